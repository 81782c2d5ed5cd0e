"""The last step of a datatrove pipeline: tokenise its documents, so that `data join` makes shards of them.

    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.readers import JsonlReader
    from llmfoundry_engines.datatrove_step import PrepareShards
    from llmfoundry_engines.join import join

    steps = [JsonlReader("raw/"), MyFilter(), PrepareShards("data/big", tokenizer="gpt2", max_seq_len=2048)]
    LocalPipelineExecutor(steps, tasks=16).run()
    join("data/big")

Each task of the pipeline is a part of the preparation, so documents are in the order of tasks, and in each task in the
order of the pipeline. This module needs the package `datatrove`.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

try:
    from datatrove.pipeline.base import PipelineStep  # pyright: ignore[reportMissingImports]
except ImportError as error:
    raise ImportError(
        "llmfoundry_engines.datatrove_step needs the package datatrove: pip install 'llmfoundry-lite[datatrove]'"
    ) from error

from llmfoundry_engines.part import Part
from llmfoundry_engines.places import naming, open_place
from llmfoundry_engines.prepare_part import prepare_opened_part
from llmfoundry_lite.data.tokenizer import load_tokenizer
from llmfoundry_lite.errors import ConfigError, DataError
from llmfoundry_lite.prepare.documents import Unit
from llmfoundry_lite.prepare.out_folder import build_request_record
from llmfoundry_lite.prepare.prepare import OpenedInput
from llmfoundry_lite.prepare.request import TRAIN_PREFIX, PrepareRequest
from llmfoundry_lite.prepare.sources import DEFAULT_VAL_FRACTION, MAX_UNIT_BYTES, Piece, Source, stream_units
from llmfoundry_lite.prepare.token_files import MAX_LOST_TEXT, PieceRange

UNIT_CHARACTERS = MAX_UNIT_BYTES // 4
"""Size of a unit. A character has at most 4 bytes in UTF-8."""
SOURCE_NAME = "datatrove"
"""The source of such a preparation in its summary."""


class PrepareShards(PipelineStep):
    """A step that tokenises the documents of a pipeline. It is the last one: no document leaves it."""

    name = "llmfoundry-lite"
    type = "TOKENIZER"

    def __init__(self, out: str | Path, *, tokenizer: str, max_seq_len: int, **options: Any) -> None:
        """Take the options of `data prepare`, which must be the same in all tasks.

        out: output folder, on a disk that all tasks share, or its URL in a bucket.
        tokenizer: a local folder or a Hub name. A tokenizer cannot be trained here, because a task sees only its own
            documents.
        options: other fields of `PrepareRequest`: `val_fraction`, `on_error`, `size_limit_bytes`, `compression`.

        Raises ConfigError and DataError for options that are not valid.
        """
        super().__init__()
        if tokenizer.startswith(TRAIN_PREFIX):
            raise ConfigError(
                f"tokenizer {tokenizer}: a pipeline cannot train one; train it with `data prepare`, and name its folder"
            )
        options.setdefault("val_fraction", DEFAULT_VAL_FRACTION)
        self.out = out
        self.request = PrepareRequest(sources=(SOURCE_NAME,), tokenizer=tokenizer, max_seq_len=max_seq_len, **options)

    def run(self, data: Any, rank: int = 0, world_size: int = 1) -> None:
        """Tokenise the documents of a task as part `rank + 1` of `world_size`. A complete part is not done again."""
        part = Part(rank + 1, world_size)
        pieces = [Piece(num_bytes=0, units=tuple) for _ in range(world_size)]
        pieces[rank] = Piece(num_bytes=0, units=OnceOnly(self.count_documents(data)).units)
        source = Source(
            pieces=lambda: iter(pieces),
            # What the pipeline reads and does is unknown here. Another number of tasks is another order.
            describe_state=lambda: {"tasks": world_size},
            total_bytes=None,
            val_fraction=DEFAULT_VAL_FRACTION,
        )
        tokenizer = load_tokenizer(self.request.tokenizer)
        opened = OpenedInput(
            request=self.request,
            source=source,
            existing_tokenizer=tokenizer,
            record=build_request_record(self.request, source, tokenizer),
        )
        with open_place(self.out) as place:
            prepare_opened_part(
                opened,
                place,
                part,
                PieceRange(first=rank, end=rank + 1, num_bytes=0),
                num_workers=1,
                max_lost_text=MAX_LOST_TEXT,
                show_progress=False,
                notify=naming(place, print),
            )

    def count_documents(self, data: Iterable[Any]) -> Iterator[str]:
        """Yield the texts of documents, and count them in the statistics of the pipeline."""
        for document in data:
            self.update_doc_stats(document)
            yield document.text


class OnceOnly:
    """Documents of a pipeline, which can be read only once."""

    def __init__(self, texts: Iterator[str]) -> None:
        """Take the texts, which have not been read."""
        self.texts = texts
        self.is_read = False

    def units(self) -> Iterator[Unit]:
        """Yield the units of the texts. Raises DataError if they have been read, because the encoder has changed."""
        if self.is_read:
            raise DataError(
                "the fast encoder differs from tokenizers, and is not used any more: run the pipeline again"
            )
        self.is_read = True
        yield from stream_units("rows", SOURCE_NAME, ((text, 0) for text in self.texts), UNIT_CHARACTERS)
