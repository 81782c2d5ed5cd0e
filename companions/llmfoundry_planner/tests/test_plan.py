"""`llmfoundry-lite plan`, as a user calls it."""

import itertools
import json
import math
import re
import subprocess
import sys

import pytest
import yaml
from omegaconf import OmegaConf

from llmfoundry_lite.cli.main import run
from llmfoundry_lite.config.layout import DIMENSIONS, layout_of
from llmfoundry_lite.config.load_train import load_train_config
from llmfoundry_lite.config.shipped import shipped_folder
from llmfoundry_lite.estimate.memory import estimate_training_memory
from llmfoundry_planner.plan.search import search_layouts
from llmfoundry_planner.plan.step import accelerator_named, find_hardware
from tests.helpers.launch import ROOT


def plan(*arguments: str) -> int:
    return run(["plan", *arguments])


def facts_of(capsys, *arguments: str) -> dict:
    assert plan(*arguments, "--json") == 0
    return json.loads(capsys.readouterr().out)


def test_a_run_is_planned_and_the_plan_explained(capsys):
    assert plan("mpt-7b", "--hardware", "mi250", "--devices", "256", "--price", "1.5") == 0
    out = capsys.readouterr().out
    assert "mpt-7b: 6.66 billion parameters, 134 billion tokens, 1024 x 2048 a batch, amp_bf16" in out
    assert "256 x MI250 (half a card each), 8 in a node" in out
    assert "state     0.12 TB at 18 bytes a parameter (0.0932 TB at the 14 that papers count)" in out
    assert "rejected  64 copies x 4 context, ZERO_1: needs " in out
    assert [line.split()[0] for line in out.splitlines() if line[:10].strip()][-6:-1] == [
        "rejected",
        "run",
        "failures",
        "budget",
        "days",
    ]
    assert " dollars" in out and "matrix products" in out


def test_a_dimension_has_one_name_in_the_table_and_in_rejections(capsys):
    assert plan("mpt-7b", "--hardware", "mi250", "--devices", "64") == 0
    out = capsys.readouterr().out
    head = next(line for line in out.splitlines() if "stages" in line and "recomputed" in line).split()
    named = [re.findall(r"\d+ (\w+)", line.partition(": ")[0]) for line in out.splitlines() if line[:8] == "rejected"]
    assert named and all(name in head for names in named for name in names)
    assert any("context" in names for names in named)


def test_the_days_of_a_published_run_stand_beside_those_that_are_predicted(capsys):
    published = ("mpt-7b", "--hardware", "a100-40gb", "--tokens", "1e12", "global_train_batch_size=1760")
    note = "all else comes on top: MPT-7B on 440 A100-40GB took 9.5, and 6.6 are predicted"
    assert plan(*published, "--devices", "440") == 0
    out = capsys.readouterr().out
    assert re.search(r"^run +6\.[56]\d days", out, re.MULTILINE) and note in out
    assert plan("mpt-125m", "--hardware", "h100", "--devices", "1,2") == 0
    assert note in capsys.readouterr().out
    assert plan("mpt-125m", "--hardware", "h100", "--devices", "1", "max_duration=1ep", "scheduler.t_warmup=0ba") == 0
    assert "days are" not in capsys.readouterr().out  # nothing tells how many tokens an epoch has


def test_every_layout_is_planned_or_rejected_with_a_reason(capsys):
    facts = facts_of(capsys, "mpt-30b", "--hardware", "h100", "--devices", "64")
    found = [*facts["layouts"], *facts["rejected"]]
    seen = [(*(x[name] for name in DIMENSIONS), x["sharding_strategy"]) for x in found]
    every = [one for one in itertools.product([2**n for n in range(7)], repeat=5) if math.prod(one) == 64]
    # Parts of a sample and of a layer stay in a node; 64 stages are more than its blocks.
    assert {tuple(degrees) for *degrees, _ in seen} == {one for one in every if one[0] < 64 and one[3] * one[4] <= 8}
    assert len(seen) == len(set(seen))
    assert {"FULL_SHARD", "HYBRID_SHARD", "NO_SHARD", "ZERO_1"} == {strategy for *_, strategy in seen}
    assert all(x["memory_bytes"] <= facts["usable_bytes"] for x in facts["layouts"])
    assert all(x["reason"] for x in facts["rejected"])
    fastest = max(x["tokens_per_second"] for x in facts["layouts"])
    assert facts["layouts"][0]["tokens_per_second"] >= fastest / 1.01
    alike = [x for x in facts["layouts"] if x["tokens_per_second"] >= fastest / 1.01]
    assert facts["layouts"][0]["memory_bytes"] == min(x["memory_bytes"] for x in alike)


@pytest.mark.parametrize(
    "said",
    [
        ["tp_config.tensor_parallel_degree=8", "tp_config.sequence_parallel=true"],
        ["fsdp_config.sharding_strategy=HYBRID_SHARD", "fsdp_config.data_parallel_shard_degree=16"],
        ["fsdp_config.activation_checkpointing=true", "fsdp_config.activation_cpu_offload=true"],
        ["fsdp_config.activation_checkpointing=true", "fsdp_config.activation_checkpointing_reentrant=true"],
        ["device_train_microbatch_size=null", "pp_config.pipeline_parallel_degree=2", "pp_config.num_microbatches=16"],
        ["--pipeline=1", "pp_config.pipeline_parallel_degree=2"],
    ],
    ids=lambda said: said[-1].partition("=")[0],
)
def test_the_overlay_takes_back_what_the_run_says_otherwise(capsys, tmp_path, said):
    run = tmp_path / "run.yaml"
    base = shipped_folder("yamls") / "pretrain/mpt-7b.yaml"
    values = OmegaConf.merge(OmegaConf.load(base), OmegaConf.from_dotlist([text for text in said if text[0] != "-"]))
    OmegaConf.save(values, run)
    options = [str(run), "--hardware", "h100", "--devices", "64", *(text for text in said if text[0] == "-")]
    for found in facts_of(capsys, *options)["layouts"]:
        overlay = tmp_path / "x.yaml"
        overlay.write_text(yaml.safe_dump(found["overlay"]))
        config = load_train_config([str(run), str(overlay)]).config
        layout = layout_of(config, 64, 8)
        assert layout.degrees._asdict() == {name: found[name] for name in DIMENSIONS}
        assert estimate_training_memory(config, layout).total_bytes == found["memory_bytes"]


ON_H100 = ["mpt-7b", "--hardware", "h100", "--devices"]


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
    ],
)
def test_what_cannot_be_meant_is_refused_in_a_line(capsys, arguments, words):
    assert plan(*arguments) == 2
    printed, error = capsys.readouterr()
    assert words in error and error.count("\n") == 1 and not printed


@pytest.mark.parametrize(
    ("arguments", "would"),
    [
        ([*ON_H100, "1000000"], 8192),
        (["mpt-70b", "--hardware", "a10", "--devices", "8", "--pipeline", "8"], 128),
        (["mpt-30b", "--hardware", "l4", "--devices", "8"], 32),
    ],
    ids=["too many for the batch", "in stages", "small devices"],
)
def test_the_count_that_it_names_fits(capsys, arguments, would):
    assert plan(*arguments) == 2
    assert f"fits; {would} devices would do" in capsys.readouterr().out
    assert plan(*arguments[:4], str(would), *arguments[5:]) == 0


def test_an_island_is_planned_too(capsys):
    island = ["islands={coordinator: 'h:1', name: a}", "save_folder=s"]
    layouts = facts_of(capsys, "mpt-1b", "--hardware", "h100", "--devices", "8", *island)["layouts"]
    assert {one["tensor"] * one["context"] * one["pipeline"] for one in layouts} > {1}, "any layout inside"


def test_a_hundred_thousand_devices_are_planned_too(capsys):
    facts = facts_of(capsys, "mpt-70b", "--hardware", "h100", "--devices", "98304", "global_train_batch_size=98304")
    assert facts["layouts"] and facts["cost"]["hours_between_failures"] < 1


def test_a_measured_stall_takes_the_place_of_the_assumed_one(capsys):
    """Four times as long a stall: saves half as often, and twice as much lost to them (Young 1974)."""
    on = ["mpt-7b", "--hardware", "h100", "--devices", "1024", "global_train_batch_size=1024", "save_interval=100ba"]
    short, long = (facts_of(capsys, *on, "--stall", seconds) for seconds in ("1", "4"))
    assert long["cost"]["save_every_seconds"] == pytest.approx(2 * short["cost"]["save_every_seconds"], rel=0.02)
    assert long["cost"]["lost_share"] > short["cost"]["lost_share"]
    best = [facts["layouts"][0] for facts in (short, long)]
    assert [one["shares"]["saves"] * one["step_seconds"] for one in best] == pytest.approx([0.01, 0.04])


@pytest.mark.parametrize(
    ("interval", "share"),
    [("100ba", None), ("51200sp", None), ("104857600tok", None), ("10s", 0.0197), ("auto", 0.02), ("1ep", 0.0)],
)
def test_saves_take_their_share_of_a_step(capsys, interval, share):
    """1.3 billion parameters of 12 bytes over 8 devices, copied at 10 GB/s: 0.197 s a save."""
    arguments = ["mpt-1b", "--hardware", "a100-80gb", "--devices", "8", "global_train_batch_size=512"]
    best = facts_of(capsys, *arguments, f"save_interval={interval}")["layouts"][0]
    saves = best["shares"]["saves"] * best["step_seconds"]
    if share is None:
        assert saves * 100 == pytest.approx(0.197, rel=0.01)
    else:
        assert saves / (best["step_seconds"] - saves) == pytest.approx(share, rel=0.01)


def test_stages_are_asked_for_by_an_option_or_by_the_run_and_written_as_the_run_has_them(capsys, tmp_path):
    arguments = ["mpt-70b", "--hardware", "mi250x", "--devices", "512"]
    assert plan(*arguments, "--pipeline", "8", "--write", str(tmp_path / "x.yaml")) == 0
    out = capsys.readouterr().out
    assert "waiting for other stages" in out
    asked = {"pipeline_parallel_degree": 8, "schedule": "1f1b", "virtual_stages": 1}
    written = yaml.safe_load((tmp_path / "x.yaml").read_text())
    assert written["pp_config"] == asked
    best = facts_of(capsys, *arguments, "--pipeline", "8", "--adapter", "100")["layouts"][0]
    fast = facts_of(capsys, *arguments, "--pipeline", "8")["layouts"][0]
    assert best["tokens_per_second"] < fast["tokens_per_second"] and fast["overlay"] == written
    assert plan(*arguments, "pp_config.pipeline_parallel_degree=8") == 0
    assert capsys.readouterr().out == out


LONG = ["max_seq_len=65536", "model.max_seq_len=65536", "global_train_batch_size=8"]


@pytest.mark.parametrize(
    ("arguments", "kinds"),
    [
        (["mpt-7b"], {"FULL_SHARD", "HYBRID_SHARD", "ZERO_1", "pp_config", "tp_config"}),
        (["mpt-7b", *LONG], {"cp_config"}),
        (["mpt-70b", "--pipeline", "4", "--schedule", "zbv", "model.tie_word_embeddings=false"], {"zbv"}),
    ],
)
def test_every_kind_of_layout_that_it_finds_loads_as_the_layout_it_is(capsys, tmp_path, arguments, kinds):
    run, *options = arguments
    layouts = facts_of(capsys, run, *options, "--hardware", "h200", "--devices", "64")["layouts"]
    written = tmp_path / "x.yaml"
    for kind in kinds:
        found = next(one for one in layouts if kind in str(one["overlay"]))
        written.write_text(yaml.safe_dump(found["overlay"]))
        config = load_train_config([run, str(written), *(option for option in options if "=" in option)]).config
        layout = layout_of(config, 64, 8)
        assert layout.degrees._asdict() == {name: found[name] for name in DIMENSIONS}, kind
        assert estimate_training_memory(config, layout).total_bytes == found["memory_bytes"], kind


def test_a_layout_that_a_launch_would_refuse_is_rejected_in_its_words(capsys):
    rejected = facts_of(capsys, "mpt-125m", "--hardware", "h100", "--devices", "16")["rejected"]
    reasons = {x["reason"] for x in rejected}
    assert "tp_config.tensor_parallel_degree: 8 does not divide model.n_heads, 12; use 1, 2, 3, 4, 6 or 12" in reasons
    assert any(reason.endswith("times as long as the fastest, even with memory to spare") for reason in reasons)


def test_several_counts_make_one_table(capsys):
    counts = ["--hardware", "h100,mi300x", "--devices", "8,64,512", "--samples", "2"]
    assert plan("mpt-7b", *counts) == 0
    rows = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert [(row[0].strip(), row[1].strip(), row[2].strip()) for row in rows[1:]] == [
        (name, devices, samples)
        for name in ("H100-80GB", "MI300X")
        for devices, samples in (("8", "16"), ("64", "128"), ("512", "1,024"))
    ]
    assert [row[9].strip() for row in rows[1::3]] == ["100.0%", "100.0%"]
    assert rows[0][-1].strip() == "of it lost"
    assert plan("mpt-7b", *counts, "--price", "2.5") == 0
    priced = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert [row[:-1] for row in priced] == rows and priced[0][-1].strip() == "dollars"
    for row in priced[1:]:
        days, dollars = (float(cell.replace(",", "")) for cell in (row[10], row[-1]))
        assert dollars == pytest.approx(2.5 * 24 * days * int(row[1]), rel=0.01)
    assert plan("mpt-7b", "--hardware", "h100", "--devices", "8,many") == 2
    assert "--devices: '8,many' given, expected a number, or several such as 64,128,256" in capsys.readouterr().err


def test_a_plan_says_by_which_software_it_predicts_and_how_far_it_may_be_off(capsys):
    """Rates measured on one device promise less of more."""
    now, then = "software of 2026: kernels of MPT-1B on one H100, torch 2.11", "software of 2023: fitted to half of"
    for hardware, devices, era, interval, words in (
        ("h100", "1", 2026, [0.9, 1.1], f"({now})"),
        ("h100", "8", 2026, [0.8, 1.1], f"({now}, extrapolated to more devices)"),
        ("a100-80gb", "8", 2023, [0.93, 1.07], f"({then}"),
        ("a100-80gb", "8 compile_config={}", 2023, [0.85, 1.07], f"({then}"),
        ("mi300x", "8", 2023, [0.75, 1.35], "(software of 2023: no published run"),
    ):
        arguments = ["mpt-1b", "--hardware", hardware, "--devices", *devices.split()]
        facts = facts_of(capsys, *arguments)
        assert (facts["rates"]["era"], facts["rates"]["interval"]) == (era, interval)
        assert plan(*arguments) == 0
        (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("rates "))
        assert words in line
    assert plan("mpt-1b", "--hardware", "h100,mi250", "--devices", "1,8,16") == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("interval ")]
    assert [line[10:40] for line in lines] == [
        "1 x H100-80GB: 0.90 to 1.10 ti",
        "8, 16 x H100-80GB: 0.80 to 1.1",
        "1, 8, 16 x MI250: 0.75 to 1.35",
    ]
    assert plan("mpt-1b", "--hardware", "h100", "--devices", "8", "--efficiency", "0.5") == 0
    assert f"(products as given; attention by {now}" in capsys.readouterr().out


def test_a_second_cluster_is_answered_with_a_way_and_what_each_would_reach(capsys):
    arguments = ["mpt-7b", "--hardware", "a100-80gb", "--devices", "64", "--pipeline", "1", "--join", "mi250:64"]
    answers = {}
    for gigabits in ("0.01", "1", "200", "100000"):
        assert plan(*arguments, "--wan", gigabits) == 0
        _, _, joined = capsys.readouterr().out.partition("joined    with 64 x MI250 over ")
        answer, rates, *ways = joined.splitlines()
        assert rates.startswith(
            "  64 x MI250: 0.75 to 1.35 times the tokens/s in nine cases of ten (software of 2023: "
        )
        answers[gigabits] = answer.partition(": ")[2]
        names = [line.split(": ")[0].split(", every")[0] for line in ways]
        assert names == ["  exact", "  exact with overlap", "  local steps"]
        assert all(" tokens/s, " in line and "; pays from " in line for line in ways)
        for line in (answer, ways[2]):
            assert "local steps" not in line or "(another algorithm; see docs/local-steps.md)" in line
    assert answers["0.01"] == "the faster cluster alone" and answers["100000"] == "exact"
    assert answers["1"].startswith("local steps, every ") and answers["200"].startswith("local steps, every 10 ")
    assert plan(*arguments, "--samples", "8") == 0
    by_device = capsys.readouterr().out
    assert plan(*arguments, "global_train_batch_size=512") == 0
    assert by_device == capsys.readouterr().out  # both clusters plan the same batch
    assert plan(*arguments, "--json") == 2
    assert "--join prints a sentence, not JSON" in capsys.readouterr().err
    assert plan(*arguments[:-1], "mi250") == 2
    assert "--join: 'mi250' given, expected HARDWARE:DEVICES" in capsys.readouterr().err
    assert plan(*arguments[:-1], "mi2500:8") == 2
    refused = capsys.readouterr()
    assert "hardware 'mi2500' is not in the table" in refused.err and not refused.out


def test_a_plan_waits_for_nothing_that_it_does_not_need():
    """Each of these takes a tenth of a second or more to import."""
    heavy = ("torch", "numpy", "rich", "matplotlib", "transformers")
    program = (
        "import sys; from llmfoundry_lite.cli.main import main\n"
        "try: main()\nexcept SystemExit as end: code = end.code\n"
        f"print([code or 0, [name for name in {heavy} if name in sys.modules]])"
    )
    arguments = ["plan", "mpt-7b", "--hardware", "h100", "--devices", "8"]
    result = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, cwd=ROOT)
    assert result.stdout.splitlines()[-1] == "[0, []]", result.stderr


def test_the_planner_keeps_the_samples_divided():
    run = ["mpt-125m", "global_train_batch_size=16", "cp_config.context_parallel_degree=2", "cp_config.kind=heads"]
    config = load_train_config(run).config
    candidates, rejected = search_layouts(config, 8, find_hardware(accelerator_named("H100-80GB")))
    assert {found.layout.context for found in [*candidates, *rejected]} == {2}
    written = [found.overlay(config)["cp_config"] for found in candidates]
    assert written and all(keys == {"context_parallel_degree": 2, "kind": "heads"} for keys in written)
    assert all(found.time.context > 0 for found in candidates)
    refused = "cp_config.context_parallel_degree: 2 x 4 of tp_config does not divide model.n_heads, 12; "
    assert any(found.reason.startswith(refused) for found in rejected)


def test_a_run_with_exact_sums_gets_the_layouts_that_do_not_divide_its_sums():
    config = load_train_config(["mpt-125m", "exact_sums=true"]).config
    candidates, rejected = search_layouts(config, 8, find_hardware(accelerator_named("H100-80GB")))
    assert {(found.layout.tensor, found.layout.context) for found in candidates} == {(1, 1)}
    assert all(isinstance(found.config.device_train_microbatch_size, int) for found in candidates)
    assert not any(found.reason.startswith("exact_sums: needs") for found in rejected)
