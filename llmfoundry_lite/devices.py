"""This machine as torch sees it: the kind of device, its name, its memory, and its row in `hardware.py`."""

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
    """Return `cuda`, for NVIDIA and AMD, or `cpu`."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def device_name() -> str:
    """Return the accelerator's name, or the processor's."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def accelerator(device: torch.device | None = None) -> Accelerator | None:
    """Return the row of a device, by default the current one, in the hardware table; None if it has none."""
    if not torch.cuda.is_available() or (device is not None and device.type == "cpu"):
        return None
    units = torch.cuda.get_device_properties(device).multi_processor_count
    return find_accelerator(torch.cuda.get_device_name(device), units)


def has_tf32() -> bool:
    """Return whether fp32 products can be computed in TF32: on NVIDIA since Ampere, and on AMD's gfx94 with
    HIPBLASLT_ALLOW_TF32 (ROCm's "Data types and precision support")."""
    if not torch.cuda.is_available():
        return False
    if torch.version.hip:
        name = getattr(torch.cuda.get_device_properties(), "gcnArchName", "")
        return name.startswith("gfx94") and os.environ.get("HIPBLASLT_ALLOW_TF32") == "1"
    return torch.cuda.get_device_capability()[0] >= 8


def set_tf32(is_allowed: bool) -> None:
    """Set whether products may use TF32, with 10 of fp32's 23 bits of fraction. Composer allows it on every GPU."""
    torch.backends.cuda.matmul.allow_tf32 = is_allowed
    torch.backends.cudnn.allow_tf32 = is_allowed


def computed_precision(precision: str) -> str:
    """Return the precision in which this device computes `precision`: tf32 becomes fp32 on a device without TF32."""
    return "fp32" if precision == "tf32" and not has_tf32() else precision


def peak_memory_bytes() -> int:
    """Return the peak memory of this process: on the accelerator if there is one, else resident in RAM."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def finish() -> None:
    """Wait until the device has finished, before a clock is read: kernels run asynchronously."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def keep_freed_memory() -> None:
    """On CPUs, keep the memory that a step frees for the next one, instead of returning it to the system.

    glibc maps each large tensor anew, and its first touch costs a page fault for every 4 KiB: a sixth of a step of the
    124M model in bf16. With this, a process keeps its peak, which the next step needs again.
    """
    if not torch.cuda.is_available() and platform.libc_ver()[0] == "glibc":
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, -1)


M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
"""Parameters of mallopt(3)."""


def vendor() -> str:
    """Return nvidia, amd or cpu: the vendor of torch's runtime, where there is a device to run on."""
    if not torch.cuda.is_available():
        return "cpu"
    return "amd" if torch.version.hip else "nvidia"


def runtime() -> str | None:
    """Return the CUDA or ROCm release that torch was built for; None on CPUs."""
    return (torch.version.hip or torch.version.cuda) if torch.cuda.is_available() else None


def driver() -> str | None:
    """Return the release of the kernel's driver for the accelerators; None on CPUs."""
    files = {"nvidia": "/proc/driver/nvidia/version", "amd": "/sys/module/amdgpu/version"}
    path = Path(files.get(vendor(), ""))
    # NVIDIA's file has a sentence: "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar …"
    found = re.search(r"\b\d+\.\d[\d.]*", path.read_text()) if path.is_file() else None
    return found[0] if found else None


def local_devices() -> list[Device]:
    """Return the accelerators of this machine, or its RAM if it has none."""
    if not torch.cuda.is_available():
        return [Device("this machine's RAM", available_memory_bytes(), True)]
    indices = range(torch.cuda.device_count())
    return [
        Device(f"cuda:{i} ({torch.cuda.get_device_name(i)})", torch.cuda.mem_get_info(i)[0], False) for i in indices
    ]


def available_memory_bytes() -> int:
    """Return the free RAM of the machine or of the container, whichever is less."""
    available = psutil.virtual_memory().available
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        return available if limit == "max" else min(available, max(0, int(limit) - used))
    except OSError:
        return available
