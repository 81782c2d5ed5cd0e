"""The ladder's arithmetic: a law of the loss in parameters, its prediction, and baselines over the same bytes."""

import gzip
import lzma
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmfoundry_lite.evaluation.significance import Floats, bootstrap_sums

EXPONENTS = np.arange(0.02, 1.5, 0.005)
NUM_DRAWS, LEVEL, SEED = 4000, 0.05, 17
ORDER = 5


class Law(NamedTuple):
    """L(N) = floor + scale N^-exponent. Each is a number, or one for each of several fits."""

    floor: Floats
    scale: Floats
    exponent: Floats

    def at(self, num_parameters: float) -> Floats:
        return self.floor + self.scale * num_parameters**-self.exponent


def fit(sizes_n: Sequence[float], losses_fn: Floats) -> Law:
    """Fit a law to each row of losses by least squares, with a floor of at least 0."""
    sizes, means_f = np.array(sizes_n, np.float64), losses_fn.mean(axis=1)
    best = np.full((4, len(losses_fn)), np.inf)
    for exponent in EXPONENTS:
        x = (sizes / sizes[0]) ** -exponent
        slope = losses_fn @ (x - x.mean()) / ((x - x.mean()) ** 2).sum()
        is_below = means_f < slope * x.mean()
        slope = np.where(is_below, losses_fn @ x / (x @ x), slope)
        floor = np.where(is_below, 0, means_f - slope * x.mean())
        squares = ((floor[:, None] + slope[:, None] * x - losses_fn) ** 2).sum(axis=1)
        found = np.stack([squares, floor, slope * sizes[0] ** exponent, np.full(len(losses_fn), exponent)])
        best = np.where(squares < best[0], found, best)
    return Law(*best[1:])


def predict(
    sizes_n: Sequence[float], documents_nu2: Sequence[Floats], size: float, deviation: float
) -> dict[str, float]:
    """Predict bits per byte at `size` from the documents' [nats, bytes] at each smaller size; ends hold 95 %.

    The interval takes in which documents were drawn, the same for all sizes, and how runs differ by their seed: normal,
    with standard `deviation`, in the measured losses and in the one to come.
    """
    columns = np.stack([*(rows[:, 0] for rows in documents_nu2), documents_nu2[0][:, 1] * math.log(2)], axis=1)
    sums = np.concatenate([columns.sum(axis=0)[None], bootstrap_sums(columns, np.random.default_rng(SEED), NUM_DRAWS)])
    noise = np.random.default_rng(SEED + 1).normal(0, deviation, (NUM_DRAWS + 1, len(sizes_n) + 1))
    noise[0] = 0
    laws = fit(sizes_n, sums[:, :-1] / sums[:, -1:] + noise[:, :-1])
    found = {**laws._asdict(), "bits": laws.at(size) + noise[:, -1]}
    report = {name: float(values[0]) for name, values in found.items()}
    for name, values in found.items():
        report[f"{name}_low"], report[f"{name}_high"] = np.quantile(values[1:], (LEVEL / 2, 1 - LEVEL / 2)).tolist()
    return report


# ------------------------------------------------------------------------------------------------------- baselines


def compressed(texts: Sequence[str]) -> dict[str, float]:
    """Return bits per byte of the texts, one after the other, by compressors that have seen nothing before."""
    content = "".join(texts).encode()
    sizes = {"gzip -9": gzip.compress(content, 9), "xz -9e": lzma.compress(content, preset=9 | lzma.PRESET_EXTREME)}
    return {name: 8 * len(packed) / len(content) for name, packed in sizes.items()}


class NGram:
    """Kneser and Ney's model of tokens, interpolated, with one discount for each order."""

    def __init__(self, tokens: NDArray[np.int64], vocab_size: int, order: int = ORDER):
        self.vocab_size = vocab_size
        self.orders: list[tuple[NDArray[np.int64], Floats, NDArray[np.int64], Floats, float]] = []
        keys, counts = np.unique(windows(tokens, order, vocab_size), return_counts=True)
        for left in reversed(range(order)):
            once, twice = (int((counts == n).sum()) for n in (1, 2))
            contexts, starts, kinds = np.unique(keys // vocab_size, return_index=True, return_counts=True)
            totals = np.stack([np.add.reduceat(counts, starts), kinds]).astype(np.float64)
            self.orders.insert(
                0, (keys, counts.astype(np.float64), contexts, totals, once / max(once + 2 * twice, 1) or 0.5)
            )
            # A lower order counts the different tokens before a gram.
            keys, counts = np.unique(keys % vocab_size**left, return_counts=True)

    def nats(self, tokens: NDArray[np.int64]) -> float:
        """Return the surprise at all tokens but the first, each by the tokens before it that its order sees."""
        p = np.full(len(tokens) - 1, 1 / self.vocab_size)
        for n, (keys, counts, contexts, totals, discount) in enumerate(self.orders[: len(tokens)], start=1):
            wanted = windows(tokens, n, self.vocab_size)[n == 1 :]
            lower = p[len(p) - len(wanted) :]
            count = looked_up(keys, counts, wanted)
            total, kinds = (looked_up(contexts, values, wanted // self.vocab_size) for values in totals)
            seen = (np.maximum(count - discount, 0) + discount * kinds * lower) / np.maximum(total, 1)
            lower[:] = np.where(total > 0, seen, lower)
        return float(-np.log(p).sum())


def windows(tokens: NDArray[np.int64], n: int, vocab_size: int) -> NDArray[np.int64]:
    """Return each run of n tokens as one number."""
    keys = np.zeros(len(tokens) - n + 1, np.int64)
    for i in range(n):
        keys = keys * vocab_size + tokens[i : len(tokens) - n + 1 + i]
    return keys


def looked_up(keys: NDArray[np.int64], values: Floats, wanted: NDArray[np.int64]) -> Floats:
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[at] == wanted, values[at], 0)
