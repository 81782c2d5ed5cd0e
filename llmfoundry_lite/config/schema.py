"""The configuration of a training run, `TrainConfig`: a frozen dataclass for each block of the YAML.

Keys have LLM Foundry's names. A field's type, default and `setting` say which values its key may have, how it may
change in mid-run, and whether a hardware overlay may set it (`fields.py`). `load_train.py` builds a TrainConfig from
files and `key=value` arguments; all other code only reads it. Properties of TrainConfig are values that follow from one
or several keys. `as_dict` at the end is the form in which a run records its configuration.
"""

from dataclasses import dataclass
from typing import Any

from llmfoundry_lite.config.batch_schedule import PerBatch, Steps
from llmfoundry_lite.config.blocks import given_blocks, keys_of_blocks
from llmfoundry_lite.config.callbacks_schema import AlertsConfig, CallbacksConfig, LoggersConfig, StragglersConfig
from llmfoundry_lite.config.data_schema import LoaderConfig, TokenizerConfig
from llmfoundry_lite.config.eval_schema import TaskConfig
from llmfoundry_lite.config.fields import (
    NON_NEGATIVE,
    POSITIVE,
    REQUIRED,
    Use,
    as_yaml,
    check_path_or_url,
    check_source_path_or_url,
    duration_setting,
    local_folder,
    not_empty,
    parsed,
    setting,
    validator,
    without_empty,
    without_our_keys,
)
from llmfoundry_lite.config.model_schema import RECORDED_IF_GIVEN, ModelConfig
from llmfoundry_lite.config.optimizer_schema import OptimizerConfig, SchedulerConfig
from llmfoundry_lite.config.scalars import FromEnvironment, map_texts
from llmfoundry_lite.config.sharding_schema import (
    ContextParallelConfig,
    FSDPConfig,
    PipelineConfig,
    TensorParallelConfig,
)
from llmfoundry_lite.config.spans import (
    TIME_UNITS,
    Duration,
    SaveInterval,
    Scalar,
    Time,
    describe_span,
    parse_limit,
)
from llmfoundry_lite.errors import mask_urls
from llmfoundry_lite.own_code import is_own

MAX_REPLICATED_PARAMETERS = 1.5e9
"""Models with more parameters are sharded by default. With gradients and AdamW's state, this many take 24 GB in fp32.
"""

LOSS_CHUNK_MIB = 256
"""Default of loss_chunk_mib, in MiB."""


@dataclass(kw_only=True, slots=True, frozen=True)
class GradientClippingConfig:
    """How large a gradient may become."""

    clipping_type: str = setting(
        "norm", choices="norm value", instead="expected norm or value; adaptive clipping is left out"
    )
    clipping_threshold: float = setting(1.0, POSITIVE)


@dataclass(kw_only=True, slots=True, frozen=True)
class AlgorithmsConfig:
    """LLM Foundry's block of algorithms. Only gradient clipping is used."""

    gradient_clipping: GradientClippingConfig | None = None


NOTHING_TO_EVALUATE = "nothing is evaluated; eval_loader, eval_loaders or icl_tasks name what to evaluate"
IN_CONTEXT = (Use(has_effect=lambda run, _: run.icl_tasks, reason="there are no icl_tasks"),)
LOADING = (
    Use(
        has_effect=lambda run, _: run.load_path,
        reason="there is no load_path to load from; name a checkpoint there, or remove this",
        is_refused=True,
    ),
)
AS_VALIDATION = {
    "drop_last": Use(
        has_effect=lambda loader, _: loader.name != "text" or not loader.drop_last,
        reason="an evaluation never drops a sample",
        even_default=True,
    ),
    "dataset.shuffle": Use(
        has_effect=lambda _, run: False, reason="an evaluation reads samples in the order of their files"
    ),
    "dataset.shuffle_block_size": Use(has_effect=lambda _, run: False, reason="an evaluation shuffles nothing"),
}
"""Keys of a loader that have no effect for validation data."""

DEFAULT_EVAL_TOKENS = 8192
"""Default number of tokens of a device in one forward pass of an evaluation, which keeps no activations."""

MAX_SEED = 2**32 - 2**16
"""Largest seed. Each rank adds its rank number, which is less than 2**16, and the sum must fit into 32 bits."""


def _parse_eval_interval(written: Scalar) -> Duration:
    """Parse a duration such as `100ba`, or the number 0, which never evaluates.

    Raises ValueError, whose text says what was expected, for anything else. That includes 0 with a unit, such as `0ba`.
    """
    interval = Duration.parse(written, TIME_UNITS)
    if interval.value == 0 and written != 0:
        raise ValueError("more than 0, or 0 to never evaluate")
    return interval


def _is_all_or_count(value: int) -> bool:
    """Return whether a number is valid for a key that takes a count, or -1 for all."""
    return value == -1 or value > 0


@dataclass(kw_only=True, slots=True, frozen=True)
class TrainConfig:
    """A training run. Precedence: these defaults < YAML files, in order < key=value arguments."""

    model: ModelConfig = setting(change="never", replay="used")
    tokenizer: TokenizerConfig = setting(change="freely", replay="used")
    train_loader: LoaderConfig = setting(change="never", replay="used")
    optimizer: OptimizerConfig = setting(change="never", replay="used")
    scheduler: SchedulerConfig = setting(change="logged", replay="used")
    max_duration: Duration = duration_setting(change="logged", replay="used")
    """4800ba, 1ep, 2.5e9tok or 1000sp; a bare integer counts epochs."""
    global_train_batch_size: int = setting(REQUIRED, POSITIVE, change="never", replay="used")
    """Samples, over all devices."""
    batch_size_schedule: Steps | None = parsed(
        None,
        Steps.parse,
        dict[str, int | None],
        change="logged",
        replay="used",
    )
    """Sizes of batches from given batches on, multiples of global_train_batch_size, which is the size until then. A
    larger batch has the samples of several consecutive batches of that size. null: one size."""
    max_seq_len: int = setting(REQUIRED, POSITIVE, change="never", replay="used")
    """Tokens."""
    seq_len_schedule: Steps | None = parsed(None, Steps.parse, dict[str, int | None], change="logged", replay="used")
    """Lengths of rows in tokens, from given batches on. They divide max_seq_len, which is the length until then. Each
    sample is cut into rows of that length. null: samples stay whole."""

    run_name: str = setting(change="freely")
    """Default: $RUN_NAME, else the first YAML file's name."""
    run_folder: str = setting(REQUIRED, local_folder("save_folder"), is_path_or_url=True, change="freely")
    """Default: runs/<run_name>. Always local."""
    seed: int = setting(
        17,
        NON_NEGATIVE,
        validator(f"at most {MAX_SEED}: a rank adds its number, within 32 bits", lambda value: value <= MAX_SEED),
        change="never",
        replay="used",
    )
    precision: str = setting(
        "amp_bf16",
        choices="fp32 tf32 amp_bf16 amp_fp16",
        instead="expected fp32, tf32, amp_bf16 or amp_fp16; fp8 is left out",
        hardware=True,
        replay="used",
    )
    """tf32 is fp32 with products in TF32 where the device has it; nothing else uses TF32."""
    eval_loader: LoaderConfig | None = setting(None, change="logged", uses_inside=AS_VALIDATION)
    """Validation data; a list of loaders, each with a label, is read as eval_loaders."""
    eval_loaders: dict[str, LoaderConfig] = setting(dict, change="logged", uses_inside=AS_VALIDATION)
    """Label -> validation data, logged as eval/<label>/loss."""
    eval_interval: Duration = parsed(
        1,
        _parse_eval_interval,
        expected=describe_span(TIME_UNITS),
        change="logged",
        uses=(
            Use(
                has_effect=lambda run, _: run.validation or run.icl_tasks or not run.evaluates,
                reason=NOTHING_TO_EVALUATE,
            ),
        ),
    )
    """A span; a bare integer counts epochs; 0 never evaluates."""
    eval_first: bool = setting(
        False,
        change="freely",
        uses=(
            Use(has_effect=lambda run, _: run.validation or run.icl_tasks, reason=NOTHING_TO_EVALUATE),
            Use(has_effect=lambda run, _: run.evaluates, reason="eval_interval is 0, which never evaluates"),
        ),
    )
    eval_subset_num_batches: int = setting(
        -1,
        validator("-1 (all) or a count", _is_all_or_count),
        change="logged",
        uses=(Use(has_effect=lambda run, _: run.validation, reason="there is no eval_loader"),),
    )
    """Batches of global_train_batch_size samples, the first ones of each validation set, on any number of devices; -1
    for all."""
    loss_chunk_mib: int = setting(LOSS_CHUNK_MIB, POSITIVE, hardware=True, replay="used")
    """Size of the fp32 logits that the loss computes at a time; its memory is two and a half times as much. More makes
    products larger, and adds up the embedding's gradient in fewer parts."""
    device_eval_batch_size: int | None = setting(
        None,
        POSITIVE,
        hardware=True,
        uses=(Use(has_effect=lambda run, _: run.validation or run.icl_tasks, reason=NOTHING_TO_EVALUATE),),
    )
    """Samples in one forward pass. Default: device_train_microbatch_size where that is a number, else as many as
    8,192 tokens hold. The loss does not depend on it."""
    icl_tasks: list[Any] | str = setting(list, change="logged", written=list[TaskConfig | str] | str)
    """Tasks to evaluate in context whenever the validation loss is due, as scripts/eval.py names them."""
    icl_task_folder: str = setting("evals", is_path_or_url=True, change="freely", uses=IN_CONTEXT)
    icl_limit: int | None = setting(None, POSITIVE, change="logged", uses=IN_CONTEXT)
    """Only so many first items of each task."""
    device_train_microbatch_size: int | str | None = setting(
        None,
        validator(
            "a number of samples, or auto", lambda value: value > 0 if isinstance(value, int) else value == "auto"
        ),
        hardware=True,
        shapes_dropout=True,
        replay="used",
    )
    """Samples, or auto: the most that fits, measured before the first batch. Default: the device's whole batch."""
    accumulate_train_batch_on_tokens: bool = setting(True, change="never", replay="used")
    """true: the loss is the mean over a batch's tokens. false: the mean of its rows' means, rows without loss aside."""
    exact_sums: bool = setting(False, change="logged", replay="used")
    """Make a run bit-identical on any number of ranks whose devices compute a microbatch alike. Gradients are added in
    float64, as multiples of 2^-46. The size of a microbatch becomes part of the run."""
    algorithms: AlgorithmsConfig = setting(AlgorithmsConfig, change="logged", replay="used")
    callbacks: CallbacksConfig = setting(CallbacksConfig, change="freely")
    loggers: LoggersConfig = setting(LoggersConfig, change="freely")
    fsdp_config: FSDPConfig | None = setting(None, hardware=True, replay="used")
    """null: every device holds the whole model (NO_SHARD) up to 1.5 billion parameters. Larger models are divided
    (FULL_SHARD)."""
    tp_config: TensorParallelConfig | None = setting(None, hardware=True, shapes_dropout=True, replay="used")
    """null: no layer is divided."""
    cp_config: ContextParallelConfig | None = setting(None, hardware=True, shapes_dropout=True, replay="used")
    """null: every device has whole samples."""
    pp_config: PipelineConfig | None = setting(None, hardware=True, shapes_dropout=True, replay="used")
    """null: every device computes all blocks."""
    blocks: dict[str, Any] = setting(dict, keys=keys_of_blocks)
    """Key -> block of a companion, or None where the run does not use it. In the YAML each is at the top."""
    on_non_finite: str = setting("stop", choices="stop skip", change="logged", replay="used")
    """Policy for a batch whose loss or gradient is not finite."""
    max_skipped_batches: int = setting(
        100,
        POSITIVE,
        change="freely",
        replay="used",
        uses=(
            Use(
                has_effect=lambda run, _: run.on_non_finite == "skip",
                reason="on_non_finite is {run.on_non_finite}, which skips no batch; set it to skip, or remove this",
                is_refused=True,
            ),
        ),
    )
    """Skipped batches of one launch after which `skip` gives up."""
    save_folder: str | None = setting(
        None,
        not_empty("a folder or a URL; remove the line for <run_folder>/checkpoints"),
        check_path_or_url,
        is_path_or_url=True,
        change="freely",
    )
    """Where checkpoints go: a local folder or an fsspec URL such as s3://…; default: <run_folder>/checkpoints."""
    save_fallback: str | None = setting(
        None,
        not_empty("a folder or a URL; remove the line for no second place"),
        check_path_or_url,
        is_path_or_url=True,
        hardware=True,
        uses=(
            Use(
                has_effect=lambda run, _: run.trains_alone,
                reason="launches that train one run together save in save_folder alone; remove it",
                is_refused=True,
            ),
        ),
    )
    """A second place for checkpoints, a local folder or a URL, while saves to save_folder fail. They are copied to
    save_folder when it is back. A resume finds the newest intact checkpoint of both."""
    save_interval: SaveInterval = parsed("1000ba", SaveInterval.parse, change="logged")
    """A span, a time such as 5m, 90s or 1h, or auto. auto measures what saves cost, and saves as often as possible
    without costing more than 2 % of training time. The end of a launch always saves."""
    max_unsaved: SaveInterval = parsed("30m", parse_limit, change="freely")
    """How far the run trains on while every save fails: a time or a span such as 200ba, from the first failed save on.
    Then the launch ends as failed, with the reason."""
    digest_interval: Duration | None = duration_setting(None, change="freely")
    """Span at which a digest of weights and optimizer is logged, besides each save. It is the same in every layout."""
    save_num_checkpoints_to_keep: int = setting(
        -1, validator("-1 (all) or a count above 0", _is_all_or_count), change="freely"
    )
    """Number of newest checkpoints to keep; -1 keeps all."""
    save_keep_every_batches: int | None = setting(
        None,
        POSITIVE,
        change="freely",
        uses=(
            Use(
                has_effect=lambda run, _: run.save_num_checkpoints_to_keep != -1,
                reason="save_num_checkpoints_to_keep is -1, which keeps every checkpoint",
            ),
        ),
    )
    """Also keep every checkpoint whose batch is a multiple of this."""
    autoresume: bool = setting(False, change="freely")
    """Carry on from the newest intact checkpoint of save_folder, if there is one."""
    takeover: bool = setting(False, change="freely")
    """Carry on though a launch on another machine may hold this run; if it does, it ends at its next save. Without it,
    such a launch is watched for 30 s: this one is refused if that one lives, and carries on if it does not."""
    load_path: str | None = setting(
        None,
        not_empty("a checkpoint or a folder of them; remove the line to begin from nothing"),
        check_source_path_or_url,
        is_path_or_url=True,
        change="freely",
    )
    """A checkpoint, a folder of them, or a run directory to begin from; what autoresume finds takes precedence."""
    load_weights_only: bool = setting(False, change="freely", uses=LOADING)
    """Take the weights from load_path and begin at batch 1."""
    load_ignore_keys: list[str] = setting(list, change="freely", uses=LOADING)
    """Patterns of tensors of load_path to leave as they were initialised, such as model/transformer.wpe.*"""
    load_cast: bool = setting(False, change="freely", uses=LOADING)
    """Permit tensors of load_path in another dtype."""
    stop_after: Duration | None = duration_setting(None, change="freely")
    """End this launch (not the run) after this span, saved."""
    stop_at: Duration | None = duration_setting(None, change="freely")
    """End this launch, saved, at this point of the run, such as 210ba; at once if the run is there already."""
    max_wall_time: Time | None = parsed(None, Time.parse, Scalar, hardware=True)
    """Save and exit with code 75 after this much time: 3h55m, 90s, 1d, 3:55:00, or seconds."""
    preemption_grace_seconds: float = setting(20.0, POSITIVE, hardware=True)
    """Seconds from a signal, max_wall_time or the file STOP to the exit, saved or not. `composer` kills after 30."""
    retry_for: Time = parsed("30m", Time.parse, Scalar, hardware=True)
    """Time to wait without progress for a fault that may pass, such as a full disk, a server's 5xx or an expired token.
    The last save of a launch waits, and so does `llmfoundry-lite train -n`, which restarts ranks. 0 never waits."""
    compile_config: dict[str, Any] | None = setting(None, hardware=True, replay="used")
    """Arguments of torch.compile, which is applied to each block and to the loss; {} for its defaults."""
    deterministic: bool | None = setting(None, change="freely", replay="used")
    """true: use only kernels that give the same digits every time. They are slower, and torch raises where it has none.
    null: true on a GPU with exact_sums, else torch's own choice."""
    dist_timeout: float = setting(600.0, POSITIVE, hardware=True)
    """Seconds a collective may take."""
    environment: dict[str, str] = setting(dict, hardware=True, replay="trusted")
    """Environment variables of NCCL, RCCL and torch for this hardware. Those that the shell has set take precedence."""
    progress_bar: bool = setting(False, change="freely")
    log_to_console: bool = setting(True, change="freely")
    console_log_interval: Duration = duration_setting(
        "1ba",
        ("ba", "ep"),
        change="freely",
        uses=(
            Use(
                has_effect=lambda run, _: run.log_to_console or run.progress_bar,
                reason="log_to_console is false",
            ),
        ),
    )
    stragglers: StragglersConfig | None = setting(StragglersConfig, change="freely")
    """Names ranks that are slower than others; null: does not."""
    console_format: str = setting("text", choices="text json", change="freely")
    """json: each line that a launch prints is a JSON object, for programs that collect logs. Not for `lf.train`."""
    alerts: AlertsConfig | None = setting(None, change="freely")
    """Messages about this run: that it has ended, that saves fail, that it stands still. null: none."""
    metrics_port: int | None = setting(
        None, validator("a port, 1 to 65535", lambda value: 0 < value < 65536), change="freely"
    )
    """Port at which Prometheus reads the run's numbers while a launch runs; null: none."""
    metrics_host: str = setting(
        "127.0.0.1",
        not_empty("an address of this machine"),
        change="freely",
        uses=(Use(has_effect=lambda run, _: run.metrics_port is not None, reason="there is no metrics_port"),),
    )
    """Address of that port. 0.0.0.0 lets other machines read."""
    export_at_end: bool = setting(True, change="freely")
    """Write <run directory>/huggingface when the run is done and plain transformers can read the model."""
    python_log_level: str | None = setting(None, choices="debug info warning error critical", change="freely")
    variables: dict[str, Any] = setting(dict, change="freely")
    metadata: dict[str, Any] = setting(dict, change="freely")

    @property
    def sharding(self) -> FSDPConfig:
        """The block fsdp_config. Without one, small models are copied (NO_SHARD) and others sharded (FULL_SHARD)."""
        if self.fsdp_config is not None:
            return self.fsdp_config
        is_small = self.model.num_matrix_parameters <= MAX_REPLICATED_PARAMETERS
        return FSDPConfig(sharding_strategy="NO_SHARD" if is_small else "FULL_SHARD")

    @property
    def tensor_parallel_degree(self) -> int:
        """Number of devices that divide each layer; 1 without tp_config."""
        return self.tp_config.tensor_parallel_degree if self.tp_config else 1

    @property
    def sequence_parallel(self) -> bool:
        """Whether devices that divide layers also divide each sequence between them."""
        return self.tensor_parallel_degree > 1 and self.tp_config is not None and self.tp_config.sequence_parallel

    @property
    def context(self) -> ContextParallelConfig:
        """The block cp_config, or the default of degree 1, with which no sample is divided."""
        return self.cp_config or ContextParallelConfig()

    @property
    def pipeline(self) -> PipelineConfig:
        """The block pp_config, or the default of degree 1, with which each device has all blocks of the model."""
        return self.pp_config or PipelineConfig()

    @property
    def fuses_loss(self) -> bool:
        """Whether the loss, from logits to their gradient, is compiled to one kernel, as torch's inductor does it.

        A loss of the user's own is not.
        """
        return self.compiles_kernels and not is_own(self.model.loss_fn)

    @property
    def compiles_kernels(self) -> bool:
        """Whether the model is compiled to kernels, as torch's inductor does it."""
        return self.compile_config is not None and self.compile_config.get("backend", "inductor") == "inductor"

    def is_deterministic_on(self, device_type: str) -> bool:
        """Return whether a launch uses only deterministic kernels. `device_type` is "cuda" or "cpu"."""
        if self.deterministic is not None:
            return self.deterministic
        return self.exact_sums and device_type == "cuda"

    @property
    def reduces_every_microbatch(self) -> bool:
        """Whether gradients are summed over devices after each microbatch, instead of after the last one."""
        # A stage of a pipeline sums its gradients once, after all microbatches.
        if self.pipeline.pipeline_parallel_degree > 1:
            return False
        if self.sharding.reduce_every_microbatch is not None:
            return self.sharding.reduce_every_microbatch
        # By default, only for a large model. Its gradients are then kept in shards between microbatches.
        return self.model.num_matrix_parameters > MAX_REPLICATED_PARAMETERS

    def first_microbatch_size(self, device_batch_size: int) -> int:
        """Return the number of samples in the first microbatch of a launch.

        `device_batch_size` is the number of samples of a device in each batch. A microbatch is the part of them in one
        forward and backward pass. With 8 samples, a `device_train_microbatch_size` of 4 gives 4, of 16 gives 8, and of
        "auto" gives 1. Without the key it is all 8, or 2 in a pipeline of 4 microbatches.
        """
        configured_size = self.device_train_microbatch_size
        if configured_size == "auto":
            return 1  # from there, the launch measures how many samples fit
        if configured_size is not None:
            return min(int(configured_size), device_batch_size)

        # By default, a microbatch is the whole batch of the device. A pipeline needs several microbatches, because each
        # of its stages computes another one at the same time.
        if self.pipeline.pipeline_parallel_degree == 1:
            return device_batch_size
        num_microbatches = self.pipeline.num_microbatches
        if num_microbatches is None:
            num_microbatches = self.pipeline.default_num_microbatches(device_batch_size)
        return -(-device_batch_size // num_microbatches)  # rounded up

    @property
    def batch_sizes(self) -> PerBatch:
        """Number of samples of each batch, over all devices."""
        return PerBatch.build(self.global_train_batch_size, self.batch_size_schedule)

    @property
    def parts_of_batches(self) -> PerBatch:
        """Number of consecutive batches of `global_train_batch_size` that each batch consists of."""
        return self.batch_sizes.divided_by(self.global_train_batch_size)

    @property
    def num_batches(self) -> int | None:
        """Number of batches of the run. None if `max_duration` is in epochs, as the data alone tell how long one is.

        A last batch that is not full counts as one.
        """
        duration = self.max_duration
        if duration.unit == "ba":
            return int(duration.value)
        if duration.unit == "sp":
            return self.batch_sizes.count_batches(int(duration.value))
        if duration.unit == "tok":
            return self.batch_sizes.count_batches(-(-int(duration.value) // self.max_seq_len))
        return None

    @property
    def largest_batch_size(self) -> int:
        """Number of samples in the largest batch that the run reaches before `max_duration`, over all devices."""
        num_batches = self.num_batches
        if not num_batches:
            return self.batch_sizes.largest
        return max(stretch.value for stretch in self.batch_sizes.stretches(num_batches))

    @property
    def parts_of_largest_batch(self) -> int:
        """Number of batches of `global_train_batch_size` that the largest batch of the run consists of."""
        return self.largest_batch_size // self.global_train_batch_size

    @property
    def seq_lens(self) -> PerBatch:
        """Number of tokens of a row of each batch."""
        return PerBatch.build(self.max_seq_len, self.seq_len_schedule)

    @property
    def trains_alone(self) -> bool:
        """Whether no other launch trains this run at the same time."""
        return not any(block.shared_run for block in given_blocks(self.blocks).values())

    @property
    def evaluates(self) -> bool:
        """Whether the run evaluates. An `eval_interval` of 0 turns evaluations off."""
        return self.eval_interval.value > 0

    @property
    def eval_batch_size(self) -> int:
        """Number of samples of one device in one forward pass of an evaluation."""
        if self.device_eval_batch_size is not None:
            return self.device_eval_batch_size
        if isinstance(self.device_train_microbatch_size, int):
            return self.device_train_microbatch_size
        return max(1, DEFAULT_EVAL_TOKENS // self.max_seq_len)

    @property
    def eval_subset_samples(self) -> int | None:
        """Number of samples of each validation set to evaluate, on all devices together; None for all."""
        if self.eval_subset_num_batches == -1:
            return None
        return self.eval_subset_num_batches * self.global_train_batch_size

    @property
    def own_code(self) -> list[tuple[str, str]]:
        """Code of the user that the YAML names: dotted key and import path, `python:package.module:Thing`, of each."""
        names = [(f"model.{key}", name) for key, name in self.model.own_parts.items()]
        names += [("model.loss_fn", self.model.loss_fn)]
        names += [("tokenizer.name", self.tokenizer.name)]
        names += [("optimizer.name", self.optimizer.name), ("scheduler.name", self.scheduler.name)]
        names += [(f"{key}.name", loader.name) for key, loader in self.loaders.items()]
        names += [("callbacks", name) for name in self.callbacks.extra]
        names += [("loggers", name) for name in self.loggers.extra]
        return [(key, name) for key, name in names if is_own(name)]

    @property
    def keys_of_ops(self) -> list[str]:
        """Keys that the run sets and the companion llmfoundry_ops implements."""
        keys = self.callbacks.of_companions
        if self.alerts is not None:
            keys.append("alerts")
        if self.metrics_port is not None:
            keys.append("metrics_port")
        if self.console_format != "text":
            keys.append("console_format")
        return keys

    @property
    def validation(self) -> dict[str, LoaderConfig]:
        """Dotted key -> block of each loader of validation data: `eval_loader`, `eval_loaders.wiki`, ..."""
        blocks = {}
        if self.eval_loader is not None:
            blocks["eval_loader"] = self.eval_loader
        for label, loader in self.eval_loaders.items():
            blocks[f"eval_loaders.{label}"] = loader
        return blocks

    @property
    def loaders(self) -> dict[str, LoaderConfig]:
        """Dotted key -> block of each loader, `train_loader` first."""
        return {"train_loader": self.train_loader, **self.validation}

    @property
    def checkpoint_folder(self) -> str:
        """Folder or URL of the run's checkpoints."""
        return self.save_folder or f"{self.run_folder}/checkpoints"


def data_label(key: str) -> str:
    """Return Composer's label of a loader by its dotted key: train, eval, or eval/wiki for eval_loaders.wiki."""
    block, _, label = key.partition(".")
    return f"eval/{label}" if label else block.removesuffix("_loader")


def with_keys(config: TrainConfig) -> dict[str, Any]:
    """Return a configuration as the nested dictionaries of its YAML, with the blocks of companions at the top level."""
    values: dict[str, Any] = {}
    for name, value in as_yaml(config).items():
        if name == "blocks":
            values |= value
        else:
            values[name] = value
    return values


def as_dict(config: TrainConfig) -> dict[str, Any]:
    """Return a configuration as a run records it: nested dictionaries, lists, numbers and text, without secrets.

    Text from an environment variable is recorded as the YAML has it, `${oc.env:NAME}`. Credentials in URLs are masked.
    """

    def without_secrets(text: str) -> str:
        """Return the text to record instead of a text of the configuration."""
        if isinstance(text, FromEnvironment):
            text = text.written
        return mask_urls(text)

    values = map_texts(with_keys(config), without_secrets)
    # Record the default of weight_decay as a number, because a later release may have another default.
    values["optimizer"]["weight_decay"] = config.optimizer.decay
    values["optimizer"] = without_our_keys(values["optimizer"])
    values["scheduler"] = without_our_keys(values["scheduler"])

    if not config.optimizer.param_groups:
        values["optimizer"].pop("param_groups")

    # A run without parts of the user's own is recorded as earlier releases did, so that they can read it.
    later_keys = [f"model.{key}" for key in RECORDED_IF_GIVEN]
    return without_empty(values, [*later_keys, "scheduler.kwargs", "loggers.extra"])
