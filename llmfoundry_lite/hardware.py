"""The one table of accelerators: peak FLOP/s, memory, bandwidth and power, each row with its source. No torch.

A row is one device as torch sees it: half a card for the MI250 and MI250X, whose two dies (GCDs) are two
devices. Peaks are dense: what a datasheet prints "with sparsity" is halved here. An accelerator that is not in
the table, or a slice of one that is, has no peak: nothing is guessed.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from llmfoundry_lite.errors import ConfigError

FREE_SHARE = 0.98
"""Of the memory as sold: 1 to 2 % less is free for programs."""
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def in_bytes(number: int) -> str:
    """4096 -> 4.00 KiB"""
    for unit, unit_bytes in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if number >= unit_bytes:
            return f"{number / unit_bytes:,.2f} {unit}"
    return f"{number} B"


@dataclass(kw_only=True, slots=True, frozen=True)
class Accelerator:
    name: str
    vendor: str
    """nvidia or amd"""
    pattern: str
    """Regular expression for the whole of `torch.cuda.get_device_name()`."""
    num_compute_units: int
    """Streaming multiprocessors or compute units, torch's `multi_processor_count`; a slice of the device has fewer."""
    devices_per_card: int = 1
    peak_teraflops: Mapping[str, float]
    """fp32 (without TF32), tf32, bf16, fp16, fp8 -> dense matrix products with fp32 sums; a dtype whose peak is not
    published is absent."""
    memory_bytes: int
    """As sold. Vendors' GB are GiB here."""
    memory_bandwidth_bytes_per_second: float
    power_watts: float
    """The most one device draws."""
    source: str
    pci_ids: tuple[int, ...] = ()
    """AMD: the PCI device numbers under which the kernel lists it (pci.ids, vendor 1002). NVIDIA's lists names."""

    @property
    def free_bytes(self) -> int:
        """What is left of the memory for a program."""
        return int(FREE_SHARE * self.memory_bytes)

    @property
    def workspace_bytes(self) -> int:
        """Scratch memory of matrix products for each thread that computes, as torch has it: 32 MiB from Hopper on, a
        quarter before (`getChosenWorkspaceSize`). AMD's is not rehearsed and counts as Hopper's."""
        is_older = self.name.startswith(("V100", "A100", "A10", "L4", "RTX-4090"))
        return 8 * MIB + 128 * KIB if is_older else 32 * MIB

    def peak_flops(self, dtype: str) -> float | None:
        """Dense FLOP/s in fp32, tf32, bf16, fp16 or fp8; None where none is published."""
        teraflops = self.peak_teraflops.get(dtype)
        return None if teraflops is None else teraflops * 1e12


class Device(NamedTuple):
    """What a rank of this machine computes on."""

    name: str
    free_bytes: int
    is_shared: bool
    """By all ranks of this machine, as its RAM is."""


def find_accelerator(device_name: str, num_compute_units: int | None = None) -> Accelerator | None:
    """The row for what `torch.cuda.get_device_name()` says; None for a device that the table does not know.

    ROCm gives MI250 and MI250X one name, and slices (MIG, partitions) the name of the whole: with
    `num_compute_units`, torch's `multi_processor_count`, they are told apart; without, the first two are unknown.
    """
    rows = [row for row in ACCELERATORS.values() if re.fullmatch(row.pattern, device_name)]
    if num_compute_units is not None:
        rows = [row for row in rows if row.num_compute_units == num_compute_units]
    return rows[0] if len(rows) == 1 else None


def accelerator_named(name: str) -> Accelerator:
    """The row of this name in upper or lower case, or the one that it begins: `h100` and `h100-8` are H100-80GB, a
    module rather than a PCIe card.

    Raises ConfigError, which lists the rows, for a name that none has or several have.
    """
    rows = rows_named(name)
    if len(rows) > 1:
        names = " and ".join(row.name for row in rows)
        raise ConfigError(f"hardware {name!r} may be {names}; name one of them")
    if not rows:
        raise ConfigError(
            f"hardware {name!r} is not in the table; expected one of {', '.join(ACCELERATORS)}. For a new device, copy "
            "the row of one like it in llmfoundry_lite/hardware.py and change its figures"
        )
    return rows[0]


def is_named(name: str) -> bool:
    """Whether the table has a row, or several, that `accelerator_named` could mean."""
    return bool(rows_named(name))


def rows_named(name: str) -> list[Accelerator]:
    exact = [row for row in ACCELERATORS.values() if row.name.lower() == name.lower()]
    stem = re.sub(r"-\d+$", "", name.lower())
    rows = exact or [row for row in ACCELERATORS.values() if f"{row.name.lower()}-".startswith(f"{stem}-")]
    return [row for row in rows if "PCIe" not in row.name] or rows


# ------------------------------------------------------------------------------------------------------- the table

A100 = {"fp32": 19.5, "tf32": 156.0, "bf16": 312.0, "fp16": 312.0}
A100_SOURCE = "NVIDIA A100 datasheet, June 2021"
H100_SXM = {"fp32": 67.0, "tf32": 494.5, "bf16": 989.5, "fp16": 989.5, "fp8": 1979.0}
H100_SOURCE = "NVIDIA H100 datasheet, 2023; tensor figures halved, they are with sparsity"
CDNA2_SOURCE = "AMD CDNA 2 white paper and Instinct MI200 series brochure, 2021"
CDNA3 = {"fp32": 163.4, "tf32": 653.7, "bf16": 1307.4, "fp16": 1307.4, "fp8": 2614.9}
V100 = {"fp32": 15.7, "fp16": 125.0}
V100_SOURCE = "NVIDIA V100 datasheet, January 2020"

_ROWS = (
    Accelerator(
        name="V100-16GB",
        vendor="nvidia",
        pattern=r"Tesla V100-SXM2-16GB",
        num_compute_units=80,
        peak_teraflops=V100,
        memory_bytes=16 * GIB,
        memory_bandwidth_bytes_per_second=900e9,
        power_watts=300,
        source=V100_SOURCE,
    ),
    Accelerator(
        name="V100-32GB",
        vendor="nvidia",
        pattern=r"Tesla V100-SXM2-32GB",
        num_compute_units=80,
        peak_teraflops=V100,
        memory_bytes=32 * GIB,
        memory_bandwidth_bytes_per_second=900e9,
        power_watts=300,
        source=V100_SOURCE,
    ),
    Accelerator(
        name="A100-40GB",
        vendor="nvidia",
        pattern=r"(NVIDIA )?A100-SXM4-40GB",
        num_compute_units=108,
        peak_teraflops=A100,
        memory_bytes=40 * GIB,
        memory_bandwidth_bytes_per_second=1555e9,
        power_watts=400,
        source=A100_SOURCE,
    ),
    Accelerator(
        name="A100-80GB",
        vendor="nvidia",
        pattern=r"(NVIDIA )?A100-SXM4-80GB",
        num_compute_units=108,
        peak_teraflops=A100,
        memory_bytes=80 * GIB,
        memory_bandwidth_bytes_per_second=2039e9,
        power_watts=400,
        source=A100_SOURCE,
    ),
    Accelerator(
        name="A100-PCIe-40GB",
        vendor="nvidia",
        pattern=r"(NVIDIA )?A100-PCIE-40GB",
        num_compute_units=108,
        peak_teraflops=A100,
        memory_bytes=40 * GIB,
        memory_bandwidth_bytes_per_second=1555e9,
        power_watts=250,
        source=A100_SOURCE,
    ),
    Accelerator(
        name="A100-PCIe-80GB",
        vendor="nvidia",
        pattern=r"(NVIDIA )?A100 80GB PCIe",
        num_compute_units=108,
        peak_teraflops=A100,
        memory_bytes=80 * GIB,
        memory_bandwidth_bytes_per_second=1935e9,
        power_watts=300,
        source=A100_SOURCE,
    ),
    Accelerator(
        name="H100-80GB",
        vendor="nvidia",
        pattern=r"NVIDIA H100 80GB HBM3",
        num_compute_units=132,
        peak_teraflops=H100_SXM,
        memory_bytes=80 * GIB,
        memory_bandwidth_bytes_per_second=3350e9,
        power_watts=700,
        source=H100_SOURCE,
    ),
    Accelerator(
        name="H100-PCIe-80GB",
        vendor="nvidia",
        pattern=r"NVIDIA H100 PCIe",
        num_compute_units=114,
        peak_teraflops={"fp32": 51.0, "tf32": 378.0, "bf16": 756.5, "fp16": 756.5, "fp8": 1513.0},
        memory_bytes=80 * GIB,
        memory_bandwidth_bytes_per_second=2000e9,
        power_watts=350,
        source=H100_SOURCE,
    ),
    Accelerator(
        name="H200",
        vendor="nvidia",
        pattern=r"NVIDIA H200",
        num_compute_units=132,
        peak_teraflops=H100_SXM,
        memory_bytes=141 * GIB,
        memory_bandwidth_bytes_per_second=4800e9,
        power_watts=700,
        source="NVIDIA H200 (SXM) datasheet, 2024; tensor figures halved, they are with sparsity",
    ),
    Accelerator(
        name="B200",
        vendor="nvidia",
        pattern=r"NVIDIA B200",
        num_compute_units=148,
        # The published fp32 and tf32 figures differ between documents, so they are left out.
        peak_teraflops={"bf16": 2250.0, "fp16": 2250.0, "fp8": 4500.0},
        memory_bytes=180 * GIB,
        memory_bandwidth_bytes_per_second=8000e9,
        power_watts=1000,
        source="NVIDIA HGX B200, Blackwell datasheet, 2024: 36 PFLOP/s bf16 with sparsity for eight",
    ),
    Accelerator(
        name="L4",
        vendor="nvidia",
        pattern=r"NVIDIA L4",
        num_compute_units=58,
        peak_teraflops={"fp32": 30.3, "tf32": 60.0, "bf16": 121.0, "fp16": 121.0, "fp8": 242.5},
        memory_bytes=24 * GIB,
        memory_bandwidth_bytes_per_second=300e9,
        power_watts=72,
        source="NVIDIA L4 datasheet, 2023; tensor figures halved, they are with sparsity",
    ),
    Accelerator(
        name="A10",
        vendor="nvidia",
        pattern=r"NVIDIA A10",
        num_compute_units=72,
        peak_teraflops={"fp32": 31.2, "tf32": 62.5, "bf16": 125.0, "fp16": 125.0},
        memory_bytes=24 * GIB,
        memory_bandwidth_bytes_per_second=600e9,
        power_watts=150,
        source="NVIDIA A10 datasheet, 2021",
    ),
    Accelerator(
        name="RTX-4090",
        vendor="nvidia",
        pattern=r"NVIDIA GeForce RTX 4090",
        num_compute_units=128,
        peak_teraflops={"fp32": 82.6, "tf32": 82.6, "bf16": 165.2, "fp16": 165.2, "fp8": 330.3},
        memory_bytes=24 * GIB,
        memory_bandwidth_bytes_per_second=1008e9,
        power_watts=450,
        source="NVIDIA Ada GPU architecture white paper, 2022, appendix A",
    ),
    Accelerator(
        name="MI210",
        vendor="amd",
        pattern=r"AMD Instinct MI210",
        num_compute_units=104,
        peak_teraflops={"fp32": 45.3, "bf16": 181.0, "fp16": 181.0},
        memory_bytes=64 * GIB,
        memory_bandwidth_bytes_per_second=1638.4e9,
        power_watts=300,
        source=CDNA2_SOURCE,
        pci_ids=(0x740F,),
    ),
    Accelerator(
        name="MI250",
        vendor="amd",
        pattern=r"AMD Instinct MI250|AMD Instinct MI250X ?/ ?MI250",
        num_compute_units=104,
        devices_per_card=2,
        peak_teraflops={"fp32": 45.25, "bf16": 181.0, "fp16": 181.0},
        memory_bytes=64 * GIB,
        memory_bandwidth_bytes_per_second=1638.4e9,
        power_watts=280,
        source=f"{CDNA2_SOURCE}: a card has 362 TFLOP/s, 128 GB, 3277 GB/s, 560 W",
        pci_ids=(0x740C,),
    ),
    Accelerator(
        name="MI250X",
        vendor="amd",
        pattern=r"AMD Instinct MI250X( ?/ ?MI250)?",
        num_compute_units=110,
        devices_per_card=2,
        peak_teraflops={"fp32": 47.85, "bf16": 191.5, "fp16": 191.5},
        memory_bytes=64 * GIB,
        memory_bandwidth_bytes_per_second=1638.4e9,
        power_watts=280,
        source=f"{CDNA2_SOURCE}: a card has 383 TFLOP/s, 128 GB, 3277 GB/s, 560 W",
        pci_ids=(0x7408, 0x740C),
    ),
    Accelerator(
        name="MI300X",
        vendor="amd",
        pattern=r"AMD Instinct MI300X( VF)?",
        num_compute_units=304,
        peak_teraflops=CDNA3,
        memory_bytes=192 * GIB,
        memory_bandwidth_bytes_per_second=5300e9,
        power_watts=750,
        source="AMD Instinct MI300X data sheet, December 2023",
        pci_ids=(0x74A1, 0x74B5),
    ),
    Accelerator(
        name="MI325X",
        vendor="amd",
        pattern=r"AMD Instinct MI325X( VF)?",
        num_compute_units=304,
        peak_teraflops=CDNA3,
        memory_bytes=256 * GIB,
        memory_bandwidth_bytes_per_second=6000e9,
        power_watts=1000,
        source="AMD Instinct MI325X data sheet, October 2024",
        pci_ids=(0x74A5, 0x74B9),
    ),
)

ACCELERATORS: Mapping[str, Accelerator] = {row.name: row for row in _ROWS}
