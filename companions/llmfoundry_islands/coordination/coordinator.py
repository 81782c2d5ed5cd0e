"""The protocol of islands as a state machine: membership, and which batches count. No tensors, no clock, no sockets.

`hello`, `receive`, `lose` and `tick` take events. They append messages to `outbox`, and connections to close to
`dropped`.

Commits are two-phase. When every member of a view has sent `prepared`, all receive `commit`, and the batch counts. If
anything fails before that, a new epoch begins with a new view (`member.View`): rows are divided again, and the batch is
repeated. Weights have not been touched by then.

With local steps an island trains several batches between two commits, as its reports say in `steps`. These batches are
committed together, and a repeat repeats their exchange alone.
"""

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address
from itertools import combinations
from typing import Any

from llmfoundry_islands.coordination.division import Pace, Rate, divide, latest_seconds
from llmfoundry_islands.coordination.member import View
from llmfoundry_islands.coordination.messages import FROM_RANK, BadMessageError, Message, check_message
from llmfoundry_islands.coordination.owners import busy_seconds, divide_sum
from llmfoundry_lite.errors import ConfigError

WORTH_MOVING = 0.95
"""Rows move if a batch is expected to take less than this fraction of its present time."""
BATCHES_BETWEEN_MOVES = 10
WORTH_MOVING_SOON = 0.85
"""Rows move already after BATCHES_UNTIL_SURE if a batch is expected to take less than this fraction. The owners of sums
change, too, if the slowest link is expected to."""
BATCHES_UNTIL_SURE = 2
STALL_SLACK_SECONDS = 1.0
"""Allowance for the new epoch between two silences, which delays heartbeats."""
MAX_SILENCES = 2
"""A batch may fail for this many `silence_seconds` with no island lost; then the smallest is evicted."""
SECONDS_TO_BE_WHOLE = 30.0
"""Time between the first and the last hello of an island. A later rank counts as frozen."""
MAX_TRIED = 10
"""If all islands together cannot divide a batch, every combination of this many of the fastest is tried."""
MAX_PAST = 1000
"""Ended launches that are remembered."""
MAX_TICK_SECONDS = 1.0
"""If more time passes between two ticks, this process was suspended, and no rank counts as silent for it."""
MIN_BATCH_SECONDS = 1e-6
"""Shortest credible time for a batch."""
SUMMED = ("bad", "samples", "tokens", "losses", "digest", "again")


@dataclass(kw_only=True)
class Island:
    """A launch, from its first rank's hello on."""

    name: str
    launch: str
    size: int
    came_at: float
    hellos: dict[int, Message] = field(default_factory=dict)
    connections: dict[int, int] = field(default_factory=dict)
    received_at: dict[int, float] = field(default_factory=dict)
    phases: dict[int, tuple[str, int]] = field(default_factory=dict)
    """Rank -> its phase, and the bytes that it has exchanged."""
    prepared: Message | None = None
    rate: Rate = field(default_factory=Rate)
    """Rows per second."""
    link: Rate = field(default_factory=Rate)
    """Bytes per second that come from other islands."""
    is_leaving: bool = False
    has_state: bool = False
    """It has the run's weights, so it may save them and send them to joiners."""
    wait_reason: str = ""
    """The last reason for waiting that was sent to it."""

    @property
    def is_whole(self) -> bool:
        return len(self.connections) == self.size

    @property
    def facts(self) -> Message:
        return self.hellos[0]

    @property
    def batch(self) -> int:
        """The batch of its checkpoint."""
        return next(iter(self.hellos.values()))["batch"]

    def describe(self) -> list[Message]:
        """Return one message per rank: the boxes of all ranks may exceed MAX_BYTES."""
        common = {"kind": "member", "name": self.name, "launch": self.launch, "machine": self.facts["machine"]}
        keys = ("size", "rank", "address", "boxes", "data_ranks")
        return [{**common, **{key: hello[key] for key in keys}} for hello in self.hellos.values()]


class Coordinator:
    """Membership and commits of one run. Connections are numbered in the order in which they were made."""

    def __init__(self, num_founders: int, silence_seconds: float, log: Callable[[str], None] = lambda line: None):
        self.num_founders = num_founders
        self.silence_seconds = silence_seconds
        self.log = log
        self.islands: dict[str, Island] = {}
        """All islands of which at least one rank is connected."""
        self.senders: dict[int, tuple[Island, int]] = {}
        """Connection -> its island and rank."""
        self.members: list[str] = []
        """The view's members, in order of names."""
        self.epoch = 0
        self.batch = 0
        """Number of committed batches."""
        self.num_rows = 0
        """Rows of a batch."""
        self.is_over = False
        """A member has finished the run; the others are about to."""
        self.leader = ""
        self.row_indices: dict[str, range] = {}
        self.shares: dict[str, int] = {}
        """Parts of the sum that islands own, see `owners`."""
        self.joiners: list[str] = []
        """New members of the view, to which the leader sends its state."""
        self.is_whole = False
        """With local steps: the next exchange is of all weights, as an island has asked that wants to save."""
        self.failing_since: float | None = None
        """Time of the first failed exchange of this batch since an island was lost."""
        self.moved_at = 0
        self.progress: tuple[Any, float] = (None, 0.0)
        """The ranks' phases and bytes, and the time of their last change."""
        self.past: deque[tuple[str, str]] = deque(maxlen=MAX_PAST)
        """Names and launches that have ended."""
        self.newest_connection = -1
        self.newest_before_restart = -1
        """The newest connection when the last member left. Ranks up to it may lack the newest checkpoint."""
        self.ticked_at = 0.0
        self.outbox: list[tuple[int, Message]] = []
        self.dropped: list[int] = []

    # --------------------------------------------------------------------------------------------------- events

    def greet(self, connection: int) -> None:
        """Note the connection of a rank, which now builds its model."""
        self.newest_connection = max(self.newest_connection, connection)

    def hello(self, connection: int, message: Message, now: float) -> None:
        """Register a rank. Raises BadMessageError."""
        check_message(message, {"hello": FROM_RANK["hello"]})
        self.greet(connection)
        name, launch, rank, size = (message[key] for key in ("island", "launch", "rank", "size"))
        present = self.islands.get(name)
        if (name, launch) in self.past or (
            present is not None and present.launch != launch and connection < min(present.connections.values())
        ):
            self._reject(connection, f"this launch of {name} is over, or a newer one is here")
            return
        if not self.members and connection <= self.newest_before_restart and message["batch"] < self.batch:
            self._reject(connection, f"{name} may not have the newest checkpoint")
            self.past.append((name, launch))
            if present is not None and present.launch == launch:
                self._evict(name, f"{name} may not have the newest checkpoint")
            return
        if present is not None and present.launch != launch:
            self._evict(name, f"{name} has been launched again")
            present = None
        island = present or Island(name=name, launch=launch, size=size, came_at=now)
        if island.size != size or rank in island.connections:
            raise BadMessageError(f"hello of rank {rank} of {name}, which is here")
        self.islands[name] = island
        island.hellos[rank], island.connections[rank], island.received_at[rank] = message, connection, now
        self.senders[connection] = (island, rank)
        if island.is_whole:
            refusal = self._refusal(island)
            if refusal:
                self._refuse(island, refusal)
                return
            self.log(f"{name} is here, with {size} ranks, at batch {message['batch']}")
            if not self.members:
                self._begin_if_all_here()

    def receive(self, connection: int, message: Message, now: float) -> None:
        """Handle a message of a registered rank. Raises BadMessageError."""
        found = self.senders.get(connection)
        if found is None:
            return  # evicted in the meantime
        check_message(message, FROM_RANK)
        island, rank = found
        island.received_at[rank] = now
        if message["kind"] == "beat":
            island.phases[rank] = (message["phase"], message["bytes"])
        elif message["kind"] == "prepared":
            self._prepare(island, message, now)
        elif message["kind"] == "state":
            if message["epoch"] == self.epoch and island.name == self.leader:
                for name in self.joiners:
                    self._send(self.islands[name], message, rank_0_only=True)
        elif message["kind"] == "leave":
            if message.get("finished") is True and island.name in self.members:
                self.is_over = True
            if message.get("asks") is True and self._is_needed(island):
                return
            self._lose(island.name, f"{island.name} " + ("has finished" if self.is_over else "leaves"))
        else:
            raise BadMessageError("a second hello")

    def lose(self, connection: int) -> None:
        """Note the end of a connection."""
        found = self.senders.get(connection)
        if found is not None:
            self._evict(found[0].name, f"rank {found[1]} of {found[0].name} is gone")

    def tick(self, now: float) -> None:
        """Check for silent ranks and dead links. Call it several times a second."""
        slept = now - self.ticked_at
        if self.ticked_at and slept > MAX_TICK_SECONDS:
            for island in self.islands.values():
                island.received_at = {rank: time + slept for rank, time in island.received_at.items()}
            self.progress = (None, 0.0)
        self.ticked_at = now
        for island in list(self.islands.values()):
            if self.islands.get(island.name) is not island:
                continue  # the loss of an island before it has ended it too
            silent = [rank for rank, time in island.received_at.items() if now - time > self.silence_seconds]
            if silent:
                self._evict(island.name, f"rank {silent[0]} of {island.name} is silent")
            elif not island.is_whole and now - island.came_at > SECONDS_TO_BE_WHOLE:
                count = island.size - len(island.connections)
                self._evict(island.name, f"{count} of {island.size} ranks of {island.name} do not come")
        self._check_for_stall(now)

    # ------------------------------------------------------------------------------------------------ the decision

    def _prepare(self, island: Island, message: Message, now: float) -> None:
        if island.name not in self.members or message["epoch"] != self.epoch:
            return  # a report of an earlier view
        if message["batch"] != self.batch:
            raise BadMessageError(f"{island.name} prepares batch {message['batch']}, not {self.batch}")
        island.prepared = message
        present = [self.islands[name] for name in self.members]
        if any(one.prepared is None for one in present):
            return
        if any(one.prepared and one.prepared["steps"] != message["steps"] for one in present):
            raise BadMessageError(f"{island.name} prepares {message['steps']} batches, others another number")
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
            "loss_sum": sum(report["loss"] for report in reports.values()),
            "norm": reports[self.leader]["norm"],
            "out_of_range": any(report["out_of_range"] for report in reports.values()),
            **{key: sum(report[key] for report in reports.values()) for key in SUMMED},
            "rows": {name: report["samples"] for name, report in reports.items()},
            "drifted": self._drifted(reports),
        }
        self.batch += reports[self.leader]["steps"]
        self.failing_since = None
        for one in present:
            one.prepared = None
            one.has_state = True
            one.is_leaving = reports[one.name]["leaving"]
        self.is_whole = message["next_is_whole"] = any(report["asks_for_whole"] for report in reports.values())
        message["next"], too_many = self._next_view(message["drifted"])
        for one in present:
            self._send(one, message, rank_0_only=True)
        self._send_away(too_many)

    def _is_needed(self, island: Island) -> bool:
        """Answer an island that asks to leave between two commits: the last one has to commit its batches first."""
        is_last = self.members == [island.name]
        self._send(island, {"kind": "left", "epoch": self.epoch, "is_last": is_last}, rank_0_only=True)
        return is_last

    def _drifted(self, reports: Mapping[str, Message]) -> list[str]:
        """Return the islands whose weights differed from the leader's before this batch."""
        digests = {name: report["weights"] for name, report in reports.items() if report["weights"]}
        expected = digests.get(self.leader)
        drifted = [name for name, digest in digests.items() if expected and digest != expected]
        if drifted:
            self.log(f"batch {self.batch + 1}: other weights than {self.leader}'s on {', '.join(drifted)}")
        return drifted

    def _next_view(self, drifted: list[str]) -> tuple[Message | None, list[str]]:
        """Return the view from the next batch on, None if it stays; and members left out to make a batch divisible.

        Leaving islands go, waiting ones join, and rows may move. Drifted islands get the leader's state, as joiners do.
        """
        staying = [name for name in self.members if not self.islands[name].is_leaving]
        if not staying:
            return None, []  # the last ones save and leave by themselves
        others = (one for name, one in self.islands.items() if name not in self.members)
        joiners = self._fitting(staying, [one.name for one in others if one.is_whole and not one.is_leaving])
        too_many: list[str] = []
        if len(staying) < len(self.members) and not joiners:
            fitting = self._best_choice(staying)
            too_many = [name for name in staying if name not in fitting]
            staying = fitting
        if self.leader in staying:
            joiners += [name for name in staying if name in drifted]
            staying = [name for name in staying if name not in drifted]
        if joiners or len(staying) < len(self.members):
            return self._view(staying, joiners), too_many
        if self._is_worth_moving():
            return self._view(staying, []), []
        return None, []

    def _is_worth_moving(self) -> bool:
        """Return whether other rows or owners would make batches of the same members clearly faster."""
        num_batches = self.batch - self.moved_at
        if num_batches < BATCHES_UNTIL_SURE:
            return False
        paces, links = self._paces(self.members), self._links()
        worth = WORTH_MOVING if num_batches >= BATCHES_BETWEEN_MOVES else WORTH_MOVING_SOON
        if latest_seconds(divide(self.num_rows, paces), paces) <= worth * latest_seconds(self.row_indices, paces):
            return True
        present = busy_seconds(self.shares, links)
        return num_batches >= BATCHES_BETWEEN_MOVES and (
            busy_seconds(divide_sum(links), links) < WORTH_MOVING_SOON * present
        )

    def _fail(self, reason: str, now: float) -> None:
        """Repeat a batch that failed while all islands are alive. If it keeps failing, evict the smallest: no island
        can tell whose link is dead."""
        self.failing_since = now if self.failing_since is None else self.failing_since
        if now - self.failing_since < MAX_SILENCES * self.silence_seconds - STALL_SLACK_SECONDS:
            self._repeat(reason)
            return
        others = [name for name in self.members if name != self.leader]
        smallest = min(others or self.members, key=lambda name: len(self.row_indices[name]))
        self._evict(smallest, f"links of {smallest} are dead")

    def _repeat(self, reason: str) -> None:
        """Begin a new epoch of the same batch, with the members that can divide it."""
        self.log(f"batch {self.batch + 1} is repeated: {reason}")
        fitting = self._best_choice(self.members)
        self._send_away([name for name in self.members if name not in fitting])
        view = self._view(fitting, [])
        for name in self.members:
            self._send(self.islands[name], view)

    def _view(self, members: list[str], joiners: list[str]) -> Message:
        """Begin a new epoch and return its view. New members and old ones receive each other's descriptions."""
        before, self.members, self.joiners = self.members, sorted([*members, *joiners]), joiners
        strangers = [name for name in self.members if name not in before]
        for name in strangers:
            for other in self.members:
                self._introduce(other, to=name)
                if other not in strangers:
                    self._introduce(name, to=other)
        if self.leader not in self.members:
            self.leader = min(self.members, key=lambda name: (not self.islands[name].has_state, name))
        self.epoch += 1
        self.moved_at = self.batch
        self.progress = (None, math.inf)
        for name in self.members:
            self.islands[name].prepared = None
        self.row_indices = divide(self.num_rows, self._paces(self.members))
        rows = ", ".join(f"{name} {len(indices)}" for name, indices in self.row_indices.items())
        self.log(f"epoch {self.epoch}, batch {self.batch + 1}: {rows}; {self.leader} saves")
        launches = {name: self.islands[name].launch for name in self.members}
        source = self.leader if joiners else ""
        self.shares = divide_sum(self._links())
        who = (launches, self.row_indices, self.leader, source, joiners, self.shares)
        view = View(self.epoch, self.batch, *who, self.is_whole).as_message()
        for name in strangers:
            self._send(self.islands[name], view)
        return view

    # ----------------------------------------------------------------------------------------------- membership

    def _begin_if_all_here(self) -> None:
        """Begin once `num_founders` islands are whole. Islands that are behind get the state of the furthest."""
        whole = sorted(name for name, one in self.islands.items() if one.is_whole)
        if not whole or len(whole) < self.num_founders:
            return
        self.num_rows = self.islands[whole[0]].facts["rows"]
        if reason := self._why_not(whole):
            for name in whole:
                self._refuse(self.islands[name], reason)
            return
        self.batch = max(self.islands[name].batch for name in whole)
        first = [name for name in whole if self.islands[name].batch == self.batch]
        self.leader = first[0]
        for name in first:
            self.islands[name].has_state = True
        self._view(first, [name for name in whole if name not in first])

    def _refusal(self, island: Island) -> str:
        """Return why this island cannot take part; empty if it can."""
        common = ("fingerprints", "rows", "microbatch", "unit", "batch", "data_ranks")
        if any(hello[key] != island.facts[key] for hello in island.hellos.values() for key in common):
            return f"{island.name}: its ranks differ in their configuration"
        tensors = _tensors_of(island)
        if reason := self._why_not([island.name], island.facts["rows"]):
            return reason
        for name, other in self.islands.items():
            if name == island.name or not other.is_whole:
                continue
            mine, theirs = island.facts["fingerprints"], other.facts["fingerprints"]
            differing = sorted(key for key in {*mine, *theirs} if mine.get(key) != theirs.get(key))
            if differing or island.facts["rows"] != other.facts["rows"]:
                what = ", ".join(differing) or "global_train_batch_size"
                return f"{island.name} and {name} differ in {what}; islands train one run"
            if _tensors_of(other) != tensors:
                return f"{island.name} and {name} differ in their parameters; islands train one run"
            if problem := _out_of_reach(island, other) or _out_of_reach(other, island):
                return problem
        return ""

    def _fitting(self, members: list[str], waiting: list[str]) -> list[str]:
        """Return waiting islands with which a batch can be divided. The others receive the reason and wait on."""
        fitting: list[str] = []
        while more := next(
            (n for n in waiting if n not in fitting and self._can_divide([*members, *fitting, n])), None
        ):
            fitting.append(more)
        for island in [self.islands[name] for name in waiting if name not in fitting]:
            reason = self._why_not([*members, *fitting, island.name])
            if reason != island.wait_reason:
                island.wait_reason = reason
                self._send(island, {"kind": "waits", "reason": reason}, rank_0_only=True)
                self.log(f"{island.name} waits until other islands are here: {reason}")
        return fitting

    def _best_choice(self, members: list[str]) -> list[str]:
        """Return the fastest combination that can divide a batch. One with the run's weights comes first."""
        if self._can_divide(members):
            return list(members)
        rates = {name: pace.rate for name, pace in self._paces(members).items()}
        tried = sorted(members, key=lambda name: -rates[name])[:MAX_TRIED]
        choices = [choice for count in range(1, len(tried) + 1) for choice in combinations(tried, count)]
        choices.sort(key=lambda c: (any(self.islands[n].has_state for n in c), sum(rates[n] for n in c)), reverse=True)
        return sorted(next(choice for choice in choices if self._can_divide(choice)))  # each island can divide it alone

    def _can_divide(self, names: Sequence[str]) -> bool:
        return not self._why_not(names)

    def _why_not(self, names: Sequence[str], num_rows: int | None = None) -> str:
        """Return why these islands cannot divide a batch; empty if they can."""
        try:
            divide(num_rows or self.num_rows, self._paces(names))
        except ConfigError as error:
            return str(error)
        return ""

    def _paces(self, names: Sequence[str]) -> dict[str, Pace]:
        """Return paces: by measured rates if all islands have one, else by `islands.weight`."""
        islands = [self.islands[name] for name in names]
        are_measured = all(one.rate.value for one in islands)
        rates = [float((are_measured and one.rate.value) or one.facts["weight"]) for one in islands]
        paces = zip(islands, rates, strict=True)
        return {one.name: _pace(one.facts, rate) for one, rate in paces}

    def _links(self) -> dict[str, float]:
        """Return the rates of the members' links; all equal until all are measured."""
        rates = {name: self.islands[name].link.value for name in self.members}
        return {name: rate if rate and all(rates.values()) else 1.0 for name, rate in rates.items()}

    def _measure(self, present: list[Island]) -> None:
        for one in present:
            assert one.prepared is not None
            seconds, steps = float(one.prepared["seconds"]), one.prepared["steps"]
            # Rows of local steps are those of the view in which the first of them began.
            is_round = steps > 1 or one.prepared["again"]
            rows = one.prepared["samples"] / steps if is_round else len(self.row_indices[one.name])
            if MIN_BATCH_SECONDS < seconds < math.inf and rows:
                one.rate.add(rows / seconds)
            if one.prepared["link"] > 0:
                one.link.add(float(one.prepared["link"]))

    def _check_for_stall(self, now: float) -> None:
        """Fail the batch if all members exchange and no byte moves: a link is dead while both its ends live."""
        reports = [report for name in self.members for report in self.islands[name].phases.values()]
        size = sum(self.islands[name].size for name in self.members)
        phases = {phase for phase, _ in reports}
        is_exchanging = len(reports) == size and "exchange" in phases and "compute" not in phases
        seen = (self.epoch, self.batch, tuple(reports)) if is_exchanging else None
        if seen is None or seen != self.progress[0]:
            self.progress = (seen, now)
            return
        if now - self.progress[1] <= self.silence_seconds:
            return
        self.failing_since = self.progress[1] if self.failing_since is None else self.failing_since
        self._fail("a link is dead", now)

    # ------------------------------------------------------------------------------------------ sending, removing

    def _send(self, island: Island, message: Message, *, rank_0_only: bool = False) -> None:
        ranks = [0] if rank_0_only else sorted(island.connections)
        self.outbox.extend((island.connections[rank], message) for rank in ranks)

    def _introduce(self, name: str, *, to: str) -> None:
        for message in self.islands[name].describe():
            self._send(self.islands[to], message, rank_0_only=True)

    def _refuse(self, island: Island, reason: str) -> None:
        self._send(island, {"kind": "refused", "reason": reason})
        self._forget(island)
        self.log(f"refused: {reason}")

    def _reject(self, connection: int, reason: str) -> None:
        """Evict one rank that is not registered."""
        self.outbox.append((connection, {"kind": "evicted", "reason": reason}))
        self.dropped.append(connection)
        self.log(f"turned away: {reason}")

    def _send_away(self, names: list[str], reason: str = "") -> None:
        """Evict islands, which may come back. The caller decides how the others carry on."""
        why = reason or self._why_not(sorted({*self.members, *names})) + "; the other islands carry on"
        for name in names:
            self._send(self.islands[name], {"kind": "evicted", "reason": why})
            self._forget(self.islands[name])
            self.members = [member for member in self.members if member != name]
            self.log(f"{name} leaves: {why}")

    def _forget(self, island: Island) -> None:
        del self.islands[island.name]
        self.past.append((island.name, island.launch))
        for connection in island.connections.values():
            del self.senders[connection]
            self.dropped.append(connection)

    def _evict(self, name: str, reason: str) -> None:
        self._send(self.islands[name], {"kind": "evicted", "reason": reason})
        self._lose(name, reason)

    def _lose(self, name: str, reason: str) -> None:
        self.log(reason)
        self._forget(self.islands[name])
        if name not in self.members:
            return
        self.members.remove(name)
        self.failing_since = None
        if not self.members:
            self._restart()
        elif not self.is_over:
            self._repeat(f"without {name}")

    def _restart(self) -> None:
        """Start over without members. Evict waiting islands that may lack the newest checkpoint."""
        reason = f"the run has ended after batch {self.batch}" if self.is_over else "no island is left"
        self.log(reason if self.is_over else f"{reason}; the next ones begin at the newest checkpoint")
        self.leader, self.row_indices, self.is_whole = "", {}, False
        self.newest_before_restart = self.newest_connection
        behind = [name for name, one in self.islands.items() if one.batch < self.batch or self.is_over]
        self._send_away(behind, reason)
        self.is_over = False
        self._begin_if_all_here()


def _out_of_reach(island: Island, other: Island) -> str:
    """Return why the other island's ranks cannot reach this one's; empty if no reason is known."""
    hosts = {hello.get("host") for hello in other.hellos.values()}
    for hello in island.hellos.values():
        address = hello["address"][0]
        if ip_address(address).is_loopback and hosts - {hello.get("host")}:
            return (
                f"{island.name} listens at {address}, where {other.name} on another host does not reach it; give "
                "islands.address an address of its host"
            )
    return ""


def _pace(facts: Message, rate: float) -> Pace:
    num_ranks = facts["data_ranks"]
    return Pace(num_ranks, facts["microbatch"], rate, num_ranks * facts["unit"])


def _tensors_of(island: Island) -> dict[str, int]:
    """Return each tensor's number of elements: its ranks hold boxes that are alike or do not overlap."""
    boxes = {(name, str(box)): box for hello in island.hellos.values() for name, box in hello["boxes"].items()}
    sizes: dict[str, int] = {}
    for (name, _), (_, lengths) in boxes.items():
        sizes[name] = sizes.get(name, 0) + math.prod(lengths)
    return sizes
