"""Lines of a log -> columns: launches told apart, and tokens where a batch is missing."""

import json

import numpy as np

from llmfoundry_lite.report.reading import count_tokens, parse_log


def line(batch, elapsed, launch=1):
    return json.dumps({"batch": batch, "launch": launch, "time/elapsed_seconds": elapsed}).encode() + b"\n"


def test_tokens_of_a_batch_are_not_known_where_the_one_before_it_is_missing():
    np.testing.assert_array_equal(count_tokens([1, 2, 4], np.array([10.0, 20.0, 40.0])), [10, 10, np.nan])


def test_a_clock_that_starts_again_is_another_launch():
    """One that knew nothing of the others' log has numbered itself from 1 as they did."""
    log = parse_log([line(1, 5.0), line(2, 6.0), line(3, 1.0), line(4, 2.0)])
    assert log.launch.tolist() == [1, 1, 2, 2]
