"""Held-out text as a task: every token predicted once, in windows of the model's length."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from llmfoundry_lite.config.schema import TaskConfig
from llmfoundry_lite.data.baselines import read_tokens
from llmfoundry_lite.errors import DataError
from llmfoundry_lite.evaluation.rows import is_broken_text
from llmfoundry_lite.evaluation.tasks import TEXT_SETTINGS, Encoder, Item, Prepared, Request
from llmfoundry_lite.files import open_regular

LINES = (".jsonl", ".json", ".ndjson")
"""Files with a row to a line, as `data prepare` takes them."""


class Document(NamedTuple):
    before: int
    """The token before the first."""
    ids: list[int]
    """To be predicted."""
    num_bytes: int
    """Of their text, in UTF-8."""
    source: str | list[int]
    """What the file has: the text, or a sample's tokens."""


def prepare_text(config: TaskConfig, tokenizer: Encoder, *, max_seq_len: int, limit: int | None) -> Prepared:
    """Windows that each predict the next `max_seq_len` tokens after the token before them. The last one has fewer to
    predict, and as much text before them as fits, as in lm-evaluation-harness's rolling perplexity.

    A text file is one document; of a file of JSON lines each row's `text` is one. Both are predicted from the
    tokenizer's beginning, or its beginning-of-text token, or its end-of-text token where it has neither. Of an MDS
    split each sample is one, and its first token is given, not predicted. The documents in a sample see each other
    unless the model was trained with attn_uses_sequence_id.

    Of each request, `num_characters` counts bytes. An item's `index` is its document's, because windows of one document
    are not independent. Equal documents are a cluster. `limit` counts windows. Raises DataError.
    """
    items: list[Item] = []
    first_of: dict[str, int] = {}
    digest, is_cut = hashlib.sha256(), False
    for number, document in enumerate(_documents(config, tokenizer)):
        if is_cut := limit is not None and len(items) >= limit:
            break
        source = json.dumps(document.source)
        digest.update(source.encode())
        cluster = str(first_of.setdefault(source, number))
        for request in _windows(document, tokenizer, max_seq_len):
            items.append(Item(index=number, requests=(request,), cluster=cluster))
    is_cut = is_cut or (limit is not None and len(items) > limit)
    items = items[:limit]
    if all(item.cluster == str(item.index) for item in items):  # no document is there twice
        items = [replace(item, cluster=None) for item in items]
    if not items:
        raise DataError(f"{config.label}: {config.dataset_uri} has no text")
    settings = {**TEXT_SETTINGS, "max_seq_len": max_seq_len, "limit": limit if is_cut else None}
    digest_of_data = digest.hexdigest()[:16]
    digest.update(json.dumps(settings).encode())
    return Prepared(
        label=config.label,
        kind="perplexity",
        num_fewshot=0,
        items=tuple(items),
        fingerprint=f"sha256:{digest.hexdigest()[:16]}",
        settings=settings,
        data_fingerprint=f"sha256:{digest_of_data}",
        beginning=tokenizer.beginning,
        config=config,
    )


def _windows(document: Document, tokenizer: Encoder, max_seq_len: int) -> Iterator[Request]:
    """Their bytes add up to the document's. A character that two windows share counts with either: to the last goes
    what the others leave."""
    ids, left = document.ids, document.num_bytes
    for start in range(0, len(ids), max_seq_len):
        window = ids[start : start + max_seq_len]
        is_last = start + max_seq_len >= len(ids)
        num_bytes = left if is_last else min(left, len(tokenizer.decode(window).encode()))
        left -= num_bytes
        first = start + len(window) - max_seq_len - 1
        context = ids[first:start] if start else [document.before]
        yield Request(tuple(context), tuple(window), num_bytes, 0)


def _documents(config: TaskConfig, tokenizer: Encoder) -> Iterator[Document]:
    path = Path(config.dataset_uri)
    if (path / "index.json").is_file():
        try:
            samples = read_tokens(path, tokenizer.vocab_size)
        except (ValueError, KeyError, OSError) as error:
            raise DataError(f"{config.label}: {path} is no MDS split of tokens ({error})") from error
        between = (tokenizer.eos_token_id, tokenizer.prefix_token_id)  # documents, and no text
        for before, *ids in samples.tolist():
            written = tokenizer.decode([token for token in ids if token not in between])
            yield Document(before, ids, len(written.encode()), [before, *ids])
        return
    for text in _texts(path, config.label):
        if ids := tokenizer.encode(text):
            before = [tokenizer.prefix_token_id, *tokenizer.beginning][-1]
            yield Document(before, ids, len(text.encode()), text)


def _texts(path: Path, label: str) -> Iterator[str]:
    try:
        with open(path, "rb", opener=open_regular) as file:
            content = file.read().decode("utf-8-sig")  # every byte counts, those of line ends too
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"{label}: {path} cannot be read ({error}); expected a text or JSONL file or an MDS split"
        ) from error
    if path.suffix not in LINES:
        yield content
        return
    for number, line in enumerate(content.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            text = json.loads(line)["text"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise DataError(
                f"{label}: {path}, line {number}: {error!r}; expected a JSON object with the column text"
            ) from None
        if not isinstance(text, str):
            raise DataError(f"{label}: {path}, line {number}: text is {text!r}, expected a text")
        if is_broken_text(line):
            raise DataError(f"{label}: {path}, line {number} has half a character, such as \\ud83d alone")
        yield text
