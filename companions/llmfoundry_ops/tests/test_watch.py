"""`llmfoundry-lite watch`: a run is shown as it is written, and until it ends."""

import io
import json
import math
import socket
from types import SimpleNamespace

import pytest
from rich.console import Console

from llmfoundry_lite.checkpoint.lease import Lease
from llmfoundry_lite.checkpoint.store import CheckpointStore
from llmfoundry_lite.cli import main
from llmfoundry_lite.errors import CheckpointError
from llmfoundry_lite.ranks.status import write_status
from llmfoundry_ops import runs
from llmfoundry_ops import watch as watching
from llmfoundry_ops.runs import list_runs
from llmfoundry_ops.tests.buckets import end_last_writer, record_launch, save_with_log
from llmfoundry_ops.watch import exit_code_of, line_of, watch
from tests.checkpoint.saves import save as save_checkpoint

LINE = {
    "batch": 1,
    "time/epoch": 0,
    "loss/train/total": 4.5,
    "throughput/tokens_per_sec": 1234.0,
    "time/remaining_seconds": 75.0,
}


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.yaml").write_text("run_name: tiny\nmax_duration: 4ba\n")
    write_status(folder, "running", 0)
    return folder


def append(folder, batch, **more):
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({**LINE, "batch": batch, **more}) + "\n")


def save(folder, batch):
    store = CheckpointStore(folder / "checkpoints")
    save_checkpoint(store, store.acquire(), batch)


def test_a_pipe_gets_a_line_whenever_the_run_is_further_and_its_end(run):
    steps = [
        lambda: append(run, 1),
        lambda: None,
        lambda: (append(run, 2, **{"eval/a/loss": 4.25, "eval/b/loss": 3.0}), save(run, 1), save(run, 2)),
        lambda: (append(run, 3), write_status(run, "failed", 3, "out of memory")),
    ]
    console = Console(file=io.StringIO(), width=200)
    status = watch(run, console=console, pause=lambda seconds: steps.pop(0)())
    assert console.file.getvalue().splitlines() == [
        "batch 1/4 · loss 4.5000 · 1,234 tokens/s · ETA 1:15",
        "batch 2/4 · loss 4.5000 · validation a 4.2500 · validation b 3.0000 · 1,234 tokens/s · ETA 1:15 · saved ba2",
        "batch 3/4 · loss 4.5000 · 1,234 tokens/s · ETA 1:15 · saved ba2",
        "failed at batch 3: out of memory",
    ]
    assert status["status"] == "failed" and not steps


def test_a_slow_rank_is_shown_while_the_run_trains(run):
    append(run, 3)
    times = {"stage": 0, "own_seconds": 0.4, "median_seconds": 0.2, "waiting_seconds": 0.0}
    slow_ranks = [{"rank": rank, "host": "gpu007", "ratio": 2.3 - rank / 10, **times} for rank in (7, 5, 6)]
    write_status(run, "running", 3, slow_ranks=slow_ranks, all_slow_ranks=[*range(20)])
    live = runs.LiveRun(run)
    live.look()
    assert line_of(live).endswith("· slow: rank 5 on gpu007 (1.8 times the median) and 19 more")
    write_status(run, "done", 4, slow_ranks=slow_ranks)
    live.look()
    assert "slow" not in line_of(live)


def test_a_terminal_shows_batch_loss_rate_remaining_time_and_the_last_save(run):
    append(run, 3)
    (run / "metrics.jsonl").open("a").write('{"batch": 4, "loss')  # being written
    save(run, 2)
    write_status(run, "running", 3, "SIGTERM")

    def end(seconds):
        append(run, 4)
        write_status(run, "done", 4)

    console = Console(file=io.StringIO(), width=100, force_terminal=True, color_system=None)
    assert watch(run, console=console, pause=end)["status"] == "done"
    shown = console.file.getvalue()
    assert "batch 3/4 · loss 4.5000 · 1,234 tokens/s · ETA 1:15 · saved ba2 · asked to leave: SIGTERM" in shown
    assert "done at batch 4" in shown


def test_a_finished_run_is_shown_at_once(run, capsys):
    append(run, 4)
    write_status(run, "done", 4)
    assert main.run(["watch", str(run)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "batch 4/4 · loss 4.5000 · 1,234 tokens/s · ETA 1:15",
        "done at batch 4",
    ]


def test_a_folder_without_a_run_is_one_line(tmp_path, capsys):
    assert main.run(["watch", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(f"error: {tmp_path}: no status.json here; expected a run directory")


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 1e308, 10**400, "2.0", []])
@pytest.mark.parametrize("unit", ["ba", "ep", "tok"])
def test_numbers_that_are_none_are_not_shown(run, value, unit):
    (run / "config.yaml").write_text(f"run_name: tiny\nmax_duration: 4{unit}\n")
    keys = ("loss/train/total", "eval/loss", "throughput/tokens_per_sec", "throughput/device/mfu")
    append(run, 1, **dict.fromkeys((*keys, "time/remaining_seconds", "time/token", "time/epoch"), value))
    console = Console(file=io.StringIO(), width=200, force_terminal=True, color_system=None)
    assert watch(run, console=console, pause=lambda _: write_status(run, "done", 1))["status"] == "done"
    write_status(run, "running", 1)
    piped = Console(file=io.StringIO(), width=200)
    watch(run, console=piped, pause=lambda _: write_status(run, "done", 1))
    assert "done at batch 1" in piped.file.getvalue() and "loss" not in piped.file.getvalue()


def test_what_a_status_says_reaches_the_terminal_escaped(run):
    append(run, 1)
    write_status(run, "failed", 1, "a\x1b[31m")
    console = Console(file=io.StringIO(), width=100)
    watch(run, console=console)
    assert "\x1b" not in console.file.getvalue() and "failed at batch 1: a\\x1b[31m" in console.file.getvalue()


def test_local_steps_are_said(run):
    append(run, 1, **{"islands/local_steps": 100})
    write_status(run, "done", 1)
    console = Console(file=io.StringIO(), width=200)
    watch(run, console=console)
    assert "local steps, every 100: losses are of this island's rows" in console.file.getvalue()


# ----------------------------------------------------------------------------------------- exit codes, buckets


def end_of_a_killed_process(folder):
    """Leave a status that says `running`, of a process that is gone."""
    content = json.loads((folder / "status.json").read_text())
    content["process"]["pid"], content["process"]["started"] = 2**22 + 1, 1
    (folder / "status.json").write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("status", "code"), [("done", 0), ("stopped", 0), ("preempted", 75), ("failed", 1), ("running", 1)]
)
def test_the_exit_code_is_the_run_s(run, status, code, capsys):
    append(run, 3)
    write_status(run, status, 3)
    if status == "running":
        end_of_a_killed_process(run)
    assert main.run(["watch", str(run)]) == code
    assert ("is gone without a word" in capsys.readouterr().out) == (status == "running")


def test_a_run_that_left_no_status_does_not_count_as_done(run, capsys):
    (run / "status.json").unlink()
    append(run, 3)
    assert main.run(["watch", str(run)]) == 1
    assert "unknown at batch 3" in capsys.readouterr().out


def test_a_watch_that_ctrl_c_ends_does_not_count_as_a_run_that_is_done(run, monkeypatch):
    def press(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(watching, "watch", press)
    assert main.run(["watch", str(run)]) == 130


def test_a_bucket_whose_newest_save_is_damaged_is_told_by_the_one_before():
    url = "memory://watch/damaged/tiny"
    lease = save_with_log(url, 2)
    save_with_log(url, 3, lease)
    newest = CheckpointStore(url).root.child("ba3")
    manifest = newest.read("manifest.json", 1 << 20)
    newest.put("manifest.json", manifest[: len(manifest) // 2])
    (found,) = list_runs("memory://watch/damaged")
    assert (found.batch, found.last_checkpoint()) == (2, "ba2")
    assert "saved ba2 · memory://watch/damaged/tiny/ba3/manifest.json: the checksum does not match" in line_of(found)


def test_a_bucket_is_watched_by_its_checkpoints_until_the_run_is_done():
    url = "memory://watch/ends/tiny"
    lease = save_with_log(url, 2)
    console = Console(file=io.StringIO(), width=200)
    status = watch(url, console=console, pause=lambda seconds: save_with_log(url, 4, lease))
    assert console.file.getvalue().splitlines() == [
        "batch 2/4 · loss 4.5000 · 1,234 tokens/s · ETA 1:15 · saved ba2",
        "batch 4/4 · loss 4.5000 · 1,234 tokens/s · ETA 1:15 · saved ba4",
        "done at batch 4",
    ]
    assert status["status"] == "done"


def test_a_bucket_whose_last_writer_is_gone_is_not_done(capsys):
    url = "memory://watch/gone/tiny"
    save_with_log(url, 2)
    end_last_writer(url)
    assert main.run(["watch", url]) == 1
    assert (
        "ended at batch 2: process 4194305 of this machine, the last that saved here, is gone"
        in capsys.readouterr().out
    )


class Clock:
    """The monotonic clock of `watch`; nobody sleeps."""

    def __init__(self, monkeypatch, *steps):
        self.now, self.steps = 0.0, list(steps)
        monkeypatch.setattr(runs, "time", SimpleNamespace(monotonic=lambda: self.now))

    def pause(self, seconds):
        self.now += seconds
        if self.steps:
            self.steps.pop(0)()


def hold(url, lease, renewals):
    """Let the holder of the lease be a process elsewhere that has renewed it so many times."""
    leases = CheckpointStore(url).leases
    name = f"{lease.epoch:08d}.json"
    owner = lease.owner | {"boot": "another", "host": "gpu-17", "pid": 42}
    leases.folder.put(name, json.dumps(owner).encode())
    leases.renew(Lease(lease.epoch, owner), renewals)


WATCHED = "batch 2/4 · loss 4.5000 · 1,234 tokens/s · ETA 1:15 · saved ba2"


def test_a_bucket_that_no_launch_takes_after_a_release_ends_when_patience_does(monkeypatch):
    """Meanwhile it says so, because a relay may be between two sites."""
    url = "memory://watch/released/tiny"
    lease = save_with_log(url, 2)
    CheckpointStore(url).leases.renew(lease, 0)
    clock = Clock(monkeypatch, lambda: CheckpointStore(url).release(lease))
    console = Console(file=io.StringIO(), width=300)
    status = watch(url, patience_seconds=60, console=console, pause=clock.pause)
    first, idle, last = console.file.getvalue().splitlines()
    assert (first, status["status"], exit_code_of(status)) == (WATCHED, "ended", 1)
    assert idle.startswith(f"{WATCHED} · host ")
    assert idle.endswith(" has released this run, and no launch has taken it for 0 s")
    assert last.startswith("ended at batch 2: host ")
    assert last.endswith(" has released this run, and no launch has taken it for 60 s (--patience)")
    assert clock.now == 70.0


def test_a_launch_that_takes_a_released_run_is_watched_on(monkeypatch):
    url = "memory://watch/taken/tiny"
    lease = save_with_log(url, 2)
    CheckpointStore(url).release(lease)
    taken = [lambda: None] * 4 + [lambda: save_with_log(url, 4)]
    clock = Clock(monkeypatch, *taken)
    console = Console(file=io.StringIO(), width=300)
    assert watch(url, patience_seconds=60, console=console, pause=clock.pause)["status"] == "done"
    assert clock.now == 50.0


def test_the_end_of_a_launch_elsewhere_is_shown_and_waited_on(monkeypatch):
    """Another site may take the run until patience is at its end. Then `watch` exits as the launch did."""
    url = "memory://watch/preempted/tiny"
    lease = save_with_log(url, 2)
    hold(url, lease, 0)
    record_launch(url, lease)

    def leave():
        record_launch(url, lease, status="preempted", reason="SIGTERM\x1b[2J")
        CheckpointStore(url).release(lease)

    clock = Clock(monkeypatch, leave)
    console = Console(file=io.StringIO(), width=300)
    status = watch(url, patience_seconds=60, console=console, pause=clock.pause)
    assert (status["status"], exit_code_of(status), clock.now) == ("preempted", 75, 70.0)
    first, left, last = console.file.getvalue().splitlines()
    assert first == WATCHED
    assert left.startswith(f"{WATCHED} · preempted at batch 2: SIGTERM\\x1b[2J · host ")
    assert left.endswith(" has released this run, and no launch has taken it for 0 s")
    assert last.startswith("preempted at batch 2: SIGTERM\\x1b[2J; host ") and last.endswith("for 60 s (--patience)")


def test_a_record_says_nothing_once_another_launch_has_the_lease(monkeypatch):
    url = "memory://watch/successor/tiny"
    lease = save_with_log(url, 2)
    record_launch(url, lease, status="failed", reason="out of memory")
    later = save_with_log(url, 2)
    hold(url, later, 0)
    (run,) = list_runs("memory://watch/successor")
    assert (run.status["status"], run.has_ended) == ("saved", False)
    record_launch(url, later, failed_saves=3, save_error="the token has expired")
    run.look()
    assert (run.status["status"], run.has_ended, run.batch) == ("running", False, 2)
    assert line_of(run).endswith(" · saved ba2 · failed saves 3: the token has expired")


def test_a_bucket_whose_holder_elsewhere_renews_nothing_ends_when_patience_does(monkeypatch):
    """A holder that renews is waited for, however long it saves nothing."""
    url = "memory://watch/silent/tiny"
    lease = save_with_log(url, 2)
    hold(url, lease, 0)
    renewals = [lambda number=number: hold(url, lease, number) for number in range(1, 9)]
    clock = Clock(monkeypatch, *renewals)
    console = Console(file=io.StringIO(), width=300)
    status = watch(url, patience_seconds=60, console=console, pause=clock.pause)
    assert clock.now == 8 * 10 + 60
    first, idle, last = console.file.getvalue().splitlines()
    assert (first, exit_code_of(status)) == (WATCHED, 1)
    assert idle == f"{WATCHED} · host gpu-17, process 42 has not renewed its lease for 30 s"
    assert last == "ended at batch 2: host gpu-17, process 42 has not renewed its lease for 60 s (--patience)"


def test_a_holder_on_another_machine_of_this_host_name_is_watched_on(monkeypatch):
    url = "memory://watch/namesake/tiny"
    lease = save_with_log(url, 2)
    leases = CheckpointStore(url).leases
    owner = lease.owner | {"boot": "another", "host": socket.gethostname(), "pid": 2**22 + 1}
    leases.folder.put(f"{lease.epoch:08d}.json", json.dumps(owner).encode())
    renewals = [lambda number=number: leases.renew(Lease(lease.epoch, owner), number) for number in range(3)]
    clock = Clock(monkeypatch, *renewals)
    watch(url, patience_seconds=60, console=Console(file=io.StringIO(), width=300), pause=clock.pause)
    assert clock.now == 3 * 10 + 60


def test_a_log_that_cannot_be_read_now_is_read_at_the_next_look(monkeypatch):
    url = "memory://watch/log/tiny"
    lease = save_with_log(url, 2)
    read_part, failures = runs.add_carried_log, []

    def refuse(*arguments):
        failures.append(arguments)
        raise OSError("SlowDown")

    steps = [
        lambda: (save_with_log(url, 3, lease), monkeypatch.setattr(runs, "add_carried_log", refuse)),
        lambda: monkeypatch.setattr(runs, "add_carried_log", read_part),
        lambda: save_with_log(url, 4, lease),
    ]
    console = Console(file=io.StringIO(), width=300)
    watch(url, console=console, pause=lambda seconds: steps.pop(0)())
    lines = console.file.getvalue().splitlines()
    last_parts = [line.rpartition(" · ")[2] for line in lines[:-1]]
    assert last_parts == ["saved ba2", f"{url}: cannot be read: SlowDown", "saved ba3", "saved ba4"]
    assert len(failures) == 1 and lines[2].startswith("batch 3/4 · loss 4.5000")
    monkeypatch.setattr(runs, "add_carried_log", refuse)
    assert main.run(["watch", url]) == 2


def test_patience_that_is_no_time_is_one_line(capsys):
    assert main.run(["watch", "memory://watch/ends/tiny", "--patience", "soon"]) == 2
    assert capsys.readouterr().err.startswith("error: --patience: soon given, expected a time such as")


LIST_CHECKPOINTS = CheckpointStore.candidates


def begin_outage(monkeypatch, url):
    """Let no listing of the bucket be answered until `end_outage`."""

    def refuse(self):
        raise CheckpointError(f"{url}: cannot be listed: Connection refused")

    monkeypatch.setattr(CheckpointStore, "candidates", refuse)


def end_outage(monkeypatch):
    monkeypatch.setattr(CheckpointStore, "candidates", LIST_CHECKPOINTS)


def test_a_pipe_is_told_when_a_bucket_does_not_answer_and_when_it_does(monkeypatch):
    url = "memory://watch/piped/tiny"
    lease = save_with_log(url, 2)
    steps = [
        lambda: begin_outage(monkeypatch, url),
        lambda: end_outage(monkeypatch),
        lambda: save_with_log(url, 4, lease),
    ]
    console = Console(file=io.StringIO(), width=300)
    watch(url, console=console, pause=lambda seconds: steps.pop(0)())
    assert [" · ".join(line.split(" · ")[4:]) for line in console.file.getvalue().splitlines()[:3]] == [
        "saved ba2",
        "saved ba2 · memory://watch/piped/tiny: cannot be listed: Connection refused",
        "saved ba2",
    ]


def test_a_bucket_that_does_not_answer_for_a_while_is_looked_at_again(monkeypatch):
    url = "memory://watch/away/tiny"
    lease = save_with_log(url, 2)
    steps = [
        lambda: begin_outage(monkeypatch, url),
        lambda: (end_outage(monkeypatch), save_with_log(url, 4, lease)),
    ]
    console = Console(file=io.StringIO(), width=200, force_terminal=True, color_system=None)
    assert watch(url, console=console, pause=lambda seconds: steps.pop(0)())["status"] == "done"
    assert "saved ba2 · memory://watch/away/tiny: cannot be listed: Connection refused" in console.file.getvalue()


def test_a_bucket_of_which_nothing_can_be_read_for_a_while_is_looked_at_again():
    """It lists its checkpoints, and refuses their manifests, as a bucket that is asked too often may."""
    url = "memory://watch/refused/tiny"
    lease = save_with_log(url, 2)
    folder = CheckpointStore(url).root.child("ba2")
    manifest = folder.read("manifest.json", 1 << 20)
    steps = [
        lambda: folder.put("manifest.json", b""),
        lambda: (folder.put("manifest.json", manifest), save_with_log(url, 4, lease)),
    ]
    console = Console(file=io.StringIO(), width=300)
    assert watch(url, console=console, pause=lambda seconds: steps.pop(0)())["status"] == "done"
    assert console.file.getvalue().splitlines()[1].endswith(f"saved ba2 · {url}: no checkpoint here can be read")


@pytest.mark.parametrize("url", ["memory://watch/nothing", "s4://bucket/run"])
def test_a_url_without_a_run_is_one_line(url, capsys):
    assert main.run(["watch", url]) == 2
    assert capsys.readouterr().err.startswith(f"error: {url}")
