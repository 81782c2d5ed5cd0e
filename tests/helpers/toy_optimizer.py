"""The command line with one optimizer and one schedule more: python -m tests.helpers.toy_optimizer train …

This is all that a contributor writes: a function and a row of each table. The rows are added before anything reads the
tables, as if they stood in `config/optimizers.py` and `config/schedules.py`.
"""

import torch

from llmfoundry_lite.config.optimizers import OPTIMIZERS, OptimizerRow
from llmfoundry_lite.config.schedules import SCHEDULES, ScheduleRow

TOY = OptimizerRow(
    builder="tests.helpers.toy_optimizer:build_toy",
    keys=("betas", "weight_decay"),
    betas=(0.5, 0.75),
    weight_decay=0.25,
    slots=("first", "second", "third"),
    num_scratch=4,
    moved_bytes=1000,
    sums_exactly=False,
    other_words=("plaything",),
)
TOY_SCHEDULE = ScheduleRow(formula="tests.helpers.toy_optimizer:compute_half", keys=("alpha_f",))


def build_toy(groups, context):
    """Build SGD with the learning rate of the first group."""
    settings = groups[0].settings
    parameters = [parameter for group in groups for parameter in group.parameters.values()]
    return torch.optim.SGD(parameters, lr=settings.lr, weight_decay=settings.decay)


def compute_half(schedule, times):
    """Return the same factor at any time."""
    return 0.5


def add_toys() -> None:
    """Add the two rows."""
    OPTIMIZERS["toy"] = TOY
    SCHEDULES["half_rate"] = TOY_SCHEDULE


if __name__ == "__main__":
    add_toys()
    from llmfoundry_lite.__main__ import main

    main()
