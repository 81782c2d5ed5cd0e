"""The `islands` block of a run's YAML: its settings, with a rule for each, and its checks. No torch."""

from dataclasses import dataclass

from llmfoundry_islands.coordination.messages import WEIGHTS, find_token
from llmfoundry_lite.config.blocks import Block
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
    """Local steps: each island trains alone between exchanges of the weights' mean change. Not the run of one world."""

    every: Duration = duration_setting(REQUIRED, ("ba",))
    """Batches between two exchanges."""
    lr: float = setting(0.7, POSITIVE)
    """Rate of the outer step."""
    momentum: float = setting(0.9, validator("0 <= momentum < 1", lambda value: 0 <= value < 1))
    """Nesterov momentum of the outer steps."""
    dtype: str = setting("fp32", choices="fp32 bf16 int8")
    """Type of numbers that travel. The next exchange adds what rounding drops, unless the island dies before."""
    fragments: int = setting(1, POSITIVE)
    """Parts of the weights that are exchanged in turn, each once in `every` batches."""
    delay: Duration = duration_setting("0ba", ("ba",), may_be_zero=True)
    """Batches that islands compute while a fragment travels."""
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
    """Weight of the island's own fragment, trained in the meantime, beside the mean that arrives after a delay."""
    lost_rows: str = setting("drop", choices="drop retrain")
    """Rows of an island that dies in a round: lost, or trained by the others in the next round."""


@dataclass(kw_only=True, slots=True, frozen=True)
class IslandsConfig:
    """This launch as one of several that train one run at once, each with a process group of its own."""

    coordinator: str = setting(REQUIRED, matches("host:port, such as 127.0.0.1:7070", r".+:\d{1,5}"))
    """Address of `llmfoundry-lite islands coordinate`."""
    begin_with: int | None = setting(None, validator("a number of islands", lambda value: value >= 1))
    """Start the coordinator, on this host, where none answers yet; the run begins when so many islands are here."""
    name: str = setting(REQUIRED, matches("letters and digits, and . _ - after the first", r"\w[\w.\-]{0,63}"))
    """Name of this island, unlike any other's."""
    address: str = setting(
        "127.0.0.1",
        validator("an address at which other islands reach this host", lambda value: value not in ("0.0.0.0", "::")),
    )
    """Address of this host, where its ranks listen for those of other islands."""
    weight: float = setting(
        1.0, validator("a number from 1e-6 to 1e6", lambda value: WEIGHTS[0] <= value <= WEIGHTS[1])
    )
    """Rows per second beside the other islands', until they have been measured."""
    check_weights_every: int = setting(100, POSITIVE)
    """Batches after which weights are compared; where they differ, those of the island that saves win."""
    sync: SyncConfig | None = setting(None, change="logged")
    """Exchange the weights' mean change now and then; default: the gradient of every batch, as one world does."""


def check(config: TrainConfig) -> None:
    """Refuse what islands cannot do together, with the reason."""
    size = config.device_train_microbatch_size
    reasons = {
        "model.attn_config.attn_pdrop": (
            bool(config.model.attn_config.attn_pdrop),
            "kernels draw it for each rank, so another division of rows is another run",
        ),
        "train_loader.name": (
            config.train_loader.name != "text",
            "rows move between islands, and a loader of yours has no order to find them by",
        ),
        "device_train_microbatch_size: auto": (
            size == "auto" and config.exact_sums,
            "exact_sums needs one size on all islands, and auto may find several",
        ),
    }
    for what, (is_asked_for, why) in reasons.items():
        if is_asked_for:
            raise ConfigError(f"islands: does not go with {what}: {why}; remove one of them")
    if size is None:
        raise ConfigError(
            "device_train_microbatch_size: missing; islands divide rows by microbatches, so give a number or auto"
        )
    if config.save_folder is None:
        raise ConfigError(
            "save_folder: missing; islands take turns to save, so name a folder or URL that all of them reach"
        )
    if (sync := settings_of(config).sync) is not None:
        _check_local_steps(config, sync)


def _check_local_steps(config: TrainConfig, sync: SyncConfig) -> None:
    if config.exact_sums:
        raise ConfigError(
            "exact_sums: does not go with islands.sync: local steps are not the run of one world; remove one of them"
        )
    if config.sharding.sharding_strategy == "ZERO_1":
        raise ConfigError(
            "fsdp_config.sharding_strategy: ZERO_1 does not go with islands.sync: it divides the optimizer's state, "
            "with the momentum of outer steps, otherwise than the weights; use FULL_SHARD or NO_SHARD"
        )
    every, delay = int(sync.every.value), int(sync.delay.value)
    if every % sync.fragments:
        raise ConfigError(
            f"islands.sync.fragments: {sync.fragments} given, expected a divisor of islands.sync.every, {every} batches"
        )
    if delay >= every // sync.fragments:
        raise ConfigError(
            f"islands.sync.delay: {sync.delay.written} given, expected less than every / fragments, which is "
            f"{every // sync.fragments} batches"
        )
    for key, value in {key: getattr(config, key) for key in ("max_duration", "stop_after", "stop_at")}.items():
        if value is not None and value.unit in ("tok", "sp"):
            raise ConfigError(
                f"{key}: {value.written} does not go with islands.sync: an island counts its own samples and tokens "
                "between exchanges, so each would reach it in another batch; give batches or epochs, such as 1000ba"
            )


def settings_of(config: TrainConfig) -> IslandsConfig:
    return config.blocks["islands"]


BLOCK = Block(
    schema=IslandsConfig,
    rules=Setting(hardware=True),
    partners="llmfoundry_islands.training.local_islands:find_islands",
    check=check,
    check_here=lambda config: find_token(),
    describe=lambda config: ", island {0.name} at {0.coordinator}".format(settings_of(config)),
    folder_key="name",
)
