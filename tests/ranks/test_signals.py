"""Signals that ask a process to leave."""

import os
import signal
import threading

import pytest

from llmfoundry_lite.ranks.signals import (
    LEAVING_SIGNALS,
    describe_reason_to_leave,
    handle_leaving_signals,
    signals_given_back,
)
from llmfoundry_lite.training import preemption
from llmfoundry_lite.training.preemption import Preemption


@pytest.fixture
def handlers():
    before = {number: signal.getsignal(number) for number in LEAVING_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_an_ignored_hang_up_stays_ignored_and_other_signals_are_heard(handlers):
    """`nohup` and `setsid` ignore it for the program that they start."""
    heard = []
    for number in LEAVING_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    handle_leaving_signals(lambda number, frame: heard.append(number))
    for number in LEAVING_SIGNALS:
        signal.raise_signal(number)
    assert heard == [number for number in LEAVING_SIGNALS if number != signal.SIGHUP]


def test_a_program_has_its_signals_back_after_a_launch_in_its_process(handlers, tmp_path, monkeypatch):
    """Ctrl-C in the program must not make the launch's thread end it."""
    monkeypatch.setattr(preemption.dist, "get_rank", lambda: 0)
    heard = []
    signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    ended = Preemption(tmp_path, 0.0, None, print, print)
    ended._poll_other_ranks = lambda: None
    threads_before = set(threading.enumerate())
    descriptors_before = set(os.listdir("/proc/self/fd"))
    with signals_given_back():
        ended.listen()
        new_threads = set(threading.enumerate()) - threads_before
        (thread,) = (thread for thread in new_threads if thread.name == "preemption")
    thread.join(10.0)
    assert not thread.is_alive()
    assert set(os.listdir("/proc/self/fd")) == descriptors_before
    signal.raise_signal(signal.SIGTERM)
    assert heard == [signal.SIGTERM] and not ended.reason
    assert signal.set_wakeup_fd(-1) == -1


def test_a_closed_terminal_is_named():
    assert describe_reason_to_leave("SIGHUP") == "preempted by SIGHUP (its terminal has closed)"
    assert describe_reason_to_leave("SIGTERM") == "preempted by SIGTERM"
