"""What torch sees on this machine: the kind of device, its name, its memory, and its row in `hardware.py`."""

import ctypes
import os
import platform
import re
import resource
from pathlib import Path

import psutil
import torch

from llmfoundry_lite.hardware import Accelerator, Device, find_accelerator


def device_type() -> str:
    """`cuda` (NVIDIA and AMD alike, as torch has it) or `cpu`."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def device_name() -> str:
    """The accelerator's own name, or the processor's."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def accelerator() -> Accelerator | None:
    """This machine's row of the hardware table; None when it is not in it, and then nothing is guessed."""
    if not torch.cuda.is_available():
        return None
    return find_accelerator(device_name(), torch.cuda.get_device_properties().multi_processor_count)


def has_tf32() -> bool:
    """Whether fp32 products can be computed in TF32: on NVIDIA since Ampere; on AMD's gfx94 where hipBLASLt is told to
    (HIPBLASLT_ALLOW_TF32, by ROCm's "Data types and precision support")."""
    if not torch.cuda.is_available():
        return False
    if torch.version.hip:
        name = getattr(torch.cuda.get_device_properties(), "gcnArchName", "")
        return name.startswith("gfx94") and os.environ.get("HIPBLASLT_ALLOW_TF32") == "1"
    return torch.cuda.get_device_capability()[0] >= 8


def set_tf32(is_allowed: bool) -> None:
    """TF32 keeps 10 of fp32's 23 bits of fraction. Composer allows it on every GPU; here `precision` alone decides."""
    torch.backends.cuda.matmul.allow_tf32 = is_allowed
    torch.backends.cudnn.allow_tf32 = is_allowed


def computed_precision(precision: str) -> str:
    """`precision` as this device computes it: without TF32, tf32 is fp32."""
    return "fp32" if precision == "tf32" and not has_tf32() else precision


def peak_memory_bytes() -> int:
    """The most memory this process has held: on the accelerator if there is one, else resident in RAM."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def finish() -> None:
    """Return when the device has done all that it was asked to: kernels run behind the host, which a clock would time
    instead. On CPUs everything has been done already."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def keep_freed_memory() -> None:
    """On CPUs, have what a step frees serve the next one, instead of returning it to the system.

    glibc maps each large tensor anew, and its first touch costs a page fault for every 4 KiB: a sixth of a step of the
    124M model in bf16. A process holds on to its peak instead, which a step needs again at once.
    """
    if not torch.cuda.is_available() and platform.libc_ver()[0] == "glibc":
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, -1)


M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
"""Parameters of mallopt(3)."""


def vendor() -> str:
    """nvidia, amd or cpu: whose runtime this torch was built for, where there is a device to run on."""
    if not torch.cuda.is_available():
        return "cpu"
    return "amd" if torch.version.hip else "nvidia"


def runtime() -> str | None:
    """The CUDA or ROCm release torch was built for; None on CPUs."""
    return (torch.version.hip or torch.version.cuda) if torch.cuda.is_available() else None


def driver() -> str | None:
    """The release of the kernel's driver for the accelerators; None on CPUs."""
    files = {"nvidia": "/proc/driver/nvidia/version", "amd": "/sys/module/amdgpu/version"}
    path = Path(files.get(vendor(), ""))
    # NVIDIA's is a sentence: "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar …"
    found = re.search(r"\b\d+\.\d[\d.]*", path.read_text()) if path.is_file() else None
    return found[0] if found else None


def local_devices() -> list[Device]:
    """The accelerators of this machine; its RAM where it has none."""
    if not torch.cuda.is_available():
        return [Device("this machine's RAM", available_memory_bytes(), True)]
    indices = range(torch.cuda.device_count())
    return [
        Device(f"cuda:{i} ({torch.cuda.get_device_name(i)})", torch.cuda.mem_get_info(i)[0], False) for i in indices
    ]


def available_memory_bytes() -> int:
    """RAM that could still be had, by the machine's count or that of the container around us, whichever is less."""
    available = psutil.virtual_memory().available
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        return available if limit == "max" else min(available, max(0, int(limit) - used))
    except OSError:
        return available
