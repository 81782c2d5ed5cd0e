"""What the system lets one process have: open files."""

import resource
from collections.abc import Iterator

from llmfoundry_lite.doctor.finding import Finding, Machine, Status

ENOUGH_FILES = 4096
"""Loader workers hand every tensor over as an open file, a StreamingDataset keeps shards open, ranks their sockets."""


def check(machine: Machine) -> Iterator[Finding]:
    soft, hard = (_or_none(limit) for limit in resource.getrlimit(resource.RLIMIT_NOFILE))
    if soft is None or soft >= ENOUGH_FILES:
        value = "no limit" if soft is None else soft
        yield Finding(check="open files", status=Status.PASS, value=value, detail="of one process")
        return
    if hard is None or hard >= ENOUGH_FILES:
        fix = f"ulimit -n {min(hard or 65536, 65536)}"
    else:
        fix = "raise nofile in /etc/security/limits.conf (containers: --ulimit nofile=65536)"
    detail = f"loader workers and shards may need {ENOUGH_FILES}"
    yield Finding(check="open files", status=Status.WARN, value=soft, detail=detail, fix=fix)


def _or_none(limit: int) -> int | None:
    return None if limit == resource.RLIM_INFINITY else limit
