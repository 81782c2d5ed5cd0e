"""Tasks: a file of questions -> prompts -> token ids to be scored.

Owns what a model is asked: delimiters, the choice of examples, and where a prompt ends and an answer begins, in text
and in tokens. Leaves the file and its columns to `rows.py`. Two conventions exist and give different scores: LLM
Foundry tokenises the examples, the context and the answer apart (`separate`); lm-evaluation-harness tokenises all
together and divides (`joint`).
"""

import bisect
import hashlib
import json
import random
import re
import string
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

from llmfoundry_lite.config.schema import TaskConfig
from llmfoundry_lite.errors import DataError
from llmfoundry_lite.evaluation.rows import GENERATION, strip

THOUGHT_ALLOWANCE = 10
"""Tokens by which a model's reasoning may be longer than the longest in the file, as in LLM Foundry."""


TEXT_SETTINGS = {"icl_task_type": "perplexity", "windows": "the last with full context"}
"""Settings that all held-out text shares."""


class Encoder(Protocol):
    """What is needed of a tokenizer."""

    @property
    def eos_token_id(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def prefix_token_id(self) -> int:
        """Token that a text with nothing before it is predicted from."""
        ...

    @property
    def beginning(self) -> list[int]:
        """What stands before every text, once, such as Llama's `<s>`."""
        ...

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
    cluster: str | None = None
    """Items with the same one are not independent."""
    num_missing_examples: int = 0
    """By how many its category is too small for the examples asked for."""
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
    beginning: list[int] = field(default_factory=list)
    """Token ids before every text, which the tokenizer's template decides."""
    num_repeated: int = 0
    """Items that ask the same as an earlier one, with which they are a cluster."""
    skipped: dict[str, int] = field(default_factory=dict)
    """Reason -> items that could not be asked."""
    config: TaskConfig

    @property
    def name(self) -> str:
        return f"{self.label}/{self.num_fewshot}-shot"

    @property
    def metric(self) -> str:
        """What goes into tables and the average, as in LLM Foundry."""
        if self.kind == "perplexity":
            return "bits_per_byte"
        return self.config.metric or ("acc_per_token" if self.kind in ("multiple_choice", "schema") else "acc")


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
    """Render and tokenise every item. Raises DataError when there are too few rows, or none that can be asked."""
    tokenization = config.tokenization or tokenization
    groups = groups_of(config, rows)
    askable = find_askable(config, rows, num_fewshot)
    indices = askable[:limit]
    group_of = {index: group for group in groups for index in group}
    if num_fewshot >= max(map(len, groups)):
        raise DataError(
            f"{config.label}: {config.dataset_uri} has {max(map(len, groups))} rows"
            f"{' in its largest category' if config.has_categories else ''}, "
            f"too few for {num_fewshot} examples and a question"
        )
    described = settings_of(config, num_fewshot, tokenization, limit_that_cuts(limit, len(askable)))
    if config.icl_task_type in GENERATION and config.max_new_tokens is None:
        config = replace(config, max_new_tokens=longest_answer(config, rows, tokenizer))
    clusters = find_clusters(config, rows)
    encode = _Encoding(tokenizer, tokenization, max_seq_len, strips=config.strip_dataset)
    items, skipped = [], {}
    for index in indices:
        examples = choose_examples(config, group_of[index], index, num_fewshot)
        item = _build_item(config, rows, index, examples, encode)
        if isinstance(item, str):
            skipped[item] = skipped.get(item, 0) + 1
        else:
            missing = num_fewshot - len(examples)
            items.append(replace(item, num_missing_examples=missing, cluster=clusters.get(index)))
    if not items:
        reasons = ", ".join(f"{count} with {reason}" for reason, count in skipped.items())
        raise DataError(f"{config.label}: no item can be asked of a model of {max_seq_len} tokens: {reasons}")
    if skipped or any(request.num_trimmed for item in items for request in item.requests):
        described["max_seq_len"] = max_seq_len  # which otherwise has no part in what was asked
    return Prepared(
        label=config.label,
        kind=config.icl_task_type,
        num_fewshot=num_fewshot,
        items=tuple(items),
        fingerprint=fingerprint([described, rows]),
        settings=described,
        data_fingerprint=data_fingerprint(rows),
        beginning=tokenizer.beginning,
        num_repeated=len(items) - len({question_of(config, rows[item.index]) for item in items}),
        skipped=skipped,
        config=replace(config, tokenization=tokenization),
    )


def fingerprint(content: Any) -> str:
    text = json.dumps(content, sort_keys=True, ensure_ascii=False)
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def data_fingerprint(rows: list[dict[str, Any]]) -> str:
    """The same whether strip_dataset is set or not."""
    return fingerprint([{key: strip(value) for key, value in row.items()} for row in rows])


def question_of(config: TaskConfig, row: dict[str, Any]) -> str:
    """Return a fingerprint of what a row asks, without its other columns."""
    contexts, answers, _ = _options(config, row)
    return fingerprint([contexts, answers])


def find_clusters(config: TaskConfig, rows: list[dict[str, Any]]) -> dict[int, str]:
    """The cluster of each row: rows are in one that share the column `cluster`, or ask the same. Empty where all rows
    are independent."""
    root, first_of = list(range(len(rows))), dict[tuple[str, str], int]()

    def find(index: int) -> int:
        while root[index] != index:
            root[index] = index = root[root[index]]
        return index

    for index, row in enumerate(rows):
        keys = [("question", question_of(config, row))]
        keys += [] if config.cluster is None else [("cluster", str(row[config.cluster]))]
        for key in keys:
            ends = find(first_of.setdefault(key, index)), find(index)
            root[max(ends)] = min(ends)
    if config.cluster is None and len(first_of) == len(rows):
        return {}
    found = {index: find(index) for index in range(len(rows))}
    return {i: str(first) if config.cluster is None else str(rows[first][config.cluster]) for i, first in found.items()}


def find_askable(config: TaskConfig, rows: list[dict[str, Any]], num_fewshot: int) -> list[int]:
    """Rows that are questions: all but those that are the same examples for every question."""
    if not config.fewshot_fixed:
        return list(range(len(rows)))
    reserved = {index for group in groups_of(config, rows) for index in group[:num_fewshot]}
    return [index for index in range(len(rows)) if index not in reserved]


def limit_that_cuts(limit: int | None, num_items: int) -> int | None:
    """A limit that all items fit into is none: the evaluation is the same without it."""
    return limit if limit is not None and limit < num_items else None


def groups_of(config: TaskConfig, rows: list[dict[str, Any]]) -> list[list[int]]:
    """The rows that an item's examples come from: those of its category, as in LLM Foundry, or all."""
    if not config.has_categories:
        return [list(range(len(rows)))]
    groups: dict[str, list[int]] = {}
    for index, row in enumerate(rows):
        groups.setdefault(str(row["category"]), []).append(index)
    return list(groups.values())


def settings_of(config: TaskConfig, num_fewshot: int, tokenization: str, limit: int | None) -> dict[str, Any]:
    """What decides the prompts and their scoring; the name of the task and of its file do not."""
    names = (
        *("icl_task_type", "fewshot_random_seed", "fewshot_fixed", "prompt_string", "example_delimiter"),
        *("continuation_delimiter", "prelimiter", "strip_dataset", "max_new_tokens", "early_stopping_criteria"),
        *("do_normalization", "cot_delimiter", "metric"),
    )
    decisive = {name: getattr(config, name) for name in names}
    if config.has_categories:  # named only where set, as results without it have always been
        decisive["has_categories"] = True
    if config.cluster is not None:
        decisive["cluster"] = config.cluster
    return {**decisive, "num_fewshot": num_fewshot, "tokenization": config.tokenization or tokenization, "limit": limit}


def choose_examples(config: TaskConfig, group: Sequence[int], index: int, num_fewshot: int) -> list[int]:
    """Rows of `group`, which is sorted, to show before `index`: never itself, and all others where they are fewer. A
    function of (seed, index): neither ranks nor order matter."""
    if config.fewshot_fixed:
        return list(group[:num_fewshot])
    place, num_others = bisect.bisect_left(group, index), len(group) - 1
    generator = random.Random(f"{config.fewshot_random_seed}/{index}")
    chosen = generator.sample(range(num_others), min(num_fewshot, num_others))
    return [group[i + (i >= place)] for i in chosen]


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
        if config.icl_task_type in GENERATION:
            request = encode.prompt(preamble, text, config.max_new_tokens or 1)
        else:
            request = encode.request(preamble, text, answer)
        if isinstance(request, str):
            return request
        requests.append(request)
    options = contexts if config.icl_task_type == "schema" else answers
    accepted = _accepted(row) if config.icl_task_type in GENERATION else []
    if accepted and not any(clean(config, answer) for answer in accepted):
        return "answers of which nothing is left to compare"
    return Item(
        index=index,
        requests=tuple(requests),
        gold=gold,
        category=str(row["category"]) if config.has_categories and "category" in row else None,
        answers=tuple(accepted),
        has_duplicates=len({option.strip() for option in options}) < len(options),
    )


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
        answer = _solution(config, row, row["answer"])
    return _render_context(config, contexts[gold], is_first=is_first) + answer


def _solution(config: TaskConfig, row: dict[str, Any], answer: str) -> str:
    thought = row.get("chain_of_thought")
    return f"{thought}{config.cot_delimiter}{answer}" if thought else answer


def _accepted(row: dict[str, Any]) -> list[str]:
    return [row["answer"], *(row.get("aliases") or [])]


def longest_answer(config: TaskConfig, rows: list[dict[str, Any]], tokenizer: Encoder) -> int:
    """Tokens a model is given for its answer, reasoning included. As LLM Foundry counts them: the answer by itself,
    after the tokenizer's beginning."""
    solutions = (_solution(config, row, answer) for row in rows for answer in _accepted(row))
    longest = max(len(tokenizer.encode(solution)) for solution in solutions)
    return len(tokenizer.beginning) + longest + (THOUGHT_ALLOWANCE if config.cot_delimiter else 0)


def clean(config: TaskConfig, text: str) -> str:
    """What of a generated text, or of an answer, is compared."""
    return normalise(text) if config.do_normalization else text.strip()


def normalise(text: str) -> str:
    """Lower case; no punctuation, articles, underscores or double spaces."""
    marks = string.punctuation + "‘’´`"
    text = "".join(" " if c in marks else c for c in text.lower())
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def _render_context(config: TaskConfig, context: str, *, is_first: bool) -> str:
    return ("" if is_first else config.example_delimiter) + config.prelimiter + context + config.continuation_delimiter


# -------------------------------------------------------------------------------------------------------- tokens


class _Encoding:
    """Text -> requests, by one convention. Both put the tokenizer's beginning before the first text and nowhere else;
    trimming takes it away with the rest."""

    def __init__(self, tokenizer: Encoder, tokenization: str, max_seq_len: int, *, strips: bool):
        self.tokenizer = tokenizer
        self.beginning = tokenizer.beginning
        self.strips = strips
        self.is_joint = tokenization == "joint"
        # The last token is predicted and never read, so one more fits; LLM Foundry does not use that.
        self.max_tokens = max_seq_len + self.is_joint
        # Byte-level BPE has a token for " a"; SentencePiece adds the space by itself.
        self.needs_space = len(tokenizer.encode(" a")) == 1
        self._known: dict[str, list[int]] = {}

    def request(self, preamble: str, context: str, answer: str) -> Request | str:
        """A request, or why it cannot be asked."""
        split = self._joint if self.is_joint else self._separate
        ids, answer_ids = split(preamble, context, answer)
        if not answer_ids:
            return "an answer without tokens"
        return self._fit(ids, answer_ids, len(answer_ids), len(answer))

    def prompt(self, preamble: str, context: str, num_tokens: int) -> Request | str:
        """As `request`, for an answer of up to `num_tokens` that the model is to write."""
        if self.is_joint:
            preamble, context = "", preamble + context
        return self._fit(self._apart(preamble, context), [], num_tokens, 0)

    def _fit(self, ids: list[int], answer_ids: list[int], num_tokens: int, num_characters: int) -> Request | str:
        """Trimmed from the left."""
        room = self.max_tokens - num_tokens
        if room < 1:
            return "an answer longer than the model"
        ids = ids or [self.tokenizer.prefix_token_id]  # something to predict the first token from
        return Request(tuple(ids[-room:]), tuple(answer_ids), num_characters, max(0, len(ids) - room))

    def _separate(self, preamble: str, context: str, answer: str) -> tuple[list[int], list[int]]:
        if self.needs_space and answer and not answer.startswith(" "):
            answer = " " + answer
        return self._apart(preamble, context), self._encode(answer)

    def _apart(self, preamble: str, context: str) -> list[int]:
        context = context.rstrip() if self.strips else context
        return self.beginning + self._encode(preamble) + self._encode(context)

    def _joint(self, preamble: str, context: str, answer: str) -> tuple[list[int], list[int]]:
        """White space at the context's end goes to the answer, where tokenizers like to have it.

        What the answer's first token would swallow of the context stays with the context, as in
        lm-evaluation-harness: the context is what it is by itself, and of the whole what is beyond its length is the
        answer.
        """
        before = self._encode((preamble + context).rstrip())
        answer_ids = self.tokenizer.encode(preamble + context + answer)[len(before) :]
        return self.beginning + before, answer_ids

    def _encode(self, text: str) -> list[int]:
        """Remembers, because the choices of an item share their context."""
        if text not in self._known:
            if len(self._known) > 4096:
                self._known.clear()
            self._known[text] = self.tokenizer.encode(text) if text else []
        return self._known[text]
