"""What the configuration alone can tell to be wrong: choices, ranges, spans, and blocks that do not go together."""

import dataclasses
import difflib
import math
import re
import typing
from collections.abc import Iterator, Sequence
from typing import Any

from llmfoundry_lite.config.layers import Layer, get, source_of
from llmfoundry_lite.config.schema import TIME_UNITS, Duration, LoaderConfig, ModelConfig, TrainConfig, parse_seconds
from llmfoundry_lite.errors import ConfigError

LONGEST_GRACE_SECONDS = 25
"""`composer` (its launcher's CLEANUP_TIMEOUT) and torchrun give their ranks 30 seconds from the first signal."""

Refuse = typing.Callable[[str, str], typing.NoReturn]
"""(key, what is wrong with it) -> ConfigError, with the file that has the key."""

HASHES = (
    *("md5", "sha1", "sha224", "sha256", "sha384", "sha512", "sha3_224", "sha3_256", "sha3_384", "sha3_512"),
    *("blake2b", "blake2s", "xxh32", "xxh64", "xxh128", "xxh3_64", "xxh3_128"),
)
"""What streaming.base.hashing finds in hashlib and xxhash."""

CHOICES = {
    "model.name": ("mpt_causal_lm",),
    "model.norm_type": ("low_precision_layernorm", "layernorm", "low_precision_rmsnorm", "rmsnorm"),
    "model.loss_fn": ("auto", "fused_crossentropy", "torch_crossentropy"),
    "model.init_device": ("meta", "cpu", "mixed"),
    "model.attn_config.attn_type": ("multihead_attention", "grouped_query_attention", "multiquery_attention"),
    "model.attn_config.attn_impl": ("auto", "sdpa", "flex", "flash", "reference", "torch"),
    "model.attn_config.rope_impl": ("dail", "hf"),
    "model.attn_config.rope_hf_config.type": ("no_scaling", "linear", "dynamic", "ntk"),
    "model.ffn_config.ffn_type": ("mptmlp", "mptglu"),
    "model.ffn_config.ffn_act_fn.name": ("gelu", "quick_gelu", "relu", "silu"),
    "model.ffn_config.ffn_act_fn.approximate": ("none", "tanh"),
    "model.init_config.name": (
        *("kaiming_normal_", "kaiming_uniform_", "xavier_normal_", "xavier_uniform_"),
        *("small_init_", "neox_init_", "baseline_", "default_"),
    ),
    "model.init_config.fan_mode": ("fan_in", "fan_out"),
    "model.init_config.init_nonlinearity": ("relu", "leaky_relu", "linear", "tanh", "sigmoid", "selu"),
    "train_loader.name": ("text", "python:"),
    "eval_loader.name": ("text", "python:"),
    "train_loader.dataset.validate_hash": HASHES,
    "eval_loader.dataset.validate_hash": HASHES,
    "optimizer.name": ("decoupled_adamw", "adamw", "lion", "decoupled_lionw", "python:"),
    "scheduler.name": (
        *("constant_with_warmup", "cosine_with_warmup"),
        *("linear_decay_with_warmup", "inv_sqrt_with_warmup"),
    ),
    "algorithms.gradient_clipping.clipping_type": ("norm", "value"),
    "fsdp_config.sharding_strategy": ("FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "NO_SHARD"),
    "fsdp_config.mixed_precision": ("PURE", "DEFAULT", "FULL"),
    "precision": ("fp32", "amp_bf16", "amp_fp16"),
    "on_non_finite": ("stop", "skip"),
    "python_log_level": ("debug", "info", "warning", "error", "critical"),
}

POSITIVE = (
    *("model.d_model", "model.n_heads", "model.n_layers", "model.expansion_ratio", "model.max_seq_len"),
    *("model.vocab_size", "model.norm_eps", "model.attn_config.clip_qkv", "model.attn_config.softmax_scale"),
    *("model.attn_config.kv_n_heads", "model.attn_config.rope_theta", "model.attn_config.rope_hf_config.factor"),
    *("model.ffn_config.ffn_hidden_size", "model.attn_config.alibi_bias_max", "max_seq_len"),
    "tp_config.tensor_parallel_degree",
    *("global_train_batch_size", "device_eval_batch_size"),
    *("optimizer.lr", "optimizer.eps", "dist_timeout", "max_skipped_batches", "preemption_grace_seconds"),
    *("algorithms.gradient_clipping.clipping_threshold", "callbacks.speed_monitor.window_size"),
    *("model.init_config.init_std", "train_loader.prefetch_factor", "eval_loader.prefetch_factor"),
    *("fsdp_config.data_parallel_shard_degree", "train_loader.dataset.max_seq_len", "eval_loader.dataset.max_seq_len"),
    *("train_loader.dataset.shuffle_block_size", "eval_loader.dataset.shuffle_block_size", "save_keep_every_batches"),
    *("train_loader.dataset.predownload", "eval_loader.dataset.predownload"),
    *("train_loader.dataset.download_timeout", "eval_loader.dataset.download_timeout"),
)

NON_NEGATIVE = (
    *("seed", "optimizer.weight_decay", "model.init_config.emb_init_std", "model.init_config.init_gain"),
    *("scheduler.alpha_i", "scheduler.alpha_f", "scheduler.alpha_f_decay", "scheduler.alpha_f_cooldown"),
    *("train_loader.num_workers", "train_loader.timeout", "train_loader.dataset.shuffle_seed"),
    *("eval_loader.num_workers", "eval_loader.timeout", "eval_loader.dataset.shuffle_seed"),
    *("train_loader.dataset.download_retry", "eval_loader.dataset.download_retry"),
)

NOT_EMPTY = {
    "load_path": "a checkpoint or a folder of them; remove the line to begin from nothing",
    "save_folder": "a folder or a URL; remove the line for <run_folder>/checkpoints",
    "tokenizer.name": "a local folder or a name on the Hub",
    "loggers.tensorboard.log_dir": "a folder; remove the line for <run_folder>/tensorboard",
}
"""Text that stands for something, and what it stands for."""

PROBABILITIES = ("model.attn_config.attn_pdrop", "model.resid_pdrop", "model.emb_pdrop")

DURATIONS = {
    "max_duration": TIME_UNITS,
    "eval_interval": TIME_UNITS,
    "save_interval": TIME_UNITS,
    "stop_after": TIME_UNITS,
    "console_log_interval": ("ba", "ep"),
    "scheduler.t_warmup": (*TIME_UNITS, "dur"),
    "scheduler.t_max": (*TIME_UNITS, "dur"),
    "scheduler.t_scale": (*TIME_UNITS, "dur"),
    "scheduler.t_cooldown": (*TIME_UNITS, "dur"),
}

MAY_BE_ZERO = ("scheduler.t_warmup", "scheduler.t_cooldown")

ALTERNATIVES = {
    "model.name": "LLM Foundry's Hugging Face models cannot be training targets here; use mpt_causal_lm",
    "model.ffn_config.ffn_type": "mixture of experts and TransformerEngine layers are left out; use mptmlp or mptglu",
    "model.norm_type": "use rmsnorm or low_precision_rmsnorm, layernorm or low_precision_layernorm",
    "model.attn_config.rope_hf_config.type": "expected no_scaling, linear, dynamic or ntk",
    "train_loader.name": "fine-tuning loaders are left out; prepare text with `llmfoundry-lite data prepare`",
    "eval_loader.name": "fine-tuning loaders are left out; prepare text with `llmfoundry-lite data prepare`",
    "precision": "expected fp32, amp_bf16 or amp_fp16; fp8 is left out",
}
"""Said when one of these has a value outside its list."""

SYNONYMS = {
    "bf16": "amp_bf16",
    "bfloat16": "amp_bf16",
    "fp16": "amp_fp16",
    "float16": "amp_fp16",
    "amp": "amp_fp16",
    "float32": "fp32",
    "adam": "adamw",
    "decoupled_lion": "decoupled_lionw",
    "mpt": "mpt_causal_lm",
    "triton": "flash",
}
"""Other libraries' words for our values."""


def check_config(config: TrainConfig, layers: Sequence[Layer] = ()) -> None:
    """Check everything that the configuration alone can tell. Raises ConfigError."""

    def refuse(key: str, message: str) -> typing.NoReturn:
        raise ConfigError(f"{source_of(key, layers)}: {key}: {message}")

    for key, value in _numbers(config):
        if not math.isfinite(value):
            refuse(key, f"{value!r} given, expected a finite number")
    for key, expected in NOT_EMPTY.items():
        value = _attribute(config, key)
        if value is not None and not value.strip():
            refuse(key, f"{value!r} given, expected {expected}")
    for key in CHOICES:
        value = _attribute(config, key)
        if value is not None:
            _check_choice(key, value, layers)
    for key in POSITIVE:
        value = _attribute(config, key)
        if value is not None and not value > 0:
            refuse(key, f"{value!r} given, expected a number above 0")
    for key in NON_NEGATIVE:
        value = _attribute(config, key)
        if value is not None and value < 0:
            refuse(key, f"{value!r} given, expected 0 or more")
    for key in PROBABILITIES:
        value = _attribute(config, key)
        if not 0 <= value < 1:
            refuse(key, f"{value!r} given, expected a probability, 0 <= p < 1")
    for key in DURATIONS:
        value = _attribute(config, key)
        if value is not None and not (key == "eval_interval" and value == 0):
            _check_duration(key, value, refuse)

    check_model(config.model, refuse)
    if config.max_seq_len > config.model.max_seq_len:
        refuse("max_seq_len", f"{config.max_seq_len} is more than model.max_seq_len, {config.model.max_seq_len}")
    for block in ("train_loader", "eval_loader"):
        loader = getattr(config, block)
        if loader is not None and loader.name == "text":
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
    microbatch, batch = config.device_train_microbatch_size, config.global_train_batch_size
    if microbatch not in (None, "auto"):
        if not isinstance(microbatch, int) or microbatch <= 0:
            refuse("device_train_microbatch_size", f"{microbatch!r} given, expected a number of samples, or auto")
        if microbatch > batch:
            refuse("device_train_microbatch_size", f"{microbatch} is more than global_train_batch_size, {batch}")
    if config.max_wall_time is not None:
        try:
            parse_seconds(config.max_wall_time)
        except ValueError as error:
            refuse("max_wall_time", f"{config.max_wall_time!r} given, expected {error}")
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
    if config.tensor_parallel_degree > 1:
        _check_tensor_parallel(config, refuse)
    for path in config.callbacks.extra:
        _check_import_path("callbacks", path, layers)
    _check_schedule_units(config, layers, refuse)
    warmup, end = Duration.parse(config.scheduler.t_warmup), Duration.parse(config.scheduler.t_max)
    if warmup.unit == end.unit and warmup.value > end.value:
        refuse("scheduler.t_warmup", f"{warmup} is more than t_max, {end}; the warm-up is part of the schedule")


def check_world_size(config: TrainConfig, world_size: int) -> None:
    """Check what depends on the number of devices. Raises ConfigError."""
    batch, microbatch = config.global_train_batch_size, config.device_train_microbatch_size
    degree, num_ranks, devices = config.tensor_parallel_degree, config.num_data_ranks(world_size), "devices"
    if degree > 1:
        devices = f"groups of {degree} devices (tp_config)"
        if world_size % degree:
            raise ConfigError(
                f"tp_config.tensor_parallel_degree: {degree} does not divide the {world_size} devices of this launch; "
                f"start a multiple of {degree}, or change the degree"
            )
    if batch % num_ranks:
        divisors = [str(n) for n in range(1, min(batch, 4 * num_ranks) + 1) if batch % n == 0]
        raise ConfigError(
            f"global_train_batch_size: {batch} cannot be shared evenly by {num_ranks} {devices}; "
            f"start with a number of {devices} that divides it ({', '.join(divisors)}) or change the batch size"
        )
    if isinstance(microbatch, int) and microbatch > batch // num_ranks:
        raise ConfigError(
            f"device_train_microbatch_size: {microbatch} is more than the {batch // num_ranks} samples "
            f"each device gets ({batch} / {num_ranks} {devices}); set it to {batch // num_ranks} or less"
        )


def check_kinds(values: dict[str, Any], layers: Sequence[Layer]) -> None:
    """A block of a kind we do not have is refused as such, before its keys are found unknown one by one."""
    for key in ALTERNATIVES:
        found, value = get(values, key)
        if found and value is not None:
            _check_choice(key, value, layers)


def _check_duration(key: str, value: str | int, refuse: Refuse) -> None:
    try:
        duration = Duration.parse(value, DURATIONS[key])
    except ValueError as error:
        refuse(key, f"{value!r} given, expected {error}")
    if duration.value == 0 and key not in MAY_BE_ZERO:
        never = ", or 0 to never evaluate" if key == "eval_interval" else ""
        refuse(key, f"{value!r} given, expected more than 0{never}")


def _check_schedule_units(config: TrainConfig, layers: Sequence[Layer], refuse: Refuse) -> None:
    """The schedule counts in the unit of max_duration alone, so that the learning rate depends on nothing else."""
    schedule, run = config.scheduler, Duration.parse(config.max_duration)
    epochs = f"; max_duration: {run.value} counts epochs" if isinstance(config.max_duration, int) else ""
    is_inverse_root = schedule.name == "inv_sqrt_with_warmup"
    for name in ("t_warmup", "t_max", "t_scale", "t_cooldown") if is_inverse_root else ("t_warmup", "t_max"):
        key, span = f"scheduler.{name}", Duration.parse(getattr(schedule, name))
        if span.value == 0 or span.unit in ("dur", run.unit):
            continue
        if name == "t_scale" and span == Duration(1, "ba") and not any(get(layer.values, key)[0] for layer in layers):
            refuse(key, f"missing; expected a span in {run.unit}, the unit of max_duration, or in dur{epochs}")
        equivalent = _convert_span(span, run.unit, config)
        hint = f"that is {equivalent}" if equivalent else "a share of the run is written 0.1dur"
        refuse(key, f"{span} given, expected a span in {run.unit}, the unit of max_duration, or in dur; {hint}{epochs}")


def _convert_span(span: Duration, unit: str, config: TrainConfig) -> Duration | None:
    """Exactly, or not at all: how many samples an epoch has, the configuration does not tell."""
    seq_len = config.train_loader.dataset.max_seq_len or config.max_seq_len
    num_tokens = {"tok": 1, "sp": seq_len, "ba": seq_len * config.global_train_batch_size}
    if span.unit not in num_tokens or unit not in num_tokens:
        return None
    value, rest = divmod(int(span.value) * num_tokens[span.unit], num_tokens[unit])
    return None if rest else Duration(value, unit)


def find_surprises(config: TrainConfig, layers: Sequence[Layer], *, under_srun: bool = False) -> list[str]:
    """What is allowed, and perhaps not meant."""
    notes = []
    for key in ("max_duration", "eval_interval"):
        value = _attribute(config, key)
        given = any(get(layer.values, key)[0] for layer in layers)
        if given and isinstance(value, int) and value > 0:
            notes.append(f"{source_of(key, layers)}: {key}: {value} counts epochs; {value} batches are {value}ba")
    run = Duration.parse(config.max_duration)
    for key, meaning in (("t_warmup", "the learning rate never reaches lr"), ("t_max", "the schedule does not end")):
        span = Duration.parse(getattr(config.scheduler, key))
        if span.value > (1 if span.unit == "dur" else run.value if span.unit == run.unit else math.inf):
            key = f"scheduler.{key}"
            notes.append(f"{source_of(key, layers)}: {key}: {span} is longer than the run, {run}: {meaning}")
    grace = config.preemption_grace_seconds
    if grace > LONGEST_GRACE_SECONDS and not under_srun:
        key = "preemption_grace_seconds"
        notes.append(
            f"{source_of(key, layers)}: {key}: {grace:g} is for srun alone; `composer` and `torchrun` kill after 30 s "
            f"({LONGEST_GRACE_SECONDS} or less leaves them time)"
        )
    return notes


def _check_choice(key: str, value: Any, layers: Sequence[Layer]) -> None:
    choices = CHOICES[key]
    if value in choices:
        return
    if "python:" in choices and str(value).startswith("python:"):
        _check_import_path(key, value, layers)
        return
    hint = ALTERNATIVES.get(key) or f"expected {_or(choices)}"
    nearest = _nearest_choice(str(value), choices, cutoff=0.85 if key in ALTERNATIVES else 0.75)
    if nearest:
        hint = f"did you mean {nearest}?" + ("" if key in ALTERNATIVES else f" ({hint})")
    hint = hint.replace("python:", "python:package.module:Thing")
    raise ConfigError(f"{source_of(key, layers)}: {key}: {value!r} is not known; {hint}")


def _nearest_choice(value: str, choices: Sequence[str], cutoff: float) -> str | None:
    if SYNONYMS.get(value.lower()) in choices:
        return SYNONYMS[value.lower()]
    begun = [choice for choice in choices if value and choice.lower().startswith(value.lower())]
    near = begun if len(begun) == 1 else difflib.get_close_matches(value, choices, n=1, cutoff=cutoff)
    return near[0] if near else None


def _or(options: Sequence[str]) -> str:
    *others, last = options
    return f"{', '.join(others)} or {last}" if others else last


def _check_import_path(key: str, value: str, layers: Sequence[Layer]) -> None:
    if not re.fullmatch(r"python:\w+(\.\w+)*:\w+", value):
        raise ConfigError(
            f"{source_of(key, layers)}: {key}: {value!r} given, expected an import path, python:package.module:Thing"
        )


def check_model(model: ModelConfig, refuse: Refuse) -> None:
    """What cannot be built or makes no sense together. `refuse` raises."""
    if model.d_model % model.n_heads:
        near = [n for n in range(1, model.d_model + 1) if model.d_model % n == 0]
        nearest = min(near, key=lambda n: abs(n - model.n_heads))
        refuse(
            "model.n_heads",
            f"{model.n_heads} does not divide d_model, {model.d_model}; the nearest that does is {nearest}",
        )
    _check_attention(model, refuse)
    if not 0 < model.embedding_fraction <= 1:
        refuse("model.embedding_fraction", f"{model.embedding_fraction} given, expected a share, 0 < share <= 1")
    ffn_dim = model.d_model * model.expansion_ratio
    if model.ffn_config.ffn_hidden_size is None and ffn_dim != int(ffn_dim):
        refuse(
            "model.expansion_ratio",
            f"{model.expansion_ratio} x d_model, {model.d_model}, is no whole number; "
            f"the nearest that gives one is {round(ffn_dim) / model.d_model}",
        )
    if isinstance(model.logit_scale, str) and model.logit_scale != "inv_sqrt_d_model":
        refuse("model.logit_scale", f"{model.logit_scale!r} given, expected a number or inv_sqrt_d_model")
    if model.logit_scale == 0:
        refuse(
            "model.logit_scale", "0 given, which makes every token as likely as any other; remove it or give a number"
        )
    init = model.init_config
    if init.name == "baseline_" and init.init_std is None:
        refuse("model.init_config.init_std", "missing; baseline_ draws weights from N(0, init_std)")
    divide = init.init_div_is_residual
    is_text = isinstance(divide, str) and not divide.replace(".", "", 1).isdigit()
    if is_text or (not isinstance(divide, bool) and not float(divide) > 0):
        refuse("model.init_config.init_div_is_residual", f"{divide!r} given, expected true, false or a number above 0")
    for key in ("emb_init_std", "emb_init_uniform_lim"):
        if init.name == "default_" and getattr(init, key) is not None:
            refuse(
                f"model.init_config.{key}", "default_ draws embeddings from N(0, 1); remove it or use another scheme"
            )
    limit = init.emb_init_uniform_lim
    is_pair = isinstance(limit, list) and len(limit) == 2 and all(map(_is_number, limit)) and limit[0] <= limit[1]
    if not (limit is None or _is_number(limit) or is_pair):
        refuse(
            "model.init_config.emb_init_uniform_lim",
            f"{limit!r} given, expected a number, or the lower and the upper limit in a list",
        )


def _check_attention(model: ModelConfig, refuse: Refuse) -> None:
    options = model.attn_config
    is_grouped = options.attn_type == "grouped_query_attention"
    if is_grouped and options.kv_n_heads is None:
        refuse("model.attn_config.kv_n_heads", "missing; grouped_query_attention needs the number of heads of k and v")
    if options.kv_n_heads not in (None, model.num_kv_heads):
        refuse(
            "model.attn_config.kv_n_heads",
            f"{options.kv_n_heads} given, but {options.attn_type} has {model.num_kv_heads}; remove it, or use "
            "attn_type: grouped_query_attention",
        )
    if model.n_heads % model.num_kv_heads:
        divisors = [str(n) for n in range(1, model.n_heads + 1) if model.n_heads % n == 0]
        refuse(
            "model.attn_config.kv_n_heads",
            f"{model.num_kv_heads} does not divide n_heads, {model.n_heads}; use one of {_or(divisors)}",
        )
    if options.qk_ln and options.qk_gn:
        refuse("model.attn_config.qk_gn", "both qk_ln and qk_gn given; use one of them")
    if options.alibi and options.rope:
        refuse("model.attn_config.rope", "both alibi and rope given; use one of them")
    if options.rope and model.head_dim % 2:
        refuse("model.attn_config.rope", f"turns pairs of dimensions, and d_model / n_heads is {model.head_dim}, odd")
    scaling = options.rope_hf_config
    if scaling.factor != 1.0 and scaling.type == "no_scaling":
        refuse("model.attn_config.rope_hf_config.factor", "given without a type; add type: linear, dynamic or ntk")
    if scaling.factor < 1:
        refuse("model.attn_config.rope_hf_config.factor", f"{scaling.factor} given, expected 1 or more")
    if options.sliding_window_size < -1 or options.sliding_window_size == 0:
        refuse(
            "model.attn_config.sliding_window_size",
            f"{options.sliding_window_size} given, expected a number of tokens above 0, or -1 to see all",
        )
    if options.attn_impl == "flex" and options.attn_pdrop:
        refuse("model.attn_config.attn_impl", "flex has no attn_pdrop; use sdpa, or attn_pdrop: 0")


def _check_tensor_parallel(config: TrainConfig, refuse: Refuse) -> None:
    """Layers are divided by heads, and by the feed-forward layer's width; each device gets as many as the others."""
    model, degree = config.model, config.tensor_parallel_degree
    sizes = {"model.n_heads": model.n_heads, "the heads of keys and values": model.num_kv_heads}
    for name, size in (*sizes.items(), ("the width of the feed-forward layer", model.ffn_dim)):
        if size % degree:
            most = math.gcd(model.n_heads, model.num_kv_heads, model.ffn_dim)
            divisors = [str(n) for n in range(1, most + 1) if most % n == 0]
            refuse("tp_config.tensor_parallel_degree", f"{degree} does not divide {name}, {size}; use {_or(divisors)}")
    if model.attn_config.fused_qkv:
        refuse(
            "model.attn_config.fused_qkv",
            "one matrix for q, k and v cannot be divided by heads, as tp_config asks for; set it to false",
        )
    if model.attn_config.qk_ln:
        refuse(
            "model.attn_config.qk_ln",
            "a norm over all heads, which tp_config divides among devices; use qk_gn: true, a norm over each head",
        )
    if config.compile_config is not None:
        cannot = "cannot be compiled where tp_config divides layers"
        if config.sharding.activation_checkpointing == "selective":
            key = "fsdp_config.activation_checkpointing"
            refuse(key, f"selective {cannot}; use true or false, or no compile_config")
        if model.attn_config.attn_pdrop:
            refuse("model.attn_config.attn_pdrop", f"{cannot}; set it to 0, or use no compile_config")
    for block in ("train_loader", "eval_loader"):
        loader = getattr(config, block)
        if loader is not None and loader.name.startswith("python:"):
            refuse(
                f"{block}.name",
                f"{loader.name} cannot know that with tp_config neighbouring devices must read the same samples; "
                "use text, or no tp_config",
            )


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
    for key, units, example in (("epoch_size", "kmb", "100k"), ("cache_limit", "kmgt", "100gb")):
        value = getattr(dataset, key)
        is_text = isinstance(value, str) and re.fullmatch(rf"[0-9][0-9_.]*[{units}]?b?", value.lower())
        if not (value is None or is_text or (isinstance(value, int) and value > 0)):
            refuse(f"{block}.dataset.{key}", f"{value!r} given, expected a number above 0, such as {example}")


def describe_duration(key: str) -> str:
    return f"a number with a unit, {_or(DURATIONS[key])}, such as 100ba"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _numbers(value: Any, key: str = "") -> Iterator[tuple[str, float]]:
    """(key, number) of every number of a block; what is passed on to others' code is theirs to judge."""
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _numbers(getattr(value, field.name), f"{key}.{field.name}" if key else field.name)
    elif isinstance(value, dict):
        for name, item in value.items():
            if dataclasses.is_dataclass(item):
                yield from _numbers(item, f"{key}.{name}")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _numbers(item, f"{key}[{index}]")
    elif _is_number(value):
        yield key, value


def _attribute(config: Any, key: str) -> Any:
    for part in key.split("."):
        config = getattr(config, part, None)
    return config
