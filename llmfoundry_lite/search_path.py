"""Where modules come from: never from the working directory, unless a `python:` name of the user's own is found there.

The working directory may be a folder that somebody else made. Python looks there first for `python -m` and `python -c`,
also in processes that multiprocessing and launchers start, and for an empty entry of PYTHONPATH. The dynamic linker
looks there for what NVIDIA's libraries load.
"""

import itertools
import os
import sys

# Nothing else is imported before the working directory is off the path: `os` and `sys` are loaded when Python starts,
# and itertools is a part of it.

HOME = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
"""Folder that holds this package: a clone, or site-packages."""
SAFE_PATH = "PYTHONSAFEPATH"
SET_BY_US = "llmfoundry_lite"
"""Our value of PYTHONSAFEPATH, for which Python accepts any text. It tells our setting from the user's own."""
LIBRARIES = ("libcask_profile_interface.so", "libcuda.so.1", "libnvrtc.so.12", "libnvrtc.so.13")
"""Libraries that NVIDIA's `libcusparseLt.so.0` (0.8.1, which comes with torch 2.13) loads at its own start or later.
Its RUNPATH is `$ORIGIN:`, whose empty entry is the working directory, so `import torch` runs a `libcuda.so.1` there."""
LIBRARY_FOLDERS = ("tls", "haswell", "xeon_phi", "avx512_1", "x86_64", "aarch64", "x86_64", "aarch64")
"""Folders for kinds of processors, any of which the dynamic linker of glibc 2.36 or older joins, in this order."""
CAPABILITIES = ("x86-64-v2", "x86-64-v3", "x86-64-v4")
"""Folders of `glibc-hwcaps` where newer ones look."""


def leave_out_working_directory() -> None:
    """Remove the working directory from the search path of this process, and of Python processes that it starts.

    It stays if PYTHONPATH names it, or if this package lies there. Ends the process with a line where a library lies
    there that torch would load.
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
    refuse_libraries_here()


def refuse_libraries_here() -> None:
    """End this process with a line if torch would load a library from the working directory."""
    library = find_library_here()
    if library is None:
        return

    from llmfoundry_lite.errors import EXIT_USER

    print(
        f"error: {library} lies in the working directory: torch would load it, and run its code; remove it, or work in "
        "another folder",
        file=sys.stderr,
    )
    sys.exit(EXIT_USER)


def find_library_here() -> str | None:
    """Return a library of the working directory that `import torch` may load from there; None if there is none."""
    folders: list[tuple[str, ...]] = []
    if os.path.isdir("glibc-hwcaps"):
        folders += [("glibc-hwcaps", name) for name in CAPABILITIES]

    # Each of the 256 combinations is only asked for if its first folder exists: this runs at every start.
    first_names = {name for name in LIBRARY_FOLDERS if os.path.isdir(name)}
    for num_names in range(len(LIBRARY_FOLDERS) + 1):
        for names in itertools.combinations(LIBRARY_FOLDERS, num_names):
            if not names or names[0] in first_names:
                folders.append(names)

    for names in folders:
        for library in LIBRARIES:
            path = os.path.join(*names, library)
            if os.path.exists(path):
                return path
    return None


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
