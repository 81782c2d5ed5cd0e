"""Finds the events of one launch in its run folder, for alerts and metrics. No torch.

`LaunchObserver` reads what a launch writes into its run folder, and tells what has happened: the launch has begun or
ended, ranks were started again or are slow, saves fail, the loss has a spike, or there is no progress. `alerts.py`
makes the messages, and `observer_process.py` runs the observer beside a launch.
"""

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llmfoundry_lite.checkpoint.run_log import METRICS, Record, duration_text, number_of, validation_losses
from llmfoundry_lite.config.callbacks_schema import AlertsConfig
from llmfoundry_lite.errors import DataError, printable
from llmfoundry_lite.ranks.identity import is_alive
from llmfoundry_lite.ranks.status import (
    SAVED_IN,
    SAVES_STAND,
    TRY_AGAIN,
    WAITS_FOR_SAVE,
    is_running,
    read_status,
)
from llmfoundry_lite.report.log import LOSS
from llmfoundry_lite.training.slow_ranks import MAX_RANKS_LISTED
from llmfoundry_ops.alerts import (
    RANKS_RECOVERED,
    SAVES_RECOVERED,
    SECOND_PLACE_STEP,
    TRY_AGAIN_STEP,
    WAITING_STEP,
    Alert,
    Facts,
    LossSpikes,
    Messages,
    name_of_save,
)
from llmfoundry_ops.faults import LAUNCHER, RESTARTS, WAS_KILLED
from llmfoundry_ops.launch_lines import LaunchLines
from llmfoundry_ops.rank_times import RankTime, read_all_slow_ranks, read_rank_times, read_slow_ranks
from llmfoundry_ops.runs import LiveRun

LOOK_SECONDS = 1.0
"""Time between two looks at the run folder."""
LAST_WORDS_SECONDS = 15.0
"""Seconds that rank 0 may live on after its launcher. Ranks of `train -n` notice within seconds that it is gone."""
MAX_HISTORY_BYTES = 1 << 20
"""Bytes at the end of an existing log that are read for the losses before this launch: some thousand batches."""
FALLBACK_SECONDS = 120.0
"""Seconds that a run with `save_fallback` may have one failed save before that is told. The next save goes to the
second place, a minute later at most."""
TOLD_LATE = "the launch before ended, and the process that tells it was ended with it"
"""Reason of a message that a later launch sends, if the launch before left none."""
END_EVENTS = {"done": "ended", "stopped": "ended", "preempted": "preempted"}
"""Status with which a launch has ended -> the event; `failed` for any other."""
NO_STEP = "nothing: a launch has carried on"
KILLED_STEP = "run the same command again; if it is killed again, ask the kernel's log (dmesg) whether memory ran out"
KILLED_RANK_STEP = "nothing, unless it happens again; then ask the kernel's log (dmesg) whether memory ran out"
LAUNCHER_GONE = f"the launcher of the ranks is gone without a word, killed or aborted; {SAVES_STAND}"
GONE = "the launch ended before it began to train, and recorded no reason; its output says why"
OVERTAKEN = "its process is gone, and another launch trains the run by now"


class ObservedRun(LiveRun):
    """State of the run folder of a launch. `records` collects the new records of each look."""

    def __init__(self, folder: Path):
        """Open the run folder, and skip all but the end of a log that exists already. Raises DataError."""
        super().__init__(folder)
        self.records: list[Record] = []
        with contextlib.suppress(OSError):
            self._num_bytes_read = max(0, (folder / METRICS).stat().st_size - MAX_HISTORY_BYTES)

    def _note_record(self, record: Record) -> None:
        self.records.append(record)


class LaunchObserver:
    """Finds events of one launch in its run folder, and sends their messages."""

    def __init__(
        self,
        description: dict[str, Any],
        send: Callable[[Alert], None],
        clock: Callable[[], float] = time.monotonic,
    ):
        """`description` is what `observer.py` sends, and `send` delivers a message."""
        self.folder = Path(description["run_folder"])
        self.run: ObservedRun | None = None
        """None until the run folder has something to read."""
        self.launch: int | None = None
        """Number of the launch in metrics.jsonl, once it has begun to train. A restart has a new one."""
        self.logged: dict[str, float] = {}
        """Key of the log -> its newest number."""
        self.validation: dict[str, float] = {}
        """Label of a validation set -> its newest loss."""
        self.rank_times: list[RankTime] | None = None
        """Times of the slowest ranks in the newest batch that was measured; None if none of this launch was."""
        self.slow_ranks: dict[int, str] = {}
        """The ranks of this launch that are slow: number -> name, such as `rank 5 on gpu007`."""

        self._alerts: AlertsConfig | None = None
        """None if the run has no alerts, but metrics."""
        if description["alerts"] is not None:
            self._alerts = AlertsConfig(**description["alerts"])
        events = self._alerts.events if self._alerts is not None else []
        self.messages = Messages(description["run_name"], self.folder, events, description.get("observer"))
        self._spikes = LossSpikes(self._alerts.loss_spike if self._alerts is not None else 0.0)
        self._send = send
        self._clock = clock

        # The launch.
        self._status_before: dict[str, Any] = description["status_before"] or {}
        """Content of status.json before this launch."""
        self._launch_lines = LaunchLines(self.folder, description["num_launch_bytes"])
        self._last_begun_before = self._launch_lines.read_last_begun()
        """The newest line of launches.jsonl by a launch before this one that has trained."""
        self._last_line: dict[str, Any] | None = None
        """The newest line of launches.jsonl by this launch."""
        self._num_begun = 0
        """Number of times that ranks of this launch have begun to train."""
        self._first_batch = 0
        """Batches that were trained when they began first."""
        self._process: dict[str, Any] | None = None
        """The process of rank 0, as status.json describes it."""
        self._last_reason: str | None = None
        """Why ranks ended that the launcher has started again, as rank 0 has recorded it."""
        self._launch_process: dict[str, Any] = description.get("process") or {}
        """The process that has started this one: rank 0, or the launcher of `train -n`."""
        self._launcher_reason: str | None = None
        """Why ranks ended, as the launcher has recorded it; None if rank 0 knew that itself."""
        self._was_killed = False
        """Whether that was SIGKILL, by the system."""
        self._restarts: bool | None = None
        """Whether the launcher starts ranks again that have failed; None while that is not decided."""

        # Progress.
        self._batch = 0
        self._batch_changed_at = clock()
        self._is_idle = False
        """It was told that there is no progress."""
        self._failing_since: float | None = None
        """Time at which saves began to fail, if the last one has failed."""
        self._times_of_saves: dict[str, float | None] = {}
        """Name of the newest checkpoint -> when it was published; None if that is not known."""
        self._note_save(self._status_before)

    # ------------------------------------------------------------------------------------------------ present state

    @property
    def idle_seconds(self) -> float:
        """Time since the newest batch, or since this launch was started."""
        return self._clock() - self._batch_changed_at

    @property
    def state(self) -> str:
        """The present state of the run, as metrics have it."""
        if self._last_line is None or self.run is None:
            return "waiting"
        status = self.run.status["status"]
        if self._is_restarting(status):
            return "restarting"
        return status

    def _is_restarting(self, status: str) -> bool:
        """Return whether ranks have ended with a status, and the launcher starts them again, or may still do so."""
        if not self._has_launcher:
            return False
        if status == "failed":
            return self._restarts is not False
        return status == "preempted" and self._restarts is True

    @property
    def _has_launcher(self) -> bool:
        """Whether the ranks have a launcher that starts them again: rank 0 is not the process of the launch."""
        if self._process is None or not self._launch_process:
            return False
        return self._process.get("pid") != self._launch_process.get("pid")

    @property
    def status(self) -> dict[str, Any]:
        """Content of status.json: this launch's, or before it begins that of the launch before."""
        is_own = self.run is not None and self._last_line is not None
        return self.run.status if self.run is not None and is_own else self._status_before

    @property
    def batch(self) -> int:
        """Batches that are trained, or if the launch has ended, those that are saved too."""
        if self.run is not None and self._last_line is not None:
            return self.run.batch
        return int(self._status_before.get("batch", 0))

    @property
    def saved_at(self) -> float | None:
        """Time of the newest checkpoint's publication, in seconds since 1970; None if that is unknown."""
        self._note_save(self.status)
        return self._times_of_saves.get(str(self.status.get("last_saved")))

    def _note_save(self, status: dict[str, Any]) -> None:
        """Remember when the newest save was published. Ranks that resume from it do not know that."""
        saved_at = number_of(status.get("saved_at"))
        name = name_of_save(status.get("last_saved"))
        if name is None:
            return
        if saved_at is not None:
            self._times_of_saves = {name: saved_at}
        elif name not in self._times_of_saves and self.run is not None:
            self._times_of_saves = {name: self.run.read_time_of_save(name)}

    @property
    def is_saved_in_second(self) -> bool:
        """Whether the newest save is in `save_fallback`, and not in `save_folder`."""
        return bool(self.status.get(SAVED_IN))

    # ------------------------------------------------------------------------------------------------------- events

    def begin(self) -> None:
        """Read what earlier launches have left, and tell that this one was started."""
        with contextlib.suppress(DataError):  # a new run
            self.run = ObservedRun(self.folder)
            self.run.look()
            for record in self._take_records():
                self._add_loss(record)
        self._batch = self.batch
        self._tell("began")

    def look(self) -> None:
        """Read what is new in the run folder, and tell the events that it shows."""
        reason_before = self.status.get("reason")
        if self.run is None:
            with contextlib.suppress(DataError):  # a new run, whose configuration is still being checked
                self.run = ObservedRun(self.folder)
        if self.run is not None:
            self.run.look()
            self._follow_launches(reason_before)
            self._note_save(self.status)
            self._follow_saves()
            self._follow_ranks()
            for record in self._take_records():
                if self._is_history(record):
                    self._add_loss(record)
                else:
                    self._follow_loss(record)
        self._follow_progress()

    def end(self, reason_to_leave: str | None = None) -> None:
        """Tell how the launch has ended, once it has.

        reason_to_leave: what the launch has sent at its end, why it was asked to leave; empty if it was not. None if it
            ended without that, because it was killed. Its rank 0 may then still have to write why it ends.
        """
        was_killed = reason_to_leave is None
        deadline = self._clock() + LAST_WORDS_SECONDS
        while was_killed and self._process is not None and is_alive(self._process) and self._clock() < deadline:
            if (read_status(self.folder) or {}).get("status") != "running":
                break
            time.sleep(LOOK_SECONDS / 10)
        self.look()

        line = self._last_line
        status = read_status(self.folder) or {}
        if line is None and reason_to_leave:
            self._tell("preempted", reason_to_leave)
        elif line is None:
            self._tell("failed", self._launcher_reason or GONE, next_step=self._step_if_killed)
        elif line["status"] != "running":
            reason = self._launcher_reason or line.get("reason")
            end = {**line, "reason": reason, TRY_AGAIN: status.get(TRY_AGAIN)}
            self._tell_end(end, next_step=self._step_if_killed)
        elif status.get("status") == "running" and is_running(status) and status.get("process") != self._process:
            self._tell("failed", OVERTAKEN)
        elif was_killed and self._has_launcher and status.get("status") == "failed":
            self._tell_end({**status, "reason": LAUNCHER_GONE}, next_step=KILLED_STEP)
        else:
            self._tell_end(status, next_step=KILLED_STEP)  # it has written no end, and `read_status` says why

    @property
    def _step_if_killed(self) -> str | None:
        """Advice if the last end of ranks was that one was killed by the system; None if it was not."""
        was_killed = self._launcher_reason is not None and self._was_killed
        return KILLED_STEP if was_killed else None

    def _follow_launches(self, reason_before: str | None) -> None:
        """Read the beginnings and ends of this launch. `reason_before` is the status' reason at the look before."""
        for line in self._launch_lines.read_new():
            if LAUNCHER in line:
                self._follow_launcher(line)
                continue
            if line["status"] == "running":
                if self._num_begun == 0:
                    self._first_batch = line["batch"]
                    self._tell_launch_before()
                else:
                    self._tell_restart(reason_before)
                self._num_begun += 1
                self.rank_times = None  # another launch may have other nodes
                self.slow_ranks = {}
                self.launch = line.get("launch")
                self._batch_changed_at = self._clock()
            else:
                self._last_reason = line.get("reason")
                self._launcher_reason = None  # the launcher's line comes after rank 0's
            self._last_line = line
        process = self.run.status.get("process") if self.run is not None else None
        if self._last_line is not None and process is not None:
            self._process = process

    def _follow_launcher(self, line: dict[str, Any]) -> None:
        """Take a line of the launcher: why a try has failed, and whether there is another."""
        reason = line[LAUNCHER]
        if isinstance(reason, str) and reason:
            self._launcher_reason = reason
            self._was_killed = line.get(WAS_KILLED) is True
        self._restarts = line.get(RESTARTS) is True

    def _tell_restart(self, reason_before: str | None) -> None:
        """Tell that ranks have begun again. `reason_before` is the status' reason at the look before."""
        next_step = KILLED_RANK_STEP if self._step_if_killed else None
        self._tell("restarted", self._launcher_reason or self._last_reason or reason_before, next_step=next_step)
        self._launcher_reason = None
        self._last_reason = None
        self._restarts = None

    def _tell_launch_before(self) -> None:
        """Tell the end of the last launch that was observed and ended together with its observer, if there is one.

        If there are several, such as launches of a container that is killed while it starts, only one message is sent.
        """
        untold = self.messages.find_untold_launches()
        if not untold:
            return
        *earlier, last = untold
        before = self._status_before
        facts = Facts(
            batch=int(before.get("batch", 0)),
            launch=None,
            last_saved=before.get("last_saved"),
            saved_at=number_of(before.get("saved_at")),
        )
        # A launch that was refused since has written its own end to status.json.
        end = before if last.is_newest else self._last_begun_before
        event = END_EVENTS.get(str(end.get("status")), "failed")
        reason = f"{TOLD_LATE}; {end['reason']}" if end.get("reason") else TOLD_LATE
        if earlier:
            reason += f"; {len(earlier):,} more before it ended in the same way"
        for launch in earlier:
            self.messages.note_end("failed", facts.batch, launch.observer_id)
        self._tell(event, reason, facts=facts, observer_id=last.observer_id, next_step=NO_STEP)

    def _follow_saves(self) -> None:
        """Tell that saves fail, once for several in a row, and that one is in `save_folder` again.

        Saves that go to `save_fallback` instead are told once too, and then again if both places fail.
        """
        if self.run is None or self._num_begun == 0:
            return
        is_in_second = self.is_saved_in_second
        if not self.run.failed_saves:
            self._failing_since = None
        elif self._failing_since is None:
            self._failing_since = self._clock()

        is_news = not self.messages.saves_fail or self.messages.is_in_second
        if is_news and self._have_saves_failed() and not self.run.has_ended:
            self._tell("failed_saves", self.run.save_error)
        elif is_in_second and self.run.save_error and not self.messages.saves_fail:
            name, place = self.run.status.get("last_saved"), self.run.status.get(SAVED_IN)
            reason = f"saves to save_folder fail: {self.run.save_error}; {name} is in {place}"
            self._tell("failed_saves", reason, next_step=SECOND_PLACE_STEP, is_in_second=True)
        elif self._awaited_save and not self.messages.saves_fail:
            reason = f"training stands still, because it waits for a save: {self._awaited_save}"
            self._tell("failed_saves", reason, next_step=WAITING_STEP)

        has_saved = self.run.status.get("saved_at") is not None
        is_well = has_saved and not self.run.failed_saves and not self._awaited_save
        if self.messages.saves_fail and is_well and not is_in_second:
            self._tell(SAVES_RECOVERED)

    @property
    def _awaited_save(self) -> str:
        """The save for which training stands still, and its place, as status.json has it; empty if it does not."""
        awaited = self.run.status.get(WAITS_FOR_SAVE) if self.run is not None else None
        return printable(awaited) if isinstance(awaited, str) else ""

    def _have_saves_failed(self) -> bool:
        """Return whether saves fail now, and in both places if there are two."""
        if self.run is None or self._failing_since is None:
            return False
        has_second = bool(self.run.config.get("save_fallback"))
        if not has_second or self.run.failed_saves > 1:
            return True
        waited_seconds = self._clock() - self._failing_since
        return waited_seconds >= FALLBACK_SECONDS and not self.is_saved_in_second

    def _follow_ranks(self) -> None:
        """Tell that ranks have become slow, and that they no longer are."""
        if self.run is None or self._num_begun == 0:
            return
        rank_times = read_rank_times(self.run.status)
        if rank_times is None:
            return  # no batch of this launch was measured yet
        self.rank_times = rank_times

        # The status describes some of the slow ranks, those that were named last, and has the numbers of all.
        described = {time.rank: time for time in read_slow_ranks(self.run.status)}
        slow_before = self.slow_ranks
        self.slow_ranks = {}
        for rank in read_all_slow_ranks(self.run.status):
            name = described[rank].name if rank in described else f"rank {rank}"
            self.slow_ranks[rank] = slow_before.get(rank, name)

        became_slow = [rank for rank in self.slow_ranks if rank not in slow_before]
        if became_slow:
            self._tell_slow([time for time in described.values() if time.rank in became_slow], len(became_slow))
        recovered = [name for rank, name in slow_before.items() if rank not in self.slow_ranks]
        if recovered:
            self._tell(RANKS_RECOVERED, _join_some(recovered))

    def _tell_slow(self, described: list[RankTime], num_ranks: int) -> None:
        """Tell that `num_ranks` ranks have become slow, some of which are described."""
        if not described:
            self._tell("slow_rank", f"{num_ranks} more ranks are slow")
            return
        reason, _, next_step = described[0].text.partition("; next: ")
        others = [str(time) for time in described[1:]]
        num_more = num_ranks - len(described)
        if num_more > 0:
            others.append(f"{num_more} more")
        if others:
            reason += f"; and {', '.join(others)}"
        self._tell("slow_rank", reason, next_step=next_step or None)

    def _take_records(self) -> list[Record]:
        """Return the new records of the log, and keep their numbers for the metrics."""
        if self.run is None:
            return []
        records = self.run.records
        self.run.records = []
        for record in records:
            for key, value in record.items():
                number = number_of(value)
                if number is not None:
                    self.logged[key] = number
            for label, loss in validation_losses(record).items():
                if number_of(loss) is not None:
                    self.validation[label] = loss
        return records

    def _is_history(self, record: Record) -> bool:
        """Return whether an earlier launch has trained the batch of a record.

        A launch on another machine appends the log that the checkpoint carries, whose spikes were told there.
        """
        if self._num_begun == 0:
            return True
        return self.launch is not None and record.get("launch") != self.launch

    def _follow_loss(self, record: Record) -> None:
        """Tell a spike of the loss that begins with a record, unless it was told for this batch before."""
        reason = self._add_loss(record)
        if reason is not None and record["batch"] > self.messages.spike_batch:
            self._tell("loss_spike", reason)

    def _add_loss(self, record: Record) -> str | None:
        """Pass the loss of a record on, and return a text if a spike has begun."""
        if LOSS not in record:
            return None  # an evaluation before the first batch
        return self._spikes.add(record["batch"], number_of(record[LOSS]))

    def _follow_progress(self) -> None:
        """Tell that there has been no new batch for some time."""
        if self.batch != self._batch:
            self._batch = self.batch
            self._batch_changed_at = self._clock()
            self._is_idle = False
        is_done = self._last_line is not None and self._last_line["status"] in ("done", "stopped")  # it exports
        is_late = self._alerts is not None and self.idle_seconds >= 60 * self._alerts.no_progress_minutes
        if is_late and not is_done and not self._is_idle:
            self._is_idle = True
            reason = f"no new batch for {duration_text(self.idle_seconds)}"
            if self._num_begun == 0:
                reason += ", and the launch has not begun to train"
            elif self._last_line is not None and self._last_line["status"] != "running":
                reason += f"; its last try ended: {self._launcher_reason or self._last_reason}"
            next_step = None
            if self._awaited_save:
                reason += f"; training waits for a save: {self._awaited_save}"
                next_step = WAITING_STEP
            self._tell("no_progress", reason, next_step=next_step)

    def _tell_end(self, status: dict[str, Any], *, next_step: str | None = None) -> None:
        """Tell how the launch has ended, from a status. A run that was done before this launch was told already."""
        name = str(status.get("status"))
        reason = status.get("reason")
        event = END_EVENTS.get(name, "failed")
        if event == "ended":
            reason = name
            has_trained = self.batch > self._first_batch
            if not has_trained and self.messages.ended_batch == self.batch:
                return self.messages.note_end("ended", self.batch)
        if status.get(TRY_AGAIN):
            next_step = TRY_AGAIN_STEP
        return self._tell(event, reason, next_step=next_step)

    def _tell(
        self,
        event: str,
        reason: str | None = None,
        *,
        next_step: str | None = None,
        facts: Facts | None = None,
        observer_id: str | None = None,
        is_in_second: bool = False,
    ) -> None:
        """Record an event, and send its message if the user wants it. By default `facts` are the present ones."""
        if self._alerts is None:
            return
        if facts is None:
            last_saved = self.status.get("last_saved")
            facts = Facts(batch=self.batch, launch=self.launch, last_saved=last_saved, saved_at=self.saved_at)
        alert = self.messages.tell(
            event, facts, reason, next_step=next_step, observer_id=observer_id, is_in_second=is_in_second
        )
        if alert is not None:
            self._send(alert)


def _join_some(names: list[str]) -> str:
    """Return names with commas between them, MAX_RANKS_LISTED at most, and how many more there are."""
    text = ", ".join(names[:MAX_RANKS_LISTED])
    num_more = len(names) - MAX_RANKS_LISTED
    return f"{text} and {num_more} more" if num_more > 0 else text
