"""Events of a run that `alerts` tell, found in its run folder, and the message of each. No torch.

`Messages` makes an `Alert` of an event and remembers in the run folder what was told (ALERTS), so that a later launch
does not tell it again. `LossSpikes` decides whether losses are a spike. `launch_observer.py` looks at the run, and
`receivers.py` delivers.
"""

import json
import math
import socket
import statistics
import time
import uuid
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from llmfoundry_lite.bounded import MAX_NOTE_BYTES, parse_json
from llmfoundry_lite.checkpoint.commit import COMMITTED
from llmfoundry_lite.checkpoint.run_log import duration_text
from llmfoundry_lite.errors import printable
from llmfoundry_lite.files import open_no_link

ALERTS = "alerts.jsonl"
"""Name of the file in the run folder with a line for each event, and one for each message that a receiver got or did
not get."""
MAX_REMEMBERED_BYTES = MAX_NOTE_BYTES
"""Bytes at the end of ALERTS that are read: several thousand events."""
MAX_REASON_CHARACTERS = 2000
"""Characters of a reason that are kept. Linux passes no variable of more than 128 KiB to a program."""
MAX_NAME_CHARACTERS = 40
"""Longest name of a checkpoint that is passed on."""
STARTED = "started"
"""Entry of a launch in ALERTS before its observer runs. It sends nothing. The next launch tells the end if
nobody has."""
ENDS = ("preempted", "failed", "ended")
"""Events with which a launch is over."""
SAVES_RECOVERED = "saves_recovered"
"""Event that follows `failed_saves`: a save has been published in `save_folder` again."""
RANKS_RECOVERED = "ranks_recovered"
"""Event that follows `slow_rank`: ranks are no longer slow."""
FOLLOWING = {"failed_saves": SAVES_RECOVERED, "slow_rank": RANKS_RECOVERED}
"""Event -> the one that says that it is over. If the user wants messages of the first, the second is sent too."""

WINDOW = 100
"""Batches whose median loss is what a spike is compared with."""
IN_A_ROW = 3
"""Losses that must be high. One high loss is usually an odd batch."""
DEVIATIONS_PER_MAD = 1.4826
"""Standard deviation of normally distributed values, divided by the median of their distances from the median."""
MIN_DEVIATION = 0.01
"""Least standard deviation, as a share of the median loss, because losses of a short window may hardly differ."""

NEXT_STEPS = {
    "began": "nothing",
    "restarted": "nothing, unless it happens again; the launcher carries on from the newest save",
    "failed_saves": "make room, or renew the credentials, or start the server; training goes on for max_unsaved",
    SAVES_RECOVERED: "nothing",
    "slow_rank": "look at the node, or run the same command again without it",
    RANKS_RECOVERED: "nothing",
    "no_progress": "look at its output; if it hangs, kill it and run the same command again",
    "loss_spike": "look at `llmfoundry-lite report`; if the loss stays high, carry on from a checkpoint before it",
    "preempted": "run the same command again",
    "failed": "remove the cause, then run the same command again",
    "ended": "nothing",
}
"""Event -> what the reader of its message can do."""
SECOND_PLACE_STEP = "make room in save_folder, or renew the credentials, or start the server; saves go to save_fallback"
WAITING_STEP = "see whether save_folder answers; a kill -9 would lose the batches since the last save, SIGTERM may not"
TRY_AGAIN_STEP = "run the same command again; the fault may have passed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Facts about a run at the moment of an event."""

    batch: int
    launch: int | None
    """Number of the launch in metrics.jsonl; None if it has not begun to train."""
    last_saved: str | None
    """Name of the newest checkpoint, such as `ba200`."""
    saved_at: float | None
    """When it was published, in seconds since 1970; None if that is unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """A message. The names of its fields are the keys of the JSON that receivers get."""

    event: str
    text: str
    """The message in one line."""
    run: str
    run_folder: str
    host: str
    launch: int | None
    batch: int
    reason: str | None
    last_saved: str | None
    last_saved_age_seconds: float | None
    next: str
    """Advice to the user."""
    time: float
    """Seconds since 1970."""

    def as_json(self) -> bytes:
        """Return the message as JSON."""
        return json.dumps(asdict(self)).encode()


@dataclass(frozen=True, slots=True)
class Untold:
    """An earlier launch that has begun, and whose end was not told."""

    observer_id: str
    is_newest: bool
    """No other launch has begun since, so that status.json is as this launch has left it."""


class Messages:
    """Makes the messages of a run, and keeps a record of them in its run folder."""

    def __init__(self, run_name: str, folder: Path, events: list[str], observer_id: str | None = None):
        """Read which events earlier launches have told.

        events: those that send a message.
        observer_id: what the launch has recorded itself with; None for a new one.
        """
        self.run_name = run_name
        self.folder = folder
        self.events = {*events}
        for event, following in FOLLOWING.items():
            if event in events:
                self.events.add(following)
        self.saves_fail = False
        """Whether the last that was told of saves is that they fail."""
        self.is_in_second = False
        """Whether it is that they fail in `save_folder`, and go to `save_fallback`."""
        self.spike_batch = 0
        """The last batch of a loss spike that was told."""
        self.ended_batch: int | None = None
        """Batch of the newest event `ended`."""
        self._observer_id = observer_id or new_observer_id()
        """Tells this launch's entries in the record from those of others."""
        for entry in read_record(folder / ALERTS):
            self._take(entry)

    def tell(
        self,
        event: str,
        facts: Facts,
        reason: str | None = None,
        *,
        next_step: str | None = None,
        observer_id: str | None = None,
        is_in_second: bool = False,
    ) -> Alert | None:
        """Record an event and return its message; None if the user does not want messages of such events.

        next_step: what to do, instead of NEXT_STEPS.
        observer_id: that of another launch, if the event is of that one.
        is_in_second: whether saves that fail go to `save_fallback`.
        """
        now = time.time()
        last_saved = name_of_save(facts.last_saved)
        age_seconds = None
        if last_saved is not None and facts.saved_at is not None:
            age_seconds = round(max(0.0, now - facts.saved_at), 1)
        reason = printable(reason)[:MAX_REASON_CHARACTERS] if reason else None
        alert = Alert(
            event=event,
            text="",
            run=self.run_name,
            run_folder=str(self.folder),
            host=socket.gethostname(),
            launch=facts.launch,
            batch=facts.batch,
            reason=reason,
            last_saved=last_saved,
            last_saved_age_seconds=age_seconds,
            next=next_step or NEXT_STEPS[event],
            time=now,
        )
        fields = asdict(alert)
        fields["text"] = _describe(alert)
        alert = Alert(**fields)

        is_wanted = event in self.events
        entry = {"time": now, "event": event, "batch": facts.batch, "is_sent": is_wanted, "text": alert.text}
        entry["observer"] = observer_id or self._observer_id
        if is_in_second:
            entry["is_in_second"] = True
        self.record(entry)
        self._take(entry)
        return alert if is_wanted else None

    def note_end(self, event: str, batch: int, observer_id: str | None = None) -> None:
        """Record the end of a launch of which no message is sent, because another message tells it.

        observer_id: that of another launch, if the end is of that one.
        """
        observer_id = observer_id or self._observer_id
        self.record({"time": time.time(), "event": event, "batch": batch, "is_sent": False, "observer": observer_id})

    def find_untold_launches(self) -> list[Untold]:
        """Find earlier launches whose observers have recorded a beginning and no end, in the order in which they began.

        Each was ended together with its observer, as by a container that stops. Launches that came later, such as one
        that was refused, do not tell its end.
        """
        began: list[str] = []
        ended: set[str] = set()
        for entry in read_record(self.folder / ALERTS):
            observer_id = entry.get("observer")
            if not isinstance(observer_id, str) or observer_id == self._observer_id:
                continue
            if entry.get("event") in (STARTED, "began") and observer_id not in began:
                began.append(observer_id)
            elif entry.get("event") in ENDS:
                ended.add(observer_id)
        return [Untold(each, is_newest=each == began[-1]) for each in began if each not in ended]

    def record(self, entry: dict[str, Any]) -> None:
        """Append a line to the record."""
        append_record(self.folder, entry)

    def _take(self, entry: dict[str, Any]) -> None:
        """Update what is remembered from an entry of the record."""
        event, batch = entry.get("event"), entry.get("batch")
        if not isinstance(event, str) or type(batch) is not int:
            return  # the line of a delivery, or not ours
        if event in ("failed_saves", SAVES_RECOVERED):
            self.saves_fail = event == "failed_saves"
            self.is_in_second = entry.get("is_in_second") is True
        if event == "loss_spike":
            self.spike_batch = max(self.spike_batch, batch)
        if event == "ended":
            self.ended_batch = batch


def new_observer_id() -> str:
    """Return text that tells the entries of one launch from those of others."""
    return uuid.uuid4().hex


def append_record(folder: Path, entry: dict[str, Any]) -> None:
    """Append a line to the record of a run. A disk that is full or read-only does not prevent a message."""
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / ALERTS, "a", opener=open_no_link) as file:
            file.write(json.dumps(entry) + "\n")


def read_record(path: Path, begin: int = 0) -> Iterator[dict[str, Any]]:
    """Yield the entries of a record from byte `begin` on, but only the last MAX_REMEMBERED_BYTES.

    Lines that are not JSON objects are skipped.
    """
    content = b""
    with suppress(OSError), open(path, "rb", opener=open_no_link) as file:
        file.seek(max(begin, path.stat().st_size - MAX_REMEMBERED_BYTES))
        content = file.read(MAX_REMEMBERED_BYTES)
    for line in content.splitlines():
        with suppress(ValueError):
            entry = parse_json(line)
            if isinstance(entry, dict):
                yield entry


def _describe(alert: Alert) -> str:
    """Return a message in one line: `mpt-1b on gpu003: failed at batch 230: out of memory; last save ba200, 12:03 old;
    next: …`."""
    words = alert.event.replace("_", " ")
    parts = [f"{alert.run} on {alert.host}: {words} at batch {alert.batch}"]
    if alert.reason:
        parts[0] += f": {alert.reason}"
    if alert.last_saved is None:
        parts.append("no save yet")
    elif alert.last_saved_age_seconds is None:
        parts.append(f"last save {alert.last_saved}")
    else:
        parts.append(f"last save {alert.last_saved}, {duration_text(alert.last_saved_age_seconds)} old")
    is_said = alert.next in (alert.reason or "")
    if alert.next != "nothing" and not is_said:
        parts.append(f"next: {alert.next}")
    return printable("; ".join(parts))


def name_of_save(value: Any) -> str | None:
    """Return a value of status.json if it is the name of a checkpoint, such as `ba200`; else None.

    Anybody may have written the file, and receivers pass the name on.
    """
    is_name = isinstance(value, str) and len(value) <= MAX_NAME_CHARACTERS and COMMITTED.fullmatch(value)
    return value if is_name else None


class LossSpikes:
    """Finds spikes of the training loss.

    A spike is three losses in a row (IN_A_ROW) that are above `median + multiple * deviation`. Both are computed from
    the 100 batches before them (WINDOW), and the deviation is the robust one: 1.4826 times the median distance from the
    median, or 1 % of the median if that is more. Single outliers change neither. A loss that is not finite is above any
    limit. A loss that falls fast, as at the beginning of a run, is below the median and never a spike.
    """

    def __init__(self, multiple: float):
        self.multiple = multiple
        self._losses: deque[tuple[int, float]] = deque(maxlen=WINDOW + IN_A_ROW)
        """Batch and loss, in the order of training."""
        self._was_high = False

    def add(self, batch: int, loss: float | None) -> str | None:
        """Take the loss of a batch, None for one that is not finite. Return a text if a spike has just begun."""
        # A launch that carries on trains some batches again.
        while self._losses and self._losses[-1][0] >= batch:
            self._losses.pop()
        self._losses.append((batch, math.inf if loss is None else loss))
        if len(self._losses) < WINDOW + IN_A_ROW:
            return None

        losses = [loss for _, loss in self._losses]
        earlier = losses[:-IN_A_ROW]
        median = statistics.median(earlier)
        deviation = DEVIATIONS_PER_MAD * statistics.median(abs(loss - median) for loss in earlier)
        limit = median + self.multiple * max(deviation, MIN_DEVIATION * abs(median))
        is_high = all(loss > limit for loss in losses[-IN_A_ROW:])
        has_begun = is_high and not self._was_high
        self._was_high = is_high
        if not has_begun:
            return None
        return f"{IN_A_ROW} losses in a row are above {limit:.4f}; the median of {WINDOW} before is {median:.4f}"
