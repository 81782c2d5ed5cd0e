"""Several ranks: what one of them finds, all of them do; and what one of them fails, none of them publishes."""

import errno
import os
import pickle
import re
import signal
import socket
import threading
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from llmfoundry_lite import retry
from llmfoundry_lite.checkpoint import local_folder, restore
from llmfoundry_lite.checkpoint import save as save_module
from llmfoundry_lite.checkpoint.restore import load, load_newest
from llmfoundry_lite.checkpoint.retention import prune
from llmfoundry_lite.checkpoint.save import Saver
from llmfoundry_lite.checkpoint.state import local_tensor, read_state
from llmfoundry_lite.checkpoint.store import CheckpointStore
from llmfoundry_lite.checkpoint.verify import verify_checkpoint
from llmfoundry_lite.errors import CheckpointError, DamagedCheckpointError, UnreadableCheckpointError
from tests.checkpoint.mounts import hide, need_namespaces
from tests.checkpoint.ranks import about, build, save_now, start, step, whole_state
from tests.checkpoint.saves import flip
from tests.helpers.launch import launch

pytestmark = [pytest.mark.multiprocess, pytest.mark.fault]


def raised_by(kind, call):
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__}")


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def faults(folder):
    """All in one launch: starting ranks is what takes the time."""
    start()
    rank = dist.get_rank()
    model, opt = build("FULL_SHARD")
    step(model, opt, 0)
    with torch.no_grad():
        model(torch.zeros(1, 3, dtype=torch.int64))  # evaluation leaves the root's parameters whole
    store = CheckpointStore(folder)
    saver = Saver(store)
    saver.take_lease()
    for batch in (1, 2):
        save_now(saver, model, opt, batch)
    at_two = whole_state(model, opt)

    # One rank's disk fails: nobody publishes, everybody hears why, and the next save is sound.
    write = local_folder.WRITE
    if rank == 1:

        def full(descriptor, pieces, offset):
            raise OSError(28, "No space left on device")

        local_folder.WRITE = full
    saver.save(model, opt, about(3))
    assert "shard-00001.safetensors: not written: No space left" in raised_by(CheckpointError, saver.wait)
    local_folder.WRITE = write
    dist.barrier()
    assert sorted(name for name in os.listdir(folder) if name.startswith((".tmp", "ba"))) == ["ba1", "ba2"]

    # One rank has drifted: its steps are others.
    if rank == 1:
        next(iter(opt.state.values()))["step"] += 1
    saver.save(model, opt, about(3))
    assert "rank 1 has other optimizer groups or steps" in raised_by(CheckpointError, saver.wait)
    if rank == 1:
        next(iter(opt.state.values()))["step"] -= 1

    # One rank has non-finite weights.
    if rank == 1:
        poisoned = model.embed.weight.to_local()
        kept = poisoned.clone()
        poisoned.data.fill_(float("nan"))
    saver.save(model, opt, about(3))
    assert "not saved: non-finite values in model/embed.weight" in raised_by(CheckpointError, saver.wait)
    if rank == 1:
        poisoned.data.copy_(kept)
    save_now(saver, model, opt, 3)

    # Damage in what only one rank reads: no rank touches its model, and all go back together.
    dist.barrier()
    if rank == 0:
        shard = Path(folder) / "ba3" / "shard-00001.safetensors"
        flip(shard, shard.stat().st_size - 17)
    dist.barrier()
    other, other_opt = build("FULL_SHARD", seed=4)
    before = whole_state(other, other_opt)
    words = raised_by(DamagedCheckpointError, lambda: load(f"{folder}/ba3", other, other_opt))
    assert "ba3/shard-00001.safetensors: bytes" in words
    assert same(whole_state(other, other_opt), before)
    restored = load_newest(store, other, other_opt, lease=saver.lease)
    assert restored.manifest.timestamp.batch == 2 and len(restored.notes) == 1
    assert same(whole_state(other, other_opt), at_two)
    dist.barrier()
    assert not (Path(folder) / "ba3").exists()

    # What is held of the state is in no graph, and training may change it in place.
    held = [local_tensor(tensor) for tensor in read_state(other, other_opt).tensors.values()]
    assert not any(part.requires_grad for part in held)
    step(other, other_opt, 9)

    # One node lacks the package that the folder's protocol needs.
    def no_package(url):
        raise CheckpointError(f"{url}: needs a package that is not installed")

    opener = restore.open_folder
    if rank == 1:
        restore.open_folder = no_package
    words = raised_by(CheckpointError, lambda: load(f"{folder}/ba2", other, other_opt))
    assert words == f"{folder}/ba2: needs a package that is not installed"
    restore.open_folder = opener

    # A save restored by object collectives or pickles would trip here.
    def forbidden(*args, **kwargs):
        raise AssertionError("pickled")

    for module, names in (
        (pickle, ("dump", "dumps", "load", "loads", "Pickler", "Unpickler")),
        (torch, ("save", "load")),
    ):
        for name in names:
            setattr(module, name, forbidden)
    dist.distributed_c10d._pickler = dist.distributed_c10d._unpickler = forbidden

    # And a collective in a background thread would meet those of the training loop.
    def on_main_thread(collective):
        def called(*args, **kwargs):
            assert threading.current_thread() is threading.main_thread()
            return collective(*args, **kwargs)

        return called

    for name in ("all_reduce", "all_gather", "all_gather_into_tensor", "broadcast", "barrier"):
        setattr(dist, name, on_main_thread(getattr(dist, name)))
    saver.save(model, opt, about(4))
    while saver.poll() is None:
        pass
    load(f"{folder}/ba4", other, other_opt)


def test_what_one_rank_finds_all_ranks_do(tmp_path):
    launch(faults, (str(tmp_path / "checkpoints"),), tmp_path, 2).check()


def wait_for_one(folder):
    """The disk of rank 1 does not answer until that rank has waited for a while; rank 0 waits with it."""
    save_module.POLL_SECONDS, save_module.NOTE_SECONDS = 0.01, 0.0
    start()
    answers, told = threading.Event(), []

    def note(name, seconds):
        told.append(name)
        answers.set()

    def wait_for_answer(phase):
        if phase == "half a shard" and dist.get_rank() == 1:
            assert answers.wait(60)

    saver = Saver(CheckpointStore(folder, on_phase=wait_for_answer), note_wait=note)
    save_now(saver, *build("FULL_SHARD"), 1)
    assert told[0] == "ba1"


def test_ranks_that_wait_for_the_disk_of_another_sit_in_no_collective(tmp_path):
    """A collective would fail after `dist_timeout`, however long the disk may take."""
    launch(wait_for_one, (str(tmp_path / "checkpoints"),), tmp_path, 2).check()


def views(folder):
    """Faults that only one rank sees, all in one launch. The lasting fault comes last."""
    start()
    rank, host = dist.get_rank(), socket.gethostname()
    model, opt = build("FULL_SHARD")
    store = CheckpointStore(folder)
    saver = Saver(store)
    saver.take_lease()
    for batch in (1, 2):
        step(model, opt, batch)
        save_now(saver, model, opt, batch)
    at_two, before = whole_state(model, opt), listing(folder)
    retry.PAUSES_SECONDS = (0.0,) * 3
    read = os.preadv

    def restored_with(victim, answer):
        """The newest checkpoint, of whose tensors `victim` reads something else."""
        dist.barrier()

        def preadv(descriptor, pieces, offset):
            done = read(descriptor, pieces, offset)
            if sum(map(len, pieces)) > 4096:  # the header alone is no more
                answer(pieces)
            return done

        if rank == victim:
            os.preadv = preadv
        other, other_opt = build("FULL_SHARD", seed=4)
        try:
            restored = load_newest(store, other, other_opt, lease=saver.lease)
            assert same(whole_state(other, other_opt), at_two)
            return restored.notes
        finally:
            os.preadv = read
            dist.barrier()
            assert listing(folder) == before

    def once(answer):
        left = [answer]
        return lambda pieces: left.pop()(pieces) if left else None

    def refuse(pieces):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def garble(pieces):
        pieces[-1][-1] ^= 1

    # Once is never.
    for victim, answer in product((0, 1), (refuse, garble)):
        assert restored_with(victim, once(answer)) == []

    # For ever, on one rank alone: that rank, its host and the file; and the checkpoint stands.
    sound = f"; rank 0 on host {host} finds this file sound, so nothing is wrong with the checkpoint: see on {host}"
    words = raised_by(CheckpointError, lambda: restored_with(1, refuse))
    file = f"{folder}/ba2/shard-0000[01].safetensors"
    assert re.match(f"rank 1 on host {host}: {file}: cannot be read on host {host}: Input/output error{sound}", words)
    words = raised_by(CheckpointError, lambda: restored_with(1, garble))
    assert re.match(f"rank 1 on host {host}: {file}: bytes .* are not what was written .*{sound}", words)

    # On rank 0: no rank goes on, and nothing is moved either.
    words = raised_by(UnreadableCheckpointError, lambda: restored_with(0, refuse))
    assert re.match(f"{file}: cannot be read on host {host}: Input/output error$", words)

    # A node whose mount failed: it can neither load nor save.
    if rank == 1:
        hide(folder)
    words = raised_by(CheckpointError, lambda: restored_with(None, None) if rank == 0 else hidden_load(store))
    assert re.match(f"rank 1 on host {host}: {file}: missing{sound}", words)
    lease, saver = saver.lease, Saver(store)  # an older thread still sees the disk
    saver.lease, saver.has_lease = lease, True
    words = raised_by(CheckpointError, lambda: save_now(saver, model, opt, 3))
    assert f"host {host} does not find this launch's lease" in words and "not shared by all nodes" in words
    assert rank == 1 or listing(folder) == before
    assert rank == 0 or os.listdir(folder) == []


def hidden_load(store):
    dist.barrier()
    try:
        load_newest(store, *build("FULL_SHARD", seed=4))
    finally:
        dist.barrier()


def listing(folder):
    return sorted(name for name in os.listdir(folder) if name != "latest.json")


def test_what_one_rank_alone_sees_is_its_nodes_fault_and_no_checkpoint_pays_for_it(tmp_path):
    need_namespaces()
    launch(views, (str(tmp_path / "checkpoints"),), tmp_path, 2).check()


def train_until_killed(folder, phase, victim):
    """Saves after each step; the victim dies in its second save."""
    start()
    model, opt = build("FULL_SHARD")
    count = 0

    def kill(now):
        nonlocal count
        count += now == phase
        if count == 2 and victim in (dist.get_rank(), "all"):
            os.kill(os.getpid(), signal.SIGKILL)

    store = CheckpointStore(folder, on_phase=kill)
    saver = Saver(store)
    saver.take_lease()
    restored = load_newest(store, model, opt, lease=saver.lease)
    first = restored.manifest.timestamp.batch if restored.manifest else 0
    for batch in range(first + 1, first + 4):
        step(model, opt, batch)
        save_now(saver, model, opt, batch)
        if dist.get_rank() == 0:
            prune(store, saver.lease, keep_newest=1)


EVERY_RANK = ["planned", "half a shard", "shard synced"]
RANK_0 = ["before manifest", "before rename", "after rename", "mid-prune"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("phase", "victim"), [*product(EVERY_RANK, [0, 1, "all"]), *product(RANK_0, [0, "all"])], ids=str
)
def test_a_killed_rank_costs_at_most_the_save_in_flight(tmp_path, phase, victim):
    folder = tmp_path / "checkpoints"
    done = launch(train_until_killed, (str(folder), phase, victim), tmp_path, 2)
    assert -signal.SIGKILL in done.exit_codes
    found = CheckpointStore(folder).newest_intact(verify_checkpoint)
    assert found.checkpoint is not None and not found.notes
    batch = found.checkpoint.manifest.timestamp.batch
    assert batch == {"after rename": 2, "mid-prune": 3}.get(phase, 1)
    launch(train_until_killed, (str(folder), "never", None), tmp_path, 3).check()
    assert next(c.name for c in CheckpointStore(folder).candidates()) == f"ba{batch + 3}"
    assert not [name for name in os.listdir(folder) if name.startswith((".tmp", ".deleting"))]
