"""Models, runs and data of llmfoundry_lite for programs: `import llmfoundry_lite as lf`.

Importing it costs next to nothing, because a name imports its module when it is first used. `docs/library.md` is made
from the docstrings of these names.

The first thing that happens here, if this process is one of our commands, is to remove the working directory from the
search path (`search_path.py`). Below it, `_HOMES` lists the public names, and `_import_name` imports them.
"""

import sys as _sys

# Find out whether this process runs one of our commands. The search path of a user's program is not changed.
_program = (_sys.argv or [""])[0]
"""Path of the program, or `-m` while `python -m` looks for the module to run."""
_is_module_of_ours = _program == "-m" and any(word.split(".")[0] == __name__ for word in _sys.orig_argv)
_PROGRAMS = ("/llmfoundry-lite", "/llmfoundry_formats/lm_eval.py")
"""Ends of the paths of our programs. `python -m` runs the second, and finds it before it imports this package."""
if _is_module_of_ours or _program.endswith(_PROGRAMS):
    # Before anything else is imported, because the working directory may come first on the search path.
    from llmfoundry_lite.search_path import leave_out_working_directory as _leave_out_working_directory

    _leave_out_working_directory()

import importlib as _importlib  # noqa: E402
import typing as _typing  # noqa: E402

if _typing.TYPE_CHECKING:
    from llmfoundry_lite.data.stateful import open_dataset
    from llmfoundry_lite.errors import UserError
    from llmfoundry_lite.evaluation.compare import compare_files as compare
    from llmfoundry_lite.evaluation.loaded import load
    from llmfoundry_lite.programs import evaluate, runs, train
    from llmfoundry_lite.report.batch import read_batches as batches
    from llmfoundry_lite.report.reading import read_run

__version__: str
__all__ = ["UserError", "batches", "compare", "evaluate", "load", "open_dataset", "read_run", "runs", "train"]

_HOMES = {
    "UserError": ("errors", "UserError"),
    "batches": ("report.batch", "read_batches"),
    "compare": ("evaluation.compare", "compare_files"),
    "evaluate": ("programs", "evaluate"),
    "load": ("evaluation.loaded", "load"),
    "open_dataset": ("data.stateful", "open_dataset"),
    "read_run": ("report.reading", "read_run"),
    "runs": ("programs", "runs"),
    "train": ("programs", "train"),
}
"""Public name -> the module that has it, relative to this package, and its name in that module."""


def _import_name(name: str) -> _typing.Any:
    """Import and return a public name when a program first uses it; Python calls this as the module's `__getattr__`.

    The name is then set in this module, so that Python does not call this again for it. The version is an exception: it
    is read each time.

    Raises AttributeError for a name that this library does not have, and ImportError, which says what to install, if a
    package that the name needs is missing.
    """
    if name == "__version__":
        from llmfoundry_lite.release import read_release

        return read_release().version
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module_name, name_in_module = _HOMES[name]
    try:
        value = getattr(_importlib.import_module(f"{__name__}.{module_name}"), name_in_module)
    except ModuleNotFoundError as error:
        # A missing module of this package is a bug of ours, not a package to install.
        is_own_module = error.name is None or error.name.partition(".")[0] == __name__
        if is_own_module:
            raise
        from llmfoundry_lite.errors import SECOND_STEP

        remedy = "pip install llmfoundry-lite"
        if name in ("batches", "open_dataset", "train"):
            remedy = f"pip install 'llmfoundry-lite[train]'`, then `{SECOND_STEP}"
        raise ImportError(
            f"{__name__}.{name} needs {error.name}, which is not installed; `{remedy}`", name=error.name
        ) from error
    globals()[name] = value
    return value


if not _typing.TYPE_CHECKING:  # a type checker would accept any name
    __getattr__ = _import_name


def __dir__() -> list[str]:
    """List the public names, which are not in the module's dictionary until they are used."""
    return __all__
