"""Muon: the mathematics of torch's, on every layout, with a state that any other layout restores."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from llmfoundry_lite import companions
from llmfoundry_lite.checkpoint.planning import box_of
from llmfoundry_lite.checkpoint.state import row_orders
from llmfoundry_lite.config.layout import Layout
from llmfoundry_lite.config.load_train import load_train_config
from llmfoundry_lite.config.model_schema import AttentionConfig, ModelConfig
from llmfoundry_lite.config.optimizer_schema import OptimizerConfig
from llmfoundry_lite.config.sharding_schema import FSDPConfig
from llmfoundry_lite.errors import ConfigError
from llmfoundry_lite.models.mpt import MPT, Attention
from llmfoundry_lite.own_code import trust_code
from llmfoundry_lite.parallel.fsdp import build_parallel_model
from llmfoundry_lite.parallel.mesh import build_mesh
from llmfoundry_lite.parallel.precision import PRECISIONS
from llmfoundry_lite.training import builders, muon
from llmfoundry_lite.training.muon import (
    Matrix,
    Muon,
    MuonGroup,
    muon_of_groups,
    newton_schulz,
    to_parameter_order,
    to_rank_order,
)
from llmfoundry_lite.training.optimizers import ParameterGroup
from tests.helpers.launch import launch
from tests.helpers.layouts import run_in_launches
from tests.helpers.present import needs
from tests.helpers.runs import metrics, run
from tests.helpers.tiny import tiny_config, values, write_config, write_data

FUSED = AttentionConfig(attn_type="grouped_query_attention", kv_n_heads=2)
UNFUSED = AttentionConfig(fused_qkv=False, attn_type="grouped_query_attention", kv_n_heads=2)
SMALL = ModelConfig(d_model=32, n_heads=4, n_layers=2, max_seq_len=32, vocab_size=95, attn_config=UNFUSED)
EXACT: dict[str, Any] = {"name": "muon", "lr": 0.02, "weight_decay": 0.1, "ns_dtype": "fp32"}


def random_like(tensor: torch.Tensor, seed: int) -> torch.Tensor:
    return torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(12, 12), (8, 20), (20, 8)])
@pytest.mark.parametrize("adjust_lr_fn", ["match_rms_adamw", "original"])
def test_a_matrix_is_updated_as_torch_updates_it(shape, adjust_lr_fn):
    ours, theirs = (torch.nn.Parameter(random_like(torch.empty(shape), 0)) for _ in range(2))
    config = OptimizerConfig(name="muon", lr=0.02, weight_decay=0.1, momentum=0.9, adjust_lr_fn=adjust_lr_fn)
    other = torch.nn.Parameter(torch.ones(3))
    optimizer = Muon([MuonGroup([Matrix(ours, (shape[0],))], {"other": other}, config)])
    reference = torch.optim.Muon([theirs], lr=0.02, weight_decay=0.1, momentum=0.9, adjust_lr_fn=adjust_lr_fn)
    for step in range(3):
        ours.grad, theirs.grad = random_like(ours, step + 1), random_like(ours, step + 1)
        other.grad = torch.ones(3)
        optimizer.step()
        reference.step()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-3)  # Newton and Schulz in bf16
    torch.testing.assert_close(optimizer.state[ours]["momentum_buffer"], reference.state[theirs]["momentum_buffer"])


def test_what_is_no_matrix_has_a_rate_of_its_own():
    config = OptimizerConfig(name="muon", lr=0.02, adamw_lr=0.3, weight_decay=0.0)
    other = torch.nn.Parameter(torch.ones(3))
    optimizer = Muon([MuonGroup([Matrix(torch.nn.Parameter(torch.ones(2, 2)), (2,))], {"other": other}, config)])
    other.grad = torch.ones(3)
    optimizer.step()
    torch.testing.assert_close(other.detach(), torch.full((3,), 1 - 0.3))  # AdamW's first step is as large as its rate
    assert [group["lr"] for group in optimizer.param_groups] == [0.02, 0.3]


def test_newton_and_schulz_leave_singular_values_of_about_one():
    matrix = random_like(torch.empty(24, 40), 0)
    before, after = (torch.linalg.svdvals(m) for m in (matrix, newton_schulz(matrix, 5)))
    assert before.max() / before.min() > 4
    assert 0.6 < after.min() < after.max() < 1.3


class OwnAttention(Attention):
    """Attention of a user's own, which has our parameters."""


class OtherAttention(nn.Module):
    """Attention of a user's own with a matrix of our name."""

    def __init__(self, config):
        super().__init__()
        self.Wqkv = nn.Linear(config.d_model, config.d_model)


@pytest.mark.parametrize(("attention", "num_matrices"), [(OwnAttention, 3), (OtherAttention, 1)])
def test_q_k_and_v_are_three_matrices_in_a_subclass_of_ours_alone(tmp_path, monkeypatch, attention, num_matrices):
    name = f"python:{__name__}:{attention.__name__}"
    yaml = write_config(tmp_path / "run.yaml", tiny_config(tmp_path / "data", optimizer={"name": "muon", "lr": 0.1}))
    config = load_train_config([yaml, f"model.attn_config.attn_type={name}"]).config
    trust_code([name])
    monkeypatch.setattr(muon, "build_stage_group", lambda *_: None)
    optimizer = builders.build_optimizer(config, MPT(config.model), Layout())
    assert max(len(matrix.heights) for matrix in cast(Muon, optimizer).matrices) == num_matrices


@pytest.mark.parametrize("head_dim", [None, 12])
def test_matrices_of_blocks_are_muons_and_a_fused_q_k_v_takes_the_steps_of_three(head_dim):
    fused, apart = (
        MPT(replace(SMALL, attn_config=replace(options, head_dim=head_dim))) for options in (FUSED, SMALL.attn_config)
    )
    settings = OptimizerConfig(**EXACT)
    optimizers = [
        muon_of_groups([ParameterGroup(dict(m.named_parameters()), settings)], m.config) for m in (fused, apart)
    ]
    named = dict(fused.named_parameters())
    others = {name for name, p in named.items() if not any(p is q for q in optimizers[0].param_groups[0]["params"])}
    assert {"transformer.wte.weight", "transformer.wpe.weight", "transformer.norm_f.weight"} <= others
    assert all(named[name].ndim == 1 or "blocks" not in name for name in others)
    for model in (fused, apart):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
    with torch.no_grad():
        for a, b in zip(fused.transformer.blocks, apart.transformer.blocks, strict=True):
            a.attn.Wqkv.weight.copy_(torch.cat([w.weight for w in (b.attn.Wq, b.attn.Wk, b.attn.Wv)]))
            a.attn.Wqkv.weight.grad = random_like(a.attn.Wqkv.weight, 3)
            parts = a.attn.Wqkv.weight.grad.split([fused.config.q_dim, fused.config.kv_dim, fused.config.kv_dim])
            for layer, part in zip((b.attn.Wq, b.attn.Wk, b.attn.Wv), parts, strict=True):
                layer.weight.grad = part.clone()
    for optimizer in optimizers:
        optimizer.step()
    for a, b in zip(fused.transformer.blocks, apart.transformer.blocks, strict=True):
        together = torch.cat([w.weight for w in (b.attn.Wq, b.attn.Wk, b.attn.Wv)])
        torch.testing.assert_close(a.attn.Wqkv.weight, together, rtol=0, atol=1e-6)


# ------------------------------------------------------------------------------------------------------- on ranks

LAYOUTS: dict[str, tuple[str, Layout]] = {
    "sharded": ("FULL_SHARD", Layout(shard=4)),
    "hybrid": ("HYBRID_SHARD", Layout(replicate=2, shard=2)),
    "replicated": ("NO_SHARD", Layout(replicate=4)),
    "zero": ("ZERO_1", Layout(replicate=4)),
    "divided layers": ("FULL_SHARD", Layout(shard=2, tensor=2)),
    "divided layers, zero": ("ZERO_1", Layout(replicate=2, tensor=2, has_whole_copies=True)),
    "divided samples": ("FULL_SHARD", Layout(shard=2, context=2)),
    "divided samples, replicated": ("NO_SHARD", Layout(replicate=2, context=2, has_whole_copies=True)),
}
if not companions.is_installed("llmfoundry_layouts"):
    LAYOUTS = {name: one for name, one in LAYOUTS.items() if one[0] != "ZERO_1" and one[1].tensor == 1}


def updates_on_ranks() -> None:
    """Two steps of every layout from the same gradients: how far each weight is from one rank's; who computes what."""
    dist.init_process_group("gloo")
    model_config = replace(SMALL, attn_config=FUSED)
    told: dict[str, float] = {}
    single: dict[str, torch.Tensor] = {}
    for name, (strategy, layout) in {"whole": ("NO_SHARD", Layout()), **LAYOUTS}.items():
        fsdp, config = FSDPConfig(sharding_strategy=strategy), OptimizerConfig(**EXACT)
        mesh = build_mesh(layout, "cpu") if name != "whole" else None
        if mesh is None:
            model = MPT(model_config)
            reference = build_parallel_model(
                model_config, fsdp, PRECISIONS["fp32", "DEFAULT"], build_mesh(Layout(replicate=4), "cpu"), 1
            )
            model.load_state_dict({n: _whole(p.detach()) for n, p in reference.named_parameters()}, strict=False)
        else:
            model = build_parallel_model(model_config, fsdp, PRECISIONS["fp32", "DEFAULT"], mesh, 1)
        named = {n.replace("_fsdp_wrapped_module.", ""): p for n, p in model.named_parameters()}
        group = dist.new_group([dist.get_rank()], use_local_synchronization=True) if mesh is None else None
        orders = row_orders(model, {f"model/{n}": p for n, p in named.items()})
        orders = {n.removeprefix("model/"): runs for n, runs in orders.items()}
        assert len(orders) == (2 * SMALL.n_layers if layout.tensor > 1 else 0)  # weights and biases

        def build(parameters, config=config, group=group, orders=orders):
            return muon_of_groups([ParameterGroup(parameters, config)], model_config, group, orders)

        if strategy == "ZERO_1":
            optimizer: Any = companions.load("llmfoundry_layouts.zero:share_optimizer")(named, build)
        else:
            optimizer = build(named)
        for step in range(2):
            for seed, (n, parameter) in enumerate(named.items()):
                gradient = random_like(parameter, 100 * step + seed)
                gradient = to_rank_order(gradient, orders[n]) if n in orders else gradient
                parameter.grad = _like(gradient, parameter)
            optimizer.step()
        weights = {n: _whole(p.detach()) for n, p in named.items()}
        weights |= {n: to_parameter_order(weights[n], runs) for n, runs in orders.items()}
        if mesh is None:
            single = weights
        else:
            assert optimizer._owners is not None
            assert [len(r) for r in optimizer._owners.rounds] == [4, 4]
            told[name] = max((weights[n] - single[n]).abs().max().item() for n in single)
    if dist.get_rank() == 0:
        print(json.dumps(told))


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


def _like(gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    if not isinstance(parameter, DTensor):
        return gradient
    offset, lengths = box_of(parameter)
    local = gradient[tuple(slice(begin, begin + n) for begin, n in zip(offset, lengths, strict=True))].contiguous()
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


@pytest.mark.slow
@pytest.mark.multiprocess
def test_the_update_of_a_divided_matrix_is_the_whole_one_s(tmp_path):
    result = launch(updates_on_ranks, (), tmp_path, 4).check()
    furthest = json.loads(result.output.splitlines()[-1])
    assert furthest.keys() == LAYOUTS.keys()
    assert max(furthest.values()) < 1e-6, furthest


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return write_data(tmp_path_factory.mktemp("data"))


@needs("llmfoundry_layouts")
@pytest.mark.long
@pytest.mark.multiprocess
def test_a_run_changes_its_layout_at_any_checkpoint(tmp_path, data):
    config = tiny_config(
        data,
        model__n_layers=4,
        autoresume=True,
        max_duration="8ba",
        optimizer=EXACT,
        device_train_microbatch_size=2,
    )
    run(tmp_path, config, "whole")
    launches: list[tuple[int, dict[str, Any]]] = [
        (2, {"pp_config": {"pipeline_parallel_degree": 2}}),
        (4, {"pp_config": {"pipeline_parallel_degree": 2, "schedule": "interleaved"}}),
        (1, {}),
        (4, {"tp_config": {"tensor_parallel_degree": 2}}),
        (4, {"tp_config": {"tensor_parallel_degree": 2}, "fsdp_config": {"sharding_strategy": "ZERO_1"}}),
        (4, {"pp_config": {"pipeline_parallel_degree": 2}, "tp_config": {"tensor_parallel_degree": 2}}),
        (4, {}),
        (2, {"fsdp_config": {"sharding_strategy": "ZERO_1"}}),
    ]
    run_in_launches(tmp_path, config, launches)
    ours, theirs = metrics(tmp_path, "moved"), metrics(tmp_path, "whole")
    for key in ("loss/train/total", "grad_norm"):
        assert values(ours, key) == pytest.approx(values(theirs, key), rel=1e-5), key


# ---------------------------------------------------------------------------------------------------- what is asked


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            "optimizer.name=adamw optimizer.momentum=0.9",
            "optimizer.momentum: only muon uses it, and optimizer.name is adamw",
        ),
        ("optimizer.momentum=1.5", "optimizer.momentum: 1.5 given, expected 0 <= momentum < 1"),
        (
            "optimizer.adjust_lr_fn=original",
            "optimizer.adamw_lr: missing; adjust_lr_fn: original scales updates differently from AdamW",
        ),
        ("optimizer.ns_dtype=fp64", "optimizer.ns_dtype: 'fp64' is not known; expected bf16 or fp32"),
        ("fsdp_config.offload_optimizer=true", "fsdp_config.offload_optimizer: muon multiplies matrices in its step"),
    ],
)
def test_what_muon_cannot_do_is_refused_in_one_line(tmp_path, arguments, message):
    config = tiny_config(tmp_path, optimizer={"name": "muon", "lr": 0.02})
    with pytest.raises(ConfigError) as error:
        load_train_config([write_config(tmp_path / "run.yaml", config), *arguments.split()])
    assert message in str(error.value)
    assert "\n" not in str(error.value)
