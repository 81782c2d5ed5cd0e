"""A program that is asked to leave while it imports has the exit code of one that is asked later."""

import os
import signal
import subprocess
import sys
from functools import partial

import pytest

from tests.helpers.launch import ROOT
from tests.helpers.tiny import tiny_config, write_config

SIGNAL_AT_AN_IMPORT = """
import os, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ.get("MISSING"):
            raise ImportError("libfoo.so: cannot open shared object file")
        if name in os.environ.get("AT", "omegaconf typer yaml").split():
            os.kill(os.getpid(), int(os.environ["NUMBER"]))

sys.meta_path.insert(0, Finder())
"""

PROGRAMS = {
    "module": ["-m", "llmfoundry_lite.launch_train", "mpt-125m"],
    "script": [str(ROOT / "scripts/train.py"), "mpt-125m"],
    "command": ["-m", "llmfoundry_lite", "train", "mpt-125m"],
    "launcher": ["-m", "llmfoundry_lite", "train", "-n", "2", "mpt-125m"],
    "module of eval": ["-m", "llmfoundry_lite.launch_eval"],
    "script of eval": [str(ROOT / "scripts/eval.py")],
    "eval": ["-m", "llmfoundry_lite", "eval"],
    "relay": ["-m", "llmfoundry_lite", "relay", "relay.yaml"],
}


def run(arguments, tmp_path, number, preexec_fn=None, **environment):
    (tmp_path / "sitecustomize.py").write_text(SIGNAL_AT_AN_IMPORT)
    more = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "NUMBER": str(int(number)), **environment}
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, cwd=tmp_path, env=os.environ | more, capture_output=True, text=True, check=False, preexec_fn=preexec_fn
    )


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_that_still_imports_leaves_with_75(tmp_path, program):
    done = run(PROGRAMS[program], tmp_path, signal.SIGTERM)
    text = "preempted by SIGTERM before anything had begun; run the same command again\n"
    assert (done.returncode, done.stderr) == (75, text)


def test_a_launcher_in_a_job_of_several_ranks_hears_sigterm(tmp_path):
    """A batch script may export WORLD_SIZE; a rank has RANK too."""
    done = run(PROGRAMS["module"], tmp_path, signal.SIGTERM, WORLD_SIZE="8")
    text = "preempted by SIGTERM before anything had begun; run the same command again\n"
    assert (done.returncode, done.stderr) == (75, text)


def test_a_program_that_imports_composer_leaves_with_75(tmp_path, data):
    """Composer's own signal handlers would exit with 143."""
    config = write_config(tmp_path / "run.yaml", tiny_config(data))
    done = run(["-m", "llmfoundry_lite.launch_train", config], tmp_path, signal.SIGTERM, AT="composer.core.engine")
    text = "preempted by SIGTERM before anything had begun; run the same command again\n"
    assert (done.returncode, done.stderr) == (75, text)


ONE_OF_TWO = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}


@pytest.mark.parametrize("program", ["module", "script", "module of eval"])
def test_a_rank_of_several_that_is_terminated_meets_its_mistake_first(tmp_path, program):
    """Its launcher may end it because the same mistake has ended another rank."""
    wrong = [*PROGRAMS[program], "optimizer.learning_rate=1"]
    done = run(wrong, tmp_path, signal.SIGTERM, TMPDIR=str(tmp_path), **ONE_OF_TWO)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


def test_a_rank_of_several_that_is_preempted_leaves_when_it_has_checked_its_configuration(tmp_path):
    done = run([*PROGRAMS["module"], "--dry-run"], tmp_path, signal.SIGTERM, TMPDIR=str(tmp_path), **ONE_OF_TWO)
    assert (done.returncode, done.stderr) == (75, "preempted by SIGTERM; run the same command again\n")


def test_a_rank_that_is_killed_while_it_imports_has_failed(tmp_path):
    """A library's crash or lack of memory kills it. Its launcher then ends the others."""
    rank_1 = ONE_OF_TWO | {"RANK": "1", "LOCAL_RANK": "1"}
    killed = run(PROGRAMS["script"], tmp_path, signal.SIGKILL, TMPDIR=str(tmp_path), **rank_1)
    done = run([*PROGRAMS["script"], "--dry-run"], tmp_path, signal.SIGTERM, TMPDIR=str(tmp_path), **ONE_OF_TWO)
    assert (killed.returncode, done.returncode) == (-signal.SIGKILL, 1)
    assert done.stderr.startswith("error: rank 1 has ended without a message") and done.stderr.count("\n") == 1


def test_a_rank_that_leaves_while_it_imports_has_not_been_killed(tmp_path):
    """A terminal's Ctrl-C reaches all ranks, one before the other."""
    rank_1 = ONE_OF_TWO | {"RANK": "1", "LOCAL_RANK": "1"}
    left = run(PROGRAMS["script"], tmp_path, signal.SIGINT, TMPDIR=str(tmp_path), **rank_1)
    done = run([*PROGRAMS["script"], "--dry-run"], tmp_path, signal.SIGTERM, TMPDIR=str(tmp_path), **ONE_OF_TWO)
    assert (left.returncode, done.returncode) == (75, 75)


def test_a_broken_installation_is_no_preemption(tmp_path):
    place = ONE_OF_TWO | {"TMPDIR": str(tmp_path), "MISSING": "yaml"}
    done = run(PROGRAMS["module"], tmp_path, signal.SIGTERM, **place)
    assert done.returncode == 1 and done.stderr.count("ImportError: libfoo.so") == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGUSR1, signal.SIGHUP, signal.SIGUSR2, signal.SIGXCPU])
def test_other_wishes_to_leave_are_heard_too_and_other_ranks_say_nothing(tmp_path, number):
    done = run(PROGRAMS["module"], tmp_path, number, RANK="1")
    assert (done.returncode, done.stderr) == (75, "")


@pytest.mark.parametrize("program", ["module", "launcher", "relay"])
def test_a_closed_terminal_is_named_and_stays_ignored_under_nohup(tmp_path, program):
    done = run(PROGRAMS[program], tmp_path, signal.SIGHUP)
    text = "preempted by SIGHUP (its terminal has closed) before anything had begun; run the same command again\n"
    assert (done.returncode, done.stderr) == (75, text)
    done = run(
        PROGRAMS[program], tmp_path, signal.SIGHUP, preexec_fn=partial(signal.signal, signal.SIGHUP, signal.SIG_IGN)
    )
    assert done.returncode == 2


def test_other_commands_end_as_programs_do(tmp_path):
    assert run(["-m", "llmfoundry_lite", "report", "x"], tmp_path, signal.SIGTERM).returncode == -signal.SIGTERM
