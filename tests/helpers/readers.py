"""Input that every reader of other people's files must bear, and the places that read files without a limit."""

import contextlib
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llmfoundry_lite.errors import UserError

UNPICKLES = re.compile(
    r"\b(import|from)\s+(pickle|cPickle|_pickle|dill|cloudpickle|joblib|shelve|marshal)\b|\bpickle\.\w|\b[Uu]npickler\b"
    r"|torch\.(load|save|serialization|package)\b|from torch import .*\b(load|save)\b|allow_pickle\s*=\s*True"
    r"|(gather|broadcast|scatter|send|recv)_object|object_list|all_gather_object|_MaybePickler"
    r"|\b(dcp|dist_cp)\.(load|save|async_save)\b|FileSystem(Reader|Writer)|HuggingFaceStorage|torch\.hub\b|jit\.load"
)
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
    return {name for name, text in _sources(package).items() if WHOLE.search(text)}


def find_unpickling(package: Path) -> list[str]:
    """Return the modules of a package that pickle or unpickle, comments and texts apart."""
    code = {
        name: re.sub(r'""".*?"""|#[^\n]*|"[^"\n]*"', "", text, flags=re.S) for name, text in _sources(package).items()
    }
    return [name for name, text in code.items() if UNPICKLES.search(text)]


def _sources(package: Path) -> dict[str, str]:
    modules = [path for path in sorted(package.rglob("*.py")) if "tests" not in path.relative_to(package).parts]
    return {str(path.relative_to(package)): path.read_text() for path in modules}
