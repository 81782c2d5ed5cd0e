"""`llmfoundry-lite relay relay.yaml`: one run, several places, in turn.

Owns whose turn it is and how a launch has ended; leaves launching to launchers that exist (a local command, ssh,
sbatch --wait) and everything about the run to the run. What the relay knows lies in the run folder: status.json, the
checkpoints, and its own journal, only appended to. So it may be killed at any time: started again, it finds the launch
that goes on, waits for it, and carries on.

    every: 200ba     batches 1 to 200 are the first place's, 201 to 400 the next one's; a leg ends by stop_after
    on_preemption    a place keeps the run until it is preempted or fails; then it is the next one's

A place that leaves early rests, twice as long each time in a row that it saved nothing. Exit code 2 is the user's to
mend: that place is not tried again.
"""

import contextlib
import errno
import fcntl
import json
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llmfoundry_lite import journal
from llmfoundry_lite.checkpoint.store import CheckpointStore
from llmfoundry_lite.errors import (
    EXIT_DONE,
    EXIT_INTERRUPTED,
    EXIT_PREEMPTED,
    EXIT_USER,
    CheckpointError,
    UserError,
    printable,
)
from llmfoundry_lite.journal import DONE, FAILED, LOST, PREEMPTED, REFUSED, STOPPED, Leg, read_legs
from llmfoundry_lite.relay import processes
from llmfoundry_lite.relay.places import ARGUMENTS, Place, Relay
from llmfoundry_lite.status import STATUS, is_sound, read_status

LOCK, FOLDER = "relay.lock", "relay"
LONGEST_REST_SECONDS = 3600.0
LOOK_SECONDS = 1.0
"""Between looks at what outlives its launcher."""
KILL_SECONDS = 90.0
"""For ranks that have lost their launcher, to save and leave."""
ANSWER_SECONDS = 60.0
"""For a place's `leave` or `status`."""
TAIL_BYTES = 1 << 16
"""Of a launch's output, in which its last line is looked for."""
NOT_FOUND = (126, 127)
"""A shell's codes for a command that cannot be run, or is not there."""


def run(relay: Relay) -> int:
    """Until the run is done (0), or this process is asked to leave and the place has left (75). Raises UserError when
    no place is left, or the run folder cannot be used."""
    with locked(relay.folder), processes.Ending() as ending:
        try:
            return Runner(relay, ending).run()
        except OSError as error:
            where = error.filename or relay.folder
            raise UserError(
                f"run: {where}: {error.strerror or error}; when that is mended, start the relay again: a launch that "
                "had begun goes on"
            ) from error


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Two relays would launch the run twice. The lock ends with the process that holds it, however that ends."""
    try:
        (folder / FOLDER).mkdir(parents=True, exist_ok=True)
        file = (folder / LOCK).open("a")
    except OSError as error:
        raise UserError(
            f"run: {folder} cannot be reached from here ({error.strerror}); name the run folder on a disk that the "
            "relay shares with the places, or give each place a status command"
        ) from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                raise UserError(f"run: {folder / LOCK} cannot be locked ({error.strerror})") from None
            raise UserError(f"run: another relay moves {folder}; stop that one, or leave the run to it") from None
        yield


class Runner:
    """The relay of one run, which holds its lock."""

    def __init__(self, relay: Relay, ending: processes.Ending):
        self.relay = relay
        self.ending = ending
        self.folder = relay.folder
        self.refused: dict[str, str] = {}
        """Place -> why it is not tried again."""
        self._launched: subprocess.Popen[bytes] | None = None
        self._has_read_saves = False

    def run(self) -> int:
        legs = read_legs(self.folder)
        leg = legs[-1] if legs and legs[-1].over is None else None
        status = read_status(self.folder) if not legs else None
        if status is not None and status["status"] == "running":
            raise UserError(
                f"run: a launch that no relay began still runs in {self.folder}; touch {self.folder / 'STOP'}, and "
                "start the relay when it has left"
            )
        if leg is not None and leg.place not in self.relay.places:
            raise UserError(
                f"places: {leg.place} is missing, where the run still is, by {self.folder / journal.JOURNAL}; put it "
                "back until that launch has ended"
            )
        if leg is not None:
            say(f"leg {leg.number} at {leg.place} had begun; waiting for it")
        while not self.ending.num_asked or leg is not None:
            if leg is None:
                turn = self._next_turn()
                if turn is None:
                    continue
                leg = self._begin(turn)
            self._wait(leg)
            if self.ending.num_asked > 1:
                say(f"leg {leg.number} at {leg.place} goes on; start the relay again to wait for it")
                return EXIT_INTERRUPTED
            leg = self._end(leg)
            if leg.ended == DONE:
                say(f"the run is done, at batch {leg.to_batch}, after {leg.number} legs")
                return EXIT_DONE
            leg = None
        say("asked to leave; start the relay again to carry on")
        return EXIT_PREEMPTED

    # --------------------------------------------------------------------------------------------- whose turn it is

    def _next_turn(self) -> int | None:
        """The index of the place that is to have the run now; None after waiting for one that rests."""
        order, legs, now = self.relay.order, read_legs(self.folder), time.time()
        if set(order) <= set(self.refused):
            raise UserError("; ".join(f"{place} is not tried again: {why}" for place, why in self.refused.items()))
        turns = [turn for turn in turns_from(self.relay, legs, self._newest_batch()) if order[turn] not in self.refused]
        rests = {turn: rest_until(self.relay, order[turn], legs) for turn in turns}
        for turn in turns:
            if rests[turn] <= now:
                return turn
        until = min(rests.values())
        say(f"every place rests; the next try is in {until - now:.0f} s")
        self.ending.wait(until - now)
        return None

    def _newest_batch(self) -> int:
        """Of the newest save; 0 without one. Raises CheckpointError where that cannot be read, when it never could."""
        while True:
            try:
                newest = CheckpointStore(self.relay.store).candidates()[:1]
            except CheckpointError as error:
                if not self._has_read_saves or self.ending.num_asked:
                    raise
                say(f"{error}; looking again in {self.relay.rest}")
                self.ending.wait(self.relay.rest_seconds)
                continue
            self._has_read_saves = True
            return newest[0].batch if newest else 0

    # ------------------------------------------------------------------------------------------------ one launch

    def _begin(self, turn: int) -> Leg:
        """The journal knows of it first: should the relay be killed here, the next one looks for that launch."""
        name = self.relay.order[turn]
        place, batch = self.relay.places[name], self._newest_batch()
        number = max((leg.number for leg in read_legs(self.folder)), default=0) + 1
        leg = Leg(
            number=number,
            place=name,
            turn=turn,
            began=time.time(),
            from_batch=batch,
            host=socket.gethostname(),
            price=place.price,
            status_before=self._status(place),
        )
        begun = ("number", "place", "turn", "began", "from_batch", "host", "price", "status_before")
        journal.append(self.folder, **{key: getattr(leg, key) for key in begun})
        arguments = ["autoresume=true"]
        if self.relay.every is not None:
            arguments.append(f"stop_after={self.relay.every - batch % self.relay.every}ba")
        say(f"leg {number} at {name}, from batch {batch}; its output: {self._output(leg)}")
        command = place.launch.replace(ARGUMENTS, " ".join(arguments))
        self._launched = processes.begin(command, self._code_file(leg), self._output(leg))
        return leg

    def _wait(self, leg: Leg) -> None:
        """Until the launcher has ended and nothing of the launch is left; or until somebody asks for a second time."""
        is_told = False
        shell = self._launched.pid if self._launched is not None else processes.shell_of(self._code_file(leg))
        while shell is not None and self.ending.num_asked < 2:
            if self.ending.num_asked and not is_told:
                is_told = True
                self._ask(leg, shell)
            if self.ending.wait(None, shell):
                break
        if self.ending.num_asked < 2 and self._launched is not None:
            self._launched.wait()
            self._launched = None
        self._wait_for_remains(leg)
        self._wait_for_silence(leg, is_told)

    def _ask(self, leg: Leg, shell: int | None) -> None:
        """That the launch saves and leaves."""
        place = self.relay.places[leg.place]
        say(f"asking {leg.place} to leave")
        if place.leave is not None:
            answer = processes.ask(place.leave, ANSWER_SECONDS)
            if answer.code is None:
                say(f"{leg.place}: leave: not done in {ANSWER_SECONDS:.0f} s")
            elif answer.code != 0:
                say(f"{leg.place}: leave: exit code {answer.code}: {last_line(answer.errors)}")
        elif shell is not None:
            processes.terminate(processes.launcher_of(shell, self._code_file(leg)))

    def _wait_for_remains(self, leg: Leg) -> None:
        """Ranks of this machine whose launcher is gone: they are asked to leave, and at last made to."""
        kill_at = None
        while self.ending.num_asked < 2 and (left := processes.find(self._code_file(leg))):
            now = time.monotonic()
            if kill_at is None:
                kill_at = now + KILL_SECONDS
                processes.terminate(left)
            elif now >= kill_at:
                processes.terminate(left, signal.SIGKILL)
            self.ending.wait(LOOK_SECONDS)

    def _wait_for_silence(self, leg: Leg, is_told: bool) -> None:
        """A launch on another machine may go on when ssh has lost it; status.json tells."""
        place = self.relay.places[leg.place]
        is_told |= leg.host != socket.gethostname()  # its launcher may live there
        status, heard_at = self._status(place), time.monotonic()
        while self.ending.num_asked < 2 and status is not None and status["status"] == "running":
            if status == leg.status_before or time.monotonic() - heard_at > self.relay.silence_seconds:
                return
            if not is_told:
                is_told = True
                self._ask(leg, None)
            self.ending.wait(LOOK_SECONDS)
            status, before = self._status(place), status
            heard_at = heard_at if status == before else time.monotonic()

    def _end(self, leg: Leg) -> Leg:
        code, status = processes.exit_code(self._code_file(leg)), self._status(self.relay.places[leg.place])
        ended, reason = how_it_ended(code, status, leg.status_before)
        if reason is None and ended in (FAILED, REFUSED):
            reason = f"exit code {code}: {last_line(tail_of(self._output(leg)))}"
        batch = self._newest_batch()
        if ended == STOPPED and status is not None and batch < status["batch"]:
            raise UserError(
                f"checkpoints: {self.relay.store} has no save of batch {status['batch']}, at which {leg.place} "
                "stopped; name the run's save_folder"
            )
        journal.append(
            self.folder, number=leg.number, over=time.time(), to_batch=batch, code=code, ended=ended, reason=reason
        )
        say(f"leg {leg.number} at {leg.place}: {ended} at batch {batch}" + (f": {reason}" if reason else ""))
        if ended == REFUSED:
            self.refused[leg.place] = reason or f"exit code {code}"
        return read_legs(self.folder)[-1]

    def _status(self, place: Place) -> dict[str, Any] | None:
        if place.status is None:
            return read_status(self.folder)
        answer = processes.ask(place.status, ANSWER_SECONDS)
        if answer.code is None:
            say(f"{place.status}: not done in {ANSWER_SECONDS:.0f} s")
        with contextlib.suppress(ValueError, RecursionError):
            content = json.loads(answer.output)
            return content if is_sound(content) else None
        return None

    def _code_file(self, leg: Leg) -> Path:
        return (self.folder / FOLDER / f"{leg.number}.code").resolve()

    def _output(self, leg: Leg) -> Path:
        return self.folder / FOLDER / f"{leg.number}-{leg.place}.txt"


def turns_from(relay: Relay, legs: list[Leg], batch: int) -> list[int]:
    """Indices into the order of places, the one whose turn it is first."""
    num_turns = len(relay.order)
    if relay.every is not None:
        first = batch // relay.every
    else:
        first = legs[-1].turn + 1 if legs else 0
    return [(first + i) % num_turns for i in range(num_turns)]


def rest_until(relay: Relay, place: str, legs: list[Leg]) -> float:
    """In seconds since 1970: when that place may have the run again, by how its last legs ended."""
    here = [leg for leg in legs if leg.place == place and leg.over is not None]
    if not here or not here[-1].is_early:
        return 0.0
    num_in_vain = next((i for i, leg in enumerate(reversed(here)) if not leg.is_in_vain), len(here))
    rest = min(relay.rest_seconds * 2 ** max(0, num_in_vain - 1), LONGEST_REST_SECONDS)
    over = here[-1].over or 0.0
    return over + rest if over <= time.time() else 0.0  # the clock has been set back, and nobody knows by how much


def how_it_ended(
    code: int | None, status: dict[str, Any] | None, before: dict[str, Any] | None
) -> tuple[str, str | None]:
    """(how, why), from the launch command's exit code and from status.json, which is believed where this launch has
    written it: torchrun makes 1 of every code, and ssh 255 of a lost connection."""
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
