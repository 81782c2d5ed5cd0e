"""Two clusters and a link: what each way of training together takes, and which one is named."""

import math
from dataclasses import replace

import pytest

from llmfoundry_planner.plan.join import EVERY, EXACT, OVERLAP, Pair, join
from llmfoundry_planner.plan.plan import hardware_named, make_plan

PAIR = Pair(rates=(1e6, 5e5), batch_tokens=3_000_000, num_parameters=10**9, num_last=10**8, num_microbatches=4)
"""A batch of 2 seconds on both, 3 on the faster one."""


def test_the_exchange_takes_its_bytes_over_the_link():
    assert PAIR.seconds(EXACT, 32e9) == pytest.approx(2 + 1), "four bytes a parameter, one second at 32 Gbit/s"
    assert PAIR.gain(EXACT, 32e9) == pytest.approx(1)
    assert PAIR.gain(EXACT, math.inf) == pytest.approx(1.5)
    assert replace(PAIR, value_bytes=5).seconds(EXACT, 32e9) == pytest.approx(2 + 5 / 4)


def test_overlap_hides_the_last_backward_pass_and_never_the_last_gradients():
    hidden = 2 / 3 * 2 / 4
    assert PAIR.seconds(OVERLAP, 32e9) == pytest.approx(2 + 1 - hidden)
    assert PAIR.seconds(OVERLAP, 320e9) == pytest.approx(2 + 0.1 * 0.1), "of a tenth of a second the last tenth shows"
    fewer = replace(PAIR, num_microbatches=1)
    assert fewer.seconds(OVERLAP, 32e9) == pytest.approx(2 + 0.1)


def test_local_steps_send_weights_every_so_many_batches():
    assert PAIR.seconds(10, 32e9) == pytest.approx(2 + 1 / 10)
    assert PAIR.seconds(10, 32e9, value_bytes=1) == pytest.approx(2 + 1 / 40)
    assert replace(PAIR, value_bytes=5).seconds(10, 32e9) == pytest.approx(2.1), "weights, not exact sums"
    allowed = 2 / 0.95 - 2
    seconds = [every * allowed * nearly for every in (10, 50, 100) for nearly in (0.99, 1.01)]
    assert [PAIR.local_steps(32e9 / x) for x in seconds] == [10, 50, 50, 100, 100, 500]
    assert PAIR.local_steps(1e3) == 500


@pytest.mark.parametrize("way", [EXACT, OVERLAP, *EVERY])
@pytest.mark.parametrize("gain", [1.0, 1.4])
def test_a_link_that_is_told_reaches_what_it_is_told_for(way, gain):
    least = PAIR.least_link(way, gain)
    assert PAIR.gain(way, least) == pytest.approx(gain, rel=2e-3)
    assert PAIR.gain(way, least / 2) < gain < PAIR.gain(way, 2 * least) + 1e-9
    assert math.isinf(PAIR.least_link(way, 1.6)), "two clusters are 1.5 times the faster"


def test_the_exact_way_is_named_where_it_loses_little():
    """Each answer begins at the link that is told for it."""
    exact, overlap = (PAIR.least_link(way, 0.95 * 1.5) for way in (EXACT, OVERLAP))
    assert overlap < exact
    assert PAIR.choose(1.01 * exact) == EXACT
    assert PAIR.choose(0.99 * exact) == PAIR.choose(1.01 * overlap) == OVERLAP
    assert PAIR.choose(0.99 * overlap) == EVERY[0]
    assert PAIR.choose(0.99 * PAIR.least_link(EVERY[-1], 1.0)) is None
    assert replace(PAIR, rates=(1e6, 1e3)).choose(1e6) is None


def test_plans_make_a_pair_with_what_comes_last_and_the_more_microbatches():
    plans = [make_plan(["mpt-1b"], hardware_named(name), 8) for name in ("h100", "mi250")]
    pair = join(*plans)
    config = plans[0].config
    assert pair.batch_tokens == config.global_train_batch_size * config.max_seq_len
    embeddings = (config.model.vocab_size + config.model.max_seq_len) * config.model.d_model
    assert embeddings < pair.num_last < embeddings + pair.num_parameters / config.model.n_layers
    for plan, rate in zip(plans, pair.rates, strict=True):
        best, samples = plan.candidates[0], config.global_train_batch_size * rate / sum(pair.rates)
        assert pair.num_microbatches >= samples / best.layout.num_data_ranks / best.microbatch_size
    staged = [replace(plans[0].candidates[0], layout=replace(plans[0].candidates[0].layout, pipeline=2))]
    pair_of_stages = join(replace(plans[0], candidates=staged), plans[1])
    assert pair_of_stages.seconds(OVERLAP, 1e9) == pair_of_stages.seconds(EXACT, 1e9)
    exact = join(*[replace(plan, config=replace(plan.config, exact_sums=True)) for plan in plans])
    assert exact.value_bytes == 1.25 * pair.value_bytes
