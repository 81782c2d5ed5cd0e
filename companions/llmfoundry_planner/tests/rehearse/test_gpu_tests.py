"""Tests marked `gpu`, on a device that is not there: eager and compiled code run, and nothing is said about numbers.

Left out, because they are about numbers alone: `tests/doctor` (memory that must keep what is written),
`test_resume_exactly` (states that must be equal), `an offloaded optimizer` (the host computes with gradients that
nobody has computed, and its save is refused).
"""

import os
import re
import subprocess
import sys

import pytest

from llmfoundry_lite.hardware import ACCELERATORS
from llmfoundry_planner.rehearse.build import build_library
from llmfoundry_planner.rehearse.device import describe_device
from llmfoundry_planner.rehearse.fork_server import cuda_release, preload
from tests.helpers.launch import ROOT

FILES = ["tests/test_gpu.py", "tests/evaluation/test_scoring.py"]


@pytest.mark.long
def test_tests_of_a_gpu_run_where_there_is_none(tmp_path):
    caches = {"TRITON_CACHE_DIR": f"{tmp_path}/triton", "TORCHINDUCTOR_CACHE_DIR": f"{tmp_path}/inductor"}
    facts = describe_device(ACCELERATORS["H100-80GB"], 1, cuda_release())
    result = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "llmfoundry_planner.tests.without_numbers"),
            *("-k", "not offloaded", "--durations=8", f"--basetemp={tmp_path}/tests", *FILES),
        ],
        cwd=ROOT,
        env={**os.environ, **preload(build_library()), **facts, **caches, "TORCHINDUCTOR_COMPILE_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert re.search(r"\d\d passed, .*deselected", result.stdout) and "skipped" not in result.stdout
    assert any((tmp_path / "triton").rglob("*.cubin")) or any((tmp_path / "inductor").rglob("*.cubin"))
