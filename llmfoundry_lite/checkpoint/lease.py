"""Leases on a run's folder: numbered claims, of which the highest may write. No torch.

A launch claims the lease by creating `.leases/<number>.json`, which must not exist yet. The number is the lease's
epoch, and the launch is the lease's holder. A holder that no longer finds its own content in that file has lost the
disk.

While a holder runs, it counts its renewals in `.leases/<number>.renewed.json`. When it ends, it records there that the
lease is released. Another launch that wants the lease has to find out whether the holder still runs. If the holder ran
on the same machine, its process id tells. Otherwise the launch watches the count of renewals for a while by its own
monotonic clock. No wall clocks are compared.

`Leases` claims, reads and checks leases; `Renewals` renews one in a background thread. `store` says what a lease
permits.
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
    """A launch's claim to be the one that writes to a run's folder."""

    epoch: int
    """The claim's number. The highest one may write."""
    owner: dict[str, Any]
    """The content of the claim's file: `describe_this_process` of the holder, `claim`, an id that no other claim has,
    and the `run` if it has a name. Empty if it cannot be read."""


@dataclass(frozen=True, slots=True)
class Holder(Lease):
    """The highest claim, and what its holder has recorded since."""

    renewals: int | None = None
    """How often the holder has renewed the lease. None: never."""
    is_released: bool = False
    """Whether the holder has given the lease up, so that another launch may take it at once."""
    renewed_at: float | None = None
    """When it has last renewed or released the lease, in seconds since 1970 by its own clock. For people alone."""

    @property
    def activity_id(self) -> str:
        """Text that changes with each claim and with each renewal. A holder is alive if it changes."""
        return f"{self.epoch} {self.owner.get('claim')} {self.renewals}"

    def describe(self) -> str:
        """Return the holder in words, such as `host gpu-17, process 4242, run mpt-1b`."""
        text = f"host {self.owner.get('host', 'unknown')}, process {self.owner.get('pid', 'unknown')}"
        if self.owner.get("run"):
            text += f", run {self.owner['run']}"
        return text


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRequest:
    """How a launch asks for a lease."""

    run_name: str = ""
    fallback: str = ""
    """The launch's second place for saves if only this machine may see it; empty if not. A launch on another machine
    that takes over tells the user of it."""
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
        `request` may name a holder that was found dead before, or ask to take the lease over without watching.

        Returns the `activity_id` of a holder that was found dead, for a later request, or "" if there was no holder.
        Raises CheckpointError if the holder is alive, and OSError if the claims cannot be read.
        """
        while True:
            holder = self.current_holder()
            if holder is None or holder.is_released:
                return ""

            # A holder on this machine, or one about which the caller has decided.
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
                _note_fallback(holder, request.note)
                return holder.activity_id

            # A holder on another machine.
            changed_holder = self._watch(holder, request.note)
            if changed_holder is None:
                _note_fallback(holder, request.note)
                return holder.activity_id
            is_same_claim = (changed_holder.epoch, changed_holder.owner) == (holder.epoch, holder.owner)
            has_renewed = is_same_claim and not changed_holder.is_released
            if has_renewed:
                raise CheckpointError(
                    f"{self.url}: another launch trains this run now ({holder.describe()}); stop it there, or give "
                    "this run another save_folder; takeover=true ends that launch and carries on here"
                )
            # The lease has just been released, or another launch has claimed it. Look at the new holder.

    def _watch(self, holder: Holder, note: Callable[[str], None]) -> Holder | None:
        """Watch a holder until it renews or releases its lease, or until another launch claims the lease.

        Returns the highest claim as it is then, or None if nothing changes for WATCH_SECONDS. `note` is called with a
        line for the user every NOTE_SECONDS.
        """
        began_at = time.monotonic()
        next_note_at = began_at
        while True:
            now = time.monotonic()
            watched_seconds = now - began_at
            if watched_seconds >= WATCH_SECONDS:
                return None
            if now >= next_note_at:
                next_note_at = now + NOTE_SECONDS
                note(
                    f"{self.url}: {holder.describe()} held this run and has not renewed its lease for "
                    f"{watched_seconds:.0f} s of {WATCH_SECONDS:.0f}"
                )
            time.sleep(POLL_SECONDS)
            current_holder = self.current_holder()
            if current_holder is None:
                continue  # a listing may miss a file for a moment
            if current_holder.activity_id != holder.activity_id or current_holder.is_released:
                return current_holder

    def acquire(
        self, *, at_least: int, steal_from_live_writer: bool = False, request: LeaseRequest | None = None
    ) -> Lease:
        """Claim the lease for this process, and return it.

        at_least: the lowest number that the claim may have. It is usually one more than the highest claim's.
        steal_from_live_writer: claim at once. Otherwise this waits until the lease is free, as `wait_until_free`.
        request: how to ask for the lease.

        Sets the claim that later checks expect to see. Old claims are removed. Raises CheckpointError if the holder is
        alive, or if the next number is above MAX_EPOCH; and OSError if the folder cannot be written.
        """
        request = request or LeaseRequest()
        owner = describe_this_process() | {"claim": uuid.uuid4().hex}
        if request.run_name:
            owner["run"] = request.run_name
        if request.fallback:
            owner["fallback"] = request.fallback

        while True:
            if not steal_from_live_writer:
                self.wait_until_free(request)
            # Nothing else creates this folder, so that a folder which is missing later has vanished.
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
                # Another launch was faster. A listing may show its claim late or never.
                at_least = epoch + 1
        self._seen_epoch = epoch
        self._remove_old_claims(epoch)
        return Lease(epoch, owner)

    def copy_claim(self, lease: Lease) -> None:
        """Put the claim of a lease that this process holds in another folder into this one, too.

        It refuses a launch with an earlier lease here as well (`check`). Raises CheckpointError if a later launch has
        its claim here, and OSError if the folder cannot be written.
        """
        self.folder.make(with_parents=True)
        if self.highest_epoch() >= lease.epoch:
            self.check(lease)  # raises, unless the claim is this launch's
            return
        self.folder.put(_claim_name(lease.epoch), write_json(lease.owner), only_if_new=True)
        self._seen_epoch = lease.epoch
        self._remove_old_claims(lease.epoch)

    def _remove_old_claims(self, epoch: int) -> None:
        """Remove the files of old claims and of their renewals: all but the last NUM_CLAIMS_KEPT up to `epoch`.

        The lease is taken already, so a file that cannot be removed stays.
        """
        for name in self.folder.names():
            claim = CLAIM.fullmatch(name)
            if claim is not None and int(claim[1]) <= epoch - NUM_CLAIMS_KEPT:
                with contextlib.suppress(OSError):
                    self.folder.remove(name)

    def check(self, lease: Lease) -> None:
        """Raise CheckpointError if a lease no longer permits its holder to write.

        That is so if another launch has a higher one, or if this claim is absent or has other content. If it is absent,
        the error may be transient, because the disk may come back; see `check_is_seen`. Raises OSError if the folder
        cannot be read.
        """
        highest_epoch = self.highest_epoch()
        if highest_epoch > lease.epoch:
            holder = Holder(highest_epoch, {})
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
        """Raise CheckpointError unless this process sees the claim with this number, which rank 0 has made.

        Every rank calls this before it writes: a rank that does not see the claim would write to another disk. If it
        has seen the claim before, on a disk, the error is transient, because the disk can be mounted again.
        """
        if not self.folder.child(_claim_name(epoch)).exists():
            raise self._vanished_error(epoch) from self._transient_cause(epoch)
        self._seen_epoch = epoch

    def _transient_cause(self, epoch: int) -> TransientError | None:
        """Return the cause of an error about an absent claim if the claim may come back; else None.

        An error with this cause counts as transient. The claim may come back if this process has seen it on a disk. A
        file that was removed from a bucket does not come back, and a node that has never seen the claim has another
        disk.
        """
        if self.folder.path_here is None or self._seen_epoch != epoch:
            return None
        return TransientError(f"{self.folder.path_here} has vanished")

    def _vanished_error(self, epoch: int) -> CheckpointError:
        """Return the error that this process no longer finds the claim with this number, which its launch has made."""
        reason = "the disk may have been unmounted, or is not shared by all nodes"
        remedy = "mount it, or give this run another save_folder"
        if self.folder.path_here is None:
            reason = "somebody may have removed the folder"
            remedy = "give this run another save_folder, or start it again from there"
        return CheckpointError(
            f"{self.url}: host {socket.gethostname()} does not find this launch's lease "
            f"({FOLDER}/{_claim_name(epoch)}) any more; {reason}. Nothing was written there; {remedy}"
        )

    def current_holder(self) -> Holder | None:
        """Read the highest claim and its renewals. Returns None if there is no claim. Raises OSError."""
        epoch = self.highest_epoch()
        return self.read_holder(epoch) if epoch else None

    def read_holder(self, epoch: int) -> Holder:
        """Read the claim of this number and its renewals. Raises OSError.

        Files may be absent, damaged or from anybody, so values of another type count as absent.
        """
        owner = self._read(_claim_name(epoch))
        renewals_record = self._read(_renewals_name(epoch))
        is_of_this_claim = renewals_record.get("claim") == owner.get("claim")
        if not is_of_this_claim:  # an earlier claim had the same number
            renewals_record = {}
        renewals = renewals_record.get("renewals")
        if not isinstance(renewals, int):
            renewals = None
        renewed_at = renewals_record.get("time")
        if not isinstance(renewed_at, float):
            renewed_at = None
        return Holder(
            epoch, owner, renewals, is_released=renewals_record.get("released") is True, renewed_at=renewed_at
        )

    def renew(self, lease: Lease, renewals: int, *, is_released: bool = False) -> None:
        """Record for other launches that the holder of this lease is alive, or that it has released the lease.

        `renewals` must be another number each time, as a launch that watches looks for a change. The `time` is for
        people. Raises OSError.
        """
        content = {
            "claim": lease.owner.get("claim"),
            "renewals": renewals,
            "released": is_released,
            "time": time.time(),
        }
        self.folder.put(_renewals_name(lease.epoch), write_json(content))

    def release(self, lease: Lease) -> None:
        """Record that the holder gives this lease up, so that another launch may take it at once. Raises OSError."""
        self.renew(lease, 0, is_released=True)

    def highest_epoch(self) -> int:
        """Return the number of the highest claim, or 0 if there is none. Raises OSError."""
        highest = 0
        for name in self.folder.names():
            if re.fullmatch(r"[0-9]+\.json", name):
                highest = max(highest, int(name.removesuffix(".json")))
        return highest

    def _read(self, name: str) -> dict[str, Any]:
        """Return the JSON object in the file of a claim or of its renewals.

        Returns an empty one if the file is absent or damaged. Raises OSError if it cannot be read.
        """
        with contextlib.suppress(FileNotFoundError, IsADirectoryError, DamagedCheckpointError):
            content = parse_json(self.folder.read(name, MAX_BYTES), FOLDER)
            return content if isinstance(content, dict) else {}
        return {}


class Renewals:
    """Renews a lease from a background thread, from the beginning until `stop` or `release`.

    A renewal that fails raises nothing: the next one may succeed, and training must neither wait for it nor end by it.
    """

    def __init__(self, leases: Leases, lease: Lease):
        """Start to renew a lease in a background thread."""
        self._leases = leases
        self._lease = lease
        self._is_over = threading.Event()
        self._renewed_seconds = time.monotonic()
        """Monotonic time at which the last renewal that succeeded began, or at which the lease was taken."""
        self._releases = False
        """Whether the thread, when it ends, records that the lease is released."""
        self._thread = threading.Thread(target=self._run, name="lease-renewals", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        """Renew the lease every RENEWAL_SECONDS until `_is_over` is set. Runs in the background thread."""
        renewals = 0
        while not self._is_over.is_set():
            began_seconds = time.monotonic()
            with contextlib.suppress(OSError, CheckpointError):
                self._leases.renew(self._lease, renewals)
                self._renewed_seconds = began_seconds
            renewals += 1
            self._is_over.wait(RENEWAL_SECONDS)
        # The release is recorded in this thread, so that no late renewal can follow it.
        if self._releases:
            with contextlib.suppress(OSError, CheckpointError):
                self._leases.renew(self._lease, renewals, is_released=True)

    @property
    def silent_seconds(self) -> float:
        """Time since the last renewal that succeeded began. It grows while the folder cannot be written."""
        return time.monotonic() - self._renewed_seconds

    def stop(self) -> None:
        """End the thread without releasing the lease. Another launch then has to watch it before it takes over."""
        self._is_over.set()

    def release(self) -> None:
        """End the thread, and let another launch take the lease at once. Waits for RELEASE_SECONDS at most."""
        self._releases = True
        self._is_over.set()
        self._thread.join(RELEASE_SECONDS)


def is_alive_here(owner: dict[str, Any]) -> bool | None:
    """Return whether the owner of a lease is another process of this machine that still runs.

    owner: the content of the claim's file, with the keys of `describe_this_process`. It may be from anybody.

    Returns True if that process runs; False if it has ended, or is this process; None if this machine cannot tell,
    because the owner ran on another machine or in another container. Host names do not decide, as several machines may
    have the same.
    """
    this_process = describe_this_process()
    is_this_process = all(owner.get(key) == this_process[key] for key in ("boot", "namespace", "pid", "started"))
    if is_this_process:
        return False
    if type(owner.get("pid")) is not int:
        return None

    if this_process["boot"] is None or owner.get("boot") is None:
        # A machine without /proc has no boot id. A process with this id may be another one by now, so only its absence
        # is certain.
        has_ended = is_alive(owner) is False
        return False if has_ended else None
    if owner["boot"] != this_process["boot"]:
        return None  # another machine, or this one before it was restarted
    return is_alive({"namespace": pid_namespace(), **owner})


def _note_fallback(holder: Holder, note: Callable[[str], None]) -> None:
    """Tell the user of the second place on another machine in which a dead holder may have saved."""
    fallback = holder.owner.get("fallback")
    if isinstance(fallback, str) and fallback:
        note(
            f"host {holder.owner.get('host', 'unknown')} has saves of this run in {fallback} if save_folder was away "
            "while it trained; only that machine can tell. `llmfoundry-lite checkpoint copy` brings them here"
        )


def _claim_name(epoch: int) -> str:
    """Return the file name of a claim: `00000007.json` for epoch 7."""
    return f"{epoch:08d}.json"


def _renewals_name(epoch: int) -> str:
    """Return the name of the file that counts the renewals of a claim."""
    return f"{epoch:08d}.renewed.json"
