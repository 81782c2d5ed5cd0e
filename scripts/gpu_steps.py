"""Steps of `gpu_check.py`'s two parts. Nothing here measures: tests, benchmarks and runs do, each in its own process.

    python scripts/gpu_check.py device
    python scripts/gpu_check.py runs

`PARTS` has the two parts. Each part is a function that runs its steps (`check_...`) in order of importance. A step runs
a program, reads the report that it wrote, and adds the findings to the part's proof under its own key (`Part.note`).
Findings that are wrong are added to the proof's `problems`, and what had no time to its `left_out`. Without a GPU, the
steps run smaller programs that need none.
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
    """Run the part `device`: the tests and, at the same time, measurements of memory. Then MFU, with nothing beside it.

    Memory is only measured on a GPU of the hardware table, since the estimate needs its row.
    """
    steps: dict[str, Callable[[], None]] = {"tests": partial(run_tests, part)}
    if part.proof["row"] is None:
        part.proof["left_out"].append("memory beside the rehearsal: no GPU of the hardware table")
    else:
        part.proof["memory"] = []
        steps |= {f"memory {model}": partial(check_memory, part, model) for model in ("mpt-1b", "mpt-125m")}
    part.together(steps)
    part.together({"mfu": partial(check_mfu, part)})


def run_tests(part: Part) -> None:
    """Run the tests marked gpu, or without a GPU the quick other tests of the same files. Note each test's outcome.

    Tests write their outcomes as they end (`tests/helpers/outcomes.py`), so that those of a run which is killed at its
    limit are known.
    """
    # test_gpu.py comes first, because its tests are the most important.
    paths = [*(ROOT / "tests").rglob("test_*.py"), *(ROOT / "companions").rglob("test_*.py")]
    paths.sort(key=lambda path: (path.name != "test_gpu.py", path))
    files = [str(path.relative_to(ROOT)) for path in paths if "pytest.mark.gpu" in path.read_text()]
    marks = "not gpu and not slow and not long" if part.is_cpu else "gpu"

    outcomes = part.out / f"{part.proof['part']}-outcomes.jsonl"
    outcomes.unlink(missing_ok=True)
    arguments = ["-m", "pytest", "-q", "-p", "tests.helpers.outcomes", "-p", "no:cacheprovider", "--durations=8"]
    # Several workers at once, because tests spend most of their time starting processes.
    num_workers = count_workers(part)
    if num_workers > 1 and importlib.util.find_spec("xdist"):
        arguments += ["-n", str(num_workers)]
    part.run("tests", [*arguments, "-m", marks, *files], share=0.5, OUTCOMES=str(outcomes.resolve()))
    part.note(tests=read_outcomes(outcomes))
    if not part.proof["tests"]:
        part.proof["problems"].append("tests: none has run")


def count_workers(part: Part) -> int:
    """Return how many processes a step may run at once. Other steps run beside it, so some cores are left to them."""
    return part.num_cores * 5 // 8


def read_outcomes(path: Path) -> dict[str, dict[str, Any]]:
    """Return the outcome of every collected test: name of the test -> its record.

    Each worker of pytest writes the names that it collects, which are the same for all, and then a record for each test
    that ends. A test that did not end in time has the outcome `no time`.
    """
    outcomes: dict[str, dict[str, Any]] = {}
    lines = path.read_text().splitlines() if path.is_file() else []
    for line in lines:
        record = json.loads(line)
        if "collected" in record:
            outcomes = {name: {"outcome": "no time"} for name in record["collected"]}
        else:
            outcomes[record.pop("test")] = record
    return outcomes


def check_memory(part: Part, model: str) -> None:
    """Measure the memory of one model, with at most 4 samples, since tests use the same device."""
    folder = make_folder(part, f"memory-{model}")
    # The last variant begins before the time of `--minutes` is up, and may take 80 s more.
    minutes = max(0.1, (part.left() / 2 - 80) / 60)
    command = ["-m", "llmfoundry_lite", "bench", "memory", "--models", model, "--most", "4"]
    part.run(f"memory {model}", [*command, "--minutes", f"{minutes:.2f}", "--out", str(folder)], share=0.5)
    report = read_report(part, "memory", folder / "memory.json")
    part.proof["memory"] += list_memory(report)
    part.note()


def check_mfu(part: Part) -> None:
    """Measure the MFU of MPT-1B and MPT-125M in all of the time that is left, and print each step's line."""
    shapes = "1b,125m"
    options = []
    if part.is_cpu:
        shapes = "10m"
        options = ["--seq-len", "512", "--batch-size", "8"]
    if part.is_cpu or is_large(part.proof["row"]):
        # The size is known to fit. Finding one takes minutes if the model is compiled.
        options.append("device_train_microbatch_size=8")

    folder = make_folder(part, "mfu")
    minutes = max(0.5, (part.left() - MFU_RESERVE_SECONDS) / 60)
    command = ["-m", "llmfoundry_lite", "bench", "mfu", "--shapes", shapes, "--minutes", f"{minutes:.2f}", *options]
    part.run("mfu", [*command, "--out", str(folder)])
    rows = list_mfu(read_report(part, "mfu", folder / "mfu.json"), part.proof["row"])
    part.note(mfu=rows)
    for row in rows:
        print(describe_mfu(row), flush=True)


def read_report(part: Part, name: str, path: Path) -> dict[str, Any]:
    """Return the report that a bench wrote to `path`, or one without rows if it wrote none.

    Cases that the bench had no time for are added to the proof. `name` is the step's.
    """
    report = read_json(path) or {"rows": [], "peak_flops": None}
    part.proof["left_out"] += [f"{name}: {case}: no time for it" for case in report.get("left_out", [])]
    return report


def is_large(row_name: str | None) -> bool:
    """Return whether a device of the hardware table has the memory to train MPT-1B with microbatches of 8 samples."""
    from llmfoundry_lite.hardware import ACCELERATORS, GIB

    return row_name is not None and ACCELERATORS[row_name].memory_bytes >= 80 * GIB


def list_mfu(report: dict[str, Any], row_name: str | None) -> list[dict[str, Any]]:
    """Return the rows of a report of `bench mfu` for a proof.

    Each has its rate as a share of the measured rate of matrix products and of the datasheet's peak, and the share of
    the peak that the planner predicts for the hardware table's row `row_name`. Shares that are not known are None.
    """
    products_rates = {
        row["shape"]: row.get("flops_per_sec") for row in report["rows"] if row["step"] == "matrix products"
    }
    peak_rate = report["peak_flops"]
    rows = []
    for row in report["rows"]:
        rate = row.get("flops_per_sec")
        products_rate = products_rates.get(row["shape"])
        kept = {key: row.get(key) for key in ("shape", "step", "microbatch_size", "flops_per_sec", "error")}
        kept["share_of_products"] = rate / products_rate if rate and products_rate else None
        kept["share_of_peak"] = rate / peak_rate if rate and peak_rate else None
        kept["predicted_share_of_peak"] = predict(row["shape"], row_name, row["step"])
        rows.append(kept)
    return rows


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
    """Run the part `runs`. On a GPU, the save is first and alone, since joules and seconds are the whole device's."""
    steps = {"exact": check_exact, "switch": check_switch, "save": check_save, "evaluation": check_evaluation}
    if not part.is_cpu:
        part.together({"save": partial(steps.pop("save"), part)})
    part.together({name: partial(step, part) for name, step in steps.items()})


def check_exact(part: Part) -> None:
    """Train NUM_EXACT batches with exact sums in several ways, which must give the same losses and data, bit for bit.

    The run is made in one launch, then stopped and resumed, and, if there are two devices or none, on two ranks.
    """
    from tests.helpers.tiny import read_metrics, tiny_config, values, write_config, write_data

    folder = make_folder(part, "exact")
    settings = {
        "max_duration": f"{NUM_EXACT}ba",
        "exact_sums": True,
        "autoresume": True,
        "device_train_microbatch_size": 1,
        "log_to_console": False,
    }
    path = write_config(folder / "run.yaml", tiny_config(write_data(folder / "data"), **settings))

    # Name of a run -> the commands that make it, one after the other.
    train = ["scripts/train.py"]
    commands_by_run = {"whole": [train], "carried on": [[*train, "stop_after=10ba"], train]}
    if part.is_cpu or part.proof["num_devices"] > 1:
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        commands_by_run["on two ranks"] = [[*torchrun, *train]]
    results: dict[str, Any] = {}

    def make_run(name: str) -> None:
        run_folder = folder / name.replace(" ", "-")
        for command in commands_by_run[name]:
            arguments = [*command, path, f"run_folder={run_folder}"]
            if part.run(f"exact {name}", arguments, needs=10, OMP_NUM_THREADS="1").returncode:
                return  # it is in the proof's problems
        records = read_metrics(run_folder)
        # In hexadecimal a float is written exactly.
        losses = [loss.hex() for loss in values(records, "loss/train/total")]
        results[name] = {"digests": values(records, "data/digest"), "losses": losses}

    part.together({f"exact {name}": partial(make_run, name) for name in commands_by_run})
    part.note(exact={name: results[name] for name in commands_by_run if name in results})
    for name, result in results.items():
        # Without the whole run, only the number of batches can be checked.
        expected = results.get("whole", result)
        for key in ("digests", "losses"):
            if result[key] != expected[key] or len(result[key]) != NUM_EXACT:
                part.proof["problems"].append(f"exact sums: {name} has other {key} than the run that never stopped")


def check_switch(part: Part) -> None:
    """Switch one run between CPUs and the GPU, with control runs. Without a GPU, between kernels of the CPU.

    `benchmarks switch` does this, and gives the verdict whether the switches changed the loss.
    """
    from benchmarks.switch.band import Verdict
    from benchmarks.switch.switch import SEQ_LEN
    from tests.helpers.tiny import write_data

    folder = make_folder(part, "switch")
    write_data(folder / "data", num_train=2_000, num_val=80, seq_len=SEQ_LEN)
    (folder / "data/summary.json").write_text("{}")  # marks it as prepared
    num_batches, every, clusters = ("12", "4", "B,D") if part.is_cpu else ("40", "10", "A,B,D")
    options = ["--num-batches", num_batches, "--every", every, "--only", clusters, "--untimed"]
    options += ["--jobs", str(max(2, count_workers(part)))]
    command = ["-m", "benchmarks", "switch", *options, "--data", str(folder / "data"), "--out", str(folder / "out")]
    part.run("switch", [*command, "--keep", str(folder / "runs")], needs=45)
    shutil.rmtree(folder / "runs", ignore_errors=True)  # frees a gigabyte of checkpoints

    report = read_json(folder / "out/switch.json")
    if report is None:
        return
    verdicts = {name: Verdict(**verdict).words for name, verdict in report["verdicts"].items()}
    part.note(
        switch={
            **{key: report[key] for key in ("precision", "num_batches", "every", "passed")},
            "clusters": [f"{cluster['device']}: {cluster['words']}" for cluster in report["clusters"]],
            "ratios": {name: verdict["largest_ratio"] for name, verdict in report["verdicts"].items()},
            "verdicts": verdicts,
        }
    )
    if not report["passed"]:
        part.proof["problems"] += [f"switch: {name}: {verdict}" for name, verdict in verdicts.items()]


def check_save(part: Part) -> None:
    """Train MPT-1B and save it, then resume it in two more processes, the second with deterministic kernels.

    Notes the seconds and bytes of the save, the price of deterministic kernels, and the energy, from the run's log.
    Without a GPU, the model is smaller.
    """
    from llmfoundry_machines.bench.steps import write_run
    from tests.helpers.tiny import read_metrics

    # The run takes two steps more than `num_steps`, which `write_run` adds for the warm-up.
    num_steps = NUM_BEFORE_SAVE + NUM_AFTER_RESTORE + NUM_DETERMINISTIC - 2
    settings = {"shape": "1b", "seq_len": 2048, "batch_size": 16, "num_steps": num_steps}
    if part.is_cpu:
        settings |= {"shape": "40m", "seq_len": 128, "batch_size": 2}
    launches = {
        "save": [f"stop_after={NUM_BEFORE_SAVE}ba"],
        "restore": [f"stop_after={NUM_AFTER_RESTORE}ba"],
        "deterministic": ["deterministic=true"],
    }

    # A checkpoint has 12 bytes for each parameter, and there may be two, so they do not stay in the part's folder.
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        path = write_run(Path(folder), settings, "bf16")
        command = ["scripts/train.py", str(path), "autoresume=true", "save_interval=1000ba"]
        command.append("save_num_checkpoints_to_keep=1")
        command.append(f"device_train_microbatch_size={8 if is_large(part.proof['row']) else 1}")
        for name, options in launches.items():
            if part.run(name, [*command, *options], needs=15).returncode:
                break
        records = read_metrics(Path(folder, "run")) if Path(folder, "run/metrics.jsonl").is_file() else []

    part.note(checkpoint={"model": settings["shape"], **sum_up_saves(records)}, energy=sum_up_energy(records))
    if records and part.proof["energy"] is None:
        # A CPU need not have a counter of energy, but a GPU should.
        key = "left_out" if part.is_cpu else "problems"
        part.proof[key].append("energy: no counter was read")


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
    """Evaluate one exported model with our harness and with lm_eval, on the same questions.

    Each must choose the same answers, with log-probabilities that differ by no more than MAX_NATS.
    """
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
    suites = {}
    for name, suite in report["suites"].items():
        suites[name] = {key: suite[key] for key in ("num_different", "largest_difference_nats")}
    part.note(evaluation={"num_items": report["num_items"], "suites": suites})
    for name, suite in suites.items():
        if suite["num_different"] or suite["largest_difference_nats"] > MAX_NATS:
            part.proof["problems"].append(f"evaluation beside lm_eval: {name}: {suite}")


def make_folder(part: Part, name: str) -> Path:
    """Make an empty folder in the part's folder, and return it. What a former check left there is removed."""
    shutil.rmtree(part.out / name, ignore_errors=True)
    (part.out / name).mkdir(parents=True)
    return part.out / name


def read_json(path: Path) -> dict[str, Any] | None:
    """Return a JSON report, or None if there is none because its program failed, which the proof already says."""
    return json.loads(path.read_text()) if path.is_file() else None


PARTS: dict[str, Callable[[Part], None]] = {"device": check_device, "runs": check_runs}
"""Name of a part -> the function that runs its steps."""
