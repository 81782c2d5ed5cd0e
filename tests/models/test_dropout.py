"""Dropout of the residual stream: a function of seed, row, place and channel, and as random as torch's."""

from dataclasses import replace

import pytest
import torch

from llmfoundry_lite.models.dropout import dropout, seeds_of_rows, seeds_of_site, seeds_of_tokens
from tests.helpers.models import BASE, random_model, random_tokens

SEED = 3
P = 0.25
WIDTH = 257
"""Number of channels."""
TOKENS_BT = torch.randint(50_000, (8, 64), generator=torch.Generator().manual_seed(1))
POSITIONS_T = torch.arange(64)[None]
ONES_BTD = torch.ones(8, 64, WIDTH)
MAX_STANDARD_ERRORS = 5
"""How far a measured share or correlation may be from its expectation."""


def seeds_of(tokens_bt: torch.Tensor, seed: int = SEED) -> torch.Tensor:
    """The seed of each token of each row."""
    return seeds_of_tokens(seeds_of_rows(tokens_bt, seed), POSITIONS_T)


def kept_by(seeds_bt: torch.Tensor, p: float = P) -> torch.Tensor:
    """For each row, token and channel, whether dropout keeps it."""
    return dropout(ONES_BTD, p, True, seeds_bt) > 0


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_the_share_that_is_dropped_and_the_scale_of_the_others_are_torchs(p):
    out_btd = dropout(ONES_BTD, p, True, seeds_of(TOKENS_BT))
    assert sorted(out_btd.unique().tolist()) == pytest.approx([0.0, 1 / (1 - p)], rel=2e-4)

    dims_by_group = {"all": (0, 1, 2), "a row": (1, 2), "a channel": (0, 1), "a place": (0, 2)}
    for group, dims in dims_by_group.items():
        dropped_shares = (out_btd == 0).float().mean(dims)
        num_draws = ONES_BTD.numel() / dropped_shares.numel()
        standard_error = (p * (1 - p) / num_draws) ** 0.5
        deviations = (dropped_shares - p).abs() / standard_error
        assert deviations.max() < MAX_STANDARD_ERRORS, group


def test_in_evaluation_nothing_is_dropped():
    assert torch.equal(dropout(ONES_BTD, P, False, seeds_of(TOKENS_BT)), ONES_BTD)


MASK_BTD = kept_by(seeds_of(TOKENS_BT))
OTHER_TOKEN = TOKENS_BT + (torch.arange(64) == 5)
OTHER_MASKS = {
    "next channel": MASK_BTD.roll(1, 2),
    "second next channel": MASK_BTD.roll(2, 2),
    "other half of a hash": MASK_BTD.roll(129, 2),
    "next token": MASK_BTD.roll(1, 1),
    "next row": MASK_BTD.roll(1, 0),
    "next batch": kept_by(seeds_of(TOKENS_BT, seed=SEED + 1)),
    "a row of one other token": kept_by(seeds_of(OTHER_TOKEN)),
    **{f"site {site}": kept_by(seeds_of_site(seeds_of(TOKENS_BT), site)) for site in range(1, 9)},
}


@pytest.mark.parametrize("name", OTHER_MASKS)
def test_masks_of_neighbours_rows_sites_and_batches_have_nothing_in_common(name):
    masks = torch.stack([MASK_BTD.flatten(), OTHER_MASKS[name].flatten()]).float()
    correlation = torch.corrcoef(masks)[0, 1]
    standard_error = MASK_BTD.numel() ** -0.5
    assert abs(correlation) < MAX_STANDARD_ERRORS * standard_error


def test_parts_of_a_batch_drop_what_the_whole_drops():
    seeds_of_parts = [seeds_of_rows(part_bt, SEED) for part_bt in TOKENS_BT.split(3)]
    assert torch.equal(torch.cat(seeds_of_parts), seeds_of_rows(TOKENS_BT, SEED))


def test_rows_in_another_order_drop_what_they_dropped():
    seeds_b = seeds_of_rows(TOKENS_BT.flip(0), SEED)
    assert torch.equal(seeds_b.flip(0), seeds_of_rows(TOKENS_BT, SEED))


def test_parts_of_rows_drop_what_the_whole_drops():
    seeds_b = seeds_of_rows(TOKENS_BT, SEED)
    whole_bt = seeds_of_tokens(seeds_b, POSITIONS_T)
    part_bt = seeds_of_tokens(seeds_b, POSITIONS_T[:, 16:32])
    assert torch.equal(part_bt, whole_bt[:, 16:32])


ROW_SEED = 1831910715
"""Of a row of the tokens 0 to 63 with seed 3."""
TOKEN_SEEDS = [-417311728, 421411737, 85248893]
KEPT_BITS = "1100100011101010"


def test_a_mask_is_the_same_on_every_machine():
    """Every other device, compiler and release must give these numbers too."""
    two_equal_rows_bt = torch.arange(64).repeat(2, 1)
    assert seeds_of_rows(two_equal_rows_bt, SEED).tolist() == [ROW_SEED, ROW_SEED]
    seeds_bt = seeds_of_tokens(torch.tensor([ROW_SEED], dtype=torch.int32), POSITIONS_T)
    assert seeds_bt[0, :3].tolist() == TOKEN_SEEDS
    kept_d = dropout(torch.ones(1, 64, 16), 0.5, True, seeds_bt)[0, 0] > 0
    assert "".join(str(int(bit)) for bit in kept_d) == KEPT_BITS


# -------------------------------------------------------------------------------------------- in a whole model


@pytest.fixture(params=["emb_pdrop", "resid_pdrop"])
def model(request) -> torch.nn.Module:
    return random_model(replace(BASE, **{request.param: 0.5})).train()


def test_a_row_of_a_model_drops_the_same_in_any_microbatch_and_again(model):
    tokens_bt = random_tokens(BASE)
    seeds_b = seeds_of_rows(tokens_bt, 7)
    whole_btv = model(tokens_bt, dropout_seeds_b=seeds_b)
    without_first_btv = model(tokens_bt[1:], dropout_seeds_b=seeds_b[1:])
    torch.testing.assert_close(without_first_btv, whole_btv[1:])


def test_another_seed_drops_other_numbers_of_a_model(model):
    tokens_bt = random_tokens(BASE)
    one_btv = model(tokens_bt, dropout_seeds_b=seeds_of_rows(tokens_bt, 7))
    other_btv = model(tokens_bt, dropout_seeds_b=seeds_of_rows(tokens_bt, 8))
    assert not torch.equal(one_btv, other_btv)


def test_a_model_that_is_evaluated_drops_nothing(model):
    model.eval()
    tokens_bt = random_tokens(BASE)
    with_seeds_btv = model(tokens_bt, dropout_seeds_b=seeds_of_rows(tokens_bt, 7))
    torch.testing.assert_close(with_seeds_btv, model(tokens_bt))


class Ones(torch.nn.Module):
    """In the place of attention and feed-forward: adds 1 to each number."""

    def forward(self, x_btd, *_):
        return torch.ones_like(x_btd)


def test_attention_and_feed_forward_of_a_block_drop_different_numbers():
    """Each adds 0 or 2, half of the time. With one mask for both, the sum would never be 2."""
    block = random_model(replace(BASE, resid_pdrop=0.5)).train().transformer.blocks[0]
    block.attn = Ones()
    block.ffn = Ones()
    zeros_btd = torch.zeros(*TOKENS_BT.shape, BASE.d_model)
    added_btd = block(zeros_btd, None, None, dropout_seeds_bt=seeds_of(TOKENS_BT))
    shares = [(added_btd == total).float().mean().item() for total in (0, 2, 4)]
    assert shares == pytest.approx([0.25, 0.5, 0.25], abs=0.02)
