"""The table "verified on": drawn from proofs, with what failed, and the page has it."""

import json
from typing import Any

import pytest

from scripts import gpu_check
from scripts.gpu_proofs import describe_proofs, read_proof
from tests.helpers.launch import ROOT
from tests.helpers.markdown import section
from tests.helpers.readers import give_brackets, give_pipe

PROOFS = sorted((ROOT / "benchmarks/results/verified").glob("*.json"))
RUN = {"digests": ["a", "b"], "losses": ["0x1p+2", "0x1p+1"]}
STEP = {"microbatch_size": 8, "error": None, "share_of_products": None, "share_of_peak": None}
STEP["predicted_share_of_peak"] = None
H200 = {"device": "NVIDIA H200", "num_devices": 1, "driver": "580.1", "commit": "abc"}
SECONDS = {"stall_seconds": 2.5, "durable_seconds": 20.0, "restore_seconds": 10.0}
KINDS = {
    "tests": {
        "tests": {
            "tests/a.py::one": {"outcome": "passed"},
            "tests/a.py::two": {"outcome": "failed", "why": "assert 1 == 2"},
            "tests/a.py::three": {"outcome": "no time"},
        }
    },
    "speed": {
        "mfu": [
            {**STEP, "shape": "1b", "step": "matrix products", "flops_per_sec": 8e14},
            {**STEP, "shape": "1b", "step": "sdpa, not compiled", "flops_per_sec": 4e14},
            {
                **STEP,
                "shape": "1b",
                "step": "sdpa, compiled",
                "flops_per_sec": 5e14,
                "share_of_products": 0.625,
                "share_of_peak": 0.505,
                "predicted_share_of_peak": 0.45,
            },
            {**STEP, "shape": "125m", "step": "flex, compiled", "flops_per_sec": None, "error": "no time is left"},
        ],
        "memory": [{"model": "mpt-1b", "real_bytes": 100, "rehearsed_bytes": 99, "error": ""}],
    },
    "runs": {
        "switch": {
            "precision": "fp32",
            "num_batches": 40,
            "every": 10,
            "passed": False,
            "ratios": {"switching": 0.5, "untouched": 0.625, "moments": 0.9},
            "verdicts": {
                "switching": "the same run",
                "untouched": "the same run",
                "skipped": "caught by digest, batch 21",
                "moments": "not told apart by the loss",
            },
        },
        "checkpoint": {"model": "1b", "bytes": 16e9, "deterministic_price": 1.5, **SECONDS},
        "energy": {"joules": 2000.0, "seconds": 4.0, "tokens": 400_000},
        "evaluation": {"num_items": 10, "suites": {"ARC": {"num_different": 1, "largest_difference_nats": 2e-5}}},
    },
    "switch": {"exact": {"whole": RUN, "carried on": RUN, "on two ranks": {**RUN, "losses": ["0x1p+2", "0x1p+0"]}}},
}


def write_proof(folder, part, **changes):
    path = folder / f"{part}-{len(list(folder.iterdir()))}.json"
    frame = {"format": 1, "part": part, "torch": "2.11.0", "date": "2026-11-25", "problems": [], "left_out": []}
    path.write_text(json.dumps(frame | H200 | KINDS[part] | changes))
    return path


def test_parts_of_a_machine_are_rows_with_their_failures_below(tmp_path):
    runs, speed, switch, tests, *failures = [
        line for line in describe_proofs([write_proof(tmp_path, part) for part in KINDS])[2:] if line
    ]
    start = "| NVIDIA H200 | torch 2.11.0, driver 580.1 | abc, 2026-11-25 |"
    assert tests == f"{start} tests | 1 failed, 1 no time, 1 passed |"
    assert "1b 500 TFLOP/s (sdpa, compiled), 62% of its products, MFU 50.5% (predicted 45.0%)" in speed
    assert speed.endswith("; memory of mpt-1b: rehearsed -1.0% |")
    assert runs.endswith(
        "runs | 40 batches in fp32, switching every 10: the same run (of the band: switching 0.50, untouched 0.62), 1 "
        "controls caught; 1b: saved 16.00 GB in 20.0 s (0.80 GB/s), training waited 2.5 s; restored in 10.0 s (1.60 "
        "GB/s); deterministic kernels: a step takes 1.50 times as long; energy of 1b: "
        "500 W, 5 mJ a token; beside lm_eval: 1 of 10 items decided otherwise, at most 2e-05 nats "
        "apart |"
    )
    assert switch.endswith("switch | 2 batches with exact sums; bit-equal: carried on |")
    assert failures == [
        "- NVIDIA H200, speed: 125m, flex, compiled: no time is left",
        "- NVIDIA H200, tests: `tests/a.py::two`: failed. assert 1 == 2",
        "- NVIDIA H200, tests: `tests/a.py::three`: no time.",
    ]


def test_a_switch_that_changed_the_run_is_no_control(tmp_path):
    caught = {"switching": "caught by loss, batch 12", "one batch skipped": "caught by digest, batch 41"}
    switch: dict[str, Any] = KINDS["runs"]["switch"]
    switch = switch | {"verdicts": switch["verdicts"] | caught}
    row = describe_proofs([write_proof(tmp_path, "runs", switch=switch)])[2]
    assert "NOT the same run: switching is caught by loss, batch 12 (of the band: " in row
    assert "2 controls caught" in row


def test_a_machine_that_read_other_data_is_named(tmp_path):
    other = {"whole": {**RUN, "digests": ["a", "c"]}}
    paths = [write_proof(tmp_path, "switch"), write_proof(tmp_path, "switch", device="Z", exact=other)]
    assert describe_proofs(paths)[-1] == "- Z: has read other data than NVIDIA H200"
    assert describe_proofs(paths[:1])[-1] == "- Nothing failed."


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot be read"),
        ("[]", "is not a proof of format 1"),
        ('{"format": 2, "part": "tests", "device": "", "torch": "", "date": "", "problems": []}', "is not a proof"),
        ('{"format": 1, "part": "tests"}', "is not a proof of format 1"),
    ],
)
def test_a_file_of_something_else_is_refused(tmp_path, capsys, content, message):
    (tmp_path / "file.json").write_text(content)
    assert gpu_check.main(["verified", str(tmp_path / "file.json")]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["verified"], ["ready", "a.json"]])
def test_files_without_verified_and_the_reverse_are_refused(capsys, arguments):
    with pytest.raises(SystemExit) as left:
        gpu_check.main(arguments)
    assert left.value.code == 2 and "belong together" in capsys.readouterr().err


@pytest.mark.timeout(60)
def test_a_pipe_and_endless_brackets_end_in_no_traceback(tmp_path):
    give_pipe(tmp_path / "pipe.json", read_proof)
    give_brackets(tmp_path / "proof.json", read_proof)


def test_the_page_has_the_table_of_the_proofs_that_are_here():
    assert len(PROOFS) >= 3
    lines = describe_proofs(PROOFS)
    assert "\n".join(lines) in section((ROOT / "docs/hardware.md").read_text(), "Verified on")
