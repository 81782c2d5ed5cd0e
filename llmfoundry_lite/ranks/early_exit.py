"""Signals that come while a program still imports, or checks its configuration: exit with code 75, where Python would
exit with 143.

A launcher ends the other ranks by SIGTERM when one has failed. A mistake in the configuration or in the installation is
the same on each, so a rank that gets SIGTERM goes on until it has met it, or knows that there is none.

It imports nothing that takes time. `ranks.ending`, the launcher and the relay replace its handlers with their own.
"""

import os
import signal
import sys
import threading
import traceback
from contextlib import suppress
from types import TracebackType
from typing import Any

from llmfoundry_lite.errors import EXIT_BUG, EXIT_PREEMPTED
from llmfoundry_lite.ranks.signals import leaving_because, listen

CHECK_SECONDS = 10.0
"""How long a rank that gets SIGTERM goes on. Launchers and SLURM kill after 30."""
was_put_off = threading.Event()
"""SIGTERM has come, and the rank goes on."""


def leave_with_75_when_asked() -> None:
    """Exit with code 75 on a signal that asks to leave. For programs that the same command carries on."""
    listen(leave)
    if _has_siblings():
        sys.excepthook = _report_once
    if "RANK" in os.environ:  # `srun`'s variables are translated later
        from llmfoundry_lite.ranks import siblings

        siblings.enrol()  # from here on the others notice a death


def leave(number: int, frame: Any = None) -> None:
    if number != signal.SIGTERM or not _has_siblings():
        leave_now(number)
    if not was_put_off.is_set():
        was_put_off.set()
        limit.start()


def leave_now(number: int, frame: Any = None) -> None:
    """Exit with code 75; with that of another rank if it has failed."""
    because = leaving_because(signal.Signals(number).name)
    code, text = EXIT_PREEMPTED, f"{because} before anything had begun; run the same command again"
    is_told = os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0"
    with suppress(KeyError, AttributeError):  # until it is imported nothing has been noted
        siblings: Any = sys.modules["llmfoundry_lite.ranks.siblings"]
        if failure := siblings.failure_of_another():
            code, text = failure.code, failure.text
            is_told = siblings.note_end(code, text).rank == siblings.this_rank().rank
        siblings.note_end(code)
    if is_told:
        os.write(2, f"{text}\n".encode())
    os._exit(code)


limit = threading.Timer(CHECK_SECONDS, leave_now, [signal.SIGTERM])
"""Ends a rank that goes on, unless it has met its own error before."""
limit.daemon = True


def _has_siblings() -> bool:
    """Return whether a launcher has started other ranks on this node; by the variables of `srun` or the others'."""
    is_step = "RANK" not in os.environ and int(os.environ.get("SLURM_STEP_NUM_TASKS") or 1) > 1
    return is_step or int(os.environ.get("WORLD_SIZE") or 1) > 1


def _report_once(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print what the imports have raised, on one rank of a node."""
    is_first = True
    with suppress(Exception):
        from llmfoundry_lite.ranks import rank, siblings

        rank.adopt_srun()
        siblings.enrol()
        text = "".join(traceback.format_exception(error))
        is_first = siblings.note_end(EXIT_BUG, text).rank == rank.this_rank().rank
    if is_first:
        sys.__excepthook__(kind, error, trace)
