"""`hardware=auto`: the hardware overlay for the devices that this machine has. No torch.

Devices are read from the files in which the kernel lists them: a configuration is checked in every rank, and asking
`nvidia-smi`, NVML or HIP takes seconds. Only kernels without NVIDIA's files (WSL, gVisor) are asked by `nvidia-smi`.
"""

import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from llmfoundry_lite.config.shipped import shipped_folder
from llmfoundry_lite.errors import ConfigError
from llmfoundry_lite.hardware import ACCELERATORS, Accelerator, find_accelerator, find_rows

AUTO = "hardware=auto"
SAFE: dict[str, Any] = {
    "device_train_microbatch_size": "auto",
    "fsdp_config": {"sharding_strategy": "FULL_SHARD"},
    "train_loader": {"num_workers": 2},
}
"""Settings for accelerators without an overlay: least memory on each, and microbatches as large as measured to fit."""


class Found(NamedTuple):
    """Devices of one kind."""

    name: str
    """The name in torch; the kernel's name for a device that is not in the table."""
    row: Accelerator | None
    num_devices: int = 1
    uuid: str = ""
    """GPU-…, as variables and nvidia-smi name it; empty where the kernel does not say."""


class Choice(NamedTuple):
    values: Path | dict[str, Any]
    """The overlay's file, or the keys to set where there is none."""
    note: str
    """One line: the devices found, and what is chosen for them."""


def choose_overlay(root: Path = Path("/"), environ: Mapping[str, str] = os.environ) -> Choice:
    """Choose the overlay for the devices that /proc and /sys under `root` list. Raises ConfigError for two kinds."""
    found = find_devices(root, environ)
    if found is None:
        return Choice(shipped_folder("yamls") / "hardware/cpu.yaml", f"{AUTO}: cpu; no accelerator was found")
    devices = f"{found.num_devices} x {found.name}"
    if path := _overlay_for(found):
        return Choice(path, f"{AUTO}: {path.stem}, for {devices}")
    name = _slug(found.row.name if found.row else found.name)
    return Choice(
        SAFE,
        f"{AUTO}: no overlay for {devices}; FULL_SHARD, with microbatches as large as fit. For its own settings copy "
        f"one of {shipped_folder('yamls') / 'hardware'} to yamls/hardware/{name}.yaml here, which {AUTO} then takes",
    )


def find_devices(root: Path = Path("/"), environ: Mapping[str, str] = os.environ) -> Found | None:
    """Return the accelerators of this machine; None if there are none, or a variable such as CUDA_VISIBLE_DEVICES hides
    all. Where some are in the table of accelerators, others, such as a laptop's own graphics, are left out.

    Raises ConfigError when that leaves two kinds, or when a variable names none of the devices.
    """
    present = {"nvidia": _nvidia(root), "amd": _amd(root)}
    devices = [one for vendor, listed in present.items() for one in _visible(listed, vendor, environ)]
    known = [device for device in devices if device.row is not None] or devices
    kinds = {device.name: device for device in known}
    if len(kinds) > 1:
        raise ConfigError(
            f"{AUTO}: this machine has {' and '.join(kinds)}; hide one kind (CUDA_VISIBLE_DEVICES, "
            "HIP_VISIBLE_DEVICES) or name an overlay, as in hardware=h100-8"
        )
    if kinds:
        return next(iter(kinds.values()))._replace(num_devices=len(known), uuid="")
    given = _variables("nvidia", environ) | _variables("amd", environ)
    named = [f"{name}={value}" for name, value in given.items() if value.split(",")[0].strip() not in ("", "-1")]
    if any(present.values()) and named:
        raise ConfigError(
            f"{AUTO}: {' '.join(named)} leaves none of this machine's devices; name those that it has, once each"
        )
    return None


def _nvidia(root: Path) -> list[Found]:
    """Read `Model: NVIDIA H100 80GB HBM3` and `GPU UUID: GPU-8932f937-…` from each device's file, by PCI address."""
    files = sorted((root / "proc/driver/nvidia/gpus").glob("*/information"))
    facts = [dict(re.findall(r"^(Model|GPU UUID):[ \t]*(.*?)\s*$", _read(file), re.M)) for file in files]
    named = [(one["Model"], one.get("GPU UUID", "")) for one in facts if "Model" in one]
    if not files and (program := shutil.which("nvidia-smi")):
        command = [program, "--query-gpu=name,uuid", "--format=csv,noheader"]
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
            lines = result.stdout.splitlines() if result.returncode == 0 else []
            named = [(name, uuid) for name, _, uuid in (line.partition(", ") for line in lines)]
    return [Found(name, find_accelerator(name), uuid="" if "?" in uuid else uuid) for name, uuid in named]


def _amd(root: Path) -> list[Found]:
    """Read KFD's node of each device as torch counts them: an MI250 has two. Nodes without SIMDs are processors."""
    found = []
    files = (root / "sys/class/kfd/kfd/topology/nodes").glob("*/properties")
    for file in sorted(files, key=lambda file: (len(file.parent.name), file)):  # 2 before 10
        facts = {key: int(value) for key, value in re.findall(r"^(\w+) (\d+)$", _read(file), re.M)}
        if not facts.get("simd_count") or not facts.get("simd_per_cu"):
            continue
        pci, units = facts.get("device_id"), facts["simd_count"] // facts["simd_per_cu"]
        rows = [row for row in ACCELERATORS.values() if pci in row.pci_ids and units == row.num_compute_units]
        name = f"AMD Instinct {rows[0].name}" if rows else f"AMD device {pci or 0:x}"
        uuid = f"GPU-{facts['unique_id']:016x}" if facts.get("unique_id") else ""
        found.append(Found(name, rows[0] if rows else None, uuid=uuid))
    return found


def _read(file: Path) -> str:
    """Read one of the kernel's files; empty where a container may not read it."""
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""


def _variables(vendor: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that hide devices, and their values, in the order in which they apply: HIP's numbers count
    within ROCm's list. Read as torch reads them (`torch.cuda._parse_visible_devices`)."""
    names = ["CUDA_VISIBLE_DEVICES"]
    if vendor == "amd":
        of_hip = [name for name in ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES") if name in environ]
        names = ["ROCR_VISIBLE_DEVICES", *of_hip[:1]]
    return {name: environ[name] for name in names if name in environ}


def _visible(devices: list[Found], vendor: str, environ: Mapping[str, str]) -> list[Found]:
    """Return the devices that these variables leave visible. An empty value or -1 hides all, and so does a device named
    twice; a word that names no device hides those after it.

    Raises ConfigError where devices differ and nothing tells which of them are meant.
    """
    for variable, value in _variables(vendor, environ).items():
        words = [word.strip() for word in value.split(",")]
        if slices := [word for word in words if word.startswith("MIG-")]:
            return [Found("NVIDIA MIG slice", None)] * len(slices) if devices else []
        chosen: list[int] = []
        for word in words:
            if (index := _index_of(word, devices, len(chosen))) is None:
                break
            chosen.append(index)
        if len({device.name for device in devices}) > 1:
            is_by_uuid = words[0].startswith("GPU-")
            is_by_speed = vendor == "nvidia" and environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID"
            problem = ""
            if is_by_uuid and any(not device.uuid for device in devices):
                problem = "the kernel tells no UUID of some devices; "
            elif not is_by_uuid and is_by_speed and 0 < len(chosen) < len(devices):
                problem = (
                    "CUDA numbers unlike devices by their speed; set CUDA_DEVICE_ORDER=PCI_BUS_ID, name devices by "
                    "UUID (nvidia-smi -L), or "
                )
            if problem:
                raise ConfigError(f"{AUTO}: {variable}={value}: {problem}name an overlay, as in hardware=h100-8")
        devices = [devices[index] for index in chosen] if len(set(chosen)) == len(chosen) else []
    return devices


def _index_of(word: str, devices: list[Found], position: int) -> int | None:
    """Return the index of the device that a number, or the beginning of a UUID, names. Where a UUID is unknown, the
    device at `position` stands for it: either all are alike, or the caller raises an error."""
    if not word.startswith("GPU-"):
        number = re.match(r"\+?(\d+)", word)
        return int(number[1]) if number and int(number[1]) < len(devices) else None
    if any(not device.uuid for device in devices):
        return position if position < len(devices) else None
    found = [i for i, device in enumerate(devices) if device.uuid.lower().startswith(word.lower())]
    return found[0] if len(found) == 1 else None


def _overlay_for(found: Found) -> Path | None:
    """Return the overlay named after the device. One for this number of cards is preferred, then the user's own."""
    own = Path("yamls/hardware").resolve()
    folders = dict.fromkeys((own, (shipped_folder("yamls") / "hardware").resolve()))
    paths = [path for folder in folders for path in sorted(folder.glob("*.yaml")) if _is_for(path.stem, found)]
    num_cards = found.num_devices // (found.row.devices_per_card if found.row else 1)
    return next((path for path in paths if path.stem.endswith(f"-{num_cards}")), next(iter(paths), None))


def _is_for(stem: str, found: Found) -> bool:
    rows: Sequence[Accelerator] = find_rows(stem)
    return found.row in rows[:1] if len(rows) == 1 else _slug(found.name) in (stem, re.sub(r"-\d+$", "", stem))


def _slug(name: str) -> str:
    """Write `NVIDIA RTX A6000` as nvidia-rtx-a6000."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
