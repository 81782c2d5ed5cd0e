"""`llmfoundry-lite plan`, as a user calls it.

A search over layouts takes up to seconds. `printed_plan` and `facts_of` keep what a command has answered, so that
several tests may ask for the same plan.
"""

import functools
import io
import itertools
import json
import math
import re
import subprocess
import sys
from contextlib import redirect_stdout
from dataclasses import dataclass
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from llmfoundry_lite.cli.main import run
from llmfoundry_lite.config.layout import DIMENSIONS, layout_of
from llmfoundry_lite.config.load_train import load_train_config
from llmfoundry_lite.config.schema import TrainConfig
from llmfoundry_lite.config.shipped import shipped_folder
from llmfoundry_lite.estimate.memory import estimate_training_memory
from llmfoundry_planner.plan.search import Candidate, Rejected, search_layouts
from llmfoundry_planner.plan.step import accelerator_named, find_hardware
from tests.helpers.launch import ROOT


def plan(*arguments: str) -> int:
    return run(["plan", *arguments])


@functools.cache
def printed_plan(*arguments: str) -> str:
    """Return what `plan` prints."""
    with redirect_stdout(io.StringIO()) as printed:
        assert plan(*arguments) == 0
    return printed.getvalue()


@functools.cache
def facts_of(*arguments: str) -> dict[str, Any]:
    """Return what `plan --json` prints."""
    return json.loads(printed_plan(*arguments, "--json"))


def best_layout(*arguments: str) -> dict[str, Any]:
    return facts_of(*arguments)["layouts"][0]


def lines_labelled(label: str, printed: str) -> list[str]:
    """Return the lines that begin with a label, without it. Labels stand in the first ten columns."""
    return [line[10:] for line in printed.splitlines() if line[:10].strip() == label]


def rows_of_table(printed: str) -> list[dict[str, str]]:
    """Return the rows of the Markdown table that is printed for several plans, as dicts of column -> cell."""
    table = []
    for line in printed.splitlines():
        if line.startswith("| "):
            cells = line.split("|")[1:-1]
            table.append([cell.strip() for cell in cells])
    columns, *rows = table
    return [dict(zip(columns, row, strict=True)) for row in rows]


# ---------------------------------------------------------------------------------------------- one plan as text

MPT_7B_ON_256 = ("mpt-7b", "--hardware", "mi250", "--devices", "256", "--price", "1.5")


def test_a_plan_begins_with_the_run_the_hardware_and_the_state():
    printed = printed_plan(*MPT_7B_ON_256)
    assert "mpt-7b: 6.66 billion parameters, 134 billion tokens, 1024 x 2048 a batch, amp_bf16" in printed
    assert "256 x MI250 (half a card each), 8 in a node" in printed
    assert "state     0.12 TB at 18 bytes a parameter (0.0932 TB at the 14 that papers count)" in printed


def test_a_plan_says_what_takes_the_time_and_why_others_are_rejected():
    printed = printed_plan(*MPT_7B_ON_256)
    assert "matrix products" in printed
    assert "rejected  64 copies x 4 context, ZERO_1: needs " in printed


def test_a_plan_names_a_norm_that_it_does_not_know_and_refuses_a_layer(capsys):
    words = ("mpt-125m", "--hardware", "h100", "--devices", "1")
    printed = printed_plan(*words, "model.norm_type=python:mine:Norm")
    assert lines_labelled("not known", printed) == [
        "python:mine:Norm (model.norm_type): counted neither in memory nor in time"
    ]
    assert plan(*words, "model.ffn_config.ffn_type=python:mine:Ffn") == 2
    assert capsys.readouterr().err == (
        "error: plan: nothing is known of the time of python:mine:Ffn (model.ffn_config.ffn_type), which is code of "
        'your own; say in its class which layer of ours is as large, such as like = "mptglu", or plan with that layer\n'
    )


def test_a_layer_that_says_what_it_is_like_is_planned_as_that_layer(tmp_path, monkeypatch):
    (tmp_path / "alike_in_plans.py").write_text("raise SystemExit\nclass Ffn:\n    like = 'mptglu'\n")
    monkeypatch.syspath_prepend(tmp_path)
    words = ("mpt-125m", "--hardware", "h100", "--devices", "8")
    name = "python:alike_in_plans:Ffn"
    own = printed_plan(*words, f"model.ffn_config.ffn_type={name}")
    assert lines_labelled("counted", own) == [
        f"{name} (model.ffn_config.ffn_type) like mptglu of width 3072, as the class says"
    ]
    ours = printed_plan(*words, "model.ffn_config.ffn_type=mptglu")
    for label in ("memory", "time", "interval"):
        assert lines_labelled(label, own) == lines_labelled(label, ours) != []
    assert not lines_labelled("not known", own)


def test_a_plan_ends_with_the_cost():
    printed = printed_plan(*MPT_7B_ON_256)
    labels = [line.split()[0] for line in printed.splitlines() if line[:10].strip()]
    assert labels[-6:] == ["rejected", "run", "failures", "budget", "days", "not"]
    assert " dollars" in printed


def test_a_dimension_has_one_name_in_the_table_and_in_rejections():
    printed = printed_plan("mpt-7b", "--hardware", "mi250", "--devices", "64")
    (head,) = [line.split() for line in printed.splitlines() if "stages" in line and "recomputed" in line]
    rejected_layouts = [line.partition(": ")[0] for line in lines_labelled("rejected", printed)]
    names = set()
    for layout in rejected_layouts:
        names.update(re.findall(r"\d+ (\w+)", layout))  # such as 4 of `64 copies x 4 context`
    assert "context" in names
    assert names <= set(head)


NOTE_ON_DAYS = "all else comes on top: MPT-7B on 440 A100-40GB took 9.5, and 6.6 are predicted"


def test_the_days_of_a_published_run_stand_beside_those_that_are_predicted():
    published_run = ("mpt-7b", "--tokens", "1e12", "global_train_batch_size=1760")
    printed = printed_plan(*published_run, "--hardware", "a100-40gb", "--devices", "440")
    assert re.search(r"^run +6\.[56]\d days", printed, re.MULTILINE)
    assert NOTE_ON_DAYS in printed


def test_the_note_on_days_stands_below_a_table_too():
    assert NOTE_ON_DAYS in printed_plan("mpt-125m", "--hardware", "h100", "--devices", "1,2")


def test_no_days_are_predicted_for_epochs():
    """Nothing tells how many tokens an epoch has."""
    one_epoch = ("mpt-125m", "max_duration=1ep", "scheduler.t_warmup=0ba")
    assert "days are" not in printed_plan(*one_epoch, "--hardware", "h100", "--devices", "1")


# ------------------------------------------------------------------------------------- layouts and rejected layouts

MPT_30B_ON_64 = ("mpt-30b", "--hardware", "h100", "--devices", "64")


def divisions_of_64() -> set[tuple[int, ...]]:
    """Return the divisions of 64 devices that can be tried: degrees in the order of DIMENSIONS."""
    powers_of_two = [2**exponent for exponent in range(7)]
    divisions = set()
    for degrees in itertools.product(powers_of_two, repeat=len(DIMENSIONS)):
        by_name = dict(zip(DIMENSIONS, degrees, strict=True))
        # Parts of a sample and of a layer stay in a node of 8; 64 stages are more than the model's 48 blocks.
        is_possible = by_name["context"] * by_name["tensor"] <= 8 and by_name["pipeline"] < 64
        if math.prod(degrees) == 64 and is_possible:
            divisions.add(degrees)
    return divisions


def test_every_layout_is_planned_or_rejected_once():
    facts = facts_of(*MPT_30B_ON_64)
    layouts = []
    for layout in [*facts["layouts"], *facts["rejected"]]:
        degrees = tuple(layout[name] for name in DIMENSIONS)
        layouts.append((degrees, layout["sharding_strategy"]))
    assert {degrees for degrees, _ in layouts} == divisions_of_64()
    assert {strategy for _, strategy in layouts} == {"FULL_SHARD", "HYBRID_SHARD", "NO_SHARD", "ZERO_1"}
    assert len(layouts) == len(set(layouts))


def test_layouts_that_are_planned_fit_the_memory():
    facts = facts_of(*MPT_30B_ON_64)
    assert max(layout["memory_bytes"] for layout in facts["layouts"]) <= facts["usable_bytes"]


def test_layouts_that_are_rejected_have_a_reason():
    assert all(layout["reason"] for layout in facts_of(*MPT_30B_ON_64)["rejected"])


def test_the_first_layout_has_the_least_memory_of_those_within_1_percent():
    layouts = facts_of(*MPT_30B_ON_64)["layouts"]
    fastest = max(layout["tokens_per_second"] for layout in layouts)
    almost_fastest = [layout for layout in layouts if layout["tokens_per_second"] >= fastest / 1.01]
    assert layouts[0] in almost_fastest
    assert layouts[0]["memory_bytes"] == min(layout["memory_bytes"] for layout in almost_fastest)


def test_a_layout_that_a_launch_would_refuse_is_rejected_in_its_words():
    rejected = facts_of("mpt-125m", "--hardware", "h100", "--devices", "16")["rejected"]
    reasons = {layout["reason"] for layout in rejected}
    assert "tp_config.tensor_parallel_degree: 8 does not divide model.n_heads, 12; use 1, 2, 3, 4, 6 or 12" in reasons


def test_a_layout_that_is_far_too_slow_is_rejected():
    rejected = facts_of("mpt-125m", "--hardware", "h100", "--devices", "16")["rejected"]
    words = "times as long as the fastest, even with memory to spare"
    assert any(layout["reason"].endswith(words) for layout in rejected)


# ------------------------------------------------------------------------------------------------------- overlays


def assert_loads_as(layout_facts: dict[str, Any], config: TrainConfig, case: str = "") -> None:
    """The configuration has the layout that was planned for 64 devices, and the memory that was estimated for it."""
    layout = layout_of(config, 64, 8)
    assert layout.degrees._asdict() == {name: layout_facts[name] for name in DIMENSIONS}, case
    assert estimate_training_memory(config, layout).total_bytes == layout_facts["memory_bytes"], case


@pytest.mark.parametrize(
    ("settings", "options"),
    [
        (["tp_config.tensor_parallel_degree=8", "tp_config.sequence_parallel=true"], []),
        (["fsdp_config.sharding_strategy=HYBRID_SHARD", "fsdp_config.data_parallel_shard_degree=16"], []),
        (["fsdp_config.activation_checkpointing=true", "fsdp_config.activation_cpu_offload=true"], []),
        (["fsdp_config.activation_checkpointing=true", "fsdp_config.activation_checkpointing_reentrant=true"], []),
        (
            [
                "device_train_microbatch_size=null",
                "pp_config.pipeline_parallel_degree=2",
                "pp_config.num_microbatches=16",
            ],
            [],
        ),
        (["pp_config.pipeline_parallel_degree=2"], ["--pipeline", "1"]),
    ],
    ids=["tensor parallelism", "shards", "offloading", "reentrant", "pipeline", "pipeline, but one stage asked for"],
)
def test_the_overlay_takes_back_what_the_run_says_otherwise(tmp_path, settings, options):
    run_file = tmp_path / "run.yaml"
    mpt_7b = OmegaConf.load(shipped_folder("yamls") / "pretrain/mpt-7b.yaml")
    OmegaConf.save(OmegaConf.merge(mpt_7b, OmegaConf.from_dotlist(settings)), run_file)
    overlay_file = tmp_path / "x.yaml"
    for layout_facts in facts_of(str(run_file), "--hardware", "h100", "--devices", "64", *options)["layouts"]:
        overlay_file.write_text(yaml.safe_dump(layout_facts["overlay"]))
        assert_loads_as(layout_facts, load_train_config([str(run_file), str(overlay_file)]).config)


LONG_SAMPLES = ["max_seq_len=65536", "model.max_seq_len=65536", "global_train_batch_size=8"]
UNTIED = "model.tie_word_embeddings=false"


@pytest.mark.parametrize(
    ("run_name", "settings", "options", "kinds"),
    [
        ("mpt-7b", [], [], {"FULL_SHARD", "HYBRID_SHARD", "ZERO_1", "pp_config", "tp_config"}),
        ("mpt-7b", LONG_SAMPLES, [], {"cp_config"}),
        ("mpt-70b", [UNTIED], ["--pipeline", "4", "--schedule", "zbv"], {"zbv"}),
    ],
)
def test_every_kind_of_layout_loads_as_the_layout_it_is(tmp_path, run_name, settings, options, kinds):
    """A kind is a word of the overlay."""
    layouts = facts_of(run_name, *settings, *options, "--hardware", "h200", "--devices", "64")["layouts"]
    overlay_file = tmp_path / "x.yaml"
    for kind in kinds:
        layout_facts = next(layout for layout in layouts if kind in str(layout["overlay"]))
        overlay_file.write_text(yaml.safe_dump(layout_facts["overlay"]))
        assert_loads_as(layout_facts, load_train_config([run_name, str(overlay_file), *settings]).config, kind)


# ------------------------------------------------------------------------------- refusals, and devices that would do

# Both lack their last argument: a number of devices, and a second cluster.
ON_H100 = ["mpt-7b", "--hardware", "h100", "--devices"]
JOINED = ["mpt-7b", "--hardware", "a100-80gb", "--devices", "64", "--pipeline", "1", "--join"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([*ON_H100, "64", "--write", "/nonexistent/x.yaml"], "--write: /nonexistent/x.yaml: No such file or directory"),
        ([*ON_H100, "64", "--write", "/tmp"], "--write: /tmp: Is a directory; choose another file"),
        ([*ON_H100, "64", "--join", "h100:12"], "--devices: 12 are not a whole number of nodes of 8"),
        ([*ON_H100, "64", "--tokens", "inf"], "--tokens: inf given, expected a number of tokens, such as 1e12"),
        ([*ON_H100, "4096", "--mtbf", "1", "global_train_batch_size=4096"], "--mtbf: a failure every 0.879 s on 4096"),
        ([*ON_H100, "64", "--stall", "inf"], "--stall: inf given, expected a finite number"),
        ([*ON_H100, "64", "--mtbf", "inf"], "--mtbf: inf given, expected a finite number"),
        ([*ON_H100, "64", "--schedule", "gpipe"], "--schedule: gpipe given, which needs --pipeline"),
        ([*ON_H100, "64", "--virtual", "2"], "--virtual: 2 given, which needs --pipeline"),
        ([*ON_H100, "64", "--wan", "2"], "--wan: 2.0 given, which needs --join"),
        (["mpt-7b", "--hardware", "cpu"], "cpu given, which no table has; `init DATA --hours 8` measures this machine"),
        (["mpt-7b"], "expected RUN.yaml, --hardware and --devices, or --check RUN"),
        (["mpt-1b", "--hardware", "h1000", "--devices", "8"], "'h1000' is not in the table; expected one of V100-16GB"),
        (["mpt-1b", "--hardware", "a100", "--devices", "8"], "'a100' may be A100-40GB and A100-80GB; name one of them"),
        ([*ON_H100, "12"], "12 are not a whole number of nodes of 8; the nearest counts are 8 "),
        ([*ON_H100, "8", "--pipeline", "3"], "3 stages do not divide 8 devices"),
        ([*ON_H100, "8", "precision=fp16"], "precision"),
        (["mpt-1b", "--hardware", "mi250", "--devices", "8", "precision=tf32"], "MI250: no tf32 peak is published"),
        (
            [*ON_H100, "64", "--check", "runs/x", "--json"],
            "--check: a finished run says all of it itself; leave out mpt-7b, --hardware, --devices, --json",
        ),
        ([*JOINED, "mi250:64", "--json"], "--join prints a sentence, not JSON"),
        ([*JOINED, "mi250"], "--join: 'mi250' given, expected HARDWARE:DEVICES"),
        ([*JOINED, "mi2500:8"], "hardware 'mi2500' is not in the table"),
        (
            ["mpt-7b", "--hardware", "h100", "--devices", "8,many"],
            "--devices: '8,many' given, expected a number, or several such as 64,128,256",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused_in_a_line(capsys, arguments, words):
    assert plan(*arguments) == 2
    printed, error = capsys.readouterr()
    assert words in error
    assert error.count("\n") == 1
    assert not printed


@pytest.mark.parametrize(
    ("run_name", "hardware", "num_devices", "options", "num_sufficient"),
    [
        ("mpt-7b", "h100", "1000000", [], "8192"),
        ("mpt-70b", "a10", "8", ["--pipeline", "8"], "128"),
        ("mpt-30b", "l4", "8", [], "32"),
    ],
    ids=["too many for the batch", "in stages", "small devices"],
)
def test_the_count_that_it_names_fits(capsys, run_name, hardware, num_devices, options, num_sufficient):
    arguments = [run_name, "--hardware", hardware, *options, "--devices"]
    assert plan(*arguments, num_devices) == 2
    assert f"fits; {num_sufficient} devices would do" in capsys.readouterr().out
    assert plan(*arguments, num_sufficient) == 0


def test_an_island_may_have_any_layout_inside():
    island = ["islands={coordinator: 'h:1', name: a}", "save_folder=s"]
    layouts = facts_of("mpt-1b", "--hardware", "h100", "--devices", "8", *island)["layouts"]
    degrees = {layout["tensor"] * layout["context"] * layout["pipeline"] for layout in layouts}
    assert degrees > {1}


def test_a_hundred_thousand_devices_are_planned_too():
    facts = facts_of("mpt-70b", "--hardware", "h100", "--devices", "98304", "global_train_batch_size=98304")
    assert facts["layouts"]
    assert facts["cost"]["hours_between_failures"] < 1


# ---------------------------------------------------------------------------------------------------------- saves


def facts_with_stall(seconds: str) -> dict[str, Any]:
    """Plan MPT-7B on 1,024 H100, whose saves stall it for a measured time."""
    settings = ["global_train_batch_size=1024", "save_interval=100ba"]
    return facts_of("mpt-7b", *settings, "--hardware", "h100", "--devices", "1024", "--stall", seconds)


def test_after_four_times_the_stall_a_run_saves_half_as_often():
    """Young 1974."""
    short_stall = facts_with_stall("1")["cost"]
    long_stall = facts_with_stall("4")["cost"]
    assert long_stall["save_every_seconds"] == pytest.approx(2 * short_stall["save_every_seconds"], rel=0.02)
    assert long_stall["lost_share"] > short_stall["lost_share"]


@pytest.mark.parametrize("stall_seconds", [1, 4])
def test_a_measured_stall_takes_the_place_of_the_assumed_one(stall_seconds):
    """A save every 100 batches adds a hundredth of its stall to each step."""
    best = facts_with_stall(str(stall_seconds))["layouts"][0]
    assert best["shares"]["saves"] * best["step_seconds"] == pytest.approx(stall_seconds / 100)


SAVE_SECONDS = 0.197
"""1.3 billion parameters of 12 bytes over 8 devices, copied at 10 GB/s."""


def best_with_saves(save_interval: str) -> dict[str, Any]:
    run_of_1b = ("mpt-1b", "global_train_batch_size=512", f"save_interval={save_interval}")
    return best_layout(*run_of_1b, "--hardware", "a100-80gb", "--devices", "8")


@pytest.mark.parametrize("save_interval", ["100ba", "51200sp", "104857600tok"])
def test_saves_every_hundred_batches_add_a_hundredth_of_a_save_to_a_step(save_interval):
    best = best_with_saves(save_interval)
    seconds_of_saves = best["shares"]["saves"] * best["step_seconds"]
    assert seconds_of_saves == pytest.approx(SAVE_SECONDS / 100, rel=0.01)


@pytest.mark.parametrize(("save_interval", "ratio"), [("10s", SAVE_SECONDS / 10), ("auto", 0.02), ("1ep", 0.0)])
def test_saves_at_intervals_of_time_take_a_share_of_the_training(save_interval, ratio):
    best = best_with_saves(save_interval)
    seconds_of_saves = best["shares"]["saves"] * best["step_seconds"]
    seconds_of_training = best["step_seconds"] - seconds_of_saves
    assert seconds_of_saves / seconds_of_training == pytest.approx(ratio, rel=0.01)


# ------------------------------------------------------------------------------------------------ asked-for stages

MPT_70B_ON_512 = ("mpt-70b", "--hardware", "mi250x", "--devices", "512")


def test_stages_that_an_option_asks_for_are_written_as_the_run_has_them(tmp_path):
    overlay_file = tmp_path / "x.yaml"
    assert plan(*MPT_70B_ON_512, "--pipeline", "8", "--write", str(overlay_file)) == 0
    overlay = yaml.safe_load(overlay_file.read_text())
    assert overlay["pp_config"] == {"pipeline_parallel_degree": 8, "schedule": "1f1b", "virtual_stages": 1}
    assert overlay == best_layout(*MPT_70B_ON_512, "--pipeline", "8")["overlay"]


def test_stages_that_the_run_asks_for_give_the_same_plan_as_the_option():
    by_option = printed_plan(*MPT_70B_ON_512, "--pipeline", "8")
    by_run = printed_plan(*MPT_70B_ON_512, "pp_config.pipeline_parallel_degree=8")
    assert "waiting for other stages" in by_option
    assert by_run == by_option


def test_a_slower_adapter_slows_stages_down():
    usual = best_layout(*MPT_70B_ON_512, "--pipeline", "8")
    slow = best_layout(*MPT_70B_ON_512, "--pipeline", "8", "--adapter", "100")
    assert slow["tokens_per_second"] < usual["tokens_per_second"]


# ------------------------------------------------------------------------------------------------ several counts

SIX_PLANS = ("mpt-7b", "--hardware", "h100,mi300x", "--devices", "8,64,512", "--samples", "2")
"""MPT-7B on two kinds of hardware, with 2 samples a device."""


def test_several_counts_make_one_table():
    rows = rows_of_table(printed_plan(*SIX_PLANS))
    assert [row["hardware"] for row in rows] == ["H100-80GB"] * 3 + ["MI300X"] * 3
    assert [row["devices"] for row in rows] == ["8", "64", "512"] * 2
    assert [row["samples"] for row in rows] == ["16", "128", "1,024"] * 2


def test_scaling_compares_with_the_first_count_of_the_same_hardware():
    rows = rows_of_table(printed_plan(*SIX_PLANS))
    assert rows[0]["scaling"] == "100.0%"
    assert rows[3]["scaling"] == "100.0%"


def test_a_price_adds_a_last_column_and_changes_no_other():
    rows = rows_of_table(printed_plan(*SIX_PLANS))
    priced_rows = rows_of_table(printed_plan(*SIX_PLANS, "--price", "2.5"))
    assert list(rows[0])[-1] == "of it lost"
    assert list(priced_rows[0])[-1] == "dollars"
    without_dollars = [{column: row[column] for column in rows[0]} for row in priced_rows]
    assert without_dollars == rows


def test_dollars_are_the_price_of_all_devices_for_all_days():
    for row in rows_of_table(printed_plan(*SIX_PLANS, "--price", "2.5")):
        device_hours = 24 * float(row["days"]) * int(row["devices"])
        dollars = float(row["dollars"].replace(",", ""))
        assert dollars == pytest.approx(2.5 * device_hours, rel=0.01)


# -------------------------------------------------------------------------------- how far a prediction may be off

KERNELS_OF_2026 = "software of 2026: kernels of MPT-1B on one H100, torch 2.11"
FITTED_2023 = "software of 2023: fitted to half of"


@pytest.mark.parametrize(
    ("hardware", "num_devices", "settings", "era", "interval", "origin"),
    [
        ("h100", "1", [], 2026, [0.9, 1.1], f"({KERNELS_OF_2026})"),
        ("h100", "8", [], 2026, [0.8, 1.1], f"({KERNELS_OF_2026}, extrapolated to more devices)"),
        ("a100-80gb", "8", [], 2023, [0.93, 1.07], f"({FITTED_2023}"),
        ("a100-80gb", "8", ["compile_config={}"], 2023, [0.85, 1.07], f"({FITTED_2023}"),
        ("mi300x", "8", [], 2023, [0.75, 1.35], "(software of 2023: no published run"),
    ],
)
def test_a_prediction_is_shown_with_its_software_and_its_interval(
    hardware, num_devices, settings, era, interval, origin
):
    """Rates measured on one device promise less of more."""
    arguments = ("mpt-1b", *settings, "--hardware", hardware, "--devices", num_devices)
    rates = facts_of(*arguments)["rates"]
    assert rates["era"] == era
    assert rates["interval"] == interval
    (printed_rates,) = lines_labelled("rates", printed_plan(*arguments))
    assert origin in printed_rates


def test_counts_of_one_interval_share_a_line_below_a_table():
    printed = printed_plan("mpt-1b", "--hardware", "h100,mi250", "--devices", "1,8,16")
    h100_alone, h100s, mi250s = lines_labelled("interval", printed)
    assert h100_alone.startswith("1 x H100-80GB: 0.90 to 1.10 ti")
    assert h100s.startswith("8, 16 x H100-80GB: 0.80 to 1.1")
    assert mi250s.startswith("1, 8, 16 x MI250: 0.75 to 1.35")


def test_an_efficiency_that_is_given_is_named_beside_the_measured_one():
    printed = printed_plan("mpt-1b", "--hardware", "h100", "--devices", "8", "--efficiency", "0.5")
    assert f"(products as given; attention by {KERNELS_OF_2026}" in printed


# ------------------------------------------------------------------------------------------------ a second cluster

WITH_MI250 = (*JOINED, "mi250:64")
LINKS = ["0.01", "1", "200", "100000"]
"""In Gbit/s, from one that is no use to one that costs nothing."""
OTHER_ALGORITHM = "(another algorithm; see docs/local-steps.md)"


@dataclass(kw_only=True)
class Joined:
    """The last lines of a plan with --join."""

    answer: str
    """The way to train together that is recommended."""
    interval: str
    ways: dict[str, str]
    """Way -> what it reaches. The name of local steps has the number of batches between exchanges."""


def joined_over(link: str) -> Joined:
    printed = printed_plan(*WITH_MI250, "--wan", link)
    _, _, last_lines = printed.partition("joined    with 64 x MI250 over ")
    first_line, interval, *way_lines = last_lines.splitlines()
    _link, _, answer = first_line.partition(": ")
    ways = {}
    for line in way_lines:
        name, _, reached = line.strip().partition(": ")
        ways[name] = reached
    return Joined(answer=answer, interval=interval.strip(), ways=ways)


@pytest.mark.parametrize(
    ("link", "answer"),
    [
        ("0.01", r"the faster cluster alone"),
        ("1", r"local steps, every \d+ .*"),
        ("200", r"local steps, every 10 .*"),
        ("100000", r"exact"),
    ],
)
def test_a_second_cluster_is_answered_with_a_way(link, answer):
    assert re.fullmatch(answer, joined_over(link).answer)


@pytest.mark.parametrize("link", LINKS)
def test_each_way_is_shown_with_what_it_would_reach(link):
    ways = joined_over(link).ways
    assert [name.partition(", every")[0] for name in ways] == ["exact", "exact with overlap", "local steps"]
    for reached in ways.values():
        assert " tokens/s, " in reached
        assert "; pays from " in reached


@pytest.mark.parametrize("link", LINKS)
def test_local_steps_are_always_called_another_algorithm(link):
    joined = joined_over(link)
    for name in [joined.answer, *joined.ways]:
        assert name.startswith("local steps") == name.endswith(OTHER_ALGORITHM)


@pytest.mark.parametrize("link", LINKS)
def test_the_prediction_of_the_second_cluster_has_its_own_interval(link):
    expected = "64 x MI250: 0.75 to 1.35 times the tokens/s in nine cases of ten (software of 2023: "
    assert joined_over(link).interval.startswith(expected)


def test_both_clusters_plan_the_same_batch():
    """8 samples for each of the first cluster's 64 devices are 512 in all, and not 1,024 with the second's."""
    by_device = printed_plan(*WITH_MI250, "--samples", "8")
    assert by_device == printed_plan(*WITH_MI250, "global_train_batch_size=512")


# ------------------------------------------------------------------------------------------ imports, and the search


def test_a_plan_waits_for_nothing_that_it_does_not_need():
    """Each of these takes a tenth of a second or more to import. The exit code and those imported are printed last."""
    heavy = ("torch", "numpy", "rich", "matplotlib", "transformers")
    program = (
        "import sys; from llmfoundry_lite.cli.main import main\n"
        "try: main()\nexcept SystemExit as end: code = end.code\n"
        f"print([code or 0, [name for name in {heavy} if name in sys.modules]])"
    )
    arguments = ["plan", "mpt-7b", "--hardware", "h100", "--devices", "8"]
    result = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, cwd=ROOT)
    assert result.stdout.splitlines()[-1] == "[0, []]", result.stderr


@dataclass(kw_only=True)
class Searched:
    """A search over layouts of a run on eight H100."""

    config: TrainConfig
    candidates: list[Candidate]
    rejected: list[Rejected]


def search_on_eight(*arguments: str) -> Searched:
    config = load_train_config(arguments).config
    candidates, rejected = search_layouts(config, 8, find_hardware(accelerator_named("H100-80GB")))
    return Searched(config=config, candidates=candidates, rejected=rejected)


@pytest.fixture(scope="module")
def divided_samples() -> Searched:
    """Of a run whose samples are divided in two, by heads of attention."""
    by_heads = ["cp_config.context_parallel_degree=2", "cp_config.kind=heads"]
    return search_on_eight("mpt-125m", "global_train_batch_size=16", *by_heads)


def test_the_planner_keeps_the_samples_divided(divided_samples):
    tried = [*divided_samples.candidates, *divided_samples.rejected]
    assert {layout.layout.context for layout in tried} == {2}


def test_overlays_of_divided_samples_say_how_they_are_divided(divided_samples):
    assert divided_samples.candidates
    for candidate in divided_samples.candidates:
        overlay = candidate.overlay(divided_samples.config)
        assert overlay["cp_config"] == {"context_parallel_degree": 2, "kind": "heads"}


def test_divided_samples_cost_time(divided_samples):
    assert min(candidate.time.context for candidate in divided_samples.candidates) > 0


def test_more_parts_of_samples_and_layers_than_heads_divide_are_rejected(divided_samples):
    words = "cp_config.context_parallel_degree: 2 x 4 of tp_config does not divide model.n_heads, 12; "
    assert any(rejected.reason.startswith(words) for rejected in divided_samples.rejected)


@pytest.fixture(scope="module")
def exact_sums() -> Searched:
    return search_on_eight("mpt-125m", "exact_sums=true")


def test_a_run_with_exact_sums_gets_no_layouts_that_divide_its_sums(exact_sums):
    assert {candidate.layout.tensor for candidate in exact_sums.candidates} == {1}
    assert {candidate.layout.context for candidate in exact_sums.candidates} == {1}


def test_a_run_with_exact_sums_gets_a_microbatch_size(exact_sums):
    for candidate in exact_sums.candidates:
        assert isinstance(candidate.config.device_train_microbatch_size, int)


def test_no_layout_is_rejected_because_exact_sums_need_a_microbatch_size(exact_sums):
    assert not any(rejected.reason.startswith("exact_sums: needs") for rejected in exact_sums.rejected)


def test_a_run_of_several_batch_sizes_is_planned_one_size_at_a_time(capsys):
    words = (*ON_H100, "64")
    schedule = "batch_size_schedule={1000ba: 2048}"
    assert plan(*words, schedule) == 2
    assert (
        "plan: batch_size_schedule has batches of 1024 to 2048 samples, and plan takes one size; give each in turn by "
        "batch_size_schedule=null global_train_batch_size=…"
    ) in capsys.readouterr().err
    size = "global_train_batch_size=2048"
    assert printed_plan(*words, schedule, "batch_size_schedule=null", size) == printed_plan(*words, size)


def test_a_run_of_several_lengths_is_planned_with_whole_samples(capsys):
    words = (*ON_H100, "64")
    schedule = "seq_len_schedule={0ba: 512}"
    assert plan(*words, schedule) == 2
    assert (
        "plan: seq_len_schedule has rows of 512 to 512 tokens, and plan takes one length; seq_len_schedule=null "
        "computes whole samples, which take longest"
    ) in capsys.readouterr().err
    assert printed_plan(*words, schedule, "seq_len_schedule=null") == printed_plan(*words)
