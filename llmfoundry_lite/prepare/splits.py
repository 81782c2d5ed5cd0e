"""Which documents are held out for validation.

A document is held out if its split key, a 64-bit hash of its text, is below the threshold. So a threshold of 5 % of
2^64 holds out about 5 % of the documents, and equal texts are in the same split.
"""

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from llmfoundry_lite.prepare.request import PrepareRequest
from llmfoundry_lite.prepare.token_unit import load_unit


def choose_threshold(train_tokens: int, val_tokens: int, paths: Iterable[Path], request: PrepareRequest) -> np.uint64:
    """Choose the threshold of split keys: documents with a key below it are held out for validation.

    train_tokens, val_tokens: tokens of each split by `initial_threshold`.
    paths: all token files, which are read only if that threshold does not do.

    The threshold is the request's fraction of the range of keys, if both splits then have at least one sample.
    Otherwise it is raised until the validation split has one. Returns 0, so that nothing is held out, if there is not
    enough data for a sample in both splits.
    """
    threshold = initial_threshold(request)
    one_sample = request.max_seq_len
    if threshold == 0 or (val_tokens >= one_sample and train_tokens >= one_sample):
        return threshold

    # There is so little data that one split has less than one sample. If it is the training split, hold out nothing.
    if train_tokens < one_sample:
        return np.uint64(0)

    # Otherwise hold out more documents. These few fit into memory.
    units = [load_unit(path, without_tokens=True) for path in paths]
    keys = np.concatenate([unit.doc_keys for unit in units])
    tokens = np.concatenate([unit.doc_tokens for unit in units])
    threshold = raise_threshold(threshold, keys, tokens, one_sample)
    has_sample = tokens[keys < threshold].sum() >= one_sample
    return threshold if has_sample else np.uint64(0)


def initial_threshold(request: PrepareRequest) -> np.uint64:
    """Return the split key below which the request's validation fraction of all documents is expected.

    Split keys are hashes, and so uniformly distributed over 64 bits. A fraction of 0.25 has the threshold 2^62.
    """
    assert request.val_fraction is not None, "prepare sets the source's default"
    return np.uint64(int(request.val_fraction * 2**64))


def raise_threshold(threshold: np.uint64, keys: np.ndarray, sizes: np.ndarray, min_size: int) -> np.uint64:
    """Raise the threshold of split keys until the documents below it have `min_size` together, but at most half of all.

    keys: split keys of all documents.
    sizes: sizes of all documents, in the unit of `min_size`, which is tokens or bytes.

    Documents with equal keys are held out together. The keys 10, 20, 30 and 40 with sizes of 5 each, a threshold of 15
    and a `min_size` of 8 have the result 21, below which are two documents of together 10. Returns `threshold` if it
    need not be raised.
    """
    if not len(keys):
        return threshold

    # Sort the documents by key, and compute for each distinct key the size of all documents up to it.
    order = np.argsort(keys, kind="stable")
    sorted_keys = keys[order]
    is_last_of_key = np.append(sorted_keys[1:] != sorted_keys[:-1], True)  # equal texts have equal keys
    sizes_up_to_key = np.cumsum(sizes[order])[is_last_of_key]

    # Raise the threshold above one key after another.
    half_of_all = sizes.sum() / 2
    for key, size_up_to_key in zip(sorted_keys[is_last_of_key], sizes_up_to_key, strict=True):
        if key < threshold:
            continue
        is_enough = sizes[keys < threshold].sum() >= min_size
        exceeds_half = size_up_to_key > half_of_all
        is_largest_key = key == 2**64 - 1  # there is no threshold above it
        if is_enough or exceeds_half or is_largest_key:
            break
        threshold = np.uint64(key + np.uint64(1))
    return threshold
