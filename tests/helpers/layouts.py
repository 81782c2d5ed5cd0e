"""One run, divided in several ways: what it is in every way."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from llmfoundry_lite.data.tokenizer import train_tokenizer
from tests.helpers.launch import Launch
from tests.helpers.resave import assert_same_state, resave_into
from tests.helpers.runs import metrics, run, saves
from tests.helpers.tiny import values

RELATIVE = 1e-5
LLAMA: dict[str, Any] = {
    "no_bias": True,
    "norm_type": "rmsnorm",
    "tie_word_embeddings": False,
    "ffn_config": {"ffn_type": "mptglu", "ffn_act_fn": {"name": "silu"}},
    "attn_config": {"attn_type": "grouped_query_attention", "kv_n_heads": 2, "rope": True},
}


def assert_same_run(
    folder: Path, one: str, other: str, tolerance: float = RELATIVE, norm_tolerance: float | None = None
) -> None:
    """The same data in the same batches, and within the tolerance the same losses and norms of gradients."""
    ours, theirs = metrics(folder, one), metrics(folder, other)
    assert ours
    for key in ("batch", "data/digest", "time/sample", "time/token", "lr"):
        assert values(ours, key) == values(theirs, key), key
    tolerances = {"loss/train/total": tolerance, "grad_norm": norm_tolerance or tolerance, "eval/loss": tolerance}
    for key, relative in tolerances.items():
        assert values(ours, key) == pytest.approx(values(theirs, key), rel=relative), key


def run_in_launches(
    folder: Path, config: dict[str, Any], launches: Sequence[tuple[int, dict[str, Any]]], batches_per_launch: int = 1
) -> list[Launch]:
    """Run `launches`, each on so many ranks and divided so. Each finds, bit for bit, what the one before it has saved;
    what the first begins with lies in `begun/0`."""
    outputs = []
    for number, (num_ranks, changes) in enumerate(launches):
        found, span = folder / f"begun/{number}", f"{batches_per_launch}ba"
        options = {"stop_after": span, "callbacks": resave_into(found), **changes}
        outputs.append(run(folder, config, "moved", num_ranks, **options))
        if number:
            name = f"ba{batches_per_launch * number}"
            assert_same_state(saves(folder, "moved") / name, found / name)
    return outputs


def ask_in_context(folder: Path, data: Path) -> dict[str, Any]:
    """Changes of a run (as `tiny_config` takes them) that make it answer two tasks, with a tokenizer of its own."""
    train_tokenizer(["what is one and one? two"] * 9, 300).save(str(folder / "tokenizer"))
    questions = [{"context": f"what is {word}?", "answer": "two"} for word in ("one", "two", "and", "one and", "is")]
    (folder / "write.jsonl").write_text("\n".join(map(json.dumps, questions)))
    kinds = {"text": ("perplexity", data / "val"), "write": ("generation_task_with_answers", folder / "write.jsonl")}
    return {
        "icl_tasks": [
            {"label": label, "icl_task_type": kind, "dataset_uri": str(uri)} for label, (kind, uri) in kinds.items()
        ],
        "tokenizer__name": str(folder / "tokenizer"),
        "model__vocab_size": 384,
        "device_train_microbatch_size": "auto",
    }


def assert_same_export(folder: Path, one: str, other: str, *, atol: float) -> None:
    ours, theirs = (load_file(folder / f"runs/{name}/huggingface/model.safetensors") for name in (one, other))
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], atol=atol, rtol=1e-3)


def assert_same_answers(folder: Path, one: str, other: str) -> None:
    for key in ("eval/icl/text/0-shot/perplexity", "eval/icl/average"):
        ours, theirs = (values(metrics(folder, name), key) for name in (one, other))
        assert ours == pytest.approx(theirs, rel=1e-4), key
        assert ours, key
