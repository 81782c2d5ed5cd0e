"""Report of one run or several, for people and programs: tables, a figure, a sample of what the model writes.

    llmfoundry-lite report runs/mpt-1b                      loss.png, report.md, report.json beside it
    llmfoundry-lite report runs/moved runs/whole --out both  how far apart they are, batch by batch; report.png
    llmfoundry-lite report runs/mpt-1b --csv --format pdf   loss.pdf, and report.csv with a row for each batch

It reads the files that runs leave behind (metrics.jsonl, config.yaml, the newest checkpoint's manifest,
huggingface/), and the data set that a run names if that is on this disk. It imports no training code.

`report` collects everything into one JSON-compatible dictionary, the content of report.json. Tables (`page.py`) are
built from that dictionary alone, and figures (`figure.py`) from it and the logs. The sections of this file compute the
parts of the dictionary: comparisons of runs, the facts of one run, its data, and texts that its model writes.
"""

import csv
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

import numpy as np

from llmfoundry_lite import companions
from llmfoundry_lite.bounded import read_json
from llmfoundry_lite.checkpoint.run_log import read_lines
from llmfoundry_lite.errors import ConfigError, DataError, join_with_and, mask_credentials, mask_urls, printable
from llmfoundry_lite.files import check_replaceable, write_atomically
from llmfoundry_lite.report.figure import Axis, Curve, Difference, plot_comparison, plot_run
from llmfoundry_lite.report.log import DEVICE_RATE, FLOPS, LOSS, RATE, SECONDS, TOKENS
from llmfoundry_lite.report.page import Additions, Facts, Section, build_sections, markdown, print_sections
from llmfoundry_lite.report.reading import NoBatchesError, Run, read_run
from llmfoundry_lite.report.segments import (
    changes_of,
    parse_prices,
    segment_facts,
    sum_segments,
    unused_prices,
    visible_spans,
)
from llmfoundry_lite.tables import csv_text

if TYPE_CHECKING:  # a report without samples needs no torch
    from llmfoundry_lite.models.mpt import MPT

AXIS_LABELS = {"batch": "batch", "tokens": "training tokens", "flops": "training FLOPs of the model"}
NUM_FINAL_LOSSES = 20
"""Training losses, counted from the last batch back, whose mean is reported as the training loss."""
NUM_PROMPTS = 3
"""Most prompts that are taken from the validation data."""
PROMPT_TOKENS = 96
"""Tokens at the beginning of a row in which a prompt is looked for."""
PROMPT_WORDS = 3
PROMPT_CHARACTERS = 30
"""Most words and most characters of a prompt that is taken from the validation data."""
MAX_NEW_TOKENS = 80
"""Length of a sample of text after its prompt."""
MAX_EARLIER_PARAMETERS = 50_000_000
"""Largest model whose earlier checkpoints are loaded too, to show how its texts have changed."""
MAX_BASELINE_TOKENS = 100_000_000
"""Largest training split on which the baselines are counted; they need all of it in memory."""
MAX_PROMPT_DATA_BYTES = 256 * 1024**2
"""Largest validation split from which prompts are taken; all of it is read."""


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


# ---------------------------------------------------------------------------------------------- a run's data


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFacts:
    """Statistics of the data set that a run was trained on. A value is None where that set cannot tell it."""

    baselines: dict[str, float] | None = None
    """Validation loss of a bigram and of a unigram model, in nats per token."""
    training_bytes_per_token: float | None = None
    validation_bytes_per_token: float | None = None
    note: str | None = None
    """Why a statistic is missing, if the data set cannot be read."""


def measure_data(run: Run) -> DataFacts:
    """Measure the data set that a run's configuration names, if `data prepare` made it and it is on this disk.

    The configuration and the data set may be written by anybody, so a value of a wrong type or a damaged file becomes
    a note rather than an error.
    """
    try:
        return measure_local_data(run.config or {})
    except (OSError, LookupError, ValueError, TypeError, AttributeError, ArithmeticError) as error:
        note = f"no baselines and no bits per byte: the data that config.yaml names cannot be read ({error!r})"
        return DataFacts(note=note)


def measure_local_data(config: dict[str, Any]) -> DataFacts:
    """Count bytes per token, and fit the baselines if both splits lie in one folder and the training split is small.

    config: the run's recorded configuration. Its `train_loader.dataset` and `eval_loader.dataset` name the two splits
    by `local` (a folder that `data prepare` made) and `split`.

    Raises an error of any of the kinds that `measure_data` catches if the configuration or summary.json is malformed.
    If only the shards cannot be read, the baselines are missing, and the note says so.
    """
    # Bytes per token come from the summary of the preparation, without reading any data.
    train = (config.get("train_loader") or {}).get("dataset")
    validation = (config.get("eval_loader") or {}).get("dataset")
    train_bytes_per_token = bytes_per_token_of(train)
    validation_bytes_per_token = bytes_per_token_of(validation)
    without_baselines = DataFacts(
        training_bytes_per_token=train_bytes_per_token, validation_bytes_per_token=validation_bytes_per_token
    )

    # Baselines are fitted to the training split, and only make sense for validation data with the same tokenizer. That
    # is certain if both splits were prepared together.
    if not train or not validation or train_bytes_per_token is None or validation_bytes_per_token is None:
        return without_baselines
    if train["local"] != validation["local"]:
        return without_baselines
    folder = Path(train["local"])
    if read_summary(folder)["splits"][train["split"]]["tokens"] > MAX_BASELINE_TOKENS:
        return without_baselines

    from llmfoundry_lite.data.baselines import measure_baselines

    vocab_size = config["model"]["vocab_size"]
    try:
        baselines = measure_baselines(folder / train["split"], folder / validation["split"], vocab_size)
    except (OSError, ValueError, LookupError) as error:  # its shards are gone, or damaged
        return replace(without_baselines, note=f"no baselines: {folder} cannot be read ({error})")
    return replace(without_baselines, baselines={"bigram": baselines.bigram, "unigram": baselines.unigram})


def bytes_per_token_of(dataset: dict[str, Any] | None) -> float | None:
    """Return the mean bytes of text per token of a split, from the summary.json that `data prepare` wrote.

    dataset: the configuration's block of the data set, with `local` and `split`.

    Bytes that the tokenizer cannot represent (`lost_bytes`) are not counted, because no token stands for them. Tokens
    that did not fill a sample (`remainder_tokens`) are counted, because `text_bytes` includes their text. A split of
    1,000 bytes of text with 240 tokens in samples, 10 left over, and 1 % lost has 0.99 * 1000 / 250 = 3.96.

    Returns None if there is no summary, or if it does not have the split.
    """
    if not dataset or not dataset.get("local"):
        return None
    summary = read_summary(Path(dataset["local"]))
    split_counts = summary["splits"].get(dataset.get("split") or "")
    lost_text = summary.get("lost_text")
    if not split_counts:
        return None

    # Lost text was counted on a part of the data, for both splits together, so only its fraction is used.
    kept_fraction = 1
    if lost_text:
        kept_fraction = 1 - lost_text["lost_bytes"] / max(lost_text["text_bytes"], 1)
    num_tokens = split_counts["tokens"] + split_counts["remainder_tokens"]
    return kept_fraction * split_counts["text_bytes"] / num_tokens


def read_summary(folder: Path) -> dict[str, Any]:
    """Read the summary.json that `data prepare` writes beside the splits. Without the file, return an empty summary."""
    file = folder / "summary.json"
    if not file.is_file():
        return {"splits": {}}
    return read_json(file, "a summary")


# ------------------------------------------------------------------------------------------- samples of text


def sample_texts(run: Run, prompts: Sequence[str], *, temperature: float, top_k: int) -> list[Facts]:
    """Let the run's model continue each prompt, as it is now and as it was earlier in the run.

    The run must have exported a model with its tokenizer into huggingface/ on this disk; otherwise there are no
    samples. If the export needs a companion that is not installed, the newest checkpoint is read instead. If there is
    none, a note is added to the run.

    Without `prompts`, words of the validation data are used, or an empty prompt. Returns a dictionary for each prompt:

        {"prompt": "import", "temperature": 0.7, "top_k": 40, "texts": [{"batch": 0, "text": "import qx…"}, …]}

    `texts` has the prompt with its continuation by the model after each batch at which one was available, oldest first.
    """
    export = Path(run.folder.url) / "huggingface"
    if run.folder.path_here is None or not (export / "tokenizer.json").is_file():
        return []

    import torch

    from llmfoundry_lite.evaluation.loaded import generate_text, model_of
    from llmfoundry_lite.evaluation.models import locate_and_load_model

    # Load the final model: the export, or the newest checkpoint with the export's tokenizer.
    cpu = torch.device("cpu")
    try:
        loaded = locate_and_load_model(str(export), device=cpu)
    except ConfigError as missing_companion:
        try:
            loaded = locate_and_load_model(run.folder.url, tokenizer=str(export), device=cpu)
        except DataError:
            run.notes.append(f"no texts: {missing_companion}")
            return []

    # Continue every prompt by each earlier model, and by the final one.
    sampling = {"temperature": temperature, "top_k": top_k}
    prompts = prompts or prompts_from_data(run, loaded.tokenizer) or ("",)
    samples: list[Facts] = [{"prompt": prompt, "texts": [], **sampling} for prompt in prompts]
    last_batch = int(run.log.batch[-1])
    final_model = model_of(loaded)
    for batch, model in [*load_earlier_models(run, final_model), (last_batch, final_model)]:
        for sample in samples:
            prompt = sample["prompt"]
            pieces = generate_text(model, loaded.tokenizer, prompt, MAX_NEW_TOKENS, **sampling)
            sample["texts"].append({"batch": batch, "text": prompt + "".join(pieces)})
    return samples


def prompts_from_data(run: Run, tokenizer: Any) -> list[str]:
    """Take up to NUM_PROMPTS prompts from the run's validation data, one from each third of its rows.

    Each is taken from the third's first row that has words; a third without any gives no prompt. Rows are decoded by
    `tokenizer`. Returns no prompts if the data is not on this disk, is larger than MAX_PROMPT_DATA_BYTES, or cannot be
    read.
    """
    dataset = ((run.config or {}).get("eval_loader") or {}).get("dataset") or {}
    folder = Path(dataset.get("local") or "", dataset.get("split") or "")
    if not folder.is_dir():
        return []
    if sum(file.stat().st_size for file in folder.iterdir()) > MAX_PROMPT_DATA_BYTES:
        return []

    from llmfoundry_lite.data.baselines import read_tokens

    try:
        tokens_nt = read_tokens(folder)  # [samples, tokens]
    except (OSError, ValueError, LookupError):  # no shards of tokens, or damaged ones
        return []

    prompts: list[str] = []
    num_parts = min(NUM_PROMPTS, len(tokens_nt))
    for part_nt in np.array_split(tokens_nt[:, :PROMPT_TOKENS], num_parts):
        for tokens_t in part_nt:
            prompt = extract_prompt(tokenizer.decode(tokens_t[tokens_t >= 0].tolist()))  # without padding
            if prompt:
                prompts.append(prompt)
                break
    return prompts


def extract_prompt(text: str) -> str:
    """Return the first PROMPT_WORDS words of the longest whole line in a row's text; "" if the row is blank.

    A row is cut from a longer text, so its first and last line, and its first and last word, may be incomplete. If no
    line between them has words, the row's own words are taken without the first and the last, or if that leaves none,
    with them. The prompt has at most PROMPT_CHARACTERS characters, because not all languages have spaces.

    "lf.x\n    return a + b\nclass Na" gives "return a +", and "ound the red house quic" gives "the red house".
    """
    whole_lines = text.splitlines()[1:-1]
    longest_line = max(whole_lines, key=lambda line: len(line.split()), default="")
    words = longest_line.split() or text.split()[1:-1] or text.split()

    # Wrapping cuts after the last word that fits, or within the first word if that alone is too long.
    wrapped_lines = wrap(" ".join(words[:PROMPT_WORDS]), PROMPT_CHARACTERS)
    return wrapped_lines[0] if wrapped_lines else ""


def load_earlier_models(run: Run, model: "MPT") -> Iterator[tuple[int, "MPT"]]:
    """Yield (batch, model) of earlier states of a run, to show how its texts have changed.

    These are the initial weights, at batch 0, and the checkpoint whose batch is nearest to a third of the last one.
    Initial weights are computed again, from the seed. They are left out if the run began from another run's weights
    (`load_path`). The checkpoint is left out if there is none before the last batch.

    `model` is the final one. If it has more than MAX_EARLIER_PARAMETERS, nothing is yielded, because loading it again
    takes long.
    """
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    if run.config is None or num_parameters > MAX_EARLIER_PARAMETERS:
        return

    import torch

    from llmfoundry_lite.evaluation.loaded import model_of
    from llmfoundry_lite.evaluation.models import find_all_checkpoints, locate_and_load_model, model_config_of
    from llmfoundry_lite.models.flops import count_parameters
    from llmfoundry_lite.models.initialise import initialise_weights
    from llmfoundry_lite.models.mpt import MPT

    # Compute the initial weights.
    checkpoints, _ = find_all_checkpoints(run.folder.url)
    # A checkpoint's configuration says how weights are initialised; an export's does not.
    config = model_config_of(checkpoints[-1]) if checkpoints else model.config
    has_own_initial_weights = not run.config.get("load_path")
    if has_own_initial_weights and count_parameters(config) <= MAX_EARLIER_PARAMETERS:
        initial_model = MPT(config).eval().requires_grad_(False)
        initialise_weights(initial_model, run.config["seed"])
        yield 0, initial_model

    # Load the checkpoint nearest to a third of the run.
    last_batch = int(run.log.batch[-1])
    earlier = [checkpoint for checkpoint in checkpoints if 0 < checkpoint.manifest.timestamp.batch < last_batch]
    if earlier:
        nearest = min(earlier, key=lambda checkpoint: abs(checkpoint.manifest.timestamp.batch - last_batch / 3))
        loaded = locate_and_load_model(nearest.url, device=torch.device("cpu"))
        yield nearest.manifest.timestamp.batch, model_of(loaded)
