"""How fast bytes move within a device and to and from it, and how fast it multiplies, beside its datasheet.

Only what `hardware.py` has figures for is judged: memory and matrix units. What the bus to the host can do depends on
the board, so it is reported; pinned host memory, as loaders use it.
"""

from collections.abc import Iterator, Sequence

import torch

from llmfoundry_lite.devices import device_type
from llmfoundry_lite.doctor.finding import Finding, Machine, Status
from llmfoundry_lite.doctor.timing import all_devices, measure_seconds
from llmfoundry_lite.hardware import GIB, MIB, Accelerator, find_accelerator

LOWEST_SHARE_OF_MEMORY = 0.6
"""Of the datasheet's bandwidth; plain copies reach 0.75 to 0.9."""
LOWEST_SHARE_OF_PEAK = 0.4
"""Of the datasheet's FLOP/s; large products reach 0.5 (MI250) to 0.8."""
THROTTLED = "look for a device that is hot, shared or limited in power (`nvidia-smi -q -d PERFORMANCE`, `rocm-smi`)"


def check(machine: Machine) -> Iterator[Finding]:
    size = (32 if device_type() == "cpu" else 256) * MIB if machine.quick else GIB // 4
    repeats = 3 if machine.quick else 10
    devices = all_devices()
    rows = [_row(device) for device in devices]

    rates = [measure_copy(device, size, repeats) for device in devices]
    figures = [row and row.memory_bandwidth_bytes_per_second for row in rows]
    yield judge_rates("memory copy", rates, devices, figures, LOWEST_SHARE_OF_MEMORY)
    if device_type() == "cpu":
        return
    for name, to_device in (("host to device", True), ("device to host", False)):
        rates = [measure_transfer(device, size, repeats, to_device=to_device) for device in devices]
        yield judge_rates(name, rates, devices, [None] * len(devices))
    rates = [measure_flops(device, 4096 if machine.quick else 8192, repeats) for device in devices]
    figures = [row and row.peak_flops("bf16") for row in rows]
    yield judge_rates("gemm rate bf16", rates, devices, figures, LOWEST_SHARE_OF_PEAK, "TFLOP/s", 1e12)


def judge_rates(
    name: str,
    rates: Sequence[float],
    devices: Sequence[torch.device],
    figures: Sequence[float | None],
    lowest_share: float = 0.0,
    unit: str = "GB/s",
    scale: float = 1e9,
) -> Finding:
    """The slowest device's rate, beside its datasheet's figure if there is one."""
    slowest = min(range(len(rates)), key=rates.__getitem__)
    rate, figure = rates[slowest], figures[slowest]
    detail = f"{devices[slowest]}" + (f", the slowest of {len(rates)}" if len(rates) > 1 else "")
    slow = figure is not None and rate < lowest_share * figure
    if figure is not None:
        detail += f"; {rate / figure:.0%} of the datasheet's {figure / scale:,.0f}"
    return Finding(
        check=name,
        status=Status.WARN if slow else Status.PASS,
        value=rate / scale,
        unit=unit,
        detail=f"{detail}, {lowest_share:.0%} should be reached" if slow else detail,
        fix=THROTTLED if slow else "",
    )


def measure_copy(device: torch.device, size: int, repeats: int) -> float:
    """Bytes per second within a device's memory: read and written ones both count."""
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / measure_seconds(lambda: target.copy_(source), device, repeats)


def measure_transfer(device: torch.device, size: int, repeats: int, *, to_device: bool) -> float:
    """Bytes per second between pinned host memory and a device."""
    host = torch.ones(size, dtype=torch.uint8).pin_memory()
    there = torch.ones(size, dtype=torch.uint8, device=device)
    target, source = (there, host) if to_device else (host, there)
    return size / measure_seconds(lambda: target.copy_(source, non_blocking=True), device, repeats)


def measure_flops(device: torch.device, size: int, repeats: int) -> float:
    """FLOP/s of a square product in bf16."""
    matrix = torch.randn(size, size, device=device).to(torch.bfloat16)
    out = torch.empty_like(matrix)
    return 2 * size**3 / measure_seconds(lambda: torch.mm(matrix, matrix, out=out), device, repeats)


def _row(device: torch.device) -> Accelerator | None:
    if device.type == "cpu":
        return None
    properties = torch.cuda.get_device_properties(device)
    return find_accelerator(properties.name, properties.multi_processor_count)
