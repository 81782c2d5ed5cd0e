"""Processes of a launch whose output nobody reads."""

import os
import subprocess
import sys

import pytest

from tests.helpers.launch import ROOT

SPEAKS = """
import os, sys
from llmfoundry_lite.errors import ConfigError
from llmfoundry_lite.ranks.ending import Preempted, run_and_exit

def main(arguments):
    for stream in (sys.stdout, sys.stderr):
        print("a batch has ended", file=stream, flush=True)
        print("another has ended", end="", file=stream)
    assert os.open(os.devnull, os.O_RDONLY) > 2  # or children would write into it
    raise {"75": Preempted("as asked", orderly=True), "2": ConfigError("a mistake")}[arguments[0]]

run_and_exit(main)
"""


@pytest.mark.parametrize("code", [75, 2])
@pytest.mark.parametrize("closed", [">/dev/full", "2>/dev/full", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_words_that_cannot_be_written_change_no_exit_code(closed, code):
    shell = ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-c", SPEAKS, str(code)]
    assert subprocess.run(shell, cwd=ROOT, capture_output=True).returncode == code


@pytest.mark.parametrize("code", [75, 2])
def test_whoever_reads_the_words_may_end_first(code):
    """Ctrl-C ends `| tee` before a rank has saved."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb") as pipe:
        command = [sys.executable, "-c", SPEAKS, str(code)]
        assert subprocess.run(command, cwd=ROOT, stdout=pipe, stderr=pipe).returncode == code


def test_a_terminal_that_has_closed_changes_no_exit_code():
    """Each write is answered with EIO."""
    keyboard, terminal = os.openpty()
    os.close(keyboard)
    with open(terminal, "wb", buffering=0) as closed:
        command = [sys.executable, "-c", SPEAKS, "75"]
        assert subprocess.run(command, cwd=ROOT, stdout=closed, stderr=closed).returncode == 75
