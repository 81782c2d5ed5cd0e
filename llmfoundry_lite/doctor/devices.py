"""What torch sees: how many devices, of which kind, how much of their memory is free."""

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from llmfoundry_lite.devices import device_name
from llmfoundry_lite.doctor.finding import Finding, Machine, Status
from llmfoundry_lite.hardware import GIB, find_accelerator


class Device(NamedTuple):
    name: str
    num_compute_units: int
    memory_bytes: int
    free_bytes: int


def check(machine: Machine, devices: Sequence[Device] | None = None) -> Iterator[Finding]:
    devices = _look() if devices is None else devices
    if not devices:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        cores = len(os.sched_getaffinity(0))
        detail = f"{device_name()}, {cores} cores, {memory / GIB:,.1f} GiB of memory"
        yield Finding(check="devices", status=Status.PASS, value="CPU only", detail=detail)
        return
    yield _check_kind(devices)
    yield _check_free_memory(devices)


def _look() -> list[Device]:
    import torch

    if not torch.cuda.is_available():
        return []
    found = []
    for index in range(torch.cuda.device_count()):
        row = torch.cuda.get_device_properties(index)
        free_bytes = torch.cuda.mem_get_info(index)[0]
        found.append(Device(row.name, row.multi_processor_count, row.total_memory, free_bytes))
    return found


def _check_kind(devices: Sequence[Device]) -> Finding:
    kinds = Counter((device.name, device.num_compute_units) for device in devices)
    memory = min(device.memory_bytes for device in devices)
    detail = ", ".join(f"{count} x {name} ({units} compute units)" for (name, units), count in kinds.items())
    detail += f", {memory / GIB:,.0f} GiB each"
    problems, fixes = [], []
    if len(kinds) > 1:
        problems.append("they are not all the same, and the slowest sets the pace")
        fixes.append("leave the odd ones out with CUDA_VISIBLE_DEVICES (HIP_VISIBLE_DEVICES)")
    for name, units in kinds:
        row = find_accelerator(name, units)
        if row is None:
            problems.append(f"{name} with {units} compute units is not in hardware.py: no MFU will be given")
            fixes.append("add its row, with the datasheet as source, to llmfoundry_lite/hardware.py")
        elif row.devices_per_card > 1:
            detail += f"; {row.devices_per_card} of them are one {row.name} card"
            if kinds[name, units] % row.devices_per_card:
                problems.append("half a card is missing")
                fixes.append("look for it with `rocm-smi`, and at HIP_VISIBLE_DEVICES")
    return Finding(
        check="devices",
        status=Status.WARN if problems else Status.PASS,
        value=f"{len(devices)}",
        detail="; ".join([detail, *problems]),
        fix="; ".join(fixes),
    )


def _check_free_memory(devices: Sequence[Device]) -> Finding:
    """A device that nobody uses has given 1 to 3 % to its driver."""
    shares = [device.free_bytes / device.memory_bytes for device in devices]
    used = [str(index) for index, share in enumerate(shares) if share < 0.9]
    return Finding(
        check="device memory free",
        status=Status.WARN if used else Status.PASS,
        value=100 * min(shares),
        unit="%",
        detail=f"another process uses device {', '.join(used)}" if used else "least of all devices",
        fix="end what runs there (`nvidia-smi`, `rocm-smi --showpids`)" if used else "",
    )
