"""Evaluation in context beside lm-evaluation-harness: the same model, items, prompts, precision and cores.

python -m benchmarks eval --peer-python ~/lm-eval/bin/python

The peer is an environment of its own (`pip install "lm-eval[hf]==0.4.13"`); without one, our figures stand alone.
Both sides read the same rendered prompts from one file and tokenise context and choice together. What is timed is, of
ours, all but loading the model; of the peer's, tokenising and scoring alone. Decisions are compared item by item. Items
are made up, in the shapes of ARC (zero-shot, five examples of each item's own, five fixed examples), HellaSwag (long
endings) and PIQA (two choices), since only lengths matter for speed; `--data` brings a file of real ones.

On a CPU that others use as well, times say who else was there; processor seconds (with OMP_NUM_THREADS=1, or threads
that wait for each other count as working) say what either side needs. Both are told.
"""

import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from math import nan
from pathlib import Path
from typing import Any, NamedTuple

import torch

from llmfoundry_lite.config.eval_schema import TaskConfig
from llmfoundry_lite.convert.huggingface import export_model
from llmfoundry_lite.data.tokenizer import train_tokenizer
from llmfoundry_lite.errors import DataError
from llmfoundry_lite.evaluation.harness import evaluate
from llmfoundry_lite.evaluation.models import LocatedModel, TreeModel, locate_and_load_model
from llmfoundry_lite.evaluation.packing import Row
from llmfoundry_lite.evaluation.prompts import choose_examples, render_example
from llmfoundry_lite.evaluation.result_files import ResultFiles
from llmfoundry_lite.evaluation.results import Results
from llmfoundry_lite.evaluation.scoring import AnswerTokens, Inputs
from llmfoundry_lite.evaluation.task_files import read_rows
from llmfoundry_lite.evaluation.tasks import prepare_task
from llmfoundry_lite.models.initialise import initialise_weights
from llmfoundry_lite.models.mpt import MPT
from llmfoundry_lite.models.products import matmul_transposed
from llmfoundry_lite.tables import Table
from llmfoundry_machines.bench import frame
from llmfoundry_machines.bench.steps import SHAPES, model_of

VOCAB_SIZE = 8192
"""Vocabulary of the tokenizer that is made for the items."""
LOGITS_AT_A_TIME = 256
"""Positions, when the product that makes logits is timed."""


class Suite(NamedTuple):
    """Items of one shape: words in a question, words in a choice, choices, examples."""

    words: tuple[int, int]
    choice_words: tuple[int, int]
    num_choices: int
    num_fewshot: int
    is_fixed: bool
    wanted: float | None
    """How many times the peer's items/s."""


SUITES = {
    "ARC, zero-shot": Suite((12, 30), (1, 8), 4, 0, False, 3.5),
    "ARC, 5-shot, examples of each item": Suite((12, 30), (1, 8), 4, 5, False, 5.0),
    "ARC, 5-shot, fixed examples": Suite((12, 30), (1, 8), 4, 5, True, 8.0),
    "HellaSwag, zero-shot": Suite((20, 50), (12, 30), 4, 0, False, 2.5),
    "PIQA, zero-shot": Suite((6, 14), (8, 30), 2, 0, False, None),
}


def run(
    *,
    peer_python: str | None = None,
    model: str | None = None,
    data: Path | None = None,
    shape: str = "125m",
    num_items: int = 60,
    num_rounds: int = 1,
    out: Path | None = None,
) -> dict[str, Any]:
    """Measure each suite on both sides in turn, print a table, return it. Raises DataError when a side fails."""
    frame.check_names("--shape", [shape], SHAPES)
    console = frame.open_console()
    report: dict[str, Any] = frame.describe_conditions() | {
        "shape": Path(model).name if model else shape,
        "num_items": num_items,
        "num_rounds": num_rounds,
        "suites": {},
    }
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        names = {data.name: Suite((0, 0), (0, 0), 0, 0, False, None)} if data else SUITES
        files = {name: folder / f"{i}.jsonl" for i, name in enumerate(names)}
        for name, suite in names.items():
            rows = read_real(data) if data else make_items(suite, num_items + suite.num_fewshot)
            write_rendered(rows, suite, num_items, files[name])
        model = model or make_model(shape, [path.read_text() for path in files.values()], folder / "model")
        with ExitStack() as stack:
            our_side = stack.enter_context(_worker([sys.executable, "-m", "benchmarks.eval.eval", model]))
            peer = stack.enter_context(peer_of(peer_python, model)) if peer_python else None
            for name, suite in names.items():
                console.print(name)
                sides = {"ours": partial(our_side, items=str(files[name]), is_fixed=suite.is_fixed)}
                if peer is not None:
                    sides["lm-eval"] = partial(peer, items=str(files[name]))
                found, _ = frame.take_turns(sides, num_rounds, console)
                theirs = found.get("lm-eval", [])
                floors = {
                    key: frame.spread(one[key] for one in found["ours"]).median
                    for key in ("of_the_floor", "of_the_floor_with_logits")
                }
                wanted = {"wanted": suite.wanted} if theirs else {}
                report["suites"][name] = compare(found["ours"], theirs) | floors | wanted
                # What has been measured is kept, whatever becomes of the rest.
                about = {"name": "eval", "heading": HEADING, "command": COMMAND, "asked": ["shape"]}
                frame.tell(report, table_of(report), FLOOR, **about, out=out)
    console.print(FLOOR)
    return report


def compare(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return rates of our side, and beside the peer's their ratios within rounds, and decisions that differ."""

    def rates(sides: list[dict[str, Any]], key: str) -> list[float]:
        return [one["n"] / one[key] for one in sides]

    found: dict[str, Any] = {}
    for side, name in ((ours, "items"), (theirs, "peer_items")):
        for key, per in (("seconds", "second"), ("cpu_seconds", "cpu_second")):
            if side:
                found[f"{name}_per_{per}"] = frame.spread(rates(side, key)).median
    if theirs:
        pairs = zip(*(chain.from_iterable(side[0]["log_probability"]) for side in (ours, theirs)), strict=True)
        found |= {
            "times": frame.ratios(rates(ours, "seconds"), rates(theirs, "seconds")),
            "times_in_cpu_seconds": frame.ratios(rates(ours, "cpu_seconds"), rates(theirs, "cpu_seconds")),
            "num_different": {
                metric: sum(a != b for a, b in zip(ours[0][metric], theirs[0][metric], strict=True))
                for metric in ("acc", "acc_norm")
            },
            "largest_difference_nats": max(abs(a - b) for a, b in pairs),
        }
    return found


COLUMNS: list[frame.Column] = [
    ("items", "{name}"),
    ("ours", "{items_per_second:.2f}"),
    ("lm-eval", "{peer_items_per_second:.2f}"),
    ("times", "{times}"),
    ("in CPU time", "{times_in_cpu_seconds}"),
    ("wanted", "{wanted:g}"),
    ("of the floor", "{of_the_floor:.0%}"),
    ("with logits", "{of_the_floor_with_logits:.0%}"),
    ("other decisions", lambda row: str(sum(row["num_different"].values())) if "num_different" in row else ""),
]
HEADING, COMMAND = "Evaluation in context, compared with lm-evaluation-harness", "python -m benchmarks eval"
FLOOR = (
    "Columns: `of the floor` compares with the rate at which a forward pass computes the same tokens once, as "
    "plain text without logits. `with logits` also counts the plain product that computes the logits of the "
    "answers' tokens, without which nothing can be scored. If the load average is higher than the number of "
    "cores, read the column of CPU time."
)


def table_of(report: dict[str, Any]) -> Table:
    rows = [{"name": name, **found} for name, found in report["suites"].items()]
    threads = f"{report['num_threads']} thread{'s' if report['num_threads'] > 1 else ''}"
    title = f"{report['shape']}, {report['num_items']} items, {report['num_rounds']} round(s), fp32, {threads}"
    return frame.tabulate(f"{title}; items per second", COLUMNS, rows)


# ------------------------------------------------------------------------------------------------------------ items


def make_items(suite: Suite, count: int) -> list[dict[str, Any]]:
    generator = random.Random(0)
    words = ["".join(generator.choices("aeioubdfghklmnprst", k=generator.randint(2, 9))) for _ in range(2000)]

    def text(bounds: tuple[int, int]) -> str:
        return " ".join(generator.choices(words, k=generator.randint(*bounds)))

    return [
        {
            "query": f"Question: {text(suite.words)}?",
            "choices": [text(suite.choice_words) for _ in range(suite.num_choices)],
            "gold": generator.randrange(suite.num_choices),
        }
        for _ in range(count)
    ]


def read_real(path: Path) -> list[dict[str, Any]]:
    return read_rows(TaskConfig(label=path.stem, icl_task_type="multiple_choice", dataset_uri=str(path)))


def write_rendered(rows: list[dict[str, Any]], suite: Suite, num_items: int, path: Path) -> None:
    """Write contexts with their examples already in them, so that both sides get the same prompts."""
    task = TaskConfig(
        label="bench",
        icl_task_type="multiple_choice",
        dataset_uri=str(path),
        continuation_delimiter="\nAnswer: ",
        fewshot_fixed=suite.is_fixed,
    )
    first = suite.num_fewshot if suite.is_fixed else 0
    with path.open("w") as file:
        for index in range(first, min(len(rows), first + num_items)):
            context = ""
            for example in choose_examples(task, range(len(rows)), index, suite.num_fewshot):
                context += render_example(task, rows[example], is_first=not context)
            context += ("\n" if context else "") + rows[index]["query"] + "\nAnswer:"
            row = {"query": context, "choices": rows[index]["choices"], "gold": rows[index]["gold"]}
            file.write(json.dumps(row) + "\n")


def make_model(shape: str, texts: list[str], folder: Path) -> str:
    """Write random weights and a tokenizer for these texts, as plain transformers loads them."""
    train_tokenizer(texts, VOCAB_SIZE).save(folder / "tokenizer")
    config = model_of(shape, 2048, no_bias=False)
    model = MPT(replace(config, vocab_size=max(VOCAB_SIZE, config.vocab_size)))
    initialise_weights(model, 17)
    export_model(model.state_dict(), model.config, folder / "export", tokenizer_folder=folder / "tokenizer")
    return str(folder / "export")


# --------------------------------------------------------------------------------------------------------- our side


Ask = Callable[..., dict[str, Any]]


@contextmanager
def peer_of(python: str, model: str, name: str = "hf") -> Iterator[Ask]:
    """Have lm-evaluation-harness, by its model `name`, answer calls with items=FILE, and kind and delimiter of the
    task."""
    with _worker([python, str(Path(__file__).with_name("peer.py")), model, name]) as ask:
        yield ask


@contextmanager
def _worker(command: list[str]) -> Iterator[Ask]:
    """Start a process that loads the model and answers each line of JSON with another. It idles meanwhile."""
    with tempfile.TemporaryFile("w+") as told:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=told, text=True)
        assert process.stdin is not None and process.stdout is not None
        questions, answers = process.stdin, process.stdout

        def ask(**settings: Any) -> dict[str, Any]:
            with suppress(BrokenPipeError):
                questions.write(json.dumps(settings) + "\n")
                questions.flush()
            for line in answers:
                if line.startswith('{"n"'):  # all else is chatter
                    return json.loads(line)
            told.seek(0)
            lines = told.read().strip().splitlines() or ["no output"]
            reason = next((line for line in reversed(lines) if "Error" in line), lines[-1])
            raise DataError(f"{command[0]} failed: {reason}")

        try:
            yield ask
        finally:
            with suppress(BrokenPipeError):
                questions.close()
            answers.close()
            process.terminate()
            process.wait()


def answer_questions(model: str) -> None:
    located = locate_and_load_model(model, device=torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    _forward_rate(located.model)  # warms up
    for line in sys.stdin:
        print(json.dumps(measure(located, **json.loads(line))), flush=True)


def measure(located: LocatedModel, *, items: str, is_fixed: bool) -> dict[str, Any]:
    task = TaskConfig(
        label="bench",
        icl_task_type="multiple_choice",
        dataset_uri=items,
        continuation_delimiter=" ",
        tokenization="joint",
    )
    rates = [_forward_rate(located.model)]
    with tempfile.TemporaryDirectory() as folder:
        files = ResultFiles(Path(folder), "bench", "ours")
        started, cpu_started = time.perf_counter(), time.process_time()
        evaluate(located.model, located.tokenizer, [task], Results(model="", suite="", source=""), files)
        seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_started
        answered = [json.loads(line) for line in files.items_path.read_text().splitlines()]
    rates += [_forward_rate(located.model)]
    prepared = prepare_task(task, read_rows(task), 0, located.tokenizer, max_seq_len=2048, tokenization="joint")
    tree = Row()
    for number, item in enumerate(prepared.items):
        context = item.requests[0].context if is_fixed else (-1 - number, *item.requests[0].context)
        for request in item.requests:
            tree.add(request._replace(context=context), number)
    num_tokens = len(tree) - (0 if is_fixed else len(prepared.items))
    floor = num_tokens / statistics.mean(rates)
    is_ours = isinstance(located.model, TreeModel)
    logits = _logits_seconds(located.model, len({index for index, _, _ in tree.targets})) if is_ours else nan
    elapsed = _elapsed(located.model, seconds, cpu_seconds)
    return {
        "n": len(answered),
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "of_the_floor": floor / elapsed,
        "of_the_floor_with_logits": (floor + logits) / elapsed,
        "acc": [item["acc"] for item in answered],
        "acc_norm": [item["acc_norm"] for item in answered],
        "log_probability": [item["log_probability"] for item in answered],
    }


def _forward_rate(model: Any) -> float:
    """Measure tokens per second of plain text, without logits."""
    tokens = torch.randint(0, 1000, (16, 128), device=model.device)
    one = torch.zeros(1, dtype=torch.int64, device=model.device)
    with torch.no_grad():
        started, cpu_started = time.perf_counter(), time.process_time()
        float(model.score(Inputs(tokens, None, None), AnswerTokens(one, one, one, one)).log_probability_n[0])
        return tokens.numel() / _elapsed(model, time.perf_counter() - started, time.process_time() - cpu_started)


def _logits_seconds(model: TreeModel, num_positions: int) -> float:
    """Time the product that makes logits of so many positions, without a softmax or loss."""
    config = model.model.config
    hidden_ud = torch.randn(num_positions, config.d_model, device=model.device)
    unembedding_vd = torch.randn(config.vocab_size, config.d_model, device=model.device)
    started, cpu_started = time.perf_counter(), time.process_time()
    for part_ud in hidden_ud.split(LOGITS_AT_A_TIME):
        float(matmul_transposed(part_ud, unembedding_vd)[0, 0])
    return _elapsed(model, time.perf_counter() - started, time.process_time() - cpu_started)


def _elapsed(model: Any, seconds: float, cpu_seconds: float) -> float:
    """Return the seconds that count for the share of the floor: on a CPU, processor time."""
    return cpu_seconds if model.device.type == "cpu" else seconds


if __name__ == "__main__":
    answer_questions(sys.argv[1])
