"""The table of accelerators: which names it knows, and that it guesses none."""

import pytest

from llmfoundry_lite.hardware import ACCELERATORS, GIB, find_accelerator

PUBLISHED_CARDS = {
    "MI250": (362, 128, 3277, 560),
    "A100-40GB": (312, 40, 1555, 400),
    "A100-80GB": (312, 80, 2039, 400),
    "H100-80GB": (989.5, 80, 3350, 700),
}
"""bf16 TFLOP/s, GB, GB/s and watts of a card: MosaicML, "Training LLMs at Scale with AMD MI250 GPUs", table 1."""


@pytest.mark.parametrize(
    ("device_name", "expected"),
    [
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("NVIDIA A100 80GB PCIe", "A100-PCIe-80GB"),
        ("NVIDIA H100 80GB HBM3", "H100-80GB"),
        ("NVIDIA H100 PCIe", "H100-PCIe-80GB"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA B200", "B200"),
        ("Tesla V100-SXM2-32GB", "V100-32GB"),
        ("NVIDIA A10", "A10"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("AMD Instinct MI250", "MI250"),
        ("AMD Instinct MI250X", "MI250X"),
        ("AMD Instinct MI300X", "MI300X"),
        ("AMD Instinct MI300X VF", "MI300X"),
        ("AMD Instinct MI300X OAM", "MI300X"),
    ],
)
def test_names_as_torch_reports_them(device_name, expected):
    row = find_accelerator(device_name)
    assert row is not None and row.name == expected
    assert find_accelerator(device_name, row.num_compute_units) is row


@pytest.mark.parametrize(
    "device_name",
    [
        "",
        "NVIDIA H200 NVL",
        "NVIDIA GH200 480GB",
        "NVIDIA A10G",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "AMD Radeon RX 7900 XTX",
        "Intel(R) Xeon(R) Platinum",
    ],
)
def test_what_is_not_in_the_table_is_not_guessed(device_name):
    assert find_accelerator(device_name) is None


def test_the_name_shared_by_mi250_and_mi250x_needs_the_compute_units():
    name = "AMD Instinct MI250X / MI250"
    assert find_accelerator(name) is None
    mi250, mi250x = find_accelerator(name, 104), find_accelerator(name, 110)
    assert mi250 is not None and mi250.peak_flops("bf16") == 181e12
    assert mi250x is not None and mi250x.peak_flops("bf16") == 191.5e12


def test_a_slice_of_a_device_is_not_the_device():
    assert find_accelerator("AMD Instinct MI300X", 38) is None
    assert find_accelerator("NVIDIA H200", 66) is None


def test_peaks_are_in_flops_and_absent_where_not_published():
    h100 = ACCELERATORS["H100-80GB"]
    assert h100.peak_flops("bf16") == 989.5e12 and h100.peak_flops("fp8") == 1979e12
    assert ACCELERATORS["V100-16GB"].peak_flops("bf16") is None
    assert ACCELERATORS["A100-40GB"].peak_flops("fp8") is None


def test_frontiers_rates_are_the_published_shares_of_its_peak():
    """TFLOP/s of a device and percent of 191.5, arXiv 2312.12705: 22, 175 and 1,000 billion parameters."""
    peak = ACCELERATORS["MI250X"].peak_flops("fp16")
    for rate, percent in ((73.5, 38.38), (69.2, 36.14), (61.2, 31.96)):
        assert 100 * rate * 1e12 / peak == pytest.approx(percent, abs=0.01)


@pytest.mark.parametrize("row", ACCELERATORS.values(), ids=ACCELERATORS)
def test_rows_are_complete_and_within_reason(row):
    assert row.source and row.vendor in ("nvidia", "amd")
    assert set(row.peak_teraflops) <= {"fp32", "tf32", "bf16", "fp16", "fp8"}
    assert 16 * GIB <= row.memory_bytes <= 300 * GIB
    assert 1e11 < row.memory_bandwidth_bytes_per_second < 1e13
    assert 50 < row.power_watts / row.devices_per_card <= 1500 or row.devices_per_card == 2
    peaks = [row.peak_flops(dtype) for dtype in ("fp32", "tf32", "fp16", "fp8") if row.peak_flops(dtype)]
    assert peaks == sorted(peaks)


@pytest.mark.parametrize("name", PUBLISHED_CARDS)
def test_cards_agree_with_the_published_table(name):
    teraflops, gigabytes, bandwidth, watts = PUBLISHED_CARDS[name]
    accelerator = ACCELERATORS[name]
    devices = accelerator.devices_per_card
    assert accelerator.peak_teraflops["bf16"] * devices == teraflops
    assert accelerator.memory_bytes * devices == gigabytes * GIB
    found = accelerator.memory_bandwidth_bytes_per_second * devices
    assert found == pytest.approx(bandwidth * 1e9, rel=1e-3)
    assert accelerator.power_watts * devices == watts
