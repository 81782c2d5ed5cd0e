"""Whole rehearsals: the run's own code on devices that are not there."""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from llmfoundry_lite.cli.main import run
from tests.helpers.launch import ROOT

pytestmark = pytest.mark.slow

RUN = ["rehearse", "yamls/pretrain/mpt-125m.yaml", "yamls/hardware/h100-8.yaml", "--devices", "8"]


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch):
    monkeypatch.chdir(ROOT)


def test_a_small_model_on_a_node_is_measured_beside_its_estimate(capfd):
    before = set(Path(tempfile.gettempdir()).glob("rehearse-*"))
    assert run([*RUN, "device_train_microbatch_size=8"]) == 0
    text = capfd.readouterr().out
    found = re.search(r"allocated ([\d.]+), reserved ([\d.]+), of 78.40 GiB .*\n +estimate ([\d.]+)", text)
    assert found, text
    allocated, reserved, estimate = map(float, found.groups())
    assert allocated <= reserved
    assert allocated - 0.01 <= estimate <= 1.05 * allocated
    assert "flash, of scaled_dot_product_attention" in text
    assert "all_gather bfloat16, 8 ranks within a node" in text
    assert "reduce_scatter float32, 8 ranks within a node" in text
    waits = re.findall(r"host waits +(\S+?):?\d*: (\d+) in a batch", text)
    assert waits == [("llmfoundry_lite/training/gradients.py", "1")], "of four microbatches"
    assert set(Path(tempfile.gettempdir()).glob("rehearse-*")) <= before


def test_out_of_memory_is_the_allocators_own_and_one_line(capfd):
    options = ["--hardware", "A100-40GB", "device_train_microbatch_size=32", "model.n_layers=32"]
    assert run([*RUN, *options]) == 2
    text = capfd.readouterr().err
    assert text.count("\n") == 1
    assert "out of memory on rank 0 in batch 1" in text and "of 39.20 GiB in use" in text


def test_a_tensor_on_the_wrong_device_is_refused(capfd):
    assert run([*RUN, "callbacks={'python:tests.rehearse.mistakes:AddsHostTensor': {}}", "model.n_layers=2"]) == 1
    assert "Expected all tensors to be on the same device" in capfd.readouterr().err


def test_a_rehearsal_that_is_killed_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    command = [sys.executable, "-m", "llmfoundry_lite.cli.main", *RUN, "device_train_microbatch_size=8"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as parent:
        children = []
        while parent.poll() is None and not children:
            children = [child for child in psutil.Process(parent.pid).children() if is_rehearsing(child)]
        assert children and list(tmp_path.glob("rehearse-*"))
        parent.kill()
    psutil.wait_procs(children, timeout=120)
    assert not list(tmp_path.glob("rehearse-*"))


def is_rehearsing(process: psutil.Process) -> bool:
    try:
        return "llmfoundry_lite.rehearse.child" in process.cmdline()
    except psutil.NoSuchProcess:
        return False
