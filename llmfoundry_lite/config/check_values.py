"""What each key may hold by itself: choices, ranges, spans. Leaves what goes together to `check.py`."""

import dataclasses
import difflib
import math
import re
import typing
from collections.abc import Iterator, Sequence
from typing import Any

from llmfoundry_lite.config.layers import Layer, source_of
from llmfoundry_lite.config.schema import TIME_UNITS, Duration, SaveInterval, TrainConfig
from llmfoundry_lite.errors import ConfigError

Refuse = typing.Callable[[str, str], typing.NoReturn]
"""(key, what is wrong with it) -> ConfigError, with the file that has the key."""

HASHES = (
    *("md5", "sha1", "sha224", "sha256", "sha384", "sha512", "sha3_224", "sha3_256", "sha3_384", "sha3_512"),
    *("blake2b", "blake2s", "xxh32", "xxh64", "xxh128", "xxh3_64", "xxh3_128"),
)
"""What streaming.base.hashing finds in hashlib and xxhash."""

TOKEN_TYPES = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")

LLAMA3_KEYS = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")

CHOICES = {
    "model.name": ("mpt_causal_lm",),
    "model.norm_type": ("low_precision_layernorm", "layernorm", "low_precision_rmsnorm", "rmsnorm"),
    "model.loss_fn": ("auto", "fused_crossentropy", "torch_crossentropy"),
    "model.init_device": ("meta", "cpu", "mixed"),
    "model.attn_config.attn_type": ("multihead_attention", "grouped_query_attention", "multiquery_attention"),
    "model.attn_config.attn_impl": ("auto", "sdpa", "blocked", "flex", "flash", "reference", "torch"),
    "model.attn_config.norm_type": ("low_precision_layernorm", "layernorm", "low_precision_rmsnorm", "rmsnorm"),
    "model.attn_config.rope_impl": ("dail", "hf"),
    "model.attn_config.rope_hf_config.type": ("no_scaling", "linear", "dynamic", "ntk", "llama3"),
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
    "train_loader.dataset.token_encoding_type": TOKEN_TYPES,
    "eval_loader.dataset.token_encoding_type": TOKEN_TYPES,
    "optimizer.name": ("decoupled_adamw", "adamw", "lion", "decoupled_lionw", "muon", "python:"),
    "optimizer.ns_dtype": ("bf16", "fp32"),
    "optimizer.adjust_lr_fn": ("match_rms_adamw", "original"),
    "scheduler.name": (
        *("constant_with_warmup", "cosine_with_warmup"),
        *("linear_decay_with_warmup", "inv_sqrt_with_warmup", "warmup_stable_decay"),
    ),
    "scheduler.decay": ("linear", "cosine", "1-sqrt"),
    "algorithms.gradient_clipping.clipping_type": ("norm", "value"),
    "fsdp_config.sharding_strategy": ("FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "NO_SHARD", "ZERO_1"),
    "fsdp_config.mixed_precision": ("PURE", "DEFAULT", "FULL"),
    "cp_config.kind": ("heads", "gather"),
    "pp_config.schedule": ("gpipe", "1f1b", "interleaved", "zero_bubble", "zbv"),
    "precision": ("fp32", "tf32", "amp_bf16", "amp_fp16"),
    "on_non_finite": ("stop", "skip"),
    "python_log_level": ("debug", "info", "warning", "error", "critical"),
}

POSITIVE = (
    *("model.d_model", "model.n_heads", "model.n_layers", "model.expansion_ratio", "model.max_seq_len"),
    *("model.vocab_size", "model.norm_eps", "model.attn_config.norm_eps"),
    *("model.attn_config.clip_qkv", "model.attn_config.softmax_scale"),
    *("model.attn_config.kv_n_heads", "model.attn_config.rope_theta", "model.attn_config.rope_hf_config.factor"),
    *(f"model.attn_config.rope_hf_config.{key}" for key in LLAMA3_KEYS),
    *("model.ffn_config.ffn_hidden_size", "model.attn_config.alibi_bias_max", "max_seq_len"),
    *("tp_config.tensor_parallel_degree", "cp_config.context_parallel_degree"),
    *(f"pp_config.{key}" for key in ("pipeline_parallel_degree", "virtual_stages", "num_microbatches")),
    *("global_train_batch_size", "device_eval_batch_size", "loss_chunk_mib"),
    *(
        "optimizer.lr",
        "optimizer.adamw_lr",
        "optimizer.ns_steps",
        "optimizer.eps",
        "dist_timeout",
        "max_skipped_batches",
        "preemption_grace_seconds",
    ),
    *("algorithms.gradient_clipping.clipping_threshold", "callbacks.speed_monitor.window_size"),
    "callbacks.profiler.active",
    *("model.init_config.init_std", "train_loader.prefetch_factor", "eval_loader.prefetch_factor"),
    *("fsdp_config.data_parallel_shard_degree", "train_loader.dataset.max_seq_len", "eval_loader.dataset.max_seq_len"),
    *("train_loader.dataset.shuffle_block_size", "eval_loader.dataset.shuffle_block_size", "save_keep_every_batches"),
    *("train_loader.dataset.predownload", "eval_loader.dataset.predownload"),
    *("train_loader.dataset.download_timeout", "eval_loader.dataset.download_timeout"),
)

NON_NEGATIVE = (
    *(f"callbacks.profiler.{key}" for key in ("skip_first", "wait", "warmup", "repeat")),
    *("seed", "optimizer.weight_decay", "model.init_config.emb_init_std", "model.init_config.init_gain"),
    *("scheduler.alpha_i", "scheduler.alpha_f", "scheduler.alpha_f_decay", "scheduler.alpha_f_cooldown"),
    *("train_loader.num_workers", "train_loader.timeout", "train_loader.dataset.shuffle_seed"),
    *("eval_loader.num_workers", "eval_loader.timeout", "eval_loader.dataset.shuffle_seed"),
    *("train_loader.dataset.download_retry", "eval_loader.dataset.download_retry"),
    *(f"{loader}_loader.dataset.{token}_token_id" for loader in ("train", "eval") for token in ("eos", "bos")),
)

NOT_EMPTY = {
    "load_path": "a checkpoint or a folder of them; remove the line to begin from nothing",
    "save_folder": "a folder or a URL; remove the line for <run_folder>/checkpoints",
    "tokenizer.name": "a local folder or a name on the Hub",
    "loggers.tensorboard.log_dir": "a folder; remove the line for <run_folder>/tensorboard",
    "callbacks.profiler.folder": "a folder; remove the line for <run_folder>/traces",
}
"""Text that stands for something, and what it stands for."""

LOCAL = ("run_folder", "callbacks.profiler.folder")
"""No URL: as a path, `s3://b/x` is a folder `s3:` here."""

PROBABILITIES = ("model.attn_config.attn_pdrop", "model.resid_pdrop", "model.emb_pdrop")

DURATIONS = {
    "max_duration": TIME_UNITS,
    "eval_interval": TIME_UNITS,
    "stop_after": TIME_UNITS,
    "console_log_interval": ("ba", "ep"),
    "scheduler.t_warmup": (*TIME_UNITS, "dur"),
    "scheduler.t_max": (*TIME_UNITS, "dur"),
    "scheduler.t_scale": (*TIME_UNITS, "dur"),
    "scheduler.t_cooldown": (*TIME_UNITS, "dur"),
    "scheduler.t_decay": (*TIME_UNITS, "dur"),
}

MAY_BE_ZERO = ("scheduler.t_warmup", "scheduler.t_cooldown")

ALTERNATIVES = {
    "model.name": "LLM Foundry's Hugging Face models cannot be training targets here; use mpt_causal_lm",
    "model.ffn_config.ffn_type": "mixture of experts and TransformerEngine layers are left out; use mptmlp or mptglu",
    "model.norm_type": "use rmsnorm or low_precision_rmsnorm, layernorm or low_precision_layernorm",
    "model.attn_config.rope_hf_config.type": "expected no_scaling, linear, dynamic, ntk or llama3",
    "train_loader.name": "expected text or python:; `llmfoundry-lite data prepare` prepares text",
    "eval_loader.name": "expected text or python:; `llmfoundry-lite data prepare` prepares text",
    "optimizer.name": "expected decoupled_adamw, adamw, lion, decoupled_lionw, muon or python:",
    "algorithms.gradient_clipping.clipping_type": "expected norm or value; adaptive clipping is left out",
    "precision": "expected fp32, tf32, amp_bf16 or amp_fp16; fp8 is left out",
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
    **{f"zero{dash}1": "ZERO_1" for dash in ("", "-")},
    **{f"zero{dash}2": "SHARD_GRAD_OP" for dash in ("", "-", "_")},
    **{f"zero{dash}3": "FULL_SHARD" for dash in ("", "-", "_")},
    "wsd": "warmup_stable_decay",
}
"""Other libraries' words for our values."""


def check_values(config: TrainConfig, layers: Sequence[Layer], refuse: Refuse) -> None:
    """Check every key of the tables above, and that every number is finite. `refuse` raises."""
    check_numbers(config, "", refuse)
    for key, expected in NOT_EMPTY.items():
        for _, value in _values(config, key):
            if not value.strip():
                refuse(key, f"{value!r} given, expected {expected}")
    for key in LOCAL:
        for place, value in _values(config, key):
            if "://" in value:
                refuse(place, f"{value!r} given, expected a folder of this machine; save_folder takes a URL")
    for key, choices in CHOICES.items():
        for place, value in _values(config, key):
            _check_choice(place, value, layers, key, choices)
    for key in DURATIONS:
        for _, value in _values(config, key):
            if not (key == "eval_interval" and value == 0):
                _check_duration(key, value, refuse)
    try:
        SaveInterval.parse(config.save_interval)
    except ValueError as error:
        refuse("save_interval", f"{config.save_interval!r} given, expected {error}")


def check_numbers(block: Any, place: str, refuse: Refuse) -> None:
    """Those of a block that stands at `place` (`model.`; "" for the whole): finite, and within their limits."""
    for key, value in _numbers(block, place.removesuffix(".")):
        if isinstance(value, int) and abs(value) >= 2**63:
            refuse(key, f"{value} given, expected a whole number of 64 bits")
        if not math.isfinite(value):
            refuse(key, f"{value!r} given, expected a finite number")
    for table, is_right, expected in (
        (POSITIVE, lambda value: value > 0, "a number above 0"),
        (NON_NEGATIVE, lambda value: value >= 0, "0 or more"),
        (PROBABILITIES, lambda value: 0 <= value < 1, "a probability, 0 <= p < 1"),
    ):
        for key in table:
            for here, value in _values(block, key.removeprefix(place)) if key.startswith(place) else ():
                if not is_right(value):
                    refuse(place + here, f"{value!r} given, expected {expected}")


def check_kinds(values: dict[str, Any], layers: Sequence[Layer]) -> None:
    """A block of a kind we do not have is refused as such, before its keys are found unknown one by one."""
    for key in ALTERNATIVES:
        for place, value in _values(values, key):
            _check_choice(place, value, layers, key, CHOICES[key])


def _check_duration(key: str, value: str | int, refuse: Refuse) -> None:
    try:
        duration = Duration.parse(value, DURATIONS[key])
    except ValueError as error:
        refuse(key, f"{value!r} given, expected {error}")
    if duration.value == 0 and key not in MAY_BE_ZERO:
        never = ", or 0 to never evaluate" if key == "eval_interval" else ""
        refuse(key, f"{value!r} given, expected more than 0{never}")


def _check_choice(place: str, value: Any, layers: Sequence[Layer], key: str, choices: Sequence[str]) -> None:
    """`key` is that of the tables, and `place` where the value stands."""
    if value in choices:
        return
    if "python:" in choices and str(value).startswith("python:"):
        check_import_path(place, value, layers)
        return
    hint = ALTERNATIVES.get(key) or f"expected {either(choices)}"
    nearest = _nearest_choice(str(value), choices, cutoff=0.85 if key in ALTERNATIVES else 0.75)
    if nearest:
        hint = f"did you mean {nearest}?" + ("" if key in ALTERNATIVES else f" ({hint})")
    hint = hint.replace("python:", "python:package.module:Thing")
    raise ConfigError(f"{source_of(place, layers)}: {place}: {value!r} is not known; {hint}")


def _nearest_choice(value: str, choices: Sequence[str], cutoff: float) -> str | None:
    if SYNONYMS.get(value.lower()) in choices:
        return SYNONYMS[value.lower()]
    begun = [choice for choice in choices if value and choice.lower().startswith(value.lower())]
    near = begun if len(begun) == 1 else difflib.get_close_matches(value, choices, n=1, cutoff=cutoff)
    return near[0] if near else None


def check_import_path(key: str, value: str, layers: Sequence[Layer]) -> None:
    if not re.fullmatch(r"python:\w+(\.\w+)*:\w+", value):
        raise ConfigError(
            f"{source_of(key, layers)}: {key}: {value!r} given, expected an import path, python:package.module:Thing"
        )


def either(options: Sequence[str]) -> str:
    *others, last = options
    return f"{', '.join(others)} or {last}" if others else last


def is_number(value: Any) -> bool:
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
    elif is_number(value):
        yield key, value


def _values(config: Any, key: str) -> Iterator[tuple[str, Any]]:
    """(place, value) of a key, of eval_loader's in each of eval_loaders too, wherever there is one."""
    block, _, rest = key.partition(".")
    places = {key: (config, key)}
    if block == "eval_loader":
        several = _attribute(config, "eval_loaders")
        blocks = several.items() if isinstance(several, dict) else ()
        places |= {f"eval_loaders.{label}.{rest}": (loader, rest) for label, loader in blocks}
    for place, (inside, name) in places.items():
        if (value := _attribute(inside, name)) is not None:
            yield place, value


def _attribute(config: Any, key: str) -> Any:
    for part in key.split("."):
        config = config.get(part) if isinstance(config, dict) else getattr(config, part, None)
    return config
