"""What the system lets one process have: open files."""

import resource
from collections.abc import Iterator

from llmfoundry_lite.doctor.finding import Finding, Machine, Status

ENOUGH_FILES = 4096
"""Loader workers hand every tensor over as an open file, a StreamingDataset keeps shards open, ranks their sockets."""


def check(machine: Machine) -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    endless = soft == resource.RLIM_INFINITY
    enough = endless or soft >= ENOUGH_FILES
    possible = hard == resource.RLIM_INFINITY or hard >= ENOUGH_FILES
    yield Finding(
        check="open files",
        status=Status.PASS if enough else Status.WARN,
        value="no limit" if endless else soft,
        detail="of one process" if enough else f"loader workers and shards may need {ENOUGH_FILES}",
        fix=""
        if enough
        else f"ulimit -n {65536 if hard in (-1,) or hard >= 65536 else hard}"
        if possible
        else "raise `nofile` in /etc/security/limits.conf (containers: --ulimit nofile=65536)",
    )
