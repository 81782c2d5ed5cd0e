"""Exact islands: one run on several launches, which sum the gradient of every batch. Seen from one rank of one launch.

`Islands` connects the training loop, which calls the methods of `LaunchRole`, to the coordinator
(`coordination.member`) and to the ranks of other islands (`tensors`). It reads this island's rows, exchanges gradients,
applies the coordinator's decision on each batch, transfers state to islands that join, and decides who saves. The
coordinator decides on membership and commits. `local_islands.py` derives from this class.

A batch counts on all islands or on none. Before the commit only gradients have changed. If the commit fails, they are
dropped, and the batch is computed again with the rows of a new view.
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
from llmfoundry_islands.coordination.member import Disconnection, Member, View, start_coordinator_if_absent
from llmfoundry_islands.coordination.messages import Message, find_token, parse_address
from llmfoundry_islands.tensors.boxes import Tensors, divide_replicas, rows_of
from llmfoundry_islands.tensors.exchange import Exchange, Ranks
from llmfoundry_islands.tensors.summing import Summing, SumPlan
from llmfoundry_islands.training.held_parts import HeldParts, read_boxes
from llmfoundry_islands.training.local_steps import RetrainedRows
from llmfoundry_lite import devices
from llmfoundry_lite.checkpoint.state import local_tensor
from llmfoundry_lite.config.changes import trained_values
from llmfoundry_lite.config.schema import TrainConfig, as_dict
from llmfoundry_lite.errors import CheckpointError, ConfigError
from llmfoundry_lite.ranks.codec import decode_value, encode_value
from llmfoundry_lite.ranks.ending import Preempted
from llmfoundry_lite.ranks.exchange import all_reduce_max, all_reduce_sum, broadcast_json, raising_on_all_ranks
from llmfoundry_lite.ranks.rank import this_rank
from llmfoundry_lite.training.launch_role import LaunchRole
from llmfoundry_lite.training.run_handle import Measured, RunHandle

POLL_SECONDS = 0.5
"""Interval at which a waiting launch checks whether it is asked to leave."""
LABELS_PER_BATCH = 64
"""Every transfer between islands has a label, so that numbers of another batch are never taken for this one's. A batch
has this number of labels: the first is its gradient, and the next ones are the kinds of state that joiners receive."""


class Islands(LaunchRole):
    """The other islands of this run, seen from one rank of this island.

    The methods are called in this order: `connect`, `join_run`, then `batches`, and for every batch `begin_batch`,
    `exchange_gradient` and `end_batch`; finally `close`. All methods are collective over this island's ranks,
    except those that background threads call: `_print_waiting`, `_note_transfer` and `_send_early`.
    """

    takes_lease_at_start = False
    instead_of_saving = "the other islands carry on"
    sends_during_backward = True
    """Gradients are sent while the backward pass still computes others."""
    retrained = RetrainedRows()
    """Rows of an earlier batch that this island reads besides this batch's. Exact islands have none."""
    weights_for_joiners: Tensors | None = None
    """This rank's part of the weights that joiners receive, by parameter. None: the model's."""

    def __init__(self, config: TrainConfig):
        """Read the configuration. Nothing is connected yet."""
        self.config = settings_of(config)
        self.fingerprints = trained_values(as_dict(config))
        """Settings that must be equal on all islands."""
        self.run_folder = Path(config.run_folder)
        self.num_rows = config.global_train_batch_size
        self.model_config = config.model
        self.by_tokens = config.accumulate_train_batch_on_tokens
        self.sends_early = self.sends_during_backward and not config.sharding.offload_optimizer
        self.name = self.config.name
        self.rank, self.num_ranks, *_ = this_rank()
        self.member: Any = None
        """The connection to the coordinator. None before `connect`, and after `close`."""
        self.view = View(0, 0, {}, {}, "", "", [], {})
        """The islands of this epoch, and their rows."""
        self.next_view: View | None = None
        """The view that follows the batch that was committed last. None if the view stays."""
        self.trained: dict[str, dict[str, Any]] = {}
        """Island -> its machine, and the number of rows that it has trained since this launch began."""
        self.measured: dict[str, float] = {}
        """Metrics of the last batch."""
        self.num_repeats = 0
        """Batches that were computed again, because their exchange had failed."""
        self.num_drifts = 0
        """Number of times that an island's weights were found to differ from the leader's."""
        self.row_indices = range(0)
        """Rows of each batch that this island reads."""
        self.data_ranks: dict[str, int] = {}
        """Island -> its number of data ranks."""
        self.summing: Summing | None = None
        """The sum of this batch's gradient. None between `exchange_gradient` and the next batch."""
        self.weights_digest = ""
        """Digest of the weights if they are compared with this batch. Otherwise it is empty."""
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

            # A rank whose main thread waits for another island is freed by these calls.
            member.on_newer_view = exchange.abort
            member.on_disconnected = lambda: exchange.abort(math.inf)
            member.count_bytes = lambda: exchange.num_bytes
            exchange.on_transfer = self._note_transfer
            self.member = member
            self.exchange = exchange

    def _print_waiting(self, reason: str) -> None:
        """Print on rank 0 why this island waits. A background thread calls this."""
        if self.rank == 0:
            print(f"islands: still waiting: {reason}", flush=True)

    def join_run(self, run: RunHandle) -> None:
        """Describe this rank to the coordinator, wait for the first view, and take over the state of a run under way.

        Raises ConfigError if the island is refused, and Preempted if this launch is asked to leave while it waits.
        """
        super().join_run(run)
        self.run = run
        self.member.on_evicted = run.leave
        with raising_on_all_ranks(CheckpointError):
            self.held = HeldParts(run.model, run.optimizer, self.model_config)
        self.prepare()
        if self.sends_early:
            run.on_gradients(self.held.parameters, self._send_early)

        self._send_hello()
        if self.rank == 0:
            print("islands: waiting until as many are here as the run begins with, or its next batch ends", flush=True)
        # All ranks enter every round of this loop together, because they may have to leave together.
        while not all_reduce_max([int(self.member.wait(POLL_SECONDS))])[0]:
            leaving_reason = run.agree_on_leaving()
            if leaving_reason:  # without a save: nothing has been trained
                raise Preempted(
                    f"{leaving_reason} while waiting for other islands; run the same command again", orderly=True
                )
        decision = self._receive_decision()
        assert decision["kind"] == "view", decision["kind"]
        self._begin_view(View.from_message(decision))

    def _send_hello(self) -> None:
        """Describe this rank to the coordinator: which launch it belongs to, what it holds, and what it trains."""
        launch, first_batch = broadcast_json([secrets.token_hex(8), self.run.batch])
        fingerprints = {**self.fingerprints, "order of the data": self.run.data_order}
        rows_unit = 1
        if self.run.is_exact:
            # Exact sums depend on which rows are in a microbatch together.
            fingerprints["device_train_microbatch_size"] = str(self.run.microbatch)
            rows_unit = self.run.microbatch
        self.member.send(
            {
                "kind": "hello",
                "island": self.name,
                "launch": launch,
                "rank": self.rank,
                "size": self.num_ranks,
                "machine": {
                    "device": devices.device_name(),
                    "num_devices": self.num_ranks,
                    "torch": str(torch.__version__),
                },
                "address": list(self.exchange.address),
                "data_ranks": self.run.num_data_ranks,
                "boxes": self.held.boxes,
                "rows": self.num_rows,
                "microbatch": self.run.microbatch,
                "unit": rows_unit,
                "weight": self.config.weight,
                "batch": first_batch,
                "fingerprints": fingerprints,
            }
        )

    def prepare(self) -> None:
        """Set up what needs the model, before the coordinator hears of this island. Raises ConfigError on all ranks.

        Exact islands need nothing; `LocalIslands` overrides this.
        """

    def close(self, *, has_finished: bool = False) -> None:
        """Leave the run and close all connections. `has_finished` says that the run is over for all islands."""
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
        if isinstance(decision, Disconnection):
            self._leave(decision)
        return decision

    def _next_decision(self) -> Message | Disconnection:
        """Return rank 0's next decision, or why its connection is lost, on all ranks."""
        decision: Any = None
        if self.rank == 0:
            decision = self.member.receive_decision()
            if isinstance(decision, Disconnection):
                decision = {"kind": "lost", "lost": list(decision)}
        # Encoded, because a loss or a norm may not be finite, which JSON cannot express.
        decision = decode_value(broadcast_json(encode_value(decision)))
        if decision["kind"] == "lost":
            return Disconnection(*decision["lost"])
        return decision

    def _leave(self, disconnection: Disconnection) -> NoReturn:
        """End this launch because its connection to the coordinator has ended.

        Raises ConfigError if the island was refused, and else Preempted. If the coordinator itself is gone, the leader
        saves first.
        """
        if disconnection.kind == "refused":
            raise ConfigError(f"islands: {disconnection.reason}")
        if disconnection.kind == "evicted":
            raise Preempted(f"left the run: {disconnection.reason}; run the same command again", orderly=True)
        raise Preempted(self._save_before_leaving(disconnection.reason), orderly=True)

    def _begin_view(self, view: View) -> None:
        """Apply a new view, or leave if the coordinator is lost."""
        disconnection = self._apply_view(view)
        if disconnection is not None:
            self._leave(disconnection)

    def _apply_view(self, view: View) -> Disconnection | None:
        """Apply a new view, between two batches or before one is repeated. Collective.

        Connects this rank to ranks of the other islands, and sends or receives state if islands join. Sets `view`,
        `machines`, `data_ranks` and `plan`, and resets `next_view`.

        Returns None, or why the coordinator is lost; nothing has changed then.
        """
        hellos_of_islands = self._get_descriptions(view)
        if isinstance(hellos_of_islands, Disconnection):
            return hellos_of_islands

        becomes_leader = view.leader == self.name and self.view.leader != self.name
        if becomes_leader:
            self.run.note_newest_lease()
        self.view = view
        self.next_view = None
        self.machines = {name: hellos[0]["machine"] for name, hellos in hellos_of_islands.items()}
        self.data_ranks = {name: hellos[0]["data_ranks"] for name, hellos in hellos_of_islands.items()}

        # Connect to the other islands, and share out the sum of gradients. Every rank computes the pieces of all ranks
        # of all islands, so that none has to ask another.
        boxes = {name: [read_boxes(hello["boxes"]) for hello in hellos] for name, hellos in hellos_of_islands.items()}
        pieces = {name: divide_replicas(boxes_of_ranks) for name, boxes_of_ranks in boxes.items()}
        self.held.begin_view(boxes[self.name], pieces[self.name], self.rank)
        other_islands = {}
        for name, hellos in hellos_of_islands.items():
            if name != self.name:
                addresses = [(host, port) for host, port in (hello["address"] for hello in hellos)]
                other_islands[name] = Ranks(addresses, pieces[name])
        self.exchange.connect(view.epoch, self.held.pieces, other_islands)
        rows_of_tensors = rows_of([boxes_of_rank for ranks in boxes.values() for boxes_of_rank in ranks])
        self.plan = SumPlan.of(self.name, self.held.pieces, self.exchange.overlaps, rows_of_tensors, view.shares)

        # Bring joiners to the state of the run.
        if self.name == view.source:
            self._send_state()
        elif self.name in view.joiners:
            self._receive_state()
        self.member.phase = "compute"
        return None

    def _get_descriptions(self, view: View) -> dict[str, list[Message]] | Disconnection:
        """Return island -> the description of each of its ranks, for all islands of a view. Collective.

        Rank 0 has them from the coordinator, and passes them on. Returns why the coordinator is lost if it has not sent
        all of them.
        """
        hellos_of_islands: dict[str, list[Message]] = {}
        disconnection: Disconnection | None = None
        if self.rank == 0:
            try:
                for name, launch in view.members.items():
                    hellos_of_islands[name] = self.member.describe(name, launch)
            except ConnectionError as error:
                disconnection = self.member.disconnection or Disconnection(str(error), "gone")
        hellos_of_islands, disconnection = broadcast_json([hellos_of_islands, disconnection])
        if disconnection is not None:
            return Disconnection(*disconnection)
        return hellos_of_islands

    def _note_transfer(self, is_transferring: bool) -> None:
        """Set the phase that heartbeats report. Threads that send and receive call this.

        The phase is `exchange` while sockets wait for other islands, `wait` while this rank waits for its own island or
        the coordinator, and `compute` while the host or the device works. The coordinator takes a link for dead if all
        islands exchange and no byte moves.
        """
        self.member.phase = "exchange" if is_transferring else "compute"

    # ---------------------------------------------------------------------------------------------------- saving

    @property
    def writes_checkpoints(self) -> bool:  # type: ignore[override]
        """Whether this island is the leader. If the leader leaves, whether it is also the last island."""
        if self.view.leader != self.name:
            return False
        next_members = {} if self.next_view is None else self.next_view.members
        return not next_members or self.name in next_members

    @property
    def segment(self) -> dict[str, Any]:  # type: ignore[override]
        return {"islands": {name: dict(island) for name, island in self.trained.items()}}

    def may_save(self) -> bool:
        """Return whether this island makes the save that is due.

        An island that has lost the coordinator must not steal the lease from a successor: the other islands would end.
        """
        if not self.writes_checkpoints:
            return False
        is_disconnected = broadcast_json(self.member.disconnection is not None)
        return not (is_disconnected and self.run.has_successor())

    def _save_before_leaving(self, reason: str) -> str:
        """Save during a batch, before its commit, if this island saves. Returns the message of the exit.

        Raises CheckpointError if the save fails, unless another island saves by now.
        """
        outcome = "another island saves"
        begins_save = self.writes_checkpoints and not self.run.has_successor()
        try:
            saved_batch = self.run.save(begins=begins_save)
            if begins_save:
                outcome = f"saved as ba{saved_batch}"
        except CheckpointError:
            if not self.run.has_successor():
                raise
        return f"{reason} after batch {self.run.batch}, {outcome}; run the same command again"

    # --------------------------------------------------------------------------------------------------- the data

    @property
    def next_row_indices(self) -> range:
        """Rows of the next batch that are this island's."""
        return self.view.row_indices[self.name]

    def batches(self) -> Iterator[Any]:
        self.row_indices = self.next_row_indices
        return self.run.read(self.row_indices, self.retrained.row_indices, self.retrained.num_batches_back)

    def end_batch(self) -> Iterator[Any] | None:
        """Apply the view that follows the batch, and set `weights_digest` for the report of the next one. Collective.

        Returns the batches to continue with if this island's rows change; else None.
        """
        if self._begin_next_view() is not None:
            # The next batch finds out that the coordinator is lost. This one is not in the log yet, so a save now would
            # have a log that lacks it.
            return None
        is_due = self.run.batch % self.config.check_weights_every == 0
        self.weights_digest = self.held.digest() if is_due else ""
        if self.row_indices == self.next_row_indices:
            return None
        return self.batches()

    def _begin_next_view(self) -> Disconnection | None:
        """Apply the view that follows the last commit, if there is one and this island is in it.

        Returns why the coordinator is lost, or None.
        """
        view = self.next_view
        if view is None or self.name not in view.members:
            return None
        return self._apply_view(view)

    # -------------------------------------------------------------------------------------------------- the batch

    def begin_batch(self) -> None:
        """Start the clock that measures this island's pace, and begin to receive other islands' gradients.

        The clock starts here, so that it excludes an evaluation or a save before the batch.
        """
        self.began_at = synchronized_time()
        self.weight = self.run.counts.weight(by_tokens=self.by_tokens)
        self.num_bytes_before = self.exchange.num_bytes
        label = self.run.batch * LABELS_PER_BATCH
        self.summing = Summing(self.exchange, self.plan, label, float(self.weight), is_exact=self.run.is_exact)

    @torch.no_grad()
    def _send_early(self, name: str, parameter: torch.nn.Parameter) -> None:
        """Send a gradient that is final, during the backward pass of the last microbatch.

        It is the sum over this island's ranks. Called for parameters of which the training loop knows that early.
        """
        if self.summing is None or parameter.grad is None:
            return
        gradient = local_tensor(parameter.grad)
        for key, piece in self.held.pieces_with([name]).items():
            part = self.held.parts[key]
            self.summing.put(key, part.view_of(gradient)[piece.slices_in(part.box)])

    def exchange_gradient(self, loss: torch.Tensor) -> bool:
        """Exchange this island's gradient, report to the coordinator and wait for its decision.

        `loss` is this rank's, as for `RunHandle.measure`. Collective. Sets `measured`, the metrics of the batch.

        Returns True after a commit: the run's gradient, norm, loss and counts are then the global batch's. Returns
        False if the coordinator has sent a new view instead: `view` is then that one, the gradient is dropped, and the
        batch must be computed again with the rows of that view.
        """
        compute_seconds = synchronized_time() - self.began_at
        with torch.no_grad():
            report, num_bytes = self._exchange(loss)
        exchanged_at = time.monotonic()
        counts = self.run.counts
        if self.rank == 0:
            self.member.send(
                {
                    "kind": "prepared",
                    "epoch": self.view.epoch,
                    "batch": self.run.batch,
                    "steps": 1,
                    "weight": self.weight,
                    "samples": counts.num_samples,
                    "tokens": counts.num_tokens,
                    "losses": counts.num_loss_tokens,
                    "digest": counts.digest,
                    "seconds": compute_seconds,
                    "weights": self.weights_digest,
                    **report,
                }
            )

        self.member.phase = "wait"
        decision = self._receive_decision()
        while self._is_outdated(decision):
            decision = self._receive_decision()
        self.member.phase = "compute"

        # An island has left or failed, so this batch is repeated without it.
        if decision["kind"] == "view":
            self.run.drop_gradient()
            self.num_repeats += 1
            self._begin_view(View.from_message(decision))
            return False
        self.measured = {
            "islands/members": len(self.view.members),
            "islands/rows": counts.num_samples,
            "islands/compute_seconds": compute_seconds,
            "islands/exchange_seconds": exchanged_at - self.began_at - compute_seconds,
            "islands/decision_seconds": time.monotonic() - exchanged_at,
            "islands/bytes": num_bytes,
        }
        self._commit(decision)
        return True

    def _is_outdated(self, decision: Message) -> bool:
        """Return whether a decision is of an earlier view, or is the view that has been applied already."""
        is_present_view = decision["kind"] == "view" and decision["epoch"] == self.view.epoch
        return decision["epoch"] < self.view.epoch or is_present_view

    def _commit(self, decision: Message) -> None:
        """Pass the global batch's norm, loss and counts to the run, and note the view that follows."""
        own_counts = self.run.counts
        self.num_drifts += len(decision["drifted"])
        self._count_trained_rows(decision["rows"])
        self.tokens_elsewhere += decision["tokens"] - own_counts.num_tokens

        loss = decision["loss_sum"] if self.run.is_exact else decision["loss"]
        measured = Measured(decision["norm"], loss, decision["bad"], decision["out_of_range"])
        counts = own_counts._replace(
            num_samples=decision["samples"],
            num_tokens=decision["tokens"],
            num_loss_tokens=decision["losses"],
            digest=decision["digest"] % (1 << 64),
        )
        self.run.commit(measured, counts)
        self.next_view = None if decision["next"] is None else View.from_message(decision["next"])

    def _count_trained_rows(self, rows_of_islands: dict[str, int]) -> None:
        """Add the rows that each island has trained to `trained`, from which checkpoints get their segments."""
        for name, num_rows in rows_of_islands.items():
            island = self.trained.setdefault(name, {**self.machines[name], "rows": 0})
            island["rows"] += num_rows

    def metrics(self) -> dict[str, float]:
        return {**self.measured, "islands/repeats": self.num_repeats, "islands/drifts": self.num_drifts}

    def _exchange(self, loss: torch.Tensor) -> tuple[Message, int]:
        """Replace this island's gradient with the global batch's, if every rank of the island could exchange.

        Ends `summing`, which `begin_batch` has begun. Collective over this island's ranks.

        Returns two results. The first is the part of the island's report that depends on the exchange: whether it
        succeeded (`ok`), whether the island leaves, the rate of its link, and the norm and loss. The second is the
        number of bytes that the island has sent and received for this batch.
        """
        # Wait until the sums of this rank's pieces of the gradient have arrived.
        gradients = {name: self._gradient(parameter) for name, parameter in self.held.parameters.items()}
        parts, pieces = self.held.views(gradients)
        summing = self.summing
        assert summing is not None
        has_failed = True
        with suppress(OSError):
            summing.wait(pieces)
            has_failed = False
        self.summing = None

        # Ask the island's other ranks whether theirs have. Ranks whose links are slower, or dead, come later.
        self.member.phase = "wait"
        num_bytes_of_rank = self.exchange.num_bytes - self.num_bytes_before
        num_failed, num_asked_to_leave, link_rate, num_bytes = all_reduce_sum(
            [int(has_failed), int(self.run.is_asked_to_leave), int(summing.link_rate), int(num_bytes_of_rank)]
        )
        report = {"leaving": bool(num_asked_to_leave), "link": link_rate, "again": 0, "asks_for_whole": False}
        if num_failed:
            return {"ok": False, **report, **_as_report(Measured(0.0, 0.0, 0))}, num_bytes

        # Write the sums into the gradients. A single island keeps the gradient that it has.
        self.member.phase = "compute"
        if len(self.view.members) > 1:
            for key, total in summing.sums.items():
                pieces[key].copy_(total)
            self.held.completion.apply(pieces, parts, summing.dtype)

        # Measure the norm of the new gradient, and the loss.
        total_weight = 0
        if self.run.is_exact:
            # The maximum, because a rank without a piece has heard of no other island.
            total_weight = all_reduce_max([int(summing.total_weight)])[0]
        measured = self.run.measure(loss, total_weight)
        return {"ok": True, **report, **_as_report(measured)}, num_bytes

    def _gradient(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """Return this rank's part of a gradient. Sets it to zeros if none of this rank's rows has a loss."""
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter, dtype=torch.float64 if self.run.is_exact else None)
        return local_tensor(parameter.grad)

    # ------------------------------------------------------------------------------------------- state for joiners

    def _send_state(self) -> None:
        """Send the run's state to joining islands: scalars through the coordinator, tensors from rank to rank."""
        state = self.held.read_state(self.weights_for_joiners)
        if self.rank == 0:
            content = {"optimizer": encode_value(state.optimizer), "kinds": state.kinds, **self.run.collect_state()}
            self.member.send({"kind": "state", "epoch": self.view.epoch, "state": content})
        # If a joiner is gone, the next exchange fails, and the batch is repeated without it.
        with suppress(OSError):
            for label, kind in enumerate(state.kinds, self.run.batch * LABELS_PER_BATCH + 1):
                self.exchange.send_pieces(state.pieces[kind], self.held.pieces, self.view.joiners, label)

    @torch.no_grad()
    def _receive_state(self) -> None:
        """Replace this island's state with the source's. Raises Preempted if the source fails."""
        self.member.phase = "wait"
        message = self._receive_decision()
        if message["kind"] != "state":  # a newer view, which assumes that this island has the state
            raise self._missing_state()
        content = message["state"]
        kinds = content["kinds"]
        pieces: dict[str, Tensors] = {}
        has_failed = False
        try:
            for label, kind in enumerate(sorted(kinds), self.view.batch * LABELS_PER_BATCH + 1):
                pieces_of_kind = self.held.pieces_with(kinds[kind])
                pieces[kind] = self.exchange.receive_pieces(pieces_of_kind, self.view.source, label)
        except OSError:
            has_failed = True

        # Writing the state is collective, so all ranks write it or none does.
        self.member.phase = "wait"
        if all_reduce_sum([int(has_failed)])[0]:
            raise self._missing_state()
        self.member.phase = "compute"
        self.held.write_state(kinds, pieces, decode_value(content["optimizer"]))
        self.run.restore_state(content)

    def _missing_state(self) -> Preempted:
        return Preempted(f"left the run: {self.view.source} could not give its state; run the same command again")


def synchronized_time() -> float:
    """Return the monotonic time once the device has finished its queued work.

    An island's speed, and therefore its share of the rows, is measured between two such times.
    """
    devices.synchronize()
    return time.monotonic()


def _as_report(measured: Measured) -> Message:
    """Return the fields of an island's report that `RunHandle.measure` provides."""
    return {
        "norm": measured.norm,
        "loss": measured.loss,
        "bad": measured.num_bad_losses,
        "out_of_range": measured.is_out_of_range,
    }
