"""Prepares held-out text: tokenises its documents and cuts them into windows, whose probability gives bits per byte.

`prepare_text` is the counterpart of `tasks.prepare_task`. A document that is longer than the model's context is cut
into windows (`windows_of`), each of which is an item with one request. Bits per byte divide by the bytes of the text,
so that models with different tokenizers can be compared. Text that a tokenizer loses, because no token stands for it,
does not count, and is measured as `LostText`.
"""

import contextlib
import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from llmfoundry_lite.bounded import TooLargeError, read_json
from llmfoundry_lite.config.eval_schema import TaskConfig
from llmfoundry_lite.config.task_types import TEXT
from llmfoundry_lite.data.spelling import LostText, Speller, lost_text_from_json
from llmfoundry_lite.data.tokenizer import Tokenizer
from llmfoundry_lite.errors import DataError
from llmfoundry_lite.evaluation.items import EmptyTaskError, Item, PreparedTask, Request
from llmfoundry_lite.evaluation.task_files import read_texts

TEXT_SETTINGS = {"icl_task_type": TEXT, "windows": "the last with full context"}
"""Settings that all held-out text shares."""
CHECKED_CHARACTERS = 10_000
"""`check_text` tokenises this many characters at the beginning of a text to see whether it has tokens."""


class Document(NamedTuple):
    """The tokens of a document, all of which are predicted."""

    before: int
    """The token id from which the first of `ids` is predicted."""
    ids: list[int]
    """Token ids of the text."""
    num_bytes: int
    """Bytes in UTF-8 of the text that the tokens stand for."""
    source: str | list[int]
    """The document as the file has it: a text, or the token ids of a sample. Equal documents have equal sources."""


def prepare_text(config: TaskConfig, tokenizer: Tokenizer, *, max_seq_len: int, limit: int | None) -> PreparedTask:
    """Cut the task's text into windows, and return them as the items of a prepared task.

    A text file is one document. In a file of JSON lines, the `text` of each row is a document. In an MDS split, each
    sample is a document, whose first token is not predicted. In the two other cases the first token is predicted from
    the token that `document_of` puts before it.

    max_seq_len: the number of tokens that a window predicts at most, which is the model's context length.
    limit: the largest number of windows; None for all.

    Raises DataError for a file that cannot be read, and EmptyTaskError for a file without text.
    """
    windows = _cut_windows(config, tokenizer, max_seq_len, limit)
    if not windows.items:
        raise EmptyTaskError(f"{config.label}: {config.dataset_uri} has no text")
    settings = {**TEXT_SETTINGS, "max_seq_len": max_seq_len, "limit": limit if windows.is_cut else None}

    # The task's fingerprint continues the hash of the documents with all that its windows depend on.
    task_hash = windows.data_hash.copy()
    task_hash.update(json.dumps(settings).encode())
    if not windows.lost_text.is_empty:  # fewer bytes count than with a tokenizer that has tokens for every character
        task_hash.update(windows.lost_text.as_text().encode())
    return PreparedTask(
        label=config.label,
        kind=TEXT,
        num_fewshot=0,
        items=tuple(windows.items),
        fingerprint=_short(task_hash),
        settings=settings,
        data_fingerprint=_short(windows.data_hash),
        beginning=tokenizer.beginning,
        lost_text=None if windows.lost_text.is_empty else windows.lost_text.as_json(),
        config=config,
    )


@dataclass(frozen=True, slots=True)
class Windows:
    """The windows of a task's text, with facts about the documents that they were cut from."""

    items: list[Item]
    is_cut: bool
    """The text has more windows than the limit allowed."""
    data_hash: Any
    """SHA-256 of the documents that were read."""
    lost_text: LostText
    """Characters of these documents that no token stands for."""


def _cut_windows(config: TaskConfig, tokenizer: Tokenizer, max_seq_len: int, limit: int | None) -> Windows:
    """Read documents until there are `limit` windows (None: all documents), and cut them into windows.

    The windows of a document are items with its number as index. Documents with the same text are one cluster, which is
    named after the first of them. Raises DataError for a file that cannot be read.
    """
    items: list[Item] = []
    lost_text = LostText()
    data_hash = hashlib.sha256()
    first_with_source: dict[str, int] = {}
    """Source of a document -> the number of the first document with this source."""
    is_cut = False
    for document_number, document in enumerate(_read_documents(config, tokenizer, lost_text)):
        # This document is read although there are enough windows, only to know that the text has more.
        if limit is not None and len(items) >= limit:
            is_cut = True
            break
        source = json.dumps(document.source)
        data_hash.update(source.encode())
        cluster = str(first_with_source.setdefault(source, document_number))
        for request in windows_of(document, tokenizer, max_seq_len):
            items.append(Item(index=document_number, requests=(request,), cluster=cluster))

    # The last document may have had more windows than there was room for.
    if limit is not None and len(items) > limit:
        is_cut = True
        items = items[:limit]

    # Clusters are recorded only if some documents are equal. Otherwise each document is its own cluster.
    has_equal_documents = any(item.cluster != str(item.index) for item in items)
    if not has_equal_documents:
        items = [replace(item, cluster=None) for item in items]
    return Windows(items, is_cut, data_hash, lost_text)


def fingerprint_of_texts(texts: Iterable[str]) -> str:
    """Return the hash by which a result identifies the held-out texts of a file, if it read all of them."""
    data_hash = hashlib.sha256()
    for text in texts:
        data_hash.update(json.dumps(text).encode())
    return _short(data_hash)


def _short(sha256: Any) -> str:
    """Return the first 16 digits of a hash with its name, such as "sha256:0f3c…", as results record it."""
    return f"sha256:{sha256.hexdigest()[:16]}"


def check_text(config: TaskConfig, tokenizer: Tokenizer) -> None:
    """Raise the DataError that `prepare_text` would raise, after tokenising only the beginning of each text.

    All texts are read, so that a bad row is found wherever it is. MDS splits cannot be checked this way.
    """
    has_tokens = False
    for text in read_texts(config):
        has_tokens = has_tokens or bool(tokenizer.encode(text[:CHECKED_CHARACTERS]))
    if not has_tokens:
        raise EmptyTaskError(f"{config.label}: {config.dataset_uri} has no text")


def windows_of(document: Document, tokenizer: Tokenizer, max_seq_len: int) -> Iterator[Request]:
    """Yield the windows of a document, each of which predicts the next `max_seq_len` tokens of it.

    Only one token fits before a full window. The last window predicts fewer tokens, and has as much of the text before
    it as fits, as in lm-evaluation-harness's rolling perplexity. For 5 tokens and `max_seq_len` 2:

        window 1 predicts tokens 1 and 2 after `before`
        window 2 predicts tokens 3 and 4 after token 2
        window 3 predicts token 5 after tokens 3 and 4

    The windows' bytes add up to the document's. A character that two windows divide may count in either of them, and
    the last window gets the bytes that are left.
    """
    bytes_left = document.num_bytes
    for start in range(0, len(document.ids), max_seq_len):
        predicted = document.ids[start : start + max_seq_len]
        is_last = start + max_seq_len >= len(document.ids)

        # Count the bytes of the predicted tokens. The last window takes those that are left.
        num_bytes = bytes_left
        if not is_last:
            num_bytes = min(bytes_left, len(tokenizer.decode(predicted).encode()))
        bytes_left -= num_bytes

        # The first window follows the token before the document, and every other one the text before it.
        context = [document.before]
        if start > 0:
            # The model never reads the last predicted token, so context and predicted tokens fill max_seq_len + 1.
            context_start = start + len(predicted) - max_seq_len - 1
            context = document.ids[context_start:start]
        yield Request(tuple(context), tuple(predicted), num_bytes, 0)


def _read_documents(config: TaskConfig, tokenizer: Tokenizer, lost_text: LostText) -> Iterator[Document]:
    """Yield the documents of a task's text that have tokens.

    `lost_text` is changed: as documents are yielded, the characters that their tokens do not spell are added to it.
    They do not count as bytes of the document either. Raises DataError for a file that cannot be read.
    """
    # An MDS split was tokenised by `data prepare`, which recorded the lost text of the whole split.
    folder = Path(config.dataset_uri)
    if (folder / "index.json").is_file():
        lost_text += lost_text_of_split(folder)
        yield from _read_samples(config, folder, tokenizer)
        return

    speller = Speller(tokenizer)
    for text in read_texts(config):
        document = document_of(text, tokenizer)
        if document.ids:
            lost_in_document = speller.measure(text)
            lost_text += lost_in_document
            yield document._replace(num_bytes=document.num_bytes - lost_in_document.lost_bytes)


def _read_samples(config: TaskConfig, split: Path, tokenizer: Tokenizer) -> Iterator[Document]:
    """Yield each sample of an MDS split as a document, whose first token is only read and not predicted.

    Raises DataError if the folder is not an MDS split of token ids that this tokenizer has.
    """
    from llmfoundry_lite.data.baselines import read_shards  # imports mosaicml-streaming

    # These tokens are predicted like the others, but no bytes of text stand behind them.
    ids_without_text = (tokenizer.eos_token_id, tokenizer.prefix_token_id, tokenizer.unk_token_id)
    try:
        for tokens_nt in read_shards(split, tokenizer.vocab_size):  # n samples of t tokens
            for tokens_t in tokens_nt:
                before, *ids = tokens_t[tokens_t >= 0].tolist()  # without padding
                text = tokenizer.decode([token for token in ids if token not in ids_without_text])
                yield Document(before, ids, len(text.encode()), source=[before, *ids])
    except TooLargeError as error:
        raise DataError(f"{config.label}: {error}") from error
    except (ValueError, LookupError, OSError) as error:
        raise DataError(f"{config.label}: {split} is not an MDS split of tokens ({error})") from error


def lost_text_of_split(split: Path) -> LostText:
    """Return the lost text that `data prepare` recorded beside an MDS split, or an empty LostText without a record."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        summary = read_json(split.parent / "summary.json", "a summary")
        return lost_text_from_json(summary["lost_text"])
    return LostText()


def document_of(text: str, tokenizer: Tokenizer) -> Document:
    """Tokenise a text as one document.

    Its first token is predicted from the last of the tokens that the tokenizer puts before every text, such as <s>. If
    there are none, it is predicted from the tokenizer's `prefix_token_id`.
    """
    if tokenizer.beginning:
        before = tokenizer.beginning[-1]
    else:
        before = tokenizer.prefix_token_id
    return Document(before, tokenizer.encode(text), len(text.encode()), text)
