"""Report of one run or several, for people and programs: tables, a figure, a sample of what the model writes.

    llmfoundry-lite report runs/mpt-1b                      loss.png, report.md, report.json beside it
    llmfoundry-lite report runs/moved runs/whole --out both  how far apart they are, batch by batch; report.png
    llmfoundry-lite report runs/mpt-1b --csv --format pdf   loss.pdf, and report.csv with a row for each batch

It reads the files that runs leave behind (metrics.jsonl, config.yaml, the newest checkpoint's manifest,
huggingface/), and the data set that a run names if that is on this disk. It imports no training code.

`report` collects everything into one JSON-compatible dictionary, the content of report.json. Tables (`page.py`) are
built from that dictionary alone, and figures (`figure.py`) from it and the logs. The sections of this file compute
parts of the dictionary: comparisons of runs, and the facts of one run. `data_facts.py` has those of its data, and
`sample_texts.py` the texts that its model writes.
"""

import csv
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from llmfoundry_lite import companions
from llmfoundry_lite.checkpoint.run_log import read_lines
from llmfoundry_lite.errors import ConfigError, join_with_and, mask_credentials, mask_urls, printable
from llmfoundry_lite.files import check_replaceable, write_atomically
from llmfoundry_lite.report.data_facts import measure_data
from llmfoundry_lite.report.figure import Axis, Curve, Difference, plot_comparison, plot_run
from llmfoundry_lite.report.log import DEVICE_RATE, FLOPS, LOSS, RATE, SECONDS, TOKENS
from llmfoundry_lite.report.page import Additions, Facts, Section, build_sections, markdown, print_sections
from llmfoundry_lite.report.reading import NoBatchesError, Run, read_run
from llmfoundry_lite.report.sample_texts import sample_texts
from llmfoundry_lite.report.segments import (
    changes_of,
    parse_prices,
    segment_facts,
    sum_segments,
    unused_prices,
    visible_spans,
)
from llmfoundry_lite.tables import csv_text

AXIS_LABELS = {"batch": "batch", "tokens": "training tokens", "flops": "training FLOPs of the model"}
NUM_FINAL_LOSSES = 20
"""Training losses, counted from the last batch back, whose mean is reported as the training loss."""


def report(
    locations: Sequence[str],
    *,
    out: Path | None = None,
    prices: Sequence[str] = (),
    prompts: Sequence[str] = (),
    temperature: float = 0.7,
    top_k: int = 40,
    image_format: str = "png",
    x_axis: str = "batch",
    smooth_batches: int | None = None,
    with_csv: bool = False,
    results_folder: Path = Path("results"),
) -> Facts:
    """Report on one or several runs: print tables, and write report.json, report.md and figures.

    `locations` are run directories, their URLs, or folders of checkpoints. Runs that have not trained a batch yet are
    left out, and the report names them. The first run is the one that the others are compared with.

    `out`: folder of the files; the first run's by default.
    `prices`: texts such as `cpu=0.05`, a device's price per hour.
    `prompts`: what the sampled texts begin with; words of the validation data by default. Texts are only sampled of a
    single run, at `temperature`, among the `top_k` likeliest tokens.
    `image_format`: png, pdf or svg. `x_axis`: a key of AXIS_LABELS.
    `smooth_batches`: width of the running mean; 1 draws none.
    `with_csv`: write report.csv too, with a row for each batch.
    `results_folder`: folder with results of evaluations. Those of the runs' checkpoints are shown by a companion.

    Returns the content of report.json. Raises DataError if a location has no run or no run has a batch, and
    ConfigError for a price that cannot be parsed, for a remote run without `out`, and for an `x_axis` that the log
    does not have.
    """
    device_prices = parse_prices(prices)
    runs, left_out = read_runs(locations)
    is_single = len(runs) == 1
    folder = out or runs[0].folder.path_here
    if folder is None:
        raise ConfigError(f"{runs[0].location} is not on this disk; say with --out DIR where the report goes")

    # Before any work, refuse to replace files that no earlier report has written.
    names = distinct_names(runs)
    all_additions = load_additions(runs, names, image_format, results_folder)
    file_names = ["report.md", f"loss.{image_format}", f"report.{image_format}", "report.csv"]
    for additions in all_additions:
        file_names += additions.file_names
    check_replaceable(folder / "report.json", [folder / name for name in file_names])

    # Describe each run. `sample_texts` and `note_unread_relays` may add notes to a run, so they come before
    # `describe_run`, which copies them.
    samples = sample_texts(runs[0], prompts, temperature=temperature, top_k=top_k) if is_single else []
    note_unread_relays(runs)
    described_runs: list[Facts] = []
    for i, (run, name) in enumerate(zip(runs, names, strict=True)):
        added_facts: Facts = {}
        for additions in all_additions:
            added_facts |= additions.run_facts[i]
        described_runs.append(describe_run(run, name, added_facts, device_prices))
    facts: Facts = {
        "runs": described_runs,
        "comparisons": [],
        "samples": samples,
        "prices_per_device_hour": device_prices,
        "figure": f"{'loss' if is_single else 'report'}.{image_format}",
    }
    for additions in all_additions:
        facts |= additions.facts
    if left_out:
        facts["left_out"] = left_out
    for device in unused_prices(runs, device_prices):
        note = f"the price of {device!r} was not used: no segment ran on a device of that name"
        facts["runs"][0]["notes"].append(note)

    # Compare every other run with the first.
    differences: list[Difference] = []
    for run, name in zip(runs[1:], names[1:], strict=True):
        comparison, difference = compare_runs(runs[0], run, names[0], name)
        facts["comparisons"].append(comparison)
        differences.append(difference)
    sections = build_sections(facts, all_additions)

    # Write the files. report.json comes first, because only beside it may the next report replace the other files. If
    # this one is interrupted, the files that it has written can be replaced, too.
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "report.json", mask_urls(json.dumps(facts, indent=1, allow_nan=False)) + "\n")
    write_atomically(folder / "report.md", mask_credentials(markdown(sections)))
    half_width = None if smooth_batches is None else smooth_batches // 2  # batches on either side of the middle one
    draw_figure(folder, runs, facts, differences, x_axis, half_width)
    figure_paths: list[Path] = []
    for additions in all_additions:
        figure_paths += additions.draw(folder)
    figure_paths.append(folder / facts["figure"])
    if with_csv:
        write_csv(folder / "report.csv", runs, names)

    print_report(sections, folder, figure_paths, left_out, with_csv=with_csv)
    return facts


def load_additions(
    runs: Sequence[Run], names: Sequence[str], image_format: str, results_folder: Path
) -> list[Additions]:
    """Return what installed companions add, in the order of sections. The arguments are those of `Additions`."""
    classes = [
        companions.load_if_installed("llmfoundry_ops.report:Launches"),
        companions.load_if_installed("llmfoundry_studies.report_curves:Curves"),
    ]
    return [
        additions_class(runs, names, image_format, results_folder)
        for additions_class in classes
        if additions_class is not None
    ]


def read_runs(locations: Sequence[str]) -> tuple[list[Run], list[str]]:
    """Read the runs at `locations` that have trained at least one batch.

    Returns the runs, and a message for each run that was left out because it has no batch yet, such as a member of a
    sweep that has not started. Raises DataError if a location has no run, and NoBatchesError if no run has a batch.
    """
    runs: list[Run] = []
    without_batches: list[NoBatchesError] = []
    for location in locations:
        try:
            runs.append(read_run(location))
        except NoBatchesError as error:
            without_batches.append(error)

    if not runs:
        raise without_batches[0]
    return runs, [str(error) for error in without_batches]


def distinct_names(runs: Sequence[Run]) -> list[str]:
    """Return a name for each run, by which tables and figures tell the runs apart.

    These are the runs' names, for instance ["base", "wide"]. If two runs have the same name, all runs are called by
    their locations, such as ["runs/a", "runs/b"].
    """
    names = [run.name for run in runs]
    if len(set(names)) < len(names):
        return [run.location for run in runs]
    return names


def note_unread_relays(runs: Sequence[Run]) -> None:
    """Add a note to each run that has a relay's journal, if the companion that reads journals is not installed.

    A relay moves a run between sites. Its journal (relay.jsonl) lists the allocations at each.
    """
    if companions.is_installed("llmfoundry_ops"):
        return
    for run in runs:
        run_folder = run.folder.path_here
        if run_folder is not None and (run_folder / "relay.jsonl").exists():
            missing = companions.missing("llmfoundry_ops", "relay.jsonl")
            run.notes.append(f"no sites and no allocations: {missing}")


def draw_figure(
    folder: Path,
    runs: Sequence[Run],
    facts: Facts,
    differences: Sequence[Difference],
    x_axis: str,
    half_width: int | None,
) -> None:
    """Draw the report's figure into `folder`: one run's loss and speed, or the losses of several and their differences.

    facts: the content of report.json. It gives the file's name, and each run's name, segments and baselines.
    differences: one for each run but the first, how far its losses are from the first run's. Unused for a single run.
    x_axis: a key of AXIS_LABELS.
    half_width: number of batches that a running mean covers on either side; None chooses one, 0 draws no mean.

    Raises ConfigError if a run's log cannot be drawn along `x_axis`.
    """
    path = folder / facts["figure"]
    is_single = len(runs) == 1
    curves = [
        build_curve(run, run_facts, x_axis, with_history=is_single)
        for run, run_facts in zip(runs, facts["runs"], strict=True)
    ]
    spans = [visible_spans(run_facts["segments"]) for run_facts in facts["runs"]]

    if is_single:
        baselines = facts["runs"][0]["baselines"]
        plot_run(path, curves[0], spans[0], title=runs[0].name, baselines=baselines, half_width=half_width)
    else:
        title = join_with_and([run_facts["name"] for run_facts in facts["runs"]])
        plot_comparison(path, curves, differences, spans, title=title, half_width=half_width)


def write_csv(path: Path, runs: Sequence[Run], names: Sequence[str]) -> None:
    """Write every number of the logs as CSV, with a row for each batch of each run.

    The first lines for a run called base are, for instance:

        run,batch,launch,loss/train/total,time/token
        base,1,1,6.93,8192

    Columns are run, batch, launch, then every key that any log has, in order of appearance. A cell is empty if a batch
    has no such key. Batches on dead branches, which a later launch trained again, are left out. Text that a spreadsheet
    would run as a formula is escaped.
    """
    # Collect the columns. A dictionary keeps their order and drops repeats.
    columns = dict.fromkeys(["run", "batch", "launch"])
    for run in runs:
        for _, record in read_lines(run.log.lines):
            columns |= dict.fromkeys(record)

    with path.open("w", newline="", encoding="utf-8", errors="backslashreplace") as file:
        writer = csv.writer(file)
        writer.writerow([csv_text(column) for column in columns])
        for run, name in zip(runs, names, strict=True):
            for (_, record), launch in zip(read_lines(run.log.lines), run.log.launch.tolist(), strict=True):
                # The log's own number of the launch is replaced, because merged logs may use a number twice.
                values = {**record, "run": name, "launch": launch}
                cells = [values.get(column, "") for column in columns]
                writer.writerow([csv_text(cell) if isinstance(cell, str) else cell for cell in cells])


def print_report(
    sections: Sequence[Section], folder: Path, figure_paths: Sequence[Path], left_out: Sequence[str], *, with_csv: bool
) -> None:
    """Print the sections, the paths of the files that the report wrote into `folder`, and the runs that it left out."""
    print_sections(sections)
    for path in figure_paths:
        print(printable(f"plot: {path}"))
    print(printable(f"the same as Markdown and JSON: {folder / 'report.md'}, {folder / 'report.json'}"))
    if with_csv:
        print(printable(f"every batch: {folder / 'report.csv'}"))
    for reason in left_out:
        print(printable(f"left out: {reason}"))


# ------------------------------------------------------------------------------------------------ several runs


def compare_runs(first: Run, other: Run, first_name: str, other_name: str) -> tuple[Facts, Difference]:
    """Compare the losses and data digests of two runs over the batches that both logs have.

    Signed differences are the other run's value less the first run's. A batch whose loss is not finite in one of the
    runs counts as common, but not as compared. If the first run has batches 1 to 3 with the losses 5.0, 4.0 and 3.0,
    and the other one batches 2 to 4 with 4.5, NaN and 2.0, then 2 batches are common (2 and 3), 1 is compared (2), and
    the largest and the final difference are both 0.5, at batch 2.

    Equal digests mean that both runs trained a batch on the same samples.

    Returns the comparison's facts for report.json, and the absolute differences for the figure.
    """
    # Find the common batches. All arrays below have an element for each of them.
    batches, first_rows, other_rows = np.intersect1d(
        first.log.batch, other.log.batch, assume_unique=True, return_indices=True
    )
    differences = other.log.numbers(LOSS)[other_rows] - first.log.numbers(LOSS)[first_rows]
    validation_differences = other.log.validation[other_rows] - first.log.validation[first_rows]
    absolute = np.abs(differences)

    # Compare the losses. These are indices of common batches: with a difference, with a validation loss in both runs,
    # and of the largest difference (none, or one).
    compared = np.flatnonzero(np.isfinite(absolute))
    evaluated = np.flatnonzero(np.isfinite(validation_differences))
    largest = compared[[np.argmax(absolute[compared])]] if len(compared) else compared
    max_batch, max_absolute = last_value(batches, absolute, largest)
    final_batch, final_difference = last_value(batches, differences, compared)
    validation_batch, validation_difference = last_value(batches, validation_differences, evaluated)

    # Compare the data, and find the first batch that the runs trained on different samples.
    num_digests = 0  # common batches for which both logs have a digest
    first_different_data_batch = None
    for batch, first_row, other_row in zip(batches.tolist(), first_rows.tolist(), other_rows.tolist(), strict=True):
        first_digest = first.log.digest[first_row]
        other_digest = other.log.digest[other_row]
        if first_digest is None or other_digest is None:
            continue
        num_digests += 1
        if first_digest != other_digest and first_different_data_batch is None:
            first_different_data_batch = batch

    not_finite_in_one = set(first.log.not_finite) ^ set(other.log.not_finite)
    facts = {
        "first": first_name,
        "other": other_name,
        "num_common": len(batches),
        "num_compared": len(compared),  # both losses are finite
        "not_finite_in_one": sorted(not_finite_in_one & set(batches.tolist())),
        "num_equal": int((absolute == 0).sum()),  # to the last bit
        "max_absolute": max_absolute,
        "max_absolute_batch": max_batch,
        "mean_absolute": float(absolute[compared].mean()) if len(compared) else None,
        "final_batch": final_batch,
        "final_difference": final_difference,
        "num_digests": num_digests,
        "digests_part_at": first_different_data_batch,
        "validation_batch": validation_batch,
        "validation_difference": validation_difference,
    }
    return facts, Difference(
        name=other_name, batches=batches, absolute=absolute, first_different_data_batch=first_different_data_batch
    )


def last_value(batches: np.ndarray, values: np.ndarray, indices: np.ndarray) -> tuple[int | None, float | None]:
    """Return the batch and the value at the last of `indices`, or (None, None) if there are no indices.

    `batches` and `values` have the same length. For the indices [0, 2], the result is (batches[2], values[2]).
    """
    if not len(indices):
        return None, None
    last = indices[-1]
    return int(batches[last]), float(values[last])


# --------------------------------------------------------------------------------------------------- one run


def describe_run(run: Run, name: str, added_facts: Facts, prices: dict[str, float]) -> Facts:
    """Return a run's facts as report.json has them: losses, speed, segments, notes. None stands for an unknown value.

    name: the run's name in this report (see `distinct_names`).
    added_facts: a companion's facts of this run.
    prices: a device's name -> its price per hour.

    The notes are copied from `run`, so everything that adds notes to a run must be called before.
    """
    # Most columns of a log have gaps, for instance where a batch was not evaluated.
    log = run.log
    losses = finite_values(log.numbers(LOSS))
    final_losses = losses[-NUM_FINAL_LOSSES:]
    tokens = finite_values(log.numbers(TOKENS))
    rates = finite_values(log.numbers(RATE))
    validation_losses = finite_values(log.validation)
    validation_batches = log.batch[np.isfinite(log.validation)]

    data = measure_data(run)
    segments = segment_facts(run, prices)
    notes = list(run.notes)
    if data.note is not None:
        notes.append(data.note)
    return {
        "run": run.location,
        "name": name,
        "num_batches": int((log.batch > 0).sum()),  # record 0 is an evaluation before the first batch
        "first_batch": int(log.batch[0]),
        "last_batch": int(log.batch[-1]),
        "num_launches": log.num_launches,
        "tokens": int(tokens[-1]) if len(tokens) else None,
        "tokens_per_second": float(rates[-1]) if len(rates) else None,
        "training_seconds": float(np.nansum(log.numbers(SECONDS))),
        "training_loss": float(final_losses.mean()) if len(losses) else None,
        "training_loss_batches": len(final_losses),
        "validation_loss": float(validation_losses[-1]) if len(validation_losses) else None,
        "validation_batch": int(validation_batches[-1]) if len(validation_batches) else None,
        "baselines": data.baselines,
        "bytes_per_token": data.validation_bytes_per_token,
        "training_bytes_per_token": data.training_bytes_per_token,
        "not_finite": log.not_finite,
        "dead_branches": [branch.as_dict() for branch in log.dead],
        **added_facts,
        "save_interval": (run.config or {}).get("save_interval"),
        "segments_from": run.segments_from,
        "state_digest": run.state_digest,
        "segments": segments,
        "total": sum_segments(segments),
        "notes": notes,
    }


def finite_values(values: np.ndarray) -> np.ndarray:
    """Return the values that are neither NaN nor infinite, in their order."""
    return values[np.isfinite(values)]


def build_curve(run: Run, run_facts: Facts, x_axis: str, *, with_history: bool) -> Curve:
    """Build the curve of a run for a figure, from its log and its facts in report.json.

    x_axis: a key of AXIS_LABELS.
    with_history: add dead branches (batches that a later launch trained again) and marks where settings changed. A
        comparison of several runs leaves both out, because it would have too many lines.

    Raises ConfigError if the log cannot be drawn along `x_axis`.
    """
    log = run.log
    is_evaluated = np.isfinite(log.validation)
    dead_branches = [(branch.batch, branch.numbers(LOSS)) for branch in log.dead]
    return Curve(
        name=run_facts["name"],
        batches=log.batch,
        losses=log.numbers(LOSS),
        tokens_per_second=log.numbers(RATE),
        eval_batches=log.batch[is_evaluated],
        eval_losses=log.validation[is_evaluated],
        not_finite=log.not_finite,
        dead_branches=dead_branches if with_history else (),
        changes=changes_of(run_facts["segments"]) if with_history else (),
        axis=build_axis(run, x_axis),
    )


def build_axis(run: Run, x_axis: str) -> Axis:
    """Build the horizontal axis of a run's curves: its batches, the tokens trained after each, or the FLOPs.

    x_axis: a key of AXIS_LABELS. For "flops", a batch lies at the tokens trained after it times the FLOPs of one token.
    The latter are the median over batches of the logged FLOPs per second over the logged tokens per second, both of one
    device. Raises ConfigError if the log does not have these numbers.
    """
    log = run.log
    if x_axis == "batch":
        return Axis()

    # `totals` has the tokens trained after each batch, and below, if asked for, the FLOPs.
    totals = log.numbers(TOKENS)
    required_key = TOKENS
    if x_axis == "flops":
        with np.errstate(divide="ignore", invalid="ignore"):
            flops_per_token = finite_values(log.numbers(FLOPS) / log.numbers(DEVICE_RATE))
        totals = totals * (np.median(flops_per_token) if len(flops_per_token) else np.nan)
        required_key = FLOPS
    if not np.isfinite(totals).any():
        raise ConfigError(f"--x {x_axis}: the log of {run.location} has no {required_key}; --x batch needs none")
    return Axis(AXIS_LABELS[x_axis], log.batch, totals)
