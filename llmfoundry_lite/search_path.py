"""Where modules come from: never from the working directory, unless a `python:` name of the user's own is found there.

The working directory may be a folder that somebody else made. Python looks there first for `python -m` and `python -c`,
also in processes that multiprocessing and launchers start, and for an empty entry of PYTHONPATH.
"""

import os
import sys
from pathlib import Path

HOME = str(Path(__file__).resolve().parents[1])
"""Folder that holds this package: a clone, or site-packages."""
SAFE_PATH = "PYTHONSAFEPATH"
SET_BY_US = "llmfoundry_lite"
"""Our value of PYTHONSAFEPATH, for which Python accepts any text. It tells our setting from the user's own."""


def leave_out_working_directory() -> None:
    """Remove the working directory from the search path of this process, and of Python processes that it starts.

    It stays if PYTHONPATH names it, or if this package lies there.
    """
    try:
        here = os.getcwd()
    except FileNotFoundError:  # the folder was removed, so nothing can be imported from there
        return
    if os.path.realpath(here) == HOME or os.environ.get(SAFE_PATH) == SET_BY_US:
        return

    if not sys.flags.safe_path and sys.path[:1] in ([""], [here]):
        del sys.path[0]

    entries = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    named = [entry for entry in entries if entry]
    is_named = any(os.path.realpath(entry) == os.path.realpath(here) for entry in named)
    if "" in entries and here in sys.path and not is_named:
        sys.path.remove(here)

    if named:
        os.environ["PYTHONPATH"] = os.pathsep.join(named)
    else:
        os.environ.pop("PYTHONPATH", None)
    os.environ.setdefault(SAFE_PATH, SET_BY_US)


def environment_of_user() -> dict[str, str]:
    """Return the environment for a command of the user's own, which may import from its working directory."""
    return {name: value for name, value in os.environ.items() if (name, value) != (SAFE_PATH, SET_BY_US)}


def allow_working_directory_for(module: str) -> None:
    """Let imports find the working directory, last of all, if only there is a module that the user's YAML names.

    The user trusts that folder, then. So processes that the user's own code starts get the user's own PYTHONSAFEPATH.
    """
    from importlib.machinery import PathFinder
    from importlib.util import find_spec

    package = module.partition(".")[0]
    if package in sys.modules or find_spec(package) is not None:
        return
    if PathFinder.find_spec(package, [os.getcwd()]) is None:
        return
    sys.path.append(os.getcwd())
    if os.environ.get(SAFE_PATH) == SET_BY_US:
        del os.environ[SAFE_PATH]
