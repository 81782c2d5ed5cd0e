"""Islands with local steps (`islands.sync`): each island trains alone between outer steps. The algorithm is DiLoCo.

A *round* is the training between two outer steps. In a round an island computes its rows of every batch and steps its
optimizer at once; only heartbeats cross the link. The round ends with an exchange of the change of the weights, or of
one fragment of them. With `delay` that exchange begins some batches earlier, and the islands compute meanwhile. The
coordinator commits all batches of the round together. If the exchange fails, it is repeated, and nothing is computed
again. Rows of an island that dies in a round are lost, or trained by the others in the next round (`lost_rows`).

With fragments or a delay, the islands' weights differ after most rounds (`has_equal_weights`). Saves and `stop_after`
need equal weights. So they ask for a round that ends with an exchange of all weights, without delay
(`exchanges_all_weights`), and wait for its end (`is_settled`). An island that joins begins at the weights of the last
outer steps. Counts of samples and tokens are this island's own until a round ends.

`local_steps.py` has the arithmetic, and `outer_weights.py` the outer state.
"""

import math
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from llmfoundry_islands.block import settings_of
from llmfoundry_islands.coordination.member import Disconnection, View
from llmfoundry_islands.coordination.messages import Message
from llmfoundry_islands.tensors.boxes import Tensors
from llmfoundry_islands.training.islands import LABELS_PER_BATCH, Islands, synchronized_time
from llmfoundry_islands.training.local_steps import RetrainedRows, Round, count_lost_samples, divide_lost_rows
from llmfoundry_islands.training.outer_weights import FragmentExchange, OuterWeights
from llmfoundry_lite.config.schema import TrainConfig
from llmfoundry_lite.errors import NonFiniteError
from llmfoundry_lite.ranks.exchange import all_gather_json, all_reduce_max, all_reduce_sum
from llmfoundry_lite.training.launch_role import Decision
from llmfoundry_lite.training.run_handle import RunHandle


class MeanChange(NamedTuple):
    """Numbers of an exchange that has succeeded, over all ranks of this island."""

    norm: float
    """L2 norm of the islands' mean change of the weights."""
    num_bytes: int
    """Bytes that this island has sent and received in the round."""


class LocalIslands(Islands):
    """The other islands of a run with local steps, seen from one rank of this island.

    All methods are collective over this island's ranks, except `_note_transfer`. After each batch, `end_batch` adds it
    to the round, and ends the round when it is complete; `decide` then postpones saves that are not possible yet.
    """

    takes_outer_steps = True
    sends_during_backward = False

    def __init__(self, config: TrainConfig):
        """Read the configuration. Nothing is connected yet."""
        super().__init__(config)
        assert self.config.sync is not None
        self.sync = self.config.sync
        self.every = int(self.sync.every.value)
        self.delay = int(self.sync.delay.value)
        self.batches_per_round = self.every // self.sync.fragments
        self.has_partial_exchanges = self.sync.fragments > 1 or self.delay > 0
        """Most exchanges are of a fragment or delayed, so the islands' weights differ after most rounds."""
        self.exchanges_all_weights = not self.has_partial_exchanges
        """This round ends with an exchange of all weights, without delay."""
        self.has_equal_weights = True
        """The last outer step was of all weights, and gave all islands the same ones."""
        self.round = Round()
        self.round_row_indices: dict[str, range] = {}
        """Island -> its rows of each batch, from the beginning of the round to its end."""
        self.retrained_row_indices: dict[str, list[int]] = {}
        """Island -> rows of each batch of the previous round that it trains again in this round."""
        self.num_batches_back = 0
        """Number of batches of the previous round, whose lost rows are trained again in as many batches of this one."""
        self.fragment_exchange: FragmentExchange | None = None
        """The exchange that is under way while this island computes."""
        self.disconnection: Disconnection | None = None
        """Why the connection to the coordinator has ended. This launch leaves before its next batch."""
        self.has_left = False
        """The other islands go on without this one. What it has trained since the last outer step is lost."""
        self.owes_save = False
        """A save was due when the islands' weights differed. It is made when they are equal."""
        self.num_lost_samples = 0
        self.num_samples_again = 0
        """Lost samples that were trained again."""

    def join_run(self, run: RunHandle) -> None:
        """Join the run as `Islands.join_run` does. Also raises ConfigError for more fragments than parameters."""
        super().join_run(run)
        self.outer.load_state()
        self._begin_round()
        self.exchanges_all_weights = self.exchanges_all_weights or self.view.is_whole
        run.print(f"islands: {self.described}: another algorithm than one world's; losses are of this island's rows")

    def prepare(self) -> None:
        """Set `outer`, this rank's outer weights and momentum. Raises ConfigError on all ranks."""
        self.outer = OuterWeights(self.sync, self.held, self.run.optimizer)

    @property
    def weights_for_joiners(self) -> Tensors:  # type: ignore[override]
        return self.outer.outer_weights

    @property
    def described(self) -> str:
        """The settings of local steps as users read them, such as "local steps, every 100, 4 fragments, delay 5"."""
        description = f"local steps, every {self.every}"
        if self.sync.fragments > 1:
            description += f", {self.sync.fragments} fragments"
        if self.delay:
            description += f", delay {self.delay}"
        return description

    @property
    def segment(self) -> dict[str, Any]:  # type: ignore[override]
        return {**super().segment, "sync": self.described}

    def _note_transfer(self, is_transferring: bool) -> None:
        # A transfer in a background thread does not keep this rank from computing. When the main thread waits for it,
        # `_wait_for_mean` sets the phase.
        if threading.current_thread() is threading.main_thread():
            super()._note_transfer(is_transferring)

    # ------------------------------------------------------------------------------------------------- the batches

    @property
    def next_row_indices(self) -> range:
        """This island's rows of the next batch. They change only between two rounds."""
        return self.round_row_indices[self.name]

    @property
    def next_retrained(self) -> RetrainedRows:
        """Rows of the previous round that this island trains again in the next batch, if they are of this epoch."""
        row_indices = self.retrained_row_indices.get(self.name)
        has_batch_to_retrain = self.round.steps < self.num_batches_back
        is_in_this_epoch = self.num_batches_back <= self.run.batch_in_epoch
        if row_indices and has_batch_to_retrain and is_in_this_epoch:
            return RetrainedRows(row_indices, self.num_batches_back)
        return RetrainedRows()

    def batches(self) -> Iterator[Any]:
        self.retrained = self.next_retrained
        return super().batches()

    def begin_batch(self) -> None:
        """Start the clock that measures this island's pace. Raises Preempted if the coordinator was lost before."""
        if self.disconnection is not None:
            self._leave(self.disconnection)
        self.outer.remove_momentum_from_optimizer()
        self.began_at = synchronized_time()

    def exchange_gradient(self, loss: torch.Tensor) -> bool:
        """Keep this island's own gradient, and measure the batch. Returns True: no batch is computed again."""
        compute_seconds = synchronized_time() - self.began_at
        self.round.seconds += compute_seconds
        self.measured = {
            "islands/local_steps": self.every,
            "islands/members": len(self.round_row_indices),
            "islands/rows": self.run.counts.num_samples,
            "islands/compute_seconds": compute_seconds,
            "islands/lost_samples": self.num_lost_samples,
            "islands/samples_again": self.num_samples_again,
        }
        return True

    def end_batch(self) -> Iterator[Any] | None:
        """Add the batch to the round, and take the step of the round that is due after it. Collective.

        Example: in rounds of 10 batches with a delay of 3, the exchange begins after batch 7, and the round ends after
        batch 10.

        Changes `round`, and sets `fragment_exchange` when an exchange begins. The end of a round also changes the
        weights, `outer`, `view` and the rows of this island (`_end_round`). Sets `has_left` if this island leaves and
        the others go on.

        Returns the batches to continue with if this island's rows change; else None.
        """
        if self.has_left:
            return None
        run = self.run
        weight = run.counts.weight(by_tokens=self.by_tokens)
        self.round.add_batch(run.counts, weight, run.loss, again=len(self.retrained.row_indices))
        self.outer.count_batch(weight)

        # All ranks of the island must take the same branch below, so one that has noticed something tells the others.
        is_asked_to_leave, is_disconnected = all_reduce_max(
            [int(run.is_asked_to_leave), int(self.member.disconnection is not None)]
        )
        is_round_over = run.is_last or self.round.steps >= self.batches_per_round
        is_exchange_due = self.round.steps == self.batches_per_round - self.delay and not self.exchanges_all_weights

        # The first case that applies is the only one. A lost coordinator comes first, because the other cases need it.
        # The end of the round comes before leaving: an outer step that is due keeps what this island has trained.
        if is_disconnected:
            self._end_without_coordinator()
        elif is_round_over:
            is_whole = self.exchanges_all_weights or run.is_last
            self._end_round(is_whole=is_whole, leaves=bool(is_asked_to_leave or run.is_launch_over))
        elif is_asked_to_leave:
            self.leave_early()
        elif is_exchange_due:
            self.fragment_exchange = self._begin_exchange(is_whole=False)

        if self.has_left:
            return None
        has_same_rows = self.row_indices == self.next_row_indices and self.retrained == self.next_retrained
        return None if has_same_rows else self.batches()

    # --------------------------------------------------------------------------------------------- the outer step

    def _begin_round(
        self, retrained_row_indices: Mapping[str, list[int]] | None = None, num_batches_back: int = 0
    ) -> None:
        """Begin a round with the rows of the present view. Resets everything that is counted in a round.

        `retrained_row_indices` are lost rows to train again: by island, rows of each of the last `num_batches_back`
        batches.
        """
        self.round = Round()
        self.round_row_indices = self.view.row_indices
        self.retrained_row_indices = dict(retrained_row_indices or {})
        self.num_batches_back = num_batches_back
        self.num_bytes_before = self.exchange.num_bytes

    def _begin_exchange(self, *, is_whole: bool) -> FragmentExchange:
        """Begin to exchange the change of all weights (`is_whole`), or of the fragment whose turn it is.

        Returns the exchange, which the caller keeps in `fragment_exchange` until its round ends.
        """
        batch = self.run.batch
        if is_whole:
            fragment_indices = range(self.sync.fragments)
        else:
            # Counted from the run's first batch, so that islands which joined later take the same turn.
            round_index = (batch - self.round.steps) // self.batches_per_round
            turn = round_index % self.sync.fragments
            fragment_indices = range(turn, turn + 1)
        label = batch * LABELS_PER_BATCH
        return self.outer.begin_exchange(fragment_indices, self.exchange, label)

    def _end_round(self, *, is_whole: bool, leaves: bool) -> None:
        """Exchange changes until the coordinator commits the round, take the outer step, and begin the next round.

        `is_whole`: all weights are exchanged, without delay. `leaves`: this launch ends after a whole outer step.

        Changes the weights and all that `_commit_round` names. If the coordinator or this island's connection is lost
        meanwhile, `_end_alone` ends the round instead.
        """
        began_at = time.monotonic()
        if is_whole and self.fragment_exchange is not None:
            # The run ends while a fragment is being sent. The change of all weights contains that fragment's.
            self.member.phase = "exchange"  # so that the coordinator notices a dead link
            self.fragment_exchange.transfer.wait()
            self.fragment_exchange = None
        if self.fragment_exchange is None:
            self.fragment_exchange = self._begin_exchange(is_whole=is_whole)
        fragment_exchange = self.fragment_exchange

        # Every turn of this loop exchanges the changes, reports to the coordinator and gets its decision, which is one
        # of four: commit the round (leave the loop); exchange again; a new view, without an island that has left, after
        # which the exchange is repeated; or the connection is lost, and this island ends the round alone.
        while True:
            mean_change = self._wait_for_mean(fragment_exchange)
            arrived_at = time.monotonic()
            # An island leaves, or saves, after a whole outer step only, so it asks for one.
            needs_equal_weights = leaves or (self.owes_save and self.view.leader == self.name)
            self._report(mean_change, leaving=leaves and is_whole, asks_for_whole=needs_equal_weights and not is_whole)

            self.member.phase = "wait"
            decision = self._next_decision()
            while not isinstance(decision, Disconnection) and decision["epoch"] < self.view.epoch:
                decision = self._next_decision()  # the last one was of an earlier view
            self.member.phase = "compute"

            if not isinstance(decision, Disconnection) and decision["kind"] == "view":
                # An island has left, so the exchange is repeated with the others.
                self.num_repeats += 1
                decision = self._apply_view(View.from_message(decision)) or decision
            if isinstance(decision, Disconnection):
                self._end_alone(decision)
                return
            if decision["kind"] == "commit":
                break
            fragment_exchange.begin(self.exchange, self.held.pieces, self.sync.dtype)

        self.fragment_exchange = None
        assert mean_change is not None  # the coordinator commits only if every island could exchange
        self.measured = {
            "islands/exchange_seconds": arrived_at - began_at,
            "islands/decision_seconds": time.monotonic() - arrived_at,
            "islands/travel_seconds": fragment_exchange.transfer.seconds,
            "islands/bytes": mean_change.num_bytes,
        }
        self._commit_round(decision, fragment_exchange)

    def _wait_for_mean(self, fragment_exchange: FragmentExchange) -> MeanChange | None:
        """Wait for the islands' changes, and compute their mean, which stays in `fragment_exchange`.

        Returns None on all ranks if a rank of this island could not exchange.
        """
        self.member.phase = "exchange"
        has_arrived = fragment_exchange.transfer.wait()
        self.member.phase = "wait"
        num_failed_ranks = all_reduce_sum([int(not has_arrived)])[0]
        if num_failed_ranks:
            return None

        self.member.phase = "compute"
        sum_of_squares = fragment_exchange.take_mean(self.held, self.name)
        num_bytes = self.exchange.num_bytes - self.num_bytes_before
        numbers_of_ranks = all_gather_json([sum_of_squares, num_bytes])
        return MeanChange(
            norm=math.sqrt(sum(sum_of_squares for sum_of_squares, _ in numbers_of_ranks)),
            num_bytes=sum(num_bytes for _, num_bytes in numbers_of_ranks),
        )

    def _report(self, mean_change: MeanChange | None, *, leaving: bool, asks_for_whole: bool) -> None:
        """Report the round to the coordinator, from rank 0. `mean_change` is None if the exchange has failed."""
        if self.rank != 0:
            return
        self.member.send(
            {
                "kind": "prepared",
                "epoch": self.view.epoch,
                "batch": self.run.batch - self.round.steps,
                "ok": mean_change is not None,
                "norm": mean_change.norm if mean_change is not None else 0.0,
                "weights": self.weights_digest,
                "steps": self.round.steps,
                "weight": self.round.weight,
                "samples": self.round.samples,
                "tokens": self.round.tokens,
                "losses": self.round.losses,
                "digest": self.round.digest,
                "loss": self.round.loss,
                "again": self.round.again,
                "seconds": self.round.seconds / self.round.steps,
                "leaving": leaving,
                "asks_for_whole": asks_for_whole,
                # Only exact islands use these.
                "out_of_range": False,
                "bad": 0,
                "link": 0,
            }
        )

    def _commit_round(self, decision: Message, fragment_exchange: FragmentExchange) -> None:
        """Count and log a committed round, take its outer step, apply the view that follows, and begin the next round.

        `decision` is the coordinator's commit: the numbers of all islands in the round, and the view that follows.

        Changes the weights, `outer`, `view`, `round` and the counts. Sets `has_equal_weights` for the step that was
        taken, `exchanges_all_weights` and `weights_digest` for the next round, and `disconnection` if the view cannot
        be applied. Raises NonFiniteError, before anything changes, if the mean change is not finite.
        """
        batch = self.run.batch
        num_batches = self.round.steps
        if not math.isfinite(decision["norm"]):
            raise NonFiniteError(
                f"outer step after batch {batch}: the mean change of the weights is not finite; the newest checkpoint "
                "stands. Lower the learning rate or islands.sync.lr"
            )
        self._count_round(decision)

        # Take the outer step.
        self.has_equal_weights = self.outer.finish_exchange(fragment_exchange, batch * LABELS_PER_BATCH)
        self.exchanges_all_weights = decision["next_is_whole"] or not self.has_partial_exchanges

        # Apply the next view. A save, or a joiner, gets the outer momentum as part of the optimizer's state.
        self.next_view = None if decision["next"] is None else View.from_message(decision["next"])
        has_joiners = self.next_view is not None and bool(self.next_view.joiners)
        if self.has_equal_weights or has_joiners:
            self.outer.add_momentum_to_optimizer()
        self.disconnection = self._begin_next_view()
        has_new_view = bool(decision["next"]) and self.disconnection is None and self.next_view is None
        if has_new_view and self.name in self.view.joiners:
            self.outer.load_state()  # this island's weights had drifted, so it has received the leader's

        # Begin the next round, with the rows that islands have lost in this one.
        retrained_row_indices = self._divide_lost_rows(decision["rows"])
        self._begin_round(retrained_row_indices, num_batches)

        # Islands compare their weights once in an interval: after the round in which a multiple of it was trained.
        interval = self.config.check_weights_every
        is_digest_due = batch // interval > (batch - num_batches) // interval
        self.weights_digest = self.held.digest(self.outer.outer_weights) if is_digest_due else ""

        # No other outer step can follow, so this island makes weights that can be saved.
        is_coordinator_gone = self.disconnection is not None and self.disconnection.kind == "gone"
        if is_coordinator_gone and not self.has_equal_weights:
            self._step_alone()

    def _count_round(self, decision: Message) -> None:
        """Add the rows and tokens of all islands to this launch's counts, and log the round's numbers."""
        lost_before = self.num_lost_samples
        self._count_lost_samples(decision["rows"], decision["again"])
        self._count_trained_rows(decision["rows"])
        self.num_drifts += len(decision["drifted"])
        tokens_elsewhere = decision["tokens"] - self.round.tokens
        self.run.add_counts(decision["samples"] - self.round.samples, tokens_elsewhere)
        self.tokens_elsewhere += tokens_elsewhere
        self.measured |= {
            "islands/loss": decision["loss"],
            "islands/samples": decision["samples"],
            "islands/tokens": decision["tokens"],
            "islands/steps": self.round.steps,
            "islands/outer_norm": decision["norm"],
            "islands/lost_samples": self.num_lost_samples,
            "islands/lost_in_round": self.num_lost_samples - lost_before,
            "islands/again_in_round": decision["again"],
            "islands/samples_again": self.num_samples_again,
        }
        self.run.log(self.metrics())

    # ------------------------------------------------------------------------------------------------- lost rows

    def _count_lost_samples(self, trained: Mapping[str, int], again: int) -> None:
        """Count and print the samples that islands have lost in this round, and those that were trained again.

        `trained` maps the islands of the outer step to their samples. Islands that began the round and are missing have
        lost theirs. `again` is the number of samples that the previous round had lost.
        """
        last_batch = self.run.batch
        batches = f"batches {last_batch - self.round.steps + 1} to {last_batch}"
        lost_samples = count_lost_samples(self.round_row_indices, trained, self.round.steps)
        for name, num_samples in lost_samples.items():
            self.num_lost_samples += num_samples
            self.run.print(f"islands: rows of {name} in {batches} are lost: {num_samples} samples")
        self.num_samples_again += again
        if again:
            self.run.print(f"islands: {batches} trained lost rows again: {again} samples")

    def _divide_lost_rows(self, trained: Mapping[str, int]) -> dict[str, list[int]]:
        """Divide the rows that the round has lost among the islands of the new view, if `lost_rows` is `retrain`.

        `trained` has the islands of the round's outer step. Rows of the others are lost. Call this when the round has
        ended, and before the next one begins.

        Returns, by island, indices of rows of each batch of the round. If nothing is lost, or the rows cannot be
        divided, which is printed, the result is empty.
        """
        lost_rows: list[int] = []
        for name, row_indices in self.round_row_indices.items():
            if name not in trained:
                lost_rows += row_indices
        if not lost_rows or self.sync.lost_rows != "retrain":
            return {}

        staying = {name: rows for name, rows in self.view.row_indices.items() if name in trained}
        divided_rows = divide_lost_rows(lost_rows, staying, self.data_ranks)
        if staying and not divided_rows:
            self.run.print(
                f"islands: {len(lost_rows)} lost rows of a batch are no multiple of an island's data ranks, so they "
                "are not trained again"
            )
        return divided_rows

    # ------------------------------------------------------------------------------------------ losing and leaving

    def _apply_view(self, view: View) -> Disconnection | None:
        # A view may come in the middle of a round, whose rows stay as they are. It has ended the exchange under way,
        # whose thread uses the connections that are closed now.
        if self.fragment_exchange is not None:
            self.fragment_exchange.transfer.wait()
        return super()._apply_view(view)

    def _end_without_coordinator(self) -> None:
        """End the round because a rank has lost its connection. Handles decisions that came before on rank 0."""
        decision = self._next_decision()
        while not isinstance(decision, Disconnection):
            if decision["kind"] == "view":
                self.view = View.from_message(decision)  # the leader, which saves, may have changed
            decision = self._next_decision()
        self._end_alone(decision)

    def _end_alone(self, disconnection: Disconnection) -> None:
        """Prepare to leave after this batch, because the connection to the coordinator has ended.

        Sets `disconnection`, which makes `begin_batch` or `decide` leave. If only this island was evicted, also sets
        `has_left`: the others carry on, and what it has trained in the round is lost. If the coordinator itself is
        gone, takes an outer step with this island's change, so that the leader can save.
        """
        self.disconnection = disconnection
        is_coordinator_gone = disconnection.kind == "gone"
        if not is_coordinator_gone:
            self.has_left = True
            return
        self._count_lost_samples({self.name: self.round.samples}, self.round.again)
        self._step_alone()

    def _step_alone(self) -> None:
        """Take an outer step of all weights with this island's change alone, and begin a round.

        Changes the weights, `outer` and the optimizer's state, so that a save is possible (`is_settled`).
        """
        self.fragment_exchange = None
        self.outer.step_alone()
        self.outer.add_momentum_to_optimizer()
        self.has_equal_weights = True
        self._begin_round()

    def leave_early(self) -> None:
        """Leave the run in the middle of a round, or make the state one that can be saved. Collective.

        If other islands carry on, sets `has_left`: they save, and what this one has trained in the round is lost. The
        last island ends the round early with its own outer step, and can then save. Does nothing if it can already.
        """
        if self.is_settled or self.has_left:
            return

        # Between two commits another island may ask to leave, too. The coordinator says which one is the last.
        if len(self.view.members) > 1:
            if self.rank == 0:
                self.member.send({"kind": "leave", "asks": True})
            answer = self._next_decision()
            while not isinstance(answer, Disconnection) and answer["kind"] != "left":
                # A view that the coordinator sent before its answer.
                disconnection = self._apply_view(View.from_message(answer))
                answer = disconnection or self._next_decision()

            if isinstance(answer, Disconnection):
                self._end_alone(answer)
                return
            if not answer["is_last"]:
                self.has_left = True
                self._print_left()
                return

        # This island is the last one.
        if self.round.steps:
            self._end_round(is_whole=True, leaves=True)
        else:
            self._step_alone()

    def _print_left(self) -> None:
        """Print that this island leaves in the middle of a round, and which samples that loses."""
        message = (
            f"islands: this island leaves; its last {self.round.steps} batches since the outer step are lost: "
            f"{self.round.samples} samples"
        )
        if self.has_partial_exchanges:  # earlier batches have reached only some fragments
            message += f"; of up to {self.every} batches before, what it had not sent"
        self.run.print(message)

    @property
    def is_settled(self) -> bool:
        """Whether all islands have the same weights: none has trained since an outer step of all weights."""
        return self.has_equal_weights and self.round.steps == 0

    def decide(self, decision: Decision) -> Decision:
        """Postpone saves, and the end of the launch, until all islands have the same weights.

        An island that has left does not save. If the coordinator has evicted it and the launch does not end anyway,
        raises Preempted. Sets `owes_save` when a save is postponed, and resets it when the save is made.
        """
        launch_ends = bool(decision.preempted_by) or decision.stops
        if self.has_left:
            if self.disconnection is not None and not launch_ends:
                self._leave(self.disconnection)
            return decision._replace(saves=False)
        if self.is_settled:
            saves = decision.saves or self.owes_save
            self.owes_save = False
            return decision._replace(saves=saves)

        if decision.saves and not self.owes_save:
            self.owes_save = True
            if self.view.leader == self.name:
                self.run.print("islands: the save that is due is made at an outer step of all weights")
        return decision._replace(saves=False, preempted_by="", stops=False)

    @property
    def writes_checkpoints(self) -> bool:  # type: ignore[override]
        """Whether this island saves, as `Islands.writes_checkpoints` says, and all islands have the same weights."""
        return super().writes_checkpoints and self.is_settled


def find_islands(config: TrainConfig) -> Islands:
    """Return the role of a launch whose YAML has the block `islands`: with `islands.sync`, that of local steps."""
    if settings_of(config).sync is None:
        return Islands(config)
    return LocalIslands(config)
