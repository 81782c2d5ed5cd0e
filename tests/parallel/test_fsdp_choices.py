"""Settings of FSDP for each block: when it frees gathered parameters, and in which type it sums gradients."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from llmfoundry_lite.config.model_schema import ModelConfig
from llmfoundry_lite.config.sharding_schema import FSDPConfig
from llmfoundry_lite.models.mpt import MPT
from llmfoundry_lite.parallel import fsdp
from llmfoundry_lite.parallel.exact import ExactSums
from llmfoundry_lite.parallel.fsdp import shard_model
from llmfoundry_lite.parallel.precision import PRECISIONS

SMALL = ModelConfig(d_model=32, n_heads=4, n_layers=2, max_seq_len=32, vocab_size=96)


def told_of_blocks(monkeypatch, strategy, *names, precision=("fp32", "PURE"), sums=None) -> dict[str, Any]:
    """Return what FSDP is told of blocks on a mesh of two simulated devices with these dimensions."""
    told: list[dict[str, Any]] = []

    def shard(module, **options):
        told.append(options)
        module.set_modules_to_forward_prefetch = lambda following: None
        module.set_gradient_divide_factor = lambda factor: options.update(divided_by=factor)
        module.set_force_sum_reduction_for_comms = lambda is_sum: options.update(is_sum=is_sum)

    monkeypatch.setattr(fsdp, "fully_shard", shard)
    monkeypatch.setattr(fsdp, "dimensions_of", lambda mesh: names)
    monkeypatch.setattr(fsdp, "mesh_of_stage", lambda mesh, **_: SimpleNamespace(size=lambda: 2))
    with torch.device("meta"):
        model = MPT(SMALL)
    mesh: Any = SimpleNamespace(device_type="cpu")
    shard_model(model, FSDPConfig(sharding_strategy=strategy), PRECISIONS[precision], mesh, sums=sums)
    assert len(told) == SMALL.n_layers + 1
    assert all(options == told[0] for options in told[: SMALL.n_layers])
    return told[0]


@pytest.mark.parametrize(
    ("strategy", "names", "gives_up"),
    [
        ("FULL_SHARD", ("shard",), True),
        ("HYBRID_SHARD", ("replicate", "shard"), True),
        ("SHARD_GRAD_OP", ("shard",), False),
        ("FULL_SHARD", ("pipeline", "shard"), False),
    ],
)
def test_whole_parameters_are_given_up_after_a_forward_pass(monkeypatch, strategy, names, gives_up):
    assert told_of_blocks(monkeypatch, strategy, *names)["reshard_after_forward"] == gives_up


@pytest.mark.parametrize("precision", [("amp_bf16", "DEFAULT"), ("amp_bf16", "PURE"), ("amp_bf16", "FULL")])
def test_gradients_are_summed_in_the_type_of_the_table(monkeypatch, precision):
    policy = told_of_blocks(monkeypatch, "FULL_SHARD", "shard", precision=precision)["mp_policy"]
    assert (policy.param_dtype, policy.reduce_dtype) == (
        *(PRECISIONS[precision].parameters, PRECISIONS[precision].reduction),
    )


@pytest.mark.parametrize(
    ("precision", "sums", "divided_by"),
    [("amp_fp16", None, 1.0), ("amp_bf16", None, None), ("amp_bf16", ExactSums(), 1.0)],
)
def test_scaled_and_exact_gradients_are_sums_over_ranks_and_others_are_means(monkeypatch, precision, sums, divided_by):
    told = told_of_blocks(monkeypatch, "FULL_SHARD", "shard", precision=(precision, "DEFAULT"), sums=sums)
    assert (told.get("divided_by"), told.get("is_sum", False)) == (divided_by, divided_by is not None)
