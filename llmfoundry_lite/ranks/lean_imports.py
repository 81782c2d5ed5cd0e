"""Import Composer and StreamingDataset without what they import for features that no YAML can name.

`import composer` takes twice as long with torchvision's models, transformers, and clients of services. Stand-ins answer
for these meanwhile. Then they leave `sys.modules`, so whoever asks for the real packages gets them.

Composer's vision algorithms, its Hugging Face wrapper and its logger for MosaicML's platform keep their stand-ins, and
do not work. With a component of the user's own in the YAML, everything is imported (`FULL_IMPORTS`).
"""

import gc
import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

FULL_IMPORTS = "LLMFOUNDRY_LITE_FULL_IMPORTS"
"""Environment variable: if it is set, nothing is left out."""
HEAVY = ("composer", "composer.algorithms", "streaming")
"""Packages that a training process imports lean. Composer imports its algorithms at the first event of a run."""
LEFT_OUT = ("mcli", "paramiko", "torchvision", "transformers")
"""Top-level packages."""


def import_lean(*names: str) -> None:
    """Import these packages, with stand-ins for those of `LEFT_OUT` that nobody has imported yet."""
    if FULL_IMPORTS in os.environ:
        with without_matplotlibrc_of_working_directory(), suppress(ModuleNotFoundError):
            importlib.import_module("matplotlib")
        return

    finder = _Finder(tuple(name for name in LEFT_OUT if name not in sys.modules))
    sys.meta_path.insert(0, finder)
    try:
        with no_collection(), without_matplotlibrc_of_working_directory():
            for name in names:
                importlib.import_module(name)
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name, module in sys.modules.items() if isinstance(module, StandIn)]:
            del sys.modules[name]


@contextmanager
def without_matplotlibrc_of_working_directory() -> Iterator[None]:
    """Let that file count as missing while matplotlib is imported, which Composer imports through torchmetrics.

    The folder may be somebody else's, and the file a pipe, which would never end.
    """
    exists = os.path.exists

    def exists_elsewhere(path: int | str | bytes | os.PathLike) -> bool:
        return path != "matplotlibrc" and exists(path)

    os.path.exists = exists_elsewhere
    try:
        yield
    finally:
        os.path.exists = exists


@contextmanager
def no_collection() -> Iterator[None]:
    """Pause the garbage collector, which takes a fifth of the time: imports make many objects and little garbage."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class _Finder(MetaPathFinder, Loader):
    def __init__(self, roots: tuple[str, ...]):
        self.roots = roots

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in self.roots else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


class StandIn(ModuleType):
    """A module that has every name: an empty class, which can be inherited from and annotated with."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        thing = type(name, (), {"__module__": self.__name__})
        setattr(self, name, thing)
        return thing
