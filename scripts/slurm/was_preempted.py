"""Exit with 0 if status.json of the run of these arguments says that it was preempted after a given time.

    python3 scripts/slurm/was_preempted.py 1700000000 yamls/pretrain/mpt-1b.yaml run_name=…

Batch scripts need this when a signal has ended a rank, because the launcher's exit code is then that signal's.
"""

import sys
from pathlib import Path

from llmfoundry_lite.config.load_train import load_train_config
from llmfoundry_lite.ranks.status import STATUS, read_status


def was_preempted(since: float, arguments: list[str]) -> bool:
    """Return whether the run was preempted after `since` (seconds since 1970); earlier launches do not count."""
    folder = Path(load_train_config(arguments).config.run_folder)
    status = read_status(folder)
    return status is not None and status["status"] == "preempted" and (folder / STATUS).stat().st_mtime >= since


if __name__ == "__main__":
    sys.exit(0 if was_preempted(float(sys.argv[1]), sys.argv[2:]) else 1)
