"""Small files that unpack to much, and measures of how much a reader takes of them."""

import resource
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager

import pyarrow  # noqa: F401  # readers import them on first use, which is no memory of what they read
import snappy  # noqa: F401

MIB = 1 << 20


@contextmanager
def little_memory(max_mib: int) -> Iterator[None]:
    """Fail if Python objects made meanwhile, by any thread, take more memory at once."""
    tracemalloc.start()
    try:
        yield
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < max_mib * MIB


@contextmanager
def small_files(max_mib: int) -> Iterator[None]:
    """Let the system refuse any larger file, with EFBIG."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (max_mib * MIB, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
