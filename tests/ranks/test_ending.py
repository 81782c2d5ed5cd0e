"""How a rank ends when it is asked to leave."""

import errno
import io
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import torch.distributed as dist

from llmfoundry_lite.errors import UserError
from llmfoundry_lite.ranks import ending
from llmfoundry_lite.ranks.siblings import FirstError
from llmfoundry_lite.ranks.signals import LEAVING_SIGNALS
from llmfoundry_lite.ranks.start import start_process_group
from tests.helpers.launch import ROOT, free_port

WAITS = """
from llmfoundry_lite.ranks.ending import run_and_exit
from llmfoundry_lite.ranks.siblings import FirstError
from llmfoundry_lite.ranks.signals import LEAVING_SIGNALS
from llmfoundry_lite.ranks.start import start_process_group

def main(arguments):
    print("begins", flush=True)
    start_process_group("cpu", 600.0)

run_and_exit(main)
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_rank_that_waits_for_others_leaves_though_they_never_come(number):
    """They may have been asked to leave a moment before. Python's handlers do not run while it waits."""
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    environment = os.environ | place | {"MASTER_PORT": str(free_port()), "PYTHONPATH": str(ROOT)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    rank = subprocess.Popen([sys.executable, "-c", WAITS], env=environment, **pipes)
    try:
        assert rank.stdout.readline() == "begins\n"
        port = int(environment["MASTER_PORT"])
        while not any(one.laddr.port == port for one in psutil.Process(rank.pid).net_connections()):
            assert rank.poll() is None
        rank.send_signal(number)
        _, said = rank.communicate(timeout=60)
    finally:
        rank.kill()
    reason = "preempted by SIGTERM" if number == signal.SIGTERM else "interrupted by Ctrl-C"
    assert (rank.returncode, said) == (75, f"{reason}; run the same command again\n")


@pytest.mark.fault
def test_a_rank_whose_rank_0_freezes_while_they_meet_ends_by_itself(monkeypatch, capsys):
    """torch connects, as the kernel does that for a frozen process, and then waits for an answer for ever."""
    left, codes = threading.Event(), []
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(dist, "init_process_group", lambda *arguments, **options: left.wait(60))
    monkeypatch.setattr(ending, "exit_now", lambda code: (codes.append(code), left.set()))
    start_process_group("cpu", 0.05, 2)
    assert codes == [2]
    said = "error: rank 1: the ranks have not met in 0.1 s, and rank 0 at localhost does not answer: it is frozen"
    assert said in capsys.readouterr().err


@pytest.mark.fault
def test_a_rank_that_fails_beside_a_frozen_rank_0_says_why_and_ends(monkeypatch):
    frozen = threading.Event()

    class Store:
        def compare_set(self, *arguments):
            frozen.wait(60)
            raise RuntimeError

    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(ending, "_process_group_store", Store)
    monkeypatch.setattr(ending, "STORE_SECONDS", 0.05)
    first = ending.claim_first_error(UserError("lost contact"))
    frozen.set()
    assert first == (1, 2, "error: lost contact")


FAILURE = FirstError(3, 2, "error: a shard is damaged")


def test_a_rank_that_its_launcher_ends_because_another_has_failed_is_not_preempted(monkeypatch, capsys):
    before = {number: signal.getsignal(number) for number in LEAVING_SIGNALS}
    monkeypatch.setattr(ending, "find_failure_of_other_rank", lambda: FAILURE)
    monkeypatch.setattr(ending.siblings, "record_end", lambda code, text: FAILURE)
    try:
        ending.raise_when_interrupted()
        with pytest.raises(ending.AnotherFailedError) as caught:
            signal.raise_signal(signal.SIGTERM)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    ending.report_error(caught.value)
    assert (ending.exit_code_of(caught.value), capsys.readouterr().err) == (2, "")
    assert ending.describe_cause(caught.value) == "a shard is damaged"


def summary_of(error: BaseException) -> str:
    """What status.json has about a bug with a traceback."""
    try:
        raise error
    except type(error) as raised:
        return ending.describe_failure(FirstError(1, 1, ending.describe_error(raised)))


def test_a_reason_has_all_lines_of_a_message_and_no_traceback():
    cuda = "CUDA error: out of memory\nFor debugging, see above.\nCompile with `TORCH_USE_CUDA_DSA`.\n"
    expected = "CUDA error: out of memory For debugging, see above. Compile with `TORCH_USE_CUDA_DSA`."
    assert summary_of(RuntimeError(cuda)) == f"rank 1: RuntimeError: {expected}"
    assert summary_of(ValueError("a key is missing:\n\tnorm.weight")) == (
        "rank 1: ValueError: a key is missing: norm.weight"
    )
    assert summary_of(KeyError()) == "rank 1: KeyError"
    assert len(summary_of(ValueError("x" * 10_000))) == len("rank 1: ") + ending.MAX_SUMMARY_CHARACTERS


def test_words_of_gloo_about_a_lost_rank_are_cut():
    text = "[/pytorch/gloo/transport/tcp/pair.cc:537] Connection closed by peer [127.0.0.1]:1. " + "Good luck! " * 20
    described = ending.describe_error(RuntimeError(text))
    assert "(Connection closed by peer [127.0.0.1]:1. Good luck!" in described
    assert len(described.rpartition("(")[2]) == ending.MAX_LOST_PEER_CHARACTERS + 1


@pytest.mark.parametrize(("announced", "expected"), [("", FAILURE), ("SIGTERM", None)])
def test_a_failure_that_follows_a_preemption_is_not_the_reason(monkeypatch, announced, expected):
    """A rank that is preempted leaves others without it, who then fail."""

    said = {ending.PREEMPTED: announced, ending.FIRST_ERROR: "5 1 error: lost contact"}

    class Store:
        def compare_set(self, key, *_):
            return said[key].encode()

    monkeypatch.setattr(ending, "_process_group_store", Store)
    monkeypatch.setattr(ending.siblings, "find_recorded_failure", lambda: FAILURE)
    assert ending.find_failure_of_other_rank() == expected


def test_a_signal_while_modules_are_imported_ends_at_once_and_is_heard_by_nobody_else(monkeypatch):
    """Composer's engine installs handlers that raise SystemExit(143), which others swallow."""
    before = {number: signal.getsignal(number) for number in LEAVING_SIGNALS}
    heard, alarms = [], signal.getsignal(signal.SIGALRM)
    monkeypatch.setattr(ending, "leave_now", lambda number, frame: heard.append(number))
    try:
        with ending.leaving_during_imports():
            signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))
            signal.raise_signal(signal.SIGTERM)
            assert signal.signal(signal.SIGALRM, signal.SIG_IGN) == alarms  # other signals are anybody's
        with pytest.raises(ending.Preempted):
            signal.raise_signal(signal.SIGTERM)
    finally:
        for number, handler in (before | {signal.SIGALRM: alarms}).items():
            signal.signal(number, handler)
    assert heard == [signal.SIGTERM]


@pytest.mark.parametrize(("end", "is_said"), [("ValueError: 3", False), ("ValueError: 4", True)])
def test_a_traceback_that_another_rank_has_printed_is_not_printed_again(monkeypatch, capsys, end, is_said):
    first = FirstError(0, 1, f"Traceback (most recent call last):\n  from further within\n{end}")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(ending.siblings, "record_end", lambda code, text: first)
    try:
        raise ValueError(3)
    except ValueError as error:
        ending.report_error(error)
    assert ("Traceback" in capsys.readouterr().err) == is_said


def test_a_mistake_of_a_rank_whose_output_is_a_file_is_shown_beside_the_launcher_s_output(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(ending.siblings, "record_end", lambda code, text: FirstError(1, code, text))
    monkeypatch.setattr(ending, "launcher_stderr", io.StringIO())
    ending.report_error(UserError("no such mount"))
    assert ending.launcher_stderr.getvalue() == "rank 1: error: no such mount\n"
    ending.report_error(ValueError("a bug, which is tried again"))
    assert ending.launcher_stderr.getvalue().count("\n") == 1
    assert "error: no such mount\nValueError" in capsys.readouterr().err


def full_disk():
    error = UserError("runs/x/metrics.jsonl cannot be written")
    error.__cause__ = OSError(errno.ENOSPC, "No space left on device")
    return error


@pytest.mark.parametrize(("has_launcher", "has_lost", "expected"), [(0, 0, 75), (0, 1, 1), (1, 0, 74), (1, 1, 71)])
def test_a_fault_that_may_pass_has_codes_of_its_own_for_our_launcher(monkeypatch, has_launcher, has_lost, expected):
    monkeypatch.delenv(ending.RANK_LOGS, raising=False)
    if has_launcher:
        monkeypatch.setenv(ending.RANK_LOGS, "logs")
    error = full_disk()
    error.has_lost = bool(has_lost)
    assert ending.exit_code_of(error) == expected
    assert ending.describe_error(error).endswith("; this may pass: run the same command again")


def test_a_rank_that_lost_another_leaves_with_the_code_of_the_first_to_fail(monkeypatch):
    """The launcher and composer must not take the one's full disk for the other's bug."""

    class Store:
        said = ""

        def compare_set(self, key, expected, desired):
            self.said = self.said or desired
            return self.said.encode()

    store = Store()
    monkeypatch.setattr(ending, "_process_group_store", lambda: store)
    monkeypatch.delenv(ending.RANK_LOGS, raising=False)
    monkeypatch.setenv("RANK", "3")
    assert ending.describe_cause(full_disk()).startswith("runs/x/metrics.jsonl cannot be written")
    monkeypatch.setenv("RANK", "0")
    lost = RuntimeError("Connection closed by peer")
    assert ending.exit_code_of(lost) == 75
    assert ending.describe_cause(lost).startswith("rank 3: runs/x/metrics.jsonl cannot be written")


@pytest.mark.parametrize("batches", [(7, 7, 7), (7, 7), (7, 7, 8)])
def test_ranks_act_together_after_an_error_if_all_have_met_it(batches, monkeypatch):
    """One that is missing waits for the others in a collective, so they must not start another one."""
    store = dist.HashStore()
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setattr(ending, "_process_group_store", lambda: store)
    monkeypatch.setattr(ending, "TOGETHER_SECONDS", 60.0 if batches == (7, 7, 7) else 0.2)
    with ThreadPoolExecutor(3) as ranks:
        answers = list(ranks.map(ending.all_ranks_fail, batches))
    assert answers == [batches == (7, 7, 7)] * len(batches)
    assert ending.all_ranks_fail(7) == (len(batches) == 3 and answers[0]), "a late one gets the same answer"


def test_a_rank_that_meets_its_own_error_in_its_checks_is_not_preempted(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError), ending.sigterm_delayed():
        signal.raise_signal(signal.SIGTERM)
        raise UserError("a mistake")
    assert not signal.sigpending() and not signal.pthread_sigmask(signal.SIG_BLOCK, [])
