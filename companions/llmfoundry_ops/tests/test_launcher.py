"""The launcher alone: real processes of a program that imports nothing heavy."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest

from llmfoundry_lite.config.spans import Time
from llmfoundry_lite.errors import ConfigError
from llmfoundry_lite.ranks.status import write_status
from llmfoundry_ops import launcher as module
from llmfoundry_ops.commands import train_ranks
from llmfoundry_ops.launcher import (
    Launcher,
    Outcome,
    Program,
    Restarts,
    World,
    launch_code,
    start_server,
)
from llmfoundry_ops.rank_logs import make_room_for_logs
from llmfoundry_ops.server import BEAT_SECONDS, Beat, open_channel, receive, send
from tests.helpers.launch import ROOT

DEADLINE_SECONDS = 60
SOON = {"SILENCE_SECONDS": "1"}
"""For tests of frozen processes alone: on a busy machine others may be silent for longer."""


class Launched:
    """A launcher in a process of its own."""

    def __init__(self, logs: Path, num_ranks: int, max_restarts: int, *words: str, imports="json", **environment: str):
        logs.mkdir()
        self.logs = logs
        numbers = (str(num_ranks), str(max_restarts))
        command = (sys.executable, "-m", "llmfoundry_ops.tests.program", str(logs), *numbers, imports, *words)
        silent = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, cwd=ROOT, env=os.environ | environment, **silent)

    def end(self) -> tuple[int, str, str]:
        """Exit code, stdout, stderr."""
        try:
            out, err = self.process.communicate(timeout=DEADLINE_SECONDS)
        finally:
            self.process.kill()
        return self.process.returncode, out, err

    def pid(self, rank: int, number: int = 0) -> int:
        """Return the process of a rank, once it has begun its try."""
        began = self.logs / f"began-{rank}.{number}"
        wait_until(lambda: began.exists() and began.read_text())
        return int(began.read_text().split()[0])


def wait_until(is_so):
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def launched(tmp_path):
    """Begin a launcher, and leave nothing of it behind."""
    all_launched = []

    def begin(*arguments, **options):
        all_launched.append(Launched(tmp_path / f"logs{len(all_launched)}", *arguments, **options))
        return all_launched[-1]

    yield begin
    for one in all_launched:
        one.process.kill()
        one.process.communicate()


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        *(((0, 0), 0), ((0, 75), 75), ((1, 75, -9), 75), ((1, 2, 75), 2), ((-15, 0), 1), ((130, 1), 130), ((1, 3), 1)),
        *(((1, 74), 74), ((74, 71, 1), 71), ((74, 75), 75), ((74, 2), 2)),
    ],
)
def test_a_launch_has_one_exit_code_of_its_ranks(codes, expected):
    assert launch_code(codes) == expected


def test_rank_0_speaks_on_the_screen_and_the_others_into_their_files(launched):
    run = launched(3, 0)
    assert run.end() == (0, "rank 0 of 3 speaks, try 0\n", "")
    assert (run.logs / "rank2.txt").read_text() == "rank 2 of 3 speaks, try 0\n"


@pytest.mark.parametrize("code", [2, 75])
def test_what_would_come_again_is_not_tried_again(launched, code):
    run = launched(2, 3, f"0.0=exit:{code}", f"1.0=exit:{code}")
    assert run.end()[0] == code
    assert not (run.logs / "began-0.1").exists()


@pytest.mark.parametrize("end", ["kill:SIGKILL", "exit:1"])
def test_a_rank_that_dies_takes_all_to_the_next_try_which_carries_on(launched, end):
    run = launched(2, 2, f"1.0={end}", "0.0=wait", "0.1=kill:SIGSEGV", "1.1=wait")
    code, _, words = run.end()
    assert code == 0
    first = "was killed by SIGKILL" if "KILL" in end else "left with exit code 1"
    assert words.splitlines() == [
        f"launcher: rank 1 {first}; restart 1 of 2, from the newest save",
        "launcher: rank 0 was killed by SIGSEGV; restart 2 of 2 in 0.2 s, from the newest save",
    ]
    assert "autoresume" not in (run.logs / "began-0.0").read_text()
    assert (run.logs / "began-0.2").read_text().endswith("autoresume=true")


@pytest.mark.parametrize("closed", ["2>/dev/full", "<&- >&- 2>&-"])
def test_ranks_start_again_though_nobody_hears_of_it(closed, tmp_path):
    command = [
        sys.executable,
        "-m",
        "llmfoundry_ops.tests.program",
        str(tmp_path),
        "2",
        "1",
        "json",
        "1.0=kill:SIGKILL",
    ]
    shell = ["sh", "-c", f'exec "$@" {closed}', "sh", *command, "0.0=wait"]
    assert subprocess.run(shell, cwd=ROOT, capture_output=True, timeout=DEADLINE_SECONDS).returncode == 0
    assert (tmp_path / "rank1.txt").read_text() == "rank 1 of 2 speaks, try 0\nrank 1 of 2 speaks, try 1\n"


@pytest.mark.parametrize(
    ("end", "how", "last"),
    [
        ("raise:no such lamp", "left with exit code 1", "  RuntimeError: no such lamp"),
        ("kill:35", "was killed by signal 35", "  rank 1 of 2 speaks, try 0"),  # a signal without a name
    ],
)
def test_when_no_try_is_left_it_says_what_the_culprit_said(launched, end, how, last):
    code, _, words = launched(2, 0, "0.0=wait", f"1.0={end}").end()
    assert code == 1
    assert words.startswith(f"launcher: rank 1 {how}; the end of ") and words.splitlines()[-1] == last


def test_a_frozen_rank_is_found_and_a_busy_one_is_left_alone(launched):
    run = launched(2, 1, "0.0=wait", "1.0=kill:SIGSTOP", "0.1=hold:150000000", **SOON)
    code, _, words = run.end()
    assert code == 0
    assert words == ("launcher: rank 1 is frozen: it has done nothing for 1 s; restart 1 of 1, from the newest save\n")


@pytest.mark.parametrize(("used_since", "noticed_after"), [(0.0, 0.0), (0.4, BEAT_SECONDS)])
def test_a_rank_that_has_computed_before_is_found_frozen_after_one_silence(monkeypatch, used_since, noticed_after):
    """A rank that computed between its last sign of life and its freeze is found too."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(module, "cpu_seconds", lambda pid: 5.0 + (used_since if clock.now > 100 else 0.0))
    mine, its = open_channel()
    send(its, Beat(0, os.getpid()))
    ranks = World(mine, lambda: False, 1)
    ranks._receive_message()
    while not ranks._fault and clock.now < 150:
        clock.now += 0.5
        ranks._find_frozen()
    assert clock.now == 100 + noticed_after + module.SILENCE_SECONDS


def test_after_the_launcher_itself_was_stopped_no_rank_is_frozen(monkeypatch):
    """Ctrl-Z, and some time later `fg`: nobody was heard meanwhile."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(module, "cpu_seconds", lambda pid: 0.0)
    ranks = World(open_channel()[0], lambda: False, 1)
    ranks.processes[1] = module.Process(0, os.getpid(), clock.now)
    clock.now += 10 * module.SILENCE_SECONDS
    ranks._find_frozen()
    assert not ranks._fault


@pytest.mark.parametrize(("codes", "expected"), [((-9, 0), 75), ((1, -9), 1), ((-9, 75), 75)])
def test_asked_to_leave_a_killed_rank_could_not_and_one_that_failed_did(codes, expected):
    ranks = World(open_channel()[0], lambda: False, 2)
    ranks.processes = {pid: module.Process(pid, pid, 0.0, code=code) for pid, code in enumerate(codes)}
    ranks.leaving_signal = signal.SIGTERM
    assert ranks.wait().code == expected


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1], ids=lambda number: number.name)
def test_a_signal_is_handed_to_the_ranks_which_are_not_started_again(launched, number):
    run = launched(2, 3, "0.0=wait", "1.0=wait")
    run.pid(0), run.pid(1)
    run.process.send_signal(number)
    code, _, words = run.end()
    assert code == 75
    assert "restart" not in words
    assert f"{'interrupted by Ctrl-C' if number == signal.SIGINT else 'preempted by ' + number.name}" in words


def test_asked_to_leave_while_ranks_are_frozen_it_has_left_and_says_why(launched):
    run = launched(2, 3, "0.0=wait", "1.0=wait", **SOON)
    launcher, ranks = psutil.Process(run.process.pid), [psutil.Process(run.pid(rank)) for rank in (0, 1)]
    for process in (launcher, *ranks):  # the launcher first: it is asked before it finds that the others are frozen
        process.suspend()
        wait_until(lambda process=process: process.status() == psutil.STATUS_STOPPED)
    run.process.send_signal(signal.SIGTERM)
    launcher.resume()
    code, _, words = run.end()
    assert code == 75
    assert words.endswith(" is frozen: it has done nothing for 1 s; the newest save stands, if there is one\n")


def test_a_rank_whose_log_cannot_be_opened_yet_is_not_taken_for_frozen(tmp_path):
    mine, its = open_channel()
    mine.settimeout(DEADLINE_SECONDS)
    hangs = "server.open_no_link = lambda *arguments: threading.Event().wait()"  # as on a disk that does not answer
    begins = "server.become_rank(server.Start(1, [], {}, sys.argv[1]), socket.socket(fileno=int(sys.argv[2])))"
    program = f"import socket, sys, threading; from llmfoundry_ops import server; {hangs}; {begins}"
    command = [sys.executable, "-c", program, str(tmp_path / "rank1.txt"), str(its.fileno())]
    rank = subprocess.Popen(command, cwd=ROOT, pass_fds=[its.fileno()])
    its.close()
    try:
        assert receive(mine) == Beat(1, rank.pid)
        assert rank.poll() is None
    finally:
        rank.kill()
        rank.wait()


def test_logs_of_a_launch_that_goes_on_are_not_taken_from_it(tmp_path):
    (tmp_path / "logs").mkdir()
    make_room_for_logs(tmp_path / "logs")
    log = tmp_path / "logs/rank1.txt"
    with log.open("a") as first:
        make_room_for_logs(tmp_path / "logs")
        first.write("still here")
    assert (tmp_path / "logs/rank1.before.txt").read_text() == "still here"
    assert not log.exists()


def test_a_log_folder_that_cannot_be_is_a_users_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(
        ConfigError, match="file: ranks cannot write their logs there: File exists; name another folder with --log-dir"
    ):
        make_room_for_logs(tmp_path / "file")
    with pytest.raises(ConfigError, match="/proc/x: ranks cannot write their logs there"):
        make_room_for_logs(Path("/proc/x"))


def test_arguments_that_no_rank_can_be_handed_are_refused(tmp_path):
    mine, _its = open_channel()
    with pytest.raises(ConfigError, match="too long to be handed to ranks; put them into a YAML file"):
        World(mine, lambda: False, 2).start(["é" * 1_000_000], {}, tmp_path)


def test_asked_to_leave_while_it_imports_it_leaves_at_once(launched, tmp_path):
    os.mkfifo(tmp_path / "fifo")
    slow = "llmfoundry_ops.tests.imports_that_take_long"
    run = launched(2, 3, imports=slow, TAKES_LONG=str(tmp_path / "fifo"))
    with (tmp_path / "fifo").open("w"):  # the server is importing
        run.process.send_signal(signal.SIGTERM)
        code, _, words = run.end()
    assert (code, words) == (
        75,
        "launcher: asked to leave before the ranks had begun; run the same command again\n",
    )


def test_no_rank_outlives_a_launcher_that_is_killed(launched):
    run = launched(2, 3, "0.0=wait", "1.0=wait")
    pids = [run.pid(0), run.pid(1)]
    run.process.kill()
    wait_until(lambda: not any(map(module.is_running, pids)))


def test_ranks_start_again_when_the_process_that_forks_them_is_killed(launched):
    run = launched(2, 1, "0.0=wait", "1.0=wait")
    server = psutil.Process(run.pid(0)).parent()
    assert server is not None and server.pid != run.process.pid
    run.pid(1)
    server.kill()
    code, _, words = run.end()
    assert code == 0
    assert words.startswith("launcher: the process that starts the ranks has ended; restart 1 of 1")


@pytest.mark.parametrize(("asked", "expected"), [(False, 0), (True, 75)])
def test_ranks_that_end_while_the_process_that_forks_them_is_frozen_are_missed(launched, asked, expected):
    run = launched(2, 1, "0.0=wait", "1.0=wait", **SOON)
    pid = run.pid(1)
    server = psutil.Process(run.pid(0)).parent()
    assert server is not None and server.pid != run.process.pid
    server.suspend()
    if asked:
        run.process.send_signal(signal.SIGTERM)
    else:
        os.kill(pid, signal.SIGKILL)
    code, _, words = run.end()
    assert code == expected
    frozen = "launcher: the process that starts the ranks is frozen: it does not tell of one that has ended; "
    assert (
        frozen + ("the newest save stands, if there is one" if asked else "restart 1 of 1, from the newest save")
        in words
    )
    assert not server.is_running()


def test_a_server_that_ends_before_it_has_a_rank_is_a_failed_try(launched):
    code, _, words = launched(2, 1, imports="no_such_module").end()
    assert code == 1
    assert [line for line in words.splitlines() if line.startswith("launcher: ")] == [
        "launcher: the process that starts the ranks has ended; restart 1 of 1, from the newest save",
        "launcher: the process that starts the ranks has ended; that was restart 1 of 1",
    ]


class Tried:
    """Tries and the decisions of a `Restarts` about them, by a clock of their own."""

    def __init__(self, max_restarts: int = 3, retry_seconds: float = 600.0):
        self.restarts, self.now = Restarts(max_restarts, retry_seconds, 0), 0.0

    def after(self, *come_to: int, is_transient: bool) -> list[float | None]:
        """Return the pauses after tries that ended at these points."""
        pauses = []
        for batch in come_to:
            pause = self.restarts.pause(is_transient, batch, self.now)
            self.now += pause or 0.0
            pauses.append(pause)
        return pauses


def test_progress_ends_the_backing_off_of_ranks_that_die():
    tried = Tried(max_restarts=9)
    assert tried.after(0, 0, 0, is_transient=False) == [0.0, 1.0, 2.0]
    assert tried.after(7, 7, 8, is_transient=False) == [0.0, 1.0, 0.0]


def test_transient_faults_are_waited_for_with_a_time_are_no_restarts_and_progress_begins_that_time_anew():
    tried = Tried(max_restarts=0, retry_seconds=60.0)
    assert tried.after(*[0] * 7, is_transient=True) == [1.0, 2.0, 5.0, 10.0, 30.0, 12.0, None]
    assert tried.restarts.num_restarts == 0 and not tried.restarts.has_progressed
    tried = Tried(retry_seconds=8.0)
    assert tried.after(0, 0, 0, is_transient=True) == [1.0, 2.0, 5.0]
    assert tried.after(*[4] * 5, is_transient=True) == [1.0, 2.0, 5.0, None, None]
    assert Tried(retry_seconds=0.0).after(0, is_transient=True) == [None]


def test_a_fault_that_passes_is_no_restart_and_is_tried_with_the_same_words(launched):
    run = launched(2, 0, "0.0=exit:74", "1.0=wait", RETRY_SECONDS="60")
    code, _, words = run.end()
    assert (code, words) == (
        0,
        "launcher: rank 0 met a fault that may pass; next try in 0.2 s, for 60 s in all (retry_for)\n",
    )
    assert "autoresume" not in (run.logs / "began-0.1").read_text()


@pytest.mark.parametrize(
    ("saved", "batch", "added"),
    [((0, 0), (0, 0), []), ((0, 5), (0, 0), ["autoresume=true"]), ((0, 0), (0, 3), ["autoresume=true"])],
    ids=["nothing", "saved", "trained"],
)
def test_a_run_that_met_a_fault_is_carried_on_if_it_had_begun(tmp_path, monkeypatch, saved, batch, added):
    """One that had not must still be refused where a run of its name exists."""
    outcomes, told = [Outcome(74), Outcome(0)], []

    def run_ranks(self, arguments, environment):
        told.append(arguments)
        return outcomes.pop(0)

    monkeypatch.setattr(module, "PAUSE_SECONDS", (0.0, 0.0))
    monkeypatch.setattr(Launcher, "_try", run_ranks)
    monkeypatch.setattr("llmfoundry_ops.processes.handle_leaving_signals", lambda handler: None)
    launcher = Launcher(
        Program("json", "json"),
        1,
        0,
        tmp_path,
        progress=lambda: saved[min(len(told), 1)],
        begun=lambda: batch[min(len(told), 1)],
        retry_seconds=60.0,
    )
    assert launcher.run(["a.yaml"]) == 0
    assert told == [["a.yaml"], ["a.yaml", *added]]


def test_it_records_why_each_try_has_failed_and_whether_there_is_another(tmp_path, monkeypatch):
    killed = "rank 1 was killed by SIGKILL"
    outcomes = [
        Outcome(1, killed, 1, -signal.SIGKILL),
        Outcome(1, "rank 1 left with exit code 3", 1, 3),
        Outcome(2, "rank 0 is wrong", 0, 2),
        Outcome(1, "rank 1 was killed by SIGSEGV", 1, -signal.SIGSEGV),
        Outcome(1, "rank 1 is frozen", 1),
    ]
    noted = []
    faults = SimpleNamespace(
        begin_try=lambda: noted.append("try"),
        note=lambda fault, restarts, was_killed: noted.append((fault, restarts, was_killed)),
    )
    monkeypatch.setattr(module, "PAUSE_SECONDS", (0.0, 0.0))
    monkeypatch.setattr(Launcher, "_try", lambda *arguments: outcomes.pop(0))
    monkeypatch.setattr("llmfoundry_ops.processes.handle_leaving_signals", lambda handler: None)
    launcher = Launcher(Program("json", "json"), 2, 1, tmp_path, faults=cast(Any, faults))
    assert launcher.run([]) == 1
    left = f"rank 1 left with exit code 3; {tmp_path}/rank1.txt has its output"
    assert noted == ["try", (killed, True, True), "try", (left, False, False)]
    assert launcher.run([]) == 2
    assert noted[4:] == ["try"]
    assert launcher.run([]) == 1
    words = [("rank 1 was killed by SIGSEGV", True, False), ("rank 1 is frozen", False, False)]
    assert [entry for entry in noted[5:] if entry != "try"] == words, "no output is named, and memory is not blamed"


@pytest.mark.parametrize(("left_with", "expected"), [(74, 75), (71, 1)])
def test_when_the_time_is_spent_the_code_says_whether_anything_was_lost(launched, left_with, expected):
    code, _, words = launched(2, 3, "0.0=wait", f"1.0=exit:{left_with}").end()
    assert code == expected
    assert words.startswith("launcher: rank 1 met a fault that may pass; tried again for 0 s (retry_for)")


def test_ctrl_c_does_not_end_the_server_that_still_imports():
    """A terminal sends it to the launcher's children too; the server begins with the signal masked."""
    process, channel = start_server(Program("json", "json"))
    blocked = next(line for line in Path(f"/proc/{process.pid}/status").read_text().splitlines() if "SigBlk" in line)
    process.kill()
    process.wait()
    channel.close()
    assert int(blocked.split()[1], 16) >> (signal.SIGINT - 1) & 1
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_a_launch_that_has_lost_batches_is_no_preemption_though_its_last_try_could_not_begin(launched):
    """The first try trains and can save nothing, and the second one finds that the bucket is still down."""
    code, _, words = launched(1, 0, "0.0=exit:71", "0.1=exit:74", "0.2=exit:74", RETRY_SECONDS="0.1").end()
    assert code == 1
    assert words.splitlines()[-1].startswith("launcher: rank 0 met a fault that may pass; tried again for 0.1 s")


def test_only_saved_batches_count_as_progress_of_a_launch(tmp_path, monkeypatch):
    """Else a run whose bucket is gone would be tried again for ever, with the same batches."""
    seen = []

    def run(launcher: Launcher, arguments):
        for batch, saved in ((0, None), (20, None), (20, "ba20"), (30, "ba20")):
            write_status(tmp_path, "running", batch, last_saved=saved)
            seen.append((launcher.progress(), launcher.begun()))
        return 0

    monkeypatch.setattr(Launcher, "run", run)
    config = SimpleNamespace(
        run_folder=str(tmp_path),
        retry_for=Time.parse("60s"),
        environment={},
        own_code=[],
        icl_tasks=[],
        icl_task_folder=None,
    )
    checked = SimpleNamespace(invocation=SimpleNamespace(config=config))
    monkeypatch.setattr("llmfoundry_lite.launch_train.check", lambda arguments, merged: checked)
    monkeypatch.setattr("llmfoundry_lite.launch_train.check_access", lambda config: None)
    assert train_ranks(["run.yaml"], 2, 3, None) == 0
    assert seen == [(None, 0), (None, 20), ("ba20", 20), ("ba20", 30)]
