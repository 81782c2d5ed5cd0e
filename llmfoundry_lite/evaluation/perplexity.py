"""Held-out text as a task: every token predicted once, in windows of the model's length."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from llmfoundry_lite.config.eval_schema import TaskConfig
from llmfoundry_lite.data.baselines import read_tokens
from llmfoundry_lite.data.tokenizer import Tokenizer
from llmfoundry_lite.errors import DataError
from llmfoundry_lite.evaluation.tasks import TEXT_SETTINGS, Item, Prepared, Request, read_json_lines, read_text

LINES = (".jsonl", ".json", ".ndjson")
"""Files with a row to a line, as `data prepare` takes them."""


class Document(NamedTuple):
    """Tokens to be predicted, the one before them, and what the file has: the text, or a sample's tokens."""

    before: int
    ids: list[int]
    num_bytes: int
    source: str | list[int]


def prepare_text(config: TaskConfig, tokenizer: Tokenizer, *, max_seq_len: int, limit: int | None) -> Prepared:
    """Return windows that each predict the next `max_seq_len` tokens after the token before them. The last one has
    fewer to predict, and as much text before them as fits, as in lm-evaluation-harness's rolling perplexity.

    A text file is one document; in a file of JSON lines each row's `text` is one. Both are predicted from the
    tokenizer's beginning, or its beginning-of-text or end-of-text token. In an MDS split each sample is one, and its
    first token is given. An item's `index` is its document's; equal documents are a cluster. The `num_characters` of a
    request are bytes. `limit` counts windows. Raises DataError.
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
    data_fingerprint = f"sha256:{digest.hexdigest()[:16]}"
    digest.update(json.dumps(settings).encode())
    return Prepared(
        label=config.label,
        kind="perplexity",
        num_fewshot=0,
        items=tuple(items),
        fingerprint=f"sha256:{digest.hexdigest()[:16]}",
        settings=settings,
        data_fingerprint=data_fingerprint,
        beginning=tokenizer.beginning,
        config=config,
    )


def _windows(document: Document, tokenizer: Tokenizer, max_seq_len: int) -> Iterator[Request]:
    """Yield windows whose bytes add up to the document's. A character that two windows share counts with either; the
    last window has the bytes that the others leave."""
    ids, left = document.ids, document.num_bytes
    for start in range(0, len(ids), max_seq_len):
        window = ids[start : start + max_seq_len]
        is_last = start + max_seq_len >= len(ids)
        num_bytes = left if is_last else min(left, len(tokenizer.decode(window).encode()))
        left -= num_bytes
        first = start + len(window) - max_seq_len - 1
        context = ids[first:start] if start else [document.before]
        yield Request(tuple(context), tuple(window), num_bytes, 0)


def _documents(config: TaskConfig, tokenizer: Tokenizer) -> Iterator[Document]:
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
    for text in _texts(config) if path.suffix in LINES else [read_text(config)]:
        if ids := tokenizer.encode(text):
            before = [tokenizer.prefix_token_id, *tokenizer.beginning][-1]
            yield Document(before, ids, len(text.encode()), text)


def _texts(config: TaskConfig) -> Iterator[str]:
    for row, where in read_json_lines(config):
        if not isinstance(row.get("text"), str):
            raise DataError(f"{where}: text is {row.get('text')!r}, expected a text")
        yield row["text"]
