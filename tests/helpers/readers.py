"""What every reader of other people's files must bear, and where files are read without a limit."""

import contextlib
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llmfoundry_lite.errors import UserError

WHOLE = re.compile(r"\.read_(text|bytes)\(|OmegaConf\.load\((?!io)|base\.compression import decompress")


def give_pipe(path: Path, read: Callable[[Path], Any]) -> None:
    """Let it read a pipe that nobody writes to. It may refuse it, and not wait for it."""
    if not path.exists():
        os.mkfifo(path)
    with contextlib.suppress(UserError, OSError):
        read(path)


def give_brackets(path: Path, read: Callable[[Path], Any]) -> None:
    """Let it read JSON that is too deep for Python's own reader."""
    path.write_text("[" * 100_000 + "\n")
    with contextlib.suppress(OSError, ValueError):  # which a UserError is, too
        read(path)


def find_whole_reads(package: Path) -> set[str]:
    """Return the modules of a package that read whole files."""
    modules = [path for path in package.rglob("*.py") if "tests" not in path.relative_to(package).parts]
    return {str(path.relative_to(package)) for path in modules if WHOLE.search(path.read_text())}
