"""Commands that read from the Hugging Face Hub, in processes of their own that take a server on loopback for it.

Nothing is replaced within them: `huggingface_hub` and `datasets` ask over HTTP, as they would ask the Hub.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow
import pytest
import torch
import yaml
from pyarrow import parquet

from llmfoundry_lite.cli.main import run
from llmfoundry_lite.data.tokenizer import train_tokenizer
from tests.helpers.data import folder_bytes, make_documents
from tests.helpers.hub import Hub, broken, cut, too_many
from tests.helpers.launch import ROOT
from tests.helpers.present import needs

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]


@pytest.fixture
def hub():
    with Hub() as hub:
        yield hub


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(make_documents(400, seed=1), 600).save(folder)
    return folder


def command(hub: Hub, cache: Path, words: list[str], **more: str) -> subprocess.CompletedProcess[str]:
    """Run `llmfoundry-lite` with these words and a cache of its own."""
    environment = os.environ | hub.environment(cache) | {"PYTHONPATH": str(ROOT), **more}
    program = [sys.executable, "-m", "llmfoundry_lite", *words]
    return subprocess.run(program, env=environment, cwd=cache.parent, capture_output=True, text=True, check=False)


def prepare(source: str, tokenizer: str, out: Path) -> list[str]:
    return ["data", "prepare", "--source", source, "--tokenizer", tokenizer, "--out", str(out), "--max-seq-len", "32"]


@needs("llmfoundry_formats")
def test_a_private_data_set_on_a_busy_hub_gives_the_shards_of_its_folder(hub, tmp_path, tokenizer_folder):
    """It has been renamed; its files lie on another host; listings and files are refused, and bodies cut, at times."""
    folder = tmp_path / "folder"
    (folder / "data").mkdir(parents=True)
    documents = make_documents(400, seed=2)
    for part in range(2):
        lines = [json.dumps({"text": text}) for text in documents[200 * part : 200 * (part + 1)]]
        (folder / f"data/train-0000{part}.jsonl").write_text("\n".join(lines))
    hub.add("models", "someone/words", tokenizer_folder)
    texts = hub.add("datasets", "someone/texts", folder, token="secret")
    hub.renamed["someone/before"] = "someone/texts"
    hub.faults += [
        *(too_many("/tree/", 2), too_many("data/train-00000", 1), too_many("someone/words/resolve", 1)),
        *(cut("/storage/datasets", 2), cut("/storage/models", 1)),
    ]
    wanted = prepare("hf:someone/before", "someone/words", tmp_path / "from-hub")
    result = command(hub, tmp_path / "cache", wanted, HF_TOKEN="secret")
    assert result.returncode == 0, result.stderr
    assert run(prepare(f"hf:{folder}", str(tokenizer_folder), tmp_path / "from-folder")) == 0
    for split in ("train", "val"):
        assert folder_bytes(tmp_path / "from-hub" / split) == folder_bytes(tmp_path / "from-folder" / split)
    assert 307 in hub.statuses("/api/datasets/someone/before")
    assert hub.statuses("/tree/").count(429) == 2 and 429 in hub.statuses("data/train-00000")
    assert hub.statuses("/storage/datasets").count(206) >= 4, "the two files, and both again after the cut"
    of_files = [one.path for one in hub.asked if "/datasets/someone/texts/resolve/" in one.path]
    assert of_files and all(texts.sha in path for path in of_files), "one revision, and not what main is by now"


@needs("llmfoundry_formats")
def test_a_model_and_a_task_of_the_hub_are_evaluated_as_from_a_folder(hub, tmp_path, tokenizer_folder):
    """The weights are cut after 12 of 16 MiB, and asked for from there; a second evaluation downloads nothing."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32768}
    config = transformers.GPTNeoXConfig(vocab_size=600, max_position_embeddings=64, **sizes)
    torch.manual_seed(0)
    transformers.GPTNeoXForCausalLM(config).save_pretrained(tmp_path / "neox")
    for path in tokenizer_folder.iterdir():
        (tmp_path / "neox" / path.name).write_bytes(path.read_bytes())
    (tmp_path / "rows").mkdir()
    rows = [{"q": f"{text[:40]}", "o": ["yes", "no"], "l": n % 2} for n, text in enumerate(make_documents(20))]
    (tmp_path / "rows/test.jsonl").write_text("\n".join(map(json.dumps, rows)))
    hub.add("models", "someone/neox", tmp_path / "neox")
    hub.add("datasets", "someone/rows", tmp_path / "rows")
    hub.faults += [cut("/-/model.safetensors", 1, 0.75), too_many("/-/model.safetensors", 1), too_many("test.jsonl", 1)]

    def evaluate(model: str, uri: str, out: str) -> dict:
        parsed = {"query": ["q"], "choices": ["o"], "gold": ["l"]}
        task = {"label": "t", "dataset_uri": uri, "icl_task_type": "multiple_choice", "num_fewshot": [0]}
        task |= {"hf_loading_vars": {"split": "test"}, "hf_parsing_map": parsed}
        content = {"suite": "s", "models": {"m": f"hf:{model}"}, "icl_tasks": [task], "results_folder": out}
        path = tmp_path / f"{out}.yaml"
        path.write_text(yaml.safe_dump(content))
        result = command(hub, tmp_path / "cache", ["eval", str(path)])
        assert result.returncode == 0, result.stderr
        found = json.loads((tmp_path / out / "s/m.json").read_text())["tasks"]["t/0-shot"]
        return {key: found[key] for key in ("n", "data_fingerprint", "items_hash", "acc", "acc_norm")}

    first, second = (evaluate("someone/neox", "hf://someone/rows", out) for out in ("hub", "again"))
    assert hub.statuses("/-/model.safetensors") == [200, 429, 206]
    (resumed,) = (one.range for one in hub.asked if "/-/model.safetensors" in one.path and one.status == 206)
    assert resumed == f"bytes={10 << 20}-", "what was written before the line was lost is kept"
    hub.faults.append(broken("someone", 503))
    local = evaluate(str(tmp_path / "neox"), f"hf://{tmp_path / 'rows'}", "local")
    assert first == second == local


@needs("llmfoundry_formats")
@pytest.mark.parametrize(
    ("source", "words", "code", "message"),
    [
        ("someone/private", "someone/words", 2, "no such data set on the Hugging Face Hub, or none that you may read"),
        ("someone/texts", "nobody/words", 2, "nor a repository on the Hugging Face Hub that you may read"),
        ("busy/texts", "someone/words", 75, "the Hugging Face Hub cannot be reached"),
        ("someone/texts", "busy/words", 75, "the Hugging Face Hub cannot be reached"),
    ],
)
def test_what_the_hub_refuses_is_a_mistake_and_what_may_pass_is_not(
    hub, tmp_path, tokenizer_folder, source, words, code, message
):
    rows = {"train.jsonl": b'{"text": "a b c"}'}
    for name in ("someone/words", "busy/words"):
        hub.add("models", name, tokenizer_folder)
    for name, token in (("someone/texts", None), ("busy/texts", None), ("someone/private", "secret")):
        hub.add("datasets", name, rows, token)
    hub.faults += [broken("/busy/words/resolve/", 503), too_many("/api/datasets/busy/texts", 100)]
    result = command(hub, tmp_path / "cache", prepare(f"hf:{source}", words, tmp_path / "out"))
    *_, last = result.stderr.splitlines()
    assert result.returncode == code and last.startswith("error: ") and message in last, result.stderr


def test_mmlu_is_fetched_with_its_examples_from_parquet_files(hub, tmp_path):
    """`fetch_tasks.py` names a configuration and two splits, which the Hub's card lists as files."""
    files = [{"split": split, "path": f"all/{split}-*"} for split in ("test", "dev")]
    card = f"---\n{yaml.safe_dump({'configs': [{'config_name': 'all', 'data_files': files}]})}---\n"
    (tmp_path / "set/all").mkdir(parents=True)
    (tmp_path / "set/README.md").write_text(card)
    for split, num_rows in (("test", 3), ("dev", 2)):
        columns = {
            "question": [f"{split} {number}?" for number in range(num_rows)],
            "subject": ["world_religions"] * num_rows,
            "choices": [["a", "b", "c", "d"]] * num_rows,
            "answer": [2] * num_rows,
        }
        parquet.write_table(pyarrow.table(columns), tmp_path / f"set/all/{split}-00000-of-00001.parquet")
    hub.add("datasets", "cais/mmlu", tmp_path / "set")

    environment = os.environ | hub.environment(tmp_path / "cache")
    program = [sys.executable, str(ROOT / "scripts/fetch_tasks.py"), "--suite", "mmlu"]
    result = subprocess.run(program, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    rows = [json.loads(line) for line in (tmp_path / "data/eval/mmlu.jsonl").read_text().splitlines()]
    assert [row["query"] for row in rows] == ["dev 0?", "dev 1?", "test 0?", "test 1?", "test 2?"]
    assert [row["split"] for row in rows] == ["dev"] * 2 + ["test"] * 3
    assert {row["category"] for row in rows} == {"world religions"}
    assert {row["gold"] for row in rows} == {2}
