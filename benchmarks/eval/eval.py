"""Compare the speed of evaluation in context with lm-evaluation-harness, with all else equal.

    python -m benchmarks eval --peer-python ~/lm-eval/bin/python

Model, items, prompts, precision and cores are the same. The peer is an environment of its own (`pip install
"lm-eval[hf]==0.4.13"`). Without one, only our figures are measured. Both sides read the same rendered prompts from one
file, and tokenise context and choice together. The time of ours is everything except loading the model; that of the
peer is tokenising and scoring alone. Decisions are compared item by item.

Only lengths matter for speed, so the items are generated in the shapes of ARC (zero-shot, five examples of each item's
own, five fixed examples), HellaSwag (long endings) and PIQA (two choices). `--data` reads a file of real items instead.

On a machine that others use as well, wall-clock times depend on them. Processor seconds say what either side needs, if
OMP_NUM_THREADS=1 (threads that wait for each other would count as working). Both are reported.

The order of this file: the benchmark and its table, the items and the model, the processes that answer, and our side's
measurement, which runs in such a process.
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
"""Vocabulary of the tokenizer that is trained on the items."""
LOGITS_AT_A_TIME = 256
"""Positions in one product when the computation of logits is timed."""


class Suite(NamedTuple):
    """Shape of a set of items. Lengths are ranges of words, both ends included."""

    words: tuple[int, int]
    """Length of a question."""
    choice_words: tuple[int, int]
    """Length of a choice."""
    num_choices: int
    num_fewshot: int
    """Examples before each question."""
    is_fixed: bool
    """Whether all questions have the same examples."""
    wanted: float | None
    """Target: our items per second as a multiple of the peer's. None: no target."""


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
    """Measure each suite on both sides in turns, print a table and return the report, which is also written into `out`.

    `peer_python` is an interpreter that has lm-eval, and `model` a model folder; the default is random weights of this
    `shape`. `data` is a file of real items that replaces the suites. Raises DataError when a side fails.
    """
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

        # Write one file of prompts for each suite. The sizes of a real file's suite are not used.
        suites = {data.name: Suite((0, 0), (0, 0), 0, 0, False, None)} if data else SUITES
        files = {name: folder / f"{index}.jsonl" for index, name in enumerate(suites)}
        for name, suite in suites.items():
            rows = read_real(data) if data else make_items(suite, num_items + suite.num_fewshot)
            write_rendered(rows, suite, num_items, files[name])
        model = model or make_model(shape, [path.read_text() for path in files.values()], folder / "model")

        # One process for each side, which loads the model once.
        with ExitStack() as stack:
            our_side = stack.enter_context(_worker([sys.executable, "-m", "benchmarks.eval.eval", model]))
            peer = stack.enter_context(peer_of(peer_python, model)) if peer_python else None
            for name, suite in suites.items():
                console.print(name)
                sides = {"ours": partial(our_side, items=str(files[name]), is_fixed=suite.is_fixed)}
                if peer is not None:
                    sides["lm-eval"] = partial(peer, items=str(files[name]))
                results_of_sides, _ = frame.take_turns(sides, num_rounds, console)
                theirs = results_of_sides.get("lm-eval", [])
                floors = {
                    key: frame.spread(result[key] for result in results_of_sides["ours"]).median
                    for key in ("of_the_floor", "of_the_floor_with_logits")
                }
                wanted = {"wanted": suite.wanted} if theirs else {}
                report["suites"][name] = compare(results_of_sides["ours"], theirs) | floors | wanted
                # What has been measured is kept, whatever becomes of the rest.
                about = {"name": "eval", "heading": HEADING, "command": COMMAND, "asked": ["shape"]}
                frame.tell(report, table_of(report), FLOOR, **about, out=out)
    console.print(FLOOR)
    return report


def compare(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return our rates and, if the peer was measured, its rates, the ratios within rounds, and what differs.

    `ours` and `theirs` have one result of `measure` for each round; `theirs` may be empty. Decisions and
    log-probabilities are compared in the first round, because they are the same in all of them.
    """

    def rates(sides: list[dict[str, Any]], key: str) -> list[float]:
        """Return the items per second of each round."""
        return [result["n"] / result[key] for result in sides]

    comparison: dict[str, Any] = {}
    for side, prefix in ((ours, "items"), (theirs, "peer_items")):
        for key, unit in (("seconds", "second"), ("cpu_seconds", "cpu_second")):
            if side:
                comparison[f"{prefix}_per_{unit}"] = frame.spread(rates(side, key)).median
    if theirs:
        # Flatten the log-probabilities of all choices of all items.
        log_probabilities = zip(
            *(chain.from_iterable(side[0]["log_probability"]) for side in (ours, theirs)), strict=True
        )
        comparison |= {
            "times": frame.ratios(rates(ours, "seconds"), rates(theirs, "seconds")),
            "times_in_cpu_seconds": frame.ratios(rates(ours, "cpu_seconds"), rates(theirs, "cpu_seconds")),
            "num_different": {
                metric: sum(a != b for a, b in zip(ours[0][metric], theirs[0][metric], strict=True))
                for metric in ("acc", "acc_norm")
            },
            "largest_difference_nats": max(abs(a - b) for a, b in log_probabilities),
        }
    return comparison


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
    """Return a table with one row for each suite."""
    rows = [{"name": name, **found} for name, found in report["suites"].items()]
    threads = f"{report['num_threads']} thread{'s' if report['num_threads'] > 1 else ''}"
    title = f"{report['shape']}, {report['num_items']} items, {report['num_rounds']} round(s), fp32, {threads}"
    return frame.tabulate(f"{title}; items per second", COLUMNS, rows)


# ------------------------------------------------------------------------------------------------------------ items


def make_items(suite: Suite, count: int) -> list[dict[str, Any]]:
    """Generate items of a suite's shape from made-up words. The same call always returns the same items."""
    generator = random.Random(0)
    words = ["".join(generator.choices("aeioubdfghklmnprst", k=generator.randint(2, 9))) for _ in range(2000)]

    def text(bounds: tuple[int, int]) -> str:
        """Return as many random words as a number drawn from these bounds, ends included."""
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
    """Read the rows of a multiple-choice task's file."""
    return read_rows(TaskConfig(label=path.stem, icl_task_type="multiple_choice", dataset_uri=str(path)))


def write_rendered(rows: list[dict[str, Any]], suite: Suite, num_items: int, path: Path) -> None:
    """Write items whose contexts already contain their examples, so that both sides get the same prompts.

    With fixed examples, the first `num_fewshot` rows are the examples, and the items follow them.
    """
    task = TaskConfig(
        label="bench",
        icl_task_type="multiple_choice",
        dataset_uri=str(path),
        continuation_delimiter="\nAnswer: ",
        fewshot_fixed=suite.is_fixed,
    )
    first_item = suite.num_fewshot if suite.is_fixed else 0
    with path.open("w") as file:
        for index in range(first_item, min(len(rows), first_item + num_items)):
            context = ""
            for example in choose_examples(task, range(len(rows)), index, suite.num_fewshot):
                context += render_example(task, rows[example], is_first=not context)
            context += ("\n" if context else "") + rows[index]["query"] + "\nAnswer:"
            row = {"query": context, "choices": rows[index]["choices"], "gold": rows[index]["gold"]}
            file.write(json.dumps(row) + "\n")


def make_model(shape: str, texts: list[str], folder: Path) -> str:
    """Write a model with random weights and a tokenizer for these texts, and return its folder.

    The folder is an export that plain transformers can load.
    """
    train_tokenizer(texts, VOCAB_SIZE).save(folder / "tokenizer")
    config = model_of(shape, 2048, no_bias=False)
    model = MPT(replace(config, vocab_size=max(VOCAB_SIZE, config.vocab_size)))
    initialise_weights(model, 17)
    export_model(model.state_dict(), model.config, folder / "export", tokenizer_folder=folder / "tokenizer")
    return str(folder / "export")


# --------------------------------------------------------------------------------------------------------- our side


Ask = Callable[..., dict[str, Any]]
"""Sends a task to a side's process, as keyword arguments, and waits for its result."""


@contextmanager
def peer_of(python: str, model: str, name: str = "hf") -> Iterator[Ask]:
    """Start a process of lm-evaluation-harness, and yield the function that sends tasks to it.

    `name` is lm_eval's name for the kind of model. A task is items=FILE, and optionally its kind and delimiter.
    """
    with _worker([python, str(Path(__file__).with_name("peer.py")), model, name]) as ask:
        yield ask


@contextmanager
def _worker(command: list[str]) -> Iterator[Ask]:
    """Start a process that loads the model and answers each line of JSON with another. Yields a function to ask it.

    The process is idle between questions, so the sides do not disturb each other. It is ended when the block ends.
    """
    with tempfile.TemporaryFile("w+") as stderr_file:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr_file, text=True
        )
        assert process.stdin is not None and process.stdout is not None
        questions, answers = process.stdin, process.stdout

        def ask(**settings: Any) -> dict[str, Any]:
            """Send one question and return its answer. Raises DataError with the process's error if it has ended."""
            with suppress(BrokenPipeError):
                questions.write(json.dumps(settings) + "\n")
                questions.flush()
            # Libraries may print as well. Only a line that begins like a result is the answer.
            for line in answers:
                if line.startswith('{"n"'):
                    return json.loads(line)

            # The output has ended without an answer, so the process has failed.
            stderr_file.seek(0)
            lines = stderr_file.read().strip().splitlines() or ["no output"]
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
    """Load the model, then measure the task on each line of stdin. This is our side's process."""
    located = locate_and_load_model(model, device=torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    _forward_rate(located.model)  # warms up
    for line in sys.stdin:
        print(json.dumps(measure(located, **json.loads(line))), flush=True)


def measure(located: LocatedModel, *, items: str, is_fixed: bool) -> dict[str, Any]:
    """Evaluate the items of a file, and return their number, the seconds, the shares of the floor, and the answers.

    The floor is the time in which a forward pass computes each distinct token of the items once, as plain text.
    `is_fixed` says that all items have the same examples, whose tokens then need to be computed only once.
    """
    task = TaskConfig(
        label="bench",
        icl_task_type="multiple_choice",
        dataset_uri=items,
        continuation_delimiter=" ",
        tokenization="joint",
    )

    # The forward rate is measured before and after, because a shared machine changes its speed.
    tokens_per_second = [_forward_rate(located.model)]
    with tempfile.TemporaryDirectory() as folder:
        files = ResultFiles(Path(folder), "bench", "ours")
        started, cpu_started = time.perf_counter(), time.process_time()
        evaluate(located.model, located.tokenizer, [task], Results(model="", suite="", source=""), files)
        seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_started
        answers = [json.loads(line) for line in files.items_path.read_text().splitlines()]
    tokens_per_second += [_forward_rate(located.model)]

    # Count the distinct tokens: a tree of the items' requests shares equal beginnings.
    prepared = prepare_task(task, read_rows(task), 0, located.tokenizer, max_seq_len=2048, tokenization="joint")
    tree = Row()
    for item_index, item in enumerate(prepared.items):
        # A first token of its own, which is not counted, keeps an item from sharing with the others.
        context = item.requests[0].context if is_fixed else (-1 - item_index, *item.requests[0].context)
        for request in item.requests:
            tree.add(request._replace(context=context), item_index)
    num_tokens = len(tree) - (0 if is_fixed else len(prepared.items))
    floor_seconds = num_tokens / statistics.mean(tokens_per_second)

    # Scoring also needs the logits of each answer token.
    is_ours = isinstance(located.model, TreeModel)
    logits_seconds = _logits_seconds(located.model, len({index for index, _, _ in tree.targets})) if is_ours else nan
    elapsed_seconds = _elapsed(located.model, seconds, cpu_seconds)
    return {
        "n": len(answers),
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "of_the_floor": floor_seconds / elapsed_seconds,
        "of_the_floor_with_logits": (floor_seconds + logits_seconds) / elapsed_seconds,
        "acc": [item["acc"] for item in answers],
        "acc_norm": [item["acc_norm"] for item in answers],
        "log_probability": [item["log_probability"] for item in answers],
    }


def _forward_rate(model: Any) -> float:
    """Measure how many tokens of plain text per second a forward pass computes, without logits."""
    tokens = torch.randint(0, 1000, (16, 128), device=model.device)
    zero_index = torch.zeros(1, dtype=torch.int64, device=model.device)
    with torch.no_grad():
        started, cpu_started = time.perf_counter(), time.process_time()
        # The one answer is only there because `score` needs one. Reading it waits for the device.
        float(
            model.score(
                Inputs(tokens, None, None), AnswerTokens(zero_index, zero_index, zero_index, zero_index)
            ).log_probability_n[0]
        )
        return tokens.numel() / _elapsed(model, time.perf_counter() - started, time.process_time() - cpu_started)


def _logits_seconds(model: TreeModel, num_positions: int) -> float:
    """Return the seconds of the matrix product that computes the logits of `num_positions`, without softmax or loss."""
    config = model.model.config
    hidden_ud = torch.randn(num_positions, config.d_model, device=model.device)
    unembedding_vd = torch.randn(config.vocab_size, config.d_model, device=model.device)
    started, cpu_started = time.perf_counter(), time.process_time()
    for part_ud in hidden_ud.split(LOGITS_AT_A_TIME):
        float(matmul_transposed(part_ud, unembedding_vd)[0, 0])
    return _elapsed(model, time.perf_counter() - started, time.process_time() - cpu_started)


def _elapsed(model: Any, seconds: float, cpu_seconds: float) -> float:
    """Return the seconds that the floor is compared with: on a CPU, which others may use, processor time."""
    return cpu_seconds if model.device.type == "cpu" else seconds


if __name__ == "__main__":
    answer_questions(sys.argv[1])
