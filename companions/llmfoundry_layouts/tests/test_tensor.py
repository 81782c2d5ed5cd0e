"""Layers divided among ranks: the run is the run it would be without, and its checkpoints go both ways."""

import itertools
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from composer.core import Callback
from torch.distributed.tensor import Replicate

from llmfoundry_layouts.tensor import divide_vocabulary
from llmfoundry_lite.checkpoint.full_tensors import diff, open_checkpoint
from llmfoundry_lite.config.layout import Coordinates, DataRanks, Layout, divide_devices
from llmfoundry_lite.config.model_schema import AttentionConfig, ModelConfig
from llmfoundry_lite.config.sharding_schema import FSDPConfig
from llmfoundry_lite.models.generate import generate
from llmfoundry_lite.parallel.fsdp import build_parallel_model
from llmfoundry_lite.parallel.mesh import build_mesh
from llmfoundry_lite.parallel.precision import PRECISIONS
from llmfoundry_lite.ranks.exchange import all_gather_json
from llmfoundry_lite.training.loss import IGNORED, cross_entropy_sum, next_token_labels
from llmfoundry_lite.training.monitor import DropoutSeed
from llmfoundry_lite.training.optimizers import local
from tests.helpers.exchanged import CountBytes
from tests.helpers.launch import launch
from tests.helpers.layouts import (
    LLAMA,
    ask_in_context,
    assert_same_answers,
    assert_same_export,
    assert_same_run,
    run_in_launches,
)
from tests.helpers.plans import estimate_memory
from tests.helpers.resave import resave_into
from tests.helpers.runs import losses, run, saves
from tests.helpers.tiny import tiny_config, write_data

OVER_TWO: dict[str, Any] = {"tp_config": {"tensor_parallel_degree": 2}}
OVER_FOUR: dict[str, Any] = {"tp_config": {"tensor_parallel_degree": 4, "sequence_parallel": True}}
STREAM_OVER_TWO: dict[str, Any] = {"tp_config": {"tensor_parallel_degree": 2, "sequence_parallel": True}}
SMALL = ModelConfig(
    d_model=64, n_heads=4, n_layers=2, max_seq_len=32, vocab_size=96, attn_config=AttentionConfig(fused_qkv=False)
)
HYBRID = {"sharding_strategy": "HYBRID_SHARD", "data_parallel_shard_degree": 2}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return write_data(tmp_path_factory.mktemp("data"))


def divisible(data: Path, **changes: Any) -> dict[str, Any]:
    options = {"model__attn_config__fused_qkv": True, "autoresume": True, "max_duration": "4ba"}
    return tiny_config(data, **{**options, **changes})


# --------------------------------------------------------------------------------------------------- the same run


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_run_is_the_same_divided_or_not_and_changes_over_at_any_checkpoint(tmp_path, data):
    config = divisible(data, max_duration="6ba", eval_interval="3ba", model__vocab_size=97)
    run(tmp_path, config, "whole", callbacks=resave_into(tmp_path / "begun/whole"))
    said = run_in_launches(tmp_path, config, [(4, OVER_TWO), (4, {}), (4, OVER_FOUR)], batches_per_launch=2)
    assert "tensor parallel degree 2 -> none" in said[1].output
    assert "tensor parallel degree none -> 4" in said[2].output
    assert_same_run(tmp_path, "moved", "whole")
    assert not any(d.num_different for d in diff(tmp_path / "begun/whole/ba0", tmp_path / "begun/0/ba0"))
    segments = open_checkpoint(saves(tmp_path, "moved") / "ba6").manifest.segments
    assert [segment.tensor_parallel_degree for segment in segments] == [2, None, 4]


FAMILY = {
    "alibi": ({"attn_config": {"alibi": True}}, 4),
    "alibi, reference": ({"attn_config": {"alibi": True, "attn_impl": "reference", "qk_gn": True, "clip_qkv": 2}}, 2),
    "llama": (LLAMA, 2),
    "qwen 3, wide heads": (
        LLAMA | {"attn_config": LLAMA["attn_config"] | {"head_dim": 24, "qk_gn": True, "norm_type": "rmsnorm"}},
        2,
    ),
    "three matrices": (LLAMA | {"attn_config": LLAMA["attn_config"] | {"fused_qkv": False}}, 2),
    "window": ({"attn_config": {"alibi": True, "sliding_window_size": 9}}, 2),
}


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("name", FAMILY)
def test_every_member_of_the_family_can_be_divided(tmp_path, data, name):
    changes, degree = FAMILY[name]
    config = divisible(data)
    attention = config["model"]["attn_config"] | changes["attn_config"]
    config["model"] |= {**changes, "attn_config": attention}
    run(tmp_path, config, "whole")
    run(tmp_path, config, "divided", 4, tp_config={"tensor_parallel_degree": degree, "sequence_parallel": True})
    assert_same_run(tmp_path, "divided", "whole")


EAGER = {"backend": "aot_eager"}  # all of the compiler but the code it writes
WAYS = {
    "hybrid": (8, {"fsdp_config": HYBRID}),
    "replicated": (4, {"fsdp_config": None}),
    "gathered once": (4, {"fsdp_config": {"sharding_strategy": "SHARD_GRAD_OP"}}),
    "uneven": (6, {}),
    "checkpointed": (4, {"fsdp_config": {"activation_checkpointing": True}}),
    "selective": (4, {"fsdp_config": {"activation_checkpointing": "selective"}}),
    "microbatches": (4, {"device_train_microbatch_size": 1}),
    "microbatches, by sample": (4, {"device_train_microbatch_size": 1, "accumulate_train_batch_on_tokens": False}),
    "summed at once": (4, {"device_train_microbatch_size": 1, "fsdp_config": {"reduce_every_microbatch": True}}),
    "stream": (4, STREAM_OVER_TWO),
    "stream, microbatches": (4, STREAM_OVER_TWO | {"device_train_microbatch_size": 1}),
    "stream, selective": (4, STREAM_OVER_TWO | {"fsdp_config": {"activation_checkpointing": "selective"}}),
    "stream, reentrant": (
        2,
        STREAM_OVER_TWO
        | {"fsdp_config": {"activation_checkpointing": True, "activation_checkpointing_reentrant": True}},
    ),
    "stream, compiled": (2, STREAM_OVER_TWO | {"compile_config": EAGER}),
    "compiled": (2, {"compile_config": EAGER}),
    "compiled, selective": (2, {"compile_config": EAGER, "fsdp_config": {"activation_checkpointing": "selective"}}),
    "compiled, recomputed": (2, {"compile_config": EAGER, "fsdp_config": {"activation_checkpointing": True}}),
    "lion": (4, {"optimizer": {"name": "decoupled_lionw", "lr": 1e-3, "weight_decay": 0.1}}),
    "clipped": (4, {"algorithms": {"gradient_clipping": {"clipping_type": "norm", "clipping_threshold": 0.1}}}),
}


KEPT: dict[str, Any] = dict.fromkeys(("stream, selective", "stream, compiled", "clipped"), pytest.mark.slow)
"""Others are in the long tier: `test_layouts.py` has pairs of ways."""


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", [pytest.param(name, marks=KEPT.get(name, pytest.mark.long)) for name in WAYS])
def test_division_goes_with_every_other_way_to_compute(tmp_path, data, name):
    num_ranks, changes = WAYS[name]
    config = divisible(data, global_train_batch_size=12, train_loader__num_workers=2)
    same_on_one = {key: value for key, value in changes.items() if key in ("optimizer", "algorithms")}
    run(tmp_path, config, "whole", **same_on_one)
    run(tmp_path, config, "divided", num_ranks, **(OVER_TWO | changes))
    assert_same_run(tmp_path, "divided", "whole")


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("precision", "mixed_precision"),
    [
        ("amp_bf16", "DEFAULT"),
        *(pytest.param(*mixed, marks=pytest.mark.long) for mixed in (("amp_bf16", "PURE"), ("amp_bf16", "FULL"))),
        pytest.param("amp_fp16", "DEFAULT", marks=pytest.mark.long),
    ],
)
def test_half_precision_stays_in_the_band_of_fp32(tmp_path, data, precision, mixed_precision):
    config = divisible(data, max_duration="10ba")
    run(tmp_path, config, "fp32")
    half = {"precision": precision, "fsdp_config": {"mixed_precision": mixed_precision}}
    run(tmp_path, config, "divided", 4, **STREAM_OVER_TWO, **half)
    assert losses(tmp_path, "divided") == pytest.approx(losses(tmp_path, "fp32"), abs=0.06)
    assert losses(tmp_path, "divided") != losses(tmp_path, "fp32")


@pytest.mark.slow
@pytest.mark.multiprocess
def test_groups_share_the_tasks_in_context_and_the_model_is_exported_whole(tmp_path, data):
    config = divisible(data, **ask_in_context(tmp_path, data), eval_interval="2ba", export_at_end=True)
    config["model"] |= LLAMA
    run(tmp_path, config, "whole")
    said = run(tmp_path, config, "divided", 4, **STREAM_OVER_TWO)
    assert_same_run(tmp_path, "divided", "whole")
    assert_same_answers(tmp_path, "divided", "whole")
    assert_same_export(tmp_path, "divided", "whole", atol=1e-3)
    assert not [line for output in said.outputs for line in output.splitlines() if "redistribut" in line]


# ----------------------------------------------------------------------------------------------------- vocabulary


def sum_loss(model: Any, tokens_bt: torch.Tensor, **options: Any) -> torch.Tensor:
    """Its gradient is added up."""
    labels_bt = next_token_labels(tokens_bt)
    labels_bt[0, :20] = IGNORED
    total = model(tokens_bt, head=partial(cross_entropy_sum, labels_bt=labels_bt, **options))
    (0.01 * total).backward()
    return total.detach()


def assert_same_gradient(divided: Any, whole: Any) -> None:
    for (name, ours), theirs in zip(divided.named_parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(
            ours.grad.full_tensor(),
            theirs.grad.full_tensor(),
            rtol=1e-4,
            atol=1e-5,
            msg=lambda text, name=name: f"{name}: {text}",
        )


def compare_vocabularies() -> None:
    """Compare loss, gradient, logits and text of a model whose vocabulary two ranks divide with those of a whole
    one."""
    dist.init_process_group("gloo")
    tokens_bt = torch.randint(97, (9, 32), generator=torch.Generator().manual_seed(3))
    for is_tied in (True, False):
        config = replace(SMALL, vocab_size=97, tie_word_embeddings=is_tied)
        whole, divided = (build_divided(degree, config) for degree in (1, 2))
        several_chunks = {"chunk_bytes": 128 * 4 * 97}
        in_parts = {**several_chunks, "divide_vocabulary": divide_vocabulary}
        totals = [sum_loss(whole, tokens_bt, **several_chunks), sum_loss(divided, tokens_bt, **in_parts)]
        torch.testing.assert_close(totals[1], totals[0], rtol=1e-6, atol=0)
        assert_same_gradient(divided, whole)
        with torch.no_grad():
            torch.testing.assert_close(divided(tokens_bt), whole(tokens_bt), rtol=1e-5, atol=1e-5)
        texts = [list(generate(model, tokens_bt[0, :9], 12, temperature=0)) for model in (whole, divided)]
        assert texts[0] == texts[1]
    assert [local(p).shape[0] for p in divided.lm_head.parameters()] == [49 - dist.get_rank()]
    dist.barrier()


@pytest.mark.multiprocess
def test_two_ranks_divide_any_vocabulary(tmp_path):
    launch(compare_vocabularies, (), tmp_path, 2).check()


# ------------------------------------------------------------------------------------------------ divided sequences


def compare_streams() -> None:
    """Compare a whole stream with a divided one: loss, gradient, and exchanged bytes with the formula."""
    dist.init_process_group("gloo")
    tokens_bt = torch.randint(96, (4, 32), generator=torch.Generator().manual_seed(3))
    stream_bytes, logit_bytes = 4 * 32 * SMALL.d_model * 4, 2 * 2 * 4 * 32 * 4
    found: dict[Any, Any] = {}
    for recomputes in (False, True):
        for sequence_parallel in (False, True):
            fsdp = FSDPConfig(activation_checkpointing=recomputes)
            model = build_divided(2, fsdp=fsdp, sequence_parallel=sequence_parallel)
            with CountBytes() as count:
                found[sequence_parallel] = sum_loss(model, tokens_bt, divide_vocabulary=divide_vocabulary), model
            reductions = (SMALL.n_layers * (5 if recomputes else 4) + 2) * stream_bytes
            if not sequence_parallel:
                assert count.num_bytes == {"all_reduce": reductions, "all_gather_into_tensor": logit_bytes}
                continue
            # The gradients of what both ranks have: norms, biases after sums, learned positions.
            shared = [p for p in model.parameters() if any(isinstance(x, Replicate) for x in p.placements)]
            assert count.num_bytes.pop("all_reduce") == 4 * sum(p.numel() for p in shared)
            halves = count.num_bytes["all_gather_into_tensor"] - logit_bytes, count.num_bytes["reduce_scatter_tensor"]
            assert sum(halves) == 2 * reductions + recomputes * SMALL.n_layers * stream_bytes
        totals = [total for total, _ in found.values()]
        torch.testing.assert_close(totals[1], totals[0], rtol=1e-6, atol=0)
        assert_same_gradient(found[True][1], found[False][1])
    with torch.no_grad():  # of any length
        torch.testing.assert_close(*(model(tokens_bt[:, :7]) for _, model in found.values()), rtol=1e-5, atol=1e-5)
    dist.barrier()


@pytest.mark.multiprocess
def test_a_divided_stream_gives_the_same_gradient_for_the_bytes_of_the_formula(tmp_path):
    launch(compare_streams, (), tmp_path, 2).check()


# -------------------------------------------------------------------------------------------------------- dropout


class CopiesAreEqual(Callback):
    """Tensors that every rank of a group holds whole are bit-equal after every batch."""

    def batch_end(self, state, logger):
        norms = [p for name, p in state.model.named_parameters() if "norm_" in name and ".blocks." in name]
        shares = all_gather_json([local(p).sum(dtype=torch.float64).item() for p in norms])
        assert (shares[0], shares[2]) == (shares[1], shares[3])
        assert shares[0] != shares[2] or int(state.timestamp.batch) == 1  # whose learning rate is 0


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_group_drops_the_same_of_the_stream_as_one_device_does(tmp_path, data):
    config = divisible(data, model__resid_pdrop=0.2, model__emb_pdrop=0.1)
    run(tmp_path, config, "whole")
    run(tmp_path, config, "divided", 2, **OVER_TWO)
    assert_same_run(tmp_path, "divided", "whole")
    equal = {f"python:{__name__}:CopiesAreEqual": {}}
    config["model"]["attn_config"]["attn_pdrop"] = 0.2
    for name in ("first", "second"):
        run(tmp_path, config, name, 4, callbacks=equal, fsdp_config={"activation_checkpointing": True}, **OVER_TWO)
    assert losses(tmp_path, "first") == losses(tmp_path, "second")
    run(tmp_path, config, "stream", 4, callbacks=equal, **STREAM_OVER_TWO)
    assert losses(tmp_path, "stream") == pytest.approx(losses(tmp_path, "first"), abs=0.2)
    assert losses(tmp_path, "stream") != losses(tmp_path, "first")
    run(tmp_path, config, "compiled", 2, compile_config=EAGER, **STREAM_OVER_TWO)
    assert losses(tmp_path, "compiled") == pytest.approx(losses(tmp_path, "first"), abs=0.2)


@pytest.mark.parametrize(
    ("sequence_parallel", "num_drawn"), [(False, 4), (True, 8)], ids=["whole stream", "divided stream"]
)
def test_ranks_that_have_other_tokens_of_a_sequence_drop_something_else(sequence_parallel, num_drawn):
    state = SimpleNamespace(timestamp=SimpleNamespace(batch=3))
    ranks, drawn = DataRanks(rank=0, size=1, is_counted=True), set()
    for pipeline, context, tensor in itertools.product(range(2), repeat=3):
        place = Coordinates(pipeline=pipeline, replicate=0, shard=0, context=context, tensor=tensor)
        DropoutSeed(17, SimpleNamespace(), ranks, place, sequence_parallel=sequence_parallel).batch_start(state, None)  # type: ignore[arg-type]
        drawn.add(int(torch.randint(1 << 48, ())))
    assert len(drawn) == num_drawn


def compare_heads() -> None:
    """Check what the heads of each rank in a group give, with all heads alike."""
    dist.init_process_group("gloo")
    model = build_divided(2, replace(SMALL, attn_config=replace(SMALL.attn_config, attn_pdrop=0.5)))
    heads: list[torch.Tensor] = []
    attention: Any = model.transformer.blocks[0].attn
    for linear in (attention.Wq, attention.Wk, attention.Wv):
        linear.weight.data.fill_(0.1)
    attention.out_proj.register_forward_pre_hook(lambda module, inputs: heads.append(inputs[0].detach()))
    torch.manual_seed(3)
    for training in (True, False):
        model.train(training)(torch.arange(32)[None])
    digests = [[float(head.double().square().sum()) for head in heads], int(torch.randint(1 << 30, ()))]
    (dropped, whole), (other_dropped, other_whole) = (sums for sums, _ in all_gather_json(digests))
    assert dropped != other_dropped
    assert whole == other_whole
    following = [number for _, number in all_gather_json(digests)]
    assert following[0] == following[1]  # the stream's dropout, which comes after, is the same again


def build_divided(degree: int, config: ModelConfig = SMALL, fsdp: FSDPConfig | None = None, **options: Any) -> Any:
    fsdp = fsdp or FSDPConfig()
    mesh = build_mesh(divide_devices(fsdp, dist.get_world_size(), tensor=degree), "cpu")
    return build_parallel_model(config, fsdp, PRECISIONS["fp32", "DEFAULT"], mesh, seed=1, **options)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_each_rank_drops_other_scores_of_its_heads(tmp_path):
    launch(compare_heads, (), tmp_path, 2).check()


# ------------------------------------------------------------------------------------------------------------- memory


def measure_shares() -> None:
    dist.init_process_group("gloo")
    for degree in (1, 2, 4):
        model = build_divided(degree)
        num_bytes = sum(local(p).numel() * p.element_size() for p in model.parameters())
        estimate = estimate_memory(
            SMALL, seq_len=32, microbatch_size=1, layout=Layout(shard=4 // degree, tensor=degree)
        )
        assert num_bytes == estimate.parameters_bytes
    dist.barrier()  # rank 0 has the store by which the others still find each other


@pytest.mark.slow
@pytest.mark.multiprocess
def test_the_estimate_knows_what_each_device_keeps(tmp_path):
    launch(measure_shares, (), tmp_path, 4).check()
