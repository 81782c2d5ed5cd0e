"""`llmfoundry-lite relay relay.yaml`: one run that several sites train in turn.

    every: 200ba     batches 1 to 200 are the first site's, 201 to 400 the next one's; an allocation ends by stop_after
    on_preemption    a site keeps the run until it is preempted or fails; then it is the next one's

`Runner.run` repeats four steps: choose the site whose turn it is, launch the run there, wait until nothing of the
launch is left, and write into the journal how it ended. All that the relay knows is in the run folder: status.json,
the checkpoints and its journal. It may be killed at any time: started again, it finds the launch that goes on and
waits for it.
"""

import contextlib
import errno
import fcntl
import json
import math
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import psutil

from llmfoundry_lite.checkpoint.store import CheckpointStore
from llmfoundry_lite.checkpoint.verify import check_present
from llmfoundry_lite.errors import (
    EXIT_DONE,
    EXIT_FAILURE,
    EXIT_INTERRUPTED,
    EXIT_PREEMPTED,
    EXIT_USER,
    CheckpointError,
    ConfigError,
    NewerFormatError,
    UserError,
    is_transient,
    needs_credentials,
    printable,
)
from llmfoundry_lite.files import open_no_link
from llmfoundry_lite.ranks.status import STATUS, is_sound, read_status
from llmfoundry_ops import journal, processes
from llmfoundry_ops.journal import DONE, FAILED, LOST, PREEMPTED, REFUSED, STOPPED, Allocation, read_allocations
from llmfoundry_ops.sites import ARGUMENTS, Relay, Site

T = TypeVar("T")
LOCK, FOLDER = "relay.lock", "relay"
"""Names in the run folder: of the relay's lock, and of the folder for the launches' output and exit codes."""
MAX_REST_SECONDS = 3600.0
"""Longest rest of a site that has left early again and again."""
MAX_PAUSE_SECONDS = 300.0
"""Longest pause between two tries of a folder that cannot be read or written at the moment."""
CHECK_SECONDS = 1.0
"""Pause between two checks of a launch that has lost its launcher."""
KILL_SECONDS = 90.0
"""Time for ranks that have lost their launcher to save and leave."""
ANSWER_SECONDS = 60.0
"""Time for a site's `leave` or `status` command."""
TAIL_BYTES = 1 << 16
"""Bytes at the end of a launch's output that are searched for its last line."""
NOT_FOUND = (126, 127)
"""A shell's exit codes for a command that cannot be run, or does not exist."""
PERMANENT_ERRORS = (errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP)
"""Errors of a folder that do not pass by themselves."""


class GivenUp(UserError):
    """Raised when a transient fault has lasted for longer than `retry_for`."""

    def __init__(self, text: str, exit_code: int = EXIT_FAILURE):
        super().__init__(text)
        self.exit_code = exit_code


def _is_not_permanent(error: Exception) -> bool:
    """Return whether an error of a folder may pass by itself."""
    return getattr(error, "errno", 0) not in PERMANENT_ERRORS


def run(relay: Relay) -> int:
    """Move a run between its sites until it is done, and return the exit code: EXIT_DONE.

    If a signal asks this process to leave, the site is asked too, and the code is EXIT_PREEMPTED once the launch has
    left. After a second signal, the launch goes on and the code is EXIT_INTERRUPTED.

    Raises UserError if no site is left or the run folder cannot be used, and GivenUp when `retry_for` is over.
    """
    try:
        with processes.Ending() as ending:
            runner = Runner(relay, ending)
            with runner.locked():
                return runner.run()
    except GivenUp as error:
        # If anything is saved, the run can be resumed. The journal knows, even if checkpoints cannot be read.
        with contextlib.suppress(OSError, ConfigError):
            allocations = read_allocations(relay.folder)
            if any(allocation.to_batch or allocation.from_batch for allocation in allocations):
                error.exit_code = EXIT_PREEMPTED
        raise
    except OSError as error:
        path = error.filename or relay.folder
        raise UserError(
            f"run: {path}: {error.strerror or error}; when that is mended, start the relay again: a launch that "
            "had begun goes on"
        ) from error


@dataclass
class Runner:
    """The relay of one run."""

    relay: Relay
    ending: processes.Ending
    """Signals that ask this process to leave."""
    refused: dict[str, str] = field(default_factory=dict)
    """Site -> why it is not tried again."""
    launched: subprocess.Popen[bytes] | None = None
    """The shell of the current launch, if this process has started it."""
    has_read_saves: bool = False
    """Whether the checkpoints could be read once, so that an error about them may pass."""
    printed_notes: set[str] = field(default_factory=set)
    """Notes on unusable checkpoints that were printed."""
    ended_at: dict[int, float] = field(default_factory=dict)
    """Number of an allocation -> its end by the monotonic clock: the wall clock may step while a site rests."""
    unsaved_since: float | None = None
    """Monotonic time at the end of the first allocation in a row that saved nothing; None after one that did."""

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self.relay.folder

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the run's lock, which ends with this process: two relays would launch the run twice.

        Raises UserError if another relay has it, or if the run folder cannot be reached.
        """

        def open_lock() -> Any:
            (self.folder / FOLDER).mkdir(parents=True, exist_ok=True)
            return open(self.folder / LOCK, "a", opener=open_no_link)

        try:
            file = self._retry(open_lock, is_transient)
        except OSError as error:
            raise UserError(
                f"run: {self.folder} cannot be reached from here ({error.strerror}); name the run folder on a disk "
                "that the relay shares with the sites, or give each site a status command"
            ) from None
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(
                    f"run: another relay is moving {self.folder}; stop that one, or leave the run to it"
                ) from None
            yield

    def _retry(self, call: Callable[[], T], may_pass: Callable[[Exception], bool] = _is_not_permanent) -> T:
        """Return the result of `call`, which is called again, after ever longer pauses, while its error may pass.

        Raises GivenUp after `retry_for`, or when this process is asked to leave. Other errors are raised unchanged.
        """
        began = time.monotonic()
        pause = max(self.relay.rest.seconds, 0.1)
        while True:
            try:
                return call()
            except (CheckpointError, OSError) as error:
                if not may_pass(error):
                    raise
                text = str(error)
                if needs_credentials(error):
                    text += "; renew the credentials"
            if self.ending.num_asked:
                raise GivenUp(f"{text}; asked to leave; start the relay again when that has passed", EXIT_PREEMPTED)
            if time.monotonic() - began > self.relay.retry_for.seconds:
                raise GivenUp(
                    f"{text}; given up after {self.relay.retry_for.written} (retry_for); start the relay again"
                )
            say(f"{text}; looking again in {pause:g} s")
            self.ending.sleep(pause)
            pause = min(2 * pause, MAX_PAUSE_SECONDS)

    def run(self) -> int:
        """Launch the run at one site after the other until it is done.

        Returns and raises as the function `run` does.
        """
        allocation = self._allocation_under_way()
        while not self.ending.num_asked or allocation is not None:
            if allocation is None:
                turn = self._wait_for_turn()
                if turn is None:
                    continue
                allocation = self._begin(turn)
            self._wait_for_end(allocation)
            if self.ending.num_asked > 1:
                say(
                    f"allocation {allocation.number} at {allocation.site} goes on; start the relay again to wait for it"
                )
                return EXIT_INTERRUPTED
            allocation = self._record_end(allocation)
            if allocation.ended == DONE:
                say(f"the run is done, at batch {allocation.to_batch}, after {allocation.number} allocations")
                return EXIT_DONE
            self._check_progress(allocation)
            allocation = None
        say("asked to leave; start the relay again to carry on")
        return EXIT_PREEMPTED

    def _allocation_under_way(self) -> Allocation | None:
        """Return the allocation that an earlier relay has begun and not ended; None if there is none.

        Raises UserError if a launch is running that no relay has begun, or at a site that relay.yaml does not name.
        """
        allocations = self._allocations()
        if not allocations:
            status = read_status(self.folder)
            if status is not None and status["status"] == "running":
                raise UserError(
                    f"run: a launch that no relay began still runs in {self.folder}; touch {self.folder / 'STOP'}, and "
                    "start the relay when it has left; if it has died on another machine, remove "
                    f"{self.folder / STATUS}"
                )
            return None

        allocation = allocations[-1]
        if allocation.over is not None:
            return None
        if allocation.site not in self.relay.sites:
            raise UserError(
                f"sites: {allocation.site} is missing, where the run still is, by {self.folder / journal.JOURNAL}; "
                "put it back until that launch has ended"
            )
        say(f"allocation {allocation.number} at {allocation.site} had begun; waiting for it")
        return allocation

    # --------------------------------------------------------------------------------------------- whose turn it is

    def _wait_for_turn(self) -> int | None:
        """Return the turn that begins now, as an index into the order of sites.

        If every site rests, waits until the first one is rested, or a signal comes, and returns None: the caller then
        calls again, or leaves. Raises UserError if no site is left.
        """
        order = self.relay.order
        allocations = self._allocations()
        if set(order) <= set(self.refused):
            raise UserError("; ".join(f"{site} is not tried again: {why}" for site, why in self.refused.items()))

        turns = turns_from(self.relay, allocations, self._newest_batch())
        turns = [turn for turn in turns if order[turn] not in self.refused]
        rests_left = {turn: self._rest_left(order[turn], allocations) for turn in turns}
        for turn in turns:
            if rests_left[turn] <= 0:
                return turn
        seconds = min(rests_left.values())
        say(f"every site rests; the next try is in {seconds:.0f} s")
        self.ending.sleep(seconds)
        return None

    def _rest_left(self, site: str, allocations: list[Allocation]) -> float:
        """Return the seconds until a site may have the run again; 0 or less if it may have it now."""
        ended = [allocation for allocation in allocations if allocation.site == site and allocation.over is not None]
        # An allocation that another relay has ended is known only by the wall clock of another time or machine.
        if not ended or ended[-1].number not in self.ended_at:
            return 0.0
        rested_seconds = time.monotonic() - self.ended_at[ended[-1].number]
        return rest_of(self.relay, site, allocations) - rested_seconds

    def _check_progress(self, allocation: Allocation) -> None:
        """Raise GivenUp if no allocation has saved anything for longer than `retry_for`. Called at the end of each."""
        if not allocation.saved_nothing:
            # A launch that was refused has never run, and says nothing about the others.
            if allocation.ended != REFUSED:
                self.unsaved_since = None
            return
        now = time.monotonic()
        if self.unsaved_since is None:
            self.unsaved_since = now
        if now - self.unsaved_since < self.relay.retry_for.seconds:
            return
        state = f"batch {allocation.to_batch} is saved" if allocation.to_batch else "nothing is saved"
        reason = allocation.reason or self._describe_exit(allocation, allocation.code)
        raise GivenUp(
            f"given up: no launch has saved anything for {self.relay.retry_for.written} (retry_for), and {state}; "
            f"allocation {allocation.number} at {allocation.site}: {allocation.ended}: {reason}; mend that, and start "
            "the relay again"
        )

    def _newest_batch(self) -> int:
        """Return the batch of the newest save from which a launch can resume; 0 if there is none.

        Prints a note on each unusable checkpoint once.
        """

        def may_pass(error: Exception) -> bool:
            was_readable_before = self.has_read_saves and not isinstance(error, NewerFormatError)
            return is_transient(error) or was_readable_before

        search = self._retry(lambda: CheckpointStore(self.relay.store).newest_intact(check_present), may_pass)
        self.has_read_saves = True
        for note in search.notes:
            if note not in self.printed_notes:
                self.printed_notes.add(note)
                say(note)
        if search.checkpoint is None:
            return 0
        return search.checkpoint.manifest.timestamp.batch

    # ------------------------------------------------------------------------------------------------ one launch

    def _begin(self, turn: int) -> Allocation:
        """Launch the run at the site whose turn it is. Sets `launched`."""
        site_name = self.relay.order[turn]
        site = self.relay.sites[site_name]
        batch = self._newest_batch()
        number = max((allocation.number for allocation in self._allocations()), default=0) + 1
        fields = {
            "number": number,
            "site": site_name,
            "turn": turn,
            "began": time.time(),
            "from_batch": batch,
            "host": socket.gethostname(),
            "price": site.price,
            "status_before": self._status(site),
        }
        # The journal comes first, so that a relay after this one finds the launch, whenever this one is killed.
        self._retry(lambda: journal.append(self.folder, **fields))
        allocation = Allocation(**fields)

        arguments = ["autoresume=true"]
        if self.relay.every is not None:
            num_batches_left = self.relay.every - batch % self.relay.every
            arguments.append(f"stop_after={num_batches_left}ba")
        command = site.launch.replace(ARGUMENTS, " ".join(arguments))
        output = self._output(allocation)
        say(f"allocation {number} at {site_name}, from batch {batch}; its output: {output}")
        self.launched = self._retry(lambda: processes.begin(command, self._code_file(allocation), output))
        return allocation

    def _wait_for_end(self, allocation: Allocation) -> None:
        """Wait until nothing of the launch is left. Returns early when asked to leave for a second time.

        When asked for the first time, asks the launch to save and leave.
        """
        has_asked = False
        # For a moment after its start, a process has neither arguments nor an environment by which it could be found.
        if self.launched is not None:
            shell = psutil.Process(self.launched.pid)
        else:
            shell = processes.find_shell(self._code_file(allocation))
        while shell is not None and processes.is_running(shell) and self.ending.num_asked < 2:
            if self.ending.num_asked and not has_asked:
                has_asked = True
                self._ask(allocation, shell)
            self.ending.sleep(math.inf, shell)
        if self.ending.num_asked < 2 and self.launched is not None:
            self.launched.wait()
            self.launched = None

        self._end_orphans(allocation)
        self._wait_for_remote(allocation, has_asked)

    def _ask(self, allocation: Allocation, shell: psutil.Process | None) -> None:
        """Ask the launch to save and leave.

        The site's `leave` command does that, or without one SIGTERM to the launcher that `shell` has started.
        """
        site = self.relay.sites[allocation.site]
        say(f"asking {allocation.site} to leave")
        if site.leave is not None:
            answer = processes.ask(site.leave, ANSWER_SECONDS)
            if answer.code is None:
                say(f"{allocation.site}: leave: not done in {ANSWER_SECONDS:.0f} s")
            elif answer.code != 0:
                say(f"{allocation.site}: leave: exit code {answer.code}: {last_line(answer.errors)}")
        elif shell is not None:
            processes.terminate(processes.find_launcher(shell, self._code_file(allocation)))

    def _end_orphans(self, allocation: Allocation) -> None:
        """Ask ranks on this machine that have lost their launcher to leave, and kill them after KILL_SECONDS."""
        kill_at: float | None = None
        while self.ending.num_asked < 2:
            orphans = processes.find(self._code_file(allocation))
            if not orphans:
                return
            now = time.monotonic()
            if kill_at is None:
                kill_at = now + KILL_SECONDS
                processes.terminate(orphans)
            elif now >= kill_at:
                processes.terminate(orphans, signal.SIGKILL)
            self.ending.sleep(CHECK_SECONDS)

    def _wait_for_remote(self, allocation: Allocation, has_asked: bool) -> None:
        """Wait for a launch on another machine to end, by its status.json.

        The launch may go on after its ssh has ended, or after the relay was started again elsewhere. One that has not
        written its status yet may still begin. A launch is given up once its status has not changed for the time
        `silence`, unless it still renews its lease. `has_asked` is whether it was asked to leave.
        """
        site = self.relay.sites[allocation.site]
        name = f"allocation {allocation.number} at {allocation.site}"
        is_launcher_here = allocation.host == socket.gethostname()
        is_away = not is_launcher_here or site.leave is not None
        may_begin = is_away and processes.exit_code(self._code_file(allocation)) is None

        status = self._status(site)
        heard_at = time.monotonic()  # when the status has changed, or the lease was seen to be renewed
        has_said_waiting = False
        lease_before: str | None = None
        while self.ending.num_asked < 2:
            # 1. Give the launch up if its status has been silent for too long, and its lease too.
            if time.monotonic() - heard_at > self.relay.silence.seconds:
                lease = self._lease()
                is_renewed = bool(lease) and lease != lease_before
                if not is_renewed:
                    return
                lease_before = lease
                heard_at = time.monotonic()
                say(f"{name}: {STATUS} has fallen silent, but the launch renews its lease; waiting for it")

            # 2. A launch that has begun ends when its status says so. One that has not may still begin.
            if status is not None and status != allocation.status_before:
                if status["status"] != "running":
                    return
                # If its launcher was here, nobody tells it to leave any more: the relay has to.
                if not has_asked and (is_launcher_here or self.ending.num_asked):
                    has_asked = True
                    self._ask(allocation, None)
                if lease_before is None:
                    lease_before = self._lease()
            else:
                if not may_begin or processes.exit_code(self._code_file(allocation)) is not None:
                    return
                if not has_said_waiting:
                    has_said_waiting = True
                    say(f"{name} may be about to begin; waiting for {self.relay.silence.written} (silence)")

            # 3. Look at the status again.
            self.ending.sleep(CHECK_SECONDS)
            new_status = self._status(site)
            if new_status is not None and new_status != status:  # None: it cannot be read at the moment
                status = new_status
                heard_at = time.monotonic()

    def _lease(self) -> str:
        """Return a text that changes whenever a launch takes or renews the lease of the checkpoints.

        Empty if nobody has the lease, or if it cannot be read.
        """
        with contextlib.suppress(OSError, CheckpointError):
            holder = CheckpointStore(self.relay.store).leases.current_holder()
            if holder is not None and not holder.is_released:
                return holder.activity_id
        return ""

    def _record_end(self, allocation: Allocation) -> Allocation:
        """Find out how a launch has ended, and write it into the journal. Returns the allocation with its end.

        Adds the time to `ended_at`, and the site to `refused` if it refused the launch, so that it is not tried again.
        Raises UserError, before anything is written, if the launch has saved somewhere else.
        """
        # Find out how it ended, and at which batch.
        exit_code = processes.exit_code(self._code_file(allocation))
        status = self._status(self.relay.sites[allocation.site])
        ended, reason = how_it_ended(exit_code, status, allocation.status_before)
        if exit_code in NOT_FOUND and self._was_done_before(allocation.site):
            ended = FAILED  # the command was there before: its disk may come back
        if reason is None and ended in (FAILED, REFUSED):
            reason = self._describe_exit(allocation, exit_code)

        batch = self._newest_batch()
        if ended == STOPPED and status is not None and batch < status["batch"]:
            raise UserError(
                f"checkpoints: {self.relay.store} has no save of batch {status['batch']}, at which {allocation.site} "
                "stopped; name the run's save_folder"
            )

        # Record it.
        fields = {"over": time.time(), "to_batch": batch, "code": exit_code, "ended": ended, "reason": reason}
        self._retry(lambda: journal.append(self.folder, number=allocation.number, **fields))
        self.ended_at[allocation.number] = time.monotonic()
        because = f": {reason}" if reason else ""
        say(f"allocation {allocation.number} at {allocation.site}: {ended} at batch {batch}{because}")
        if ended == REFUSED:
            self.refused[allocation.site] = reason or f"exit code {exit_code}"
        return self._allocations()[-1]

    def _was_done_before(self, site: str) -> bool:
        """Return whether the launch command of a site has ended with exit code 0 before."""
        return any(allocation.site == site and allocation.code == EXIT_DONE for allocation in self._allocations())

    def _describe_exit(self, allocation: Allocation, exit_code: int | None) -> str:
        """Return the exit code and the last line of output of a launch, as the reason of its end."""
        return f"exit code {exit_code}: {last_line(tail_of(self._output(allocation)))}"

    def _allocations(self) -> list[Allocation]:
        """Return the allocations in the journal, in order."""
        return self._retry(lambda: read_allocations(self.folder))

    def _status(self, site: Site) -> dict[str, Any] | None:
        """Return the content of a site's status.json; None if there is none or it cannot be read."""
        if site.status is None:
            return read_status(self.folder)
        command = site.status
        answer = self._retry(lambda: processes.ask(command, ANSWER_SECONDS))
        if answer.code is None:
            say(f"{site.status}: not done in {ANSWER_SECONDS:.0f} s")
        with contextlib.suppress(ValueError, RecursionError):
            content = json.loads(answer.output)
            return content if is_sound(content) else None
        return None

    def _code_file(self, allocation: Allocation) -> Path:
        """Return the file for a launch's exit code, whose path also marks the launch's processes."""
        return (self.folder / FOLDER / f"{allocation.number}.code").resolve()

    def _output(self, allocation: Allocation) -> Path:
        """Return the file for a launch's output."""
        return self.folder / FOLDER / f"{allocation.number}-{allocation.site}.txt"


def turns_from(relay: Relay, allocations: list[Allocation], batch: int) -> list[int]:
    """Return all turns, as indices into the order of sites, beginning with the one that is next.

    `batch` is the batch of the newest save, which decides if the run moves every N batches. With three sites and every:
    200ba, it is [1, 2, 0] at batch 300.
    """
    num_turns = len(relay.order)
    if relay.every is not None:
        first = batch // relay.every
    else:
        first = allocations[-1].turn + 1 if allocations else 0
    return [(first + offset) % num_turns for offset in range(num_turns)]


def rest_of(relay: Relay, site: str, allocations: list[Allocation]) -> float:
    """Return the seconds that a site rests after its last allocation.

    0 if that did not end early. Otherwise it is the relay's `rest`, doubled for each further allocation in a row at
    this site that saved nothing: 5, 10, 20, … s, at most MAX_REST_SECONDS.
    """
    ended = [allocation for allocation in allocations if allocation.site == site and allocation.over is not None]
    if not ended or not ended[-1].is_early:
        return 0.0
    num_without_save = 0
    for allocation in reversed(ended):
        if not allocation.saved_nothing:
            break
        num_without_save += 1
    num_doublings = max(0, num_without_save - 1)
    return min(relay.rest.seconds * 2**num_doublings, MAX_REST_SECONDS)


def how_it_ended(
    exit_code: int | None, status: dict[str, Any] | None, status_before: dict[str, Any] | None
) -> tuple[str, str | None]:
    """Return how an allocation ended, as one of the journal's ends, and why, if that is known.

    exit_code: the launch command's; None if it was killed before it could write one.
    status, status_before: content of status.json now, and before the launch.

    status.json takes precedence if this launch has written it: torchrun turns every code into 1, and ssh turns a lost
    connection into 255.
    """
    launch_status = status if status != status_before else None
    if exit_code in (EXIT_USER, *NOT_FOUND):
        reason = launch_status.get("reason") if launch_status is not None else None
        return REFUSED, reason

    # A launch of a run that is done already writes no new status.
    was_done_already = status is not None and status["status"] == DONE and exit_code == EXIT_DONE
    if was_done_already:
        launch_status = status
    if launch_status is not None:
        if launch_status["status"] == "running":
            return FAILED, f"its launcher has ended, and {STATUS} has fallen silent"
        ends = {"done": DONE, "stopped": STOPPED, "preempted": PREEMPTED}
        return ends.get(launch_status["status"], FAILED), launch_status.get("reason")

    if exit_code == EXIT_PREEMPTED:
        return PREEMPTED, None
    if exit_code is None:
        return LOST, "killed before it could leave a word"
    if exit_code == EXIT_DONE:
        return FAILED, f"exit code 0, but this launch has written no {STATUS} here; is `run` its run folder?"
    return FAILED, None


def tail_of(file: Path) -> str:
    """Return the last TAIL_BYTES of a file as text; empty if it cannot be read."""
    with contextlib.suppress(OSError), file.open("rb") as output:
        output.seek(max(0, file.stat().st_size - TAIL_BYTES))
        return output.read().decode(errors="replace")
    return ""


def last_line(text: str) -> str:
    """Return the last line of a command's output."""
    lines = text.strip().splitlines()
    return lines[-1] if lines else "no output"


def say(text: str) -> None:
    """Print a line of the relay."""
    print(f"relay: {printable(text)}", flush=True)
