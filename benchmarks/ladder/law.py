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
    sizes = np.array(sizes_n, np.float64)
    best = np.full((4, len(losses_fn)), np.inf)
    for exponent in EXPONENTS:
        x = (sizes / sizes[0]) ** -exponent
        slope = ((losses_fn - losses_fn.mean(axis=1, keepdims=True)) @ (x - x.mean())) / ((x - x.mean()) ** 2).sum()
        floor = losses_fn.mean(axis=1) - slope * x.mean()
        slope = np.where(floor < 0, losses_fn @ x / (x @ x), slope)
        floor = np.maximum(floor, 0)
        squares = ((floor[:, None] + slope[:, None] * x - losses_fn) ** 2).sum(axis=1)
        found = np.stack([squares, floor, slope * sizes[0] ** exponent, np.full(len(losses_fn), exponent)])
        best = np.where(squares < best[0], found, best)
    return Law(*best[1:])


class Prediction(NamedTuple):
    """A law fitted to the sizes before, and the loss of the next size with the interval of that prediction."""

    law: Law
    expected: float
    low: float
    high: float
    exponents: tuple[float, float]
    floors: tuple[float, float]


def predict(
    sizes_n: Sequence[float], nats_and_bytes_nu2: Sequence[Floats], size: float, deviation: float
) -> Prediction:
    """Predict bits per byte at `size` from documents [nats, bytes] of each smaller size.

    The interval takes in which documents were drawn, the same for all sizes, and how runs differ by their seed: normal,
    with standard `deviation`, in the measured losses and in the one to come.
    """
    columns = np.concatenate([rows[:, :1] for rows in nats_and_bytes_nu2] + [nats_and_bytes_nu2[0][:, 1:]], axis=1)
    bits = lambda sums: sums[..., :-1] / sums[..., -1:] / math.log(2)  # noqa: E731
    generator = np.random.default_rng(SEED)
    law = fit(sizes_n, bits(columns.sum(axis=0))[None])
    draws = bits(bootstrap_sums(columns, generator, NUM_DRAWS))
    laws = fit(sizes_n, draws + generator.normal(0, deviation, draws.shape))
    ends = lambda values: tuple(float(end) for end in np.quantile(values, (LEVEL / 2, 1 - LEVEL / 2)))  # noqa: E731
    low, high = ends(laws.at(size) + generator.normal(0, deviation, NUM_DRAWS))
    one = Law(*(float(value[0]) for value in law))
    return Prediction(one, float(one.at(size)), low, high, ends(laws.exponent), ends(laws.floor))


# ------------------------------------------------------------------------------------------------------- baselines


def compressed(texts: Sequence[str]) -> dict[str, float]:
    """Return bits per byte of the texts, one after the other, by compressors that have seen nothing before."""
    content = "".join(texts).encode()
    sizes = {
        "gzip -9": len(gzip.compress(content, 9)),
        "xz -9e": len(lzma.compress(content, preset=9 | lzma.PRESET_EXTREME)),
    }
    return {name: 8 * size / len(content) for name, size in sizes.items()}


class Grams(NamedTuple):
    """Counts of one order: sorted n-grams, and of each context its total and how many tokens follow it."""

    keys: NDArray[np.int64]
    counts: Floats
    contexts: NDArray[np.int64]
    totals: Floats
    kinds: Floats
    discount: float


class NGram:
    """Kneser and Ney's model, interpolated, with one discount for each order."""

    def __init__(self, tokens: NDArray[np.int64], vocab_size: int, order: int = ORDER):
        self.vocab_size, self.orders = vocab_size, []
        keys, counts = np.unique(windows(tokens, order, vocab_size), return_counts=True)
        for left in range(order, 0, -1):
            once, twice = (int((counts == n).sum()) for n in (1, 2))
            contexts, starts, kinds = np.unique(keys // vocab_size, return_index=True, return_counts=True)
            totals = np.add.reduceat(counts, starts)
            discount = once / max(once + 2 * twice, 1) or 0.5
            self.orders.insert(0, Grams(keys, counts, contexts, totals, kinds, discount))
            # A lower order counts the different tokens before a gram.
            keys, counts = np.unique(keys % vocab_size ** (left - 1), return_counts=True)

    def nats(self, tokens: NDArray[np.int64]) -> float:
        """Return the surprise at all tokens but the first, each by at most order - 1 tokens before it."""
        p = np.full(len(tokens) - 1, 1 / self.vocab_size)
        for n, grams in enumerate(self.orders, start=1):
            if n > len(tokens):
                break
            wanted = windows(tokens, n, self.vocab_size)[1 if n == 1 else 0 :]
            lower = p[len(p) - len(wanted) :]
            counts = looked_up(grams.keys, grams.counts, wanted)
            totals, kinds = (looked_up(grams.contexts, values, wanted // self.vocab_size) for values in grams[3:5])
            seen = (np.maximum(counts - grams.discount, 0) + grams.discount * kinds * lower) / np.maximum(totals, 1)
            p[len(p) - len(wanted) :] = np.where(totals > 0, seen, lower)
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
