"""A run that is asked to leave saves and leaves, in time, with 75; the same command carries on."""

import contextlib
import errno
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmfoundry_lite.config.spans import parse_seconds
from llmfoundry_lite.errors import EXIT_FAILURE, EXIT_PREEMPTED, ConfigError
from llmfoundry_lite.ranks import ending as launching
from llmfoundry_lite.ranks.identity import age_seconds, uptime
from llmfoundry_lite.ranks.signals import describe_reason_to_leave
from llmfoundry_lite.ranks.status import read_status
from llmfoundry_lite.training import preemption as preemption_module
from llmfoundry_lite.training import train as train_module
from llmfoundry_lite.training.checkpointing import Checkpointing
from llmfoundry_lite.training.launch_role import LaunchRole
from llmfoundry_lite.training.preemption import REASONS, Preemption
from llmfoundry_lite.training.run_folder import RunFolder
from tests.helpers.launch import ROOT
from tests.helpers.runs import attempt
from tests.helpers.signals import Signal, SignalInEvaluation
from tests.helpers.tiny import read_metrics, tiny_config, values, write_config

pytestmark = pytest.mark.multiprocess


class SignalThenHang(Signal):
    """Sends the signal when the save of two batches before is published, then hangs. Ranks agree on that after the
    batch between."""

    def batch_end(self, state, logger):
        flight = next(c for c in state.callbacks if isinstance(c, Checkpointing)).saver._in_flight
        if flight is not None:
            wait([flight.background_task])

    def batch_start(self, state, logger):
        if self.is_here(state):
            while not Path(f"runs/tiny/checkpoints/ba{self.batch - 2}/manifest.json").exists():
                threading.Event().wait(0.01)
            os.kill(os.getpid(), self.number)
            threading.Event().wait()


class PressTwiceThenHang(Signal):
    """Presses Ctrl-C twice, then hangs; here no second press counts as an echo of the first."""

    def batch_start(self, state, logger):
        if self.is_here(state):
            launching.ECHO_SECONDS = 0
            os.kill(os.getpid(), signal.SIGINT)
            while not any(isinstance(c, Checkpointing) and c.preemption.reason for c in state.callbacks):
                threading.Event().wait(0.01)
            os.kill(os.getpid(), signal.SIGINT)
            threading.Event().wait()


class Abort(Signal):
    """Aborts, as NCCL's watchdog does in a process whose peer is gone."""

    def batch_start(self, state, logger):
        if self.is_here(state):
            os.abort()


class SignalThenAbort(Signal):
    """Aborts when rank 0, which asks once a second, has heard of the signal."""

    def batch_start(self, state, logger):
        if int(state.timestamp.batch) + 1 == self.batch:
            if self.is_here(state):
                os.kill(os.getpid(), self.number)
            while not any(isinstance(c, Checkpointing) and c.preemption.reason for c in state.callbacks):
                threading.Event().wait(0.01)
            run = next(c for c in state.callbacks if isinstance(c, RunFolder))
            for _ in range(500):  # until the others can know; rank 0, which keeps the store, may be gone by then
                if launching.announced_preemption():
                    break
                threading.Event().wait(0.01)
            while os.environ["RANK"] == "0" and read_status(run.folder)["reason"] is None:
                threading.Event().wait(0.01)
            os.abort()


class HangAtTheEnd(Signal):
    """Hangs when all is saved, where wandb, for one, may wait for its server."""

    def close(self, state, logger):
        if int(os.environ["RANK"]) == 0:
            threading.Event().wait()


class SignalAtTheStart(Signal):
    """Sends the signal before anything is restored, while the other ranks build their models."""

    def before_load(self, state, logger):
        if int(os.environ["RANK"]) == self.rank:
            os.kill(os.getpid(), self.number)


class FreezeTheOtherThenSignal(Signal):
    """Rank 0, which keeps the store, is stopped; it is killed when rank 1 has gone, so that the test can end."""

    def fit_start(self, state, logger):
        if os.environ["RANK"] == "0":
            Path("rank0.pid").write_text(str(os.getpid()))

    def batch_start(self, state, logger):
        if self.is_here(state):
            other, me = Path("rank0.pid").read_text(), os.getpid()
            os.kill(int(other), signal.SIGSTOP)
            subprocess.Popen(["sh", "-c", f"tail --pid={me} -f /dev/null; kill -KILL {other}"])
            os.kill(me, self.number)


class TouchStop(Signal):
    def batch_start(self, state, logger):
        if self.is_here(state):
            open("runs/tiny/STOP", "w").close()


def callback(kind: type, **arguments):
    return {f"python:{__name__}:{kind.__name__}": arguments}


def status(tmp_path, name="tiny"):
    return json.loads((tmp_path / "runs" / name / "status.json").read_text())


def launch(tmp_path, config, num_ranks=2, run_name="tiny", **changes):
    return attempt(tmp_path, config, run_name, num_ranks, **changes)


SLOW_NAMES = [pytest.param(name, marks=pytest.mark.slow) for name in ("SIGUSR1", "SIGHUP")]


@pytest.mark.parametrize("name", ["SIGTERM", *SLOW_NAMES])
def test_a_signal_to_one_rank_makes_all_of_them_save_and_leave(tmp_path, data, name):
    config = tiny_config(data, autoresume=True, eval_interval="2ba")
    launch(tmp_path, config, run_name="whole").check()
    result = launch(tmp_path, config, callbacks=callback(Signal, rank=1, batch=4, name=name))
    assert result.exit_codes == [75, 75]
    assert result.output.splitlines()[-1] == (
        f"{describe_reason_to_leave(name)} at batch 4, saved as ba4; run the same command again"
    )
    assert "preempted" not in result.outputs[1]
    assert status(tmp_path)["status"] == "preempted"
    assert status(tmp_path)["batch"] == 4
    launch(tmp_path, config).check()
    whole, parts = read_metrics(tmp_path / "runs/whole"), read_metrics(tmp_path / "runs/tiny")
    for key in ("loss/train/total", "data/digest"):
        assert values(parts, key) == values(whole, key)
    assert status(tmp_path)["status"] == "done"


@pytest.mark.slow
def test_a_file_named_stop_is_obeyed_once(tmp_path, data):
    config = tiny_config(data, autoresume=True, max_duration="6ba", callbacks=callback(TouchStop, rank=1, batch=3))
    result = launch(tmp_path, config)
    assert result.exit_codes == [75, 75]
    assert "preempted by the file STOP at batch 3, saved as ba3" in result.output
    launch(tmp_path, config).check()


@pytest.mark.slow
def test_a_deadline_ends_the_launch(tmp_path, data):
    config = tiny_config(data, max_duration="1000000ba", save_interval="1000000ba", max_wall_time="2s")
    result = launch(tmp_path, config, console_log_interval="1000ba")
    assert result.exit_codes == [75, 75]
    assert "preempted by max_wall_time" in result.output
    assert result.output.endswith("run the same command again with autoresume=true\n")
    assert status(tmp_path)["batch"] > 0
    assert (tmp_path / f"runs/tiny/checkpoints/ba{status(tmp_path)['batch']}/manifest.json").exists()


def test_a_rank_that_hangs_does_not_hold_the_exit_and_the_last_save_stands(tmp_path, data):
    config = tiny_config(data, autoresume=True, save_interval="2ba", preemption_grace_seconds=2)
    hang = callback(SignalThenHang, rank=1, batch=6)
    result = launch(tmp_path, config, callbacks=hang)
    assert result.exit_codes == [75, 75]
    assert " in no save; ba" in result.output
    assert status(tmp_path)["status"] == "preempted"
    renewals = tmp_path / "runs/tiny/checkpoints/.leases/00000001.renewed.json"
    assert json.loads(renewals.read_text())["released"], "another machine need not wait"
    result = launch(tmp_path, config).check()
    assert "carrying on from runs/tiny/checkpoints/ba4" in result.output


@pytest.mark.slow
def test_who_leaves_late_says_what_has_been_saved(tmp_path, data):
    hang = callback(HangAtTheEnd, rank=1, batch=4)
    result = launch(tmp_path, tiny_config(data, preemption_grace_seconds=10, callbacks=hang))
    assert result.exit_codes == [75, 75]
    assert "preempted by SIGTERM: saved as ba4; closing the run took more than the rest of 10 s" in result.output
    assert status(tmp_path)["reason"].startswith("preempted by SIGTERM: saved as ba4")


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_a_signal_before_the_first_batch_is_one_too(tmp_path, data, name):
    config = tiny_config(data, callbacks=callback(SignalAtTheStart, rank=1, batch=1, name=name))
    result = launch(tmp_path, config)
    assert result.exit_codes == [75, 75], result.outputs
    assert "Traceback" not in result.output


@pytest.mark.slow
def test_a_frozen_node_does_not_hold_the_exit_of_the_others(tmp_path, data):
    """Neither the batch nor the store will ever answer."""
    freeze = callback(FreezeTheOtherThenSignal, rank=1, batch=4)
    result = launch(tmp_path, tiny_config(data, preemption_grace_seconds=2, callbacks=freeze))
    assert result.exit_codes == [-signal.SIGKILL, 75]


@pytest.mark.slow
def test_a_long_evaluation_does_not_hold_the_exit(tmp_path, data):
    config = tiny_config(data, autoresume=True, eval_interval="4ba", device_eval_batch_size=1)
    launch(tmp_path, config, run_name="whole").check()
    result = launch(tmp_path, config, callbacks=callback(SignalInEvaluation, rank=1, batch=5))
    assert result.exit_codes == [75, 75]
    assert "preempted by SIGTERM at batch 4, saved as ba4" in result.output
    assert [record["batch"] for record in read_metrics(tmp_path / "runs/tiny")] == [1, 2, 3, 4]
    launch(tmp_path, config).check()
    whole, parts = read_metrics(tmp_path / "runs/whole"), read_metrics(tmp_path / "runs/tiny")
    assert values(parts, "loss/train/total") == values(whole, "loss/train/total")


@pytest.mark.parametrize("then", [None, pytest.param("SIGTERM", marks=pytest.mark.slow)])
def test_ctrl_c_saves_and_leaves(tmp_path, data, then):
    """A terminal sends it to the whole process group, loader workers included; `composer` sends SIGTERM after it."""
    config = tiny_config(data, max_duration="1000000ba", train_loader__num_workers=1)
    path = write_config(tmp_path / "tiny.yaml", config)
    process = start([sys.executable, ROOT / "scripts/train.py", path], tmp_path)
    try:
        read_until(process, "batch 3/")
        os.killpg(process.pid, signal.SIGINT)
        os.killpg(process.pid, signal.SIGINT)
        if then is not None:
            process.send_signal(signal.Signals[then])
        output, _ = process.communicate(timeout=300)
    finally:
        process.poll() is None and os.killpg(process.pid, signal.SIGKILL)
    batch = status(tmp_path)["batch"]
    assert process.returncode == 75, output
    saved = f"at batch {batch}, saved as ba{batch}; run the same command again with autoresume=true"
    assert output.splitlines()[-1] == f"interrupted by Ctrl-C {saved}"
    assert status(tmp_path)["status"] == "preempted"
    assert (tmp_path / f"runs/tiny/checkpoints/ba{batch}/manifest.json").exists()


def test_ctrl_c_again_leaves_at_once(tmp_path, data):
    """Batch 2 is saved by then: the save of batch 4 has begun."""
    config = tiny_config(
        data, autoresume=True, save_interval="2ba", callbacks=callback(PressTwiceThenHang, rank=0, batch=6)
    )
    result = launch(tmp_path, config, 1)
    assert result.exit_codes == [130]
    text = result.output.splitlines()[-1]
    lost = "(batch 5 is in no save; ba4 stands|batches 3 to 5 are in no save; ba2 stands)"
    assert re.fullmatch(f"interrupted by Ctrl-C a second time: nothing more was saved; {lost}", text)
    told = status(tmp_path)
    assert (told["status"], told["batch"], told["reason"]) == ("failed", 5, text)


def test_whoever_pressed_ctrl_c_is_the_reason_though_the_launcher_s_sigterm_came_in_first(tmp_path):
    said = []
    preemption = Preemption(tmp_path, 30.0, None, said.append, print)
    preemption._note_reason(REASONS.index("SIGTERM"))
    leave_by = preemption.leave_by
    for name in ("SIGINT", "SIGTERM", "SIGINT"):
        preemption._note_reason(REASONS.index(name))
    assert said == ["SIGTERM", "SIGINT"]
    assert preemption.set_agreed(preemption.reason) == "SIGINT"
    assert preemption.describe_reason("SIGTERM") == "interrupted by Ctrl-C", "the ranks had agreed before it was heard"
    assert preemption.leave_by == leave_by, "asked for once more is no reason to take longer"


@pytest.mark.fault
def test_no_stop_file_is_found_in_a_folder_into_which_nobody_may_look(tmp_path, monkeypatch):
    """`chmod` while it trains ends no run."""
    preemption = Preemption(tmp_path, 30.0, None, print, print)
    preemption._is_main = True

    def refuse(*_, **__):
        raise PermissionError(errno.EACCES, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", refuse)
        assert preemption.find_reason() == 0
    (tmp_path / "STOP").touch()
    assert REASONS[preemption.find_reason()] == "the file STOP"


@pytest.mark.fault
def test_a_stop_file_that_cannot_be_removed_is_no_failure(tmp_path, capsys):
    preemption = Preemption(tmp_path, 30.0, None, print, print)
    preemption._is_main = True
    (tmp_path / "STOP").mkdir()
    preemption.set_agreed(REASONS.index("the file STOP"))
    preemption.remove_stop_file()
    assert "STOP cannot be removed: Is a directory" in capsys.readouterr().out


@pytest.mark.fault
@pytest.mark.parametrize(
    ("reason", "is_main", "stays"),
    [
        ("the file STOP", True, False),
        ("the file STOP", False, True),  # rank 0 removes it
        ("SIGTERM", True, True),  # the file was not why
    ],
)
def test_a_stop_file_is_removed_by_a_launch_that_leaves_late(tmp_path, monkeypatch, reason, is_main, stays):
    left = []
    monkeypatch.setattr(preemption_module, "exit_now", left.append)
    preemption = Preemption(tmp_path, 0.0, None, print, print)
    preemption._is_main = is_main
    (tmp_path / "STOP").touch()
    preemption._note_reason(REASONS.index(reason))
    assert preemption.leave_by is not None
    preemption._leave_if_late(preemption.leave_by)
    assert left == [75]
    assert (tmp_path / "STOP").exists() == stays


class Ended:
    """The end of a launch on this rank, with what its `train` and the threads of its `Preemption` record."""

    def __init__(self, tmp_path, monkeypatch):
        self.codes, self.recorded = [], []
        monkeypatch.setattr(preemption_module, "exit_now", self.codes.append)
        monkeypatch.setattr(train_module, "ignore_leaving_signals", lambda: None)
        monkeypatch.setattr(preemption_module, "announce_preemption", lambda reason: None)
        self.preemption = Preemption(tmp_path, 0.0, None, print, lambda status, why: self.recorded.append(status))
        run_folder: Any = SimpleNamespace(
            fail=lambda status, *reason, **options: self.recorded.append(status),
            trainer=None,
            folder=tmp_path,
            is_main=False,
        )
        self.launch = train_module.Launch(
            config=SimpleNamespace(), run_folder=run_folder, preemption=self.preemption, role=LaunchRole()
        )

    def let_time_pass(self):
        """The process lives on until the thread would end it."""
        self.preemption._note_reason(REASONS.index("SIGTERM"))
        self.preemption._leave_if_late(time.monotonic() + 1.0)


@pytest.mark.parametrize(
    ("error", "recorded", "codes"),
    [(launching.Preempted("left"), "preempted", [75]), (ConfigError("wrong"), "failed", [])],
    ids=["preempted", "failed"],
)
def test_a_launch_has_one_end_though_its_process_lives_on_while_an_alert_is_sent(
    tmp_path, monkeypatch, error, recorded, codes
):
    launch = Ended(tmp_path, monkeypatch)
    assert train_module.end_with_error(error, launch.launch) is error
    launch.let_time_pass()
    assert launch.recorded == [recorded] and launch.codes == codes


def test_threads_of_a_launch_that_has_failed_do_not_spin(tmp_path, monkeypatch):
    """Its process may live on for minutes, as a notebook does. The time to leave is over by then."""
    launch = Ended(tmp_path, monkeypatch)
    launch.let_time_pass()
    assert launch.preemption._seconds_to_next_check() == 0.0
    launch.preemption.note_end(has_failed=True)
    assert launch.preemption._seconds_to_next_check() == preemption_module.POLL_SECONDS
    monkeypatch.setattr(preemption_module, "announced_preemption", lambda: pytest.fail("the store was asked"))
    launch.preemption.reason = 0
    launch.preemption._poll_other_ranks()


def test_a_launch_that_is_done_stays_done_though_its_process_lives_on(tmp_path, monkeypatch):
    launch = Ended(tmp_path, monkeypatch)
    launch.launch.run_folder.finish = launch.recorded.append
    launch.launch.run_folder.start = lambda *arguments: None
    trainer = SimpleNamespace(state=None, close=lambda: None)
    parts = SimpleNamespace(was_preempted_by="", wandb_run_id=None, history=None, finish_copies=lambda: None)
    launch.launch.config.export_at_end = False
    launch.launch.config.max_duration = None
    launch.preemption.listen = lambda: None
    for name, stand_in in {
        "start_launch": lambda config, role: launch.launch,
        "build_own_tokenizer": lambda config: None,
        "find_start": lambda config, takes_lease: None,
        "build_and_restore": lambda *arguments: (trainer, parts),
        "set_microbatch_size": lambda *arguments: None,
        "announce_stop": lambda *arguments: False,
        "progress_of": lambda state, max_duration: 1.0,
        "run_missed_evaluation": lambda *arguments: None,
        "user_errors_on_all_ranks": contextlib.nullcontext,
    }.items():
        monkeypatch.setattr(train_module, name, stand_in)
    train_module.train(launch.launch.config)
    launch.let_time_pass()
    assert launch.recorded == ["done"] and launch.codes == [75]


def seconds_left(tmp_path, max_wall_seconds):
    deadline = Preemption(tmp_path, 30.0, max_wall_seconds, print, print).deadline
    assert deadline is not None
    return deadline - time.monotonic()


@pytest.mark.parametrize("started_by", ["launcher", "composer"])
@pytest.mark.parametrize("step_seconds", [7200, -7200])
def test_a_step_of_the_wall_clock_moves_no_deadline(tmp_path, monkeypatch, started_by, step_seconds):
    if started_by == "launcher":
        monkeypatch.setenv(launching.LAUNCHED_AT, str(uptime() - 600))
        expected = 3000
    else:
        monkeypatch.delenv(launching.LAUNCHED_AT, raising=False)
        expected = 3600 - age_seconds(os.getpid())
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + step_seconds)
    assert seconds_left(tmp_path, 3600) == pytest.approx(expected, abs=60)


def test_a_rank_that_torchrun_has_started_again_leaves_by_the_first_one_s_deadline(tmp_path, monkeypatch):
    ages = {os.getpid(): 5.0, os.getppid(): 3000.0}
    monkeypatch.setattr("llmfoundry_lite.training.preemption.age_seconds", ages.__getitem__)
    monkeypatch.delenv(launching.LAUNCHED_AT, raising=False)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert seconds_left(tmp_path, 3600) == pytest.approx(600, abs=60)


def test_only_a_later_press_is_a_second_one(monkeypatch):
    now = iter([10.0, 10.1, 11.9, 12.1])
    monkeypatch.setattr(launching.time, "monotonic", lambda: next(now))
    ctrl_c = launching.CtrlC()
    assert [ctrl_c.is_second_press() for _ in range(4)] == [False, False, False, True]


@pytest.mark.parametrize("rank", [0, 1])
def test_an_aborted_process_is_a_failed_run(tmp_path, data, rank):
    config = tiny_config(data, autoresume=True, save_interval="2ba")
    result = launch(tmp_path, config, callbacks=callback(Abort, rank=rank, batch=4))
    assert result.exit_codes[rank] == -signal.SIGABRT and result.exit_codes[1 - rank] == 1
    found = read_status(tmp_path / "runs/tiny")
    assert found["status"] == "failed"
    assert found["batch"] in ([3] if rank else [1, 2, 3]), "rank 0 writes it every few seconds"
    words = "lost contact with another rank" if rank else "the process of rank 0 is gone without a word"
    assert words in found["reason"]


def test_an_abort_after_a_request_to_leave_is_a_preemption(tmp_path, data):
    config = tiny_config(data, autoresume=True, save_interval="2ba", preemption_grace_seconds=20)
    result = launch(tmp_path, config, callbacks=callback(SignalThenAbort, rank=1, batch=4))
    assert -signal.SIGABRT in result.exit_codes
    found = read_status(tmp_path / "runs/tiny")
    assert (found["status"], found["batch"]) == ("preempted", 3)
    assert found["reason"].startswith("SIGTERM: the process of rank 0 is gone")


def start(arguments, tmp_path, **environment):
    return subprocess.Popen(
        [str(argument) for argument in arguments],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        start_new_session=True,
    )


def read_until(process, beginning):
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith(beginning):
            return
    raise AssertionError("".join(lines))


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "name", "code"),
    [
        (["composer", "-n", "2"], "SIGTERM", 75),
        (["composer", "-n", "2"], "SIGINT", 75),
        pytest.param(TORCHRUN, "SIGTERM", 1, marks=pytest.mark.long),
    ],
    ids=["composer", "ctrl-c at a terminal", "torchrun"],
)
def test_the_launcher_may_be_the_one_who_is_told(tmp_path, data, launcher, name, code):
    """SLURM's time limit and a cloud's preemption reach the launcher; what it returns is its own affair. A terminal's
    Ctrl-C reaches ranks and launcher, and is one request."""
    path = write_config(tmp_path / "tiny.yaml", tiny_config(data, max_duration="1000000ba"))
    process = start([*launcher, ROOT / "scripts/train.py", path], tmp_path)
    try:
        read_until(process, "batch 3/")
        (os.killpg if name == "SIGINT" else os.kill)(process.pid, signal.Signals[name])
        output, _ = process.communicate(timeout=300)
    finally:
        process.poll() is None and os.killpg(process.pid, signal.SIGKILL)
    assert ("interrupted by Ctrl-C at batch" if name == "SIGINT" else "preempted by SIGTERM") in output
    assert status(tmp_path)["status"] == "preempted"
    assert (tmp_path / f"runs/tiny/checkpoints/ba{status(tmp_path)['batch']}/manifest.json").exists()
    assert process.returncode == code or (code == 1 and process.returncode != 0)


@pytest.mark.parametrize(
    ("text", "seconds"), [("3h55m", 14100), ("90s", 90), (90, 90), ("1d", 86400), ("1-02:00:00", 93600), ("5:30", 330)]
)
def test_times_are_read_as_people_and_slurm_write_them(text, seconds):
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize(
    ("saved", "expected"), [(None, ("failed", EXIT_FAILURE)), ("ba4", ("preempted", EXIT_PREEMPTED))]
)
def test_who_leaves_late_while_saves_fail_does_not_promise_that_all_is_saved(tmp_path, monkeypatch, saved, expected):
    left, released = [], []
    monkeypatch.setattr(preemption_module, "exit_now", left.append)
    preemption = Preemption(tmp_path, 20.0, None, print, lambda status, why: left.extend([status, why]))
    preemption.describe_failed_save = lambda: "" if saved else "s3://b/ba6: not written: the token has expired"
    preemption.describe_saves = lambda: "ba4 stands"
    preemption.release_lease = lambda: released.append(True)
    preemption._note_reason(REASONS.index("SIGTERM"))
    preemption.saved = saved
    assert preemption.leave_by is not None
    preemption._leave_if_late(preemption.leave_by)
    assert (left[0], left[2]) == expected and len(left) == 3 and released
    if not saved:
        why = "preempted by SIGTERM, but saves fail: s3://b/ba6: not written: the token has expired; ba4 stands"
        assert left[1] == why
