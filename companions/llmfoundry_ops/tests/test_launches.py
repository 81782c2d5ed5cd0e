"""Launches in the log joined with those on record."""

import pytest

from llmfoundry_ops.launches import KILLED, Launch, match


@pytest.mark.parametrize("first_batch", [100, 101])
def test_a_launch_on_record_is_the_one_in_the_log_that_began_where_it_did(first_batch):
    """An evaluation before the first batch has a line of its own, under the batch that was restored."""
    logged = [Launch(first_batch=0, last_batch=100), Launch(first_batch=first_batch, last_batch=120)]
    found = match(logged, [(100, "failed", "disk full"), (110, KILLED, None)])
    assert [(one.first_batch, one.ended, one.reason) for one in found] == [
        (0, "not known here", None),  # on the other cluster
        (first_batch, "failed", "disk full"),
        (None, KILLED, None),  # ended before it trained a batch
    ]
