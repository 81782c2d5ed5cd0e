"""`llmfoundry-lite data show`: the rows of a batch of a run, and whether they are those that it was trained on."""

import gc
import json
import math
import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml

from llmfoundry_lite.cli.main import run as run_command
from llmfoundry_lite.config.build import build_block
from llmfoundry_lite.config.data_schema import LoaderConfig
from llmfoundry_lite.data import folder_locks
from llmfoundry_lite.data.dataset import TextDataset
from llmfoundry_lite.data.loader import batch_digest, build_text_loader, format_digest
from llmfoundry_lite.errors import ConfigError, DataError
from llmfoundry_lite.report.batch import compute_losses, read_batch
from tests.helpers.runs import metrics, run
from tests.helpers.tiny import SEQ_LEN, build_tokenizer, tiny_config, write_config, write_data

BATCH_SIZE = 8


@pytest.fixture
def folder(tmp_path):
    """With a log of three epochs of 20 samples of two streams, as two ranks train them; and its configuration."""
    write_data(tmp_path / "a[1]", num_train=40)
    write_data(tmp_path / "b", num_train=30)
    streams = {"a": {"local": str(tmp_path / "a[1]"), "proportion": 0.5}, "b": {"local": str(tmp_path / "b")}}
    streams["b"]["proportion"] = 0.5
    config = tiny_config(tmp_path, train_loader__drop_last=False)
    config["train_loader"]["dataset"] |= {"local": None, "streams": streams, "epoch_size": 20}
    (tmp_path / "run").mkdir()
    write_config(tmp_path / "run" / "config.yaml", config)
    block = build_block(LoaderConfig, config["train_loader"], "train_loader")
    digests = [0] * 9
    for rank in range(2):
        options = {
            "max_seq_len": SEQ_LEN,
            "global_batch_size": BATCH_SIZE,
            "drop_last": False,
            "data_rank_and_size": (rank, 2),
        }
        loader = build_text_loader(TextDataset(block.dataset, **options))
        for number, batch in enumerate(batch for _ in range(3) for batch in loader):
            digests[number] += batch_digest(batch["input_ids"])
    records = [{"batch": i + 1, "data/digest": format_digest(digest)} for i, digest in enumerate(digests)]
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return tmp_path


def test_every_batch_of_every_epoch_has_the_digest_of_the_log_and_says_where_its_rows_lie(folder):
    found = [read_batch(str(folder / "run"), number) for number in range(1, 10)]
    assert all(batch.logged_digest == batch.digest for batch in found)
    assert [batch.epoch for batch in found] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert [len(batch.rows) for batch in found] == [8, 8, 4] * 3, "padding is no row"
    rows = [row for batch in found[:3] for row in batch.rows]
    assert {row.stream for row in rows} == {"a", "b"} and rows[0].shard.startswith("shard.")
    assert len({(row.stream, row.shard, row.sample) for row in rows}) == 20
    assert found[0].text(found[0].rows[0]) == " ".join(map(str, found[0].rows[0].tokens_t)), "without a tokenizer, ids"


def test_other_data_than_the_runs_and_batches_it_has_not_trained_are_refused(folder):
    where = str(folder / "run")
    with pytest.raises(DataError, match=r"batch 10 given, expected 1 to 9, the last in metrics\.jsonl"):
        read_batch(where, 10)
    with pytest.raises(DataError, match=r"batch 2 has data/digest .* and .*: this is not the data"):
        read_batch(where, 2, ["train_loader.dataset.shuffle_seed=4"])
    with pytest.raises(ConfigError, match=r"model.d_model=3 given, expected train_loader.dataset"):
        read_batch(where, 2, ["model.d_model=3"])
    with pytest.raises(ConfigError, match=r"cannot read train_loader.dataset.streams.b.local=\[x: did not find"):
        read_batch(where, 2, ["train_loader.dataset.streams.b.local=[x"])
    with pytest.raises(DataError, match=r"tokenizer folder .*/gone does not exist"):
        read_batch(where, 2, [f"tokenizer.name={folder}/gone"])
    with pytest.raises(DataError, match="run: no checkpoint here, which losses need"):
        compute_losses(read_batch(where, 2), None, torch.device("cpu"))
    (folder / "b").rename(folder / "moved")
    with pytest.raises(DataError, match=r"streams\.b: .*/b/train does not hold its data here; give .*\.b\.local="):
        read_batch(where, 2)
    assert read_batch(where, 2, [f"train_loader.dataset.streams.b.local={folder / 'moved'}"]).logged_digest
    text = (folder / "run" / "config.yaml").read_text().replace("train_loader:", "train_loader:\n  name: python:a:b")
    (folder / "run" / "config.yaml").write_text(text)
    with pytest.raises(ConfigError, match="is python:a:b, whose order only its own code knows"):
        read_batch(where, 2)


def test_the_command_shows_text_and_counts_documents(folder, capsys):
    build_tokenizer(folder / "tokenizer")
    arguments = [str(folder / "run"), "--batch", "1", f"tokenizer.name={folder / 'tokenizer'}"]
    assert run_command(["data", "show", *arguments]) == 0
    out = capsys.readouterr().out
    assert "epoch 0, 8 rows\ndata/digest " in out and ", as in the log\n" in out
    assert out.count("shard.0000") == 8 and "documents" in out
    assert run_command(["data", "show", "--rows", *arguments]) == 0
    out = capsys.readouterr().out
    batch = read_batch(str(folder / "run"), 1, [f"tokenizer.name={folder / 'tokenizer'}"])
    ends = [int((row.tokens_t[:-1] == 2).sum()) for row in batch.rows]
    assert [batch.num_documents(row) for row in batch.rows] == [count + 1 for count in ends]
    assert f"row 0, stream {batch.rows[0].stream}, shard {batch.rows[0].shard}, sample {batch.rows[0].sample}, " in out


def test_a_folder_that_a_live_run_downloads_into_is_refused_without_waiting(folder, monkeypatch):
    with tempfile.TemporaryDirectory(dir=folder_locks.SHARED_MEMORY) as locks:
        monkeypatch.setattr(folder_locks, "SHARED_MEMORY", Path(locks))
        monkeypatch.delattr(folder_locks.time, "sleep")
        live = folder_locks.hold_folder(str(folder / "b/train"), "live", exclusive=True)
        path = folder_locks.lock_path(str(folder / "b/train"))
        path.write_text(path.read_text().replace(str(os.getpid()), "1"))
        with pytest.raises(DataError, match=r"another run \(process 1\) is downloading into .*/b/train; give this run"):
            places = {"remote": folder / "a[1]", "local": folder / "b"}
            read_batch(str(folder / "run"), 1, [f"train_loader.dataset.streams.b.{k}={v}" for k, v in places.items()])
        assert live is not None
        live.close()


@pytest.mark.slow
@pytest.mark.multiprocess
def test_by_the_weights_before_it_the_rows_losses_are_the_loss_of_the_log(tmp_path):
    write_data(tmp_path / "data")
    config = tiny_config(tmp_path / "data", max_duration="4ba", save_interval="1ba")
    config["model"].setdefault("attn_config", {})["attn_uses_sequence_id"] = True
    config["train_loader"]["dataset"]["eos_token_id"] = 2
    run(tmp_path, config, "spiked", 2)
    where = tmp_path / "runs" / "spiked"
    batch = read_batch(str(where), 3)
    losses = compute_losses(batch, str(where / "checkpoints" / "ba2"), torch.device("cpu"))
    logged = metrics(tmp_path, "spiked")[2]["loss/train/total"]
    assert len(losses.of_rows) == 8 and losses.of_batch == pytest.approx(logged, rel=1e-5)
    short = replace(batch, rows=[*batch.rows, replace(batch.rows[0], tokens_t=batch.rows[0].tokens_t[:1])])
    newest = compute_losses(short, None, torch.device("cpu"))
    assert math.isnan(newest.of_rows[8]), "nothing is predicted in a row of one token"
    assert newest.checkpoint.endswith("ba4") and newest.of_batch < losses.of_batch
    shutil.rmtree(tmp_path / "data")
    write_data(tmp_path / "data", num_train=400)
    with pytest.raises(DataError, match="the data is not what the checkpoint was trained with"):
        read_batch(str(where), 3)


def test_nothing_that_a_run_recorded_is_resolved_or_written(folder, monkeypatch):
    path, gone = folder / "run" / "config.yaml", folder / "gone"
    monkeypatch.setenv("SECRET", str(folder / "b"))
    (folder / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder / "tmp"))
    recorded = yaml.safe_load(path.read_text())
    stream = recorded["train_loader"]["dataset"]["streams"]["b"]
    for remote in ("${oc.env:SECRET}", str(folder / "b")):
        stream |= {"local": str(gone), "remote": remote}
        write_config(path, recorded | {"loggers": {"x": "${oc.env:NOBODY}"}})
        with pytest.raises(DataError, match=r"streams\.b: .*gone/train does not hold its data here; give .*\.remote="):
            read_batch(str(folder / "run"), 1)
        assert not gone.exists()
    found = read_batch(str(folder / "run"), 1, [f"train_loader.dataset.streams.b.remote={folder / 'b'}"])
    assert found.logged_digest == found.digest and not gone.exists(), "downloads go elsewhere"
    gc.collect()
    assert not [*(folder / "tmp").glob("llmfoundry-lite-data-*")], "and are removed"
