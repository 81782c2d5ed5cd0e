"""Islands that train alone between outer steps (`islands.sync`): another algorithm than one world's, DiLoCo.

Between two outer steps an island computes its rows of every batch and steps its optimizer at once; only heartbeats
flow. A round ends with an exchange of the change of the weights, or of a fragment of them. With `delay` that exchange
begins some batches earlier, and the islands compute meanwhile. The coordinator commits all batches of the round
together. If the exchange fails it is repeated; nothing is computed again. Rows of an island that dies in a round are
lost, or trained by the others in the next one (`lost_rows`).

With fragments or a delay the islands' weights differ after most rounds (`is_alike`). Saves and `stop_after` ask for a
round that ends with an exchange of all weights, without delay (`is_whole`), and wait for its end (`is_settled`). An
island that joins begins at the weights of the last outer steps. Counts of samples and tokens are this island's own
until a round ends.
"""

import math
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from llmfoundry_islands.block import settings_of
from llmfoundry_islands.coordination.member import Lost, View
from llmfoundry_islands.coordination.messages import Message
from llmfoundry_islands.tensors.boxes import Tensors
from llmfoundry_islands.training.islands import LABELS_PER_BATCH, Islands, now
from llmfoundry_islands.training.local_steps import Again, Round, lost_samples, share_lost
from llmfoundry_islands.training.outer_weights import Departure, OuterWeights
from llmfoundry_lite.config.schema import TrainConfig
from llmfoundry_lite.errors import NonFiniteError
from llmfoundry_lite.ranks.exchange import all_gather_json, all_reduce_max, all_reduce_sum
from llmfoundry_lite.training.partners import Decision
from llmfoundry_lite.training.run_handle import RunHandle


class LocalIslands(Islands):
    """The other islands of a run with local steps, seen from one rank of this island."""

    takes_outer_steps = True
    overlaps = False

    def __init__(self, config: TrainConfig):
        super().__init__(config)
        assert self.config.sync is not None
        self.sync = self.config.sync
        self.every, self.delay = int(self.sync.every.value), int(self.sync.delay.value)
        self.interval = self.every // self.sync.fragments
        """Batches of a round."""
        self.streams = self.sync.fragments > 1 or self.delay > 0
        """Weights of the islands differ after most rounds."""
        self.is_whole = not self.streams
        """This round ends with an exchange of all weights, for which nothing leaves early."""
        self.is_alike = True
        """The last outer step was of all weights."""
        self.round = Round()
        self.round_row_indices: dict[str, range] = {}
        """Rows of all islands until the round ends."""
        self.round_again: dict[str, list[int]] = {}
        """Rows of each batch of the round before that islands train again in this one."""
        self.num_back = 0
        """Batches of the round before."""
        self.departure: Departure | None = None
        """The change that travels while this island computes."""
        self.lost: Lost | None = None
        self.has_left = False
        """The others carry on: what was trained since the last outer step is lost."""
        self.owes_save = False
        self.num_lost_samples = self.num_samples_again = 0

    def join_run(self, run: RunHandle) -> None:
        """Join the run as `Islands.join_run` does. Also raises ConfigError for more fragments than parameters."""
        super().join_run(run)
        self.outer.take_over()
        self._begin_round()
        self.is_whole = self.is_whole or self.view.is_whole
        run.print(f"islands: {self.described}: another algorithm than one world's; losses are of this island's rows")

    def prepare(self) -> None:
        self.outer = OuterWeights(self.sync, self.held, self.run.optimizer)

    @property
    def given_weights(self) -> Tensors:  # type: ignore[override]
        return self.outer.start

    @property
    def described(self) -> str:
        fragments, delay = self.sync.fragments, self.delay
        more = (f", {fragments} fragments" if fragments > 1 else "") + (f", delay {delay}" if delay else "")
        return f"local steps, every {self.every}{more}"

    @property
    def segment(self) -> dict[str, Any]:  # type: ignore[override]
        return {**super().segment, "sync": self.described}

    def _note_transfer(self, is_transferring: bool) -> None:
        if threading.current_thread() is threading.main_thread():  # else this rank computes, or `_arrive` says so
            super()._note_transfer(is_transferring)

    # ------------------------------------------------------------------------------------------------- the batches

    @property
    def next_row_indices(self) -> range:
        return self.round_row_indices[self.name]

    @property
    def next_again(self) -> Again:
        """Earlier rows that this island trains again in the next batch."""
        row_indices = self.round_again.get(self.name)
        is_there = row_indices and self.round.steps < self.num_back <= self.run.batch_in_epoch
        return Again(row_indices, self.num_back) if row_indices and is_there else Again()

    def batches(self) -> Iterator[Any]:
        self.again = self.next_again
        return super().batches()

    def begin_batch(self) -> None:
        if self.lost is not None:
            self._leave(self.lost)
        self.outer.hide_momentum()
        self.began_at = now()

    def exchange_gradient(self, loss: torch.Tensor) -> bool:
        """Keep this island's own gradient."""
        seconds = now() - self.began_at
        self.round.seconds += seconds
        self.measured = {
            "islands/local_steps": self.every,
            "islands/members": len(self.round_row_indices),
            "islands/rows": self.run.counts.num_samples,
            "islands/compute_seconds": seconds,
            "islands/lost_samples": self.num_lost_samples,
            "islands/samples_again": self.num_samples_again,
        }
        return True

    def changed_batches(self) -> Iterator[Any] | None:
        """Count the batch, and take an outer step if the round ends with it."""
        if self.has_left:
            return None
        run, weight = self.run, self.run.counts.weight(by_tokens=self.by_tokens)
        self.round.count(run.counts, weight, run.loss, again=len(self.again.row_indices))
        self.outer.count(weight)
        leaves, is_lost = all_reduce_max([int(run.is_asked_to_leave), int(self.member.lost is not None)])
        if is_lost:
            self._end_without_coordinator()
        elif run.is_last or self.round.steps >= self.interval:
            self._end_round(is_whole=self.is_whole or run.is_last, leaves=bool(leaves or run.is_launch_over))
        elif leaves:
            self.leave_early()
        elif self.round.steps == self.interval - self.delay and not self.is_whole:
            self._depart(is_whole=False)
        if self.has_left or (self.row_indices, self.again) == (self.next_row_indices, self.next_again):
            return None
        return self.batches()

    # --------------------------------------------------------------------------------------------- the outer step

    def _begin_round(self) -> None:
        self.round, self.round_row_indices = Round(), self.view.row_indices
        self.round_again, self.num_back = {}, 0
        self.num_bytes_before = self.exchange.num_bytes

    def _depart(self, *, is_whole: bool) -> Departure:
        """Send the change of all weights, or of the fragment whose turn it is."""
        batch = self.run.batch
        turn = (batch - self.round.steps) // self.interval % self.sync.fragments
        numbers = range(self.sync.fragments) if is_whole else [turn]
        self.departure = self.outer.depart(numbers, self.exchange, batch * LABELS_PER_BATCH)
        return self.departure

    def _end_round(self, *, is_whole: bool, leaves: bool) -> None:
        """Exchange changes until the coordinator commits the round, and take the outer step."""
        began_at = time.monotonic()
        if is_whole and self.departure is not None:  # the run ends: what travels is in the whole change, too
            self.member.phase = "exchange"  # else nobody would notice that its link is dead
            self.departure.swap.wait()
            self.departure = None
        departure = self.departure or self._depart(is_whole=is_whole)
        while True:
            norm = self._arrive(departure)
            arrived_at = time.monotonic()
            # An island that leaves, or saves, does so after a whole outer step.
            asks_for_whole = not is_whole and (leaves or (self.owes_save and self.view.leader == self.name))
            self._report(norm, leaving=leaves and is_whole, asks_for_whole=asks_for_whole)
            self.member.phase = "wait"
            decision = self._next_decision()
            while isinstance(decision, dict) and decision["epoch"] < self.view.epoch:
                decision = self._next_decision()
            self.member.phase = "compute"
            if isinstance(decision, dict) and decision["kind"] == "view":
                self.num_repeats += 1
                decision = self._take_view(View.of(decision)) or decision
            if isinstance(decision, Lost):
                self._end_alone(decision)
                return
            if decision["kind"] == "commit":
                break
            departure.send(self.exchange, self.held.pieces, self.sync.dtype)
        self.departure = None
        self.measured = {
            "islands/exchange_seconds": arrived_at - began_at,
            "islands/decision_seconds": time.monotonic() - arrived_at,
            "islands/travel_seconds": departure.swap.seconds,
            "islands/bytes": self.num_bytes,
        }
        self._commit_round(decision, departure)

    def _arrive(self, departure: Departure) -> float | None:
        """Wait for the mean change over islands. Returns its norm; None if a rank could not exchange."""
        self.member.phase = "exchange"
        has_arrived = departure.swap.wait()
        self.member.phase = "wait"
        if all_reduce_sum([int(not has_arrived)])[0]:
            return None
        self.member.phase = "compute"
        own = [departure.take_mean(self.held, self.name), self.exchange.num_bytes - self.num_bytes_before]
        squares, self.num_bytes = (sum(column) for column in zip(*all_gather_json(own), strict=True))
        return math.sqrt(squares)

    def _report(self, norm: float | None, **flags: bool) -> None:
        if self.rank != 0:
            return
        here = self.round
        keys = ("steps", "weight", "samples", "tokens", "losses", "digest", "loss", "again")
        counts = {key: getattr(here, key) for key in keys}
        place = {"epoch": self.view.epoch, "batch": self.run.batch - here.steps, "weights": self.weights}
        pace = {"ok": norm is not None, "norm": norm or 0.0, "seconds": here.seconds / here.steps}
        unused = {"out_of_range": False, "bad": 0, "link": 0}
        self.member.send({"kind": "prepared", **place, **counts, **pace, **flags, **unused})

    def _commit_round(self, decision: Message, departure: Departure) -> None:
        """Apply a committed outer step, and begin the next round with the view that follows."""
        batch, steps = self.run.batch, self.round.steps
        if not math.isfinite(decision["norm"]):
            raise NonFiniteError(
                f"outer step after batch {batch}: the mean change of the weights is not finite; the newest checkpoint "
                "stands. Lower the learning rate or islands.sync.lr"
            )
        lost_before, trained = self.num_lost_samples, decision["rows"]
        self._note_lost(batch, trained, decision["again"])
        for name, rows in trained.items():
            self.trained.setdefault(name, {**self.machines[name], "rows": 0})["rows"] += rows
        self.num_drifts += len(decision["drifted"])
        tokens_elsewhere = decision["tokens"] - self.round.tokens
        self.run.add_counts(decision["samples"] - self.round.samples, tokens_elsewhere)
        self.tokens_elsewhere += tokens_elsewhere
        counted = {key: decision[key] for key in ("loss", "samples", "tokens")}
        self.measured |= {f"islands/{key}": value for key, value in counted.items()}
        self.measured |= {
            "islands/steps": steps,
            "islands/outer_norm": decision["norm"],
            "islands/lost_samples": self.num_lost_samples,
            "islands/lost_in_round": self.num_lost_samples - lost_before,
            "islands/again_in_round": decision["again"],
            "islands/samples_again": self.num_samples_again,
        }
        self.run.log(self.metrics())
        self.is_alike = self.outer.land(departure, batch * LABELS_PER_BATCH)
        self.is_whole = decision["next_is_whole"] or not self.streams
        self.next_view = View.of(decision["next"]) if decision["next"] is not None else None
        if self.is_alike or (self.next_view and self.next_view.joiners):
            self.outer.show_momentum()
        self.lost = self._begin_next_view()
        if self.lost is None and self.next_view is None and decision["next"] and self.name in self.view.joiners:
            self.outer.take_over()  # this island's weights had drifted
        row_indices = self.round_row_indices
        self._begin_round()
        self._share_lost(row_indices, trained, steps)
        is_due = batch // self.config.check_weights_every > (batch - steps) // self.config.check_weights_every
        self.weights = self.held.digest(self.outer.start) if is_due else ""
        if self.lost is not None and self.lost.kind == "gone" and not self.is_alike:
            self._step_alone()

    # ------------------------------------------------------------------------------------------------- lost rows

    def _note_lost(self, batch: int, trained: Mapping[str, int], again: int = 0) -> None:
        """Name the rows of islands that began the round and are not in its outer step, and those trained again."""
        batches = f"batches {batch - self.round.steps + 1} to {batch}"
        for name, count in lost_samples(self.round_row_indices, trained, self.round.steps).items():
            self.num_lost_samples += count
            self.run.print(f"islands: rows of {name} in {batches} are lost: {count} samples")
        self.num_samples_again += again
        if again:
            self.run.print(f"islands: {batches} trained lost rows again: {again} samples")

    def _share_lost(self, row_indices: Mapping[str, range], trained: Mapping[str, int], steps: int) -> None:
        """Divide the rows that the last round has lost among its islands that stay, to be trained in this round."""
        lost = [index for name in row_indices if name not in trained for index in row_indices[name]]
        if lost and self.sync.lost_rows == "retrain":
            staying = {name: rows for name, rows in self.view.row_indices.items() if name in trained}
            self.round_again, self.num_back = share_lost(lost, staying, self.data_ranks), steps
            if staying and not self.round_again:
                self.run.print(
                    f"islands: {len(lost)} lost rows of a batch are no multiple of an island's data ranks, so they are "
                    "not trained again"
                )

    # ------------------------------------------------------------------------------------------ losing and leaving

    def _take_view(self, view: View) -> Lost | None:
        """Apply a view in the middle of a round, whose rows stay as they are."""
        if self.departure is not None:
            self.departure.swap.wait()  # the newer view has ended it
        return super()._take_view(view)

    def _end_without_coordinator(self) -> None:
        decision = self._next_decision()
        while not isinstance(decision, Lost):
            if decision["kind"] == "view":
                self.view = View.of(decision)  # `leader` may have changed
            decision = self._next_decision()
        self._end_alone(decision)

    def _end_alone(self, lost: Lost) -> None:
        """Leave after this batch. If the coordinator is gone, take an outer step with this island's change first: one
        island then saves."""
        self.lost = lost
        if lost.kind != "gone":
            self.has_left = True
            return
        self._note_lost(self.run.batch, {self.name: self.round.samples}, self.round.again)
        self._step_alone()

    def _step_alone(self) -> None:
        self.departure = None
        self.outer.step_alone()
        self.outer.show_momentum()
        self.is_alike = True
        self._begin_round()

    def leave_early(self) -> None:
        """Leave in the middle of a round if others carry on; else end it."""
        if self.is_settled or self.has_left:
            return
        if len(self.view.members) > 1:
            if self.rank == 0:
                self.member.send({"kind": "leave", "asks": True})
            decision = self._next_decision()
            while isinstance(decision, dict) and decision["kind"] != "left":
                lost = self._take_view(View.of(decision))
                decision = lost or self._next_decision()
            if isinstance(decision, Lost):
                self._end_alone(decision)
                return
            if not decision["is_last"]:
                self.has_left = True
                more = f"; of up to {self.every} batches before, what it had not sent" if self.streams else ""
                self.run.print(
                    f"islands: this island leaves; its last {self.round.steps} batches since the outer step are lost: "
                    f"{self.round.samples} samples{more}"
                )
                return
        if self.round.steps:
            self._end_round(is_whole=True, leaves=True)
        else:
            self._step_alone()

    @property
    def is_settled(self) -> bool:
        """Whether all islands have the same weights: none has trained since an outer step of all."""
        return self.is_alike and self.round.steps == 0

    def decide(self, decision: Decision) -> Decision:
        """Put off saves, and leaving, until all islands have the same weights."""
        if self.has_left and not (decision.preempted_by or decision.stops):
            if self.lost is not None:
                self._leave(self.lost)
            return decision._replace(saves=False)
        if self.is_settled or self.has_left:
            saves, self.owes_save = decision.saves or self.owes_save, False
            return decision._replace(saves=saves and not self.has_left)
        if decision.saves and not self.owes_save:
            self.owes_save = True
            if self.view.leader == self.name:
                self.run.print("islands: the save that is due is made at an outer step of all weights")
        return decision._replace(saves=False, preempted_by="", stops=False)

    @property
    def writes_checkpoints(self) -> bool:  # type: ignore[override]
        return super().writes_checkpoints and self.is_settled


def find_islands(config: TrainConfig) -> Islands:
    return (Islands if settings_of(config).sync is None else LocalIslands)(config)
