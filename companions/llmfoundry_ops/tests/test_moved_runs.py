"""`report` on runs that moved between folders, beside a history that is known: launches, failures, what was lost."""

import json
import random
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from llmfoundry_lite.checkpoint.store import CheckpointStore
from llmfoundry_lite.ranks.status import write_status
from llmfoundry_lite.report.reading import read_run
from llmfoundry_lite.report.report import report
from llmfoundry_lite.training.run_folder import append_missing_records, last_launch, log_until
from llmfoundry_ops.journal import append
from llmfoundry_ops.launches import ELSEWHERE, KILLED, describe_failures
from tests.helpers.reported import on_cpu, record, save
from tests.helpers.tiny import write_config

WHO = "test/launch"
"""Number in each line of the log that says which launch wrote it, whatever number the launch had."""


@dataclass
class Launched:
    folder: str
    begun: int
    last_batch: int
    ended: str
    reason: str | None


@dataclass
class Moving:
    """A run whose launches write what real ones write, in run directories of their own, and save in one folder."""

    root: Path
    has_numbers: bool = True
    """launches.jsonl has the number of each launch, as it has not in runs of earlier releases."""
    has_records: bool = False
    """Each launch leaves a record beside the checkpoints."""
    launches: list[Launched] = field(default_factory=list)
    saved: int = 0
    carried: bytes = b""
    """The log in the newest checkpoint."""

    def launch(self, folder, last_batch, ended, *, saves=(), reason=None):
        """Train from the newest save on. The last batch is saved unless the launch fails or is killed."""
        path = self.root / folder
        path.mkdir(exist_ok=True)
        write_config(path / "config.yaml", {"run_name": "moving", "save_folder": str(self.root / "shared")})
        log, begun, who = path / "metrics.jsonl", self.saved, len(self.launches)
        append_missing_records(log, self.carried)
        number = 1 + last_launch(log)
        write_status(path, "running", begun, launch=number if self.has_numbers else None)
        is_orderly = ended not in ("failed", KILLED)
        for batch in range(begun + 1, last_batch + 1):
            # Clocks of two launches are never equal.
            clock = {"time/elapsed_seconds": 2.0 * (batch - begun) + who / 1024, WHO: who}
            line = record(batch, launch=number) | clock
            self._write(log, line)
            if batch in saves or (batch == last_batch and is_orderly):
                self.saved, self.carried = batch, log_until(log, batch)
            if batch == last_batch and is_orderly:
                self._write(log, line | {"checkpoint/stall_seconds": 1.0})  # known when the save is published
        if ended == KILLED:
            status = json.loads((path / "status.json").read_text())
            status["process"] |= {"pid": 2**22 + 1, "started": 1}
            (path / "status.json").write_text(json.dumps(status))
        else:
            write_status(path, ended, last_batch, reason)
        self.launches.append(Launched(folder, begun, last_batch, ended, reason))
        if self.has_records:
            self._write_record(path, number)

    def _write_record(self, path, number):
        """Write the record of the last launch, which stays `running` if it was killed."""
        launch = self.launches[-1]
        events = [json.loads(line) for line in (path / "launches.jsonl").read_text().splitlines()]
        began_at = [event["time"] for event in events if event["status"] == "running"][-1]
        process = {"host": f"gpu-{launch.folder}", "pid": 1, "boot": "another"}
        record = {"status": "running", "batch": launch.begun, "reason": None, "process": process}
        if launch.ended != KILLED:
            record |= {"status": launch.ended, "batch": launch.last_batch, "reason": launch.reason}
        record |= {"began_at": began_at, "began_at_batch": launch.begun, "launch": number}
        folder = self.root / "shared/launches"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{len(self.launches):08d}.json").write_text(json.dumps(record))

    @staticmethod
    def _write(log, line):
        with log.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def publish(self):
        """Write the newest checkpoint."""
        lines = [json.loads(line) for line in self.carried.splitlines()]
        save(str(self.root / "shared"), [on_cpu(1, self.saved)], log=lines)

    def expected(self, folder):
        """Return (first batch, last batch, how it ended, batches lost) of each launch, as far as this folder can know:
        by its own launches, its own log, and the log in the newest checkpoint."""
        lines = [*(self.root / folder / "metrics.jsonl").read_bytes().splitlines(), *self.carried.splitlines()]
        known = {(record["batch"], record[WHO]) for record in map(json.loads, lines)}
        found = []
        for who, launch in enumerate(self.launches):
            batches = sorted(batch for batch, other in known if other == who)
            later = [other.begun for other in self.launches[who + 1 :]]
            kept_until = min(later, default=self.launches[-1].last_batch)
            lost = sum(batch > kept_until for batch in batches)
            ended = launch.ended if launch.folder == folder else ELSEWHERE
            if batches or launch.folder == folder:
                first, last = (batches[0], batches[-1]) if batches else (None, None)
                found.append((first, last, ended, lost))
        return found


def told(facts):
    return [(one["first_batch"], one["last_batch"], one["ended"], one["batches_lost"]) for one in facts["launches"]]


def six_launches(root, **options):
    """Two machines in turn: one launch is killed and one fails, each after batches that no save holds."""
    moving = Moving(root, **options)
    moving.launch("a", 6, "stopped", saves=[5])
    moving.launch("b", 13, KILLED, saves=[10])
    moving.launch("a", 17, "preempted", reason="SIGTERM")
    moving.launch("b", 22, "failed", saves=[20], reason="cuda:1 is gone")
    moving.launch("a", 25, "stopped")
    moving.launch("b", 30, "done")
    moving.publish()
    return moving


@pytest.mark.parametrize("has_numbers", [True, False], ids=["numbers", "of an earlier release"])
def test_six_launches_that_moved_between_two_folders_are_six(tmp_path, has_numbers, capsys):
    six_launches(tmp_path, has_numbers=has_numbers)
    (run,) = report([tmp_path / "b"])["runs"]
    facts = run["failures"]
    assert told(facts) == [
        (1, 6, ELSEWHERE, 0),
        (7, 13, KILLED, 3),
        (11, 17, ELSEWHERE, 0),
        (18, 22, "failed", 2),
        (21, 25, ELSEWHERE, 0),
        (26, 30, "done", 0),
    ]
    assert (facts["num_failures"], facts["batches_lost"], run["num_launches"]) == (2, 5, 6)
    assert [(one["first_batch"], one["last_batch"]) for one in run["dead_branches"]] == [(11, 13), (21, 22)]
    page = (tmp_path / "b/report.md").read_text()
    assert "6 launches: 3 not known here, 1 killed without a word, 1 failed, 1 done; 5 batches" in page
    assert told(describe_failures(read_run(tmp_path / "a"))) == [
        (1, 6, "stopped", 0),
        (7, 13, ELSEWHERE, 3),
        (11, 17, "preempted", 0),
        (18, 22, ELSEWHERE, 2),
        (21, 25, "stopped", 0),
        (26, 30, ELSEWHERE, 0),
    ]


def test_records_beside_checkpoints_tell_on_any_machine_how_each_launch_ended(tmp_path):
    """Also to one that has only the checkpoints, and of a launch that was killed before it saved anything."""
    moving = six_launches(tmp_path, has_records=True)
    moving.launch("c", 34, KILLED)
    moving.launch("c", 32, "failed", reason="no disk")  # it saved nothing, and another machine has no line of it
    everywhere = [
        (1, 6, "stopped", 0),
        (7, 13, KILLED, 3),
        (11, 17, "preempted", 0),
        (18, 22, "failed", 2),
        (21, 25, "stopped", 0),
        (26, 30, "done", 0),
        (None, None, KILLED, 0),
        (None, None, "failed", 0),
    ]
    facts = describe_failures(read_run(tmp_path / "b"))
    assert told(facts) == everywhere
    assert facts["launches"][2]["reason"] == "SIGTERM" and facts["launches"][-1]["reason"] == "no disk"
    elsewhere = told(describe_failures(read_run(tmp_path / "shared")))
    assert [ended for _, _, ended, _ in elsewhere] == [ended for _, _, ended, _ in everywhere]


def test_a_record_of_the_newest_launch_that_may_still_run_is_not_a_failure(tmp_path):
    moving = six_launches(tmp_path, has_records=True)
    moving.launch("c", 34, KILLED)
    assert describe_failures(read_run(tmp_path / "b"))["launches"][-1]["ended"] == "running"
    store = CheckpointStore(tmp_path / "shared")
    holder = store.leases.current_holder()
    assert holder is not None and holder.epoch == len(moving.launches)
    store.release(holder)
    assert describe_failures(read_run(tmp_path / "b"))["launches"][-1]["ended"] == KILLED


@pytest.mark.parametrize("seed", range(12))
def test_a_history_of_moves_is_told_as_it_was(tmp_path, seed):
    """Launches end in any way, with batches that are lost and in up to three folders; orderly ones may train nothing.
    The order of launches that knew nothing of each other cannot be told."""
    dice = random.Random(seed)
    moving = Moving(tmp_path)
    for _ in range(dice.randint(3, 9)):
        folder, ended = dice.choice("abc"), dice.choice(["stopped", "preempted", "failed", KILLED])
        last_batch = moving.saved + dice.randint(int(ended == KILLED), 6)
        saves = [batch for batch in range(moving.saved + 1, last_batch + 1) if dice.random() < 0.3]
        moving.launch(folder, last_batch, ended, saves=saves)
    moving.launch("a", moving.saved + 2, "done")
    moving.publish()
    for folder in {launch.folder for launch in moving.launches}:
        facts = describe_failures(read_run(tmp_path / folder))
        assert sorted(told(facts), key=str) == sorted(moving.expected(folder), key=str), folder


def test_a_batch_that_is_evaluated_by_a_later_launch_elsewhere_keeps_both_and_stays_alive(tmp_path):
    moving = six_launches(tmp_path)
    log = tmp_path / "a/metrics.jsonl"
    line = next(one for one in map(json.loads, log.read_bytes().splitlines()) if one["batch"] == 20)
    Moving._write(log, line | {"eval/loss": 1.5})
    moving.launch("a", 32, "done")
    moving.publish()
    run = read_run(tmp_path / "b")
    assert run.log.validation[run.log.batch == 20].tolist() == [1.5]
    assert [(branch.batch[0], branch.batch[-1]) for branch in run.log.dead] == [(11, 13), (21, 22)]
    assert run.log.num_launches == 7


def write_journal(folder, spans):
    for number, (site, from_batch, to_batch, ended, reason) in enumerate(spans, start=1):
        begun = {"turn": 0, "host": "h", "status_before": None}
        append(folder, number=number, site=site, began=1e9 + number, from_batch=from_batch, **begun)
        over = {"over": 1e9 + number + 0.5, "to_batch": to_batch, "code": 0, "ended": ended, "reason": reason}
        append(folder, number=number, **over)


def test_how_launches_elsewhere_ended_is_known_where_a_relay_has_begun_them(tmp_path):
    six_launches(tmp_path)
    spans = [
        ("a", 0, 6, "stopped", None),
        ("b", 6, 10, "lost", "no exit code"),
        ("c", 10, 10, "failed", "no disk"),  # it trained nothing, and has no line
        ("a", 10, 17, "preempted", "by the relay"),
        ("b", 17, 20, "failed", "cuda:1 is gone"),
        ("a", 20, 25, "stopped", None),
        ("b", 25, 30, "done", None),
    ]
    write_journal(tmp_path / "a", spans)
    facts = describe_failures(read_run(tmp_path / "a"))
    assert [(one["first_batch"], one["ended"], one["reason"]) for one in facts["launches"]] == [
        (1, "stopped", None),
        (7, "lost", "no exit code"),
        (11, "preempted", "SIGTERM"),  # by its own record
        (18, "failed", "cuda:1 is gone"),
        (21, "stopped", None),
        (26, "done", None),
    ]
    assert facts["num_failures"] == 2


def test_of_an_allocation_with_several_launches_only_the_end_of_the_last_is_known(tmp_path):
    moving = Moving(tmp_path)
    moving.launch("b", 8, KILLED, saves=[5])
    moving.launch("b", 10, "stopped")
    moving.launch("c", 15, "stopped")  # by hand
    moving.launch("a", 20, "done")
    moving.publish()
    write_journal(tmp_path / "a", [("b", 0, 10, "stopped", None), ("a", 15, 20, "done", None)])
    facts = describe_failures(read_run(tmp_path / "a"))
    assert [(one["first_batch"], one["ended"]) for one in facts["launches"]] == [
        *((1, ELSEWHERE), (6, "stopped"), (11, ELSEWHERE), (16, "done")),
    ]
