"""Exit with 0 if status.json of the run of these arguments says that it is to be launched again, after a given time.

    python3 scripts/slurm/was_preempted.py 1700000000 yamls/pretrain/mpt-1b.yaml run_name=…

That is a run that was preempted. Batch scripts need this when a signal has ended a rank, because the launcher's exit
code is then that signal's. It is also a run that failed by a fault that may pass, such as a bucket that was down for
longer than `max_unsaved`, if that launch had saved something before.
"""

import sys
from pathlib import Path

from llmfoundry_lite.config.load_train import load_train_config
from llmfoundry_lite.ranks.status import STATUS, TRY_AGAIN, read_status


def is_to_go_on(since: float, arguments: list[str]) -> bool:
    """Return whether the run is to be launched again, by what was written after `since` (seconds since 1970)."""
    folder = Path(load_train_config(arguments).config.run_folder)
    status = read_status(folder)
    if status is None or (folder / STATUS).stat().st_mtime < since:
        return False  # earlier launches do not count
    return status["status"] == "preempted" or (status["status"] == "failed" and status.get(TRY_AGAIN) is True)


if __name__ == "__main__":
    sys.exit(0 if is_to_go_on(float(sys.argv[1]), sys.argv[2:]) else 1)
