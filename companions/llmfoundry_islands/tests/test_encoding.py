"""Encoding of changes of weights for the wire."""

import pytest
import torch

from llmfoundry_islands.tensors.boxes import Box
from llmfoundry_islands.tensors.encoding import LARGEST_INT8, encode, pack, packed_bytes, unpack

PIECES = {"w": Box((4, 0), (6, 8)), "b": Box((2,), (5,)), "empty": Box((0, 0), (0, 8))}
"""What the sender has: rows 4 to 9 of a matrix, elements 2 to 6 of a vector, and no rows of another matrix."""
PEER_PIECES = {"w": Box((6, 3), (7, 2)), "b": Box((0,), (4,))}
"""What a peer has: two columns of the matrix's rows 6 to 12, and elements 0 to 3 of the vector."""
OVERLAPS = {"w": Box((6, 3), (4, 2)), "b": Box((2,), (2,))}
"""What both have."""

HALF_UNITS = {"fp32": 0.0, "bf16": 2**-8, "int8": 0.5 / LARGEST_INT8}
"""How far rounding may move a number, relative to the largest of its row."""


def random_pieces() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(box.lengths, generator=generator) for name, box in PIECES.items()}


@pytest.mark.parametrize("dtype", HALF_UNITS)
def test_a_peer_decodes_what_the_sender_uses(dtype):
    """The peer has other rows and columns than the sender, so that the overlap lies elsewhere in its piece."""
    encoded = {name: encode(piece, dtype) for name, piece in random_pieces().items()}
    raw = pack(PIECES, encoded, OVERLAPS)
    received = {}
    unpack(raw, PEER_PIECES, OVERLAPS, dtype, received)

    assert raw.numel() == packed_bytes(OVERLAPS, dtype)
    for name, overlap in OVERLAPS.items():
        of_sender = encoded[name].values[overlap.slices_in(PIECES[name])]
        of_peer = received[name][overlap.slices_in(PEER_PIECES[name])]
        assert torch.equal(of_peer, of_sender), name


@pytest.mark.parametrize("dtype", HALF_UNITS)
def test_rounding_stays_within_half_a_unit_of_the_row_s_largest(dtype):
    matrix = random_pieces()["w"]
    matrix[2] *= 1e-6  # a row of its own scale
    errors = (encode(matrix, dtype).values - matrix).abs()
    relative_errors = errors.amax(1) / matrix.abs().amax(1)
    assert relative_errors.max() <= HALF_UNITS[dtype] * 1.001


@pytest.mark.parametrize("dtype", ["bf16", "int8"])
def test_error_feedback_leaves_no_bias(dtype):
    """The same small change many times: without feedback int8 would send nothing of its last two numbers."""
    num_times = 1000
    change = torch.tensor([[1.0, 1e-3, -3e-4]])
    residual = torch.zeros_like(change)  # what rounding has dropped so far
    total_sent = torch.zeros_like(change)
    for _ in range(num_times):
        wanted = change + residual
        sent = encode(wanted, dtype).values
        residual = wanted - sent
        total_sent += sent
    assert torch.allclose(total_sent / num_times, change, atol=1e-5)


def test_zeros_stay_zeros():
    zeros = torch.zeros(2, 3)
    assert torch.equal(encode(zeros, "int8").values, zeros)


@pytest.mark.parametrize("not_finite", [float("nan"), float("inf")])
def test_a_row_with_a_number_that_is_not_finite_decodes_to_such_numbers(not_finite):
    matrix = torch.ones(2, 3)
    matrix[1, 1] = not_finite
    decoded = encode(matrix, "int8").values
    assert torch.allclose(decoded[0], torch.ones(3)), "the other row stays as it is"
    assert not decoded[1].isfinite().any()
