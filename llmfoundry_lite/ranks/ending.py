"""The end of a process of a launch: signals, the error that is printed, the exit code. No torch.

`run_and_exit` is the frame around every program that is a rank. When one rank fails, the others fail after it, or are
ended by the launcher, so that their own errors hide the reason. So ranks agree on the launch's first failure
(`claim_first_error`), only that is printed (`report_error`), and the exit code follows from it (`exit_code_of`).

Ranks learn of each other's end from the process group's store where there is one, and from `siblings` on each node.
The store is a dictionary that rank 0 keeps for all ranks. Its `compare_set(key, "", value)` sets a key that is not set
yet, and returns the value that the key then has; with an empty value, it only reads.
"""

import os
import re
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
    OwnCodeError,
    UserError,
    printable,
)
from llmfoundry_lite.ranks import siblings
from llmfoundry_lite.ranks.output import ignore_output_errors, say
from llmfoundry_lite.ranks.rank import adopt_srun, this_rank
from llmfoundry_lite.ranks.siblings import FirstError
from llmfoundry_lite.ranks.signals import (
    LEAVING_SIGNALS,
    describe_reason_to_leave,
    handle_leaving_signals,
    leave_now,
    signals_delayed,
)

# For a lost connection the exception is enough; the stack traces of torch's C++ bury the reason.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


class Preempted(BaseException):
    """Raised where a run must leave before its end; the same command carries on."""

    exit_code = EXIT_PREEMPTED

    def __init__(self, text: str, *, orderly: bool = False):
        """`orderly` says that all ranks have agreed to leave, so that none waits for another in a collective."""
        super().__init__(text)
        self.is_orderly = orderly


class AnotherFailedError(BaseException):
    """Raised on a rank that its launcher ends because another rank has failed, which has printed why."""

    def __init__(self, failure: FirstError):
        super().__init__(failure.text)
        self.failure = failure


EXIT_RETRY, EXIT_RETRY_LOST = 74, 71
"""From a rank to our launcher alone: a fault that may pass. The launch ends with 75, or with 1 where batches are lost
(`UserError.has_lost`), when the launcher has tried again for long enough."""
MAX_LOST_PEER_CHARACTERS = 80
"""Characters of torch's error that are quoted where contact with another rank is lost."""
LOST_CONTACT = "lost contact with another rank, which has died or lost its network"
"""Beginning of the error of a rank that knows no more than that another one is gone."""
ECHO_SECONDS = 2.0
"""One Ctrl-C reaches a rank up to three times: from the terminal, from the launcher, and as the launcher's SIGTERM.
SIGINTs within this time of the first are such echoes."""


def run_and_exit(main: Callable[[Sequence[str]], None]) -> NoReturn:
    """Run a program's `main(arguments)` as one rank of a launch, and exit with its code.

    A user's error is printed as one line, a bug as a traceback. Only the launch's first error is printed. Each way
    out is recorded for the other ranks on this node, before this process exits: `siblings` takes a rank that is gone
    without a record for one that was killed.
    """
    ignore_output_errors()
    raise_when_interrupted()
    try:
        try:
            adopt_srun()
            siblings.register_rank()
            main(sys.argv[1:])
        except BaseException:
            ignore_leaving_signals()  # the next signal would interrupt the handling below
            raise
    except Preempted as error:
        # All ranks are preempted together, so that one of them prints it. A rank that leaves alone may not run exit
        # handlers, which could wait for the others.
        if this_rank().rank == 0:
            say(describe_error(error), "ended", {"exit_code": error.exit_code}, file=sys.stderr)
        if not error.is_orderly:
            exit_now(error.exit_code)
        siblings.record_end(error.exit_code)
        sys.exit(error.exit_code)
    except BaseException as error:
        report_error(error)
        exit_now(exit_code_of(error))
    siblings.record_end(EXIT_DONE)
    sys.exit(EXIT_DONE)


def ignore_leaving_signals() -> None:
    """Ignore the signals that ask to leave from now on, because this rank is ending anyway."""
    handle_leaving_signals(lambda number, frame: None)


def sigterm_delayed() -> AbstractContextManager[None]:
    """Delay SIGTERM during a block of checks that have the same result on all ranks.

    A launcher sends SIGTERM to the other ranks when one has failed. If a check fails, it fails on this rank too,
    which then reports that error rather than a preemption. After the block, signals raise Preempted. A process alone
    delays nothing.
    """
    delayed = [signal.SIGTERM] if this_rank().world_size > 1 else []
    return signals_delayed(delayed, raise_when_interrupted)


@contextmanager
def leaving_during_imports() -> Iterator[None]:
    """Exit at once with code 75 if a signal asks to leave during a block of imports.

    An exception would not do, since modules swallow some while they are imported. Composer's module installs handlers
    that exit with 143, so handlers of these signals cannot be replaced in the block. After it, signals raise
    Preempted.
    """
    install_handler = signal.signal

    def install_unless_leaving_signal(number: int, handler: Any) -> Any:
        """Install a handler as `signal.signal` does, or leave the present one if the signal asks to leave."""
        if number in LEAVING_SIGNALS:
            return signal.getsignal(number)
        return install_handler(number, handler)

    handle_leaving_signals(leave_now)
    signal.signal = install_unless_leaving_signal
    try:
        yield
    finally:
        signal.signal = install_handler
    raise_when_interrupted()


def raise_when_interrupted() -> None:
    """Let the first signal that asks to leave raise Preempted in the main thread, while nothing needs to be saved.

    This installs the handlers, and returns. If the launcher sends the signal because another rank has failed,
    AnotherFailedError is raised instead. While the exception is handled, further signals are ignored, but a second
    press of Ctrl-C exits at once.
    """
    ctrl_c = CtrlC()

    def raise_preempted(number: int, frame: Any) -> None:
        """Handle the first signal: find out why it was sent, and raise an exception that says so."""
        name = signal.Signals(number).name
        handle_leaving_signals(exit_on_second_ctrl_c)
        exit_on_second_ctrl_c(number, frame)  # counts this one as the first press
        failure = find_failure_of_other_rank()
        if failure is not None:
            raise AnotherFailedError(failure)
        announce_preemption(name)
        raise Preempted(f"{describe_reason_to_leave(name)}; run the same command again")

    def exit_on_second_ctrl_c(number: int, frame: Any) -> None:
        """Handle the signals after the first: ignore all but a second press of Ctrl-C."""
        if number == signal.SIGINT and ctrl_c.is_second_press():
            exit_now(EXIT_INTERRUPTED)

    handle_leaving_signals(raise_preempted)


class CtrlC:
    """Tells a second press of Ctrl-C from the echoes of the first, which arrive within ECHO_SECONDS of it."""

    def __init__(self) -> None:
        self._first_pressed_at: float | None = None

    def is_second_press(self) -> bool:
        """Return whether Ctrl-C was pressed before, more than ECHO_SECONDS ago. To be called at each SIGINT."""
        now = time.monotonic()
        if self._first_pressed_at is None:
            self._first_pressed_at = now
        return now - self._first_pressed_at > ECHO_SECONDS


@contextmanager
def limited_wait(grace_seconds: float, limit_seconds: float, text: str, exit_code: int) -> Iterator[None]:
    """End this process if it stays in the block for too long. There must be nothing to save.

    grace_seconds: how long the block may go on after a signal that asks to leave. The process then exits as preempted.
        If another rank has failed, it exits at once, with that rank's code.
    limit_seconds: how long the block may take without a signal.
    text, exit_code: what is printed, and the code of this process, if `limit_seconds` are over.

    The block may wait in C++, where Python's signal handlers do not run. So a thread watches the time, and reads the
    signals from a pipe, into which Python's C code writes the number of each (`signal.set_wakeup_fd`).
    """
    is_over = threading.Event()
    reader, writer = os.pipe()

    def watch() -> None:
        """Wait in a thread until the block is over or the time is up, which is sooner after a signal."""
        signal_number: int | None = None  # the first signal that asked to leave
        end = time.monotonic() + limit_seconds
        while select.select([reader], [], [], max(0.0, end - time.monotonic()))[0]:
            signal_byte = os.read(reader, 1)
            if not signal_byte:
                return  # the block is over, and has closed the pipe
            if signal_number is None and signal_byte[0] in LEAVING_SIGNALS:
                signal_number = signal_byte[0]
                end = time.monotonic() + grace_seconds
                failure = find_failure_of_other_rank()
                if failure is not None:
                    report_error(AnotherFailedError(failure))
                    exit_now(failure.code)

        # The time is up.
        if is_over.is_set():
            return
        if signal_number is None:
            say(text, "ended", {"level": "error", "exit_code": exit_code}, file=sys.stderr)
        elif this_rank().rank == 0:
            reason = describe_reason_to_leave(signal.Signals(signal_number).name)
            say(f"{reason}; run the same command again", "ended", {"exit_code": EXIT_PREEMPTED}, file=sys.stderr)
        exit_now(exit_code if signal_number is None else EXIT_PREEMPTED)

    # Only the main thread may set the descriptor. In another thread, the time alone is watched.
    os.set_blocking(writer, False)
    is_main_thread = threading.current_thread() is threading.main_thread()
    descriptor_before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False) if is_main_thread else -1
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        is_over.set()
        if is_main_thread:
            signal.set_wakeup_fd(descriptor_before)
        os.close(writer)  # wakes the thread
        watcher.join()
        os.close(reader)


PREEMPTED = "llmfoundry_lite/preempted"
"""Key in the process group's store: the reason of the first rank that was asked to leave."""
STORE_SECONDS = 10.0
"""Time for which a rank that fails waits for the process group's store."""


def announce_preemption(reason: str) -> None:
    """Tell the other ranks through the store why this one leaves, in case it is gone before all have agreed to leave.

    `reason` is a signal's name or another reason. If another rank has announced one before, that reason stays. This
    rank waits a second at most for the store.
    """
    with suppress(RuntimeError):
        _ask_store(lambda store: store.compare_set(PREEMPTED, "", reason), 1.0)


def announced_preemption() -> str:
    """Return why the first rank that announced to leave does so; empty if none has, or if the store is gone."""
    store = _process_group_store()
    with suppress(RuntimeError):
        return store.compare_set(PREEMPTED, "", "").decode() if store is not None else ""
    return ""


def describe_error(error: BaseException) -> str:
    """Return what a rank prints for an error: one line for a user's error, the traceback for a bug, and both for an
    error of the user's own code.

    The one line begins with "error: ". Names in errors may come from files of anybody, so control characters are
    escaped. A preemption and another rank's failure are not errors of this rank, and have only their own text.
    """
    if isinstance(error, Preempted):
        return printable(str(error))
    if isinstance(error, AnotherFailedError):
        return str(error)
    if isinstance(error, UserError):
        line = f"error: {printable(str(error))}{error.remedy}"
        if isinstance(error, OwnCodeError) and error.__cause__ is not None:
            return f"{_format_traceback(error.__cause__)}\n{line}"
        return line
    if is_lost_peer(error):
        first_line = printable(str(error).splitlines()[0])
        # Gloo begins with a path of its source code, and ends with general advice and wishes.
        first_line = re.sub(r"^\[[^\]]*\] *", "", first_line)[:MAX_LOST_PEER_CHARACTERS]
        return f"error: {LOST_CONTACT}; its own output has the reason: {describe_output_location()} ({first_line})"
    return _format_traceback(error)


def _format_traceback(error: BaseException) -> str:
    """Return the traceback of an error as Python prints it, safe to print."""
    return printable("".join(traceback.format_exception(error)).rstrip(), keep="\n\t")


def is_lost_peer(error: BaseException) -> bool:
    """Return whether a collective failed because another rank is gone, by the words that gloo and NCCL use for it."""
    words = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "NCCL", "Timed out waiting")
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words)


def exit_code_of(error: BaseException) -> int:
    """Return the exit code of a rank that ends with this error.

    A rank that only lost contact with another one, or is ended because of it, has the code of the first rank that
    failed. Under our launcher, a fault that may pass has a code that makes it start the ranks again (EXIT_RETRY, or
    EXIT_RETRY_LOST if batches are lost). A bug has EXIT_FAILURE.
    """
    if isinstance(error, AnotherFailedError):
        return error.failure.code
    if is_lost_peer(error):
        with suppress(RuntimeError):  # the store is gone
            return claim_first_error(error).code
    if not isinstance(error, UserError):
        return EXIT_FAILURE
    if error.is_transient and RANK_LOGS in os.environ:
        return EXIT_RETRY_LOST if error.has_lost else EXIT_RETRY
    return error.exit_code


def report_error(error: BaseException) -> None:
    """Print the error with which this rank ends, unless another rank prints what is to be said.

    Each rank that ends with an error calls this, and one of them prints the launch's first. With a launcher of ours,
    the user does not see what ranks other than 0 print. So such a rank's mistake of the user is also shown beside the
    launcher's output, unless there is a process group, in which rank 0 prints it.
    """
    text = _choose_text_to_print(error)
    if not text:
        return
    exit_code = exit_code_of(error)
    facts: dict[str, Any] = {"level": "error"}
    if exit_code not in (EXIT_RETRY, EXIT_RETRY_LOST):  # our launcher decides on the code of the launch
        facts["exit_code"] = exit_code
    say(text, "ended", facts, file=sys.stderr)

    # Show a user's mistake beside the launcher's output, too, if rank 0 will not print it.
    is_unseen = launcher_stderr is not None and _process_group_store() is None
    if is_unseen and exit_code == EXIT_USER:
        with suppress(OSError):
            print(f"rank {this_rank().rank}: {text}", file=launcher_stderr, flush=True)


def _choose_text_to_print(error: BaseException) -> str:
    """Return what this rank prints when it ends with `error`; empty if it prints nothing.

    When one rank fails, the others fail after it, with errors that hide the reason. So the first prints its own, and
    with a process group, rank 0, whose output the user watches, prints that too. A bug that is not the first's is
    always printed where it happened, because a rank that failed later may have claimed to be the first.

    If rank 3 fails with a full disk, and ranks 0 and 1 lose contact with it, then rank 3 prints "error: no space left
    …", rank 0 prints "rank 3: error: no space left …", and rank 1 prints nothing.
    """
    rank = this_rank().rank
    text = describe_error(error)
    is_bug = text.startswith("Traceback") and not isinstance(error, AnotherFailedError)
    try:
        first = claim_first_error(error)
    except RuntimeError:  # rank 0, which keeps the store, is gone and has said why
        return text if is_bug else ""

    if first.rank == rank:
        return text
    if rank == 0 and _process_group_store() is not None:
        return text if first.text == text else f"rank {first.rank}: {first.text}"
    # Another rank was first, and prints its error. The same bug may have been reported with another traceback, from
    # further within.
    is_another_bug = is_bug and _summarise(first.text) != _summarise(text)
    return text if is_another_bug else ""


launcher_stderr: TextIO | None = None
"""Our launcher's standard error, on a rank whose own is a file. The launcher itself quotes the file for codes that it
would try again."""


def describe_cause(error: BaseException) -> str:
    """Return one line with the cause of this launch's end, as status.json has it, for a rank that ends with `error`.

    It is the message of the launch's first error, with the rank's number if that is another rank's. If the store is
    gone, it is the message of `error`.
    """
    text = describe_error(error)
    with suppress(RuntimeError):
        first = claim_first_error(error)
        is_of_this_rank = first.rank == this_rank().rank or first.text == text
        if not is_of_this_rank:
            return describe_failure(first)
    return _summarise(text)


MAX_SUMMARY_CHARACTERS = 400
"""Characters of an error's message that status.json and alerts have. The console has all of it."""
FIRST_ERROR = "llmfoundry_lite/first_error"
"""Key in the process group's store: `RANK CODE TEXT` of the first rank that has failed."""


def claim_first_error(error: BaseException) -> FirstError:
    """Record that this rank has failed with `error`, and return the launch's first failure, which may be this one.

    The first is decided by the process group's store, or without one, among the ranks of this node. Either has this
    rank's failure afterwards, unless another rank was first. So a further call has the same result.

    Raises RuntimeError if rank 0, which keeps the store, is gone.
    """
    # Record it on this node. The code of a lost peer is the first failure's, which is not known yet.
    exit_code = EXIT_FAILURE if is_lost_peer(error) else exit_code_of(error)
    text = describe_error(error)
    first_on_node = siblings.record_end(exit_code, text)
    if _process_group_store() is None:
        return first_on_node

    # Record it among all ranks, unless another rank has been first. Without an answer, this rank counts as the first.
    claimed_entry = f"{this_rank().rank} {exit_code} {text}"
    first_entry = _ask_store(lambda store: store.compare_set(FIRST_ERROR, "", claimed_entry).decode(), STORE_SECONDS)
    return _parse_first_error(claimed_entry if first_entry is None else first_entry)


FAILING, ALL_FAIL = "llmfoundry_lite/failing", "llmfoundry_lite/all_fail"
"""Keys in the process group's store, followed by a batch: how many ranks have failed after it, and whether all have."""
TOGETHER_SECONDS = 2.0
"""Time within which ranks that meet the same error are expected to have met it."""


def all_ranks_fail(batch: int) -> bool:
    """Return whether every rank has met an error after batch number `batch`.

    Then no rank waits for another in a collective, and all can still act together, for example save. Each rank that has
    met an error calls this, and waits up to TOGETHER_SECONDS for the others.

    The store counts the ranks that call. The last one to call writes the decision "yes", and a rank that has waited too
    long writes "no". The first decision stays, so that all ranks get the same answer, also one that calls later.
    Returns False if the store does not answer.
    """
    world_size = this_rank().world_size
    if world_size == 1:
        return True

    def decide(store: Any) -> bool:
        """Count this rank, and return the decision, which the last rank or one that has waited too long makes."""
        key = f"{ALL_FAIL}/{batch}"
        num_failing = store.add(f"{FAILING}/{batch}", 1)
        if num_failing == world_size:
            return store.compare_set(key, "", "yes") == b"yes"  # "no", if a rank has decided so by now

        # Wait for the decision of another rank.
        end = time.monotonic() + TOGETHER_SECONDS
        while time.monotonic() < end:
            decision = store.compare_set(key, "", "")
            if decision:
                return decision == b"yes"
            time.sleep(0.02)
        return store.compare_set(key, "", "no") == b"yes"

    try:
        return bool(_ask_store(decide, TOGETHER_SECONDS + STORE_SECONDS))
    except RuntimeError:  # rank 0, which keeps the store, is gone
        return False


def find_failure_of_other_rank() -> FirstError | None:
    """Return the failure of another rank because of which a launcher may be ending this one; None if none is known.

    None too if any rank has announced that it is preempted: a failure after that is a consequence. Ranks of this node
    come first, then the first error in the store. This rank waits for the store up to two seconds.
    """
    failure = siblings.find_recorded_failure()
    with suppress(RuntimeError):  # rank 0, which keeps the store, is gone
        if _ask_store(lambda store: store.compare_set(PREEMPTED, "", "").decode(), 1.0):
            return None
        entry = _ask_store(lambda store: store.compare_set(FIRST_ERROR, "", "").decode(), 1.0)
        if failure is None and entry:
            return _parse_first_error(entry)
    return failure


def describe_failure(failure: FirstError) -> str:
    """Return one line about the failure of a rank: its number, and the message of its error."""
    return f"rank {failure.rank}: {_summarise(failure.text)}"


def _parse_first_error(entry: str) -> FirstError:
    """Parse an entry of the store, `RANK CODE TEXT`. The text may contain spaces: "3 2 error: no space left"."""
    rank, code, text = entry.split(" ", 2)
    return FirstError(int(rank), int(code), text)


def _ask_store(ask: Callable[[Any], Any], seconds: float) -> Any:
    """Return `ask(store)` for the process group's store, or None if there is no store or no answer within `seconds`.

    Rank 0 keeps the store. If it is frozen, torch waits without an end, so `ask` runs in a thread, which is left
    running after `seconds`. Raises RuntimeError if rank 0 is gone.
    """
    store = _process_group_store()
    if store is None:
        return None
    answers: list[Any] = []  # the answer or the error, or nothing if the thread has not ended

    def run() -> None:
        """Ask the store, in a thread."""
        try:
            answers.append(ask(store))
        except RuntimeError as error:
            answers.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    answer = answers[0] if answers else None
    if isinstance(answer, RuntimeError):
        raise answer
    return answer


def _summarise(text: str) -> str:
    """Return the message of a printed error in one line, at most MAX_SUMMARY_CHARACTERS long, without a traceback.

    The message of an exception may have several lines, which are joined. The last of them alone is often only advice:
    CUDA's errors end with "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions."
    """
    lines = text.splitlines()
    if lines and lines[-1].startswith("error: "):  # it follows the traceback of the user's own code
        lines = lines[-1:]
    tracebacks = [index for index, line in enumerate(lines) if line.endswith("Traceback (most recent call last):")]
    if tracebacks:
        lines = lines[tracebacks[-1] + 1 :]
        while len(lines) > 1 and lines[0].startswith("  "):  # frames, their source code, and marks below that
            del lines[0]

    summary = " ".join(" ".join(lines).split()).removeprefix("error: ")
    if len(summary) > MAX_SUMMARY_CHARACTERS:
        summary = f"{summary[: MAX_SUMMARY_CHARACTERS - 1]}…"
    return summary


RANK_LOGS = "LLMFOUNDRY_LITE_RANK_LOGS"
"""Variable of our launcher: the folder of what ranks other than 0 print."""
LAUNCHED_AT = "LLMFOUNDRY_LITE_LAUNCHED_AT"
"""Variable of our launcher: when it began, by `identity.uptime`. `max_wall_time` counts from there, over restarts."""


def describe_output_location() -> str:
    """Say where the user can read what other ranks have printed. It depends on the launcher, known by its variables."""
    if RANK_LOGS in os.environ:
        return f"{os.environ[RANK_LOGS]}/rank1.txt and so on"
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return "torchrun shows it, or keeps it with --log-dir DIR --redirects 3"
    if "SLURM_STEP_NUM_TASKS" in os.environ:
        return "it is in srun's output"
    return "composer prints it when it ends, and keeps it with --stdout 'rank{rank}.txt' --stderr 'rank{rank}.err'"


def _process_group_store() -> Any:
    """Return the process group's store, which rank 0 keeps; None without a process group. Does not import torch."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed.distributed_c10d._get_default_store()


def exit_now(code: int) -> NoReturn:
    """Record this rank's end, and exit without running exit handlers.

    Exit handlers of a rank that has failed may wait in a collective that no other rank will join.
    """
    siblings.record_end(code)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
