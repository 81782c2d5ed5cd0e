"""Faults in the middle of a schedule end with the words, exit codes and guarantees of a run without stages."""

import json
import os
import re
import signal
from typing import Any

import pytest
import torch
from composer.core import Callback

from tests.helpers.launch import train
from tests.helpers.tiny import read_metrics, tiny_config, values, write_config, write_data

pytestmark = pytest.mark.multiprocess

BATCH, MICROBATCH = 4, 3
STAGES = {"pp_config": {"pipeline_parallel_degree": 2, "schedule": "1f1b"}, "device_train_microbatch_size": 2}


class InTheMiddle(Callback):
    """Does something to the last stage as one of its microbatches goes through a block, others being on their way."""

    def fit_start(self, state, logger):
        self.num_seen = 0
        block = next(module for name, module in state.model.named_modules() if re.search(r"blocks\.\d+$", name))
        block.register_forward_pre_hook(lambda module, arguments: self._look(state))

    def _look(self, state):
        if int(state.timestamp.batch) + 1 == BATCH and int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
            self.num_seen += 1
            if self.num_seen == MICROBATCH:
                self.act()


class Kill(InTheMiddle):
    def act(self):
        os.kill(os.getpid(), signal.SIGKILL)


class Preempt(InTheMiddle):
    def act(self):
        os.kill(os.getpid(), signal.SIGTERM)


class Greed(InTheMiddle):
    """torch's allocator refuses it, and says so in its own words."""

    def act(self):
        torch.empty(1 << 47, dtype=torch.uint8)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("data"))


def begin(tmp_path, data, kind: type, name: str, **stages: Any):
    changes = {"model__n_layers": 4, "max_duration": "8ba", "save_interval": "2ba", "run_name": name}
    config = tiny_config(data, callbacks={f"python:{__name__}:{kind.__name__}": {}}, **changes) | STAGES
    config["pp_config"] = {**config["pp_config"], **stages}
    path = write_config(tmp_path / f"{name}.yaml", config)
    return path, train([path], tmp_path, 2), tmp_path / "runs" / name


@pytest.mark.slow
def test_a_stage_that_is_killed_stops_the_others_which_say_why_and_the_last_save_carries_on(tmp_path, data):
    path, result, run = begin(tmp_path, data, Kill, "killed")
    assert result.exit_codes == [1, -signal.SIGKILL]
    assert "error: lost contact with another rank" in result.output
    status = json.loads((run / "status.json").read_text())
    assert (status["status"], status["batch"]) == ("failed", BATCH - 1)
    train([path, "callbacks=null", "autoresume=true"], tmp_path, 2).check()
    train([path, "callbacks=null", "run_name=whole"], tmp_path, 2).check()
    for key in ("data/digest", "loss/train/total", "grad_norm"):
        assert values(read_metrics(run), key) == values(read_metrics(tmp_path / "runs/whole"), key)


@pytest.mark.long
def test_a_stage_that_is_preempted_lets_the_schedule_end_and_all_save_and_leave(tmp_path, data):
    _, result, run = begin(tmp_path, data, Preempt, "preempted")
    assert result.exit_codes == [75, 75]
    assert f"preempted by SIGTERM at batch {BATCH}, saved as ba{BATCH}" in result.output
    assert (run / f"checkpoints/ba{BATCH}/manifest.json").exists()


@pytest.mark.long
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_a_stage_without_memory_says_what_was_needed_and_what_would_help(tmp_path, data, schedule):
    _, result, run = begin(tmp_path, data, Greed, "greedy", schedule=schedule)
    assert result.exit_codes == [2, 2]  # a rank that lost its peer ends as the peer did
    line = next(line for line in result.outputs[1].splitlines() if line.startswith("error: "))
    assert line.startswith(f"error: out of memory on rank 1 in batch {BATCH}: 131,072.00 GiB more were asked for")
    assert "what helps most: " in line
    for output in result.outputs:
        assert "Traceback" not in output and "Full Schedule" not in output
    assert json.loads((run / "status.json").read_text())["status"] == "failed"
