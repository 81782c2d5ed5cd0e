"""`llmfoundry-lite runs ls`: runs below a folder or in a bucket, each by a few small files."""

import json
import re
import socket
import time

import pytest

from llmfoundry_lite.checkpoint.launch_record import EARLY_END, RECORDS, record_early_end
from llmfoundry_lite.checkpoint.open_folder import open_folder
from llmfoundry_lite.checkpoint.remote_folder import RemoteFolder
from llmfoundry_lite.checkpoint.store import CheckpointStore
from llmfoundry_lite.cli import main
from llmfoundry_lite.errors import DataError
from llmfoundry_lite.ranks.status import write_status
from llmfoundry_lite.report.report import report
from llmfoundry_ops import published
from llmfoundry_ops.index import RunLine, build_records, build_table, list_run_lines
from llmfoundry_ops.published import format_age, read_newest_launch
from llmfoundry_ops.runs import list_runs, open_run
from llmfoundry_ops.tests.buckets import end_last_writer, record_launch, save_with_log
from tests.checkpoint.saves import saved
from tests.helpers.reported import on_cpu, record, save, write_run


def lines_of(url):
    return {line.run: line for line in list_run_lines(url)}


def test_runs_in_a_bucket_are_listed_by_what_their_last_launch_recorded():
    root = "memory://index/bucket"
    for name, facts in {
        "running": {},
        "team/failed": {"status": "failed", "batch": 3, "reason": "out of memory"},
        "team/preempted": {"status": "preempted", "reason": "SIGTERM"},
    }.items():
        lease = save_with_log(f"{root}/{name}", 2)
        record_launch(f"{root}/{name}", lease, **facts)
    save_with_log(f"{root}/no-record", 4)
    open_folder(f"{root}/data/train").put("index.json", b"{}")
    open_folder(f"{root}/a/b/too/deep/ba2").put("manifest.json", b"{}")

    found = lines_of(root)
    assert sorted((line.run, line.state, line.batch, line.reason) for line in found.values()) == [
        ("no-record", "saved", 4, None),
        ("running", "running", 2, None),
        ("team/failed", "failed", 3, "out of memory"),
        ("team/preempted", "preempted", 2, "SIGTERM"),
    ]
    line = found["running"]
    assert (line.last_saved, line.host, line.tokens_per_second, line.max_duration) == ("ba2", "gpu-17", 1234.0, "4ba")
    assert abs((line.saved_at or 0) - time.time() + 120) < 60
    (only,) = list_run_lines(f"{root}/running")
    assert (only.run, only.state) == ("running", "running")


@pytest.fixture(params=["disk", "bucket"])
def root(request, tmp_path):
    return str(tmp_path / "runs") if request.param == "disk" else f"memory://index/{tmp_path.name}"


def test_runs_are_found_whatever_they_and_their_neighbours_are_called(root):
    for name in ("ba1", "launches/ba2", "launches/launches", "two"):
        record_launch(f"{root}/{name}", save_with_log(f"{root}/{name}", 2))
    copy_of_save = open_folder(f"{root}/copied/ba2")
    copy_of_save.make(with_parents=True)
    copy_of_save.put("manifest.json", open_folder(f"{root}/two/ba2").read("manifest.json", 1 << 20))
    open_folder(root).put("status.json", b'{"page": 1}')
    found = lines_of(root)
    assert {name: line.state for name, line in found.items()} == {
        **dict.fromkeys(("ba1", "launches/ba2", "launches/launches", "two"), "running"),
        "copied": "saved",
    }
    assert [line.last_saved for line in list_run_lines(f"{root}/copied")] == ["ba2"]


def test_a_launch_that_is_silent_is_called_running_and_last_heard_of(monkeypatch):
    url = "memory://index/silent/tiny"
    lease = save_with_log(url, 2)
    record_launch(url, lease)
    now = time.time()
    monkeypatch.setattr(published.time, "time", lambda: now + 12 * 60)
    assert lines_of("memory://index/silent")["tiny"].reason == "last heard of 12 min ago on gpu-17"
    CheckpointStore(url).leases.renew(lease, 1)
    assert lines_of("memory://index/silent")["tiny"].reason is None
    CheckpointStore(url).release(lease)
    line = lines_of("memory://index/silent")["tiny"]
    assert (line.state, line.reason) == ("ended", "it has released this run; how it ended was not written")


REFUSED = {"status": "failed", "batch": 0, "reason": "data/c4 is missing", "process": {"host": "gpu-3", "pid": 4}}


def test_a_launch_that_ended_before_it_trained_is_known_until_another_begins(monkeypatch):
    root = "memory://index/early"
    record_early_end(f"{root}/new", REFUSED)
    lease = save_with_log(f"{root}/tiny", 2)
    record_launch(f"{root}/tiny", lease, status="preempted", batch=2)
    store = CheckpointStore(f"{root}/tiny")
    store.release(lease)
    record_early_end(f"{root}/tiny", REFUSED)
    for name, batch in (("new", 0), ("tiny", 2)):
        line = lines_of(root)[name]
        assert (line.state, line.batch or 0, line.host) == ("failed", batch, "gpu-3")
        assert line.reason == "did not begin: data/c4 is missing"
    (run,) = list_runs(root)
    assert run.describe_status() == "failed at batch 2: did not begin: data/c4 is missing"
    assert [run.describe_status() for run in list_runs(f"{root}/tiny")] == [run.describe_status()]
    with pytest.raises(
        DataError, match="no checkpoints here, and its newest launch has failed: did not begin: data/c4"
    ):
        open_run(f"{root}/new")

    store.acquire()
    assert lines_of(root)["tiny"].state == "preempted"


def test_a_second_start_that_is_refused_is_not_the_state_of_the_first(monkeypatch):
    url = "memory://index/second/tiny"
    lease = save_with_log(url, 2)
    record_launch(url, lease)
    store = CheckpointStore(url)
    store.leases.renew(lease, 1)
    record_early_end(url, REFUSED)
    assert lines_of("memory://index/second")["tiny"].state == "running"
    now = time.time()
    monkeypatch.setattr(published.time, "time", lambda: now + 12 * 60)
    assert lines_of("memory://index/second")["tiny"].state == "failed"  # it was killed before the second start
    store.leases.renew(lease, 2)
    assert lines_of("memory://index/second")["tiny"].state == "running"  # or not
    store.release(lease)
    record_launch(url, lease, status="done", batch=4)
    record_early_end(url, REFUSED)
    assert lines_of("memory://index/second")["tiny"].state == "done"


def test_a_second_start_that_is_refused_while_the_first_restores_is_not_its_state(monkeypatch):
    """The first has the lease and no record yet, and has not renewed since the second was refused."""
    url = "memory://index/restoring/tiny"
    lease = save_with_log(url, 2)
    record_launch(url, lease, status="preempted", batch=2)
    store = CheckpointStore(url)
    store.release(lease)
    lease = store.acquire()
    for renewals in (0, 1):
        if renewals:
            store.leases.renew(lease, renewals)
        record_early_end(url, REFUSED)
        assert lines_of("memory://index/restoring")["tiny"].state == "preempted"
        assert [run.describe_status() for run in list_runs(url)] == ["saved at batch 2"]
    now = time.time()
    monkeypatch.setattr(published.time, "time", lambda: now + 12 * 60)
    assert lines_of("memory://index/restoring")["tiny"].state == "failed"
    monkeypatch.undo()
    end_last_writer(url)
    record_early_end(url, REFUSED)
    assert lines_of("memory://index/restoring")["tiny"].state == "failed"


def test_a_bucket_whose_newest_save_is_in_the_second_place_says_so():
    url = "memory://index/fallback/tiny"
    lease = save_with_log(url, 2)
    record_launch(url, lease, last_saved="ba4", last_saved_in="/nvme/tiny", batch=4)
    place = "its newest save, ba4, is in save_fallback, /nvme/tiny"
    assert lines_of("memory://index/fallback")["tiny"].reason == place
    (run,) = list_runs("memory://index/fallback")
    assert repr(run) == f"<{url}: running at batch 4, loss 4.5000, saved ba2 here, and ba4 in /nvme/tiny>"

    # A launch on a machine that does not have the second place is refused.
    CheckpointStore(url).release(lease)
    record_early_end(url, REFUSED)
    assert lines_of("memory://index/fallback")["tiny"].reason == f"did not begin: data/c4 is missing; {place}"
    (run,) = list_runs("memory://index/fallback")
    assert "saved ba2 here, and ba4 in /nvme/tiny" in repr(run)

    # Somebody has copied it there.
    save_with_log(url, 4)
    assert "save_fallback" not in str(lines_of("memory://index/fallback")["tiny"].reason)
    (run,) = list_runs("memory://index/fallback")
    assert "saved ba4" in repr(run) and "/nvme" not in repr(run)


def test_a_bucket_that_has_only_a_record_says_where_the_saves_are():
    url = "memory://index/nothing-yet/tiny"
    lease = CheckpointStore(url).acquire()
    record_launch(url, lease, last_saved="ba4", last_saved_in="/nvme/tiny", batch=4)
    words = re.escape("its newest launch is running (its newest save, ba4, is in save_fallback, /nvme/tiny)")
    with pytest.raises(DataError, match=words):
        open_run(url)


@pytest.mark.parametrize("content", [b"[1]", b"{", b'{"status": 7}', b" " * (1 << 17), b'{"lease": "", "status": "x"}'])
def test_an_early_end_that_no_launch_writes_counts_as_none(content):
    url = "memory://index/strange-end/tiny"
    save_with_log(url, 2)
    open_folder(url).child(RECORDS).put(EARLY_END, content)
    assert read_newest_launch(open_folder(url)) == (None, None)


def test_a_launch_that_was_killed_on_this_machine_has_failed():
    url = "memory://index/killed/tiny"
    lease = save_with_log(url, 2)
    end_last_writer(url)
    record_launch(url, lease, process={**lease.owner, "pid": 2**22 + 1, "started": 1})
    line = lines_of("memory://index/killed")["tiny"]
    assert line.state == "failed" and "on this machine, is gone without a word" in (line.reason or "")


def test_run_folders_are_listed_by_status_log_and_checkpoints(tmp_path, capsys):
    write_run(tmp_path / "runs/done", [record(1), record(2)], max_duration="2ba")
    write_status(tmp_path / "runs/done", "done", 2, last_saved="ba2")
    saved(tmp_path / "runs/done/checkpoints", 1, 2)
    write_run(tmp_path / "runs/islands/a", [record(3)], save_folder="s3://bucket/a")
    saves = {"last_saved": "ba2", "saved_at": 1.7e9, "failed_saves": 2, "save_error": "no space left"}
    write_status(tmp_path / "runs/islands/a", "running", 0, **saves)
    (tmp_path / "runs/notes.txt").write_text("")
    (tmp_path / "runs/empty").mkdir()
    assert main.run(["runs", "ls", str(tmp_path / "runs"), "--json"]) == 0
    facts = {one["run"]: one for one in json.loads(capsys.readouterr().out)}
    assert facts.keys() == {"done", "islands/a"}
    done, island = facts["done"], facts["islands/a"]
    assert (done["state"], done["batch"], done["max_duration"], done["last_saved"]) == ("done", 2, "2ba", "ba2")
    assert done["host"] == socket.gethostname()
    assert (island["state"], island["batch"], island["last_saved"], island["saved_at"]) == ("running", 3, "ba2", 1.7e9)
    assert island["reason"] == "failed saves 2: no space left"
    assert main.run(["runs", "ls", str(tmp_path / "runs")]) == 0
    heading, _, *rows = capsys.readouterr().out.splitlines()
    assert heading.split() == ["run", "state", "batch", "last", "save", "age", "tokens/s", "host", "reason"]
    assert len(rows) == 2


def test_a_newest_save_in_the_second_place_is_named(tmp_path):
    write_run(tmp_path / "runs/tiny", [record(1), record(2)], save_fallback="/nvme/tiny")
    saved(tmp_path / "runs/tiny/checkpoints", 1)
    write_status(
        tmp_path / "runs/tiny", "failed", 2, "disk", last_saved="ba2", saved_at=1.7e9, last_saved_in="/nvme/tiny"
    )
    (line,) = list_run_lines(tmp_path / "runs")
    assert (line.last_saved, line.saved_at) == ("ba2", 1.7e9)
    assert line.reason == "disk; its newest save is in save_fallback, /nvme/tiny"


def test_json_has_no_password_of_the_url_that_was_listed():
    line = RunLine(run="tiny", url="sftp://user:hunter2@host/tiny", reason="ftp://user:hunter2@host: refused")
    assert "hunter2" not in json.dumps(build_records([line]))


def test_a_price_gives_the_cost_that_a_report_has(tmp_path):
    log = [record(batch) for batch in (1, 2, 3)]
    save(str(tmp_path / "runs/tiny"), [on_cpu(1, 3)], log=log)
    (line,) = list_run_lines(tmp_path / "runs", {"cpu": 3600.0})
    (facts,) = report([tmp_path / "runs/tiny"], out=tmp_path / "out", prices=["cpu=3600"])["runs"]
    assert line.cost == pytest.approx(sum(segment["cost"] for segment in facts["segments"]))
    assert "cost" in build_table([line]).columns


STRANGE = {
    "huge": b" " * (1 << 17) + b"{}",
    "not JSON": b"\xff\xfe{",
    "nested": b"[" * 5000,
    "a list": b"[1, 2]",
    "no batch": b'{"status": "done"}',
    "wrong types": b'{"status": 7, "batch": "many"}',
    "batch out of range": b'{"status": "done", "batch": 1e400}',
}


@pytest.mark.parametrize("content", STRANGE.values(), ids=STRANGE)
def test_a_record_that_no_launch_writes_counts_as_none(content):
    url = "memory://index/strange/tiny"
    save_with_log(url, 2)
    open_folder(url).child(RECORDS).put("00000099.json", content)
    assert read_newest_launch(open_folder(url)).record is None
    assert lines_of("memory://index/strange")["tiny"].state == "saved"


def test_values_of_another_type_in_a_record_count_as_absent(capsys):
    url = "memory://index/types/tiny"
    lease = save_with_log(url, 2)
    strange = {"last_saved": "../../etc", "launch": -1, "saved_at": "now", "began_at": 1e300, "max_duration": {"a": 1}}
    strange |= {"failed_saves": True, "throughput/tokens_per_sec": [1], "loss/train/total": "low"}
    record_launch(url, lease, **strange, reason="\x1b]0;gone\x07" + "x" * 5000, status="done\x1b[2J" + "y" * 500)
    found = read_newest_launch(open_folder(url)).record
    assert found is not None
    assert (found.last_saved, found.launch, found.saved_at, found.began_at, found.max_duration) == (None,) * 5
    assert (found.failed_saves, found.tokens_per_second, found.loss) == (0, None, None)
    assert main.run(["runs", "ls", url]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out and "\x07" not in out and "\\x1b]0;gone" in out
    assert max(map(len, out.splitlines())) < 3000


def test_a_run_in_a_bucket_takes_a_few_requests(monkeypatch):
    root = "memory://index/requests"
    for name in ("one", "two"):
        url = f"{root}/{name}"
        lease = save_with_log(url, 1)
        for batch in (2, 3, 4, 5):
            save_with_log(url, batch, lease)
        record_launch(url, lease, last_saved="ba5", status="preempted")
    num_requests = [0]

    def count(method):
        def counted(self, *arguments):
            num_requests[0] += 1
            return method(self, *arguments)

        return counted

    for name in ("entries", "read"):
        monkeypatch.setattr(RemoteFolder, name, count(getattr(RemoteFolder, name)))
    assert len(list_run_lines(root)) == 2
    assert num_requests[0] == 2 + 2 * 4  # the root; each run's folder, its list of records, the newest, a manifest


def test_a_place_without_runs_is_one_line(tmp_path, capsys):
    for place, words in {
        str(tmp_path): "no runs here, nor up to two levels below",
        str(tmp_path / "missing"): "is not a folder on this disk",
        "memory://index/nothing": "no runs here, nor up to two levels below",
        "s4://bucket": "s4",
    }.items():
        assert main.run(["runs", "ls", place]) == 2
        said = capsys.readouterr().err
        assert said.startswith(f"error: {place}") and words in said and said.count("\n") == 1


@pytest.mark.parametrize(
    ("seconds", "text"), [(-5, "0 s"), (89, "89 s"), (720, "12 min"), (3.5 * 3600, "3.5 h"), (9 * 86400, "9 d")]
)
def test_an_age_has_one_unit(seconds, text):
    assert format_age(seconds) == text
