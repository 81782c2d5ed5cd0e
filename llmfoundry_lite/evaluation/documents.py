"""Held-out text: documents, cut into windows of tokens whose probability gives bits per byte."""

import contextlib
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from llmfoundry_lite.bounded import TooLargeError, read_json
from llmfoundry_lite.config.eval_schema import TaskConfig
from llmfoundry_lite.data.spelling import LostText, Speller, lost_text_from_json
from llmfoundry_lite.data.tokenizer import Tokenizer
from llmfoundry_lite.errors import DataError
from llmfoundry_lite.evaluation.items import EmptyTaskError, Item, PreparedTask, Request
from llmfoundry_lite.evaluation.task_files import read_texts

TEXT_SETTINGS = {"icl_task_type": "perplexity", "windows": "the last with full context"}
"""Settings that all held-out text shares."""
CHECKED_CHARACTERS = 10_000
"""Characters at the beginning of a text that are tokenised to see whether it has tokens."""


class Document(NamedTuple):
    """The tokens of a document, all of which are predicted."""

    before: int
    """The token from which the first one is predicted."""
    ids: list[int]
    num_bytes: int
    """Bytes in UTF-8 of the text that the tokens stand for."""
    source: str | list[int]
    """Content of the file: a text, or a sample's tokens. Equal documents have equal sources."""


def prepare_text(config: TaskConfig, tokenizer: Tokenizer, *, max_seq_len: int, limit: int | None) -> PreparedTask:
    """Cut the task's text into windows, and return them as the items of a prepared task.

    A text file is one document. In a file of JSON lines, the `text` of each row is one. In an MDS split each sample is
    a document, whose first token is not predicted. In the two other cases the first token is predicted from the token
    that `document_of` puts before it. `limit` is the largest number of windows.

    Raises DataError for a file that cannot be read, EmptyTaskError for one without text.
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
        kind="perplexity",
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
    """The windows of a task's text."""

    items: list[Item]
    is_cut: bool
    """The text has more windows than the limit allowed."""
    data_hash: Any
    """SHA-256 of the documents that were read."""
    lost_text: LostText
    """Characters of these documents that no token stands for."""


def _cut_windows(config: TaskConfig, tokenizer: Tokenizer, max_seq_len: int, limit: int | None) -> Windows:
    """Read documents until there are `limit` windows, and cut them into windows. Raises DataError."""
    items: list[Item] = []
    lost_text = LostText()
    data_hash = hashlib.sha256()
    first_with_source: dict[str, int] = {}
    """Source of a document -> the number of the first document with this source."""
    is_cut = False
    for number, document in enumerate(_read_documents(config, tokenizer, lost_text)):
        if limit is not None and len(items) >= limit:
            is_cut = True
            break
        source = json.dumps(document.source)
        data_hash.update(source.encode())
        cluster = str(first_with_source.setdefault(source, number))
        for request in windows_of(document, tokenizer, max_seq_len):
            items.append(Item(index=number, requests=(request,), cluster=cluster))
    if limit is not None and len(items) > limit:
        is_cut = True
        items = items[:limit]

    # Clusters are recorded only where documents are equal, because otherwise each is its own.
    has_equal_documents = any(item.cluster != str(item.index) for item in items)
    if not has_equal_documents:
        items = [replace(item, cluster=None) for item in items]
    return Windows(items, is_cut, data_hash, lost_text)


def _short(sha256: Any) -> str:
    """Return the beginning of a hash, as results record it."""
    return f"sha256:{sha256.hexdigest()[:16]}"


def check_text(config: TaskConfig, tokenizer: Tokenizer) -> None:
    """Raise DataError where `prepare_text` would, having tokenised only the beginning of each text. Not for MDS
    splits."""
    has_tokens = False
    for text in read_texts(config):
        has_tokens = has_tokens or bool(tokenizer.encode(text[:CHECKED_CHARACTERS]))
    if not has_tokens:
        raise EmptyTaskError(f"{config.label}: {config.dataset_uri} has no text")


def windows_of(document: Document, tokenizer: Tokenizer, max_seq_len: int) -> Iterator[Request]:
    """Yield the windows of a document, each of which predicts its next `max_seq_len` tokens.

    The context of a window is the text before it, as far as it fits. The last window predicts fewer tokens, after all
    the more context, as in lm-evaluation-harness's rolling perplexity. For 5 tokens and `max_seq_len` 2:

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
        num_bytes = bytes_left
        if not is_last:
            num_bytes = min(bytes_left, len(tokenizer.decode(predicted).encode()))
        bytes_left -= num_bytes

        context = [document.before]
        if start > 0:
            # The model reads all tokens but the last: the context and the predicted ones fill max_seq_len + 1.
            context_start = start + len(predicted) - max_seq_len - 1
            context = document.ids[context_start:start]
        yield Request(tuple(context), tuple(predicted), num_bytes, 0)


def _read_documents(config: TaskConfig, tokenizer: Tokenizer, lost_text: LostText) -> Iterator[Document]:
    """Yield the documents that have tokens, and add the characters that their tokens do not spell to `lost_text`."""
    folder = Path(config.dataset_uri)
    if (folder / "index.json").is_file():
        lost_text += lost_text_of_split(folder)
        yield from _read_samples(config, folder, tokenizer)
        return

    speller = Speller(tokenizer)
    for text in read_texts(config):
        document = document_of(text, tokenizer)
        if document.ids:
            lost_here = speller.measure(text)
            lost_text += lost_here
            yield document._replace(num_bytes=document.num_bytes - lost_here.lost_bytes)


def _read_samples(config: TaskConfig, split: Path, tokenizer: Tokenizer) -> Iterator[Document]:
    """Yield each sample of an MDS split as a document. Raises DataError for a split of other content."""
    from llmfoundry_lite.data.baselines import read_shards  # imports mosaicml-streaming

    without_text = (tokenizer.eos_token_id, tokenizer.prefix_token_id, tokenizer.unk_token_id)
    try:
        for tokens_nt in read_shards(split, tokenizer.vocab_size):
            for before, *ids in tokens_nt.tolist():
                text = tokenizer.decode([token for token in ids if token not in without_text])
                yield Document(before, ids, len(text.encode()), [before, *ids])
    except TooLargeError as error:
        raise DataError(f"{config.label}: {error}") from error
    except (ValueError, LookupError, OSError) as error:
        raise DataError(f"{config.label}: {split} is not an MDS split of tokens ({error})") from error


def lost_text_of_split(split: Path) -> LostText:
    """Return the lost text that `data prepare` recorded beside a split; an empty LostText without a record."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        summary = read_json(split.parent / "summary.json", "a summary")
        return lost_text_from_json(summary["lost_text"])
    return LostText()


def document_of(text: str, tokenizer: Tokenizer) -> Document:
    """Tokenise a text as one document, predicted from the last token that stands before every text."""
    before = tokenizer.beginning[-1] if tokenizer.beginning else tokenizer.prefix_token_id
    return Document(before, tokenizer.encode(text), len(text.encode()), text)
