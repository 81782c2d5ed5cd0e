"""Samples divided among ranks: the run is the run it would be without, and its checkpoints go both ways."""

import itertools
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from llmfoundry_layouts.context import Context, HeadsMask, build_context
from llmfoundry_layouts.tensor import divide_vocabulary
from llmfoundry_lite.checkpoint.full_tensors import diff, open_checkpoint
from llmfoundry_lite.config.layout import Layout, divide_devices
from llmfoundry_lite.config.model_schema import AttentionConfig, ModelConfig
from llmfoundry_lite.config.sharding_schema import ContextParallelConfig, FSDPConfig
from llmfoundry_lite.models.attention import Mask
from llmfoundry_lite.models.initialise import initialise_weights
from llmfoundry_lite.models.mpt import MPT
from llmfoundry_lite.parallel.fsdp import build_parallel_model
from llmfoundry_lite.parallel.mesh import build_mesh
from llmfoundry_lite.parallel.precision import PRECISIONS
from llmfoundry_lite.training.adapter import LanguageModel
from llmfoundry_lite.training.loss import cross_entropy_sum
from tests.helpers import flash_attn
from tests.helpers.exchanged import CountBytes
from tests.helpers.launch import launch
from tests.helpers.layouts import RELATIVE, ask_in_context, assert_same_answers, assert_same_run, run_in_launches
from tests.helpers.resave import resave_into
from tests.helpers.runs import run, saves
from tests.helpers.tiny import SEQ_LEN, VOCAB_SIZE, tiny_config, write_data

EOS = 3


def over(degree: int = 2, kind: str = "heads") -> dict[str, Any]:
    return {"cp_config": {"context_parallel_degree": degree, "kind": kind}}


def parts(degree: int, kind: str) -> ContextParallelConfig:
    return ContextParallelConfig(context_parallel_degree=degree, kind=kind)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return write_data(tmp_path_factory.mktemp("data"))


def divisible(data: Path, **changes: Any) -> dict[str, Any]:
    options = {
        "model__attn_config__fused_qkv": False,
        "model__attn_config__alibi": True,
        "autoresume": True,
        "max_duration": "3ba",
        "eval_interval": "3ba",
    }
    return tiny_config(data, **{**options, **changes})


# ----------------------------------------------------------------------------------------- the same loss and gradient

BASE = ModelConfig(d_model=64, n_heads=4, n_layers=2, max_seq_len=SEQ_LEN, vocab_size=VOCAB_SIZE)
ATTENTION: dict[str, dict[str, Any]] = {
    "alibi": {"alibi": True},
    "rope, grouped": {"rope": True, "attn_type": "grouped_query_attention", "kv_n_heads": 2, "qk_gn": True},
    "learned": {},
}
SEEN: dict[str, dict[str, Any]] = {
    "plain": {},
    "documents": {"attn_uses_sequence_id": True},
    "window": {"sliding_window_size": 9},
    "documents in a window": {"attn_uses_sequence_id": True, "sliding_window_size": 9},
}
FAMILY = {f"{a}, {s}": {**ATTENTION[a], **SEEN[s]} for a in ATTENTION for s in SEEN}
FAMILY["norm over heads, clamped"] = {"qk_ln": True, "clip_qkv": 1.0}


def compare(kind: str, degree: int, tensor: int, attn_impl: str, names: list[str], options: dict[str, Any]) -> None:
    """Compare, on each rank and for every model, loss and gradient of divided samples with those of whole ones."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    sys.modules["flash_attn"] = flash_attn
    fsdp, precision = FSDPConfig(**options), PRECISIONS["fp32", "DEFAULT"]
    layout = divide_devices(fsdp, dist.get_world_size(), context=degree, tensor=tensor)
    mesh = build_mesh(layout, "cpu")
    context = build_context(parts(degree, kind), layout, "cpu")
    rows = torch.randint(VOCAB_SIZE, (4, SEQ_LEN), generator=torch.Generator().manual_seed(1))
    rows[0, 5:] = -1  # a sample that ends early: some ranks have none of it
    ranks = layout.data_ranks(dist.get_rank())
    mine = rows.chunk(ranks.size)[ranks.rank]
    for name in names:
        attention = AttentionConfig(fused_qkv=tensor == 1, attn_impl=attn_impl, **FAMILY[name])
        config = replace(BASE, attn_config=attention)
        separator = EOS if attention.attn_uses_sequence_id else None
        whole_model = MPT(config, attn_impl)
        initialise_weights(whole_model, 1)
        whole = LanguageModel(whole_model, precision, separator)
        model = build_parallel_model(config, fsdp, precision, mesh, seed=1, attn_impl=attn_impl)
        sum_loss = partial(cross_entropy_sum, divide_vocabulary=divide_vocabulary if tensor > 1 else None)
        divided = LanguageModel(model, precision, separator, context, sum_loss)

        with torch.set_grad_enabled(attn_impl != "flex"):  # which has no backward pass on a CPU
            expected, found = whole({"input_ids": rows}), divided({"input_ids": mine})
        total = found["loss_sum"].detach().clone()
        dist.all_reduce(total)
        assert float(total) / dist.get_world_size() * ranks.size == pytest.approx(float(expected["loss_sum"]), rel=1e-6)
        if attn_impl == "flex":
            continue
        expected["loss_sum"].backward()
        found["loss_sum"].backward()
        gradients: dict[str, Any] = {key: parameter.grad for key, parameter in whole.named_parameters()}
        for key, parameter in divided.named_parameters():
            gradient = parameter.grad.full_tensor() * ranks.size  # type: ignore[union-attr]
            error = (gradient - gradients[key]).norm() / gradients[key].norm()
            assert error < RELATIVE or gradients[key].norm() < 1e-4, f"{name}: {key}: {error:.1e}"
    dist.barrier()  # rank 0 has the store by which the others still find each other


def compare_both() -> None:
    for kind in ("heads", "gather"):
        compare(kind, 2, 1, "sdpa", ["alibi, documents", "rope, grouped, window", "norm over heads, clamped"], {})


@pytest.mark.multiprocess
def test_loss_and_gradient_of_divided_samples_are_those_of_whole_ones(tmp_path):
    launch(compare_both, (), tmp_path, 2).check()


@pytest.mark.parametrize("num_samples", [1, 2])
def test_the_compiler_takes_what_attention_gets_of_any_number_of_samples(monkeypatch, num_samples):
    """FlexAttention is compiled, where nothing else is. Views of a tensor that nobody has waited for fail there."""
    add = torch.compile(lambda q, k, v: q + k + v, backend="eager", fullgraph=True)
    monkeypatch.setattr(Mask, "attend", lambda mask, q, k, v, scale, dropout_p: add(*(x.mT for x in (q, k, v))).mT)
    dist.init_process_group("fake", rank=0, world_size=2, store=dist.HashStore())
    try:
        context = build_context(parts(2, "heads"), Layout(context=2, node_size=2), "cpu")
        q, k, v = (torch.randn(num_samples, 8, 4, 16, requires_grad=True) for _ in range(3))
        mask = HeadsMask(context=context, implementation="flex")
        mask.attend(q, k, v).sum().backward()
        assert q.grad is not None and q.grad.shape == q.shape
    finally:
        dist.destroy_process_group()


HYBRID = {"sharding_strategy": "HYBRID_SHARD", "data_parallel_shard_degree": 1}
WAYS: dict[str, tuple[str, int, int, str, dict[str, Any]]] = {
    "heads, sharded": ("heads", 2, 1, "sdpa", {}),
    "gather, sharded": ("gather", 2, 1, "sdpa", {}),
    "heads, layers divided": ("heads", 2, 2, "sdpa", {}),
    "gather, layers divided": ("gather", 2, 2, "reference", {}),
    "gather, four parts": ("gather", 4, 1, "blocked", {"sharding_strategy": "SHARD_GRAD_OP"}),
    "heads, hybrid": ("heads", 2, 1, "blocked", HYBRID),
    "gather, replicated": ("gather", 2, 1, "sdpa", {"sharding_strategy": "NO_SHARD"}),
    "heads, recomputed": ("heads", 2, 1, "sdpa", {"activation_checkpointing": True}),
    "gather, selective": ("gather", 2, 1, "sdpa", {"activation_checkpointing": "selective"}),
    "heads, flash": ("heads", 2, 1, "flash", {}),
    "gather, flash": ("gather", 4, 1, "flash", {}),
    "heads, flex": ("heads", 2, 1, "flex", {}),
    "gather, flex": ("gather", 4, 1, "flex", {}),
}


SLOW = ("heads, sharded",)


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else pytest.mark.long) for name in WAYS]
)
def test_samples_can_be_divided_whatever_the_attention_and_the_sharding(tmp_path, name):
    kind, degree, tensor, attn_impl, options = WAYS[name]
    names = list(FAMILY)
    if tensor > 1:  # whose refusals are below
        names = [name for name in FAMILY if "qk_ln" not in FAMILY[name]]
    if kind == "heads":
        names = [name for name in names if FAMILY[name].get("kv_n_heads", 4) % (tensor * degree) == 0]
    launch(compare, (kind, degree, tensor, attn_impl, names, options), tmp_path, 4).check()


@pytest.mark.parametrize("rank", range(4))
def test_a_rank_that_gathers_plain_rows_has_no_bias_over_their_length(rank):
    """For 65,536 tokens on 8 devices, a bias would take 1.1 GB in each forward pass, and no flash attention."""
    config = parts(4, "gather")
    context = Context(config=config, group=dist.group.WORLD, rank=rank)  # type: ignore[arg-type]
    with FakeTensorMode():
        positions_1t = context.part(torch.arange(64, device="cuda")[None])
        mask = context.build_mask(AttentionConfig(), "sdpa", None, positions_1t, positions_1t.size(1))
    assert [piece.bias_bhts for piece in mask.masks.values()] == [None, None]  # type: ignore[attr-defined]


def count_exchanges() -> None:
    """Compare what a group exchanges for attention with the formula."""
    dist.init_process_group("gloo")
    config = replace(BASE, attn_config=AttentionConfig(**ATTENTION["rope, grouped"]))
    for kind, recomputing in itertools.product(("heads", "gather"), (False, True, "selective")):
        fsdp, context = FSDPConfig(activation_checkpointing=recomputing), parts(2, kind)
        layout = divide_devices(fsdp, 2, context=2)
        model = build_parallel_model(config, fsdp, PRECISIONS["fp32", "DEFAULT"], build_mesh(layout, "cpu"), seed=1)
        divided = LanguageModel(model, PRECISIONS["fp32", "DEFAULT"], None, build_context(context, layout, "cpu"))
        with CountBytes() as count:
            divided({"input_ids": torch.zeros(3, SEQ_LEN, dtype=torch.int64)})["loss_sum"].backward()
        widths = 2 * config.kv_dim if kind == "gather" else config.q_dim + config.kv_dim
        num_bytes, times = config.n_layers * widths * 3 * SEQ_LEN * 4, 3 if recomputing else 2
        expected = {"all_to_all_single": times * num_bytes}
        if kind == "gather":
            expected = {"all_gather_into_tensor": (times - 1) * num_bytes, "reduce_scatter_tensor": num_bytes}
        assert count.num_bytes == expected, f"{kind}, {recomputing}: {dict(count.num_bytes)}, expected {expected}"
    dist.barrier()


@pytest.mark.multiprocess
def test_ranks_exchange_the_bytes_of_the_formula(tmp_path):
    launch(count_exchanges, (), tmp_path, 2).check()


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_run_changes_between_whole_and_divided_samples_at_any_checkpoint(tmp_path, data):
    config = divisible(data, max_duration="3ba", eval_interval="3ba")
    run(tmp_path, config, "whole", callbacks=resave_into(tmp_path / "begun/whole"))
    said = run_in_launches(tmp_path, config, [(4, over()), (1, {}), (2, over())])
    assert "context parallel 2, heads -> none" in said[1].output
    assert_same_run(tmp_path, "moved", "whole")
    assert not any(d.num_different or d.note for d in diff(tmp_path / "begun/whole/ba0", tmp_path / "begun/0/ba0"))
    segments = open_checkpoint(saves(tmp_path, "moved") / "ba3").manifest.segments
    assert [segment.context for segment in segments] == ["2, heads", None, "2, heads"]


EAGER = {"backend": "aot_eager"}  # all of the compiler but the code it writes
STAGES = {"pp_config": {"pipeline_parallel_degree": 2}, "device_train_microbatch_size": 2}
LAYERS = {"tp_config": {"tensor_parallel_degree": 2}}
STREAM = {"tp_config": {"tensor_parallel_degree": 2, "sequence_parallel": True}}
ZERO = {"fsdp_config": {"sharding_strategy": "ZERO_1"}}
RUNS: dict[str, tuple[int, dict[str, Any]]] = {
    "stages": (4, over() | STAGES),
    "stages, gathered": (4, over(2, "gather") | STAGES | {"pp_config": STAGES["pp_config"] | {"schedule": "gpipe"}}),
    "stages of layers": (8, over() | STAGES | LAYERS),
    "stream divided twice": (4, over() | STREAM),
    "stream divided twice, in stages": (8, over() | STREAM | STAGES),
    "optimizer sharded": (4, over() | ZERO),
    "compiled": (2, over() | {"compile_config": EAGER}),
    "compiled, gathered": (2, over(2, "gather") | {"compile_config": EAGER}),
    "compiled, recomputed": (2, over() | {"compile_config": EAGER, "fsdp_config": {"activation_checkpointing": True}}),
    "microbatches": (2, over() | {"device_train_microbatch_size": 3}),
    "muon": (2, over()),
    "muon, optimizer sharded": (4, over(2, "gather") | ZERO),
    "norm over all heads": (2, over() | {"fsdp_config": {"activation_checkpointing": "selective"}}),
    "layers divided, fused": (4, over() | LAYERS),
    "stream divided twice, fused": (4, over(2, "gather") | STREAM),
}
MUON = {"optimizer": {"name": "muon", "lr": 0.02, "weight_decay": 0.1, "ns_dtype": "fp32"}}
OF_THE_RUN: dict[str, dict[str, Any]] = {
    "microbatches": {"accumulate_train_batch_on_tokens": False},
    "muon": MUON,
    "muon, optimizer sharded": MUON,
    "norm over all heads": {"model__attn_config__qk_ln": True},
    "layers divided, fused": {"model__attn_config__fused_qkv": True},
    "stream divided twice, fused": {"model__attn_config__fused_qkv": True},
}
"""What is trained so, divided or not."""


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in ("stream divided twice", "muon") else pytest.mark.long)
        for name in RUNS
    ],
)
def test_divided_samples_go_with_every_other_way_to_compute(tmp_path, data, name):
    num_ranks, changes = RUNS[name]
    config = divisible(data, **OF_THE_RUN.get(name, {}))
    run(tmp_path, config, "whole")
    run(tmp_path, config, "divided", num_ranks, **changes)
    assert_same_run(tmp_path, "divided", "whole")


@pytest.mark.long
@pytest.mark.multiprocess
def test_groups_answer_tasks_in_context_with_whole_rows(tmp_path, data):
    config = divisible(data, **ask_in_context(tmp_path, data))
    run(tmp_path, config, "whole")
    said = run(tmp_path, config, "divided", 4, **over(2, "gather"))
    assert "device_train_microbatch_size: auto is" in said.output
    assert_same_run(tmp_path, "divided", "whole")
    assert_same_answers(tmp_path, "divided", "whole")
