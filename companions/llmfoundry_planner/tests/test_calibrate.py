"""`plan --calibrate`: constants from reports, the interval of what they predict, and files that fix nothing."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llmfoundry_lite.cli.main import run
from llmfoundry_lite.config.build import build_block
from llmfoundry_lite.config.layout import layout_of
from llmfoundry_lite.config.load_train import load_train_config
from llmfoundry_lite.config.schema import TrainConfig, as_dict
from llmfoundry_lite.hardware import ACCELERATORS, PRODUCTS
from llmfoundry_machines.bench.frame import tell
from llmfoundry_machines.doctor.collectives import CLOCKS, RankResult, summarise_step
from llmfoundry_machines.doctor.examine import as_dict as as_report
from llmfoundry_machines.doctor.finding import Finding, Status
from llmfoundry_planner.plan.calibrate import calibrate
from llmfoundry_planner.plan.network import Group
from llmfoundry_planner.plan.plan import hardware_named
from llmfoundry_planner.plan.rates import KNOWN_SPREAD, MANY_DEVICES
from llmfoundry_planner.plan.step import find_hardware, step_time

H100 = find_hardware(ACCELERATORS["H100-80GB"])
DEVICE = "NVIDIA H100 80GB HBM3"
ON_H100 = ["plan", "mpt-7b", "--hardware", "h100", "--pipeline", "1", "--devices"]


def write_bench(folder: Path, name: str, **report) -> Path:
    """Write a report as `bench` itself does."""
    conditions = {"date": "", "machine": "", "torch": "", "load_average": 0.0, "device": DEVICE, "peak_flops": 989.5e12}
    tell(conditions | report, name=name, heading="", command="", out=folder)
    return folder / f"{name}.json"


def write_steps(folder: Path, counts, products: float, jitter: float, odd: float = 1.0) -> Path:
    """Write steps of MPT-1B as a cluster of such rates would take them; every second one `odd` times as long."""
    truth = replace(
        H100,
        efficiency=replace(
            H100.efficiency,
            products=products,
            attention=products / H100.efficiency.products * H100.efficiency.attention,
        ),
        node=replace(H100.node, jitter=jitter),
    )
    rows = []
    for number, num_devices in enumerate(counts):
        config = load_train_config(["mpt-1b", f"global_train_batch_size={16 * num_devices}"]).config
        seconds = step_time(config, layout_of(config, num_devices, min(8, num_devices)), truth).seconds
        seconds *= odd if number % 2 else 1.0
        rows.append({"num_devices": num_devices, "seconds": seconds, "config": as_dict(config)})
    return write_bench(folder, "scaling", device_name=DEVICE, rows=rows)


def write_mfu(folder: Path, **changes) -> Path:
    rows = [
        {"shape": "1b", "step": PRODUCTS, "flops_per_sec": 600e12},
        {"shape": "7b", "step": PRODUCTS, "flops_per_sec": 640e12},
        {"shape": "7b", "step": "sdpa, compiled", "flops_per_sec": 400e12},
        {"shape": "30b", "step": PRODUCTS, "error": "out of memory"},
    ]
    return write_bench(folder, "mfu", **{"rows": rows} | changes)


ALIKE = f"8 x {DEVICE} (132 compute units), 80 GiB each"
MIXED = f"4 x {DEVICE}, 4 x NVIDIA A100-SXM4-80GB"


def write_doctor(folder: Path, *findings: Finding, detail: str = ALIKE) -> Path:
    path = folder / "doctor.json"
    devices = Finding("devices", Status.PASS, "8", detail=detail)
    path.write_text(json.dumps(as_report([devices, *findings])))
    return path


def gathered(num_ranks: int, rate: float, place: str = "") -> Finding:
    return Finding(
        "all_gather", Status.PASS, rate, "GB/s", f"{num_ranks} ranks{place} over NCCL, bus bandwidth at 64 MiB"
    )


def test_steps_fix_products_and_over_several_nodes_the_jitter(tmp_path):
    found = calibrate(H100, [write_steps(tmp_path, (1, 2, 4, 8, 16, 32), 0.5, 0.02)], {})
    assert found.efficiency.products == pytest.approx(0.5, rel=2e-3)
    assert found.node.jitter == pytest.approx(0.02, abs=2e-3)
    assert "products, jitter fitted to 6 steps on at most 32 devices" in found.efficiency.source
    in_one_node = calibrate(H100, [write_steps(tmp_path, (1, 2, 4, 8), 0.5, 0.02)], {})
    assert in_one_node.efficiency.products == pytest.approx(0.5, rel=2e-3)
    assert in_one_node.node.jitter == pytest.approx(H100.node.jitter) and "jitter" not in in_one_node.efficiency.source


def test_the_interval_follows_from_the_steps_errors_and_widens_with_the_nodes(tmp_path):
    exact = calibrate(H100, [write_steps(tmp_path, (1, 2, 4, 8), 0.5, 0.003)], {})
    assert exact.interval(8) == pytest.approx((1 / KNOWN_SPREAD, KNOWN_SPREAD)), "the least that is promised"
    low, high = exact.interval(1024)
    worst = (1 + 7 * 0.003) / (1 + 7 * 0.028)
    assert low == pytest.approx(worst / KNOWN_SPREAD), "this cluster's jitter may be the worst that is known"
    assert high == pytest.approx(KNOWN_SPREAD)
    odd = calibrate(H100, [write_steps(tmp_path, (1, 2, 4, 8, 16, 32), 0.5, 0.003, odd=1.2)], {})
    near, far = odd.interval(8), odd.interval(1024)
    assert near[1] > 1.15 and far[1] > 1.5 * near[1] - 0.5 and far[0] < near[0] < 1 / 1.15


def test_two_nodes_alone_promise_no_jitter(tmp_path):
    """Two constants pass through two steps whatever these are."""
    found = calibrate(H100, [write_steps(tmp_path, (8, 16), 0.5, 0.003)], {})
    assert found.efficiency.residuals is not None and found.efficiency.residuals.freedom == 0
    assert found.interval(1024)[0] < 0.9 / KNOWN_SPREAD


def test_links_give_the_planner_the_time_that_doctor_took(tmp_path):
    """The report is `doctor`'s own; the planner's all-gather then moves as many bytes a second."""
    reports = {rank: RankResult(bytes_per_second=rate) for rank, rate in enumerate((301e9, 300e9, 305e9))}
    collective = summarise_step("all_reduce", reports, {}, 3, 64 << 20, 90.0)
    assert collective.value == 300 and collective.check != CLOCKS
    across = gathered(16, 40.0, " on 2 nodes")
    node = calibrate(H100, [write_doctor(tmp_path, collective, across)], {}).node
    num_bytes = 1e9
    for size, in_node, rate in ((8, 8, 300e9), (16, 8, 40e9)):
        seconds = Group(size=size, in_node=in_node, node=node).gather_seconds(num_bytes)
        assert (size - 1) / size * num_bytes / seconds == pytest.approx(rate, rel=0.02)
    assert node.source.startswith("in a node as measured, doctor.json; between nodes as measured, doctor.json; else ")
    given = hardware_named("h100", link_gigabytes=100, measured=[tmp_path / "doctor.json"]).node
    assert given.link_bytes_per_second == 100e9 and given.adapter_bytes_per_second == node.adapter_bytes_per_second


def test_products_alone_take_the_place_of_fitted_ones_unless_steps_were_timed(capsys, tmp_path):
    paths = [str(write_mfu(tmp_path)), str(write_steps(tmp_path, (1, 2, 4, 8), 0.5, 0.003))]
    assert run([*ON_H100, "8", "--calibrate", paths[0], "--json"]) == 0
    alone = json.loads(capsys.readouterr().out)
    assert alone["rates"]["products"] == pytest.approx(620 / 989.5)
    begin = "products measured, mfu.json; attention by software of 2026: kernels of MPT-1B"
    assert alone["rates"]["source"].startswith(begin) and alone["rates"]["era"] is None
    assert run([*ON_H100, "64", "--calibrate", ",".join(paths)]) == 0
    told = capsys.readouterr().out
    assert "products at 50.0% of the peak" in told and "(scaling.json: products fitted to 4 steps on at most 8" in told
    assert "; mfu.json not used beside timed steps)" in told
    assert run([*ON_H100, "64", "--calibrate", paths[1], "--json"]) == 0
    assert "not used" not in json.loads(capsys.readouterr().out)["rates"]["source"]


def test_a_share_that_is_given_comes_before_a_measured_one_and_takes_its_interval_along(tmp_path):
    steps = write_steps(tmp_path, (1, 2, 4, 8), 0.5, 0.003)
    given = hardware_named("h100", products_efficiency=0.4, measured=[steps])
    assert given.efficiency.products == 0.4 and given.interval(64) == H100.interval(64)


def test_all_files_of_steps_are_fitted_and_named(tmp_path):
    first = write_steps(tmp_path / "first", (1, 2), 0.5, 0.003).rename(tmp_path / "first.json")
    found = calibrate(H100, [first, write_steps(tmp_path, (4, 8), 0.5, 0.003)], {})
    assert found.efficiency.source.startswith("first.json, scaling.json: products fitted to 4 steps")


ONE_B = as_dict(load_train_config(["mpt-1b"]).config)
WITH_OWN_FFN = as_dict(load_train_config(["mpt-125m", "model.ffn_config.ffn_type=python:mine:Ffn"]).config)
SLOW = [{"step": PRODUCTS, "flops_per_sec": 700e12}]


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (lambda f: f / "no.json", "no.json: No such file or directory"),
        (lambda f: f, "Is a directory"),
        (lambda f: write_mfu(f, rows=[]), "mfu.json: no rate of matrix products"),
        (lambda f: write_mfu(f, peak_flops=None), "mfu.json: the device's peak is not in the table"),
        (lambda f: write_mfu(f, rows=[{"step": PRODUCTS, "flops_per_sec": "fast"}]), "damaged or no such report"),
        (lambda f: write_mfu(f, rows=SLOW, peak_flops=1e12), "matrix products at 70000% of the peak; measure again"),
        (lambda f: write_mfu(f, rows=3), "damaged or no such report; expected mfu.json or scaling.json of `llmf"),
        (lambda f: write_mfu(f, schema=1), "schema 1, this release reads 2; measure again: llmfoundry-lite bench mfu"),
        (
            lambda f: write_mfu(f, device="NVIDIA A100-SXM4-80GB"),
            "measured on NVIDIA A100-SXM4-80GB, --hardware says",
        ),
        (lambda f: write_mfu(f, device=f"{DEVICE} MIG 1g.10gb"), "MIG 1g.10gb, --hardware says H100-80GB"),
        (lambda f: write_doctor(f, gathered(8, 300.0), detail=MIXED), f"measured on {MIXED}, --hardware says"),
        (lambda f: write_bench(f, "block", rows=[]), "damaged or no such report"),
        (
            lambda f: write_bench(f, "scaling", rows=[]),
            "scaling.json: no timed steps; measure again: llmfoundry-lite",
        ),
        (
            lambda f: write_bench(f, "scaling", rows=[{"seconds": math.nan, "num_devices": 1}]),
            "a step of nan s on 1",
        ),
        (lambda f: write_bench(f, "scaling", rows=[{"seconds": 1, "num_devices": 1}]), "damaged or no such report"),
        (
            lambda f: write_bench(f, "scaling", rows=[{"seconds": 1, "num_devices": 0}]),
            "scaling.json: a step of 1.0 s on 0 devices; measure again",
        ),
        (
            lambda f: write_bench(
                f, "scaling", device_name=DEVICE, rows=[{"seconds": 1, "num_devices": 7, "config": ONE_B}]
            ),
            "scaling.json: global_train_batch_size: 512 does not divide over 7 data ranks",
        ),
        (
            lambda f: write_bench(
                f, "scaling", device_name=DEVICE, rows=[{"seconds": 1, "num_devices": 1, "config": WITH_OWN_FFN}]
            ),
            "nothing is known of the time of python:mine:Ffn (model.ffn_config.ffn_type), which is code of your own; "
            "measure with a layer of ours that is as large",
        ),
        (lambda f: write_steps(f, (1, 2), 3.0, 0.003), "scaling.json: its steps take products at 3"),
        (lambda f: write_doctor(f), "no collective was timed; start doctor on several devices"),
        (lambda f: write_doctor(f, gathered(8, math.inf)), "all_gather at inf GB/s; measure again"),
        (
            lambda f: write_doctor(f, gathered(2, 9.0, " on 2 nodes")),
            "2 ranks on 2 nodes of 8 devices; start doctor",
        ),
    ],
)
def test_a_file_that_fixes_nothing_is_refused_in_a_line(capsys, tmp_path, write, words):
    assert run([*ON_H100, "8", "--calibrate", str(write(tmp_path))]) == 2
    printed, error = capsys.readouterr()
    assert words in error and error.count("\n") == 1 and not printed


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "3", '{"findings": 3}', '{"findings": [{}]}', '{"bench": "mfu"}', "\xff"]
)
def test_a_damaged_file_is_refused_in_a_line(capsys, tmp_path, text):
    path = tmp_path / "odd.json"
    path.write_bytes(text.encode("latin-1"))
    assert run([*ON_H100, "8", "--calibrate", str(path)]) == 2
    error = capsys.readouterr().err
    assert "odd.json: damaged or no such report" in error and error.count("\n") == 1


def steps_of_an_h100(size: str) -> list[dict[str, Any]]:
    """Rows of `bench mfu`, with what one H100 took: `benchmarks/results/h100/cases.jsonl`."""
    num_samples, microbatch_size, seconds = {
        "1b": (16, 8, {"{}": 0.5389, "null": 0.5741}),
        "125m": (64, 32, {"{}": 0.3001, "null": 0.3650}),
    }[size]
    sizes = [f"global_train_batch_size={num_samples}", f"device_train_microbatch_size={microbatch_size}"]
    rows = []
    for compile_config, one in seconds.items():
        arguments = [f"mpt-{size}", "h100-8", "max_seq_len=2048", *sizes, f"compile_config={compile_config}"]
        config = as_dict(load_train_config(arguments).config)
        rows.append({"step": "sdpa", "seconds": one, "num_devices": 1, "config": config, "flops_per_sec": 5e14})
    return rows


@pytest.mark.parametrize(("fitted", "other"), [("1b", "125m"), ("125m", "1b")])
def test_one_model_s_steps_of_bench_mfu_predict_the_other_within_the_interval(tmp_path, fitted, other):
    path = tmp_path / "mfu.json"
    products = {"step": PRODUCTS, "flops_per_sec": 801.8e12}
    report = {"bench": "mfu", "device_name": DEVICE, "peak_flops": 989.5e12}
    path.write_text(json.dumps(report | {"rows": [products, *steps_of_an_h100(fitted)]}))
    hardware = calibrate(H100, [path], {})
    assert "mfu.json: products fitted to 2 steps on at most 1 devices" in hardware.efficiency.source
    assert "extrapolated to more devices" in hardware.origin(8) and hardware.interval(8)[0] <= MANY_DEVICES
    low, high = hardware.interval(1)
    for row in steps_of_an_h100(other):
        config = build_block(TrainConfig, row["config"])
        predicted = step_time(config, layout_of(config, 1, 1), hardware).seconds
        rate = predicted / row["seconds"]  # the measured rate over the predicted one
        assert low <= rate <= high
