"""Facts of a span of batches, from its log."""

import json

import pytest

from llmfoundry_lite.checkpoint.manifest import Segment
from llmfoundry_lite.report.log import parse_log
from llmfoundry_lite.report.segments import accelerator_of, measure_segment, sum_segments

CARD = "NVIDIA H100 80GB HBM3"
H100 = Segment(first_batch=1, last_batch=5, vendor="nvidia", device=CARD, num_devices=2, precision="amp_bf16 PURE")


def log_of(batches, peak=989.5e12):
    """Batches of 1,000 tokens and two seconds."""
    numbers = {"time/batch_seconds": 2.0, "throughput/tokens_per_sec": 500.0, "throughput/device/mfu": 0.4}
    flops = {"throughput/device/flops_per_sec": 0.4 * peak}
    lines = [{"batch": b, "time/token": 1000 * b, "time/elapsed_seconds": 2.0 * b, **numbers, **flops} for b in batches]
    return parse_log([json.dumps(line).encode() + b"\n" for line in lines])


def test_a_batch_whose_tokens_are_not_known_counts_neither_its_seconds_in_the_rate():
    """The log lacks batch 3, and so what batch 4 trained."""
    fact = measure_segment(log_of([1, 2, 4, 5]), H100, {})
    assert (fact["tokens"], fact["tokens_per_second_per_device"]) == (3000, 250)


@pytest.mark.parametrize(("share", "is_known"), [(1.0, True), (0.9, False), (1.1, False)])
def test_a_device_is_known_by_the_peak_that_its_mfu_was_computed_with(share, is_known):
    """A slice of a card bears the name of the whole."""
    assert (accelerator_of(log_of([1, 2], 989.5e12 * share), H100) is not None) == is_known


def test_a_sum_with_an_unknown_part_is_unknown():
    known = measure_segment(log_of([1, 2, 3]), H100, {CARD: 3.6})
    unknown = known | {"cost": None, "energy_kwh": None}
    sums = sum_segments([known, unknown])
    assert (sums["cost"], sums["energy_kwh"], sums["joules_per_token"]) == (None, None, None)
    assert (sums["tokens"], sums["cost_per_million_tokens"]) == (6000, None)


def test_a_log_with_an_mfu_and_no_rate_has_facts_without_an_mfu():
    """Only another program writes such a log."""
    lines = [{"batch": b, "time/token": 1000 * b, "time/batch_seconds": 2.0} for b in (1, 2)]
    lines[1] |= {"throughput/device/mfu": 0.4, "throughput/device/flops_per_sec": 0.4 * 989.5e12}
    log = parse_log([json.dumps(line).encode() + b"\n" for line in lines])
    fact = measure_segment(log, H100, {})
    assert (fact["tokens_per_second_per_device"], fact["mfu"]) == (250, None)
