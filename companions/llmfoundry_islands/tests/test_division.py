"""Division of a batch's rows among islands of different speeds."""

import pytest

from llmfoundry_islands.coordination.division import Pace, Rate, divide
from llmfoundry_lite.errors import ConfigError


def pace(*, rate: float, data_ranks: int = 1, microbatch: int = 1, exact_sums: bool = False) -> Pace:
    """The pace of an island, whose rows are a multiple of its data ranks, or with exact sums of full microbatches."""
    multiple = data_ranks * microbatch if exact_sums else data_ranks
    return Pace(data_ranks, microbatch, rate, multiple)


def row_counts(num_rows: int, **paces: Pace) -> dict[str, int]:
    """How many rows each island gets."""
    row_indices = divide(num_rows, paces)
    return {name: len(indices) for name, indices in row_indices.items()}


# ------------------------------------------------------------------------------------------- how many rows


def test_rows_follow_the_rates():
    assert row_counts(64, a=pace(rate=3.0), b=pace(rate=1.0)) == {"a": 48, "b": 16}


def test_rows_are_full_microbatches_where_they_can_be():
    a = pace(data_ranks=4, microbatch=4, rate=10.0)
    b = pace(data_ranks=2, microbatch=4, rate=3.0)
    assert row_counts(64, a=a, b=b) == {"a": 48, "b": 16}


def test_rows_are_multiples_of_the_data_ranks():
    """Islands of the same rate would have 5 rows each, which four data ranks cannot divide."""
    assert row_counts(10, a=pace(data_ranks=4, rate=1.0), b=pace(rate=1.0)) == {"a": 4, "b": 6}


def test_where_one_microbatch_holds_all_rows_they_follow_the_rates_too():
    a = pace(microbatch=8, rate=3.0)
    b = pace(microbatch=8, rate=1.0)
    assert row_counts(8, a=a, b=b) == {"a": 6, "b": 2}


def test_every_island_has_rows():
    a = pace(rate=1000.0)
    b = pace(data_ranks=2, rate=0.001)
    assert row_counts(8, a=a, b=b) == {"a": 6, "b": 2}


def test_no_division_is_an_error_that_names_the_ranks():
    message = r"8 rows are not a sum of multiples of the islands' data ranks \(a 3, b 3\)"
    with pytest.raises(ConfigError, match=message):
        row_counts(8, a=pace(data_ranks=3, rate=1.0), b=pace(data_ranks=3, rate=1.0))


# ------------------------------------------------------------------------------------------- with exact sums


def test_with_exact_sums_microbatches_are_whole_and_lie_as_in_one_world():
    microbatch = 3
    a = pace(data_ranks=2, microbatch=microbatch, rate=1.0, exact_sums=True)
    b = pace(data_ranks=1, microbatch=microbatch, rate=1.0, exact_sums=True)
    row_indices = divide(24, {"a": a, "b": b})
    assert len(row_indices["a"]) == 12
    assert len(row_indices["b"]) == 12
    for name, indices in row_indices.items():
        assert indices.start % microbatch == 0, name
        assert len(indices) % microbatch == 0, name


def test_with_exact_sums_no_division_is_an_error_that_names_the_multiples():
    either = pace(data_ranks=2, microbatch=2, rate=1.0, exact_sums=True)
    with pytest.raises(ConfigError, match=r"ranks x microbatch, as exact_sums needs, \(a 4, b 4\)"):
        row_counts(10, a=either, b=either)


# ------------------------------------------------------------------------------------------- which rows


def test_the_row_indices_are_all_of_the_batch_in_order_of_names():
    paces = {
        "b": pace(data_ranks=8, microbatch=4, rate=5.0),
        "a": pace(data_ranks=64, microbatch=2, rate=70.0),
        "c": pace(data_ranks=3, microbatch=1, rate=1.0),
    }
    row_indices = divide(4096, paces)
    assert list(row_indices) == ["a", "b", "c"]
    assert [*row_indices["a"], *row_indices["b"], *row_indices["c"]] == list(range(4096))


# ------------------------------------------------------------------------------------------- large batches


def test_large_batches_are_divided_into_full_microbatches():
    microbatch = 4096
    a = pace(microbatch=microbatch, rate=5.0)
    b = pace(microbatch=microbatch, rate=7.0)
    assert row_counts(16 * microbatch, a=a, b=b) == {"a": 7 * microbatch, "b": 9 * microbatch}


def test_large_batches_are_divided_among_many_islands_at_once():
    """The coordinator sends no heartbeat meanwhile. If each number of rows were tried, it would take hours."""
    paces = {name: pace(microbatch=1 << 30, rate=1.0) for name in "abcdefgh"}
    assert set(row_counts(1 << 31, **paces)) == set(paces)


# ------------------------------------------------------------------------------------------- measured rates


def rate_after(*measurements: float) -> float | None:
    rate = Rate()
    for measured in measurements:
        rate.add(measured)
    return rate.value


def test_the_first_measurement_is_the_rate():
    assert rate_after(100.0) == 100


def test_a_rate_follows_small_changes_by_their_weight():
    assert rate_after(100.0, 110.0) == pytest.approx(103)


def test_one_large_change_of_a_rate_is_noise():
    assert rate_after(100.0, 200.0) == 100


def test_a_rate_follows_a_large_change_that_is_measured_twice_in_a_row():
    assert rate_after(100.0, 200.0, 220.0) == pytest.approx(210)
    assert rate_after(100.0, 50.0, 40.0) == pytest.approx(45)


def test_large_changes_in_both_directions_are_noise():
    assert rate_after(100.0, 200.0, 50.0) == 100


def test_large_changes_that_are_apart_are_noise():
    assert rate_after(100.0, 200.0, 100.0, 200.0) == 100
