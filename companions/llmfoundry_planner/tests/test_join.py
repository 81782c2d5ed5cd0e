"""Two clusters and a link: what each way of training together takes, and which one is named."""

import math
from dataclasses import replace

import pytest

from llmfoundry_planner.plan.join import EVERY, EXACT, OVERLAP, Pair, join
from llmfoundry_planner.plan.plan import Plan, hardware_named, make_plan

PAIR = Pair(rates=(1e6, 5e5), batch_tokens=3_000_000, num_parameters=10**9, num_last=10**8, num_microbatches=4)
COMPUTE_SECONDS = 2
"""Both clusters of PAIR compute a batch in this time."""
MOST_GAIN = 1.5
"""The faster cluster of PAIR alone takes 3 s for a batch, so no link makes the two more than 1.5 times as fast."""
LINK = 32e9
"""In bit/s: all gradients of PAIR, 4 bytes for each parameter, cross it in 1 s."""
BACKWARD_SHARE = 2 / 3
"""Of a microbatch's computing."""
LOST = 0.05
"""Share of the rate of both clusters that a way may lose and still be taken."""
EXACT_SUM_BYTES = 5
"""Bytes of a gradient on the link in a run with `exact_sums`; fp32 has 4."""
FEWEST_LOCAL_STEPS = EVERY[0]
MOST_LOCAL_STEPS = EVERY[-1]


def link_that_takes(exchange_seconds: float) -> float:
    """Return the link, in bit/s, that all gradients of PAIR cross in the given time."""
    return LINK / exchange_seconds


# -------------------------------------------------------------------------------- the exact way, without overlap


def test_an_exact_batch_takes_computing_and_the_exchange():
    assert PAIR.seconds(EXACT, LINK) == pytest.approx(COMPUTE_SECONDS + 1)


def test_an_exchange_of_exact_sums_takes_longer_by_their_bytes():
    pair_of_exact_sums = replace(PAIR, value_bytes=EXACT_SUM_BYTES)
    assert pair_of_exact_sums.seconds(EXACT, LINK) == pytest.approx(COMPUTE_SECONDS + 5 / 4)


def test_the_gain_compares_with_the_faster_cluster_alone():
    assert PAIR.gain(EXACT, LINK) == pytest.approx(1), "3 s together, as the faster one alone"
    assert PAIR.gain(EXACT, math.inf) == pytest.approx(MOST_GAIN)


# --------------------------------------------------------------------------------------------- exact with overlap


def test_overlap_hides_the_backward_pass_of_the_last_of_four_microbatches():
    last_backward_seconds = BACKWARD_SHARE * COMPUTE_SECONDS / 4
    assert PAIR.seconds(OVERLAP, LINK) == pytest.approx(COMPUTE_SECONDS + 1 - last_backward_seconds)


def test_overlap_does_not_hide_the_gradients_that_are_ready_last():
    """They are a tenth of all, so a tenth of an exchange of 0.1 s remains, though the backward pass takes longer."""
    seconds = PAIR.seconds(OVERLAP, link_that_takes(0.1))
    assert seconds == pytest.approx(COMPUTE_SECONDS + 0.01)


def test_a_single_microbatch_hides_all_but_the_last_gradients():
    """Its backward pass takes 1.33 s, more than the whole exchange."""
    pair_of_one_microbatch = replace(PAIR, num_microbatches=1)
    assert pair_of_one_microbatch.seconds(OVERLAP, LINK) == pytest.approx(COMPUTE_SECONDS + 0.1)


# --------------------------------------------------------------------------------------------------- local steps


def test_local_steps_spread_an_exchange_over_the_batches_between():
    assert PAIR.seconds(10, LINK) == pytest.approx(COMPUTE_SECONDS + 1 / 10)


def test_local_steps_may_send_one_byte_for_each_weight():
    assert PAIR.seconds(10, LINK, value_bytes=1) == pytest.approx(COMPUTE_SECONDS + 1 / 40)


def test_local_steps_send_weights_in_fp32_in_a_run_with_exact_sums_too():
    pair_of_exact_sums = replace(PAIR, value_bytes=EXACT_SUM_BYTES)
    assert pair_of_exact_sums.seconds(10, LINK) == PAIR.seconds(10, LINK)


@pytest.mark.parametrize(("num_batches", "next_more"), [(10, 50), (50, 100), (100, 500)])
def test_local_steps_are_as_few_as_lose_little(num_batches, next_more):
    """Where an exchange takes a little longer than `num_batches` have to spare, the next number of EVERY is taken."""
    spare_seconds_per_batch = COMPUTE_SECONDS / (1 - LOST) - COMPUTE_SECONDS
    spare_seconds = num_batches * spare_seconds_per_batch
    assert PAIR.local_steps(link_that_takes(0.99 * spare_seconds)) == num_batches
    assert PAIR.local_steps(link_that_takes(1.01 * spare_seconds)) == next_more


def test_a_link_too_slow_for_all_gets_the_most_local_steps():
    assert PAIR.local_steps(1e3) == MOST_LOCAL_STEPS


# ------------------------------------------------------------------------------------- the link that a way needs


@pytest.mark.parametrize("way", [EXACT, OVERLAP, *EVERY])
@pytest.mark.parametrize("gain", [1.0, 1.4])
def test_the_least_link_of_a_way_just_reaches_the_gain(way, gain):
    least_link = PAIR.least_link(way, gain)
    assert PAIR.gain(way, least_link) == pytest.approx(gain, rel=2e-3)
    assert PAIR.gain(way, least_link / 2) < gain
    assert PAIR.gain(way, 2 * least_link) > gain - 1e-9


@pytest.mark.parametrize("way", [EXACT, OVERLAP, *EVERY])
def test_no_link_makes_two_clusters_faster_than_their_sum(way):
    assert math.isinf(PAIR.least_link(way, MOST_GAIN + 0.1))


# -------------------------------------------------------------------------------------------- the way that is named


def least_sufficient_link(way: str) -> float:
    """Return the slowest link on which an exact way loses so little that it is named."""
    return PAIR.least_link(way, (1 - LOST) * MOST_GAIN)


def test_overlap_is_content_with_a_slower_link():
    assert least_sufficient_link(OVERLAP) < least_sufficient_link(EXACT)


def test_the_exact_way_is_named_where_it_loses_little():
    assert PAIR.choose(1.01 * least_sufficient_link(EXACT)) == EXACT


def test_overlap_is_named_from_its_own_link_to_that_of_the_exact_way():
    assert PAIR.choose(0.99 * least_sufficient_link(EXACT)) == OVERLAP
    assert PAIR.choose(1.01 * least_sufficient_link(OVERLAP)) == OVERLAP


def test_local_steps_are_named_where_overlap_loses_too_much():
    assert PAIR.choose(0.99 * least_sufficient_link(OVERLAP)) == FEWEST_LOCAL_STEPS


def test_no_way_is_named_where_the_most_local_steps_do_not_pay():
    least_paying_link = PAIR.least_link(MOST_LOCAL_STEPS, 1.0)
    assert PAIR.choose(0.99 * least_paying_link) is None


def test_no_way_is_named_for_a_second_cluster_that_adds_little():
    pair_with_a_slow_cluster = replace(PAIR, rates=(1e6, 1e3))
    assert pair_with_a_slow_cluster.choose(1e6) is None


# -------------------------------------------------------------------------------------------------- two whole plans


@pytest.fixture(scope="module")
def plans() -> list[Plan]:
    """MPT-1B on 8 devices of each of two kinds."""
    return [make_plan(["mpt-1b"], hardware_named(name), 8) for name in ("h100", "mi250")]


def test_a_pair_of_plans_shares_the_batch_of_the_run(plans):
    config = plans[0].config
    assert join(*plans).batch_tokens == config.global_train_batch_size * config.max_seq_len


def test_the_embeddings_and_at_most_one_block_come_last(plans):
    pair = join(*plans)
    model = plans[0].config.model
    num_in_embeddings = (model.vocab_size + model.max_seq_len) * model.d_model
    most_in_a_block = pair.num_parameters / model.n_layers
    assert num_in_embeddings < pair.num_last
    assert pair.num_last < num_in_embeddings + most_in_a_block


@pytest.mark.parametrize("cluster", [0, 1])
def test_a_pair_has_the_microbatches_of_the_cluster_with_more(plans, cluster):
    """Each cluster computes a part of the batch's samples in proportion to its rate."""
    pair = join(*plans)
    plan = plans[cluster]
    best = plan.candidates[0]
    num_samples = plan.config.global_train_batch_size * pair.rates[cluster] / sum(pair.rates)
    num_samples_of_rank = num_samples / best.layout.num_data_ranks
    assert pair.num_microbatches >= num_samples_of_rank / best.microbatch_size


def test_overlap_hides_nothing_if_a_cluster_has_a_pipeline(plans):
    first, second = plans
    best = first.candidates[0]
    best_in_two_stages = replace(best, layout=replace(best.layout, pipeline=2))
    pair = join(replace(first, candidates=[best_in_two_stages]), second)
    assert pair.seconds(OVERLAP, 1e9) == pair.seconds(EXACT, 1e9)


def test_exact_sums_of_a_run_take_five_bytes_on_the_link(plans):
    plans_of_exact_sums = [replace(plan, config=replace(plan.config, exact_sums=True)) for plan in plans]
    assert join(*plans).value_bytes == 4
    assert join(*plans_of_exact_sums).value_bytes == EXACT_SUM_BYTES
