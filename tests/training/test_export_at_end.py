"""The export at the end of a run is its own affair: training is done by then."""

import datetime
import errno
import os
import threading

import pytest
import torch.distributed as dist
from composer.core import Callback

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
