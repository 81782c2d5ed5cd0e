"""Islands that train alone between outer steps (`islands.sync`): another algorithm than one world's, DiLoCo.

Between two outer steps an island computes its rows of every batch and steps its optimizer at once; only heartbeats
flow. An outer step takes place at the end of a batch. Islands exchange the changes of their weights; the coordinator
commits all batches since the last outer step together. If the exchange fails it is repeated; nothing is computed again.
Rows of an island that dies in a round are lost; the others keep theirs until the round ends.

Saves, joiners and leaving wait for an outer step. Counts of samples and tokens are this island's own until then.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch
from composer import Trainer
from composer.core import State
from torch.distributed.tensor import DTensor

from llmfoundry_lite.checkpoint.state import local_tensor
from llmfoundry_lite.config.schema import TrainConfig
from llmfoundry_lite.config.spans import Duration
from llmfoundry_lite.errors import NonFiniteError
from llmfoundry_lite.islands.boxes import Tensors
from llmfoundry_lite.islands.changes import swap_changes
from llmfoundry_lite.islands.encoding import encode
from llmfoundry_lite.islands.local_steps import Round, lost_samples, take_outer_step
from llmfoundry_lite.islands.member import Lost, View
from llmfoundry_lite.islands.messages import Message
from llmfoundry_lite.islands.summing import sum_weighted
from llmfoundry_lite.ranks.exchange import all_gather_json, all_reduce_max, all_reduce_sum
from llmfoundry_lite.training.islands import LABELS_PER_BATCH, Islands, now
from llmfoundry_lite.training.partners import OUTER_MOMENTUM
from llmfoundry_lite.training.save_policy import Decision
from llmfoundry_lite.training.trainer import LOSS


class LocalIslands(Islands):
    """The other islands of a run with local steps, seen from one rank of this island."""

    takes_outer_steps = True
    overlaps = False

    def __init__(self, config: TrainConfig):
        super().__init__(config)
        assert self.config.sync is not None
        self.sync = self.config.sync
        self.every = int(Duration.parse(self.sync.every).value)
        self.round = Round()
        self.round_lanes: dict[str, range] = {}
        """Rows of all islands until the round ends."""
        self.lost: Lost | None = None
        self.has_left = False
        """The others carry on: what was trained since the last outer step is lost."""
        self.owes_save = False
        self.num_lost_samples = 0
        self.kept: Tensors = {}
        """Sum of what rounding has dropped from the changes of this rank's pieces."""
        self.dropped: Tensors = {}
        """The same, after the round that is being exchanged."""

    def enter(self, trainer: Trainer, checkpointing: Any, on_evicted: Callable[[str, str], None]) -> None:
        self.logger = trainer.logger
        super().enter(trainer, checkpointing, on_evicted)
        self._take_momentum(trainer.state)
        self._begin_round(trainer.state)
        checkpointing.print_on_rank_0(
            f"islands: {self.described}: another algorithm than one world's; losses are of this island's rows"
        )

    @property
    def described(self) -> str:
        return f"local steps, every {self.every}"

    @property
    def segment(self) -> dict[str, Any]:  # type: ignore[override]
        return {**super().segment, "sync": self.described}

    # ------------------------------------------------------------------------------------------------- the batches

    @property
    def next_lanes(self) -> range:
        return self.round_lanes[self.name]

    def begin_batch(self, state: State) -> None:
        if self.lost is not None:
            self._leave(self.lost)
        self.began_at = now()

    def exchange_gradient(self, state: State, loss: torch.Tensor) -> bool:
        """Keep this island's own gradient."""
        seconds = now() - self.began_at
        self.round.seconds += seconds
        self.measured = {
            "islands/local_steps": self.every,
            "islands/members": len(self.round_lanes),
            "islands/rows": self.agreement.current.num_filled,
            "islands/compute_seconds": seconds,
            "islands/lost_samples": self.num_lost_samples,
        }
        return True

    def move_on(self, state: State) -> Iterator[Any] | None:
        """Count the batch, and take an outer step if the round ends with it."""
        if self.has_left:
            return None
        here = self.agreement.current
        weight = here.num_losses if self.by_tokens else here.num_filled
        counts = {"samples": here.num_filled, "tokens": here.num_tokens, "losses": here.num_losses}
        self.round.count(weight=weight, **counts, digest=here.digest, loss=float(state.total_loss_dict[LOSS]))
        policy = self.checkpointing.policy
        wants_to_leave = bool(self.agreement.preemption.reason) or policy.is_launch_over(state)
        leaves, is_lost = all_reduce_max([int(wants_to_leave), int(self.member.lost is not None)])
        if is_lost:
            self._end_without_coordinator(state)
        elif self.round.steps >= self.every or policy.is_last(state):
            self._end_round(state, leaves=bool(leaves))
        elif leaves:
            self.leave_early(state)
        return None if self.has_left or self.lanes == self.next_lanes else self.batches(state)

    # --------------------------------------------------------------------------------------------- the outer step

    @torch.no_grad()
    def _begin_round(self, state: State) -> None:
        """Copy the weights to the host."""
        self.start = {name: _on_host(parameter) for name, parameter in self.held.parameters.items()}
        self.round, self.round_lanes = Round(), self.view.lanes

    def _take_momentum(self, state: State) -> None:
        """Copy the momentum of a restored or received state to the host; zeros if it has none."""
        slots = state.optimizers[0].state
        kept = {name: slots.get(parameter, {}).get(OUTER_MOMENTUM) for name, parameter in self.held.parameters.items()}
        self.velocity = {
            name: torch.zeros_like(_on_host(self.held.parameters[name])) if slot is None else _on_host(slot)
            for name, slot in kept.items()
        }
        self._show_momentum(state)

    def _show_momentum(self, state: State) -> None:
        """Make the momentum a slot of the optimizer's state, where it is saved and sent to joiners."""
        slots = state.optimizers[0].state
        for name, parameter in self.held.parameters.items():
            if slots.get(parameter) or parameter.grad is not None:  # the first step sets up a state that is empty
                slots[parameter][OUTER_MOMENTUM] = _like(self.velocity[name], parameter)

    @torch.no_grad()
    def _end_round(self, state: State, *, leaves: bool) -> None:
        """Exchange changes until the coordinator commits them, and take the outer step."""
        began_at = time.monotonic()
        changes = {name: self.start[name] - _on_host(parameter) for name, parameter in self.held.parameters.items()}
        while True:
            mean, norm = self._exchange_changes(state, changes)
            exchanged_at = time.monotonic()
            self._report(state, leaves=leaves, ok=mean is not None, norm=norm)
            self.member.phase = "wait"
            verdict = self._next_verdict()
            while isinstance(verdict, dict) and verdict["epoch"] < self.view.epoch:
                verdict = self._next_verdict()
            self.member.phase = "compute"
            if isinstance(verdict, dict) and verdict["kind"] == "view":
                self.num_repeats += 1
                verdict = self._take_view(View.of(verdict), state) or verdict
            if isinstance(verdict, Lost):
                self._end_alone(state, verdict)
                return
            if verdict["kind"] == "commit":
                break
        assert mean is not None
        self.measured = {
            "islands/exchange_seconds": exchanged_at - began_at,
            "islands/verdict_seconds": time.monotonic() - exchanged_at,
            "islands/bytes": self.num_bytes,
        }
        self._commit_round(state, verdict, mean)

    def _exchange_changes(self, state: State, changes: Tensors) -> tuple[Tensors | None, float]:
        """Return the mean change over islands, and its norm; None if a rank could not exchange."""
        num_bytes_before = self.exchange.num_bytes
        mean = {name: change.clone() for name, change in changes.items()}
        parts, inside = self.held.views(mean)
        encoded = {key: encode(part + self.kept.get(key, 0.0), self.sync.dtype) for key, part in inside.items()}
        swapped = None
        with suppress(OSError):
            label, weight = int(state.timestamp.batch) * LABELS_PER_BATCH, float(self.round.weight)
            swapped = swap_changes(self.exchange, self.held.pieces, encoded, self.sync.dtype, label, weight)
        self.member.phase = "wait"
        if all_reduce_sum([int(swapped is None)])[0]:
            return None, 0.0
        assert swapped is not None
        self.member.phase = "compute"
        weights = {**swapped.weights, self.name: float(self.round.weight)}
        whole = max(sum(weights[name] for name in sorted(weights)), 1.0)
        shares = {name: weight / whole for name, weight in weights.items()}
        self.dropped = {}
        for key, part in inside.items():
            self.dropped[key] = part + self.kept.get(key, 0.0) - encoded[key].values
            theirs = {island: tensors[key] for island, tensors in swapped.tensors.items()} if part.numel() else {}
            part.copy_(sum_weighted(encoded[key].values, self.name, theirs, shares))
        self.held.completion.apply(inside, parts, torch.float32)
        squares = sum(float(part.double().square().sum()) for part in inside.values())
        own = [squares, self.exchange.num_bytes - num_bytes_before]
        squares, self.num_bytes = (sum(column) for column in zip(*all_gather_json(own), strict=True))
        return mean, math.sqrt(squares)

    def _report(self, state: State, *, leaves: bool, ok: bool, norm: float) -> None:
        if self.rank != 0:
            return
        here = self.round
        keys = ("steps", "weight", "samples", "tokens", "losses", "digest", "loss")
        counts = {key: getattr(here, key) for key in keys}
        place = {"epoch": self.view.epoch, "batch": int(state.timestamp.batch) - here.steps, "weights": self.weights}
        flags = {"ok": ok, "leaving": leaves, "out_of_range": False, "bad": 0, "link": 0}
        pace = {"norm": norm, "seconds": here.seconds / here.steps}
        self.member.send({"kind": "prepared", **place, **counts, **flags, **pace})

    def _commit_round(self, state: State, verdict: Message, mean: Tensors) -> None:
        """Apply a committed outer step, and begin the next round with the view that follows."""
        batch, steps = int(state.timestamp.batch), self.round.steps
        if not math.isfinite(verdict["norm"]):
            raise NonFiniteError(
                f"outer step after batch {batch}: the mean change of the weights is not finite; the newest checkpoint "
                "stands. Lower the learning rate or islands.sync.lr"
            )
        lost_before = self.num_lost_samples
        self._note_lost(batch, verdict["rows"])
        for name, rows in verdict["rows"].items():
            self.trained.setdefault(name, {**self.machines[name], "rows": 0})["rows"] += rows
        self.num_drifts += len(verdict["drifted"])
        self._count_elsewhere(state, verdict["samples"] - self.round.samples, verdict["tokens"] - self.round.tokens)
        counted = {key: verdict[key] for key in ("loss", "samples", "tokens")}
        self.measured |= {f"islands/{key}": value for key, value in counted.items()}
        self.measured |= {
            "islands/steps": steps,
            "islands/outer_norm": verdict["norm"],
            "islands/lost_samples": self.num_lost_samples,
            "islands/lost_in_round": self.num_lost_samples - lost_before,
        }
        self.logger.log_metrics(self.metrics())
        self._apply(state, mean)
        self.kept = self.dropped
        self.next_view = View.of(verdict["next"]) if verdict["next"] is not None else None
        self.lost = self._begin_next_view(state)
        if verdict["next"] is not None and self.name in self.view.joiners:  # its weights had drifted
            self._take_momentum(state)
        self._begin_round(state)
        is_due = batch // self.config.check_weights_every > (batch - steps) // self.config.check_weights_every
        self.weights = self.held.digest() if is_due else ""

    def _apply(self, state: State, mean: Tensors) -> None:
        for name, parameter in self.held.parameters.items():
            take_outer_step(self.start[name], self.velocity[name], mean[name], self.sync.lr, self.sync.momentum)
            local_tensor(parameter).copy_(self.start[name])
        self._show_momentum(state)

    def _count_elsewhere(self, state: State, num_samples: int, num_tokens: int) -> None:
        """Add the other islands' samples and tokens of the round to the run's clock."""
        stamp = state.timestamp
        state.timestamp = stamp.copy(
            sample=int(stamp.sample) + num_samples,
            sample_in_epoch=int(stamp.sample_in_epoch) + num_samples,
            token=int(stamp.token) + num_tokens,
            token_in_epoch=int(stamp.token_in_epoch) + num_tokens,
            token_in_iteration=int(stamp.token_in_iteration) + num_tokens,
        )
        self.tokens_elsewhere += num_tokens

    def _note_lost(self, batch: int, trained: Mapping[str, int]) -> None:
        """Name the rows of islands that began the round and are not in its outer step."""
        batches = f"batches {batch - self.round.steps + 1} to {batch}"
        for name, count in lost_samples(self.round_lanes, trained, self.round.steps).items():
            self.num_lost_samples += count
            self.checkpointing.print_on_rank_0(f"islands: rows of {name} in {batches} are lost: {count} samples")

    # ------------------------------------------------------------------------------------------ losing and leaving

    def _take_view(self, view: View, state: State) -> Lost | None:
        """Apply a view in the middle of a round, whose rows stay as they are."""
        described, lost = self._describe(view)
        if lost is None:
            self._begin_view(view, state, described)
        return lost

    def _end_without_coordinator(self, state: State) -> None:
        verdict = self._next_verdict()
        while not isinstance(verdict, Lost):
            if verdict["kind"] == "view":
                self.view = View.of(verdict)  # for its scribe
            verdict = self._next_verdict()
        self._end_alone(state, verdict)

    @torch.no_grad()
    def _end_alone(self, state: State, lost: Lost) -> None:
        """Leave after this batch. If the coordinator is gone, take an outer step with this island's change first: one
        island then saves."""
        self.lost = lost
        if lost.kind != "gone":
            self.has_left = True
            return
        self._note_lost(int(state.timestamp.batch), {self.name: self.round.samples})
        self._apply(state, {name: self.start[name] - _on_host(p) for name, p in self.held.parameters.items()})
        self._begin_round(state)

    def leave_early(self, state: State) -> None:
        """Leave in the middle of a round if others carry on; else end it."""
        if self.round.steps == 0 or self.has_left:
            return
        if len(self.view.members) > 1:
            if self.rank == 0:
                self.member.send({"kind": "leave", "asks": True})
            verdict = self._next_verdict()
            while isinstance(verdict, dict) and verdict["kind"] != "left":
                lost = self._take_view(View.of(verdict), state)
                verdict = lost or self._next_verdict()
            if isinstance(verdict, Lost):
                self._end_alone(state, verdict)
                return
            if not verdict["is_last"]:
                self.has_left = True
                self.checkpointing.print_on_rank_0(
                    f"islands: this island leaves; its last {self.round.steps} batches since the outer step are lost: "
                    f"{self.round.samples} samples"
                )
                return
        self._end_round(state, leaves=True)

    def decide(self, decision: Decision) -> Decision:
        """Put off saves, and leaving, until the outer step."""
        if self.has_left and not (decision.preempted_by or decision.stops):
            if self.lost is not None:
                self._leave(self.lost)
            return decision._replace(saves=False)
        if self.round.steps == 0 or self.has_left:
            saves, self.owes_save = decision.saves or self.owes_save, False
            return decision._replace(saves=saves and not self.has_left)
        if decision.saves and not self.owes_save:
            self.owes_save = True
            self.checkpointing.print_on_rank_0("islands: the save that is due is made at the next outer step")
        return decision._replace(saves=False, preempted_by="", stops=False)

    @property
    def saves_here(self) -> bool:  # type: ignore[override]
        return super().saves_here and self.round.steps == 0


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of this rank's part in the host's memory, in fp32."""
    return local_tensor(tensor).to("cpu", torch.float32, copy=True)


def _like(local: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor that is divided as `parameter` is."""
    if not isinstance(parameter, DTensor):
        return local
    layout: dict[str, Any] = {"shape": parameter.shape, "stride": parameter.stride(), "run_check": False}
    return DTensor.from_local(local, parameter.device_mesh, parameter.placements, **layout)
