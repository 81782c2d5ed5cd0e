"""Samples of up to 65,536 tokens, and stages of a trillion parameters: rehearsed, beside the estimate.

python -m benchmarks large --out results      half an hour on two cores, without a GPU
"""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from llmfoundry_machines.bench.frame import Column, describe_conditions, tabulate, tell

LONG = "mpt-7b {0} --devices 16 max_seq_len={1} model.max_seq_len={1} global_train_batch_size=16 "
LONG += "device_train_microbatch_size=1 model.attn_config.alibi=true model.attn_config.attn_uses_sequence_id=true "
LONG += "train_loader.dataset.eos_token_id=0 cp_config.context_parallel_degree={2}"
WAYS = [(32768, "8 by heads", "8"), (65536, "8 by heads", "8"), (65536, "8 by gathering", "8 cp_config.kind=gather")]
WAYS += [(65536, "4 by heads, 2 parts of a layer", "4 tp_config.tensor_parallel_degree=2")]
STAGES = {"first of 64 stages": 0, "middle of 64 stages": 1536, "last of 64 stages": 3071}
TRILLION = "mpt-1t mi250-4 mpt-1t-3072x64gb --hardware mi250x --devices 3072 --rank {}"
CASES = {
    f"mpt-7b, {overlay}, {tokens:,} tokens divided by {way}": LONG.format(overlay, tokens, options)
    for overlay in ("h100-8", "mi300x-8")
    for tokens, way, options in WAYS
} | {f"mpt-1t, {stage}": TRILLION.format(rank) for stage, rank in STAGES.items()}
COLUMNS: list[Column] = [("run", "{run}"), ("date", "{date}"), ("seconds", "{seconds}")]
COLUMNS += [(f"{name}, GiB", f"{{{name}}}") for name in ("allocated", "reserved", "estimate")]
HOW = "Memory is of the fullest moment of two batches on one rank. AMD's is rehearsed on NVIDIA's runtime and kernels."
MEASURED = r"in (?P<seconds>\d+) s\n.*allocated (?P<allocated>[\d.]+), reserved (?P<reserved>[\d.]+),"
MEASURED += r".*estimate (?P<estimate>[\d.]+ \([-+.\d]+%\))"


def run(max_seconds: float = 600, out: Path | None = None) -> dict[str, Any]:
    """Rehearse all cases but those that large.json in `out` has already, each for `max_seconds` at most."""
    report, path = describe_conditions(), (out or Path()) / "large.json"
    before = json.loads(path.read_text())["rows"] if out and path.is_file() else []
    rows = {row["run"]: row for row in before if "error" not in row}
    for name, command in CASES.items():
        if name not in rows:
            rows[name] = {"run": name, "date": report["date"]} | rehearse(command, max_seconds)
    report["rows"] = [rows[name] for name in CASES]
    commands = [f"{name}: `llmfoundry-lite rehearse {command}`" for name, command in CASES.items()]
    table, heading = tabulate("", COLUMNS, report["rows"]), "Large runs and long samples, rehearsed"
    tell(report, HOW, table, commands, name="large", heading=heading, command="python -m benchmarks large", out=out)
    return report


def rehearse(command: str, max_seconds: float) -> dict[str, Any]:
    """Return what the rehearsal prints, or its error."""
    words = [sys.executable, "-m", "llmfoundry_lite", "rehearse", *command.split()]
    try:
        ended = subprocess.run(words, capture_output=True, text=True, timeout=max_seconds, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"no end after {max_seconds:.0f} s"}
    found = re.search(MEASURED, ended.stdout, re.DOTALL)
    return found.groupdict() if found else {"error": ended.stderr.strip().splitlines()[-1]}
