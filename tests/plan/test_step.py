"""Predicted steps beside published ones. Rows are LLM Foundry's benchmark table, MosaicML's MI250 study (2023) and
Frontier's (arXiv 2312.12705); nothing here is calibrated on the row that it is compared with, but where said."""

import dataclasses
import statistics

import pytest

from llmfoundry_lite.config.layout import Layout
from llmfoundry_lite.config.model_schema import ModelConfig
from llmfoundry_lite.config.schema import OptimizerConfig, PipelineConfig
from llmfoundry_lite.errors import ConfigError
from llmfoundry_lite.hardware import ACCELERATORS
from llmfoundry_lite.plan.network import Group, Node, find_node
from llmfoundry_lite.plan.step import StepTime, find_hardware, newton_schulz_flops, step_time
from tests.helpers.plans import config_of

SIZES = {
    "125m": (768, 12, 12),
    "760m": (1536, 24, 12),
    "1b": (2048, 24, 16),
    "3b": (2560, 32, 20),
    "7b": (4096, 32, 32),
    "13b": (5120, 40, 40),
    "30b": (7168, 48, 56),
}
# device, size, devices, microbatch, samples of a batch, recomputed, PURE, tokens/s of a device; sequences of 2,048
PUBLISHED = [
    ("H100-80GB", "30b", 16, 10, 480, True, False, 2263),
    ("H100-80GB", "30b", 32, 14, 1344, True, False, 2308),
    ("H100-80GB", "30b", 128, 8, 1024, True, False, 2199),
    ("H100-80GB", "13b", 8, 2, 16, False, False, 4792),
    ("H100-80GB", "13b", 16, 2, 32, False, False, 4767),
    ("H100-80GB", "13b", 64, 2, 128, False, False, 4800),
    ("H100-80GB", "7b", 8, 6, 48, False, False, 10643),
    ("H100-80GB", "7b", 128, 6, 768, False, False, 10475),
    ("H100-80GB", "7b", 256, 6, 1536, False, False, 10119),
    ("H100-80GB", "1b", 8, 14, 112, False, False, 45455),
    ("H100-80GB", "1b", 32, 20, 640, False, False, 45130),
    ("H100-80GB", "1b", 64, 20, 1280, False, False, 44402),
    ("A100-40GB", "7b", 8, 12, 384, True, True, 3679),
    ("A100-40GB", "7b", 16, 16, 256, True, True, 3645),
    ("A100-40GB", "7b", 128, 18, 2304, True, True, 3623),
    ("A100-40GB", "3b", 8, 5, 320, False, True, 10065),
    ("A100-40GB", "3b", 32, 6, 192, False, True, 9914),
    ("A100-40GB", "3b", 64, 6, 384, False, True, 9736),
    ("A100-40GB", "760m", 8, 12, 384, False, True, 30173),
    ("A100-40GB", "760m", 64, 12, 768, False, True, 29344),
    ("A100-40GB", "760m", 128, 12, 1536, False, True, 28940),
    ("A100-40GB", "125m", 16, 26, 416, False, True, 130535),
    ("A100-40GB", "125m", 128, 26, 3328, False, True, 123936),
]


def predict(device, size, num_devices, microbatch_size, batch_size, recomputed, pure, *_) -> float:
    """Tokens per second of a device."""
    config = config_of(
        model_of(size),
        global_train_batch_size=batch_size,
        device_train_microbatch_size=microbatch_size,
        activation_checkpointing=recomputed,
        mixed_precision="PURE" if pure else "DEFAULT",
        num_workers=8,  # as LLM Foundry's YAMLs have it
    )
    time = step_time(config, Layout(shard=num_devices, node_size=8), find_hardware(ACCELERATORS[device]))
    return time.tokens_per_second / num_devices


def model_of(size: str) -> ModelConfig:
    d_model, n_layers, n_heads = SIZES[size]
    return ModelConfig(d_model=d_model, n_layers=n_layers, n_heads=n_heads, max_seq_len=2048, vocab_size=50368)


def test_published_runs_are_predicted_from_their_size_alone():
    errors = [abs(predict(*row) / row[-1] - 1) for row in PUBLISHED]
    assert statistics.median(errors) < 0.05
    assert max(errors) < 0.25


def test_more_devices_are_predicted_from_fewer():
    """Each row from the smallest of its device and size: median error at most 3 %."""
    errors = []
    for row in PUBLISHED:
        smallest = next(first for first in PUBLISHED if first[:2] == row[:2])
        if row is not smallest:
            errors.append(abs(predict(*row) * smallest[-1] / predict(*smallest) / row[-1] - 1))
    assert len(errors) == 15
    assert statistics.median(errors) <= 0.03
    assert max(errors) < 0.06


def test_strong_scaling_of_mi250s():
    """166 TFLOP/s a card on 4 cards (which the rate is fitted to), 159 on 128: 95.8 %."""
    teraflops = {}
    for cards in (4, 128):
        config = config_of(model_of("7b"), global_train_batch_size=1536, device_train_microbatch_size=6)
        layout = Layout(shard=2 * cards, node_size=8)
        time = step_time(config, layout, find_hardware(ACCELERATORS["MI250"]))
        teraflops[cards] = 362 * time.mfu(config, layout, ACCELERATORS["MI250"])
    assert teraflops[4] == pytest.approx(166, rel=0.02)
    assert teraflops[128] / teraflops[4] == pytest.approx(0.958, abs=0.05)


def frontier(d_model: int, n_layers: int, tensor: int, stages: int, num_devices: int, batch_size: int = 8000) -> float:
    """TFLOP/s of a device of Frontier's, 8,000 samples a batch, one at a time, every block recomputed."""
    model = ModelConfig(d_model=d_model, n_layers=n_layers, n_heads=d_model // 128, max_seq_len=2048, vocab_size=51200)
    config = config_of(
        model,
        global_train_batch_size=batch_size,
        device_train_microbatch_size=1,
        precision="amp_fp16",
        sharding_strategy="NO_SHARD",
        activation_checkpointing=True,
    )
    copies = num_devices // tensor // stages
    layout = Layout(pipeline=stages, replicate=copies, tensor=tensor, node_size=8)
    time = step_time(config, layout, find_hardware(ACCELERATORS["MI250X"]))
    return 191.5 * time.mfu(config, layout, ACCELERATORS["MI250X"])


def test_frontiers_rates_are_near_and_its_losses_are_not():
    """69.2 TFLOP/s for 175 billion parameters and 61.2 for a trillion. Of strong scaling to 1,024 devices 89.9 % were
    left and the bubble alone explains less: ours predicts 97 %, a miss of 7 points that its authors' formulas share."""
    assert frontier(12288, 96, 4, 16, 1024) == pytest.approx(69.2, rel=0.05)
    assert frontier(25600, 128, 8, 64, 1024) == pytest.approx(61.2, rel=0.11)
    left = frontier(12288, 96, 4, 16, 1024) / frontier(12288, 96, 4, 16, 128)
    assert 0.899 < left < 0.98


def test_a_trillions_loss_on_3072_devices_is_missed_by_as_much():
    """87.05 % of 512 devices' rate were left; ours predicts 96, nine points too many. Six copies take 7,998 samples."""
    left = frontier(25600, 128, 8, 64, 3072, 7998) / frontier(25600, 128, 8, 64, 512)
    assert 0.8705 < left < 0.97


ONE_BILLION = {"model": model_of("1b"), "global_train_batch_size": 512, "device_train_microbatch_size": 2}
MUON = OptimizerConfig(name="muon", lr=1e-3)


def time_of(layout: Layout, **changes) -> StepTime:
    config = config_of(**ONE_BILLION | changes)
    return step_time(config, layout, find_hardware(ACCELERATORS["A100-80GB"]))


def test_what_a_layout_costs_is_told_apart():
    alone = time_of(Layout(), global_train_batch_size=64)
    assert alone.sharding == alone.tensor == alone.context == alone.pipeline == alone.bubble == 0
    sharded = time_of(Layout(shard=8, node_size=8))
    assert sharded.products * 8 == pytest.approx(alone.products * 8) and sharded.sharding > 0
    assert sharded.optimizer * 8 == pytest.approx(alone.optimizer)
    assert time_of(Layout(tensor=8, node_size=8)).tensor > 0
    # Parts of a layer in several nodes pass their sums through the adapters.
    assert time_of(Layout(tensor=16, node_size=8)).tensor > 1.3 * time_of(Layout(tensor=8, node_size=8)).tensor
    without_head = dataclasses.replace(model_of("1b"), vocab_size=8)
    piped = time_of(Layout(pipeline=4, replicate=2, node_size=8), model=without_head)
    busy = piped.products + piped.attention + piped.memory + piped.pipeline
    assert piped.bubble == pytest.approx(3 / 128 * busy, rel=1e-3)
    assert time_of(Layout(context=2, shard=4, node_size=8)).context > 0
    assert sum(piped.parts().values()) == pytest.approx(1)


def test_blocks_that_are_divided_unevenly_take_longer():
    """By what the stage that has the most of them computes, and the others wait."""
    layout, model = Layout(pipeline=2, replicate=4, node_size=8), dataclasses.replace(model_of("1b"), vocab_size=8)
    even, uneven = (
        time_of(layout, model=model, pp_config=PipelineConfig(pipeline_parallel_degree=2, blocks=blocks))
        for blocks in ([12, 12], [8, 16])
    )
    assert uneven.products == pytest.approx(even.products * 16 / 12, rel=1e-3)
    assert uneven.bubble == pytest.approx(even.bubble * 8 / 12, rel=1e-3)


def test_muon_multiplies_matrices_in_its_step():
    """Five iterations for each of 6 matrices in 24 blocks; of a fused one, of its three parts. Ranks take turns."""
    adam, muon = time_of(Layout()), time_of(Layout(), optimizer=MUON)
    d = 2048
    flops = 24 * (4 * newton_schulz_flops(d, d, 5) + 2 * newton_schulz_flops(d, 4 * d, 5))
    assert newton_schulz_flops(d, 4 * d, 5) == newton_schulz_flops(4 * d, d, 5) == 5 * 18 * d**3
    assert (muon.optimizer - adam.optimizer) * 0.74 * 312e12 == pytest.approx(flops)
    attention = dataclasses.replace(model_of("1b").attn_config, fused_qkv=True)
    fused = time_of(Layout(), optimizer=MUON, model=dataclasses.replace(model_of("1b"), attn_config=attention))
    assert fused.optimizer == pytest.approx(muon.optimizer)
    layout = Layout(shard=8, node_size=8)
    divided = time_of(layout, optimizer=MUON).optimizer - time_of(layout).optimizer
    assert divided == pytest.approx((muon.optimizer - adam.optimizer) / 8, rel=0.15)


def test_data_are_waited_for_where_nothing_reads_ahead_or_reading_takes_longer_than_a_step():
    """A data rank's share of the batch at 7 million tokens a second and process."""
    reading = 512 * 2048 / 8 / 7e6
    layout = Layout(shard=8, node_size=8)
    assert time_of(layout).data == pytest.approx(reading)
    ahead = time_of(layout, num_workers=1)
    assert ahead.data == 0 and ahead.seconds == pytest.approx(time_of(layout).seconds - reading)
    fast = dataclasses.replace(
        ACCELERATORS["A100-80GB"], peak_teraflops={"bf16": 1e6}, memory_bandwidth_bytes_per_second=1e18
    )
    time = step_time(config_of(**ONE_BILLION, num_workers=2), Layout(replicate=1), find_hardware(fast))
    assert time.data == pytest.approx(512 * 2048 / 7e6 / 2 - (time.seconds - time.data)) and time.data > 0


def test_recomputing_costs_a_forward_pass():
    whole, recomputed = time_of(Layout()), time_of(Layout(), activation_checkpointing=True)
    assert 1.2 < recomputed.products / whole.products < 4 / 3
    assert whole.seconds < time_of(Layout(), activation_checkpointing="selective").seconds < recomputed.seconds


def test_a_ring_is_as_slow_as_its_slowest_link():
    node = Node(num_devices=8, link_bytes_per_second=300e9, adapter_bytes_per_second=100e9, power_watts=1, source="")
    within, across = Group(size=8, in_node=8, node=node), Group(size=16, in_node=8, node=node)
    assert within.gather_seconds(8e9) == pytest.approx(7e9 / (0.8 * 300e9), rel=0.01)
    assert across.gather_seconds(8e9) == pytest.approx(4e9 / (0.8 * 100e9), rel=0.01)
    # Eight groups of two nodes' devices share the adapters that one group of all had.
    assert Group(size=2, in_node=1, node=node).gather_seconds(1e9) == across.gather_seconds(8e9) - 14 * 3e-6
    assert across.reduce_seconds(8e9) == 2 * across.gather_seconds(8e9)
    assert Group(size=1, in_node=1, node=node).reduce_seconds(8e9) == 0


def test_a_dtype_without_a_published_peak_is_refused():
    with pytest.raises(ConfigError, match=r"MI250: no tf32 peak is published for it \(known: fp32, bf16, fp16\)"):
        step_time(config_of(**ONE_BILLION, precision="tf32"), Layout(), find_hardware(ACCELERATORS["MI250"]))


def test_every_accelerator_has_a_node():
    for name in ACCELERATORS:
        assert find_node(name).num_devices > 0
