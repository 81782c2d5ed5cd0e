"""What status.json says while a run runs; and the export at its end, which is its own affair: training is done."""

import datetime
import errno
import json
import os
import threading
from pathlib import Path

import pytest
import torch.distributed as dist
from composer.core import Callback

from llmfoundry_lite.status import read_status
from llmfoundry_lite.training import train as training
from tests.helpers.tiny import tiny_config
from tests.training.runs import run, status

pytestmark = pytest.mark.multiprocess


class Export(Callback):
    """Collectives may take a second from now on, and rank 0 writes for three; or its disk is full."""

    def __init__(self, fails: bool):
        self.fails = fails

    def fit_end(self, state, logger):
        dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=1))
        write = training.export_model

        def export_model(*arguments, **options):
            assert os.environ["RANK"] == "0"
            if self.fails:
                raise OSError(errno.ENOSPC, "No space left on device")
            threading.Event().wait(3)
            write(*arguments, **options)

        training.export_model = export_model


class Watch(Callback):
    def __init__(self):
        training.STATUS_SECONDS = 0
        self.seen = []

    def batch_start(self, state, logger):
        self.seen.append(read_status(Path("runs/run")))

    def fit_end(self, state, logger):
        Path("seen.json").write_text(json.dumps(self.seen))


def test_a_run_can_be_watched(tmp_path, data):
    run(tmp_path, tiny_config(data, max_duration="3ba", callbacks={f"python:{__name__}:Watch": {}}), "run")
    seen = json.loads((tmp_path / "seen.json").read_text())
    assert [(found["status"], found["batch"], found["reason"]) for found in seen] == [
        ("running", 0, None),
        ("running", 1, None),
        ("running", 2, None),
    ]
    assert status(tmp_path, "run") == {"status": "done", "batch": 3, "reason": None}


@pytest.mark.parametrize("fails", [False, True])
def test_neither_a_slow_nor_a_failed_export_is_the_failure_of_a_run(tmp_path, data, fails):
    callbacks = {f"python:{__name__}:Export": {"fails": fails}}
    config = tiny_config(data, max_duration="2ba", export_at_end=True, callbacks=callbacks)
    result = run(tmp_path, config, "run", 2)
    last = result.output.splitlines()[-1]
    if fails:
        assert last == (
            "not exported to runs/run/huggingface: [Errno 28] No space left on device; "
            "`llmfoundry-lite checkpoint export runs/run runs/run/huggingface` makes up for it"
        )
    else:
        assert last == "exported to runs/run/huggingface"
    assert (tmp_path / "runs/run/huggingface/config.json").exists() != fails
    assert status(tmp_path, "run") == {"status": "done", "batch": 2, "reason": None}
    assert "Traceback" not in "".join(result.outputs)
