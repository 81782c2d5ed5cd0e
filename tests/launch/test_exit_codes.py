"""Exit codes and messages of `composer`, whose launcher ends the other ranks by SIGTERM when one has failed; and of
launches whose terminal closes."""

import os
import pty
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from llmfoundry_lite.ranks.status import read_status
from tests.helpers.launch import ROOT
from tests.helpers.present import needs
from tests.helpers.tiny import tiny_config, write_config

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]

COMPOSER = Path(sys.executable).parent / "composer"
TRAIN = [ROOT / "scripts/train.py"]
PIPES = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}


@pytest.fixture
def begin(tmp_path):
    """Begin a launch, which ends with the test."""
    begun = []

    def begin(*arguments, num_ranks=4):
        place = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
        begun.append(subprocess.Popen([COMPOSER, "-n", str(num_ranks), *arguments], cwd=tmp_path, env=place, **PIPES))
        return begun[-1]

    yield begin
    for launcher in begun:
        for process in (
            [*psutil.Process(launcher.pid).children(recursive=True), launcher] if not launcher.poll() else []
        ):
            process.kill()


def end(launcher):
    output, _ = launcher.communicate(timeout=300)
    return launcher.returncode, output


def ranks_that_listen(launcher):
    """Wait until all ranks have handlers of SIGTERM, and return them in order."""
    while launcher.poll() is None:
        ranks = sorted(psutil.Process(launcher.pid).children(), key=lambda rank: rank.pid)
        caught = [None]
        with suppress(FileNotFoundError, ProcessLookupError):  # a child of the launcher that has ended
            caught = [re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{rank.pid}/status").read_text()) for rank in ranks]
        if len(ranks) == 4 and all(one and int(one[1], 16) & 1 << (signal.SIGTERM - 1) for one in caught):
            return ranks
    raise AssertionError(launcher.communicate()[0])


@pytest.mark.parametrize(
    ("program", "error"),
    [
        (
            [*TRAIN, "mpt-125m", "optimizer.learning_rate=1"],
            "error: command line: optimizer.learning_rate: unknown key",
        ),
        ([*TRAIN, "nowhere.yaml"], "error: nowhere.yaml"),
        ([ROOT / "scripts/eval.py", "models.a=nowhere"], "error: command line: no YAML file given"),
    ],
)
def test_a_mistake_is_told_once_and_ends_the_launch_with_2(begin, program, error):
    code, output = end(begin(*program))
    assert (code, output.count(error), output.count("preempted")) == (2, 1, 0), output


def test_ranks_that_are_preempted_while_they_start_end_the_launch_with_75(begin, tmp_path, data):
    launcher = begin(*TRAIN, write_config(tmp_path / "tiny.yaml", tiny_config(data)))
    for rank in ranks_that_listen(launcher):
        rank.terminate()
    code, output = end(launcher)
    assert (code, output.count("preempted by SIGTERM")) == (75, 1), output


def test_a_rank_that_is_killed_while_it_starts_ends_the_launch_with_1(begin, tmp_path, data):
    launcher = begin(*TRAIN, write_config(tmp_path / "tiny.yaml", tiny_config(data)))
    ranks = ranks_that_listen(launcher)
    while not list(tmp_path.glob("llmfoundry_lite_ranks_*.json")):
        assert launcher.poll() is None
    notes = next(tmp_path.glob("llmfoundry_lite_ranks_*.json"))
    while f"[{ranks[3].pid}, " not in notes.read_text():
        assert launcher.poll() is None
    ranks[3].kill()
    code, output = end(launcher)
    assert (code, output.count("rank 3 has ended without a message"), output.count("preempted")) == (1, 1, 0), output


def has_pending(process, number):
    """Return whether a stopped process has yet to hear a signal."""
    pending = re.search(r"ShdPnd:\s*(\w+)", Path(f"/proc/{process.pid}/status").read_text())
    return bool(int(pending[1], 16) & 1 << (number - 1))


def test_a_second_sigterm_ends_composer_with_143_and_the_run_is_saved(begin, tmp_path, data):
    """143 is its launcher's own: the second signal ends it while it waits for its ranks, which still save."""
    options = ["max_duration=3000ba", "save_interval=3000ba", "console_log_interval=1ba", "export_at_end=false"]
    path = write_config(tmp_path / "tiny.yaml", tiny_config(data, eval_interval=0))
    launcher = begin(*TRAIN, path, *options, num_ranks=2)
    while "batch 2/" not in launcher.stdout.readline():
        assert launcher.poll() is None
    ranks = psutil.Process(launcher.pid).children()
    ranks[-1].suspend()  # so that the launcher still waits for it when the second signal comes
    while ranks[-1].status() != psutil.STATUS_STOPPED:  # of two pending signals SIGTERM would be heard before SIGSTOP
        assert launcher.poll() is None
    launcher.terminate()
    while not has_pending(ranks[-1], signal.SIGTERM):
        assert launcher.poll() is None
    launcher.terminate()
    assert launcher.wait(timeout=300) == 143
    ranks[-1].resume()
    _, running = psutil.wait_procs(ranks, timeout=300)
    assert running == []
    status = read_status(next((tmp_path / "runs").iterdir()))
    assert status["status"] == "preempted" and "saved as ba" in status["reason"], status


LAUNCHERS = {
    "ours": (["llmfoundry-lite", "train", "-n", "2"], 75),
    "one process": (["llmfoundry-lite", "train"], 75),
    "composer": (["composer", "-n", "2", str(ROOT / "scripts/train.py")], -signal.SIGHUP),
    "nohup": (["nohup", "llmfoundry-lite", "train"], 0),
}


@pytest.mark.parametrize(
    "name", [pytest.param("ours", marks=needs("llmfoundry_ops")), "one process", "composer", "nohup"]
)
def test_a_run_whose_terminal_closes_is_saved(tmp_path, data, name):
    """`composer` does not outlive its terminal, its ranks do. Under `nohup` the run goes on."""
    command, expected = LAUNCHERS[name]
    length = "3000ba" if name != "nohup" else "30ba"
    path = write_config(tmp_path / "tiny.yaml", tiny_config(data, max_duration=length, eval_interval=0))
    options = ["save_interval=3000ba", "console_log_interval=1ba", "export_at_end=false"]
    place = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    place["PATH"] = f"{Path(sys.executable).parent}:{place['PATH']}"
    launcher, terminal = pty.fork()
    if launcher == 0:
        os.chdir(tmp_path)
        os.execvpe(command[0], [*command, path, *options], place)
    begun = tmp_path / "nohup.out" if name == "nohup" else tmp_path / "runs/tiny/metrics.jsonl"
    while not begun.exists() or begun.read_text().count("\n") < 3:
        time.sleep(0.05)
        assert os.waitpid(launcher, os.WNOHANG)[0] == 0
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(launcher, 0)[1]) == expected
    while (status := read_status(tmp_path / "runs/tiny"))["status"] == "running":
        time.sleep(0.05)
    if name == "nohup":
        assert (status["status"], status["batch"]) == ("done", 30)
        return
    assert status["status"] == "preempted"
    assert status["reason"].startswith("preempted by SIGHUP (its terminal has closed) at batch ")
    assert f"saved as ba{status['batch']}" in status["reason"]
    assert (tmp_path / f"runs/tiny/checkpoints/ba{status['batch']}/manifest.json").exists()
