"""Counters of energy, of a made-up /sys and made-up libraries, and in real runs of one and two ranks."""

import ctypes
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from composer.core import Callback

from llmfoundry_lite import devices
from llmfoundry_lite.cli import main
from llmfoundry_lite.ranks.rank import this_rank
from llmfoundry_lite.training.checkpointing import Checkpointing
from llmfoundry_ops import energy
from llmfoundry_ops.energy import Counter, EnergyMeter, find_counters, find_packages
from tests.helpers.launch import train
from tests.helpers.tiny import read_metrics, tiny_config, values, write_config, write_data

RANGE = 1000_000_000
ZONES = {
    "intel-rapl:0": "package-0",
    "intel-rapl:0:0": "core",
    "intel-rapl:0:1": "dram",
    "intel-rapl:1": "package-1",
    "intel-rapl:2": "psys",
    "intel-rapl-mmio:0": "package-0",
}


def write_zones(root: Path, zones: dict[str, str]) -> Path:
    for zone, name in zones.items():
        (root / zone).mkdir(parents=True)
        (root / zone / "name").write_text(f"{name}\n")
        (root / zone / "max_energy_range_uj").write_text(f"{RANGE}\n")
        (root / zone / "energy_uj").write_text("0\n")
    return root


def use(root: Path, zone: str, joules: int) -> None:
    file = root / zone / "energy_uj"
    file.write_text(f"{(int(file.read_text()) + joules * 1_000_000) % RANGE}\n")


def test_packages_and_dram_are_summed_and_wrap_around(tmp_path):
    root = write_zones(tmp_path, ZONES)
    for zone in ZONES:
        use(root, zone, 900)
    meter = EnergyMeter(find_packages(root), clock=lambda: 0.0)
    assert meter.take() == (0, 1), "there is no reading before the first"
    for number, zone in enumerate(ZONES):
        use(root, zone, 10**number)
    meter.sample()
    use(root, "intel-rapl:0", 200)
    assert meter.take() == ((1 + 100 + 1000 % 1000 + 200) * 1000, 0), "a counter that went all around shows nothing"
    assert meter.take() == (0, 0)


def test_a_counter_that_may_have_wrapped_twice_or_cannot_be_read_measures_nothing(tmp_path):
    now, root = [0.0], write_zones(tmp_path, {"intel-rapl:0": "package-0"})
    meter = EnergyMeter(find_packages(root), clock=lambda: now[0])
    for seconds, expected in ((0, (0, 1)), (0.5, (7000, 0)), (1.5, (0, 1)), (0.5, (7000, 0))):
        now[0] += seconds
        use(root, "intel-rapl:0", 7)
        assert meter.take()[1] == expected[1]
    (root / "intel-rapl:0/energy_uj").unlink()
    assert meter.take() == (0, 1)
    (root / "intel-rapl:0/energy_uj").write_text("0")
    assert meter.take() == (0, 1), "nothing is known of the time since the last reading"
    use(root, "intel-rapl:0", 3)
    assert meter.take() == (3000, 0)


def test_a_counter_that_begins_again_without_a_range_measures_nothing():
    joules = [5.0]
    meter = EnergyMeter([Counter(lambda: joules[0])])
    meter.take()
    joules[0] = 6.0
    assert meter.take() == (1000, 0)
    joules[0] = 2.0
    assert meter.take() == (0, 1)
    joules[0] = 2.5
    assert meter.take() == (500, 0)


def test_one_process_of_a_node_measures_its_packages(tmp_path, monkeypatch):
    monkeypatch.setattr(energy, "POWERCAP", write_zones(tmp_path, ZONES))
    first, second = find_counters(0), find_counters(1)
    assert len(first or ()) == 3 and second is None
    assert EnergyMeter(second).take() == (0, 0), "it lacks no counter"
    monkeypatch.setattr(energy, "POWERCAP", tmp_path / "none")
    assert find_counters(0) == [] and EnergyMeter([]).take() == (0, 1)


def test_counters_that_only_root_may_read_are_named(tmp_path, monkeypatch, capsys):
    root = write_zones(tmp_path, ZONES)
    real = Path.read_text

    def read_text(path, *arguments):
        if path.name == "energy_uj":
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *arguments)

    monkeypatch.setattr(Path, "read_text", read_text)
    assert find_packages(root) == []
    file = root / "intel-rapl:0/energy_uj"
    assert f"energy is not measured: only root may read {file}; chmod a+r allows it" in capsys.readouterr().out


class Nvml:
    """A library with one board, which has used 1.5 J more at each reading."""

    code, millijoules = 0, 10_000

    def nvmlInit_v2(self):
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid, handle):
        return 0 if uuid == b"GPU-1234" else 6

    def nvmlDeviceGetTotalEnergyConsumption(self, handle, millijoules):
        self.millijoules += 1500
        millijoules._obj.value = self.millijoules
        return self.code


def on_gpu(monkeypatch, vendor, **properties: Any):
    monkeypatch.setattr(devices, "vendor", lambda: vendor)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: SimpleNamespace(**properties))


def test_nvml_counts_the_board_that_torch_names(monkeypatch):
    library = Nvml()
    monkeypatch.setattr(ctypes, "CDLL", {"libnvidia-ml.so.1": library}.__getitem__)
    on_gpu(monkeypatch, "nvidia", uuid="1234")
    meter = EnergyMeter(find_counters(3))
    meter.take()
    assert meter.take() == (1500, 0)
    library.code = 3  # not supported
    assert meter.take() == (0, 1)
    assert find_counters(0) == []
    library.code = 0
    on_gpu(monkeypatch, "nvidia", uuid="a MIG slice")
    assert find_counters(0) == []


def test_without_nvml_or_amdsmi_nothing_is_measured(monkeypatch):
    monkeypatch.setitem(sys.modules, "amdsmi", None)
    monkeypatch.setattr(devices, "accelerator", lambda: "MI250")

    def missing(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    for vendor in ("nvidia", "amd"):
        on_gpu(monkeypatch, vendor, uuid="1234", pci_domain_id=0, pci_bus_id=1, pci_device_id=0)
        assert find_counters(0) == []


@pytest.mark.parametrize("key", ["energy_accumulator", "power"])
def test_amdsmi_counts_the_card_in_the_slot_that_torch_names(monkeypatch, key):
    class AmdSmiException(Exception):
        pass

    count = {key: 1_000_000, "counter_resolution": 15.3}

    def handle_at(place):
        if place != "0000:c1:00.0":
            raise AmdSmiException(place)
        return place

    names = {
        "AmdSmiException": AmdSmiException,
        "amdsmi_init": lambda: None,
        "amdsmi_get_processor_handle_from_bdf": handle_at,
        "amdsmi_get_energy_count": lambda handle: dict(count),
    }
    monkeypatch.setitem(sys.modules, "amdsmi", SimpleNamespace(**names))
    monkeypatch.setattr(devices, "accelerator", lambda: "MI250")
    on_gpu(monkeypatch, "amd", pci_domain_id=0, pci_bus_id=0xC1, pci_device_id=0)
    meter = EnergyMeter(find_counters(1))
    meter.take()
    count[key] += 1_000_000
    assert meter.take() == (15_300, 0)
    on_gpu(monkeypatch, "amd", pci_domain_id=0, pci_bus_id=0xC2, pci_device_id=0)
    assert find_counters(0) == []
    on_gpu(monkeypatch, "amd", pci_domain_id=0, pci_bus_id=0xC1, pci_device_id=0)
    monkeypatch.setattr(devices, "accelerator", lambda: None)
    assert find_counters(0) == [], "a partition of the card"


# ------------------------------------------------------------------------------------------------------ a real run


class FiveJoulesABatch(Callback):
    """A package that uses 5 J in each batch, and 300 J in each of an evaluation's: it wraps around more than once."""

    def fit_start(self, state, logger):
        energy.POWERCAP = Path(f"powercap-{state.run_name}")
        if this_rank().local_rank == 0:
            write_zones(energy.POWERCAP, {"intel-rapl:0": "package-0"})
            use(energy.POWERCAP, "intel-rapl:0", 990)  # wraps around in batch 3
        (agreement,) = (one.agreement for one in state.callbacks if isinstance(one, Checkpointing))
        agreement.meter = EnergyMeter(find_counters(this_rank().local_rank), clock=lambda: 0.0)

    def batch_start(self, state, logger):
        if this_rank().local_rank == 0:
            use(energy.POWERCAP, "intel-rapl:0", 5)

    def eval_batch_start(self, state, logger):
        if this_rank().local_rank == 0:
            use(energy.POWERCAP, "intel-rapl:0", 300)


@pytest.mark.multiprocess
def test_runs_on_one_and_two_ranks_log_their_energy(tmp_path, capsys):
    data = write_data(tmp_path / "data")
    callbacks = {"python:llmfoundry_ops.tests.test_energy:FiveJoulesABatch": {}}
    config = tiny_config(data, max_duration="8ba", eval_interval="4ba", callbacks=callbacks)
    for name, num_ranks in (("one", 1), ("two", 2)):
        train([write_config(tmp_path / f"{name}.yaml", {**config, "run_name": name})], tmp_path, num_ranks).check()
        joules = values(read_metrics(tmp_path / "runs" / name), "energy/joules")
        num_eval_batches = {1: 10, 2: 5}[num_ranks]  # 37 rows, 4 a batch and rank
        assert joules == [5.0] * 4 + [5.0 + 300 * num_eval_batches] + [5.0] * 3
    runs, out = [str(tmp_path / "runs" / name) for name in ("one", "two")], tmp_path / "out"
    command = ["report", *runs, "--out", str(out), "--price", "cpu=0.5"]
    assert main.run(command) == 0
    one, two = (run["total"] for run in json.loads((out / "report.json").read_text())["runs"])
    assert (one["energy_kwh"] * 3.6e6, two["energy_kwh"] * 3.6e6) == pytest.approx((3040, 1540))
    assert one["joules_per_token"] == pytest.approx(3040 / (8 * 8 * 32))
    assert two["cost"] == pytest.approx(two["hours"])
    printed = capsys.readouterr().out
    assert " measured " in printed and "measured: kWh by the devices' counters" in printed and "rated:" not in printed
