"""The rehearsed device, and what the library that stands in for CUDA must say about it. No torch."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from llmfoundry_lite.errors import ConfigError
from llmfoundry_lite.hardware import ACCELERATORS, Accelerator, find_rows
from llmfoundry_planner.plan.step import accelerator_named

CAPABILITIES = {
    "V100": (7, 0),
    "A100": (8, 0),
    "A10": (8, 6),
    "RTX-4090": (8, 9),
    "L4": (8, 9),
    "H100": (9, 0),
    "H200": (9, 0),
    "B200": (10, 0),
}
"""Beginning of a row's name -> compute capability. Source: NVIDIA, "CUDA GPU Compute Capability"."""

LIMITS = {
    (7, 0): (98304, 98304, 2048),
    (8, 0): (166912, 167936, 2048),
    (8, 6): (101376, 102400, 1536),
    (8, 9): (101376, 102400, 1536),
    (9, 0): (232448, 233472, 2048),
    (10, 0): (232448, 233472, 2048),
}
"""Compute capability -> bytes of shared memory of a block and of a multiprocessor, threads of a multiprocessor.
Source: NVIDIA, CUDA C++ Programming Guide, "Technical Specifications per Compute Capability"."""

PREFERS_CUDNN = ((9, 0), (10, 0))
"""Capabilities for which scaled_dot_product_attention takes cuDNN's kernel first. Source: torch,
`check_prefer_cudnn_attention`."""

AMD_STAND_IN = (9, 0)
"""An AMD device is rehearsed with its own memory on NVIDIA's runtime, as an H100 would be."""


def find_device(arguments: Sequence[str], name: str | None) -> Accelerator:
    """Return the row `name` of the hardware table; without a name, the row that the overlay's name begins.

    Raises ConfigError, which lists the rows, for a name that none has or several have.
    """
    if name is not None:
        return accelerator_named(name)
    # Overlays are files, or names of those that ship.
    files = (text.removeprefix("hardware=") for text in arguments)
    stems = [Path(text).stem for text in files if "=" not in text]
    named = next((stem for stem in reversed(stems) if find_rows(stem)), None)
    if named is None:
        raise ConfigError(
            "rehearse: no overlay is named after a device; add one such as h100-8, or name it with --hardware, one of "
            f"{', '.join(ACCELERATORS)}"
        )
    return accelerator_named(named)


def describe_device(device: Accelerator, num_devices: int, cuda_release: int, spare_bytes: int = 0) -> dict[str, str]:
    """Return the environment of `cuda.c`. `spare_bytes` of the memory are out of reach."""
    capability = find_capability(device)
    block, unit, threads = LIMITS[capability]
    facts = {
        "NAME": device_name(device),
        "DEVICES": num_devices,
        "MEMORY_BYTES": device.free_bytes - spare_bytes,
        "MAJOR": capability[0],
        "MINOR": capability[1],
        "UNITS": device.num_compute_units,
        "SHARED_PER_BLOCK": block,
        "SHARED_PER_UNIT": unit,
        "THREADS_PER_UNIT": threads,
        "CUDA": cuda_release,
    }
    return {f"REHEARSED_{key}": str(value) for key, value in facts.items()}


def find_capability(device: Accelerator) -> tuple[int, int]:
    """Return the compute capability of a row; an AMD device's is that of its stand-in."""
    if device.vendor != "nvidia":
        return AMD_STAND_IN
    return CAPABILITIES[max((name for name in CAPABILITIES if device.name.startswith(name)), key=len)]


def choose_kernels(built_for: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return which of torch's kernels (`sm_80 sm_90` …) the device of `describe_device` would run.

    A device runs those of its own generation that are not newer. Raises ConfigError where there are none.
    """
    version = 10 * int(environment["REHEARSED_MAJOR"]) + int(environment["REHEARSED_MINOR"])
    versions = map(int, re.findall(r"\bsm_(\d+)", built_for))
    kernels = [number for number in versions if number <= version and number // 10 == version // 10]
    if not kernels:
        raise ConfigError(
            f"rehearse: this torch has no kernels for {environment['REHEARSED_NAME']} (sm_{version}): it was built for "
            f"{built_for}; install a torch that has them, or rehearse another device"
        )
    return {"REHEARSED_KERNELS": str(max(kernels))}


def device_name(device: Accelerator) -> str:
    """Return a name that the row's pattern matches: its first alternative, without optional parts."""
    name = re.sub(r"\([^()]*\)\?|.\?", "", device.pattern.split("|")[0])
    assert re.fullmatch(device.pattern, name), device.pattern
    return name
