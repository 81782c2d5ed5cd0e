"""`hardware=auto`: the overlay for the devices that the kernel lists, from folders that stand for /proc and /sys."""

import re
from pathlib import Path

import pytest

from llmfoundry_lite.config import layers
from llmfoundry_lite.config.auto_hardware import choose_overlay, find_devices
from llmfoundry_lite.config.load_train import load_train_config
from llmfoundry_lite.errors import ConfigError
from llmfoundry_lite.hardware import ACCELERATORS
from tests.helpers.launch import ROOT
from tests.helpers.present import needs

CPU_NODE = {"cpu_cores_count": 64, "simd_count": 0, "simd_per_cu": 0, "device_id": 0, "vendor_id": 0}


def uuid_of(number: int) -> str:
    return f"GPU-{number:08x}-d72c-4106-c12f-20bd9faed9f6"


def nvidia(root: Path, *names: str) -> Path:
    """Write devices where the NVIDIA driver's kernel module lists them."""
    for number, name in enumerate(names):
        folder = root / f"proc/driver/nvidia/gpus/0000:{number:02x}:00.0"
        folder.mkdir(parents=True)
        lines = f"Model: \t\t {name}\nIRQ:   \t\t 77\nGPU UUID: \t {uuid_of(number)}\nDevice Minor: \t {number}\n"
        (folder / "information").write_text(lines)
    return root


def amd(root: Path, *devices: tuple[int, int], processors: int = 2) -> Path:
    """Write devices as KFD lists them: processors' nodes, then a node for each (PCI number, compute units)."""
    nodes = [CPU_NODE] * processors
    nodes += [
        {"simd_count": units * 4, "simd_per_cu": 4, "device_id": pci, "vendor_id": 4098, "unique_id": 0xABC0 + number}
        for number, (pci, units) in enumerate(devices)
    ]
    for number, facts in enumerate(nodes):
        folder = root / f"sys/class/kfd/kfd/topology/nodes/{number}"
        folder.mkdir(parents=True)
        (folder / "properties").write_text("".join(f"{key} {value}\n" for key, value in facts.items()))
    return root


@pytest.mark.parametrize(
    ("name", "count", "overlay"),
    [
        ("NVIDIA A100-SXM4-40GB", 8, "a100-40gb-8"),
        ("NVIDIA A100-SXM4-80GB", 8, "a100-80gb-8"),
        ("NVIDIA H100 80GB HBM3", 8, "h100-8"),
        ("NVIDIA H100 80GB HBM3", 1, "h100-8"),
        ("NVIDIA H200", 8, "h200-8"),
    ],
)
def test_nvidia_devices_have_their_overlay(tmp_path, name, count, overlay):
    values, note = choose_overlay(nvidia(tmp_path, *[name] * count), {})
    assert values == ROOT / f"yamls/hardware/{overlay}.yaml"
    assert note == f"hardware=auto: {overlay}, for {count} x {name}"


@pytest.mark.parametrize(
    ("pci", "units", "count", "overlay", "name"),
    [
        (0x740C, 104, 8, "mi250-4", "AMD Instinct MI250"),
        (0x74A1, 304, 8, "mi300x-8", "AMD Instinct MI300X"),
        (0x74B5, 304, 1, "mi300x-8", "AMD Instinct MI300X"),
    ],
)
def test_amd_devices_have_their_overlay(tmp_path, pci, units, count, overlay, name):
    values, note = choose_overlay(amd(tmp_path, *[(pci, units)] * count), {})
    assert values == ROOT / f"yamls/hardware/{overlay}.yaml"
    assert note == f"hardware=auto: {overlay}, for {count} x {name}"


def test_an_overlay_is_named_by_cards_of_which_two_devices_are_one(tmp_path, monkeypatch):
    own = tmp_path / "yamls/hardware"
    own.mkdir(parents=True)
    for cards in (1, 2, 4, 8):
        (own / f"mi250-{cards}.yaml").write_text("overlay: hardware\n")
    monkeypatch.chdir(tmp_path)
    for devices, cards in ((2, 1), (4, 2), (8, 4)):
        values, _ = choose_overlay(amd(tmp_path / str(devices), *[(0x740C, 104)] * devices), {})
        assert values == own / f"mi250-{cards}.yaml"


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("environment: {CXX: ./theirs}", "environment.CXX"),
        ("compile_config: {mode: default, options: {cpp.cxx: ./theirs}}", "compile_config.options.cpp.cxx"),
        ("model: {attn_config: {attn_impl: 'python:theirs:attend'}}", "model.attn_config.attn_impl"),
        ("model: {attn_config: {attn_impl: '${oc.env:NONE,python}:theirs:attend'}}", "model.attn_config.attn_impl"),
        ("train_loader: {dataset: {local: /elsewhere}}", "train_loader.dataset.local"),
        ("eval_loader: {dataset: {remote: 'http://theirs'}}", "eval_loader.dataset.remote"),
        pytest.param("islands: {coordinator: theirs:7070}", "islands.coordinator", marks=needs("llmfoundry_islands")),
    ],
)
def test_an_overlay_that_nobody_named_runs_nothing_and_names_no_place(tmp_path, monkeypatch, text, key):
    """The working directory may be somebody else's, and `auto` looks there by itself."""
    own = tmp_path / "yamls/hardware"
    own.mkdir(parents=True)
    overlay = own / "h200-8.yaml"
    overlay.write_text(f"overlay: hardware\nprecision: amp_bf16\n{text}\n")
    monkeypatch.chdir(tmp_path)
    chosen = choose_overlay(nvidia(tmp_path / "root", *[H200] * 8), {})
    monkeypatch.setattr(layers, "choose_overlay", lambda: chosen)
    run = str(ROOT / "yamls/pretrain/mpt-125m.yaml")
    expected = f"hardware=auto: {overlay} sets {key}, .*; if you trust it, give hardware=yamls/hardware/h200-8.yaml"
    for words in (["hardware=auto"], ["yamls/hardware/auto"]):
        with pytest.raises(ConfigError, match=expected):
            layers.read_layers([run, *words])

    named = layers.read_layers([run, "hardware=yamls/hardware/h200-8.yaml"])
    assert named[-1].values["precision"] == "amp_bf16"
    overlay.write_text(
        "overlay: hardware\nprecision: amp_bf16\ncompile_config: {mode: default}\n"
        "model: {attn_config: {attn_impl: sdpa}}\n"
    )
    assert layers.read_layers([run, "hardware=auto"])[-1].values["precision"] == "amp_bf16"


def test_every_amd_row_is_found_by_one_number_and_its_compute_units(tmp_path):
    rows = [row for row in ACCELERATORS.values() if row.vendor == "amd"]
    for row in rows:
        for pci in row.pci_ids:
            found = find_devices(amd(tmp_path / f"{row.name}-{pci}", (pci, row.num_compute_units)), {})
            assert found is not None and found.row is row
    assert all(row.pci_ids for row in rows)


def test_a_machine_without_an_accelerator_or_with_all_hidden_takes_the_cpu_s(tmp_path):
    cpu = ROOT / "yamls/hardware/cpu.yaml"
    assert choose_overlay(amd(tmp_path / "empty"), {}).values == cpu
    both = amd(nvidia(tmp_path / "both", "NVIDIA H200"), (0x74A1, 304))
    for hidden in ("", "-1"):
        assert choose_overlay(both, {"CUDA_VISIBLE_DEVICES": hidden}).values == cpu


def test_hidden_devices_are_not_counted(tmp_path):
    root = nvidia(tmp_path, *["NVIDIA H200"] * 8)
    found = find_devices(root, {"CUDA_VISIBLE_DEVICES": "4,5,6"})
    assert found is not None and found.num_devices == 3


H100, A100, H200 = "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB", "NVIDIA H200"
MIXED = [A100, A100, H100, H100, H200]
BY_ADDRESS = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        ("2,3", (H100, 2)),
        ("0, 1", (A100, 2)),
        ("4", (H200, 1)),
        ("3,-1,0", (H100, 1)),
        ("2,9,0", (H100, 1)),
        (f"{uuid_of(3)},{uuid_of(2)}", (H100, 2)),
        ("GPU-00000004", (H200, 1)),
        ("GPU-00000004,GPU-0000000", (H200, 1)),
        ("", None),
        ("-1,2", None),
    ],
)
def test_the_devices_that_a_variable_names_are_looked_at(tmp_path, visible, expected):
    found = find_devices(nvidia(tmp_path, *MIXED), {"CUDA_VISIBLE_DEVICES": visible, **BY_ADDRESS})
    assert (found and (found.name, found.num_devices)) == expected


def test_cuda_s_own_order_of_unlike_devices_is_not_guessed(tmp_path):
    root = nvidia(tmp_path, *MIXED)
    with pytest.raises(ConfigError, match=r"CUDA_VISIBLE_DEVICES=2,3: CUDA numbers unlike devices by their speed; set"):
        find_devices(root, {"CUDA_VISIBLE_DEVICES": "2,3"})
    found = find_devices(root, {"CUDA_VISIBLE_DEVICES": uuid_of(4)})
    assert found and found.name == H200


def test_uuids_that_the_kernel_does_not_tell(tmp_path):
    """A sleeping device has no UUID. Where all devices are alike, only their number matters."""
    for name, devices in (("alike", [H100] * 4), ("mixed", MIXED)):
        for file in nvidia(tmp_path / name, *devices).rglob("information"):
            file.write_text(re.sub(r"GPU-.*", "GPU-????????-????-????-????-????????????", file.read_text()))
    visible = {"CUDA_VISIBLE_DEVICES": f"{uuid_of(3)},{uuid_of(2)}"}
    found = find_devices(tmp_path / "alike", visible)
    assert found and (found.name, found.num_devices) == (H100, 2)
    with pytest.raises(ConfigError, match=r"the kernel tells no UUID of some devices; name an overlay, as in"):
        find_devices(tmp_path / "mixed", visible)


def test_a_slice_of_a_device_has_no_overlay(tmp_path):
    _, note = choose_overlay(nvidia(tmp_path, H100), {"CUDA_VISIBLE_DEVICES": "MIG-f1a9d7a5-8f2b-4a66-9f7d"})
    assert note.startswith("hardware=auto: no overlay for 1 x NVIDIA MIG slice; FULL_SHARD")


MI250, MI300X = (0x740C, 104), (0x74A1, 304)


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        ({"ROCR_VISIBLE_DEVICES": "8,9,10,11"}, ("AMD Instinct MI300X", 4)),
        ({"HIP_VISIBLE_DEVICES": "8,9"}, ("AMD Instinct MI300X", 2)),
        ({"HIP_VISIBLE_DEVICES": "8,9", "CUDA_VISIBLE_DEVICES": "0"}, ("AMD Instinct MI300X", 2)),
        ({"CUDA_VISIBLE_DEVICES": "0"}, ("AMD Instinct MI250", 1)),
        ({"ROCR_VISIBLE_DEVICES": "6,7,8", "HIP_VISIBLE_DEVICES": "2"}, ("AMD Instinct MI300X", 1)),
        ({"ROCR_VISIBLE_DEVICES": "GPU-000000000000ABC9,GPU-000000000000abca"}, ("AMD Instinct MI300X", 2)),
    ],
)
def test_amd_devices_that_variables_name_are_looked_at(tmp_path, visible, expected):
    """With twelve devices, the kernel's node 10 is not the third."""
    found = find_devices(amd(tmp_path, *[MI250] * 8, *[MI300X] * 4), visible)
    assert found and (found.name, found.num_devices) == expected


@pytest.mark.parametrize("visible", ["7", uuid_of(9), "0,0"])
def test_a_variable_that_names_none_of_the_devices_is_no_way_to_a_cpu(tmp_path, visible):
    with pytest.raises(
        ConfigError, match=f"CUDA_VISIBLE_DEVICES={visible} leaves none of this machine's devices; name"
    ):
        find_devices(nvidia(tmp_path, H100, H100), {"CUDA_VISIBLE_DEVICES": visible})


def test_a_device_without_an_overlay_gets_safe_values_and_a_line_on_how_to_write_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    values, note = choose_overlay(nvidia(tmp_path / "root", *["NVIDIA RTX A6000"] * 2), {})
    assert isinstance(values, dict)
    assert values["device_train_microbatch_size"] == "auto"
    assert values["fsdp_config"] == {"sharding_strategy": "FULL_SHARD"}
    assert "no overlay for 2 x NVIDIA RTX A6000; FULL_SHARD, with microbatches as large as fit" in note
    named = re.search(r"to (yamls/hardware/[\w-]+\.yaml) here, which hardware=auto then takes", note)
    assert named and named[1] == "yamls/hardware/nvidia-rtx-a6000.yaml"
    Path(named[1]).parent.mkdir(parents=True)
    Path(named[1]).write_text((ROOT / "yamls/hardware/h100-8.yaml").read_text())
    assert choose_overlay(tmp_path / "root", {}).values == tmp_path / named[1]


def test_a_part_of_a_device_is_not_the_device(tmp_path, monkeypatch):
    """An MI300X in partitions: eight nodes with the number of the whole, and 38 of its compute units each."""
    monkeypatch.chdir(tmp_path)
    _, note = choose_overlay(amd(tmp_path, *[(0x74A1, 38)] * 8), {})
    assert "no overlay for 8 x AMD device 74a1" in note and "amd-device-74a1.yaml" in note


def test_the_user_s_own_overlay_goes_first_and_one_for_as_many_devices_before_others(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    own = tmp_path / "yamls/hardware"
    own.mkdir(parents=True)
    for count in (2, 4):
        (own / f"h100-{count}.yaml").write_text("overlay: hardware\ndevice_train_microbatch_size: 1\n")
    h100 = "NVIDIA H100 80GB HBM3"
    for count, expected in ((2, own / "h100-2.yaml"), (4, own / "h100-4.yaml"), (1, own / "h100-2.yaml")):
        assert choose_overlay(nvidia(tmp_path / str(count), *[h100] * count), {}).values == expected
    assert choose_overlay(nvidia(tmp_path / "8", *[h100] * 8), {}).values == ROOT / "yamls/hardware/h100-8.yaml"


def test_two_kinds_of_devices_are_refused_unless_one_is_a_laptop_s_own(tmp_path):
    both = amd(nvidia(tmp_path / "both", "NVIDIA H200"), (0x74A1, 304))
    with pytest.raises(ConfigError, match="this machine has NVIDIA H200 and AMD Instinct MI300X; hide one kind"):
        choose_overlay(both, {})
    assert choose_overlay(both, {"HIP_VISIBLE_DEVICES": ""}).note.endswith("h200-8, for 1 x NVIDIA H200")
    own_graphics = amd(nvidia(tmp_path / "laptop", "NVIDIA H200"), (0x1681, 12))
    assert choose_overlay(own_graphics, {}).note.endswith("h200-8, for 1 x NVIDIA H200")


def test_a_device_that_a_container_does_not_have_is_not_counted(tmp_path):
    """Its file is in sysfs, and reading it is refused. (Root may read all, so a folder stands for the refusal.)"""
    root = amd(tmp_path, *[(0x74A1, 304)] * 2)
    refused = root / "sys/class/kfd/kfd/topology/nodes/3/properties"
    refused.unlink()
    refused.mkdir()
    found = find_devices(root, {})
    assert found is not None and found.num_devices == 1


@pytest.mark.parametrize(("code", "note"), [(0, "h100-8, for 2 x NVIDIA H100 80GB HBM3"), (9, "cpu; no accelerator")])
def test_where_the_kernel_lists_none_nvidia_smi_is_asked(tmp_path, monkeypatch, code, note):
    program = tmp_path / "nvidia-smi"
    name = "NVIDIA H100 80GB HBM3"
    program.write_text(
        f'#!/bin/sh\n[ "$1" = --query-gpu=name,uuid ] && printf "{name}, GPU-1\\n{name}, GPU-2\\n"\nexit {code}\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert choose_overlay(tmp_path / "nothing", {}).note.startswith(f"hardware=auto: {note}")


RUN = str(ROOT / "yamls/pretrain/mpt-125m.yaml")


@pytest.mark.parametrize("word", ["hardware=auto", "auto", "yamls/hardware/auto", "yamls/hardware/auto.yaml"])
def test_the_chosen_overlay_lies_below_the_command_line_and_is_said(monkeypatch, word):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    invocation = load_train_config([RUN, word, "fsdp_config.sharding_strategy=NO_SHARD"], {})
    assert invocation.notes == ["hardware=auto: cpu; no accelerator was found"]
    assert invocation.config.train_loader.pin_memory is False  # the cpu's
    assert invocation.config.sharding.sharding_strategy == "NO_SHARD"


def test_hardware_names_an_overlay_wherever_it_stands():
    assert load_train_config(["hardware=mi300x-8", RUN], {}).config.sharding.sharding_strategy == "HYBRID_SHARD"


@pytest.mark.parametrize("name", ["h1000-8", "mpt-1b", RUN])
def test_another_yaml_is_no_hardware(name):
    with pytest.raises(ConfigError, match=r"hardware: '.*' is not a hardware overlay; expected auto, a file, or a100-"):
        load_train_config([RUN, f"hardware={name}"], {})
