"""One run on several islands at once: what a batch asks of the other islands, and what comes of it.

Owns the seam between training and `llmfoundry_lite.islands`: this island's rows, its gradient's way to the others, the
verdict on each batch, the state of those that join, and who saves. Leaves membership and commits to the coordinator,
and sockets to `islands.exchange`.

A batch counts on all islands or on none. Until the coordinator says so, nothing but gradients has been touched: they
are dropped, and the batch is computed again with the rows of a new view.
"""

import math
import secrets
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import torch
from composer.core import State
from composer.loggers import Logger

from llmfoundry_lite import devices
from llmfoundry_lite.checkpoint.planning import box_of
from llmfoundry_lite.checkpoint.state import local_part, parameter_names, read_state, write_optimizer
from llmfoundry_lite.config.changes import what_is_trained
from llmfoundry_lite.config.schema import TrainConfig, as_dict
from llmfoundry_lite.data.dataset import TextDataset
from llmfoundry_lite.data.loader import build_text_loader
from llmfoundry_lite.errors import ConfigError
from llmfoundry_lite.islands.exchange import (
    Box,
    Boxes,
    Exchange,
    Ranks,
    Swapped,
    complete,
    digest_of_parts,
    share_out,
    sum_weighted,
)
from llmfoundry_lite.islands.member import Lost, Member, View, found_coordinator
from llmfoundry_lite.islands.messages import Message, find_token, parse_address
from llmfoundry_lite.ranks.codec import decode_value, encode_value
from llmfoundry_lite.ranks.ending import Preempted
from llmfoundry_lite.ranks.exchange import all_reduce_sum, broadcast_json, max_of, raise_on_all_ranks
from llmfoundry_lite.ranks.rank import this_rank
from llmfoundry_lite.training.agreement import Agreement
from llmfoundry_lite.training.checkpointing import Checkpointing
from llmfoundry_lite.training.gradients import GradientStep, Measured, measure
from llmfoundry_lite.training.optimizers import clear_gradients, local

LOOK_SECONDS = 0.5
"""Between two looks whether a launch that waits is asked to leave."""
Described = dict[str, list[Message]]
"""Islands, each by what its ranks have said of themselves."""
LABELS = 64
"""Of transfers, for each batch: 0 is the gradient, those above are kinds of state."""


class Islands:
    """This rank's part. Every rank of the island calls every method at the same places."""

    def __init__(self, config: TrainConfig):
        """Connects, so that a launch is refused before anything heavy starts. Raises UserError on all ranks."""
        assert config.islands is not None
        self.config = config.islands
        self.fingerprints = what_is_trained(as_dict(config))
        self.num_rows = config.global_train_batch_size
        self.by_tokens = config.accumulate_train_batch_on_tokens
        self.loader = config.train_loader
        self.name = self.config.name
        self.rank, self.num_ranks, *_ = this_rank()
        self.view = View(0, 0, {}, {}, "", "", [])
        self.next_view: View | None = None
        self.trained: dict[str, dict[str, Any]] = {}
        """Each island that has trained since this one began: its machine, and its rows since then."""
        self.metrics: dict[str, float] = {}
        """Of the batch that was committed last."""
        self.num_repeats = self.num_drifts = 0
        self.weights = ""
        """Their digest, where they are to be compared now."""
        self.tokens_elsewhere = 0
        """That other islands have trained in this time."""
        error = None
        coordinator = parse_address(self.config.coordinator, "islands.coordinator")
        try:
            if self.config.begin_with is not None and self.rank == 0:
                found_coordinator(coordinator, self.config.begin_with, Path(config.run_folder) / "coordinator.txt")
        except ConfigError as caught:
            error = caught
        raise_on_all_ranks(error)
        try:
            token = find_token()
            self.member = Member(coordinator, token, self.name, self._say_waiting)
            self.exchange = Exchange(self.name, self.rank, self.config.address, token)
        except ConfigError as caught:
            error = caught
        except (OSError, UnicodeError) as caught:  # the latter: no name of a host
            reason = getattr(caught, "strerror", None) or caught
            error = ConfigError(f"islands.address: {self.config.address}: {reason}")
        raise_on_all_ranks(error)
        self.member.on_newer_view = self.exchange.abort
        self.member.on_lost = lambda: self.exchange.abort(math.inf)
        self.member.count_bytes = lambda: self.exchange.num_bytes
        self.exchange.on_transfer = self._note_transfer

    def _say_waiting(self, reason: str) -> None:
        if self.rank == 0:
            print(f"islands: still waiting: {reason}", flush=True)

    def attach(self, agreement: Agreement, guard: GradientStep) -> None:
        self.agreement = agreement
        self.guard = guard
        agreement.changed = self.move_on

    @property
    def this_one_saves(self) -> bool:
        """It is the scribe; and if it leaves, nobody is left to go on."""
        following = None if self.next_view is None else self.next_view.members
        return self.view.scribe == self.name and (not following or self.name in following)

    @property
    def has_lost_the_others(self) -> bool:
        """As far as this rank has heard; it leaves at the next batch."""
        return self.member.lost is not None

    # ------------------------------------------------------------------------------------------- coming and going

    def enter(self, state: State, logger: Logger, checkpointing: Checkpointing) -> None:
        """Say what this rank has, and wait for the first view; take over the state of a run that is under way."""
        self.checkpointing = checkpointing
        self.save_before_leaving = lambda reason: checkpointing.save_before_leaving(reason, state, logger)
        dataset: Any = state.train_dataloader.dataset  # type: ignore[union-attr]
        self.dataset: TextDataset = dataset
        optimizer = state.optimizers[0]
        names = parameter_names(checkpointing.model.model, optimizer)
        self.parameters = {names[id(p)]: p for group in optimizer.param_groups for p in group["params"]}
        self.boxes: Boxes = {name: Box(*box_of(parameter)) for name, parameter in self.parameters.items()}
        launch, first_batch = broadcast_json([secrets.token_hex(8), int(state.timestamp.batch)])
        self.member.say_hello(
            {
                "island": self.name,
                "launch": launch,
                "rank": self.rank,
                "size": self.num_ranks,
                "address": list(self.exchange.address),
                "boxes": self.boxes,
                "machine": {
                    "device": devices.device_name(),
                    "num_devices": self.num_ranks,
                    "torch": str(torch.__version__),
                },
                "fingerprints": {**self.fingerprints, "order of the data": dataset.order.fingerprint},
                "batch": first_batch,
                "rows": self.num_rows,
                "microbatch": int(state.device_train_microbatch_size or 1),
                "weight": self.config.weight,
            }
        )
        if self.rank == 0:
            print("islands: waiting until as many are here as the run begins with, or its next batch ends", flush=True)
        self._wait_for_others()
        self._take_up(self._hear_view(), state)

    def _wait_for_others(self) -> None:
        """For as long as it takes. Who asks this launch to leave is answered at once: there is nothing to save."""
        preemption = self.agreement.preemption
        while not max_of([int(self.member.wait(LOOK_SECONDS))])[0]:
            if asked_by := preemption.agree_on_reason():
                why = preemption.because(asked_by)
                raise Preempted(f"{why} while waiting for other islands; run the same command again", orderly=True)

    def close(self, *, has_finished: bool = False) -> None:
        self.member.close(has_finished=has_finished)
        self.exchange.close()

    def _hear_view(self) -> View:
        verdict = self._hear()
        assert verdict["kind"] == "view", verdict["kind"]
        return View.of(verdict)

    def _hear(self) -> Message:
        """The next verdict that rank 0 hears, on all ranks.

        When there is none to come, raises Preempted, after a save if this island is the scribe; ConfigError when the
        island is refused.
        """
        verdict: Any = None
        if self.rank == 0:
            heard = self.member.hear()
            verdict = {"kind": "lost", "lost": list(heard)} if isinstance(heard, Lost) else heard
        verdict = broadcast_json(verdict)
        if verdict["kind"] == "lost":
            self._leave(Lost(*verdict["lost"]))
        return verdict

    def _leave(self, lost: Lost) -> NoReturn:
        if lost.kind == "refused":
            raise ConfigError(f"islands: {lost.reason}")
        if lost.kind == "evicted":
            raise Preempted(f"left the run: {lost.reason}; run the same command again", orderly=True)
        raise Preempted(self.save_before_leaving(lost.reason), orderly=True)

    def _describe(self, view: View) -> tuple[Described, Lost | None]:
        """What rank 0 knows of the view's islands, or why it knows nothing."""
        described: Described = {}
        lost: Lost | None = None
        if self.rank == 0:
            try:
                described = {name: self.member.describe(name, launch) for name, launch in view.members.items()}
            except ConnectionError as caught:
                lost = self.member.lost or Lost(str(caught), "gone")
        described, lost = broadcast_json([described, lost])
        return described, Lost(*lost) if lost is not None else None

    def _take_up(self, view: View, state: State, described: Described | None = None) -> None:
        """A new view, between two batches or before one is repeated."""
        if described is None:
            described, lost = self._describe(view)
            if lost is not None:
                self._leave(lost)
        if view.scribe == self.name != self.view.scribe:
            self.checkpointing.note_leases()
        self.view, self.next_view = view, None
        pieces = {name: share_out([_boxes_of(one) for one in ranks]) for name, ranks in described.items()}
        self.pieces = pieces[self.name][self.rank]
        others = {
            name: Ranks([(host, port) for host, port in (one["address"] for one in ranks)], pieces[name])
            for name, ranks in described.items()
            if name != self.name
        }
        self.machines = {name: ranks[0]["machine"] for name, ranks in described.items()}
        self.exchange.meet(view.epoch, self.pieces, others)
        if self.name == view.donor:
            self._give_state(state)
        elif self.name in view.joiners:
            self._take_state(state)
        self.member.phase = "compute"

    def _note_transfer(self, is_transferring: bool) -> None:
        """Nothing else counts as silence of a link: `exchange` is said while sockets wait, `wait` while this rank waits
        for its own island or for the coordinator, `compute` whenever the host or the device works."""
        self.member.phase = "exchange" if is_transferring else "compute"

    # --------------------------------------------------------------------------------------------------- the data

    def batches(self, state: State) -> Iterator[Any]:
        """This rank's rows of the epoch's batches, from the next one on. Every rank must begin to read together."""
        lanes = self.view.lanes[self.name]
        num_rows = len(lanes) // self.num_ranks
        mine = lanes[self.rank * num_rows : (self.rank + 1) * num_rows]
        place = int(state.timestamp.batch_in_epoch) * self.dataset.global_batch_size
        self.dataset.continue_with(mine, int(state.timestamp.epoch), place)
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
        """At the end of a batch: batches to go on with instead, if there is a new view with other rows."""
        view, before = self.next_view, self.view
        if view is not None and self.name in view.members:
            described, lost = self._describe(view)
            if lost is not None:  # the next batch hears of it; this one is not recorded yet, and a save would lack it
                return None
            self._take_up(view, state, described)
        is_due = int(state.timestamp.batch) % self.config.check_weights_every == 0
        self.weights = self._digest_weights() if is_due else ""
        return None if self.view.lanes[self.name] == before.lanes[self.name] else self.batches(state)

    def _now(self) -> float:
        """When the device has done what was asked of it: shares follow what it computes, not what it is sent."""
        devices.finish()
        return time.monotonic()

    def _digest_weights(self) -> str:
        parts = {name: local_part(parameter) for name, parameter in self.parameters.items()}
        shapes = {name: tuple(parameter.shape) for name, parameter in self.parameters.items()}
        digest = all_reduce_sum([digest_of_parts(parts, self.pieces, self.boxes, shapes)])[0]
        return f"{digest % (1 << 64):016x}"

    # -------------------------------------------------------------------------------------------------- the batch

    def begin(self) -> None:
        """The batch is computed from here on. An evaluation or a save before it says nothing of this island's pace."""
        self.began_at = self._now()

    def settle(self, state: State, loss: torch.Tensor) -> bool:
        """Exchange the gradient of this island's rows, and hear the verdict. `loss` is a data rank's, as for `measure`.

        True: the gradient is the whole batch's, and the guard and the agreement know what all have found of it. False:
        the gradient is gone, and the batch is to be computed again, with the rows of the new view.
        """
        seconds = self._now() - self.began_at
        here = self.agreement.current
        weight = here.num_losses if self.by_tokens else here.num_filled
        with torch.no_grad():
            report = self._exchange(state, weight, loss)
        exchanged_at = time.monotonic()
        if self.rank == 0:
            place = {"kind": "prepared", "epoch": self.view.epoch, "batch": int(state.timestamp.batch)}
            counts = {"weight": weight, "samples": here.num_filled, "tokens": here.num_tokens}
            self.member.say(
                {
                    **place,
                    **counts,
                    "losses": here.num_losses,
                    "digest": here.digest,
                    "seconds": seconds,
                    "weights": self.weights,
                    **report,
                }
            )
        self.member.phase = "wait"
        verdict = self._hear()
        while verdict["epoch"] < self.view.epoch or (verdict["kind"] == "view" and verdict["epoch"] == self.view.epoch):
            verdict = self._hear()
        self.member.phase = "compute"
        if verdict["kind"] == "view":
            clear_gradients(state.optimizers[0])
            self.num_repeats += 1
            self._take_up(View.of(verdict), state)
            return False
        self.num_drifts += len(verdict["drifted"])
        self.metrics = {
            "islands/members": len(self.view.members),
            "islands/rows": here.num_filled,
            "islands/compute_seconds": seconds,
            "islands/exchange_seconds": exchanged_at - self.began_at - seconds,
            "islands/verdict_seconds": time.monotonic() - exchanged_at,
            "islands/repeats": self.num_repeats,
            "islands/drifts": self.num_drifts,
        }
        self.guard.agreed = Measured(verdict["norm"], verdict["loss"], verdict["bad"])
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
        return True

    def _exchange(self, state: State, weight: int, loss: torch.Tensor) -> Message:
        """Put the whole gradient in place of this island's, if all ranks could exchange it. Returns what to report."""
        gradients = {name: self._gradient(parameter) for name, parameter in self.parameters.items()}
        parts = {name: local(gradient) for name, gradient in gradients.items()}
        inside = {name: parts[name][piece.within(self.boxes[name])] for name, piece in self.pieces.items()}
        swapped = None
        with suppress(OSError):
            swapped = self.exchange.swap(inside, self.pieces, int(state.timestamp.batch) * LABELS, float(weight))
        self.member.phase = "wait"  # for ranks whose links are slower, or dead
        failed, leaves = all_reduce_sum([int(swapped is None), int(bool(self.agreement.preemption.reason))])
        if failed:
            return {"ok": False, "leaving": bool(leaves), "norm": 0.0, "loss": 0.0, "bad": 0}
        assert swapped is not None
        self.member.phase = "compute"
        if len(self.view.members) > 1:
            self._add_up(inside, swapped, weight)
            complete(gradients, parts, self.pieces, self.boxes)
        norm, mean, num_bad = measure(list(self.parameters.values()), loss, self.guard.bad_losses)
        return {"ok": True, "leaving": bool(leaves), "norm": norm, "loss": mean, "bad": num_bad}

    def _gradient(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        if parameter.grad is None:  # no token of these rows has a loss
            parameter.grad = torch.zeros_like(parameter)
        return parameter.grad

    def _add_up(self, inside: dict[str, torch.Tensor], swapped: Swapped, weight: int) -> None:
        weights = {**swapped.weights, self.name: float(weight)}
        whole = max(sum(weights[name] for name in sorted(weights)), 1.0)
        shares = {name: part / whole for name, part in weights.items()}
        for name, values in inside.items():
            if values.numel():
                theirs = {island: tensors[name] for island, tensors in swapped.tensors.items()}
                values.copy_(sum_weighted(values, self.name, theirs, shares))

    # -------------------------------------------------------------------------------------------------- the state

    def _give_state(self, state: State) -> None:
        """To islands that join: numbers through the coordinator, tensors from rank to rank."""
        found = read_state(self.checkpointing.model.model, state.optimizers[0])
        kinds = sorted({key.rsplit("/", 1)[1] for key in found.tensors if key.startswith("optim/")})
        if self.rank == 0:
            told = {"optimizer": encode_value(found.optimizer), "kinds": kinds, **self.checkpointing.tell(state)}
            self.member.say({"kind": "state", "epoch": self.view.epoch, "state": told})
        with suppress(OSError):  # who joins has gone: the next exchange fails, and the batch is repeated without
            for number, tensors in enumerate(self._kinds_of(found.tensors, kinds), 1):
                self.exchange.give(
                    tensors, self.pieces, self.view.joiners, int(state.timestamp.batch) * LABELS + number
                )

    def _kinds_of(self, tensors: dict[str, torch.Tensor], kinds: list[str]) -> Iterator[dict[str, torch.Tensor]]:
        """The parameters' pieces, then those of each kind of slot."""
        for pattern in ("model/{}", *(f"optim/{{}}/{kind}" for kind in kinds)):
            yield {
                name: local_part(tensors[pattern.format(name)])[piece.within(self.boxes[name])]
                for name, piece in self.pieces.items()
            }

    @torch.no_grad()
    def _take_state(self, state: State) -> None:
        """All that the donor has; nothing of what this island has begun with is left."""
        self.member.phase = "wait"
        message = self._hear()
        if message["kind"] != "state":  # a newer view: nobody knows that this island has nothing to train on
            raise self._joined_in_vain()
        told = message["state"]
        error = None
        kinds: list[dict[str, torch.Tensor]] = []
        try:
            for number in range(1, 2 + len(told["kinds"])):
                label = self.view.batch * LABELS + number
                kinds.append(self.exchange.take(self.pieces, self.view.donor, label))
        except OSError as caught:
            error = caught
        self.member.phase = "wait"
        if all_reduce_sum([int(error is not None)])[0]:
            raise self._joined_in_vain()
        self.member.phase = "compute"
        wholes = [self._complete(kind) for kind in kinds]
        for name, parameter in self.parameters.items():
            local_part(parameter).copy_(wholes[0][name])
        slots = {
            f"optim/{name}/{kind}": whole[name]
            for kind, whole in zip(told["kinds"], wholes[1:], strict=True)
            for name in self.parameters
        }
        like = {key: self.parameters[key.split("/", 1)[1].rsplit("/", 1)[0]].detach() for key in slots}
        write_optimizer(state.optimizers[0], self.parameters, decode_value(told["optimizer"]), slots, like)  # type: ignore[arg-type]
        self.checkpointing.take_over(told, state)

    def _joined_in_vain(self) -> Preempted:
        return Preempted(f"left the run: {self.view.donor} could not give its state; run the same command again")

    def _complete(self, pieces: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Pieces of parameters -> this rank's parts of them."""
        parts = {}
        for name, parameter in self.parameters.items():
            parts[name] = torch.zeros_like(local_part(parameter))
            if name in pieces:
                parts[name][self.pieces[name].within(self.boxes[name])] = pieces[name].to(parts[name])
        complete(self.parameters, parts, self.pieces, self.boxes)
        return parts


def _boxes_of(described: Message) -> Boxes:
    return {name: Box(tuple(offset), tuple(lengths)) for name, (offset, lengths) in described["boxes"].items()}
