"""A checkpoint or a log of somebody else may state any number: a line refuses it, and nothing is built of it."""

import json
import math
import os
import shutil
from pathlib import Path

import pytest
import yaml

import llmfoundry_lite as lf
from llmfoundry_lite.cli.main import run as run_command
from llmfoundry_lite.data.tokenizer import train_tokenizer
from llmfoundry_lite.errors import CheckpointError, DataError
from llmfoundry_lite.models import mpt
from tests.helpers.present import needs, present
from tests.helpers.recorded import record_of, rewrite, write_run
from tests.helpers.tiny import tiny_config

COMMANDS = {
    "generate": ("generate", "RUN", "--prompt", "the cat", "--max-new-tokens", "3"),
    "export": ("checkpoint", "export", "RUN", "OUT"),
    "replay": ("replay", "RUN", "ba3..ba6"),
}
NO_PLACE = "its configuration does not fit its tensors: "
IMPOSSIBLE = "its manifest describes a model that cannot be: "
MISFITS = {
    "n_layers": (3_000_000, NO_PLACE + "it has 3,000,000 layers, and there are 28 tensors"),
    "d_model": (2**40, NO_PLACE + "it has 29,"),
    "vocab_size": (301, NO_PLACE + "transformer.wte.weight is [300, 32], and the configuration says [301, 32]"),
    "max_seq_len": (2**60, NO_PLACE + "it has 36,893,"),
    "expansion_ratio": (1e308, IMPOSSIBLE),
    "n_heads": (10**9, IMPOSSIBLE + "model.n_heads: 1000000000 does not divide d_model"),
    "norm_type": ("rmsnorm", NO_PLACE + "transformer.blocks.0.norm_1.bias has no place in the configuration"),
}


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("foreign")
    train_tokenizer(["the cat sat on a mat"] * 3, 300).save(folder / "tokenizer")
    config = tiny_config(folder / "gone", model__vocab_size=300, tokenizer__name=str(folder / "tokenizer"))
    write_run(folder / "run", config, (3, 6))
    return folder


@pytest.fixture
def run_of(world, tmp_path, monkeypatch):
    """A copy of the run whose configuration says something else; blocks beyond those of one model are an error."""
    num_built = 0
    build = mpt.Block.__init__

    def count_and_build(self, *arguments):
        nonlocal num_built
        num_built += 1
        assert num_built < 50, "a model of the stated size is built"
        build(self, *arguments)

    monkeypatch.setattr(mpt.Block, "__init__", count_and_build)
    monkeypatch.chdir(tmp_path)

    def write(change) -> Path:
        run = shutil.copytree(world / "run", tmp_path / "run")
        config = yaml.safe_load((run / "config.yaml").read_text())
        change(config)
        (run / "config.yaml").write_text(yaml.safe_dump(config))
        for batch in (3, 6):
            rewrite(run, batch, config=config)
        return run

    return write


def words_of(name: str, run: Path) -> list[str]:
    places = {"RUN": str(run), "OUT": str(run.parent / "out")}
    words = []
    for word in COMMANDS[name]:
        for place, path in places.items():
            word = word.replace(place, path)
        words.append(word)
    return words


@pytest.mark.parametrize("key", MISFITS)
def test_a_model_that_does_not_fit_its_tensors_is_refused_unbuilt(key, run_of, capsys):
    value, message = MISFITS[key]
    run = run_of(lambda config: config["model"].update({key: value}))
    for name in present(("generate", "export", "replay")):
        assert run_command(words_of(name, run)) == 2, name
        error = capsys.readouterr().err
        is_far_larger = key not in ("vocab_size", "norm_type")
        if name != "replay" or is_far_larger:  # its ranks name the tensor when they restore
            assert message in error, name
        assert error.count("\n") == 1, error
    with pytest.raises((CheckpointError, DataError)) as refused:
        lf.load(run)
    assert message in str(refused.value)


def test_a_model_of_the_same_size_in_other_shapes_is_refused(run_of):
    """One matrix for q, k and v has as many numbers as three."""
    run = run_of(lambda config: config["model"].update({"attn_config": {"fused_qkv": False}}))
    with pytest.raises(
        CheckpointError, match=r"fit its tensors: transformer\.blocks\.0\.attn\.Wq\.weight is missing; the"
    ):
        lf.load(run)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer": {"name": 7}}, "its configuration has 7 for the tokenizer's name, expected text"),
        ({"tokenizer": [1]}, "its configuration has [1] for the tokenizer's name, expected text"),
        ({"tokenizer": {"name": "x" * 5000}}, "is not on this machine"),
        ({"model": 7}, IMPOSSIBLE),
        ({"train_loader": {"dataset": {"eos_token_id": 2**70}}}, "train_loader.dataset.eos_token_id is 11805916207"),
    ],
    ids=["number", "list", "long", "no-model", "id"],
)
def test_a_recorded_value_of_another_kind_is_a_line(change, message, run_of, capsys):
    run = run_of(lambda config: config.update(change))
    assert run_command(words_of("generate", run)) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1, error


def test_blocks_that_are_none_do_not_end_reading(run_of):
    run = run_of(lambda config: config.update(eval_loaders=7, train_loader=7, save_folder="a\0b"))
    assert repr(lf.read_run(run)).endswith("batches 1 to 6>")


WRONG = {"infinite": math.inf, "not-a-number": math.nan, "huge": 10**400, "negative": -5, "text": "x", "list": [1]}


@needs("llmfoundry_ops")
@pytest.mark.parametrize("kind", WRONG)
def test_numbers_that_no_launch_writes_do_not_end_a_report(kind, world, tmp_path, capsys, monkeypatch):
    """In each file beside the log, and in each line of the log, but for what tells a line of a launch."""
    monkeypatch.setattr("llmfoundry_lite.report.report.draw_figure", lambda *_: None)
    monkeypatch.setattr("llmfoundry_lite.report.report.sample_texts", lambda *_, **__: [])
    wrong = WRONG[kind]
    run = shutil.copytree(world / "run", tmp_path / "runs" / "run")
    begun = {"time": 1.0, "boot": "b", "uptime": 3.0, "status": "running", "batch": 0, "reason": None}
    launches = [begun, *({**begun, "status": "failed", key: wrong} for key in begun), begun | {"has_begun": wrong}]
    (run / "launches.jsonl").write_text("".join(json.dumps(line) + "\n" for line in launches))
    (run / "status.json").write_text(json.dumps({"status": "failed", "batch": 6, "reason": wrong}))
    begins = {"number": 1, "site": "a", "turn": 0, "began": 1.0, "from_batch": 0, "host": "h"}
    (run / "relay.jsonl").write_text(json.dumps(begins) + "\n" + json.dumps({"number": 1, "price": wrong}) + "\n")
    record = record_of(6) | {"time/elapsed_seconds": 4.0, "time/batch_seconds": 1.0, "checkpoint/stall_seconds": 0.1}
    lines = [record_of(5), *(record | {key: wrong} for key in record if key != "batch"), record]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    assert run_command(["report", str(run), "--out", str(tmp_path / "out")]) == 0, capsys.readouterr().err
    facts = json.loads((tmp_path / "out" / "report.json").read_text())
    assert len(facts["runs"]) == 1
    assert run_command(["watch", str(run)]) in (1, 75)
    assert [Path(os.fspath(one)).name for one in lf.runs(tmp_path / "runs")] == ["run"]
