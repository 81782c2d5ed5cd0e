"""A program for the launcher to start, and the launcher's own process.

    python -m llmfoundry_ops.tests.program LOGS NUM_RANKS MAX_RESTARTS WORD…

Each word says what a rank does on a try, `RANK.TRY=ACTION` (`1.0=exit:2`); ranks that no word names leave with 0.
"""

import os
import signal
import sys
import time
from pathlib import Path

PAUSES_OF_TESTS = (0.0, 0.2)
"""Pauses before restarts in a row, in seconds: enough to see that a launcher pauses, and says so."""
GRACE_OF_TESTS = 0.1
"""Seconds that ranks which wait for a signal get after another has failed; they use all of them."""
SILENCE_SECONDS = float(os.environ.get("SILENCE_SECONDS", "0"))
"""Time after which a rank is frozen; 0 for the launcher's own. Heartbeats and looks are as many in it as usual."""

if SILENCE_SECONDS:
    # Ranks are forks of the server, which imports this module, and runs as a program itself.
    vars(sys.modules["__main__"])["BEAT_SECONDS"] = SILENCE_SECONDS / 10


def main(arguments: list[str]) -> None:
    """Run one rank. The number of its try is that of earlier tries that have left a file."""
    rank, folder = os.environ["RANK"], Path(os.environ["LLMFOUNDRY_LITE_RANK_LOGS"])
    tries = len(list(folder.glob(f"began-{rank}.*")))
    (folder / f"began-{rank}.{tries}").write_text(f"{os.getpid()} {' '.join(arguments)}")
    while len(list(folder.glob(f"began-*.{tries}"))) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.01)  # no rank ends a try that another has not begun
    print(f"rank {rank} of {os.environ['WORLD_SIZE']} speaks, try {tries}", flush=True)
    words = dict(word.split("=", 1) for word in arguments)
    action, _, value = words.get(f"{rank}.{tries}", "exit:0").partition(":")
    if action == "exit":
        os._exit(int(value))
    if action == "kill":
        os.kill(os.getpid(), int(value) if value.isdecimal() else signal.Signals[value])
    if action == "hold":
        sum(range(int(value)))  # holds the interpreter's lock, so that no heartbeat is sent
    if action == "wait":
        while True:
            signal.pause()
    if action == "raise":
        raise RuntimeError(value)


def launch() -> int:
    from llmfoundry_ops import launcher

    if SILENCE_SECONDS:
        launcher.SILENCE_SECONDS = SILENCE_SECONDS
        launcher.BEAT_SECONDS = SILENCE_SECONDS / 10
        launcher.CHECK_SECONDS = SILENCE_SECONDS / 20
    launcher.PAUSE_SECONDS = PAUSES_OF_TESTS
    # Ranks that leave after a signal have all the time that users' ranks have, however busy the machine is.
    for code in (launcher.EXIT_RETRY, launcher.EXIT_RETRY_LOST, launcher.EXIT_FAILURE):
        launcher.GRACE_SECONDS[code] = GRACE_OF_TESTS
    logs, num_ranks, max_restarts, imports, *words = sys.argv[1:]
    program = launcher.Program("llmfoundry_ops.tests.program", imports)
    one = launcher.Launcher(program, int(num_ranks), int(max_restarts), Path(logs))
    one.retry_seconds = float(os.environ.get("RETRY_SECONDS", "0"))
    return one.run(words)


if __name__ == "__main__":
    sys.exit(launch())
