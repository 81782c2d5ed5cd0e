"""The record of each launch beside checkpoints that are outside the run folder."""

import json
import os
import signal
from pathlib import Path

import pytest
from composer.core import Callback

from tests.helpers.launch import train
from tests.helpers.tiny import tiny_config, write_config

pytestmark = pytest.mark.multiprocess


class EndAt(Callback):
    """Ends the launch at the beginning of a batch: it is killed, asked to stop, or fails."""

    def __init__(self, batch: int, how: str):
        self.batch, self.how = batch, how

    def batch_start(self, state, logger):
        if int(state.timestamp.batch) != self.batch - 1:
            return
        if self.how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how == "failed":
            raise RuntimeError("out of luck")
        Path("runs/tiny/STOP").touch()


def launch(tmp_path, data, machine, **changes):
    """Launch the run on one of several machines, which share the folder of checkpoints alone."""
    folder = tmp_path / machine
    folder.mkdir(exist_ok=True)
    changes = {"save_folder": str(tmp_path / "shared"), "autoresume": True, "max_duration": "8ba", **changes}
    return train([write_config(folder / "tiny.yaml", tiny_config(data, **changes))], folder)


def records(tmp_path):
    # A launch that is killed while it writes a record leaves a hidden file beside it.
    return [json.loads(path.read_text()) for path in sorted((tmp_path / "shared/launches").glob("0*.json"))]


def end_at(batch, how):
    return {"callbacks": {f"python:{__name__}:EndAt": {"batch": batch, "how": how}}}


def test_each_launch_of_a_moved_run_leaves_a_record_of_its_end(tmp_path, data):
    launch(tmp_path, data, "a", stop_after="2ba").check()
    assert launch(tmp_path, data, "b", save_interval="1ba", **end_at(5, "killed")).exit_codes == [-9]
    elsewhere = {"boot": "another", "host": "gpu-17"}
    claim = tmp_path / "shared/.leases/00000002.json"
    claim.write_text(json.dumps(json.loads(claim.read_text()) | elsewhere))
    failed = launch(tmp_path, data, "a", takeover=True, **end_at(6, "failed"))
    assert failed.exit_codes == [1]
    assert launch(tmp_path, data, "b", **end_at(7, "asked")).exit_codes == [75]
    launch(tmp_path, data, "a").check()

    facts = [(one["status"], one["batch"], one["last_saved"]) for one in records(tmp_path)]
    first, killed, third, fourth, last = records(tmp_path)
    assert (killed["status"], killed["began_at_batch"]) == ("running", 2)
    del facts[1]  # how far it came before it was killed is up to the disk
    assert facts == [("stopped", 2, "ba2"), ("failed", 5, "ba5"), ("preempted", 7, "ba7"), ("done", 8, "ba8")]
    assert third["reason"] == "RuntimeError: out of luck" and fourth["reason"].startswith("preempted by the file STOP")
    assert first["began_at"] < first["saved_at"] <= first["written_at"] < last["began_at"]
    assert last["process"]["pid"] and last["max_duration"] == "8ba"
    assert last["loss/train/total"] > 0 and last["throughput/tokens_per_sec"] > 0
    launches = [json.loads(line) for line in (tmp_path / "a/runs/tiny/launches.jsonl").read_text().splitlines()]
    assert [one["began_at"] for one in (first, third, last)] == [
        event["time"] for event in launches if event["status"] == "running"
    ]


def test_a_run_that_saves_into_its_run_folder_writes_no_record(tmp_path, data):
    launch(tmp_path, data, "a", save_folder=None, max_duration="1ba").check()
    assert not list(tmp_path.rglob("launches"))
    assert (tmp_path / "a/runs/tiny/checkpoints/ba1").is_dir()
