"""Dropout of the residual stream: a function of seed, row, place and channel, and as random as torch's."""

from dataclasses import replace

import pytest
import torch

from llmfoundry_lite.models.dropout import dropout, seeds_of_rows, seeds_of_site, seeds_of_tokens
from tests.helpers.models import BASE, random_model, random_tokens

TOKENS_BT = torch.randint(50_000, (8, 64), generator=torch.Generator().manual_seed(1))
POSITIONS_T = torch.arange(64)[None]


def kept(seed: int = 3, p: float = 0.25, tokens_bt: torch.Tensor = TOKENS_BT, width: int = 257) -> torch.Tensor:
    seeds_bt = seeds_of_tokens(seeds_of_rows(tokens_bt, seed), POSITIONS_T)
    return dropout(torch.ones(*tokens_bt.shape, width), p, True, seeds_bt) > 0


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_the_share_that_is_dropped_and_the_scale_of_the_others_are_torchs(p):
    x = torch.ones(8, 64, 257)
    dropped = dropout(x, p, True, seeds_of_tokens(seeds_of_rows(TOKENS_BT, 3), POSITIONS_T))
    assert sorted(dropped.unique().tolist()) == pytest.approx([0.0, 1 / (1 - p)], rel=2e-4)
    for dims in ((0, 1, 2), (1, 2), (0, 1), (0, 2)):  # of all; of each row, channel and place
        shares = (dropped == 0).float().mean(dims)
        deviations = (shares - p) / (p * (1 - p) / (x.numel() / shares.numel())) ** 0.5
        assert deviations.abs().max() < 5
    assert torch.equal(dropout(x, p, False, seeds_of_rows(TOKENS_BT, 3)), x)


def test_masks_of_neighbours_rows_sites_and_batches_have_nothing_in_common():
    mask = kept()
    seeds_bt = seeds_of_tokens(seeds_of_rows(TOKENS_BT, 3), POSITIONS_T)
    one = torch.ones(8, 64, 257)
    others = {
        "next channel": mask.roll(1, 2),
        "second next channel": mask.roll(2, 2),
        "other half of a hash": mask.roll(129, 2),
        "next token": mask.roll(1, 1),
        "next row": mask.roll(1, 0),
        "next batch": kept(seed=4),
        "a row of one other token": kept(tokens_bt=TOKENS_BT + (torch.arange(64) == 5)),
        **{f"site {site}": dropout(one, 0.25, True, seeds_of_site(seeds_bt, site)) > 0 for site in range(1, 9)},
    }
    for name, other in others.items():
        correlation = torch.corrcoef(torch.stack([mask.flatten(), other.flatten()]).float())[0, 1]
        assert abs(correlation) * mask.numel() ** 0.5 < 5, name


def test_parts_of_a_batch_and_of_rows_drop_what_the_whole_drops():
    seeds_b = seeds_of_rows(TOKENS_BT, 3)
    parts = [seeds_of_rows(part_bt, 3) for part_bt in TOKENS_BT.split(3)]
    assert torch.equal(torch.cat(parts), seeds_b)
    assert torch.equal(seeds_of_rows(TOKENS_BT.flip(0), 3).flip(0), seeds_b)
    seeds_bt = seeds_of_tokens(seeds_b, POSITIONS_T)
    assert torch.equal(seeds_of_tokens(seeds_b, POSITIONS_T[:, 16:32]), seeds_bt[:, 16:32])


def test_a_mask_is_the_same_on_every_machine():
    """Every other device, compiler and release must give these numbers too."""
    assert seeds_of_rows(TOKENS_BT[:2] * 0 + torch.arange(64), 3).tolist() == [ROW_SEED, ROW_SEED]
    seeds_bt = seeds_of_tokens(torch.tensor([ROW_SEED], dtype=torch.int32), POSITIONS_T)
    assert seeds_bt[0, :3].tolist() == TOKEN_SEEDS
    bits = dropout(torch.ones(1, 64, 16), 0.5, True, seeds_bt)[0, 0] > 0
    assert "".join(str(int(bit)) for bit in bits) == BITS


ROW_SEED, TOKEN_SEEDS, BITS = 1831910715, [-417311728, 421411737, 85248893], "1100100011101010"


@pytest.mark.parametrize("where", ["emb_pdrop", "resid_pdrop"])
def test_a_row_of_a_model_drops_the_same_in_any_microbatch_and_again(where):
    model, tokens_bt = random_model(replace(BASE, **{where: 0.5})).train(), random_tokens(BASE)
    seeds_b = seeds_of_rows(tokens_bt, 7)
    whole = model(tokens_bt, dropout_seeds_b=seeds_b)
    torch.testing.assert_close(model(tokens_bt[1:], dropout_seeds_b=seeds_b[1:]), whole[1:])
    assert not torch.equal(model(tokens_bt, dropout_seeds_b=seeds_of_rows(tokens_bt, 8)), whole)
    torch.testing.assert_close(model.eval()(tokens_bt, dropout_seeds_b=seeds_b), model(tokens_bt))


class Ones(torch.nn.Module):
    def forward(self, x_btd, *_):
        return torch.ones_like(x_btd)


def test_attention_and_feed_forward_of_a_block_drop_different_numbers():
    """With one mask for both, the sum of both would be all or nothing."""
    block = random_model(replace(BASE, resid_pdrop=0.5)).train().transformer.blocks[0]
    block.attn, block.ffn = Ones(), Ones()
    seeds_bt = seeds_of_tokens(seeds_of_rows(TOKENS_BT, 3), POSITIONS_T)
    added_btd = block(torch.zeros(*TOKENS_BT.shape, BASE.d_model), None, None, dropout_seeds_bt=seeds_bt)
    shares = [(added_btd == total).float().mean().item() for total in (0, 2, 4)]
    assert shares == pytest.approx([0.25, 0.5, 0.25], abs=0.02)
