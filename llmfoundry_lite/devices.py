"""This machine as torch sees it: the kind of device, its name, its memory, and its row in `hardware.py`.

"Device" is an accelerator (`cuda` to torch, of NVIDIA or AMD) or the CPU of a machine without one. Everything here asks
torch, so that importing this module takes a second; `hardware.py` has the facts that need no torch.
"""

import contextlib
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
    """Return torch's type of this machine's devices: `cuda` for accelerators of NVIDIA and AMD, or `cpu`."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def device_name() -> str:
    """Return the name of the current accelerator, or of the processor if there is none."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:  # which Linux alone has
        for line in file:
            if line.startswith("model name"):
                _, name = line.split(":", 1)
                return name.strip()
    return platform.processor() or platform.machine()


def accelerator(device: torch.device | None = None) -> Accelerator | None:
    """Return the row of a device, by default the current one, in the table of accelerators; None if it has none."""
    is_cpu = not torch.cuda.is_available() or (device is not None and device.type == "cpu")
    if is_cpu:
        return None
    num_compute_units = torch.cuda.get_device_properties(device).multi_processor_count
    return find_accelerator(torch.cuda.get_device_name(device), num_compute_units)


def has_tf32() -> bool:
    """Return whether matrix products of fp32 can be computed in TF32.

    NVIDIA's devices can since Ampere. AMD's gfx94 (MI300) can if HIPBLASLT_ALLOW_TF32 is 1 in the environment (ROCm's
    "Data types and precision support").
    """
    if not torch.cuda.is_available():
        return False
    if torch.version.hip:
        architecture = getattr(torch.cuda.get_device_properties(), "gcnArchName", "")
        return architecture.startswith("gfx94") and os.environ.get("HIPBLASLT_ALLOW_TF32") == "1"
    major, _ = torch.cuda.get_device_capability()
    return major >= 8  # Ampere


def set_tf32(is_allowed: bool) -> None:
    """Allow matrix products of fp32 to use TF32, which keeps 10 of fp32's 23 bits of fraction, or forbid it.

    Call this after Composer has started, because it allows TF32 on every GPU.
    """
    torch.backends.cuda.matmul.allow_tf32 = is_allowed
    torch.backends.cudnn.allow_tf32 = is_allowed


def computed_precision(precision: str) -> str:
    """Return the precision in which this device computes, if `precision` is configured.

    That is fp32 instead of tf32 on a device without TF32, and `precision` itself in all other cases.
    """
    if precision == "tf32" and not has_tf32():
        return "fp32"
    return precision


def peak_memory_bytes() -> int:
    """Return the most memory that this process has had: allocated on the accelerator, or else resident in RAM."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts KiB


def synchronize() -> None:
    """Wait until the device has finished. Call this before reading a clock, because kernels run asynchronously."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def keep_freed_memory() -> None:
    """On CPUs, make this process keep the memory that a step frees, instead of returning it to the system.

    glibc maps memory for each large tensor anew, and touching it for the first time costs a page fault for every 4 KiB:
    a sixth of the time of a step of the 124M model in bf16. After this call the process keeps the memory of its peak,
    which the next step needs again. Machines with an accelerator, or without glibc, are left as they are.
    """
    library, _ = platform.libc_ver()
    if not torch.cuda.is_available() and library == "glibc":
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, -1)


M_TRIM_THRESHOLD = -1
"""Parameter of mallopt(3): how much free memory to keep. The value -1 keeps all of it."""
M_MMAP_MAX = -4
"""Parameter of mallopt(3): how many large blocks may be mapped apart, instead of being taken from the heap."""


def vendor() -> str:
    """Return nvidia or amd, by the runtime that torch was built for, or cpu on a machine without an accelerator."""
    if not torch.cuda.is_available():
        return "cpu"
    return "amd" if torch.version.hip else "nvidia"


def runtime_release() -> str | None:
    """Return the release of CUDA or ROCm that torch was built for; None on CPUs."""
    if not torch.cuda.is_available():
        return None
    return torch.version.hip or torch.version.cuda


DRIVER_FILES = {"nvidia": "/proc/driver/nvidia/version", "amd": "/sys/module/amdgpu/version"}
"""Files in which the kernel's driver of a vendor writes its release."""


def driver_release() -> str | None:
    """Return the release of the kernel's driver for the accelerators; None on CPUs, or if the driver does not say."""
    path = Path(DRIVER_FILES.get(vendor(), ""))
    if not path.is_file():
        return None
    # NVIDIA's file has a sentence: "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar …"
    release = re.search(r"\b\d+\.\d[\d.]*", path.read_text())
    return release[0] if release else None


def local_devices() -> list[Device]:
    """Return the accelerators of this machine with their free memory, or its RAM if it has none."""
    if not torch.cuda.is_available():
        return [Device("this machine's RAM", available_memory_bytes(), is_shared=True)]
    devices = []
    for index in range(torch.cuda.device_count()):
        free_bytes, _ = torch.cuda.mem_get_info(index)
        name = f"cuda:{index} ({torch.cuda.get_device_name(index)})"
        devices.append(Device(name, free_bytes, is_shared=False))
    return devices


def available_memory_bytes() -> int:
    """Return the free RAM of the machine, or of the container (cgroup v2) if that has less."""
    available_bytes = psutil.virtual_memory().available
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used_bytes = int(Path("/sys/fs/cgroup/memory.current").read_text())
    except OSError:
        return available_bytes  # not in a container, or in one of cgroup v1
    if limit == "max":
        return available_bytes
    return min(available_bytes, max(0, int(limit) - used_bytes))
