"""Two clusters that train one run over a link: exact, exact with overlap, or local steps. Arithmetic, no torch.

Clusters of s1 and s2 tokens a second have s = s1 + s2 together, and take C / s for a batch of C tokens. The sums of N
gradients cross the link both ways at once: X = 8 w N / b seconds at w bytes a number and b bit/s. w is 4, and 5 where
the run has `exact_sums`; local steps have 4 always.

- exact: C / s + X, the same batches and the same mathematics as on one cluster;
- overlap: C / s + max(X - H, X_last). H is the backward pass of the last microbatch, two thirds of its time. X_last is
  the share of X that comes last: of the embeddings and the first block. Where one of the two has a pipeline it is
  taken as X: the first stage's gradients are final at the end, and what later stages hide is left out;
- local: C / s + X / k, changes of the weights sent every k batches. Another algorithm (Douillard et al. 2023), of which
  this predicts no loss.
"""

import math
from dataclasses import dataclass

from llmfoundry_lite.errors import ConfigError
from llmfoundry_lite.estimate.portion import FP32_BYTES
from llmfoundry_planner.plan.plan import Plan
from llmfoundry_planner.plan.report import describe_interval, three_digits
from llmfoundry_planner.plan.step import count_block_and_outside

EXACT, OVERLAP = "exact", "exact with overlap"
EVERY = (10, 50, 100, 500)
"""Batches between exchanges of local steps."""
LOST = 0.05
"""Share of both clusters' rate that an exact way may lose before local steps are named instead."""
EXACT_SUMS_BYTES = 5.0
"""Bytes of a number in a sum that does not depend on its order, packed by its width."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Pair:
    """Two clusters that share each batch by their speed."""

    rates: tuple[float, float]
    """Tokens per second of each alone."""
    batch_tokens: int
    num_parameters: int
    num_last: int = 0
    """Parameters whose gradients come last."""
    num_microbatches: int = 1
    """Microbatches of a rank in its part of the batch, on the cluster that has more."""
    value_bytes: float = FP32_BYTES

    @property
    def compute_seconds(self) -> float:
        return self.batch_tokens / sum(self.rates)

    def seconds(self, way: str | int, link_bits: float, value_bytes: float | None = None) -> float:
        """Time a batch over a link of so many bit/s each way. `way`: EXACT, OVERLAP or the batches of local steps."""
        sent = 8 * (value_bytes or (FP32_BYTES if isinstance(way, int) else self.value_bytes)) / link_bits
        exchange, last = sent * self.num_parameters, sent * self.num_last
        if isinstance(way, int):
            return self.compute_seconds + exchange / way
        if way == OVERLAP:
            hidden = 2 / 3 * self.compute_seconds / self.num_microbatches
            exchange = max(exchange - hidden, last)
        return self.compute_seconds + exchange

    def gain(self, way: str | int, link_bits: float) -> float:
        """Return the rate over that of the faster cluster alone."""
        return self.batch_tokens / max(self.rates) / self.seconds(way, link_bits)

    def least_link(self, way: str | int, gain: float, value_bytes: float | None = None) -> float:
        """Return the slowest link, in bit/s, with which the two reach this gain; inf where none does."""
        seconds, slow, fast = self.batch_tokens / max(self.rates) / gain, 1e3, 1e18
        if self.seconds(way, fast, value_bytes) > seconds:
            return math.inf
        while fast / slow > 1.001:
            middle = math.sqrt(slow * fast)
            slow, fast = (slow, middle) if self.seconds(way, middle, value_bytes) <= seconds else (middle, fast)
        return fast

    def local_steps(self, link_bits: float) -> int:
        """Return the fewest batches between exchanges that lose little, or the most that are tried."""
        allowed = self.compute_seconds / (1 - LOST)
        return next((every for every in EVERY if self.seconds(every, link_bits) <= allowed), EVERY[-1])

    def choose(self, link_bits: float) -> str | int | None:
        """Return the way to take: an exact one if it loses little; None where the second cluster does not pay."""
        best = sum(self.rates) / max(self.rates)
        for way in (EXACT, OVERLAP):
            if self.gain(way, link_bits) >= max(1.0, (1 - LOST) * best):
                return way
        ways = (EXACT, OVERLAP, self.local_steps(link_bits))
        fastest = max(ways, key=lambda way: self.gain(way, link_bits))
        return fastest if self.gain(fastest, link_bits) > 1 else None


def join(first: Plan, second: Plan) -> Pair:
    """Pair the first layouts of two plans of one run. Raises ConfigError if it does not fit on one of them."""
    for plan in (first, second):
        if not plan.candidates:
            raise ConfigError(f"--join: the run does not fit on {plan.num_devices} x {plan.hardware.accelerator.name}")
    best = [plan.candidates[0] for plan in (first, second)]
    rates = best[0].time.tokens_per_second, best[1].time.tokens_per_second
    model, samples = first.config.model, first.config.global_train_batch_size
    num_block, num_outside = count_block_and_outside(model)
    head = 0 if model.tie_word_embeddings else model.vocab_size * model.d_model
    microbatches = [
        math.ceil(samples * rate / sum(rates) / c.layout.num_data_ranks / c.microbatch_size)
        for c, rate in zip(best, rates, strict=True)
    ]
    has_pipeline = any(c.layout.pipeline > 1 for c in best)
    return Pair(
        rates=rates,
        batch_tokens=best[0].time.num_tokens,
        num_parameters=first.num_parameters,
        num_last=first.num_parameters if has_pipeline else num_block + num_outside - head,
        num_microbatches=max(microbatches),
        value_bytes=EXACT_SUMS_BYTES if first.config.exact_sums else FP32_BYTES,
    )


def name_way(way: str | int | None) -> str:
    if way is None:
        return "the faster cluster alone"
    return way if isinstance(way, str) else f"local steps, every {way} (another algorithm; see docs/local-steps.md)"


def describe_joined(second: Plan, pair: Pair, link_gigabits: float) -> str:
    """Return the answer, then for each way its rate on this link, and the links that it needs."""
    link, best = link_gigabits * 1e9, sum(pair.rates) / max(pair.rates)
    other = f"{second.num_devices} x {second.hardware.accelerator.name}"
    lines = [
        f"joined    with {other} over {link_gigabits:g} Gbit/s: {name_way(pair.choose(link))}",
        f"  {second.num_devices} x {describe_interval(second)}",
    ]
    for way in (EXACT, OVERLAP, pair.local_steps(link)):
        pays, reaches = (in_gigabits(pair.least_link(way, gain)) for gain in (1.0, (1 - LOST) * best))
        rate, gain = pair.batch_tokens / pair.seconds(way, link), pair.gain(way, link)
        needs = f"pays from {pays} on, loses under {LOST:.0%} from {reaches} on"
        lines.append(f"  {name_way(way)}: {rate:,.0f} tokens/s, {gain:.2f} times the faster alone; {needs}")
    return "\n".join(lines)


def in_gigabits(bits: float) -> str:
    if math.isinf(bits):
        return "no link"
    return f"{three_digits(bits / 1e9)} Gbit/s" if bits >= 1e9 else f"{three_digits(bits / 1e6)} Mbit/s"
