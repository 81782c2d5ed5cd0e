"""Samples divided among ranks: the run is the run it would be without, and its checkpoints go both ways."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from llmfoundry_lite.checkpoint.whole import diff, open_checkpoint
from llmfoundry_lite.config.check import check_batch
from llmfoundry_lite.config.layout import divide_devices, layout_of
from llmfoundry_lite.config.load_train import load_train_config
from llmfoundry_lite.config.schema import AttentionConfig, ContextParallelConfig, FSDPConfig, ModelConfig
from llmfoundry_lite.errors import ConfigError
from llmfoundry_lite.models.initialise import initialise_weights
from llmfoundry_lite.models.mpt import MPT
from llmfoundry_lite.parallel.context import build_context
from llmfoundry_lite.parallel.fsdp import build_parallel_model
from llmfoundry_lite.parallel.mesh import build_mesh
from llmfoundry_lite.parallel.precision import PRECISIONS
from llmfoundry_lite.training.adapter import LanguageModel
from tests.helpers import flash_attn
from tests.helpers.launch import launch
from tests.helpers.resave import assert_same_state, resave_into
from tests.helpers.tiny import SEQ_LEN, VOCAB_SIZE, tiny_config, values, write_config, write_data
from tests.training.runs import metrics, run, saves

RELATIVE = 1e-5
EOS = 3


def over(degree: int = 2, kind: str = "heads") -> dict[str, Any]:
    return {"cp_config": {"context_parallel_degree": degree, "kind": kind}}


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


def assert_same_run(tmp_path: Path, one: str, other: str, tolerance: float = RELATIVE) -> None:
    ours, theirs = metrics(tmp_path, one), metrics(tmp_path, other)
    for key in ("batch", "data/digest", "time/sample", "time/token", "lr"):
        assert values(ours, key) == values(theirs, key), key
    for key in ("loss/train/total", "grad_norm", "eval/loss"):
        assert values(ours, key) == pytest.approx(values(theirs, key), rel=tolerance), key


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
    """On each rank: of every model, the loss and the gradient of divided samples beside those of whole ones."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    sys.modules["flash_attn"] = flash_attn
    fsdp, precision = FSDPConfig(**options), PRECISIONS["fp32", "DEFAULT"]
    layout = divide_devices(fsdp, dist.get_world_size(), context=degree, tensor=tensor)
    mesh = build_mesh(layout, "cpu")
    context = build_context(ContextParallelConfig(context_parallel_degree=degree, kind=kind), layout, "cpu")
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
        divided = LanguageModel(model, precision, separator, context)

        with torch.set_grad_enabled(attn_impl != "flex"):  # which has no backward pass on a CPU
            expected, found = whole({"input_ids": rows}), divided({"input_ids": mine})
        total = found["loss_sum"].detach().clone()
        dist.all_reduce(total)
        assert float(total) / dist.get_world_size() * ranks.size == pytest.approx(float(expected["loss_sum"]), rel=1e-6)
        if attn_impl == "flex":
            continue
        expected["loss_sum"].backward()
        found["loss_sum"].backward()
        gradients = {key: parameter.grad for key, parameter in whole.named_parameters()}
        for key, parameter in divided.named_parameters():
            gradient = parameter.grad.full_tensor() * ranks.size  # type: ignore[union-attr]
            error = (gradient - gradients[key]).norm() / gradients[key].norm()
            assert error < RELATIVE or gradients[key].norm() < 1e-4, f"{name}: {key}: {error:.1e}"
    dist.barrier()  # rank 0 has the store by which the others still find each other


def compare_both() -> None:
    for kind in ("heads", "gather"):
        compare(kind, 2, 1, "sdpa", ["alibi, documents", "rope, grouped, window"], {})


@pytest.mark.multiprocess
def test_loss_and_gradient_of_divided_samples_are_those_of_whole_ones(tmp_path):
    launch(compare_both, (), tmp_path, 2).check()


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


SLOW = ("heads, sharded", "gather, layers divided")


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


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_run_changes_between_whole_and_divided_samples_at_any_checkpoint(tmp_path, data):
    config = divisible(data, max_duration="3ba", eval_interval="3ba")
    run(tmp_path, config, "whole", callbacks=resave_into(tmp_path / "begun/whole"))
    legs: list[tuple[int, dict[str, Any]]] = [(4, over()), (1, {}), (2, over())]
    for number, (num_ranks, changes) in enumerate(legs):
        found = tmp_path / f"begun/{number}"
        said = run(tmp_path, config, "legs", num_ranks, stop_after="1ba", callbacks=resave_into(found), **changes)
        if number:
            assert_same_state(saves(tmp_path, "legs") / f"ba{number}", found / f"ba{number}")
        if number == 1:
            assert "context parallel 2, heads -> none" in said.output
    assert_same_run(tmp_path, "legs", "whole")
    assert not any(d.num_different or d.note for d in diff(tmp_path / "begun/whole/ba0", tmp_path / "begun/0/ba0"))
    segments = open_checkpoint(saves(tmp_path, "legs") / "ba3").manifest.segments
    assert [segment.context for segment in segments] == ["2, heads", None, "2, heads"]


# ---------------------------------------------------------------------------------------------------- what is refused

REFUSED = {
    "cp_config.kind=head": "cp_config.kind: 'head' is not known; did you mean heads? (expected heads or gather)",
    "cp_config.context_parallel_degree=0": "cp_config.context_parallel_degree: 0 given, expected a number above 0",
    "cp_config.degree=2": "cp_config.degree",
    "cp_config.context_parallel_degree=3": (
        "cp_config.context_parallel_degree: 3 does not divide max_seq_len, 32; use 2, 4, 8, 16 or 32"
    ),
    "cp_config.context_parallel_degree=8": (
        "cp_config.context_parallel_degree: 8 does not divide model.n_heads, 4; use cp_config.kind: gather, or a "
        "degree of 2 or 4"
    ),
    "tp_config.tensor_parallel_degree=2 cp_config.context_parallel_degree=4": (
        "cp_config.context_parallel_degree: 4 x 2 of tp_config does not divide model.n_heads, 4; use cp_config.kind: "
        "gather, or a degree of 2"
    ),
    "model.attn_config.attn_type=multiquery_attention": (
        "cp_config.context_parallel_degree: 2 does not divide the heads of keys and values, 1; use cp_config.kind: "
        "gather"
    ),
    "cp_config.kind=gather cp_config.context_parallel_degree=32": (
        "cp_config.context_parallel_degree: 32, of which each has two pieces, does not divide max_seq_len, 32; use "
        "2, 4, 8 or 16"
    ),
    "eval_loader.dataset.max_seq_len=31": (
        "cp_config.context_parallel_degree: 2 does not divide eval_loader.dataset.max_seq_len, 31; use another length"
    ),
    "train_loader.name=python:my.module:load": (
        "train_loader.name: python:my.module:load cannot know that with cp_config the devices of a sample must read "
        "the same samples; use text, or no cp_config"
    ),
}


def load(tmp_path: Path, *arguments: str, **changes: Any) -> Any:
    config = divisible(tmp_path, **changes) | over()
    return load_train_config([write_config(tmp_path / "run.yaml", config), *arguments]).config


@pytest.mark.parametrize("argument", REFUSED)
def test_what_cannot_be_divided_is_refused_by_name(tmp_path, argument):
    with pytest.raises(ConfigError) as error:
        load(tmp_path, *argument.split())
    assert REFUSED[argument] in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("world_size", "arguments", "message"),
    [
        (3, "", "cp_config.context_parallel_degree: 2 does not divide the 3 devices of this launch; start a multiple"),
        (
            6,
            "tp_config.tensor_parallel_degree=2",
            "cp_config.context_parallel_degree: 2 does not divide the 3 groups of 2 devices (tp_config) of this "
            "launch; start a multiple of 4, or change the degree",
        ),
        (6, "", "global_train_batch_size: 8 cannot be shared evenly by 3 groups of 2 devices (cp_config)"),
    ],
)
def test_devices_and_batch_must_suit_the_groups(tmp_path, world_size, arguments, message):
    config = load(tmp_path, *arguments.split())
    with pytest.raises(ConfigError) as error:
        check_batch(config, layout_of(config, world_size))
    assert str(error.value).startswith(message)
