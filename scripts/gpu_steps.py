"""Steps of `gpu_check.py`'s two parts. Nothing here measures: tests, benchmarks and runs do, each in its own process.

    python scripts/gpu_check.py device
    python scripts/gpu_check.py runs

A step adds what it found to the part's proof, under a key of its own.
"""

import importlib.util
import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from scripts.gpu_part import ROOT, Part
from scripts.gpu_predictions import predict

MFU_RESERVE_SECONDS = 35
"""Seconds reserved for starting Python, and for the output of `bench mfu`."""
NUM_EXACT = 20
"""Batches of the run whose digests and losses are recorded."""
NUM_BEFORE_SAVE = 6
NUM_AFTER_RESTORE = 2
NUM_DETERMINISTIC = 5
"""Batches of the three launches of the run that is saved and restored."""
NUM_SLOW = 2
"""First batches of a launch, which are slower than the others and do not count for times and energy."""
MAX_NATS = 1e-3
"""Largest difference allowed between two log-probabilities of an answer, in fp32."""


def check_device(part: Part) -> None:
    """Run the tests and, beside them, measure memory. Then measure MFU, with the machine to itself."""
    steps: dict[str, Callable[[], None]] = {"tests": partial(run_tests, part)}
    if part.proof["row"] is None:
        part.proof["left_out"].append("memory beside the rehearsal: no GPU of the hardware table")
    else:
        part.proof["memory"] = []
        steps |= {f"memory {model}": partial(check_memory, part, model) for model in ("mpt-1b", "mpt-125m")}
    part.together(steps)
    part.together({"mfu": partial(check_mfu, part)})


def run_tests(part: Part) -> None:
    """Run the files that have tests marked gpu: those tests, or without a GPU the others."""
    paths = [path for folder in ("tests", "companions") for path in (ROOT / folder).rglob("test_*.py")]
    files = [
        str(path.relative_to(ROOT))
        for path in sorted(paths, key=lambda path: (path.name != "test_gpu.py", path))
        if "pytest.mark.gpu" in path.read_text()
    ]
    marked = "not gpu and not slow and not long" if part.is_cpu else "gpu"
    outcomes = part.out / f"{part.proof['part']}-outcomes.jsonl"
    outcomes.unlink(missing_ok=True)
    arguments = ["-m", "pytest", "-q", "-p", "tests.helpers.outcomes", "-p", "no:cacheprovider", "--durations=8"]
    num_workers = part.num_cores * 5 // 8
    if num_workers > 1 and importlib.util.find_spec("xdist"):  # tests spend most time starting processes
        arguments += ["-n", str(num_workers)]
    part.run("tests", [*arguments, "-m", marked, *files], share=0.5, OUTCOMES=str(outcomes.resolve()))
    part.note(tests=read_outcomes(outcomes))
    if not part.proof["tests"]:
        part.proof["problems"].append("tests: none has run")


def read_outcomes(path: Path) -> dict[str, dict[str, Any]]:
    """Return the outcome of every collected test. Those that did not end in time have `no time`."""
    found: dict[str, dict[str, Any]] = {}
    for line in path.read_text().splitlines() if path.is_file() else []:
        record = json.loads(line)
        if "collected" in record:
            found = {name: {"outcome": "no time"} for name in record["collected"]}
        else:
            found[record.pop("test")] = record
    return found


def check_memory(part: Part, model: str) -> None:
    """Measure the memory of one model, with at most 4 samples, since tests use the same device."""
    reports = make_folder(part, f"memory-{model}")
    minutes = max(0.1, (part.left() / 2 - 80) / 60)  # later variants would not end in time
    command = ["-m", "llmfoundry_lite", "bench", "memory", "--models", model, "--most", "4"]
    part.run(f"memory {model}", [*command, "--minutes", f"{minutes:.2f}", "--out", str(reports)], share=0.5)
    found = read_report(part, "memory", reports / "memory.json")
    part.proof["memory"] += list_memory(found)
    part.note()


def check_mfu(part: Part) -> None:
    shapes, more = ("10m", ["--seq-len", "512", "--batch-size", "8"]) if part.is_cpu else ("1b,125m", [])
    if part.is_cpu or is_large(part.proof["row"]):  # finding a size takes minutes, compiled
        more = [*more, "device_train_microbatch_size=8"]
    reports, minutes = make_folder(part, "mfu"), max(0.5, (part.left() - MFU_RESERVE_SECONDS) / 60)
    command = ["-m", "llmfoundry_lite", "bench", "mfu", "--shapes", shapes, "--minutes", f"{minutes:.2f}", *more]
    part.run("mfu", [*command, "--out", str(reports)])
    rows = list_mfu(read_report(part, "mfu", reports / "mfu.json"), part.proof["row"])
    part.note(mfu=rows)
    for row in rows:
        print(describe_mfu(row), flush=True)


def read_report(part: Part, name: str, path: Path) -> dict[str, Any]:
    """Return the report of a bench, without the parts that had no time; empty if there is none."""
    report = read_json(path) or {"rows": [], "peak_flops": None}
    part.proof["left_out"] += [f"{name}: {case}: no time for it" for case in report.get("left_out", [])]
    return report


def is_large(row_name: str | None) -> bool:
    """Return whether MPT-1B trains 8 samples at a time on one such device."""
    from llmfoundry_lite.hardware import ACCELERATORS, GIB

    return row_name is not None and ACCELERATORS[row_name].memory_bytes >= 80 * GIB


def list_mfu(report: dict[str, Any], row_name: str | None) -> list[dict[str, Any]]:
    """Return each step with its share of the measured rate of products, of the datasheet's rate, and the prediction."""
    products = {row["shape"]: row.get("flops_per_sec") for row in report["rows"] if row["step"] == "matrix products"}
    found = []
    for row in report["rows"]:
        rate = row.get("flops_per_sec")
        found.append(
            {
                **{key: row.get(key) for key in ("shape", "step", "microbatch_size", "flops_per_sec", "error")},
                "share_of_products": rate / products[row["shape"]] if rate and products.get(row["shape"]) else None,
                "share_of_peak": rate / report["peak_flops"] if rate and report["peak_flops"] else None,
                "predicted_share_of_peak": predict(row["shape"], row_name, row["step"]),
            }
        )
    return found


def describe_mfu(row: dict[str, Any]) -> str:
    """Return a timed step of a model as one line: its rate and shares as `list_mfu` has them, or the error.

    Example: `1b, compiled: 400.00 TFLOP/s, 62.0% of its products, 40.4% of the datasheet; predicted 41.0%`.
    """
    name = f"{row['shape']}, {row['step']}"
    if row["error"] or row["flops_per_sec"] is None:
        return f"{name}: {row['error']}"

    text = f"{name}: {row['flops_per_sec'] / 1e12:.2f} TFLOP/s"
    if row["share_of_products"] is not None:
        text += f", {row['share_of_products']:.1%} of its products"
    if row["share_of_peak"] is not None:
        text += f", {row['share_of_peak']:.1%} of the datasheet"
    is_whole_step = row["step"] != "matrix products"
    if is_whole_step and row["predicted_share_of_peak"] is not None:
        text += f"; predicted {row['predicted_share_of_peak']:.1%}"
    return text


def list_memory(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of a report of `bench memory` for a proof, with only the allocated bytes of each measurement."""
    rows = []
    for row in report["rows"]:
        kept = {key: row[key] for key in ("model", "microbatch_size", "estimated_bytes", "error")}
        kept["real_bytes"] = row["real"].get("allocated_bytes")
        kept["rehearsed_bytes"] = row["rehearsed"].get("allocated_bytes")
        rows.append(kept)
    return rows


def check_runs(part: Part) -> None:
    steps = {"exact": check_exact, "switch": check_switch, "save": check_save, "evaluation": check_evaluation}
    if not part.is_cpu:  # alone, because joules and seconds are of the whole device
        part.together({"save": partial(steps.pop("save"), part)})
    part.together({name: partial(step, part) for name, step in steps.items()})


def check_exact(part: Part) -> None:
    """Train 20 batches with exact sums: in one go, stopped and carried on, and on two ranks where there is room."""
    from tests.helpers.tiny import read_metrics, tiny_config, values, write_config, write_data

    folder = make_folder(part, "exact")
    more = {"max_duration": f"{NUM_EXACT}ba", "exact_sums": True, "autoresume": True, "device_train_microbatch_size": 1}
    more["log_to_console"] = False
    path = write_config(folder / "run.yaml", tiny_config(write_data(folder / "data"), **more))
    alone, on_two = ["scripts/train.py"], ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    launches = {"whole": [alone], "carried on": [[*alone, "stop_after=10ba"], alone]}
    if part.is_cpu or part.proof["num_devices"] > 1:
        launches["on two ranks"] = [[*on_two, *alone]]
    found: dict[str, Any] = {}

    def launch(name: str) -> None:
        run_folder = folder / name.replace(" ", "-")
        for command in launches[name]:
            arguments = [*command, path, f"run_folder={run_folder}"]
            if part.run(f"exact {name}", arguments, needs=10, OMP_NUM_THREADS="1").returncode:
                return
        records = read_metrics(run_folder)
        losses = [loss.hex() for loss in values(records, "loss/train/total")]
        found[name] = {"digests": values(records, "data/digest"), "losses": losses}

    part.together({f"exact {name}": partial(launch, name) for name in launches})
    part.note(exact={name: found[name] for name in launches if name in found})
    for name, one in found.items():
        for key in ("digests", "losses"):
            if one[key] != found.get("whole", one)[key] or len(one[key]) != NUM_EXACT:
                part.proof["problems"].append(f"exact sums: {name} has other {key} than the run that never stopped")


def check_switch(part: Part) -> None:
    """Switch one run between CPUs and the GPU, with control runs. Without a GPU, between kernels of the CPU."""
    from benchmarks.switch.band import Verdict
    from benchmarks.switch.switch import SEQ_LEN
    from tests.helpers.tiny import write_data

    folder = make_folder(part, "switch")
    write_data(folder / "data", num_train=2_000, num_val=80, seq_len=SEQ_LEN)
    (folder / "data/summary.json").write_text("{}")  # marks it as prepared
    num_batches, every, clusters = ("12", "4", "B,D") if part.is_cpu else ("40", "10", "A,B,D")
    options = ["--num-batches", num_batches, "--every", every, "--only", clusters, "--untimed"]
    options += ["--jobs", str(max(2, part.num_cores * 5 // 8))]
    command = ["-m", "benchmarks", "switch", *options, "--data", str(folder / "data"), "--out", str(folder / "out")]
    part.run("switch", [*command, "--keep", str(folder / "runs")], needs=45)
    shutil.rmtree(folder / "runs", ignore_errors=True)  # frees a gigabyte of checkpoints
    report = read_json(folder / "out/switch.json")
    if report is None:
        return
    words = {name: Verdict(**verdict).words for name, verdict in report["verdicts"].items()}
    part.note(
        switch={
            **{key: report[key] for key in ("precision", "num_batches", "every", "passed")},
            "clusters": [f"{cluster['device']}: {cluster['words']}" for cluster in report["clusters"]],
            "ratios": {name: verdict["largest_ratio"] for name, verdict in report["verdicts"].items()},
            "verdicts": words,
        }
    )
    if not report["passed"]:
        part.proof["problems"] += [f"switch: {name}: {text}" for name, text in words.items()]


def check_save(part: Part) -> None:
    """Train MPT-1B, save it, and carry it on in two more processes, the second with deterministic kernels.

    Seconds, bytes and joules come from its log.
    """
    from llmfoundry_machines.bench.steps import write_run
    from tests.helpers.tiny import read_metrics

    shape, size = (
        ("40m", {"seq_len": 128, "batch_size": 2}) if part.is_cpu else ("1b", {"seq_len": 2048, "batch_size": 16})
    )
    num_batches = NUM_BEFORE_SAVE + NUM_AFTER_RESTORE + NUM_DETERMINISTIC
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:  # 12 bytes for each parameter, twice
        path = write_run(Path(folder), {"shape": shape, "num_steps": num_batches - 2, **size}, "bf16")
        command = ["scripts/train.py", str(path), "autoresume=true", "save_interval=1000ba"]
        command.append("save_num_checkpoints_to_keep=1")
        command.append(f"device_train_microbatch_size={8 if is_large(part.proof['row']) else 1}")
        launches = {
            "save": [f"stop_after={NUM_BEFORE_SAVE}ba"],
            "restore": [f"stop_after={NUM_AFTER_RESTORE}ba"],
            "deterministic": ["deterministic=true"],
        }
        for name, options in launches.items():
            if part.run(name, [*command, *options], needs=15).returncode:
                break
        records = read_metrics(Path(folder, "run")) if Path(folder, "run/metrics.jsonl").is_file() else []
    part.note(checkpoint={"model": shape, **sum_up_saves(records)}, energy=sum_up_energy(records))
    if records and part.proof["energy"] is None:
        kind = "left_out" if part.is_cpu else "problems"
        part.proof[kind].append("energy: no counter was read")


def sum_up_saves(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what the metrics of `check_save`'s launches say about its first save and restore.

    The keys are "bytes", "stall_seconds", "durable_seconds" and "restore_seconds", as far as they were recorded.
    "deterministic_price" is the time of a step with deterministic kernels, in the last launch, as a multiple of the
    time without. Times are medians that leave out the first two steps of a launch, which are slower.
    """
    facts = {}
    for key in ("bytes", "stall_seconds", "durable_seconds", "restore_seconds"):
        values = [record[f"checkpoint/{key}"] for record in records if f"checkpoint/{key}" in record]
        if values:
            facts[key] = values[0]

    batch_seconds = [record["time/batch_seconds"] for record in records if "time/batch_seconds" in record]
    usual = batch_seconds[NUM_SLOW:NUM_BEFORE_SAVE]
    deterministic = batch_seconds[NUM_BEFORE_SAVE + NUM_AFTER_RESTORE + NUM_SLOW :]
    if deterministic:
        facts["deterministic_price"] = median(deterministic) / median(usual)
    return facts


def sum_up_energy(records: list[dict[str, Any]]) -> dict[str, float] | None:
    """Return joules, seconds and tokens of the batches before the save, without the first two, which are slower.

    Returns None if there are no such batches, or if their energy was not counted.
    """
    batches = records[NUM_SLOW:NUM_BEFORE_SAVE]
    if not batches or any("energy/joules" not in record for record in batches):
        return None
    last_before = records[NUM_SLOW - 1]  # seconds and tokens are counted from the beginning of the run
    return {
        "joules": sum(record["energy/joules"] for record in batches),
        "seconds": batches[-1]["time/elapsed_seconds"] - last_before["time/elapsed_seconds"],
        "tokens": batches[-1]["time/token"] - last_before["time/token"],
    }


def check_evaluation(part: Part) -> None:
    """Ask our model and lm_eval's the same questions, on one export. Answers and log-probabilities must be the same."""
    if importlib.util.find_spec("lm_eval") is None:
        part.proof["left_out"].append("evaluation beside lm_eval --model hf: lm_eval is not installed")
        return
    folder = make_folder(part, "evaluation")
    sizes = ["--shape", "tiny", "--num-items", "4"] if part.is_cpu else ["--shape", "10m", "--num-items", "10"]
    options = ["--peer-python", sys.executable, *sizes, "--out", str(folder)]
    part.run("evaluation", ["-m", "benchmarks", "eval-within", *options], needs=30, HF_HUB_OFFLINE="1")
    report = read_json(folder / "eval-within.json")
    if report is None:
        return
    keys = ("num_different", "largest_difference_nats")
    found = {name: {key: suite[key] for key in keys} for name, suite in report["suites"].items()}
    part.note(evaluation={"num_items": report["num_items"], "suites": found})
    for name, suite in found.items():
        if suite["num_different"] or suite["largest_difference_nats"] > MAX_NATS:
            part.proof["problems"].append(f"evaluation beside lm_eval: {name}: {suite}")


def make_folder(part: Part, name: str) -> Path:
    """Make an empty folder in the part's."""
    shutil.rmtree(part.out / name, ignore_errors=True)
    (part.out / name).mkdir(parents=True)
    return part.out / name


def read_json(path: Path) -> dict[str, Any] | None:
    """Return a report; None if its step has written none, which the proof already says."""
    return json.loads(path.read_text()) if path.is_file() else None


PARTS: dict[str, Callable[[Part], None]] = {"device": check_device, "runs": check_runs}
