"""Parts of a step's time, and how a layout changes each. `test_published.py` compares with published figures."""

import dataclasses
import itertools

import pytest

from llmfoundry_lite.config.layout import Layout
from llmfoundry_lite.config.model_schema import AttentionConfig, ModelConfig
from llmfoundry_lite.config.schema import OptimizerConfig
from llmfoundry_lite.config.sharding_schema import PipelineConfig
from llmfoundry_lite.errors import ConfigError
from llmfoundry_lite.hardware import ACCELERATORS
from llmfoundry_planner.plan.network import Group, Node, find_node
from llmfoundry_planner.plan.rates import LINK_SHARE, OVERLAP_COST, PUBLISHED
from llmfoundry_planner.plan.step import StepTime, find_hardware, newton_schulz_flops, step_time
from tests.helpers.plans import config_of

SIZES = {"1b": (2048, 24, 16), "22b": (6144, 48, 48)}


def model_of(size: str) -> ModelConfig:
    d_model, n_layers, n_heads = SIZES[size]
    return ModelConfig(d_model=d_model, n_layers=n_layers, n_heads=n_heads, max_seq_len=2048, vocab_size=50368)


ONE_BILLION = {"model": model_of("1b"), "global_train_batch_size": 512, "device_train_microbatch_size": 2}
MUON = OptimizerConfig(name="muon", lr=1e-3)


def time_of(layout: Layout, **changes) -> StepTime:
    config = config_of(**ONE_BILLION | changes)
    return step_time(config, layout, find_hardware(ACCELERATORS["A100-80GB"]))


def test_what_a_layout_costs_is_told_apart():
    alone = time_of(Layout(), global_train_batch_size=64)
    assert alone.sharding == alone.tensor == alone.context == alone.pipeline == alone.bubble == 0
    sharded = time_of(Layout(shard=8, node_size=8))
    assert sharded.products == pytest.approx(alone.products) and sharded.sharding > 0
    assert sharded.optimizer * 8 == pytest.approx(alone.optimizer)
    assert time_of(Layout(tensor=8, node_size=8)).tensor > 0
    # Parts of a layer in several nodes pass their sums through the adapters.
    assert time_of(Layout(tensor=16, node_size=8)).tensor > 1.3 * time_of(Layout(tensor=8, node_size=8)).tensor
    without_head = dataclasses.replace(model_of("1b"), vocab_size=8)
    stages = PipelineConfig(pipeline_parallel_degree=4)
    piped = time_of(Layout(pipeline=4, replicate=2, node_size=8), model=without_head, pp_config=stages)
    busy = piped.products + piped.attention + piped.memory + piped.pipeline
    assert piped.bubble == pytest.approx(3 / 128 * busy, rel=1e-3)
    assert time_of(Layout(context=2, shard=4, node_size=8)).context > 0
    assert sum(piped.parts().values()) == pytest.approx(1)


def test_blocks_that_are_divided_unevenly_take_longer():
    """The stage that has the most blocks computes longest, and the others wait."""
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
    assert (muon.optimizer - adam.optimizer) * PUBLISHED["A100"].products * 312e12 == pytest.approx(flops)
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


def test_recomputing_costs_a_forward_pass_but_for_each_block_s_last_product():
    """That is 4 of the 12 d^2 of a block, and of the head there is none: 2/9 more, less the head's part."""
    whole, recomputed = time_of(Layout()), time_of(Layout(), activation_checkpointing=True)
    d, n_layers, _ = SIZES["1b"]
    blocks, head = n_layers * 12 * d * d, 50368 * d
    assert recomputed.products / whole.products == pytest.approx(1 + 2 / 9 * blocks / (blocks + head), rel=1e-3)
    selective = time_of(Layout(), activation_checkpointing="selective")
    assert (selective.products, selective.attention) == (whole.products, whole.attention)
    assert whole.memory < selective.memory <= recomputed.memory


def test_plain_attention_takes_longer_for_each_token_in_proportion_to_the_sample_s_length():
    def extra(seq_len: int, **changes) -> float:
        plain, fused = (
            time_of(
                Layout(),
                model=dataclasses.replace(model_of("1b"), attn_config=AttentionConfig(attn_impl=kind)),
                max_seq_len=seq_len,
                **changes,
            )
            for kind in ("reference", "auto")
        )
        assert plain.seconds - fused.seconds == pytest.approx(plain.attention - fused.attention)
        return (plain.attention - fused.attention) / plain.num_tokens

    assert extra(2048) > 0 and extra(4096) == pytest.approx(2 * extra(2048))
    # Computed again, the forward pass moves each score four times more: 15 instead of 11.
    assert extra(2048, activation_checkpointing=True) == pytest.approx(15 / 11 * extra(2048))


def frontier(tensor: int, stages: int, num_microbatches: int, size: str = "22b") -> float:
    """Return tokens per second of a device, with one copy of the model and one sample at a time."""
    layout = Layout(pipeline=stages, tensor=tensor, node_size=8)
    pipeline = PipelineConfig(pipeline_parallel_degree=stages) if stages > 1 else None
    batch = {"global_train_batch_size": num_microbatches, "device_train_microbatch_size": 1}
    config = config_of(model_of(size), precision="amp_fp16", activation_checkpointing=True, pp_config=pipeline, **batch)
    time = step_time(config, layout, find_hardware(ACCELERATORS["MI250X"]))
    return time.tokens_per_second / layout.world_size


def is_falling(rates: list[float]) -> bool:
    """Return whether each rate is at least 2 % below the one before."""
    return all(later < 0.98 * earlier for earlier, later in itertools.pairwise(rates))


def test_observations_of_frontier_s_authors():
    """arXiv 2312.12705, section III: 1, parts of a layer cost; 2, more stages of a fixed batch cost; 3, more
    microbatches for the same stages gain. The fourth, that microbatches in step with stages hold the rate, is missed:
    `python -m benchmarks published` prints it."""
    assert is_falling([frontier(degree, 1, 8, "1b") for degree in (1, 2, 4, 8)])
    assert is_falling([frontier(8, stages, 32) for stages in (2, 4, 8, 16)])
    assert is_falling([frontier(8, 8, count) for count in (128, 64, 32, 16, 8)])


def test_sends_of_stages_hide_behind_computing_as_far_as_there_is_some():
    slow = dataclasses.replace(find_hardware(ACCELERATORS["A100-80GB"]))
    fast_links = dataclasses.replace(slow.node, num_devices=1, adapter_bytes_per_second=1e9)
    stages = PipelineConfig(pipeline_parallel_degree=4)
    config = config_of(**ONE_BILLION, pp_config=stages)
    seconds = [
        step_time(config, Layout(pipeline=4), dataclasses.replace(slow, node=node)).pipeline
        for node in (fast_links, dataclasses.replace(fast_links, adapter_bytes_per_second=0.5e9))
    ]
    sends = 256 * 2 * 2 * 2048 * 2048 * 2 / (LINK_SHARE * 1e9)
    assert OVERLAP_COST * sends < seconds[0] < sends
    assert seconds[1] - seconds[0] == pytest.approx(sends, rel=0.03)  # what is beyond computing shows whole


def test_each_doubling_of_the_nodes_adds_its_share():
    node = dataclasses.replace(find_node("A100-80GB"), jitter=0.05)
    hardware = dataclasses.replace(find_hardware(ACCELERATORS["A100-80GB"]), node=node)
    config = config_of(**ONE_BILLION)
    for num_nodes, doublings in ((1, 0), (2, 1), (8, 3)):
        time = step_time(config, Layout(shard=8 * num_nodes, node_size=8), hardware)
        rest = time.seconds - time.stragglers - time.data
        assert time.stragglers == pytest.approx(0.05 * doublings * rest)


def test_a_card_is_slower_than_the_module_of_its_name():
    for name in ("A100-80GB", "H100-80GB"):
        module = find_hardware(ACCELERATORS[name]).efficiency
        card = find_hardware(ACCELERATORS[name.replace("-", "-PCIe-")]).efficiency
        assert card.products < module.products and card.interval != module.interval


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
