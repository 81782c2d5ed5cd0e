"""The README's path through the real programs, made small: prepare, `composer`, report, then `transformers`."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.helpers.launch import ROOT

pytestmark = pytest.mark.multiprocess

BIN = Path(sys.executable).parent


def call(*command, cwd):
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, cwd=cwd, env=one_thread, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.slow
def test_text_becomes_a_model_that_transformers_loads(tmp_path):
    text = tmp_path / "text"
    text.mkdir()
    for i, source in enumerate(sorted((ROOT / "llmfoundry_lite/data").rglob("*.py"))):
        (text / f"{i}.txt").write_text(source.read_text())
    call(
        *(BIN / "llmfoundry-lite", "data", "prepare", "--source", text, "--out", tmp_path / "data"),
        *("--tokenizer", "train:512", "--max-seq-len", "64", "--val-fraction", "0.1"),
        cwd=tmp_path,
    )
    small = (
        *("variables.data=data", "max_duration=6ba", "eval_interval=3ba", "max_seq_len=64", "model.d_model=80"),
        *("model.vocab_size=512", "save_interval=2ba"),
    )
    train = (ROOT / "scripts/train.py", ROOT / "yamls/pretrain/mpt-quickstart.yaml", *small)
    first_half = (BIN / "composer", "-n", "1", *train, "stop_at=3ba", "fsdp_config.sharding_strategy=NO_SHARD")
    call(*first_half, cwd=tmp_path)
    call(BIN / "composer", "-n", "2", *train, "stop_after=1ba", cwd=tmp_path)
    # Interrupted here, and repeated: the first half is there already, and no rank alone trains the second.
    assert "the run has reached stop_at, 3ba: it is at batch 4" in call(*first_half, cwd=tmp_path)
    call(BIN / "composer", "-n", "2", *train, cwd=tmp_path)
    run = tmp_path / "runs/mpt-quickstart"
    replayed = call(BIN / "llmfoundry-lite", "replay", run, "ba3..ba5", cwd=tmp_path)
    assert "bit-equal: 2 of data/digest" in replayed and "devices 2 -> 1" in replayed
    assert json.loads((run / "status.json").read_text()) == {"status": "done", "batch": 6, "reason": None}

    output = call(BIN / "llmfoundry-lite", "report", run, cwd=tmp_path)
    for words in (
        "validation loss",
        "bigram model",
        "unigram model",
        "temperature 0.7, top-k 40",
        "loss.png",
    ):
        assert words in output
    facts = json.loads((run / "report.json").read_text())
    (ran,) = facts["runs"]
    assert [(s["num_devices"], s["sharding"], s["last_batch"]) for s in ran["segments"]] == [
        (1, "NO_SHARD", 3),
        (2, "FULL_SHARD", 4),
        (2, "FULL_SHARD", 6),
    ]
    for sample in facts["samples"]:
        assert [text["batch"] for text in sample["texts"]] == [0, 2, 6]
        assert all(text["text"].startswith(sample["prompt"]) for text in sample["texts"])
        assert sample["prompt"] == sample["prompt"].strip() != ""
    assert facts["samples"] and re.search(r"batch 0 +\| batch 2 +\| batch 6", output)
    assert (run / "loss.png").stat().st_size > 10_000

    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(run / "huggingface")
    tokenizer = AutoTokenizer.from_pretrained(run / "huggingface")
    ids = torch.tensor([tokenizer("def main(")["input_ids"]])
    assert model(ids).logits.shape[-1] == 512
