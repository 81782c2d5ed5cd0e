"""The table "verified on", from the proofs that `gpu_check.py` leaves on each machine. No torch.

    python scripts/gpu_check.py verified benchmarks/results/verified/*.json

A proof is the JSON file that one part of the check has written on one machine. The table has a row for each, and below
it stands everything that failed. `describe_proofs` is the entry.
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llmfoundry_lite.bounded import read_json
from llmfoundry_lite.errors import ConfigError, printable
from llmfoundry_lite.tables import Table

FORMAT = 1
"""Format of the files that this release reads."""
COLUMNS = ("device", "software", "commit, date", "part", "found")
GOOD_OUTCOMES = {"passed", "skipped"}
"""Outcomes of a test that are not failures."""
SAME = "the same run"
"""Verdict of `benchmarks switch` for a run that moving has not changed."""
UNCHANGED_RUNS = ("switching", "untouched")
"""Runs of `benchmarks switch` that must be the same. The others are controls, with a fault on purpose."""


def describe_proofs(paths: Sequence[Path]) -> list[str]:
    """Return lines of Markdown: a table with a row for each file, then a list of everything that failed.

    Raises ConfigError for a file that `gpu_check.py` of this release has not written.
    """
    proofs = [read_proof(path) for path in paths]
    proofs.sort(key=lambda proof: (proof["device"], proof["part"]))
    rows = [describe(proof) for proof in proofs]
    table = Table("", COLUMNS, rows, right=(), num_keys=4)

    failures: list[str] = []
    for proof in proofs:
        failures += list_failures(proof)
    failures += compare_data(proofs)
    if not failures:
        failures.append("Nothing failed.")
    return [*table.markdown(), "", *(f"- {failure}" for failure in failures)]


def read_proof(path: Path) -> dict[str, Any]:
    """Return the JSON of one file. Raises ConfigError if it cannot be read, or is not a finished proof of FORMAT."""
    try:
        proof = read_json(path, "a proof")
    except (OSError, ValueError) as error:
        raise ConfigError(f"verified: {path} cannot be read ({error}); name files of scripts/gpu_check.py") from None
    needed = {"format", "part", "device", "torch", "date", "problems"}
    if not isinstance(proof, dict) or not needed <= proof.keys() or proof["format"] != FORMAT:
        raise ConfigError(
            f"verified: {path} is not a proof of format {FORMAT}; name files that scripts/gpu_check.py of this "
            "release has written to their end"
        )
    return proof


def describe(proof: dict[str, Any]) -> list[str]:
    """Return the row of one proof, with the cells of COLUMNS."""
    device = proof["device"]
    if proof.get("num_devices", 0) > 1:
        device = f"{proof['num_devices']} x {device}"
    software = f"torch {proof['torch']}"
    if proof.get("driver"):
        software += f", driver {proof['driver']}"

    findings: list[str] = []
    num_tests = Counter(test["outcome"] for test in proof.get("tests", {}).values())
    if num_tests:
        findings.append(", ".join(f"{number} {outcome}" for outcome, number in sorted(num_tests.items())))
    findings += sum_up_speed(proof)
    findings += sum_up_runs(proof)

    # With exact sums, runs that stop and go on, or have two ranks, must equal the one that trained as a whole.
    exact_runs = proof.get("exact", {})
    whole_run = exact_runs.get("whole")
    if whole_run:
        equal_runs = [name for name, run in exact_runs.items() if run == whole_run and name != "whole"]
        num_batches = len(whole_run["digests"])
        findings.append(f"{num_batches} batches with exact sums; bit-equal: {', '.join(equal_runs) or 'none'}")

    findings += [f"left out: {text}" for text in proof.get("left_out", [])]
    commit = f"{proof.get('commit') or 'unknown'}, {proof['date']}"
    return [device, software, commit, proof["part"], printable("; ".join(findings) or "nothing")]


def sum_up_speed(proof: dict[str, Any]) -> list[str]:
    """Return a finding for each model that was timed, about its fastest step, and for each whose memory was rehearsed.

    Example: `1b 400 TFLOP/s (compiled), 62% of its products, MFU 40.4% (predicted 41.0%)`.
    """
    steps = [row for row in proof.get("mfu", []) if row["flops_per_sec"] and row["step"] != "matrix products"]
    findings = []
    for shape in dict.fromkeys(row["shape"] for row in steps):  # each once, in the order of the file
        steps_of_shape = [row for row in steps if row["shape"] == shape]
        fastest = max(steps_of_shape, key=lambda row: row["flops_per_sec"])
        finding = f"{shape} {fastest['flops_per_sec'] / 1e12:.3g} TFLOP/s ({fastest['step']})"
        if fastest["share_of_products"] is not None:
            finding += f", {fastest['share_of_products']:.0%} of its products"
        if fastest["share_of_peak"] is not None:
            finding += f", MFU {fastest['share_of_peak']:.1%}"
            predicted_share = fastest.get("predicted_share_of_peak")
            if predicted_share:
                finding += f" (predicted {predicted_share:.1%})"
        findings.append(finding)

    for row in proof.get("memory", []):
        if not row["error"]:
            excess = row["rehearsed_bytes"] / row["real_bytes"] - 1
            findings.append(f"memory of {row['model']}: rehearsed {excess:+.1%}")
    return findings


def sum_up_runs(proof: dict[str, Any]) -> list[str]:
    """Return findings about whole runs: switching, a save and a restore, energy, and evaluation beside lm_eval.

    A part of the check makes only some of them; the others are left out.
    """
    findings = []
    switch = proof.get("switch")
    if switch:
        findings.append(describe_switch(switch))

    save = proof.get("checkpoint", {})
    if save.get("bytes") and save.get("durable_seconds"):
        gigabytes = save["bytes"] / 1e9
        save_seconds = save["durable_seconds"]
        finding = (
            f"{save['model']}: saved {gigabytes:.2f} GB in {save_seconds:.1f} s "
            f"({gigabytes / save_seconds:.2f} GB/s), training waited {save['stall_seconds']:.1f} s"
        )
        restore_seconds = save.get("restore_seconds")
        if restore_seconds:
            finding += f"; restored in {restore_seconds:.1f} s ({gigabytes / restore_seconds:.2f} GB/s)"
        findings.append(finding)
    slowdown = save.get("deterministic_price")
    if slowdown:
        findings.append(f"deterministic kernels: a step takes {slowdown:.2f} times as long")

    energy = proof.get("energy")
    if energy and energy["seconds"] and energy["tokens"]:
        watts = energy["joules"] / energy["seconds"]
        millijoules_per_token = 1e3 * energy["joules"] / energy["tokens"]
        findings.append(f"energy of {save.get('model')}: {watts:.0f} W, {millijoules_per_token:.2g} mJ a token")

    evaluation = proof.get("evaluation")
    if evaluation and evaluation["suites"]:
        suites = evaluation["suites"].values()
        num_items = len(suites) * evaluation["num_items"]
        num_different = sum(suite["num_different"] for suite in suites)
        largest_difference = max(suite["largest_difference_nats"] for suite in suites)
        findings.append(
            f"beside lm_eval: {num_different} of {num_items} items decided otherwise, "
            f"at most {largest_difference:.0e} nats apart"
        )
    return findings


def describe_switch(switch: dict[str, Any]) -> str:
    """Return the finding of `benchmarks switch`: whether moving changed the run, and how many controls were caught."""
    verdicts = switch["verdicts"]
    num_caught = 0
    for name, verdict in verdicts.items():
        if name not in UNCHANGED_RUNS and verdict.startswith("caught"):
            num_caught += 1
    ratios = [f"{name} {switch['ratios'][name]:.2f}" for name in UNCHANGED_RUNS if name in verdicts]
    verdict = verdicts["switching"]
    if verdict != SAME:
        verdict = f"NOT {SAME}: switching is {verdict}"
    return (
        f"{switch['num_batches']} batches in {switch['precision']}, switching every {switch['every']}: {verdict} "
        f"(of the band: {', '.join(ratios)}), {num_caught} controls caught"
    )


def list_failures(proof: dict[str, Any]) -> list[str]:
    """Return a line for each problem of the check itself, each test that did not pass, and each measurement's error."""
    source = f"{proof['device']}, {proof['part']}"
    failures = [f"{source}: {printable(problem)}" for problem in proof["problems"]]
    for name, test in proof.get("tests", {}).items():
        if test["outcome"] not in GOOD_OUTCOMES:
            failures.append(f"{source}: `{name}`: {test['outcome']}. {printable(test.get('why', ''))}".rstrip())
    for row in proof.get("mfu", []):
        if row["error"]:
            failures.append(f"{source}: {row['shape']}, {row['step']}: {printable(row['error'])}")
    for row in proof.get("memory", []):
        if row["error"]:
            failures.append(f"{source}: {row['model']}: {printable(row['error'])}")
    return failures


def compare_data(proofs: Sequence[dict[str, Any]]) -> list[str]:
    """Return a line for each run that read other data than the first one.

    All machines train the same 20 batches with exact sums, so the batches' digests must be the same everywhere.
    """
    failures = []
    first_device = first_digests = None
    for proof in proofs:
        for run in proof.get("exact", {}).values():
            if first_digests is None:
                first_device, first_digests = proof["device"], run["digests"]
            if run["digests"] != first_digests:
                failures.append(f"{proof['device']}: has read other data than {first_device}")
    return failures
