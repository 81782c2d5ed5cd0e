"""Python, packages, torch's build, drivers, devices, open files and /dev/shm."""

import os
import platform
import re
import resource
import sys
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from llmfoundry_lite.hardware import GIB, find_accelerator
from llmfoundry_lite.release import read_release
from llmfoundry_machines.doctor.finding import INSTALL, Finding, Machine, Status, judge

ROOT = Path("/")
SHARED_MEMORY = Path("/dev/shm")
OLDEST_TORCH = Version("2.11")
HIDING = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
MIN_SIMD_UNITS = 200
"""An MI100 has 480; the largest integrated GPU, which no run uses, has 80."""
ENOUGH_FILES = 4096
"""Loader workers pass each tensor as an open file, data sets keep shards open, ranks their sockets."""
ENOUGH_SHARED_BYTES = GIB
"""Containers get 64 MiB unless told otherwise, with which loader workers and NCCL end in bus errors."""


class Build(NamedTuple):
    """torch's release, and what it was built for."""

    torch: str
    cuda: str | None
    """The CUDA release; None for other builds."""
    hip: str | None
    num_devices: int
    error: str = ""
    """torch's reason for having no devices."""


class Device(NamedTuple):
    name: str
    num_compute_units: int
    memory_bytes: int
    free_bytes: int


# -------------------------------------------------------------------------------------------------------- versions


def check_versions(machine: Machine) -> Iterator[Finding]:
    yield from check_packages()
    build = find_build()
    is_old = Version(Version(build.torch).base_version) < OLDEST_TORCH
    yield judge(
        "torch",
        [f"{OLDEST_TORCH} is the oldest that is supported"] if is_old else [],
        f"{INSTALL}; on ROCm, an image with torch {OLDEST_TORCH} or newer",
        value=build.torch,
        sound=f"{OLDEST_TORCH} or newer is supported",
    )
    yield check_build(build)
    if not build.num_devices:
        yield Finding("drivers", Status.SKIP, detail="torch uses no accelerator")
        return
    from torch.cuda import nccl

    from llmfoundry_lite.devices import driver_release

    yield Finding("drivers", Status.PASS, driver_release() or "unknown")
    yield Finding("RCCL" if build.hip else "NCCL", Status.PASS, ".".join(map(str, nccl.version())))


def check_packages() -> Iterator[Finding]:
    """Compare Python and the packages with what llmfoundry-lite requires."""
    python, ours = platform.python_version(), read_release()
    wanted = SpecifierSet(ours.python)
    fix = f"make an environment with a Python that is {wanted}"
    problems = [] if python in wanted else [f"supported is {wanted}"]
    yield judge("python", problems, fix, value=python, sound=sys.executable)

    missing, other = [], []
    required = [Requirement(text) for text in ours.requirements]
    required = [one for one in required if one.name not in ("torch", "torchvision")]
    required = [one for one in required if one.marker is None or one.marker.evaluate()]
    for requirement in required:
        try:
            found = version(requirement.name)
        except PackageNotFoundError:
            missing.append(f"{requirement.name} is missing")
            continue
        if found not in requirement.specifier:
            other.append(f"{requirement.name} is {found}, not {requirement.specifier}")
    if not required:
        other.append("their list is missing: neither pyproject.toml nor the installed package's metadata is here")
    value = f"{len(required) - len(missing) - len(other)} of {len(required)}"
    severity = Status.FAIL if missing else Status.WARN
    yield judge("packages", missing + other, INSTALL, severity, value=value, sound="as required")


def find_build() -> Build:
    import torch

    count, error = torch.cuda.device_count() if torch.cuda.is_available() else 0, ""
    if not count and (torch.version.cuda or torch.version.hip):
        try:
            torch.cuda.init()
        except Exception as problem:
            error = str(problem).splitlines()[0]
    return Build(torch.__version__, torch.version.cuda, torch.version.hip, count, error)


def check_build(build: Build) -> Finding:
    """Compare torch's build with the machine's device files, which say what it has even if torch sees none of it."""
    name = "torch build"
    kind = f"CUDA {build.cuda}" if build.cuda else f"HIP {build.hip}" if build.hip else "CPU"
    if build.num_devices:
        return Finding(name, Status.PASS, kind, detail=f"{build.num_devices} devices")
    if (ROOT / "dev/nvidiactl").exists():
        vendor, fits, other_build = "NVIDIA", build.cuda, "install the CUDA build of torch (`make install` does)"
        look = f"look at `nvidia-smi`; the driver must support CUDA {build.cuda}"
    elif has_amd_accelerator():
        vendor, fits, look = "AMD", build.hip, "look at `rocminfo`; this user must be in the groups render and video"
        other_build = "start from an image with ROCm's torch and "
        other_build += "pip install --no-deps -r requirements-without-torch.txt"
    else:
        return Finding(name, Status.PASS, kind, detail="no device on this machine: runs use the CPU")
    if not fits:
        detail = f"this machine has {vendor} devices, which a {kind} build of torch cannot use"
        return Finding(name, Status.FAIL, kind, detail=detail, fix=other_build)
    hidden = [variable for variable in HIDING if variable in os.environ]
    if hidden:
        detail = "devices are hidden by " + ", ".join(f"{variable}={os.environ[variable]}" for variable in hidden)
        return Finding(name, Status.WARN, kind, detail=detail, fix=f"unset {hidden[0]}")
    detail = f"torch sees none of this machine's {vendor} devices: {build.error or 'it gives no reason'}"
    return Finding(name, Status.FAIL, kind, detail=detail, fix=look)


def has_amd_accelerator() -> bool:
    """Return whether the kernel's list of compute nodes has an Instinct; it also lists processors' graphics."""
    nodes = ROOT.glob("sys/class/kfd/kfd/topology/nodes/*/properties")
    counts = (re.search(r"^simd_count (\d+)$", node.read_text(), re.M) for node in nodes)
    return any(count and int(count[1]) >= MIN_SIMD_UNITS for count in counts)


# --------------------------------------------------------------------------------------------------------- devices


def check_devices(machine: Machine) -> Iterator[Finding]:
    devices = find_devices()
    if not devices:
        from llmfoundry_lite.devices import device_name

        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        detail = f"{device_name()}, {len(os.sched_getaffinity(0))} cores, {memory / GIB:,.1f} GiB of memory"
        yield Finding("devices", Status.PASS, "CPU only", detail=detail)
        return
    yield check_kinds(devices)
    shares = [device.free_bytes / device.memory_bytes for device in devices]
    used = [str(index) for index, share in enumerate(shares) if share < 0.9]  # a driver takes 1 to 3 %
    yield judge(
        "device memory free",
        [f"another process uses device {', '.join(used)}"] if used else [],
        "end what runs there (`nvidia-smi`, `rocm-smi --showpids`)",
        Status.WARN,
        value=100 * min(shares),
        unit="%",
        sound="least of all devices",
    )


def find_devices() -> list[Device]:
    import torch

    found = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        row = torch.cuda.get_device_properties(index)
        free_bytes = torch.cuda.mem_get_info(index)[0]
        found.append(Device(row.name, row.multi_processor_count, row.total_memory, free_bytes))
    return found


def check_kinds(devices: list[Device]) -> Finding:
    kinds = Counter((device.name, device.num_compute_units) for device in devices)
    memory = min(device.memory_bytes for device in devices)
    detail = ", ".join(f"{count} x {name} ({units} compute units)" for (name, units), count in kinds.items())
    detail += f", {memory / GIB:,.0f} GiB each"
    problems, fixes = [], []
    if len(kinds) > 1:
        problems.append("they are not all the same, and the slowest sets the pace")
        fixes.append("leave the odd ones out with CUDA_VISIBLE_DEVICES (HIP_VISIBLE_DEVICES)")
    for (name, units), count in kinds.items():
        row = find_accelerator(name, units)
        if row is None:
            problems.append(f"{name} with {units} compute units is not in hardware.py: no MFU will be given")
            fixes.append("add its row, with the datasheet as source, to llmfoundry_lite/hardware.py")
        elif row.devices_per_card > 1:
            detail += f"; {row.devices_per_card} of them are one {row.name} card"
            if count % row.devices_per_card:
                problems.append("half a card is missing")
                fixes.append("look for it with `rocm-smi`, and at HIP_VISIBLE_DEVICES")
    return judge("devices", problems, "; ".join(fixes), Status.WARN, value=f"{len(devices)}", detail=detail)


# ---------------------------------------------------------------------------------------------------------- limits


def check_limits(machine: Machine) -> Iterator[Finding]:
    unlimited = resource.RLIM_INFINITY
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    fix = "raise nofile in /etc/security/limits.conf (containers: --ulimit nofile=65536)"
    if hard == unlimited or hard >= ENOUGH_FILES:
        fix = f"ulimit -n {65536 if hard == unlimited else min(hard, 65536)}"
    yield judge(
        "open files",
        [] if soft == unlimited or soft >= ENOUGH_FILES else [f"loader workers and shards may need {ENOUGH_FILES}"],
        fix,
        Status.WARN,
        value="no limit" if soft == unlimited else soft,
        sound="per process",
    )


def check_shared_memory(machine: Machine) -> Iterator[Finding]:
    folder = SHARED_MEMORY
    if not folder.is_dir():
        yield Finding("/dev/shm", Status.SKIP, detail=f"no {folder} here")
        return
    usage = os.statvfs(folder)
    total, free = usage.f_blocks * usage.f_frsize, usage.f_bavail * usage.f_frsize
    problems, fix = [], f"see whose it is (ls -l {folder}) and remove what is dead"
    if total < ENOUGH_SHARED_BYTES:
        problems, fix = ["too small for loader workers and NCCL"], "docker run --ipc=host (or --shm-size=16g)"
    elif free < ENOUGH_SHARED_BYTES:
        problems = ["almost full"]
    detail = f"of {total / GIB:,.2f} GiB"
    yield judge("/dev/shm", problems, fix, Status.WARN, value=free / GIB, unit="GiB free", detail=detail)
