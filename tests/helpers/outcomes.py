"""A plugin of pytest: which tests were collected and how each ended, a line of JSON at once in the file `OUTCOMES`.

What is read after the process was killed is still true: a test without a line had no time.
"""

import json
import os
from typing import Any

import pytest

WORKER = os.environ.get("PYTEST_XDIST_WORKER")
"""Of several workers the first one writes what all have collected. The process that started them writes outcomes."""


def write(**record: Any) -> None:
    with open(os.environ["OUTCOMES"], "a") as file:
        file.write(json.dumps(record) + "\n")


def pytest_collection_finish(session: pytest.Session) -> None:
    if WORKER == "gw0" or (WORKER is None and session.items):
        write(collected=[item.nodeid for item in session.items])


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write the test itself, and what else did not pass: a fixture that failed before or after it."""
    if WORKER is not None or (report.when != "call" and report.passed):
        return
    why = ""
    if report.skipped and isinstance(report.longrepr, tuple):
        why = report.longrepr[2]
    elif report.failed:
        crash = getattr(report.longrepr, "reprcrash", None)
        why = (crash.message if crash is not None else str(report.longrepr)).strip().splitlines()[0]
    write(test=report.nodeid, outcome=report.outcome, seconds=round(report.duration, 2), why=why[:300])
