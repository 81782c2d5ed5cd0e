"""Start the ranks of `eval -n` and `replay -n` on this machine, and wait for them.

`run_ranks` is the top function. A single rank is a process that it starts directly. Several are started by Composer's
launcher (`composer_launcher.py`), or by torchrun if Composer is not installed. `train -n` has a launcher of its own in
the companion `llmfoundry_ops`, which can restart ranks.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import psutil

from llmfoundry_lite.companions import search_path
from llmfoundry_lite.errors import EXIT_FAILURE, EXIT_PREEMPTED, ConfigError
from llmfoundry_lite.ranks.rank import rank_variables
from llmfoundry_lite.ranks.signals import LEAVING_SIGNALS, handle_leaving_signals
from llmfoundry_lite.search_path import SAFE_PATH, SET_BY_US


def refuse_other_launchers(environment: Mapping[str, str] = os.environ) -> None:
    """Raise ConfigError if srun, torchrun or composer has started this process, which is about to start ranks itself.

    Otherwise each of the other launcher's ranks would start all ranks again.
    """
    num_slurm_tasks = environment.get("SLURM_STEP_NUM_TASKS") or "1"
    if num_slurm_tasks != "1":
        launcher = "srun"
    elif "RANK" not in environment:
        return
    elif "TORCHELASTIC_RUN_ID" in environment:
        launcher = "torchrun"
    else:
        launcher = "composer"
    raise ConfigError(f"-n: {launcher} has started this process as one of its ranks; leave out -n, or {launcher}")


def run_ranks(module: str, arguments: Sequence[str], num_ranks: int, logs: Path) -> int:
    """Run `python -m MODULE ARGUMENTS` as `num_ranks` processes, and wait until all have ended.

    Only rank 0 prints to this terminal; with Composer's launcher, rank R writes to `logs`/rankR.txt. torchrun prints
    all ranks here, and returns 1 for every failure.

    Signals that ask this process to leave are passed on to the ranks, because Composer's launcher would end and leave
    them behind. The process's own handlers are restored at the end. No rank imports a module from the working
    directory, unless the configuration names it.

    Returns the exit code of the process, or of the launcher if there are several ranks. Raises ConfigError if the logs
    cannot be written.
    """
    launcher = _build_launcher(num_ranks, logs)
    command = [sys.executable, "-P", *launcher, "-m", module, *arguments]
    process = subprocess.Popen(command, env=_build_environment())
    has_passed_on_signals = False

    def pass_on(number: int, frame: object) -> None:
        """Send the signal `number` to the ranks. Python calls this handler in the main thread."""
        nonlocal has_passed_on_signals
        has_passed_on_signals = True
        _send(number, _find_ranks(process.pid, num_ranks))

    handlers_before = {number: signal.getsignal(number) for number in LEAVING_SIGNALS}
    handle_leaving_signals(pass_on)
    try:
        exit_code = process.wait()
    finally:
        for number, handler in handlers_before.items():
            signal.signal(number, handler)

    if exit_code >= 0:
        return exit_code
    # A negative code is the signal that ended the launcher. If we passed one on, the user asked the ranks to leave.
    return EXIT_PREEMPTED if has_passed_on_signals else EXIT_FAILURE


def _build_launcher(num_ranks: int, logs: Path) -> list[str]:
    """Return the arguments of Python that run a launcher, before the `-m module` that each rank runs; [] for one rank.

    The launcher is Composer's, or torchrun if Composer is not installed. For Composer's, this also creates the folder
    `logs`, and removes symbolic links in it that have the names of the ranks' logs. Raises ConfigError if that fails.
    """
    if num_ranks == 1:
        return []
    if find_spec("composer") is None:
        return ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]

    try:
        logs.mkdir(parents=True, exist_ok=True)
        for rank in range(num_ranks):
            log = logs / f"rank{rank}.txt"
            if log.is_symlink():  # Composer would write through it, perhaps into any file of this user
                log.unlink()
    except OSError as error:
        raise ConfigError(
            f"{logs}: ranks cannot write their logs there: {error.strerror}; name another folder with --log-dir"
        ) from error

    # Composer fills in {rank} by `str.format`, so braces of the folder's own name are doubled.
    log_file = str(logs).replace("{", "{{").replace("}", "}}") + "/rank{rank}.txt"
    launcher = ["-m", "llmfoundry_lite.launch.composer_launcher", "-n", str(num_ranks)]
    return [*launcher, "--stdout", log_file, "--stderr", log_file]


def _build_environment() -> dict[str, str]:
    """Return the environment variables for a launcher and its ranks.

    They are those of this process, without the variables of a rank, such as RANK. This process has set these for its
    own checks, and the launcher sets them for each rank. `python -P` keeps the launcher from importing from the working
    directory; PYTHONSAFEPATH does so for the ranks. PYTHONPATH names this clone, which may be the working directory.
    """
    variables_of_rank = rank_variables(0, 1).keys()
    environment = {name: value for name, value in os.environ.items() if name not in variables_of_rank}
    environment |= search_path()
    environment.setdefault(SAFE_PATH, SET_BY_US)
    return environment


def _find_ranks(pid: int, num_ranks: int) -> list[psutil.Process]:
    """Return the processes that get a signal. `pid` is the process that `run_ranks` has started.

    These are the ranks, which are children of the launcher. It is the process `pid` itself if there is only one rank,
    or if the launcher has not started its ranks yet. Returns [] if the process has ended.
    """
    try:
        process = psutil.Process(pid)
        ranks = process.children() if num_ranks > 1 else []
    except psutil.Error:
        return []
    return ranks or [process]


def _send(number: int, processes: Sequence[psutil.Process]) -> None:
    """Send a signal by its number to processes. Those that have ended meanwhile are skipped."""
    for process in processes:
        with suppress(psutil.Error):
            process.send_signal(number)
