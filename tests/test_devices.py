"""Memory that a step has freed serves the next one."""

import platform
import subprocess
import sys

import pytest

FAULTS = """
import resource, sys, torch
from llmfoundry_lite.devices import keep_freed_memory

if sys.argv[1] == "kept":
    keep_freed_memory()
for _ in range(2):
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.zeros(48 << 20, dtype=torch.uint8)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's malloc")
def test_a_second_tensor_of_a_size_costs_no_page_faults():
    page_faults = {}
    for word in ("kept", "returned"):
        command = [sys.executable, "-c", FAULTS, word]
        page_faults[word] = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert page_faults["kept"] < 100 < page_faults["returned"]
