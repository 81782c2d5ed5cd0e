"""/dev/shm: is it large enough, and what have dead runs left in it?"""

import os
import pwd
from collections import Counter
from collections.abc import Iterator

from llmfoundry_lite.data import shared_memory
from llmfoundry_lite.doctor.finding import Finding, Machine, Status
from llmfoundry_lite.hardware import GIB

ENOUGH_BYTES = GIB
"""Containers get 64 MiB unless told otherwise, with which loader workers and NCCL end in bus errors."""
NAME = "leftovers of runs"


def check(machine: Machine) -> Iterator[Finding]:
    if not shared_memory.SHARED_MEMORY.is_dir():
        yield Finding(check="/dev/shm", status=Status.SKIP, detail=f"no {shared_memory.SHARED_MEMORY} here")
        return
    yield _check_size()
    yield _check_leftovers()


def _check_size() -> Finding:
    usage = os.statvfs(shared_memory.SHARED_MEMORY)
    total, free = usage.f_blocks * usage.f_frsize, usage.f_bavail * usage.f_frsize
    if total < ENOUGH_BYTES:
        problem, fix = "too small for loader workers and NCCL", "docker run --ipc=host (or --shm-size=16g)"
    elif free < ENOUGH_BYTES:
        problem, fix = "almost full", f"see whose it is (ls -l {shared_memory.SHARED_MEMORY}) and remove what is dead"
    else:
        problem, fix = "", ""
    return Finding(
        check="/dev/shm",
        status=Status.WARN if problem else Status.PASS,
        value=free / GIB,
        unit="GiB free",
        detail="; ".join(filter(None, (f"of {total / GIB:,.2f} GiB", problem))),
        fix=fix,
    )


def _check_leftovers() -> Finding:
    stale = shared_memory.find_stale_shared_memory()
    if stale is None:
        detail = "processes that cannot be looked into may be using what is there"
        return Finding(check=NAME, status=Status.SKIP, detail=detail)
    owners: Counter[int] = Counter()
    ours = []
    for path in sorted(stale):
        try:
            uid = path.stat().st_uid
        except FileNotFoundError:
            continue
        owners[uid] += 1
        if uid == os.geteuid():
            ours.append(str(path))
    if not owners:
        detail = "blocks and locks that no living run has"
        return Finding(check=NAME, status=Status.PASS, value=0, unit="files", detail=detail)
    fixes = []
    if ours:
        fixes.append(f"your next run removes yours; or: rm {' '.join(ours)}")
    if owners.total() > len(ours):
        fixes.append("the next run of each other owner removes theirs")
    return Finding(
        check=NAME,
        status=Status.WARN,
        value=owners.total(),
        unit="files",
        detail="left by killed runs: " + ", ".join(f"{count} of {_user(uid)}" for uid, count in owners.items()),
        fix="; ".join(fixes),
    )


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"
