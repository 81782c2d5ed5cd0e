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
NUM_EPOCHS = 3
EPOCH_SIZE = 20
"""Samples of an epoch: two whole batches, and one of four rows."""
NUM_BATCHES = 9
END_TOKEN = 2


def digests_of_rank(rank, dataset):
    """What one of two ranks contributes to the digests of the nine batches. `dataset` is the configuration."""
    text_dataset = TextDataset(
        dataset,
        max_seq_len=SEQ_LEN,
        global_batch_size=BATCH_SIZE,
        drop_last=False,
        data_rank_and_size=(rank, 2),
    )
    loader = build_text_loader(text_dataset)
    digests = []
    for _ in range(NUM_EPOCHS):
        digests += [batch_digest(batch["input_ids"]) for batch in loader]
    return digests


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two streams, `a[1]` and `b`, and `run`: the configuration and the log of a run that two ranks trained on them.

    The log has nothing but the digests. No test may change the folder.
    """
    folder = tmp_path_factory.mktemp("folder")
    write_data(folder / "a[1]", num_train=40)
    write_data(folder / "b", num_train=30)

    config = tiny_config(folder, train_loader__drop_last=False)
    config["train_loader"]["dataset"] |= {
        "local": None,
        "streams": {
            "a": {"local": str(folder / "a[1]"), "proportion": 0.5},
            "b": {"local": str(folder / "b"), "proportion": 0.5},
        },
        "epoch_size": EPOCH_SIZE,
    }
    (folder / "run").mkdir()
    write_config(folder / "run/config.yaml", config)

    dataset = build_block(LoaderConfig, config["train_loader"], "train_loader").dataset
    digests_of_ranks = zip(digests_of_rank(0, dataset), digests_of_rank(1, dataset), strict=True)
    with (folder / "run/metrics.jsonl").open("w") as file:
        for batch, digests in enumerate(digests_of_ranks, start=1):
            file.write(json.dumps({"batch": batch, "data/digest": format_digest(sum(digests))}) + "\n")
    return folder


@pytest.fixture
def run_folder(folder):
    """The location of the run, as users give it."""
    return str(folder / "run")


@pytest.fixture
def recorded(folder):
    """The run's configuration, which a test may change and give to `copy_run`."""
    return yaml.safe_load((folder / "run/config.yaml").read_text())


@pytest.fixture
def copy_run(folder, tmp_path):
    """A function: configuration -> the location of a run with this configuration and the log of `folder`/run."""

    def copy(config):
        copied = tmp_path / "copied-run"
        shutil.copytree(folder / "run", copied)
        write_config(copied / "config.yaml", config)
        return str(copied)

    return copy


# --------------------------------------------------------------------------------------------- what a batch has


@pytest.fixture(scope="module")
def batches(folder):
    """All that the run has trained."""
    return [read_batch(str(folder / "run"), number) for number in range(1, NUM_BATCHES + 1)]


def test_every_batch_of_every_epoch_has_the_digest_of_the_log_and_says_where_its_rows_lie(batches):
    for batch in batches:
        assert batch.logged_digest is not None
        assert batch.digest == batch.logged_digest
        for row in batch.rows:
            assert row.stream in ("a", "b")
            assert row.shard.startswith("shard.")


def test_the_rows_of_an_epoch_lie_in_different_places_in_both_streams(batches):
    places = set()
    for batch in batches[:3]:
        places.update((row.stream, row.shard, row.sample) for row in batch.rows)
    assert len(places) == EPOCH_SIZE
    assert {stream for stream, _, _ in places} == {"a", "b"}


def test_a_batch_knows_its_epoch(batches):
    assert [batch.epoch for batch in batches] == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_padding_is_no_row(batches):
    assert [len(batch.rows) for batch in batches] == [8, 8, 4] * NUM_EPOCHS


def test_without_a_tokenizer_the_text_of_a_row_is_its_ids(batches):
    row = batches[0].rows[0]
    assert batches[0].text(row) == " ".join(str(token) for token in row.tokens_t)


# ----------------------------------------------------------------------------------------------- what is refused


def test_a_batch_that_was_not_trained_is_refused(run_folder):
    with pytest.raises(DataError, match=r"batch 10 given, expected 1 to 9, the last in metrics\.jsonl"):
        read_batch(run_folder, NUM_BATCHES + 1)


@pytest.mark.parametrize(
    ("change", "error_class", "message"),
    [
        pytest.param(
            "train_loader.dataset.shuffle_seed=4",
            DataError,
            r"batch 2 has data/digest .* and .*: this is not the data",
            id="another order",
        ),
        pytest.param(
            "model.d_model=3",
            ConfigError,
            r"model.d_model=3 given, expected train_loader.dataset",
            id="a key that is not of the data",
        ),
        pytest.param(
            "train_loader.dataset.streams.b.local=[x",
            ConfigError,
            r"cannot read train_loader.dataset.streams.b.local=\[x: did not find",
            id="no YAML",
        ),
        pytest.param(
            "tokenizer.name=/no/such/folder",
            DataError,
            r"tokenizer folder /no/such/folder does not exist",
            id="a tokenizer that is gone",
        ),
    ],
)
def test_changes_that_are_wrong_or_make_other_data_are_refused(run_folder, change, error_class, message):
    with pytest.raises(error_class, match=message):
        read_batch(run_folder, 2, [change])


def test_losses_without_a_checkpoint_are_refused(run_folder):
    with pytest.raises(DataError, match="run: no checkpoint here, which losses need"):
        compute_losses(read_batch(run_folder, 2), None, torch.device("cpu"))


def test_a_loader_of_the_users_own_is_refused(recorded, copy_run):
    recorded["train_loader"]["name"] = "python:a:b"
    with pytest.raises(ConfigError, match="is python:a:b, whose order only its own code knows"):
        read_batch(copy_run(recorded), 2)


def test_data_that_was_moved_is_missed_and_read_where_a_change_says(folder, tmp_path, recorded, copy_run):
    recorded["train_loader"]["dataset"]["streams"]["b"]["local"] = str(tmp_path / "gone/b")
    moved_run = copy_run(recorded)
    with pytest.raises(DataError, match=r"streams\.b: .*/gone/b/train does not hold its data here; give .*\.b\.local="):
        read_batch(moved_run, 2)
    batch = read_batch(moved_run, 2, [f"train_loader.dataset.streams.b.local={folder / 'b'}"])
    assert batch.digest == batch.logged_digest


@pytest.fixture
def locked_folder(folder, monkeypatch):
    """The training data of stream b, which another process, with the id 1, is downloading.

    The locks are apart from those of this machine.
    """
    path = folder / "b/train"
    with tempfile.TemporaryDirectory(dir=folder_locks.SHARED_MEMORY) as locks:
        monkeypatch.setattr(folder_locks, "SHARED_MEMORY", Path(locks))
        lock = folder_locks.hold_folder(str(path), "live", exclusive=True)
        assert lock is not None
        lock_file = folder_locks.lock_path(str(path))
        lock_file.write_text(lock_file.read_text().replace(str(os.getpid()), "1"))
        yield path
        lock.close()


def test_a_folder_that_a_live_run_downloads_into_is_refused(folder, run_folder, locked_folder, monkeypatch):
    """It does not wait for the other run: without `sleep`, waiting would be another error."""
    monkeypatch.delattr(folder_locks.time, "sleep")
    changes = [
        f"train_loader.dataset.streams.b.remote={folder / 'a[1]'}",
        f"train_loader.dataset.streams.b.local={locked_folder.parent}",
    ]
    message = r"another run \(process 1\) is downloading into .*/b/train; give this run"
    with pytest.raises(DataError, match=message):
        read_batch(run_folder, 1, changes)


# -------------------------------------------------------------------------------------------------- the command


@pytest.fixture(scope="module")
def tokenizer_change(tmp_path_factory):
    """The argument that names a tokenizer, whose END_TOKEN separates documents."""
    tokenizer = tmp_path_factory.mktemp("tokenizer")
    build_tokenizer(tokenizer)
    return f"tokenizer.name={tokenizer}"


def test_documents_are_counted_by_their_separators(run_folder, tokenizer_change):
    """A separator begins another document, unless it is the last token."""
    batch = read_batch(run_folder, 1, [tokenizer_change])
    for row in batch.rows:
        num_separators = int((row.tokens_t[:-1] == END_TOKEN).sum())
        assert batch.num_documents(row) == num_separators + 1


def test_the_command_shows_digests_and_a_line_for_each_row(run_folder, tokenizer_change, capsys):
    assert run_command(["data", "show", run_folder, "--batch", "1", tokenizer_change]) == 0
    output = capsys.readouterr().out
    assert "epoch 0, 8 rows\ndata/digest " in output
    assert ", as in the log\n" in output
    assert output.count("shard.0000") == BATCH_SIZE
    assert "documents" in output


def test_the_command_shows_where_the_text_of_a_row_lies(run_folder, tokenizer_change, capsys):
    assert run_command(["data", "show", "--rows", run_folder, "--batch", "1", tokenizer_change]) == 0
    row = read_batch(run_folder, 1).rows[0]
    assert f"row 0, stream {row.stream}, shard {row.shard}, sample {row.sample}, " in capsys.readouterr().out


# --------------------------------------------------------------------------------------------------- the losses


@pytest.fixture(scope="module")
def spiked(tmp_path_factory):
    """The folder of a run of four batches on two ranks, which saves each of them, in runs/spiked."""
    folder = tmp_path_factory.mktemp("spiked")
    write_data(folder / "data")
    config = tiny_config(folder / "data", max_duration="4ba", save_interval="1ba")
    config["model"].setdefault("attn_config", {})["attn_uses_sequence_id"] = True
    config["train_loader"]["dataset"]["eos_token_id"] = END_TOKEN
    run(folder, config, "spiked", 2)
    return folder


@pytest.fixture
def spiked_run(spiked):
    return spiked / "runs/spiked"


def losses_before_batch_3(spiked_run):
    """The losses of batch 3 by the weights with which the run computed them."""
    batch = read_batch(str(spiked_run), 3)
    return compute_losses(batch, str(spiked_run / "checkpoints/ba2"), torch.device("cpu"))


@pytest.mark.slow
@pytest.mark.multiprocess
def test_by_the_weights_before_it_the_rows_losses_are_the_loss_of_the_log(spiked, spiked_run):
    losses = losses_before_batch_3(spiked_run)
    logged = metrics(spiked, "spiked")[2]["loss/train/total"]
    assert len(losses.of_rows) == BATCH_SIZE
    assert losses.of_batch == pytest.approx(logged, rel=1e-5)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_without_a_location_the_losses_are_by_the_newest_checkpoint(spiked_run):
    newest = compute_losses(read_batch(str(spiked_run), 3), None, torch.device("cpu"))
    assert newest.checkpoint.endswith("ba4")
    assert newest.of_batch < losses_before_batch_3(spiked_run).of_batch


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_row_of_one_token_has_no_loss_and_changes_no_other(spiked_run):
    """Nothing is predicted in it."""
    batch = read_batch(str(spiked_run), 3)
    row_of_one_token = replace(batch.rows[0], tokens_t=batch.rows[0].tokens_t[:1])
    with_short_row = compute_losses(replace(batch, rows=[*batch.rows, row_of_one_token]), None, torch.device("cpu"))
    without_it = compute_losses(batch, None, torch.device("cpu"))
    assert math.isnan(with_short_row.of_rows[BATCH_SIZE])
    assert with_short_row.of_batch == pytest.approx(without_it.of_batch)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_data_that_the_checkpoint_was_not_trained_with_is_refused(spiked, spiked_run, tmp_path):
    """Other data in the place of the run's. The first 400 of its 500 samples are the same."""
    (spiked / "data").rename(tmp_path / "moved")
    write_data(spiked / "data", num_train=400)
    try:
        with pytest.raises(DataError, match="the data is not what the checkpoint was trained with"):
            read_batch(str(spiked_run), 3)
    finally:
        shutil.rmtree(spiked / "data")
        (tmp_path / "moved").rename(spiked / "data")


# ---------------------------------------------------------------------------- nothing recorded is trusted or written


@pytest.fixture
def downloads(tmp_path, monkeypatch):
    """The folder in which downloads are made."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture
def gone(tmp_path):
    """A folder that does not exist, and that a run has recorded for its copy of a stream."""
    return tmp_path / "gone"


def with_remote(recorded, remote, gone):
    """The configuration with another remote of stream b, and a reference elsewhere that cannot be resolved."""
    recorded["train_loader"]["dataset"]["streams"]["b"] |= {"local": str(gone), "remote": remote}
    return recorded | {"loggers": {"x": "${oc.env:NOBODY}"}}


MISSES_DATA = r"streams\.b: .*gone/train does not hold its data here; give .*\.remote="


@pytest.mark.usefixtures("downloads")
def test_a_remote_that_a_run_recorded_is_not_read(folder, recorded, copy_run, gone):
    run_with_remote = copy_run(with_remote(recorded, str(folder / "b"), gone))
    with pytest.raises(DataError, match=MISSES_DATA):
        read_batch(run_with_remote, 1)
    assert not gone.exists()


@pytest.mark.usefixtures("downloads")
def test_a_reference_that_a_run_recorded_is_not_resolved(folder, recorded, copy_run, gone, monkeypatch):
    """It would lead to the data."""
    monkeypatch.setenv("SECRET", str(folder / "b"))
    run_with_reference = copy_run(with_remote(recorded, "${oc.env:SECRET}", gone))
    with pytest.raises(DataError, match=MISSES_DATA):
        read_batch(run_with_reference, 1)
    assert not gone.exists()


def test_a_remote_that_a_change_names_is_downloaded_elsewhere(folder, recorded, copy_run, gone, downloads):
    run_with_remote = copy_run(with_remote(recorded, str(folder / "b"), gone))
    batch = read_batch(run_with_remote, 1, [f"train_loader.dataset.streams.b.remote={folder / 'b'}"])
    assert batch.digest == batch.logged_digest
    assert not gone.exists()
    gc.collect()  # the data set, with which the downloads are removed
    assert list(downloads.glob("llmfoundry-lite-data-*")) == []
