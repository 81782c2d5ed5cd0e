"""The parts of a machine that need no measurement: versions, torch's build, drivers, devices, open files and /dev/shm.

Each `check_…` that takes `CheckOptions` is one check of the doctor, listed in `examine.py`. What torch reports is read
by `find_build` and `find_devices`, so that tests can replace it with other machines. How fast and how sound the devices
are is measured in `speed.py`.
"""

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
from llmfoundry_machines.doctor.finding import INSTALL_FIX, CheckOptions, Finding, Status, make_finding

ROOT = Path("/")
"""Root of the file system in which device files are looked up; tests replace it."""
SHARED_MEMORY = Path("/dev/shm")
OLDEST_TORCH = Version("2.11")
VISIBILITY_VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
"""Environment variables that hide devices from torch."""
MIN_SIMD_UNITS = 200
"""An MI100 has 480; the largest integrated GPU, which no run uses, has 80."""
MIN_FREE_MEMORY = 0.9
"""Share of an idle device's memory that is free; a driver takes 1 to 3 %."""
MIN_OPEN_FILES = 4096
"""Loader workers pass each tensor as an open file, data sets keep shards open, ranks their sockets."""
SUGGESTED_OPEN_FILES = 65536
MIN_SHARED_BYTES = GIB
"""Containers have 64 MiB by default, with which loader workers and NCCL end in bus errors."""


class Build(NamedTuple):
    """torch's release, the platform that it was built for, and how many devices it sees."""

    torch: str
    cuda: str | None
    """The CUDA release; None for other builds."""
    hip: str | None
    """The HIP release; None for other builds."""
    num_devices: int
    error: str = ""
    """torch's reason for having no devices."""


class Device(NamedTuple):
    """One device, as torch describes it."""

    name: str
    num_compute_units: int
    memory_bytes: int
    free_bytes: int


# -------------------------------------------------------------------------------------------------------- versions


def check_versions(options: CheckOptions) -> Iterator[Finding]:
    """Check Python, the packages, torch and its build; with a device also report the driver and NCCL (RCCL on AMD)."""
    yield from check_packages()

    build = find_build()
    # The base version leaves out suffixes: of 2.11.0a0+git1234 it is 2.11.0, which counts as new enough.
    base_version = Version(Version(build.torch).base_version)
    problems = [f"{OLDEST_TORCH} is the oldest that is supported"] if base_version < OLDEST_TORCH else []
    yield make_finding(
        "torch",
        problems,
        f"{INSTALL_FIX}; on ROCm, an image with torch {OLDEST_TORCH} or newer",
        value=build.torch,
        pass_detail=f"{OLDEST_TORCH} or newer is supported",
    )
    yield check_build(build)

    if not build.num_devices:
        yield Finding("drivers", Status.SKIP, detail="torch uses no accelerator")
        return
    from torch.cuda import nccl

    from llmfoundry_lite.devices import driver_release

    yield Finding("drivers", Status.PASS, driver_release() or "unknown")
    library = "RCCL" if build.hip else "NCCL"
    yield Finding(library, Status.PASS, ".".join(map(str, nccl.version())))


def check_packages() -> Iterator[Finding]:
    """Compare the versions of Python and of the packages with those that llmfoundry-lite requires.

    A missing package fails, another version is a warning. torch and torchvision are left out, because an image may
    bring its own; `check_versions` checks torch.
    """
    release = read_release()
    python_version = platform.python_version()
    supported_versions = SpecifierSet(release.python)
    problems = [] if python_version in supported_versions else [f"supported is {supported_versions}"]
    fix = f"make an environment with a Python that is {supported_versions}"
    yield make_finding("python", problems, fix, value=python_version, pass_detail=sys.executable)

    # A marker limits a requirement to some platforms or releases of Python.
    requirements = [Requirement(text) for text in release.requirements]
    requirements = [requirement for requirement in requirements if requirement.name not in ("torch", "torchvision")]
    requirements = [each for each in requirements if each.marker is None or each.marker.evaluate()]

    missing = []
    mismatches = []
    for requirement in requirements:
        try:
            installed_version = version(requirement.name)
        except PackageNotFoundError:
            missing.append(f"{requirement.name} is missing")
            continue
        if installed_version not in requirement.specifier:
            mismatches.append(f"{requirement.name} is {installed_version}, not {requirement.specifier}")
    if not requirements:
        mismatches.append("their list is missing: neither pyproject.toml nor the installed package's metadata is here")

    num_right = len(requirements) - len(missing) - len(mismatches)
    yield make_finding(
        "packages",
        missing + mismatches,
        INSTALL_FIX,
        Status.FAIL if missing else Status.WARN,
        value=f"{num_right} of {len(requirements)}",
        pass_detail="as required",
    )


def find_build() -> Build:
    """Ask torch for its release, its platform and its number of devices, and for its error if it should have some."""
    import torch

    num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    error = ""
    is_device_build = torch.version.cuda or torch.version.hip
    if is_device_build and not num_devices:
        # is_available() hides the reason; initialising raises it.
        try:
            torch.cuda.init()
        except Exception as problem:
            error = str(problem).splitlines()[0]
    return Build(torch.__version__, torch.version.cuda, torch.version.hip, num_devices, error)


def check_build(build: Build) -> Finding:
    """Check that torch sees the devices which this machine has.

    The machine's device files show them even if torch sees none. A build for another vendor fails, hidden devices are a
    warning, and devices that torch should see but does not fail. A machine without devices passes with any build.
    """
    check = "torch build"
    platform_name = describe_platform(build)
    if build.num_devices:
        return Finding(check, Status.PASS, platform_name, detail=f"{build.num_devices} devices")

    if (ROOT / "dev/nvidiactl").exists():
        vendor = "NVIDIA"
        is_right_build = build.cuda is not None
        build_fix = "install the CUDA build of torch (`make install` does)"
        driver_fix = f"look at `nvidia-smi`; the driver must support CUDA {build.cuda}"
    elif has_amd_accelerator():
        vendor = "AMD"
        is_right_build = build.hip is not None
        build_fix = "start from an image with ROCm's torch and pip install --no-deps -r requirements-without-torch.txt"
        driver_fix = "look at `rocminfo`; this user must be in the groups render and video"
    else:
        return Finding(check, Status.PASS, platform_name, detail="no device on this machine: runs use the CPU")

    # From here on the machine has devices that torch does not see.
    if not is_right_build:
        detail = f"this machine has {vendor} devices, which a {platform_name} build of torch cannot use"
        return Finding(check, Status.FAIL, platform_name, detail=detail, fix=build_fix)

    set_variables = [variable for variable in VISIBILITY_VARIABLES if variable in os.environ]
    if set_variables:
        settings = [f"{variable}={os.environ[variable]}" for variable in set_variables]
        detail = f"devices are hidden by {', '.join(settings)}"
        return Finding(check, Status.WARN, platform_name, detail=detail, fix=f"unset {set_variables[0]}")

    detail = f"torch sees none of this machine's {vendor} devices: {build.error or 'it gives no reason'}"
    return Finding(check, Status.FAIL, platform_name, detail=detail, fix=driver_fix)


def describe_platform(build: Build) -> str:
    """Return the platform that torch was built for: "CUDA 13.0", "HIP 7.1" or "CPU"."""
    if build.cuda:
        return f"CUDA {build.cuda}"
    if build.hip:
        return f"HIP {build.hip}"
    return "CPU"


def has_amd_accelerator() -> bool:
    """Return whether the kernel's list of compute nodes has an AMD Instinct.

    The list (/sys/class/kfd) also has CPUs and their integrated graphics, which have few SIMD units.
    """
    for properties in ROOT.glob("sys/class/kfd/kfd/topology/nodes/*/properties"):
        simd_count = re.search(r"^simd_count (\d+)$", properties.read_text(), re.M)
        if simd_count and int(simd_count[1]) >= MIN_SIMD_UNITS:
            return True
    return False


# --------------------------------------------------------------------------------------------------------- devices


def check_devices(options: CheckOptions) -> Iterator[Finding]:
    """Report this machine's devices, whether they are alike, and how much of their memory other processes use.

    A machine without devices passes, with its CPU, cores and memory in the text.
    """
    devices = find_devices()
    if not devices:
        from llmfoundry_lite.devices import device_name

        memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        num_cores = len(os.sched_getaffinity(0))
        detail = f"{device_name()}, {num_cores} cores, {memory_bytes / GIB:,.1f} GiB of memory"
        yield Finding("devices", Status.PASS, "CPU only", detail=detail)
        return
    yield check_device_types(devices)

    free_shares = [device.free_bytes / device.memory_bytes for device in devices]
    used_indices = [str(index) for index, share in enumerate(free_shares) if share < MIN_FREE_MEMORY]
    problems = [f"another process uses device {', '.join(used_indices)}"] if used_indices else []
    yield make_finding(
        "device memory free",
        problems,
        "end what runs there (`nvidia-smi`, `rocm-smi --showpids`)",
        Status.WARN,
        value=100 * min(free_shares),
        unit="%",
        pass_detail="least of all devices",
    )


def find_devices() -> list[Device]:
    """Return all devices that torch sees; none on a machine without any."""
    import torch

    if not torch.cuda.is_available():
        return []
    devices = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        free_bytes, _ = torch.cuda.mem_get_info(index)
        device = Device(properties.name, properties.multi_processor_count, properties.total_memory, free_bytes)
        devices.append(device)
    return devices


def check_device_types(devices: list[Device]) -> Finding:
    """Warn if the devices differ from each other, are not in the hardware table, or are not all devices of a card.

    A card of an MI250 has two devices, so seven devices mean that half a card is missing.
    """
    device_types = Counter((device.name, device.num_compute_units) for device in devices)
    descriptions = [f"{count} x {name} ({units} compute units)" for (name, units), count in device_types.items()]
    smallest_bytes = min(device.memory_bytes for device in devices)
    detail = f"{', '.join(descriptions)}, {smallest_bytes / GIB:,.0f} GiB each"

    problems = []
    fixes = []
    if len(device_types) > 1:
        problems.append("they are not all the same, and the slowest sets the pace")
        fixes.append("leave the odd ones out with CUDA_VISIBLE_DEVICES (HIP_VISIBLE_DEVICES)")

    for (name, units), count in device_types.items():
        accelerator = find_accelerator(name, units)
        if accelerator is None:
            problems.append(f"{name} with {units} compute units is not in hardware.py: no MFU will be given")
            fixes.append("add its row, with the datasheet as source, to llmfoundry_lite/hardware.py")
        elif accelerator.devices_per_card > 1:
            detail += f"; {accelerator.devices_per_card} of them are one {accelerator.name} card"
            if count % accelerator.devices_per_card:
                problems.append("half a card is missing")
                fixes.append("look for it with `rocm-smi`, and at HIP_VISIBLE_DEVICES")

    return make_finding("devices", problems, "; ".join(fixes), Status.WARN, value=f"{len(devices)}", detail=detail)


# ---------------------------------------------------------------------------------------------------------- limits


def check_limits(options: CheckOptions) -> Iterator[Finding]:
    """Check how many files a process may have open.

    The soft limit is the one in force. A user may raise it up to the hard limit, which only an administrator can raise.
    """
    unlimited = resource.RLIM_INFINITY
    soft_limit, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)

    if hard_limit == unlimited:
        fix = f"ulimit -n {SUGGESTED_OPEN_FILES}"
    elif hard_limit >= MIN_OPEN_FILES:
        fix = f"ulimit -n {min(hard_limit, SUGGESTED_OPEN_FILES)}"
    else:
        fix = "raise nofile in /etc/security/limits.conf (containers: --ulimit nofile=65536)"

    is_enough = soft_limit == unlimited or soft_limit >= MIN_OPEN_FILES
    yield make_finding(
        "open files",
        [] if is_enough else [f"loader workers and shards may need {MIN_OPEN_FILES}"],
        fix,
        Status.WARN,
        value="no limit" if soft_limit == unlimited else soft_limit,
        pass_detail="per process",
    )


def check_shared_memory(options: CheckOptions) -> Iterator[Finding]:
    """Check that /dev/shm is large enough for loader workers and NCCL, and not full."""
    folder = SHARED_MEMORY
    if not folder.is_dir():
        yield Finding("/dev/shm", Status.SKIP, detail=f"no {folder} here")
        return

    usage = os.statvfs(folder)
    total_bytes = usage.f_blocks * usage.f_frsize
    free_bytes = usage.f_bavail * usage.f_frsize
    problems = []
    fix = ""
    if total_bytes < MIN_SHARED_BYTES:
        problems = ["too small for loader workers and NCCL"]
        fix = "docker run --ipc=host (or --shm-size=16g)"
    elif free_bytes < MIN_SHARED_BYTES:
        problems = ["almost full"]
        fix = f"see whose it is (ls -l {folder}) and remove what is dead"
    detail = f"of {total_bytes / GIB:,.2f} GiB"
    yield make_finding("/dev/shm", problems, fix, Status.WARN, value=free_bytes / GIB, unit="GiB free", detail=detail)
