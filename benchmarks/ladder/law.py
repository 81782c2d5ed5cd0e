"""Arithmetic of the ladder: a scaling law, the prediction of a larger size, and baselines over the same bytes.

The law says how the loss depends on the number of parameters. The baselines are compressors and an n-gram model; all
figures are bits per byte, so they are comparable with those of the models.

Axes in names: `_n` is sizes, `_f` is fits (one for each bootstrap draw), `_u` is documents, and `2` is [nats, bytes].
"""

import gzip
import lzma
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmfoundry_lite.evaluation.significance import Floats, bootstrap_sums

EXPONENTS = np.arange(0.02, 1.5, 0.005)
"""Exponents that a fit tries."""
NUM_DRAWS, LEVEL, SEED = 4000, 0.05, 17
"""Bootstrap draws, and the share of them outside an interval."""
ORDER = 5
"""Tokens of the n-gram model's longest gram."""


class Law(NamedTuple):
    """L(N) = floor + scale N^-exponent, with N in parameters. Each field has one number for each of several fits."""

    floor: Floats
    scale: Floats
    exponent: Floats

    def at(self, num_parameters: float) -> Floats:
        """Return the loss at this number of parameters."""
        return self.floor + self.scale * num_parameters**-self.exponent


def fit(sizes_n: Sequence[float], losses_fn: Floats) -> Law:
    """Fit a law to each row of losses by least squares, with a floor of at least 0.

    `sizes_n` are numbers of parameters, `losses_fn` the losses at these sizes. For a given exponent, floor and scale
    are a linear regression. So all of EXPONENTS are tried, and the one with the smallest sum of squares is kept for
    each row.
    """
    sizes, means_f = np.array(sizes_n, np.float64), losses_fn.mean(axis=1)
    best_candidate = np.full((4, len(losses_fn)), np.inf)
    for exponent in EXPONENTS:
        # Regress on N^-exponent, relative to the first size, so that its values are near 1.
        decay_n = (sizes / sizes[0]) ** -exponent
        centred_n = decay_n - decay_n.mean()
        slope_f = losses_fn @ centred_n / (centred_n**2).sum()
        # Where the regression's floor would be negative, regress through the origin instead.
        has_negative_floor_f = means_f < slope_f * decay_n.mean()
        slope_f = np.where(has_negative_floor_f, losses_fn @ decay_n / (decay_n @ decay_n), slope_f)
        floor_f = np.where(has_negative_floor_f, 0, means_f - slope_f * decay_n.mean())

        # Keep, for each row, what fits better than all exponents before.
        predicted_fn = floor_f[:, None] + slope_f[:, None] * decay_n
        squares_f = ((predicted_fn - losses_fn) ** 2).sum(axis=1)
        candidate = np.stack([squares_f, floor_f, slope_f * sizes[0] ** exponent, np.full(len(losses_fn), exponent)])
        best_candidate = np.where(squares_f < best_candidate[0], candidate, best_candidate)
    return Law(*best_candidate[1:])


def predict(
    sizes_n: Sequence[float], documents_nu2: Sequence[Floats], size: float, deviation: float
) -> dict[str, float]:
    """Predict the bits per byte at `size` parameters from those measured at smaller sizes, with 95 % intervals.

    `documents_nu2` has, for each smaller size, the [nats, bytes] of each document. The documents are the same for all
    sizes. The intervals contain two kinds of chance: which documents were drawn, and how runs differ by their seed. The
    latter is normal noise, with standard `deviation` in bits per byte, in the measured losses and in the one to come.

    Returns floor, scale, exponent and bits, each also with _low and _high.
    """
    # The first fit is that of the measured sums without noise; the others are the bootstrap's.
    columns = np.stack([*(rows[:, 0] for rows in documents_nu2), documents_nu2[0][:, 1] * math.log(2)], axis=1)
    sums = np.concatenate([columns.sum(axis=0)[None], *bootstrap_sums(columns, np.random.default_rng(SEED), NUM_DRAWS)])
    noise = np.random.default_rng(SEED + 1).normal(0, deviation, (NUM_DRAWS + 1, len(sizes_n) + 1))
    noise[0] = 0
    laws = fit(sizes_n, sums[:, :-1] / sums[:, -1:] + noise[:, :-1])
    values_of_fits = {**laws._asdict(), "bits": laws.at(size) + noise[:, -1]}

    report = {name: float(values_f[0]) for name, values_f in values_of_fits.items()}
    for name, values_f in values_of_fits.items():
        report[f"{name}_low"], report[f"{name}_high"] = np.quantile(values_f[1:], (LEVEL / 2, 1 - LEVEL / 2)).tolist()
    return report


# ------------------------------------------------------------------------------------------------------- baselines


def compressed(texts: Sequence[str]) -> dict[str, float]:
    """Return the bits per byte of the texts, one after the other, by compressors that have seen nothing before."""
    content = "".join(texts).encode()
    sizes = {"gzip -9": gzip.compress(content, 9), "xz -9e": lzma.compress(content, preset=9 | lzma.PRESET_EXTREME)}
    return {name: 8 * len(packed) / len(content) for name, packed in sizes.items()}


class NGram:
    """Kneser and Ney's interpolated n-gram model of tokens, with one discount for each order.

    `orders` has an entry for each order from 1: grams and their counts, contexts and their [total count, number of
    different next tokens], and the discount. A gram is a single number, see `windows`.
    """

    def __init__(self, tokens: NDArray[np.int64], vocab_size: int, order: int = ORDER):
        """Count the grams of all orders in `tokens`. A token is a number below `vocab_size`."""
        self.vocab_size = vocab_size
        self.orders: list[tuple[NDArray[np.int64], Floats, NDArray[np.int64], Floats, float]] = []
        keys, counts = np.unique(windows(tokens, order, vocab_size), return_counts=True)
        for context_length in reversed(range(order)):
            # The discount comes from how many grams were seen once and twice.
            num_once, num_twice = (int((counts == n).sum()) for n in (1, 2))
            # Grams are sorted, so those with the same context stand together.
            contexts, starts, num_continuations = np.unique(keys // vocab_size, return_index=True, return_counts=True)
            totals = np.stack([np.add.reduceat(counts, starts), num_continuations]).astype(np.float64)
            self.orders.insert(
                0,
                (keys, counts.astype(np.float64), contexts, totals, num_once / max(num_once + 2 * num_twice, 1) or 0.5),
            )

            # A lower order counts how many different tokens stand before a gram, not how often it occurs.
            keys, counts = np.unique(keys % vocab_size**context_length, return_counts=True)

    def nats(self, tokens: NDArray[np.int64]) -> float:
        """Return the surprise at all tokens except the first, in nats.

        Each token is predicted by the tokens before it, as many as the order sees. The probability is improved order by
        order: where a context was seen, the discounted share of the gram is mixed with the probability of the order
        below.
        """
        probability_t = np.full(len(tokens) - 1, 1 / self.vocab_size)
        for order, (keys, counts, contexts, totals, discount) in enumerate(self.orders[: len(tokens)], start=1):
            grams = windows(tokens, order, self.vocab_size)[order == 1 :]
            # A view: the first tokens have too few before them, and keep the lower order's probability.
            lower_order_t = probability_t[len(probability_t) - len(grams) :]
            gram_count = looked_up(keys, counts, grams)
            context_count, num_continuations = (
                looked_up(contexts, values, grams // self.vocab_size) for values in totals
            )
            interpolated_t = (
                np.maximum(gram_count - discount, 0) + discount * num_continuations * lower_order_t
            ) / np.maximum(context_count, 1)
            lower_order_t[:] = np.where(context_count > 0, interpolated_t, lower_order_t)
        return float(-np.log(probability_t).sum())


def windows(tokens: NDArray[np.int64], n: int, vocab_size: int) -> NDArray[np.int64]:
    """Return each run of n tokens as one number, whose digits to the base `vocab_size` are the tokens.

    For example, with a vocabulary of 10, the windows of length 2 of the tokens 1, 2, 3 are 12 and 23.
    """
    keys = np.zeros(len(tokens) - n + 1, np.int64)
    for i in range(n):
        keys = keys * vocab_size + tokens[i : len(tokens) - n + 1 + i]
    return keys


def looked_up(keys: NDArray[np.int64], values: Floats, wanted: NDArray[np.int64]) -> Floats:
    """Return the value of each wanted key, or 0 for one that is not in the sorted `keys`."""
    position = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[position] == wanted, values[position], 0)
