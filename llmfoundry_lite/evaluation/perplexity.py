"""Held-out text as a task: every token predicted once, from as much of the text before it as the model holds."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

from llmfoundry_lite.config.schema import TaskConfig
from llmfoundry_lite.data.baselines import read_tokens
from llmfoundry_lite.errors import DataError
from llmfoundry_lite.evaluation.tasks import Encoder, Item, Prepared, Request


def prepare_text(config: TaskConfig, tokenizer: Encoder, *, max_seq_len: int, limit: int | None) -> Prepared:
    """Windows of the model's length that do not overlap. Of each request, `num_characters` counts bytes.

    A text file is one document; of a JSONL file each row's `text` is one; of an MDS split each sample is, and its
    first token is given, not predicted. Raises DataError.
    """
    items: list[Item] = []
    digest, digest_of_data = hashlib.sha256(str(max_seq_len).encode()), hashlib.sha256()
    for number, (context, ids, source) in enumerate(_documents(config, tokenizer)):
        if number == limit:
            break
        digest.update(json.dumps(ids).encode())
        digest_of_data.update(json.dumps(source).encode())
        for start in range(0, len(ids), max_seq_len):
            window = ids[start : start + max_seq_len]
            before = context if start == 0 else ids[start - 1]
            num_bytes = len(tokenizer.decode(window).encode())
            request = Request((before,), tuple(window), num_bytes, 0)
            items.append(Item(index=number, requests=(request,)))
    if not items:
        raise DataError(f"{config.label}: {config.dataset_uri} has no text")
    return Prepared(
        label=config.label,
        kind="perplexity",
        num_fewshot=0,
        items=tuple(items),
        fingerprint=f"sha256:{digest.hexdigest()[:16]}",
        settings={"icl_task_type": "perplexity", "max_seq_len": max_seq_len, "limit": limit},
        data_fingerprint=f"sha256:{digest_of_data.hexdigest()[:16]}",
        config=config,
    )


def _documents(config: TaskConfig, tokenizer: Encoder) -> Iterator[tuple[int, list[int], str | list[int]]]:
    """(the token before, the tokens to predict, what the file has)"""
    path = Path(config.dataset_uri)
    if (path / "index.json").is_file():
        for row in read_tokens(path).tolist():
            yield row[0], row[1:], row
        return
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"{config.label}: {path} cannot be read ({error}); expected a text or JSONL file or an MDS split"
        ) from None
    texts = [text]
    if path.suffix == ".jsonl":
        try:
            texts = [json.loads(line)["text"] for line in text.splitlines() if line.strip()]
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{config.label}: {path} needs a JSON object with `text` on every line ({error})") from None
    for document in texts:
        if ids := tokenizer.encode(document):
            yield tokenizer.eos_token_id, ids, document
