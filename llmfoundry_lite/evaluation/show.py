"""Prints the first prompts of each task as models get them, token by token, without reading any weights.

    llmfoundry-lite eval icl-zero-shot models.ours=runs/mpt-1b --show 3

`show_prompts` is the top function. A prompt depends on a model only by its tokenizer and the length of its context, so
models that have both in common are shown once. Long prompts are shortened in the middle.
"""

import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from llmfoundry_lite import companions
from llmfoundry_lite.config.eval_schema import EvalConfig, TaskConfig
from llmfoundry_lite.data.tokenizer import Tokenizer
from llmfoundry_lite.errors import printable
from llmfoundry_lite.evaluation.documents import prepare_text
from llmfoundry_lite.evaluation.items import EmptyTaskError, Item, PreparedTask
from llmfoundry_lite.evaluation.models import locate_model
from llmfoundry_lite.evaluation.prompts import find_question_rows
from llmfoundry_lite.evaluation.suite import expand_models
from llmfoundry_lite.evaluation.task_files import Row, read_rows
from llmfoundry_lite.evaluation.tasks import prepare_task
from llmfoundry_lite.evaluation.token_texts import TokenTexts, prompt_tokens

TOKEN_BORDER = "│"
ANSWER_BORDER = "║"
LINE_END = "↵"
LEGEND = (
    f"{TOKEN_BORDER} divides tokens, {ANSWER_BORDER} comes before the tokens whose probability is computed, * marks "
    f"the right option, and {LINE_END} is a line end."
)
MAX_CONTEXT_TOKENS = 400
MAX_ANSWER_TOKENS = 100
"""Most tokens of a context and of an answer that are printed. Of a longer one, both ends are, half as many each."""
MAX_OPTIONS = 10
"""Most options of an item that are printed, besides the right one, and most right answers."""
MAX_QUESTION_CHARACTERS = 200
DEFAULT_MAX_SEQ_LEN = 2048
"""Context length of a model whose config.json gives none, as the companion that runs such models has it."""


class Reader(NamedTuple):
    """The facts of models that decide their prompts."""

    names: list[str]
    """The models that have these facts in common."""
    tokenizer: Tokenizer
    max_seq_len: int
    """Tokens of the longest row."""


def show_prompts(config: EvalConfig, tasks: Sequence[TaskConfig], num_shown: int, notes: Sequence[str] = ()) -> None:
    """Print the first `num_shown` prompts of each task, for all models of a configuration.

    `notes` are lines to print first, to standard error. Raises DataError if a model, its tokenizer or a task's file
    cannot be read.
    """
    for note in notes:
        print(printable(note), file=sys.stderr)
    readers = _find_readers(config)
    # A task that cannot be prepared ends the command before it prints the prompts of others.
    tasks_of_readers = [list(_prepare_tasks(config, tasks, reader, num_shown)) for reader in readers]

    for reader, prepared_tasks in zip(readers, tasks_of_readers, strict=True):
        print(printable(f"Prompts of {', '.join(reader.names)}, with {_describe_length(config, reader)}. {LEGEND}"))
        token_texts = TokenTexts(reader.tokenizer)
        for task in prepared_tasks:
            if isinstance(task, EmptyTaskError):
                print(f"\n{printable(str(task))}")
                continue
            print(f"\n{printable(_heading_of(task))}")
            for item in task.items[:num_shown]:
                print()
                for line in _describe_item(task, item, token_texts):
                    print(printable(f"  {line}".rstrip()))
        print()


def _find_readers(config: EvalConfig) -> list[Reader]:
    """Find the tokenizer and the context length of every model, and join models that have both in common."""
    readers: dict[tuple[object, ...], Reader] = {}
    for name, source in expand_models(config).items():
        if source.startswith("hf:"):
            fetch = companions.load("llmfoundry_formats.hub_models:fetch_to_evaluate", f"models: {source}")
            source = str(fetch(source.removeprefix("hf:"), with_weights=False))
        located = locate_model(
            source, tokenizer=config.tokenizer, device=torch.device("cpu"), trusts_code=config.trust_code
        )
        tokenizer = located.tokenizer
        model_length = located.max_seq_len or DEFAULT_MAX_SEQ_LEN
        max_seq_len = min(model_length, config.max_seq_len or model_length)
        key = (tokenizer.fingerprint, tokenizer.eos_token_id, *tokenizer.beginning, max_seq_len)
        readers.setdefault(key, Reader([], tokenizer, max_seq_len)).names.append(name)
    return list(readers.values())


def _prepare_tasks(
    config: EvalConfig, tasks: Sequence[TaskConfig], reader: Reader, num_shown: int
) -> Iterator[PreparedTask | EmptyTaskError]:
    """Yield each task with its first items, once for each number of examples, or the reason why it has no item."""
    num_items = min(num_shown, config.limit or num_shown)
    for task in tasks:
        try:
            if task.task_type.answer == "text":
                yield prepare_text(task, reader.tokenizer, max_seq_len=reader.max_seq_len, limit=num_items)
                continue
            rows = read_rows(task)
        except EmptyTaskError as error:
            yield error
            continue
        for num_fewshot in task.num_fewshot:
            try:
                yield _prepare_questions(task, rows, num_fewshot, reader, config.tokenization, num_items)
            except EmptyTaskError as error:
                yield error


def _prepare_questions(
    task: TaskConfig,
    rows: list[Row],
    num_fewshot: int,
    reader: Reader,
    tokenization: str,
    num_items: int,
) -> PreparedTask:
    """Prepare a task of questions until `num_items` of them can be asked. Raises EmptyTaskError if none can be."""
    num_questions = len(find_question_rows(task, rows, num_fewshot))
    limit = num_items
    while True:
        is_whole = limit >= num_questions
        try:
            prepared = prepare_task(
                task,
                rows,
                num_fewshot,
                reader.tokenizer,
                max_seq_len=reader.max_seq_len,
                tokenization=tokenization,
                limit=limit,
            )
            if is_whole or len(prepared.items) >= num_items:
                return prepared
        except EmptyTaskError:
            if is_whole:
                raise
        # The first rows cannot be asked, for instance because they are too long for the model.
        limit *= 4


# ------------------------------------------------------------------------------------------------------------- words


def _describe_length(config: EvalConfig, reader: Reader) -> str:
    """Return the length of a context: "a context of 256 tokens", and why it is shorter than `max_seq_len`."""
    length = f"a context of {reader.max_seq_len:,} tokens"
    if config.max_seq_len is not None and config.max_seq_len > reader.max_seq_len:
        return f"{length}, the model's length, because max_seq_len={config.max_seq_len} is longer"
    return length


def _heading_of(task: PreparedTask) -> str:
    """Return the line above a task's prompts: "arc_easy/5-shot, multiple_choice, tokenization separate"."""
    facts = [task.name, task.kind]
    if task.config.tokenization is not None:
        facts.append(f"tokenization {task.config.tokenization}")
    for reason, num_rows in task.skipped.items():
        facts.append(f"skipped so far: {num_rows:,} with {reason}")
    return ", ".join(facts)


def _describe_item(task: PreparedTask, item: Item, token_texts: TokenTexts) -> Iterator[str]:
    """Yield the lines that show an item: which row it is, its question, its context and its options in tokens."""
    if task.answer == "text":
        yield f"document {item.index + 1:,}, a window"
    else:
        examples = ", ".join(f"{row + 1:,}" for row in item.examples)
        yield f"row {item.index + 1:,}" + (f", after the examples in rows {examples}" if examples else "")
    if item.question is not None:
        yield f"question: {_shorten(item.question)}"

    # What does not fit is cut off at the beginning, more of it before an option that is longer.
    nums_trimmed = {request.num_trimmed for request in item.requests}
    if any(nums_trimmed):
        up_to = "up to " if len(nums_trimmed) > 1 else ""
        yield f"cut off: {up_to}the first {_count(max(nums_trimmed), 'token')}, which do not fit"

    # The context that all options share.
    prompt = prompt_tokens(item, token_texts)
    num_options = len(item.requests)
    context_name = "context" if num_options == 1 else "context of every option"
    if prompt["shared"]:
        yield f"{context_name}, {_count(len(prompt['shared']), 'token')}:"
        yield from _indent(_join_tokens(prompt["shared"], MAX_CONTEXT_TOKENS))
    else:
        yield "the contexts of the options begin with different tokens"

    if task.answer == "generation":
        yield f"generated: {_count(task.config.max_new_tokens or 0, 'token')} at most"
        answers = [_shorten(answer) for answer in item.answers[:MAX_OPTIONS]]
        num_left_out = len(item.answers) - len(answers)
        more = f" and {num_left_out:,} more" if num_left_out else ""
        yield f"right answers: {', '.join(answers)}{more}"
        if item.gold_request is not None:
            answer_tokens = token_texts.of(item.gold_request.continuation)
            yield f"scored for bpb, {_count(len(answer_tokens), 'token')}:"
            yield from _indent(f"{ANSWER_BORDER}{_join_tokens(answer_tokens, MAX_ANSWER_TOKENS)}")
        return

    # The options, or the only answer. Of a text, it is the part that the window predicts.
    shown_options = [number for number in range(num_options) if number < MAX_OPTIONS or number == item.gold]
    for number in shown_options:
        is_right = task.answer == "choices" and number == item.gold
        context = _join_tokens(prompt["contexts"][number], MAX_CONTEXT_TOKENS)
        answer_tokens = prompt["answers"][number]
        answer = _join_tokens(answer_tokens, MAX_ANSWER_TOKENS)
        noun = f"option {number + 1}" if task.answer == "choices" else "answer"
        yield f"{'*' if is_right else ' '} {noun}, {_count(len(answer_tokens), 'token')}:"
        yield from _indent(f"{context}{ANSWER_BORDER}{answer}")
    if len(shown_options) < num_options:
        yield f"and {_count(num_options - len(shown_options), 'option')} more"


def _join_tokens(tokens: Sequence[str], max_tokens: int) -> str:
    """Return tokens as one text with borders between them, without those in the middle if there are too many.

    Line ends are marked and kept, so that the text has several lines: `the│ cat│↵\\nthe│ dog`.
    """
    if len(tokens) > max_tokens:
        half = max_tokens // 2
        left_out = f" … {len(tokens) - 2 * half:,} tokens are not shown … "
        tokens = [*tokens[:half], left_out, *tokens[-half:]]
    return TOKEN_BORDER.join(tokens).replace("\n", f"{LINE_END}\n")


def _indent(text: str) -> Iterator[str]:
    """Yield the lines of a text, indented."""
    for line in text.split("\n"):
        yield f"    {line}"


def _shorten(text: str) -> str:
    """Return the beginning of a text on one line, with an ellipsis if that is not all of it."""
    text = text.replace("\n", f" {LINE_END} ")
    return text if len(text) <= MAX_QUESTION_CHARACTERS else f"{text[:MAX_QUESTION_CHARACTERS]}…"


def _count(number: int, noun: str) -> str:
    """Return a number with its noun: "1 token", "1,024 tokens"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
