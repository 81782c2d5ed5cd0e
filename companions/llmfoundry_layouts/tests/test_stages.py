import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmfoundry_layouts.stages import assign_stages, count_block_and_head_parameters, divide_blocks
from llmfoundry_lite.config.model_schema import FFNConfig, ModelConfig
from llmfoundry_lite.config.sharding_schema import PipelineConfig

MPT_7B = ModelConfig(d_model=4096, n_heads=32, n_layers=32, vocab_size=50432)
SCHEDULES = {"gpipe": (1,), "1f1b": (1,), "interleaved": (2, 3), "zero_bubble": (1, 2), "zbv": (2,)}
pipelines = st.sampled_from([(name, runs) for name, choices in SCHEDULES.items() for runs in choices])


@settings(deadline=None)
@given(pipelines, st.integers(2, 6), st.integers(0, 20), st.sampled_from([1, 1000, 100_000]))
def test_every_block_is_on_one_stage_in_order_and_each_rank_has_as_many_stages(kind, degree, more, vocab_size):
    schedule, num_runs = kind
    pipeline = PipelineConfig(pipeline_parallel_degree=degree, schedule=schedule, virtual_stages=num_runs)
    model = ModelConfig(d_model=64, n_heads=4, n_layers=degree * num_runs + more, vocab_size=vocab_size)
    ranks = assign_stages(model, pipeline)
    assert {len(stages) for stages in ranks} == {num_runs}
    stages = sorted(itertools.chain(*ranks), key=lambda stage: stage.index)
    assert [stage.index for stage in stages] == list(range(degree * num_runs))
    assert [block for stage in stages for block in stage.blocks] == list(range(model.n_layers))
    assert all(len(stage.blocks) for stage in stages)
    assert (ranks[0][0].is_first, ranks[0 if schedule == "zbv" else -1][-1].is_last) == (True, True)


def test_the_ends_get_fewer_blocks_for_their_embedding_and_head():
    assert divide_blocks(MPT_7B, 2) == [16, 16]
    assert divide_blocks(MPT_7B, 4) == [7, 9, 9, 7]
    assert divide_blocks(ModelConfig(n_layers=4, vocab_size=1), 2) == [2, 2]


@pytest.mark.parametrize(("ffn_type", "num_matrices"), [("mptmlp", 2), ("mptglu", 3)])
def test_a_block_costs_the_parameters_of_its_matrices(ffn_type, num_matrices):
    model = ModelConfig(d_model=64, n_heads=4, vocab_size=95, ffn_config=FFNConfig(ffn_type=ffn_type))
    assert count_block_and_head_parameters(model) == (4 * 64**2 + num_matrices * 64 * 256, 64 * 95)


def test_blocks_are_divided_as_given():
    given = PipelineConfig(pipeline_parallel_degree=2, schedule="interleaved", blocks=[1, 2, 20, 9])
    assert [[stage.blocks for stage in stages] for stages in assign_stages(MPT_7B, given)] == [
        [range(1), range(3, 23)],
        [range(1, 3), range(23, 32)],
    ]


def test_a_stage_costs_no_more_than_any_other_way_of_dividing():
    model = ModelConfig(d_model=128, n_heads=4, n_layers=9, vocab_size=3_000)
    block, end = 12 * 128**2, 3_000 * 128

    def costliest(counts):
        costs = [count * block for count in counts]
        return max([costs[0] + end, *costs[1:-1], costs[-1] + end])

    ways = [way for way in itertools.product(range(1, 10), repeat=4) if sum(way) == 9]
    assert costliest(divide_blocks(model, 4)) == min(map(costliest, ways))
