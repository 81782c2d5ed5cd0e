"""Leases on a run's folder: numbered claims, of which the highest may write. No torch.

To claim a lease is to create `.leases/<number>.json`, which must not exist yet. A holder that does not find its own
content there any more has lost the disk.

While a holder lives, it counts its renewals in `.leases/<number>.renewed.json`. When it ends, it records there that the
lease is released. If the holder ran on this machine, its process tells whether it lives. If it ran on another machine,
a launch that wants the lease watches the count for a while by its own monotonic clock. No wall clocks are compared.
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
from llmfoundry_lite.ranks.identity import describe_this_process, is_alive, pid_namespace

FOLDER = ".leases"
NUM_CLAIMS_KEPT = 8
"""A listing may miss a file created while it is read; with several left it still finds a high number."""
MAX_BYTES = 1 << 16
"""The largest file of a claim or of its renewals that is read."""
MAX_EPOCH = EXACT_IN_A_DOUBLE
"""A save's manifest records the epoch of its lease as a JSON number, and readers accept no larger one."""
CLAIM = re.compile(r"\.?([0-9]+)(\.renewed)?\.json(\..*)?")
"""File name of a claim, of its renewals, or of either whose writer was killed."""
RENEWAL_SECONDS = 10.0
"""Time between two renewals by the holder of a lease."""
WATCH_SECONDS = 3 * RENEWAL_SECONDS
"""Time without a renewal after which a holder on another machine counts as dead."""
POLL_SECONDS = 0.5
"""How often a launch that watches a holder reads its renewals."""
NOTE_SECONDS = 5.0
"""How often a launch that watches a holder tells the user so."""
RELEASE_SECONDS = 2.0
"""The longest time that a launch which ends waits for its release to be written."""


@dataclass(frozen=True, slots=True)
class Lease:
    """A numbered claim to write."""

    epoch: int
    """The claim's number."""
    owner: dict[str, Any]
    """The content of the claim's file: `describe_this_process` of the holder, and an id that no other claim has. Empty
    if it cannot be read."""


@dataclass(frozen=True, slots=True)
class Holder(Lease):
    """The highest claim, and what its holder has written since."""

    renewals: int | None = None
    """None: it has renewed nothing yet."""
    is_released: bool = False

    @property
    def activity_id(self) -> str:
        """Text that changes with each claim and with each renewal."""
        return f"{self.epoch} {self.owner.get('claim')} {self.renewals}"

    def describe(self) -> str:
        """Return `host gpu-17, process 4242`, and the run if the claim names it."""
        text = f"host {self.owner.get('host', 'unknown')}, process {self.owner.get('pid', 'unknown')}"
        if self.owner.get("run"):
            text += f", run {self.owner['run']}"
        return text


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRequest:
    """How a launch asks for a lease."""

    run_name: str = ""
    takes_over: bool = False
    """Take the lease from a holder on another machine without watching it first."""
    note: Callable[[str], None] = lambda line: None
    """Called with each line for the user while this launch watches the holder."""
    dead_holder: str = ""
    """Result of `wait_until_free` for a holder that it found dead before. That holder is not watched again, unless
    it has renewed its lease since."""


class Leases:
    """The claims in a run's folder. The launch with the highest number may write."""

    def __init__(self, root: Folder):
        """Use the claims in a run's folder `root`, without reading them."""
        self.url = root.url
        self.folder = root.child(FOLDER)
        self._seen_epoch: int | None = None
        """The claim that this process has made, or has seen once."""

    def wait_until_free(self, request: LeaseRequest) -> str:
        """Wait until the lease may be taken.

        That is at once if there is none, if it is released, or if its holder was a process of this machine that has
        ended. A holder on another machine is watched, and counts as dead if it renews nothing for WATCH_SECONDS.

        Returns the `activity_id` of a holder that was found dead, or "". Raises CheckpointError if the holder lives,
        and OSError.
        """
        while True:
            holder = self.current_holder()
            if holder is None or holder.is_released:
                return ""
            is_alive = is_alive_here(holder.owner)
            if is_alive:
                raise CheckpointError(
                    f"{self.url}: process {holder.owner.get('pid')} on this machine is saving here; stop it, or "
                    "give this run another save_folder"
                )
            if is_alive is False or holder.activity_id == request.dead_holder:
                return holder.activity_id
            if request.takes_over:
                request.note(f"takeover: this launch takes {self.url} from {holder.describe()}")
                return holder.activity_id

            changed = self._watch(holder, request.note)
            if changed is None:
                return holder.activity_id
            is_same_claim = (changed.epoch, changed.owner) == (holder.epoch, holder.owner)
            if is_same_claim and not changed.is_released:  # so it has renewed
                raise CheckpointError(
                    f"{self.url}: another launch trains this run now ({holder.describe()}); stop it there, or give "
                    "this run another save_folder; takeover=true ends that launch and carries on here"
                )
            # Otherwise it has just been released, or another launch was faster. Both are decided anew.

    def _watch(self, holder: Holder, note: Callable[[str], None]) -> Holder | None:
        """Watch a holder until it renews or releases its lease, or another launch claims one.

        Returns the holder then, or None if nothing changes within WATCH_SECONDS. `note` is called with lines for the
        user.
        """
        began = time.monotonic()
        next_note = began
        while True:
            now = time.monotonic()
            if now - began >= WATCH_SECONDS:
                return None
            if now >= next_note:
                next_note = now + NOTE_SECONDS
                note(
                    f"{self.url}: {holder.describe()} held this run and has not renewed its lease for "
                    f"{now - began:.0f} s of {WATCH_SECONDS:.0f}"
                )
            time.sleep(POLL_SECONDS)
            current = self.current_holder()
            if current is not None and (current.activity_id != holder.activity_id or current.is_released):
                return current

    def acquire(
        self, *, at_least: int, steal_from_live_writer: bool = False, request: LeaseRequest | None = None
    ) -> Lease:
        """Claim the next number, or `at_least` if that is higher.

        Waits until the lease is free, as `wait_until_free`, unless `steal_from_live_writer`. This is the only method
        that creates the folder of claims: if the folder is missing later, it has vanished.

        Raises CheckpointError if the holder lives, or if the next number is above MAX_EPOCH; and OSError.
        """
        request = request or LeaseRequest()
        owner = describe_this_process() | {"claim": uuid.uuid4().hex}
        if request.run_name:
            owner["run"] = request.run_name
        while True:
            if not steal_from_live_writer:
                self.wait_until_free(request)
            self.folder.make(with_parents=True)
            epoch = max(self.highest_epoch() + 1, at_least)
            if epoch > MAX_EPOCH:
                raise CheckpointError(
                    f"{self.url}: the next lease would be number {epoch}, which no launch makes and no checkpoint can "
                    f"record; remove {FOLDER}/{epoch - 1}.json, or the checkpoint that has this number"
                )
            try:
                self.folder.put(_claim_name(epoch), write_json(owner), only_if_new=True)
                break
            except FileExistsError:
                at_least = epoch + 1  # a listing may show this claim late or never
        self._seen_epoch = epoch
        self._remove_old_claims(epoch)
        return Lease(epoch, owner)

    def _remove_old_claims(self, epoch: int) -> None:
        """Remove the files of all claims except the NUM_CLAIMS_KEPT that end with `epoch`. The lease is taken already,
        so a file that cannot be removed stays."""
        for name in self.folder.names():
            claim = CLAIM.fullmatch(name)
            if claim is not None and int(claim[1]) <= epoch - NUM_CLAIMS_KEPT:
                with contextlib.suppress(OSError):
                    self.folder.remove(name)

    def check(self, lease: Lease) -> None:
        """Raise CheckpointError if this lease no longer permits to write: another launch has a higher one, or this
        claim is absent or has another content.

        If the claim is absent, the disk may come back, as `check_is_seen` says. Raises OSError if the folder cannot be
        read.
        """
        highest = self.highest_epoch()
        if highest > lease.epoch:
            holder = Holder(highest, {})
            with contextlib.suppress(OSError):
                holder = self.current_holder() or holder
            raise CheckpointError(
                f"{self.url}: another launch ({holder.describe()}) has taken this run over; this one may not save any "
                "more, and ends"
            )
        try:
            content = self.folder.read(_claim_name(lease.epoch), MAX_BYTES)
        except FileNotFoundError:
            raise self._vanished_error(lease.epoch) from self._transient_cause(lease.epoch)
        if content != write_json(lease.owner):
            raise self._vanished_error(lease.epoch) from None

    def check_is_seen(self, epoch: int) -> None:
        """Raise CheckpointError unless this process sees the claim that rank 0 has made.

        If this process has seen the claim before, on a disk, the error is transient: the disk can be mounted again, and
        nothing is written until then.
        """
        if not self.folder.child(_claim_name(epoch)).exists():
            raise self._vanished_error(epoch) from self._transient_cause(epoch)
        self._seen_epoch = epoch

    def _transient_cause(self, epoch: int) -> TransientError | None:
        """Return a cause that makes the error about an absent claim transient, or None if the claim cannot come back.

        It can if this process has seen it on a disk. What was removed from a bucket does not come back, and a node that
        has never seen the claim has another disk.
        """
        if self.folder.path_here is None or self._seen_epoch != epoch:
            return None
        return TransientError(f"{self.folder.path_here} has vanished")

    def _vanished_error(self, epoch: int) -> CheckpointError:
        """Return the error that this process no longer finds the claim of its launch."""
        why = "the disk may have been unmounted, or is not shared by all nodes"
        remedy = "mount it, or give this run another save_folder"
        if self.folder.path_here is None:
            why = "somebody may have removed the folder"
            remedy = "give this run another save_folder, or start it again from there"
        return CheckpointError(
            f"{self.url}: host {socket.gethostname()} does not find this launch's lease "
            f"({FOLDER}/{_claim_name(epoch)}) any more; {why}. Nothing was written there; {remedy}"
        )

    def current_holder(self) -> Holder | None:
        """Return the highest claim and its renewals, or None if there is no claim. Raises OSError."""
        epoch = self.highest_epoch()
        if not epoch:
            return None
        owner = self._read(_claim_name(epoch))
        renewed = self._read(_renewals_name(epoch))
        if renewed.get("claim") != owner.get("claim"):  # the renewals of an earlier claim that had this number
            renewed = {}
        renewals = renewed.get("renewals")
        return Holder(
            epoch, owner, renewals if isinstance(renewals, int) else None, is_released=renewed.get("released") is True
        )

    def renew(self, lease: Lease, renewals: int, *, is_released: bool = False) -> None:
        """Record that the holder has renewed its lease `renewals` times, or that it has released it. Raises OSError."""
        content = {"claim": lease.owner.get("claim"), "renewals": renewals, "released": is_released}
        self.folder.put(_renewals_name(lease.epoch), write_json(content))

    def release(self, lease: Lease) -> None:
        """Let another launch take the lease at once. Raises OSError."""
        self.renew(lease, 0, is_released=True)

    def highest_epoch(self) -> int:
        """Return the number of the highest claim, or 0 if there is none. Raises OSError."""
        epochs = [
            int(name.removesuffix(".json")) for name in self.folder.names() if re.fullmatch(r"[0-9]+\.json", name)
        ]
        return max(epochs, default=0)

    def _read(self, name: str) -> dict[str, Any]:
        """Return the content of a file of claims or renewals; empty if it is absent or is not a JSON object. Raises
        OSError if it cannot be read."""
        with contextlib.suppress(FileNotFoundError, IsADirectoryError, DamagedCheckpointError):
            content = parse_json(self.folder.read(name, MAX_BYTES), FOLDER)
            return content if isinstance(content, dict) else {}
        return {}


class Renewals:
    """Renews a lease from a background thread until `stop` or `release`.

    A renewal that fails is left out: the next one may succeed, and training neither waits for it nor ends by it.
    """

    def __init__(self, leases: Leases, lease: Lease):
        """Start to renew a lease in a background thread."""
        self._leases = leases
        self._lease = lease
        self._is_over = threading.Event()
        self._releases = False
        """Whether the thread, when it ends, records that the lease is released."""
        self._thread = threading.Thread(target=self._run, name="lease-renewals", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        """Renew the lease every RENEWAL_SECONDS. Runs in the background thread."""
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
        """End the thread, and leave the lease as it is: another launch has to watch it."""
        self._is_over.set()

    def release(self) -> None:
        """Let another launch take the lease at once. Waits for RELEASE_SECONDS at most."""
        self._releases = True
        self._is_over.set()
        self._thread.join(RELEASE_SECONDS)


def is_alive_here(owner: dict[str, Any]) -> bool | None:
    """Return whether a lease's owner is another process of this machine that still runs.

    Returns False for this very process, and None if this machine cannot tell: another machine may have the same host
    name, and another container of this machine the same process ids.
    """
    this_process = describe_this_process()
    if all(owner.get(key) == this_process[key] for key in ("boot", "namespace", "pid", "started")):
        return False
    if type(owner.get("pid")) is not int:
        return None
    if this_process["boot"] is None or owner.get("boot") is None:
        # There is no /proc. A process with this id may be another one by now; only its absence is certain.
        return False if is_alive(owner) is False else None
    if owner["boot"] != this_process["boot"]:
        return None
    return is_alive({"namespace": pid_namespace(), **owner})


def _claim_name(epoch: int) -> str:
    """Return the file name of a claim."""
    return f"{epoch:08d}.json"


def _renewals_name(epoch: int) -> str:
    """Return the name of the file that counts the renewals of a claim."""
    return f"{epoch:08d}.renewed.json"
