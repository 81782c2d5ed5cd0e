"""Energy of this process's devices, from their own counters. These only grow, so one reading for a batch is enough.

    NVIDIA   NVML's total energy of the board, from Volta on. A MIG slice has none.
    AMD      amdsmi's accumulator. The first die of an MI250 counts the whole card and the second one nothing, so a run
             needs both dies of a card. A partition of a card has none.
    CPU      RAPL in /sys: the packages and their DRAM, for all programs. By default the kernel lets only root read it.

Each rank reads its own accelerator. On CPUs, the first rank of a node reads the node's packages.
"""

import ctypes
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from llmfoundry_lite import devices
from llmfoundry_lite.ranks.rank import this_rank
from llmfoundry_lite.training.agreement import Meter

POWERCAP = Path("/sys/class/powercap")
MAX_PACKAGE_WATTS = 1000
"""Upper limit of a processor package's power. RAPL's registers wrap around after 65 kJ (AMD) or 262 kJ (Intel)."""


@dataclass(frozen=True, slots=True)
class Counter:
    """A number of joules that only grows, until it wraps around."""

    read: Callable[[], float]
    """Function that returns the joules since some moment in the past. Raises OSError."""
    wraps_at: float = math.inf


class EnergyMeter(Meter):
    """Meter of the energy between two calls of `take`, over several counters.

    `counters` is empty if there are none, and None if another process measures this one's devices.
    """

    def __init__(self, counters: Sequence[Counter] | None, clock: Callable[[], float] = time.monotonic):
        self.counters, self.clock = counters, clock
        self._before: tuple[float, list[float]] | None = None
        self._joules = 0.0
        self._is_whole = True

    def sample(self) -> None:
        """Add the energy since the last reading. Between two readings, no counter may wrap around twice."""
        if not self.counters:
            return
        try:
            now = self.clock(), [counter.read() for counter in self.counters]
        except OSError:
            now = None
        if self._before is None or now is None:
            self._is_whole = False
        else:
            most = (now[0] - self._before[0]) * MAX_PACKAGE_WATTS
            for counter, first, last in zip(self.counters, self._before[1], now[1], strict=True):
                used = last - first if last >= first else last - first + counter.wraps_at
                # A reloaded driver counts from 0 again.
                self._is_whole &= most < counter.wraps_at and math.isfinite(used)
                self._joules += used
        self._before = now

    def take(self) -> tuple[int, int]:
        """Return millijoules since the last call, and the number of processes that could not measure theirs: 0 or 1."""
        self.sample()
        joules, is_whole = self._joules, self._is_whole
        self._joules, self._is_whole = 0.0, True
        if self.counters is None:
            return 0, 0
        return (round(1000 * joules), 0) if self.counters and is_whole else (0, 1)


def build_meter() -> EnergyMeter:
    return EnergyMeter(find_counters(this_rank().local_rank))


def find_counters(local_rank: int) -> list[Counter] | None:
    """Find the counters of this process's devices, as `EnergyMeter` takes them."""
    vendor = devices.vendor()
    if vendor == "cpu":
        return find_packages(POWERCAP) if local_rank == 0 else None
    found = torch.cuda.get_device_properties()
    try:
        return [open_nvml(str(found.uuid)) if vendor == "nvidia" else open_amdsmi(found)]
    except OSError:
        return []


def find_packages(root: Path) -> list[Counter]:
    """Find RAPL's counters of packages and DRAM. `psys`, cores and the copies in `intel-rapl-mmio` would count twice.

    Prints a line if there are counters that this user may not read.
    """
    zones = sorted(root.glob("intel-rapl:*"))  # AMD's have this name too; intel-rapl:0:1 is a part of intel-rapl:0
    try:
        named = [(zone, (zone / "name").read_text().strip()) for zone in zones]
        counters = [build_zone(zone) for zone, name in named if name == "dram" or name.startswith("package")]
        for counter in counters:
            counter.read()
    except PermissionError as error:
        why = f"only root may read {error.filename}; chmod a+r allows it, and is a side channel on shared machines"
        print(f"energy is not measured: {why}", flush=True)
        return []
    except (OSError, ValueError):
        return []
    return counters


def build_zone(zone: Path) -> Counter:
    """Build the counter of a RAPL zone. Raises OSError and ValueError."""
    file = zone / "energy_uj"
    return Counter(lambda: int(file.read_text()) / 1e6, int((zone / "max_energy_range_uj").read_text()) / 1e6)


def open_nvml(uuid: str) -> Counter:
    """Open NVML's counter of the board with this `uuid`, as torch gives it. Raises OSError."""
    library: Any = ctypes.CDLL("libnvidia-ml.so.1")
    handle, millijoules = ctypes.c_void_p(), ctypes.c_ulonglong()

    def call(name: str, *arguments: Any) -> None:
        if code := getattr(library, name)(*arguments):
            raise OSError(f"{name} failed with code {code}")

    def read() -> float:
        call("nvmlDeviceGetTotalEnergyConsumption", handle, ctypes.byref(millijoules))
        return millijoules.value / 1000

    call("nvmlInit_v2")
    call("nvmlDeviceGetHandleByUUID", f"GPU-{uuid.removeprefix('GPU-')}".encode(), ctypes.byref(handle))
    read()
    return Counter(read)


def open_amdsmi(found: Any) -> Counter:
    """Open amdsmi's counter of the card with torch's properties `found`. Raises OSError."""
    if devices.accelerator() is None:
        raise OSError("a partition of a card, or one that is not in the table")
    try:
        import amdsmi  # pyright: ignore[reportMissingImports] - comes with ROCm
    except (ImportError, KeyError) as error:
        raise OSError(f"amdsmi: {error}") from error

    def read() -> float:
        try:
            count = amdsmi.amdsmi_get_energy_count(handle)
        except amdsmi.AmdSmiException as error:
            raise OSError(f"amdsmi: {error}") from error
        # Named power before ROCm 6.2; the resolution is in µJ.
        return count.get("energy_accumulator", count.get("power", 0)) * count["counter_resolution"] / 1e6

    try:
        amdsmi.amdsmi_init()
        place = f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
        handle = amdsmi.amdsmi_get_processor_handle_from_bdf(place)
    except (amdsmi.AmdSmiException, AttributeError) as error:
        raise OSError(f"amdsmi: {error}") from error
    read()
    return Counter(read)
