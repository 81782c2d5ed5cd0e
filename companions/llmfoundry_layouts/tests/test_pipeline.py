"""Blocks divided into stages: the run is the run it would be without, and its checkpoints go both ways."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.testing._internal.distributed import fake_pg  # noqa: F401 - registers the backend

from llmfoundry_layouts.pipeline import Pipeline, StageModel
from llmfoundry_layouts.stages import assign_stages
from llmfoundry_lite.checkpoint.full_tensors import diff, open_checkpoint
from llmfoundry_lite.checkpoint.state import join_optimizers
from llmfoundry_lite.config.check import check_batch
from llmfoundry_lite.config.layout import layout_of
from llmfoundry_lite.config.load_train import load_train_config
from llmfoundry_lite.config.model_schema import ModelConfig
from llmfoundry_lite.config.sharding_schema import PipelineConfig
from llmfoundry_lite.errors import ConfigError
from llmfoundry_lite.estimate.memory import estimate_training_memory
from llmfoundry_lite.models.mpt import MPT
from llmfoundry_lite.parallel.precision import PRECISIONS
from llmfoundry_lite.training.loss import cross_entropy_sum
from tests.helpers.layouts import (
    LLAMA,
    ask_in_context,
    assert_same_answers,
    assert_same_export,
    assert_same_run,
    run_in_launches,
)
from tests.helpers.resave import resave_into
from tests.helpers.runs import attempt, losses, run, saves, status
from tests.helpers.tiny import tiny_config, write_config, write_data


def stages(degree: int = 2, schedule: str = "1f1b", **options: Any) -> dict[str, Any]:
    return {"pp_config": {"pipeline_parallel_degree": degree, "schedule": schedule, **options}}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return write_data(tmp_path_factory.mktemp("data"))


def pipelined(data: Path, **changes: Any) -> dict[str, Any]:
    options = {
        "model__attn_config__fused_qkv": True,
        "model__attn_config__alibi": True,
        "model__n_layers": 4,
        "device_train_microbatch_size": 2,
        "autoresume": True,
        "max_duration": "3ba",
        "eval_interval": "3ba",
    }
    return tiny_config(data, **{**options, **changes})


# --------------------------------------------------------------------------------------------------- the same run

TENSOR = {"tp_config": {"tensor_parallel_degree": 2}}
STREAM = {"tp_config": {"tensor_parallel_degree": 2, "sequence_parallel": True}}


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_run_changes_between_stages_and_every_other_layout_at_any_checkpoint(tmp_path, data):
    config = pipelined(data, max_duration="5ba", eval_interval="5ba")
    run(tmp_path, config, "whole", callbacks=resave_into(tmp_path / "begun/whole"))
    launches: list[tuple[int, dict[str, Any]]] = [
        (2, stages()),
        (1, {}),
        (4, stages(schedule="gpipe")),
        (4, stages() | TENSOR),
        (2, stages(schedule="interleaved")),
    ]
    said = run_in_launches(tmp_path, config, launches)
    assert "pipeline 2 stages, 1f1b -> none" in said[1].output
    assert_same_run(tmp_path, "moved", "whole")
    assert not any(d.num_different or d.note for d in diff(tmp_path / "begun/whole/ba0", tmp_path / "begun/0/ba0"))
    segments = open_checkpoint(saves(tmp_path, "moved") / "ba5").manifest.segments
    assert [segment.pipeline for segment in segments[:3]] == ["2 stages, 1f1b", None, "2 stages, gpipe"]


HYBRID = {"sharding_strategy": "HYBRID_SHARD", "data_parallel_shard_degree": 2}
UNTIED = {"tie_word_embeddings": False, "attn_config": {"alibi": True}}
LEARNED = {"attn_config": {"alibi": False}, "resid_pdrop": 0.0, "logit_scale": "inv_sqrt_d_model"}
WAYS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "gpipe, replicated": (4, {}, stages(schedule="gpipe") | {"fsdp_config": {"sharding_strategy": "NO_SHARD"}}),
    "interleaved, sharded": (4, {}, stages(schedule="interleaved")),
    "zero bubble": (2, {}, stages(schedule="zero_bubble", virtual_stages=2)),
    "zero bubble, sharded": (4, {}, stages(schedule="zero_bubble")),
    "zbv, sharded": (4, UNTIED, stages(schedule="zbv")),
    "zero bubble, tensor": (4, {}, stages(schedule="zero_bubble") | TENSOR),
    "interleaved, stream, untied": (4, UNTIED, stages(schedule="interleaved") | STREAM),
    "stream, learned positions": (4, LEARNED, stages() | STREAM),
    "four stages, llama": (4, LLAMA, stages(4)),
    "blocks as given": (2, UNTIED | {"n_layers": 5}, stages(schedule="interleaved", blocks=[2, 1, 1, 1])),
    "learned positions, recomputed": (2, LEARNED, stages() | {"fsdp_config": {"activation_checkpointing": True}}),
    "sharded, selective": (4, {}, stages() | {"fsdp_config": {"activation_checkpointing": "selective"}}),
    "copies of shards": (8, {}, stages() | {"fsdp_config": HYBRID, "device_train_microbatch_size": 1}),
    "compiled": (2, {}, stages(schedule="interleaved") | {"compile_config": {"backend": "aot_eager"}}),
}


KEPT: dict[str, Any] = dict.fromkeys(
    ("zero bubble, sharded", "four stages, llama", "blocks as given"), pytest.mark.slow
)
"""Others are in the long tier: `test_layouts.py` has pairs of ways."""


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", [pytest.param(name, marks=KEPT.get(name, pytest.mark.long)) for name in WAYS])
def test_stages_go_with_every_schedule_and_every_other_way_to_compute(tmp_path, data, name):
    num_ranks, model, changes = WAYS[name]
    config = pipelined(data)
    attention = config["model"]["attn_config"] | model.get("attn_config", {})
    if "rope" in attention:
        attention["alibi"] = False
    config["model"] |= {**model, "attn_config": attention}
    run(tmp_path, config, "whole")
    run(tmp_path, config, "stages", num_ranks, **changes)
    assert_same_run(tmp_path, "stages", "whole")


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_batch_that_microbatches_do_not_divide_is_filled_up(tmp_path, data):
    config = pipelined(data, global_train_batch_size=7, accumulate_train_batch_on_tokens=False)
    run(tmp_path, config, "whole")
    run(tmp_path, config, "stages", 2, **stages())
    assert_same_run(tmp_path, "stages", "whole")


@pytest.mark.slow
@pytest.mark.multiprocess
def test_rows_that_fill_up_the_last_batch_of_an_epoch_count_on_no_layout(tmp_path):
    """All samples have as many tokens, so weighed by samples a batch is what it is by tokens."""
    small = write_data(tmp_path / "small", num_train=19)
    changes = {"train_loader__drop_last": False, "max_duration": "2ep", "eval_interval": "2ep"}
    by_tokens, by_samples = (
        pipelined(small, **changes, accumulate_train_batch_on_tokens=answer, scheduler__t_warmup="0ba")
        for answer in (True, False)
    )
    run(tmp_path, by_tokens, "whole")
    run(tmp_path, by_samples, "samples")
    for name, config in (("tokens", by_tokens), ("samples", by_samples)):
        run(tmp_path, config, f"{name}-in-shards", 4)
        run(tmp_path, config, f"{name}-in-stages", 4, **stages())
    assert len(losses(tmp_path, "whole")) == 6
    for name in ("samples", *(f"{name}-in-{kind}" for name in ("tokens", "samples") for kind in ("shards", "stages"))):
        assert_same_run(tmp_path, name, "whole")


@pytest.mark.slow
@pytest.mark.multiprocess
def test_stages_answer_tasks_in_context_and_the_model_is_exported_whole(tmp_path, data):
    config = pipelined(data, **ask_in_context(tmp_path, data), export_at_end=True, eval_first=True)
    config["model"] |= LLAMA | {"attn_config": LLAMA["attn_config"] | {"fused_qkv": False}}
    run(tmp_path, config, "whole")
    said = run(tmp_path, config, "stages", 2, **stages(schedule="interleaved"))
    assert "device_train_microbatch_size: auto is" in said.output
    assert_same_run(tmp_path, "stages", "whole")
    assert_same_answers(tmp_path, "stages", "whole")
    assert_same_export(tmp_path, "stages", "whole", atol=1e-4)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_gradient_that_is_not_finite_is_named_by_all_stages(tmp_path, data):
    config = pipelined(data, on_non_finite="stop", optimizer__lr=1e30)
    found = attempt(tmp_path, config, "broken", 2, **stages())
    assert set(found.exit_codes) == {2}
    assert status(tmp_path, "broken")["status"] == "failed"
    assert "the weights were not touched" in found.output


# ---------------------------------------------------------------------------------------------------- what is refused

REFUSED = {
    "pp_config.schedule=zigzag": "pp_config.schedule: 'zigzag' is not known; expected gpipe, 1f1b, interleaved,",
    "pp_config.virtual_stages=2": "pp_config.virtual_stages: 2 given, 1f1b has 1; change it or the schedule",
    "pp_config.pipeline_parallel_degree=5": (
        "pp_config.pipeline_parallel_degree: 5 x 1 runs of blocks are more than model.n_layers, 4; use a smaller degree"
    ),
    "pp_config.schedule=interleaved model.n_layers=3": (
        "pp_config.pipeline_parallel_degree: 2 x 2 runs of blocks are more than model.n_layers, 3; use a smaller"
    ),
    "pp_config.blocks=[1,2,1]": "pp_config.blocks: [1, 2, 1] given, expected 2 counts, for 2 stages",
    "pp_config.schedule=interleaved pp_config.blocks=[1,3]": (
        "pp_config.blocks: [1, 3] given, expected 4 counts, for 2 x 2 runs of blocks"
    ),
    "pp_config.blocks=[0,4]": "pp_config.blocks: [0, 4] given, expected 1 or more for each",
    "pp_config.blocks=[1,2]": ("pp_config.blocks: [1, 2] given, 3 in all, and model.n_layers is 4; change one of them"),
    "pp_config.num_microbatches=4": (
        "pp_config.num_microbatches: both it and device_train_microbatch_size given; use one of them"
    ),
    "pp_config.schedule=zero_bubble compile_config={}": (
        "pp_config.schedule: zero_bubble computes the weights' gradients apart, which torch cannot compile; use "
        "interleaved or 1f1b, or compile_config: null"
    ),
    "pp_config.schedule=zero_bubble fsdp_config.activation_checkpointing=true": (
        "pp_config.schedule: zero_bubble computes the weights' gradients apart, and activation_checkpointing would "
    ),
    "pp_config.schedule=zbv": "pp_config.schedule: zbv has the first and the last stage on one device, where tied ",
    "fsdp_config.reduce_every_microbatch=true": "fsdp_config.reduce_every_microbatch: a stage sums its gradients ",
    "fsdp_config.offload_optimizer=true": "fsdp_config.offload_optimizer: does not go with pp_config; remove one ",
    "train_loader.name=python:my.module:load": (
        "train_loader.name: python:my.module:load cannot know that with pp_config the devices of all stages must read "
        "the same samples; use text, or no pp_config"
    ),
}


def load(tmp_path: Path, *arguments: str, **changes: Any) -> Any:
    config = pipelined(tmp_path, **changes) | stages()
    return load_train_config([write_config(tmp_path / "run.yaml", config), *arguments]).config


@pytest.mark.parametrize("argument", REFUSED)
def test_what_cannot_be_pipelined_is_refused_by_name(tmp_path, argument):
    with pytest.raises(ConfigError) as error:
        load(tmp_path, *argument.split())
    assert REFUSED[argument] in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("world_size", "arguments", "message"),
    [
        (3, "", "pp_config.pipeline_parallel_degree: 2 does not divide the 3 devices of this launch; start a multiple"),
        (6, "", "global_train_batch_size: 8 cannot be shared evenly by 3 groups of 2 devices (pp_config)"),
        (
            2,
            "device_train_microbatch_size=8",
            "device_train_microbatch_size: 8 makes 1 microbatch(es) of 8 samples of a data rank through 2 stages of "
            "1f1b, which does not fit; use 1, 2 or 4",
        ),
        (
            2,
            "device_train_microbatch_size=null pp_config.num_microbatches=3",
            "pp_config.num_microbatches: 3 does not fit 8 samples of a data rank through 2 stages of 1f1b; use 2, 4 or "
            "8",
        ),
        (
            2,
            "device_train_microbatch_size=null pp_config.num_microbatches=1",
            "pp_config.num_microbatches: 1 does not fit 8 samples of a data rank through 2 stages of 1f1b; use 2, 4 or "
            "8",
        ),
        (
            4,
            "device_train_microbatch_size=null global_train_batch_size=10 pp_config.schedule=interleaved",
            "pp_config.num_microbatches: 5 does not fit 5 samples of a data rank through 2 stages of interleaved; use "
            "device_train_microbatch_size: 4, 3 or 2",
        ),
        (
            2,
            "device_train_microbatch_size=1 global_train_batch_size=1",
            "global_train_batch_size: 1 samples of a data rank through 2 stages of 1f1b fit no number of microbatches; "
            "use a batch that gives a data rank a multiple of 2 samples, or schedule: gpipe",
        ),
    ],
)
def test_devices_and_batch_must_suit_the_stages(tmp_path, world_size, arguments, message):
    config = load(tmp_path, *arguments.split())
    with pytest.raises(ConfigError) as error:
        check_batch(config, layout_of(config, world_size))
    assert str(error.value).startswith(message)


# ----------------------------------------------------------------------------------------------------------- one rank


def test_a_stage_takes_less_memory_and_more_microbatches_take_more(tmp_path):
    config = load(tmp_path, global_train_batch_size=32)
    whole = load(tmp_path, "pp_config=null", global_train_batch_size=32)
    half = estimate_training_memory(config, layout_of(config, 2))
    assert half.parameters_bytes < estimate_training_memory(whole, layout_of(whole, 1)).parameters_bytes
    filled = load(tmp_path, "pp_config.schedule=gpipe", global_train_batch_size=32)
    assert estimate_training_memory(filled, layout_of(filled, 2)).activations_bytes > 2 * half.activations_bytes


def test_the_loss_can_go_backward_twice():
    hidden, unembedding = torch.randn(2, 5, 8, requires_grad=True), torch.randn(11, 8, requires_grad=True)
    labels = torch.randint(11, (2, 5))
    once = torch.autograd.grad(3 * cross_entropy_sum(hidden, unembedding, labels), [hidden, unembedding])
    loss = 3 * cross_entropy_sum(hidden, unembedding, labels, backward_runs_once=False)
    for _ in range(2):
        twice = torch.autograd.grad(loss, [hidden, unembedding], retain_graph=True)
        assert all(map(torch.equal, once, twice))


def test_stages_have_the_names_of_the_whole_model():
    config = ModelConfig(d_model=32, n_heads=4, n_layers=4, max_seq_len=32, vocab_size=96)
    kind = PipelineConfig(pipeline_parallel_degree=2, schedule="interleaved")
    names: list[str] = []
    with torch.device("meta"):
        for parts in assign_stages(config, kind):
            models = [StageModel(config, "sdpa", part, cross_entropy_sum, PRECISIONS["fp32", "PURE"]) for part in parts]
            pipeline = Pipeline.__new__(Pipeline)
            nn.Module.__init__(pipeline)
            pipeline.stages = nn.ModuleList(models)
            names += [name for name, _ in pipeline.named_parameters()]
        whole = [name for name, _ in MPT(config).named_parameters()]
    assert sorted(names) == sorted([*whole, "transformer.wte.weight"])  # the first stage's, and the head's


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zero_bubble"])
def test_all_ranks_meet_before_any_batch_of_sends(monkeypatch, schedule):
    """NCCL needs all ranks of a group in its first batched call, and only the first and the last stage make one."""
    config = ModelConfig(d_model=32, n_heads=4, n_layers=6, max_seq_len=8, vocab_size=96)
    kind, precision = PipelineConfig(pipeline_parallel_degree=3, schedule=schedule), PRECISIONS["fp32", "DEFAULT"]
    calls: list[str] = []

    def noted(name: str) -> Any:
        made = getattr(dist, name)
        return lambda *args, **options: (calls.append(name), made(*args, **options))[1]

    for name in ("all_reduce", "batch_isend_irecv"):
        monkeypatch.setattr(dist, name, noted(name))
    for name in ("_warmup_forward_vote", "_warmup_backward_result"):  # nobody is there to be asked
        monkeypatch.setattr(PipelineStage, name, lambda *args, **options: torch.ones(1), raising=False)
    dist.init_process_group("fake", rank=0, world_size=3, store=dist.HashStore())
    try:
        models = [
            StageModel(config, "sdpa", part, cross_entropy_sum, precision) for part in assign_stages(config, kind)[0]
        ]
        for parameter in (parameter for model in models for parameter in model.parameters()):
            nn.init.zeros_(parameter)
        pipeline = Pipeline(models, kind, precision, dist.group.WORLD)
        tokens_bt = torch.ones((3, 8), dtype=torch.int64)
        pipeline.train_on(tokens_bt, tokens_bt, torch.ones(3))
    finally:
        dist.destroy_process_group()
    assert calls[0] == "all_reduce" and "batch_isend_irecv" in calls


def test_the_optimizer_of_a_save_lists_parameters_as_the_whole_model_does():
    def part(*numbers: int, first: bool = False, last: bool = False) -> dict[str, Any]:
        names = [f"transformer.blocks.{n}.{kind}" for n in numbers for kind in ("norm_1.weight", "attn.Wq.weight")]
        names = ["transformer.wte.weight"] * first + names + ["transformer.norm_f.weight", "lm_head.weight"] * last
        return {"class": "AdamW", "groups": [{"params": names, "options": {}}], "state": {}}

    whole = part(*range(12), first=True, last=True)
    assert join_optimizers([part(0, 1, 2, 6, 7, 8, first=True), part(3, 4, 5, 9, 10, 11, last=True)]) == whole
    assert join_optimizers([part(0, 1, 2, 9, 10, 11, first=True, last=True), part(3, 4, 5, 6, 7, 8)]) == whole


def test_the_stages_of_a_rank_begin_at_one_place_in_the_cache():
    """Each adds its tokens; the next one of this rank must not take them for earlier ones."""
    seen = []

    class Block(SimpleNamespace):
        def __call__(self, x, *, cache, head):
            seen.append(cache.length)
            cache.length += x.size(1)
            return x

    ends = [SimpleNamespace(index=i, is_first=i == 0, is_last=i == 2) for i in range(3)]
    rank: Any = SimpleNamespace(stages=[Block(stage=stage) for stage in ends], rank=0, _rank_of_stage=lambda index: 0)
    cache: Any = SimpleNamespace(length=5)
    tokens_bt = torch.zeros(1, 4)
    assert Pipeline.run_forward(rank, tokens_bt, cache=cache) is tokens_bt
    assert (seen, cache.length) == ([5, 5, 5], 9)
