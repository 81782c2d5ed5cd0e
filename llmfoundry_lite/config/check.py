"""What the configuration alone can tell to be wrong, and what is allowed but perhaps not meant.

Owns how blocks go together. Leaves the values of single keys to `check_values.py`, the model to `check_model.py`, and
how devices divide it to `check_layout.py`.
"""

import dataclasses
import math
import re
import typing
from collections.abc import Sequence

from llmfoundry_lite.config.check_layout import check_layout, find_undivided
from llmfoundry_lite.config.check_model import check_model
from llmfoundry_lite.config.check_values import Refuse, check_import_path, check_values
from llmfoundry_lite.config.layers import Layer, get, source_of
from llmfoundry_lite.config.schema import Duration, LoaderConfig, TrainConfig, parse_seconds
from llmfoundry_lite.errors import ConfigError

COMPILE_OPTIONS = ("fullgraph", "dynamic", "backend", "mode", "options", "disable")
COMPILE_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")

SCHEDULES_KEYS = {
    "warmup_stable_decay": ("decay", "t_decay"),
    "inv_sqrt_with_warmup": ("t_scale", "t_cooldown", "alpha_f_decay", "alpha_f_cooldown"),
    "linear_decay_with_warmup": ("alpha_i",),
}
"""What one schedule alone has a use for."""

COMPOSERS_SCHEDULES = ("constant_with_warmup", "cosine_with_warmup", "linear_decay_with_warmup")

MUON_KEYS = ("adamw_lr", "momentum", "ns_steps", "ns_dtype", "adjust_lr_fn")

TOKENIZER_OPTIONS = ("model_max_length", "pad_token", "padding_side", "use_fast")
"""LLM Foundry's options that are checked, or that change no token id."""

LARGEST_SEED = 2**32 - 2**16

LONGEST_GRACE_SECONDS = 25
"""`composer` (its launcher's CLEANUP_TIMEOUT) and torchrun give their ranks 30 seconds from the first signal."""


def check_config(config: TrainConfig, layers: Sequence[Layer] = ()) -> None:
    """Check everything that the configuration alone can tell. Raises ConfigError."""
    check_values(config, layers, _refusing(layers))
    check_together(config, layers)


def _refusing(layers: Sequence[Layer]) -> Refuse:
    def refuse(key: str, message: str) -> typing.NoReturn:
        raise ConfigError(f"{source_of(key, layers)}: {key}: {message}")

    return refuse


def check_together(config: TrainConfig, layers: Sequence[Layer] = ()) -> None:
    """What goes together, of values that are right by themselves; a planner asks often. Raises ConfigError."""
    refuse = _refusing(layers)
    if config.seed > LARGEST_SEED:
        refuse("seed", f"{config.seed} given, expected at most {LARGEST_SEED}: a rank adds its number, within 32 bits")
    check_model(config.model, refuse)
    if config.max_seq_len > config.model.max_seq_len:
        refuse("max_seq_len", f"{config.max_seq_len} is more than model.max_seq_len, {config.model.max_seq_len}")
    for block, loader in config.loaders.items():
        if loader.name == "text":
            _check_loader(loader, block, config, refuse)
    model_max_length = config.tokenizer.kwargs.get("model_max_length")
    if isinstance(model_max_length, int) and model_max_length < config.max_seq_len:
        refuse(
            "tokenizer.kwargs.model_max_length", f"{model_max_length} is less than max_seq_len, {config.max_seq_len}"
        )
    if config.eval_subset_num_batches < -1 or config.eval_subset_num_batches == 0:
        refuse("eval_subset_num_batches", f"{config.eval_subset_num_batches} given, expected -1 (all) or a count")
    num_kept = config.save_num_checkpoints_to_keep
    if num_kept < -1 or num_kept == 0:
        refuse("save_num_checkpoints_to_keep", f"{num_kept} given, expected -1 (all) or a count above 0")
    for beta in config.optimizer.betas or ():
        if not 0 <= beta < 1:
            refuse("optimizer.betas", f"{beta} given, expected 0 <= beta < 1")
    _check_muon(config, refuse)
    microbatch, batch = config.device_train_microbatch_size, config.global_train_batch_size
    if microbatch not in (None, "auto"):
        if not isinstance(microbatch, int) or microbatch <= 0:
            refuse("device_train_microbatch_size", f"{microbatch!r} given, expected a number of samples, or auto")
        if microbatch > batch:
            refuse("device_train_microbatch_size", f"{microbatch} is more than global_train_batch_size, {batch}")
    for key, time in (("max_wall_time", config.max_wall_time), ("retry_for", config.retry_for)):
        try:
            if time is not None:
                parse_seconds(time)
        except ValueError as error:
            refuse(key, f"{time!r} given, expected {error}")
    fsdp = config.fsdp_config
    if fsdp and fsdp.data_parallel_shard_degree is not None and fsdp.sharding_strategy != "HYBRID_SHARD":
        refuse(
            "fsdp_config.data_parallel_shard_degree",
            f"only HYBRID_SHARD uses it, and sharding_strategy is {fsdp.sharding_strategy}; change that or remove this",
        )
    if fsdp and isinstance(fsdp.activation_checkpointing, str):
        if fsdp.activation_checkpointing != "selective":
            key = "fsdp_config.activation_checkpointing"
            refuse(key, f"{fsdp.activation_checkpointing!r} given, expected true, false or selective")
        if fsdp.activation_checkpointing_reentrant:
            refuse("fsdp_config.activation_checkpointing_reentrant", "selective has no reentrant form; remove it")
    if fsdp and fsdp.activation_cpu_offload and not fsdp.activation_checkpointing:
        refuse(
            "fsdp_config.activation_cpu_offload",
            "offloads what activation_checkpointing keeps; add activation_checkpointing: true, or remove it",
        )
    if fsdp and fsdp.sharding_strategy == "ZERO_1" and fsdp.offload_optimizer:
        refuse(
            "fsdp_config.offload_optimizer",
            "ZERO_1 keeps the whole model on each device; use FULL_SHARD, or remove one of them",
        )
    if config.compile_config is not None:
        _check_compilation(config.compile_config, refuse)
    check_layout(config, refuse)
    if config.islands is not None:
        _check_islands(config, refuse)
    for path in config.callbacks.extra:
        check_import_path("callbacks", path, layers)
    _check_schedule_keys(config, refuse)
    _check_schedule_units(config, layers, refuse)
    _check_schedule_spans(config, refuse)


def _check_islands(config: TrainConfig, refuse: Refuse) -> None:
    """What one island of several does not do yet, or must know."""
    islands = config.islands
    assert islands is not None
    if not re.fullmatch(r"\w[\w.\-]{0,63}", islands.name):
        refuse("islands.name", f"{islands.name!r} given, expected letters and digits, and . _ - after the first")
    if not re.fullmatch(r".+:\d{1,5}", islands.coordinator):
        refuse("islands.coordinator", f"{islands.coordinator!r} given, expected host:port, such as 127.0.0.1:7070")
    if not 1e-6 <= islands.weight <= 1e6:  # as `islands.checks` has it
        refuse("islands.weight", f"{islands.weight} given, expected a number from 1e-6 to 1e6")
    if islands.address in ("0.0.0.0", "::"):
        refuse(
            "islands.address", f"{islands.address} given, expected an address at which other islands reach this host"
        )
    if islands.begin_with is not None and islands.begin_with < 1:
        refuse("islands.begin_with", f"{islands.begin_with} given, expected a number of islands")
    if islands.check_weights_every < 1:
        refuse("islands.check_weights_every", f"{islands.check_weights_every} given, expected a number above 0")
    model = config.model
    unsupported = {
        "pp_config": config.pipeline.pipeline_parallel_degree > 1,
        "tp_config": config.tensor_parallel_degree > 1,
        "cp_config": config.context.context_parallel_degree > 1,
        "precision: amp_fp16": config.precision == "amp_fp16",
        "fsdp_config.sharding_strategy: ZERO_1": config.sharding.sharding_strategy == "ZERO_1",
        "optimizer.name: muon": config.optimizer.name == "muon",
        "dropout": any((model.resid_pdrop, model.emb_pdrop, model.attn_config.attn_pdrop)),
        "train_loader.name: python": config.train_loader.name != "text",
    }
    for what, is_asked_for in unsupported.items():
        if is_asked_for:
            refuse("islands", f"an island does not go with {what} yet; remove one of them")
    if not isinstance(config.device_train_microbatch_size, int):
        given = "missing" if config.device_train_microbatch_size is None else "auto given"
        refuse("device_train_microbatch_size", f"{given}; an island's rows change, so say how many samples it has")
    if config.save_folder is None:
        refuse("save_folder", "missing; islands take turns to save, so name a folder or URL that all of them reach")


def _check_muon(config: TrainConfig, refuse: Refuse) -> None:
    optimizer = config.optimizer
    if optimizer.name != "muon":
        for key in MUON_KEYS:
            if getattr(optimizer, key) is not None:
                refuse(f"optimizer.{key}", f"only muon uses it, and optimizer.name is {optimizer.name}; remove it")
        return
    if optimizer.momentum is not None and not 0 <= optimizer.momentum < 1:
        refuse("optimizer.momentum", f"{optimizer.momentum} given, expected 0 <= momentum < 1")
    if optimizer.adjust_lr_fn == "original" and optimizer.adamw_lr is None:
        refuse("optimizer.adamw_lr", "missing; adjust_lr_fn: original has updates of another size than AdamW's")
    if config.sharding.offload_optimizer:
        refuse(
            "fsdp_config.offload_optimizer",
            "muon multiplies matrices in its step, which would be the host's work; use FULL_SHARD without it, or adamw",
        )


def _check_schedule_keys(config: TrainConfig, refuse: Refuse) -> None:
    """No schedule passes over what was meant for another one."""
    schedule = config.scheduler
    defaults = {field.name: field.default for field in dataclasses.fields(schedule)}
    for name, keys in SCHEDULES_KEYS.items():
        for key in keys if name != schedule.name else ():
            if getattr(schedule, key) != defaults[key]:
                refuse(f"scheduler.{key}", f"only {name} uses it, and scheduler.name is {schedule.name}; remove it")


def _check_schedule_units(config: TrainConfig, layers: Sequence[Layer], refuse: Refuse) -> None:
    """The schedule counts in the unit of max_duration alone, so that the learning rate depends on nothing else.

    Composer's schedules convert epochs and batches into each other by an epoch's length, which the launch knows.
    """
    schedule, run = config.scheduler, Duration.parse(config.max_duration)
    epochs = f"; max_duration: {run.value} counts epochs" if isinstance(config.max_duration, int) else ""
    more = {"inv_sqrt_with_warmup": ("t_scale", "t_cooldown"), "warmup_stable_decay": ("t_decay",)}
    for name in ("t_warmup", "t_max", *more.get(schedule.name, ())):
        key, span = f"scheduler.{name}", Duration.parse(getattr(schedule, name))
        if span.value == 0 or span.unit in ("dur", run.unit):
            continue
        if schedule.name in COMPOSERS_SCHEDULES and {span.unit, run.unit} == {"ba", "ep"}:
            continue
        if name == "t_scale" and span == Duration(1, "ba") and not any(get(layer.values, key)[0] for layer in layers):
            refuse(key, f"missing; expected a span in {run.unit}, the unit of max_duration, or in dur{epochs}")
        equivalent = _convert_span(span, run.unit, config)
        hint = f"that is {equivalent}" if equivalent else "a share of the run is written 0.1dur"
        refuse(key, f"{span} given, expected a span in {run.unit}, the unit of max_duration, or in dur; {hint}{epochs}")


def _check_schedule_spans(config: TrainConfig, refuse: Refuse) -> None:
    """Warm-up and decay are parts of the schedule, one after the other."""
    run, schedule = Duration.parse(config.max_duration), config.scheduler
    warmup, decay, end = (Duration.parse(span) for span in (schedule.t_warmup, schedule.t_decay, schedule.t_max))
    if warmup.unit == end.unit and warmup.value > end.value:
        refuse("scheduler.t_warmup", f"{warmup} is more than t_max, {end}; the warm-up is part of the schedule")

    def length(span: Duration) -> float:
        return span.value * run.value if span.unit == "dur" else span.value

    if schedule.name == "warmup_stable_decay" and length(warmup) + length(decay) > length(end):
        refuse(
            "scheduler.t_decay",
            f"{decay} after a warm-up of {warmup} is more than t_max, {end} (max_duration: {run}); shorten one of them",
        )


def _convert_span(span: Duration, unit: str, config: TrainConfig) -> Duration | None:
    """Exactly, or not at all: how many samples an epoch has, the configuration does not tell."""
    seq_len = config.train_loader.dataset.max_seq_len or config.max_seq_len
    num_tokens = {"tok": 1, "sp": seq_len, "ba": seq_len * config.global_train_batch_size}
    if span.unit not in num_tokens or unit not in num_tokens:
        return None
    value, rest = divmod(int(span.value) * num_tokens[span.unit], num_tokens[unit])
    return None if rest else Duration(value, unit)


def _check_compilation(options: dict[str, typing.Any], refuse: Refuse) -> None:
    """A backend may be anybody's package; what else torch.compile takes is known."""
    for key, value in options.items():
        if key not in COMPILE_OPTIONS:
            refuse(f"compile_config.{key}", f"torch.compile has no such argument; it has {', '.join(COMPILE_OPTIONS)}")
        if key == "mode" and value not in (None, *COMPILE_MODES):
            refuse("compile_config.mode", f"{value!r} given, expected one of {', '.join(COMPILE_MODES)}")


def _check_loader(loader: LoaderConfig, block: str, config: TrainConfig, refuse: Refuse) -> None:
    dataset = loader.dataset
    if dataset.streams and (dataset.local or dataset.remote):
        refuse(
            f"{block}.dataset", "both streams and local/remote given; put each folder under streams, or use no streams"
        )
    if not dataset.streams and not dataset.local:
        refuse(
            f"{block}.dataset.local", "missing; expected the folder of an MDS data set (a remote one is cached there)"
        )
    for name, stream in dataset.streams.items():
        if not stream.local:
            refuse(
                f"{block}.dataset.streams.{name}.local", "missing; expected the folder this stream is read or cached in"
            )
        given = {key: getattr(stream, key) for key in ("proportion", "repeat", "choose")}
        given = {key: value for key, value in given.items() if value is not None}
        if len(given) > 1:
            refuse(f"{block}.dataset.streams.{name}", f"{' and '.join(given)} given, expected one of them at most")
        for key, value in given.items():
            if not value > 0:
                refuse(f"{block}.dataset.streams.{name}.{key}", f"{value!r} given, expected a number above 0")
    if len({stream.proportion is None for stream in dataset.streams.values()}) == 2:
        refuse(f"{block}.dataset.streams", "some streams have a proportion and some do not; give it to all or to none")
    if dataset.max_seq_len is not None and dataset.max_seq_len > config.model.max_seq_len:
        refuse(
            f"{block}.dataset.max_seq_len",
            f"{dataset.max_seq_len} is more than model.max_seq_len, {config.model.max_seq_len}",
        )
    train, tokens = config.train_loader.dataset, ("eos_token_id", "bos_token_id")
    for key in tokens:
        token = getattr(dataset, key)
        if token is not None and token >= config.model.vocab_size:
            refuse(f"{block}.dataset.{key}", f"{token} is outside model.vocab_size, {config.model.vocab_size}")
        if token is not None and token != getattr(train, key):
            refuse(
                f"{block}.dataset.{key}",
                f"{token} is not that of train_loader.dataset, {getattr(train, key)}; the model divides documents of "
                "both alike: give both loaders the same one",
            )
    if dataset.eos_token_id is not None and dataset.bos_token_id is not None:
        refuse(f"{block}.dataset", "both eos_token_id and bos_token_id given; documents end with one or begin with one")
    for key, units, example in (("epoch_size", "kmb", "100k"), ("cache_limit", "kmgt", "100gb")):
        value = getattr(dataset, key)
        is_text = isinstance(value, str) and re.fullmatch(rf"(?=.*[1-9])[0-9][0-9_.]*[{units}]?b?", value.lower())
        if not (value is None or is_text or (isinstance(value, int) and value > 0)):
            refuse(f"{block}.dataset.{key}", f"{value!r} given, expected a number above 0, such as {example}")


def find_surprises(config: TrainConfig, layers: Sequence[Layer], *, under_srun: bool = False) -> list[str]:
    """What is allowed, and perhaps not meant."""
    notes = []
    for key in ("max_duration", "eval_interval", "save_interval"):
        value = getattr(config, key)
        given = any(get(layer.values, key)[0] for layer in layers)
        if given and isinstance(value, int) and value > 0:
            notes.append(f"{source_of(key, layers)}: {key}: {value} counts epochs; {value} batches are {value}ba")
    run = Duration.parse(config.max_duration)
    for key, meaning in (("t_warmup", "the learning rate never reaches lr"), ("t_max", "the schedule does not end")):
        span = Duration.parse(getattr(config.scheduler, key))
        if span.value > (1 if span.unit == "dur" else run.value if span.unit == run.unit else math.inf):
            key = f"scheduler.{key}"
            notes.append(f"{source_of(key, layers)}: {key}: {span} is longer than the run, {run}: {meaning}")
    for name in config.tokenizer.kwargs:
        if name not in TOKENIZER_OPTIONS:
            key = f"tokenizer.kwargs.{name}"
            notes.append(f"{source_of(key, layers)}: {key} has no effect: the tokenizer's own files decide")
    notes += [f"{source_of(key, layers)}: {key}: {what}" for key, what in find_undivided(config).items()]
    dataset, batch = config.train_loader.dataset, config.global_train_batch_size
    if dataset.shuffle and dataset.shuffle_block_size is not None and dataset.shuffle_block_size < 2 * batch:
        key = "train_loader.dataset.shuffle_block_size"
        notes.append(
            f"{source_of(key, layers)}: {key}: {dataset.shuffle_block_size} is less than two batches of {batch}: "
            f"shards are shuffled, their samples are not; set it to {100 * batch} or more, or leave it out"
        )
    for key in ("eos_token_id", "bos_token_id"):
        if getattr(dataset, key) is not None and not config.model.attn_config.attn_uses_sequence_id:
            key = f"train_loader.dataset.{key}"
            notes.append(
                f"{source_of(key, layers)}: {key} has no effect: documents see each other without "
                "model.attn_config.attn_uses_sequence_id: true"
            )
    grace = config.preemption_grace_seconds
    if grace > LONGEST_GRACE_SECONDS and not under_srun:
        key = "preemption_grace_seconds"
        notes.append(
            f"{source_of(key, layers)}: {key}: {grace:g} is for srun alone; `composer` and `torchrun` kill after 30 s "
            f"({LONGEST_GRACE_SECONDS} or less leaves them time)"
        )
    return notes
