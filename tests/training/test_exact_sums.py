"""`exact_sums`: the same bits on any number of ranks, sharded any way, in stages or not."""

import re
from typing import Any

import pytest
import torch
from composer.core import Callback

from benchmarks.switch.band import judge, read_series
from llmfoundry_lite.checkpoint.full_tensors import load_full_tensors, open_checkpoint
from tests.helpers.by_hand import assert_is_by_hand, train_by_hand
from tests.helpers.covering import cover
from tests.helpers.present import needs
from tests.helpers.runs import attempt, losses, metrics, run, saves
from tests.helpers.tiny import reading_texts, tiny_config, values, write_data, write_texts

pytestmark = pytest.mark.multiprocess

LAYOUTS = {
    "1 rank": (1, {"fsdp_config": {"sharding_strategy": "NO_SHARD"}}),
    "2 whole": (2, {"fsdp_config": {"sharding_strategy": "NO_SHARD"}}),
    "2 FULL_SHARD": (2, {}),
    "3 FULL_SHARD": (3, {"fsdp_config": {"sharding_strategy": "FULL_SHARD", "activation_checkpointing": True}}),
    "4 SHARD_GRAD_OP": (4, {"fsdp_config": {"sharding_strategy": "SHARD_GRAD_OP"}}),
    "2 each microbatch": (2, {"fsdp_config": {"sharding_strategy": "FULL_SHARD", "reduce_every_microbatch": True}}),
    "4 HYBRID_SHARD": (
        4,
        {
            "fsdp_config": {
                "sharding_strategy": "HYBRID_SHARD",
                "data_parallel_shard_degree": 2,
                "reduce_every_microbatch": True,
            }
        },
    ),
    "3 ZERO_1": (3, {"fsdp_config": {"sharding_strategy": "ZERO_1"}}),
    "2 stages": (2, {"pp_config": {"pipeline_parallel_degree": 2}}),
    "2 stages, zero bubble": (2, {"pp_config": {"pipeline_parallel_degree": 2, "schedule": "zero_bubble"}}),
    "2 stages x 2": (4, {"pp_config": {"pipeline_parallel_degree": 2}}),
}
EVERY = LAYOUTS | {
    f"{num_ranks} {strategy}": (num_ranks, {"fsdp_config": {"sharding_strategy": strategy}})
    for strategy, counts in {"NO_SHARD": (3, 4), "FULL_SHARD": (4,), "SHARD_GRAD_OP": (2, 3), "ZERO_1": (2, 4)}.items()
    for num_ranks in counts
}
"""With all numbers of ranks."""
SETTINGS = {
    "precision": ["fp32", "amp_bf16"],
    "optimizer": ["decoupled_adamw", "decoupled_lionw", "muon"],
    "rows": ["full", "unlike", "unlike, by rows"],
    "positions": ["learned", "rope", "alibi"],
}
FACTORS = {"layout": list(LAYOUTS), "resumed on": ["1 rank", "2 FULL_SHARD", "2 stages"], **SETTINGS}
POSITIONS: dict[str, dict[str, Any]] = {"learned": {}, "rope": {"rope": True}, "alibi": {"alibi": True}}
OPTIMIZERS = {
    "decoupled_adamw": {"name": "decoupled_adamw", "lr": 1e-2},
    "decoupled_lionw": {"name": "decoupled_lionw", "lr": 1e-3},
    "muon": {"name": "muon", "lr": 1e-2},
}


def plan_runs() -> list[tuple[dict[str, Any], list[str]]]:
    """Return the settings of a few runs, each with layouts to train on in turn.

    Together they have every pair of settings, and every layout with every setting.
    """
    runs = cover(SETTINGS, lambda case: True, seed=8)  # with this seed 10 runs in 36 launches
    layouts_of_runs: list[list[str]] = [[] for _ in runs]

    def is_of_a_run(case: dict[str, Any]) -> bool:
        return {factor: case[factor] for factor in SETTINGS} in runs

    for case in cover({"layout": list(LAYOUTS), **SETTINGS}, is_of_a_run, seed=0):
        settings = {factor: case[factor] for factor in SETTINGS}
        layouts_of_runs[runs.index(settings)].append(case["layout"])
    return list(zip(runs, layouts_of_runs, strict=True))


RUNS = {"-".join(settings.values()): (settings, layouts) for settings, layouts in plan_runs()}


class RoundOnce(Callback):
    """Rounds the sum of gradients to fp32 once, after a microbatch of batch 2."""

    def after_backward(self, state, logger):
        if int(state.timestamp.batch) == 1 and not hasattr(self, "is_done"):
            self.is_done = True
            for parameter in state.model.parameters():
                assert parameter.grad is not None
                parameter.grad = parameter.grad.float().double()


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return write_texts(tmp_path_factory.mktemp("texts"), num_texts=60)


def exact_config(data, **changes):
    batches = {"global_train_batch_size": 12, "device_train_microbatch_size": 1, "device_eval_batch_size": 1}
    spans = {"eval_interval": "2ba", "max_duration": "4ba"}
    return tiny_config(data, exact_sums=True, **batches | spans | changes)


def start(folder, config, name, layout, **changes):
    num_ranks, settings = EVERY[layout]
    run(folder, config, name, num_ranks, **settings | changes)


def bits(folder, name):
    """Return everything that a run has recorded and saved, bit by bit."""
    records = metrics(folder, name)
    newest = max(saves(folder, name).glob("ba*"), key=lambda path: int(path.name[2:]))
    keys = ("loss/train/total", "grad_norm", "eval/loss", "data/digest")
    found = {key: [v.hex() if isinstance(v, float) else v for v in values(records, key)] for key in keys}
    found["state/digest"] = [open_checkpoint(newest).manifest.state_digest]
    assert records[-1]["state/digest"] == found["state/digest"][0] and records[-1]["state/batch"] == len(records)
    return found, {name: tensor.view(torch.int32) for name, tensor in load_full_tensors(str(newest)).items()}


def check_equal(one, other):
    assert one[0] == other[0]
    assert one[1].keys() == other[1].keys()
    assert [name for name, tensor in one[1].items() if not torch.equal(tensor, other[1][name])] == []


def rows_of(case, data, texts):
    """Return the data of a case, and the changes with which a run reads them."""
    if case["rows"] == "full":
        return data, {}
    return texts, {**reading_texts(texts), "accumulate_train_batch_on_tokens": case["rows"] == "unlike"}


def config_of(case, data, texts, **changes):
    rows, reading = rows_of(case, data, texts)
    return exact_config(
        rows,
        precision=case["precision"],
        optimizer=OPTIMIZERS[case["optimizer"]],
        model__attn_config=dict(POSITIONS[case["positions"]]),
        **reading,
        **changes,
    )


def train_reference(folder, config, name):
    """Train on one rank without a stop; in fp32, compare it with plain PyTorch. Return its bits."""
    start(folder, config, name, "1 rank")
    if config["precision"] == "fp32":
        # The rate of the first batch is 0, so that no optimizer has a part in two losses.
        expected = train_by_hand(folder, config, 2, eval_interval=0)
        assert_is_by_hand(metrics(folder, name)[:2], expected)
    return bits(folder, name)


def check_case(folder, data, texts, case, references, stop_after="3ba", **changes):
    config = config_of(case, data, texts, **changes)
    key = tuple(case[factor] for factor in SETTINGS)
    if key not in references:
        references[key] = train_reference(folder, config, f"reference-{len(references)}")
    name = "-".join(re.sub(r"\W+", "_", str(value)) for value in case.values())
    start(folder, config, name, case["layout"], stop_after=stop_after)
    start(folder, config, name, case["resumed on"], autoresume=True)
    check_equal(references[key], bits(folder, name))


def test_one_rank_and_two_shards_train_the_same_bits_and_without_it_they_do_not(tmp_path, data):
    config = exact_config(data, max_duration="2ba", eval_subset_num_batches=2)
    for name, layout in (("one", "1 rank"), ("two", "2 FULL_SHARD")):
        start(tmp_path, config, name, layout)
    check_equal(bits(tmp_path, "one"), bits(tmp_path, "two"))
    for name, layout in (("plain-one", "1 rank"), ("plain-two", "2 FULL_SHARD")):
        start(tmp_path, config, name, layout, exact_sums=False)
    assert bits(tmp_path, "plain-one")[0] != bits(tmp_path, "plain-two")[0]


@pytest.mark.slow
@needs("llmfoundry_layouts")
def test_stages_in_16_bits_weigh_rows_of_unlike_length_as_one_rank_does(tmp_path, texts):
    by_rows = {**reading_texts(texts), "accumulate_train_batch_on_tokens": False}
    config = exact_config(texts, precision="amp_bf16", max_duration="2ba", **by_rows)
    for name, layout in (("one", "1 rank"), ("two", "2 stages")):
        start(tmp_path, config, name, layout)
    check_equal(bits(tmp_path, "one"), bits(tmp_path, "two"))
    start(tmp_path, config, "plain", "1 rank", exact_sums=False, eval_interval=0)
    assert losses(tmp_path, "two") == pytest.approx(losses(tmp_path, "plain"), rel=1e-5)


@needs("llmfoundry_layouts")
@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_run_that_goes_through_layouts_has_the_bits_of_one_rank(tmp_path, data, texts, name):
    """Two batches on each layout, and each launch resumes from the save of the one before."""
    settings, layouts = RUNS[name]
    config = config_of(settings, data, texts, max_duration=f"{2 * len(layouts)}ba")
    expected = train_reference(tmp_path, config, "reference")
    for number, layout in enumerate(layouts, start=1):
        start(tmp_path, config, "moved", layout, stop_after=f"{2 * number}ba", autoresume=True)
    check_equal(expected, bits(tmp_path, "moved"))


@needs("llmfoundry_layouts")
@pytest.mark.long
def test_every_pair_of_layout_resumption_precision_and_optimizer(tmp_path, data, texts):
    references = {}
    for case in cover(FACTORS, lambda case: True, seed=1):
        check_case(tmp_path, data, texts, case, references)


@needs("llmfoundry_layouts")
@pytest.mark.long
@pytest.mark.parametrize("rows", FACTORS["rows"])
@pytest.mark.parametrize("precision", FACTORS["precision"])
def test_twenty_batches_on_every_layout_and_then_on_other_ranks(tmp_path, data, texts, precision, rows):
    references, names = {}, list(EVERY)
    settings = {"precision": precision, "optimizer": "decoupled_adamw", "rows": rows, "positions": "alibi"}
    for i, layout in enumerate(names):
        other = next(name for name in names[i:] + names[:i] if EVERY[name][0] != EVERY[layout][0])
        case = {"layout": layout, "resumed on": other, **settings}
        check_case(tmp_path, data, texts, case, references, "11ba", max_duration="20ba", eval_interval="5ba")


def test_a_sum_that_is_once_rounded_to_fp32_is_caught(tmp_path, data):
    config = exact_config(data, max_duration="2ba", eval_interval=0)
    start(tmp_path, config, "exact", "1 rank")
    start(tmp_path, config, "rounded", "1 rank", callbacks={f"python:{__name__}:RoundOnce": {}})
    exact, rounded = (bits(tmp_path, name)[0] for name in ("exact", "rounded"))
    assert exact["loss/train/total"] == rounded["loss/train/total"]
    assert exact["state/digest"] != rounded["state/digest"]


def test_microbatches_of_an_incomplete_batch_have_the_same_rows_on_any_number_of_ranks(tmp_path):
    data = write_data(tmp_path / "data", num_train=26)
    config = exact_config(data, device_train_microbatch_size=2, eval_interval="4ba", train_loader__drop_last=False)
    for name, layout in (("one", "1 rank"), ("two", "2 FULL_SHARD")):
        start(tmp_path, config, name, layout)
    check_equal(bits(tmp_path, "one"), bits(tmp_path, "two"))
    assert_is_by_hand(metrics(tmp_path, "two"), train_by_hand(tmp_path, config, 4))


@pytest.mark.long
def test_the_curve_lies_within_the_band_of_runs_without_it(tmp_path, data):
    config = exact_config(data, max_duration="60ba", eval_interval=0)
    plain = {"exact_sums": False, "device_train_microbatch_size": None}
    for num_ranks in (1, 2, 3, 4):
        run(tmp_path, config, f"plain-{num_ranks}", num_ranks, **plain)
    run(tmp_path, config, "exact", 2)
    run(tmp_path, config, "control", 2, optimizer={"name": "decoupled_adamw", "lr": 1e-2 * 1.0001})
    names = ["exact", "control", *(f"plain-{num_ranks}" for num_ranks in (1, 2, 3, 4))]
    exact, control, *others = (read_series(metrics(tmp_path, name)) for name in names)
    found = judge(exact, others)
    assert found.same_data and found.largest_ratio <= 2, "no further from the band than it is wide"
    assert judge(control, others).largest_ratio > 2


@pytest.mark.slow
def test_the_microbatch_stays_with_the_run(tmp_path, data):
    config = exact_config(data, max_duration="2ba", eval_interval=0)
    run(tmp_path, config, "auto", 2, device_train_microbatch_size="auto", stop_after="1ba")
    refused = attempt(tmp_path, config, "auto", 2, autoresume=True, device_train_microbatch_size=1)
    assert refused.exit_codes == [2, 2]
    assert "device_train_microbatch_size is 1 here and 6 in the checkpoint" in refused.output
    refused = attempt(tmp_path, config, "auto", 4, autoresume=True, device_train_microbatch_size=1)
    assert (
        "the run's microbatches have 6 samples, which exact_sums keeps, and that does not divide the 3 samples of a "
        "device here; start 1 or 2 devices, with device_train_microbatch_size=6 or auto, or set exact_sums=false from "
        "here on"
    ) in refused.output
    run(tmp_path, config, "auto", 1, device_train_microbatch_size="auto", autoresume=True)
    refused = attempt(tmp_path, config, "other", 3, device_train_microbatch_size=3)
    assert "3 does not divide the 4 samples of each device" in refused.output


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tp_config": {"tensor_parallel_degree": 2}}, "tensor parallelism divides the sums within a product"),
        ({"cp_config": {"context_parallel_degree": 2}}, "context parallelism divides the sums over a sample"),
        ({"precision": "amp_fp16"}, "the loss scale changes what is rounded"),
        ({"device_train_microbatch_size": None}, "needs device_train_microbatch_size"),
    ],
)
def test_what_computes_a_microbatch_otherwise_is_refused(tmp_path, data, changes, message):
    refused = attempt(tmp_path, exact_config(data), "refused", 2, **changes)
    assert set(refused.exit_codes) == {2} and message in refused.output


def test_an_element_beyond_the_grid_is_named_like_one_that_is_not_finite(tmp_path, data):
    config = exact_config(data, eval_interval=0, model__logit_scale=1e6)
    refused = attempt(tmp_path, config, "large")
    assert refused.exit_codes != [0] and "which exact_sums cannot add; the weights were not touched" in refused.output
