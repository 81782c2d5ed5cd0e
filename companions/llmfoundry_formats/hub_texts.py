"""Texts of data sets of the Hugging Face Hub, for `data prepare --source hf:NAME`."""

import itertools
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from llmfoundry_formats.hub_folders import without_pattern
from llmfoundry_lite.errors import DataError, one_line
from llmfoundry_lite.prepare.documents import Unit, text_of_row
from llmfoundry_lite.prepare.request import PrepareRequest
from llmfoundry_lite.prepare.sources import (
    DEFAULT_VAL_FRACTION,
    HUB_PREFIX,
    MAX_UNIT_BYTES,
    Piece,
    Source,
    stream_units,
    summarize_files,
)

STREAM_UNIT_CHARACTERS = MAX_UNIT_BYTES // 4
"""Size of a unit. A character has at most 4 bytes in UTF-8."""
LISTING_TIMEOUT_SECONDS = 20


def open_hub(name_and_config: str, request: PrepareRequest) -> Source:
    """Open a data set as a source of `data prepare`. Rows are streamed: nothing is downloaded ahead of time.

    `name_and_config` is a name on the Hub, such as `allenai/c4` or `allenai/c4:en`, or a local folder in the Hub's
    format. A name is resolved to a commit once, so that a resumed preparation reads the same rows. Raises DataError.
    """
    if Path(name_and_config).is_dir():
        name, config = name_and_config, ""  # the name of a folder may have a colon
    else:
        name, _, config = name_and_config.partition(":")
    if not name:
        raise DataError(f"{HUB_PREFIX} needs the name of a data set, as in {HUB_PREFIX}allenai/c4:en")
    folder = Path(name)
    revision = None if folder.is_dir() else hub_revision(name)

    def describe_state() -> dict[str, str | int]:
        # Equal descriptions mean equal rows: of a commit of the Hub, or of files that nobody has changed.
        if revision is not None:
            return {"revision": revision}
        files = sorted(file for file in folder.rglob("*") if file.is_file())
        return summarize_files((file.relative_to(folder).as_posix(), file, True) for file in files)

    def units() -> Iterator[Unit]:
        origin = f"{HUB_PREFIX}{name_and_config}, split {request.split}"
        rows = hub_rows(name, config or None, request.split, revision, origin)
        # The 0 is the number of bytes read from disk, which a stream does not have.
        texts = ((text_of_row(row, request.text_keys), 0) for row in rows)
        yield from stream_units("rows", origin, texts, STREAM_UNIT_CHARACTERS)

    return Source(
        pieces=lambda: iter([Piece(num_bytes=0, units=units)]),  # the length of a stream is unknown
        describe_state=describe_state,
        total_bytes=None,
        val_fraction=DEFAULT_VAL_FRACTION,
    )


def hub_revision(name: str) -> str:
    """Return the commit at which a data set on the Hub is now. Raises DataError."""
    import huggingface_hub
    from huggingface_hub import errors

    try:
        revision = huggingface_hub.HfApi().dataset_info(name, timeout=LISTING_TIMEOUT_SECONDS).sha
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        raise DataError(
            f"{HUB_PREFIX}{name}: no such data set on the Hugging Face Hub, or none that you may read; "
            "check the spelling, or run `hf auth login`"
        ) from error
    except Exception as error:  # errors of the network have no common base class that huggingface_hub exports
        raise DataError(
            f"{HUB_PREFIX}{name}: the Hugging Face Hub cannot be reached ({type(error).__name__}); "
            "download the data set elsewhere and give its files or folder instead"
        ) from error
    assert revision is not None, "the Hub names the revision of every data set"
    return revision


def hub_rows(
    name: str, config: str | None, split: str, revision: str | None, origin: str
) -> Iterator[Mapping[str, Any]]:
    """Yield the rows of one split of a data set, in order.

    name, config, revision: the data set, as in `open_hub`. `revision` is None for a local folder.
    origin: the data set and the split, for errors while rows are read.

    Raises DataError, whatever `datasets` raises: its errors are of a dozen unrelated types.
    """
    import datasets

    # The temporary folder, if there is one, is needed until the last row.
    with ExitStack() as stack:
        try:
            safe_name = stack.enter_context(without_pattern(name))
        except OSError as error:
            raise DataError(f"{HUB_PREFIX}{name}: links to its files cannot be made: {error}") from error

        try:
            rows = iter(datasets.load_dataset(safe_name, config, split=split, revision=revision, streaming=True))
        except Exception as error:
            reason = one_line(error).replace(safe_name, name)
            raise DataError(f"{HUB_PREFIX}{name}: the data set cannot be opened: {reason}") from error

        for num_rows_read in itertools.count():
            try:
                row = next(rows, None)
            except Exception as error:
                raise DataError(f"{origin}: reading stopped after row {num_rows_read}: {one_line(error)}") from error
            if row is None:
                return
            yield row
