"""A comparison as tables (a task to a row) on a console, in Markdown and JSON; and the points of its figure."""

import io
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.text import Text

from llmfoundry_lite.errors import printable
from llmfoundry_lite.evaluation.compare import SEED, SIGNIFICANT, Pair, Paired, p_text
from llmfoundry_lite.evaluation.records import BITS, RESULT, Record
from llmfoundry_lite.evaluation.results import Results
from llmfoundry_lite.evaluation.significance import NUM_RESAMPLES
from llmfoundry_lite.evaluation.tables import print_notes
from llmfoundry_lite.report.tables import Table, markdown_list, markdown_text

Point = tuple[float, float, float, bool]
SEQUENTIAL = (
    " Sequential: p and intervals hold at all looks together (repeated confidence intervals). A difference that was "
    "found early is on average smaller than it looks. There is no mean of tasks that stopped at different looks."
)


def print_comparison(pairs: Sequence[Pair], console: Console) -> None:
    for pair in pairs:
        for title, rows in ((f"{pair.other} against {pair.first}", pair.rows), ("by the other metrics", pair.more)):
            if rows:
                names = (
                    "\n".join(name[i : i + 9] for i in range(0, len(name), 9)) for name in (pair.first, pair.other)
                )
                columns = ["task", "items\n(needed)", *names, " difference [interval]", "p\nwon/lost"]
                console.print(Text(printable(title), style="italic"))
                table = Table(title, columns, [_console_row(paired, pair) for paired in rows], right={1, 2, 3, 5})
                table.print(console, unbroken={4})
                console.print()
        if pair.sentence:
            console.print(Text(printable(pair.sentence), style="bold"))
        print_notes(console, pair.notes)
        console.print()
    console.print(Text(legend(pairs), style="dim"))


def text_of(pairs: Sequence[Pair]) -> str:
    """Return what `print_comparison` prints, without colours."""
    console = Console(file=io.StringIO(), width=100)
    with console.capture() as capture:
        print_comparison(pairs, console)
    return capture.get().rstrip()


def _console_row(paired: Paired, pair: Pair) -> list[str]:
    name, _, shots = paired.task.rpartition("/")
    is_plain = paired is pair.mean or (paired in pair.tasks and paired.metric in ("acc_per_token", "acc"))
    under = filter(None, (shots if name else "", "" if is_plain else paired.metric.replace("_", " ")))
    return [
        "\n".join((name or paired.task, *under)),
        _items(paired, "\n") + (f"\n({paired.needed:,})" if paired.needed else ""),
        *_numbers(paired),
        f" {_difference(paired)}\n {paired.verdict}",
        f"{p_text(paired.p_corrected)}\n{paired.wins:,}/{paired.losses:,}",
    ]


def _numbers(paired: Paired) -> list[str]:
    return [f"{number:.{paired.digits}f}" for number in (paired.first, paired.other)]


def _items(paired: Paired, space: str) -> str:
    if paired.stage is None:
        return f"{paired.n:,}"
    plan = paired.stage.plan
    return f"{paired.n:,}{space}of {plan.looks[-1] if paired.metric == BITS else plan.num_items:,}"


def _difference(paired: Paired) -> str:
    text = f"{paired.difference:+.{paired.digits}f}"
    if paired.low is None or paired.high is None:
        return text
    return f"{text} [{paired.low:+.{paired.digits}f}, {paired.high:+.{paired.digits}f}]"


def legend(pairs: Sequence[Pair]) -> str:
    num, num_more = sum(len(pair.tasks) for pair in pairs), sum(len(pair.more) for pair in pairs)
    more = f", and for {num_more} by the other metrics" if num_more else ""
    return (
        f"p: score test, paired (McNemar's for a task), and for bits per byte a studentised bootstrap over documents; "
        f"corrected for {num} test{'' if num == 1 else 's'}{more} (Holm). Intervals are of the same tests, at the "
        "level that decides, 0.05 over the number of tests left, so that they exclude 0 exactly where a difference "
        "is found. needed: items to find a difference of 0.01, one point, with 80 % power in a test of its own, "
        "where the two models part as often as here."
        + (SEQUENTIAL if any(paired.stage for pair in pairs for paired in pair.tasks) else "")
    )


def write_comparison(results: Sequence[Results], pairs: Sequence[Pair], folder: Path, above: str = "") -> list[Path]:
    """Write compare.md, which starts with `above`, and compare.json."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [above] if above else []
    for pair in pairs:
        title, measured = f"{pair.other} against {pair.first}", ["difference", "at", "won/lost/tied", "p", "verdict"]
        columns = ["task", "metric", "items", "needed", pair.first, pair.other, *measured]
        table = Table(title, columns, [_markdown_row(paired) for paired in [*pair.rows, *pair.more]])
        notes = [*filter(None, (pair.sentence, *pair.notes))]
        lines += [f"## {markdown_text(title)}", "", *table.markdown(), "", *markdown_list(notes), ""]
    if pairs:
        lines += [legend(pairs), ""]
    markdown, facts = folder / "compare.md", folder / "compare.json"
    markdown.write_text("\n".join(lines))
    facts.write_text(json.dumps(_as_json(results, pairs), indent=1) + "\n")
    return [markdown, facts]


def _markdown_row(paired: Paired) -> list[str]:
    return [
        paired.task,
        "" if paired.metric == "mean" else paired.metric,
        _items(paired, " "),
        f"{paired.needed:,}" if paired.needed else "",
        *_numbers(paired),
        _difference(paired),
        f"{100 * paired.confidence:.4g} %",
        f"{paired.wins:,}/{paired.losses:,}/{paired.ties:,}",
        p_text(paired.p_corrected),
        paired.verdict,
    ]


def _as_json(results: Sequence[Results], pairs: Sequence[Pair]) -> Record:
    def as_record(paired: Paired) -> Record:
        known = {key: value for key, value in asdict(paired).items() if key != "interval"}
        return {**known, "detectable": paired.detectable, "verdict": paired.verdict}

    keys = [key for key in RESULT if key != "suite"]
    return {
        "results": {result.name: {key: getattr(result, key) for key in keys} for result in results},
        "comparisons": [
            {
                "first": pair.first,
                "other": pair.other,
                "mean": pair.mean and as_record(pair.mean),
                "tasks": [as_record(paired) for paired in pair.tasks],
                "other_metrics": [as_record(paired) for paired in pair.more],
                "notes": pair.notes,
            }
            for pair in pairs
        ],
        "method": {"num_resamples": NUM_RESAMPLES, "seed": SEED, "level": SIGNIFICANT, "correction": "Holm"},
    }


def panels(pairs: Sequence[Pair]) -> dict[str, dict[str, dict[str, Point]]]:
    """Return what a figure shows: what is measured -> task -> model -> (difference, low, high, whether detected)."""
    found: dict[str, dict[str, dict[str, Point]]] = {}
    for pair in pairs:
        for paired in pair.rows:
            better = "left is better" if paired.metric == BITS else "right is better"
            title = f"difference in {'bits per byte' if paired.metric == BITS else 'accuracy'} ({better})"
            low, high = (paired.difference if end is None else end for end in (paired.low, paired.high))
            point = (paired.difference, low, high, paired.is_detected)
            found.setdefault(title, {}).setdefault(paired.task, {})[pair.other] = point
    return {title: found[title] for title in sorted(found)}
