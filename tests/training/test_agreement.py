"""One sum between two batches tells every rank the same: what comes next, who must leave, whether to save."""

from typing import Any, cast

import pytest
import torch

from llmfoundry_lite.config.layout import DataRanks
from llmfoundry_lite.data.loader import batch_digest
from llmfoundry_lite.errors import DataError
from llmfoundry_lite.training import agreement
from llmfoundry_lite.training.agreement import Agreement, BatchCounts, count_filled, count_rows, count_tokens
from llmfoundry_lite.training.preemption import REASONS

FULL = BatchCounts(True, 3, 7, 5, 2, 0)
BATCH = {"input_ids": torch.tensor([[1, 2, 3, -100], [4, 5, 6, 7], [-100, -100, -100, -100]])}


class Preempted:
    """A rank that knows of one reason to leave."""

    def __init__(self, reason=0):
        self.reason, self.agreed_reason = reason, 0

    def find_reason(self):
        return self.reason

    def set_agreed(self, reason):
        self.agreed_reason = reason


def rank(batches, *, number=0, is_counted=True, reason=0):
    ranks = DataRanks(rank=number, size=2, is_counted=is_counted)
    made = Agreement(ranks, cast(Any, Preempted(reason)), lambda: None)
    made._batches = iter(batches)
    return made


def end_batch(monkeypatch, *ranks, writes=(), wants_save=()):
    """The end of a batch on all ranks of a world, in turn: once to hear their numbers, once with the sums."""
    heard: list[list[int]] = []
    batches = [list(one._batches) for one in ranks]

    def play(all_reduce_sum):
        monkeypatch.setattr(agreement, "all_reduce_sum", all_reduce_sum)
        for number, (one, its) in enumerate(zip(ranks, batches, strict=True)):
            one._batches = iter(its)
            one.end_batch(is_last=False, is_busy=number in writes, wants_save=number in wants_save)

    play(lambda values: heard.append(values) or values)
    sums = [sum(column) for column in zip(*heard, strict=True)]
    play(lambda values: sums)


def test_a_batch_is_there_when_every_rank_has_its_share(monkeypatch):
    ranks = rank([BATCH]), rank([BATCH], number=1)
    end_batch(monkeypatch, *ranks)
    for one in ranks:
        assert one.upcoming[:5] == (True, 4, 14, 2 * 5, 4)
        assert one.next_batch() is BATCH


@pytest.mark.parametrize("length", [2, 4, 8])
def test_a_sample_in_several_rows_is_counted_and_hashed_as_a_whole(monkeypatch, length):
    """Two samples, the second with padding, and one of padding alone. A row has no loss for its first token."""
    samples_bt = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, *[-100] * 5], [-100] * 8])
    cut = rank([{"input_ids": samples_bt.reshape(-1, length)}])
    cut.sample_length = 8
    end_batch(monkeypatch, cut)

    num_loss_tokens = {2: 5, 4: 8, 8: 9}[length]
    num_loss_rows = {2: 5, 4: 3, 8: 2}[length]
    assert cut.upcoming == (True, 2, 11, num_loss_tokens, num_loss_rows, batch_digest(samples_bt))


def test_own_times_of_ranks_are_in_the_sum_of_the_batches_that_are_measured(monkeypatch):
    ranks = rank([BATCH], reason=1), rank([BATCH], number=1)
    ranks[0].take_own_times = lambda: [1, 2, 3, 0, 0, 0]
    ranks[1].take_own_times = lambda: [0, 0, 0, 4, 5, 6]
    end_batch(monkeypatch, *ranks)
    assert [one.own_times for one in ranks] == [[1, 2, 3, 4, 5, 6]] * 2
    assert [cast(Any, one.preemption).agreed_reason for one in ranks] == [1, 1]
    for one in ranks:
        one.take_own_times, one._batches = list, iter([BATCH])
    end_batch(monkeypatch, *ranks)
    assert [one.own_times for one in ranks] == [[], []]


def test_one_rank_without_a_share_ends_the_epoch_for_all(monkeypatch):
    ranks = rank([BATCH]), rank([], number=1)
    end_batch(monkeypatch, *ranks)
    assert [one.next_batch() for one in ranks] == [None, None]


def test_ranks_that_see_the_same_rows_count_them_once(monkeypatch):
    ranks = rank([BATCH]), rank([BATCH], is_counted=False)
    end_batch(monkeypatch, *ranks)
    assert {one.upcoming.num_tokens for one in ranks} == {7}


def test_the_highest_reason_that_any_rank_has_is_every_ranks(monkeypatch):
    low, high = REASONS.index("SIGTERM"), REASONS.index("the file STOP")
    ranks = rank([BATCH], reason=low), rank([BATCH], number=1, reason=high), rank([BATCH], number=2)
    end_batch(monkeypatch, *ranks)
    assert [cast(Any, one.preemption).agreed_reason for one in ranks] == [high] * 3


def test_no_rank_leaves_without_a_reason(monkeypatch):
    ranks = rank([BATCH]), rank([BATCH], number=1)
    end_batch(monkeypatch, *ranks)
    assert [cast(Any, one.preemption).agreed_reason for one in ranks] == [0, 0]


@pytest.mark.parametrize(("number", "is_due"), [(0, True), (1, False)])
def test_rank_0_alone_decides_that_a_save_is_due(monkeypatch, number, is_due):
    ranks = rank([BATCH]), rank([BATCH], number=1)
    end_batch(monkeypatch, *ranks, wants_save=[number])
    assert [one.save_is_due for one in ranks] == [is_due] * 2


def test_one_rank_that_still_writes_is_known_to_all(monkeypatch):
    ranks = rank([BATCH]), rank([BATCH], number=1)
    end_batch(monkeypatch, *ranks, writes=[1])
    assert [one.all_idle for one in ranks] == [False, False]


def test_what_the_loader_raises_comes_after_this_batch_is_recorded(monkeypatch):
    def broken():
        raise OSError("the shard is gone")
        yield

    one = rank([])
    monkeypatch.setattr(agreement, "all_reduce_sum", lambda values: values)
    one._batches = broken()
    one.end_batch(is_last=False, is_busy=False, wants_save=False)
    assert one.upcoming.is_complete  # or the epoch would seem to have ended, and the error with it
    with pytest.raises(OSError, match="the shard is gone"):
        one.next_batch()


def test_a_batch_that_one_rank_cannot_read_is_an_error_of_all(monkeypatch):
    ranks = rank([BATCH]), rank([BATCH], number=1)
    ranks[1]._read_ahead = lambda: setattr(ranks[1], "_error", DataError("the shard is gone")) or FULL
    end_batch(monkeypatch, *ranks)
    met = []
    monkeypatch.setattr(agreement, "raise_on_all_ranks", met.append)
    for one in ranks:
        one.next_batch()
    assert list(map(str, met)) == ["None", "the shard is gone"]


def test_an_error_in_reading_ahead_ends_with_its_epoch(monkeypatch):
    """A callback may end an epoch early: the batch that could not be read is not needed any more."""

    def broken():
        yield BATCH
        raise OSError("the shard is gone")

    one = rank([])
    monkeypatch.setattr(agreement, "all_reduce_sum", lambda values: values)
    one.begin_epoch(broken())
    assert one.next_batch() is BATCH
    one.end_batch(is_last=False, is_busy=False, wants_save=False)
    one.end_epoch()
    one.begin_epoch(iter([BATCH]))
    assert one.next_batch() is BATCH


def test_a_token_has_a_loss_when_its_row_has_one_before_it():
    assert count_tokens(BATCH) == {"total": 7, "loss_generating": 5}
    assert count_filled(BATCH) == count_rows(BATCH) == 2
    batch = {"input_ids": torch.tensor([[1, -100, -100], [1, -100, 2], [-100, 1, 2], [1, 2, 3]])}
    assert (count_filled(batch), count_rows(batch)) == (4, 3)
