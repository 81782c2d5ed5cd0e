"""The device that is rehearsed, and what the library that replaces CUDA must say about it. No torch.

`find_device` chooses a row of the hardware table. `describe_device` returns the environment variables that `cuda.c`
reads, all with the prefix REHEARSED_.
"""

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
"""Compute capability of an H100. An AMD device is rehearsed as an H100 that has the AMD device's memory."""


def find_device(arguments: Sequence[str], name: str | None) -> Accelerator:
    """Return the row of the hardware table that `name` means, or if it is None, the one an overlay is named after.

    Example: the arguments ["mpt-7b", "h100-8", "max_duration=10ba"] mean H100-80GB. The last such overlay counts.
    Raises ConfigError, which lists the rows, if no row or more than one may be meant.
    """
    if name is not None:
        return accelerator_named(name)

    # An overlay is a file or the name of one that ships, perhaps as hardware=NAME. Other arguments are settings.
    for argument in reversed(arguments):
        overlay = argument.removeprefix("hardware=")
        stem = Path(overlay).stem
        if "=" not in overlay and find_rows(stem):
            return accelerator_named(stem)
    raise ConfigError(
        "rehearse: no overlay is named after a device; add one such as h100-8, or name it with --hardware, one of "
        f"{', '.join(ACCELERATORS)}"
    )


def describe_device(device: Accelerator, num_devices: int, cuda_release: int, spare_bytes: int = 0) -> dict[str, str]:
    """Return the environment variables from which `cuda.c` learns what device it is.

    num_devices: devices that it says the machine has.
    cuda_release: release of the CUDA driver that it pretends to be, 13000 for 13.0.
    spare_bytes: memory that it keeps out of the run's reach.
    """
    capability = find_capability(device)
    shared_bytes_per_block, shared_bytes_per_unit, threads_per_unit = LIMITS[capability]
    facts = {
        "NAME": device_name(device),
        "DEVICES": num_devices,
        "MEMORY_BYTES": device.free_bytes - spare_bytes,
        "MAJOR": capability[0],
        "MINOR": capability[1],
        "UNITS": device.num_compute_units,
        "SHARED_PER_BLOCK": shared_bytes_per_block,
        "SHARED_PER_UNIT": shared_bytes_per_unit,
        "THREADS_PER_UNIT": threads_per_unit,
        "CUDA": cuda_release,
    }
    return {f"REHEARSED_{key}": str(value) for key, value in facts.items()}


def find_capability(device: Accelerator) -> tuple[int, int]:
    """Return the compute capability of a device as (major, minor), and AMD_STAND_IN for an AMD device."""
    if device.vendor != "nvidia":
        return AMD_STAND_IN
    matching_names = [name for name in CAPABILITIES if device.name.startswith(name)]
    return CAPABILITIES[max(matching_names, key=len)]  # A100 matches A10 too


def choose_kernels(built_for: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variable that says which of torch's kernels the device runs.

    A device runs kernels of its own major version that are not newer than it. Example: a torch that was built for
    "sm_80 sm_90" runs its sm_80 kernels on a device of capability 8.9, so the result is {"REHEARSED_KERNELS": "80"}.

    built_for: what torch was built for, as its `_cuda_getArchFlags` lists it.
    environment: has the variables of `describe_device`.

    Raises ConfigError if torch has no kernels for the device.
    """
    major = int(environment["REHEARSED_MAJOR"])
    device_version = 10 * major + int(environment["REHEARSED_MINOR"])
    built_versions = [int(digits) for digits in re.findall(r"\bsm_(\d+)", built_for)]
    usable_versions = [version for version in built_versions if 10 * major <= version <= device_version]
    if not usable_versions:
        raise ConfigError(
            f"rehearse: this torch has no kernels for {environment['REHEARSED_NAME']} (sm_{device_version}): it was "
            f"built for {built_for}; install a torch that has them, or rehearse another device"
        )
    return {"REHEARSED_KERNELS": str(max(usable_versions))}


def device_name(device: Accelerator) -> str:
    """Return a name by which the product would recognise the device, one that matches the pattern of its row.

    It is the pattern's first alternative without optional parts: `(NVIDIA )?A100-SXM4-40GB` gives `A100-SXM4-40GB`.
    """
    first_alternative = device.pattern.split("|")[0]
    name = re.sub(r"\([^()]*\)\?|.\?", "", first_alternative)
    assert re.fullmatch(device.pattern, name), device.pattern
    return name
