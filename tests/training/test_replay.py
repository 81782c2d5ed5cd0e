"""`llmfoundry-lite replay`: what was recorded, trained again elsewhere; and whatever was not so is found."""

import json
import os
import shutil
from dataclasses import replace

import pytest
from composer.core import Callback

from llmfoundry_lite.checkpoint.full_tensors import open_checkpoint
from llmfoundry_lite.checkpoint.manifest_json import encode
from llmfoundry_lite.checkpoint.shards import hash_blocks, hash_buffers
from llmfoundry_lite.cli.main import run as run_command
from llmfoundry_lite.errors import ConfigError
from llmfoundry_lite.launch.replay import Outcome, compare_replay, plan_replay, write_replay
from llmfoundry_lite.launch_replay import main
from tests.helpers.launch import launch
from tests.helpers.present import needs
from tests.helpers.runs import run, saves
from tests.helpers.tiny import tiny_config, write_data

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

RUN = "audited"


class OtherRate(Callback):
    """Doubles the learning rate of batch 5, where the environment says so: no configuration knows of it."""

    def after_train_batch(self, state, logger):
        if "OTHER_RATE" in os.environ and int(state.timestamp.batch) == 4:
            for group in state.optimizers[0].param_groups:
                group["lr"] *= 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with a run of 6 batches on one rank, saved every 2."""
    folder = tmp_path_factory.mktemp("runs")
    write_data(folder / "data")
    run(folder, config(folder), RUN)
    return folder


def config(folder, **changes):
    batches = {"global_train_batch_size": 12, "device_train_microbatch_size": 1, "max_duration": "6ba"}
    callbacks = {f"python:{__name__}:OtherRate": {}}
    everything = {"exact_sums": True, "save_interval": "2ba", "callbacks": callbacks, **batches, **changes}
    return tiny_config(folder / "data", **everything)


def replay(folder, states=None, num_ranks=1, where=RUN, env=None) -> Outcome:
    """Replay as the command does, with the tests' own launcher."""
    plan = plan_replay(str(folder / "runs" / where), states)
    out = folder / f"replay-{len(list(folder.iterdir()))}"
    path = write_replay(plan, out, num_ranks)
    launch(main, ([path],), folder, num_ranks, env=env).check()
    assert not list(out.glob("checkpoints/ba*"))
    return compare_replay(plan, out)


def forget_ranks(monkeypatch):
    """Undo after the test what the command sets."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def copy_of_run(folder, name):
    """Return a copy to tamper with."""
    shutil.copytree(folder / "runs" / RUN, folder / "runs" / name)
    return saves(folder, name)


def rewrite(checkpoint, **changes):
    (checkpoint / "manifest.json").write_bytes(encode(replace(open_checkpoint(checkpoint).manifest, **changes)))


def test_on_other_ranks_it_is_bit_equal_and_the_run_stays_as_it_is(folder):
    before = {path: path.read_bytes() for path in (folder / "runs" / RUN).rglob("*") if path.is_file()}
    outcome = replay(folder, "ba3..ba6", 2)
    assert outcome.is_equal, outcome.text
    assert outcome.text == (
        "bit-equal: 4 of data/digest, 4 of lr, 4 of loss/train/total, 4 of grad_norm, 2 of state/digest; "
        "beside the run: devices 1 -> 2"
    )
    assert {path: path.read_bytes() for path in (folder / "runs" / RUN).rglob("*") if path.is_file()} == before


def test_a_flipped_bit_of_a_weight_is_found_though_all_hashes_fit(folder):
    checkpoint = copy_of_run(folder, "flipped") / "ba4"
    file = open_checkpoint(checkpoint).manifest.files[0]
    raw = bytearray((checkpoint / file.name).read_bytes())
    header = json.loads(raw[8 : file.header_bytes])
    place = next(value["data_offsets"][0] for key, value in header.items() if key.startswith("model/"))
    raw[file.header_bytes + place] ^= 1
    hashes = hash_blocks(bytes(raw[: file.hashed_bytes]), file.block_bytes)
    raw[file.hashed_bytes :] = hashes
    (checkpoint / file.name).write_bytes(raw)
    digest = hash_buffers([bytes(raw[: file.header_bytes]), hashes]).hex()
    rewrite(checkpoint, files=(replace(file, digest=digest),))
    outcome = replay(folder, None, where="flipped")
    assert outcome.text.startswith("does not fit: batch 4: state/digest is ") and not outcome.is_equal


def test_other_threads_are_named(folder):
    outcome = replay(folder, "ba4..ba6", env={"OMP_NUM_THREADS": "2"})
    assert outcome.text.startswith(("bit-equal: ", "within a band: ")) and "threads of a rank 1 -> 2" in outcome.text


def test_a_step_of_another_learning_rate_is_found(folder):
    run(folder, config(folder), "faster", env={"OTHER_RATE": "1"})
    assert replay(folder, "ba2..ba4", where="faster").is_equal
    outcome = replay(folder, "ba4..ba6", where="faster")
    assert outcome.text.startswith("does not fit: batch 6: loss/train/total is ")


def test_another_seed_is_found(folder):
    run(folder, config(folder, seed=18), "seeded")
    for checkpoint in saves(folder, "seeded").glob("ba*"):
        manifest = open_checkpoint(checkpoint).manifest
        rewrite(checkpoint, config=manifest.config | {"seed": 17})
    outcome = replay(folder, "ba0..ba2", where="seeded")
    assert outcome.text.startswith("does not fit: batch 1: loss/train/total is ")


def test_a_changed_row_of_data_is_found(folder):
    kept = {path: path.read_bytes() for path in (folder / "data" / "train").glob("*.mds")}
    try:
        for path, content in kept.items():  # a token of those rows that have it, behind the table of rows
            middle = len(content) // 2
            path.write_bytes(content[:middle] + content[middle:].replace(b"\x05\x00", b"\x06\x00"))
        outcome = replay(folder, "ba0..ba6")
    finally:
        for path, content in kept.items():
            path.write_bytes(content)
    assert outcome.text.startswith("does not fit: batch ") and ": data/digest is " in outcome.text


def test_other_data_does_not_fit(folder, monkeypatch, capfd):
    forget_ranks(monkeypatch)
    write_data(folder / "other", num_train=300)
    assert run_command(["replay", str(folder / "runs" / RUN), f"train_loader.dataset.local={folder / 'other'}"]) == 3
    told = capfd.readouterr()
    assert "does not fit: the data is not what the run was trained with: " in told.out and "new run" not in told.err


def test_without_exact_sums_other_ranks_are_within_a_band(folder):
    run(folder, config(folder, exact_sums=False), "plain")
    outcome = replay(folder, "ba2..ba6", 2, where="plain")
    assert outcome.text.startswith("within a band: ") and "devices 1 -> 2" in outcome.text and not outcome.is_equal


@needs("llmfoundry_layouts")
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_run_in_stages_is_bit_equal_in_stages_and_on_one_rank(folder, num_ranks):
    if not (folder / "runs/stages").exists():
        run(folder, config(folder, pp_config={"pipeline_parallel_degree": 2}), "stages", 2)
    outcome = replay(folder, "ba2..ba4", num_ranks, where="stages")
    assert outcome.is_equal and outcome.text.startswith("bit-equal: 2 of data/digest"), outcome.text


def test_batches_with_local_steps_are_refused(folder, tmp_path):
    copied = shutil.copytree(folder / "runs" / RUN, tmp_path / "local")
    for path in (copied / "checkpoints").glob("ba*/manifest.json"):
        manifest = open_checkpoint(str(path.parent)).manifest
        segments = tuple(replace(one, sync="local steps, every 4") for one in manifest.segments)
        path.write_bytes(encode(replace(manifest, segments=segments)))
    with pytest.raises(ConfigError, match="with local steps, every 4, which one world does not repeat; replay batches"):
        plan_replay(str(copied), "ba4..ba6")


def test_the_command_says_what_it_found_and_refuses_another_run(folder, monkeypatch, capfd):
    monkeypatch.chdir(folder)
    forget_ranks(monkeypatch)
    assert run_command(["replay", f"runs/{RUN}", "ba6..ba4"]) == 2
    assert "expected two states of the run, the earlier first" in capfd.readouterr().err
    assert run_command(["replay", f"runs/{RUN}", "ba4..ba9"]) == 2
    assert "no loss of batch 7; it ends with 6" in capfd.readouterr().err
    assert run_command(["replay", f"runs/{RUN}", "ba4..ba6", "optimizer.lr=1"]) == 2
    assert "replay: optimizer.lr 0.01 -> 1.0 would be another run" in capfd.readouterr().err
    assert run_command(["replay", f"runs/{RUN}", "ba4..ba6"]) == 0
    assert "bit-equal: 2 of data/digest" in capfd.readouterr().out
