"""Check keys of a training configuration against each other.

`check_together` refuses combinations, and `surprises.py` warns of settings that are perhaps not meant. `check_batch` is
called later, when the number of devices is known. `build.py` has checked each key by itself. The method `problems` of a
block checks its own keys against each other. A companion checks whether tp_config, cp_config and pp_config can divide
the model.
"""

import os
from collections.abc import Iterator, Sequence
from typing import Any

from llmfoundry_lite import companions
from llmfoundry_lite.config.blocks import given_blocks
from llmfoundry_lite.config.data_schema import OF_THE_MODEL, LoaderConfig, TextDatasetConfig
from llmfoundry_lite.config.data_stages import SHARES, Streams, first_batches, streams_of_stages
from llmfoundry_lite.config.fields import keys_of
from llmfoundry_lite.config.layers import ConfigLayer, find_value, naming_source
from llmfoundry_lite.config.layout import Layout, describe_data_ranks, find_data_ranks
from llmfoundry_lite.config.model_schema import ModelConfig, divisors
from llmfoundry_lite.config.optimizer_schema import OptimizerConfig, SchedulerConfig
from llmfoundry_lite.config.optimizers import OPTIMIZERS
from llmfoundry_lite.config.schedules import SCHEDULES
from llmfoundry_lite.config.schema import TrainConfig
from llmfoundry_lite.config.sharding_schema import FSDPConfig
from llmfoundry_lite.config.spans import Duration
from llmfoundry_lite.config.uses import refuse_unused_keys
from llmfoundry_lite.errors import ConfigError, join_with_or
from llmfoundry_lite.own_code import is_own

COMPILE_OPTIONS = ("fullgraph", "dynamic", "backend", "mode", "options", "disable")
COMPILE_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


def check_together(config: TrainConfig, layers: Sequence[ConfigLayer] = ()) -> None:
    """Raise ConfigError for a combination of keys that does not work, although each key is valid by itself.

    `layers` are the files and arguments of the configuration, so that the error names the file. The planner, which has
    none, calls this for each configuration that it tries, so it has to be fast.
    """
    with naming_source(layers):
        check_model(config.model)
        _check_data(config)
        _check_batch_sizes(config)
        _check_seq_lens(config)
        refuse_unused_keys(config)
        _check_optimizer(config.optimizer, config.sharding)
        _check_mup(config)
        raise_first_problem(config.sharding.problems(), "fsdp_config")
        if config.alerts is not None:
            raise_first_problem(config.alerts.problems(), "alerts")
        _check_compilation(config.compile_config or {})
        _check_layout(config)
        _check_blocks(config)
        _check_exact_sums(config)
        _check_second_place(config)
        has_t_scale = any(find_value(layer.values, "scheduler.t_scale")[0] for layer in layers)
        _check_schedule_units(config, has_t_scale)
        _check_schedule_spans(config.scheduler, config.max_duration)
        _check_own_loaders(config, layers)


def check_model(model: ModelConfig) -> None:
    """Raise ConfigError for a model whose keys do not go together, such as heads that do not divide its width."""
    raise_first_problem(model.problems(), "model")


def raise_first_problem(problems: Iterator[str], block_key: str) -> None:
    """Raise ConfigError for the first problem that a block's method `problems` yields, if there is one.

    A problem begins with the name of its key in the block. With the `block_key` model, `n_heads: 3 does not divide …`
    becomes `model.n_heads: 3 does not divide …`.
    """
    for problem in problems:
        raise ConfigError(f"{block_key}.{problem}")


# -------------------------------------------------------------------------------------------------- data


def _check_data(config: TrainConfig) -> None:
    """Raise ConfigError for data sets whose keys do not go together, and for lengths and sizes that do not fit."""
    max_model_length = config.model.max_seq_len
    if config.max_seq_len > max_model_length:
        raise ConfigError(f"max_seq_len: {config.max_seq_len} is more than model.max_seq_len, {max_model_length}")
    for block, loader in config.loaders.items():
        if loader.name == "text":
            _check_loader(loader, f"{block}.dataset", config)

    max_tokenizer_length = config.tokenizer.kwargs.get("model_max_length")
    if isinstance(max_tokenizer_length, int) and max_tokenizer_length < config.max_seq_len:
        raise ConfigError(
            f"tokenizer.kwargs.model_max_length: {max_tokenizer_length} is less than max_seq_len, {config.max_seq_len}"
        )
    microbatch_size = config.device_train_microbatch_size
    batch_size = config.global_train_batch_size
    if isinstance(microbatch_size, int) and microbatch_size > batch_size:
        raise ConfigError(
            f"device_train_microbatch_size: {microbatch_size} is more than global_train_batch_size, {batch_size}"
        )


def _check_batch_sizes(config: TrainConfig) -> None:
    """Raise ConfigError for a batch_size_schedule with a size that is no multiple of global_train_batch_size.

    If it has larger batches, it also does not go with a loader of the user's own, with several launches that train one
    run, and with a run or a learning rate schedule whose spans are given in epochs.
    """
    schedule = config.batch_size_schedule
    if schedule is None or not schedule.steps:
        return
    base = config.global_train_batch_size
    for first_batch, size in schedule.steps:
        if size % base:
            lower = size // base * base
            near = join_with_or([multiple for multiple in (lower, lower + base) if multiple])
            raise ConfigError(
                f"batch_size_schedule: {size} from {first_batch}ba on given, expected a multiple of "
                f"global_train_batch_size, {base}, such as {near}; the smallest size belongs there"
            )
    if config.parts_of_batches.largest == 1:
        return  # a run of one size after all
    if config.max_duration.unit == "ep":
        raise ConfigError(
            f"batch_size_schedule: max_duration is {config.max_duration.written}, and a batch may have samples of two "
            "epochs; write max_duration in ba, sp or tok"
        )
    durations = () if is_own(config.scheduler.name) else SCHEDULES[config.scheduler.name].durations
    for name in durations:
        duration: Duration = getattr(config.scheduler, name)
        if duration.unit == "ep" and duration.value > 0:
            raise ConfigError(
                f"batch_size_schedule: does not go with scheduler.{name}, {duration}: epochs have different numbers of "
                "batches; write it in the unit of max_duration or in dur"
            )
    if config.train_loader.name != "text":
        raise ConfigError(
            f"batch_size_schedule: does not go with train_loader.name, {config.train_loader.name}: nothing is known of "
            "its place in the data; remove one of them"
        )
    for block in _find_shared_blocks(config):
        raise ConfigError(
            f"batch_size_schedule: does not go with {block}: several launches divide batches of one size; remove one"
        )


def _check_seq_lens(config: TrainConfig) -> None:
    """Raise ConfigError for a seq_len_schedule with a length that does not divide max_seq_len.

    It also does not go with a loader of the user's own, with samples of another length, with several launches that
    train one run, and with context and pipeline parallelism.
    """
    schedule = config.seq_len_schedule
    if schedule is None or not schedule.steps:
        return
    for first_batch, length in schedule.steps:
        if config.max_seq_len % length or length < 2:
            fitting = [divisor for divisor in divisors(config.max_seq_len) if divisor > 1]
            shorter = [divisor for divisor in fitting if divisor < length]
            longer = [divisor for divisor in fitting if divisor > length]
            raise ConfigError(
                f"seq_len_schedule: {length} from {first_batch}ba on given, expected 2 tokens or more that divide "
                f"max_seq_len, {config.max_seq_len}, such as {join_with_or(shorter[-1:] + longer[:1])}"
            )
        if config.sequence_parallel and length % config.tensor_parallel_degree:
            raise ConfigError(
                f"seq_len_schedule: {length} from {first_batch}ba on is not divided by "
                f"tp_config.tensor_parallel_degree, {config.tensor_parallel_degree}, which divides sequences; give "
                "multiples of it, or set tp_config.sequence_parallel=false"
            )
    # Key -> (whether the run has it, why it does not go with rows of other lengths).
    reasons = {
        "train_loader.name": (config.train_loader.name != "text", "its rows may be anything"),
        "train_loader.dataset.max_seq_len": (
            config.train_loader.dataset.max_seq_len not in (None, config.max_seq_len),
            "samples have max_seq_len tokens",
        ),
        "cp_config": (config.context.context_parallel_degree > 1, "its devices divide samples of one length"),
        "pp_config": (config.pipeline.pipeline_parallel_degree > 1, "its stages exchange tensors of one shape"),
        **dict.fromkeys(_find_shared_blocks(config), (True, "several launches divide batches of one shape")),
    }
    for key, (is_asked_for, why) in reasons.items():
        if is_asked_for:
            raise ConfigError(f"seq_len_schedule: does not go with {key}: {why}; remove one of them")


def _find_shared_blocks(config: TrainConfig) -> list[str]:
    """Return keys of the blocks by which several launches train the run together."""
    return [key for key, block in given_blocks(config.blocks).items() if block.shared_run is not None]


def _check_own_loaders(config: TrainConfig, layers: Sequence[ConfigLayer]) -> None:
    """Raise ConfigError for a `dataset` block beside a user's own loader, `name: python:…`, which does not get it.

    Two sorts of keys are allowed: those by which the model divides documents, because they do have an effect, and those
    that hardware overlays set, because overlays are written for many runs.
    """
    for block, loader in config.loaders.items():
        if loader.name == "text":
            continue
        for name in keys_of(TextDatasetConfig):
            key = f"{block}.dataset.{name}"
            if name not in OF_THE_MODEL and _is_set_by_run(key, loader.dataset, layers):
                raise ConfigError(
                    f"{key}: {loader.name} is not given it; remove it, and write its own arguments beside its name"
                )


def _is_set_by_run(key: str, block: Any, layers: Sequence[ConfigLayer]) -> bool:
    """Return whether a layer other than a hardware overlay sets a dotted key to another value than its default.

    `block` is the dataclass whose field the key is.
    """
    name = key.rpartition(".")[2]
    default = keys_of(type(block))[name].default
    for layer in layers:
        is_given, value = find_value(layer.values, key)
        if is_given and value != default and not layer.is_overlay:
            return True
    return False


def _check_loader(loader: LoaderConfig, block: str, config: TrainConfig) -> None:
    """Raise ConfigError for a data set whose keys do not go together, or not with the model.

    `block` is the dotted key of the data set, such as `train_loader.dataset`.
    """
    dataset, model = loader.dataset, config.model
    # Folders: those of the data set itself, or those of its streams.
    if dataset.streams and (dataset.local or dataset.remote):
        raise ConfigError(
            f"{block}: both streams and local/remote given; put each folder under streams, or use no streams"
        )
    for stage_index, streams in enumerate(streams_of_stages(dataset)):
        has_own_streams = bool(dataset.stages) and bool(dataset.stages[stage_index].streams)
        key = f"{block}.stages[{stage_index}].streams" if has_own_streams else f"{block}.streams"
        if has_own_streams or dataset.streams:
            _check_streams(streams, key, has_epoch_size=dataset.epoch_size is not None)
        elif not dataset.local:
            raise ConfigError(
                f"{block}.local: missing; expected the folder of an MDS data set (a remote one is cached there)"
            )
    if dataset.stages:
        _check_stages(loader, block, config)
    if dataset.max_seq_len is not None and dataset.max_seq_len > model.max_seq_len:
        raise ConfigError(
            f"{block}.max_seq_len: {dataset.max_seq_len} is more than model.max_seq_len, {model.max_seq_len}"
        )

    # Tokens that end or begin a document. The model has one rule for training and validation.
    for key in ("eos_token_id", "bos_token_id"):
        token = getattr(dataset, key)
        token_in_training = getattr(config.train_loader.dataset, key)
        if token is None:
            continue
        if token >= model.vocab_size:
            raise ConfigError(f"{block}.{key}: {token} is outside model.vocab_size, {model.vocab_size}")
        if token != token_in_training:
            raise ConfigError(
                f"{block}.{key}: {token} is not that of train_loader.dataset, {token_in_training}; the model divides "
                "documents of both alike: give both loaders the same one"
            )
    if dataset.eos_token_id is not None and dataset.bos_token_id is not None:
        raise ConfigError(
            f"{block}: both eos_token_id and bos_token_id given; documents end with one or begin with one"
        )


def _check_streams(streams: Streams, block: str, *, has_epoch_size: bool) -> None:
    """Raise ConfigError for streams of a data set, or of one of its stages, that have no folder or unclear shares.

    `block` is the dotted key of the streams. Each stream may say by one key of SHARES how much of it an epoch has.
    `has_epoch_size` says whether the data set fixes the size of an epoch, which only proportions can divide.
    """
    for name, stream in streams.items():
        if not stream.local:
            raise ConfigError(f"{block}.{name}.local: missing; expected the folder this stream is read or cached in")
        share_keys = [key for key in SHARES if getattr(stream, key) is not None]
        if len(share_keys) > 1:
            raise ConfigError(f"{block}.{name}: {' and '.join(share_keys)} given, expected one of them at most")
        if has_epoch_size and share_keys and share_keys[0] != "proportion":
            raise ConfigError(
                f"{block}.{name}.{share_keys[0]}: given with epoch_size, which proportions divide; use proportion, or "
                "remove epoch_size"
            )

    num_with_proportion = sum(stream.proportion is not None for stream in streams.values())
    if 0 < num_with_proportion < len(streams):
        raise ConfigError(f"{block}: some streams have a proportion and some do not; give it to all or to none")


def _check_stages(loader: LoaderConfig, block: str, config: TrainConfig) -> None:
    """Raise ConfigError for settings of a loader that do not go with stages, and for folders that no stage reads.

    `block` is the dotted key of the data set.
    """
    dataset = loader.dataset
    if not block.startswith("train_loader"):
        raise ConfigError(f"{block}.stages: validation has one stage; leave it out, or name a loader for each mixture")
    if not loader.drop_last:
        raise ConfigError(f"{block}.stages: stages end by full batches; remove train_loader.drop_last: false")
    # Raises ConfigError unless each stage ends after the one before it.
    first_batches(dataset, block, config.max_duration, config.batch_sizes, config.max_seq_len)

    # A stage without streams reads those of the data set. If there is none, every stream must be named by a stage.
    if not all(stage.streams for stage in dataset.stages):
        return
    if dataset.local or dataset.remote:
        raise ConfigError(f"{block}.local: no stage reads it; name it under a stage's streams, or remove it")
    names = {name for stage in dataset.stages for name in stage.streams}
    for name, stream in dataset.streams.items():
        if name not in names:
            raise ConfigError(f"{block}.streams.{name}: no stage names it; name it in one, or remove it")
        for share in SHARES:
            if getattr(stream, share) is not None:
                raise ConfigError(f"{block}.streams.{name}.{share}: every stage has shares of its own; give it there")


# ------------------------------------------------------------------------------- optimizer, FSDP, compilation


def _check_mup(config: TrainConfig) -> None:
    """Raise ConfigError for muP with the user's own optimizer, whose updates may depend on the width in any way."""
    name = config.optimizer.name
    if config.model.mup is not None and is_own(name):
        raise ConfigError(
            f"model.mup: does not know how the updates of optimizer.name: {name} depend on the width; use "
            f"{join_with_or([*OPTIMIZERS])}, or remove mup"
        )


def _check_optimizer(optimizer: OptimizerConfig, fsdp: FSDPConfig) -> None:
    """Raise ConfigError for settings that do not go together, or not with the optimizer."""
    if optimizer.adjust_lr_fn == "original" and optimizer.adamw_lr is None:
        raise ConfigError("optimizer.adamw_lr: missing; adjust_lr_fn: original scales updates differently from AdamW")
    row = OPTIMIZERS.get(optimizer.name)
    if fsdp.offload_optimizer and row is not None and row.multiplies_matrices:
        raise ConfigError(
            f"fsdp_config.offload_optimizer: {optimizer.name} multiplies matrices in its step, which would be the "
            "host's work; use FULL_SHARD without it, or adamw"
        )


def _check_compilation(options: dict[str, Any]) -> None:
    """Raise ConfigError for arguments that torch.compile does not have, and for a mode that it does not know.

    The value of `backend` is not checked, because any installed package may add one.
    """
    for key, value in options.items():
        if key not in COMPILE_OPTIONS:
            known = ", ".join(COMPILE_OPTIONS)
            raise ConfigError(f"compile_config.{key}: torch.compile has no such argument; it has {known}")
        if key == "mode" and value not in (None, *COMPILE_MODES):
            raise ConfigError(f"compile_config.mode: {value!r} given, expected one of {', '.join(COMPILE_MODES)}")


# ------------------------------------------------------------------------------------------------ devices


def _check_layout(config: TrainConfig) -> None:
    """Raise ConfigError for degrees of tensor, context and pipeline parallelism that cannot divide the model.

    These rules do not depend on the number of devices. If the companion that has these layouts is not installed,
    nothing is checked: `preflight` then refuses a degree above 1, and other keys of these blocks have no effect.
    """
    is_given = config.tp_config or config.cp_config or config.pp_config
    if not is_given:
        return
    _refuse_to_divide_own_parts(config)
    check_division = companions.load_if_installed("llmfoundry_layouts.checks:check_division")
    if check_division is not None:
        check_division(config)


def _refuse_to_divide_own_parts(config: TrainConfig) -> None:
    """Raise ConfigError for a part of the user's own in a layout that divides layers, samples or blocks."""
    degrees = {
        "tp_config.tensor_parallel_degree": config.tensor_parallel_degree,
        "cp_config.context_parallel_degree": config.context.context_parallel_degree,
        "pp_config.pipeline_parallel_degree": config.pipeline.pipeline_parallel_degree,
    }
    parts = dict(config.model.own_parts)
    if is_own(config.model.loss_fn):
        parts["loss_fn"] = config.model.loss_fn
    for key, name in parts.items():
        for degree_key, degree in degrees.items():
            if degree > 1:
                raise ConfigError(
                    f"{degree_key}: {degree} given, but nothing is known of how model.{key}, {name}, could be divided; "
                    f"remove {degree_key}, because only FSDP divides parts of your own"
                )


def check_batch(config: TrainConfig, layout: Layout) -> None:
    """Raise ConfigError unless the devices of a layout can divide a global batch evenly, and into its microbatches.

    The error names numbers of devices, or sizes of microbatches, that fit.
    """
    batch_size = config.global_train_batch_size
    microbatch_size = config.device_train_microbatch_size
    num_data_ranks = layout.num_data_ranks
    devices = describe_data_ranks(layout)
    # With exact sums the size of a microbatch is part of the run, so it must fit on any number of devices.
    fixed_size = None
    if config.exact_sums and isinstance(microbatch_size, int):
        fixed_size = microbatch_size
    fitting = find_data_ranks(config, fixed_size)
    if batch_size % num_data_ranks:
        near = ", ".join(str(number) for number in fitting if number <= 4 * num_data_ranks) or "there is none"
        parts = f", in microbatches of {fixed_size} samples" if fixed_size is not None else ""
        raise ConfigError(
            f"global_train_batch_size: {batch_size} cannot be shared evenly by {num_data_ranks} {devices}; "
            f"start with a number of {devices} that divides it{parts} ({near}) or change the batch size"
        )

    # Check that a device's share of the batch consists of whole microbatches.
    device_batch_size = batch_size // num_data_ranks
    remedy = "set it to"
    if fixed_size is not None and fitting:
        # A run that resumes may not set another size, so another number of devices is the first advice.
        remedy = f"start {join_with_or(fitting)} {devices}, or set it, in a new run, to"
    if isinstance(microbatch_size, int) and microbatch_size > device_batch_size:
        raise ConfigError(
            f"device_train_microbatch_size: {microbatch_size} is more than the {device_batch_size} samples "
            f"each device gets ({batch_size} / {num_data_ranks} {devices}); {remedy} {device_batch_size} or less"
        )
    if fixed_size is not None and device_batch_size % fixed_size:
        raise ConfigError(
            f"device_train_microbatch_size: {fixed_size} does not divide the {device_batch_size} samples of each "
            f"device; with exact_sums every microbatch has as many; {remedy} "
            f"{join_with_or(divisors(device_batch_size))}"
        )

    if layout.pipeline > 1:
        key = "pp_config.pipeline_parallel_degree"
        check_microbatches = companions.load("llmfoundry_layouts.checks:check_microbatches", key)
        check_microbatches(config, layout, device_batch_size)


# ---------------------------------------------------------------------------------------------- schedule


def _check_schedule_units(config: TrainConfig, has_t_scale: bool) -> None:
    """Raise ConfigError for durations of the schedule in another unit than max_duration.

    For example, `t_warmup: 100ba` with `max_duration: 1e9tok` is refused; the error says how many tokens 100 batches
    have. This keeps the learning rate independent of the size of the data. Composer's schedules may mix epochs and
    batches, because the launch converts them by the length of an epoch. `has_t_scale` says whether the user sets
    t_scale.
    """
    schedule = config.scheduler
    run_duration = config.max_duration
    if is_own(schedule.name):
        return
    for name in SCHEDULES[schedule.name].durations:
        duration: Duration = getattr(schedule, name)
        if duration.value == 0 or duration.unit in ("dur", run_duration.unit):
            continue
        are_batches_and_epochs = {duration.unit, run_duration.unit} == {"ba", "ep"}
        if are_batches_and_epochs and SCHEDULES[schedule.name].mixes_batches_and_epochs:
            continue

        # The default of t_scale is in batches, so in other units it has to be given.
        if name == "t_scale" and duration == Duration(1, "ba") and not has_t_scale:
            problem, hint = "missing;", ""
        else:
            equivalent = _convert_duration(duration, run_duration.unit, config)
            problem = f"{duration} given,"
            hint = f"; that is {equivalent}" if equivalent else "; a share of the run is written 0.1dur"
        is_bare_number = isinstance(run_duration.written, int)
        note_on_epochs = f"; max_duration: {run_duration.value} counts epochs" if is_bare_number else ""
        raise ConfigError(
            f"scheduler.{name}: {problem} expected a span in {run_duration.unit}, the unit of max_duration, or in dur"
            f"{hint}{note_on_epochs}"
        )


def _convert_duration(duration: Duration, unit: str, config: TrainConfig) -> Duration | None:
    """Convert a duration to another unit: with batches of 8 samples of 2,048 tokens, 100ba is 800sp or 1638400tok.

    Returns None if the result is not a whole number, and for epochs, whose size the configuration does not tell.
    """
    seq_len = config.train_loader.dataset.max_seq_len or config.max_seq_len
    tokens_per_unit = {"tok": 1, "sp": seq_len}
    if config.parts_of_batches.largest == 1:  # otherwise a number of batches has no number of samples by itself
        tokens_per_unit["ba"] = seq_len * config.global_train_batch_size
    if duration.unit not in tokens_per_unit or unit not in tokens_per_unit:
        return None
    num_tokens = int(duration.value) * tokens_per_unit[duration.unit]
    value, remainder = divmod(num_tokens, tokens_per_unit[unit])
    return None if remainder else Duration(value, unit)


def _check_schedule_spans(schedule: SchedulerConfig, run: Duration) -> None:
    """Raise ConfigError unless warm-up and decay fit into the schedule, one after the other. `run` is max_duration."""
    warmup = schedule.t_warmup
    decay = schedule.t_decay
    end = schedule.t_max
    if is_own(schedule.name):
        return
    row = SCHEDULES[schedule.name]
    if row.has_end and warmup.unit == end.unit and warmup.value > end.value:
        raise ConfigError(
            f"scheduler.t_warmup: {warmup} is more than t_max, {end}; the warm-up is part of the schedule"
        )

    def length(duration: Duration) -> float:
        """Return a duration's number in the unit of max_duration. `dur` is a fraction of the run."""
        return duration.value * run.value if duration.unit == "dur" else duration.value

    if "t_decay" in row.keys and length(warmup) + length(decay) > length(end):
        raise ConfigError(
            f"scheduler.t_decay: {decay} after a warm-up of {warmup} is more than t_max, {end} (max_duration: {run}); "
            "shorten one of them"
        )


# ------------------------------------------------------------------------------- blocks of companions, exact sums


def _check_blocks(config: TrainConfig) -> None:
    """Raise ConfigError for two blocks that name the run's other launches, and for one that its companion refuses."""
    blocks = given_blocks(config.blocks)
    keys_of_shared_runs = [key for key, block in blocks.items() if block.shared_run is not None]
    if len(keys_of_shared_runs) > 1:
        first, second, *_ = keys_of_shared_runs
        raise ConfigError(f"{second}: does not go with {first}: both name the run's other launches; remove one")
    for block in blocks.values():
        block.check(config)


def _check_second_place(config: TrainConfig) -> None:
    """Raise ConfigError if `save_fallback` is `save_folder`, or if one of them lies in the other."""
    if config.save_fallback is None:
        return
    first = f"{_address_of(config.checkpoint_folder)}/"
    second = f"{_address_of(config.save_fallback)}/"
    if first.startswith(second) or second.startswith(first):
        raise ConfigError(
            f"save_fallback: {config.save_fallback} given, and checkpoints go to {config.checkpoint_folder}; expected "
            "another place, on another disk or in another bucket"
        )


def _address_of(place: str) -> str:
    """Return the absolute path of a folder on this machine, or its URL, without a slash at the end."""
    protocol, separator, path = place.partition("://")
    if separator and protocol not in ("file", "local"):
        return place.rstrip("/")
    local_path = path if separator else place
    return os.path.abspath(os.path.expanduser(local_path))


def _check_exact_sums(config: TrainConfig) -> None:
    """Raise ConfigError for settings that do not go with exact_sums.

    With exact sums, a run is bit-identical on any number of ranks. That is impossible if a setting makes the arithmetic
    of a microbatch depend on the number of ranks.
    """
    if not config.exact_sums:
        return
    name = config.optimizer.name
    sums_exactly = name in OPTIMIZERS and OPTIMIZERS[name].sums_exactly
    # Setting -> (whether the run has it, why it does not go with exact sums).
    reasons = {
        "tp_config": (config.tensor_parallel_degree > 1, "tensor parallelism divides the sums within a product"),
        "cp_config": (config.context.context_parallel_degree > 1, "context parallelism divides the sums over a sample"),
        "precision: amp_fp16": (config.precision == "amp_fp16", "the loss scale changes what is rounded"),
        "model.attn_config.attn_pdrop": (bool(config.model.attn_config.attn_pdrop), "kernels draw it for each rank"),
        "train_loader.name": (config.train_loader.name != "text", "nothing is known of the rows of its microbatches"),
        "optimizer.name": (not sums_exactly, "nothing is known of its arithmetic on shards"),
    }
    for key, (is_asked_for, why) in reasons.items():
        if is_asked_for:
            raise ConfigError(f"exact_sums: does not go with {key}: {why}; remove one of them")
    if config.deterministic is False:
        raise ConfigError(
            "deterministic: false given, but exact_sums needs kernels that give the same digits every time; remove one "
            "of them"
        )
    if config.device_train_microbatch_size is None:
        raise ConfigError(
            "exact_sums: needs device_train_microbatch_size, which becomes part of the run: auto, or a number that "
            "divides the samples of a device wherever the run goes on, such as 1"
        )
