"""Where to measure and how: every device that torch sees or the CPU, and clocks for both."""

import time
from collections.abc import Callable

import torch

from llmfoundry_lite.devices import device_type


def all_devices() -> list[torch.device]:
    if device_type() == "cpu":
        return [torch.device("cpu")]
    return [torch.device("cuda", index) for index in range(torch.cuda.device_count())]


def measure_seconds(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Of one `work()`, the fastest of `repeats`, by the device's own clock; one more goes before, unmeasured."""
    work()
    if device.type == "cpu":
        return min(_seconds(work) for _ in range(repeats))
    seconds = []
    with torch.cuda.device(device):
        for _ in range(repeats):
            began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            began.record()
            work()
            ended.record()
            ended.synchronize()
            seconds.append(began.elapsed_time(ended) / 1e3)
    return min(seconds)


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
