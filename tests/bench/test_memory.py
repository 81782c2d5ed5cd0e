"""The table of `bench memory`: what a run of it replaces, and what it leaves."""

import pytest

from llmfoundry_lite.bench.memory import read_report, write_report
from llmfoundry_lite.hardware import GIB


def row(model: str, overlays: list[str], num_devices: int, gib: float = 1.0):
    rehearsed = {"allocated_bytes": gib * GIB}
    return {
        "model": model,
        "overlays": overlays,
        "num_devices": num_devices,
        "microbatch_size": 1,
        "error": "",
        "num_parameters": 1,
        "estimated_bytes": 1.02 * gib * GIB,
        "rehearsed": rehearsed,
    }


@pytest.mark.parametrize(
    ("new", "left"),
    [
        (row("mpt-1b", ["h100-8"], 8, 2.0), 2),
        (row("mpt-1b", ["a100-80gb-8", "h100-8"], 8, 2.0), 2),
        (row("mpt-1b", ["h100-8"], 16, 2.0), 3),
        (row("mpt-1b", ["a100-80gb-8"], 8, 2.0), 3),
        (row("mpt-3b", ["h100-8"], 8, 2.0), 3),
    ],
)
def test_a_row_replaces_those_of_the_same_model_overlay_and_count(tmp_path, new, left):
    write_report([row("mpt-1b", ["h100-8", "h200-8"], 8), row("mpt-1b", ["h100-8", "h200-8"], 1024)], tmp_path)
    write_report([new], tmp_path)
    rows = read_report(tmp_path)
    assert len(rows) == left and new in rows
    assert (tmp_path / "memory.md").read_text().count("| 2.00 | 2.04 | +2.0% |") == 1
