"""The `islands` block of a run's YAML: its settings, the rule of each, and what islands do not go with.

`IslandsConfig` is the block, and `SyncConfig` its optional part for local steps. The core reads the settings through
`BLOCK`, and calls `check_config` once the whole configuration has been loaded. This file does not import torch, so
that a dry run can check the block quickly. `training/` does what the settings say.
"""

from dataclasses import dataclass

from llmfoundry_islands.coordination.messages import WEIGHTS, find_token
from llmfoundry_lite.config.blocks import RunBlock, SharedRun
from llmfoundry_lite.config.fields import (
    POSITIVE,
    REQUIRED,
    Setting,
    Use,
    duration_setting,
    matches,
    setting,
    validator,
)
from llmfoundry_lite.config.schema import TrainConfig
from llmfoundry_lite.config.spans import Duration
from llmfoundry_lite.errors import ConfigError


@dataclass(kw_only=True, slots=True, frozen=True)
class SyncConfig:
    """Settings of local steps, the DiLoCo algorithm: each island trains alone between two exchanges.

    The exchange takes the mean of the changes of the islands' weights, and the outer step applies it. The loss differs
    from that of a single launch.
    """

    every: Duration = duration_setting(REQUIRED, ("ba",))
    """Batches between two exchanges."""
    lr: float = setting(0.7, POSITIVE)
    """Learning rate of the outer step."""
    momentum: float = setting(0.9, validator("0 <= momentum < 1", lambda value: 0 <= value < 1))
    """Nesterov momentum of the outer step."""
    dtype: str = setting("fp32", choices="fp32 bf16 int8")
    """Type of the numbers that are sent. The rounding error is added to the next change, unless the island dies."""
    fragments: int = setting(1, POSITIVE)
    """Number of parts of the weights. They are exchanged in turn, and each is exchanged once in `every` batches."""
    delay: Duration = duration_setting("0ba", ("ba",), may_be_zero=True)
    """Batches that islands compute while a fragment is sent."""
    alpha: float = setting(
        0.5,
        validator("0 <= alpha < 1", lambda value: 0 <= value < 1),
        uses=(
            Use(
                has_effect=lambda sync, _: sync.delay.value > 0,
                reason="{path}.delay is {block.delay.written}, in which nothing is trained",
            ),
        ),
    )
    """Weight of the island's own numbers when a delayed fragment arrives. The outer step's have `1 - alpha`."""
    lost_rows: str = setting("drop", choices="drop retrain")
    """Rows of an island that dies between two exchanges: dropped, or trained by the others before the next exchange."""


@dataclass(kw_only=True, slots=True, frozen=True)
class IslandsConfig:
    """Settings of one island: a launch with its own process group, which trains a run together with other launches."""

    coordinator: str = setting(REQUIRED, matches("host:port, such as 127.0.0.1:7070", r".+:\d{1,5}"))
    """Address of `llmfoundry-lite islands coordinate`."""
    begin_with: int | None = setting(None, validator("a number of islands", lambda value: value >= 1))
    """Start the coordinator on this host if none answers. The run begins when this number of islands has connected."""
    name: str = setting(REQUIRED, matches("letters and digits, and . _ - after the first", r"\w[\w.\-]{0,63}"))
    """Name of this island, which no other island of the run has."""
    address: str = setting(
        "127.0.0.1",
        validator("an address at which other islands reach this host", lambda value: value not in ("0.0.0.0", "::")),
    )
    """Address of this host, at which its ranks listen for the ranks of other islands."""
    weight: float = setting(
        1.0, validator("a number from 1e-6 to 1e6", lambda value: WEIGHTS[0] <= value <= WEIGHTS[1])
    )
    """Rows per second relative to the other islands, until they have been measured."""
    check_weights_every: int = setting(100, POSITIVE)
    """Batches after which the islands compare a digest of their weights. An island that differs from the leader, which
    saves, gets the leader's state."""
    sync: SyncConfig | None = setting(None, change="logged")
    """Local steps. None: the islands exchange the gradient of every batch, and train what a single launch trains."""


def check_config(config: TrainConfig) -> None:
    """Raise ConfigError if a setting outside the block does not go with islands. The message gives the reason."""
    microbatch_size = config.device_train_microbatch_size
    if config.model.attn_config.attn_pdrop:
        raise _conflict(
            "model.attn_config.attn_pdrop",
            "kernels draw it for each rank, so another division of rows is another run",
        )
    if config.train_loader.name != "text":
        raise _conflict(
            "train_loader.name", "rows move between islands, and a loader of yours has no order to find them by"
        )
    if microbatch_size == "auto" and config.exact_sums:
        raise _conflict(
            "device_train_microbatch_size: auto",
            "exact_sums needs one size on all islands, and auto may find several",
        )
    if microbatch_size is None:
        raise ConfigError(
            "device_train_microbatch_size: missing; islands divide rows by microbatches, so give a number or auto"
        )
    if config.save_folder is None:
        raise ConfigError(
            "save_folder: missing; islands take turns to save, so name a folder or URL that all of them reach"
        )
    sync = settings_of(config).sync
    if sync is not None:
        _check_local_steps(config, sync)


def _conflict(setting_name: str, reason: str) -> ConfigError:
    return ConfigError(f"islands: does not go with {setting_name}: {reason}; remove one of them")


def _check_local_steps(config: TrainConfig, sync: SyncConfig) -> None:
    """Raise ConfigError if `islands.sync` contradicts itself, or does not go with another setting of the run."""
    if config.exact_sums:
        raise ConfigError(
            "exact_sums: does not go with islands.sync: local steps are not the run of one world; remove one of them"
        )
    if config.sharding.sharding_strategy == "ZERO_1":
        raise ConfigError(
            "fsdp_config.sharding_strategy: ZERO_1 does not go with islands.sync: it divides the optimizer's state, "
            "with the momentum of outer steps, otherwise than the weights; use FULL_SHARD or NO_SHARD"
        )

    # Fragments take turns, so `every` batches are `fragments` rounds of the same length.
    every = int(sync.every.value)
    if every % sync.fragments:
        raise ConfigError(
            f"islands.sync.fragments: {sync.fragments} given, expected a divisor of islands.sync.every, {every} batches"
        )
    batches_per_round = every // sync.fragments
    if int(sync.delay.value) >= batches_per_round:
        raise ConfigError(
            f"islands.sync.delay: {sync.delay.written} given, expected less than islands.sync.every / "
            f"islands.sync.fragments, which is {batches_per_round} batches"
        )

    for key in ("max_duration", "stop_after", "stop_at"):
        duration = getattr(config, key)
        if duration is not None and duration.unit in ("tok", "sp"):
            raise ConfigError(
                f"{key}: {duration.written} does not go with islands.sync: an island counts its own samples and tokens "
                "between exchanges, so each would reach it in another batch; give batches or epochs, such as 1000ba"
            )


def settings_of(config: TrainConfig) -> IslandsConfig:
    """Return the `islands` block of a configuration that has one."""
    return config.blocks["islands"]


BLOCK = RunBlock(
    schema=IslandsConfig,
    rules=Setting(hardware=True),
    check=check_config,
    check_here=lambda config: find_token(),
    describe=lambda config: ", island {0.name} at {0.coordinator}".format(settings_of(config)),
    shared_run=SharedRun(role="llmfoundry_islands.training.local_islands:find_islands", folder_key="name"),
)
