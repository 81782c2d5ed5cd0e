"""Tasks: a file of questions -> prompts -> token ids to be scored.

Owns what a model is asked: columns, delimiters, the choice of examples, and where a prompt ends and an answer begins,
in text and in tokens. Two conventions exist and give different scores: LLM Foundry tokenises the examples, the
context and the answer apart (`separate`); lm-evaluation-harness tokenises all together and divides (`joint`).
"""

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from llmfoundry_lite.config.schema import TaskConfig
from llmfoundry_lite.errors import DataError

COLUMNS = {
    "multiple_choice": ("query", "choices", "gold"),
    "schema": ("context_options", "continuation", "gold"),
    "language_modeling": ("context", "continuation"),
    "generation_task_with_answers": ("context", "answer"),
}


class Encoder(Protocol):
    """What is needed of a tokenizer."""

    @property
    def eos_token_id(self) -> int: ...

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


class Request(NamedTuple):
    """Token ids whose probability is wanted, after others."""

    context: tuple[int, ...]
    """At least one."""
    continuation: tuple[int, ...]
    """At least one."""
    num_characters: int
    """Of the answer's text."""
    num_trimmed: int
    """Tokens of the context that did not fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """A question: one request for each option."""

    index: int
    """Its line in the file, from 0."""
    requests: tuple[Request, ...]
    gold: int = 0
    category: str | None = None
    answers: tuple[str, ...] = ()
    """Generation: all that count as right."""
    has_duplicates: bool = False
    """Two options are the same text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A task for one tokenizer and one number of examples."""

    label: str
    kind: str
    num_fewshot: int
    items: tuple[Item, ...]
    fingerprint: str
    """Of everything that is asked and how: results with different ones cannot be compared."""
    settings: dict[str, Any]
    """What of the configuration went into it, so that a comparison can name what differs."""
    data_fingerprint: str
    """Of the rows or texts alone."""
    skipped: dict[str, int] = field(default_factory=dict)
    """Reason -> items that could not be asked."""
    config: TaskConfig

    @property
    def name(self) -> str:
        return f"{self.label}/{self.num_fewshot}-shot"


def read_rows(config: TaskConfig) -> list[dict[str, Any]]:
    """The file's rows, checked. Raises DataError naming file, line and column."""
    where = config.dataset_uri
    rows = _read_hub(config) if where.startswith("hf://") else _read_jsonl(Path(where), config.label)
    if not rows:
        raise DataError(f"{config.label}: {where} has no rows")
    for number, row in enumerate(rows, start=1):
        _check_row(row, config, f"{config.label}: {where}, line {number}")
    return [{key: _strip(value) for key, value in row.items()} for row in rows] if config.strip_dataset else rows


def _strip(value: Any) -> Any:
    return value.strip() if isinstance(value, str) else value


def _read_jsonl(path: Path, label: str) -> list[dict[str, Any]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise DataError(f"{label}: {path} does not exist; `llmfoundry-lite data fetch-tasks` fetches it") from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{label}: {path} cannot be read: {error}") from None
    rows = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise DataError(f"{label}: {path}, line {number} is not JSON: {error}") from None
        if not isinstance(row, dict):
            raise DataError(f"{label}: {path}, line {number} is not a JSON object")
        rows.append(row)
    return rows


def _read_hub(config: TaskConfig) -> list[dict[str, Any]]:
    import datasets

    name = config.dataset_uri.removeprefix("hf://")
    try:
        found = datasets.load_dataset(name, **config.hf_loading_vars)
    except Exception as error:  # whatever the Hub or its scripts raise
        raise DataError(f"{config.label}: {config.dataset_uri} cannot be loaded: {error}") from error
    if not isinstance(found, datasets.Dataset):
        raise DataError(
            f"{config.label}: {config.dataset_uri} has splits {', '.join(found)}; "
            "choose one: hf_loading_vars: {split: …}"
        )
    rows: list[dict[str, Any]] = found.to_list()
    if not config.hf_parsing_map:
        return rows
    return [
        {ours: " ".join(str(row[column]) for column in theirs) for ours, theirs in config.hf_parsing_map.items()}
        for row in rows
    ]


def _check_row(row: dict[str, Any], config: TaskConfig, where: str) -> None:
    expected = COLUMNS[config.icl_task_type]
    for column in expected:
        if column not in row:
            raise DataError(f"{where}: no column {column!r}; a {config.icl_task_type} task has {', '.join(expected)}")
    options = row.get({"multiple_choice": "choices", "schema": "context_options"}.get(config.icl_task_type, ""))
    if options is None:
        return
    if not isinstance(options, list) or len(options) < 2 or not all(isinstance(option, str) for option in options):
        raise DataError(f"{where}: {options!r} given, expected two or more texts to choose from")
    gold = row["gold"]
    if not isinstance(gold, int) or isinstance(gold, bool) or not 0 <= gold < len(options):
        raise DataError(f"{where}: gold is {gold!r}, expected 0 to {len(options) - 1}")


# ------------------------------------------------------------------------------------------------------- prompts


def prepare(
    config: TaskConfig,
    rows: list[dict[str, Any]],
    num_fewshot: int,
    tokenizer: Encoder,
    *,
    max_seq_len: int,
    tokenization: str,
    limit: int | None = None,
) -> Prepared:
    """Render and tokenise every item."""
    tokenization = config.tokenization or tokenization
    num_reserved = num_fewshot if config.fewshot_fixed else 0
    indices = range(num_reserved, len(rows))[:limit]
    if not indices:
        raise DataError(
            f"{config.label}: {len(rows)} rows, and {num_fewshot} of them are examples: nothing is left to ask"
        )
    encode = _Encoding(tokenizer, tokenization, max_seq_len)
    items, skipped = [], {}
    for index in indices:
        examples = choose_examples(config, len(rows), index, num_fewshot)
        item = _build_item(config, rows, index, examples, encode)
        if isinstance(item, str):
            skipped[item] = skipped.get(item, 0) + 1
        else:
            items.append(item)
    described = {**_decisive(config), "num_fewshot": num_fewshot, "tokenization": tokenization, "limit": limit}
    return Prepared(
        label=config.label,
        kind=config.icl_task_type,
        num_fewshot=num_fewshot,
        items=tuple(items),
        fingerprint=fingerprint([described, rows]),
        settings=described,
        data_fingerprint=fingerprint(rows),
        skipped=skipped,
        config=replace(config, tokenization=tokenization),
    )


def fingerprint(content: Any) -> str:
    text = json.dumps(content, sort_keys=True, ensure_ascii=False)
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _decisive(config: TaskConfig) -> dict[str, Any]:
    """What decides the prompts and their scoring; the name of the task and of its file do not."""
    names = (
        *("icl_task_type", "fewshot_random_seed", "fewshot_fixed", "prompt_string", "example_delimiter"),
        *("continuation_delimiter", "prelimiter", "strip_dataset", "max_new_tokens", "early_stopping_criteria"),
        *("do_normalization", "cot_delimiter"),
    )
    return {name: getattr(config, name) for name in names}


def choose_examples(config: TaskConfig, num_rows: int, index: int, num_fewshot: int) -> list[int]:
    """Rows to show before `index`, never itself. A function of (seed, index): neither ranks nor order matter."""
    if config.fewshot_fixed:
        return list(range(num_fewshot))
    generator = random.Random(f"{config.fewshot_random_seed}/{index}")
    chosen = generator.sample(range(num_rows - 1), min(num_fewshot, num_rows - 1))
    return [row + (row >= index) for row in chosen]


def _build_item(
    config: TaskConfig, rows: list[dict[str, Any]], index: int, examples: list[int], encode: "_Encoding"
) -> "Item | str":
    """An item, or why it cannot be asked."""
    row = rows[index]
    preamble = config.prompt_string
    for example in examples:
        preamble += render_example(config, rows[example], is_first=not preamble)
    contexts, answers, gold = _options(config, row)
    texts = [_render_context(config, context, is_first=not preamble) for context in contexts]
    requests = []
    for text, answer in zip(texts, answers, strict=True):
        request = encode.request(preamble, text, answer, leaves_room=config.max_new_tokens or 0)
        if isinstance(request, str):
            return request
        requests.append(request)
    options = contexts if config.icl_task_type == "schema" else answers
    accepted = [row["answer"], *row.get("aliases", [])] if config.icl_task_type in GENERATION else []
    return Item(
        index=index,
        requests=tuple(requests),
        gold=gold,
        category=str(row["category"]) if config.has_categories and "category" in row else None,
        answers=tuple(accepted),
        has_duplicates=len(set(options)) < len(options),
    )


GENERATION = ("generation_task_with_answers",)


def _options(config: TaskConfig, row: dict[str, Any]) -> tuple[list[str], list[str], int]:
    """(contexts, answers, which is right), one pair for each option."""
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
    """A solved question, as it stands before the one that is asked."""
    contexts, answers, gold = _options(config, row)
    answer = answers[gold]
    if config.icl_task_type in GENERATION:
        thought = row.get("chain_of_thought", "")
        answer = f"{thought}{config.cot_delimiter}{row['answer']}" if thought else row["answer"]
    return _render_context(config, contexts[gold], is_first=is_first) + answer


def _render_context(config: TaskConfig, context: str, *, is_first: bool) -> str:
    return ("" if is_first else config.example_delimiter) + config.prelimiter + context + config.continuation_delimiter


# -------------------------------------------------------------------------------------------------------- tokens


class _Encoding:
    """Text -> requests, by one convention."""

    def __init__(self, tokenizer: Encoder, tokenization: str, max_seq_len: int):
        self.tokenizer = tokenizer
        self.is_joint = tokenization == "joint"
        # The last token is predicted and never read, so one more fits; LLM Foundry does not use that.
        self.max_tokens = max_seq_len + self.is_joint
        # Byte-level BPE has a token for " a"; SentencePiece adds the space by itself.
        self.needs_space = len(tokenizer.encode(" a")) == 1
        self._known: dict[str, list[int]] = {}

    def request(self, preamble: str, context: str, answer: str, leaves_room: int = 0) -> Request | str:
        if self.is_joint:
            ids, answer_ids = self._joint(preamble + context, answer)
        else:
            ids, answer_ids = self._separate(preamble, context, answer)
        room = self.max_tokens - max(len(answer_ids), leaves_room)
        ids = ids or [self.tokenizer.eos_token_id]  # something to predict the first token from
        if answer and not answer_ids:
            return "an answer without tokens"
        if room < 1:
            return "an answer longer than the model"
        return Request(tuple(ids[-room:]), tuple(answer_ids), len(answer), max(0, len(ids) - room))

    def _separate(self, preamble: str, context: str, answer: str) -> tuple[list[int], list[int]]:
        if self.needs_space and answer and not answer.startswith(" "):
            answer = " " + answer
        return self._encode(preamble) + self._encode(context.rstrip()), self._encode(answer)

    def _joint(self, context: str, answer: str) -> tuple[list[int], list[int]]:
        """White space at the context's end goes to the answer, where tokenizers like to have it."""
        stripped = context.rstrip()
        if not answer:
            return self.tokenizer.encode(stripped), []
        whole = self.tokenizer.encode(context + answer)
        num_context = len(self._encode(stripped))
        return whole[:num_context], whole[num_context:]

    def _encode(self, text: str) -> list[int]:
        """Remembers, because the choices of an item share their context."""
        if text not in self._known:
            if len(self._known) > 4096:
                self._known.clear()
            self._known[text] = self.tokenizer.encode(text) if text else []
        return self._known[text]
