"""Faults while a run saves: it stops with the cause, or goes on from the last checkpoint."""

import os
import pickle
import signal
import socket
from concurrent.futures import wait

import pytest
from composer.core import Callback

from llmfoundry_lite.checkpoint import local_folder
from llmfoundry_lite.checkpoint.store import CheckpointStore
from llmfoundry_lite.checkpoint.verify import verify_checkpoint
from llmfoundry_lite.training.checkpointing import Checkpointing
from tests.checkpoint.mounts import hide, mounted, need_namespaces
from tests.checkpoint.saves import flip
from tests.helpers import launch
from tests.helpers.runs import attempt, losses, metrics, run, saved_names, saves, status
from tests.helpers.tiny import tiny_config, values, write_config

pytestmark = [pytest.mark.multiprocess, pytest.mark.fault, pytest.mark.slow]


class Fault(Callback):
    """Something that happens to one rank (or to all) at one batch."""

    def __init__(self, batch: int, rank: int | None = None):
        self.batch, self.rank = batch, rank

    def batch_end(self, state, logger):
        saver = next(c for c in state.callbacks if isinstance(c, Checkpointing)).saver
        if int(state.timestamp.batch) == self.batch + 1 and saver._in_flight is not None:
            wait([saver._in_flight.background_task])  # so that it has failed when the next batch looks
        if int(state.timestamp.batch) == self.batch and self.rank in (None, int(os.environ["RANK"])):
            self.strike(state)

    def strike(self, state):
        raise NotImplementedError


class FullDisk(Fault):
    def strike(self, state):
        def full(descriptor, pieces, offset):
            raise OSError(28, "No space left on device")

        local_folder.WRITE = full


class BrokenWriter(Fault):
    def strike(self, state):
        def broken(descriptor, pieces, offset):
            raise ZeroDivisionError("a bug in the writer")

        local_folder.WRITE = broken


class PoisonMoments(Fault):
    def strike(self, state):
        optimizer = state.optimizers[0]
        moments = next(slots["exp_avg"] for slots in optimizer.state.values() if slots["exp_avg"].to_local().numel())
        moments.to_local()[0] = float("inf")


class KillAtPhase(Callback):
    """Kills its process the second time that a save comes to `phase`."""

    def __init__(self, phase: str, rank: int | None = None):
        self.phase, self.rank = phase, rank
        self.count = 0

    def fit_start(self, state, logger):
        next(c for c in state.callbacks if isinstance(c, Checkpointing)).store.on_phase = self.on_phase

    def on_phase(self, phase):
        self.count += phase == self.phase
        if self.count == 2 and self.rank in (None, int(os.environ["RANK"])):
            os.kill(os.getpid(), signal.SIGKILL)


class Bomb:
    def __reduce__(self):
        return (os.mkdir, ("exploded",))


def callback(kind, **arguments):
    return {f"python:{__name__}:{kind.__name__}": arguments}


def config_for(data, **changes):
    return tiny_config(data, **{"autoresume": True, "save_interval": "2ba", "max_duration": "8ba", **changes})


@pytest.fixture(scope="module")
def whole(tmp_path_factory, data):
    """Return the losses of a run on 2 ranks to which nothing happens."""
    folder = tmp_path_factory.mktemp("whole")
    run(folder, config_for(data), "whole", 2)
    return losses(folder, "whole")


@pytest.mark.parametrize(
    ("fault", "code", "words"),
    [
        pytest.param(BrokenWriter, 1, "ZeroDivisionError: a bug in the writer", marks=pytest.mark.slow),
        (PoisonMoments, 2, "not saved: non-finite values in optim/"),
    ],
)
def test_what_fails_in_the_background_stops_the_run_at_the_next_batch_with_its_cause(
    tmp_path, data, whole, fault, code, words
):
    failed = attempt(tmp_path, config_for(data), "run", 2, callbacks=callback(fault, batch=4, rank=1))
    assert code in failed.exit_codes and 0 not in failed.exit_codes
    assert words in failed.outputs[1 if code == 1 else 0]
    assert status(tmp_path, "run")["status"] == "failed"
    assert status(tmp_path, "run")["batch"] == 5
    assert words in status(tmp_path, "run")["reason"]
    assert saved_names(tmp_path, "run") == {"ba2"}
    run(tmp_path, config_for(data), "run", 2)
    assert losses(tmp_path, "run") == whole


def test_a_disk_that_stays_full_costs_saves_and_what_comes_after_the_last_is_trained_again(tmp_path, data, whole):
    full = callback(FullDisk, batch=4, rank=1)
    left = attempt(tmp_path, config_for(data, retry_for=0), "run", 2, callbacks=full)
    assert left.exit_codes == [1, 1]
    assert left.output.count("shard-00001.safetensors: not written: No space left on device; ba2 stands") == 3
    assert (status(tmp_path, "run")["status"], status(tmp_path, "run")["batch"]) == ("failed", 8)
    assert saved_names(tmp_path, "run") == {"ba2"}
    run(tmp_path, config_for(data), "run", 2)
    assert losses(tmp_path, "run") == whole


def test_weights_that_are_not_finite_are_never_published(tmp_path, data):
    class_name = callback(PoisonWeights, batch=4, rank=0)
    failed = attempt(tmp_path, config_for(data, on_non_finite="skip"), "run", 2, callbacks=class_name)
    assert set(failed.exit_codes) == {2}
    assert saved_names(tmp_path, "run") == {"ba2"}


class PoisonWeights(Fault):
    def strike(self, state):
        parameter = next(p for p in state.model.parameters() if p.to_local().numel())
        parameter.data.to_local()[0] = float("nan")


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, None])
@pytest.mark.parametrize(
    "phase",
    ["planned", "half a shard", "shard synced", "before manifest", "before rename", "after rename", "mid-prune"],
)
def test_killed_at_any_phase_the_run_carries_on_as_if_nothing_had_been(tmp_path, data, whole, phase, rank):
    config = config_for(data, save_num_checkpoints_to_keep=1)
    killed = attempt(tmp_path, config, "run", 2, callbacks=callback(KillAtPhase, phase=phase, rank=rank))
    assert -signal.SIGKILL in killed.exit_codes
    found = CheckpointStore(saves(tmp_path, "run")).newest_intact(verify_checkpoint)
    assert found.checkpoint is not None and not found.notes
    run(tmp_path, config, "run", 2)
    assert losses(tmp_path, "run") == whole
    assert saved_names(tmp_path, "run") == {"ba8"}
    assert not [name for name in os.listdir(saves(tmp_path, "run")) if name.startswith((".tmp", ".deleting"))]


def test_damaged_saves_are_passed_over_to_the_newest_intact_and_pickles_never_opened(tmp_path, data, whole):
    config = config_for(data)
    run(tmp_path, config, "run", 2, stop_after="6ba")
    folder = saves(tmp_path, "run")
    for name, offset in (("ba6/shard-00001.safetensors", -1), ("ba4/manifest.json", 700)):
        flip(folder / name, offset)
    for name in ("model.pt", ".metadata", "__0_0.distcp", "shard-00002.safetensors"):
        (folder / "ba2" / name).write_bytes(pickle.dumps(Bomb()))
    output = run(tmp_path, config, "run", 2).output
    assert output.count("passed over damaged checkpoint") == 2
    assert "carrying on from runs/run/checkpoints/ba2" in output
    assert losses(tmp_path, "run") == whole
    assert not (tmp_path / "exploded").exists()


def test_when_all_are_damaged_the_run_refuses_and_says_so(tmp_path, data):
    config = config_for(data, save_interval="1ba")
    run(tmp_path, config, "run", stop_after="2ba")
    for name in ("ba1", "ba2"):
        flip(saves(tmp_path, "run") / name / "shard-00000.safetensors", -1)
    before = (tmp_path / "runs/run/metrics.jsonl").read_bytes()
    refused = attempt(tmp_path, config, "run")
    assert refused.exit_codes == [2]
    assert "no checkpoint is intact" in refused.output
    assert "ba1" in refused.output and "ba2" in refused.output
    assert "Traceback" not in refused.output
    (last,) = saved_names(tmp_path, "run")
    again = attempt(tmp_path, config, "run")
    assert again.exit_codes == [2] and "no checkpoint is intact" in again.output
    assert saved_names(tmp_path, "run") == {last}, "the last one is not renamed"
    os.rename(saves(tmp_path, "run") / last, saves(tmp_path, "run") / f".damaged-{last}-0")
    refused = attempt(tmp_path, config, "run")
    assert refused.exit_codes == [2]
    assert "holds no checkpoint but .damaged-ba" in refused.output and "move the folder away" in refused.output
    assert (tmp_path / "runs/run/metrics.jsonl").read_bytes() == before


def train_without_the_disk(path: str, folder: str) -> None:
    """Rank 1's node has lost its mount of the save folder."""
    if os.environ["RANK"] == "1":
        hide(folder)
    launch._train([path])


def test_a_node_without_the_disk_is_named_and_no_checkpoint_pays_for_it(tmp_path, data, whole):
    need_namespaces()
    config = config_for(data)
    run(tmp_path, config, "run", 2, stop_after="4ba")
    folder = saves(tmp_path, "run")
    path = write_config(tmp_path / "run.yaml", {**config, "run_name": "run"})
    refused = launch.launch(train_without_the_disk, (path, str(folder)), tmp_path, 2)
    assert refused.exit_codes == [2, 2]
    words = refused.output.strip().splitlines()[-1]
    assert f"rank 1 on host {socket.gethostname()}: " in words and "/ba4/shard-0000" in words
    assert ": missing; rank 0 on host " in words and "whether the disk is mounted" in words
    assert {name for name in os.listdir(folder) if "ba" in name} == {"ba2", "ba4"}
    assert "carrying on from runs/run/checkpoints/ba4" in run(tmp_path, config, "run", 2).output
    assert losses(tmp_path, "run") == whole


@pytest.mark.slow
def test_a_read_only_folder_can_be_loaded_from_but_not_saved_into(tmp_path, data):
    config = config_for(data)
    with mounted(tmp_path / "disk") as disk:
        run(tmp_path, config, "run", stop_after="4ba", save_folder=str(disk.path))
        disk.make_read_only()
        refused = attempt(tmp_path, config, "run", 2, save_folder=str(disk.path))
        assert refused.exit_codes == [75, 75], "a disk may be written to again"
        assert refused.output.strip().splitlines()[-1] == (
            f"error: {disk.path}: no lease can be taken: Read-only file system; this may pass: run the same command "
            "again"
        )
        run(tmp_path, config, "other", 2, load_path=str(disk.path))
    assert values(metrics(tmp_path, "other"), "batch") == [1, 2, 3, 4, 5, 6, 7, 8]
