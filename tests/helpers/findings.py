"""What the doctor finds, and faults on ranks for it to find."""

import os
import signal
from collections.abc import Iterable

import torch
import torch.distributed as dist

from llmfoundry_lite.doctor.finding import Finding, Machine, Status

QUICK = Machine(quick=True)


def by_name(findings: Iterable[Finding]) -> dict[str, Finding]:
    findings = list(findings)
    assert all(finding.fix for finding in findings if finding.status in (Status.WARN, Status.FAIL))
    return {finding.check: finding for finding in findings}


def corrupt_one_element(rank: int) -> None:
    """The last rank's part of a large reduction arrives with one element off by one."""
    real = dist.all_reduce

    def all_reduce(values: torch.Tensor, *arguments, **options):
        if rank == dist.get_world_size() - 1 and len(values) > 1000:
            values[1000] += 1
        return real(values, *arguments, **options)

    dist.all_reduce = all_reduce


def die(rank: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
