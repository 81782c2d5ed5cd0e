"""Sources of `data prepare` in buckets: the objects of `bucket_list.py`, cut into pieces like local files."""

from collections.abc import Sequence
from pathlib import Path

from llmfoundry_engines.bucket_list import list_objects
from llmfoundry_engines.stored_list import load_list, store_list
from llmfoundry_lite.prepare.listing import Listing
from llmfoundry_lite.prepare.request import PrepareRequest
from llmfoundry_lite.prepare.sources import DEFAULT_VAL_FRACTION, Source, check_can_read_tables, file_pieces


def open_bucket(urls: Sequence[str], request: PrepareRequest, stored: Path | None = None) -> Source:
    """Open the objects that URLs refer to as a source of `data prepare`.

    They are listed here, unless the file `stored` has a list that another part has made, and read only when the units
    of a piece are asked for. Raises DataError if a URL has nothing to read, and ConfigError if a companion that is
    needed is not installed.
    """
    readers = request.reader_of_suffix
    stored_objects = load_list(stored, urls, request.on_error) if stored else None
    objects = stored_objects or list_objects(urls, request.on_error, readers)
    check_can_read_tables((file for file, _ in objects.files()), readers)
    known_states = [objects.describe()]

    def describe_state() -> dict[str, str | int]:
        """Return the state of the list that was just made and, when called again, of a new one.

        A stored list is not made again, because each object is checked when it is read.
        """
        if stored_objects is not None:
            return stored_objects.describe()
        return known_states.pop() if known_states else list_objects(urls, request.on_error, readers).describe()

    return Source(
        pieces=lambda: file_pieces(objects.files(), objects.total_bytes, request),
        describe_state=describe_state,
        total_bytes=objects.total_bytes,
        val_fraction=DEFAULT_VAL_FRACTION,
        listing=Listing(num_ignored=objects.num_ignored, unreadable=objects.unreadable),
        store_list=lambda path: store_list(path, objects, urls, request.on_error),
    )
