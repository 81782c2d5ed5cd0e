"""Student's t against published values."""

import math

import pytest

from llmfoundry_studies.student_t import quantile, two_sided_p, upper_tail


@pytest.mark.parametrize(
    ("df", "tail", "expected"),
    [  # Abramowitz and Stegun 1964, table 26.10
        (1, 0.025, 12.7062),
        (2, 0.025, 4.3027),
        (3, 0.005, 5.8409),
        (4, 0.025, 2.7764),
        (10, 0.0005, 4.5869),
        (30, 0.05, 1.6973),
        (120, 0.025, 1.9799),
        (1e6, 0.025, 1.9600),
    ],
)
def test_quantiles_are_those_of_the_tables(df, tail, expected):
    assert quantile(tail, df) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("t", [0.1, 1.0, 3.0, 50.0])
def test_one_and_two_degrees_of_freedom_have_closed_forms(t):
    assert upper_tail(t, 1) == pytest.approx(0.5 - math.atan(t) / math.pi, rel=1e-9)
    assert upper_tail(t, 2) == pytest.approx((1 - t / math.sqrt(2 + t**2)) / 2, rel=1e-9)


@pytest.mark.parametrize("df", [1.0, 1.7, 2.5, 7.3, 400.0, 3000.0])
def test_tails_are_symmetric_and_start_at_a_half(df):
    assert upper_tail(0.0, df) == pytest.approx(0.5, abs=1e-9)
    assert upper_tail(-1.3, df) == pytest.approx(1 - upper_tail(1.3, df))
    assert two_sided_p(-1.3, df) == two_sided_p(1.3, df)


def test_the_normal_approximation_continues_the_integral():
    assert upper_tail(2.5, 1999.9) == pytest.approx(upper_tail(2.5, 2000.1), rel=1e-5)
