"""Launches in the log joined with those on record."""

import pytest

from llmfoundry_ops.launches import KILLED, Launch, Logged, Recorded, join_launches


def logged(number, first_batch, last_batch):
    launch = Launch(first_batch=first_batch, last_batch=last_batch)
    return Logged(launch=launch, number=number, num_batches=last_batch - first_batch + 1)


@pytest.mark.parametrize("first_batch", [100, 101])
def test_a_launch_on_record_is_the_one_in_the_log_that_began_where_it_did(first_batch):
    """An evaluation before the first batch has a line of its own, under the batch that was restored."""
    failed = Recorded(began_at_batch=100, ended="failed", reason="disk full", last_batch=120)
    found = join_launches(
        [logged(1, 0, 100), logged(2, first_batch, 120)], [failed, Recorded(began_at_batch=110, ended=KILLED)]
    )
    assert [(one.first_batch, one.ended, one.reason) for one in found] == [
        (0, "not known here", None),  # on the other cluster
        (first_batch, "failed", "disk full"),
        (None, KILLED, None),  # ended before it trained a batch
    ]


@pytest.mark.parametrize(
    "recorded",
    [
        Recorded(began_at_batch=100, ended=KILLED, number=3),
        Recorded(began_at_batch=100, ended="stopped", last_batch=130),  # of an earlier release
    ],
)
def test_of_two_launches_that_began_at_the_same_batch_the_right_one_is_found(recorded):
    found = join_launches([logged(1, 0, 100), logged(2, 101, 120), logged(3, 101, 130)], [recorded])
    assert [one.ended for one in found] == ["not known here", "not known here", recorded.ended]
