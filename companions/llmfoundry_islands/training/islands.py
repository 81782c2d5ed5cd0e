"""One run on several islands at once: connects the training loop to `llmfoundry_lite.islands`.

It reads this island's rows, exchanges gradients, applies the coordinator's verdict on each batch, transfers state to
islands that join, and decides who saves. The coordinator decides on membership and commits.

A batch counts on all islands or on none. Before the commit only gradients have changed: if it fails they are dropped,
and the batch is computed again with the rows of a new view.
"""

import math
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from composer import Trainer
from composer.core import State
from torch.distributed.fsdp import FSDPModule

from llmfoundry_islands.coordination.member import Lost, Member, View, start_coordinator_if_absent
from llmfoundry_islands.coordination.messages import Message, find_token, parse_address
from llmfoundry_islands.tensors.boxes import Tensors, rows_of, share_out
from llmfoundry_islands.tensors.exchange import Exchange, Ranks
from llmfoundry_islands.tensors.summing import Plan, Summing
from llmfoundry_islands.training.held_parts import HeldParts, read_boxes
from llmfoundry_islands.training.local_steps import Again
from llmfoundry_lite import devices
from llmfoundry_lite.checkpoint.manifest import decode_segment, encode_segment
from llmfoundry_lite.config.changes import trained_values
from llmfoundry_lite.config.schema import TrainConfig, as_dict
from llmfoundry_lite.data.dataset import TextDataset
from llmfoundry_lite.data.loader import build_text_loader
from llmfoundry_lite.errors import CheckpointError, ConfigError
from llmfoundry_lite.parallel.pipeline import Pipeline
from llmfoundry_lite.ranks.codec import Item, decode_value, encode_value
from llmfoundry_lite.ranks.ending import Preempted
from llmfoundry_lite.ranks.exchange import all_reduce_max, all_reduce_sum, broadcast_json, raising_on_all_ranks
from llmfoundry_lite.ranks.rank import this_rank
from llmfoundry_lite.training.checkpointing import Checkpointing
from llmfoundry_lite.training.gradient_step import Measured
from llmfoundry_lite.training.optimizers import clear_gradients, local
from llmfoundry_lite.training.partners import Partners

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
        assert config.islands is not None
        self.config = config.islands
        self.fingerprints = trained_values(as_dict(config))
        self.run_folder = Path(config.run_folder)
        self.num_rows = config.global_train_batch_size
        self.model = config.model
        self.by_tokens = config.accumulate_train_batch_on_tokens
        self.loader = config.train_loader
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
        self.lanes = range(0)
        """Rows of each batch that are read here."""
        self.data_ranks: dict[str, int] = {}
        self.summing: Summing | None = None
        """The sum of this batch's gradient; None between `exchange_gradient` and the next batch."""
        self.num_bytes = 0
        """Sent and received by this island for the last batch."""
        self.weights = ""
        """Digest of the weights if this batch compares them; else empty."""
        self.tokens_elsewhere = 0
        self.newest_lease: int | None = None
        """On rank 0: epoch of the store's newest lease when this island became the scribe."""

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

    def enter(self, trainer: Trainer, checkpointing: Any, on_evicted: Callable[[str, str], None]) -> None:
        """Describe this rank to the coordinator, wait for the first view, and take over the state of a run under way.

        Raises ConfigError if the island is refused, Preempted if this launch is asked to leave.
        """
        super().enter(trainer, checkpointing, on_evicted)
        state: State = trainer.state
        self.checkpointing: Checkpointing = checkpointing
        self.agreement, self.gradient_step = checkpointing.agreement, checkpointing.gradient_step
        self.save_before_leaving = lambda reason: self._save_before_leaving(reason, state, trainer.logger)
        self.member.on_evicted = lambda reason: on_evicted("preempted", reason)
        dataset: Any = state.train_dataloader.dataset  # type: ignore[union-attr]
        self.dataset: TextDataset = dataset
        with raising_on_all_ranks(CheckpointError):
            self.held = HeldParts(checkpointing.model.model, state.optimizers[0], self.model)
        self.prepare(state)
        if self.sends_early:
            for name, parameter in final_gradients(checkpointing.model.model, self.held.parameters).items():
                parameter.register_post_accumulate_grad_hook(partial(self._send_early, name))
        launch, first_batch = broadcast_json([secrets.token_hex(8), int(state.timestamp.batch)])
        microbatch = int(state.device_train_microbatch_size or 1)
        order = " ".join(order.fingerprint for order in dataset.stages.orders)
        fingerprints = {**self.fingerprints, "order of the data": order}
        if self.gradient_step.sums:
            fingerprints["device_train_microbatch_size"] = str(microbatch)
        machine = {"device": devices.device_name(), "num_devices": self.num_ranks, "torch": str(torch.__version__)}
        self.member.send(
            {
                "kind": "hello",
                "island": self.name,
                "launch": launch,
                "rank": self.rank,
                "size": self.num_ranks,
                "address": list(self.exchange.address),
                "data_ranks": self.agreement.ranks.size,
                "boxes": self.held.boxes,
                "machine": machine,
                "fingerprints": fingerprints,
                "batch": first_batch,
                "rows": self.num_rows,
                "microbatch": microbatch,
                "unit": microbatch if self.gradient_step.sums else 1,
                "weight": self.config.weight,
            }
        )
        if self.rank == 0:
            print("islands: waiting until as many are here as the run begins with, or its next batch ends", flush=True)
        preemption = self.agreement.preemption
        while not all_reduce_max([int(self.member.wait(POLL_SECONDS))])[0]:
            if asked_by := preemption.agree_on_reason():  # without a save: nothing has been trained
                why = preemption.because(asked_by)
                raise Preempted(f"{why} while waiting for other islands; run the same command again", orderly=True)
        verdict = self._receive_verdict()
        assert verdict["kind"] == "view", verdict["kind"]
        self._begin_view(View.of(verdict), state)

    def prepare(self, state: State) -> None:
        """Set up what needs the model, before the coordinator hears of this island. Raises ConfigError on all ranks."""

    def close(self, *, has_finished: bool = False) -> None:
        if self.member is not None:
            self.member.close(has_finished=has_finished)
            self.exchange.close()
            self.member = None

    def _receive_verdict(self) -> Message:
        """Return rank 0's next verdict, on all ranks.

        If the connection is lost, raises Preempted, after a save if this island is the scribe. Raises ConfigError if
        the island is refused.
        """
        verdict = self._next_verdict()
        if isinstance(verdict, Lost):
            self._leave(verdict)
        return verdict

    def _next_verdict(self) -> Message | Lost:
        """Return rank 0's next verdict, or why its connection is lost, on all ranks."""
        verdict: Any = None
        if self.rank == 0:
            verdict = self.member.receive_verdict()
            if isinstance(verdict, Lost):
                verdict = {"kind": "lost", "lost": list(verdict)}
        # A loss or norm may be no finite number.
        verdict = decode_value(broadcast_json(encode_value(verdict)))
        return Lost(*verdict["lost"]) if verdict["kind"] == "lost" else verdict

    def _leave(self, lost: Lost) -> NoReturn:
        if lost.kind == "refused":
            raise ConfigError(f"islands: {lost.reason}")
        if lost.kind == "evicted":
            raise Preempted(f"left the run: {lost.reason}; run the same command again", orderly=True)
        raise Preempted(self.save_before_leaving(lost.reason), orderly=True)

    def _describe(self, view: View) -> tuple[dict[str, list[Message]], Lost | None]:
        """Return the hellos of the view's islands, by island and rank, or why rank 0 lacks them."""
        described: dict[str, list[Message]] = {}
        lost: Lost | None = None
        if self.rank == 0:
            try:
                described = {name: self.member.describe(name, launch) for name, launch in view.members.items()}
            except ConnectionError as caught:
                lost = self.member.lost or Lost(str(caught), "gone")
        described, lost = broadcast_json([described, lost])
        return described, Lost(*lost) if lost is not None else None

    def _begin_view(self, view: View, state: State, described: dict[str, list[Message]] | None = None) -> None:
        """Apply a new view, between two batches or before one is repeated."""
        if described is None:
            described, lost = self._describe(view)
            if lost is not None:
                self._leave(lost)
        if view.scribe == self.name != self.view.scribe and self.rank == 0:
            with suppress(OSError):
                self.newest_lease = self.checkpointing.store.leases.highest()
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
        self.plan = Plan.of(self.name, self.held.pieces, self.exchange.cuts, rows, view.shares)
        if self.name == view.donor:
            self._send_state(state)
        elif self.name in view.joiners:
            self._receive_state(state)
        self.member.phase = "compute"

    def _note_transfer(self, is_transferring: bool) -> None:
        """Set the phase that heartbeats report: `exchange` while sockets wait for other islands, `wait` while this rank
        waits for its own island or the coordinator, `compute` while host or device work."""
        self.member.phase = "exchange" if is_transferring else "compute"

    # ---------------------------------------------------------------------------------------------------- saving

    @property
    def saves_here(self) -> bool:  # type: ignore[override]
        """Whether this island is the scribe and, if it leaves, the last one."""
        following = None if self.next_view is None else self.next_view.members
        return self.view.scribe == self.name and (not following or self.name in following)

    @property
    def segment(self) -> dict[str, Any]:  # type: ignore[override]
        return {"islands": {name: dict(one) for name, one in self.trained.items()}}

    def may_save(self) -> bool:
        """Return whether this island saves and no successor holds the lease."""
        return self.saves_here and not (broadcast_json(self.member.lost is not None) and self._has_successor())

    def _has_successor(self) -> bool:
        """Return whether another island has begun to save since. Stealing its lease would end the other islands. Every
        rank must call this together."""
        has_successor = False
        if self.rank == 0:
            lease = self.checkpointing.saver.lease
            known = lease.epoch if lease is not None else self.newest_lease
            with suppress(OSError):
                has_successor = known is not None and self.checkpointing.store.leases.highest() > known
        return broadcast_json(has_successor)

    def _save_before_leaving(self, reason: str, state: State, logger: Any) -> str:
        """Save during a batch, before its commit. Returns the message of the exit."""
        saves = self.saves_here and not self._has_successor()
        try:
            (self.checkpointing.save_now if saves else self.checkpointing.fit_end)(state, logger)
        except CheckpointError:
            if not self._has_successor():
                raise
            saves = False
        saved = f"saved as ba{self.checkpointing.last_saved_batch}" if saves else "another island saves"
        return f"{reason} after batch {int(state.timestamp.batch)}, {saved}; run the same command again"

    # --------------------------------------------------------------------------------------------------- the data

    @property
    def next_lanes(self) -> range:
        """Rows of the next batch that are this island's."""
        return self.view.lanes[self.name]

    def batches(self, state: State) -> Iterator[Any]:
        """Read this rank's rows of the epoch's batches, from the next batch on. Every rank must call this together."""
        self.lanes, ranks = self.next_lanes, self.agreement.ranks
        mine, again = (
            lanes[ranks.rank * len(lanes) // ranks.size : (ranks.rank + 1) * len(lanes) // ranks.size]
            for lanes in (self.lanes, self.again.lanes)
        )
        place = int(state.timestamp.batch_in_epoch) * self.dataset.global_batch_size
        self.dataset.continue_with(mine, int(state.timestamp.epoch), place, again, self.again.back)
        return iter(
            build_text_loader(
                self.dataset,
                num_workers=self.loader.num_workers,
                pin_memory=self.loader.pin_memory and devices.device_type() == "cuda",
                prefetch_factor=self.loader.prefetch_factor,
                timeout=self.loader.timeout,
            )
        )

    def move_on(self, state: State) -> Iterator[Any] | None:
        if self._begin_next_view(state) is not None:
            return None  # the next batch finds out; this one is not recorded yet, so a save would lack it
        is_due = int(state.timestamp.batch) % self.config.check_weights_every == 0
        self.weights = self.held.digest() if is_due else ""
        return None if self.lanes == self.next_lanes else self.batches(state)

    def _begin_next_view(self, state: State) -> Lost | None:
        """Apply the view that follows the last commit, if there is one. Returns why the coordinator is lost."""
        view = self.next_view
        if view is not None and self.name in view.members:
            described, lost = self._describe(view)
            if lost is not None:
                return lost
            self._begin_view(view, state, described)
        return None

    # -------------------------------------------------------------------------------------------------- the batch

    def begin_batch(self, state: State) -> None:
        """Start the clock of this island's pace, which excludes an evaluation or a save before the batch. Await other
        islands' gradients."""
        self.began_at = now()
        here = self.agreement.current
        self.weight = here.weight(by_tokens=self.by_tokens)
        label = int(state.timestamp.batch) * LABELS_PER_BATCH
        is_exact, self.num_bytes_before = self.gradient_step.sums is not None, self.exchange.num_bytes
        self.summing = Summing(self.exchange, self.plan, label, float(self.weight), is_exact=is_exact)

    @torch.no_grad()
    def _send_early(self, name: str, parameter: torch.nn.Parameter) -> None:
        """Send a gradient that the last microbatch's backward pass has made, summed over this island's ranks."""
        if self.summing is not None and self.gradient_step.num_microbatches_left == 0:
            held, gradient = self.held, local(parameter.grad)
            for key, piece in held.pieces_with([name]).items():
                part = held.parts[key]
                self.summing.put(key, part.of(gradient)[piece.within(part.box)])

    def exchange_gradient(self, state: State, loss: torch.Tensor) -> bool:
        """Exchange this island's gradient and wait for the verdict. `loss` is this rank's, as for `measure`.

        Returns True after a commit: the gradient is the global batch's, and GradientStep and Agreement have the numbers
        of all islands. Returns False if the batch must be computed again, with the rows of a new view.
        """
        seconds = now() - self.began_at
        here = self.agreement.current
        with torch.no_grad():
            report = self._exchange(loss)
        exchanged_at = time.monotonic()
        if self.rank == 0:
            place = {"kind": "prepared", "epoch": self.view.epoch, "batch": int(state.timestamp.batch), "steps": 1}
            counts = {"weight": self.weight, "samples": here.num_filled, "tokens": here.num_tokens}
            counts |= {"losses": here.num_losses, "digest": here.digest}
            self.member.send({**place, **counts, "seconds": seconds, "weights": self.weights, **report})
        self.member.phase = "wait"
        verdict = self._receive_verdict()
        while verdict["epoch"] < self.view.epoch or (verdict["kind"] == "view" and verdict["epoch"] == self.view.epoch):
            verdict = self._receive_verdict()
        self.member.phase = "compute"
        if verdict["kind"] == "view":
            clear_gradients(state.optimizers[0])
            self.num_repeats += 1
            self._begin_view(View.of(verdict), state)
            return False
        self.measured = {
            "islands/members": len(self.view.members),
            "islands/rows": here.num_filled,
            "islands/compute_seconds": seconds,
            "islands/exchange_seconds": exchanged_at - self.began_at - seconds,
            "islands/verdict_seconds": time.monotonic() - exchanged_at,
            "islands/bytes": self.num_bytes,
        }
        self._commit(verdict)
        return True

    def _commit(self, verdict: Message) -> None:
        """Pass the numbers of all islands to this rank's GradientStep and Agreement."""
        here = self.agreement.current
        self.num_drifts += len(verdict["drifted"])
        loss = verdict["loss_sum" if self.gradient_step.sums else "loss"]
        self.gradient_step.agreed = Measured(verdict["norm"], loss, verdict["bad"], verdict["out_of_range"])
        for name, rows in verdict["rows"].items():
            self.trained.setdefault(name, {**self.machines[name], "rows": 0})["rows"] += rows
        self.tokens_elsewhere += verdict["tokens"] - here.num_tokens
        self.agreement.current = here._replace(
            num_filled=verdict["samples"],
            num_tokens=verdict["tokens"],
            num_losses=verdict["losses"],
            digest=verdict["digest"] % (1 << 64),
        )
        self.next_view = View.of(verdict["next"]) if verdict["next"] is not None else None

    def metrics(self) -> dict[str, float]:
        return {**self.measured, "islands/repeats": self.num_repeats, "islands/drifts": self.num_drifts}

    def _exchange(self, loss: torch.Tensor) -> Message:
        """Replace this island's gradient with the global batch's, if every rank could exchange. Returns the report."""
        held, parameters = self.held, list(self.held.parameters.values())
        parts, inside = held.views({name: self._gradient(parameter) for name, parameter in held.parameters.items()})
        has_failed, step, summing = True, self.gradient_step, self.summing
        assert summing is not None
        with suppress(OSError):
            summing.wait(inside)
            has_failed = False
        self.member.phase, self.summing = "wait", None  # for ranks whose links are slower or dead
        leaves_here, num_bytes = bool(self.agreement.preemption.reason), self.exchange.num_bytes - self.num_bytes_before
        failed, leaves, link_rate, self.num_bytes = all_reduce_sum(
            [int(has_failed), int(leaves_here), int(summing.link_rate), num_bytes]
        )
        report = {"leaving": bool(leaves), "link": link_rate, "again": 0, "asks_for_whole": False}
        if failed:
            return {"ok": False, **report, **_report(Measured(0.0, 0.0, 0))}
        self.member.phase = "compute"
        if len(self.view.members) > 1:
            for key, total in summing.sums.items():
                inside[key].copy_(total)
            held.completion.apply(inside, parts, summing.dtype)
        if step.sums:  # a rank without a piece has heard of no other island
            step.weight = all_reduce_max([int(summing.total_weight)])[0]
            step.sums.finish(parameters, step.scale_of_sums)
        return {"ok": True, **report, **_report(step.measure(parameters, loss))}

    def _gradient(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        if parameter.grad is None:  # no token of this rank's rows has a loss
            parameter.grad = torch.zeros_like(parameter, dtype=torch.float64 if self.gradient_step.sums else None)
        return local(parameter.grad)

    # ------------------------------------------------------------------------------------------- state for joiners

    def _send_state(self, state: State) -> None:
        """Send the run's state to joining islands: scalars through the coordinator, tensors from rank to rank."""
        here = self.checkpointing
        kinds, optimizer, pieces = self.held.read_state(self.given_weights)
        if self.rank == 0:
            segments = here.segments_until(state) if int(state.timestamp.batch) >= here.first_batch else ()
            content = {
                "optimizer": encode_value(optimizer),
                "kinds": kinds,
                "scalars": encode_value(here.run_state.collect(state)),
                "segments": [encode_segment(segment) for segment in segments],
            }
            self.member.send({"kind": "state", "epoch": self.view.epoch, "state": content})
        with suppress(OSError):  # a joiner is gone: the next exchange fails, and the batch is repeated without it
            for label, kind in enumerate(kinds, int(state.timestamp.batch) * LABELS_PER_BATCH + 1):
                self.exchange.give(pieces[kind], self.held.pieces, self.view.joiners, label)

    @torch.no_grad()
    def _receive_state(self, state: State) -> None:
        """Replace this island's state with the donor's. Raises Preempted if the donor fails."""
        self.member.phase = "wait"
        message = self._receive_verdict()
        if message["kind"] != "state":  # a newer view, which assumes that this island has the state
            raise self._missing_state()
        content = message["state"]
        error, kinds = None, content["kinds"]
        pieces: dict[str, Tensors] = {}
        try:
            for label, (kind, names) in enumerate(sorted(kinds.items()), self.view.batch * LABELS_PER_BATCH + 1):
                pieces[kind] = self.exchange.take(self.held.pieces_with(names), self.view.donor, label)
        except OSError as caught:
            error = caught
        self.member.phase = "wait"
        if all_reduce_sum([int(error is not None)])[0]:
            raise self._missing_state()
        self.member.phase = "compute"
        self.held.write_state(kinds, pieces, decode_value(content["optimizer"]))
        here = self.checkpointing
        here.run_state.restore(decode_value(content["scalars"]), state)
        here.segments = tuple(decode_segment(Item(one, "segment")) for one in content["segments"])
        here.begin(state)

    def _missing_state(self) -> Preempted:
        return Preempted(f"left the run: {self.view.donor} could not give its state; run the same command again")


def final_gradients(model: Any, parameters: Mapping[str, torch.nn.Parameter]) -> dict[str, torch.nn.Parameter]:
    """Return the parameters whose gradient is final when a batch's last hook on it runs.

    Of a pipeline these are those that FSDP reduces, once, after the stage's last microbatch. Hooks on others run after
    each. Tied embeddings of two stages are added up later still.
    """
    if not isinstance(model, Pipeline):
        return dict(parameters)
    if not all(isinstance(stage, FSDPModule) for stage in model.stages):
        return {}
    shared = {id(parameter) for parameter in model.shared_parameters}
    return {name: parameter for name, parameter in parameters.items() if id(parameter) not in shared}


def now() -> float:
    """Return the time after the device has finished: an island's rows follow from its speed."""
    devices.finish()
    return time.monotonic()


def _report(measured: Measured) -> Message:
    norm, loss, num_bad, is_out_of_range = measured
    return {"norm": norm, "loss": loss, "bad": num_bad, "out_of_range": is_out_of_range}
