import pytest

from llmfoundry_lite.errors import ConfigError
from llmfoundry_lite.islands.division import Pace, divide


def rows(total, **paces):
    return {name: len(lanes) for name, lanes in divide(total, {name: Pace(*p) for name, p in paces.items()}).items()}


def test_rows_follow_the_rates():
    assert rows(64, a=(1, 1, 3.0), b=(1, 1, 1.0)) == {"a": 48, "b": 16}


def test_shares_are_multiples_of_the_ranks_and_full_microbatches_where_they_can_be():
    assert rows(64, a=(4, 4, 10.0), b=(2, 4, 3.0)) == {"a": 48, "b": 16}
    assert rows(10, a=(4, 1, 1.0), b=(1, 1, 1.0)) == {"a": 4, "b": 6}


def test_every_island_has_rows():
    assert rows(8, a=(1, 1, 1000.0), b=(2, 1, 0.001)) == {"a": 6, "b": 2}


def test_the_lanes_are_all_of_the_batch_in_order_of_names():
    lanes = divide(4096, {"b": Pace(8, 4, 5.0), "a": Pace(64, 2, 70.0), "c": Pace(3, 1, 1.0)})
    assert list(lanes) == ["a", "b", "c"]
    assert [row for name in lanes for row in lanes[name]] == list(range(4096))


def test_no_division_is_an_error_that_names_the_ranks():
    with pytest.raises(ConfigError, match=r"8 rows are no sum of multiples of the islands' ranks \(a 3, b 3\)"):
        rows(8, a=(3, 1, 1.0), b=(3, 1, 1.0))
