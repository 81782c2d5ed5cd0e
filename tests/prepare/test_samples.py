"""Which documents are held out: a split key below a threshold, and never one at it."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from llmfoundry_lite.prepare import samples
from llmfoundry_lite.prepare.samples import choose_threshold, raise_threshold


@pytest.mark.parametrize(
    ("threshold", "at_least", "raised"),
    [
        (1, 10, 6),  # the document with key 5, and no other
        (5, 0, 5),  # enough already; key 5 is not held out
        (5, 10, 6),
        (6, 10, 6),
        (6, 11, 10),  # both documents with key 9
        (6, 30, 10),
        (1, 31, 10),  # the next would be more than half
    ],
)
def test_more_is_held_out_in_the_order_of_the_keys(threshold: int, at_least: int, raised: int) -> None:
    keys = np.array([20, 9, 5, 9, 30, 40], np.uint64)
    assert raise_threshold(np.uint64(threshold), keys, np.full(6, 10), at_least) == raised


def test_the_largest_key_is_never_held_out() -> None:
    keys = np.array([2**64 - 1] * 2, np.uint64)
    assert raise_threshold(np.uint64(1), keys, np.array([1, 0]), 1) == 1


@pytest.mark.parametrize(("keys", "expected"), [((2**62 - 1, 2**62), 2**62), ((2**62, 2**62 + 1), 2**62 + 1)])
def test_a_document_at_the_threshold_is_for_training(monkeypatch, tmp_path, keys, expected) -> None:
    unit = SimpleNamespace(doc_keys=np.array(keys, np.uint64), doc_tokens=np.array([8, 8]))
    monkeypatch.setattr(samples, "load_unit", lambda *_, **__: unit)
    request: Any = SimpleNamespace(val_fraction=0.25, max_seq_len=8)
    assert choose_threshold(tmp_path, 1, request) == expected
