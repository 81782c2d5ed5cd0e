"""Several ranks of this machine for `eval -n` and `replay -n`, started by `composer`, or by torchrun without it."""

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
from llmfoundry_lite.ranks.signals import LEAVING_SIGNALS, listen
from llmfoundry_lite.search_path import SAFE_PATH, SET_BY_US

COMPOSER = r"""
import re, sys
from composer.cli import launcher
from llmfoundry_lite.ranks.output import ignore_output_errors
ignore_output_errors()
NEEDLESS = re.compile(r"-+Begin global rank \d+ (?:STDERR-+\n.*?|STDOUT-+\n\s*)-+End global rank \d+ \w+-+\n?", re.S)
launcher.print = lambda text: text.startswith("Waiting up to") or print(NEEDLESS.sub("", text).rstrip())
sys.exit(launcher.main())
"""
"""`composer`, without announcing that it waits, and with one block for a rank's output, if there is any."""


def refuse_other_launchers(environment: Mapping[str, str] = os.environ) -> None:
    """Raise ConfigError inside another launcher: each of its ranks would start all ranks again."""
    under_srun = (environment.get("SLURM_STEP_NUM_TASKS") or "1") != "1"
    if under_srun or "RANK" in environment:
        other = "srun" if under_srun else "torchrun" if "TORCHELASTIC_RUN_ID" in environment else "composer"
        raise ConfigError(f"-n: {other} has started this process as one of its ranks; leave out -n, or {other}")


def run_ranks(module: str, arguments: Sequence[str], num_ranks: int, logs: Path) -> int:
    """Run `python -m module` on each rank, and return the exit code; of several, it is their launcher's.

    Rank 0 prints here. composer has rank R print into `logs`/rankR.txt; torchrun has all print here, and makes 1 of
    every code. Signals go to the ranks, which composer would leave behind. No module in the working directory is
    imported, unless the configuration names it. Raises ConfigError for a folder that takes no logs.
    """
    launcher: list[str] = []
    if num_ranks > 1 and find_spec("composer") is None:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    elif num_ranks > 1:
        try:
            logs.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{logs}: ranks cannot write their logs there: {error.strerror}; --log-dir") from error
        file = str(logs).replace("{", "{{").replace("}", "}}") + "/rank{rank}.txt"
        launcher = ["-c", COMPOSER, "-n", str(num_ranks), "--stdout", file, "--stderr", file]
    command = [sys.executable, "-P", *launcher, "-m", module, *arguments]
    environment = {name: value for name, value in os.environ.items() if name not in rank_variables(0, 1)}
    environment |= search_path()
    environment.setdefault(SAFE_PATH, SET_BY_US)  # for the launcher, and for the ranks that it starts
    process, asked = subprocess.Popen(command, env=environment), list[int]()

    def pass_on(number: int, frame: object) -> None:
        asked.append(number)
        with suppress(psutil.Error):
            launched = psutil.Process(process.pid)
            for one in (launched.children() if num_ranks > 1 else []) or [launched]:
                one.send_signal(number)

    before = {number: signal.getsignal(number) for number in LEAVING_SIGNALS}
    listen(pass_on)
    try:
        code = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return code if code >= 0 else EXIT_PREEMPTED if asked else EXIT_FAILURE
