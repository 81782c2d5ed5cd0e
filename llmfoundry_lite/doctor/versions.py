"""Python, the packages, torch's build and the drivers: do they fit each other and this machine's devices?"""

import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution, version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from llmfoundry_lite.doctor.finding import INSTALL, Finding, Machine, Status, shorten

OLDEST_TORCH = Version("2.11")
HIDING = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


@dataclass(kw_only=True, slots=True, frozen=True)
class Build:
    """Which torch this is, and what it can reach."""

    torch: str
    cuda: str | None
    """The CUDA release it was built for; None for builds without."""
    hip: str | None
    num_devices: int
    error: str = ""
    """Why there are none, in torch's words."""


def check(machine: Machine, build: Build | None = None, root: Path = Path("/")) -> Iterator[Finding]:
    yield _check_python()
    yield from _check_packages()
    build = build or _look_at_torch()
    yield _check_torch(build)
    yield _check_build(build, root)
    yield from _check_drivers(root)
    yield from _check_communication(build)


def _check_python(found: str = platform.python_version()) -> Finding:
    package = _ourselves()
    wanted = SpecifierSet(package.metadata["Requires-Python"] or "") if package else SpecifierSet()
    fits = found in wanted
    return Finding(
        check="python",
        status=Status.PASS if fits else Status.FAIL,
        value=found,
        detail=sys.executable if fits else f"supported is {wanted}",
        fix="" if fits else f"make an environment with a Python that is {wanted}",
    )


def _check_packages() -> Iterator[Finding]:
    package = _ourselves()
    if package is None:
        yield Finding(
            check="packages",
            status=Status.WARN,
            detail="llmfoundry-lite is not installed, so what it requires is not known here",
            fix="pip install --no-deps -e .",
        )
        return
    missing, other, count = [], [], 0
    for requirement in map(Requirement, package.requires or []):
        if requirement.name in ("torch", "torchvision") or (requirement.marker and not requirement.marker.evaluate()):
            continue
        count += 1
        try:
            found = version(requirement.name)
        except PackageNotFoundError:
            missing.append(requirement.name)
            continue
        if found not in requirement.specifier:
            other.append(f"{requirement.name} is {found}, not {requirement.specifier}")
    status = Status.FAIL if missing else Status.WARN if other else Status.PASS
    yield Finding(
        check="packages",
        status=status,
        value=f"{count - len(missing) - len(other)} of {count}",
        detail=shorten([*(f"{name} is missing" for name in missing), *other]) or "as required",
        fix="" if status is Status.PASS else INSTALL,
    )


def _look_at_torch() -> Build:
    import torch

    count, error = torch.cuda.device_count() if torch.cuda.is_available() else 0, ""
    if not count and (torch.version.cuda or torch.version.hip):
        try:
            torch.cuda.init()
        except Exception as problem:
            error = str(problem).splitlines()[0]
    return Build(
        torch=torch.__version__, cuda=torch.version.cuda, hip=torch.version.hip, num_devices=count, error=error
    )


def _check_torch(build: Build) -> Finding:
    if Version(Version(build.torch).base_version) < OLDEST_TORCH:
        return Finding(
            check="torch",
            status=Status.FAIL,
            value=build.torch,
            detail=f"{OLDEST_TORCH} is the oldest that is supported",
            fix=f"{INSTALL}; on ROCm, an image with torch {OLDEST_TORCH} or newer",
        )
    return Finding(check="torch", status=Status.PASS, value=build.torch, detail=f"{OLDEST_TORCH} or newer is supported")


def _check_build(build: Build, root: Path) -> Finding:
    """A machine's device files say what it has, whatever torch can see of it."""
    kind = f"CUDA {build.cuda}" if build.cuda else f"HIP {build.hip}" if build.hip else "CPU"
    vendor = "NVIDIA" if (root / "dev/nvidiactl").exists() else "AMD" if _has_amd_accelerator(root) else None
    status, detail, fix = Status.PASS, f"{build.num_devices} devices", ""
    if vendor is None and not build.num_devices:
        detail = "no device on this machine: runs use the CPU"
    elif build.num_devices == 0:
        hidden = [f"{name}={os.environ[name]}" for name in HIDING if name in os.environ]
        right_kind = {"NVIDIA": build.cuda, "AMD": build.hip}[vendor or "NVIDIA"]
        status = Status.FAIL
        if not right_kind:
            detail = f"this machine has {vendor} devices, which a {kind} build of torch cannot use"
            fix = {
                "NVIDIA": "install the CUDA build of torch (`make install` does)",
                "AMD": "start from an image with ROCm's torch and pip install --no-deps -r "
                "requirements-without-torch.txt",
            }[vendor or "NVIDIA"]
        elif hidden:
            status, detail = Status.WARN, f"devices are hidden by {', '.join(hidden)}"
            fix = f"unset {hidden[0].partition('=')[0]}"
        else:
            detail = f"torch sees none of this machine's {vendor} devices: {build.error or 'it gives no reason'}"
            fix = {
                "NVIDIA": f"look at `nvidia-smi`; the driver must support CUDA {build.cuda}",
                "AMD": "look at `rocminfo`; this user must be in the groups render and video",
            }[vendor or "NVIDIA"]
    return Finding(check="torch build", status=status, value=kind, detail=detail, fix=fix)


def _has_amd_accelerator(root: Path) -> bool:
    """Whether the kernel's list of compute nodes has one as large as an Instinct; processors' graphics are in it too.

    MI100 has 480 SIMD units, a large integrated GPU 80.
    """
    for node in root.glob("sys/class/kfd/kfd/topology/nodes/*/properties"):
        units = dict(line.split() for line in node.read_text().splitlines() if len(line.split()) == 2)
        if int(units.get("simd_count", 0)) >= 200:
            return True
    return False


def _check_drivers(root: Path) -> Iterator[Finding]:
    files = {
        "NVIDIA driver": "proc/driver/nvidia/version",
        "AMD driver": "sys/module/amdgpu/version",
        "ROCm": "opt/rocm/.info/version",
    }
    found = {name: (root / path).read_text() for name, path in files.items() if (root / path).is_file()}
    for name, text in found.items():
        line = text.splitlines()[0].removeprefix("NVRM version: ").strip()
        # NVIDIA's line is a sentence: "NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar …"
        number = next((word for word in line.split() if word[:1].isdigit() and "." in word), line)
        yield Finding(check=name, status=Status.PASS, value=number)
    if not found:
        yield Finding(check="drivers", status=Status.SKIP, detail="no accelerator's driver is loaded")


def _check_communication(build: Build) -> Iterator[Finding]:
    if not build.num_devices:
        return
    from torch.cuda import nccl

    number = ".".join(map(str, nccl.version()))
    yield Finding(check="RCCL" if build.hip else "NCCL", status=Status.PASS, value=number)


def _ourselves() -> Distribution | None:
    try:
        return distribution("llmfoundry-lite")
    except PackageNotFoundError:
        return None
