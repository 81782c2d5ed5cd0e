"""Two clusters that train one run over a link: exact, exact with overlap, or local steps. Arithmetic, no torch.

`join` makes a `Pair` of two plans, `Pair` does the arithmetic, and `describe_joined` prints the answer of
`plan --join`. There are three ways to train together. With s1 and s2 the tokens per second of each cluster alone, a
batch of C tokens takes C / (s1 + s2) of computing. The gradients of N parameters cross the link both ways at once,
which takes X = 8 w N / b seconds with w bytes for each number and b bit/s. w is 4, and 5 in a run with `exact_sums`;
local steps always have 4.

- exact: C / (s1 + s2) + X, with the same batches and the same mathematics as on one cluster;
- overlap: C / (s1 + s2) + max(X - H, X_last). H is the backward pass of the last microbatch, two thirds of its time.
  X_last is the share of X for the gradients that are ready last, which nothing hides: those of the embeddings and the
  first block. If one of the clusters has a pipeline, X_last is all of X, because the first stage's gradients are ready
  at the end only, and what later stages could hide is left out;
- local steps: C / (s1 + s2) + X / k, with changes of the weights sent every k batches. This is another algorithm
  (Douillard et al. 2023, "DiLoCo"), and this file does not predict its loss.
"""

import math
from dataclasses import dataclass

from llmfoundry_lite.errors import ConfigError
from llmfoundry_lite.estimate.portion import FP32_BYTES
from llmfoundry_planner.plan.plan import Plan
from llmfoundry_planner.plan.report import describe_interval, three_digits
from llmfoundry_planner.plan.step import count_block_and_outside

EXACT = "exact"
OVERLAP = "exact with overlap"
EVERY = (10, 50, 100, 500)
"""Batches between exchanges of local steps that are tried."""
LOST = 0.05
"""Share of both clusters' rate that an exact way may lose before local steps are named instead."""
EXACT_SUMS_BYTES = 5.0
"""Bytes of a number in a sum that does not depend on its order, packed by its width."""
BACKWARD_SHARE = 2 / 3
"""Share of a microbatch's computing that is its backward pass: it computes twice as much as the forward pass."""
SLOWEST_LINK = 1e3
FASTEST_LINK = 1e18
LINK_PRECISION = 1.001
"""Bounds of the search for a link, in bit/s, and the factor between the bounds at which it stops."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Pair:
    """Two clusters that train one run, and share each batch in proportion to their speed.

    A `way` to train together is EXACT, OVERLAP, or an int: local steps with so many batches between exchanges.
    """

    rates: tuple[float, float]
    """Tokens per second of each alone."""
    batch_tokens: int
    num_parameters: int
    num_last: int = 0
    """Parameters whose gradients are ready last, so that OVERLAP does not hide their exchange."""
    num_microbatches: int = 1
    """Microbatches of a rank in its cluster's part of the batch, on the cluster that has more."""
    value_bytes: float = FP32_BYTES
    """Bytes of a gradient's element on the link."""

    @property
    def compute_seconds(self) -> float:
        """Time in which both clusters compute a batch."""
        return self.batch_tokens / sum(self.rates)

    def seconds(self, way: str | int, link_bits: float, value_bytes: float | None = None) -> float:
        """Return the time of a batch over a link of `link_bits` bit/s in each direction. The module has the formulas.

        value_bytes: bytes of each number on the link. None: the run's for exact ways, and fp32 for local steps, which
        exchange weights.
        """
        is_local = isinstance(way, int)
        if value_bytes is None:
            value_bytes = FP32_BYTES if is_local else self.value_bytes
        seconds_per_number = 8 * value_bytes / link_bits
        exchange_seconds = seconds_per_number * self.num_parameters
        if is_local:
            return self.compute_seconds + exchange_seconds / way

        if way == OVERLAP:
            hidden_seconds = BACKWARD_SHARE * self.compute_seconds / self.num_microbatches
            exchange_seconds = max(exchange_seconds - hidden_seconds, seconds_per_number * self.num_last)
        return self.compute_seconds + exchange_seconds

    def gain(self, way: str | int, link_bits: float) -> float:
        """Return the rate of both clusters together as a multiple of the faster cluster's rate alone."""
        seconds_of_faster = self.batch_tokens / max(self.rates)
        return seconds_of_faster / self.seconds(way, link_bits)

    def least_link(self, way: str | int, gain: float, value_bytes: float | None = None) -> float:
        """Return the slowest link, in bit/s, with which this way reaches this `gain`; inf if no link does.

        The time of a batch falls as the link gets faster, so the link is found by bisection of its logarithm.
        """
        target_seconds = self.batch_tokens / max(self.rates) / gain
        too_slow = SLOWEST_LINK
        fast_enough = FASTEST_LINK
        if self.seconds(way, fast_enough, value_bytes) > target_seconds:
            return math.inf

        while fast_enough / too_slow > LINK_PRECISION:
            middle = math.sqrt(too_slow * fast_enough)
            if self.seconds(way, middle, value_bytes) <= target_seconds:
                fast_enough = middle
            else:
                too_slow = middle
        return fast_enough

    def local_steps(self, link_bits: float) -> int:
        """Return the fewest batches between exchanges that lose at most LOST of the rate, or the most of EVERY."""
        allowed_seconds = self.compute_seconds / (1 - LOST)
        for num_batches in EVERY:
            if self.seconds(num_batches, link_bits) <= allowed_seconds:
                return num_batches
        return EVERY[-1]

    def choose(self, link_bits: float) -> str | int | None:
        """Return the way to take over a link of `link_bits` bit/s; None if the faster cluster alone is faster.

        An exact way is taken if it pays and loses at most LOST of both clusters' rate. Otherwise the fastest way is.
        """
        best_gain = sum(self.rates) / max(self.rates)
        sufficient_gain = max(1.0, (1 - LOST) * best_gain)
        for way in (EXACT, OVERLAP):
            if self.gain(way, link_bits) >= sufficient_gain:
                return way

        ways = (EXACT, OVERLAP, self.local_steps(link_bits))
        fastest = max(ways, key=lambda way: self.gain(way, link_bits))
        return fastest if self.gain(fastest, link_bits) > 1 else None


def join(first: Plan, second: Plan) -> Pair:
    """Pair the best layouts of two clusters, which would train one run together.

    Each cluster takes a part of every batch in proportion to its rate, so that both end a batch at the same time. What
    a cluster can only send after its backward pass has ended delays the batch: `Pair.num_last` parameters.

    `first` and `second` are plans of the same run. Raises ConfigError if the run does not fit on one of the clusters.
    """
    for plan in (first, second):
        if not plan.candidates:
            raise ConfigError(f"--join: the run does not fit on {plan.num_devices} x {plan.hardware.accelerator.name}")
    candidates = (first.candidates[0], second.candidates[0])
    rates = (candidates[0].time.tokens_per_second, candidates[1].time.tokens_per_second)

    # Each cluster takes a part of the batch's samples in proportion to its rate.
    num_microbatches = []
    for candidate, rate in zip(candidates, rates, strict=True):
        num_samples = first.config.global_train_batch_size * rate / sum(rates)
        num_microbatches.append(math.ceil(num_samples / candidate.layout.num_data_ranks / candidate.microbatch_size))

    # Count the parameters whose gradients come last. The backward pass ends with the first block and the embeddings,
    # and the gradient of a head that is not tied to them is ready long before. With pipeline stages, all count as last.
    model = first.config.model
    num_in_block, num_outside_blocks = count_block_and_outside(model)
    num_in_head = 0 if model.tie_word_embeddings else model.vocab_size * model.d_model
    num_last = num_in_block + num_outside_blocks - num_in_head
    has_pipeline = any(candidate.layout.pipeline > 1 for candidate in candidates)
    if has_pipeline:
        num_last = first.num_parameters

    return Pair(
        rates=rates,
        batch_tokens=candidates[0].time.num_tokens,
        num_parameters=first.num_parameters,
        num_last=num_last,
        num_microbatches=max(num_microbatches),
        value_bytes=EXACT_SUMS_BYTES if first.config.exact_sums else FP32_BYTES,
    )


def name_way(way: str | int | None) -> str:
    """Return a way to train together, as `Pair.choose` returns it, in words."""
    if way is None:
        return "the faster cluster alone"
    if isinstance(way, int):
        return f"local steps, every {way} (another algorithm; see docs/local-steps.md)"
    return way


def describe_joined(second: Plan, pair: Pair, link_gigabits: float) -> str:
    """Return the recommended way, then for each way its rate on this link and the links from which on it pays.

    second: plan of the cluster of `--join`, whose prediction is described too.
    """
    link_bits = link_gigabits * 1e9
    best_gain = sum(pair.rates) / max(pair.rates)
    cluster = f"{second.num_devices} x {second.hardware.accelerator.name}"
    lines = [
        f"joined    with {cluster} over {link_gigabits:g} Gbit/s: {name_way(pair.choose(link_bits))}",
        f"  {second.num_devices} x {describe_interval(second)}",
    ]
    for way in (EXACT, OVERLAP, pair.local_steps(link_bits)):
        rate = pair.batch_tokens / pair.seconds(way, link_bits)
        gain = pair.gain(way, link_bits)
        paying_link = in_gigabits(pair.least_link(way, 1.0))
        sufficient_link = in_gigabits(pair.least_link(way, (1 - LOST) * best_gain))
        lines.append(
            f"  {name_way(way)}: {rate:,.0f} tokens/s, {gain:.2f} times the faster alone; "
            f"pays from {paying_link} on, loses under {LOST:.0%} from {sufficient_link} on"
        )
    return "\n".join(lines)


def in_gigabits(bits_per_second: float) -> str:
    """Return a link's bandwidth in Gbit/s, or in Mbit/s if it is below 1 Gbit/s; `no link` for inf."""
    if math.isinf(bits_per_second):
        return "no link"
    if bits_per_second >= 1e9:
        return f"{three_digits(bits_per_second / 1e9)} Gbit/s"
    return f"{three_digits(bits_per_second / 1e6)} Mbit/s"
