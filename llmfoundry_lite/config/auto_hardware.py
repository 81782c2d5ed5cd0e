"""Choose the hardware overlay of `hardware=auto`, by the accelerators that this machine has.

`choose_overlay` is the top function. `find_devices` reads the accelerators from the files under /proc and /sys in which
the kernel lists them, because every rank loads the configuration, and asking `nvidia-smi`, NVML or HIP takes seconds.
`nvidia-smi` is only asked if the kernel has no such files (WSL, gVisor). Variables such as CUDA_VISIBLE_DEVICES are
applied as torch does. Then the overlay is found by the name of the device. Nothing here imports torch.
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
"""Settings for accelerators without an overlay, which fit any of them: each device holds as little as possible of the
model, and the size of a microbatch is measured."""


class DetectedDevices(NamedTuple):
    """One accelerator, or several of the same model."""

    name: str
    """The name in torch; the kernel's name for a device that is not in the table of accelerators."""
    row: Accelerator | None
    """The device's row in the table of accelerators (`hardware.py`); None if it is not there."""
    num_devices: int = 1
    uuid: str = ""
    """UUID of a single device, GPU-…, as variables and nvidia-smi write it; empty if the kernel does not tell it."""


class Choice(NamedTuple):
    """The settings that `hardware=auto` stands for."""

    values: Path | dict[str, Any]
    """The overlay's file, or the keys to set if there is no overlay."""
    note: str
    """One line: the devices that were found, and what is chosen for them."""


def choose_overlay(root: Path = Path("/"), environ: Mapping[str, str] = os.environ) -> Choice:
    """Choose the hardware overlay for the accelerators of this machine: `h100-8.yaml` for 8 H100.

    `root` is the folder that holds /proc and /sys, for tests. Raises ConfigError if there are devices of two models.
    """
    devices = find_devices(root, environ)
    overlays = shipped_folder("yamls") / "hardware"
    if devices is None:
        return Choice(overlays / "cpu.yaml", f"{AUTO}: cpu; no accelerator was found")

    description = f"{devices.num_devices} x {devices.name}"
    overlay = _find_overlay(devices)
    if overlay is not None:
        return Choice(overlay, f"{AUTO}: {overlay.stem}, for {description}")
    name = _slug(devices.row.name if devices.row else devices.name)
    return Choice(
        SAFE,
        f"{AUTO}: no overlay for {description}; FULL_SHARD, with microbatches as large as fit. For its own settings "
        f"copy one of {overlays} to yamls/hardware/{name}.yaml here, which {AUTO} then takes",
    )


def find_devices(root: Path = Path("/"), environ: Mapping[str, str] = os.environ) -> DetectedDevices | None:
    """Return the accelerators that a launch on this machine uses, all of one model; None if there are none.

    Devices that a variable such as CUDA_VISIBLE_DEVICES hides do not count. If some devices are in the table of
    accelerators, devices that are not, such as a laptop's own graphics, do not count either.

    Raises ConfigError if that leaves devices of two models, or if a variable names none of the devices.
    """
    present = {"nvidia": _read_nvidia_devices(root), "amd": _read_amd_devices(root)}
    visible = []
    for vendor, devices in present.items():
        visible += _visible_devices(devices, vendor, environ)
    in_table = [device for device in visible if device.row is not None]
    usable = in_table or visible

    names = list(dict.fromkeys(device.name for device in usable))
    if len(names) > 1:
        raise ConfigError(
            f"{AUTO}: this machine has {' and '.join(names)}; hide one kind (CUDA_VISIBLE_DEVICES, "
            "HIP_VISIBLE_DEVICES) or name an overlay, as in hardware=h100-8"
        )
    if usable:
        return usable[0]._replace(num_devices=len(usable), uuid="")

    # No device is left. A variable that hides all of them on purpose is empty or -1. Any other value is a mistake.
    variables = _visibility_variables("nvidia", environ) | _visibility_variables("amd", environ)
    mistaken = []
    for name, value in variables.items():
        if value.split(",")[0].strip() not in ("", "-1"):
            mistaken.append(f"{name}={value}")
    if any(present.values()) and mistaken:
        raise ConfigError(
            f"{AUTO}: {' '.join(mistaken)} leaves none of this machine's devices; name those that it has, once each"
        )
    return None


def _read_nvidia_devices(root: Path) -> list[DetectedDevices]:
    """Return the NVIDIA devices of this machine in the order of their PCI addresses, one item for each.

    The kernel has a file for each device, with the lines `Model: NVIDIA H100 80GB HBM3` and `GPU UUID: GPU-8932f937-…`.
    If it has none, nvidia-smi is asked.
    """
    files = sorted((root / "proc/driver/nvidia/gpus").glob("*/information"))
    names_and_uuids = []
    for file in files:
        properties = dict(re.findall(r"^(Model|GPU UUID):[ \t]*(.*?)\s*$", _read(file), re.M))
        if "Model" in properties:
            names_and_uuids.append((properties["Model"], properties.get("GPU UUID", "")))
    if not files:
        names_and_uuids = _ask_nvidia_smi()

    devices = []
    for name, uuid in names_and_uuids:
        is_known_uuid = "?" not in uuid  # a driver that does not know the UUID yet writes question marks
        devices.append(DetectedDevices(name, find_accelerator(name), uuid=uuid if is_known_uuid else ""))
    return devices


def _ask_nvidia_smi() -> list[tuple[str, str]]:
    """Return the name and the UUID of each device that nvidia-smi lists; [] if it is not installed or fails."""
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


def _read_amd_devices(root: Path) -> list[DetectedDevices]:
    """Return the AMD devices of this machine in the order of torch, one item for each, as torch counts them.

    The kernel driver KFD has a node for each device, with lines such as `simd_count 1216`. An MI250 has two nodes, and
    counts as two devices. Processors have nodes too, but without SIMD units.
    """
    devices = []
    files = (root / "sys/class/kfd/kfd/topology/nodes").glob("*/properties")
    for file in sorted(files, key=lambda file: (len(file.parent.name), file)):  # node 2 before node 10
        properties = {key: int(value) for key, value in re.findall(r"^(\w+) (\d+)$", _read(file), re.M)}
        is_accelerator = properties.get("simd_count") and properties.get("simd_per_cu")
        if not is_accelerator:
            continue

        # Several models share a PCI id, and differ in their number of compute units.
        pci_id = properties.get("device_id")
        num_compute_units = properties["simd_count"] // properties["simd_per_cu"]
        row = None
        for accelerator in ACCELERATORS.values():
            if pci_id in accelerator.pci_ids and accelerator.num_compute_units == num_compute_units:
                row = accelerator
                break
        name = f"AMD Instinct {row.name}" if row else f"AMD device {pci_id or 0:x}"
        uuid = f"GPU-{properties['unique_id']:016x}" if properties.get("unique_id") else ""
        devices.append(DetectedDevices(name, row, uuid=uuid))
    return devices


def _read(file: Path) -> str:
    """Return the text of one of the kernel's files; empty if it cannot be read, as in some containers."""
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""


def _visibility_variables(vendor: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that hide devices of a vendor ("nvidia" or "amd"), and their values.

    They apply in this order: the numbers in HIP_VISIBLE_DEVICES count the devices that ROCR_VISIBLE_DEVICES leaves.
    They are the variables that torch reads (`torch.cuda._parse_visible_devices`).
    """
    if vendor == "nvidia":
        names = ["CUDA_VISIBLE_DEVICES"]
    else:
        # HIP ignores CUDA_VISIBLE_DEVICES if its own variable is set.
        names_for_hip = [name for name in ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES") if name in environ]
        names = ["ROCR_VISIBLE_DEVICES", *names_for_hip[:1]]
    return {name: environ[name] for name in names if name in environ}


def _visible_devices(devices: list[DetectedDevices], vendor: str, environ: Mapping[str, str]) -> list[DetectedDevices]:
    """Return the devices of a vendor that environment variables leave visible, in the variables' order.

    With CUDA_VISIBLE_DEVICES=2,0 these are the third and the first device. The rules are those of torch: an empty value
    or -1 hides all devices, a word that names no device hides those after it, and a device that is named twice hides
    all. A variable with MIG slices gives one unknown device for each slice.

    Raises ConfigError if the devices are of several models and it cannot be told which of them are meant.
    """
    for variable, value in _visibility_variables(vendor, environ).items():
        words = [word.strip() for word in value.split(",")]
        mig_slices = [word for word in words if word.startswith("MIG-")]
        if mig_slices:
            return [DetectedDevices("NVIDIA MIG slice", None)] * len(mig_slices) if devices else []

        chosen_indices: list[int] = []
        for word in words:
            index = _index_of(word, devices, position=len(chosen_indices))
            if index is None:
                break
            chosen_indices.append(index)
        _refuse_ambiguous_choice(variable, value, devices, len(chosen_indices), vendor, environ)
        is_named_twice = len(set(chosen_indices)) < len(chosen_indices)
        devices = [] if is_named_twice else [devices[index] for index in chosen_indices]
    return devices


def _refuse_ambiguous_choice(
    variable: str, value: str, devices: list[DetectedDevices], num_chosen: int, vendor: str, environ: Mapping[str, str]
) -> None:
    """Raise ConfigError if a variable chooses some of several models of devices, and it cannot be told which.

    By default, CUDA numbers devices by their speed, which is not known here, instead of by their PCI addresses.
    `variable` and `value` are the variable, `num_chosen` is the number of `devices` that it chooses.
    """
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


def _index_of(word: str, devices: list[DetectedDevices], position: int) -> int | None:
    """Return the index of the device that a word of a variable names; None if it names none.

    The word is a number (`2`) or the beginning of a UUID (`GPU-8932f937`), which must be that of one device only. If
    UUIDs are unknown, the device at `position`, the number of devices named before, stands for it. Either all devices
    are of one model, so that it does not matter which is taken, or the caller raises an error.
    """
    if not word.startswith("GPU-"):
        number = re.match(r"\+?(\d+)", word)
        if number is None or int(number[1]) >= len(devices):
            return None
        return int(number[1])

    if any(not device.uuid for device in devices):
        return position if position < len(devices) else None
    indices = [index for index, device in enumerate(devices) if device.uuid.lower().startswith(word.lower())]
    return indices[0] if len(indices) == 1 else None


def _find_overlay(devices: DetectedDevices) -> Path | None:
    """Return the overlay's file for these devices, or None if there is none.

    A file for this number of cards (`h100-8`) is preferred, and among several a file in `yamls/hardware` of the working
    directory to one of the package.
    """
    folders = dict.fromkeys([Path("yamls/hardware").resolve(), (shipped_folder("yamls") / "hardware").resolve()])
    overlays = []
    for folder in folders:
        overlays += [path for path in sorted(folder.glob("*.yaml")) if _names_device(path.stem, devices)]

    # Torch counts two devices on an MI250 card, and overlays count cards.
    devices_per_card = devices.row.devices_per_card if devices.row else 1
    num_cards = devices.num_devices // devices_per_card
    for overlay in overlays:
        if overlay.stem.endswith(f"-{num_cards}"):
            return overlay
    return overlays[0] if overlays else None


def _names_device(stem: str, devices: DetectedDevices) -> bool:
    """Return whether an overlay with the file name `stem`, without .yaml, is for these devices.

    The name is that of an accelerator in the table, or the device's own name, each with any number of cards: `h100-8`,
    `nvidia-rtx-a6000`, `nvidia-rtx-a6000-2`.
    """
    rows: Sequence[Accelerator] = find_rows(stem)
    if len(rows) == 1:
        return devices.row == rows[0]
    stem_without_number = re.sub(r"-\d+$", "", stem)
    return _slug(devices.name) in (stem, stem_without_number)


def _slug(name: str) -> str:
    """Return a device's name as the name of a file: `nvidia-rtx-a6000` for `NVIDIA RTX A6000`."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
