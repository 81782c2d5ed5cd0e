"""The end of a process of a launch: signals, the error that is printed, the exit code. No torch; ranks tell each other
by the process group's store when there is one."""

import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, NoReturn, TextIO

from llmfoundry_lite.errors import (
    EXIT_DONE,
    EXIT_FAILURE,
    EXIT_INTERRUPTED,
    EXIT_PREEMPTED,
    EXIT_USER,
    UserError,
    printable,
)
from llmfoundry_lite.ranks import siblings
from llmfoundry_lite.ranks.output import ignore_output_errors
from llmfoundry_lite.ranks.rank import adopt_srun, this_rank
from llmfoundry_lite.ranks.siblings import FirstError
from llmfoundry_lite.ranks.signals import LEAVING_SIGNALS, leave_now, leaving_because, listen, put_off

# For a lost connection the exception is enough; the stack traces of torch's C++ bury the reason.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


class Preempted(BaseException):
    """The run must leave before its end; the same command carries on."""

    exit_code = EXIT_PREEMPTED

    def __init__(self, text: str, *, orderly: bool = False):
        super().__init__(text)
        self.is_orderly = orderly
        """All ranks have agreed to leave, and nobody waits for anybody."""


class AnotherFailedError(BaseException):
    """The launcher ends this rank because another has failed, which has said why."""

    def __init__(self, failure: FirstError):
        super().__init__(failure.text)
        self.failure = failure


EXIT_RETRY, EXIT_RETRY_LOST = 74, 71
"""From a rank to our launcher alone: a fault that may pass. The launch ends with 75, or with 1 where batches are lost
(`UserError.has_lost`), when the launcher has tried again for long enough."""
ECHO_SECONDS = 2.0
"""One Ctrl-C reaches a rank up to three times: from the terminal, from the launcher, and as the launcher's SIGTERM."""


def run_and_exit(main: Callable[[Sequence[str]], None]) -> NoReturn:
    """Run a script's `main(arguments)` and exit; print one line for a user's error, a traceback for a bug."""
    ignore_output_errors()
    raise_when_interrupted()
    try:
        try:
            adopt_srun()
            siblings.enrol()
            main(sys.argv[1:])
        except BaseException:
            ignore_signals()
            raise
    except Preempted as error:
        if this_rank().rank == 0:
            print(describe(error), file=sys.stderr, flush=True)
        if not error.is_orderly:
            leave(error.exit_code)
        siblings.note_end(error.exit_code)
        sys.exit(error.exit_code)
    except BaseException as error:
        report(error)
        leave(exit_code_of(error))
    siblings.note_end(EXIT_DONE)
    sys.exit(EXIT_DONE)


def ignore_signals() -> None:
    """Ignore signals from now on: this rank is ending, and a launcher's signal would only ask for the same."""
    listen(lambda number, frame: None)


def checks() -> AbstractContextManager[None]:
    """Delay SIGTERM until the end of a block whose checks have the same result on all ranks: if it comes because
    another rank has failed, this one fails with the same error. After the block, signals raise Preempted."""
    return put_off([signal.SIGTERM] if this_rank().world_size > 1 else [], raise_when_interrupted)


@contextmanager
def imports() -> Iterator[None]:
    """Leave at once when a signal comes in a block that imports: modules swallow exceptions meanwhile.

    Composer's module installs handlers that exit with 143; they are not accepted. After the block, signals raise
    Preempted.
    """
    install = signal.signal

    def keep(number: int, handler: Any) -> Any:
        return signal.getsignal(number) if number in LEAVING_SIGNALS else install(number, handler)

    listen(leave_now)
    signal.signal = keep
    try:
        yield
    finally:
        signal.signal = install
    raise_when_interrupted()


def raise_when_interrupted() -> None:
    """Let the first signal that asks to leave raise Preempted: nothing has been trained yet that could be saved."""
    pressed_at: list[float] = []

    def leave_soon(number: int, frame: Any) -> None:
        name = signal.Signals(number).name
        listen(leave_at_once)
        leave_at_once(number, frame)
        if failure := known_failure():
            raise AnotherFailedError(failure)
        announce_preemption(name)
        raise Preempted(f"{leaving_because(name)}; run the same command again")

    def leave_at_once(number: int, frame: Any) -> None:
        if number == signal.SIGINT and is_second_press(pressed_at):
            leave(EXIT_INTERRUPTED)

    listen(leave_soon)


@contextmanager
def ending_in_time(grace_seconds: float, limit_seconds: float, text: str, exit_code: int) -> Iterator[None]:
    """End the process if it stays in the block, which may wait in C++ for ever. It ends `grace_seconds` after a signal
    that asks to leave: Python's handlers do not run there, and there is nothing to save yet. After `limit_seconds` it
    ends with a `text`."""
    is_over, (reader, writer) = threading.Event(), os.pipe()

    def watch() -> None:
        asked: int | None = None
        end = time.monotonic() + limit_seconds
        while select.select([reader], [], [], max(0.0, end - time.monotonic()))[0]:
            if not (number := os.read(reader, 1)):
                return
            if asked is None and number[0] in LEAVING_SIGNALS:
                asked, end = number[0], time.monotonic() + grace_seconds
                if failure := known_failure():
                    report(AnotherFailedError(failure))
                    leave(failure.code)
        if is_over.is_set():
            return
        said = text if asked is None else f"{leaving_because(signal.Signals(asked).name)}; run the same command again"
        if asked is None or this_rank().rank == 0:
            print(said, file=sys.stderr, flush=True)
        leave(exit_code if asked is None else EXIT_PREEMPTED)

    os.set_blocking(writer, False)
    hears = threading.current_thread() is threading.main_thread()
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False) if hears else -1
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        is_over.set()
        if hears:
            signal.set_wakeup_fd(before)
        os.close(writer)
        watcher.join()
        os.close(reader)


def is_second_press(pressed_at: list[float]) -> bool:
    """Note a SIGINT in `pressed_at`. Return whether Ctrl-C was pressed before and this is no echo of that."""
    now = time.monotonic()
    pressed_at.append(now)
    return now - pressed_at[0] > ECHO_SECONDS


PREEMPTED = "llmfoundry_lite/preempted"
STORE_SECONDS = 10.0
"""How long a rank that fails waits for the process group's store."""


def announce_preemption(reason: str) -> None:
    """Tell other ranks why this one leaves, in case it does before they agree. Waits for the store a second at most."""
    with suppress(RuntimeError):
        _ask_store(lambda store: store.compare_set(PREEMPTED, "", reason), 1.0)


def announced_preemption() -> str:
    """Return the reason that any rank has announced; empty if none has."""
    store = _process_group_store()
    with suppress(RuntimeError):
        return store.compare_set(PREEMPTED, "", "").decode() if store is not None else ""
    return ""


def describe(error: BaseException) -> str:
    """Return one line for a user's error, the traceback for a bug."""
    if isinstance(error, Preempted):
        return printable(str(error))
    if isinstance(error, AnotherFailedError):
        return str(error)
    if isinstance(error, UserError):
        return f"error: {printable(str(error))}{error.remedy}"
    if is_lost_peer(error):
        return (
            "error: lost contact with another rank, which has died or lost its network; "
            f"its own output has the reason: {where_outputs_are()} ({printable(str(error).splitlines()[0])})"
        )
    return printable("".join(traceback.format_exception(error)).rstrip(), keep="\n\t")


def is_lost_peer(error: BaseException) -> bool:
    """Return whether a collective failed because the other side is gone (gloo's and NCCL's words for it)."""
    words = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "NCCL", "Timed out waiting")
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words)


def exit_code_of(error: BaseException) -> int:
    """Return this rank's exit code. A rank that has only lost another one has the code of the first to fail."""
    code = error.exit_code if isinstance(error, UserError) else EXIT_FAILURE
    if isinstance(error, UserError) and error.is_transient and RANK_LOGS in os.environ:
        code = EXIT_RETRY_LOST if error.has_lost else EXIT_RETRY
    if isinstance(error, AnotherFailedError):
        return error.failure.code
    if is_lost_peer(error):
        with suppress(RuntimeError):
            code = first_error(error).code
    return code


def report(error: BaseException) -> None:
    """Print the launch's first error, on the rank that had it. With a process group rank 0, whose output the user
    watches, prints it too.

    When one rank fails the others fail after it, with words that hide the reason: rank 0 prints those of the first.
    Another traceback is always printed where it happened: a rank that failed after it may have been noted first.
    """
    here, text, said = this_rank(), describe(error), ""
    is_bug = text.startswith("Traceback") and not isinstance(error, AnotherFailedError)
    try:
        first = first_error(error)
        if first.rank == here.rank:
            said = text
        elif here.rank == 0 and _process_group_store() is not None:
            said = text if first.text == text else f"rank {first.rank}: {first.text}"
        elif is_bug and _last_line(first.text) != _last_line(text):  # the same one may have been noted further within
            said = text
    except RuntimeError:  # rank 0, which keeps the store, is gone and has said why
        said = text if is_bug else ""
    if said:
        print(said, file=sys.stderr, flush=True)
        if shown is not None and _process_group_store() is None and exit_code_of(error) == EXIT_USER:
            with suppress(OSError):
                print(f"rank {here.rank}: {said}", file=shown, flush=True)


shown: TextIO | None = None
"""Our launcher's standard error, on a rank whose own is a file. The launcher itself quotes the file for codes that it
would try again."""


def cause_of(error: BaseException) -> str:
    """Return the last line of the launch's first error, with its rank if it is another; else that of `error`."""
    text = describe(error)
    with suppress(RuntimeError):
        first = first_error(error)
        if first.rank != this_rank().rank and first.text != text:
            return describe_failure(first)
    return _last_line(text)


FIRST_ERROR = "llmfoundry_lite/first_error"


def first_error(error: BaseException) -> FirstError:
    """Return the first failure of any rank, `error` if this rank is the first: from the process group's store, or this
    node's without one. Raises RuntimeError when the store is gone."""
    code = EXIT_FAILURE if is_lost_peer(error) else exit_code_of(error)
    text = describe(error)
    first = siblings.note_end(code, text)
    if _process_group_store() is None:
        return first
    mine = f"{this_rank().rank} {code} {text}"
    told = _ask_store(lambda store: store.compare_set(FIRST_ERROR, "", mine).decode(), STORE_SECONDS)
    return _parse(mine if told is None else told)


FAILING, ALL_FAIL = "llmfoundry_lite/failing", "llmfoundry_lite/all_fail"
TOGETHER_SECONDS = 2.0
"""Time within which ranks that meet the same error are expected to have met it."""


def all_ranks_fail(batch: int) -> bool:
    """Return whether every rank has met an error after that batch: then none waits for another in a collective, and all
    can still act together. Every rank that has met one calls this; all get the same answer."""
    world_size = this_rank().world_size
    if world_size == 1:
        return True

    def ask(store: Any) -> bool:
        decision = f"{ALL_FAIL}/{batch}"
        if store.add(f"{FAILING}/{batch}", 1) == world_size:
            return store.compare_set(decision, "", "yes") == b"yes"  # unless one has given up by now
        end = time.monotonic() + TOGETHER_SECONDS
        while time.monotonic() < end:
            if told := store.compare_set(decision, "", ""):
                return told == b"yes"
            time.sleep(0.02)
        return store.compare_set(decision, "", "no") == b"yes"

    try:
        return bool(_ask_store(ask, TOGETHER_SECONDS + STORE_SECONDS))
    except RuntimeError:  # rank 0, which keeps the store, is gone
        return False


def known_failure() -> FirstError | None:
    """Return the first failure of another rank, because of which a launcher ends this one. None if there is none, or a
    rank was preempted before it."""
    failure = siblings.failure_of_another()
    with suppress(RuntimeError):  # rank 0, which keeps the store, is gone
        if _ask_store(lambda store: store.compare_set(PREEMPTED, "", "").decode(), 1.0):
            return None
        told = _ask_store(lambda store: store.compare_set(FIRST_ERROR, "", "").decode(), 1.0)
        failure = failure or (_parse(told) if told else None)
    return failure


def describe_failure(failure: FirstError) -> str:
    return f"rank {failure.rank}: {_last_line(failure.text)}"


def _parse(told: str) -> FirstError:
    rank, code, text = told.split(" ", 2)
    return FirstError(int(rank), int(code), text)


def _ask_store(ask: Callable[[Any], Any], seconds: float) -> Any:
    """Return the answer of the process group's store; None without one, and after `seconds`: rank 0 keeps the store,
    and torch waits for a frozen rank for ever. Raises RuntimeError when rank 0 is gone."""
    store, answers = _process_group_store(), []
    if store is None:
        return None

    def run() -> None:
        try:
            answers.append(ask(store))
        except RuntimeError as error:
            answers.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if answers and isinstance(answers[0], RuntimeError):
        raise answers[0]
    return answers[0] if answers else None


def _last_line(text: str) -> str:
    return text.splitlines()[-1].removeprefix("error: ")


RANK_LOGS = "LLMFOUNDRY_LITE_RANK_LOGS"
"""Variable of our launcher: the folder of what ranks other than 0 print."""
LAUNCHED_AT = "LLMFOUNDRY_LITE_LAUNCHED_AT"
"""Variable of our launcher: when it began, by `identity.uptime`. `max_wall_time` counts from there, over restarts."""


def where_outputs_are() -> str:
    """Say where to read what other ranks have printed, by launcher."""
    if RANK_LOGS in os.environ:
        return f"{os.environ[RANK_LOGS]}/rank1.txt and so on"
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return "torchrun shows it, or keeps it with --log-dir DIR --redirects 3"
    if "SLURM_STEP_NUM_TASKS" in os.environ:
        return "it is in srun's output"
    return "composer prints it when it ends, and keeps it with --stdout 'rank{rank}.txt' --stderr 'rank{rank}.err'"


def _process_group_store() -> Any:
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed.distributed_c10d._get_default_store()


def leave(code: int) -> NoReturn:
    """Exit without waiting: exit handlers of a rank that failed may sit in a collective no one else will join."""
    siblings.note_end(code)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
