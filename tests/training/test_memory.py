"""A step for which memory does not suffice."""

import json
import re
from pathlib import Path

import torch
from composer import Callback

from tests.helpers.launch import train
from tests.helpers.tiny import tiny_config, write_config


class Greed(Callback):
    """Asks for more than any machine has: torch's allocator is refused it, and says so in its own words."""

    def before_forward(self, state, logger):
        if int(state.timestamp.batch) == 2 and torch.distributed.get_rank() == 1:
            torch.empty(1 << 47, dtype=torch.uint8)


def test_running_out_of_memory_says_what_was_needed_what_there_was_and_what_would_help(tmp_path, data):
    settings = {"device_train_microbatch_size": 2, "callbacks": {f"python:{__name__}:Greed": {}}}
    config = tiny_config(data, run_name="greedy", max_duration="4ba", **settings)
    result = train([write_config(tmp_path / "greedy.yaml", config)], tmp_path, 2)
    assert result.exit_codes[1] == 2
    line = next(line for line in result.outputs[1].splitlines() if line.startswith("error: "))
    assert re.fullmatch(
        r"error: out of memory on rank 1 in batch 2: 131,072.00 GiB more asked for with [\d.]+ of [\d.]+ GiB in "
        r"use; by the estimate 2 x \d+ tokens at a time take [\d.]+ GiB; what helps most: (\S+: \S+ \(saves about "
        r"[\d.]+ GiB\)(, )?|twice as many devices \(saves about [\d.]+ GiB\)(, )?){3}",
        line,
    ), line
    assert "Traceback" not in result.outputs[1]
    status = json.loads(Path(tmp_path, "runs/greedy/status.json").read_text())
    assert status["status"] == "failed"
