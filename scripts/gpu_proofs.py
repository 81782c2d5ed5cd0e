"""The table "verified on", from the proofs that `gpu_check.py` leaves on each machine. No torch.

    python scripts/gpu_check.py verified benchmarks/results/verified/*.json

Failures are listed below the table.
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llmfoundry_lite.bounded import read_json
from llmfoundry_lite.errors import ConfigError, printable
from llmfoundry_lite.tables import Table

FORMAT = 1
COLUMNS = ("device", "software", "commit, date", "part", "found")
RIGHT_WAYS = {"passed", "skipped"}


def describe_proofs(paths: Sequence[Path]) -> list[str]:
    """Return lines of Markdown: a row for each file, then everything that did not pass.

    Raises ConfigError for a file that the script has not written.
    """
    proofs = sorted((read_proof(path) for path in paths), key=lambda proof: (proof["device"], proof["part"]))
    rows = [describe(proof) for proof in proofs]
    lines = Table("", COLUMNS, rows, right=(), num_keys=4).markdown()
    failures = [line for proof in proofs for line in list_failures(proof)]
    failures += compare_data(proofs)
    return [*lines, "", *(f"- {line}" for line in failures or ["Nothing failed."])]


def read_proof(path: Path) -> dict[str, Any]:
    """Read one file. Raises ConfigError if it is missing or not of this format."""
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
    count = f"{proof['num_devices']} x " if proof.get("num_devices", 0) > 1 else ""
    build = f"torch {proof['torch']}" + (f", driver {proof['driver']}" if proof.get("driver") else "")
    counts = Counter(test["outcome"] for test in proof.get("tests", {}).values())
    found = [", ".join(f"{number} {outcome}" for outcome, number in sorted(counts.items()))] if counts else []
    found += [*sum_up_speed(proof), *sum_up_runs(proof)]
    runs = proof.get("exact", {})
    if first := runs.get("whole"):
        equal = ", ".join(name for name, run in runs.items() if run == first and name != "whole")
        found.append(f"{len(first['digests'])} batches with exact sums; bit-equal: {equal or 'none'}")
    found += [f"left out: {text}" for text in proof.get("left_out", [])]
    commit = f"{proof.get('commit') or 'unknown'}, {proof['date']}"
    return [count + proof["device"], build, commit, proof["part"], printable("; ".join(found) or "nothing")]


def sum_up_speed(proof: dict[str, Any]) -> list[str]:
    """Return each model's fastest step, with the rate of its matrix products and the prediction, and its memory."""
    steps = [row for row in proof.get("mfu", []) if row["flops_per_sec"] and row["step"] != "matrix products"]
    found = []
    for shape in dict.fromkeys(row["shape"] for row in steps):
        best = max((row for row in steps if row["shape"] == shape), key=lambda row: row["flops_per_sec"])
        text = f"{shape} {best['flops_per_sec'] / 1e12:.3g} TFLOP/s ({best['step']})"
        if best["share_of_products"] is not None:
            text += f", {best['share_of_products']:.0%} of its products"
        if best["share_of_peak"] is not None:
            predicted = best.get("predicted_share_of_peak")
            text += f", MFU {best['share_of_peak']:.1%}" + (f" (predicted {predicted:.1%})" if predicted else "")
        found.append(text)
    for row in proof.get("memory", []):
        if not row["error"]:
            found.append(f"memory of {row['model']}: rehearsed {row['rehearsed_bytes'] / row['real_bytes'] - 1:+.1%}")
    return found


SAME = "the same run"
"""Word of `benchmarks switch` for a run that moving has not changed."""


def sum_up_runs(proof: dict[str, Any]) -> list[str]:
    """Return the results of switching, of a save and a restore, of energy, and of evaluation beside lm_eval."""
    found = []
    if switch := proof.get("switch"):
        sound, verdicts = ("switching", "untouched"), switch["verdicts"]
        caught = sum(words.startswith("caught") for name, words in verdicts.items() if name not in sound)
        ratios = [f"{name} {switch['ratios'][name]:.2f}" for name in sound if name in verdicts]
        text = f"{switch['num_batches']} batches in {switch['precision']}, switching every {switch['every']}: "
        words = verdicts["switching"]
        text += words if words == SAME else f"NOT {SAME}: switching is {words}"
        found.append(f"{text} (of the band: {', '.join(ratios)}), {caught} controls caught")
    save = proof.get("checkpoint", {})
    if save.get("bytes") and save.get("durable_seconds"):
        size, seconds = save["bytes"] / 1e9, save["durable_seconds"]
        rate, stall = size / seconds, save["stall_seconds"]
        text = (
            f"{save['model']}: saved {size:.2f} GB in {seconds:.1f} s ({rate:.2f} GB/s), training waited {stall:.1f} s"
        )
        if seconds := save.get("restore_seconds"):
            text += f"; restored in {seconds:.1f} s ({size / seconds:.2f} GB/s)"
        found.append(text)
    if price := save.get("deterministic_price"):
        found.append(f"deterministic kernels: a step takes {price:.2f} times as long")
    if (energy := proof.get("energy")) and energy["seconds"] and energy["tokens"]:
        watts, each = energy["joules"] / energy["seconds"], 1e3 * energy["joules"] / energy["tokens"]
        found.append(f"energy of {save.get('model')}: {watts:.0f} W, {each:.2g} mJ a token")
    if (evaluation := proof.get("evaluation")) and evaluation["suites"]:
        suites = evaluation["suites"].values()
        num_items, differ = len(suites) * evaluation["num_items"], sum(suite["num_different"] for suite in suites)
        apart = max(suite["largest_difference_nats"] for suite in suites)
        found.append(f"beside lm_eval: {differ} of {num_items} items decided otherwise, at most {apart:.0e} nats apart")
    return found


def list_failures(proof: dict[str, Any]) -> list[str]:
    where = f"{proof['device']}, {proof['part']}"
    found = [f"{where}: {printable(text)}" for text in proof["problems"]]
    for name, test in proof.get("tests", {}).items():
        if test["outcome"] not in RIGHT_WAYS:
            found.append(f"{where}: `{name}`: {test['outcome']}. {printable(test.get('why', ''))}".rstrip())
    errors = [(f"{row['shape']}, {row['step']}", row["error"]) for row in proof.get("mfu", [])]
    errors += [(row["model"], row["error"]) for row in proof.get("memory", [])]
    return found + [f"{where}: {name}: {printable(error)}" for name, error in errors if error]


def compare_data(proofs: Sequence[dict[str, Any]]) -> list[str]:
    """Report whether any machine read other data: the digests of the same 20 batches must be the same everywhere."""
    runs = [(proof["device"], run["digests"]) for proof in proofs for run in proof.get("exact", {}).values()]
    return [f"{device}: has read other data than {runs[0][0]}" for device, digests in runs if digests != runs[0][1]]
