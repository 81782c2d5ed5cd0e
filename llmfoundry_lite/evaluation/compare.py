"""Results of several models -> what can be said of their differences, item by item, each against the first.

Owns which results may be compared at all (the same items, prompts and scoring, which each task's fingerprint vouches
for), and the words for what was found: a difference is called one when its p, corrected for the number of tests, is
below 0.05, and not otherwise.

Accuracies of models with different tokenizers: `acc_per_token` divides an answer's log-probability by its number of
tokens, so two tokenizers can make one distribution over texts choose differently. `acc_norm` (per character) is
compared in its place; the sum, exact answers and bits per byte are of texts as well.
"""

import json
import math
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from llmfoundry_lite.errors import DataError
from llmfoundry_lite.evaluation.paired import (
    NUM_RESAMPLES,
    Z_POWER,
    Z_TWO_SIDED,
    Floats,
    bootstrap_sums,
    documents_needed,
    flipped_sums,
    holm,
    interval,
    items_needed,
    mcnemar_p,
    p_among,
    sign_flip_p,
)

Record = dict[str, Any]
Point = tuple[float, float, float, bool]

SIGNIFICANT = 0.05
SEED = 17
ACCURACIES = ("acc_per_token", "acc", "acc_norm")
BITS = "bits_per_byte"


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A result and its items."""

    name: str
    path: Path
    facts: Record
    """The JSON."""
    items: dict[str, list[Record]]
    """Of each task, in the file's order."""


@dataclass(slots=True, kw_only=True)
class Paired:
    """One number of two models over the items that both were asked; differences are `other` less `first`."""

    task: str
    metric: str
    n: int
    """Items; documents or windows of text for bits per byte."""
    first: float
    other: float
    difference: float
    low: float | None
    """95 % interval; None when it cannot be had."""
    high: float | None
    wins: int
    """Items on which `other` did better."""
    losses: int
    ties: int
    p: float
    test: str
    p_corrected: float = math.nan
    needed: int | None
    """Items to find a difference of 0.01 with 80 % power."""
    detectable: float | None
    """The difference that this many items find with 80 % power."""

    @property
    def is_detected(self) -> bool:
        return self.p_corrected < SIGNIFICANT

    @property
    def is_better(self) -> bool:
        """Whether `other` has the better number."""
        return (self.difference < 0) == (self.metric == BITS)

    @property
    def digits(self) -> int:
        return 4 if self.metric == BITS else 3

    @property
    def margin(self) -> str:
        """The difference without its sign, as text."""
        text = f"{abs(self.difference):.{self.digits}f}"
        return (
            text if self.low is None or self.high is None else f"{text} ± {(self.high - self.low) / 2:.{self.digits}f}"
        )

    @property
    def verdict(self) -> str:
        if self.is_detected:
            return f"{'better' if self.is_better else 'worse'} by {self.margin}"
        return "the same on every item" if self.ties == self.n else "no detectable difference"


@dataclass(slots=True, kw_only=True)
class Pair:
    """One result against the first."""

    first: str
    other: str
    tasks: list[Paired]
    """By each task's main metric."""
    mean: Paired | None
    """Of the accuracies, each task counting the same."""
    more: list[Paired]
    """By the other metrics, if they were asked for."""
    notes: list[str] = field(default_factory=list)

    @property
    def sentence(self) -> str:
        if self.mean is None:
            return ""
        where = f"on the {self.mean.task} (p {p_text(self.mean.p_corrected)})"
        if not self.mean.is_detected:
            if self.mean.detectable is None:
                return f"{self.other} and {self.first}: the same answers {where}"
            least = f"one of {self.mean.detectable:.3f} would be found four times in five"
            return f"{self.other} and {self.first}: no detectable difference {where}; {least}"
        direction = "better" if self.mean.is_better else "worse"
        return f"{self.other} is {direction} than {self.first} by {self.mean.margin} {where}"


def compare(results: Sequence[Loaded], *, skip: Sequence[str] = (), all_metrics: bool = False) -> list[Pair]:
    """Each result against the first. Raises DataError for results that cannot be compared, naming task and reason."""
    known = {task for result in results for task in result.items}
    for task in skip:
        if task not in known:
            raise DataError(f"--skip {task}: no result has that task; they have {', '.join(sorted(known))}")
    pairs = [_compare_two(results[0], other, skip, all_metrics) for other in results[1:]]
    # Whoever looks at all of these will look at the best of them.
    for family in (
        [paired for pair in pairs for paired in pair.tasks],
        [pair.mean for pair in pairs if pair.mean is not None],
        [paired for pair in pairs for paired in pair.more],
    ):
        for paired, p in zip(family, holm([paired.p for paired in family]), strict=True):
            paired.p_corrected = p
    return pairs


def _compare_two(first: Loaded, other: Loaded, skip: Sequence[str], all_metrics: bool) -> Pair:
    common = [task for task in first.items if task in other.items and task not in skip]
    if not common:
        raise DataError(
            f"{first.name} and {other.name} have no task in common: {', '.join(first.items)} against "
            f"{', '.join(other.items)}"
        )
    texts_alone = has_other_tokenizer(first, other)
    for task in common:
        refuse_if_different(task, first, other)
    tasks = [_pair_task(task, first, other, main_metric(first, task, texts_alone)) for task in common]
    more = [
        _pair_task(task.task, first, other, metric)
        for task in tasks
        for metric in ACCURACIES
        if all_metrics and metric != task.metric and metric in first.facts["tasks"][task.task]
        if not (texts_alone and metric == "acc_per_token")
    ]
    accuracies = [task for task in tasks if task.metric != BITS]
    return Pair(
        first=first.name,
        other=other.name,
        tasks=tasks,
        mean=_pair_mean(accuracies, first, other) if len(accuracies) > 1 else None,
        more=more,
        notes=notes_on(first, other, common, skip),
    )


def has_other_tokenizer(first: Loaded, other: Loaded) -> bool:
    ours, theirs = first.facts.get("tokenizer"), other.facts.get("tokenizer")
    return bool(ours and theirs) and ours != theirs


def main_metric(result: Loaded, task: str, texts_alone: bool) -> str:
    metric: str = result.facts["tasks"][task]["metric"]
    return "acc_norm" if texts_alone and metric == "acc_per_token" else metric


# ---------------------------------------------------------------------------------------------------------- numbers


def _pair_task(task: str, first: Loaded, other: Loaded, metric: str) -> Paired:
    if metric == BITS:
        return _pair_texts(task, first, other)
    a, b = _answers(task, first, other, metric)
    difference, n = b - a, len(a)
    wins, losses = int((difference > 0).sum()), int((difference < 0).sum())
    mean = float(difference.mean())
    low, high = (
        interval(bootstrap_sums(difference[:, None], _generator(task, metric))[:, 0] / n) if n > 1 else (None, None)
    )
    return Paired(
        task=task,
        metric=metric,
        n=n,
        first=float(a.mean()),
        other=float(b.mean()),
        difference=mean,
        low=low,
        high=high,
        wins=wins,
        losses=losses,
        ties=n - wins - losses,
        p=mcnemar_p(wins, losses),
        test="McNemar",
        needed=items_needed((wins + losses) / n),
        detectable=_detectable(float(difference.std()) / math.sqrt(n)),
    )


def _answers(task: str, first: Loaded, other: Loaded, metric: str) -> tuple[Floats, Floats]:
    """(of the first, of the other), over the items that both have."""
    a = {item["index"]: item[metric] for item in first.items[task]}
    b = {item["index"]: item[metric] for item in other.items[task]}
    common = [index for index in a if index in b]
    if not common:
        raise DataError(f"{task}: {first.name} and {other.name} were asked no item in common")
    return np.array([a[i] for i in common], float), np.array([b[i] for i in common], float)


def _pair_texts(task: str, first: Loaded, other: Loaded) -> Paired:
    """Bits per byte, resampled by document; within a single document by window."""
    a, b, _ = text_units(task, first, other)
    ours, theirs = _bits(a.sum(axis=0)), _bits(b.sum(axis=0))
    n = len(a)
    # `added`: what each unit adds to the difference; `residual`: beyond what the mean rates give for its bytes, which
    # is how far a ratio of sums moves with the unit.
    share_a, share_b = a / a[:, 1].mean(), b / b[:, 1].mean()
    added = (share_b[:, 0] - share_a[:, 0]) / math.log(2)
    residual = added - (theirs * share_b[:, 1] - ours * share_a[:, 1])
    rates = b[:, 0] / b[:, 1] - a[:, 0] / a[:, 1]
    low, high, p = None, None, 1.0
    if n > 1:
        draws = bootstrap_sums(np.concatenate([a, b], axis=1), _generator(task, BITS))
        low, high = interval(_bits(draws[:, 2:]) - _bits(draws[:, :2]))
        p = sign_flip_p(added, _generator(task, "flips"))
    deviation = float(residual.std(ddof=1)) if n > 1 else 0.0
    return Paired(
        task=task,
        metric=BITS,
        n=n,
        first=float(ours),
        other=float(theirs),
        difference=float(theirs - ours),
        low=low,
        high=high,
        wins=int((rates < 0).sum()),
        losses=int((rates > 0).sum()),
        ties=int((rates == 0).sum()),
        p=p,
        test="sign flips",
        needed=documents_needed(deviation) if n > 1 else None,
        detectable=_detectable(deviation / math.sqrt(n)),
    )


def text_units(task: str, first: Loaded, other: Loaded) -> tuple[Floats, Floats, str]:
    """((n, [nats, bytes]) of the first, of the other, what the n are)"""
    rows = [[_text_row(item) for item in result.items[task]] for result in (first, other)]
    documents = [sorted({item["index"] for item in result.items[task]}) for result in (first, other)]
    if documents[0] != documents[1]:
        raise DataError(f"{task}: {first.name} and {other.name} did not read the same documents")
    same_windows = [row[1] for row in rows[0]] == [row[1] for row in rows[1]]
    if len(documents[0]) == 1 and same_windows and not has_other_tokenizer(first, other):
        return np.array(rows[0]), np.array(rows[1]), "windows"
    return _by_document(first.items[task]), _by_document(other.items[task]), "documents"


def _text_row(item: Record) -> tuple[float, float]:
    return -item["log_probability"][0], max(item["num_characters"][0], 1)


def _by_document(items: Sequence[Record]) -> Floats:
    sums: dict[int, list[float]] = {}
    for item in items:
        nats, num_bytes = _text_row(item)
        known = sums.setdefault(item["index"], [0.0, 0.0])
        known[0] += nats
        known[1] += num_bytes
    return np.array([sums[index] for index in sorted(sums)])


def _bits(nats_and_bytes: Floats) -> Floats:
    return nats_and_bytes[..., 0] / nats_and_bytes[..., 1] / math.log(2)


def _pair_mean(tasks: Sequence[Paired], first: Loaded, other: Loaded) -> Paired:
    """The mean of the tasks' accuracies. Tasks are strata; those that differ in their number of examples alone ask the
    same items, which are therefore drawn together."""
    strata: dict[str, dict[int, float]] = {}
    for task in tasks:
        stratum = strata.setdefault(task.task.rsplit("/", 1)[0], {})
        theirs = {item["index"]: item[task.metric] for item in other.items[task.task]}
        for item in first.items[task.task]:
            if (index := item["index"]) in theirs:
                added = (theirs[index] - item[task.metric]) / task.n / len(tasks)
                stratum[index] = stratum.get(index, 0.0) + added
    # Rounding, so that sums of the same parts count as one value.
    values: dict[str, Floats] = {
        name: np.array([round(added, 15) for added in stratum.values()], np.float64) for name, stratum in strata.items()
    }
    draws, flips = np.zeros(NUM_RESAMPLES), np.zeros(NUM_RESAMPLES)
    for name, added in values.items():
        draws += bootstrap_sums(added[:, None], _generator(name, "mean"))[:, 0]
        flips += flipped_sums(added, _generator(name, "flips of the mean"))
    difference = sum(task.difference for task in tasks) / len(tasks)
    low, high = interval(draws)
    return Paired(
        task=f"mean of {len(tasks)} tasks",
        metric="mean",
        n=sum(task.n for task in tasks),
        first=sum(task.first for task in tasks) / len(tasks),
        other=sum(task.other for task in tasks) / len(tasks),
        difference=difference,
        low=low,
        high=high,
        wins=sum(task.wins for task in tasks),
        losses=sum(task.losses for task in tasks),
        ties=sum(task.ties for task in tasks),
        p=p_among(flips, difference),
        test="sign flips",
        needed=None,
        detectable=_detectable(float(draws.std())),
    )


def _detectable(error: float) -> float | None:
    return (Z_TWO_SIDED + Z_POWER) * error or None


def _generator(task: str, purpose: str) -> np.random.Generator:
    """A function of task and purpose, so that one more task or result changes no other number."""
    return np.random.default_rng([SEED, zlib.crc32(f"{task} {purpose}".encode())])


# --------------------------------------------------------------------------------------------------- may we compare


def refuse_if_different(task: str, first: Loaded, other: Loaded) -> None:
    """Raises DataError where the two were not asked the same, in the same way."""
    a, b = first.facts["tasks"][task], other.facts["tasks"][task]
    found = [
        f"{key} {a.get(key)!r} against {b.get(key)!r}"
        for key in ("type", "num_fewshot", "tokenization", "metric")
        if a.get(key) != b.get(key)
    ]
    settings = {**(a.get("settings") or {}), **(b.get("settings") or {})}
    if a.get("settings") and b.get("settings"):
        for key in settings:
            ours, theirs = a["settings"].get(key), b["settings"].get(key)
            if ours != theirs and not any(text.startswith(f"{key} ") for text in found):
                found.append(f"{key} {ours!r} against {theirs!r}")
    if a.get("data_fingerprint") != b.get("data_fingerprint"):
        found.append(f"the data ({a['n']:,} items against {b['n']:,})")
    is_text = a.get("type") == "perplexity"
    if not found and a["fingerprint"] != b["fingerprint"] and not (is_text and has_other_tokenizer(first, other)):
        found.append(f"fingerprint {a['fingerprint']} against {b['fingerprint']}")
    if found:
        raise DataError(
            f"{task}: {first.name} and {other.name} were not asked the same: {'; '.join(found)}; evaluate both with "
            f"one task file, or leave the task out: --skip {task}"
        )
    if is_text and has_other_tokenizer(first, other) and a["fingerprint"] == b["fingerprint"]:
        sizes = [[item["num_characters"] for item in result.items[task]] for result in (first, other)]
        if sizes[0] != sizes[1]:
            raise DataError(
                f"{task}: the data are token ids, and {first.name} and {other.name} have different tokenizers; "
                f"evaluate both on a text file, or leave the task out: --skip {task}"
            )


def notes_on(first: Loaded, other: Loaded, common: Sequence[str], skip: Sequence[str]) -> list[str]:
    """What a reader of the numbers must know."""
    names = f"{first.name} and {other.name}"
    notes = []
    budgets = [result.facts.get("num_tokens_trained") for result in (first, other)]
    if None not in budgets and budgets[0] != budgets[1]:
        notes.append(
            f"warning: token budgets differ: {first.name} {budgets[0]:,} tokens, {other.name} {budgets[1]:,}; "
            "more training is one reason to be better"
        )
    sizes = [result.facts.get("num_parameters") for result in (first, other)]
    if None not in sizes and sizes[0] != sizes[1]:
        notes.append(f"warning: sizes differ: {first.name} {sizes[0]:,} parameters, {other.name} {sizes[1]:,}")
    if has_other_tokenizer(first, other):
        notes.append(
            f"{names} have different tokenizers: acc_norm (per character) stands for acc_per_token, which depends on "
            "how a tokenizer divides an answer"
        )
    precisions = [result.facts.get("precision") for result in (first, other)]
    if precisions[0] != precisions[1]:
        notes.append(f"precision differs: {first.name} {precisions[0]}, {other.name} {precisions[1]}")
    save_ids = [result.facts.get("save_id") for result in (first, other)]
    if save_ids[0] is not None and save_ids[0] == save_ids[1]:
        notes.append(f"{names} are the same checkpoint")
    for one, two in ((first, other), (other, first)):
        if alone := [task for task in one.items if task not in two.items]:
            notes.append(f"only in {one.name}, left out: {', '.join(alone)}")
    if skip:
        notes.append(f"left out, as asked: {', '.join(skip)}")
    for task in common:
        notes += [f"{task}: {note}" for note in _notes_on_task(task, first, other)]
    return notes


def _notes_on_task(task: str, first: Loaded, other: Loaded) -> list[str]:
    notes = []
    records = [result.facts["tasks"][task] for result in (first, other)]
    if limit := (records[0].get("settings") or {}).get("limit"):
        notes.append(f"only its first {limit:,} items (limit): a try, not a result")
    trimmed = [record.get("num_trimmed", 0) for record in records]
    if trimmed[0] != trimmed[1]:
        notes.append(f"contexts cut to fit: {trimmed[0]:,} of {first.name}, {trimmed[1]:,} of {other.name}")
    if records[0]["metric"] == BITS:
        n, unit = len((found := text_units(task, first, other))[0]), found[2]
        if unit == "windows":
            notes.append("one document: its windows are resampled, as if they were independent")
        elif n == 1:
            notes.append("one document: no interval")
        return notes
    asked = [{item["index"] for item in result.items[task]} for result in (first, other)]
    if alone := len(asked[0] ^ asked[1]):
        notes.append(f"{alone:,} items that only one could be asked are left out")
    if len(asked[0] & asked[1]) == 1:
        notes.append("one item: no interval")
    return notes


# ------------------------------------------------------------------------------------------------------------ files


def load_results(paths: Sequence[Path]) -> list[Loaded]:
    """Raises DataError for a file that is no result, or whose items are missing, torn or another evaluation's."""
    for i, path in enumerate(paths):
        if any(path.resolve() == earlier.resolve() for earlier in paths[:i]):
            raise DataError(f"{path} is given twice; name another result to compare it with")
    facts = [read_facts(path) for path in paths]
    names = [str(fact["model"]) for fact in facts]
    if len(set(names)) < len(names):
        names = _tell_apart(paths)
    return [
        Loaded(name=name, path=path, facts=fact, items=read_items(path, fact))
        for name, path, fact in zip(names, paths, facts, strict=True)
    ]


def read_facts(path: Path) -> Record:
    if path.is_dir():
        found = sorted(file.name for file in path.glob("*.json"))
        raise DataError(f"{path} is a folder; name a result in it: {', '.join(found) or 'it has none'}")
    if path.name.endswith(".jsonl"):
        raise DataError(f"{path}: name the result, MODEL.json; its items are found beside it")
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(f"{path} does not exist; expected a MODEL.json that scripts/eval.py has written") from None
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(facts, dict) or "model" not in facts or not isinstance(facts.get("tasks"), dict):
        raise DataError(
            f"{path} is no result: expected a MODEL.json with 'model' and 'tasks', as scripts/eval.py writes"
        )
    for task, record in facts["tasks"].items():
        expected = ("n", "metric", "fingerprint", record.get("metric") if isinstance(record, dict) else "metric")
        if missing := [key for key in expected if not isinstance(record, dict) or key not in record]:
            raise DataError(f"{path}: {task} has no {missing[0]!r}; evaluate it again with redo=true")
    if not facts["tasks"]:
        raise DataError(f"{path} has no finished task")
    return facts


def read_items(path: Path, facts: Record) -> dict[str, list[Record]]:
    """The items of every task, checked against the numbers in the result."""
    beside = path.with_name(f"{path.stem}.items.jsonl")
    try:
        lines = beside.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        reason = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read ({error})"
        raise DataError(
            f"{beside} {reason}, and results are compared item by item; keep it beside {path.name}, or evaluate again"
        ) from None
    items: dict[str, list[Record]] = {task: [] for task in facts["tasks"]}
    torn = 0
    for number, line in enumerate(lines, start=1):
        try:
            item = json.loads(line)
            items.get(item["task"], []).append(item)
        except (ValueError, KeyError, TypeError):
            torn = torn or number
    for task, record in facts["tasks"].items():
        if len(items[task]) != record["n"]:
            hint = f" (line {torn} is torn)" if torn else ""
            raise DataError(
                f"{beside} has {len(items[task]):,} of the {record['n']:,} items of {task}{hint}; evaluate again: "
                "what is whole is not done twice"
            )
        _check_items(beside, task, record, items[task])
    return items


def _check_items(beside: Path, task: str, record: Record, items: Sequence[Record]) -> None:
    metric = record["metric"]
    try:
        if metric == BITS:
            found = float(_bits(_by_document(items).sum(axis=0)))
        else:
            found = sum(item[metric] for item in items if item["index"] >= 0) / len(items)
    except (KeyError, TypeError, IndexError, ZeroDivisionError):
        raise DataError(
            f"{beside}: the items of {task} lack {metric} or index; evaluate again with redo=true"
        ) from None
    if not math.isclose(found, record[metric], rel_tol=1e-4, abs_tol=1e-9):
        raise DataError(
            f"{beside}: the items of {task} give {metric} {found:.4f}, the result says {record[metric]:.4f}; the two "
            "files are of different evaluations: evaluate again with redo=true"
        )


def _tell_apart(paths: Sequence[Path]) -> list[str]:
    """Paths without what they have in common."""
    parts = [path.resolve().with_suffix("").parts for path in paths]
    shortest = min(len(part) for part in parts)
    common = next((i for i in range(shortest) if len({part[i] for part in parts}) > 1), shortest - 1)
    return ["/".join(part[common:]) for part in parts]


# ----------------------------------------------------------------------------------------------------- what is told


def as_json(results: Sequence[Loaded], pairs: Sequence[Pair]) -> Record:
    def told(paired: Paired) -> Record:
        return {**asdict(paired), "verdict": paired.verdict}

    keys = ("model", "source", "save_id", "num_tokens_trained", "num_parameters", "tokenizer", "precision")
    return {
        "results": {result.name: {key: result.facts.get(key) for key in keys} for result in results},
        "comparisons": [
            {
                "first": pair.first,
                "other": pair.other,
                "mean": pair.mean and told(pair.mean),
                "tasks": [told(paired) for paired in pair.tasks],
                "other_metrics": [told(paired) for paired in pair.more],
                "notes": pair.notes,
            }
            for pair in pairs
        ],
        "method": {"num_resamples": NUM_RESAMPLES, "seed": SEED, "confidence": 0.95, "correction": "Holm"},
    }


def panels(pairs: Sequence[Pair]) -> dict[str, dict[str, dict[str, Point]]]:
    """For a figure: what is measured -> task -> model -> (difference, low, high, whether it is detected)."""
    found: dict[str, dict[str, dict[str, Point]]] = {}
    for pair in pairs:
        for paired in [*pair.tasks, *filter(None, [pair.mean])]:
            better = "left is better" if paired.metric == BITS else "right is better"
            title = f"difference in {'bits per byte' if paired.metric == BITS else 'accuracy'} ({better})"
            low, high = (paired.difference if end is None else end for end in (paired.low, paired.high))
            point = (paired.difference, low, high, paired.is_detected)
            found.setdefault(title, {}).setdefault(paired.task, {})[pair.other] = point
    return {title: found[title] for title in sorted(found)}


def p_text(p: float) -> str:
    return "<.001" if p < 0.001 else f"{p:.3f}" if p < 0.1 else f"{p:.2f}"
