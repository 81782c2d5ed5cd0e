"""Processes whose output nobody reads, or whose console cannot print all characters."""

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


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_characters_that_a_console_cannot_print_are_replaced(encoding):
    said = [sys.executable, "-c", SPEAKS.replace("a batch has ended", "a batch · has ended → 1"), "75"]
    result = subprocess.run(said, cwd=ROOT, env={**os.environ, "PYTHONIOENCODING": encoding}, capture_output=True)
    point = "?" if encoding == "ascii" else "·"
    assert result.returncode == 75
    assert result.stdout.decode(encoding).startswith(f"a batch {point} has ended ? 1\n")


@pytest.mark.parametrize("prepare", ["prepare_output", "ignore_output_errors"])
@pytest.mark.parametrize(("unbuffered", "printed"), [("1", "a line of a callback\n"), ("", "")])
def test_text_is_written_at_once_where_python_is_told_so(unbuffered, printed, prepare):
    """A process that is killed has no time to write what it has kept back. Standard error is never kept back."""
    program = f"""
import os, sys
from llmfoundry_lite.ranks import output
output.{prepare}()
print("a line of a callback")
sys.stderr.write("a warning\\n")
os._exit(0)
"""
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (result.stdout, result.stderr) == (printed, "a warning\n")


def test_a_pipe_that_is_full_holds_no_rank_up():
    """As `| less` does, which reads no more than it shows."""
    program = "import llmfoundry_lite.ranks.output as output; output.STALL_SECONDS = 0.01\n"
    reader, writer = os.pipe()
    command = [sys.executable, "-c", program + SPEAKS.replace('"a batch has ended"', '"a batch" * 100_000'), "75"]
    with open(writer, "wb") as pipe:
        assert subprocess.run(command, cwd=ROOT, stdout=pipe, stderr=subprocess.DEVNULL, timeout=60).returncode == 75
    os.close(reader)


@pytest.mark.parametrize(("drops", "read"), [(True, "beginning"), (False, "all")])
def test_a_full_pipe_that_does_not_block_costs_an_answer_nothing(drops, read):
    """Another process has set O_NONBLOCK on the pipe. A rank drops what does not fit, an answer waits."""
    prepare = "ignore_output_errors" if drops else "prepare_output"
    program = f"from llmfoundry_lite.ranks import output; output.STALL_SECONDS = 0.01; output.{prepare}()\n"
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    process = subprocess.Popen([sys.executable, "-c", program + "print('a' * 500_000)"], cwd=ROOT, stdout=writer)
    os.close(writer)
    if drops:
        assert process.wait(60) == 0
    with open(reader, "rb") as pipe:
        content = pipe.read()
    assert process.wait(60) == 0
    assert len(content) == 500_001 if read == "all" else 0 < len(content) < 500_001
