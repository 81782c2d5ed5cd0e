"""The library that stands in for CUDA: built from `cuda.c` at first use, kept for each torch release. No torch."""

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
"""torch and Triton look for a driver of that name."""
LIBRARIES = (
    "libtorch_cuda.so",
    "libc10_cuda.so",
    "libtorch_python.so",
    "libcaffe2_nvrtc.so",
    "libtorch_cuda_linalg.so",
)
FUNCTION = r"(?:__cuda[A-Z]|cuda[A-Z]|cu[A-Z]|cublas)\w*"


def build_library() -> Path:
    """Return the folder of a `libcuda.so.1` for this environment's torch. Raises ConfigError if it cannot be built."""
    torch_folder = find_torch()
    release = importlib.metadata.version("torch")
    version = hashlib.sha256(SOURCE.read_bytes() + Path(__file__).read_bytes()).hexdigest()[:12]
    folder = cache_folder() / f"torch-{release}-{version}"
    if (folder / NAME).is_file():
        return folder
    compiler = next((path for name in ("cc", "gcc", "clang") if (path := shutil.which(name))), None)
    if compiler is None or shutil.which("nm") is None:
        raise ConfigError(
            "rehearse: no C compiler on PATH (cc, gcc or clang, with nm); install one (`apt-get install gcc`): "
            "the library that stands in for CUDA is built once, at first use"
        )
    headers = find_headers(torch_folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as place:
            made = compile_library(compiler, torch_folder, headers, Path(place))
            os.replace(made, folder / NAME)
    except OSError as error:
        raise ConfigError(f"rehearse: {folder} cannot be written ({error.strerror}); set XDG_CACHE_HOME") from None
    return folder


def compile_library(compiler: str, torch_folder: Path, headers: Path, place: Path) -> Path:
    """Compile `cuda.c` in `place`, a folder of this build alone. Raises ConfigError."""
    write_stubs(torch_folder, place / "stubs.inc")
    made = place / NAME
    # Torch's own headers leave out `crt`, which Triton brings.
    includes = [headers, torch_folder.parent / "triton/backends/nvidia/include", place]
    options = ["-shared", "-fPIC", "-O1", "-w", f"-Wl,-soname,{NAME}", *(f"-I{folder}" for folder in includes)]
    command = [compiler, *options, str(SOURCE), "-o", str(made), "-ldl", "-lpthread"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        telling = (line for line in done.stderr.splitlines() if "error" in line or "failed" in line)
        first = next(telling, done.stderr.strip()[:200])
        raise ConfigError(f"rehearse: {compiler} cannot build the library that stands in for CUDA: {first}")
    return made


def cache_folder() -> Path:
    try:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:
        raise ConfigError(
            "rehearse: this user has no home; set XDG_CACHE_HOME to a folder that can be written"
        ) from None
    return Path(base) / "llmfoundry_lite" / "rehearse"


def find_torch() -> Path:
    """Return torch's folder. Raises ConfigError for one that was built without CUDA."""
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
    homes = [Path(home) / "include" for name in ("CUDA_HOME", "CUDA_PATH") if (home := os.environ.get(name))]
    for folder in (*sorted(torch_folder.parent.glob("nvidia/*/include")), *homes, Path("/usr/local/cuda/include")):
        if (folder / "driver_types.h").is_file():
            return folder
    raise ConfigError(
        f"rehearse: CUDA's header driver_types.h is neither beside torch ({torch_folder.parent}/nvidia) nor in "
        "CUDA_HOME; set CUDA_HOME to a CUDA toolkit"
    )


def write_stubs(torch_folder: Path, path: Path) -> None:
    """Write a function that returns 0 for each name that torch or Triton wants from CUDA and `cuda.c` lacks."""
    wanted: set[str] = set()
    for name in LIBRARIES:
        command = ["nm", "-D", "--undefined-only", str(torch_folder / "lib" / name)]
        listed = subprocess.run(command, capture_output=True, text=True).stdout
        wanted |= set(re.findall(rf" U ({FUNCTION})", listed))
    for source in torch_folder.parent.glob("triton/backends/nvidia/driver.*"):
        wanted |= set(re.findall(r"\b(cu[A-Z]\w+)", source.read_text()))
    defined = set(re.findall(rf"^[a-z][\w ]*\**\s?\**({FUNCTION})\(", SOURCE.read_text(), re.MULTILINE))
    stubs = sorted(name for name in wanted - defined if not name.startswith("cuFile"))
    path.write_text("".join(f"int {name}(void) {{ return 0; }}\n" for name in stubs))
