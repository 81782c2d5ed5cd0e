"""Schedules of pipelines: each device's passes are those of torch's."""

import re
from itertools import accumulate

import pytest
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.testing._internal.distributed import fake_pg  # noqa: F401 - registers the backend

from llmfoundry_layouts.pipeline import SCHEDULES as SCHEDULE_OF_TORCH
from llmfoundry_layouts.schedule import list_passes
from llmfoundry_lite.config.sharding_schema import PipelineConfig


@pytest.mark.parametrize(
    ("schedule", "num_runs"), [("interleaved", 3), ("zero_bubble", 1), ("zero_bubble", 2), ("zbv", 2)]
)
def test_devices_do_what_they_do_in_torchs_schedules(schedule, num_runs):
    """torch has no list for gpipe and 1f1b; here each is a line or two."""
    for num_stages in (2, 3, 4):
        pipeline = PipelineConfig(pipeline_parallel_degree=num_stages, schedule=schedule, virtual_stages=num_runs)
        for num_microbatches in filter(pipeline.takes_microbatches, range(num_stages, 4 * num_stages)):
            for rank in range(num_stages):
                theirs = order_of_torch(schedule, rank, num_stages, num_microbatches, num_runs)
                ours = list_passes(schedule, rank, num_stages, num_microbatches, num_runs)
                assert [(one.kind, one.stage, one.microbatch) for one in ours] == theirs


def order_of_torch(schedule, rank, num_stages, num_microbatches, num_runs) -> list[tuple[str, int, int]]:
    dist.init_process_group("fake", rank=rank, world_size=num_stages, store=dist.HashStore())
    runs = [rank, 2 * num_stages - 1 - rank] if schedule == "zbv" else range(rank, num_stages * num_runs, num_stages)
    try:
        stages = [PipelineStage(torch.nn.Identity(), run, num_stages * num_runs, torch.device("cpu")) for run in runs]
        made = SCHEDULE_OF_TORCH[schedule](stages, num_microbatches, loss_fn=torch.nn.functional.l1_loss)
    finally:
        dist.destroy_process_group()
    kinds = {"I": "B"}  # the gradient of the inputs alone
    actions = (re.fullmatch(r"(\d+)([FIBW])(\d+)", str(action)) for action in made.pipeline_order[rank] if action)
    return [(kinds.get(found[2], found[2]), int(found[1]), int(found[3])) for found in actions if found]


@pytest.mark.parametrize(
    ("schedule", "num_runs", "expected"),
    [
        *(("gpipe", 1, [8, 8, 8, 8]), ("1f1b", 1, [4, 3, 2, 1]), ("interleaved", 2, [11, 9, 7, 5])),
        *(("zero_bubble", 1, [4, 4, 4, 4]), ("zbv", 2, [8, 8, 8, 8])),
    ],
)
def test_so_many_microbatches_are_kept_until_their_last_pass(schedule, num_runs, expected):
    """Counted in runs of blocks, of which zbv and interleaved have two on each device."""
    last = "W" if schedule in ("zero_bubble", "zbv") else "B"
    kept = [
        list(accumulate((one.kind == "F") - (one.kind == last) for one in list_passes(schedule, rank, 4, 8, num_runs)))
        for rank in range(4)
    ]
    assert [max(counts) for counts in kept] == expected
