"""Leases on a run's folder: numbered claims, of which the highest may write. No torch.

A claim is the creation of `.leases/<number>.json`, which must not exist yet. A holder that does not find its own
content there any more has lost the disk.

While a holder lives it counts in `.leases/<number>.renewed.json`, and when it ends it says there that the lease is
released. Whether a holder on this machine lives, its process tells. For one on another machine, a launch that wants the
lease watches the count by its own monotonic clock; no wall clocks are compared.
"""

import contextlib
import re
import socket
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llmfoundry_lite.checkpoint.folder import Folder
from llmfoundry_lite.errors import CheckpointError, DamagedCheckpointError, TransientError
from llmfoundry_lite.ranks.codec import EXACT_IN_A_DOUBLE, parse_json, write_json
from llmfoundry_lite.ranks.identity import describe_this_process, lives, pid_namespace

FOLDER = ".leases"
NUM_KEPT = 8
"""A listing may miss a file created while it is read; with several left it still finds a high number."""
MAX_BYTES = 1 << 16
MAX_EPOCH = EXACT_IN_A_DOUBLE
"""A save's manifest records the epoch of its lease as a JSON number, and readers accept no larger one."""
CLAIM = re.compile(r"\.?([0-9]+)(\.renewed)?\.json(\..*)?")
"""File name of a claim, of its renewals, or of either whose writer was killed."""
RENEWAL_SECONDS = 10.0
"""Time between two renewals by the holder of a lease."""
WATCH_SECONDS = 3 * RENEWAL_SECONDS
"""Time without a renewal after which a holder on another machine counts as dead."""
LOOK_SECONDS = 0.5
"""Time between two looks of a launch that watches."""
NOTE_SECONDS = 5.0
"""Time between two lines that say how long a launch has watched."""
RELEASE_SECONDS = 2.0
"""Longest wait of a launch that ends for its release to be written."""


@dataclass(frozen=True, slots=True)
class Lease:
    """A numbered claim to write."""

    epoch: int
    owner: dict[str, Any]
    """`describe_this_process`, and a name that no other claim has; empty if it cannot be read."""


@dataclass(frozen=True, slots=True)
class Holder(Lease):
    """The highest claim, and what its holder has said since."""

    renewals: int | None = None
    """None: it has renewed nothing yet."""
    is_released: bool = False

    @property
    def state(self) -> str:
        """Text that changes with each claim and each renewal."""
        return f"{self.epoch} {self.owner.get('claim')} {self.renewals}"

    def describe(self) -> str:
        """Return `host gpu-17, process 4242`, with the run if the claim names it."""
        owner = self.owner
        text = f"host {owner.get('host', 'unknown')}, process {owner.get('pid', 'unknown')}"
        return f"{text}, run {owner['run']}" if owner.get("run") else text


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRequest:
    """How a launch asks for a lease."""

    run_name: str = ""
    takes_over: bool = False
    """Take the lease from a holder on another machine without watching it."""
    note: Callable[[str], None] = lambda line: None
    """Called with each line for the user while this launch watches the holder."""
    watched: str = ""
    """`Holder.state` of a holder that `wait_until_free` has watched in vain before."""


class Leases:
    """The claims in a run's folder. Whoever has the highest number may write."""

    def __init__(self, root: Folder):
        self.url = root.url
        self.folder = root.child(FOLDER)
        self._seen_epoch: int | None = None
        """The claim that this process has made, or has seen once."""

    def wait_until_free(self, request: LeaseRequest) -> str:
        """Return when the lease may be taken: at once if it was released or its process on this machine is gone, and
        after WATCH_SECONDS if a holder on another machine renews nothing. Returns that holder's `state`, else "".

        Raises CheckpointError if the holder lives, OSError of the disk.
        """
        while True:
            holder = self.holder()
            if holder is None or holder.is_released:
                return ""
            is_alive = is_alive_here(holder.owner)
            if is_alive:
                raise CheckpointError(
                    f"{self.url}: process {holder.owner.get('pid')} on this machine is saving here; stop it, or "
                    "give this run another save_folder"
                )
            if is_alive is False or holder.state == request.watched:
                return holder.state
            if request.takes_over:
                request.note(f"takeover: this launch takes {self.url} from {holder.describe()}")
                return holder.state
            news = self._watch(holder, request.note)
            if news is None:
                return holder.state
            is_same_claim = (news.epoch, news.owner) == (holder.epoch, holder.owner)
            if is_same_claim and not news.is_released:  # so it has renewed
                raise CheckpointError(
                    f"{self.url}: another launch trains this run now ({holder.describe()}); stop it there, or give "
                    "this run another save_folder; takeover=true ends that launch and carries on here"
                )

    def _watch(self, holder: Holder, note: Callable[[str], None]) -> Holder | None:
        """Watch until something changes, and return the holder then; None if nothing does within WATCH_SECONDS."""
        began = time.monotonic()
        noted_at = began - NOTE_SECONDS
        while (seconds := time.monotonic() - began) < WATCH_SECONDS:
            if time.monotonic() - noted_at >= NOTE_SECONDS:
                noted_at = time.monotonic()
                note(
                    f"{self.url}: {holder.describe()} held this run and has not renewed its lease for {seconds:.0f} s "
                    f"of {WATCH_SECONDS:.0f}"
                )
            time.sleep(LOOK_SECONDS)
            news = self.holder()
            if news is not None and (news.state != holder.state or news.is_released):
                return news
        return None

    def acquire(
        self, *, at_least: int, steal_from_live_writer: bool = False, request: LeaseRequest | None = None
    ) -> Lease:
        """Claim the next number. Raises CheckpointError if the holder lives, unless the lease is to be stolen, as
        `wait_until_free` does, or if the next number is above MAX_EPOCH; OSError of the disk. Only this creates the
        folder: if it is missing later, it has vanished."""
        request = request or LeaseRequest()
        owner = describe_this_process() | {"claim": uuid.uuid4().hex}
        if request.run_name:
            owner["run"] = request.run_name
        while True:
            if not steal_from_live_writer:
                self.wait_until_free(request)
            self.folder.make(with_parents=True)
            epoch = max(self.highest() + 1, at_least)
            if epoch > MAX_EPOCH:
                raise CheckpointError(
                    f"{self.url}: the next lease would be number {epoch}, which no launch makes and no checkpoint can "
                    f"record; remove {FOLDER}/{epoch - 1}.json, or the checkpoint that has this number"
                )
            try:
                self.folder.put(_name(epoch), write_json(owner), only_if_new=True)
                self._seen_epoch = epoch
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
        """Raise CheckpointError if there is a higher number, or if this claim is absent or not as it was made; OSError
        if the folder cannot be read. An absent one may come back, as `check_is_seen` says."""
        highest = self.highest()
        if highest > lease.epoch:
            holder = Holder(highest, {})
            with contextlib.suppress(OSError):
                holder = self.holder() or holder
            raise CheckpointError(
                f"{self.url}: another launch ({holder.describe()}) has taken this run over; this one may not save any "
                "more, and ends"
            )
        try:
            found = self.folder.read(_name(lease.epoch), MAX_BYTES)
        except FileNotFoundError:
            raise self._vanished(lease.epoch) from self._cause_of_absence(lease.epoch)
        if found != write_json(lease.owner):
            raise self._vanished(lease.epoch) from None

    def check_is_seen(self, epoch: int) -> None:
        """Raise CheckpointError unless this process sees the claim that rank 0 has made. If it has seen it before, on a
        disk, the error may pass: the disk can be mounted again, and until then nothing is written."""
        if not self.folder.child(_name(epoch)).exists():
            raise self._vanished(epoch) from self._cause_of_absence(epoch)
        self._seen_epoch = epoch

    def _cause_of_absence(self, epoch: int) -> TransientError | None:
        """Return a cause that may pass if the claim was seen on a disk; None otherwise. A bucket does not come back
        with what was removed from it, and a node that has never seen the claim has another disk."""
        if self.folder.path_here is None or self._seen_epoch != epoch:
            return None
        return TransientError(f"{self.folder.path_here} has vanished")

    def _vanished(self, epoch: int) -> CheckpointError:
        why = "the disk may have been unmounted, or is not shared by all nodes"
        remedy = "mount it, or give this run another save_folder"
        if self.folder.path_here is None:
            why = "somebody may have removed the folder"
            remedy = "give this run another save_folder, or start it again from there"
        return CheckpointError(
            f"{self.url}: host {socket.gethostname()} does not find this launch's lease ({FOLDER}/{_name(epoch)}) any "
            f"more; {why}. Nothing was written there; {remedy}"
        )

    def holder(self) -> Holder | None:
        """Return the highest claim; None if there is none. Raises OSError."""
        epoch = self.highest()
        if not epoch:
            return None
        owner = self._read(_name(epoch))
        said = self._read(_renewals_name(epoch))
        if said.get("claim") != owner.get("claim"):  # the renewals of an earlier claim that had this number
            said = {}
        renewals = said.get("renewals")
        return Holder(epoch, owner, renewals if isinstance(renewals, int) else None, said.get("released") is True)

    def renew(self, lease: Lease, renewals: int, *, is_released: bool = False) -> None:
        """Write that the holder has renewed its lease that many times. Raises OSError."""
        content = {"claim": lease.owner.get("claim"), "renewals": renewals, "released": is_released}
        self.folder.put(_renewals_name(lease.epoch), write_json(content))

    def release(self, lease: Lease) -> None:
        """Let another launch take the lease at once. Raises OSError."""
        self.renew(lease, 0, is_released=True)

    def highest(self) -> int:
        return max((epoch for name in self.folder.names() if (epoch := _epoch(name)) is not None), default=0)

    def _read(self, name: str) -> dict[str, Any]:
        """Return a file's content; empty if it is absent or cannot be understood."""
        with contextlib.suppress(FileNotFoundError, IsADirectoryError, DamagedCheckpointError):
            content = parse_json(self.folder.read(name, MAX_BYTES), FOLDER)
            return content if isinstance(content, dict) else {}
        return {}


class Renewals:
    """Renews a lease from a background thread until it is released.

    A renewal that fails is left out: the next one may succeed, and training neither waits for it nor ends by it.
    """

    def __init__(self, leases: Leases, lease: Lease):
        self._leases = leases
        self._lease = lease
        self._is_over = threading.Event()
        self._releases = False
        self._thread = threading.Thread(target=self._run, name="lease-renewals", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        renewals = 0
        while not self._is_over.is_set():
            with contextlib.suppress(OSError, CheckpointError):
                self._leases.renew(self._lease, renewals)
            renewals += 1
            self._is_over.wait(RENEWAL_SECONDS)
        if self._releases:  # in this thread, so that no late renewal can follow it
            with contextlib.suppress(OSError, CheckpointError):
                self._leases.renew(self._lease, renewals, is_released=True)

    def stop(self) -> None:
        """End the thread and leave the lease as it is: another launch has to watch it."""
        self._is_over.set()

    def release(self) -> None:
        """Let another launch take the lease at once. Waits for RELEASE_SECONDS at most."""
        self._releases = True
        self._is_over.set()
        self._thread.join(RELEASE_SECONDS)


def is_alive_here(owner: dict[str, Any]) -> bool | None:
    """Return whether a lease's owner is another process that runs; None if it is not for this machine to tell.

    Another machine may have the same host name, and another container of this machine the same process ids.
    """
    here = describe_this_process()
    if all(owner.get(key) == here[key] for key in ("boot", "namespace", "pid", "started")):
        return False  # this very process
    if type(owner.get("pid")) is not int:
        return None
    if here["boot"] is None or owner.get("boot") is None:  # without /proc: the id may belong to another process by now
        return False if lives(owner) is False else None
    if owner["boot"] != here["boot"]:
        return None
    return lives({"namespace": pid_namespace(), **owner})


def _name(epoch: int) -> str:
    return f"{epoch:08d}.json"


def _renewals_name(epoch: int) -> str:
    return f"{epoch:08d}.renewed.json"


def _epoch(name: str) -> int | None:
    return int(name[:-5]) if re.fullmatch(r"[0-9]+\.json", name) else None
