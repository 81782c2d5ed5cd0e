"""A run whose tokenizer the user's code builds: on other ranks, resumed, read without the code, changed in mid-run."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from llmfoundry_lite.checkpoint.full_tensors import open_checkpoint
from llmfoundry_lite.data.tokenizer import load_tokenizer
from llmfoundry_lite.launch.replay import compare_replay, plan_replay, write_replay
from llmfoundry_lite.launch_replay import main
from tests.helpers.launch import PATHS, ROOT, launch
from tests.helpers.runs import losses, saves
from tests.helpers.tiny import tiny_config, write_config

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

NAME = "python:counted_tokens:build_bytes"
COUNTING = """

def build_changing(path):
    \"\"\"Return a tokenizer whose vocabulary grows with the lines of a file, one for each call.\"\"\"
    tokenizer = build_bytes()
    with open(path, "a+") as file:
        file.write("called\\n")
        file.seek(0)
        tokenizer.add_tokens([f"word{line}" for line, _ in enumerate(file)])
    return tokenizer
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with the page's example in `code`, data that it has encoded, and a run of 6 batches, `whole`."""
    folder = tmp_path_factory.mktemp("runs")
    section = (ROOT / "docs/own-parts.md").read_text().split("## A tokenizer\n")[1]
    code, *_ = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    (folder / "code").mkdir()
    (folder / "code/counted_tokens.py").write_text(code + COUNTING)
    texts = [f"naïve tea, number {number}, and a biscuit" for number in range(400)]
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    command(
        folder,
        "data",
        "prepare",
        "texts.jsonl",
        "--tokenizer",
        NAME,
        "--out",
        "data",
        "--max-seq-len",
        "32",
        "--val-fraction",
        "0.1",
    )
    train(folder, "whole").check()
    return folder


def train(folder, name, num_ranks=1, **changes):
    """Launch the run `name` on some ranks, which have the module on their path."""
    path = write_config(folder / f"{name}.yaml", config(folder) | {"run_name": name} | changes)
    return launch(train_with_code, (str(folder / "code"), path), folder, num_ranks)


def train_with_code(code, path):
    from llmfoundry_lite.launch_train import main
    from llmfoundry_lite.ranks.ending import run_and_exit

    sys.path.insert(0, code)
    sys.argv = ["scripts/train.py", path]
    run_and_exit(main)


def command(folder: Path, *words: str, has_code: bool = True) -> str:
    """Run `llmfoundry-lite` in `folder` and return its output. The module is on its path if `has_code`."""
    done = subprocess.run(
        [sys.executable, "-m", "llmfoundry_lite.cli.main", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": f"{PATHS}:{folder / 'code'}" if has_code else PATHS},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def config(folder):
    batches = {"global_train_batch_size": 12, "device_train_microbatch_size": 1, "max_duration": "6ba"}
    saves = {"save_interval": "2ba", "autoresume": True}
    model = {"tokenizer__name": NAME, "model__vocab_size": 320, "model__attn_config": {"attn_uses_sequence_id": True}}
    return tiny_config(folder / "data", exact_sums=True, **batches, **saves, **model)


def test_it_carries_on_on_two_ranks_bit_equal(folder):
    train(folder, "moved", stop_at="3ba").check()
    train(folder, "moved", 2).check()
    assert losses(folder, "moved") == losses(folder, "whole") and len(losses(folder, "moved")) == 6

    recorded = open_checkpoint(saves(folder, "moved") / "ba6").manifest.config
    assert recorded["tokenizer"] == {"name": NAME, "kwargs": {}}


def test_its_checkpoint_is_read_without_the_code(folder):
    """In the working directory of `generate`, the module is another one, which must not be imported."""
    traps = folder / "traps"
    traps.mkdir()
    (traps / "counted_tokens.py").write_text("raise SystemExit('it ran')")
    checkpoint = str(saves(folder, "whole") / "ba6")
    generate = ("generate", checkpoint, "--prompt", "tea", "--max-new-tokens", "4")
    assert "tea" in command(traps, *generate, has_code=False)
    command(folder, "checkpoint", "export", checkpoint, "exported", has_code=False)
    assert load_tokenizer(folder / "exported").fingerprint == load_tokenizer(folder / "data/tokenizer").fingerprint

    (folder / "task.jsonl").write_text('{"context": "naïve", "continuation": " tea"}\n' * 4)
    task = "{label: tea, icl_task_type: language_modeling, dataset_uri: task.jsonl, num_fewshot: [0]}"
    command(folder, "eval", f"models.m={checkpoint}", f"icl_tasks=[{task}]", has_code=False)


def test_a_replay_takes_the_copy_beside_the_checkpoints(folder):
    plan = plan_replay(str(folder / "runs/whole"), "ba2..ba6")
    path = write_replay(plan, folder / "replay/run", 1)
    launch(main, ([path],), folder, 1).check()  # without the code
    outcome = compare_replay(plan, folder / "replay/run")
    assert outcome.is_equal, outcome.text


def test_one_that_builds_something_else_is_refused(folder):
    """In each launch, the vocabulary has one more word."""
    changing = {"name": "python:counted_tokens:build_changing", "kwargs": {"path": str(folder / "calls.txt")}}
    first = train(folder, "changing", tokenizer=changing)
    assert first.exit_codes == [2]
    assert "build_changing is not the tokenizer that made train_loader" in first.output

    # Shards without a summary do not know their tokenizer, and a checkpoint does.
    (folder / "data/summary.json").rename(folder / "data/summary.away")
    try:
        train(folder, "changing", tokenizer=changing, stop_at="2ba").check()
        resumed = train(folder, "changing", tokenizer=changing)
    finally:
        (folder / "data/summary.away").rename(folder / "data/summary.json")
    assert resumed.exit_codes == [2]
    assert "in the checkpoint; a run must resume with its checkpoint's tokenizer: name that one" in resumed.output
