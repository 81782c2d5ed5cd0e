"""A folder as the examples of docs/library.md have it: data/mine, runs/tiny and results."""

import json
from pathlib import Path

import pytest

from llmfoundry_lite.cli.main import run as run_command
from tests.helpers.launch import ROOT
from tests.helpers.preparing import write_jsonl
from tests.helpers.results import choice, write_result
from tests.helpers.runs import run
from tests.helpers.tiny import tiny_config

RIGHT = [1] * 40 + [0] * 60


@pytest.fixture(scope="session")
def world(tmp_path_factory) -> Path:
    """Nothing in it is changed by a test."""
    folder = tmp_path_factory.mktemp("library")
    text, data = folder / "text.jsonl", folder / "data/mine"
    write_jsonl(text, [path.read_text() for path in sorted((ROOT / "llmfoundry_lite/checkpoint").glob("l*.py"))])
    options = ("--tokenizer", "train:300", "--max-seq-len", "32", "--size-limit", "6000", "--num-workers", "1")
    prepare = ["data", "prepare", "--source", str(text), "--out", str(data), "--val-fraction", "0.2", *options]
    assert run_command(prepare) == 0
    config = tiny_config(Path("data/mine"), max_duration="6ba", save_interval="3ba", model__vocab_size=320)
    config["tokenizer"]["name"] = "data/mine/tokenizer"
    del config["eval_loader"]
    run(folder, config, "tiny")
    better = [1] * 60 + [0] * 40
    harder = [0] * 60 + [1] * 40
    write_result(folder / "results", "base", {"arc_easy/0-shot": choice(RIGHT), "piqa/0-shot": choice(harder)})
    write_result(
        folder / "results", "ours", {"arc_easy/0-shot": choice(better), "piqa/0-shot": choice([1] * 10 + harder[10:])}
    )
    rows = [{"query": "x =", "choices": ["1", "one"], "gold": 0}, {"query": "def", "choices": ["f", "1"], "gold": 0}]
    (folder / "words.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    task = {"label": "words", "dataset_uri": "words.jsonl", "num_fewshot": [0], "icl_task_type": "multiple_choice"}
    (folder / "words.yaml").write_text(json.dumps({"icl_tasks": [task]}))
    return folder


@pytest.fixture
def here(world, monkeypatch) -> Path:
    """That folder as the working directory."""
    monkeypatch.chdir(world)
    return world
