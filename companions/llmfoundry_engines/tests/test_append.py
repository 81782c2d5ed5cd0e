"""Streams that are added to prepared data: the old bytes stay, and the YAML that is printed trains on all."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from llmfoundry_engines.append import append, default_name
from llmfoundry_lite.cli import main
from llmfoundry_lite.config.load_train import load_train_config
from llmfoundry_lite.data.dataset import TextDataset
from llmfoundry_lite.data.tokenizer import load_tokenizer
from llmfoundry_lite.errors import DataError
from llmfoundry_lite.prepare import prepare as prepare_module
from llmfoundry_lite.prepare.out_folder import only_preparation_in
from llmfoundry_lite.prepare.prepare import prepare
from llmfoundry_lite.prepare.summary import load_summary
from tests.helpers.data import folder_bytes, make_documents
from tests.helpers.preparing import SEQ_LEN, assert_holds, request, write_jsonl
from tests.helpers.tiny import tiny_config, write_config


@pytest.fixture
def documents(tmp_path: Path) -> list[str]:
    """Documents of the file news.jsonl, which is to be added."""
    texts = make_documents(80, seed=5)
    write_jsonl(tmp_path / "news.jsonl", texts, key="body")
    return texts


@pytest.fixture
def out(tmp_path: Path, tokenizer_folder: Path) -> Path:
    """A prepared data set with options that are not the defaults."""
    write_jsonl(tmp_path / "web.jsonl", make_documents(120))
    wanted = request(tmp_path / "web.jsonl", tokenizer_folder, val_fraction=0.0, on_error="skip", size_limit_bytes=6000)
    prepare(wanted, tmp_path / "set", num_workers=1)
    return tmp_path / "set"


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Function that runs `data append` and returns its output."""

    def run_command(*arguments: object) -> str:
        assert main.run(["data", "append", *map(str, arguments), "--num-workers", "1"]) == 0
        return capsys.readouterr().out

    return run_command


def printed_blocks(output: str) -> list[dict[str, Any]]:
    """The YAML blocks in the output of the command."""
    return [yaml.safe_load(block) for block in re.findall(r"^train_loader:\n(?: +.*\n?)+", output, re.MULTILINE)]


def open_run(tmp_path: Path, out: Path, *blocks: dict[str, Any]) -> TextDataset:
    """Open the training data of a run that reads `out`, with YAML blocks laid over its own."""
    config = tiny_config(out, max_duration="1000ba", eval_loader__dataset__split="train")
    files = [write_config(tmp_path / f"{number}.yaml", block) for number, block in enumerate([config, *blocks])]
    loaded = load_train_config(files).config
    return TextDataset(
        loaded.train_loader.dataset, max_seq_len=SEQ_LEN, global_batch_size=8, max_duration=loaded.max_duration
    )


def test_a_stream_is_added_and_nothing_else_changes(out, documents, tmp_path, run):
    before = folder_bytes(out)
    output = run(out, tmp_path / "news.jsonl", "--text-key", "body")
    after = folder_bytes(out)
    assert {name: content for name, content in after.items() if not name.startswith("streams/")} == before
    stream = out / "streams/news"
    summary = json.loads((stream / "summary.json").read_text())
    options = {name: summary["request"][name] for name in ("max_seq_len", "on_error", "size_limit_bytes")}
    assert options == {"max_seq_len": SEQ_LEN, "on_error": "skip", "size_limit_bytes": 6000}
    assert_holds(stream / "train", load_summary(stream), load_tokenizer(out / "tokenizer"), documents)
    assert re.search(r"^set .*\nnews .* %$", output, re.MULTILINE)


def test_the_printed_streams_train_on_every_sample_once(out, documents, tmp_path, run):
    new_run, _ = printed_blocks(run(out, tmp_path / "news.jsonl", "--text-key", "body"))
    old, both = open_run(tmp_path, out), open_run(tmp_path, out, new_run)
    news = open_run(tmp_path, out / "streams/news")
    assert both.order.num_samples == old.order.num_samples + news.order.num_samples
    assert both.state_dict(0)["streams"] == ["set", "news"]


def test_the_printed_stage_continues_a_run_of_the_old_data(out, documents, tmp_path, run):
    old = open_run(tmp_path, out)
    state = json.loads(json.dumps(old.state_dict(5 * 8)))
    _, stage = printed_blocks(run(out, tmp_path / "news.jsonl", "--text-key", "body"))
    stage["train_loader"]["dataset"]["stages"][0]["until"] = "6ba"
    continued = open_run(tmp_path, out, stage)
    continued.load_state_dict(state)
    first, second = continued.stages.orders
    assert continued.stages.first_batches == [0, 6]
    assert first.fingerprint == old.order.fingerprint
    assert second.num_samples > first.num_samples
    stage["train_loader"]["dataset"]["stages"][0]["until"] = "3ba"
    with pytest.raises(DataError, match="only stages that begin after 5 may be added"):
        open_run(tmp_path, out, stage).load_state_dict(state)


def test_a_killed_append_is_resumed_and_a_finished_one_returns(out, documents, tmp_path, run, monkeypatch):
    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    arguments = ["data", "append", str(out), str(tmp_path / "news.jsonl"), "--text-key", "body", "--num-workers", "1"]
    with monkeypatch.context() as patch:
        patch.setattr(prepare_module, "publish", fail)
        assert main.run(arguments) == 130
    assert "carrying on in" in run(*arguments[2:-2])
    before = folder_bytes(out)
    assert "is complete: the same preparation finished there before" in run(*arguments[2:-2])
    assert folder_bytes(out) == before


def test_the_same_source_is_warned_of_and_a_taken_name_is_refused(out, documents, tmp_path, run):
    output = run(out, tmp_path / "web.jsonl", "--name", "twice")
    assert "warning: stream set has the same files; a run would read them twice in an epoch" in output
    output = run(out, tmp_path / "web.jsonl", tmp_path / "news.jsonl", "--text-key", "text", "--on-error", "skip")
    assert f"warning: stream twice was prepared from {tmp_path}/web.jsonl, too; what has not changed" in output
    with pytest.raises(DataError, match=r"streams/twice is a stream already, .*sources was .*; give another --name"):
        append(out, [str(tmp_path / "news.jsonl")], name="twice")


def test_a_stream_may_have_the_name_of_the_folder_and_be_made_beside_others(out, documents, tmp_path, run):
    with only_preparation_in(out, is_shared=True):  # as another `data append` does meanwhile
        new_run, _ = printed_blocks(run(out, tmp_path / "news.jsonl", "--text-key", "body", "--name", "set"))
    streams = new_run["train_loader"]["dataset"]["streams"]
    folders = {name: stream["local"] for name, stream in streams.items()}
    assert folders == {"set-1": str(out), "set": str(out / "streams/set")}


def test_data_that_streams_were_added_to_is_not_overwritten(out, documents, tmp_path, tokenizer_folder, run):
    run(out, tmp_path / "news.jsonl", "--text-key", "body")
    before = folder_bytes(out)
    with pytest.raises(DataError, match=r"set/streams was added to this data by `data append`; remove it first"):
        prepare(request(tmp_path / "web.jsonl", tokenizer_folder), out, num_workers=1, overwrite=True)
    assert folder_bytes(out) == before


def test_what_cannot_be_added_to_is_refused_in_a_line(out, documents, tmp_path, capsys):
    with pytest.raises(DataError, match="nothing was prepared in"):
        append(tmp_path / "empty", ["a"])
    with pytest.raises(DataError, match=r"--name '\.\./x': expected letters, digits"):
        append(out, ["a"], name="../x")
    assert main.run(["data", "append", "s3://bucket/set", "a.jsonl"]) == 2
    refusal = "data append s3://bucket/set: adds to a folder of this machine, and a bucket was given; copy its summary"
    assert refusal in capsys.readouterr().err
    assert main.run(["data", "append", str(out), "a.jsonl", "--max-seq-len", "64"]) == 2
    tokenizer = out / "tokenizer/tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace("#", "@", 1))
    with pytest.raises(DataError, match=r"set/tokenizer is sha256:.*; restore the tokenizer of the data"):
        append(out, [str(tmp_path / "news.jsonl")])


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("raw/news.jsonl.zst", "news"),
        ("raw/news/", "news"),
        ("raw/new s/*", "new-s"),
        ("hf:allenai/c4:en", "en"),
        ("raw/新聞.txt", "raw"),
    ],
)
def test_a_stream_is_named_after_its_first_source(source, name):
    assert default_name([source]) == name
