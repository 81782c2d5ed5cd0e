"""Records of launches are written in the background, and hold nobody up."""

import errno
import json
import threading
import time

from llmfoundry_lite.checkpoint import launch_record
from llmfoundry_lite.checkpoint.launch_record import (
    EARLY_END,
    LEASE,
    RECORDS,
    RecordWriter,
    describe_lease,
    list_records,
    record_early_end,
)
from llmfoundry_lite.checkpoint.open_folder import open_folder
from llmfoundry_lite.checkpoint.store import CheckpointStore
from tests.checkpoint.saves import saved

DEADLINE_SECONDS = 30


def read(url, epoch):
    return json.loads(open_folder(url).child(RECORDS).read(f"{epoch:08d}.json", 1 << 20))


def test_the_last_record_of_a_launch_is_the_one_that_stays(url):
    CheckpointStore(url).acquire()
    writer = RecordWriter(open_folder(url), 7)
    for batch in range(20):
        writer.write({"status": "running", "batch": batch})
    writer.write({"status": "done", "batch": 20})
    writer.end()
    writer.join(DEADLINE_SECONDS)
    assert read(url, 7) == {"status": "done", "batch": 20, "written_at": read(url, 7)["written_at"]}


def test_a_record_that_could_not_be_written_is_written_when_it_can(url, monkeypatch):
    monkeypatch.setattr(launch_record, "RETRY_SECONDS", 0.001)
    CheckpointStore(url).acquire()
    writer, has_failed = RecordWriter(open_folder(url), 1), threading.Event()
    put = writer._folder.put

    def refuse(name, data):
        has_failed.set()
        raise OSError(errno.ENETDOWN, "down")

    monkeypatch.setattr(writer._folder, "put", refuse)
    writer.write({"batch": 1})
    assert has_failed.wait(DEADLINE_SECONDS)
    monkeypatch.setattr(writer._folder, "put", put)
    writer.end()
    writer.join(DEADLINE_SECONDS)
    assert read(url, 1)["batch"] == 1


def test_a_folder_that_hangs_is_waited_for_no_longer_than_asked(tmp_path, monkeypatch):
    CheckpointStore(tmp_path).acquire()
    writer, goes_on = RecordWriter(open_folder(tmp_path), 1), threading.Event()
    monkeypatch.setattr(writer._folder, "put", lambda name, data: goes_on.wait(DEADLINE_SECONDS))
    began = time.monotonic()
    writer.write({"batch": 1})
    writer.end()
    writer.join(0.05)
    assert time.monotonic() - began < DEADLINE_SECONDS / 2
    goes_on.set()
    writer.join(DEADLINE_SECONDS)


def test_nothing_is_written_into_the_mount_point_of_a_disk_that_is_gone(tmp_path):
    writer = RecordWriter(open_folder(tmp_path), 1)
    writer.write({"batch": 1})
    writer.end()
    writer.join(DEADLINE_SECONDS)
    record_early_end(str(tmp_path), {"status": "failed"})
    assert list(tmp_path.iterdir()) == []


def test_an_early_end_is_one_file_that_names_the_lease(url):
    store, _ = saved(url, 1)
    for reason in ("data/c4 is missing", "out of memory"):
        record_early_end(url, {"status": "failed", "reason": reason})
    assert store.root.child(RECORDS).names() == [EARLY_END]
    written = json.loads(store.root.child(RECORDS).read(EARLY_END, 1 << 20))
    assert written["reason"] == "out of memory" and written[LEASE] == describe_lease(store.leases.current_holder())
    assert list_records(store.root) == []


def test_the_time_to_import_the_client_of_a_bucket_is_not_that_to_write(url, monkeypatch):
    saved(url, 1)
    opened = []

    def import_and_open(url):
        time.sleep(0.2)
        opened.append(url)
        return open_folder(url)

    monkeypatch.setattr(launch_record, "open_folder", import_and_open)
    monkeypatch.setattr(launch_record, "EARLY_END_IMPORT_SECONDS", DEADLINE_SECONDS)
    monkeypatch.setattr(launch_record, "EARLY_END_SECONDS", 0.0)
    record_early_end(url, {"status": "failed"})
    assert opened == [url]
    for thread in threading.enumerate():
        if thread.name == "early-end":
            thread.join(DEADLINE_SECONDS)


def test_an_early_end_waits_for_a_folder_that_hangs_no_longer_than_some_seconds(tmp_path, monkeypatch):
    goes_on = threading.Event()

    def hang(url):
        goes_on.wait(DEADLINE_SECONDS)
        raise OSError(errno.ENETDOWN, "down")

    assert launch_record.EARLY_END_SECONDS == 2.0
    monkeypatch.setattr(launch_record, "open_folder", hang)
    monkeypatch.setattr(launch_record, "EARLY_END_IMPORT_SECONDS", 0.05)
    began = time.monotonic()
    record_early_end(str(tmp_path), {})
    assert time.monotonic() - began < DEADLINE_SECONDS / 2
    monkeypatch.undo()
    goes_on.set()


def test_a_lease_is_above_all_records_though_leases_and_saves_are_gone(url):
    """Otherwise the record of an earlier run would be taken for that of the newest launch."""
    store, _ = saved(url, 1)
    folder = store.root.child(RECORDS)
    folder.make()
    for name in ("00000041.json", "123456789012.json", "0042.json", "notes.txt"):
        folder.put(name, b"{}")
    assert list_records(store.root) == [41]
    assert store.acquire().epoch == 42
