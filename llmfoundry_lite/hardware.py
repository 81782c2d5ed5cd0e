"""The table of accelerators: peak FLOP/s, memory, bandwidth and power, each row with its source. No torch.

A row is one device as torch sees it: half a card for the MI250 and MI250X, whose two dies (GCDs) are two devices. Peaks
are dense. Nothing is guessed: accelerators that are not in the table, and slices of those that are, have no peak.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import starmap
from typing import NamedTuple

FREE_FRACTION = 0.98
"""Fraction of the memory as sold that is free for a program; driver and context take the rest."""
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
"""Bytes of a KiB, a MiB and a GiB."""
REPORT_SCHEMA = 2
"""Version of the JSON of `bench`, raised when older reports can no longer be read or compared."""
PRODUCTS = "matrix products"
"""Name of the rows of matrix products in the report of `bench mfu`."""


def format_bytes(num_bytes: int) -> str:
    """Return a number of bytes as text in the largest unit that it reaches: `4.00 KiB` for 4096."""
    for unit, unit_bytes in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if num_bytes >= unit_bytes:
            return f"{num_bytes / unit_bytes:,.2f} {unit}"
    return f"{num_bytes} B"


@dataclass(slots=True, frozen=True)
class Accelerator:
    """A row of the table: one kind of device, as torch sees it."""

    name: str
    """Our own name for it, from which the names of overlays are made."""
    pattern: str
    """Regular expression for the whole of `torch.cuda.get_device_name()`."""
    num_compute_units: int
    """Streaming multiprocessors or compute units: torch's `multi_processor_count`. A slice of the device has fewer."""
    memory_bytes: int
    """Memory as sold, with GiB for vendors' GB."""
    memory_bandwidth_bytes_per_second: float
    power_watts: float
    """Maximum power of one device."""
    peak_teraflops: Mapping[str, float]
    """fp32 (without TF32), tf32, bf16, fp16, fp8 -> peak of dense matrix products with fp32 sums. Dtypes without a
    published peak are absent."""
    source: str
    """The document that these numbers are from."""
    pci_ids: tuple[int, ...] = ()
    """AMD: PCI device numbers under which the kernel lists it (pci.ids, vendor 1002). NVIDIA's kernel lists names."""
    devices_per_card: int = 1
    """Devices that torch sees on one card: two for the MI250 and MI250X."""

    @property
    def vendor(self) -> str:
        """`nvidia` or `amd`."""
        return "amd" if self.pci_ids else "nvidia"

    @property
    def free_bytes(self) -> int:
        """Memory that is free for a program, before it has allocated anything."""
        return int(FREE_FRACTION * self.memory_bytes)

    @property
    def workspace_bytes(self) -> int:
        """Scratch memory that torch allocates for matrix products, for each thread that computes.

        It is 32 MiB from Hopper on, and a quarter of that and 128 KiB before (torch's `getChosenWorkspaceSize`). AMD's
        devices count as Hopper's, because no rehearsal has shown their size.
        """
        is_older = self.name.startswith(("V100", "A100", "A10", "L4", "RTX-4090"))
        return 8 * MIB + 128 * KIB if is_older else 32 * MIB

    def peak_flops(self, dtype: str) -> float | None:
        """Return the peak of dense matrix products in FLOP/s, in fp32, tf32, bf16, fp16 or fp8; None if unpublished."""
        teraflops = self.peak_teraflops.get(dtype)
        return None if teraflops is None else teraflops * 1e12


class Device(NamedTuple):
    """The accelerator on which a rank of this machine computes, or the RAM if there is none."""

    name: str
    """In words for a message: `cuda:0 (NVIDIA H200)`, or `this machine's RAM`."""
    free_bytes: int
    """Memory that is free now."""
    is_shared: bool
    """Whether all ranks of this machine share this memory. They do if it is RAM."""


def find_accelerator(device_name: str, num_compute_units: int | None = None) -> Accelerator | None:
    """Return the row of a device by its name in torch (`torch.cuda.get_device_name()`); None if it has no row.

    >>> find_accelerator("NVIDIA H100 80GB HBM3").name
    'H100-80GB'

    Names alone do not suffice: MI250 and MI250X can have the same name in ROCm, and slices of a device (MIG,
    partitions) have the name of the whole device. `num_compute_units`, torch's `multi_processor_count`, tells them
    apart. Without it, an MI250 or MI250X with such a name is not found, and a slice counts as the whole device.
    """
    rows = [row for row in ACCELERATORS.values() if re.fullmatch(row.pattern, device_name)]
    if num_compute_units is not None:
        rows = [row for row in rows if row.num_compute_units == num_compute_units]
    return rows[0] if len(rows) == 1 else None


def find_rows(name: str) -> list[Accelerator]:
    """Return the rows that a user may mean by a name such as `h100`, `a100-80gb` or `h100-8`; [] for an unknown name.

    Upper and lower case are equal. A row of exactly this name is the only result. Otherwise a number at the end, which
    counts devices, is dropped, and rows whose names begin with these words are returned: `a100` and `a100-8` give
    A100-40GB and A100-80GB. PCIe cards are left out unless there is nothing else.
    """
    name = name.lower()
    rows = [row for row in ACCELERATORS.values() if row.name.lower() == name]
    if not rows:
        stem = re.sub(r"-\d+$", "", name)
        # The hyphens keep `a10` from matching A100.
        rows = [row for row in ACCELERATORS.values() if f"{row.name.lower()}-".startswith(f"{stem}-")]
    without_pcie = [row for row in rows if "PCIe" not in row.name]
    return without_pcie or rows


# ------------------------------------------------------------------------------------------------------- the table

# Peaks in TFLOP/s, and sources. Several rows share most of them.
HALVED = "tensor figures halved, they are with sparsity"
V100 = {"fp32": 15.7, "fp16": 125.0}
V100_SOURCE = "NVIDIA V100 datasheet, January 2020"
A100 = {"fp32": 19.5, "tf32": 156.0, "bf16": 312.0, "fp16": 312.0}
A100_SOURCE = "NVIDIA A100 datasheet, June 2021"
H100_SXM = {"fp32": 67.0, "tf32": 494.5, "bf16": 989.5, "fp16": 989.5, "fp8": 1979.0}
H100_PCIE = {"fp32": 51.0, "tf32": 378.0, "bf16": 756.5, "fp16": 756.5, "fp8": 1513.0}
H100_SOURCE = f"NVIDIA H100 datasheet, 2023; {HALVED}"
B200 = {"bf16": 2250.0, "fp16": 2250.0, "fp8": 4500.0}  # published fp32 and tf32 figures differ between documents
B200_SOURCE = "NVIDIA HGX B200, Blackwell datasheet, 2024: 36 PFLOP/s bf16 with sparsity for eight"
L4 = {"fp32": 30.3, "tf32": 60.0, "bf16": 121.0, "fp16": 121.0, "fp8": 242.5}
A10 = {"fp32": 31.2, "tf32": 62.5, "bf16": 125.0, "fp16": 125.0}
RTX_4090 = {"fp32": 82.6, "tf32": 82.6, "bf16": 165.2, "fp16": 165.2, "fp8": 330.3}
ADA_SOURCE = "NVIDIA Ada GPU architecture white paper, 2022, appendix A"
MI210 = {"fp32": 45.3, "bf16": 181.0, "fp16": 181.0}
MI250 = {"fp32": 45.25, "bf16": 181.0, "fp16": 181.0}
MI250X = {"fp32": 47.85, "bf16": 191.5, "fp16": 191.5}
MI250_NAME, MI250X_NAME = "AMD Instinct MI250", "AMD Instinct MI250X"
CDNA2_SOURCE = "AMD CDNA 2 white paper and Instinct MI200 series brochure, 2021"
MI250_SOURCE = f"{CDNA2_SOURCE}: a card has 362 TFLOP/s, 128 GB, 3277 GB/s, 560 W"
MI250X_SOURCE = f"{CDNA2_SOURCE}: a card has 383 TFLOP/s, 128 GB, 3277 GB/s, 560 W"
CDNA3 = {"fp32": 163.4, "tf32": 653.7, "bf16": 1307.4, "fp16": 1307.4, "fp8": 2614.9}
MI300X_SOURCE = "AMD Instinct MI300X data sheet, December 2023"
MI325X_SOURCE = "AMD Instinct MI325X data sheet, October 2024"

# The fields of an Accelerator, in their order: name, pattern, compute units, memory, bytes/s, watts, TFLOP/s, source,
# PCI numbers, devices on a card.
_ROWS = (
    ("V100-16GB", "Tesla V100-SXM2-16GB", 80, 16 * GIB, 900e9, 300, V100, V100_SOURCE),
    ("V100-32GB", "Tesla V100-SXM2-32GB", 80, 32 * GIB, 900e9, 300, V100, V100_SOURCE),
    ("A100-40GB", "(NVIDIA )?A100-SXM4-40GB", 108, 40 * GIB, 1555e9, 400, A100, A100_SOURCE),
    ("A100-80GB", "(NVIDIA )?A100-SXM4-80GB", 108, 80 * GIB, 2039e9, 400, A100, A100_SOURCE),
    ("A100-PCIe-40GB", "(NVIDIA )?A100-PCIE-40GB", 108, 40 * GIB, 1555e9, 250, A100, A100_SOURCE),
    ("A100-PCIe-80GB", "(NVIDIA )?A100 80GB PCIe", 108, 80 * GIB, 1935e9, 300, A100, A100_SOURCE),
    ("H100-80GB", "NVIDIA H100 80GB HBM3", 132, 80 * GIB, 3350e9, 700, H100_SXM, H100_SOURCE),
    ("H100-PCIe-80GB", "NVIDIA H100 PCIe", 114, 80 * GIB, 2000e9, 350, H100_PCIE, H100_SOURCE),
    ("H200", "NVIDIA H200", 132, 141 * GIB, 4800e9, 700, H100_SXM, f"NVIDIA H200 (SXM) datasheet, 2024; {HALVED}"),
    ("B200", "NVIDIA B200", 148, 180 * GIB, 8000e9, 1000, B200, B200_SOURCE),
    ("L4", "NVIDIA L4", 58, 24 * GIB, 300e9, 72, L4, f"NVIDIA L4 datasheet, 2023; {HALVED}"),
    ("A10", "NVIDIA A10", 72, 24 * GIB, 600e9, 150, A10, "NVIDIA A10 datasheet, 2021"),
    ("RTX-4090", "NVIDIA GeForce RTX 4090", 128, 24 * GIB, 1008e9, 450, RTX_4090, ADA_SOURCE),
    ("MI210", "AMD Instinct MI210", 104, 64 * GIB, 1638.4e9, 300, MI210, CDNA2_SOURCE, (0x740F,), 1),
    ("MI250", f"{MI250_NAME}|{MI250X_NAME} ?/ ?MI250", 104, 64 * GIB, 1638.4e9, 280, MI250, MI250_SOURCE, (0x740C,), 2),
    ("MI250X", f"{MI250X_NAME}( ?/ ?MI250)?", 110, 64 * GIB, 1638.4e9, 280, MI250X, MI250X_SOURCE, (0x7408, 0x740C), 2),
    (
        "MI300X",
        "AMD Instinct MI300X( OAM)?( VF)?",
        304,
        192 * GIB,
        5300e9,
        750,
        CDNA3,
        MI300X_SOURCE,
        (0x74A1, 0x74B5),
        1,
    ),
    ("MI325X", "AMD Instinct MI325X( VF)?", 304, 256 * GIB, 6000e9, 1000, CDNA3, MI325X_SOURCE, (0x74A5, 0x74B9), 1),
)

ACCELERATORS: Mapping[str, Accelerator] = {row.name: row for row in starmap(Accelerator, _ROWS)}
