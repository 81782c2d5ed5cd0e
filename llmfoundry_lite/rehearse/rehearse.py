"""Rehearse a run without its hardware: one rank's real code, on devices that are not there.

Owns the request, the child process and its end. Leaves what is replaced to `child.py`, what is measured to
`measure.py`, the words to `report.py`. No torch is imported here.
"""

import dataclasses
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llmfoundry_lite import preflight
from llmfoundry_lite.config.layout import layout_of
from llmfoundry_lite.config.load_train import load_train_config
from llmfoundry_lite.config.schema import TrainConfig
from llmfoundry_lite.errors import EXIT_BUG, EXIT_DONE, ConfigError
from llmfoundry_lite.hardware import Accelerator
from llmfoundry_lite.rehearse.build import NAME, build_library
from llmfoundry_lite.rehearse.device import describe_device, find_device
from llmfoundry_lite.rehearse.report import Rehearsal, describe

CUDA_RELEASE = 13000
"""As CUDA counts, until torch says its own."""


def rehearse(
    arguments: Sequence[str],
    *,
    num_devices: int,
    per_node: int = 8,
    ranks: Sequence[int] = (0,),
    num_batches: int = 2,
    hardware: str | None = None,
) -> int:
    """Rehearse `ranks` in turn and print what was measured. Returns the exit code: 0, or that of the first that fails.

    Raises ConfigError for what can be refused before anything starts.
    """
    device = find_device(arguments, hardware)
    config = load_train_config(arguments).config
    if num_devices > per_node and num_devices % per_node:
        nearest = [n for n in (num_devices // per_node * per_node, -(-num_devices // per_node) * per_node) if n]
        raise ConfigError(
            f"--devices: {num_devices} are no whole number of nodes of {per_node}; the nearest counts are "
            f"{' and '.join(map(str, nearest))} (--per-node says how many a node has)"
        )
    preflight.check(config, layout_of(config, num_devices, per_node), must_exist=False)
    for rank in ranks:
        if not 0 <= rank < num_devices:
            raise ConfigError(f"--rank: {rank} given, expected 0 to {num_devices - 1}")
    library = build_library()
    for rank in ranks:
        code, rehearsal = rehearse_rank(
            arguments, config, device, library, rank, num_devices, min(per_node, num_devices), num_batches
        )
        if rehearsal is None:
            return code
        print(describe(rehearsal), flush=True)
    return EXIT_DONE


def rehearse_rank(
    arguments: Sequence[str],
    config: TrainConfig,
    device: Accelerator,
    library: Path,
    rank: int,
    num_devices: int,
    per_node: int,
    num_batches: int,
) -> tuple[int, Rehearsal | None]:
    """(exit code, what was measured), None if the run refused or failed; its own line is on standard error then."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="rehearse-", ignore_cleanup_errors=True) as folder:
        result = Path(folder) / "result.json"
        request = {
            "arguments": list(arguments),
            "folder": folder,
            "result": str(result),
            "parent": os.getpid(),
            "num_batches": num_batches,
            "per_node": per_node,
            "world_size": num_devices,
        }
        path = Path(folder) / "request.json"
        path.write_text(json.dumps(request))
        environment = {
            **os.environ,
            **describe_device(device, per_node, cuda_release()),
            "LD_PRELOAD": " ".join(filter(None, [str(library / NAME), os.environ.get("LD_PRELOAD")])),
            "TRITON_LIBCUDA_PATH": str(library),
            "TRITON_CACHE_DIR": f"{folder}/triton",
            "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
            "TORCH_CUDA_EXPANDABLE_SEGMENTS_IPC": "0",  # would ask NVIDIA's management library
            "RANK": str(rank),
            "WORLD_SIZE": str(num_devices),
            "LOCAL_RANK": str(rank % per_node),
            "LOCAL_WORLD_SIZE": str(per_node),
            "NODE_RANK": str(rank // per_node),
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": "29999",
        }
        command = [sys.executable, "-m", "llmfoundry_lite.rehearse.child", str(path)]
        child = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
        try:
            code = child.wait()
        finally:
            child.kill()
            child.wait()
        if code or not result.is_file():
            return code if code > 0 else EXIT_BUG, None
        found: dict[str, Any] = json.loads(result.read_text())
    rehearsal = Rehearsal(
        config=dataclasses.replace(config, device_train_microbatch_size=found["microbatch_size"]),
        device=device,
        rank=rank,
        num_devices=num_devices,
        per_node=per_node,
        wall_seconds=time.monotonic() - began,
        **{field.name: found[field.name] for field in dataclasses.fields(Rehearsal) if field.name in found},
    )
    return EXIT_DONE, rehearsal


def cuda_release() -> int:
    """As CUDA counts: 13000 for 13.0, of the release that torch was built for."""
    for name in ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu12"):
        try:
            major, minor, *_ = importlib.metadata.version(name).split(".")
            return int(major) * 1000 + int(minor) * 10
        except importlib.metadata.PackageNotFoundError:
            continue
    return CUDA_RELEASE
