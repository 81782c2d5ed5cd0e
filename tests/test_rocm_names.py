"""HIP's names, as ROCm's torch reports them, without its runtime: the vendor, the device's row, no count of devices.

What a GPU alone can show, such as kernels and RCCL, is not here.
"""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from llmfoundry_lite import devices
from tests.helpers.launch import ROOT

IMPORTS = """
import os, sys
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # as `llmfoundry_ops.server` sets it
import torch
torch.version.hip, torch.version.cuda = "7.0.51831", None
sys.modules["amdsmi"] = None  # then torch would count by HIP's runtime, which does not survive a fork
def count():
    raise AssertionError("devices were counted before the fork")
torch._C._cuda_getDeviceCount = count
from llmfoundry_lite.ranks.lean_imports import HEAVY, import_lean
import_lean(*HEAVY)
import llmfoundry_lite.training.train
assert not torch.cuda.is_initialized()
"""


@pytest.fixture
def rocm(monkeypatch):
    """Make torch ROCm's, with the device of this name, compute units and architecture."""

    def be(name, num_compute_units, architecture):
        properties = SimpleNamespace(name=name, multi_processor_count=num_compute_units, gcnArchName=architecture)
        monkeypatch.setattr(torch.version, "hip", "7.0.51831")
        monkeypatch.setattr(torch.version, "cuda", None)
        monkeypatch.setitem(sys.modules, "amdsmi", None)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: name)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: properties)

    return be


@pytest.mark.parametrize(
    ("name", "num_compute_units", "architecture", "row"),
    [
        ("AMD Instinct MI250X / MI250", 110, "gfx90a:sramecc+:xnack-", "MI250X"),
        ("AMD Instinct MI250X / MI250", 104, "gfx90a:sramecc+:xnack-", "MI250"),
        ("AMD Instinct MI250X", 110, "gfx90a:sramecc+:xnack-", "MI250X"),
        ("AMD Instinct MI300X OAM", 304, "gfx942:sramecc+:xnack-", "MI300X"),
        ("AMD Instinct MI300X", 304, "gfx942:sramecc+:xnack-", "MI300X"),
        ("AMD Instinct MI300X OAM", 38, "gfx942:sramecc+:xnack-", None),  # a partition
    ],
)
def test_a_device_of_rocms_torch_is_amds_and_has_its_row(rocm, monkeypatch, name, num_compute_units, architecture, row):
    rocm(name, num_compute_units, architecture)
    found = devices.accelerator()
    assert (found and found.name) == row
    assert (devices.vendor(), devices.runtime_release(), devices.device_type()) == ("amd", "7.0.51831", "cuda")
    monkeypatch.delenv("HIPBLASLT_ALLOW_TF32", raising=False)
    assert not devices.has_tf32()
    monkeypatch.setenv("HIPBLASLT_ALLOW_TF32", "1")
    assert devices.has_tf32() == architecture.startswith("gfx94")


@pytest.mark.slow
def test_the_server_of_ranks_counts_no_device_before_it_forks():
    result = subprocess.run([sys.executable, "-c", IMPORTS], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
