"""Fresh weights: LLM Foundry's formulas, and nothing but seed, name and index decides them.

Every scheme is held against torch's own `nn.init` functions, called as LLM Foundry's param_init_fns.py calls them.
"""

import hashlib
import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from llmfoundry_lite.config.model_schema import InitConfig, ModelConfig
from llmfoundry_lite.models.initialise import BLOCK_SIZE, _normal, _uniform, draw_range, initialise_weights
from llmfoundry_lite.models.mpt import MPT

SMALL = ModelConfig(d_model=128, n_heads=4, n_layers=3, max_seq_len=256, vocab_size=1024)
RESIDUAL = ("attn.out_proj.weight", "ffn.down_proj.weight")

torch.set_num_threads(1)


def initialised(config: ModelConfig = SMALL, seed: int = 17, **init_options) -> dict[str, torch.Tensor]:
    if init_options:
        config = replace(config, init_config=InitConfig(**init_options))
    model = MPT(config)
    initialise_weights(model, seed)
    return dict(model.state_dict())


def reference(init_fn, shape: torch.Size, *, num_fused: int = 1) -> torch.Tensor:
    torch.manual_seed(0)
    weight = torch.empty(shape)
    for part in weight.chunk(num_fused):
        init_fn(part)
    return weight


def assert_same_distribution(ours: torch.Tensor, theirs: torch.Tensor, name: str) -> None:
    """Standard deviations agree within five standard errors, and so does the reach of a bounded distribution."""
    error = (ours.std() / theirs.std() - 1).abs().item()
    assert error < 5 / math.sqrt(ours.numel()), f"{name}: std {ours.std():.5f}, expected {theirs.std():.5f}"
    assert abs(ours.mean().item()) < 5 * theirs.std().item() / math.sqrt(ours.numel()), name
    kurtosis = [(x.pow(4).mean() / x.var().pow(2)).item() for x in (ours, theirs)]
    assert abs(kurtosis[0] - kurtosis[1]) < 0.3, f"{name}: not the same shape of distribution"
    if kurtosis[1] < 2:
        assert ours.abs().max() == pytest.approx(theirs.abs().max().item(), rel=0.01), name


SCHEMES = {
    "kaiming_normal_": (
        {"name": "kaiming_normal_"},
        partial(nn.init.kaiming_normal_, a=0, mode="fan_in", nonlinearity="relu"),
    ),
    "kaiming_normal_ fan_out": (
        {"name": "kaiming_normal_", "fan_mode": "fan_out", "init_nonlinearity": "leaky_relu", "init_gain": 0.5},
        partial(nn.init.kaiming_normal_, a=0.5, mode="fan_out", nonlinearity="leaky_relu"),
    ),
    "kaiming_uniform_": (
        {"name": "kaiming_uniform_", "init_nonlinearity": "tanh"},
        partial(nn.init.kaiming_uniform_, a=0, mode="fan_in", nonlinearity="tanh"),
    ),
    "kaiming_uniform_ fan_out": (
        {"name": "kaiming_uniform_", "fan_mode": "fan_out", "init_nonlinearity": "linear"},
        partial(nn.init.kaiming_uniform_, a=0, mode="fan_out", nonlinearity="linear"),
    ),
    "xavier_normal_": ({"name": "xavier_normal_", "init_gain": 0.7}, partial(nn.init.xavier_normal_, gain=0.7)),
    "xavier_uniform_": ({"name": "xavier_uniform_", "init_gain": 2.0}, partial(nn.init.xavier_uniform_, gain=2.0)),
    "xavier without gain": ({"name": "xavier_uniform_"}, partial(nn.init.xavier_uniform_, gain=1.0)),
    "baseline_": ({"name": "baseline_", "init_std": 0.03}, partial(nn.init.normal_, std=0.03)),
    "small_init_": ({"name": "small_init_"}, partial(nn.init.normal_, std=math.sqrt(2 / (5 * 128)))),
}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_schemes_draw_what_llm_foundry_draws(scheme):
    options, init_fn = SCHEMES[scheme]
    for name, tensor in initialised(**options).items():
        if "norm" in name:
            assert torch.equal(tensor, torch.full_like(tensor, float(name.endswith("weight")))), name
        elif name.endswith("bias"):
            assert not tensor.any(), name
        else:
            expected = reference(init_fn, tensor.shape, num_fused=3 * SMALL.n_heads if "Wqkv" in name else 1)
            if name.endswith(RESIDUAL):
                expected /= math.sqrt(2 * SMALL.n_layers)
            assert_same_distribution(tensor, expected, name)


@pytest.mark.parametrize("part", ["Wq", "Wk", "Wv"])
def test_q_k_and_v_are_drawn_head_by_head_in_matrices_of_their_own_too(part):
    attention = replace(SMALL.attn_config, fused_qkv=False)
    init = InitConfig(name="kaiming_normal_", fan_mode="fan_out", init_nonlinearity="linear")
    weights = initialised(replace(SMALL, attn_config=attention, init_config=init))
    std = weights[f"transformer.blocks.0.attn.{part}.weight"].std()
    assert std == pytest.approx(1 / math.sqrt(SMALL.head_dim), rel=0.03)


def test_neox_divides_residual_weights_by_its_own_number():
    weights = initialised(name="neox_init_")
    small_std = math.sqrt(2 / (5 * SMALL.d_model))
    wang_std = 2 / (SMALL.n_layers * math.sqrt(SMALL.d_model))
    assert weights["transformer.wte.weight"].std() == pytest.approx(small_std, rel=0.02)
    assert weights["transformer.blocks.1.ffn.up_proj.weight"].std() == pytest.approx(small_std, rel=0.02)
    for name in RESIDUAL:
        assert weights[f"transformer.blocks.1.{name}"].std() == pytest.approx(wang_std, rel=0.02)


@pytest.mark.parametrize(("value", "divisor"), [(False, 1), (True, math.sqrt(6)), (4, 4), (2.5, 2.5), ("3", 3)])
def test_residual_weights_are_divided_as_told(value, divisor):
    options = {"name": "baseline_", "init_std": 0.03, "init_div_is_residual": value}
    weight = initialised(**options)["transformer.blocks.0.attn.out_proj.weight"]
    assert weight.std() == pytest.approx(0.03 / divisor, rel=0.03)


def test_default_is_what_torch_layers_draw():
    weights = initialised(name="default_")
    linear = nn.Linear(SMALL.d_model, 4 * SMALL.d_model)
    name = "transformer.blocks.0.ffn.up_proj"
    assert_same_distribution(weights[f"{name}.weight"], linear.weight.detach(), "weight")
    assert weights[f"{name}.bias"].abs().max() == pytest.approx(SMALL.d_model**-0.5, rel=0.02)
    assert weights["transformer.wte.weight"].std() == pytest.approx(1.0, rel=0.02)
    undivided = weights["transformer.blocks.0.attn.out_proj.weight"]
    assert undivided.abs().max() == pytest.approx(SMALL.d_model**-0.5, rel=0.01)


@pytest.mark.parametrize(
    ("options", "low", "high", "std"),
    [
        ({"emb_init_std": 0.5}, None, None, 0.5),
        ({"emb_init_std": 0.0}, 0.0, 0.0, 0.0),
        ({"emb_init_uniform_lim": 0.1}, -0.1, 0.1, 0.1 / math.sqrt(3)),
        ({"emb_init_uniform_lim": [0.2, 0.6]}, 0.2, 0.6, 0.2 / math.sqrt(3)),
    ],
)
def test_embeddings_can_have_their_own_distribution(options, low, high, std):
    weights = initialised(**options)
    for name in ("transformer.wte.weight", "transformer.wpe.weight"):
        assert weights[name].std() == pytest.approx(std, rel=0.02)
        if low is not None:
            assert weights[name].min() == pytest.approx(low, abs=1e-4)
            assert weights[name].max() == pytest.approx(high, abs=1e-4)
    plain = initialised()
    assert torch.equal(weights["transformer.blocks.0.attn.Wqkv.weight"], plain["transformer.blocks.0.attn.Wqkv.weight"])


# --------------------------------------------------------------------------------- seed, name, index


def test_the_same_seed_gives_the_same_bits_and_another_seed_others():
    first, again, other = initialised(seed=1), initialised(seed=1), initialised(seed=2)
    for name, tensor in first.items():
        assert torch.equal(tensor, again[name]), name
        if tensor.ndim == 2:
            assert not torch.equal(tensor, other[name]), name


def test_no_two_parameters_and_no_two_blocks_repeat_each_other():
    weights = [tensor.flatten() for tensor in initialised(name="baseline_", init_std=1.0).values() if tensor.ndim == 2]
    heads = {tuple(part[:8].tolist()) for weight in weights for part in weight.split(BLOCK_SIZE)}
    assert len(heads) == sum(len(weight.split(BLOCK_SIZE)) for weight in weights)


def test_global_generators_are_neither_read_nor_changed():
    model, expected = MPT(SMALL), initialised()
    torch.manual_seed(1)
    np.random.seed(1)
    before = torch.get_rng_state()
    initialise_weights(model, 17)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())


def drawn(draw, seed: int, name: str, start: int, stop: int, num_threads: int = 1) -> np.ndarray:
    out = np.full(stop - start, np.nan, np.float32)
    draw_range(draw, seed, name, start, out, num_threads)
    return out


@pytest.mark.parametrize("num_threads", [1, 2, 5])
@pytest.mark.parametrize("draw", [_normal(1.0), _uniform(-1.0, 2.0)], ids=["normal", "uniform"])
@pytest.mark.parametrize(
    ("start", "stop"),
    [
        (0, 10),
        (BLOCK_SIZE - 5, BLOCK_SIZE + 5),
        (BLOCK_SIZE, 2 * BLOCK_SIZE),
        (3 * BLOCK_SIZE - 1, 3 * BLOCK_SIZE),
        (100, 3 * BLOCK_SIZE + 7),
    ],
)
def test_any_range_is_a_slice_of_the_whole(draw, start, stop, num_threads):
    whole = drawn(draw, 17, "transformer.wte.weight", 0, 4 * BLOCK_SIZE)
    assert np.array_equal(drawn(draw, 17, "transformer.wte.weight", start, stop, num_threads), whole[start:stop])


@pytest.mark.parametrize("num_shards", [2, 3, 7, 48])
def test_rows_drawn_by_shards_are_the_rows_of_the_whole(num_shards):
    rows, columns, name = 1000, 173, "transformer.blocks.0.ffn.up_proj.weight"
    whole = drawn(_normal(0.1), 5, name, 0, rows * columns).reshape(rows, columns)
    parts = []
    for some_rows in np.array_split(np.arange(rows), num_shards):
        values = drawn(_normal(0.1), 5, name, some_rows[0] * columns, (some_rows[-1] + 1) * columns)
        parts.append(values.reshape(-1, columns))
    assert np.array_equal(np.concatenate(parts), whole)


def test_wrapped_blocks_get_the_weights_of_plain_ones():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    plain, wrapped = MPT(SMALL), MPT(SMALL)
    for i, block in enumerate(wrapped.transformer.blocks):
        wrapped.transformer.blocks[i] = checkpoint_wrapper(block)
    initialise_weights(plain, 17)
    initialise_weights(wrapped, 17)
    for ours, theirs in zip(plain.parameters(), wrapped.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_the_numbers_are_the_same_for_ever():
    """Written down once: whatever changes them changes the first weights of every run."""
    values = drawn(_normal(1.0), 17, "transformer.wte.weight", 0, 3)
    assert values.tolist() == [1.226395845413208, -1.2703115940093994, -0.7606976628303528]
    values = drawn(_uniform(-1.0, 2.0), 17, "transformer.wte.weight", BLOCK_SIZE - 1, BLOCK_SIZE + 2, num_threads=2)
    assert values.tolist() == [0.031691789627075195, 1.2041757106781006, -0.026454508304595947]
    weights = initialised()
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(weights):
        digest.update(weights[name].numpy().tobytes())
    assert digest.hexdigest() == "0a1b1ce8acaac66a1b0726dc7c4cf52c"
