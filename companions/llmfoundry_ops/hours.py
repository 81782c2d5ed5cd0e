"""`llmfoundry-lite init --hours`: the model that this machine trains best in a number of hours, found by measuring it.

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
from llmfoundry_lite.training.muon import muon_of_groups
from llmfoundry_lite.training.optimizers import ParameterGroup
from llmfoundry_ops.starter import (
    MAX_EPOCHS,
    MILLIONS,
    WIDTHS,
    Facts,
    Shape,
    Speed,
    build_starter,
    check_places,
    count_devices,
    count_parameters,
    length_of_run,
    precision_here,
    scaled_shape,
    write_yaml,
)

MIN_TOKENS_PER_PARAMETER = 5
"""Fewest tokens of text for each parameter. With between this number and TOKENS_PER_PARAMETER, a larger model is still
chosen if the text would end before the hours do. This is a choice, not a measurement."""
MEASURED_WIDTHS = (96, 192, 384, 768)
"""Widths whose speed is measured, as far as the time allows. Others are computed from theirs."""
MEASURED_TOKENS = 1024
"""Tokens of a measured microbatch."""
BUDGET_SECONDS = 15.0
"""Time for measuring all widths."""
NUM_STEPS = 2
"""Fewest steps that are timed. More follow while the sum is below STEPS_SECONDS."""
STEPS_SECONDS = 1.5
QUIET_SHARE = 0.75
"""Least share of the cores' time that a measurement uses on a quiet CPU. Its threads wait during the rest."""
MAX_FACTOR = 4.0
"""A rate is corrected by at most this factor, because a quota of processor time looks like other programs."""
VOCABULARY = 4096
MAX_SEQ_LEN = 512
VAL_FRACTION = 0.05
"""Arguments with which `init` prepares texts: with a small vocabulary and short samples, which suit a small model."""
MEASUREMENT_SEED = 17
"""Seed of the measured models' weights. Any would do."""


class WidthSpeed(NamedTuple):
    """Speed at which this machine trains a model of one width.

    Work has two parts: the FLOPs of the forward and backward passes, and the optimizer's multiplications.
    """

    work: tuple[float, float]
    """FLOPs for each token, and the optimizer's work for each batch, as `count_work` counts them."""
    rates: tuple[float, float]
    """Both parts of the work per second."""
    cpu_share: float = 1.0
    """Part of the cores' time that this process got while it measured; 1.0 on a GPU."""


def write_for_hours(data: Path, hours: float, out: Path) -> str:
    """Write a YAML to `out` that trains the best model for `data` in a number of hours on this machine.

    Measures the machine first, which takes about BUDGET_SECONDS, and prints a line if other programs disturbed the
    measurement. Returns a sentence on the model and the time. Raises as `write_starter` does.
    """
    facts = check_places(data, out)
    speeds = measure_widths(facts)
    shape, speed = choose(facts, hours, [correct_for_other_programs(measured) for measured in speeds])
    text, note = build_starter(data, out, facts, shape, speed)
    write_yaml(out, text)

    cpu_share = float(np.median([measured.cpu_share for measured in speeds]))
    if cpu_share < QUIET_SHARE:
        print(
            f"other programs left {cpu_share:.0%} of the cores' time: the hours are a guess, as if this machine were "
            "quiet; repeat it when they have ended"
        )
    num_ranks = max(1, count_devices())
    ranks = "1 rank" if num_ranks == 1 else f"{num_ranks} ranks"
    model = f"{shape.model['n_layers']} blocks of width {shape.model['d_model']}"
    return f"{note}; {model}, {ranks} in {precision_here()}"


def correct_for_other_programs(speed: WidthSpeed) -> WidthSpeed:
    """Return the speed as it would be on a quiet machine, if other programs used the cores during the measurement."""
    slowdown = speed.cpu_share / QUIET_SHARE
    slowdown = max(1 / MAX_FACTOR, min(1.0, slowdown))
    pass_rate, optimizer_rate = speed.rates
    return speed._replace(rates=(pass_rate / slowdown, optimizer_rate / slowdown))


def prepare_texts(source: Path) -> Path:
    """Prepare a folder of texts with a small vocabulary and short samples, and return the folder of the data.

    That folder is in `data/` and has the name of the texts. If it was prepared before, nothing is done.
    """
    out = Path("data") / source.resolve().name
    if out.resolve() == source.resolve():
        out = out.with_name(f"{out.name}-tokens")
    request = PrepareRequest(
        sources=(str(source),),
        tokenizer=f"train:{VOCABULARY}",
        max_seq_len=MAX_SEQ_LEN,
        val_fraction=VAL_FRACTION,
    )
    summary = prepare(request, out, show_progress=True, notify=print)
    print_summary(summary, out)
    return out


def choose(facts: Facts, hours: float, speeds: list[WidthSpeed]) -> tuple[Shape, Speed]:
    """Choose the largest model for which this machine has enough time, and the data enough text.

    A model needs MIN_TOKENS_PER_PARAMETER tokens of text, repeated up to MAX_EPOCHS times, and the time to train on all
    tokens that it can use. If no model fits, the largest below MILLIONS[0] is chosen, or the smallest of all.

    Returns the model's shape, named after its parameters, and this machine's speed with it.
    """
    min_parameters = MILLIONS[0] * 1e6
    max_parameters = MILLIONS[1] * 1e6
    available_tokens = MAX_EPOCHS * facts.num_train * facts.max_seq_len
    chosen: tuple[Shape, Speed] | None = None
    for width in WIDTHS:
        shape = scaled_shape(width)
        num_parameters = count_parameters(shape.model, facts.vocab_rounded)
        speed = Speed(tokens_per_second(facts, shape, speeds, hours), hours)

        num_tokens = min(TOKENS_PER_PARAMETER * num_parameters, available_tokens)
        has_enough_text = num_tokens >= MIN_TOKENS_PER_PARAMETER * num_parameters
        has_enough_time = num_tokens <= speed.max_tokens
        fits = num_parameters <= max_parameters and has_enough_text and has_enough_time
        if chosen is None or num_parameters < min_parameters or fits:
            chosen = shape._replace(size=f"{num_parameters / 1e6:.3g}M"), speed
    assert chosen is not None
    return chosen


def tokens_per_second(facts: Facts, shape: Shape, speeds: list[WidthSpeed], hours: float) -> float:
    """Predict how many tokens per second all ranks of this machine train together with a model of this shape.

    The rates of both parts of the work are interpolated between the measured widths, over the logarithm of the work.
    Outside the measured widths, the rates of the nearest one are used. `hours` decides the size of a batch.
    """
    work = count_work(facts, shape)
    rates: list[float] = []
    for part in (0, 1):
        measured_work = [math.log(speed.work[part]) for speed in speeds]
        measured_rates = [speed.rates[part] for speed in speeds]
        rates.append(float(np.interp(math.log(work[part]), measured_work, measured_rates)))
    flops_per_token, optimizer_work = work
    pass_rate, optimizer_rate = rates

    # Ranks divide the tokens of a batch, but each runs the whole optimizer's step.
    one_rank_without_steps = Speed(pass_rate / flops_per_token, hours)
    run = length_of_run(facts, shape, one_rank_without_steps)
    num_tokens = run.batch_size * facts.max_seq_len
    num_ranks = max(1, count_devices())
    pass_seconds = num_tokens * flops_per_token / pass_rate / num_ranks
    step_seconds = optimizer_work / optimizer_rate
    return num_tokens / (pass_seconds + step_seconds)


def count_work(facts: Facts, shape: Shape) -> tuple[float, float]:
    """Return the FLOPs of the forward and backward passes for each token, and the optimizer's work for each batch.

    That work is the multiplications of Muon's iteration, in proportion, plus the parameters of the embedding, which
    AdamW updates.
    """
    model = model_of(facts, shape)
    flops_per_token = count_flops_per_token(model, facts.max_seq_len)
    # Each block's matrices have 12 * d_model^2 elements, and a product with such a matrix costs d_model for each.
    muon_work = 12.0 * model.n_layers * model.d_model**3
    return flops_per_token, muon_work + model.vocab_size * model.d_model


def model_of(facts: Facts, shape: Shape) -> ModelConfig:
    """Return the configuration of a model of this shape for the data."""
    settings = {**shape.model, "max_seq_len": facts.max_seq_len, "vocab_size": facts.vocab_rounded}
    return build_block(ModelConfig, settings, "model")


def measure_widths(facts: Facts) -> list[WidthSpeed]:
    """Measure MEASURED_WIDTHS, the smallest first, until the next one would take longer than BUDGET_SECONDS allow.

    The time for a width is predicted from the rates of the one before it. The smallest is always measured.
    """
    keep_freed_memory()
    choose_device(device_type())
    deadline = time.perf_counter() + BUDGET_SECONDS
    speeds: list[WidthSpeed] = []
    for width in MEASURED_WIDTHS:
        shape = scaled_shape(width)
        if speeds:
            flops_per_token, optimizer_work = count_work(facts, shape)
            pass_rate, optimizer_rate = speeds[-1].rates
            batch_seconds = MEASURED_TOKENS * flops_per_token / pass_rate + optimizer_work / optimizer_rate
            if time.perf_counter() + (NUM_STEPS + 1) * batch_seconds > deadline:
                break
        speeds.append(measure_width(facts, shape))
    return speeds


def measure_width(facts: Facts, shape: Shape) -> WidthSpeed:
    """Train a model of this shape on random tokens, and return its speed from the median times of a batch.

    The first batch is not counted. At least NUM_STEPS more follow, until all batches together have taken STEPS_SECONDS.
    """
    config = model_of(facts, shape)
    precision = PRECISIONS[precision_here(), "DEFAULT"]
    device = torch.device(device_type())
    implementation, _ = choose_implementation(config, device.type, precision.autocast or precision.parameters)
    model = MPT(config, implementation)
    initialise_weights(model, MEASUREMENT_SEED)
    model = model.to(device)
    prepare_for_one_device(model, FSDPConfig(), precision)
    settings = build_block(OptimizerConfig, shape.optimizer)
    optimizer = muon_of_groups([ParameterGroup(dict(model.named_parameters()), settings)], config)

    num_samples = max(1, MEASURED_TOKENS // facts.max_seq_len)
    pass_seconds: list[float] = []  # forward and backward passes of each batch
    step_seconds: list[float] = []  # clipping and the optimizer's step
    all_began = time.perf_counter()
    cpu_began = time.process_time()
    while len(pass_seconds) < NUM_STEPS + 1 or sum(pass_seconds) + sum(step_seconds) < STEPS_SECONDS:
        tokens_bt = torch.randint(facts.vocab_size, (num_samples, facts.max_seq_len), device=device)
        synchronize()
        began = time.perf_counter()
        loss_sum = model(tokens_bt, head=partial(cross_entropy_sum, labels_bt=next_token_labels(tokens_bt)))
        (loss_sum / tokens_bt.numel()).backward()
        synchronize()
        passes_ended = time.perf_counter()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        synchronize()
        pass_seconds.append(passes_ended - began)
        step_seconds.append(time.perf_counter() - passes_ended)

    cpu_share = 1.0
    if device.type == "cpu":
        cpu_seconds = time.process_time() - cpu_began
        cpu_share = cpu_seconds / (time.perf_counter() - all_began) / torch.get_num_threads()

    flops_per_token, optimizer_work = count_work(facts, shape)
    num_flops = num_samples * facts.max_seq_len * flops_per_token
    pass_rate = num_flops / float(np.median(pass_seconds[1:]))
    optimizer_rate = optimizer_work / float(np.median(step_seconds[1:]))
    return WidthSpeed((flops_per_token, optimizer_work), (pass_rate, optimizer_rate), cpu_share)
