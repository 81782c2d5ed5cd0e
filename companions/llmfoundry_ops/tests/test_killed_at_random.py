"""A relay, launches and their processes, killed at random while a run moves between three "clusters" of this machine.

Nothing may be lost: every batch is trained once in the run that counts, on the data that it would have seen at home.
"""

import itertools
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest
import yaml

from llmfoundry_lite.checkpoint.store import open_checkpoint
from llmfoundry_ops import processes
from llmfoundry_ops.journal import read_allocations
from llmfoundry_ops.relay import FOLDER
from tests.helpers.launch import ROOT, train
from tests.helpers.tiny import read_metrics, tiny_config, values, write_config, write_data

TRAIN = f"{sys.executable} -m llmfoundry_lite train"
COMPOSER = f"{sys.executable} -m composer.cli"
OVERLAYS = {
    "a": {"device_train_microbatch_size": 2, "fsdp_config": {"sharding_strategy": "FULL_SHARD"}},
    "b": {"device_train_microbatch_size": 8, "fsdp_config": {"sharding_strategy": "NO_SHARD"}},
    "c": {"device_train_microbatch_size": 4, "fsdp_config": {"sharding_strategy": "SHARD_GRAD_OP"}},
}
LAUNCHERS = {"a": f"{TRAIN} -n 2", "b": TRAIN, "c": f"{COMPOSER} -n 2 {ROOT}/scripts/train.py"}
VICTIMS = ("relay", "launch", "process")
"""Processes that are killed: the relay; all of a launch, as when its machine goes; or one of a launch."""


class Experiment:
    """A run of `num_batches` in `folder`, moved every `every` batches; and whoever kills parts of it."""

    def __init__(self, folder: Path, num_batches: int, every: int, seed: int):
        self.folder, self.run = folder, folder / "runs/tiny"
        self.random = random.Random(seed)
        self.faults: Counter[str] = Counter()
        data = write_data(folder / "data")
        changes = {"max_duration": f"{num_batches}ba", "save_interval": "5ba", "save_num_checkpoints_to_keep": 3}
        self.config = tiny_config(data, **changes)
        write_config(folder / "run.yaml", self.config)
        sites = {}
        for name, overlay in OVERLAYS.items():
            write_config(folder / f"{name}.yaml", {"overlay": "hardware", **overlay})
            sites[name] = {"launch": f"{LAUNCHERS[name]} run.yaml {name}.yaml {{arguments}}", "price": 3600.0}
        relay = {"run": "runs/tiny", "policy": {"every": f"{every}ba"}, "sites": sites, "rest": "0.2s"}
        (folder / "relay.yaml").write_text(yaml.safe_dump(relay))
        self.output = (folder / "relay.txt").open("ab")
        self.relay = self.begin()

    def begin(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "llmfoundry_lite", "relay", "relay.yaml"]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled"}
        pipes = {"stdout": self.output, "stderr": subprocess.STDOUT}
        return subprocess.Popen(command, cwd=self.folder, env=environment, **pipes)

    def of_launch(self) -> list[psutil.Process]:
        """Return a launch's processes, the oldest first: a shell, its launcher, what that has begun."""
        allocations = read_allocations(self.run)
        if not allocations or allocations[-1].over is not None:
            return []
        return processes.find((self.run / FOLDER / f"{allocations[-1].number}.code").resolve())

    def strike(self, victim: str) -> bool:
        """Kill a victim. Return whether there was one."""
        if victim == "relay":
            self.relay.kill()
            self.relay.wait()
            self.relay = self.begin()
        else:
            found = self.of_launch()
            struck = found if victim == "launch" else found and [self.random.choice(found)]
            if not struck:
                return False
            processes.terminate(struck, signal.SIGKILL)
        self.faults[victim] += 1
        return True

    def end(self, seconds: float) -> None:
        assert self.relay.wait(seconds) == 0, (self.folder / "relay.txt").read_text()

    def check(self, num_batches: int, tmp_path: Path) -> str:
        """Compare with the run that was never moved. Return what happened, in a line."""
        train(["run.yaml", "run_name=whole"], self.folder).check()
        moved, whole = read_metrics(self.run), read_metrics(self.folder / "runs/whole")
        assert [record["batch"] for record in moved] == list(range(1, num_batches + 1))
        assert values(moved, "data/digest") == values(whole, "data/digest")
        assert values(moved, "lr") == values(whole, "lr")
        apart = max(
            abs(ours - theirs)
            for ours, theirs in zip(values(moved, "loss/train/total"), values(whole, "loss/train/total"), strict=True)
        )
        assert apart < 0.02
        segments = open_checkpoint(self.run / f"checkpoints/ba{num_batches}").manifest.segments
        assert [segments[0].first_batch, segments[-1].last_batch] == [1, num_batches]
        assert all(b.first_batch == a.last_batch + 1 for a, b in itertools.pairwise(segments))
        allocations = read_allocations(self.run)
        assert all(one.over is not None for one in allocations) and allocations[-1].ended == "done"
        trained = (self.run / "metrics.jsonl").read_bytes().count(b"\n")
        kinds = ", ".join(f"{number} of a {victim}" for victim, number in sorted(self.faults.items()))
        ends = ", ".join(
            f"{number} {ended}" for ended, number in sorted(Counter(one.ended for one in allocations).items())
        )
        return (
            f"{self.faults.total()} kills ({kinds}), {len(allocations)} allocations ({ends}): {num_batches} batches, "
            f"{trained - num_batches} trained again, all digests equal, losses at most {apart:.1e} nats apart"
        )


@pytest.fixture
def experiment(tmp_path):
    made = []

    def begin(*arguments):
        made.append(Experiment(tmp_path, *arguments))
        return made[0]

    yield begin
    for one in made:
        one.relay.kill()
        one.relay.wait()
        processes.terminate(one.of_launch(), signal.SIGKILL)
        one.output.close()


@pytest.mark.slow
@pytest.mark.fault
@pytest.mark.multiprocess
def test_a_relay_and_a_launch_are_killed_once_each(experiment, tmp_path):
    one = experiment(60, 30, 0)
    deadline = time.monotonic() + 120
    for victim in ("relay", "launch"):
        while not (one.of_launch() and one.strike(victim)):
            assert time.monotonic() < deadline and one.relay.poll() is None
            time.sleep(0.05)
    one.end(240)
    print(one.check(60, tmp_path))


@pytest.mark.long
@pytest.mark.fault
@pytest.mark.multiprocess
def test_nothing_is_lost_when_relay_launches_and_processes_are_killed_twenty_times(experiment, tmp_path):
    one = experiment(320, 40, 20)
    pause, deadline = threading.Event(), time.monotonic() + 420
    while one.faults.total() < 20 and one.relay.poll() is None:
        assert time.monotonic() < deadline, one.faults
        pause.wait(one.random.uniform(1.0, 14.0))  # the moment is what is random
        one.strike(one.random.choice(VICTIMS))
    assert one.faults.total() == 20
    one.end(deadline + 60 - time.monotonic())
    print(one.check(320, tmp_path))
