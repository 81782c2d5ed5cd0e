"""Launchers that start ranks again by themselves, with as many as there are: the run carries on, on the same data."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from composer.core import Callback

from tests.helpers.launch import ROOT, free_port, train
from tests.helpers.tiny import read_metrics, tiny_config, values, write_config

pytestmark = [pytest.mark.long, pytest.mark.multiprocess]
FRESH_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""For torchrun, which otherwise hands the ranks it starts again the store of those before: gloo waits for these."""
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


NODE = ["unshare", "-rm", "sh", "-c", 'mount -t tmpfs none /dev/shm && exec "$@"', "sh"]
"""Before a command: shared memory of its own, as a machine has it. The data set's is named alike on all nodes."""


class Launcher:
    """torchrun with the training script, in a process group of its own that does not outlive the test."""

    def __init__(self, folder, name, *arguments, before=()):
        self.output = folder / f"{name}.out"
        with self.output.open("w") as output:
            self.process = subprocess.Popen(
                [*before, *TORCHRUN, *map(str, arguments)],
                cwd=folder,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **FRESH_STORE},
                start_new_session=True,
            )

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for process in self.ranks():  # torchrun gives each rank a session of its own
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def ranks(self):
        with contextlib.suppress(psutil.NoSuchProcess):
            return [
                child
                for child in psutil.Process(self.process.pid).children()
                if any(part.endswith("train.py") for part in child.cmdline())
            ]
        return []

    def wait(self):
        return self.process.wait(timeout=300)


def wait_for_batch(run, batch, *launchers):
    """Until that batch is logged; the launchers must be alive until then."""
    deadline = time.monotonic() + 240
    log = run / "metrics.jsonl"
    while not log.exists() or log.read_text().count("\n") < batch:
        dead = any(launcher.process.poll() is not None for launcher in launchers)
        assert not dead and time.monotonic() < deadline, "\n".join(each.output.read_text() for each in launchers)
        time.sleep(0.05)


SCRIPT = ROOT / "scripts/train.py"
BATCHES = 60
LOST_AFTER = 12


class Hold(Callback):
    """A run that is to lose a rank after a batch goes no further until it has: then there is this file."""

    def batch_start(self, state, logger):
        while int(state.timestamp.batch) == LOST_AFTER and not Path("lost").exists():
            time.sleep(0.01)


HELD = {"callbacks": {f"python:{__name__}:Hold": {}}}


@pytest.fixture(scope="module")
def config(data):
    return tiny_config(data, autoresume=True, max_duration=f"{BATCHES}ba", save_interval="5ba", dist_timeout=60)


@pytest.fixture(scope="module")
def expected(config, tmp_path_factory):
    """The log of the same run when nothing happens to it."""
    folder = tmp_path_factory.mktemp("whole")
    train([write_config(folder / "tiny.yaml", config)], folder, 2).check()
    return read_metrics(folder / "runs/tiny")


def test_after_a_rank_was_killed_torchrun_starts_all_again_and_nothing_is_lost(tmp_path, config, expected):
    path = write_config(tmp_path / "tiny.yaml", {**config, **HELD})
    options = ("--standalone", "--nproc_per_node=2", "--max-restarts=2")
    with Launcher(tmp_path, "tiny", *options, SCRIPT, path) as launcher:
        wait_for_batch(tmp_path / "runs/tiny", LOST_AFTER, launcher)
        launcher.ranks()[1].kill()
        (tmp_path / "lost").touch()
        assert launcher.wait() == 0, launcher.output.read_text()
    assert "carrying on from runs/tiny/checkpoints/ba" in launcher.output.read_text()
    records = read_metrics(tmp_path / "runs/tiny")
    for key in ("batch", "data/digest", "loss/train/total"):
        assert values(records, key) == values(expected, key)
    assert {record["launch"] for record in records} == {1, 2}
    assert json.loads((tmp_path / "runs/tiny/status.json").read_text())["status"] == "done"


def test_when_a_node_is_lost_the_run_goes_on_with_the_other(tmp_path, config, expected):
    """Two agents take the parts of two nodes, with one rank each."""
    if not shutil.which("unshare") or subprocess.run([*NODE, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine does not let a process have shared memory of its own")
    path = write_config(tmp_path / "tiny.yaml", {**config, **HELD})
    options = (
        *("--nnodes=1:2", "--nproc_per_node=1", "--max-restarts=3", "--rdzv-backend=c10d", "--rdzv-id=tiny"),
        f"--rdzv-endpoint=localhost:{free_port()}",
        *("--monitor-interval=0.5", SCRIPT, path),
    )
    with (
        # The rendezvous is on the node that stays.
        Launcher(tmp_path, "first", "--rdzv-conf=last_call_timeout=5,is_host=true", *options, before=NODE) as first,
        Launcher(tmp_path, "second", "--rdzv-conf=last_call_timeout=5,is_host=false", *options, before=NODE) as second,
    ):
        wait_for_batch(tmp_path / "runs/tiny", LOST_AFTER, first, second)
        lost = second.ranks()
        second.process.kill()
        for rank in lost:
            rank.kill()
        (tmp_path / "lost").touch()
        assert first.wait() == 0, first.output.read_text()
        assert "devices 2 -> 1" in first.output.read_text()
    records = read_metrics(tmp_path / "runs/tiny")
    assert values(records, "batch") == values(expected, "batch")
    assert values(records, "data/digest") == values(expected, "data/digest")
    assert values(records, "loss/train/total") == pytest.approx(values(expected, "loss/train/total"), abs=1e-3)
