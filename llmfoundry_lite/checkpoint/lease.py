"""Leases on a run's folder: numbered claims, of which the highest may write. No torch.

A claim is the creation of `.leases/<number>.json`, which must not exist yet. A holder that does not find its own
content there any more has lost the disk.
"""

import contextlib
import os
import re
import socket
import uuid
from dataclasses import dataclass
from typing import Any

from llmfoundry_lite.checkpoint.folder import Folder
from llmfoundry_lite.errors import CheckpointError, DamagedCheckpointError
from llmfoundry_lite.ranks.codec import parse_json, write_json
from llmfoundry_lite.ranks.identity import describe_this_process, lives, pid_namespace

FOLDER = ".leases"
NUM_KEPT = 8
"""A listing may miss a file created while it is read; with several left it still finds a high number."""
MAX_BYTES = 1 << 16
CLAIM = re.compile(r"\.?([0-9]{1,18})\.json(\..*)?")
"""File name of a claim, or of a claim whose writer was killed."""


@dataclass(frozen=True, slots=True)
class Lease:
    """A numbered claim to write."""

    epoch: int
    owner: dict[str, Any]
    """`describe_this_process`, and a name that no other claim has; empty if it cannot be read."""


class Leases:
    """The claims in a run's folder. Whoever has the highest number may write."""

    def __init__(self, root: Folder):
        self.url = root.url
        self.folder = root.child(FOLDER)

    def acquire(self, *, at_least: int, steal_from_live_writer: bool = False) -> Lease:
        """Claim the next number. Raises CheckpointError if the holder still runs on this machine, unless the lease is
        to be stolen; OSError of the disk. Only this creates the folder: if it is missing later, it has vanished."""
        holder = self.holder()
        if holder is not None and not steal_from_live_writer and is_other_live_process(holder.owner):
            raise CheckpointError(
                f"{self.url}: process {holder.owner.get('pid')} on this machine is saving here; stop it, or "
                "give this run another save_folder"
            )
        owner = describe_this_process() | {"claim": uuid.uuid4().hex}
        self.folder.make(with_parents=True)
        while True:
            epoch = max(self.highest() + 1, at_least)
            if _epoch(_name(epoch)) is None:  # no one would see this claim, and the next launch would take it again
                raise CheckpointError(
                    f"{self.url}: the last launch there has number {epoch - 1}, which no launch can have; remove "
                    f"{FOLDER}/{_name(epoch - 1)}, or the checkpoint that says so"
                )
            try:
                self.folder.put(_name(epoch), write_json(owner), only_if_new=True)
                break
            except FileExistsError:
                at_least = epoch + 1  # a listing may show this claim late or never
        for name in self.folder.names():
            claim = CLAIM.fullmatch(name)
            if claim is not None and int(claim[1]) <= epoch - NUM_KEPT:
                with contextlib.suppress(OSError):  # the lease is taken
                    self.folder.remove(name)
        return Lease(epoch, owner)

    def check(self, lease: Lease) -> None:
        """Raise CheckpointError if there is a higher number, or if this claim is not as it was made; OSError if the
        folder cannot be read."""
        if (highest := self.highest()) > lease.epoch:
            owner = self._owner(highest)
            raise CheckpointError(
                f"{self.url}: another launch of this run ({owner.get('host', 'host unknown')}, process "
                f"{owner.get('pid', 'unknown')}) saves here now; this one may not any more"
            )
        found = None
        with contextlib.suppress(FileNotFoundError):
            found = self.folder.read(_name(lease.epoch), MAX_BYTES)
        if found != write_json(lease.owner):
            raise self._vanished(lease.epoch)

    def check_is_seen(self, epoch: int) -> None:
        """Raise CheckpointError unless this process sees the claim that rank 0 has made."""
        if not self.folder.child(_name(epoch)).exists():
            raise self._vanished(epoch)

    def _vanished(self, epoch: int) -> CheckpointError:
        return CheckpointError(
            f"{self.url}: host {socket.gethostname()} does not find this launch's lease ({FOLDER}/{_name(epoch)}) any "
            "more; the disk may have been unmounted, or is not shared by all nodes. Nothing was written there; mount "
            "it and run the same command again"
        )

    def holder(self) -> Lease | None:
        epoch = self.highest()
        return Lease(epoch, self._owner(epoch)) if epoch else None

    def highest(self) -> int:
        return max((epoch for name in self.folder.names() if (epoch := _epoch(name)) is not None), default=0)

    def _owner(self, epoch: int) -> dict[str, Any]:
        with contextlib.suppress(OSError, DamagedCheckpointError):
            owner = parse_json(self.folder.read(_name(epoch), MAX_BYTES), FOLDER)
            return owner if isinstance(owner, dict) else {}
        return {}


def is_other_live_process(owner: dict[str, Any]) -> bool:
    """Return whether a lease's owner is another process that certainly runs: on this very boot of this machine."""
    pid, namespace = owner.get("pid"), owner.get("namespace", pid_namespace())
    if type(pid) is not int or pid == os.getpid() or owner.get("boot") is None:
        return False
    return lives(owner | {"namespace": namespace}) is True


def _name(epoch: int) -> str:
    return f"{epoch:08d}.json"


def _epoch(name: str) -> int | None:
    # A longer number is no claim: no manifest could hold the next one.
    return int(name[:-5]) if re.fullmatch(r"[0-9]{1,18}\.json", name) else None
