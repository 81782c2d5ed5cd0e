"""Every way to divide a run, and every pair of ways, trains the run that one rank trains; saves go from any to any."""

import itertools
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.by_hand import assert_is_by_hand, train_by_hand
from tests.helpers.covering import all_cases, cover, pairs_of
from tests.helpers.layouts import RELATIVE, assert_same_run
from tests.helpers.resave import assert_same_state
from tests.helpers.runs import carry_on, losses, metrics, run, saves
from tests.helpers.tiny import build_tokenizer, reading_texts, tiny_config, values, write_data, write_texts

BF16_LOSS, BF16_NORM = 4e-3, 6e-2
"""Relative tolerances. Layouts add up in other orders, which bf16 rounds differently; these span what repeats of one
rank's run in tiles give."""
NUM_BATCHES = 20
END = 2
"""The token that `build_tokenizer` ends documents with."""

PARTS: dict[str, dict[str, Any]] = {
    "pipeline": {"pp_config": {"pipeline_parallel_degree": 2}},
    "tensor": {"tp_config": {"tensor_parallel_degree": 2}},
    "context": {"cp_config": {"context_parallel_degree": 2}},
    "shard": {},
}
ZERO: dict[str, Any] = {"fsdp_config": {"sharding_strategy": "ZERO_1"}}
LAYOUTS = [*((part,) for part in PARTS), *itertools.combinations(PARTS, 2)]
"""On 2 ranks, and on 4."""
SCHEDULES = ("1f1b", "gpipe", "interleaved", "zero_bubble", "zbv")
POSITIONS: dict[str, dict[str, Any]] = {
    "alibi": {"attn_config": {"alibi": True}},
    "rope": {"attn_config": {"rope": True, "attn_type": "grouped_query_attention", "kv_n_heads": 2}},
    "learned": {"attn_config": {}},
}
FACTORS = {
    "layout": LAYOUTS,
    "schedule": (None, *SCHEDULES),
    "tied": (True, False),
    "positions": tuple(POSITIONS),
    "documents": (True, False),
    "fused": (True, False),
    "precision": ("fp32", "amp_bf16"),
    "rows": ("full", "unlike", "unlike-by-rows"),
}
SEED = 28
"""The seed with the fewest cases, of a few."""


def is_valid(case: dict[str, Any]) -> bool:
    is_pipelined = "pipeline" in case["layout"]
    return is_pipelined == (case["schedule"] is not None) and not (case["schedule"] == "zbv" and case["tied"])


def name_of(case: dict[str, Any]) -> str:
    tied, documents = "tied" if case["tied"] else "untied", "documents" if case["documents"] else None
    fused = "fused" if case["fused"] else None
    rows = None if case["rows"] == "full" else case["rows"]
    words = (".".join(case["layout"]), case["schedule"], tied, case["positions"], documents, fused, case["precision"])
    return "-".join(filter(None, (*words, rows)))


CASES = {name_of(case): case for case in cover(FACTORS, is_valid, SEED)}
QUICK = {case["layout"]: name for name, case in reversed(CASES.items()) if case["precision"] == "fp32"}
"""The first case of each layout in fp32. Of these, pipeline stages with shards are in the first tier, and other ways
with shards in the second. All other cases are in the long tier."""


def marks_of(name: str) -> list[pytest.MarkDecorator]:
    layout = CASES[name]["layout"]
    is_with_shards = len(layout) == 2 and "shard" in layout
    if not is_with_shards or QUICK[layout] != name:
        return [pytest.mark.long]
    return [] if "pipeline" in layout else [pytest.mark.slow]


def test_the_cases_have_every_pair_of_settings():
    possible = set().union(*map(pairs_of, all_cases(FACTORS, is_valid)))
    assert set().union(*map(pairs_of, CASES.values())) == possible
    assert len(CASES) <= 40


# --------------------------------------------------------------------------------------------------- the same run


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("layouts")
    write_data(folder / "data")
    write_texts(folder / "texts", num_texts=100)  # the 13th batch has 4
    build_tokenizer(folder / "tokenizer")
    return folder


def model_of(
    folder: Path, tied: bool, positions: str, documents: bool, fused: bool, precision: str, rows: str = "full"
) -> dict[str, Any]:
    data = folder / ("data" if rows == "full" else "texts")
    reading: dict[str, Any] = {"tokenizer__name": str(folder / "tokenizer")}
    if rows != "full":
        reading = {**reading_texts(data), "train_loader__drop_last": False}
        reading["accumulate_train_batch_on_tokens"] = rows != "unlike-by-rows"
    config = tiny_config(
        data,
        **reading,
        precision=precision,
        autoresume=True,
        max_duration=f"{NUM_BATCHES}ba",
        eval_interval=f"{NUM_BATCHES}ba",
        device_train_microbatch_size=2,
    )
    attention = POSITIONS[positions]["attn_config"] | {"fused_qkv": fused, "attn_uses_sequence_id": documents}
    config["model"] |= {"n_layers": 4, "tie_word_embeddings": tied, "attn_config": attention}
    return config


def divided(layout: tuple[str, ...], schedule: str | None = "1f1b", tied: bool = True) -> tuple[int, dict[str, Any]]:
    """Ranks, and what the YAML says. Both kinds of context parallelism occur, by `tied`."""
    changes: dict[str, Any] = {}
    for part in layout:
        changes |= {key: dict(block) for key, block in PARTS[part].items()}
    if "pipeline" in layout:
        changes["pp_config"]["schedule"] = schedule
    if "context" in layout:
        changes["cp_config"]["kind"] = "heads" if tied and "tensor" not in layout else "gather"
    return 2 ** len(layout), changes


def check_by_hand(folder: Path, config: dict[str, Any], whole: str, case: dict[str, Any]) -> None:
    """Compare one rank's run with plain PyTorch. Texts have no separator, so each row is one document."""
    if case["precision"] == "fp32":
        separator = END if case["documents"] and case["rows"] == "full" else None
        assert_is_by_hand(metrics(folder, whole), train_by_hand(folder, config, NUM_BATCHES, separator))


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", [pytest.param(name, marks=marks_of(name)) for name in CASES])
def test_every_pair_of_ways_to_divide_a_run_trains_the_same_run(folder, name):
    case = CASES[name]
    settings = tuple(case[factor] for factor in ("tied", "positions", "documents", "fused", "precision", "rows"))
    config, whole = model_of(folder, *settings), "whole-" + "-".join(map(str, settings))
    if not (folder / "runs" / whole).exists():
        run(folder, config, whole)
        check_by_hand(folder, config, whole, case)
    num_ranks, changes = divided(case["layout"], case["schedule"], case["tied"])
    run(folder, config, name, num_ranks, **changes)
    assert len(losses(folder, name)) == NUM_BATCHES
    is_exact = case["precision"] == "fp32"
    assert_same_run(folder, name, whole, RELATIVE if is_exact else BF16_LOSS, RELATIVE if is_exact else BF16_NORM)


# ------------------------------------------------------------------------------------------- saves from any to any

ENDS = {"one_rank": (1, {})} | {".".join(layout): divided(layout) for layout in LAYOUTS}
SAVED_AT, ENDS_AT = 3, 5


@pytest.fixture(scope="module")
def begun(folder) -> dict[str, Any]:
    """Runs on every layout, with a save in their middle."""
    config = model_of(folder, True, "alibi", True, True, "fp32")
    config |= {"save_interval": f"{SAVED_AT}ba", "max_duration": f"{ENDS_AT}ba", "eval_interval": f"{ENDS_AT}ba"}
    for name, (num_ranks, changes) in ENDS.items():
        run(folder, config, f"begun-{name}", num_ranks, **changes)
    return config


@pytest.mark.long
@pytest.mark.multiprocess
@pytest.mark.parametrize("here", ENDS)
def test_a_save_of_every_layout_is_restored_bit_for_bit_and_trained_on(folder, begun, here):
    num_ranks, changes = ENDS[here]
    for there in ENDS:
        name = f"{there}-to-{here}"
        carry_on(folder, begun, f"begun-{there}", SAVED_AT, name, num_ranks, **changes)
        at = f"ba{SAVED_AT}"
        assert_same_state(saves(folder, f"begun-{there}") / at, folder / "resaved" / name / at)
        ours, whole = metrics(folder, name), metrics(folder, "begun-one_rank")[SAVED_AT:]
        assert values(ours, "data/digest") == values(whole, "data/digest")
        assert values(ours, "loss/train/total") == pytest.approx(values(whole, "loss/train/total"), rel=RELATIVE)
        if there == here:
            assert losses(folder, name) == losses(folder, f"begun-{here}")[SAVED_AT:]


# ---------------------------------------------------------------------------------------- a rate that decays on the way


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_stable_rate_decays_across_layouts_and_from_any_save(folder):
    schedule = {"name": "warmup_stable_decay", "t_warmup": "1ba", "t_decay": "3ba", "decay": "1-sqrt"}
    config = model_of(folder, True, "alibi", True, True, "fp32") | {"max_duration": "6ba", "scheduler": schedule}
    run(folder, config, "whole-decay")
    launches = [divided(("pipeline",), "interleaved"), divided(("tensor",)), (2, ZERO), divided(("context",))]
    for number, (num_ranks, changes) in enumerate(launches):
        run(folder, config, "decay", num_ranks, stop_after=f"{(1, 2, 1, 2)[number]}ba", **changes)
    assert_same_run(folder, "decay", "whole-decay")
    rates = values(metrics(folder, "decay"), "lr")
    assert rates[1:4] == [rates[1]] * 3 and rates[4] < rates[1] and rates[5] < rates[4]

    # Decay at once, from a save of the stable part.
    early = {"load_path": str(saves(folder, "decay") / "ba3"), "max_duration": "5ba", "autoresume": False}
    early["scheduler"] = schedule | {"t_decay": "2ba"}
    run(folder, config, "early-whole", **early)
    num_ranks, changes = divided(("pipeline", "shard"))
    run(folder, config, "early", num_ranks, **early, **changes)
    assert_same_run(folder, "early", "early-whole")
    assert values(metrics(folder, "early"), "lr")[-1] < rates[1]
