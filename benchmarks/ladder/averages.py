"""Measure what the mean of a run's last checkpoints gains, with a constant learning rate and with one that decays.

    python -m benchmarks averages --keep FOLDER --out docs/measurements

A size of the ladder is trained on Python's standard library twice, with the two schedules, and saves often enough that
its last checkpoints cover the last part of the run. The last checkpoint and the means of the last ones
(`llmfoundry-lite checkpoint average`) are evaluated on the held-out text, and compared document by document.

FOLDER keeps the data and the runs. Called again, the benchmark does not train again what is there.
"""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from benchmarks import last_lines
from benchmarks.ladder import plan
from benchmarks.ladder.plan import Shape
from llmfoundry_lite.config.data_schema import HELD_OUT_TEXT
from llmfoundry_lite.config.task_types import BITS
from llmfoundry_lite.errors import UserError
from llmfoundry_lite.evaluation.compare import compare
from llmfoundry_lite.evaluation.results import load_results
from llmfoundry_lite.prepare.prepare import prepare
from llmfoundry_lite.prepare.request import PrepareRequest
from llmfoundry_lite.tables import Table
from llmfoundry_machines.bench.frame import describe_conditions, open_console, tabulate, tell

SCHEDULES = {
    "constant": {"scheduler.name": "constant_with_warmup"},
    "decay to 0": {"scheduler.name": "linear_decay_with_warmup", "scheduler.alpha_f": 0.0},
}
"""Name of a schedule -> its settings of the run."""
LEARNING_RATE = 0.04
"""The rate that `benchmarks ladder` chose for its second size."""
TASK = "held_out/0-shot"
SUITE = "averages"


def run(
    *,
    size: str = "32x2",
    last: Sequence[int] = (5, 10),
    save_every: float = 0.025,
    seed: int = 17,
    keep: Path = Path("runs/averages"),
    out: Path | None = None,
) -> dict[str, Any]:
    """Train, average, evaluate, print the table, and return the report. `out` gets averages.json and .md.

    `size` is WIDTHxLAYERS. `last` has numbers of checkpoints to average. `save_every` is the part of the run between
    two saves. `keep` is the folder of the data and the runs. Raises UserError.
    """
    shape = plan.parse_shape(size, "--size")
    interval = max(1, round(shape.num_batches * save_every))
    conditions, keep = describe_conditions(), keep.resolve()
    note = partial(open_console().print, markup=False)
    prepare_data(keep)

    rows: list[dict[str, Any]] = []
    for schedule in SCHEDULES:
        note(f"training {shape} with {schedule} learning rate: {shape.num_batches:,} batches")
        name = train(keep, shape, schedule, interval, max(last), seed)
        models = average(keep, name, last)
        evaluate(keep, models)
        rows += compare_with_last(keep, schedule, models)

    # Whether averages with a constant rate make up for the decay that was left out.
    constant, decayed = (name_of(schedule) for schedule in SCHEDULES)
    paths = [keep / "results" / SUITE / f"{model}.json" for model in (f"{decayed}-last", f"{constant}-last-{last[0]}")]
    across = describe_pair(paths)

    report = conditions | {
        "size": size,
        "last": [*last],
        "interval": interval,
        "batches": shape.num_batches,
        "seed": seed,
        "rows": rows,
        "constant_mean_against_decay": across,
    }
    command = "python -m benchmarks averages" + ("" if size == "32x2" else f" --size {size}")
    tell(
        report,
        words_of(report, shape),
        table_of(rows),
        notes_of(report),
        name="averages",
        heading="The mean of the last checkpoints",
        command=command,
        asked=("size",),
        out=out,
    )
    return report


# ------------------------------------------------------------------------------------------------------ what is run


def name_of(schedule: str) -> str:
    """Return the name of the run with a schedule: `decay` for `decay to 0`."""
    return schedule.partition(" ")[0]


def prepare_data(keep: Path) -> None:
    """Prepare Python's standard library in `keep`, unless that was done, and write the task of its held-out text."""
    if not (keep / "data" / "summary.json").exists():
        keep.mkdir(parents=True, exist_ok=True)
        request = PrepareRequest(
            sources=("python-stdlib",), tokenizer=f"train:{plan.VOCAB_SIZE}", max_seq_len=plan.SEQ_LEN
        )
        prepare(request, keep / "data", show_progress=True)
    task = {"label": "held_out", "icl_task_type": "perplexity", "dataset_uri": f"data/val/{HELD_OUT_TEXT}"}
    (keep / "averages.yaml").write_text(yaml.safe_dump({"icl_tasks": [task]}))


def settings_of(shape: Shape, schedule: str, interval: int, num_kept: int, seed: int) -> dict[str, Any]:
    """Return the settings of a run that run.yaml does not have, by key."""
    settings = plan.options_of(shape, LEARNING_RATE, seed, name_of(schedule)) | SCHEDULES[schedule]
    return settings | {"save_interval": f"{interval}ba", "save_num_checkpoints_to_keep": num_kept}


def train(keep: Path, shape: Shape, schedule: str, interval: int, num_kept: int, seed: int) -> str:
    """Train the run with a schedule, or the rest of it, and return its name. Raises UserError if it does not end."""
    name = name_of(schedule)
    settings = settings_of(shape, schedule, interval, num_kept, seed)
    files = [str(plan.HERE / "run.yaml"), str(plan.HERE / "A.yaml")]
    output = plan.call(keep, "train", *files, *(f"{key}={value}" for key, value in settings.items()))
    if not (keep / "runs" / name / "checkpoints" / f"ba{shape.num_batches}").exists():
        raise UserError(f"{name}: {last_lines(output)}")
    return name


def average(keep: Path, name: str, last: Sequence[int]) -> dict[str, str]:
    """Average the last checkpoints of a run. Returns name of a model in the results -> its checkpoints.

    The first one is the run itself, whose last checkpoint is evaluated.
    """
    models = {f"{name}-last": f"runs/{name}"}
    for count in last:
        model = f"{name}-last-{count}"
        folder = keep / "averaged" / model
        if not folder.exists():
            output = plan.call(
                keep, "checkpoint", "average", f"runs/{name}", "--last", str(count), "--out", str(folder)
            )
            if not folder.exists():
                raise UserError(f"{model}: {last_lines(output)}")
        models[model] = f"averaged/{model}"
    return models


def evaluate(keep: Path, models: dict[str, str]) -> None:
    """Evaluate models on the held-out text. Raises UserError if a result is missing afterwards."""
    arguments = [f"models.{model}={source}" for model, source in models.items()]
    output = plan.call(keep, "eval", "averages.yaml", *arguments, f"suite={SUITE}")
    for model in models:
        if not (keep / "results" / SUITE / f"{model}.json").exists():
            raise UserError(f"evaluation of {model}: {last_lines(output)}")


# ------------------------------------------------------------------------------------------------------ what came


def compare_with_last(keep: Path, schedule: str, models: dict[str, str]) -> list[dict[str, Any]]:
    """Return a row for the last checkpoint of a run, and for each mean with its difference from that."""
    last_model, *means = models
    paths = {model: keep / "results" / SUITE / f"{model}.json" for model in models}
    task = json.loads(paths[last_model].read_text())["tasks"][TASK]
    rows: list[dict[str, Any]] = [
        {"schedule": schedule, "model": "the last checkpoint", "bits": task[BITS], "stderr": task[f"{BITS}_stderr"]}
    ]
    for model in means:
        pair = describe_pair([paths[last_model], paths[model]])
        count = model.rpartition("-")[2]
        rows.append({"schedule": schedule, "model": f"mean of the last {count}", **pair})
    return rows


def describe_pair(paths: Sequence[Path]) -> dict[str, Any]:
    """Compare a result with a first one on the held-out text, and return its bits and the difference.

    `difference` is negative if the other one has fewer bits per byte, which is better.
    """
    [pair] = compare(load_results(paths))
    [row] = [task for task in pair.tasks if task.task == TASK]
    other = json.loads(paths[1].read_text())["tasks"][TASK]
    keys = ("n", "difference", "low", "high", "wins", "losses", "p")
    facts = {key: getattr(row, key) for key in keys}
    return {"bits": other[BITS], "stderr": other[f"{BITS}_stderr"], **facts, "verdict": row.verdict}


def words_of(report: dict[str, Any], shape: Shape) -> str:
    """Return the paragraph that describes text, model and training."""
    interval, batches = report["interval"], report["batches"]
    return (
        f"The text is Python's standard library, of which a part is held out. The model is {report['size']} of the "
        f"[ladder](ladder.md), {shape.num_parameters:,} parameters, trained on {batches:,} batches of "
        f"{plan.BATCH} x {plan.SEQ_LEN} tokens at a learning rate of {LEARNING_RATE}, with seed {report['seed']}. It "
        f"saves every {interval} batches, so that five checkpoints are the last {5 * interval / batches:.0%} of the "
        "run. Differences are from the last checkpoint of the same run, document by document, with the interval that "
        "`compare` gives; a negative one is better."
    )


def table_of(rows: Sequence[dict[str, Any]]) -> Table:
    """Return the table of bits per byte and differences from the last checkpoint."""
    columns = (
        ("learning rate", "{schedule}"),
        ("", "{model}"),
        ("bits per byte", "{bits:.4f} ± {stderr:.4f}"),
        ("difference", "{difference:+.4f}"),
        ("95 % interval", "{low:+.4f} to {high:+.4f}"),
        ("documents won", "{wins} of {n}"),
    )
    return tabulate("bits per byte of the held-out text", columns, rows, 2)


def notes_of(report: dict[str, Any]) -> list[str]:
    """Return the notes below the table."""
    across = report["constant_mean_against_decay"]
    return [
        f"mean of the last {report['last'][0]} at a constant rate, against the last checkpoint of the decay: "
        f"{across['difference']:+.4f} ({across['low']:+.4f} to {across['high']:+.4f})",
        "one seed each: the intervals are about documents, and another seed may give another difference",
    ]
