"""`lf.train` and `lf.evaluate`: what a program gives them, alone and as ranks of a launcher."""

import inspect
import io
import json
import os
import pkgutil
import signal
import subprocess
import sys

import pytest
import torch.distributed as dist
import yaml

import llmfoundry_lite as lf
from tests.helpers.launch import ROOT

pytestmark = pytest.mark.multiprocess

SCRIPT = """
import json, sys
import llmfoundry_lite as lf
config = json.loads(sys.argv[1])
run = lf.train(config, run_folder=sys.argv[2] + "/two", **{"optimizer.lr": 1e-5})
found = lf.evaluate("words.yaml", models={"two": run}, results_folder=sys.argv[2])
print(f"{run} {found['two'].tasks['words/0-shot']['n']}\\n", end="", flush=True)  # in one piece
"""


def settings(here, **changes):
    """The run of the examples, as a mapping."""
    return yaml.safe_load((here / "runs/tiny/config.yaml").read_text()) | {"max_duration": "2ba"} | changes


@pytest.mark.slow
def test_ranks_of_a_launcher_train_and_evaluate_one_run(here, tmp_path):
    """The data of each batch are those of one rank. The examples' folder is left as it was."""
    (tmp_path / "train.py").write_text(SCRIPT)
    two = settings(here, global_train_batch_size=8)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    said = subprocess.run(
        [*launcher, str(tmp_path / "train.py"), json.dumps(two), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT}/companions", "OMP_NUM_THREADS": "1"},
    )
    assert said.returncode == 0, said.stderr
    assert said.stdout.count(f"<{tmp_path}/two: batches 1 to 2> 2") == 2
    assert lf.read_run(tmp_path / "two").log.digest == lf.read_run("runs/tiny").log.digest[:2]


def test_a_mapping_without_tasks_asks_those_whose_data_are_here(here, tmp_path):
    (tmp_path / "words.yaml").write_text((here / "words.yaml").read_text())
    asked = {"models": {"tiny": "runs/tiny"}, "task_folder": str(tmp_path)}
    found = lf.evaluate(asked, results_folder=str(tmp_path / "results"))
    assert found["tiny"].tasks.keys() == {"words/0-shot"}


def test_train_stays_a_function_whatever_else_is_imported():
    """A module of that name would take its place in the package."""
    names = [module.name for module in pkgutil.iter_modules(lf.__path__)]
    assert {*names}.isdisjoint(lf.__all__)
    assert inspect.isfunction(lf.train) and inspect.isfunction(lf.evaluate) and inspect.isfunction(lf.runs)


@pytest.mark.parametrize("call", ["train", "evaluate"])
def test_a_console_that_cannot_print_a_character_ends_no_call(call, here, tmp_path, monkeypatch, capfd):
    """What they print has `±` and `·`. Afterwards the program's output is as it was."""
    with io.TextIOWrapper(io.FileIO(1, "w", closefd=False), encoding="ascii") as ascii_console:
        monkeypatch.setattr(sys, "stdout", ascii_console)
        monkeypatch.setattr(sys, "__stdout__", ascii_console)
        if call == "train":
            lf.train(settings(here), run_folder=str(tmp_path / "run"))
        else:
            lf.evaluate("words.yaml", models={"tiny": "runs/tiny"}, results_folder=str(tmp_path))
        assert sys.stdout is ascii_console
    assert "?" in capfd.readouterr().out


def test_a_program_s_signals_and_process_group_are_as_they_were(here, tmp_path):
    before = signal.getsignal(signal.SIGINT)
    run = lf.train(settings(here), run_folder=str(tmp_path / "run"))
    assert run.log["batch"][-1] == 2 and signal.getsignal(signal.SIGINT) is before and not dist.is_initialized()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"run_name": None}, "the configuration: run_name: none given"),
        ({"max_duratoin": "2ba"}, "the configuration: max_duratoin: unknown key; did you mean max_duration?"),
        ({"seed": object()}, "the configuration: .*object.*; expected what YAML can hold"),
    ],
)
def test_what_is_wrong_with_a_mapping_is_said_in_a_line(here, changes, words):
    with pytest.raises(lf.UserError, match=f"^{words}"):
        lf.train(settings(here, **changes))
    with pytest.raises(lf.UserError, match=r"^command line: model\.d_modle: unknown key"):
        lf.train("runs/tiny/config.yaml", **{"model.d_modle": 3})
