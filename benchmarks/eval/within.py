"""Compare our model inside lm-evaluation-harness with its own class: `--model llmfoundry_lite` and `--model hf`.

    python -m benchmarks eval-within --peer-python ~/lm-eval/bin/python

The environment has lm-eval and what our package needs. Each side answers lm_eval's requests in a process of its own,
for the same items and the same exported model. Tokenising and scoring are timed; lm_eval's other work is the same for
both.
"""

import tempfile
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.eval.eval import SUITES, compare, make_items, make_model, peer_of, write_rendered
from llmfoundry_lite.tables import Table
from llmfoundry_machines.bench import frame
from llmfoundry_machines.bench.steps import SHAPES

HEADING, COMMAND = (
    "This package's model inside lm-evaluation-harness, compared with its own",
    "python -m benchmarks eval-within",
)
COLUMNS: list[frame.Column] = [
    ("items", "{name}"),
    ("--model llmfoundry_lite", "{items_per_second:.2f}"),
    ("--model hf", "{peer_items_per_second:.2f}"),
    ("times", "{times}"),
    ("in CPU time", "{times_in_cpu_seconds}"),
    ("other decisions", "{num_different}"),
    ("nats apart", "{largest_difference_nats:.0e}"),
]


def run(
    *, peer_python: str, shape: str = "125m", num_items: int = 60, num_rounds: int = 1, out: Path | None = None
) -> dict[str, Any]:
    """Measure each suite on both sides in turns, print a table, and return the report.

    `shape` is the model that is made with random weights, and `num_items` the number of items of each suite. Raises
    DataError when a side fails.
    """
    frame.check_names("--shape", [shape], SHAPES)
    console = frame.open_console()
    report: dict[str, Any] = frame.describe_conditions() | {"shape": shape, "num_items": num_items, "suites": {}}
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        folder = Path(scratch)

        # The same prompts and the same model for both sides.
        files = {name: folder / f"{index}.jsonl" for index, name in enumerate(SUITES)}
        for name, suite in SUITES.items():
            write_rendered(make_items(suite, num_items + suite.num_fewshot), suite, num_items, files[name])
        model = make_model(shape, [path.read_text() for path in files.values()], folder / "model")

        ours, theirs = (stack.enter_context(peer_of(peer_python, model, kind)) for kind in ("llmfoundry_lite", "hf"))
        for name, path in files.items():
            console.print(name)
            sides = {"ours": partial(ours, items=str(path)), "hf": partial(theirs, items=str(path))}
            results, _ = frame.take_turns(sides, num_rounds, console)
            comparison = compare(results["ours"], results["hf"])
            report["suites"][name] = comparison | {"num_different": sum(comparison["num_different"].values())}
    page = {"name": "eval-within", "heading": HEADING, "command": COMMAND, "asked": ["shape"]}
    frame.tell(report, table_of(report), **page, out=out)
    return report


def table_of(report: dict[str, Any]) -> Table:
    """Return a table with one row for each suite."""
    rows = [{"name": name, **comparison} for name, comparison in report["suites"].items()]
    threads = f"{report['num_threads']} thread{'s' if report['num_threads'] > 1 else ''}"
    title = f"{report['shape']}, {report['num_items']} items, fp32, {threads}; items per second"
    return frame.tabulate(title, COLUMNS, rows)
