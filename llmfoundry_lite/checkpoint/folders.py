"""Errors of files that may pass, and what a second look at a file makes of damage. No torch."""

import contextlib
import errno
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from llmfoundry_lite.errors import DamagedCheckpointError
from llmfoundry_lite.retry import Budget

T = TypeVar("T")
Buffer = Any
"""Bytes that can be read (and, for `Source.read_into`, written): memoryview, numpy uint8 array."""

NO_FILE = (errno.ENOENT, errno.EISDIR, errno.ENOTDIR, errno.ELOOP)

PAUSES_SECONDS = (0.2, 0.6, 1.8)
"""Before each further attempt at a file."""


def retry_on_damage(look: Callable[[bool], T]) -> T:
    """Call `look(bypass_cache=False)`, and after damage `look(True)`: it may be a bad transfer or a stale cache."""
    try:
        return look(False)
    except DamagedCheckpointError:
        return look(True)


def retry_transient_errors(call: Callable[[], T], only: Sequence[int] | None = None) -> T:
    """Repeat a call after an error that may pass: any OSError of disk or network, or with `only` those errnos."""
    budget = Budget(PAUSES_SECONDS, attempts=len(PAUSES_SECONDS))
    while True:
        try:
            with as_os_errors():
                return call()
        except (FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError):
            raise
        except OSError as error:
            if (only is not None and error.errno not in only) or (pause := budget.pause()) is None:
                raise
        time.sleep(pause)


@contextlib.contextmanager
def as_os_errors() -> Iterator[None]:
    """Turn errors of object stores' clients, such as botocore's without credentials, into OSError."""
    try:
        yield
    except (OSError, EOFError, TypeError, NotImplementedError, ValueError):
        raise
    except Exception as error:
        raise OSError(first_line(error)) from error


def first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).split("\n")[0]
