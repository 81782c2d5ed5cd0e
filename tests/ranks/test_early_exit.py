"""A program that is asked to leave while it imports has the exit code of one that is asked later."""

import os
import signal
import subprocess
import sys

import pytest

from tests.helpers.launch import ROOT

SIGNAL_AT_AN_IMPORT = """
import os, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name in ("omegaconf", "typer", "yaml"):
            os.kill(os.getpid(), int(os.environ["NUMBER"]))

sys.meta_path.insert(0, Finder())
"""

PROGRAMS = {
    "module": ["-m", "llmfoundry_lite.train", "mpt-125m"],
    "script": [str(ROOT / "scripts/train.py"), "mpt-125m"],
    "command": ["-m", "llmfoundry_lite", "train", "mpt-125m"],
    "launcher": ["-m", "llmfoundry_lite", "train", "-n", "2", "mpt-125m"],
    "module of eval": ["-m", "llmfoundry_lite.eval"],
    "script of eval": [str(ROOT / "scripts/eval.py")],
    "eval": ["-m", "llmfoundry_lite", "eval"],
    "relay": ["-m", "llmfoundry_lite", "relay", "relay.yaml"],
}


def run(arguments, tmp_path, number, **environment):
    (tmp_path / "sitecustomize.py").write_text(SIGNAL_AT_AN_IMPORT)
    more = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "NUMBER": str(int(number)), **environment}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=tmp_path, env=os.environ | more, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_that_still_imports_leaves_with_75(tmp_path, program):
    done = run(PROGRAMS[program], tmp_path, signal.SIGTERM)
    text = "preempted by SIGTERM before anything had begun; run the same command again\n"
    assert (done.returncode, done.stderr) == (75, text)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGUSR1])
def test_other_wishes_to_leave_are_heard_too_and_other_ranks_say_nothing(tmp_path, number):
    done = run(PROGRAMS["module"], tmp_path, number, RANK="1")
    assert (done.returncode, done.stderr) == (75, "")


def test_other_commands_end_as_programs_do(tmp_path):
    assert run(["-m", "llmfoundry_lite", "report", "x"], tmp_path, signal.SIGTERM).returncode == -signal.SIGTERM
