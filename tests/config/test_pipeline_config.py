import pytest

from llmfoundry_lite.config.sharding_schema import PipelineConfig


@pytest.mark.parametrize(
    ("schedule", "taken"),
    [
        ("gpipe", [1, 2, 3, 4, 5, 6, 7, 8, 9]),
        ("1f1b", [4, 5, 6, 7, 8, 9]),
        ("interleaved", [4, 5, 6, 7, 8]),
        ("zbv", [4, 5, 6, 7, 8, 9]),
    ],
)
def test_a_schedule_takes_so_many_microbatches(schedule, taken):
    pipeline = PipelineConfig(pipeline_parallel_degree=4, schedule=schedule)
    assert [count for count in range(1, 10) if pipeline.takes_microbatches(count)] == taken


def test_microbatches_are_about_four_for_each_stage_unless_said():
    default = PipelineConfig(pipeline_parallel_degree=2).default_num_microbatches
    assert [default(n) for n in (2, 6, 8, 16, 20, 24, 64)] == [2, 6, 8, 8, 10, 8, 8]
    assert default(5) == 5
