"""One run on several islands at once: connects the training loop to coordinator and exchange.

It reads this island's rows, exchanges gradients, applies the coordinator's decision on each batch, transfers state to
islands that join, and decides who saves. The coordinator decides on membership and commits.

A batch counts on all islands or on none. Before the commit only gradients have changed: if it fails they are dropped,
and the batch is computed again with the rows of a new view.
"""

import math
import secrets
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import torch

from llmfoundry_islands.block import settings_of
from llmfoundry_islands.coordination.member import Lost, Member, View, start_coordinator_if_absent
from llmfoundry_islands.coordination.messages import Message, find_token, parse_address
from llmfoundry_islands.tensors.boxes import Tensors, rows_of, share_out
from llmfoundry_islands.tensors.exchange import Exchange, Ranks
from llmfoundry_islands.tensors.summing import Summing, SumPlan
from llmfoundry_islands.training.held_parts import HeldParts, read_boxes
from llmfoundry_islands.training.local_steps import Again
from llmfoundry_lite import devices
from llmfoundry_lite.checkpoint.state import local_tensor
from llmfoundry_lite.config.changes import trained_values
from llmfoundry_lite.config.schema import TrainConfig, as_dict
from llmfoundry_lite.errors import CheckpointError, ConfigError
from llmfoundry_lite.ranks.codec import decode_value, encode_value
from llmfoundry_lite.ranks.ending import Preempted
from llmfoundry_lite.ranks.exchange import all_reduce_max, all_reduce_sum, broadcast_json, raising_on_all_ranks
from llmfoundry_lite.ranks.rank import this_rank
from llmfoundry_lite.training.partners import Partners
from llmfoundry_lite.training.run_handle import Measured, RunHandle

POLL_SECONDS = 0.5
"""Interval at which a waiting launch checks whether it is asked to leave."""
LABELS_PER_BATCH = 64
"""Label 0 of a batch's transfers is the gradient; the others are the kinds of state."""


class Islands(Partners):
    """The other islands of this run, seen from one rank of this island."""

    takes_lease_at_start = False
    instead_of_saving = "the other islands carry on"
    overlaps = True
    """Gradients leave while the backward pass still makes others."""
    again = Again()
    """Rows of an earlier batch that are read here beside this batch's."""
    given_weights: Tensors | None = None
    """This rank's part of the weights that joiners receive; None: the model's."""

    def __init__(self, config: TrainConfig):
        self.config = settings_of(config)
        self.fingerprints = trained_values(as_dict(config))
        self.run_folder, self.num_rows = Path(config.run_folder), config.global_train_batch_size
        self.model = config.model
        self.by_tokens = config.accumulate_train_batch_on_tokens
        self.sends_early = self.overlaps and not config.sharding.offload_optimizer
        self.name = self.config.name
        self.rank, self.num_ranks, *_ = this_rank()
        self.member: Any = None
        """The connection to the coordinator; None before `connect`."""
        self.view = View(0, 0, {}, {}, "", "", [], {})
        self.next_view: View | None = None
        self.trained: dict[str, dict[str, Any]] = {}
        """Name -> machine of an island, and the rows that it has trained since this launch began."""
        self.measured: dict[str, float] = {}
        self.num_repeats = self.num_drifts = 0
        self.row_indices = range(0)
        """Rows of each batch that are read here."""
        self.data_ranks: dict[str, int] = {}
        self.summing: Summing | None = None
        """The sum of this batch's gradient; None between `exchange_gradient` and the next batch."""
        self.num_bytes = 0
        """Bytes sent and received by this island for the last batch."""
        self.weights = ""
        """Digest of the weights if this batch compares them; else empty."""
        self.tokens_elsewhere = 0

    # ----------------------------------------------------------------------------------------- joining and leaving

    def connect(self) -> None:
        """Connect to the coordinator, and listen for other islands. Raises ConfigError on all ranks."""
        coordinator = parse_address(self.config.coordinator, "islands.coordinator")
        with raising_on_all_ranks(ConfigError):
            if self.config.begin_with is not None and self.rank == 0:
                start_coordinator_if_absent(coordinator, self.config.begin_with, self.run_folder / "coordinator.txt")
        with raising_on_all_ranks(ConfigError):
            token = find_token()
            member = Member(coordinator, token, self.name, self._print_waiting)
            try:
                exchange = Exchange(self.name, self.rank, self.config.address, token)
            except (OSError, UnicodeError) as error:  # UnicodeError: not a host name
                reason = getattr(error, "strerror", None) or error
                raise ConfigError(f"islands.address: {self.config.address}: {reason}") from error
            member.on_newer_view = exchange.abort
            member.on_lost = lambda: exchange.abort(math.inf)
            member.count_bytes = lambda: exchange.num_bytes
            exchange.on_transfer = self._note_transfer
            self.member, self.exchange = member, exchange

    def _print_waiting(self, reason: str) -> None:
        if self.rank == 0:
            print(f"islands: still waiting: {reason}", flush=True)

    def join_run(self, run: RunHandle) -> None:
        """Describe this rank to the coordinator, wait for the first view, and take over the state of a run under way.

        Raises ConfigError if the island is refused, Preempted if this launch is asked to leave.
        """
        super().join_run(run)
        self.run = run
        self.member.on_evicted = run.leave
        with raising_on_all_ranks(CheckpointError):
            self.held = HeldParts(run.model, run.optimizer, self.model)
        self.prepare()
        if self.sends_early:
            run.on_gradients(self.held.parameters, self._send_early)
        launch, first_batch = broadcast_json([secrets.token_hex(8), run.batch])
        fingerprints = {**self.fingerprints, "order of the data": run.data_order}
        if run.is_exact:
            fingerprints["device_train_microbatch_size"] = str(run.microbatch)
        machine = {"device": devices.device_name(), "num_devices": self.num_ranks, "torch": str(torch.__version__)}
        who = {"island": self.name, "launch": launch, "rank": self.rank, "size": self.num_ranks, "machine": machine}
        has = {"address": list(self.exchange.address), "data_ranks": run.num_data_ranks, "boxes": self.held.boxes}
        trains = {"rows": self.num_rows, "microbatch": run.microbatch, "unit": run.microbatch if run.is_exact else 1}
        trains |= {"weight": self.config.weight, "batch": first_batch, "fingerprints": fingerprints}
        self.member.send({"kind": "hello", **who, **has, **trains})
        if self.rank == 0:
            print("islands: waiting until as many are here as the run begins with, or its next batch ends", flush=True)
        while not all_reduce_max([int(self.member.wait(POLL_SECONDS))])[0]:
            if why := run.agree_on_leaving():  # without a save: nothing has been trained
                raise Preempted(f"{why} while waiting for other islands; run the same command again", orderly=True)
        decision = self._receive_decision()
        assert decision["kind"] == "view", decision["kind"]
        self._begin_view(View.of(decision))

    def prepare(self) -> None:
        """Set up what needs the model, before the coordinator hears of this island. Raises ConfigError on all ranks."""

    def close(self, *, has_finished: bool = False) -> None:
        if self.member is not None:
            self.member.close(has_finished=has_finished)
            self.exchange.close()
            self.member = None

    def _receive_decision(self) -> Message:
        """Return rank 0's next decision, on all ranks.

        If the connection is lost, raises Preempted, after a save if this island is the leader. Raises ConfigError if
        the island is refused.
        """
        decision = self._next_decision()
        if isinstance(decision, Lost):
            self._leave(decision)
        return decision

    def _next_decision(self) -> Message | Lost:
        """Return rank 0's next decision, or why its connection is lost, on all ranks."""
        decision: Any = None
        if self.rank == 0:
            decision = self.member.receive_decision()
            if isinstance(decision, Lost):
                decision = {"kind": "lost", "lost": list(decision)}
        # A loss or norm may not be finite.
        decision = decode_value(broadcast_json(encode_value(decision)))
        return Lost(*decision["lost"]) if decision["kind"] == "lost" else decision

    def _leave(self, lost: Lost) -> NoReturn:
        if lost.kind == "refused":
            raise ConfigError(f"islands: {lost.reason}")
        if lost.kind == "evicted":
            raise Preempted(f"left the run: {lost.reason}; run the same command again", orderly=True)
        raise Preempted(self._save_before_leaving(lost.reason), orderly=True)

    def _begin_view(self, view: View) -> None:
        """Apply a new view, or leave."""
        if lost := self._take_view(view):
            self._leave(lost)

    def _take_view(self, view: View) -> Lost | None:
        """Apply a new view, between two batches or before one is repeated. Returns why the coordinator is lost."""
        described: dict[str, list[Message]] = {}
        """Hellos of the view's islands, by island and rank."""
        lost: Lost | None = None
        if self.rank == 0:
            try:
                described = {name: self.member.describe(name, launch) for name, launch in view.members.items()}
            except ConnectionError as caught:
                lost = self.member.lost or Lost(str(caught), "gone")
        described, lost = broadcast_json([described, lost])
        if lost is not None:
            return Lost(*lost)
        if view.leader == self.name != self.view.leader:
            self.run.note_newest_lease()
        self.view, self.next_view = view, None
        boxes = {name: [read_boxes(one["boxes"]) for one in ranks] for name, ranks in described.items()}
        pieces = {name: share_out(boxes_of_ranks) for name, boxes_of_ranks in boxes.items()}
        self.held.begin_view(boxes[self.name], pieces[self.name], self.rank)
        others = {
            name: Ranks([(host, port) for host, port in (one["address"] for one in ranks)], pieces[name])
            for name, ranks in described.items()
            if name != self.name
        }
        self.machines = {name: ranks[0]["machine"] for name, ranks in described.items()}
        self.data_ranks = {name: ranks[0]["data_ranks"] for name, ranks in described.items()}
        self.exchange.meet(view.epoch, self.held.pieces, others)
        rows = rows_of([one for ranks in boxes.values() for one in ranks])
        self.plan = SumPlan.of(self.name, self.held.pieces, self.exchange.cuts, rows, view.shares)
        if self.name == view.source:
            self._send_state()
        elif self.name in view.joiners:
            self._receive_state()
        self.member.phase = "compute"
        return None

    def _note_transfer(self, is_transferring: bool) -> None:
        """Set the phase that heartbeats report: `exchange` while sockets wait for other islands, `wait` while this rank
        waits for its own island or the coordinator, `compute` while host or device work."""
        self.member.phase = "exchange" if is_transferring else "compute"

    # ---------------------------------------------------------------------------------------------------- saving

    @property
    def writes_checkpoints(self) -> bool:  # type: ignore[override]
        """Whether this island is the leader and, if it leaves, the last one."""
        following = None if self.next_view is None else self.next_view.members
        return self.view.leader == self.name and (not following or self.name in following)

    @property
    def segment(self) -> dict[str, Any]:  # type: ignore[override]
        return {"islands": {name: dict(one) for name, one in self.trained.items()}}

    def may_save(self) -> bool:
        """Return whether this island saves and no successor holds the lease: stealing it would end the others."""
        return self.writes_checkpoints and not (
            broadcast_json(self.member.lost is not None) and self.run.has_successor()
        )

    def _save_before_leaving(self, reason: str) -> str:
        """Save during a batch, before its commit. Returns the message of the exit."""
        saved, saves = "another island saves", self.writes_checkpoints and not self.run.has_successor()
        try:
            last = self.run.save(begins=saves)
            saved = f"saved as ba{last}" if saves else saved
        except CheckpointError:
            if not self.run.has_successor():
                raise
        return f"{reason} after batch {self.run.batch}, {saved}; run the same command again"

    # --------------------------------------------------------------------------------------------------- the data

    @property
    def next_row_indices(self) -> range:
        """Rows of the next batch that are this island's."""
        return self.view.row_indices[self.name]

    def batches(self) -> Iterator[Any]:
        self.row_indices = self.next_row_indices
        return self.run.read(self.row_indices, *self.again)

    def changed_batches(self) -> Iterator[Any] | None:
        if self._begin_next_view() is not None:
            return None  # the next batch finds out; this one is not recorded yet, so a save would lack it
        is_due = self.run.batch % self.config.check_weights_every == 0
        self.weights = self.held.digest() if is_due else ""
        return None if self.row_indices == self.next_row_indices else self.batches()

    def _begin_next_view(self) -> Lost | None:
        """Apply the view that follows the last commit, if there is one. Returns why the coordinator is lost."""
        view = self.next_view
        return self._take_view(view) if view is not None and self.name in view.members else None

    # -------------------------------------------------------------------------------------------------- the batch

    def begin_batch(self) -> None:
        """Start the clock of this island's pace, which excludes an evaluation or a save before the batch. Then wait for
        other islands' gradients."""
        self.began_at = now()
        self.weight = self.run.counts.weight(by_tokens=self.by_tokens)
        label, self.num_bytes_before = self.run.batch * LABELS_PER_BATCH, self.exchange.num_bytes
        self.summing = Summing(self.exchange, self.plan, label, float(self.weight), is_exact=self.run.is_exact)

    @torch.no_grad()
    def _send_early(self, name: str, parameter: torch.nn.Parameter) -> None:
        """Send a gradient that the last microbatch's backward pass has made, summed over this island's ranks."""
        if self.summing is not None and parameter.grad is not None:
            held, gradient = self.held, local_tensor(parameter.grad)
            for key, piece in held.pieces_with([name]).items():
                part = held.parts[key]
                self.summing.put(key, part.of(gradient)[piece.within(part.box)])

    def exchange_gradient(self, loss: torch.Tensor) -> bool:
        """Exchange this island's gradient and wait for the decision. `loss` is this rank's, as for `measure`.

        Returns True after a commit: gradient and numbers are then the global batch's. Returns False if the batch must
        be computed again, with the rows of a new view.
        """
        seconds = now() - self.began_at
        here = self.run.counts
        with torch.no_grad():
            report = self._exchange(loss)
        exchanged_at = time.monotonic()
        if self.rank == 0:
            place = {"kind": "prepared", "epoch": self.view.epoch, "batch": self.run.batch, "steps": 1}
            counts = {"weight": self.weight, "samples": here.num_samples, "tokens": here.num_tokens}
            counts |= {"losses": here.num_loss_tokens, "digest": here.digest}
            self.member.send({**place, **counts, "seconds": seconds, "weights": self.weights, **report})
        self.member.phase = "wait"
        decision = self._receive_decision()
        while (epoch := decision["epoch"]) < self.view.epoch or (
            decision["kind"] == "view" and epoch == self.view.epoch
        ):
            decision = self._receive_decision()
        self.member.phase = "compute"
        if decision["kind"] == "view":
            self.run.drop_gradient()
            self.num_repeats += 1
            self._begin_view(View.of(decision))
            return False
        self.measured = {
            "islands/members": len(self.view.members),
            "islands/rows": here.num_samples,
            "islands/compute_seconds": seconds,
            "islands/exchange_seconds": exchanged_at - self.began_at - seconds,
            "islands/decision_seconds": time.monotonic() - exchanged_at,
            "islands/bytes": self.num_bytes,
        }
        self._commit(decision)
        return True

    def _commit(self, decision: Message) -> None:
        """Pass the numbers of all islands to the run."""
        here = self.run.counts
        self.num_drifts += len(decision["drifted"])
        loss = decision["loss_sum" if self.run.is_exact else "loss"]
        for name, rows in decision["rows"].items():
            self.trained.setdefault(name, {**self.machines[name], "rows": 0})["rows"] += rows
        self.tokens_elsewhere += decision["tokens"] - here.num_tokens
        counts = {
            "num_samples": decision["samples"],
            "num_tokens": decision["tokens"],
            "num_loss_tokens": decision["losses"],
        }
        self.run.commit(
            Measured(decision["norm"], loss, decision["bad"], decision["out_of_range"]),
            here._replace(**counts, digest=decision["digest"] % (1 << 64)),
        )
        self.next_view = View.of(decision["next"]) if decision["next"] is not None else None

    def metrics(self) -> dict[str, float]:
        return {**self.measured, "islands/repeats": self.num_repeats, "islands/drifts": self.num_drifts}

    def _exchange(self, loss: torch.Tensor) -> Message:
        """Replace this island's gradient with the global batch's, if every rank could exchange. Returns the report."""
        held, summing, has_failed = self.held, self.summing, True
        parts, inside = held.views({name: self._gradient(parameter) for name, parameter in held.parameters.items()})
        assert summing is not None
        with suppress(OSError):
            summing.wait(inside)
            has_failed = False
        self.member.phase, self.summing = "wait", None  # for ranks whose links are slower or dead
        num_bytes = self.exchange.num_bytes - self.num_bytes_before
        own = map(int, (has_failed, self.run.is_asked_to_leave, summing.link_rate, num_bytes))
        failed, leaves, link_rate, self.num_bytes = all_reduce_sum([*own])
        report = {"leaving": bool(leaves), "link": link_rate, "again": 0, "asks_for_whole": False}
        if failed:
            return {"ok": False, **report, **_report(Measured(0.0, 0.0, 0))}
        self.member.phase = "compute"
        if len(self.view.members) > 1:
            for key, total in summing.sums.items():
                inside[key].copy_(total)
            held.completion.apply(inside, parts, summing.dtype)
        # A rank without a piece has heard of no other island.
        weight = all_reduce_max([int(summing.total_weight)])[0] if self.run.is_exact else 0
        return {"ok": True, **report, **_report(self.run.measure(loss, weight))}

    def _gradient(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        if parameter.grad is None:  # no token of this rank's rows has a loss
            parameter.grad = torch.zeros_like(parameter, dtype=torch.float64 if self.run.is_exact else None)
        return local_tensor(parameter.grad)

    # ------------------------------------------------------------------------------------------- state for joiners

    def _send_state(self) -> None:
        """Send the run's state to joining islands: scalars through the coordinator, tensors from rank to rank."""
        kinds, optimizer, pieces = self.held.read_state(self.given_weights)
        if self.rank == 0:
            content = {"optimizer": encode_value(optimizer), "kinds": kinds, **self.run.collect_state()}
            self.member.send({"kind": "state", "epoch": self.view.epoch, "state": content})
        with suppress(OSError):  # a joiner is gone: the next exchange fails, and the batch is repeated without it
            for label, kind in enumerate(kinds, self.run.batch * LABELS_PER_BATCH + 1):
                self.exchange.give(pieces[kind], self.held.pieces, self.view.joiners, label)

    @torch.no_grad()
    def _receive_state(self) -> None:
        """Replace this island's state with the source's. Raises Preempted if the source fails."""
        self.member.phase = "wait"
        message = self._receive_decision()
        if message["kind"] != "state":  # a newer view, which assumes that this island has the state
            raise self._missing_state()
        content = message["state"]
        error, kinds = None, content["kinds"]
        pieces: dict[str, Tensors] = {}
        try:
            for label, (kind, names) in enumerate(sorted(kinds.items()), self.view.batch * LABELS_PER_BATCH + 1):
                pieces[kind] = self.exchange.take(self.held.pieces_with(names), self.view.source, label)
        except OSError as caught:
            error = caught
        self.member.phase = "wait"
        if all_reduce_sum([int(error is not None)])[0]:
            raise self._missing_state()
        self.member.phase = "compute"
        self.held.write_state(kinds, pieces, decode_value(content["optimizer"]))
        self.run.restore_state(content)

    def _missing_state(self) -> Preempted:
        return Preempted(f"left the run: {self.view.source} could not give its state; run the same command again")


def now() -> float:
    """Return the time after the device has finished, from which an island's speed and so its rows follow."""
    devices.synchronize()
    return time.monotonic()


def _report(measured: Measured) -> Message:
    norm, loss, num_bad, is_out_of_range = measured
    return {"norm": norm, "loss": loss, "bad": num_bad, "out_of_range": is_out_of_range}
