"""Checks that the devices can share a batch. A companion checks whether tp_config, cp_config and pp_config can divide
the model. `layout.py` has the arithmetic of a division.
"""

import dataclasses
from collections.abc import Iterator

from llmfoundry_lite import companions
from llmfoundry_lite.config.layout import DEGREE_KEYS, Layout, name_data_ranks
from llmfoundry_lite.config.model_schema import divisors
from llmfoundry_lite.config.schema import TrainConfig
from llmfoundry_lite.errors import ConfigError

DIVISION = "checks of tp_config, cp_config and pp_config"
MICROBATCHES = "check of a pipeline's microbatches"


def check_layout(config: TrainConfig) -> None:
    """Check the rules that hold on any number of devices. Raises ConfigError. `check_batch` checks the others.

    Without the companion nothing is checked: `preflight` refuses a launch that needs it.
    """
    if config.tp_config or config.cp_config or config.pp_config:
        for _, check_division in companions.parts("builders", lambda name: name == DIVISION):
            check_division(config)


def find_undivided(config: TrainConfig) -> dict[str, str]:
    """Return block -> keys without effect, for blocks whose degree is 1.

    They are allowed, so that setting the degree to 1 is enough to run the same YAML on a smaller cluster.
    """
    found = {}
    for degree_key in DEGREE_KEYS.values():
        block, _, degree = degree_key.partition(".")
        section = getattr(config, block)
        if section is not None and getattr(section, degree) == 1:
            fields = [field for field in dataclasses.fields(section) if field.name != degree]
            idle = [field.name for field in fields if getattr(section, field.name) != field.default]
            if idle:
                found[block] = f"{', '.join(idle)} without effect, for {degree} is 1"
    return found


def refuse(problems: Iterator[str], path: str) -> None:
    """Raise ConfigError for the first problem of the block at `path`."""
    for problem in problems:
        raise ConfigError(f"{path}.{problem}")


# ------------------------------------------------------------------------------------------------- batch


def check_batch(config: TrainConfig, layout: Layout) -> None:
    """Check that the devices can share a batch. Raises ConfigError."""
    batch, microbatch = config.global_train_batch_size, config.device_train_microbatch_size
    num_ranks, devices = layout.num_data_ranks, name_data_ranks(layout)
    if batch % num_ranks:
        fitting = ", ".join(str(n) for n in divisors(batch) if n <= 4 * num_ranks)
        raise ConfigError(
            f"global_train_batch_size: {batch} cannot be shared evenly by {num_ranks} {devices}; "
            f"start with a number of {devices} that divides it ({fitting}) or change the batch size"
        )
    if isinstance(microbatch, int) and microbatch > batch // num_ranks:
        raise ConfigError(
            f"device_train_microbatch_size: {microbatch} is more than the {batch // num_ranks} samples "
            f"each device gets ({batch} / {num_ranks} {devices}); set it to {batch // num_ranks} or less"
        )
    if config.exact_sums and isinstance(microbatch, int) and batch // num_ranks % microbatch:
        raise ConfigError(
            f"device_train_microbatch_size: {microbatch} does not divide the {batch // num_ranks} samples of each "
            "device; with exact_sums every microbatch has as many"
        )
    if layout.pipeline > 1:
        companions.find("builders", MICROBATCHES)(config, layout, batch // num_ranks)
