"""Signals that ask a process to leave."""

import signal

import pytest

from llmfoundry_lite.ranks.signals import LEAVING_SIGNALS, describe_reason_to_leave, handle_leaving_signals


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


def test_a_closed_terminal_is_named():
    assert describe_reason_to_leave("SIGHUP") == "preempted by SIGHUP (its terminal has closed)"
    assert describe_reason_to_leave("SIGTERM") == "preempted by SIGTERM"
