"""The example package of docs/own-parts.md: installed, found by its entry point, and trained with by short names."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.environments import find_uv
from tests.helpers.launch import PATHS, ROOT
from tests.helpers.runs import losses, metrics
from tests.helpers.tiny import tiny_config, values, write_config, write_data

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

SHORT_NAMES = {
    "model__norm_type": "scalenorm",
    "model__norm_kwargs": {"length": 0.9},
    "model__ffn_config": {"ffn_type": "squared_relu", "power": 2},
    "scheduler": {"name": "triangle", "peak": 0.4},
    "callbacks": {"heartbeat": {"every": 2}},
    "token_budget": {"total": 960},
}
"""Every part of the package. The budget is used up in the third of 6 batches of 12 samples of 32 tokens."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with data, and in `installed` the package as an installer puts it there."""
    folder = tmp_path_factory.mktemp("package")
    write_data(folder / "data")

    # A build writes beside its source, so it gets a copy.
    source = shutil.copytree(ROOT / "tests/own_package", folder / "source")
    target = ("--python", sys.executable, "--target", folder / "installed")
    offline = ("--offline", "--no-deps", "--no-build-isolation")
    call(folder, find_uv(), "pip", "install", "--quiet", *target, *offline, source)
    shutil.rmtree(source)
    return folder


def call(folder: Path, *command: object, code: int = 0, has_package: bool = True) -> str:
    """Run a command in `folder` and return its output, stdout first. The package is on its path if `has_package`."""
    paths = f"{PATHS}:{folder / 'installed'}" if has_package else PATHS
    done = subprocess.run(
        [str(word) for word in command],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == code, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def train(folder: Path, name: str, *options: str, **expected) -> str:
    """Run `llmfoundry-lite train` on the run `name`, whose YAML has short names only."""
    batches = {"global_train_batch_size": 12, "device_train_microbatch_size": 1, "max_duration": "6ba"}
    config = tiny_config(folder / "data", exact_sums=True, autoresume=True, run_name=name, **batches, **SHORT_NAMES)
    config["loggers"] = {"tail": {"path": f"{name}.txt"}}
    path = write_config(folder / f"{name}.yaml", config)
    program = (sys.executable, "-m", "llmfoundry_lite.cli.main")
    return call(folder, *program, "train", path, *options, **expected)


def test_it_is_installed_and_only_there(folder):
    """Its dist-info names the entry point, and nothing of it is found without the folder."""
    find = "from importlib.metadata import entry_points as e; print(*e(group='llmfoundry_lite.companions'))"
    assert "tiny.companion:COMPANION" in call(folder, sys.executable, "-c", find)
    assert call(folder, sys.executable, "-c", find, has_package=False) == "\n"
    refused = train(folder, "without", "--dry-run", code=2, has_package=False)
    assert "without.yaml: model.norm_type: 'scalenorm' is not known" in refused


def test_a_run_with_all_its_parts_is_bit_equal_on_other_ranks(folder):
    train(folder, "whole")
    first = train(folder, "moved", "stop_at=4ba")
    second = train(folder, "moved", "-n", "2")

    assert "model.norm_type: scalenorm is python:tiny.norms:ScaleNorm" in first
    assert len(losses(folder, "whole")) == 6
    assert losses(folder, "moved") == losses(folder, "whole")

    # The schedule, with its peak after 2.4 of 6 batches.
    factors = [0, 1 / 2.4, 2 / 2.4, 3 / 3.6, 2 / 3.6, 1 / 3.6]
    assert values(metrics(folder, "moved"), "lr") == pytest.approx([1e-2 * factor for factor in factors])

    # The state of both callbacks: beats are counted on, and the budget is not said to be used up again.
    assert values(metrics(folder, "moved"), "heartbeat/beats") == [1, 2, 3]
    assert values(metrics(folder, "moved"), "token_budget/left") == [960 - 384 * batch for batch in range(1, 7)]
    assert "token_budget: used up after batch 3" in first
    assert "used up" not in second

    # The logger, in two launches.
    lines = (folder / "moved.txt").read_text().splitlines()
    assert [float(line.split()[1]) for line in lines] == losses(folder, "whole")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("token_budget.total=383", "token_budget.total: 383 given, and a batch has 384; give at least that"),
        ("token_budget.totl=9", "token_budget.totl: unknown key; did you mean token_budget.total?"),
    ],
)
def test_a_wrong_value_is_a_line(folder, setting, message):
    refused = train(folder, "wrong", setting, code=2)
    assert message in refused and "Traceback" not in refused


def test_a_dry_run_describes_the_block(folder):
    assert "token budget  960 tokens" in train(folder, "dry", "--dry-run")


RHYMES = [
    ["the cat sat on a", ["mat", "hill"]],
    ["see the hill in a", ["mill", "mat"]],
    ["the sun and a", ["run", "cat"]],
]
TASK = {
    "label": "rhymes",
    "icl_task_type": "rhymes",
    "dataset_uri": "rhymes.jsonl",
    "least_lead": 0.5,
    "metric_names": ["lead"],
    "metric_kwargs": {"lead": {"per_token": True}},
}


def test_its_reader_task_and_metric_are_used_by_short_names(folder):
    """Data are prepared from mails, a run trains on them and evaluates the task, and so does an evaluation."""
    program = (sys.executable, "-m", "llmfoundry_lite.cli.main")
    (folder / "mails").mkdir()
    for number in range(4):
        mails = [f"From: ann\n\nthe cat sat on mat {100 * number + i} and ran\x1e" for i in range(100)]
        (folder / f"mails/{number}.mbx").write_text("".join(mails))
    rows = [{"line": line, "words": words, "rhyme": words[0]} for line, words in RHYMES * 6]
    (folder / "rhymes.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    options = ("--tokenizer", "train:300", "--max-seq-len", "32", "--num-workers", "2", "--val-fraction", "0.2")
    output = call(folder, *program, "data", "prepare", "mails", "--out", "mail-data", *options)
    assert ".mbx files are read by python:tiny.readers:read_mails" in output
    request = json.loads((folder / "mail-data/summary.json").read_text())["request"]
    assert request["readers"] == [".mbx=python:tiny.readers:read_mails"]

    settings = {"max_duration": "2ba", "eval_interval": "2ba", "icl_tasks": [TASK], "model__vocab_size": 384}
    config = tiny_config(folder / "mail-data", run_name="mails", **settings)
    config["tokenizer"] = {"name": str(folder / "mail-data/tokenizer")}
    output = call(folder, *program, "train", write_config(folder / "mails.yaml", config))
    assert "icl_tasks[0].icl_task_type: rhymes is python:tiny.tasks:Rhymes" in output
    assert "python:tiny.tasks:lead" in (folder / "runs/mails/config.yaml").read_text()

    evaluated = [f"models.{name}=runs/mails" for name in ("first", "second")]
    call(folder, *program, "eval", f"icl_tasks={json.dumps([TASK])}", "suite=s", *evaluated)
    results = [f"results/s/{name}.json" for name in ("first", "second")]
    compared = call(folder, *program, "compare", *results, has_package=False)
    assert "scored by python:tiny.tasks:Rhymes, python:tiny.tasks:lead" in compared
