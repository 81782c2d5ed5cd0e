"""The protocol of islands as a state machine: which islands train together, and which batches count.

It has no tensors, no clock and no sockets. `serve.py` calls a method for each event: `note_connection`, `hello`,
`receive`, `lose` and `tick`. These append messages to `outbox`, and connections that must be closed to `dropped`.

Commits are two-phase. When every member of a view has sent `prepared`, all receive `commit`, and the batch counts. If
anything fails before that, a new epoch begins with a new view (`member.View`): rows are divided again, and the batch is
repeated. Weights have not been touched by then.

With local steps an island trains several batches between two commits, which its reports say in `steps`. These batches
are committed together, and a repeat repeats their exchange alone.

In this file, an island is *here* once all of its ranks have sent their hello. It is a *member* if it is in the present
view, and it *waits* until then. The *leader* is the member that saves, and sends its state to islands that join.
"""

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from llmfoundry_islands.coordination.choice import (
    choose_joiners,
    choose_members,
    paces_of,
    why_not_divisible,
    why_refused,
)
from llmfoundry_islands.coordination.division import divide, latest_seconds
from llmfoundry_islands.coordination.island import Island
from llmfoundry_islands.coordination.member import View
from llmfoundry_islands.coordination.messages import FROM_RANK, BadMessageError, Message, check_message
from llmfoundry_islands.coordination.owners import busy_seconds, divide_sum

WORTH_MOVING = 0.95
"""Rows move if a batch is expected to take less than this fraction of its present time."""
BATCHES_BETWEEN_MOVES = 10
WORTH_MOVING_SOON = 0.85
"""Rows move after only BATCHES_UNTIL_SURE if a batch is expected to take less than this fraction. The owners of sums
change, too, if the slowest link is expected to."""
BATCHES_UNTIL_SURE = 2
STALL_SLACK_SECONDS = 1.0
"""Allowance for the new epoch between two silences, which delays heartbeats."""
MAX_SILENCES = 2
"""A batch may fail for this many `silence_seconds` with no island lost. Then the smallest island is evicted."""
SECONDS_TO_BE_WHOLE = 30.0
"""Longest time between the first and the last hello of an island. A later rank counts as frozen."""
MAX_PAST = 1000
"""Number of ended launches that are remembered."""
MAX_TICK_SECONDS = 1.0
"""If more time passes between two ticks, this process was suspended, and no rank counts as silent for it."""
MIN_BATCH_SECONDS = 1e-6
"""Shortest credible time for a batch."""
SUMMED = ("bad", "samples", "tokens", "losses", "digest", "again")
"""Fields of reports whose sums over islands are in the commit."""


@dataclass(frozen=True)
class Progress:
    """What all members' ranks have last said while they exchange, to notice a dead link."""

    state: Any = None
    """Epoch, batch, and each rank's phase and bytes. None unless all members exchange."""
    since: float = 0.0
    """Time at which `state` changed."""


class NextMembers(NamedTuple):
    """The islands that take part from the next batch on."""

    staying: list[str]
    """Members that go on with the state that they have."""
    joiners: list[str]
    """Islands that get the leader's state: new ones, and members whose weights have drifted."""
    left_out: list[str]
    """Members to evict, because a batch cannot be divided with them."""


class Coordinator:
    """Membership and commits of one run.

    Connections have numbers, in the order in which they were made. Methods take the present time as `now`, in seconds.
    """

    def __init__(self, num_founders: int, silence_seconds: float, log: Callable[[str], None] = lambda line: None):
        """Wait for `num_founders` islands to begin with. A rank counts as dead after `silence_seconds` of silence.

        `log` is called with each line for the user.
        """
        self.num_founders = num_founders
        self.silence_seconds = silence_seconds
        self.log = log
        self.islands: dict[str, Island] = {}
        """All islands that have at least one rank connected."""
        self.senders: dict[int, tuple[Island, int]] = {}
        """Connection -> its island and rank."""
        self.members: list[str] = []
        """The members of the view, in order of names."""
        self.epoch = 0
        self.batch = 0
        """Number of committed batches."""
        self.num_rows = 0
        """Rows of a batch."""
        self.is_over = False
        """A member has finished the run, and the others are about to."""
        self.leader = ""
        self.row_indices: dict[str, range] = {}
        """Member -> its rows of each batch."""
        self.shares: dict[str, int] = {}
        """Member -> its share of the sum, see `owners`."""
        self.joiners: list[str] = []
        """New members of the view, to which the leader sends its state."""
        self.is_whole = False
        """With local steps: the next exchange is of all weights. An island that has to save has asked for that."""
        self.failing_since: float | None = None
        """Time of the first failed exchange of this batch since an island was lost."""
        self.view_began_at_batch = 0
        self.progress = Progress()
        self.ended_launches: deque[tuple[str, str]] = deque(maxlen=MAX_PAST)
        """Islands and launches that have ended. They cannot come back."""
        self.newest_connection = -1
        self.newest_before_restart = -1
        """The newest connection when the last member left. Ranks up to it may lack the newest checkpoint."""
        self.ticked_at = 0.0
        self.outbox: list[tuple[int, Message]] = []
        """Connections, and the messages to send on them."""
        self.dropped: list[int] = []
        """Connections to close."""

    # --------------------------------------------------------------------------------------------------- events

    def note_connection(self, connection: int) -> None:
        """Note that a rank has connected. It builds its model before it sends its hello."""
        self.newest_connection = max(self.newest_connection, connection)

    def hello(self, connection: int, message: Message, now: float) -> None:
        """Register a rank. When it is the last one of its island, the island is here, and may begin or wait.

        A rank of an ended launch is rejected, and a newer launch of an island replaces an older one. Raises
        BadMessageError for a malformed message, or a rank that is registered already.
        """
        check_message(message, {"hello": FROM_RANK["hello"]})
        self.note_connection(connection)
        name = message["island"]
        launch = message["launch"]
        rank = message["rank"]
        present = self.islands.get(name)
        is_other_launch = present is not None and present.launch != launch

        # Only the newest launch of an island takes part.
        is_older_launch = present is not None and is_other_launch and connection < min(present.connections.values())
        if (name, launch) in self.ended_launches or is_older_launch:
            self._reject(connection, f"this launch of {name} is over, or a newer one is here")
            return

        # After a restart, an island that had connected before may have restored an older checkpoint.
        is_behind = message["batch"] < self.batch
        if not self.members and connection <= self.newest_before_restart and is_behind:
            reason = f"{name} may not have the newest checkpoint"
            self._reject(connection, reason)
            self.ended_launches.append((name, launch))
            if present is not None and not is_other_launch:
                self._evict(name, reason)
            return

        if is_other_launch:
            self._evict(name, f"{name} has been launched again")
            present = None
        island = present or Island(name=name, launch=launch, size=message["size"], first_hello_at=now)
        if island.size != message["size"] or rank in island.connections:
            raise BadMessageError(f"hello of rank {rank} of {name}, which is here")
        self.islands[name] = island
        island.hellos[rank] = message
        island.connections[rank] = connection
        island.received_at[rank] = now
        self.senders[connection] = (island, rank)
        if island.has_all_ranks:
            self._welcome(island)

    def _welcome(self, island: Island) -> None:
        """Refuse an island that is here now, or begin the run if it has not begun. Otherwise the island waits."""
        refusal = why_refused(island, self.islands)
        if refusal:
            self._refuse(island, refusal)
            return
        self.log(f"{island.name} is here, with {island.size} ranks, at batch {island.batch}")
        if not self.members:
            self._begin_if_all_here()

    def receive(self, connection: int, message: Message, now: float) -> None:
        """Handle a message of a registered rank. Raises BadMessageError."""
        sender = self.senders.get(connection)
        if sender is None:
            return  # evicted in the meantime
        check_message(message, FROM_RANK)
        island, rank = sender
        island.received_at[rank] = now
        kind = message["kind"]
        if kind == "beat":
            island.phases[rank] = (message["phase"], message["bytes"])
        elif kind == "prepared":
            self._note_report(island, message, now)
        elif kind == "state":
            self._pass_on_state(island, message)
        elif kind == "leave":
            self._handle_leave(island, message)
        else:
            raise BadMessageError("a second hello")

    def _pass_on_state(self, island: Island, message: Message) -> None:
        """Send the leader's state to the joiners. A state of an earlier view is ignored."""
        if message["epoch"] == self.epoch and island.name == self.leader:
            for name in self.joiners:
                self._send(self.islands[name], message, rank_0_only=True)

    def _handle_leave(self, island: Island, message: Message) -> None:
        """Let an island leave. `finished` in its message says that the run is over.

        With `asks` the island leaves between two commits, and is told whether it is the last member. The last one
        stays, because it has to commit its batches first.
        """
        if message.get("finished") is True and island.name in self.members:
            self.is_over = True
        if message.get("asks") is True:
            is_last = self.members == [island.name]
            self._send(island, {"kind": "left", "epoch": self.epoch, "is_last": is_last}, rank_0_only=True)
            if is_last:
                return
        reason = f"{island.name} has finished" if self.is_over else f"{island.name} leaves"
        self._lose(island.name, reason)

    def lose(self, connection: int) -> None:
        """Handle the end of a connection. The island of its rank is evicted, if it is still here."""
        sender = self.senders.get(connection)
        if sender is not None:
            island, rank = sender
            self._evict(island.name, f"rank {rank} of {island.name} is gone")

    def tick(self, now: float) -> None:
        """Evict islands with silent or missing ranks, and check for dead links. Call it several times a second."""
        seconds_since_tick = now - self.ticked_at
        was_suspended = self.ticked_at and seconds_since_tick > MAX_TICK_SECONDS
        if was_suspended:
            for island in self.islands.values():
                island.received_at = {rank: time + seconds_since_tick for rank, time in island.received_at.items()}
            self.progress = Progress()
        self.ticked_at = now

        for island in list(self.islands.values()):
            if self.islands.get(island.name) is not island:
                continue  # the eviction of another island has ended it
            silent_ranks = [rank for rank, time in island.received_at.items() if now - time > self.silence_seconds]
            is_overdue = now - island.first_hello_at > SECONDS_TO_BE_WHOLE
            if silent_ranks:
                self._evict(island.name, f"rank {silent_ranks[0]} of {island.name} is silent")
            elif not island.has_all_ranks and is_overdue:
                num_missing = island.size - len(island.connections)
                self._evict(island.name, f"{num_missing} of {island.size} ranks of {island.name} do not come")
        self._check_for_stall(now)

    # ------------------------------------------------------------------------------------------------ the decision

    def _note_report(self, island: Island, message: Message, now: float) -> None:
        """Note an island's report in `prepared`. When all members have reported, commit the batch or repeat it.

        Raises BadMessageError if the report is of another batch, or of another number of batches than the others'.
        """
        if island.name not in self.members or message["epoch"] != self.epoch:
            return  # a report of an earlier view
        if message["batch"] != self.batch:
            raise BadMessageError(f"{island.name} prepares batch {message['batch']}, not {self.batch}")
        island.prepared = message
        reports = {}
        for name in self.members:
            report = self.islands[name].prepared
            if report is None:
                return
            reports[name] = report
        if any(report["steps"] != message["steps"] for report in reports.values()):
            raise BadMessageError(f"{island.name} prepares {message['steps']} batches, others another number")
        if all(report["ok"] for report in reports.values()):
            self._commit(reports)
        else:
            self._fail("an exchange failed", now)

    def _commit(self, reports: Mapping[str, Message]) -> None:
        """Commit the batches of the members' reports: tell all members the sums, and the view that follows.

        Changes `batch`, the members' rates and states, and `is_whole`. If other islands take part from now on, or rows
        move, begins a new epoch (`_begin_epoch`).
        """
        # Count the batches.
        members = [self.islands[name] for name in self.members]
        for island in members:
            self._measure(island, reports[island.name])
        message = self._combine(reports)
        self.batch += reports[self.leader]["steps"]
        self.failing_since = None
        for island in members:
            island.prepared = None
            island.has_state = True
            island.is_leaving = reports[island.name]["leaving"]
        self.is_whole = any(report["asks_for_whole"] for report in reports.values())
        message["next_is_whole"] = self.is_whole

        # Change the view. If every member leaves, they save and end by themselves.
        message["next"] = None
        next_members = self._choose_next_members(message["drifted"])
        if next_members.staying or next_members.joiners:
            are_other_members = bool(next_members.joiners) or len(next_members.staying) < len(self.members)
            if are_other_members or self._is_worth_moving():
                message["next"] = self._begin_epoch(next_members.staying, next_members.joiners)

        # Members that are left out also get the commit, and are evicted after it.
        for island in members:
            self._send(island, message, rank_0_only=True)
        self._send_away(next_members.left_out)

    def _combine(self, reports: Mapping[str, Message]) -> Message:
        """Return the commit for these reports, without what follows (`next` and `next_is_whole`)."""
        total_weight = sum(report["weight"] for report in reports.values())
        mean_loss = sum(report["loss"] * (report["weight"] / max(total_weight, 1)) for report in reports.values())
        sums = {key: sum(report[key] for report in reports.values()) for key in SUMMED}
        return {
            "kind": "commit",
            "epoch": self.epoch,
            "batch": self.batch,
            "loss": mean_loss,
            "loss_sum": sum(report["loss"] for report in reports.values()),
            "norm": reports[self.leader]["norm"],
            "out_of_range": any(report["out_of_range"] for report in reports.values()),
            **sums,
            "rows": {name: report["samples"] for name, report in reports.items()},
            "drifted": self._drifted(reports),
        }

    def _drifted(self, reports: Mapping[str, Message]) -> list[str]:
        """Return the islands whose weights differed from the leader's before this batch, and log them.

        Islands report a digest of their weights only with some batches, and nobody has drifted with the others.
        """
        leaders_digest = reports[self.leader]["weights"]
        if not leaders_digest:
            return []
        drifted = []
        for name, report in reports.items():
            if report["weights"] and report["weights"] != leaders_digest:
                drifted.append(name)
        if drifted:
            self.log(f"batch {self.batch + 1}: other weights than {self.leader}'s on {', '.join(drifted)}")
        return drifted

    def _choose_next_members(self, drifted: list[str]) -> NextMembers:
        """Choose who takes part from the next batch on: leaving islands go, and waiting ones join if they fit.

        Islands in `drifted` get the leader's state, as joiners do. Islands that have to wait on are told so. If all
        members leave, nobody takes part.
        """
        staying = [name for name in self.members if not self.islands[name].is_leaving]
        if not staying:
            return NextMembers([], [], [])

        waiting = []
        for name, island in self.islands.items():
            if name not in self.members and island.has_all_ranks and not island.is_leaving:
                waiting.append(name)
        joiners = choose_joiners(staying, waiting, self.islands, self.num_rows)
        self._tell_those_who_wait([*staying, *joiners], [name for name in waiting if name not in joiners])

        # The islands that stay may be unable to divide a batch without those that go.
        left_out: list[str] = []
        some_leave = len(staying) < len(self.members)
        if some_leave and not joiners:
            chosen = choose_members(staying, self.islands, self.num_rows)
            left_out = [name for name in staying if name not in chosen]
            staying = chosen

        # An island that has drifted gets the leader's state, unless the leader itself goes.
        if self.leader in staying:
            joiners += [name for name in staying if name in drifted]
            staying = [name for name in staying if name not in drifted]
        return NextMembers(staying, joiners, left_out)

    def _is_worth_moving(self) -> bool:
        """Return whether other rows or owners would make batches of the same members clearly faster."""
        num_batches = self.batch - self.view_began_at_batch
        if num_batches < BATCHES_UNTIL_SURE:
            return False
        has_waited = num_batches >= BATCHES_BETWEEN_MOVES
        paces = paces_of(self.members, self.islands)
        expected_seconds = latest_seconds(divide(self.num_rows, paces), paces)
        present_seconds = latest_seconds(self.row_indices, paces)
        fraction = WORTH_MOVING if has_waited else WORTH_MOVING_SOON
        if expected_seconds <= fraction * present_seconds:
            return True

        links = self._links()
        present_busy = busy_seconds(self.shares, links)
        return has_waited and busy_seconds(divide_sum(links), links) < WORTH_MOVING_SOON * present_busy

    def _fail(self, reason: str, now: float) -> None:
        """Repeat a batch that failed while all islands are alive.

        If it keeps failing, evict the member with the fewest rows, because no island can tell which link is dead. The
        leader stays.
        """
        if self.failing_since is None:
            self.failing_since = now
        patience_seconds = MAX_SILENCES * self.silence_seconds - STALL_SLACK_SECONDS
        if now - self.failing_since < patience_seconds:
            self._repeat(reason)
            return
        candidates = [name for name in self.members if name != self.leader] or self.members
        smallest = min(candidates, key=lambda name: len(self.row_indices[name]))
        self._evict(smallest, f"links of {smallest} are dead")

    def _repeat(self, reason: str) -> None:
        """Begin a new epoch of the same batch, with the members that can divide it. The other members are evicted."""
        self.log(f"batch {self.batch + 1} is repeated: {reason}")
        chosen = choose_members(self.members, self.islands, self.num_rows)
        self._send_away([name for name in self.members if name not in chosen])
        view = self._begin_epoch(chosen, [])
        for name in self.members:
            self._send(self.islands[name], view)

    def _begin_epoch(self, members: list[str], joiners: list[str]) -> Message:
        """Begin a new epoch with these members and joiners, and return its view as a message.

        Sets all attributes that belong to a view: `members`, `joiners`, `leader`, `epoch`, `row_indices` and `shares`.
        New members and old ones receive each other's descriptions, and new members the view. The caller sends it to the
        old ones: by itself, or in a commit.
        """
        # Introduce new members. Descriptions come before the view, because a rank connects to all when it gets that.
        previous_members = self.members
        self.members = sorted([*members, *joiners])
        self.joiners = joiners
        new_members = [name for name in self.members if name not in previous_members]
        for name in new_members:
            for other in self.members:
                self._introduce(other, to=name)
                if other not in new_members:
                    self._introduce(name, to=other)

        # The leader stays as long as it is a member. Its successor has the run's state, if any member has it.
        if self.leader not in self.members:
            self.leader = min(self.members, key=lambda name: (not self.islands[name].has_state, name))

        # Divide the rows, and forget what was reported for the view before.
        self.epoch += 1
        self.view_began_at_batch = self.batch
        self.progress = Progress(None, math.inf)
        for name in self.members:
            self.islands[name].prepared = None
        self.row_indices = divide(self.num_rows, paces_of(self.members, self.islands))
        self.shares = divide_sum(self._links())
        num_rows = ", ".join(f"{name} {len(indices)}" for name, indices in self.row_indices.items())
        self.log(f"epoch {self.epoch}, batch {self.batch + 1}: {num_rows}; {self.leader} saves")

        view = View(
            epoch=self.epoch,
            batch=self.batch,
            members={name: self.islands[name].launch for name in self.members},
            row_indices=self.row_indices,
            leader=self.leader,
            source=self.leader if joiners else "",
            joiners=joiners,
            shares=self.shares,
            is_whole=self.is_whole,
        )
        message = view.as_message()
        for name in new_members:
            self._send(self.islands[name], message)
        return message

    # ----------------------------------------------------------------------------------------------- membership

    def _begin_if_all_here(self) -> None:
        """Begin once `num_founders` islands are here, or refuse them if they cannot divide a batch.

        Islands that are behind get the state of those that are furthest. The first of these by name is the leader.
        """
        founders = sorted(name for name, island in self.islands.items() if island.has_all_ranks)
        if not founders or len(founders) < self.num_founders:
            return
        self.num_rows = self.islands[founders[0]].facts["rows"]
        reason = why_not_divisible(founders, self.islands, self.num_rows)
        if reason:
            for name in founders:
                self._refuse(self.islands[name], reason)
            return
        self.batch = max(self.islands[name].batch for name in founders)
        furthest = [name for name in founders if self.islands[name].batch == self.batch]
        self.leader = furthest[0]
        for name in furthest:
            self.islands[name].has_state = True
        self._begin_epoch(furthest, [name for name in founders if name not in furthest])

    def _tell_those_who_wait(self, members: list[str], waiting: list[str]) -> None:
        """Tell each waiting island why it cannot join the members, if the reason is a new one. Sets `wait_reason`."""
        for name in waiting:
            island = self.islands[name]
            reason = why_not_divisible([*members, name], self.islands, self.num_rows)
            if reason != island.wait_reason:
                island.wait_reason = reason
                self._send(island, {"kind": "waits", "reason": reason}, rank_0_only=True)
                self.log(f"{name} waits until other islands are here: {reason}")

    def _links(self) -> dict[str, float]:
        """Return the rates of the members' links in bytes per second. They are all 1 until every one is measured."""
        rates = {name: self.islands[name].link.value for name in self.members}
        if not all(rates.values()):
            return dict.fromkeys(self.members, 1.0)
        return {name: float(rate) for name, rate in rates.items() if rate is not None}

    def _measure(self, island: Island, report: Message) -> None:
        """Add a report's measurements to the rates of an island and of its link."""
        seconds = float(report["seconds"])  # of one batch
        # Rows of local steps are those of the view in which the first of them began, with those trained again.
        is_of_local_steps = report["steps"] > 1 or report["again"]
        if is_of_local_steps:
            num_rows = report["samples"] / report["steps"]
        else:
            num_rows = len(self.row_indices[island.name])
        if MIN_BATCH_SECONDS < seconds < math.inf and num_rows:
            island.rate.add(num_rows / seconds)
        if report["link"] > 0:
            island.link.add(float(report["link"]))

    def _check_for_stall(self, now: float) -> None:
        """Fail the batch if all members exchange, and no byte moves for `silence_seconds`.

        A link is dead then, while both of its ends live. Ranks that compute, or wait for their own island, may take any
        time. Sets `progress`.
        """
        reports = [report for name in self.members for report in self.islands[name].phases.values()]
        num_ranks = sum(self.islands[name].size for name in self.members)
        phases = {phase for phase, _ in reports}
        is_exchanging = len(reports) == num_ranks and "exchange" in phases and "compute" not in phases
        state = (self.epoch, self.batch, tuple(reports)) if is_exchanging else None
        if state is None or state != self.progress.state:
            self.progress = Progress(state, now)
            return
        if now - self.progress.since <= self.silence_seconds:
            return
        if self.failing_since is None:
            self.failing_since = self.progress.since
        self._fail("a link is dead", now)

    # ------------------------------------------------------------------------------------------ sending, removing

    def _send(self, island: Island, message: Message, *, rank_0_only: bool = False) -> None:
        """Put a message for all ranks of an island into the outbox, in order of ranks, or for its rank 0 alone."""
        ranks = [0] if rank_0_only else sorted(island.connections)
        self.outbox.extend((island.connections[rank], message) for rank in ranks)

    def _introduce(self, name: str, *, to: str) -> None:
        """Send the descriptions of an island's ranks to rank 0 of another island."""
        for message in self.islands[name].describe():
            self._send(self.islands[to], message, rank_0_only=True)

    def _refuse(self, island: Island, reason: str) -> None:
        """Send an island away that can never take part as it is configured."""
        self._send(island, {"kind": "refused", "reason": reason})
        self._forget(island)
        self.log(f"refused: {reason}")

    def _reject(self, connection: int, reason: str) -> None:
        """Evict one rank that is not registered."""
        self.outbox.append((connection, {"kind": "evicted", "reason": reason}))
        self.dropped.append(connection)
        self.log(f"turned away: {reason}")

    def _send_away(self, names: list[str], reason: str = "") -> None:
        """Evict islands, which may come back. The caller decides how the others carry on.

        Without a `reason`, it is that the members and these islands cannot divide a batch together.
        """
        if not reason:
            together = sorted({*self.members, *names})
            reason = why_not_divisible(together, self.islands, self.num_rows) + "; the other islands carry on"
        for name in names:
            self._send(self.islands[name], {"kind": "evicted", "reason": reason})
            self._forget(self.islands[name])
            self.members = [member for member in self.members if member != name]
            self.log(f"{name} leaves: {reason}")

    def _forget(self, island: Island) -> None:
        """Drop an island's connections. Its launch cannot come back. `members` stays as it is."""
        del self.islands[island.name]
        self.ended_launches.append((island.name, island.launch))
        for connection in island.connections.values():
            del self.senders[connection]
            self.dropped.append(connection)

    def _evict(self, name: str, reason: str) -> None:
        """Send an island away, and carry on without it."""
        self._send(self.islands[name], {"kind": "evicted", "reason": reason})
        self._lose(name, reason)

    def _lose(self, name: str, reason: str) -> None:
        """Forget an island. If it was a member, repeat the batch without it, or start over if it was the last one."""
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
        """Start over when no member is left. Waiting islands that may lack the newest checkpoint are evicted.

        If the run is over, all waiting islands are evicted. Otherwise it begins again, at once if enough islands are
        here.
        """
        if self.is_over:
            reason = f"the run has ended after batch {self.batch}"
            self.log(reason)
        else:
            reason = "no island is left"
            self.log(f"{reason}; the next ones begin at the newest checkpoint")
        self.leader = ""
        self.row_indices = {}
        self.is_whole = False
        self.newest_before_restart = self.newest_connection
        outdated = [name for name, island in self.islands.items() if self.is_over or island.batch < self.batch]
        self._send_away(outdated, reason)
        self.is_over = False
        self._begin_if_all_here()
