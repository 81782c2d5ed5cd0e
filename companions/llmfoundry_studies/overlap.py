"""Contamination: which items of evaluation tasks occur in training data.

    llmfoundry-lite data overlap data/mine --task arc_easy --task piqa --out overlap

An item is marked if an n-gram of its text occurs in the training data: n words in a row, the same after normalisation
(`ngrams.py`). Its text is the question, followed by its right answer. An n-gram that more than MAX_SHARED_BY items of a
task share, such as an instruction, marks none of them. The training shards are read once, however many tasks are
checked, and the memory depends on the tasks and the largest shard alone.

`find_overlap` reads tasks and data, and `write_overlap` writes what was found. `compare --overlap FOLDER` then shows
clean and marked items apart (`clean.py`).
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from llmfoundry_lite.config.eval_schema import TaskConfig
from llmfoundry_lite.data.tokenizer import Tokenizer
from llmfoundry_lite.errors import DataError
from llmfoundry_lite.evaluation.documents import fingerprint_of_texts
from llmfoundry_lite.evaluation.prompts import find_question_rows
from llmfoundry_lite.evaluation.questions import read_question
from llmfoundry_lite.evaluation.task_files import Row, data_fingerprint, read_rows, read_texts
from llmfoundry_lite.files import write_atomically
from llmfoundry_studies.ngrams import NgramTable, WordHasher, hash_ngrams, split_words

NGRAM_WORDS = 13
"""Words of an n-gram by default, as for GPT-3."""
MIN_NGRAM_WORDS = 8
"""An item with fewer words than an n-gram is looked for as a whole, if it has this many. Shorter texts, such as
`What is the capital of France? Paris`, occur by chance, or as common knowledge. GPT-3's study has the same limit."""
MAX_SHARED_BY = 10
"""Items of a task beyond which an n-gram that they share does not mark them. It is an instruction or another fixed
phrase of the task, and tells nothing about one item."""
MAX_DOCUMENT_TOKENS = 1 << 24
"""Tokens after which a text without an end counts as a document, so that the memory stays bounded."""
DOCUMENTS_AT_ONCE = 256
"""Documents that are decoded together."""
SUMMARY_FILE = "overlap.json"
MAX_SHOWN_CHARACTERS = 200
"""Characters of a matching text that are recorded."""


@dataclass(slots=True, kw_only=True)
class ItemOverlap:
    """An item of a task, and how much of it occurs in the training data."""

    index: int
    """The row of the task's file, from 0; for held-out text, the document's number."""
    words: list[str]
    """Words of the question, then of the right answer."""
    num_question_words: int
    found_at: set[int] = field(default_factory=set)
    """Word positions at which an n-gram begins that occurs in the data."""
    shard: int | None = None
    """The shard with the first match."""

    def ngram_words(self, num_words: int) -> int:
        """Return the number of words of this item's n-grams: `num_words`, or all of a shorter text.

        0 if the text is too short to say anything.
        """
        length = min(num_words, len(self.words))
        return length if length >= min(num_words, MIN_NGRAM_WORDS) else 0

    def covered_fraction(self, num_words: int) -> float:
        """Return the fraction of the item's words that lie in an n-gram which occurs in the data."""
        length = self.ngram_words(num_words)
        is_covered = np.zeros(len(self.words), np.bool_)
        for position in self.found_at:
            is_covered[position : position + length] = True
        return float(is_covered.mean()) if len(self.words) else 0.0

    def has_answer(self, num_words: int) -> bool:
        """Return whether a match includes the end of the right answer, and not the question alone."""
        last_ngram = len(self.words) - self.ngram_words(num_words)
        has_answer_words = self.num_question_words < len(self.words)
        return has_answer_words and last_ngram in self.found_at

    def as_json(self, num_words: int) -> dict[str, object]:
        """Return the item's line in the file of a task."""
        length = self.ngram_words(num_words)
        record: dict[str, object] = {"index": self.index, "num_ngrams": 0}
        if length == 0:
            return record | {"reason": f"has {len(self.words)} words"}
        first = min(self.found_at)
        text = " ".join(self.words[first : first + length])
        return record | {
            "num_ngrams": len(self.words) - length + 1,
            "num_found": len(self.found_at),
            "covered": round(self.covered_fraction(num_words), 4),
            "has_answer": self.has_answer(num_words),
            "shard": self.shard,
            "text": text[:MAX_SHOWN_CHARACTERS],
        }


@dataclass(slots=True, kw_only=True)
class TaskOverlap:
    """A task's items, with what was found of them."""

    label: str
    data_fingerprint: str
    """Hash of the task's rows, as results of an evaluation record it."""
    items: list[ItemOverlap]

    @property
    def marked(self) -> list[ItemOverlap]:
        """The items that occur in the training data."""
        return [item for item in self.items if item.found_at]


# ---------------------------------------------------------------------------------------------------------- tasks


def read_task(config: TaskConfig) -> TaskOverlap:
    """Read a task, and return its items as words. Raises DataError for a file that cannot be read."""
    items: list[ItemOverlap] = []
    if config.task_type.answer == "text":
        texts = [text for text in read_texts(config) if text]
        for index, text in enumerate(texts):
            words = split_words(text)
            items.append(ItemOverlap(index=index, words=words, num_question_words=len(words)))
        return TaskOverlap(label=config.label, data_fingerprint=fingerprint_of_texts(texts), items=items)

    rows = read_rows(config)
    for index in find_question_rows(config, rows, num_fewshot=0):  # rows that are only shown as examples are left out
        question, answer = question_and_answer(config, rows[index])
        question_words = split_words(question)
        words = question_words + split_words(answer)
        items.append(ItemOverlap(index=index, words=words, num_question_words=len(question_words)))
    return TaskOverlap(label=config.label, data_fingerprint=data_fingerprint(rows), items=items)


def question_and_answer(config: TaskConfig, row: Row) -> tuple[str, str]:
    """Return the text of a question and of its right answer, without examples, delimiters and listed choices.

    A schema question `The trophy does not fit because [it, the suitcase] …` has its right context as the question.
    """
    question = read_question(replace(config, form=None), row)  # the answer's text, also if it is asked by a letter
    return question.contexts[question.gold], question.answers[question.gold]


# ------------------------------------------------------------------------------------------------------------- data


def read_documents(folder: Path, tokenizer: Tokenizer) -> Iterator[tuple[int, list[str]]]:
    """Yield the texts of the documents in a folder of shards, some at a time, each with the number of its shard.

    Documents are separated by the tokenizer's end-of-text token. A document that goes on in the next shard is read as
    one, and counts for the shard in which it ends. Raises DataError for shards that do not hold tokens, and for damage.
    """
    from llmfoundry_lite.data.baselines import read_shards  # imports mosaicml-streaming, which a page does not need

    unfinished = np.zeros(0, np.int64)
    shard = -1
    try:
        for shard, tokens_nt in enumerate(read_shards(folder, tokenizer.vocab_size)):
            tokens = np.concatenate([unfinished, tokens_nt[tokens_nt >= 0]])  # without padding
            ends = np.flatnonzero(tokens == tokenizer.eos_token_id)
            documents = np.split(tokens, ends + 1)
            unfinished = documents.pop()
            if len(unfinished) > MAX_DOCUMENT_TOKENS:
                documents.append(unfinished)
                unfinished = unfinished[:0]
            yield from _decode(documents, tokenizer, shard)
    except (OSError, LookupError, ValueError) as error:
        raise DataError(
            f"{folder}: {error}; expected a folder of shards of tokens, as `data prepare` writes"
        ) from error
    yield from _decode([unfinished], tokenizer, shard)


def _decode(documents: Sequence[np.ndarray], tokenizer: Tokenizer, shard: int) -> Iterator[tuple[int, list[str]]]:
    """Yield the texts of documents, each given as its token ids, DOCUMENTS_AT_ONCE at a time."""
    for start in range(0, len(documents), DOCUMENTS_AT_ONCE):
        ids = [document.tolist() for document in documents[start : start + DOCUMENTS_AT_ONCE]]
        with tokenizer.failures_as_data_errors():
            yield shard, tokenizer.backend.decode_batch(ids, skip_special_tokens=True)


# -------------------------------------------------------------------------------------------------------- searching


class Search:
    """Looks the n-grams of texts up among those of all items."""

    def __init__(self, tasks: Iterable[TaskOverlap], num_words: int) -> None:
        """Hash the n-grams of all items.

        Items that are shorter than `num_words` have n-grams of their own length, so there is a table for each length.
        """
        self.num_words = num_words
        self._hasher = WordHasher()
        self._items_by_length: dict[int, dict[int, list[tuple[ItemOverlap, int]]]] = {}
        """Length of n-grams -> their hash -> the items that have it, each with the position of its first word."""
        for task in tasks:
            self._add(task)
        self._tables = {length: NgramTable(by_hash) for length, by_hash in self._items_by_length.items()}

    def _add(self, task: TaskOverlap) -> None:
        """Add the n-grams of a task's items to `_items_by_length`, except those that many of its items share."""
        items_with_ngram: dict[tuple[int, int], list[tuple[ItemOverlap, int]]] = {}
        """(length, hash) of an n-gram -> the items that have it, each with the position of its first word."""
        for item in task.items:
            length = item.ngram_words(self.num_words)
            if length == 0:
                continue
            hashes = hash_ngrams(self._hasher.hash_words(item.words), length)
            for position, ngram_hash in enumerate(hashes.tolist()):
                items_with_ngram.setdefault((length, ngram_hash), []).append((item, position))

        for (length, ngram_hash), items in items_with_ngram.items():
            num_items = len({item.index for item, _ in items})
            if num_items <= MAX_SHARED_BY:
                by_hash = self._items_by_length.setdefault(length, {})
                by_hash[ngram_hash] = [*by_hash.get(ngram_hash, ()), *items]

    def mark_items_in(self, text: str, shard: int) -> None:
        """Mark each item that shares an n-gram with a text of the training data."""
        words = split_words(text)
        word_hashes = self._hasher.hash_words(words)
        for length, table in self._tables.items():
            hashes = hash_ngrams(word_hashes, length)
            for place in table.find(hashes).tolist():
                ngram = words[place : place + length]
                for item, position in self._items_by_length[length][int(hashes[place])]:
                    is_match = item.words[position : position + length] == ngram  # not only a hash that is equal
                    if is_match:
                        item.found_at.add(position)
                        if item.shard is None:
                            item.shard = shard


def find_overlap(
    tasks: Sequence[TaskConfig],
    folder: Path,
    tokenizer: Tokenizer,
    *,
    num_words: int = NGRAM_WORDS,
    on_documents: Callable[[int, int], None] = lambda num_documents, num_characters: None,
) -> list[TaskOverlap]:
    """Find which items of tasks occur in the training data of a folder of shards.

    tokenizer: the one that the data was prepared with.
    num_words: words of an n-gram.
    on_documents: called with the number of documents and of characters after each group of documents.

    Raises DataError for tasks or data that cannot be read.
    """
    overlaps = [read_task(config) for config in tasks]
    search = Search(overlaps, num_words)
    for shard, texts in read_documents(folder, tokenizer):
        for text in texts:
            search.mark_items_in(text, shard)
        on_documents(len(texts), sum(map(len, texts)))
    return overlaps


# ---------------------------------------------------------------------------------------------------------- writing


def write_overlap(overlaps: Sequence[TaskOverlap], out: Path, *, data: Path, num_words: int) -> None:
    """Write `overlap.json`, and `<task>.jsonl` with a line for each marked item and each that is too short to check."""
    summary: dict[str, Any] = {"data": str(data), "num_words": num_words, "tasks": {}}
    out.mkdir(parents=True, exist_ok=True)
    for overlap in overlaps:
        unchecked = [item for item in overlap.items if item.ngram_words(num_words) == 0]
        listed = sorted([*overlap.marked, *unchecked], key=lambda item: item.index)
        lines = [json.dumps(item.as_json(num_words)) for item in listed]
        file_name = re.sub(r"[^\w.-]+", "-", overlap.label).lstrip(".")
        write_atomically(out / f"{file_name}.jsonl", "".join(f"{line}\n" for line in lines))
        summary["tasks"][overlap.label] = {
            "data_fingerprint": overlap.data_fingerprint,
            "num_items": len(overlap.items),
            "num_marked": len(overlap.marked),
            "num_with_answer": sum(item.has_answer(num_words) for item in overlap.marked),
            "num_unchecked": len(unchecked),
            "marked": [item.index for item in overlap.marked],
        }
    # The summary last: a folder without it is not complete.
    write_atomically(out / SUMMARY_FILE, json.dumps(summary, indent=1) + "\n")
