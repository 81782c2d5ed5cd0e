"""`llmfoundry-lite init --hours`: the model that this machine trains in so many hours, by steps that are timed here.

A few widths of one family are trained for some batches of random tokens, as one rank of a launch would: forward,
backward, clipping, optimizer. Other widths are computed from the rates of FLOPs that were measured.
"""

import math
import time
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from llmfoundry_lite.config.build import build_block
from llmfoundry_lite.config.model_schema import ModelConfig
from llmfoundry_lite.config.schema import OptimizerConfig
from llmfoundry_lite.config.sharding_schema import FSDPConfig
from llmfoundry_lite.devices import device_type, keep_freed_memory, synchronize
from llmfoundry_lite.models.attention import choose_implementation
from llmfoundry_lite.models.flops import TOKENS_PER_PARAMETER, count_flops_per_token
from llmfoundry_lite.models.initialise import initialise_weights
from llmfoundry_lite.models.mpt import MPT
from llmfoundry_lite.parallel.one_device import prepare_for_one_device
from llmfoundry_lite.parallel.precision import PRECISIONS
from llmfoundry_lite.prepare.prepare import prepare
from llmfoundry_lite.prepare.request import PrepareRequest
from llmfoundry_lite.prepare.summary import print_summary
from llmfoundry_lite.ranks.start import choose_device
from llmfoundry_lite.training.loss import cross_entropy_sum, next_token_labels
from llmfoundry_lite.training.muon import build_muon
from llmfoundry_ops.starter import (
    MAX_EPOCHS,
    MILLIONS,
    WIDTHS,
    Facts,
    Shape,
    Speed,
    check_places,
    count_devices,
    count_parameters,
    length_of_run,
    precision_here,
    scaled_shape,
    starter,
    write_yaml,
)

MIN_TOKENS_PER_PARAMETER = 5
"""Fewest tokens of text for a parameter. Between it and TOKENS_PER_PARAMETER, a larger model is chosen
where the text would end before the hours. A choice."""
MEASURED_WIDTHS = (96, 192, 384, 768)
MEASURED_TOKENS = 1024
"""Tokens of a measured microbatch."""
BUDGET_SECONDS = 15.0
NUM_STEPS = 2
"""Fewest steps that are timed. More follow while the sum is below STEPS_SECONDS."""
STEPS_SECONDS = 1.5
QUIET_SHARE = 0.75
"""Least share of the cores' time that a measurement uses on a quiet CPU. Its threads wait during the rest."""
MAX_FACTOR = 4.0
"""A rate is corrected by at most this factor, because a quota of processor time looks like other programs."""
VOCABULARY, LENGTH, HELD_OUT = 4096, 512, 0.05
"""Ids, tokens of a sample and share, for texts that `init` prepares: small enough for a small model."""


class Point(NamedTuple):
    """The measured rates of a width."""

    work: tuple[float, float]
    """FLOPs of a token, and the optimizer's work on a batch, as `work_of` counts them."""
    rates: tuple[float, float]
    """Both kinds of work per second."""
    share: float = 1.0
    """Share of the cores' time that this process had meanwhile."""


def write_for_hours(data: Path, hours: float, out: Path) -> str:
    """Measure, choose, write `out`, and return a sentence on it. Raises as `write_starter` does."""
    facts = check_places(data, out)
    points = measure_widths(facts)
    share = float(np.median([point.share for point in points]))
    shape, speed = choose(facts, hours, [as_on_a_quiet_machine(point) for point in points])
    text, note = starter(data, out, facts, shape, speed)
    write_yaml(out, text)
    num_ranks = max(1, count_devices())
    here = f"{num_ranks} rank{'s' * (num_ranks > 1)} in {precision_here()}"
    if share < QUIET_SHARE:
        print(
            f"other programs left {share:.0%} of the cores' time: the hours are a guess, as if this machine were quiet"
            "; repeat it when they have ended"
        )
    return f"{note}; {shape.model['n_layers']} blocks of width {shape.model['d_model']}, {here}"


def as_on_a_quiet_machine(point: Point) -> Point:
    slowed = max(1 / MAX_FACTOR, min(1.0, point.share / QUIET_SHARE))
    return point._replace(rates=(point.rates[0] / slowed, point.rates[1] / slowed))


def prepare_texts(source: Path) -> Path:
    """Prepare a folder of texts with a small vocabulary and short samples, unless that is done; return the data."""
    out = Path("data") / source.resolve().name
    if out.resolve() == source.resolve():
        out = out.with_name(f"{out.name}-tokens")
    request = PrepareRequest(
        sources=(str(source),), tokenizer=f"train:{VOCABULARY}", max_seq_len=LENGTH, val_fraction=HELD_OUT
    )
    print_summary(prepare(request, out, show_progress=True, notify=print), out)
    return out


def choose(facts: Facts, hours: float, points: list[Point]) -> tuple[Shape, Speed]:
    """Return the largest shape with enough time and text, and its speed; the smallest if there is none."""
    available, chosen = MAX_EPOCHS * facts.num_train * facts.max_seq_len, None
    for shape in map(scaled_shape, WIDTHS):
        parameters = count_parameters(shape.model, facts.vocab_rounded)
        speed = Speed(tokens_per_second(facts, shape, points, hours), hours)
        tokens = min(TOKENS_PER_PARAMETER * parameters, available)
        is_enough = MIN_TOKENS_PER_PARAMETER * parameters <= tokens <= speed.max_tokens
        is_in_range = MILLIONS[0] * 1e6 <= parameters <= MILLIONS[1] * 1e6
        if chosen is None or (is_in_range and is_enough) or parameters < MILLIONS[0] * 1e6:
            chosen = shape._replace(size=f"{parameters / 1e6:.3g}M"), speed
    assert chosen is not None
    return chosen


def tokens_per_second(facts: Facts, shape: Shape, points: list[Point], hours: float) -> float:
    """Predict the rate of all ranks, by interpolating between measured widths. Outside them, the nearest one counts."""
    rates = [
        float(np.interp(math.log(work), [math.log(one.work[i]) for one in points], [one.rates[i] for one in points]))
        for i, work in enumerate(work_of(facts, shape))
    ]
    flops, optimizer_work = work_of(facts, shape)
    _, batch_size, _, _ = length_of_run(facts, shape, Speed(rates[0] / flops, hours))
    num_tokens, num_ranks = batch_size * facts.max_seq_len, max(1, count_devices())
    return num_tokens / (num_tokens * flops / rates[0] / num_ranks + optimizer_work / rates[1])


def work_of(facts: Facts, shape: Shape) -> tuple[float, float]:
    """Return the FLOPs of a token, and the optimizer's work: multiplications of Muon's iteration plus the embedding's
    parameters, which AdamW updates."""
    model = model_of(facts, shape)
    embedding = model.vocab_size * model.d_model
    return count_flops_per_token(model, facts.max_seq_len), 12.0 * model.n_layers * model.d_model**3 + embedding


def model_of(facts: Facts, shape: Shape) -> ModelConfig:
    given = {**shape.model, "max_seq_len": facts.max_seq_len, "vocab_size": facts.vocab_rounded}
    return build_block(ModelConfig, given, "model")


def measure_widths(facts: Facts) -> list[Point]:
    """Measure widths, the smallest first, as long as the next one fits into BUDGET_SECONDS."""
    keep_freed_memory()
    choose_device(device_type())
    end, points = time.perf_counter() + BUDGET_SECONDS, list[Point]()
    for width in MEASURED_WIDTHS:
        shape = scaled_shape(width)
        if points:
            work = work_of(facts, shape)
            predicted = sum(
                w * scale / rate for w, scale, rate in zip(work, (MEASURED_TOKENS, 1), points[-1].rates, strict=True)
            )
            if time.perf_counter() + (NUM_STEPS + 1) * predicted > end:
                break
        points.append(measure_width(facts, shape))
    return points


def measure_width(facts: Facts, shape: Shape) -> Point:
    """Train some batches, the first of which is not timed. The median of each part counts."""
    config, precision = model_of(facts, shape), PRECISIONS[precision_here(), "DEFAULT"]
    device = torch.device(device_type())
    implementation, _ = choose_implementation(config, device.type, precision.autocast or precision.parameters)
    model = MPT(config, implementation)
    initialise_weights(model, 17)
    model = model.to(device)
    prepare_for_one_device(model, FSDPConfig(), precision)
    optimizer = build_muon(dict(model.named_parameters()), build_block(OptimizerConfig, shape.optimizer), config)
    num_samples, seconds = max(1, MEASURED_TOKENS // facts.max_seq_len), list[tuple[float, float]]()
    all_began, cpu_began = time.perf_counter(), time.process_time()
    while len(seconds) < NUM_STEPS + 1 or sum(map(sum, seconds)) < STEPS_SECONDS:
        tokens_bt = torch.randint(facts.vocab_size, (num_samples, facts.max_seq_len), device=device)
        synchronize()
        began = time.perf_counter()
        head = partial(cross_entropy_sum, labels_bt=next_token_labels(tokens_bt))
        (model(tokens_bt, head=head) / tokens_bt.numel()).backward()
        synchronize()
        middle = time.perf_counter()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        synchronize()
        seconds.append((middle - began, time.perf_counter() - middle))
    flops, optimizer_work = work_of(facts, shape)
    passes, steps = np.median(seconds[1:], axis=0)
    num_tokens = num_samples * facts.max_seq_len
    share = (time.process_time() - cpu_began) / (time.perf_counter() - all_began) / torch.get_num_threads()
    rates = num_tokens * flops / passes, optimizer_work / steps
    return Point((flops, optimizer_work), rates, share if device.type == "cpu" else 1.0)
