"""`bench memory`: which sizes it takes, and what it writes; the device and the rehearsal are stand-ins."""

import json
from contextlib import nullcontext

import pytest

from llmfoundry_lite.hardware import ACCELERATORS
from llmfoundry_machines.bench import memory


@pytest.mark.parametrize(("most", "size"), [(8, 8), (4, 4), (1, 1)])
def test_a_microbatch_is_as_large_as_fits_and_no_larger_than_asked(monkeypatch, tmp_path, most, size):
    bytes_ = {"allocated_bytes": 1, "reserved_bytes": 1}
    row = {"model": "mpt-1b", "estimated_bytes": 1, "real": bytes_, "rehearsed": bytes_, "error": ""}
    monkeypatch.setattr(memory, "accelerator", lambda: ACCELERATORS["H100-80GB"])
    monkeypatch.setattr(memory, "ForkServer", nullcontext)
    monkeypatch.setattr(memory, "compare", lambda *case: row | {"microbatch_size": case[-1], "arguments": case[2]})
    assert memory.run(["mpt-1b"], most=most, out=tmp_path) == 0
    report = json.loads((tmp_path / "memory.json").read_text())
    assert {row["microbatch_size"] for row in report["rows"]} == {size} and report["left_out"] == []
    assert f"device_train_microbatch_size={size}" in report["rows"][0]["arguments"]


def test_models_that_have_no_time_are_named(monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "accelerator", lambda: ACCELERATORS["H100-80GB"])
    monkeypatch.setattr(memory, "ForkServer", nullcontext)
    assert memory.run(["mpt-1b"], minutes=0, out=tmp_path) == 0
    report = json.loads((tmp_path / "memory.json").read_text())
    assert report["left_out"] == ["mpt-1b", "mpt-1b ALiBi", "mpt-1b compiled"] and report["rows"] == []
