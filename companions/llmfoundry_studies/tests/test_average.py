"""The mean of a run's last checkpoints is a checkpoint like any other."""

import re
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from llmfoundry_lite.checkpoint.full_tensors import load_full_tensors
from llmfoundry_lite.checkpoint.manifest import Segment, Timestamp
from llmfoundry_lite.checkpoint.manifest_json import encode
from llmfoundry_lite.checkpoint.save import SaveMetadata, Saver
from llmfoundry_lite.checkpoint.store import CheckpointStore, open_checkpoint
from llmfoundry_lite.checkpoint.verify import verify_checkpoint
from llmfoundry_lite.cli import main
from llmfoundry_lite.convert.tokenizer import find_tokenizer
from llmfoundry_lite.errors import CheckpointError
from llmfoundry_lite.evaluation.models import locate_model
from llmfoundry_studies import average
from llmfoundry_studies.average import average_checkpoints
from tests.helpers.launch import train
from tests.helpers.models import ALIBI, random_model
from tests.helpers.tiny import build_tokenizer, tiny_config, write_config, write_data

TOKENS_PER_BATCH = 1000


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory) -> Path:
    """A folder with the checkpoints ba1 to ba6 of a model whose weights change from one to the next."""
    folder = tmp_path_factory.mktemp("run")
    save_batches(folder, range(1, 7))
    return folder


def save_batches(folder: Path, batches, seed: int = 0, segments: Sequence[Segment] = ()) -> None:
    """Save a model with other weights after each of these batches, under one lease."""
    model = random_model(ALIBI)
    optimizer = torch.optim.AdamW(model.parameters())
    generator = torch.Generator().manual_seed(seed)
    saver = Saver(CheckpointStore(folder))
    saver.take_lease()
    for batch in batches:
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
        metadata = SaveMetadata(
            timestamp=Timestamp(batch=batch, token=batch * TOKENS_PER_BATCH),
            config={"model": asdict(ALIBI)},
            scalars={"timestamp": {"batch": batch}},
            segments=tuple(segments),
        )
        saver.save(model, optimizer, metadata)
        saver.wait()
    saver.release_lease()


def test_checkpoints_of_the_run_are_listed_once(run_folder, tmp_path, monkeypatch):
    listed = []
    candidates = CheckpointStore.candidates
    monkeypatch.setattr(
        CheckpointStore, "candidates", lambda store: (listed.append(store.root.url), candidates(store))[1]
    )
    arguments = ["checkpoint", "average", str(run_folder), "--out", str(tmp_path / "mean"), "--last", "2"]
    assert main.run(arguments) == 0
    assert listed.count(CheckpointStore(run_folder).root.url) == 1


def mean_of(folder: Path, names) -> dict[str, torch.Tensor]:
    """Return the mean of checkpoints by torch alone: float64 sums, rounded once."""
    parents = [load_full_tensors(folder / name) for name in names]
    return {name: torch.stack([parent[name].double() for parent in parents]).mean(0).float() for name in parents[0]}


@pytest.mark.parametrize("file_bytes", [1, average.FILE_BYTES], ids=["a-file-each", "one-file"])
def test_every_weight_is_the_mean_of_the_last_checkpoints(run_folder, tmp_path, monkeypatch, file_bytes):
    monkeypatch.setattr(average, "FILE_BYTES", file_bytes)
    averaged = average_checkpoints(str(run_folder), str(tmp_path / "mean"), last=3)

    assert [parent.name for parent in averaged.parents] == ["ba6", "ba5", "ba4"]
    assert averaged.checkpoint.name == "ba6"
    expected = mean_of(run_folder, ["ba6", "ba5", "ba4"])
    found = load_full_tensors(tmp_path / "mean/ba6")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    verify_checkpoint(open_checkpoint(tmp_path / "mean/ba6"))


def test_the_digest_is_that_of_a_save_of_the_same_weights(run_folder, tmp_path):
    averaged = average_checkpoints(str(run_folder), str(tmp_path / "mean"), last=2)
    model = random_model(ALIBI)
    model.load_state_dict(load_full_tensors(averaged.checkpoint.url))
    assert averaged.checkpoint.manifest.state_digest == Saver(CheckpointStore(tmp_path / "again")).digest(model, None)


def test_the_manifest_names_the_parents_and_keeps_the_place_of_the_newest(run_folder, tmp_path):
    manifest = average_checkpoints(str(run_folder), str(tmp_path / "mean"), last=2).checkpoint.manifest
    parents = [open_checkpoint(run_folder / name).manifest for name in ("ba6", "ba5")]
    origins = manifest.scalars["averaged_from"]
    assert [origin["save_id"] for origin in origins] == [parent.save_id for parent in parents]
    assert [origin["state_digest"] for origin in origins] == [parent.state_digest for parent in parents]
    assert manifest.timestamp == parents[0].timestamp
    assert manifest.optimizer is None


def test_a_window_takes_every_checkpoint_of_the_last_tokens(run_folder, tmp_path):
    window = f"{2 * TOKENS_PER_BATCH}tok"
    averaged = average_checkpoints(str(run_folder), str(tmp_path / "mean"), window=window)
    assert [parent.name for parent in averaged.parents] == ["ba6", "ba5", "ba4"]


def test_checkpoints_of_an_abandoned_branch_are_left_out(tmp_path):
    save_batches(tmp_path / "run", [1, 2, 3, 4])
    save_batches(tmp_path / "run", [3], seed=1)  # a later launch, which went back to batch 2
    averaged = average_checkpoints(str(tmp_path / "run"), str(tmp_path / "mean"), last=3)
    epochs_and_names = [(parent.manifest.lease_epoch, parent.name) for parent in averaged.parents]
    assert epochs_and_names == [(2, "ba3"), (1, "ba2"), (1, "ba1")]


def test_a_checkpoint_of_an_abandoned_branch_at_an_earlier_batch_is_left_out(tmp_path):
    # Launch 2 went back to batch 1. Batches 2 and 3 of launch 1 are before its batch 4, and not on the way there.
    save_batches(tmp_path / "run", [1, 2, 3], segments=[Segment(first_batch=1, last_batch=3)])
    later = [Segment(first_batch=1, last_batch=1), Segment(first_batch=2, last_batch=4)]
    save_batches(tmp_path / "run", [4], seed=1, segments=later)
    averaged = average_checkpoints(str(tmp_path / "run"), str(tmp_path / "mean"), last=2)
    assert [parent.name for parent in averaged.parents] == ["ba4", "ba1"]


def test_a_run_folder_is_not_a_place_for_the_mean(tmp_path):
    save_batches(tmp_path / "run/checkpoints", [1, 2])
    with pytest.raises(CheckpointError, match="a run folder; give another folder"):
        average_checkpoints(str(tmp_path / "run"), str(tmp_path / "run"), last=2)


def test_too_few_checkpoints_are_refused_and_nothing_is_written(run_folder, tmp_path):
    with pytest.raises(CheckpointError, match="the last 9 checkpoints are to be averaged, found ba6, ba5"):
        average_checkpoints(str(run_folder), str(tmp_path / "mean"), last=9)
    assert not (tmp_path / "mean").exists()


def test_checkpoints_of_other_models_are_refused(tmp_path):
    save_batches(tmp_path / "run", [1, 2])
    manifest = tmp_path / "run/ba1/manifest.json"
    other = open_checkpoint(tmp_path / "run/ba1").manifest
    config = {"model": {**other.config["model"], "n_heads": 1}}
    manifest.write_bytes(encode(replace(other, config=config)))
    with pytest.raises(CheckpointError, match="its model settings differ from those of"):
        average_checkpoints(str(tmp_path / "run"), str(tmp_path / "mean"), last=2)


def test_a_damaged_parent_publishes_nothing(tmp_path):
    save_batches(tmp_path / "run", [1, 2])
    shard = next((tmp_path / "run/ba1").glob("*.safetensors"))
    raw = bytearray(shard.read_bytes())
    raw[len(raw) // 4] ^= 1
    shard.write_bytes(raw)
    with pytest.raises(CheckpointError, match="not what was written"):
        average_checkpoints(str(tmp_path / "run"), str(tmp_path / "mean"), last=2)
    assert CheckpointStore(tmp_path / "mean").candidates() == []


def test_the_command_says_what_was_averaged(run_folder, tmp_path, capsys):
    out = tmp_path / "mean"
    assert main.run(["checkpoint", "average", str(run_folder), "--last", "2", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert f"averaged 2 checkpoints as {out}/ba6" in printed
    assert re.search(r"of +ba5, ba6", printed)
    assert main.run(["checkpoint", "inspect", str(out)]) == 0
    assert "mean of" in capsys.readouterr().out


@pytest.mark.parametrize(
    "options",
    [[], ["--last", "2", "--window", "5ba"], ["--window", "5ep"], ["--window", "many"]],
    ids=["neither", "both", "epochs", "no-span"],
)
def test_a_mistake_in_the_options_is_one_line(run_folder, tmp_path, capsys, options):
    out = tmp_path / "mean"
    assert main.run(["checkpoint", "average", str(run_folder), "--out", str(out), *options]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert not out.exists()


@pytest.mark.multiprocess
def test_a_mean_of_a_real_run_is_evaluated_with_its_tokenizer_and_begins_another_run(tmp_path, capsys):
    build_tokenizer(tmp_path / "tokenizer")
    settings = {"max_duration": "4ba", "save_interval": "1ba", "save_num_checkpoints_to_keep": -1}
    config = tiny_config(write_data(tmp_path / "data"), **settings, tokenizer__name=str(tmp_path / "tokenizer"))
    path = write_config(tmp_path / "run.yaml", config)
    train([path, f"run_folder={tmp_path}/run"], tmp_path)
    out = tmp_path / "mean"
    assert main.run(["checkpoint", "average", str(tmp_path / "run"), "--last", "3", "--out", str(out)]) == 0
    located = locate_model(str(out), tokenizer=None, precision="fp32", device=torch.device("cpu"), shard=None)
    assert located.num_tokens_trained == open_checkpoint(out / "ba4").manifest.timestamp.token
    assert find_tokenizer({}, open_checkpoint(out / "ba4"), str(out)) is not None


def test_a_stranger_s_manifest_is_inspected_without_a_traceback(tmp_path, capsys):
    save_batches(tmp_path / "run", [1])
    path = tmp_path / "run/ba1/manifest.json"
    manifest = open_checkpoint(tmp_path / "run/ba1").manifest
    path.write_bytes(encode(replace(manifest, scalars={"averaged_from": ["not a record", 3]})))
    assert main.run(["checkpoint", "inspect", str(tmp_path / "run/ba1")]) == 0
    assert "mean of" in capsys.readouterr().out
