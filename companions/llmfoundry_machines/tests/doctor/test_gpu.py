"""The examination of a machine with GPUs: sound ones pass, and faults on a GPU are found there."""

import pytest
import torch

from llmfoundry_machines.doctor import speed
from llmfoundry_machines.doctor.examine import examine
from llmfoundry_machines.doctor.finding import CheckOptions, Status
from llmfoundry_machines.tests.findings import QUICK, by_name

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.multiprocess,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
EVERY_GPU = range(torch.cuda.device_count())


@pytest.mark.parametrize("quick", [True, False])
def test_a_sound_machine_passes(tmp_path, quick):
    found = by_name(examine(CheckOptions(folder=tmp_path, quick=quick)))
    failed = {name: finding.detail for name, finding in found.items() if finding.status is Status.FAIL}
    assert not failed
    measured = {"host to device", "device to host", "memory copy", "gemm rate bf16", "devices", "device memory free"}
    assert measured | {f"memory cuda:{index}" for index in EVERY_GPU} <= set(found)
    assert found["host to device"].value > 1 and found["gemm rate bf16"].value > 1


def test_a_flipped_bit_in_the_memory_of_a_gpu_is_found(monkeypatch):
    real = torch.Tensor.copy_

    def copy(chunk: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        real(chunk, values)
        chunk[1000] ^= 1 << 17
        return chunk

    monkeypatch.setattr(torch.Tensor, "copy_", copy)
    found = by_name(speed.check_memory(QUICK))
    assert set(found) == {f"memory cuda:{index}" for index in EVERY_GPU}
    assert all("byte 0x1f40 bits 0x0000000000020000" in finding.detail for finding in found.values())


def test_a_gpu_that_multiplies_in_tf32_is_found(monkeypatch):
    real = torch.matmul

    def multiply(a_mk: torch.Tensor, b_kn: torch.Tensor) -> torch.Tensor:
        torch.backends.cuda.matmul.allow_tf32 = True
        try:
            return real(a_mk, b_kn)
        finally:
            torch.backends.cuda.matmul.allow_tf32 = False

    if torch.version.hip or torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("this GPU has no TF32")
    monkeypatch.setattr(torch, "matmul", multiply)
    found = by_name(speed.check_gemm(QUICK))
    assert found["gemm fp32"].status is Status.FAIL and "TF32 although" in found["gemm fp32"].detail
