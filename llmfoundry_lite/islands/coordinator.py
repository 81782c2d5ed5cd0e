"""Who trains what with whom: the only judge of membership and of which batches count. No tensors, no clock, no sockets.

Owns the protocol as a state machine: `hello`, `receive`, `lose` and `tick` take what has happened, and leave messages
in `outbox` and connections to be closed in `dropped`. Leaves connections to `serve`, and shares to `division`.

A view is an epoch, a batch, the members' lanes, a scribe that saves, and a donor for those that join. A batch counts
when every member of the view has said `prepared`: all are then told `commit`. If anything is wrong before that, there
is a next epoch: rows are divided again, gradients are dropped, and the batch is repeated. Weights were never touched.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from llmfoundry_lite.errors import ConfigError
from llmfoundry_lite.islands.division import Pace, divide, latest_seconds
from llmfoundry_lite.islands.member import View
from llmfoundry_lite.islands.messages import BadMessageError, Message

SMOOTHING = 0.3
"""The weight of a new measurement of an island's rate."""
WORTH_MOVING = 0.95
"""Rows move when a batch then takes less than this share of what it takes now."""
BATCHES_BETWEEN_MOVES = 10
STALL_SLACK_SECONDS = 1.0
"""Between two silences there is a new epoch, whose beats come a little later."""
MOST_SILENCES = 2
"""So long may a batch fail again and again without an island lost; then the smallest has to go."""

FACTS: dict[str, type | tuple[type, ...]] = {
    "island": str,
    "launch": str,
    "address": list,
    "boxes": dict,
    "fingerprints": dict,
    "machine": dict,
    "rank": int,
    "size": int,
    "batch": int,
    "rows": int,
    "microbatch": int,
    "weight": (int, float),
}
"""What a rank says of itself and its island when it comes."""
REPORT: dict[str, type | tuple[type, ...]] = {
    "epoch": int,
    "batch": int,
    "ok": bool,
    "leaving": bool,
    "bad": int,
    "seconds": (int, float),
    "weight": int,
    "samples": int,
    "tokens": int,
    "losses": int,
    "digest": int,
    "loss": (int, float),
    "norm": (int, float),
    "weights": str,
}
"""What an island says when it has, or has not, a batch's whole gradient."""


def check_fields(message: Message, fields: dict[str, type | tuple[type, ...]]) -> None:
    """Raises BadMessageError."""
    for key, kind in fields.items():
        value = message.get(key)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise BadMessageError(f"{message['kind']}: {key} is {str(value)[:40]!r}")


@dataclass(kw_only=True)
class Island:
    """A launch, from the first of its ranks that has come."""

    name: str
    launch: str
    size: int
    hellos: dict[int, Message] = field(default_factory=dict)
    connections: dict[int, int] = field(default_factory=dict)
    heard_at: dict[int, float] = field(default_factory=dict)
    phases: dict[int, tuple[str, int]] = field(default_factory=dict)
    """Of each rank: what it does, and how many bytes it has exchanged so far."""
    prepared: Message | None = None
    rate: float | None = None
    """Rows per second, smoothed."""
    is_leaving: bool = False
    has_state: bool = False
    """It has the run's weights, and so may save and give them."""

    @property
    def is_whole(self) -> bool:
        return len(self.connections) == self.size

    @property
    def facts(self) -> Message:
        return self.hellos[0]

    def describe(self) -> Message:
        ranks = [self.hellos[rank] for rank in range(self.size)]
        return {
            "kind": "member",
            "name": self.name,
            "launch": self.launch,
            "addresses": [hello["address"] for hello in ranks],
            "boxes": [hello["boxes"] for hello in ranks],
            "machine": self.facts["machine"],
        }


class Coordinator:
    def __init__(self, num_founders: int, silence_seconds: float, log: Callable[[str], None] = lambda line: None):
        self.num_founders = num_founders
        self.silence_seconds = silence_seconds
        self.log = log
        self.islands: dict[str, Island] = {}
        """All that are here, whole or not."""
        self.members: list[str] = []
        """Those of the view, in order of names."""
        self.epoch = 0
        self.batch = 0
        """How many batches count."""
        self.scribe = ""
        self.lanes: dict[str, range] = {}
        self.joiners: list[str] = []
        """Members that the view has brought in, to whom the scribe gives its state."""
        self.failing_since: float | None = None
        """When an exchange of this batch failed first, since an island was lost."""
        self.moved_at = 0
        self.progress: tuple[Any, float] = (None, 0.0)
        """What ranks have exchanged, and since when it has not changed."""
        self.outbox: list[tuple[int, Message]] = []
        self.dropped: list[int] = []

    # --------------------------------------------------------------------------------------------- what happens

    def hello(self, connection: int, message: Message, now: float) -> None:
        """A rank has come. Raises BadMessageError."""
        check_fields(message, FACTS)
        name, launch, rank, size = (message[key] for key in ("island", "launch", "rank", "size"))
        if not 0 <= rank < size or message["rows"] < 1 or message["microbatch"] < 1 or not message["weight"] > 0:
            raise BadMessageError(f"hello of rank {rank} of {size}")
        present = self.islands.get(name)
        if present is not None and present.launch != launch:
            self._evict(name, f"{name} has been launched again", now)
            present = None
        island = present or Island(name=name, launch=launch, size=size)
        if island.size != size or rank in island.connections:
            raise BadMessageError(f"hello of rank {rank} of {name}, which is here")
        self.islands[name] = island
        island.hellos[rank], island.connections[rank], island.heard_at[rank] = message, connection, now
        if island.is_whole:
            refusal = self._refusal(island)
            if refusal:
                self._refuse(island, refusal)
                return
            self.log(f"{name} is here, with {size} ranks, at batch {message['batch']}")
            if not self.members:
                self._begin_if_all_here()

    def receive(self, connection: int, message: Message, now: float) -> None:
        """From a rank that has said hello. Raises BadMessageError."""
        found = self._find(connection)
        if found is None:
            return  # evicted in the meantime
        island, rank = found
        island.heard_at[rank] = now
        if message["kind"] == "beat":
            check_fields(message, {"phase": str, "bytes": int})
            island.phases[rank] = (message["phase"], message["bytes"])
        elif message["kind"] == "prepared":
            check_fields(message, REPORT)
            self._prepare(island, message, now)
        elif message["kind"] == "state":
            check_fields(message, {"epoch": int, "state": dict})
            if message["epoch"] == self.epoch and island.name == self.scribe:
                for name in self.joiners:
                    self._tell(self.islands[name], message, speaker_only=True)
        elif message["kind"] == "leave":
            self._lose(island.name, f"{island.name} leaves")
        else:
            raise BadMessageError(f"unknown kind {message['kind'][:40]!r}")

    def lose(self, connection: int, now: float) -> None:
        """A connection has ended."""
        found = self._find(connection)
        if found is not None:
            self._evict(found[0].name, f"rank {found[1]} of {found[0].name} is gone", now)

    def tick(self, now: float) -> None:
        """Called several times a second."""
        for island in list(self.islands.values()):
            silent = [rank for rank, heard in island.heard_at.items() if now - heard > self.silence_seconds]
            if silent and self.islands.get(island.name) is island:
                self._evict(island.name, f"rank {silent[0]} of {island.name} is silent", now)
        self._look_for_stall(now)

    # ------------------------------------------------------------------------------------------------ the verdict

    def _prepare(self, island: Island, message: Message, now: float) -> None:
        if island.name not in self.members or message["epoch"] != self.epoch:
            return  # of a view that is no more
        if message["batch"] != self.batch:
            raise BadMessageError(f"{island.name} prepares batch {message['batch']}, not {self.batch}")
        island.prepared = message
        present = [self.islands[name] for name in self.members]
        if any(one.prepared is None for one in present):
            return
        if all(one.prepared and one.prepared["ok"] for one in present):
            self._commit(present)
        else:
            self._fail("an exchange failed", now)

    def _commit(self, present: list[Island]) -> None:
        reports = {one.name: one.prepared for one in present if one.prepared}
        weight = sum(report["weight"] for report in reports.values())
        self._measure(present)
        message: Message = {
            "kind": "commit",
            "epoch": self.epoch,
            "batch": self.batch,
            "loss": sum(report["loss"] * (report["weight"] / max(weight, 1)) for report in reports.values()),
            "norm": reports[self.scribe]["norm"],
            "bad": sum(report["bad"] for report in reports.values()),
            **{key: sum(r[key] for r in reports.values()) for key in ("samples", "tokens", "losses", "digest")},
            "rows": {name: report["samples"] for name, report in reports.items()},
            "drifted": self._drifted(reports),
        }
        told = [one for one in present if one.name in self.members]
        self.batch += 1
        self.failing_since = None
        for one in present:
            one.prepared = None
        for one in present:
            one.has_state = True
            one.is_leaving = reports[one.name]["leaving"]
        message["next"] = self._next_view(message["drifted"])
        for one in told:
            self._tell(one, message, speaker_only=True)

    def _drifted(self, reports: Mapping[str, Message]) -> list[str]:
        """Islands whose weights, before this batch, were not the scribe's."""
        digests = {name: report["weights"] for name, report in reports.items() if report["weights"]}
        expected = digests.get(self.scribe)
        drifted = [name for name, digest in digests.items() if expected and digest != expected]
        if drifted:
            self.log(f"batch {self.batch + 1}: other weights than {self.scribe}'s on {', '.join(drifted)}")
        return drifted

    def _next_view(self, drifted: list[str]) -> Message | None:
        """At the end of a batch: those that leave are left out, those that wait come in, rows move. Those that have
        drifted get the scribe's state, as if they joined."""
        staying = [name for name in self.members if not self.islands[name].is_leaving]
        if not staying:
            return None  # the last ones save and leave by themselves
        waiting = [one for one in self.islands.values() if one.is_whole and one.name not in self.members]
        joiners = self._that_fit(staying, [one.name for one in waiting if not one.is_leaving])
        if self.scribe in staying:
            joiners += [name for name in staying if name in drifted]
            staying = [name for name in staying if name not in drifted]
        if joiners or len(staying) < len(self.members):
            return self._view(staying, joiners)
        if self.batch - self.moved_at < BATCHES_BETWEEN_MOVES:
            return None
        paces = self._paces(self.members)
        lanes = divide(self.num_rows, paces)
        if latest_seconds(lanes, paces) > WORTH_MOVING * latest_seconds(self.lanes, paces):
            return None
        return self._view(staying, [])

    def _fail(self, reason: str, now: float) -> None:
        """All are alive, and the batch failed. Nobody can tell whose link is dead: the smallest island goes at last."""
        self.failing_since = now if self.failing_since is None else self.failing_since
        if now - self.failing_since < MOST_SILENCES * self.silence_seconds - STALL_SLACK_SECONDS:
            self._repeat(reason)
            return
        others = [name for name in self.members if name != self.scribe]
        smallest = min(others, key=lambda name: len(self.lanes[name]))
        self._evict(smallest, f"links of {smallest} are dead", now)

    def _repeat(self, reason: str) -> None:
        """The next epoch, of the same batch."""
        self.log(f"batch {self.batch + 1} is repeated: {reason}")
        view = self._view(self.members, [])
        for name in self.members:
            self._tell(self.islands[name], view)

    def _view(self, members: list[str], joiners: list[str]) -> Message:
        """A new epoch; describes members to each other that have not met."""
        strangers = [name for name in joiners if name not in self.members]
        self.members, self.joiners = sorted([*members, *joiners]), joiners
        for name in strangers:
            for other in self.members:
                self._tell(self.islands[name], self.islands[other].describe())
            for other in self.members:
                if other not in strangers:
                    self._tell(self.islands[other], self.islands[name].describe())
        if self.scribe not in self.members:
            self.scribe = min(self.members, key=lambda name: (not self.islands[name].has_state, name))
        self.epoch += 1
        self.moved_at = self.batch
        self.progress = (None, math.inf)
        for name in self.members:
            self.islands[name].prepared = None
        self.lanes = divide(self.num_rows, self._paces(self.members))
        rows = ", ".join(f"{name} {len(lanes)}" for name, lanes in self.lanes.items())
        self.log(f"epoch {self.epoch}, batch {self.batch + 1}: {rows}; {self.scribe} saves")
        launches = {name: self.islands[name].launch for name in self.members}
        donor = self.scribe if joiners else ""
        view = View(self.epoch, self.batch, launches, self.lanes, self.scribe, donor, joiners).as_message()
        for name in strangers:
            self._tell(self.islands[name], view)
        return view

    # ----------------------------------------------------------------------------------------------- who is here

    @property
    def num_rows(self) -> int:
        """Of a batch; every rank that has come says the same."""
        return next(hello["rows"] for island in self.islands.values() for hello in island.hellos.values())

    def _begin_if_all_here(self) -> None:
        """The first view: of as many as were announced. The furthest give their state to those behind."""
        whole = sorted(name for name, one in self.islands.items() if one.is_whole)
        if len(whole) < self.num_founders:
            return
        try:
            divide(self.num_rows, self._paces(whole))
        except ConfigError as error:
            for name in whole:
                self._refuse(self.islands[name], str(error))
            return
        self.batch = max(self.islands[name].facts["batch"] for name in whole)
        first = [name for name in whole if self.islands[name].facts["batch"] == self.batch]
        self.scribe = first[0]
        for name in first:
            self.islands[name].has_state = True
            for other in first:
                self._tell(self.islands[name], self.islands[other].describe())
        view = self._view(first, [name for name in whole if name not in first])
        for name in first:
            self._tell(self.islands[name], view)

    def _refusal(self, island: Island) -> str:
        """Why this island cannot take part, if it cannot."""
        if any(island.hellos[rank]["fingerprints"] != island.facts["fingerprints"] for rank in range(island.size)):
            return f"{island.name}: its ranks differ in their configuration"
        for name, other in self.islands.items():
            if name == island.name or not other.is_whole:
                continue
            mine, theirs = island.facts["fingerprints"], other.facts["fingerprints"]
            differing = sorted(key for key in {*mine, *theirs} if mine.get(key) != theirs.get(key))
            if differing or island.facts["rows"] != other.facts["rows"]:
                what = ", ".join(differing) or "global_train_batch_size"
                return f"{island.name} and {name} differ in {what}; islands train one run"
        return ""

    def _that_fit(self, members: list[str], joiners: list[str]) -> list[str]:
        """Those with whom the batch can be divided; the others are told why not."""
        fitting: list[str] = []
        for name in joiners:
            try:
                divide(self.num_rows, self._paces([*members, *fitting, name]))
                fitting.append(name)
            except ConfigError as error:
                self._refuse(self.islands[name], str(error))
        return fitting

    def _paces(self, names: list[str]) -> dict[str, Pace]:
        """By measured rates where all have one; else by the weights that the islands were given."""
        islands = [self.islands[name] for name in names]
        are_measured = all(one.rate is not None for one in islands)
        return {
            one.name: Pace(
                one.size, one.facts["microbatch"], float(one.rate if are_measured and one.rate else one.facts["weight"])
            )
            for one in islands
        }

    def _measure(self, present: list[Island]) -> None:
        for one in present:
            assert one.prepared is not None
            seconds, rows = float(one.prepared["seconds"]), len(self.lanes[one.name])
            if seconds > 0:
                rate = rows / seconds
                one.rate = rate if one.rate is None else (1 - SMOOTHING) * one.rate + SMOOTHING * rate

    def _look_for_stall(self, now: float) -> None:
        """All members exchange, and no byte has moved for so long: a link is dead whose two ends are alive."""
        phases = [phase for name in self.members for phase in self.islands[name].phases.values()]
        size = sum(self.islands[name].size for name in self.members)
        exchanging = len(phases) == size and all(phase != "compute" for phase, _ in phases)
        seen = (
            (self.epoch, self.batch, tuple(phases)) if exchanging and any(p == "exchange" for p, _ in phases) else None
        )
        if seen is None or seen != self.progress[0]:
            self.progress = (seen, now)
            return
        if now - self.progress[1] <= self.silence_seconds:
            return
        self.failing_since = self.progress[1] if self.failing_since is None else self.failing_since
        self._fail("a link is dead", now)

    # ------------------------------------------------------------------------------------------------- its means

    def _find(self, connection: int) -> tuple[Island, int] | None:
        for island in self.islands.values():
            for rank, number in island.connections.items():
                if number == connection:
                    return island, rank
        return None

    def _tell(self, island: Island, message: Message, *, speaker_only: bool = False) -> None:
        ranks = [0] if speaker_only else sorted(island.connections)
        self.outbox.extend((island.connections[rank], message) for rank in ranks)

    def _refuse(self, island: Island, reason: str) -> None:
        self._tell(island, {"kind": "refused", "reason": reason})
        self.dropped.extend(island.connections.values())
        del self.islands[island.name]
        self.log(f"refused: {reason}")

    def _evict(self, name: str, reason: str, now: float) -> None:
        island = self.islands[name]
        self._tell(island, {"kind": "evicted", "reason": reason})
        self.dropped.extend(island.connections.values())
        self._lose(name, reason)

    def _lose(self, name: str, reason: str) -> None:
        self.log(reason)
        island = self.islands.pop(name)
        self.dropped.extend(connection for connection in island.connections.values() if connection not in self.dropped)
        if name not in self.members:
            return
        self.members.remove(name)
        self.failing_since = None
        if self.members:
            self._repeat(f"without {name}")
        else:
            self.log("no island is left; the next ones begin at the newest checkpoint")
            self.scribe, self.lanes = "", {}
