"""Encoding of changes of weights for the wire."""

import pytest
import torch

from llmfoundry_islands.tensors.boxes import Box
from llmfoundry_islands.tensors.encoding import encode, pack, packed_bytes, unpack

PIECES = {"w": Box((4, 0), (6, 8)), "b": Box((2,), (5,)), "empty": Box((0, 0), (0, 8))}


def values():
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(box.lengths, generator=generator) for name, box in PIECES.items()}


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int8"])
def test_a_peer_decodes_what_the_sender_uses_whatever_it_cuts(dtype):
    """The peer has columns of some rows, and another offset."""
    encoded = {name: encode(part, dtype) for name, part in values().items()}
    theirs = {"w": Box((6, 3), (7, 2)), "b": Box((0,), (4,))}
    cuts = {name: PIECES[name].intersect(box) for name, box in theirs.items()}
    raw, found = pack(PIECES, encoded, cuts), {}
    assert raw.numel() == packed_bytes(cuts, dtype)
    unpack(raw, theirs, cuts, dtype, found)
    for name, cut in cuts.items():
        assert torch.equal(found[name][cut.slices_in(theirs[name])], encoded[name].values[cut.slices_in(PIECES[name])])


@pytest.mark.parametrize(("dtype", "error"), [("fp32", 0.0), ("bf16", 2**-8), ("int8", 0.5 / 127)])
def test_rounding_stays_within_half_a_unit_of_the_row_s_largest(dtype, error):
    part = values()["w"]
    part[2] *= 1e-6  # a row of its own scale
    off = (encode(part, dtype).values - part).abs().amax(1) / part.abs().amax(1)
    assert off.max() <= error * 1.001


@pytest.mark.parametrize("dtype", ["bf16", "int8"])
def test_error_feedback_leaves_no_bias(dtype):
    """The same small change many times: without feedback int8 would send none of it."""
    change = torch.tensor([[1.0, 1e-3, -3e-4]])
    residual, sent = torch.zeros_like(change), torch.zeros_like(change)
    for _ in range(1000):
        wanted = change + residual
        decoded = encode(wanted, dtype).values
        residual, sent = wanted - decoded, sent + decoded
    assert torch.allclose(sent / 1000, change, atol=1e-5)


def test_zeros_stay_zeros_and_what_is_not_finite_stays_so():
    assert torch.equal(encode(torch.zeros(2, 3), "int8").values, torch.zeros(2, 3))
    for bad in (float("nan"), float("inf")):
        part = torch.ones(2, 3)
        part[1, 1] = bad
        decoded = encode(part, "int8").values
        assert torch.allclose(decoded[0], part[0]) and not decoded[1].isfinite().any()
