"""Report of one run or several, for people and programs: tables, a figure, a sample of what the model writes.

    llmfoundry-lite report runs/mpt-1b                      loss.png, report.md, report.json beside it
    llmfoundry-lite report runs/moved runs/whole --out both  how far apart they are, batch by batch; report.png
    llmfoundry-lite report runs/mpt-1b --csv --format pdf   loss.pdf, and report.csv with a row for each batch

Reads what runs leave behind (metrics.jsonl, config.yaml, the newest checkpoint's manifest, huggingface/) and the data
set a run names, if that is on this disk; asks nothing of the training code.
"""

import csv
import json
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

import numpy as np

from llmfoundry_lite import companions
from llmfoundry_lite.bounded import read_json
from llmfoundry_lite.checkpoint.run_log import read_lines
from llmfoundry_lite.errors import ConfigError, DataError, mask_credentials, mask_urls, printable
from llmfoundry_lite.files import check_replaceable, write_atomically
from llmfoundry_lite.report.figure import Axis, Curve, Difference, plot_comparison, plot_run
from llmfoundry_lite.report.page import Additions, build_sections, markdown, print_sections
from llmfoundry_lite.report.reading import (
    DEVICE_RATE,
    FLOPS,
    LOSS,
    RATE,
    SECONDS,
    TOKENS,
    NoBatchesError,
    Run,
    read_run,
)
from llmfoundry_lite.report.segments import changes_of, parse_prices, segment_facts, spans_of, total, unused_prices
from llmfoundry_lite.tables import csv_text

if TYPE_CHECKING:  # a report without samples needs no torch
    from llmfoundry_lite.models.mpt import MPT

AXES = {"batch": "batch", "tokens": "training tokens", "flops": "training FLOPs of the model"}
TAIL = 20
"""Batches over which the last training loss is a mean."""
NUM_PROMPTS, PROMPT_TOKENS, PROMPT_WORDS, PROMPT_CHARACTERS = 3, 96, 3, 30
LOOK_BACK_PARAMETERS = 50_000_000
"""Parameters of a model, at most, whose earlier texts are shown beside its last."""
MAX_READ_BYTES = 256 * 1024**2
"""Size of validation data, at most, from which prompts are read."""


def report(
    places: Sequence[str],
    *,
    out: Path | None = None,
    prices: Sequence[str] = (),
    prompts: Sequence[str] = (),
    temperature: float = 0.7,
    top_k: int = 40,
    form: str = "png",
    x: str = "batch",
    smooth_batches: int | None = None,
    with_csv: bool = False,
) -> dict[str, Any]:
    """Print the tables and write figure, Markdown and JSON into `out`, by default the first run; returns the facts.

    `prompts`: by default, words of the validation data. `form` is png, pdf or svg, `x` one of AXES; `smooth_batches`
    is the width of the running mean, 1 for none.

    Of several runs, those that have not trained a batch yet are left out and named.

    Raises DataError if a place has no run, or no run has a batch, and ConfigError for a price that cannot be read.
    """
    by_device = parse_prices(prices)
    runs, left_out = read_runs(places)
    folder = out or runs[0].folder.path_here
    if folder is None:
        raise ConfigError(f"{runs[0].where} is not on this disk; say with --out DIR where the report goes")
    added: Additions = (companions.load_if_installed("llmfoundry_ops.report:Launches") or Additions)(runs, form)
    answer = ("report.md", f"loss.{form}", f"report.{form}", *added.answers, "report.csv")
    check_replaceable(folder / "report.json", [folder / name for name in answer])
    names = [run.name for run in runs]
    if len(set(names)) < len(names):
        names = [run.where for run in runs]
    written = samples(runs[0], prompts, temperature=temperature, top_k=top_k) if len(runs) == 1 else []
    note_on_relays(runs)
    facts: dict[str, Any] = {
        "runs": [describe(*each, by_device) for each in zip(runs, names, added.of_runs, strict=True)],
        "comparisons": [],
        "samples": written,
        "prices_per_device_hour": by_device,
        "figure": f"{'loss' if len(runs) == 1 else 'report'}.{form}",
        **added.facts,
    }
    if left_out:
        facts["left_out"] = left_out
    for name in unused_prices(runs, by_device):
        facts["runs"][0]["notes"].append(f"the price of {name!r} was not used: no segment ran on a device of that name")
    differences = add_comparisons(facts, runs)
    sections = build_sections(facts, added)

    folder.mkdir(parents=True, exist_ok=True)
    # The record first: by it the next report knows that the other files are its own, wherever this one ends.
    write_atomically(folder / "report.json", mask_urls(json.dumps(facts, indent=1, allow_nan=False)) + "\n")
    write_atomically(folder / "report.md", mask_credentials(markdown(sections)))
    draw_figures(folder, runs, facts, differences, x, None if smooth_batches is None else smooth_batches // 2)
    figures = [*added.draw(folder), folder / facts["figure"]]
    if with_csv:
        write_csv(folder / "report.csv", runs, names)

    print_sections(sections)
    for figure in figures:
        print(printable(f"plot: {figure}"))
    print(printable(f"the same as Markdown and JSON: {folder / 'report.md'}, {folder / 'report.json'}"))
    if with_csv:
        print(printable(f"every batch: {folder / 'report.csv'}"))
    for reason in left_out:
        print(printable(f"left out: {reason}"))
    return facts


def read_runs(places: Sequence[str]) -> tuple[list[Run], list[str]]:
    """Return the runs, and why others are left out: those of a sweep whose turn has not come have no batch yet.

    Raises DataError if a place has no run, and if no run has a batch.
    """
    runs: list[Run] = []
    without_batches: list[NoBatchesError] = []
    for where in places:
        try:
            runs.append(read_run(where))
        except NoBatchesError as error:
            without_batches.append(error)
    if not runs:
        raise without_batches[0]
    return runs, [str(error) for error in without_batches]


def note_on_relays(runs: Sequence[Run]) -> None:
    """Note where a run has moved between sites, and nobody here can tell of them."""
    if companions.is_installed("llmfoundry_ops"):
        return
    for run in runs:
        if run.folder.path_here is not None and (run.folder.path_here / "relay.jsonl").exists():
            missing = companions.missing("llmfoundry_ops", "relay.jsonl")
            run.notes.append(f"no sites and no allocations: {missing}")


def add_comparisons(facts: dict[str, Any], runs: Sequence[Run]) -> list[Difference]:
    """Compare each run with the first, add the comparisons to `facts`, and return what a figure shows of them."""
    names = [run["name"] for run in facts["runs"]]
    pairs = [compare_runs(runs[0], run, (names[0], name)) for run, name in zip(runs[1:], names[1:], strict=True)]
    facts["comparisons"] = [comparison for comparison, _ in pairs]
    return [difference for _, difference in pairs]


def draw_figures(
    folder: Path,
    runs: Sequence[Run],
    facts: dict[str, Any],
    differences: Sequence[Difference],
    x: str,
    reach: int | None,
) -> None:
    """Draw `facts["figure"]`: one run, or the `differences` of several from the first."""
    figure, first, is_alone = folder / facts["figure"], facts["runs"][0], len(runs) == 1
    names = [run["name"] for run in facts["runs"]]
    curves = [curve_of(run, its, x, is_alone=is_alone) for run, its in zip(runs, facts["runs"], strict=True)]
    spans = [spans_of(run["segments"]) for run in facts["runs"]]
    if not is_alone:
        plot_comparison(figure, curves, differences, spans, title=" and ".join(names), reach=reach)
        return
    plot_run(figure, curves[0], spans[0], title=runs[0].name, baselines=first["baselines"], reach=reach)


def write_csv(path: Path, runs: Sequence[Run], names: Sequence[str]) -> None:
    """Write a row for each batch and run, with all that the log says of it; dead branches are left out."""
    keys = dict.fromkeys(("run", "batch", "launch"))
    for run in runs:
        for _, record in read_lines(run.log.lines):
            keys |= dict.fromkeys(record)
    with path.open("w", newline="", encoding="utf-8", errors="backslashreplace") as file:
        writer = csv.writer(file)
        writer.writerow(map(csv_text, keys))
        for run, name in zip(runs, names, strict=True):
            for (_, record), launch in zip(read_lines(run.log.lines), run.log.launch.tolist(), strict=True):
                values = {**record, "run": name, "launch": launch}
                cells = (values.get(key, "") for key in keys)
                writer.writerow(csv_text(cell) if isinstance(cell, str) else cell for cell in cells)


# ------------------------------------------------------------------------------------------------ several runs


def compare_runs(first: Run, other: Run, names: tuple[str, str]) -> tuple[dict[str, Any], Difference]:
    """Compare losses and data digests over the batches that both have. Signed differences are `other` less `first`."""
    a, b = first.log, other.log
    batches, in_a, in_b = np.intersect1d(a.batch, b.batch, assume_unique=True, return_indices=True)
    differences = b.numbers(LOSS)[in_b] - a.numbers(LOSS)[in_a]
    validation = b.validation[in_b] - a.validation[in_a]
    absolute = np.abs(differences)
    finite, evaluated = np.flatnonzero(np.isfinite(absolute)), np.flatnonzero(np.isfinite(validation))
    at = finite[np.argmax(absolute[finite])] if len(finite) else None
    last = finite[-1] if len(finite) else None
    digests = [(a.digest[i], b.digest[j]) for i, j in zip(in_a.tolist(), in_b.tolist(), strict=True)]
    known = [(batch, *pair) for batch, pair in zip(batches.tolist(), digests, strict=True) if None not in pair]
    parted_at = next((batch for batch, one, two in known if one != two), None)
    facts = {
        "first": names[0],
        "other": names[1],
        "num_common": len(batches),
        "num_compared": len(finite),  # both losses are finite
        "not_finite_in_one": sorted((set(a.not_finite) ^ set(b.not_finite)) & set(batches.tolist())),
        "num_equal": int((absolute == 0).sum()),  # to the last bit
        "max_absolute": None if at is None else float(absolute[at]),
        "max_absolute_batch": None if at is None else int(batches[at]),
        "mean_absolute": float(absolute[finite].mean()) if len(finite) else None,
        "final_batch": None if last is None else int(batches[last]),
        "final_difference": None if last is None else float(differences[last]),
        "num_digests": len(known),
        "digests_part_at": parted_at,
        "validation_batch": int(batches[evaluated[-1]]) if len(evaluated) else None,
        "validation_difference": float(validation[evaluated[-1]]) if len(evaluated) else None,
    }
    return facts, Difference(name=names[1], batches=batches, absolute=absolute, digests_part_at=parted_at)


# --------------------------------------------------------------------------------------------------- one run


def describe(run: Run, name: str, added: dict[str, Any], prices: dict[str, float]) -> dict[str, Any]:
    log = run.log
    trained = log.batch > 0
    losses, validation = finite(log.numbers(LOSS)), finite(log.validation)
    tokens, rates = finite(log.numbers(TOKENS)), finite(log.numbers(RATE))
    evaluated = log.batch[np.isfinite(log.validation)]
    try:
        baselines, bytes_per_token = measure_data(run)
    except (OSError, LookupError, ValueError, TypeError, AttributeError, ArithmeticError) as error:
        baselines, bytes_per_token = None, {"training": None, "validation": None}
        run.notes.append(
            f"no baselines and no bits per byte: the data that config.yaml names cannot be read ({error!r})"
        )
    segments = segment_facts(run, prices)
    return {
        "run": run.where,
        "name": name,
        "num_batches": int(trained.sum()),
        "first_batch": int(log.batch[0]),
        "last_batch": int(log.batch[-1]),
        "num_launches": log.num_launches,
        "tokens": int(tokens[-1]) if len(tokens) else None,
        "tokens_per_second": float(rates[-1]) if len(rates) else None,
        "training_seconds": float(np.nansum(log.numbers(SECONDS))),
        "training_loss": float(losses[-TAIL:].mean()) if len(losses) else None,
        "training_loss_batches": len(losses[-TAIL:]),
        "validation_loss": float(validation[-1]) if len(validation) else None,
        "validation_batch": int(evaluated[-1]) if len(evaluated) else None,
        "baselines": baselines,
        "bytes_per_token": bytes_per_token["validation"],
        "training_bytes_per_token": bytes_per_token["training"],
        "not_finite": log.not_finite,
        "dead_branches": [branch.as_dict() for branch in log.dead],
        **added,
        "save_interval": (run.config or {}).get("save_interval"),
        "segments_from": run.segments_from,
        "state_digest": run.state_digest,
        "segments": segments,
        "total": total(segments),
        "notes": list(run.notes),
    }


def finite(values: np.ndarray) -> np.ndarray:
    return values[np.isfinite(values)]


def curve_of(run: Run, facts: dict[str, Any], x: str, *, is_alone: bool) -> Curve:
    """Build the curve of a run; one that is drawn alone has its dead branches and changes, too."""
    log = run.log
    evaluated = np.isfinite(log.validation)
    return Curve(
        name=facts["name"],
        batches=log.batch,
        losses=log.numbers(LOSS),
        tokens_per_second=log.numbers(RATE),
        eval_batches=log.batch[evaluated],
        eval_losses=log.validation[evaluated],
        not_finite=log.not_finite,
        dead=[(branch.batch, branch.numbers(LOSS)) for branch in log.dead] if is_alone else (),
        changes=changes_of(facts["segments"]) if is_alone else (),
        axis=axis_of(run, x),
    )


def axis_of(run: Run, x: str) -> Axis:
    """Place batches by tokens trained after each, or these times the FLOPs of one, by the run's own account."""
    log = run.log
    if x == "batch":
        return Axis()
    totals, key = log.numbers(TOKENS), TOKENS
    if x == "flops":
        with np.errstate(divide="ignore", invalid="ignore"):
            of_a_token = finite(log.numbers(FLOPS) / log.numbers(DEVICE_RATE))
        totals, key = totals * (np.median(of_a_token) if len(of_a_token) else np.nan), FLOPS
    if not np.isfinite(totals).any():
        raise ConfigError(f"--x {x}: the log of {run.where} has no {key}; --x batch needs none")
    return Axis(AXES[x], log.batch, totals)


def measure_data(run: Run) -> tuple[dict[str, float] | None, dict[str, float | None]]:
    """Return baselines, and bytes per token for training and validation; None unless the data set is ours and local.

    Baselines only if the set is small and both splits are of one preparation.
    """
    config = run.config or {}
    train, validation = ((config.get(key) or {}).get("dataset") for key in ("train_loader", "eval_loader"))
    bytes_per_token = {"training": bytes_per_token_of(train), "validation": bytes_per_token_of(validation)}
    if not train or not validation or None in bytes_per_token.values() or train["local"] != validation["local"]:
        return None, bytes_per_token
    folder = Path(train["local"])
    if summary_of(folder)["splits"][train["split"]]["tokens"] > 100_000_000:
        return None, bytes_per_token

    from llmfoundry_lite.data.baselines import measure_baselines

    vocab_size = config["model"]["vocab_size"]
    try:
        baselines = measure_baselines(folder / train["split"], folder / validation["split"], vocab_size)
    except (OSError, ValueError, LookupError) as error:  # its shards are gone, or damaged
        run.notes.append(f"no baselines: {folder} cannot be read ({error})")
        return None, bytes_per_token
    return {"bigram": baselines.bigram, "unigram": baselines.unigram}, bytes_per_token


def bytes_per_token_of(dataset: dict[str, Any] | None) -> float | None:
    """Count bytes of the text that was tokenised for this split, less those that its tokenizer loses."""
    if not dataset or not dataset.get("local"):
        return None
    folder = Path(dataset["local"])
    summary = summary_of(folder)
    counts, loss = summary["splits"].get(dataset.get("split") or ""), summary.get("lost_text")
    if not counts:
        return None
    kept = 1 - loss["lost_bytes"] / max(loss["text_bytes"], 1) if loss else 1
    return kept * counts["text_bytes"] / (counts["tokens"] + counts["remainder_tokens"])


def summary_of(folder: Path) -> dict[str, Any]:
    """Return what `data prepare` wrote beside the splits; without it, that there are none."""
    file = folder / "summary.json"
    return read_json(file, "a summary") if file.is_file() else {"splits": {}}


# ------------------------------------------------------------------------------------------- samples of text


def samples(run: Run, prompts: Sequence[str], max_new_tokens: int = 80, **sampling: Any) -> list[dict[str, Any]]:
    """Return what the exported model writes after each prompt, and what it wrote before; nothing if none was exported.

    Where a companion would read the export, the newest checkpoint is read. Without one there is a note.

    `sampling`: temperature, top_k.
    """
    folder = Path(run.folder.url) / "huggingface"
    if run.folder.path_here is None or not (folder / "tokenizer.json").is_file():
        return []

    import torch

    from llmfoundry_lite.evaluation.loaded import generate_text, model_of
    from llmfoundry_lite.evaluation.models import load_subject

    cpu = torch.device("cpu")
    try:
        subject = load_subject(str(folder), device=cpu)
    except ConfigError as missing:
        try:
            subject = load_subject(run.folder.url, tokenizer=str(folder), device=cpu)
        except DataError:
            run.notes.append(f"no texts: {missing}")
            return []
    prompts = prompts or first_words(run, subject.tokenizer) or ("",)
    found = [{"prompt": prompt, "texts": [], **sampling} for prompt in prompts]
    for batch, model in [*earlier_models(run, model_of(subject)), (int(run.log.batch[-1]), model_of(subject))]:
        for sample in found:
            pieces = generate_text(model, subject.tokenizer, sample["prompt"], max_new_tokens, **sampling)
            sample["texts"].append({"batch": batch, "text": sample["prompt"] + "".join(pieces)})
    return found


def first_words(run: Run, tokenizer: Any) -> list[str]:
    """Return words of each third of the validation data, if that is small and here: of its first row that has any."""
    dataset = ((run.config or {}).get("eval_loader") or {}).get("dataset") or {}
    folder = Path(dataset.get("local") or "", dataset.get("split") or "")
    if not folder.is_dir() or sum(file.stat().st_size for file in folder.iterdir()) > MAX_READ_BYTES:
        return []

    from llmfoundry_lite.data.baselines import read_tokens

    try:
        tokens_nt = read_tokens(folder)
    except (OSError, ValueError, LookupError):  # no shards of tokens, or damaged ones
        return []
    found = []
    for part in np.array_split(tokens_nt[:, :PROMPT_TOKENS], min(NUM_PROMPTS, len(tokens_nt))):
        prompts = (prompt_in(tokenizer.decode(row.tolist())) for row in part)
        found += islice(filter(None, prompts), 1)
    return found


def prompt_in(text: str) -> str:
    """Return the first words of a row's longest whole line, or of the row if none is whole; "" if it is blank.

    A row may begin and end within a line and within a word, so both ends are left out. Not all languages have spaces.
    """
    line = max(text.splitlines()[1:-1], key=lambda line: len(line.split()), default="")
    words = line.split() or text.split()[1:-1] or text.split()
    return "".join(wrap(" ".join(words[:PROMPT_WORDS]), PROMPT_CHARACTERS)[:1])


def earlier_models(run: Run, model: "MPT") -> Iterator[tuple[int, "MPT"]]:
    """Yield the model as it was after fewer batches: its initial weights, and the save nearest a third of the run.

    Nothing for a large model, whose weights would have to be read once more.
    """
    if run.config is None or sum(p.numel() for p in model.parameters()) > LOOK_BACK_PARAMETERS:
        return

    import torch

    from llmfoundry_lite.evaluation.loaded import model_of
    from llmfoundry_lite.evaluation.models import find_all_checkpoints, load_subject, model_config_of
    from llmfoundry_lite.models.flops import count_parameters
    from llmfoundry_lite.models.initialise import initialise_weights
    from llmfoundry_lite.models.mpt import MPT

    saves = find_all_checkpoints(run.folder.url)[0]
    config = model_config_of(saves[-1]) if saves else model.config  # an export does not say how weights are drawn
    if not run.config.get("load_path") and count_parameters(config) <= LOOK_BACK_PARAMETERS:
        initial = MPT(config).eval().requires_grad_(False)
        initialise_weights(initial, run.config["seed"])
        yield 0, initial
    last = int(run.log.batch[-1])
    saves = [save for save in saves if 0 < save.manifest.timestamp.batch < last]
    if saves:
        nearest = min(saves, key=lambda save: abs(save.manifest.timestamp.batch - last / 3))
        subject = load_subject(nearest.url, device=torch.device("cpu"))
        yield nearest.manifest.timestamp.batch, model_of(subject)
