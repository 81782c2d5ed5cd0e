"""A step for which memory does not suffice."""

import json
import re
import resource
from pathlib import Path

import psutil
import torch
from composer import Callback

from tests.helpers.launch import _train, launch, train
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
        r"error: out of memory on rank 1 in batch 3: 131,072.00 GiB more were asked for with [\d.]+ of [\d.]+ GiB in "
        r"use; by the estimate 2 x \d+ tokens at a time take [\d.]+ GiB; what helps most: (\S+: \S+ \(saves about "
        r"[\d.]+ GiB\)(, )?|twice as many devices \(saves about [\d.]+ GiB\)(, )?){3}",
        line,
    ), line
    assert "Traceback" not in result.outputs[1]
    status = json.loads(Path(tmp_path, "runs/greedy/status.json").read_text())
    assert status["status"] == "failed"


def train_with_2_gib_more(arguments):
    limit = psutil.Process().memory_info().vms + (2 << 30)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    _train(arguments)


def test_memory_that_does_not_suffice_for_the_model_is_told_too(tmp_path, data):
    config = tiny_config(data, model__d_model=8192, model__n_heads=64, model__n_layers=16)
    path = write_config(tmp_path / "large.yaml", config)
    result = launch(train_with_2_gib_more, ([path],), tmp_path)
    assert result.exit_codes == [2], result.output
    pattern = (
        r"^error: out of memory on rank 0 while the run was built: [\d.]+ [GM]iB more were asked for .* 8 x 32 "
        r"tokens .*what helps most: "
    )
    assert re.search(pattern, result.output, re.MULTILINE), result.output
    assert "Traceback" not in result.output
