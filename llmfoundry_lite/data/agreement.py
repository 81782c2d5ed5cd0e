"""Checks that all ranks make together before the first batch: errors, and equal data on all nodes.

For main threads only: every rank must come here in the same order.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from llmfoundry_lite.errors import DataError, UserError
from llmfoundry_lite.ranks.exchange import raise_on_all_ranks


@contextmanager
def failing_together(what: str) -> Iterator[None]:
    """Raise an error of one rank on every rank, so that nobody waits for a rank that has left.

    An error that a disk, a remote or a setting may cause becomes a DataError that begins with `what`. A bug stays as it
    is where it happened.
    """
    error = None
    try:
        yield
    except UserError as caught:
        error = caught
    except (OSError, RuntimeError, ValueError, KeyError, OverflowError) as caught:
        error = DataError(f"{what}: {one_line(caught)}")
        error.__cause__ = caught
    except Exception as caught:
        error = caught
    raise_on_all_ranks(error)


def check_alike(notes: Sequence[dict[str, Any]]) -> None:
    """Raise DataError on every rank unless all have the same data in the same order. It names a node that differs.

    Each note has `node`, `order`, and for each of `streams` its name, folder, shards, samples and content.
    """
    kinds = [(note["order"], [stream["content"] for stream in note["streams"]]) for note in notes]
    usual = max(kinds, key=kinds.count)
    if all(kind == usual for kind in kinds):
        return
    there, here = (
        notes[kinds.index(usual)],
        next(note for note, kind in zip(notes, kinds, strict=True) if kind != usual),
    )
    differing = [
        f"{stream['name'] or 'the data'}: {_describe(ours, here)}, but {_describe(stream, there)}"
        for stream, ours in zip(there["streams"], here["streams"], strict=False)
        if stream["content"] != ours["content"]
    ]
    what = "; ".join(differing) or "the same shards, but other streams, weights, seed, batch size or shuffling"
    raise DataError(
        f"{here['node']} reads other data than {there['node']}: {what}; give every node the same data and configuration"
    )


def _describe(stream: dict[str, Any], note: dict[str, Any]) -> str:
    size = f"{stream['samples']} samples in {stream['shards']} shards"
    return f"{stream['folder']} on {note['node']} has {size} ({stream['content']})"


def one_line(error: BaseException) -> str:
    """Return the message of an error without line ends, or its type where it has none."""
    return " ".join(str(error).split()) or type(error).__name__
