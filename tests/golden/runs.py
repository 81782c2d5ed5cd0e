"""Twelve kinds of small runs: loss, norm and data of every batch, and the tensors of the last checkpoint."""

import json
import os
import socket
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.golden.lab import CASES, Lab, digest, split

ISLANDS = ("a", "b")
COORDINATOR_LOG = "coordinator.txt"  # lies with the island that comes first
PASSING = ("throughput/", "memory/", "time/batch_seconds", "time/elapsed", "time/remaining", "checkpoint/")
"""Metrics that say how fast the machine was."""


def train(lab: Lab, name: str, num_ranks: int, *arguments: str, **environment: str) -> None:
    given = ("base.yaml", f"run_name={name}", *arguments)
    if num_ranks == 1 or lab.has("llmfoundry_ops"):
        ranks = ("-n", num_ranks, "--max-restarts", 0) if num_ranks > 1 else ()
        lab.check("train", *ranks, *given, **environment)
        return
    logs = lab.folder / "runs" / name / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    ranks = ("-n", num_ranks, *("--stdout", f"{logs}/rank{{rank}}.txt", "--stderr", f"{logs}/rank{{rank}}.txt"))
    lab.check(*ranks, "-m", "llmfoundry_lite.launch_train", *given, module="composer.cli.launcher")


def need_run(lab: Lab, name: str) -> None:
    """`runs/NAME`, trained unless it is there."""
    lab.need_data()
    lab.need_yaml()
    lab.once(f"run-{name}", lambda: make_run(lab, name))


def make_run(lab: Lab, name: str) -> None:
    if name in CASES["runs"]:
        num_ranks, *changes = split(CASES["runs"][name])
        train(lab, name, int(num_ranks), *changes)
    elif name in CASES["halves"]:
        first, second = CASES["halves"][name]
        train(lab, name, first, "autoresume=true", "stop_after=2ba")
        train(lab, name, second, "autoresume=true")
    else:
        make_islands(lab, name)


def make_islands(lab: Lab, name: str) -> None:
    """One row for each island, whatever their speed, so that the division is the same every time."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    common = [f"islands.coordinator=127.0.0.1:{port}", "islands.begin_with=2", f"save_folder=runs/{name}/checkpoints"]
    sizes = ["global_train_batch_size=2", "device_train_microbatch_size=1"]
    token = {"LLMFOUNDRY_LITE_ISLANDS_TOKEN": "golden" * 6}

    def island(own: str) -> None:
        train(lab, name, 1, *common, *sizes, f"islands.name={own}", **token)

    with ThreadPoolExecutor(len(ISLANDS)) as pool:
        list(pool.map(island, ISLANDS))


# ---------------------------------------------------------------------------------------------- what is recorded


def jobs(lab: Lab) -> dict[str, Callable[[], dict[str, Any]]]:
    names = [*CASES["runs"], *CASES["halves"], "islands"]
    return {name: lambda name=name: record_run(lab, name) for name in names}


def record_run(lab: Lab, name: str) -> dict[str, Any]:
    need_run(lab, name)
    folder = lab.folder / "runs" / name
    logs = {"": folder} if name != "islands" else {f"/{own}": folder / own for own in ISLANDS}
    found: dict[str, Any] = {}
    for suffix, log in logs.items():
        for key, values in read_metrics(log / "metrics.jsonl").items():
            found[f"{name}{suffix}/{key}"] = values
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != COORDINATOR_LOG]
    found[f"{name}/files"] = sorted(plain_name(path, folder) for path in files)
    newest = max((folder / "checkpoints").glob("ba*"), key=lambda path: int(path.name[2:]))
    found[f"{name}/tensors"] = read_tensors(newest)
    return found


def plain_name(path: Path, folder: Path) -> str:
    name = str(path.relative_to(folder))
    return f"{os.path.dirname(name)}/LOG" if "/log/" in name else name


def read_metrics(path: Path) -> dict[str, list[Any]]:
    """By metric, what stands in the last line of each batch; numbers in full."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    records = [record for _, record in sorted({line["batch"]: line for line in lines}.items())]
    keys = sorted(
        {key for record in records for key in record if not key.startswith(PASSING) and not key.endswith("_seconds")}
    )
    return {key: [in_full(record.get(key)) for record in records] for key in keys}


def in_full(value: Any) -> Any:
    return value.hex() if isinstance(value, float) else value


def read_tensors(checkpoint: Path) -> dict[str, str]:
    """A digest of each tensor's type, slices and bytes, read without the product: shards are plain safetensors."""
    slices: dict[str, list[tuple[list[int], str, list[int], bytes]]] = {}
    for path in sorted(checkpoint.glob("*.safetensors")):
        content = path.read_bytes()
        (length,) = struct.unpack("<Q", content[:8])
        for key, entry in json.loads(content[8 : 8 + length]).items():
            if key.startswith("__"):  # metadata and tables of hashes, no tensors
                continue
            tensor, _, offset = key.rpartition("@")
            begin, end = (8 + length + at for at in entry["data_offsets"])
            start = [int(number) for number in offset.split(",") if number]
            slices.setdefault(tensor, []).append((start, entry["dtype"], entry["shape"], content[begin:end]))
    found = {}
    for tensor, parts in sorted(slices.items()):
        parts.sort(key=lambda part: part[0])
        shapes = "+".join("x".join(map(str, shape)) for _, _, shape, _ in parts)
        found[tensor] = f"{parts[0][1]} {shapes} {digest(b''.join(part[3] for part in parts))}"
    return found
