"""Build the library that replaces CUDA in a rehearsal. No torch.

It is compiled from `cuda.c` at first use, and kept in the user's cache for each release of torch. Functions that torch
wants from CUDA and `cuda.c` does not define are generated, and return 0.
"""

import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from llmfoundry_lite.errors import ConfigError

SOURCE = Path(__file__).with_name("cuda.c")
NAME = "libcuda.so.1"
"""Name of the library, under which torch and Triton look for CUDA's driver."""
COMPILERS = ("cc", "gcc", "clang")
LIBRARIES = (
    "libtorch_cuda.so",
    "libc10_cuda.so",
    "libtorch_python.so",
    "libcaffe2_nvrtc.so",
    "libtorch_cuda_linalg.so",
)
"""Libraries of torch that call CUDA."""
FUNCTION = r"(?:__cuda[A-Z]|cuda[A-Z]|cu[A-Z]|cublas)\w*"
"""Matches the name of a function of CUDA or cuBLAS."""


def build_library() -> Path:
    """Return the folder with the `libcuda.so.1` for this environment's torch. Build it if it is not in the cache.

    Raises ConfigError without a C compiler, without a torch that was built for CUDA, and if the cache cannot be
    written.
    """
    torch_folder = find_torch()
    torch_release = importlib.metadata.version("torch")
    source_hash = hashlib.sha256(SOURCE.read_bytes() + Path(__file__).read_bytes()).hexdigest()[:12]
    folder = cache_folder() / f"torch-{torch_release}-{source_hash}"
    if (folder / NAME).is_file():
        return folder

    compilers = [path for path in map(shutil.which, COMPILERS) if path is not None]
    if not compilers or shutil.which("nm") is None:
        raise ConfigError(
            "rehearse: no C compiler on PATH (cc, gcc or clang, with nm); install one (`apt-get install gcc`): "
            "the library that stands in for CUDA is built once, at first use"
        )
    headers = find_headers(torch_folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Another process may build the same library. The rename makes it appear complete or not at all.
        with tempfile.TemporaryDirectory(dir=folder) as build_folder:
            library = compile_library(compilers[0], torch_folder, headers, Path(build_folder))
            os.replace(library, folder / NAME)
    except OSError as error:
        raise ConfigError(f"rehearse: {folder} cannot be written ({error.strerror}); set XDG_CACHE_HOME") from None
    return folder


def compile_library(compiler: str, torch_folder: Path, headers: Path, build_folder: Path) -> Path:
    """Compile `cuda.c` in `build_folder`, which nothing else uses. Return the library.

    headers: folder of CUDA's headers. Raises ConfigError with the compiler's first error.
    """
    write_stubs(torch_folder, build_folder / "stubs.inc")
    library = build_folder / NAME
    # The headers of torch's packages lack the folder `crt`, which Triton has.
    include_folders = [headers, torch_folder.parent / "triton/backends/nvidia/include", build_folder]
    options = ["-shared", "-fPIC", "-O1", "-w", f"-Wl,-soname,{NAME}"]
    options += [f"-I{folder}" for folder in include_folders]
    command = [compiler, *options, str(SOURCE), "-o", str(library), "-ldl", "-lpthread"]
    process = subprocess.run(command, capture_output=True, text=True)
    if process.returncode != 0:
        errors = [line for line in process.stderr.splitlines() if "error" in line or "failed" in line]
        first_error = errors[0] if errors else process.stderr.strip()[:200]
        raise ConfigError(f"rehearse: {compiler} cannot build the library that stands in for CUDA: {first_error}")
    return library


def cache_folder() -> Path:
    """Return the folder of built libraries in the user's cache. Raises ConfigError if the user has no home folder."""
    try:
        user_cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:
        raise ConfigError(
            "rehearse: this user has no home; set XDG_CACHE_HOME to a folder that can be written"
        ) from None
    return Path(user_cache) / "llmfoundry_lite" / "rehearse"


def find_torch() -> Path:
    """Return the folder of torch without importing it. Raises ConfigError if it was built without CUDA."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None
    folder = Path(spec.origin).parent
    if not (folder / "lib" / "libtorch_cuda.so").is_file():
        release = importlib.metadata.version("torch")
        raise ConfigError(
            f"rehearse: torch {release} in {folder} was built without CUDA; install the CUDA build "
            "(`pip install torch` on Linux has it; no GPU is needed)"
        )
    return folder


def find_headers(torch_folder: Path) -> Path:
    """Return a folder of CUDA's headers: of the packages beside torch, or of a CUDA toolkit.

    Raises ConfigError if none of them has the headers.
    """
    folders = sorted(torch_folder.parent.glob("nvidia/*/include"))
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        toolkit = os.environ.get(variable)
        if toolkit:
            folders.append(Path(toolkit) / "include")
    folders.append(Path("/usr/local/cuda/include"))

    for folder in folders:
        if (folder / "driver_types.h").is_file():
            return folder
    raise ConfigError(
        f"rehearse: CUDA's header driver_types.h is neither beside torch ({torch_folder.parent}/nvidia) nor in "
        "CUDA_HOME; set CUDA_HOME to a CUDA toolkit"
    )


def write_stubs(torch_folder: Path, path: Path) -> None:
    """Write C code with a function that returns 0 for each one that torch or Triton needs and `cuda.c` lacks."""
    needed: set[str] = set()
    for library in LIBRARIES:
        command = ["nm", "-D", "--undefined-only", str(torch_folder / "lib" / library)]
        undefined_symbols = subprocess.run(command, capture_output=True, text=True).stdout
        needed.update(re.findall(rf" U ({FUNCTION})", undefined_symbols))
    for source in torch_folder.parent.glob("triton/backends/nvidia/driver.*"):
        needed.update(re.findall(r"\b(cu[A-Z]\w+)", source.read_text()))

    # A definition begins a line with its type: `CUresult cuInit(`, `const char *cudaGetErrorString(`.
    defined = re.findall(rf"^[a-z][\w ]*\**\s?\**({FUNCTION})\(", SOURCE.read_text(), re.MULTILINE)
    # cuFile is a library of its own, for storage.
    missing = sorted(name for name in needed.difference(defined) if not name.startswith("cuFile"))
    path.write_text("".join(f"int {name}(void) {{ return 0; }}\n" for name in missing))
