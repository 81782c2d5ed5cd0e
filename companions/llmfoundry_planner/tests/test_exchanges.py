"""The bytes that real ranks exchange in a batch, beside the formulas that `plan` makes seconds of."""

import itertools
import json
from collections.abc import Mapping
from typing import Any

import pytest

from llmfoundry_layouts.stages import Stage, assign_stages
from llmfoundry_lite.config.layout import Coordinates, Layout, layout_of
from llmfoundry_lite.config.load_train import load_train_config
from llmfoundry_lite.config.model_schema import ModelConfig
from llmfoundry_lite.config.schema import TrainConfig
from llmfoundry_lite.estimate.portion import Portion
from llmfoundry_planner.plan.exchanges import context_exchanges, parameter_exchanges, stage_sends, stream_reductions
from llmfoundry_planner.plan.step import count_block_and_outside, count_microbatches
from tests.helpers.runs import run
from tests.helpers.tiny import tiny_config, write_data

Exchanged = dict[tuple[str, int, str], float]
"""(operation, ranks of the group, dtype) -> bytes."""

GATHER, REDUCE, SUM = "_allgather_base_", "_reduce_scatter_base_", "allreduce_"
SHARDS = {"sharding_strategy": "HYBRID_SHARD", "data_parallel_shard_degree": 2}
STAGES = {"pipeline_parallel_degree": 2}
LAYERS = {"tensor_parallel_degree": 2}
STREAM = LAYERS | {"sequence_parallel": True}
EXACT = {"exact_sums": True}
UNTIED = {"model__tie_word_embeddings": False}

CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "shards": (2, {}),
    "shards, reduced after each microbatch": (2, {"fsdp_config__reduce_every_microbatch": True}),
    "shards, whole between forward and backward": (2, {"fsdp_config__sharding_strategy": "SHARD_GRAD_OP"}),
    "shards, recomputed": (2, {"fsdp_config__activation_checkpointing": True}),
    "copies": (2, {"fsdp_config__sharding_strategy": "NO_SHARD"}),
    "copies that share the optimizer": (2, {"fsdp_config__sharding_strategy": "ZERO_1"}),
    "copies of shards": (4, {"fsdp_config": SHARDS | {"reduce_every_microbatch": True}}),
    "copies of shards, in 16 bits": (
        4,
        {"precision": "amp_bf16", "fsdp_config": SHARDS | {"reduce_every_microbatch": True, "mixed_precision": "PURE"}},
    ),
    "shards, with exact sums": (2, EXACT),
    "copies, with exact sums": (2, EXACT | {"fsdp_config__sharding_strategy": "NO_SHARD"}),
    "copies of shards, with exact sums": (
        4,
        EXACT
        | {
            "precision": "amp_bf16",
            "fsdp_config": SHARDS | {"reduce_every_microbatch": True, "mixed_precision": "PURE"},
        },
    ),
    "stages, with exact sums": (2, EXACT | {"pp_config": STAGES}),
    "layers": (2, {"tp_config": LAYERS}),
    "layers, recomputed": (2, {"tp_config": LAYERS, "fsdp_config__activation_checkpointing": True}),
    "layers and the stream": (2, {"tp_config": STREAM}),
    "samples": (2, {"cp_config": {"context_parallel_degree": 2}}),
    "stages of shards": (4, {"pp_config": STAGES}),
    "stages, two runs each": (2, {"pp_config": STAGES | {"schedule": "interleaved"}}),
    "stages, there and back": (2, {"pp_config": STAGES | {"schedule": "zbv"}} | UNTIED),
    "stages of a divided stream": (4, {"pp_config": STAGES, "tp_config": STREAM} | UNTIED),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("data"))


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("name", CASES)
def test_ranks_exchange_the_bytes_of_the_formulas(tmp_path, data, name):
    num_ranks, changes = CASES[name]
    options = {"max_duration": "2ba", "model__n_layers": 4, "device_train_microbatch_size": 1, **changes}
    options["callbacks"] = {"python:llmfoundry_planner.tests.exchanged:CountExchanges": {}}
    run(tmp_path, tiny_config(data, **options), "counted", num_ranks)
    config = load_train_config([str(tmp_path / "counted.yaml")]).config
    layout = layout_of(config, num_ranks)
    for rank in range(num_ranks):
        rows = json.loads((tmp_path / f"exchanged-{rank}.json").read_text())
        counted = {(operation, size, dtype): num_bytes for operation, size, dtype, num_bytes in rows}
        assert counted == expected_of(config, layout, layout.coordinates(rank)), f"rank {rank}"


def expected_of(config: TrainConfig, layout: Layout, place: Coordinates) -> Exchanged:
    model, p = config.model, Portion(config, layout)
    assert p.microbatch_size == 1
    dtype, num_bytes = ("bfloat16", 2) if p.dtype == "bf16" else ("float32", 4)
    reduced_as = {2: dtype, 4: "float32", 8: "float64"}[p.reduction_bytes]
    stages = assign_stages(model, config.pipeline)[place.pipeline]
    num_blocks = sum(len(stage.blocks) for stage in stages)
    num_block, num_outside = (count_parameters_of(model, stages)[key] for key in ("block", "outside"))
    num_microbatches = count_microbatches(p)
    found: Exchanged = {}

    # The shares of parameters and gradients.
    parts = layout.of_parameters
    times = parameter_exchanges(p, num_microbatches if layout.pipeline == 1 else 1)
    num_parameters = num_blocks * num_block + num_outside
    if layout.tensor > 1:
        assert parts.shard == parts.replicate == 1
    if p.is_sharded and parts.shard > 1:
        gathered = times.forward_gathers * num_parameters + times.backward_gathers * num_blocks * num_block
        found[GATHER, parts.shard, dtype] = gathered * num_bytes
        reduced = times.reductions * num_parameters * p.reduction_bytes
        found[REDUCE, parts.shard, reduced_as] = reduced
    if parts.replicate > 1:
        share = num_parameters // (parts.shard if p.is_sharded else 1)
        found[SUM, parts.replicate, reduced_as] = times.copy_reductions * share * p.reduction_bytes
        if p.shares_optimizer:
            found[GATHER, parts.replicate, "float32"] = num_parameters * 4

    # The streams of microbatches.
    num_tokens = config.max_seq_len // layout.context
    stream = num_tokens * model.d_model * num_bytes
    if layout.tensor > 1:
        found |= exchanged_in_layers(config, layout, stages, num_microbatches, stream)
    if layout.context > 1:
        numbers, count = context_exchanges(model, config.context, num_tokens, False)
        found["all_to_all_single", layout.context, dtype] = num_microbatches * num_blocks * count * numbers * num_bytes
    if layout.pipeline > 1:
        kept = sum(later.index == earlier.index + 1 for earlier, later in itertools.pairwise(stages))
        num_ends = stages[0].is_first + stages[-1].is_last + 2 * kept
        sent = num_microbatches * stage_sends(config.pipeline.num_runs, num_ends) * stream
        sent //= p.num_stream_parts
        tied = model.vocab_size * model.d_model * p.sum_bytes // layout.shard if model.tie_word_embeddings else 0
        for operation in ("send", "recv_"):
            found[operation, layout.pipeline, dtype] = sent
            key = (operation, layout.pipeline, "float64" if config.exact_sums else "float32")
            if tied:
                found[key] = found.get(key, 0) + tied
    return found


def exchanged_in_layers(
    config: TrainConfig, layout: Layout, stages: list[Stage], num_microbatches: int, stream: int
) -> Exchanged:
    """With a divided stream, every sum is a reduce-scatter and an all-gather; and gradients of what ranks have whole
    are summed once a batch, which the plan leaves out."""
    num_blocks = sum(len(stage.blocks) for stage in stages)
    num_ends = stages[0].is_first + stages[-1].is_last
    times = stream_reductions(num_blocks, config.sharding.activation_checkpointing is True, 2 // num_ends)
    sums = num_microbatches * times * stream
    logits = num_microbatches * 2 * config.max_seq_len * layout.tensor * 4 if stages[-1].is_last else 0
    if not config.sequence_parallel:
        return {("all_reduce", 2, "float32"): sums, ("all_gather_into_tensor", 2, "float32"): logits}
    d = config.model.d_model
    whole = 6 * d * num_blocks  # two norms, and two biases behind sums
    whole += stages[0].is_first * config.model.max_seq_len * d + stages[-1].is_last * 2 * d
    return {
        ("reduce_scatter_tensor", 2, "float32"): sums,
        ("all_gather_into_tensor", 2, "float32"): sums + logits,
        ("all_reduce", 2, "float32"): whole * 4,
    }


def count_parameters_of(model: ModelConfig, stages: list[Stage]) -> Mapping[str, int]:
    """Those of the embeddings belong to the first stage, and again to the last one where they are tied."""
    block, outside = count_block_and_outside(model)
    norm, head = 2 * model.d_model, model.vocab_size * model.d_model
    is_first, is_last = stages[0].is_first, stages[-1].is_last
    if is_first and is_last:
        return {"block": block, "outside": outside}
    first = head + model.max_seq_len * model.d_model
    return {"block": block, "outside": is_first * first + is_last * (norm + head)}
