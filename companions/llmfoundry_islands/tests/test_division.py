import pytest

from llmfoundry_islands.coordination.division import Pace, Rate, divide
from llmfoundry_lite.errors import ConfigError


def rows(total, **paces):
    whole = {name: Pace(*pace[:3], *(pace[3:] or pace[:1])) for name, pace in paces.items()}
    return {name: len(indices) for name, indices in divide(total, whole).items()}


def test_rows_follow_the_rates():
    assert rows(64, a=(1, 1, 3.0), b=(1, 1, 1.0)) == {"a": 48, "b": 16}


def test_shares_are_multiples_of_the_ranks_and_full_microbatches_where_they_can_be():
    assert rows(64, a=(4, 4, 10.0), b=(2, 4, 3.0)) == {"a": 48, "b": 16}
    assert rows(10, a=(4, 1, 1.0), b=(1, 1, 1.0)) == {"a": 4, "b": 6}


def test_where_one_microbatch_holds_all_rows_they_follow_the_rates_too():
    assert rows(8, a=(1, 8, 3.0), b=(1, 8, 1.0)) == {"a": 6, "b": 2}


def test_every_island_has_rows():
    assert rows(8, a=(1, 1, 1000.0), b=(2, 1, 0.001)) == {"a": 6, "b": 2}


def test_with_exact_sums_microbatches_are_whole_and_lie_where_one_world_has_them():
    row_indices = divide(24, {"a": Pace(2, 3, 1.0, 6), "b": Pace(1, 3, 1.0, 3)})
    assert {name: (one.start % 3, len(one) % 3) for name, one in row_indices.items()} == {"a": (0, 0), "b": (0, 0)}
    assert {name: len(one) for name, one in row_indices.items()} == {"a": 12, "b": 12}
    with pytest.raises(ConfigError, match=r"ranks x microbatch, as exact_sums needs, \(a 4, b 4\)"):
        rows(10, a=(2, 2, 1.0, 4), b=(2, 2, 1.0, 4))


def test_the_row_indices_are_all_of_the_batch_in_order_of_names():
    row_indices = divide(4096, {"b": Pace(8, 4, 5.0, 8), "a": Pace(64, 2, 70.0, 64), "c": Pace(3, 1, 1.0, 3)})
    assert list(row_indices) == ["a", "b", "c"]
    assert [row for name in row_indices for row in row_indices[name]] == list(range(4096))


def test_no_division_is_an_error_that_names_the_ranks():
    with pytest.raises(ConfigError, match=r"8 rows are not a sum of multiples of the islands' data ranks \(a 3, b 3\)"):
        rows(8, a=(3, 1, 1.0), b=(3, 1, 1.0))


def test_large_batches_are_divided_at_once_and_into_full_microbatches():
    """The coordinator sends no heartbeat meanwhile."""
    assert rows(1 << 16, a=(1, 4096, 5.0), b=(1, 4096, 7.0)) == {"a": 28672, "b": 36864}
    many = dict.fromkeys("abcdefgh", (1, 1 << 30, 1.0))
    assert set(rows(1 << 31, **many)) == set(many)


def rate_after(*measurements):
    rate = Rate()
    for found in measurements:
        rate.add(found)
    return rate.value


def test_a_rate_follows_a_large_change_that_is_measured_twice_in_a_row():
    assert rate_after(100.0) == 100
    assert rate_after(100.0, 110.0) == pytest.approx(103), "small changes count by their weight"
    assert rate_after(100.0, 200.0) == 100, "one large change is noise"
    assert rate_after(100.0, 200.0, 220.0) == pytest.approx(210)
    assert rate_after(100.0, 50.0, 40.0) == pytest.approx(45)


def test_large_changes_that_are_apart_or_in_both_directions_are_noise():
    assert rate_after(100.0, 200.0, 50.0) == 100
    assert rate_after(100.0, 200.0, 100.0, 200.0) == 100
