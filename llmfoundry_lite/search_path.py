"""Prevent imports from the working directory, unless the user's YAML names a module (`python:…`) that is only there.

The working directory may be a folder that somebody else made, and a file `random.py` in it would run instead of
Python's. Python looks there first for `python -m` and `python -c`, also in processes that multiprocessing and launchers
start, and for an empty entry of PYTHONPATH. The dynamic linker looks there for libraries that NVIDIA's libraries load.
"""

import itertools
import os
import sys

# Do not import other modules here, because the working directory is still on the path. `os` and `sys` are loaded when
# Python starts, and itertools is built into it.

HOME = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
"""Folder that holds this package: a clone, or site-packages."""
SAFE_PATH = "PYTHONSAFEPATH"
"""Environment variable which, with any value, makes Python leave out the working directory."""
SET_BY_US = "llmfoundry_lite"
"""Our value of PYTHONSAFEPATH, which differs from any that a user would set."""
LIBRARIES = ("libcask_profile_interface.so", "libcuda.so.1", "libnvrtc.so.12", "libnvrtc.so.13")
"""Libraries that NVIDIA's `libcusparseLt.so.0` (0.8.1, which comes with torch 2.13) loads when it starts or later. Its
RUNPATH is `$ORIGIN:`, whose empty entry is the working directory, so `import torch` runs a `libcuda.so.1` there."""
LIBRARY_FOLDERS = ("tls", "haswell", "xeon_phi", "avx512_1", "x86_64", "aarch64", "x86_64", "aarch64")
"""Subfolders for kinds of processors. The dynamic linker of glibc 2.36 or older looks in any path made of some of them
in this order, such as haswell/x86_64."""
CAPABILITIES = ("x86-64-v2", "x86-64-v3", "x86-64-v4")
"""Subfolders of `glibc-hwcaps` in which newer dynamic linkers look."""


def leave_out_working_directory() -> None:
    """Remove the working directory from the search path of this process, and of Python processes that it starts.

    Call this before other modules are imported. It changes `sys.path` and the environment variables PYTHONPATH and
    PYTHONSAFEPATH. The working directory stays if PYTHONPATH names it, or if this package is in it. Exits with an error
    if the working directory has a library that torch would load.
    """
    try:
        working_directory = os.getcwd()
    except FileNotFoundError:  # the folder was removed, so nothing can be imported from it
        return
    is_done_already = os.environ.get(SAFE_PATH) == SET_BY_US
    if os.path.realpath(working_directory) == HOME or is_done_already:
        return

    # `python -m` and `python -c` put the working directory first.
    if not sys.flags.safe_path and sys.path[:1] in ([""], [working_directory]):
        del sys.path[0]

    # An empty entry of PYTHONPATH stands for the working directory.
    entries = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    named_folders = [entry for entry in entries if entry]
    is_named = any(os.path.realpath(folder) == os.path.realpath(working_directory) for folder in named_folders)
    if "" in entries and working_directory in sys.path and not is_named:
        sys.path.remove(working_directory)

    # Processes that this one starts inherit the variables.
    if named_folders:
        os.environ["PYTHONPATH"] = os.pathsep.join(named_folders)
    else:
        os.environ.pop("PYTHONPATH", None)
    os.environ.setdefault(SAFE_PATH, SET_BY_US)
    refuse_libraries_here()


def refuse_libraries_here() -> None:
    """Print an error and exit if the working directory has a library that torch would load."""
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
    """Return the path of a library in the working directory that `import torch` may load; None if there is none.

    The path is relative, such as `libcuda.so.1` or `haswell/x86_64/libcuda.so.1`.
    """
    folders: list[tuple[str, ...]] = []  # the parts of each folder's path
    if os.path.isdir("glibc-hwcaps"):
        folders += [("glibc-hwcaps", name) for name in CAPABILITIES]

    # There are 256 combinations, and this runs at every start, so only those whose first folder exists are tried. The
    # combination of no names is the working directory itself.
    existing_names = {name for name in LIBRARY_FOLDERS if os.path.isdir(name)}
    for num_names in range(len(LIBRARY_FOLDERS) + 1):
        for names in itertools.combinations(LIBRARY_FOLDERS, num_names):
            if not names or names[0] in existing_names:
                folders.append(names)

    for names in folders:
        for library in LIBRARIES:
            path = os.path.join(*names, library)
            if os.path.exists(path):
                return path
    return None


def environment_of_user() -> dict[str, str]:
    """Return the environment variables for a command of the user, without our PYTHONSAFEPATH.

    Such a command may import from its working directory, as it would if the user started it.
    """
    return {name: value for name, value in os.environ.items() if (name, value) != (SAFE_PATH, SET_BY_US)}


def allow_working_directory_for(module: str) -> None:
    """Add the working directory to the end of `sys.path`, if only it has a module that the user's YAML names.

    `module` is the module of a `python:` name. By naming it, the user has said that the folder is trusted. Python
    processes that this one starts may then import from it too, unless the user has set PYTHONSAFEPATH.
    """
    from importlib.machinery import PathFinder
    from importlib.util import find_spec

    package = module.partition(".")[0]
    is_found_already = package in sys.modules or find_spec(package) is not None
    if is_found_already:
        return
    if PathFinder.find_spec(package, [os.getcwd()]) is None:
        return  # not here either; the import will fail with its own error
    sys.path.append(os.getcwd())
    if os.environ.get(SAFE_PATH) == SET_BY_US:
        del os.environ[SAFE_PATH]
