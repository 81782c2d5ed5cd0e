"""Exchanges of ranks in a batch, counted by operation, group and dtype."""

import json
from collections import defaultdict
from pathlib import Path

import torch.distributed as dist
from composer.core import Callback
from torch.utils._python_dispatch import TorchDispatchMode

from llmfoundry_planner.rehearse.measure import find_group, flatten
from tests.helpers.exchanged import HANDLES

SINGLE_NUMBERS = 8


class CountExchanges(Callback):
    """Count what each rank exchanges in the second batch of a run, forward, backward and in the optimizer's step.
    Writes bytes of whole messages by (operation, ranks of the group, dtype) into `exchanged-RANK.json`, without single
    numbers such as norms."""

    BATCH = 2

    def __init__(self) -> None:
        self.mode = CountCollectives()

    def batch_start(self, state, logger):
        if int(state.timestamp.batch) + 1 == self.BATCH:
            self.mode.__enter__()

    def batch_end(self, state, logger):
        if int(state.timestamp.batch) == self.BATCH:
            self.mode.__exit__(None, None, None)
            path = Path(f"exchanged-{dist.get_rank()}.json")
            path.write_text(json.dumps([[*key, count] for key, count in sorted(self.mode.num_bytes.items())]))


class CountCollectives(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.num_bytes: dict[tuple[str, int, str], int] = defaultdict(int)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        name = function._overloadpacket.__name__
        if function.namespace == "c10d" or (function.namespace == "_c10d_functional" and name not in HANDLES):
            group = find_group(args) or []
            found = [*flatten(args), *flatten(result)]
            largest = max(found, key=lambda tensor: tensor.nbytes, default=None)
            if largest is not None and largest.dtype.is_floating_point and largest.numel() > SINGLE_NUMBERS:
                self.num_bytes[name, len(group), str(largest.dtype).removeprefix("torch.")] += largest.nbytes
        return result
