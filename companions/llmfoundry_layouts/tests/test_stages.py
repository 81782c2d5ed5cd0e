"""Stages of a pipeline: how a model's blocks are divided into them, and which rank gets which."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmfoundry_layouts.stages import assign_stages, count_block_and_head_parameters, divide_blocks
from llmfoundry_lite.config.model_schema import FFNConfig, ModelConfig
from llmfoundry_lite.config.sharding_schema import PipelineConfig

MPT_7B = ModelConfig(d_model=4096, n_heads=32, n_layers=32, vocab_size=50432)


# ------------------------------------------------------------------------------- any schedule, any number of blocks


SCHEDULES = [
    ("gpipe", 1),
    ("1f1b", 1),
    ("interleaved", 2),
    ("interleaved", 3),
    ("zero_bubble", 1),
    ("zero_bubble", 2),
    ("zbv", 2),
]
"""Pairs of a schedule and the number of stages that it gives to each rank."""


@st.composite
def pipelines_and_models(draw):
    """A pipeline, and a model with at least one block for each of its stages."""
    schedule, num_stages_per_rank = draw(st.sampled_from(SCHEDULES))
    num_ranks = draw(st.integers(2, 6))
    pipeline = PipelineConfig(pipeline_parallel_degree=num_ranks, schedule=schedule, virtual_stages=num_stages_per_rank)

    num_blocks = num_ranks * num_stages_per_rank + draw(st.integers(0, 20))
    vocab_size = draw(st.sampled_from([1, 1000, 100_000]))  # the embedding costs less than a block, or much more
    model = ModelConfig(d_model=64, n_heads=4, n_layers=num_blocks, vocab_size=vocab_size)
    return pipeline, model


def in_the_models_order(stages_of_ranks):
    """All ranks' stages in one list."""
    return sorted(itertools.chain(*stages_of_ranks), key=lambda stage: stage.index)


@settings(deadline=None)
@given(pipelines_and_models())
def test_each_rank_has_the_same_number_of_stages(pipeline_and_model):
    pipeline, model = pipeline_and_model
    stages_of_ranks = assign_stages(model, pipeline)
    assert len(stages_of_ranks) == pipeline.pipeline_parallel_degree
    for stages in stages_of_ranks:
        assert len(stages) == pipeline.virtual_stages


@settings(deadline=None)
@given(pipelines_and_models())
def test_each_stage_is_on_one_rank(pipeline_and_model):
    pipeline, model = pipeline_and_model
    stages = in_the_models_order(assign_stages(model, pipeline))
    num_stages = pipeline.pipeline_parallel_degree * pipeline.virtual_stages
    assert [stage.index for stage in stages] == list(range(num_stages))


@settings(deadline=None)
@given(pipelines_and_models())
def test_each_block_is_on_one_stage_in_order_and_no_stage_is_empty(pipeline_and_model):
    pipeline, model = pipeline_and_model
    stages = in_the_models_order(assign_stages(model, pipeline))
    blocks = list(itertools.chain(*(stage.blocks for stage in stages)))
    assert blocks == list(range(model.n_layers))
    for stage in stages:
        assert len(stage.blocks) > 0


@settings(deadline=None)
@given(pipelines_and_models())
def test_the_first_rank_has_the_first_stage_and_the_last_rank_the_last(pipeline_and_model):
    """The schedule zbv goes through the ranks and back, so that the first rank has the last stage too."""
    pipeline, model = pipeline_and_model
    stages_of_ranks = assign_stages(model, pipeline)
    assert stages_of_ranks[0][0].is_first
    if pipeline.schedule == "zbv":
        assert stages_of_ranks[0][-1].is_last
    else:
        assert stages_of_ranks[-1][-1].is_last


def test_blocks_are_divided_as_the_config_says():
    """Two ranks have two stages each: rank 0 the first and the third, rank 1 the second and the fourth."""
    pipeline = PipelineConfig(pipeline_parallel_degree=2, schedule="interleaved", blocks=[1, 2, 20, 9])
    first_rank, second_rank = assign_stages(MPT_7B, pipeline)
    assert [stage.blocks for stage in first_rank] == [range(1), range(3, 23)]
    assert [stage.blocks for stage in second_rank] == [range(1, 3), range(23, 32)]


# ------------------------------------------------------------------------------------------ blocks of each stage


def test_the_ends_get_fewer_blocks_for_their_embedding_and_head():
    assert divide_blocks(MPT_7B, 4) == [7, 9, 9, 7]


def test_two_stages_share_the_blocks_equally():
    """Both are ends: one has the embedding and the other the head, which cost the same."""
    assert divide_blocks(MPT_7B, 2) == [16, 16]
    assert divide_blocks(ModelConfig(n_layers=4, vocab_size=1), 2) == [2, 2]


def test_the_costliest_stage_is_as_cheap_as_in_any_other_division():
    """Against all divisions of nine blocks into four stages."""
    width = 128
    vocab_size = 3_000
    num_blocks = 9
    num_stages = 4
    model = ModelConfig(d_model=width, n_heads=4, n_layers=num_blocks, vocab_size=vocab_size)
    block_cost = 12 * width**2
    embedding_cost = vocab_size * width  # that of the head, too

    def cost_of_costliest_stage(num_blocks_per_stage):
        costs = [count * block_cost for count in num_blocks_per_stage]
        costs[0] += embedding_cost
        costs[-1] += embedding_cost
        return max(costs)

    all_counts = itertools.product(range(1, num_blocks + 1), repeat=num_stages)
    divisions = [counts for counts in all_counts if sum(counts) == num_blocks]
    lowest_cost = min(cost_of_costliest_stage(division) for division in divisions)
    assert cost_of_costliest_stage(divide_blocks(model, num_stages)) == lowest_cost


@pytest.mark.parametrize(("ffn_type", "num_matrices"), [("mptmlp", 2), ("mptglu", 3)])
def test_a_block_and_the_head_cost_the_parameters_of_their_matrices(ffn_type, num_matrices):
    width = 64
    ffn_width = 4 * width
    vocab_size = 95
    ffn_config = FFNConfig(ffn_type=ffn_type)
    model = ModelConfig(d_model=width, n_heads=4, vocab_size=vocab_size, ffn_config=ffn_config)

    block_cost, head_cost = count_block_and_head_parameters(model)
    num_in_attention = 4 * width * width  # matrices of queries, keys, values and output
    num_in_feed_forward = num_matrices * width * ffn_width
    assert block_cost == num_in_attention + num_in_feed_forward
    assert head_cost == vocab_size * width
