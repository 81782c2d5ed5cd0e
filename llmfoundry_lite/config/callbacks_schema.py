"""The blocks `callbacks`, `loggers`, `stragglers` and `alerts` of a run's YAML. The first two have LLM Foundry's names
of keys."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from llmfoundry_lite.config.fields import (
    NON_NEGATIVE,
    POSITIVE,
    REQUIRED,
    Use,
    check_path_or_url,
    duration_setting,
    local_folder,
    not_empty,
    setting,
    validator,
)
from llmfoundry_lite.config.scalars import FromEnvironment
from llmfoundry_lite.config.spans import Duration
from llmfoundry_lite.errors import remember_secret


@dataclass(kw_only=True, slots=True, frozen=True)
class SpeedMonitorConfig:
    """Throughput in the log."""

    window_size: int = setting(100, POSITIVE)
    """Batches over which throughput is averaged."""


@dataclass(kw_only=True, slots=True, frozen=True)
class NoOptions:
    """Block of a callback without options."""


@dataclass(kw_only=True, slots=True, frozen=True)
class ProfilerConfig:
    """torch's profiler, with the schedule of Composer's `cyclic_schedule`: batches, and their order in a cycle."""

    skip_first: int = setting(0, NON_NEGATIVE)
    """Batches before the first cycle."""
    wait: int = setting(0, NON_NEGATIVE)
    """Batches without the profiler."""
    warmup: int = setting(1, NON_NEGATIVE)
    """Batches with the profiler whose trace is dropped, because it slows down the first ones."""
    active: int = setting(4, POSITIVE)
    """Batches that are traced."""
    repeat: int = setting(1, NON_NEGATIVE)
    """Cycles; 0 for as many as the run has room for. Each leaves a trace of its own."""
    folder: str | None = setting(
        None, not_empty("a folder; remove the line for <run_folder>/traces"), local_folder(), is_path_or_url=True
    )
    """Folder of the traces; default: <run_folder>/traces."""
    all_ranks: bool = False
    """A trace of each rank, not of rank 0 alone."""
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False


@dataclass(kw_only=True, slots=True, frozen=True)
class HFCheckpointerConfig:
    """Hugging Face folders of checkpoints: the first one published at or after each multiple of the interval, and the
    run's last. A separate process writes them."""

    save_interval: Duration = duration_setting(REQUIRED)
    save_folder: str | None = setting(
        None,
        not_empty("a folder or a URL; remove the line for the run's save_folder"),
        check_path_or_url,
        is_path_or_url=True,
    )
    """Folders are <save_folder>/huggingface/ba<batch>. Default: where the run's checkpoints are."""
    precision: str = setting("float32", choices="float32 bfloat16")


SAMPLING = (
    Use(
        has_effect=lambda generate, _: generate.do_sample,
        reason="do_sample is false, which takes the likeliest token",
    ),
)


@dataclass(kw_only=True, slots=True, frozen=True)
class GenerateConfig:
    """Texts that checkpoints write, at every `interval`, into generations.jsonl. A separate process generates them."""

    prompts: list[str] = setting(REQUIRED, validator("one prompt or more", len))
    interval: Duration = duration_setting(REQUIRED)
    max_new_tokens: int = setting(80, POSITIVE)
    do_sample: bool = False
    """false takes the likeliest token, and the next three keys have no effect."""
    temperature: float = setting(1.0, POSITIVE, uses=SAMPLING)
    top_k: int | None = setting(50, POSITIVE, uses=SAMPLING)
    top_p: float | None = setting(None, validator("above 0 and up to 1", lambda value: 0 < value <= 1), uses=SAMPLING)


@dataclass(kw_only=True, slots=True, frozen=True)
class EarlyStopperConfig:
    """End the run, saved, when a loss has not fallen for some time. A launch reads earlier losses from the log."""

    monitor: str = setting(choices="loss LanguageCrossEntropy LanguagePerplexity")
    dataloader_label: str = setting()
    """eval, eval/<label> of eval_loaders, or train: the mean over an epoch."""
    patience: Duration = duration_setting(1, ("ba", "ep"), may_be_zero=True)
    """Span since the lowest value after which the run ends; a bare integer counts epochs."""
    min_delta: float = setting(0.0, NON_NEGATIVE)
    """Least difference by which a value counts as lower."""


@dataclass(kw_only=True, slots=True, frozen=True)
class KillLossSpikeConfig:
    """Warn, or end the launch with exit code 2, when the loss stays above a multiple of its mean, or is high."""

    log_only: bool = True
    patience: int = setting(4, NON_NEGATIVE)
    """Consecutive outliers that are tolerated."""
    outlier_multiplier: float = setting(2.0, POSITIVE)
    """Multiple of the window's mean from which a loss is an outlier."""
    window_size: int = setting(100, POSITIVE)
    """Batches. The default, 100, means a twentieth of the run where that is more."""
    loss_cap: float = setting(10.0, POSITIVE)
    """Losses are high when half of a window is above this. The default, 10, means the first window's highest if lower.
    """


@dataclass(kw_only=True, slots=True, frozen=True)
class AsyncEvalConfig:
    """LLM Foundry's evaluation of checkpoints by jobs on MosaicML's platform.

    A launch starts no job. It prints the command that evaluates the checkpoints: `eval follow=true`.
    """

    interval: Duration | None = duration_setting(None)
    """LLM Foundry's interval between jobs. Here every checkpoint is evaluated."""
    compute: dict[str, Any] | None = None
    """Where the platform would run the jobs. Not used here."""
    eval_run_config: dict[str, Any] | None = None
    """How the platform would run the jobs. Not used here."""


WITH_TASKS = (
    Use(
        has_effect=lambda _, run: run.icl_tasks,
        reason="there are no icl_tasks that it could evaluate; name them, or remove it",
        is_refused=True,
    ),
)


@dataclass(kw_only=True, slots=True, frozen=True)
class CallbacksConfig:
    """Callbacks by LLM Foundry's names, and a user's own."""

    speed_monitor: SpeedMonitorConfig = setting(SpeedMonitorConfig)
    lr_monitor: NoOptions | None = None
    memory_monitor: NoOptions | None = None
    runtime_estimator: NoOptions | None = None
    """This callback and the two above are always on; naming them is allowed."""
    profiler: ProfilerConfig | None = None
    hf_checkpointer: HFCheckpointerConfig | None = None
    generate_callback: GenerateConfig | None = None
    early_stopper: EarlyStopperConfig | None = None
    kill_loss_spike: KillLossSpikeConfig | None = None
    async_eval: AsyncEvalConfig | None = setting(None, uses=WITH_TASKS)
    extra: dict[str, dict[str, Any]] = setting(dict, replay="trusted")
    """python:package.module:Class -> keyword arguments."""

    @property
    def of_companions(self) -> list[str]:
        """Keys of LLM Foundry's callbacks that the run asks for and a companion builds."""
        names = ("hf_checkpointer", "generate_callback", "early_stopper", "kill_loss_spike")
        return [f"callbacks.{name}" for name in names if getattr(self, name) is not None]


@dataclass(kw_only=True, slots=True, frozen=True)
class WandbConfig:
    """Logging to Weights & Biases."""

    project: str | None = None
    entity: str | None = None
    group: str | None = None
    name: str | None = None
    """Default: $WANDB_NAME, else the run name."""
    tags: list[str] = setting(list)
    names: str = setting("ours", choices="ours llm_foundry")
    """Names of metrics; llm_foundry writes those of LLM Foundry, in its units. metrics.jsonl has ours."""
    init_kwargs: dict[str, Any] = setting(dict)
    """Other arguments of wandb.init. Those that are null come from wandb's own variables, such as WANDB_PROJECT."""


@dataclass(kw_only=True, slots=True, frozen=True)
class TensorboardConfig:
    """Logging to TensorBoard."""

    log_dir: str | None = setting(
        None,
        not_empty("a folder; remove the line for <run_folder>/tensorboard"),
        check_path_or_url,
        is_path_or_url=True,
    )
    """Default: <run directory>/tensorboard."""
    names: str = setting("ours", choices="ours llm_foundry")
    """Names of metrics, as for wandb."""


@dataclass(kw_only=True, slots=True, frozen=True)
class LoggersConfig:
    """Where the log is written besides metrics.jsonl."""

    wandb: WandbConfig | None = None
    tensorboard: TensorboardConfig | None = None
    extra: dict[str, dict[str, Any]] = setting(dict)
    """python:package.module:Class -> keyword arguments."""


@dataclass(kw_only=True, slots=True, frozen=True)
class StragglersConfig:
    """Ranks that are slower than others: how often their times are compared, and when a rank is named."""

    interval: Duration = duration_setting("100ba", ("ba",))
    """Span between two batches in which each rank's own time is measured."""
    threshold: float = setting(1.4, validator("a number above 1", lambda value: value > 1))
    """Multiple of the median time above which a rank is slow. NVIDIA's nvidia-resiliency-ext has 1 / 0.7."""
    reports: int = setting(3, POSITIVE)
    """Measured batches in a row in which a rank must be slow before it is named."""


EVENTS = (
    *("began", "restarted", "failed_saves", "no_progress", "slow_rank", "loss_spike"),
    *("preempted", "failed", "ended"),
)
"""Events of a run that `alerts` can tell, as `alerts.events` names them."""


def _check_secret_address(address: str) -> None:
    """Raise ValueError for an address that the YAML has in full, because everybody who knows it can send messages.

    The run records its YAML, in config.yaml and in each checkpoint. The error does not quote the address.
    """
    remember_secret(address)
    if not isinstance(address, FromEnvironment):
        raise ValueError("${oc.env:NAME}, because the text of a YAML is recorded with the run and this is a secret")


def _check_webhook(url: str) -> None:
    """Raise ValueError for the URL of a webhook that is written out, or is not one of http or https."""
    _check_secret_address(url)
    if not url.startswith(("http://", "https://")):
        raise ValueError("a variable with a URL that begins with https:// or http://")


def _check_secret_addresses(addresses: list[str]) -> None:
    """Raise ValueError if one of several addresses is written out."""
    for address in addresses:
        _check_secret_address(address)


def _check_events(events: list[str]) -> None:
    """Raise ValueError for an event that does not exist."""
    if not events or not set(events) <= set(EVENTS):
        raise ValueError(f"some of {', '.join(EVENTS)}")


@dataclass(kw_only=True, slots=True, frozen=True)
class AlertsConfig:
    """Messages about a run. A process beside the run sends them (the companion llmfoundry_ops)."""

    webhook: str | None = setting(None, _check_webhook)
    """URL to which each message is posted as JSON, as ${oc.env:NAME}."""
    command: list[str] | None = setting(None, validator("a list: a program and its arguments", len))
    """Program to run for each message, which gets it in its environment and as JSON on its standard input."""
    apprise: list[str] = setting(list, _check_secret_addresses)
    """Addresses of the package apprise, each as ${oc.env:NAME}: Slack, mail, Telegram and others."""
    events: list[str] = setting(lambda: [event for event in EVENTS if event != "began"], _check_events)
    """Events that send a message; by default all but `began`, with which you can try the receivers."""
    no_progress_minutes: float = setting(30.0, POSITIVE)
    """Time without a new batch after which `no_progress` is sent. Longer than the longest evaluation."""
    loss_spike: float = setting(8.0, POSITIVE)
    """Distance from the median loss, in robust standard deviations, above which three losses in a row are a spike."""

    def problems(self) -> Iterator[str]:
        """Yield what is wrong with keys that are valid by themselves."""
        if self.webhook is None and self.command is None and not self.apprise:
            yield "webhook: missing, as are command and apprise; expected one of them, which gets the messages"
