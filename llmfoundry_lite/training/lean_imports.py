"""Import Composer and StreamingDataset without what they import for features that no YAML can name.

`import composer` takes 14 s of a processor. Almost half of that goes into torchvision's models, torchmetrics for sound,
images and text, transformers, and clients of services. While the two packages are imported, stand-ins answer for these.
Then the stand-ins leave `sys.modules`, so whoever asks for the real packages gets them.

Composer's vision algorithms, its Hugging Face wrapper and its logger for MosaicML's platform keep their stand-ins, and
do not work. A component of the user's own may need them: with one in the YAML, everything is imported (`FULL_IMPORTS`).
"""

import gc
import importlib
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

FULL_IMPORTS = "LLMFOUNDRY_LITE_FULL_IMPORTS"
"""Set in the environment, nothing is left out."""

HEAVY = ("composer", "composer.algorithms", "streaming")
"""What a training process imports lean. Composer imports its algorithms as the first event of a run happens."""

DOMAINS = (
    *("audio", "clustering", "detection", "image", "multimodal", "nominal", "retrieval", "segmentation", "shape"),
    *("text", "video"),
)
LEFT_OUT = (
    *("mcli", "paramiko", "torchvision", "transformers", "torchmetrics.utilities.plot"),
    *(f"torchmetrics.{domain}" for domain in DOMAINS),
    *(f"torchmetrics.functional.{domain}" for domain in DOMAINS),
)


def import_lean(*names: str) -> None:
    """Import these packages; those of `LEFT_OUT` that they ask for, and that nobody has imported yet, are stand-ins."""
    if FULL_IMPORTS in os.environ:
        return
    with no_collection(), _stand_ins([name for name in LEFT_OUT if name not in sys.modules]):
        for name in names:
            importlib.import_module(name)


@contextmanager
def no_collection() -> Iterator[None]:
    """Imports make millions of objects and hardly any rubbish: to look for that is a fifth of their time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextmanager
def _stand_ins(roots: Sequence[str]) -> Iterator[None]:
    finder = _Finder(tuple(roots))
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name, module in sys.modules.items() if isinstance(module, StandIn)]:
            del sys.modules[name]
            package, _, part = name.rpartition(".")
            # A package remembers its parts: `from torchmetrics import text` must look for the real one.
            if isinstance(vars(sys.modules.get(package, sys)).get(part), StandIn):
                delattr(sys.modules[package], part)


class _Finder(MetaPathFinder, Loader):
    def __init__(self, roots: tuple[str, ...]):
        self.roots = roots

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        is_left_out = name in self.roots or name.startswith(tuple(f"{root}." for root in self.roots))
        return ModuleSpec(name, self, is_package=True) if is_left_out else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


class StandIn(ModuleType):
    """Has every name: an empty class, which can be inherited from and annotated with."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        thing = type(name, (), {"__module__": self.__name__})
        setattr(self, name, thing)
        return thing
