"""Import Composer and StreamingDataset without what they import for features that no YAML can name.

`import composer` takes twice as long with torchvision's models, transformers, and clients of services. Stand-ins answer
for these meanwhile. Then they leave `sys.modules`, so that a later import gets the real packages.

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
"""Top-level packages for which there are stand-ins while others are imported."""


def import_lean(*names: str) -> None:
    """Import packages, with stand-ins for the packages of LEFT_OUT that have not been imported before.

    `names` are usually those of HEAVY. Changes `sys.meta_path` and `os.path.exists` while it runs, and restores both.
    Modules that have been imported with stand-ins keep references to them.

    If the variable FULL_IMPORTS is set, only matplotlib is imported, if it is installed, without the working
    directory's settings. The packages are then imported in full where they are used.
    """
    if FULL_IMPORTS in os.environ:
        with without_matplotlibrc_of_working_directory(), suppress(ModuleNotFoundError):
            importlib.import_module("matplotlib")
        return

    # Python asks the first finder first, so the stand-ins take precedence over installed packages.
    finder = _StandInFinder(tuple(name for name in LEFT_OUT if name not in sys.modules))
    sys.meta_path.insert(0, finder)
    try:
        with no_collection(), without_matplotlibrc_of_working_directory():
            for name in names:
                importlib.import_module(name)
    finally:
        # A later import must find the real packages.
        sys.meta_path.remove(finder)
        stand_ins = [name for name, module in sys.modules.items() if isinstance(module, StandIn)]
        for name in stand_ins:
            del sys.modules[name]


@contextmanager
def without_matplotlibrc_of_working_directory() -> Iterator[None]:
    """Hide the file `matplotlibrc` of the working directory while a block imports matplotlib, or Composer, which does.

    matplotlib would read it. The folder may be somebody else's, and the file a pipe, from which reading would never
    end. So `os.path.exists` says during the block that it is missing.
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
    """Pause the garbage collector during a block of imports, of which it takes a fifth of the time.

    Imports create many objects, which it would examine again and again, and little garbage.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class _StandInFinder(MetaPathFinder, Loader):
    """Finds and loads an empty module, a StandIn, for each of some packages and for all modules in them."""

    def __init__(self, packages: tuple[str, ...]):
        self.packages = packages

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return a specification with which this object loads the module `name` as a stand-in.

        Returns None if the module is in none of the packages, so that Python asks the next finder.
        """
        top_level_package = name.partition(".")[0]
        if top_level_package not in self.packages:
            return None
        return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass  # there is nothing to run


class StandIn(ModuleType):
    """A module that has every name. Each is an empty class, so that other modules can inherit from it, and use it in
    annotations."""

    def __getattr__(self, name: str) -> Any:
        """Create the class when the name is first used. Names such as `__path__` are missing, as in other modules."""
        if name.startswith("__"):
            raise AttributeError(name)
        empty_class = type(name, (), {"__module__": self.__name__})
        setattr(self, name, empty_class)
        return empty_class
