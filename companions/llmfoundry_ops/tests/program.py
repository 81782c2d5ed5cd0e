"""A program for the launcher to start, and the launcher's own process.

    python -m llmfoundry_ops.tests.program LOGS NUM_RANKS MAX_RESTARTS WORD…

Each word says what a rank does on a try, `RANK.TRY=ACTION` (`1.0=exit:2`); ranks that no word names leave with 0.
"""

import os
import signal
import sys
import time
from pathlib import Path


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

    launcher.SILENCE_SECONDS = float(os.environ.get("SILENCE_SECONDS", launcher.SILENCE_SECONDS))
    logs, num_ranks, max_restarts, imports, *words = sys.argv[1:]
    program = launcher.Program("llmfoundry_ops.tests.program", imports)
    one = launcher.Launcher(program, int(num_ranks), int(max_restarts), Path(logs))
    one.retry_seconds = float(os.environ.get("RETRY_SECONDS", "0"))
    return one.run(words)


if __name__ == "__main__":
    sys.exit(launch())
