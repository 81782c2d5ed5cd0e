"""The log is appended to beside the checkpoints, and what is lost of it is said and written again."""

from dataclasses import replace

import pytest
import torch

from llmfoundry_lite.checkpoint.restore import load_newest
from llmfoundry_lite.checkpoint.retention import prune
from llmfoundry_lite.checkpoint.run_log import read_log
from llmfoundry_lite.checkpoint.save import Saver
from llmfoundry_lite.checkpoint.store import CheckpointStore, open_checkpoint
from llmfoundry_lite.checkpoint.verify import verify_checkpoint
from tests.checkpoint.ranks import about
from tests.checkpoint.saves import flip


def lines(count):
    return b"".join(b'{"batch": %06d}\n' % batch for batch in range(1, count + 1))


class Run:
    def __init__(self, folder):
        self.store = CheckpointStore(folder)
        self.saver = Saver(self.store)
        self.saver.take_lease()
        self.model = torch.nn.Linear(2, 2)

    def save(self, batch, log=None):
        log = lines(batch) if log is None else log
        self.saver.save(self.model, None, replace(about(batch), log=lambda: log))
        self.saver.wait()
        checkpoint = open_checkpoint(self.store.root.child(f"ba{batch}").url)
        assert read_log(checkpoint).content == log
        return checkpoint


def test_each_save_sends_little_and_each_checkpoint_has_it_all(tmp_path):
    run = Run(tmp_path)
    num_bytes = 0
    for batch in range(1, 65):
        checkpoint = run.save(batch)
        num_bytes += (tmp_path / "log" / f"{checkpoint.manifest.save_id}.jsonl").stat().st_size
        assert len(checkpoint.manifest.log) <= 7
    assert num_bytes <= 7 * len(lines(64)), "sent as a whole each time it would be 32 times as much"


def test_a_save_without_new_lines_writes_no_part(tmp_path):
    run = Run(tmp_path)
    first = run.save(1)
    assert run.save(2, lines(1)).manifest.log == first.manifest.log


def test_a_log_that_has_changed_at_its_beginning_is_written_anew(tmp_path):
    run = Run(tmp_path)
    run.save(10)
    checkpoint = run.save(11, b"{}\n" + lines(11))
    assert len(checkpoint.manifest.log) == 1


@pytest.mark.parametrize("url", ["local", "memory://log-parts"])
def test_parts_go_with_the_last_checkpoint_that_has_them(tmp_path, url):
    run = Run(tmp_path if url == "local" else url)
    for batch in (100, 101, 102, 110, 200):
        run.save(batch)
    assert prune(run.store, run.saver.lease, keep_newest=2) == ["ba100", "ba101", "ba102"]
    kept = [open_checkpoint(run.store.root.child(name).url) for name in ("ba110", "ba200")]
    used = {part.name.removeprefix("log/") for checkpoint in kept for part in checkpoint.manifest.log}
    assert set(run.store.root.child("log").names()) == used
    assert [read_log(checkpoint).content for checkpoint in kept] == [lines(110), lines(200)]


@pytest.mark.parametrize("url", ["local", "memory://log-parts-by-hand"])
def test_a_prune_by_hand_removes_parts_and_leaves_those_of_a_save_that_is_being_published(tmp_path, url):
    run = Run(tmp_path if url == "local" else url)
    for batch in (100, 101, 110, 200):
        run.save(batch)
    log = run.store.root.child("log")
    log.put("e1-ba210-0a1b2c.jsonl", b"{}\n")  # the manifest of ba210 is put next
    log.put("e1-ba150-0a1b2c.jsonl", b"{}\n")  # of a save that failed
    log.put("notes.txt", b"mine")
    assert prune(CheckpointStore(run.store.root.url), None, keep_newest=1) == ["ba100", "ba101", "ba110"]
    newest = open_checkpoint(run.store.root.child("ba200").url)
    used = {part.name.removeprefix("log/") for part in newest.manifest.log}
    assert set(log.names()) == {*used, "e1-ba210-0a1b2c.jsonl", "notes.txt"}
    assert read_log(newest).content == lines(200)


def test_parts_that_an_earlier_prune_left_go_when_no_checkpoint_does(tmp_path):
    run = Run(tmp_path)
    for batch in (100, 200):
        run.save(batch)
    run.store.remove("ba100", open_checkpoint(tmp_path / "ba100").manifest.save_id)
    assert prune(CheckpointStore(tmp_path), None, keep_newest=1) == []
    newest = open_checkpoint(tmp_path / "ba200")
    assert {f"log/{path.name}" for path in (tmp_path / "log").iterdir()} == {part.name for part in newest.manifest.log}


@pytest.mark.fault
@pytest.mark.parametrize("loss", ["not what was written", "bytes, expected", "missing"])
def test_a_lost_part_is_said_condemns_no_checkpoint_and_is_written_again(tmp_path, loss):
    run = Run(tmp_path)
    run.save(100)
    part = next((tmp_path / "log").iterdir())
    if loss == "missing":
        part.unlink()
    elif loss == "bytes, expected":
        part.write_bytes(part.read_bytes() + b"more")
    else:
        flip(part, 5)
    run.saver.save(run.model, None, replace(about(101), log=lambda: lines(101)))
    run.saver.wait()
    checkpoint = open_checkpoint(tmp_path / "ba101")
    verify_checkpoint(checkpoint)
    assert load_newest(run.store, run.model).notes == []
    log = read_log(checkpoint)
    assert log.content == lines(101)[-len(lines(1)) :] and log.parts == ()
    assert "a part of the log is lost: " in log.notes[0] and loss in log.notes[0]
    run.saver.log_parts = log.parts
    assert read_log(run.save(102)).notes == []
