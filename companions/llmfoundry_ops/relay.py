"""`llmfoundry-lite relay relay.yaml`: one run, several sites, in turn.

    every: 200ba     batches 1 to 200 are the first site's, 201 to 400 the next one's; an allocation ends by stop_after
    on_preemption    a site keeps the run until it is preempted or fails; then it is the next one's

All that the relay knows lies in the run folder: status.json, the checkpoints and its journal. It may be killed at any
time: started again, it finds the launch that goes on and waits for it.
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
MAX_REST_SECONDS = 3600.0
MAX_PAUSE_SECONDS = 300.0
"""Longest pause between looks at a folder that cannot be read or written now."""
LOOK_SECONDS = 1.0
"""Pause between looks at processes that outlive their launcher."""
KILL_SECONDS = 90.0
"""Time for ranks that have lost their launcher to save and leave."""
ANSWER_SECONDS = 60.0
"""Time for a site's `leave` or `status`."""
TAIL_BYTES = 1 << 16
"""Bytes at the end of a launch's output that are searched for its last line."""
NOT_FOUND = (126, 127)
"""A shell's codes for a command that cannot be run, or is not there."""
PERMANENT_ERRORS = (errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP)
"""Errors of a folder that do not pass, though it was usable before."""


class GivenUp(UserError):
    """Raised when a transient fault has lasted for longer than `retry_for`."""

    def __init__(self, text: str, exit_code: int = EXIT_FAILURE):
        super().__init__(text)
        self.exit_code = exit_code


def run(relay: Relay) -> int:
    """Return 0 when the run is done, 75 when this process was asked to leave and the site has left.

    Raises UserError when no site is left or the run folder cannot be used, and GivenUp when `retry_for` is over.
    """
    try:
        with processes.Ending() as ending:
            runner = Runner(relay, ending)
            with runner.locked():
                return runner.run()
    except GivenUp as error:
        with contextlib.suppress(OSError, ConfigError):  # by the journal, as checkpoints may be unreadable
            if any(one.to_batch or one.from_batch for one in read_allocations(relay.folder)):
                error.exit_code = EXIT_PREEMPTED
        raise
    except OSError as error:
        where = error.filename or relay.folder
        raise UserError(
            f"run: {where}: {error.strerror or error}; when that is mended, start the relay again: a launch that "
            "had begun goes on"
        ) from error


@dataclass
class Runner:
    """The relay of one run."""

    relay: Relay
    ending: processes.Ending
    refused: dict[str, str] = field(default_factory=dict)
    """Site -> why it is not tried again."""
    launched: subprocess.Popen[bytes] | None = None
    has_read_saves: bool = False
    notes: set[str] = field(default_factory=set)
    """Notes on unusable checkpoints that were printed."""
    ended_at: dict[int, float] = field(default_factory=dict)
    """Allocation -> its end by the monotonic clock: the wall clock may step while a site rests."""
    in_vain_since: float | None = None
    """Monotonic time of the first launch in a row that saved nothing."""

    @property
    def folder(self) -> Path:
        return self.relay.folder

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the run's lock, which ends with this process: two relays would launch the run twice."""

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
                words = f"run: another relay moves {self.folder}; stop that one, or leave the run to it"
                raise UserError(words) from None
            yield

    def _retry(
        self,
        call: Callable[[], T],
        may_pass: Callable[[Exception], bool] = lambda error: getattr(error, "errno", 0) not in PERMANENT_ERRORS,
    ) -> T:
        """Call again after an error that may pass: by default any but PERMANENT_ERRORS.

        Raises GivenUp after `retry_for`, or when asked to leave.
        """
        began, pause = time.monotonic(), max(self.relay.rest.seconds, 0.1)
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
        allocation = self._allocation_under_way()
        while not self.ending.num_asked or allocation is not None:
            if allocation is None:
                turn = self._next_turn()
                if turn is None:
                    continue
                allocation = self._begin(turn)
            self._wait(allocation)
            if self.ending.num_asked > 1:
                say(
                    f"allocation {allocation.number} at {allocation.site} goes on; start the relay again to wait for it"
                )
                return EXIT_INTERRUPTED
            allocation = self._end(allocation)
            if allocation.ended == DONE:
                say(f"the run is done, at batch {allocation.to_batch}, after {allocation.number} allocations")
                return EXIT_DONE
            self._check_progress(allocation)
            allocation = None
        say("asked to leave; start the relay again to carry on")
        return EXIT_PREEMPTED

    def _allocation_under_way(self) -> Allocation | None:
        """Return the allocation that an earlier relay has begun. Raises UserError for a launch that no relay began."""
        allocations = self._allocations()
        status = read_status(self.folder) if not allocations else None
        if status is not None and status["status"] == "running":
            raise UserError(
                f"run: a launch that no relay began still runs in {self.folder}; touch {self.folder / 'STOP'}, and "
                f"start the relay when it has left; if it has died on another machine, remove {self.folder / STATUS}"
            )
        if not allocations or allocations[-1].over is not None:
            return None
        allocation = allocations[-1]
        if allocation.site not in self.relay.sites:
            raise UserError(
                f"sites: {allocation.site} is missing, where the run still is, by {self.folder / journal.JOURNAL}; "
                "put it back until that launch has ended"
            )
        say(f"allocation {allocation.number} at {allocation.site} had begun; waiting for it")
        return allocation

    # --------------------------------------------------------------------------------------------- whose turn it is

    def _next_turn(self) -> int | None:
        """Return the index of the site that is to have the run now; None after waiting for one that rests."""
        order, allocations = self.relay.order, self._allocations()
        if set(order) <= set(self.refused):
            raise UserError("; ".join(f"{site} is not tried again: {why}" for site, why in self.refused.items()))
        turns = [
            turn
            for turn in turns_from(self.relay, allocations, self._newest_batch())
            if order[turn] not in self.refused
        ]
        rests = {turn: self._rest_left(order[turn], allocations) for turn in turns}
        for turn in turns:
            if rests[turn] <= 0:
                return turn
        seconds = min(rests.values())
        say(f"every site rests; the next try is in {seconds:.0f} s")
        self.ending.sleep(seconds)
        return None

    def _rest_left(self, site: str, allocations: list[Allocation]) -> float:
        """Return the seconds until that site may have the run again."""
        last = next((one for one in reversed(allocations) if one.site == site and one.over is not None), None)
        if last is None or last.number not in self.ended_at:  # another relay has ended it, by another clock
            return 0.0
        return rest_of(self.relay, site, allocations) - (time.monotonic() - self.ended_at[last.number])

    def _check_progress(self, allocation: Allocation) -> None:
        """Raise GivenUp when no launch has saved anything for longer than `retry_for`."""
        if not allocation.is_in_vain:
            self.in_vain_since = self.in_vain_since if allocation.ended == REFUSED else None
            return
        now = time.monotonic()
        self.in_vain_since = now if self.in_vain_since is None else self.in_vain_since
        if now - self.in_vain_since < self.relay.retry_for.seconds:
            return
        state = f"batch {allocation.to_batch} is saved" if allocation.to_batch else "nothing is saved"
        why = allocation.reason or f"exit code {allocation.code}: {last_line(tail_of(self._output(allocation)))}"
        raise GivenUp(
            f"given up: no launch has saved anything for {self.relay.retry_for.written} (retry_for), and {state}; "
            f"allocation {allocation.number} at {allocation.site}: {allocation.ended}: {why}; mend that, and start the "
            "relay again"
        )

    def _newest_batch(self) -> int:
        """Return the batch of the newest save that a launch can carry on from; 0 without one."""
        search = self._retry(
            lambda: CheckpointStore(self.relay.store).newest_intact(check_present),
            lambda error: is_transient(error) or (self.has_read_saves and not isinstance(error, NewerFormatError)),
        )
        self.has_read_saves = True
        for note in search.notes:
            if note not in self.notes:
                self.notes.add(note)
                say(note)
        return search.checkpoint.manifest.timestamp.batch if search.checkpoint is not None else 0

    # ------------------------------------------------------------------------------------------------ one launch

    def _begin(self, turn: int) -> Allocation:
        """Launch the run at that site. The journal knows first, so that a relay after this one finds the launch."""
        name, batch = self.relay.order[turn], self._newest_batch()
        site = self.relay.sites[name]
        number = max((one.number for one in self._allocations()), default=0) + 1
        begun = {
            "number": number,
            "site": name,
            "turn": turn,
            "began": time.time(),
            "from_batch": batch,
            "host": socket.gethostname(),
            "price": site.price,
            "status_before": self._status(site),
        }
        self._retry(lambda: journal.append(self.folder, **begun))
        allocation = Allocation(**begun)
        arguments = ["autoresume=true"]
        if self.relay.every is not None:
            arguments.append(f"stop_after={self.relay.every - batch % self.relay.every}ba")
        say(f"allocation {number} at {name}, from batch {batch}; its output: {self._output(allocation)}")
        command = site.launch.replace(ARGUMENTS, " ".join(arguments))
        self.launched = self._retry(
            lambda: processes.begin(command, self._code_file(allocation), self._output(allocation))
        )
        return allocation

    def _wait(self, allocation: Allocation) -> None:
        """Wait until the launcher has ended and nothing of the launch is left, or until asked for a second time."""
        has_asked = False
        # For a moment after its start a process has neither arguments nor an environment to be found by.
        mine = self.launched
        shell = psutil.Process(mine.pid) if mine is not None else processes.find_shell(self._code_file(allocation))
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
        """Ask the launch to save and leave."""
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
        """Ask ranks of this machine whose launcher is gone to leave; kill them after KILL_SECONDS."""
        kill_at = None
        while self.ending.num_asked < 2 and (left := processes.find(self._code_file(allocation))):
            now = time.monotonic()
            if kill_at is None:
                kill_at = now + KILL_SECONDS
                processes.terminate(left)
            elif now >= kill_at:
                processes.terminate(left, signal.SIGKILL)
            self.ending.sleep(LOOK_SECONDS)

    def _wait_for_remote(self, allocation: Allocation, has_asked: bool) -> None:
        """Wait for a launch on another machine, by its status.json. It may go on after ssh has lost it, or after the
        relay was started again elsewhere. One that has not written its status yet may still begin."""
        site, is_mine = self.relay.sites[allocation.site], allocation.host == socket.gethostname()
        may_begin = processes.exit_code(self._code_file(allocation)) is None and (not is_mine or site.leave is not None)
        status, heard_at = self._status(site), time.monotonic()
        is_waiting = False
        lease_before: str | None = None
        while self.ending.num_asked < 2:
            if time.monotonic() - heard_at > self.relay.silence.seconds:
                lease = self._lease()
                if lease in ("", lease_before):
                    return
                lease_before, heard_at = lease, time.monotonic()
                where = f"allocation {allocation.number} at {allocation.site}"
                say(f"{where}: {STATUS} has fallen silent, but the launch renews its lease; waiting for it")
            has_begun = status is not None and status != allocation.status_before
            if has_begun and status is not None and status["status"] != "running":
                return
            if not has_begun and (not may_begin or processes.exit_code(self._code_file(allocation)) is not None):
                return
            if has_begun and not has_asked and (is_mine or self.ending.num_asked):
                has_asked = True  # otherwise its launcher may live elsewhere
                self._ask(allocation, None)
            if not has_begun and not is_waiting:
                is_waiting = True
                where = f"allocation {allocation.number} at {allocation.site}"
                say(f"{where} may be about to begin; waiting for {self.relay.silence.written} (silence)")
            if has_begun and lease_before is None:
                lease_before = self._lease()
            self.ending.sleep(LOOK_SECONDS)
            news = self._status(site)
            if news is not None and news != status:  # a file that cannot be read for a moment is no news
                status, heard_at = news, time.monotonic()

    def _lease(self) -> str:
        """Return text that changes whenever a launch takes or renews the lease; empty where it cannot be read."""
        with contextlib.suppress(OSError, CheckpointError):
            holder = CheckpointStore(self.relay.store).leases.current_holder()
            return holder.activity_id if holder is not None and not holder.is_released else ""
        return ""

    def _end(self, allocation: Allocation) -> Allocation:
        code, status = processes.exit_code(self._code_file(allocation)), self._status(self.relay.sites[allocation.site])
        ended, reason = how_it_ended(code, status, allocation.status_before)
        if code in NOT_FOUND and any(
            one.site == allocation.site and one.code == EXIT_DONE for one in self._allocations()
        ):
            ended = FAILED  # the command was there before: its disk may come back
        if reason is None and ended in (FAILED, REFUSED):
            reason = f"exit code {code}: {last_line(tail_of(self._output(allocation)))}"
        batch = self._newest_batch()
        if ended == STOPPED and status is not None and batch < status["batch"]:
            raise UserError(
                f"checkpoints: {self.relay.store} has no save of batch {status['batch']}, at which {allocation.site} "
                "stopped; name the run's save_folder"
            )
        end = {"over": time.time(), "to_batch": batch, "code": code, "ended": ended, "reason": reason}
        self._retry(lambda: journal.append(self.folder, number=allocation.number, **end))
        self.ended_at[allocation.number] = time.monotonic()
        say(
            f"allocation {allocation.number} at {allocation.site}: {ended} at batch {batch}"
            + (f": {reason}" if reason else "")
        )
        if ended == REFUSED:
            self.refused[allocation.site] = reason or f"exit code {code}"
        return self._allocations()[-1]

    def _allocations(self) -> list[Allocation]:
        return self._retry(lambda: read_allocations(self.folder))

    def _status(self, site: Site) -> dict[str, Any] | None:
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
        return (self.folder / FOLDER / f"{allocation.number}.code").resolve()

    def _output(self, allocation: Allocation) -> Path:
        return self.folder / FOLDER / f"{allocation.number}-{allocation.site}.txt"


def turns_from(relay: Relay, allocations: list[Allocation], batch: int) -> list[int]:
    """Return indices into the order of sites, the one whose turn it is first."""
    num_turns = len(relay.order)
    if relay.every is not None:
        first = batch // relay.every
    else:
        first = allocations[-1].turn + 1 if allocations else 0
    return [(first + i) % num_turns for i in range(num_turns)]


def rest_of(relay: Relay, site: str, allocations: list[Allocation]) -> float:
    """Return the seconds that a site rests after its last allocation, by how its last allocations ended."""
    here = [one for one in allocations if one.site == site and one.over is not None]
    if not here or not here[-1].is_early:
        return 0.0
    num_in_vain = next((i for i, one in enumerate(reversed(here)) if not one.is_in_vain), len(here))
    return min(relay.rest.seconds * 2 ** max(0, num_in_vain - 1), MAX_REST_SECONDS)


def how_it_ended(
    code: int | None, status: dict[str, Any] | None, before: dict[str, Any] | None
) -> tuple[str, str | None]:
    """Return (how, why) an allocation ended, from the launch command's exit code and status.json.

    status.json takes precedence if this launch has written it: torchrun turns every code into 1, and ssh turns a lost
    connection into 255.
    """
    if code in (EXIT_USER, *NOT_FOUND):
        return REFUSED, (status or {}).get("reason") if status != before else None
    if status is not None and (status != before or (code == EXIT_DONE and status["status"] == DONE)):
        if status["status"] == "running":
            return FAILED, f"its launcher has ended, and {STATUS} has fallen silent"
        words = {"done": DONE, "stopped": STOPPED, "preempted": PREEMPTED}
        return words.get(status["status"], FAILED), status.get("reason")
    if code == EXIT_PREEMPTED:
        return PREEMPTED, None
    if code is None:
        return LOST, "killed before it could leave a word"
    if code == EXIT_DONE:
        return FAILED, f"exit code 0, but this launch has written no {STATUS} here; is `run` its run folder?"
    return FAILED, None


def tail_of(file: Path) -> str:
    with contextlib.suppress(OSError), file.open("rb") as output:
        output.seek(max(0, file.stat().st_size - TAIL_BYTES))
        return output.read().decode(errors="replace")
    return ""


def last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no output"])[-1]


def say(text: str) -> None:
    print(f"relay: {printable(text)}", flush=True)
