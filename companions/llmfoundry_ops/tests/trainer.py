"""Leaves what a launch leaves in its run folder, without training: status.json, checkpoints, a line for each batch.

    python -m llmfoundry_ops.tests.trainer runs/x 60 [seconds_per_batch=0.01] [host=elsewhere] stop_after=20ba …

Saves every 5 batches and when it leaves; SIGTERM or SIGUSR1 makes it leave with 75.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

from llmfoundry_lite.checkpoint.store import CheckpointStore
from llmfoundry_lite.errors import EXIT_PREEMPTED
from llmfoundry_lite.ranks.status import STATUS, write_status
from tests.checkpoint.saves import save

SAVE_INTERVAL = 5


def main(folder: Path, num_batches: int, options: dict[str, str]) -> int:
    asked: list[int] = []
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda number, frame: asked.append(number))
    folder.mkdir(parents=True, exist_ok=True)
    store = CheckpointStore(folder / "checkpoints")
    newest = store.newest_intact().checkpoint
    lease = store.acquire()
    batch = newest.manifest.timestamp.batch if newest is not None else 0
    stop_at = batch + int(options.get("stop_after", "1000000ba").removesuffix("ba"))
    note(folder, "running", batch, options)
    while batch < min(num_batches, stop_at) and not asked:
        time.sleep(float(options.get("seconds_per_batch", "0.002")))  # the batch
        batch += 1
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"batch": batch, "pid": os.getpid(), "site": options.get("site")}) + "\n")
        if batch % SAVE_INTERVAL == 0:
            save(store, lease, batch)
    if batch % SAVE_INTERVAL:
        save(store, lease, batch)
    ended = "done" if batch == num_batches else "preempted" if asked else "stopped"
    note(folder, ended, batch, options)
    return EXIT_PREEMPTED if ended == "preempted" else 0


def note(folder: Path, status: str, batch: int, options: dict[str, str]) -> None:
    write_status(folder, status, batch, "preempted by SIGTERM" if status == "preempted" else None)
    if host := options.get("host"):
        content = json.loads((folder / STATUS).read_text())
        content.get("process", {}).update(host=host, boot=host)
        (folder / STATUS).write_text(json.dumps(content))


if __name__ == "__main__":
    run, count, *words = sys.argv[1:]
    sys.exit(main(Path(run), int(count), dict(word.split("=", 1) for word in words)))
