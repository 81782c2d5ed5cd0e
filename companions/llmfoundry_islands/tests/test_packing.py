"""Exact sums as bytes: any integer of 53 bits comes back, and nothing malformed is taken."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmfoundry_islands.coordination.messages import BadMessageError
from llmfoundry_islands.tensors.packing import CHUNK, LARGEST, PIECE, most_bytes, pack_sums, unpack_sums

BITS = 46
integers = st.one_of(st.integers(-LARGEST, LARGEST), st.integers(-300, 300), st.just(0))


def there_and_back(values):
    raw = pack_sums(values, BITS)
    assert len(raw) <= most_bytes(len(values))
    return unpack_sums(memoryview(raw), len(values), BITS)


@settings(deadline=None)
@given(st.lists(integers, max_size=40), st.integers(0, 2 * CHUNK + 1), st.integers(0, 60))
def test_every_integer_of_53_bits_comes_back(numbers, num_zeros, place):
    values = np.zeros(len(numbers) + num_zeros)
    place = min(place, num_zeros)
    values[place : place + len(numbers)] = np.array(numbers, float) * 2.0**-BITS
    assert np.array_equal(there_and_back(values), values)


@pytest.mark.parametrize("count", [0, 1, CHUNK - 1, CHUNK, PIECE, PIECE + 1, 2 * PIECE + CHUNK + 7])
def test_chunks_of_every_width_come_back_at_every_length(count):
    chance = np.random.default_rng(count)
    scales = 2.0 ** chance.integers(0, 54, -(-count // CHUNK)).repeat(CHUNK)[:count]
    values = (chance.uniform(-1, 1, count) * scales).round() * 2.0**-BITS
    assert np.array_equal(there_and_back(values), values)


@pytest.mark.parametrize(("number", "width"), [(0, 0), (-1, 1), (127, 1), (128, 2), (-128, 1), (-129, 2), (1 << 53, 7)])
def test_a_chunk_takes_the_bytes_that_its_largest_integer_needs(number, width):
    values = np.zeros(CHUNK)
    values[5] = number * 2.0**-BITS
    assert len(pack_sums(values, BITS)) == 1 + width * CHUNK


def test_a_chunk_with_a_number_that_is_not_finite_is_not_a_number_and_leaves_the_others_as_they_are():
    values = np.full(2 * CHUNK + 3, 2.0**-BITS)
    values[CHUNK + 1], values[0] = np.inf, 1e300
    found = there_and_back(values)
    assert np.isnan(found[CHUNK : 2 * CHUNK]).all()
    assert found[0] == LARGEST * 2.0**-BITS and np.array_equal(found[1:CHUNK], values[1:CHUNK])
    assert np.array_equal(found[2 * CHUNK :], values[2 * CHUNK :])


@settings(deadline=None)
@given(st.binary(max_size=60), st.integers(0, 50))
def test_noise_is_taken_for_what_it_packs_or_refused(raw, count):
    try:
        found = unpack_sums(memoryview(raw), count, BITS)
    except BadMessageError:
        return
    assert len(found) == count and not (np.abs(found) > LARGEST * 2.0**-BITS).any()


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"\x08" + bytes(8), "a width that cannot be"),
        (b"", "a width that cannot be"),
        (b"\x02\x00", "fewer bytes than their widths say"),
        (b"\x01\x00\x00", "3 bytes, expected 2"),
        (b"\x07" + b"\xff" * 6 + b"\x7f", "an integer of more than 53 bits"),
    ],
)
def test_malformed_sums_are_refused(raw, words):
    with pytest.raises(BadMessageError, match=words):
        unpack_sums(memoryview(raw), 1, BITS)
