"""The table of `python -m benchmarks memory`: what a run of it replaces, and what it leaves."""

import pytest

from benchmarks.memory import measured_before, read_report, run, write_report
from llmfoundry_lite.errors import ConfigError
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


def test_a_rehearsal_that_failed_is_not_kept_for_the_next_time(tmp_path):
    done, failed = row("mpt-1b", ["h100-8"], 8) | {"run": "a"}, row("mpt-1b", ["h100-8"], 16) | {"run": "b"}
    write_report([done, failed | {"error": "error: killed", "rehearsed": {}}], tmp_path)
    assert measured_before(tmp_path) == {"a": done}
    assert len(read_report(tmp_path)) == 2 and "error: killed" in (tmp_path / "memory.md").read_text()
    assert measured_before(None) == {}


def test_counts_that_are_none_are_refused_before_anything_starts():
    with pytest.raises(ConfigError, match=r"^--devices: 'many' given, expected numbers, or smallest$"):
        run(devices=["smallest", "many"])
