"""Compare the prompts of the suites `core` and `mmlu`, as text, with those that other programs make of the same rows.

    uv pip install --no-deps --target theirs/foundry llm-foundry==0.9.0
    git clone https://github.com/karpathy/nanochat theirs/nanochat
    python -m benchmarks eval-prompts --peer-python ~/lm-eval/bin/python \\
        --llm-foundry theirs/foundry --nanochat theirs/nanochat

DCLM evaluates with LLM Foundry 0.9.0. The peer's Python has lm-evaluation-harness, as in `eval-parity`, and
transformers before version 5, which its CoQA needs. All programs are run as they are (`prompt_peers.py`), and
those that are not given are left out. The rows in `prompt_rows.json` are made up, in the form of the published ones,
and for lm-evaluation-harness also in the form of the Hub. A task that shows examples is asked with one, because
programs draw examples by different rules.

`--data data/eval/core` also compares pairs of rows of the published files, as far as they are in that folder, with LLM
Foundry and nanochat.

Ours are the tokens that a model would get, decoded. A prompt is the same if it is so for every option of the question,
with the option's answer at its end.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llmfoundry_lite.config.eval_schema import TaskConfig
from llmfoundry_lite.config.load_eval import load_eval_config
from llmfoundry_lite.data.tokenizer import Tokenizer, train_tokenizer
from llmfoundry_lite.errors import DataError
from llmfoundry_lite.evaluation.task_files import read_rows
from llmfoundry_lite.evaluation.tasks import prepare_task
from llmfoundry_machines.bench.frame import Column, describe_conditions, tabulate, tell

ROWS_FILE = Path(__file__).with_name("prompt_rows.json")
ROOT = Path(__file__).parents[2]
VOCAB_SIZE = 600
"""Vocabulary of the tokenizer. It only has to give texts back as they were, and a token to a letter with its space."""
MAX_SEQ_LEN = 16384
"""Longer than any prompt, so that none is cut. LLM Foundry's side has the same length."""
SAME = "same"
BLANK_LINE = "\n\n"
"""Text that lm_eval and nanochat have between examples, and LLM Foundry does not."""
SHOWN_CHARACTERS = 13
"""Characters from the first difference on that the table shows."""

Record = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A program that is compared with: a process that answers a line of JSON for each task."""

    name: str
    process: subprocess.Popen[str]

    def render(self, **task: Any) -> list[str]:
        """Return the prompts of a task's first row. Raises DataError if the program fails; its traceback is printed."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        line = ""
        with suppress(BrokenPipeError):  # the process has ended
            self.process.stdin.write(json.dumps(task) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        if not line:
            raise DataError(f"{self.name} has failed on a task; its error is above")
        return json.loads(line)


def run(
    *,
    peer_python: str | None = None,
    llm_foundry: str | None = None,
    nanochat: str | None = None,
    data: Path | None = None,
    pairs: int = 20,
    out: Path | None = None,
) -> Record:
    """Compare all prompts, print a table, and return the report.

    `peer_python` is a Python with lm_eval, `llm_foundry` a folder with the package `llmfoundry`, `nanochat` a clone,
    `data` a folder with the files of CORE, and `pairs` the number of pairs of rows of each file. `passed` in the report
    says whether all prompts of CORE are LLM Foundry's, and those of MMLU lm-evaluation-harness's.
    """
    rows_of_task = json.loads(ROWS_FILE.read_text())
    tokenizer = train_tokenizer([" A B C D a b c d " * 50, *map(str, rows_of_task.values())], VOCAB_SIZE)
    report: Record = describe_conditions() | {"tasks": []}
    with ExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory())
        tokenizer.save(scratch)
        programs: dict[str, Program] = {}
        if llm_foundry is not None:
            command = [sys.executable, "llm_foundry", llm_foundry, scratch]
            programs["LLM Foundry"] = stack.enter_context(_start("LLM Foundry", command))
        if nanochat is not None:
            programs["nanochat"] = stack.enter_context(_start("nanochat", [sys.executable, "nanochat", nanochat]))
        if peer_python is not None:
            programs["lm_eval"] = stack.enter_context(_start("lm_eval", [peer_python, "lm_eval"]))

        for task in _tasks_of_suites():
            for num_fewshot in task.num_fewshot:
                entry = rows_of_task[task.label]
                report["tasks"].append(
                    _compare_task(task, min(num_fewshot, 1), entry, programs, tokenizer)
                    | {"name": f"{task.label}/{num_fewshot}-shot"}
                    | _compare_published_rows(task, min(num_fewshot, 1), data, pairs, programs, tokenizer)
                )

    report["passed"] = all(_is_as_claimed(record) for record in report["tasks"])
    columns: list[Column] = [
        ("task", "{name}"),
        ("LLM Foundry", "{LLM Foundry}"),
        ("its prompts of published rows", "{published rows}"),
        ("nanochat", "{nanochat}"),
        ("lm-eval", "{lm_eval}"),
    ]
    table = tabulate("ours | theirs, from the first difference on", columns, report["tasks"])
    heading = "Prompts of CORE and MMLU, beside other programs'"
    tell(report, table, name="eval-prompts", heading=heading, command="python -m benchmarks eval-prompts", out=out)
    return report


def _is_as_claimed(record: Record) -> bool:
    """Return whether a task's prompts are those of LLM Foundry, as far as it was asked, and MMLU's those of lm_eval."""
    verdicts = [record.get("LLM Foundry", SAME), record.get("published rows", SAME).partition(",")[0]]
    if record["name"].startswith("mmlu/"):
        verdicts.append(record.get("lm_eval", SAME))
    return all(verdict == SAME for verdict in verdicts)


def _tasks_of_suites() -> list[TaskConfig]:
    """Return the tasks of both suites."""
    tasks: list[TaskConfig] = []
    for suite in ("core", "mmlu"):
        tasks += load_eval_config([str(ROOT / f"yamls/eval/{suite}.yaml"), "models.none=none"]).tasks
    return tasks


@contextmanager
def _start(name: str, command: list[str]) -> Iterator[Program]:
    """Start a program's process, and end it when the block is left. `command` has a Python and a side's arguments."""
    python, *arguments = command
    script = Path(__file__).with_name("prompt_peers.py")
    process = subprocess.Popen(
        [python, str(script), *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield Program(name=name, process=process)
    finally:
        process.kill()
        process.wait()


def _compare_task(
    task: TaskConfig,
    num_fewshot: int,
    entry: Mapping[str, Any],
    programs: Mapping[str, Program],
    tokenizer: Tokenizer,
) -> Record:
    """Compare a task's prompts of the made rows. Returns each program's verdict.

    It is "same", a difference in no more than a blank line between examples, the texts from their first difference on,
    or why there is nothing to compare.
    """
    ours = _render_ours(task, entry["rows"], num_fewshot, tokenizer)
    with_blank_line = replace(task, example_delimiter=BLANK_LINE)
    ours_with_blank_line = _render_ours(with_blank_line, entry["rows"], num_fewshot, tokenizer)

    verdicts: Record = {}
    for name, program in programs.items():
        if name == "lm_eval":
            if entry["lm_eval"] is None:
                verdicts[name] = "no task with these rows"
                continue
            theirs = program.render(**entry["lm_eval"], num_fewshot=num_fewshot)
        elif task.form is not None:
            continue  # the other two do not ask by letters
        else:
            theirs = _render_by_rows(program, task, entry["rows"], num_fewshot)

        if theirs == ours_with_blank_line and theirs != ours:
            verdicts[name] = f"{SAME}, with a blank line between examples"
        else:
            verdicts[name] = describe_difference(ours, theirs)
    return verdicts


def _compare_published_rows(
    task: TaskConfig,
    num_fewshot: int,
    data: Path | None,
    pairs: int,
    programs: Mapping[str, Program],
    tokenizer: Tokenizer,
) -> Record:
    """Compare a task's prompts of neighbouring rows of the published file with those of LLM Foundry.

    Returns the verdict under "published rows"; nothing without `data`, without LLM Foundry, or without the file.
    """
    path = data / f"{task.label}.jsonl" if data is not None else None
    if path is None or not path.exists() or "LLM Foundry" not in programs:
        return {}
    # The rows are compared as they are, because LLM Foundry strips them itself.
    rows = read_rows(replace(task, dataset_uri=str(path), strip_dataset=False))[: 2 * pairs]
    num_pairs = len(rows) // 2
    for start in range(0, 2 * num_pairs, 2):
        pair = rows[start : start + 2]
        ours = _render_ours(task, pair, num_fewshot, tokenizer)
        verdict = describe_difference(ours, _render_by_rows(programs["LLM Foundry"], task, pair, num_fewshot))
        if verdict != SAME:
            return {"published rows": f"row {start}: {verdict}"}
    return {"published rows": f"{SAME}, {num_pairs} pairs"}


def _render_by_rows(program: Program, task: TaskConfig, rows: list[Record], num_fewshot: int) -> list[str]:
    """Return the prompts that LLM Foundry or nanochat makes of two rows."""
    # Both read the columns of the task alone; LLM Foundry would divide rows that have a category.
    return program.render(
        kind=task.icl_task_type, delimiter=task.continuation_delimiter, rows=rows, num_fewshot=num_fewshot
    )


def _render_ours(task: TaskConfig, rows: list[Record], num_fewshot: int, tokenizer: Tokenizer) -> list[str]:
    """Return our prompt of each option of the first of two rows, with its answer, after `num_fewshot` examples."""
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch, "rows.jsonl")
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        task = replace(task, dataset_uri=str(path))
        prepared = prepare_task(
            task, read_rows(task), num_fewshot, tokenizer, max_seq_len=MAX_SEQ_LEN, tokenization="separate"
        )
    requests = prepared.items[0].requests
    return [tokenizer.decode([*request.context, *request.continuation]) for request in requests]


def describe_difference(ours: list[str], theirs: list[str]) -> str:
    """Return "same" if all prompts are equal, and otherwise the first pair's texts from their first difference on."""
    if ours == theirs:
        return SAME
    if len(ours) != len(theirs):
        return f"{len(ours)} options | {len(theirs)} options"
    our_text, their_text = next(pair for pair in zip(ours, theirs, strict=True) if pair[0] != pair[1])
    position = 0
    while position < min(len(our_text), len(their_text)) and our_text[position] == their_text[position]:
        position += 1
    shown = [text[position : position + SHOWN_CHARACTERS] for text in (our_text, their_text)]
    return " | ".join(json.dumps(text, ensure_ascii=False) for text in shown)
