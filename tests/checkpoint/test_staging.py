"""The host memory that a save is copied to: of the size that is asked for, told to the driver, given back."""

from types import SimpleNamespace

import psutil
import pytest
import torch

from llmfoundry_lite.checkpoint.local_folder import DIRECT_BYTES
from llmfoundry_lite.checkpoint.staging import aligned_memory

ODD = (64 << 20) + 12_345


class Driver:
    """Pins what it is told to, or refuses."""

    def __init__(self, refusal: int = 0):
        self.refusal, self.pinned = refusal, dict[int, int]()

    def register(self, address: int, num_bytes: int, flags: int) -> int:
        if not self.refusal:
            self.pinned[address] = num_bytes
        return self.refusal

    def unregister(self, address: int) -> int:
        del self.pinned[address]
        return 0


@pytest.fixture
def drive(monkeypatch):
    def drive(driver: Driver) -> None:
        runtime = SimpleNamespace(cudaHostRegister=driver.register, cudaHostUnregister=driver.unregister)
        monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)

    return drive


def resident_bytes() -> int:
    return psutil.Process().memory_info().rss


def test_pinned_memory_is_as_large_as_asked_for_and_is_given_back(drive):
    """torch's own would be 128 MiB here, and stay."""
    driver = Driver()
    drive(driver)
    before = resident_bytes()
    memory = aligned_memory(ODD, pinned=True)
    assert memory.nbytes == ODD and memory.data_ptr() % DIRECT_BYTES == 0
    assert driver.pinned == {memory.data_ptr(): ODD}
    memory.fill_(7)
    assert resident_bytes() - before > 0.9 * ODD
    part = memory[3:]
    del memory
    assert driver.pinned and int(part[-1]) == 7
    del part
    assert not driver.pinned and resident_bytes() - before < 0.5 * ODD


def test_a_driver_that_refuses_leaves_pageable_memory(drive):
    driver = Driver(refusal=304)
    drive(driver)
    memory = aligned_memory(ODD, pinned=True)
    assert int(memory.fill_(3)[-1]) == 3 and not driver.pinned


def test_nothing_is_pinned_where_there_is_nothing_to_copy(drive):
    driver = Driver()
    drive(driver)
    assert not aligned_memory(0, pinned=True).numel() and not driver.pinned
