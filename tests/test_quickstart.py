"""The README's path through the real programs, made small: prepare, `composer`, report, then `transformers`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.helpers.launch import ROOT

pytestmark = pytest.mark.multiprocess

BIN = Path(sys.executable).parent


def call(*command, cwd):
    result = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300, check=False)
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
        *("variables.data=data", "max_duration=6ba", "eval_interval=3ba", "max_seq_len=64", "model.d_model=48"),
        *("model.vocab_size=512", "global_train_batch_size=8"),
    )
    train = (ROOT / "scripts/train.py", ROOT / "yamls/pretrain/mpt-quickstart.yaml", *small)
    call(
        *(BIN / "composer", "-n", "1", *train, "stop_after=3ba", "fsdp_config.sharding_strategy=NO_SHARD"), cwd=tmp_path
    )
    call(BIN / "composer", "-n", "2", *train, cwd=tmp_path)
    run = tmp_path / "runs/mpt-quickstart"
    assert json.loads((run / "status.json").read_text()) == {"status": "done", "batch": 6, "reason": None}

    output = call(BIN / "llmfoundry-lite", "report", run, cwd=tmp_path)
    for words in (
        "validation loss",
        "bigram model",
        "unigram model",
        "A sample after 'def ', temperature 0.7",
        "loss.png",
    ):
        assert words in output
    facts = json.loads((run / "report.json").read_text())
    (ran,) = facts["runs"]
    assert [(s["num_devices"], s["sharding"], s["last_batch"]) for s in ran["segments"]] == [
        (1, "NO_SHARD", 3),
        (2, "FULL_SHARD", 6),
    ]
    assert [sample["text"].startswith(sample["prompt"]) for sample in facts["samples"]] == [True] * 3
    assert (run / "loss.png").stat().st_size > 10_000

    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(run / "huggingface")
    tokenizer = AutoTokenizer.from_pretrained(run / "huggingface")
    ids = torch.tensor([tokenizer("def main(")["input_ids"]])
    assert model(ids).logits.shape[-1] == 512
