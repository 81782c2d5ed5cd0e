"""How a comparison looks: a task to a row on a console, in Markdown and JSON; and what a figure of it shows."""

import json
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path

from rich.console import Console
from rich.text import Text

from llmfoundry_lite.errors import printable
from llmfoundry_lite.evaluation.compare import SEED, SIGNIFICANT, Pair, Paired, p_text
from llmfoundry_lite.evaluation.paired import NUM_RESAMPLES
from llmfoundry_lite.evaluation.reading import BITS, Loaded, Record
from llmfoundry_lite.evaluation.tables import print_note
from llmfoundry_lite.report.tables import lean_table, markdown_list, markdown_table, markdown_text

Point = tuple[float, float, float, bool]


def print_comparison(pairs: Sequence[Pair], console: Console) -> None:
    for pair in pairs:
        _print_pairs(
            console, printable(f"{pair.other} against {pair.first}"), pair, [*pair.tasks, *filter(None, [pair.mean])]
        )
        console.print()
        if pair.more:
            _print_pairs(console, "by the other metrics", pair, pair.more)
            console.print()
        if pair.sentence:
            console.print(Text(printable(pair.sentence), style="bold"))
        for note in pair.notes:
            print_note(console, note)
        console.print()
    console.print(Text(legend(pairs), style="dim"))


def _print_pairs(console: Console, title: str, pair: Pair, rows: Sequence[Paired]) -> None:
    table = lean_table(title)
    table.add_column("task", overflow="fold")
    for header in ("items\n(needed)", *(_short(printable(name)) for name in (pair.first, pair.other))):
        table.add_column(Text(header), justify="right", overflow="fold")
    table.add_column(" difference [interval]", no_wrap=True)
    table.add_column("p\nwon/lost", justify="right")
    for paired in rows:
        name, _, shots = paired.task.rpartition("/")
        is_plain = paired is pair.mean or (paired in pair.tasks and paired.metric in ("acc_per_token", "acc"))
        under = filter(None, (shots if name else "", "" if is_plain else paired.metric.replace("_", " ")))
        table.add_row(
            Text(printable("\n".join((name or paired.task, *under)), keep="\n")),
            _items(paired, "\n") + (f"\n({paired.needed:,})" if paired.needed else ""),
            f"{paired.first:.{paired.digits}f}",
            f"{paired.other:.{paired.digits}f}",
            Text(f" {difference_text(paired)}\n {paired.verdict}", style="bold" if paired.is_detected else ""),
            f"{p_text(paired.p_corrected)}\n{paired.wins:,}/{paired.losses:,}",
        )
    console.print(table)


def _items(paired: Paired, space: str) -> str:
    if paired.stage is None:
        return f"{paired.n:,}"
    plan = paired.stage.plan
    return f"{paired.n:,}{space}of {plan.looks[-1] if paired.metric == BITS else plan.num_items:,}"


def _short(name: str) -> str:
    """In lines of at most nine characters."""
    return "\n".join(name[i : i + 9] for i in range(0, len(name), 9))


def difference_text(paired: Paired) -> str:
    text = f"{paired.difference:+.{paired.digits}f}"
    if paired.low is None or paired.high is None:
        return text
    return f"{text} [{paired.low:+.{paired.digits}f}, {paired.high:+.{paired.digits}f}]"


SEQUENTIAL = (
    " Sequential: p and intervals hold at all looks together (repeated confidence intervals). A difference that was "
    "found early is on average smaller than it looks. There is no mean of tasks that stopped at different looks."
)


def legend(pairs: Sequence[Pair]) -> str:
    num, num_more = (sum(map(len, tables)) for tables in zip(*((p.tasks, p.more) for p in pairs), strict=True))
    more = f", and for {num_more} by the other metrics" if num_more else ""
    return (
        f"p: score test, paired (McNemar's for a task), and for bits per byte a studentised bootstrap over documents; "
        f"corrected for {num} test{'' if num == 1 else 's'}{more} (Holm). Intervals are of the same tests, at the "
        "level that decides, 0.05 over the number of tests left, so that they exclude 0 exactly where a difference "
        "is found. needed: items to find a difference of 0.01, one point, with 80 % power in a test of its own, "
        "where the two models part as often as here."
        + (SEQUENTIAL if any(paired.stage for pair in pairs for paired in pair.tasks) else "")
    )


def write_comparison(results: Sequence[Loaded], pairs: Sequence[Pair], folder: Path, above: str = "") -> list[Path]:
    """compare.md, which starts with `above`, and compare.json."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [above] if above else []
    for pair in pairs:
        header = ["task", "metric", "items", "needed", pair.first, pair.other, "difference", "at", "won/lost/tied", "p"]
        rows = [[*header, "verdict"]]
        for paired in [*pair.tasks, *filter(None, [pair.mean]), *pair.more]:
            rows.append(
                [
                    paired.task,
                    "" if paired.metric == "mean" else paired.metric,
                    _items(paired, " "),
                    f"{paired.needed:,}" if paired.needed else "",
                    f"{paired.first:.{paired.digits}f}",
                    f"{paired.other:.{paired.digits}f}",
                    difference_text(paired),
                    f"{100 * paired.confidence:.4g} %",
                    f"{paired.wins:,}/{paired.losses:,}/{paired.ties:,}",
                    p_text(paired.p_corrected),
                    paired.verdict,
                ]
            )
        lines += [f"## {markdown_text(f'{pair.other} against {pair.first}')}", "", *markdown_table(rows), ""]
        lines += markdown_list([*filter(None, (pair.sentence, *pair.notes))])
        lines += [""]
    if pairs:
        lines += [legend(pairs), ""]
    markdown, facts = folder / "compare.md", folder / "compare.json"
    markdown.write_text("\n".join(lines))
    facts.write_text(json.dumps(as_json(results, pairs), indent=1) + "\n")
    return [markdown, facts]


def as_json(results: Sequence[Loaded], pairs: Sequence[Pair]) -> Record:
    def told(paired: Paired) -> Record:
        known = {field.name: getattr(paired, field.name) for field in fields(paired) if field.name != "interval"}
        stage = paired.stage and asdict(paired.stage)
        return {**known, "stage": stage, "detectable": paired.detectable, "verdict": paired.verdict}

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
        "method": {"num_resamples": NUM_RESAMPLES, "seed": SEED, "level": SIGNIFICANT, "correction": "Holm"},
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
