"""Tasks: a file of questions -> rows -> prompts -> token ids to be scored; held-out text -> windows of token ids.

Two conventions exist and give different scores. LLM Foundry tokenises examples, context and answer apart (`separate`).
lm-evaluation-harness tokenises all of it together and then divides the tokens (`joint`).
"""

import bisect
import contextlib
import functools
import hashlib
import json
import random
import re
import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from llmfoundry_lite import companions
from llmfoundry_lite.bounded import (
    MAX_LINE_BYTES,
    MAX_LOG_BYTES,
    TooLargeError,
    read_at_most,
    read_json,
    read_lines_at_most,
)
from llmfoundry_lite.config.eval_schema import TaskConfig
from llmfoundry_lite.data.spelling import LostText, Speller, lost_text_from_json
from llmfoundry_lite.data.tokenizer import Tokenizer
from llmfoundry_lite.errors import DataError

COLUMNS = {
    "multiple_choice": ("query", "choices", "gold"),
    "schema": ("context_options", "continuation", "gold"),
    "language_modeling": ("context", "continuation"),
    "generation_task_with_answers": ("context", "answer"),
}
SEPARATE = "separate"
"""Tokenization of context and answer where nothing else is said, as in a run's own evaluations."""
CHOICES = ("multiple_choice", "schema")
GENERATION = ("generation_task_with_answers",)
TEXT_SETTINGS = {"icl_task_type": "perplexity", "windows": "the last with full context"}
"""Settings that all held-out text shares."""
LINES = (".jsonl", ".json", ".ndjson")
"""Suffixes of text files with a row on each line, as `data prepare` reads them."""
TEXTS_AT_ONCE = 4096
"""Number of texts that are tokenised together, on all cores: one after the other, a large task takes ten seconds."""
CHECKED_CHARACTERS = 10_000
"""Beginning of a text that is tokenised to see whether it has tokens."""
THOUGHT_ALLOWANCE = 10
"""Tokens by which a model's reasoning may exceed the longest in the file, as in LLM Foundry."""


class Request(NamedTuple):
    """Token ids whose probability is wanted, and those before them."""

    context: tuple[int, ...]
    continuation: tuple[int, ...]  # empty for an answer that the model is to write
    num_characters: int  # characters of the answer's text; of a window of text, its bytes
    num_trimmed: int  # tokens of the context that did not fit


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """A question: one request for each option."""

    index: int  # the line in the file, from 0
    requests: tuple[Request, ...]
    gold: int = 0
    category: str | None = None
    cluster: str | None = None  # items of one cluster are not independent
    num_missing_examples: int = 0  # examples that were asked for and that its category does not have
    answers: tuple[str, ...] = ()  # generation: all that count as right
    has_duplicates: bool = False  # two options are the same text


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A task for one tokenizer and one number of examples."""

    label: str
    kind: str
    num_fewshot: int
    items: tuple[Item, ...]
    fingerprint: str  # hash of the questions and how they are asked; only equal ones can be compared
    settings: dict[str, Any]
    """The part of the configuration that the fingerprint covers, so that a comparison can name what differs."""
    data_fingerprint: str  # hash of the rows or texts alone
    beginning: list[int] = field(default_factory=list)  # token ids before every text
    num_repeated: int = 0  # items that repeat an earlier one, and are in its cluster
    skipped: dict[str, int] = field(default_factory=dict)  # reason -> items that could not be asked
    lost_text: dict[str, Any] | None = None  # held-out text that its tokens do not spell: `LostText.as_json`
    config: TaskConfig

    @property
    def name(self) -> str:
        return f"{self.label}/{self.num_fewshot}-shot"

    @property
    def metric(self) -> str:
        """Name of the number in tables and in the average, as in LLM Foundry."""
        if self.kind == "perplexity":
            return "bits_per_byte"
        return self.config.metric or ("acc_per_token" if self.kind in CHOICES else "acc")


# ------------------------------------------------------------------------------------------------------------- rows


class NothingToAsk(DataError):
    """A task has no item that this model can be asked. A gauntlet leaves it out."""


def read_rows(config: TaskConfig) -> list[dict[str, Any]]:
    """Return the rows of the task's file or data set. Raises DataError, which names file, line and column."""
    where = config.dataset_uri
    if where.startswith("hf://"):
        read_hub = companions.load("llmfoundry_formats.hub_tasks:read_hub", f"{config.label}: {where}")
        found = read_hub(config)
    else:
        found = [row for row, _ in read_json_lines(config)]
    if not found:
        raise NothingToAsk(f"{config.label}: {where} has no rows")
    for number, row in enumerate(found, start=1):
        _check_row(row, config, f"{config.label}: {where}, line {number}")
    return [{key: _strip(value) for key, value in row.items()} for row in found] if config.strip_dataset else found


def _strip(value: Any) -> Any:
    return value.strip() if isinstance(value, str) else value


def read_json_lines(config: TaskConfig) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield each row, and its file and line. Raises DataError."""
    with _naming_the_file(config):
        for number, content in enumerate(read_lines_at_most(config.dataset_uri, MAX_LOG_BYTES, "a task"), start=1):
            line = content.decode("utf-8-sig" if number == 1 else "utf-8")
            if not line.strip():
                continue
            where = f"{config.label}: {config.dataset_uri}, line {number}"
            try:
                row = json.loads(line)
                json.dumps(row, ensure_ascii=False).encode()
            except UnicodeEncodeError:  # JSON can escape half of a surrogate pair; tokenizers refuse it
                raise DataError(f"{where} has half a character, such as \\ud83d alone") from None
            except (ValueError, RecursionError) as error:
                reason = "too deep" if isinstance(error, RecursionError) else error
                raise DataError(f"{where} is not JSON: {reason}") from None
            if not isinstance(row, dict):
                raise DataError(f"{where} is not a JSON object")
            yield row, where


def read_text(config: TaskConfig) -> str:
    """Return the task's file as text, with line ends unchanged. Raises DataError."""
    with _naming_the_file(config):
        return read_at_most(config.dataset_uri, MAX_LINE_BYTES, "a text").decode("utf-8-sig")


@contextlib.contextmanager
def _naming_the_file(config: TaskConfig) -> Iterator[None]:
    label, path = config.label, config.dataset_uri
    try:
        yield
    except FileNotFoundError:
        raise DataError(
            f"{label}: {path} does not exist; in a clone, `python scripts/fetch_tasks.py` fetches the public tasks, "
            "`python scripts/make_tasks.py` makes our own, data_root=…/llm-foundry/scripts finds LLM Foundry's, "
            "skip_missing_tasks=true leaves it out"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{label}: {path} cannot be read: {error}") from error


def _check_row(row: dict[str, Any], config: TaskConfig, where: str) -> None:
    kind = config.icl_task_type
    for column in COLUMNS[kind]:
        if column not in row:
            raise DataError(f"{where}: no column {column!r}; a {kind} task has {', '.join(COLUMNS[kind])}")
        if column in ("query", "context", "continuation", "answer") and not isinstance(row[column], str):
            raise DataError(f"{where}: {column} is {row[column]!r}, expected a text")
    aliases = row.get("aliases") or []
    if kind in GENERATION and not _are_texts(aliases):
        raise DataError(f"{where}: aliases is {aliases!r}, expected texts")
    if config.has_categories and "category" not in row:
        raise DataError(f"{where}: no column 'category', which has_categories asks for")
    grouping = {"category": "has_categories asks for"} if config.has_categories else {}
    grouping |= {} if config.cluster is None else {config.cluster: "cluster names"}
    for column, why in grouping.items():
        if not isinstance(row.get(column), str | int):
            expected = f"expected a text or a whole number, because {why} this column"
            raise DataError(f"{where}: {column} is {row.get(column)!r}, {expected}")
    if kind not in CHOICES:
        return
    options, gold = row["choices" if kind == "multiple_choice" else "context_options"], row["gold"]
    if not _are_texts(options) or len(options) < 2:
        raise DataError(f"{where}: {options!r} given, expected two or more texts to choose from")
    if not isinstance(gold, int) or isinstance(gold, bool) or not 0 <= gold < len(options):
        raise DataError(f"{where}: gold is {gold!r}, expected 0 to {len(options) - 1}")


def _are_texts(values: Any) -> TypeGuard[list[str]]:
    return isinstance(values, list) and all(isinstance(value, str) for value in values)


# ---------------------------------------------------------------------------------------------------------- prompts


def prepare_task(
    config: TaskConfig,
    rows: list[dict[str, Any]],
    num_fewshot: int,
    tokenizer: Tokenizer,
    *,
    max_seq_len: int,
    tokenization: str,
    limit: int | None = None,
) -> Prepared:
    """Render and tokenise every item. Raises DataError when there are too few rows, or none that can be asked."""
    config = resolve_settings(config, num_fewshot, tokenization)
    settings = settings_of(config, num_fewshot, limit_that_cuts(limit, len(find_askable(config, rows, num_fewshot))))
    if config.icl_task_type in GENERATION and (stops := stop_tokens_of(tokenizer)):
        settings["stop_tokens"] = stops  # only where there are any, or older results would differ
    if config.icl_task_type in GENERATION and config.max_new_tokens is None:
        config = replace(config, max_new_tokens=longest_answer(config, rows, tokenizer))
    clusters = find_clusters(config, rows)
    skipped = dict[str, list[int]]()
    items = [
        replace(item, cluster=clusters.get(item.index))
        for item in _build_items(config, rows, num_fewshot, tokenizer, max_seq_len, limit, skipped)
    ]
    if skipped or any(request.num_trimmed for item in items for request in item.requests):
        settings["max_seq_len"] = max_seq_len  # it cut a prompt; otherwise it changes nothing
    return Prepared(
        label=config.label,
        kind=config.icl_task_type,
        num_fewshot=num_fewshot,
        items=tuple(items),
        fingerprint=fingerprint([settings, rows]),
        settings=settings,
        data_fingerprint=data_fingerprint(rows),
        beginning=tokenizer.beginning,
        num_repeated=len(items) - len({_question(config, rows[item.index]) for item in items}),
        skipped={f"{reason}, first in row {found[0] + 1}": len(found) for reason, found in skipped.items()},
        config=config,
    )


def check_task(
    config: TaskConfig, tokenizer: Tokenizer, *, tokenization: str, max_seq_len: int, limit: int | None
) -> None:
    """Raise DataError where `prepare_task` or `prepare_text` would: for rows that cannot be read or used, and where
    nothing can be asked. All rows are read, and tokenised only up to the first item that can be asked. Not for MDS
    splits."""
    if config.icl_task_type == "perplexity":
        _check_text(config, tokenizer)
        return
    rows = read_rows(config)
    if config.icl_task_type in GENERATION and config.max_new_tokens is None:
        config = replace(config, max_new_tokens=longest_answer(config, rows, tokenizer))
    for num_fewshot in config.num_fewshot:
        task = resolve_settings(config, num_fewshot, tokenization)
        next(_build_items(task, rows, num_fewshot, tokenizer, max_seq_len, limit, {}))


def _check_text(config: TaskConfig, tokenizer: Tokenizer) -> None:
    is_lines = Path(config.dataset_uri).suffix in LINES
    has_tokens = False
    for text in _texts(config) if is_lines else [read_text(config)]:
        has_tokens = has_tokens or bool(tokenizer.encode(text[:CHECKED_CHARACTERS]))
    if not has_tokens:
        raise NothingToAsk(f"{config.label}: {config.dataset_uri} has no text")


def _build_items(
    config: TaskConfig,
    rows: list[dict[str, Any]],
    num_fewshot: int,
    tokenizer: Tokenizer,
    max_seq_len: int,
    limit: int | None,
    skipped: dict[str, list[int]],
) -> Iterator[Item]:
    """Yield the items that can be asked, one at least; `skipped` gets the others by reason. Raises DataError."""
    groups = groups_of(config, rows)
    if num_fewshot >= max(map(len, groups)):
        raise DataError(
            f"{config.label}: {config.dataset_uri} has {max(map(len, groups))} rows"
            f"{' in its largest category' if config.has_categories else ''}, "
            f"too few for {num_fewshot} examples and a question"
        )
    group_of = {index: group for group in groups for index in group}
    encode = _Encoding(tokenizer, config, max_seq_len)
    is_empty = True
    for index in find_askable(config, rows, num_fewshot)[:limit]:
        examples = choose_examples(config, group_of[index], index, num_fewshot)
        try:
            item = _build_item(config, rows, index, examples, encode)
        except _Unaskable as reason:
            skipped.setdefault(str(reason), []).append(index)
            continue
        is_empty = False
        yield replace(item, num_missing_examples=num_fewshot - len(examples))
    if is_empty:
        reasons = ", ".join(f"{len(indices)} with {reason}" for reason, indices in skipped.items())
        raise NothingToAsk(f"{config.label}: no item can be asked of a model of {max_seq_len} tokens: {reasons}")


def fingerprint(content: Any) -> str:
    text = json.dumps(content, sort_keys=True, ensure_ascii=False)
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def data_fingerprint(rows: list[dict[str, Any]]) -> str:
    """Return a hash of the rows, which is the same with and without strip_dataset."""
    return fingerprint([{key: _strip(value) for key, value in row.items()} for row in rows])


def _question(config: TaskConfig, row: dict[str, Any]) -> str:
    contexts, answers, _ = _options(config, row)
    return fingerprint([contexts, answers])


def find_clusters(config: TaskConfig, rows: list[dict[str, Any]]) -> dict[int, str]:
    """Return row -> cluster, for rows that share a value of the column `cluster` or ask the same. Empty if none do."""
    column = config.cluster
    keys = [[("question", _question(config, row))] for row in rows]
    for row, own in zip(rows, keys, strict=True):
        own += [] if column is None else [("cluster", str(row[column]))]
    first = join_rows(keys)
    if column is None and first == list(range(len(rows))):
        return {}
    return {i: str(found if column is None else rows[found][column]) for i, found in enumerate(first)}


def join_rows(keys: Sequence[Sequence[tuple[str, str]]]) -> list[int]:
    """Return, for each row, the first row of its group. Rows that share any of their keys are in one group."""
    root, first_of = list(range(len(keys))), dict[tuple[str, str], int]()

    def find(index: int) -> int:
        while root[index] != index:
            root[index] = index = root[root[index]]
        return index

    for index, own in enumerate(keys):
        for key in own:
            ends = find(first_of.setdefault(key, index)), find(index)
            root[max(ends)] = min(ends)
    return list(map(find, range(len(keys))))


def find_askable(config: TaskConfig, rows: list[dict[str, Any]], num_fewshot: int) -> list[int]:
    """Return the rows that are asked: all except those that serve as fixed examples."""
    if not config.fewshot_fixed:
        return list(range(len(rows)))
    reserved = {index for group in groups_of(config, rows) for index in group[:num_fewshot]}
    return [index for index in range(len(rows)) if index not in reserved]


def resolve_settings(config: TaskConfig, num_fewshot: int, tokenization: str) -> TaskConfig:
    """Return the task with the settings that follow from the number of examples and the evaluation's tokenization.

    LLM Foundry has no delimiter before a schema task's question if nothing precedes it. Where context and answer are
    tokenised together, a space remains.
    """
    tokenization, delimiter = config.tokenization or tokenization, config.continuation_delimiter
    if config.icl_task_type == "schema" and not num_fewshot and not config.prompt_string:
        if tokenization == "joint":
            delimiter = " " if delimiter.strip() else delimiter
        elif delimiter.strip() or not config.strip_dataset:
            delimiter = ""
    return replace(config, tokenization=tokenization, continuation_delimiter=delimiter)


def limit_that_cuts(limit: int | None, num_items: int) -> int | None:
    """Return the limit; None if all items fit into it, so that the evaluation is the same without it."""
    return limit if limit is not None and limit < num_items else None


def groups_of(config: TaskConfig, rows: list[dict[str, Any]]) -> list[list[int]]:
    """Return groups of rows from which an item's examples come: its category, as in LLM Foundry, or all rows."""
    groups: dict[str, list[int]] = {}
    for index, row in enumerate(rows):
        groups.setdefault(str(row["category"]) if config.has_categories else "", []).append(index)
    return list(groups.values())


def settings_of(config: TaskConfig, num_fewshot: int, limit: int | None) -> dict[str, Any]:
    """Return the settings of a decided task that shape prompts and scores. The names of task and file do not."""
    names = (
        *("icl_task_type", "fewshot_random_seed", "fewshot_fixed", "prompt_string", "example_delimiter"),
        *("continuation_delimiter", "prelimiter", "strip_dataset", "max_new_tokens", "early_stopping_criteria"),
        *("do_normalization", "cot_delimiter", "metric"),
        # Only where they are set, or older results would differ.
        *(name for name in ("has_categories", "cluster") if getattr(config, name)),
    )
    decisive = {name: getattr(config, name) for name in names}
    return {**decisive, "num_fewshot": num_fewshot, "tokenization": config.tokenization, "limit": limit}


def choose_examples(config: TaskConfig, group: Sequence[int], index: int, num_fewshot: int) -> list[int]:
    """Return rows of the sorted `group` to show before row `index`, which is never among them; all if there are fewer.
    The choice depends on (seed, index) alone, not on ranks or order."""
    if config.fewshot_fixed:
        return list(group[:num_fewshot])
    place, num_others = bisect.bisect_left(group, index), len(group) - 1
    generator = random.Random(f"{config.fewshot_random_seed}/{index}")
    chosen = generator.sample(range(num_others), min(num_fewshot, num_others))
    return [group[i + (i >= place)] for i in chosen]


def _build_item(
    config: TaskConfig, rows: list[dict[str, Any]], index: int, examples: list[int], encode: "_Encoding"
) -> Item:
    """Render and tokenise one item. Raises _Unaskable."""
    row, preamble, is_written = rows[index], config.prompt_string, config.icl_task_type in GENERATION
    for example in examples:
        preamble += render_example(config, rows[example], is_first=not preamble)
    contexts, answers, gold = _options(config, row)
    texts = [_render_context(config, context, is_first=not preamble) for context in contexts]
    if is_written:
        requests = [encode.prompt(preamble, text, config.max_new_tokens or 1) for text in texts]
    else:
        requests = [encode.request(preamble, text, answer) for text, answer in zip(texts, answers, strict=True)]
    options = contexts if config.icl_task_type == "schema" else answers
    accepted = _accepted(row) if is_written else []
    if accepted and not any(clean(config, answer) for answer in accepted):
        raise _Unaskable("answers of which nothing is left to compare")
    return Item(
        index=index,
        requests=tuple(requests),
        gold=gold,
        category=str(row["category"]) if config.has_categories else None,
        answers=tuple(accepted),
        has_duplicates=len({option.strip() for option in options}) < len(options),
    )


def _options(config: TaskConfig, row: dict[str, Any]) -> tuple[list[str], list[str], int]:
    """Return (contexts, answers, index of the right option), with one context and answer for each option."""
    match config.icl_task_type:
        case "multiple_choice":
            return [row["query"]] * len(row["choices"]), row["choices"], row["gold"]
        case "schema":
            return row["context_options"], [row["continuation"]] * len(row["context_options"]), row["gold"]
        case "language_modeling":
            return [row["context"]], [row["continuation"]], 0
        case _:
            return [row["context"]], [""], 0


def render_example(config: TaskConfig, row: dict[str, Any], *, is_first: bool) -> str:
    """Render a solved question, as an example before the one that is asked."""
    contexts, answers, gold = _options(config, row)
    answer = _solution(config, row, row["answer"]) if config.icl_task_type in GENERATION else answers[gold]
    return _render_context(config, contexts[gold], is_first=is_first) + answer


def _render_context(config: TaskConfig, context: str, *, is_first: bool) -> str:
    return ("" if is_first else config.example_delimiter) + config.prelimiter + context + config.continuation_delimiter


def _solution(config: TaskConfig, row: dict[str, Any], answer: str) -> str:
    """Return an answer as an example shows it. If the file has chains of thought, the delimiter precedes each answer,
    as in LLM Foundry: the model should write it too, and its own answer is read after it."""
    return f"{row['chain_of_thought'] or ''}{config.cot_delimiter}{answer}" if "chain_of_thought" in row else answer


def _accepted(row: dict[str, Any]) -> list[str]:
    return [row["answer"], *(row.get("aliases") or [])]


def longest_answer(config: TaskConfig, rows: list[dict[str, Any]], tokenizer: Tokenizer) -> int:
    """Return the tokens that a model may use for its answer, counted as in LLM Foundry: with reasoning, and with the
    tokens that the tokenizer begins with."""
    solutions = [_solution(config, row, answer) for row in rows for answer in _accepted(row)]
    longest = 0
    for start in range(0, len(solutions), TEXTS_AT_ONCE):
        ids_of_each = tokenizer.encode_batch(solutions[start : start + TEXTS_AT_ONCE])
        longest = max(longest, *map(len, ids_of_each))
    return len(tokenizer.beginning) + longest + (THOUGHT_ALLOWANCE if config.cot_delimiter else 0)


def stop_tokens_of(tokenizer: Tokenizer) -> list[str]:
    """Return the texts of the tokens, besides the end of text, that end an answer."""
    others = sorted(tokenizer.stop_token_ids - {tokenizer.eos_token_id})
    return [tokenizer.decode([token]) for token in others if token < tokenizer.vocab_size]


def clean(config: TaskConfig, text: str) -> str:
    """Return the text to compare: in lower case, without punctuation, articles and double spaces; or unchanged."""
    if not config.do_normalization:
        return text.strip()
    marks = string.punctuation + "‘’´`"
    text = "".join(" " if c in marks else c for c in text.lower())
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def is_right(config: TaskConfig, text: str, answers: Sequence[str]) -> bool:
    """Return whether the text begins with one of the answers, after the clean-up LLM Foundry takes from TriviaQA."""
    if config.cot_delimiter:
        text = text.split(config.cot_delimiter)[-1]
    text = clean(config, text)
    return any(text.startswith(wanted) for answer in answers if (wanted := clean(config, answer)))


# ----------------------------------------------------------------------------------------------------------- tokens


class _Unaskable(Exception):
    """The reason why an item is skipped."""


class _Encoding:
    """Encoding of text into requests, by one convention. Both put the tokens that the tokenizer begins with before the
    first text and nowhere else. Trimming may remove them."""

    def __init__(self, tokenizer: Tokenizer, config: TaskConfig, max_seq_len: int):
        self.tokenizer = tokenizer
        self.strips = config.strip_dataset
        self.is_joint = config.tokenization == "joint"
        # The last token is predicted and never read, so one more fits. LLM Foundry does not use that.
        self.max_tokens = max_seq_len + self.is_joint
        # Byte-level BPE has a token for " a"; SentencePiece adds the space by itself.
        self.needs_space = len(tokenizer.encode(" a")) == 1
        self._encode = functools.lru_cache(4096)(tokenizer.encode)  # the choices of an item share their context

    def request(self, preamble: str, context: str, answer: str) -> Request:
        if self.is_joint:
            # White space at the context's end goes to the answer, where tokenizers like to have it. As in
            # lm-evaluation-harness the context is what it is by itself, and of the whole what is beyond its length is
            # the answer: what the answer's first token would swallow of the context stays with the context.
            before = self._encode((preamble + context).rstrip())
            ids = self.tokenizer.beginning + before
            answer_ids = self.tokenizer.encode(preamble + context + answer)[len(before) :]
        else:
            space = " " if self.needs_space and answer and not answer.startswith(" ") else ""
            ids, answer_ids = self._apart(preamble, context), self._encode(space + answer)
        if not answer_ids:
            joined = "an answer that one token joins to its context (tokenization: separate has it apart)"
            raise _Unaskable(joined if answer.strip() else "an answer without tokens")
        return self._fit(ids, answer_ids, len(answer_ids), len(answer))

    def prompt(self, preamble: str, context: str, num_tokens: int) -> Request:
        """Return a request whose answer, of up to `num_tokens`, the model writes."""
        if self.is_joint:
            preamble, context = "", preamble + context
        return self._fit(self._apart(preamble, context), [], num_tokens, 0)

    def _fit(self, ids: list[int], answer_ids: list[int], num_tokens: int, num_characters: int) -> Request:
        room = self.max_tokens - num_tokens
        if room < 1:
            raise _Unaskable("an answer longer than the model")
        ids = ids or [self.tokenizer.prefix_token_id]  # the first token needs one before it
        return Request(tuple(ids[-room:]), tuple(answer_ids), num_characters, max(0, len(ids) - room))

    def _apart(self, preamble: str, context: str) -> list[int]:
        context = context.rstrip() if self.strips else context
        return self.tokenizer.beginning + self._encode(preamble) + self._encode(context)


# ---------------------------------------------------------------------------------------------------- held-out text


class Document(NamedTuple):
    """Tokens to be predicted, those before them, and the file's content: a text, or a sample's tokens."""

    before: int
    ids: list[int]
    num_bytes: int  # of the text that the tokens stand for
    source: str | list[int]


def prepare_text(config: TaskConfig, tokenizer: Tokenizer, *, max_seq_len: int, limit: int | None) -> Prepared:
    """Return windows, each of which predicts the next `max_seq_len` tokens from the token before them. The last window
    predicts fewer, after as much text as fits, as in lm-evaluation-harness's rolling perplexity.

    A text file is one document. In a file of JSON lines, each row's `text` is one. Both are predicted from the
    tokenizer's beginning, or its beginning-of-text or end-of-text token. In an MDS split each sample is a document,
    whose first token is given. An item's `index` is its document's; equal documents are a cluster. A request's
    `num_characters` counts the bytes of text that the tokens stand for. `limit` counts windows. Raises DataError.
    """
    items, loss = list[Item](), LostText()
    first_of: dict[str, int] = {}
    digest, is_cut = hashlib.sha256(), False
    for number, document in enumerate(_documents(config, tokenizer, loss)):
        if is_cut := limit is not None and len(items) >= limit:
            break
        source = json.dumps(document.source)
        digest.update(source.encode())
        cluster = str(first_of.setdefault(source, number))
        for request in windows_of(document, tokenizer, max_seq_len):
            items.append(Item(index=number, requests=(request,), cluster=cluster))
    is_cut = is_cut or (limit is not None and len(items) > limit)
    items = items[:limit]
    if all(item.cluster == str(item.index) for item in items):  # no document is repeated
        items = [replace(item, cluster=None) for item in items]
    if not items:
        raise NothingToAsk(f"{config.label}: {config.dataset_uri} has no text")
    settings = {**TEXT_SETTINGS, "max_seq_len": max_seq_len, "limit": limit if is_cut else None}
    data_fingerprint = f"sha256:{digest.hexdigest()[:16]}"
    digest.update(json.dumps(settings).encode())
    if not loss.is_none:  # fewer bytes count than for tokenizers that spell everything
        digest.update(loss.stored().encode())
    return Prepared(
        label=config.label,
        kind="perplexity",
        lost_text=None if loss.is_none else loss.as_json(),
        num_fewshot=0,
        items=tuple(items),
        fingerprint=f"sha256:{digest.hexdigest()[:16]}",
        settings=settings,
        data_fingerprint=data_fingerprint,
        beginning=tokenizer.beginning,
        config=config,
    )


def windows_of(document: Document, tokenizer: Tokenizer, max_seq_len: int) -> Iterator[Request]:
    """Yield windows whose bytes add up to the document's. A character that two windows share may count in either. The
    last window gets the remaining bytes."""
    ids, left = document.ids, document.num_bytes
    for start in range(0, len(ids), max_seq_len):
        window = ids[start : start + max_seq_len]
        is_last = start + max_seq_len >= len(ids)
        num_bytes = left if is_last else min(left, len(tokenizer.decode(window).encode()))
        left -= num_bytes
        first = start + len(window) - max_seq_len - 1
        context = ids[first:start] if start else [document.before]
        yield Request(tuple(context), tuple(window), num_bytes, 0)


def _documents(config: TaskConfig, tokenizer: Tokenizer, loss: LostText) -> Iterator[Document]:
    """Yield the documents, and add the characters that their tokens do not spell to `loss`."""
    path = Path(config.dataset_uri)
    if (path / "index.json").is_file():
        from llmfoundry_lite.data.baselines import read_shards  # imports mosaicml-streaming

        loss += lost_text_of_split(path)
        silent = (tokenizer.eos_token_id, tokenizer.prefix_token_id, tokenizer.unk_token_id)  # these stand for no text
        try:
            for before, *ids in (
                row for tokens_nt in read_shards(path, tokenizer.vocab_size) for row in tokens_nt.tolist()
            ):
                written = tokenizer.decode([token for token in ids if token not in silent])
                yield Document(before, ids, len(written.encode()), [before, *ids])
        except TooLargeError as error:
            raise DataError(f"{config.label}: {error}") from error
        except (ValueError, LookupError, OSError) as error:
            raise DataError(f"{config.label}: {path} is no MDS split of tokens ({error})") from error
        return
    speller = Speller(tokenizer)
    for text in _texts(config) if path.suffix in LINES else [read_text(config)]:
        if (document := document_of(text, tokenizer)).ids:
            lost = speller.measure(text)
            loss += lost
            yield document._replace(num_bytes=document.num_bytes - lost.lost_bytes)


def lost_text_of_split(split: Path) -> LostText:
    """Return the lost text that `data prepare` recorded beside a split; an empty LostText without a record."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        return lost_text_from_json(read_json(split.parent / "summary.json", "a summary")["lost_text"])
    return LostText()


def document_of(text: str, tokenizer: Tokenizer) -> Document:
    before = [tokenizer.prefix_token_id, *tokenizer.beginning][-1]
    return Document(before, tokenizer.encode(text), len(text.encode()), text)


def _texts(config: TaskConfig) -> Iterator[str]:
    for row, where in read_json_lines(config):
        if not isinstance(row.get("text"), str):
            raise DataError(f"{where}: text is {row.get('text')!r}, expected a text")
        yield row["text"]
