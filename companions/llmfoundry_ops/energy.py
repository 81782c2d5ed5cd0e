"""Energy of this process's devices, from their own counters, which only grow. One reading for each batch is enough.

    NVIDIA   NVML's total energy of the board, from Volta on. A MIG slice has none.
    AMD      amdsmi's accumulator. The first die of an MI250 counts the whole card and the second one nothing, so a run
             needs both dies of a card. A partition of a card has none.
    CPU      RAPL in /sys: the packages and their DRAM, for all programs. By default the kernel lets only root read it.

Each rank reads its own accelerator. On CPUs, the first rank of a node reads the node's packages. `build_meter` finds
the counters, and `EnergyMeter` adds up what they count.
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
    """Joules at which it begins at 0 again."""


@dataclass(frozen=True, slots=True)
class Reading:
    """Values of all counters at one time."""

    seconds: float
    """By the meter's clock."""
    joules: list[float]


class EnergyMeter(Meter):
    """Meter of the energy between two calls of `take`, over several counters.

    `counters` is empty if there are none, and None if another process measures this one's devices.
    """

    def __init__(self, counters: Sequence[Counter] | None, clock: Callable[[], float] = time.monotonic):
        self.counters = counters
        self.clock = clock
        self._last_reading: Reading | None = None
        """None before the first reading, and after one that failed."""
        self._joules = 0.0
        """Energy since the last call of `take`."""
        self._is_complete = True
        """Whether all energy since then was measured."""

    def sample(self) -> None:
        """Add the energy since the last reading. Between two readings, no counter may wrap around twice."""
        if not self.counters:
            return
        try:
            reading = Reading(self.clock(), [counter.read() for counter in self.counters])
        except OSError:
            reading = None

        if self._last_reading is None or reading is None:
            self._is_complete = False
        else:
            elapsed_seconds = reading.seconds - self._last_reading.seconds
            max_joules = elapsed_seconds * MAX_PACKAGE_WATTS
            for counter, before, after in zip(self.counters, self._last_reading.joules, reading.joules, strict=True):
                used_joules = after - before
                if used_joules < 0:
                    used_joules += counter.wraps_at
                # A counter that does not wrap around, but has fallen, was reset, as by a reloaded driver.
                was_reset = not math.isfinite(used_joules)
                may_have_wrapped_twice = max_joules >= counter.wraps_at
                if was_reset or may_have_wrapped_twice:
                    self._is_complete = False
                self._joules += used_joules
        self._last_reading = reading

    def take(self) -> tuple[int, int]:
        """Return the energy since the last call, in millijoules, and begin anew.

        Also returns the number of processes that could not measure theirs, 0 or 1, so that ranks can add up both. If
        it is 1, the energy is 0.
        """
        self.sample()
        joules = self._joules
        is_complete = self._is_complete
        self._joules = 0.0
        self._is_complete = True
        if self.counters is None:
            return 0, 0
        if not self.counters or not is_complete:
            return 0, 1
        return round(1000 * joules), 0


def build_meter() -> EnergyMeter:
    """Build the meter of this rank."""
    return EnergyMeter(find_counters(this_rank().local_rank))


def find_counters(local_rank: int) -> list[Counter] | None:
    """Find the counters of this process's devices. Empty if there are none; None if another process reads them."""
    vendor = devices.vendor()
    if vendor == "cpu":
        return find_packages(POWERCAP) if local_rank == 0 else None
    properties = torch.cuda.get_device_properties()
    try:
        if vendor == "nvidia":
            return [open_nvml(str(properties.uuid))]
        return [open_amdsmi(properties)]
    except OSError:
        return []


def find_packages(root: Path) -> list[Counter]:
    """Find RAPL's counters of packages and DRAM in a folder such as POWERCAP.

    The zones `psys` and cores, and the copies in `intel-rapl-mmio`, would count the same energy twice. Prints a line if
    there are counters that this user may not read, and returns none then.
    """
    # AMD's zones have this name too. intel-rapl:0:1 is a part of intel-rapl:0.
    zones = sorted(root.glob("intel-rapl:*"))
    counters = []
    try:
        for zone in zones:
            name = (zone / "name").read_text().strip()
            if name == "dram" or name.startswith("package"):
                counters.append(build_zone(zone))
        for counter in counters:
            counter.read()
    except PermissionError as error:
        reason = f"only root may read {error.filename}; chmod a+r allows it, and is a side channel on shared machines"
        print(f"energy is not measured: {reason}", flush=True)
        return []
    except (OSError, ValueError):
        return []
    return counters


def build_zone(zone: Path) -> Counter:
    """Build the counter of a RAPL zone, whose files are in microjoules. Raises OSError and ValueError."""
    energy_file = zone / "energy_uj"
    wraps_at = int((zone / "max_energy_range_uj").read_text()) / 1e6
    return Counter(lambda: int(energy_file.read_text()) / 1e6, wraps_at)


def open_nvml(uuid: str) -> Counter:
    """Open NVML's counter of the board with this UUID, as torch gives it: with or without "GPU-". Raises OSError."""
    library: Any = ctypes.CDLL("libnvidia-ml.so.1")
    handle = ctypes.c_void_p()
    millijoules = ctypes.c_ulonglong()

    def call(name: str, *arguments: Any) -> None:
        code = getattr(library, name)(*arguments)
        if code:
            raise OSError(f"{name} failed with code {code}")

    def read() -> float:
        call("nvmlDeviceGetTotalEnergyConsumption", handle, ctypes.byref(millijoules))
        return millijoules.value / 1000

    call("nvmlInit_v2")
    call("nvmlDeviceGetHandleByUUID", f"GPU-{uuid.removeprefix('GPU-')}".encode(), ctypes.byref(handle))
    read()  # fails for a board without a counter
    return Counter(read)


def open_amdsmi(properties: Any) -> Counter:
    """Open amdsmi's counter of the card with these properties, as torch gives them. Raises OSError."""
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
        # The key is `power` before ROCm 6.2. The resolution is in microjoules.
        accumulator = count.get("energy_accumulator", count.get("power", 0))
        return accumulator * count["counter_resolution"] / 1e6

    try:
        amdsmi.amdsmi_init()
        pci_address = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
        handle = amdsmi.amdsmi_get_processor_handle_from_bdf(pci_address)
    except (amdsmi.AmdSmiException, AttributeError) as error:
        raise OSError(f"amdsmi: {error}") from error
    read()  # fails for a card without a counter
    return Counter(read)
