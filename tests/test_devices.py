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
layers = torch.nn.Sequential(torch.nn.Linear(64, 2048), torch.nn.GELU(), torch.nn.Linear(2048, 64))
for step in range(20):
    if step == 10:
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    layers(torch.ones(4096, 64)).sum().backward()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults)
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's malloc")
def test_a_step_like_the_one_before_costs_hardly_a_page_fault():
    page_faults = {}
    for word in ("kept", "returned"):
        command = [sys.executable, "-c", FAULTS, word]
        page_faults[word] = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert page_faults["kept"] < 0.1 * page_faults["returned"]
