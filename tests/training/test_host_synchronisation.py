"""How often a batch waits: for its device, and for other ranks beside FSDP's own collectives."""

import json
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from composer.core import Callback
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers.launch import train
from tests.helpers.tiny import tiny_config, write_config, write_data

pytestmark = pytest.mark.multiprocess
COLLECTIVES = ("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_single", "broadcast", "reduce_scatter")
READS = ("item", "tolist", "cpu")
NUM_BATCHES = 3


class Count(Callback):
    """From the end of batch 2, `NUM_BATCHES` batches. Reads are numbers of tensors that Python sees, unless they lie in
    host memory by their nature (`ranks/exchange.py`, and what is loaded); collectives are those that torch.distributed
    is asked for by others than FSDP."""

    def __init__(self):
        self.counted: Counter[str] = Counter()

    def batch_end(self, state, logger):
        batch = int(state.timestamp.batch)
        if batch == 2:
            self.watch()
        elif batch == 2 + NUM_BATCHES:
            self.mode.__exit__(None, None, None)
            Path(f"counted-{dist.get_rank()}.json").write_text(json.dumps(self.counted))

    def watch(self):
        for name in COLLECTIVES:
            if hasattr(dist, name):
                self.spy(dist, name, "collective")
        for name in READS:
            self.spy(torch.Tensor, name, "read")
        self.mode = Scalars(self)
        self.mode.__enter__()

    def spy(self, owner, name, kind):
        real = getattr(owner, name)

        def counted(*args, **kwargs):
            self.note(kind, name)
            return real(*args, **kwargs)

        setattr(owner, name, counted)

    def note(self, kind, name):
        files = []
        frame = sys._getframe(2)
        while frame is not None:
            files.append(frame.f_code.co_filename)
            frame = frame.f_back
        outside = [file for file in files if "/torch/" not in file and file != __file__]
        is_fsdp = any("/fsdp/" in file and "/torch/" in file for file in files)
        is_hosts = outside[0].endswith(("ranks/exchange.py", "data/loader.py", "training/agreement.py"))
        if not is_fsdp and not (kind == "read" and is_hosts):
            self.counted[f"{kind}: {name} in {Path(outside[0]).name}"] += 1


class Scalars(TorchDispatchMode):
    """`float(tensor)`, `if tensor:` and their like."""

    def __init__(self, count):
        super().__init__()
        self.count = count

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._overloadpacket is torch.ops.aten._local_scalar_dense and sys._getframe(1).f_code.co_name != "counted":
            self.count.note("read", "number")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("microbatch", [4, 1])
def test_a_batch_waits_once_for_its_device_and_twice_for_other_ranks_whatever_its_microbatches(tmp_path, microbatch):
    data = write_data(tmp_path / "data")
    callbacks = {"python:tests.training.test_host_synchronisation:Count": {}}
    changes = {"device_train_microbatch_size": microbatch, "callbacks": callbacks, "stragglers": {"interval": "1ba"}}
    config = tiny_config(data, max_duration="6ba", **changes)
    train([write_config(tmp_path / "run.yaml", config)], tmp_path, 2).check()
    for rank in (0, 1):
        assert json.loads((tmp_path / f"counted-{rank}.json").read_text()) == {
            "collective: all_reduce in exchange.py": NUM_BATCHES,
            "collective: all_reduce in gradient_step.py": NUM_BATCHES,
            "read: tolist in gradient_step.py": NUM_BATCHES,
        }
