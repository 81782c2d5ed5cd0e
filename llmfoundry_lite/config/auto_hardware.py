"""`hardware=auto`: the hardware overlay for the devices that this machine has. No torch.

Devices are read from the files in which the kernel lists them: a configuration is checked in every rank, and asking
`nvidia-smi`, NVML or HIP takes seconds. Only kernels without NVIDIA's files (WSL, gVisor) are asked by `nvidia-smi`.
"""

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
    """The settings that `hardware=auto` stands for."""

    values: Path | dict[str, Any]
    """The overlay's file, or the keys to set where there is none."""
    note: str
    """One line: the devices found, and what is chosen for them."""


def choose_overlay(root: Path = Path("/"), environ: Mapping[str, str] = os.environ) -> Choice:
    """Choose the overlay for the devices that /proc and /sys under `root` list. Raises ConfigError for two kinds."""
    found = find_devices(root, environ)
    overlays = shipped_folder("yamls") / "hardware"
    if found is None:
        return Choice(overlays / "cpu.yaml", f"{AUTO}: cpu; no accelerator was found")
    devices = f"{found.num_devices} x {found.name}"
    overlay = _overlay_for(found)
    if overlay is not None:
        return Choice(overlay, f"{AUTO}: {overlay.stem}, for {devices}")
    name = _slug(found.row.name if found.row else found.name)
    return Choice(
        SAFE,
        f"{AUTO}: no overlay for {devices}; FULL_SHARD, with microbatches as large as fit. For its own settings copy "
        f"one of {overlays} to yamls/hardware/{name}.yaml here, which {AUTO} then takes",
    )


def find_devices(root: Path = Path("/"), environ: Mapping[str, str] = os.environ) -> Found | None:
    """Return the accelerators of this machine; None if there are none, or a variable such as CUDA_VISIBLE_DEVICES hides
    all. Where some are in the table of accelerators, others, such as a laptop's own graphics, are left out.

    Raises ConfigError when that leaves two kinds, or when a variable names none of the devices.
    """
    present = {"nvidia": _nvidia(root), "amd": _amd(root)}
    visible = [device for vendor, devices in present.items() for device in _visible(devices, vendor, environ)]
    in_table = [device for device in visible if device.row is not None]
    usable = in_table or visible
    kinds = {device.name: device for device in usable}
    if len(kinds) > 1:
        raise ConfigError(
            f"{AUTO}: this machine has {' and '.join(kinds)}; hide one kind (CUDA_VISIBLE_DEVICES, "
            "HIP_VISIBLE_DEVICES) or name an overlay, as in hardware=h100-8"
        )
    if kinds:
        return usable[0]._replace(num_devices=len(usable), uuid="")

    # None is left. Variables that hide all on purpose are empty or -1; others name devices that are not there.
    variables = _variables("nvidia", environ) | _variables("amd", environ)
    naming = [f"{name}={value}" for name, value in variables.items() if value.split(",")[0].strip() not in ("", "-1")]
    if any(present.values()) and naming:
        raise ConfigError(
            f"{AUTO}: {' '.join(naming)} leaves none of this machine's devices; name those that it has, once each"
        )
    return None


def _nvidia(root: Path) -> list[Found]:
    """Read `Model: NVIDIA H100 80GB HBM3` and `GPU UUID: GPU-8932f937-…` from each device's file, by PCI address.

    Where the kernel has no such files, nvidia-smi is asked, if it is there.
    """
    files = sorted((root / "proc/driver/nvidia/gpus").glob("*/information"))
    names_and_uuids = []
    for file in files:
        facts = dict(re.findall(r"^(Model|GPU UUID):[ \t]*(.*?)\s*$", _read(file), re.M))
        if "Model" in facts:
            names_and_uuids.append((facts["Model"], facts.get("GPU UUID", "")))
    if not files:
        names_and_uuids = _ask_nvidia_smi()
    # A driver that does not know a UUID yet writes question marks.
    return [Found(name, find_accelerator(name), uuid="" if "?" in uuid else uuid) for name, uuid in names_and_uuids]


def _ask_nvidia_smi() -> list[tuple[str, str]]:
    """Return name and UUID of each device that nvidia-smi lists; none where it is absent or fails."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    command = [program, "--query-gpu=name,uuid", "--format=csv,noheader"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    if result.returncode != 0:
        return []
    names_and_uuids = []
    for line in result.stdout.splitlines():
        name, _, uuid = line.partition(", ")
        names_and_uuids.append((name, uuid))
    return names_and_uuids


def _amd(root: Path) -> list[Found]:
    """Read KFD's node of each device as torch counts them: an MI250 has two. Nodes without SIMDs are processors."""
    devices = []
    files = (root / "sys/class/kfd/kfd/topology/nodes").glob("*/properties")
    for file in sorted(files, key=lambda file: (len(file.parent.name), file)):  # 2 before 10
        facts = {key: int(value) for key, value in re.findall(r"^(\w+) (\d+)$", _read(file), re.M)}
        if not facts.get("simd_count") or not facts.get("simd_per_cu"):
            continue
        pci_id = facts.get("device_id")
        num_compute_units = facts["simd_count"] // facts["simd_per_cu"]
        rows = [
            row for row in ACCELERATORS.values() if pci_id in row.pci_ids and row.num_compute_units == num_compute_units
        ]
        row = rows[0] if rows else None
        name = f"AMD Instinct {row.name}" if row else f"AMD device {pci_id or 0:x}"
        uuid = f"GPU-{facts['unique_id']:016x}" if facts.get("unique_id") else ""
        devices.append(Found(name, row, uuid=uuid))
    return devices


def _read(file: Path) -> str:
    """Read one of the kernel's files; empty where a container may not read it."""
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""


def _variables(vendor: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that hide devices, and their values, in the order in which they apply: HIP's numbers count
    within ROCm's list. Read as torch reads them (`torch.cuda._parse_visible_devices`)."""
    if vendor == "nvidia":
        names = ["CUDA_VISIBLE_DEVICES"]
    else:
        names_for_hip = [name for name in ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES") if name in environ]
        names = ["ROCR_VISIBLE_DEVICES", *names_for_hip[:1]]
    return {name: environ[name] for name in names if name in environ}


def _visible(devices: list[Found], vendor: str, environ: Mapping[str, str]) -> list[Found]:
    """Return the devices that these variables leave visible. An empty value or -1 hides all, and so does a device named
    twice; a word that names no device hides those after it.

    Raises ConfigError where devices differ and nothing tells which of them are meant.
    """
    for variable, value in _variables(vendor, environ).items():
        words = [word.strip() for word in value.split(",")]
        slices = [word for word in words if word.startswith("MIG-")]
        if slices:
            return [Found("NVIDIA MIG slice", None)] * len(slices) if devices else []

        chosen: list[int] = []
        for word in words:
            index = _index_of(word, devices, position=len(chosen))
            if index is None:
                break
            chosen.append(index)
        _refuse_ambiguous_choice(variable, value, devices, len(chosen), vendor, environ)
        is_named_twice = len(set(chosen)) < len(chosen)
        devices = [] if is_named_twice else [devices[index] for index in chosen]
    return devices


def _refuse_ambiguous_choice(
    variable: str, value: str, devices: list[Found], num_chosen: int, vendor: str, environ: Mapping[str, str]
) -> None:
    """Raise ConfigError where a variable chooses some of unlike devices, and nothing tells which."""
    if len({device.name for device in devices}) < 2:
        return
    is_by_uuid = value.split(",")[0].strip().startswith("GPU-")
    is_by_speed = vendor == "nvidia" and environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID"
    problem = ""
    if is_by_uuid and any(not device.uuid for device in devices):
        problem = "the kernel tells no UUID of some devices; "
    elif not is_by_uuid and is_by_speed and 0 < num_chosen < len(devices):
        problem = (
            "CUDA numbers unlike devices by their speed; set CUDA_DEVICE_ORDER=PCI_BUS_ID, name devices by "
            "UUID (nvidia-smi -L), or "
        )
    if problem:
        raise ConfigError(f"{AUTO}: {variable}={value}: {problem}name an overlay, as in hardware=h100-8")


def _index_of(word: str, devices: list[Found], position: int) -> int | None:
    """Return the index of the device that a number, or the beginning of a UUID, names. Where a UUID is unknown, the
    device at `position` stands for it: either all are alike, or the caller raises an error."""
    if not word.startswith("GPU-"):
        digits = re.match(r"\+?(\d+)", word)
        return int(digits[1]) if digits and int(digits[1]) < len(devices) else None
    if any(not device.uuid for device in devices):
        return position if position < len(devices) else None
    indices = [index for index, device in enumerate(devices) if device.uuid.lower().startswith(word.lower())]
    return indices[0] if len(indices) == 1 else None


def _overlay_for(found: Found) -> Path | None:
    """Return the overlay named after the device. One for this number of cards is preferred, then the user's own."""
    folders = dict.fromkeys([Path("yamls/hardware").resolve(), (shipped_folder("yamls") / "hardware").resolve()])
    paths = [path for folder in folders for path in sorted(folder.glob("*.yaml")) if _is_for(path.stem, found)]
    devices_per_card = found.row.devices_per_card if found.row else 1
    num_cards = found.num_devices // devices_per_card
    for path in paths:
        if path.stem.endswith(f"-{num_cards}"):
            return path
    return paths[0] if paths else None


def _is_for(stem: str, found: Found) -> bool:
    """Return whether an overlay's file name means this device: by the table, or a device's own name and any number."""
    rows: Sequence[Accelerator] = find_rows(stem)
    if len(rows) == 1:
        return found.row == rows[0]
    stem_without_number = re.sub(r"-\d+$", "", stem)
    return _slug(found.name) in (stem, stem_without_number)


def _slug(name: str) -> str:
    """Write `NVIDIA RTX A6000` as nvidia-rtx-a6000."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
