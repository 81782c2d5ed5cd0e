"""LLM Foundry's keys that have no counterpart: ignored with a note, or refused with what to use instead."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from llmfoundry_lite.config.build import refuse_keys
from llmfoundry_lite.config.fields import keys_of
from llmfoundry_lite.config.layers import Layer, get, pop, source_of
from llmfoundry_lite.errors import ConfigError

_REASONS = {
    "the resolved configuration is always written to config.yaml": "log_config",
    "a checkpoint is never overwritten": "save_overwrite",
    "no batch is ever replayed to find one's place": "spin_dataloaders",
    "checkpoints have fixed names": "save_filename save_latest_filename fsdp_config.sharded_ckpt_prefix_dir",
    "a checkpoint is always whole": "save_ignore_keys",
    "weights are always checked strictly; load_ignore_keys names exceptions": "load_strict_model_weights",
    "icl_limit counts items": "icl_subset_num_batches",
    "contexts may be as long as the model's": "icl_seq_len",
    "metadata is logged as it is": "flatten_metadata",
    "the launcher knows": "n_gpus",
    "training keeps no cache": "model.use_cache",
    "samples have no padding": "model.use_pad_tok_in_ffn",
    "`--dry-run=full` shows the model": "model.verbose model.init_config.verbose",
    "FSDP2 always does": "fsdp_config.limit_all_gathers fsdp_config.use_orig_params",
    "every rank makes the same weights": "fsdp_config.sync_module_states",
    "state is always saved sharded and loads anywhere": "fsdp_config.state_dict_type",
    "FSDP2 always prefetches": "fsdp_config.backward_prefetch fsdp_config.backward_prefetch_limit "
    "fsdp_config.forward_prefetch fsdp_config.forward_prefetch_limit",
    "`--dry-run=full` shows the sharding": "fsdp_config.verbose",
    "FSDP2 keeps parameters apart": "fsdp_config.flatten_parameters",
    "weights are read by the ranks that need them": "fsdp_config.load_monolith_rank0_only",
    "each block is sharded by itself": "fsdp_config.auto_wrap",
    "no schedule is scaled": "scheduler.scale_warmup",
    "the training loss is always logged": "model.use_train_metrics",
    "peak memory is always logged": "callbacks.memory_monitor.memory_keys "
    "callbacks.memory_monitor.dist_aggregate_batch_interval",
    "the table of accelerators has it": "callbacks.speed_monitor.gpu_flops_available",
    "times are logged in seconds": "callbacks.speed_monitor.time_unit callbacks.runtime_estimator.time_unit",
    "the time that remains is always logged": "callbacks.runtime_estimator.skip_batches",
    "rank 0 logs for all": "loggers.wandb.rank_zero_only loggers.tensorboard.rank_zero_only",
    "each batch is written at once": "loggers.tensorboard.flush_interval",
    "attention and feed-forward layers are both divided": "tp_config.strategy",
    "sample order does not depend on nodes": "*.dataset.num_canonical_nodes",
    "there is one order, for every world size": "*.dataset.shuffle_algo *.dataset.partition_algo",
    "streams are mixed in proportion in every batch": "*.dataset.batching_method",
}
WITHOUT_EFFECT = {key: reason for reason, keys in _REASONS.items() for key in keys.split()}
"""Key -> why it is ignored, which a note says. `*` stands for the loaders."""

EVAL_WITHOUT_EFFECT = {
    "seed": "nothing is random but the choice of examples, which is a task's: fewshot_random_seed",
    "device_eval_batch_size": "device_batch_tokens bounds a batch; no result depends on it",
    "fsdp_config": "each rank has the whole model; fsdp=true shards it, if it is an MPT, GPT-2 or Llama",
    "eval_subset_num_batches": "it counts batches of eval_loader",
    **dict.fromkeys(("python_log_level", "console_log_interval"), "there is nothing to log but progress"),
    "destination_dir": "data are read where they are; scripts/fetch_tasks.py downloads them",
    **dict.fromkeys(("log_config", "metadata"), "results say what was evaluated"),
}
"""The same in an evaluation's YAML."""


class LeftOut(NamedTuple):
    instead: str
    harmless: Sequence[Any] = ()
    """Values that ask for what we do anyway."""


_ROWS: tuple[tuple[str, str, *tuple[Any, ...]], ...] = (
    ("save_weights_only", "use `llmfoundry-lite checkpoint export`", False),
    (
        "icl_tasks_str eval_gauntlet eval_gauntlet_str",
        "write the tasks under icl_tasks, or evaluate checkpoints with scripts/eval.py",
    ),
    ("code_paths", "put the folder on PYTHONPATH and name the object: python:package.module:Thing"),
    ("profiler", "write callbacks: {profiler: {wait: 1, warmup: 1, active: 2}}"),
    ("device_train_grad_accum", "use device_train_microbatch_size"),
    ("device_train_batch_size", "use global_train_batch_size"),
    ("expandable_segments max_split_size_mb", "set PYTORCH_CUDA_ALLOC_CONF in the environment"),
    ("cuda_load_lazy", "set CUDA_MODULE_LOADING in the environment", False),
    ("train_subset_num_batches", "use max_duration", -1),
    ("only_hf_checkpoint only_composer_checkpoint", "use export_at_end", False),
    (
        "model.ffn_config.moe_num_experts model.ffn_config.moe_top_k model.ffn_config.moe_loss_weight "
        "model.ffn_config.moe_world_size model.ffn_config.moe_jitter_eps model.ffn_config.uniform_expert_assignment "
        "model.ffn_config.moe_normalize_expert_weights model.ffn_config.moe_weight_parallelism",
        "there is no mixture of experts; use ffn_type: mptmlp or mptglu",
    ),
    ("model.block_overrides", "every block has the same shape here"),
    (
        "model.fc_type model.attn_config.fc_type model.ffn_config.fc_type",
        "layers are torch's; remove it",
        *("torch", {"name": "torch"}),
    ),
    ("model.activation_checkpointing_target", "use fsdp_config.activation_checkpointing: true or selective"),
    ("model.peft_config", "every weight is trained; remove it"),
    ("optimizer.disable_grad", "every weight is trained; remove it", []),
    (
        "model.attn_config.rope_dail_config",
        "positions are always turned in fp32, and there is no xpos; remove it",
        {"type": "original"},
        {"type": "original", "pos_idx_in_fp32": True},
        {"type": "original", "pos_idx_in_fp32": True, "xpos_scale_base": 512},
    ),
    ("model.attn_config.nope", "use learned_pos_emb: false", False),
    ("model.attn_config.kv_dim", "k and v are as wide as d_model; remove it"),
    ("model.attn_config.attn_logit_softcapping", "use qk_ln or clip_qkv"),
    (
        "model.attn_config.attn_temperature_tuning",
        "use softmax_scale",
        *({"floor_scale": 8192, "attn_scale": 0.0}, {"attn_scale": 0.0}),
    ),
    ("model.head_dim", "use attn_config.head_dim"),
    ("model.attention_bias", "use no_bias, or attn_config.qkv_bias"),
    ("model.final_logit_softcapping", "use logit_scale"),
    ("model.additional_train_metrics", "the training loss is always logged; remove it", []),
    ("fsdp_config.cpu_offload", "use fsdp_config.offload_optimizer", False),
    (
        "fsdp_config.data_parallel_replicate_degree fsdp_config.process_group",
        "use fsdp_config.data_parallel_shard_degree with HYBRID_SHARD",
    ),
    ("fsdp_config.keep_low_precision_grads", "use fsdp_config.mixed_precision", False),
    (
        "fsdp_config.te_checkpoint_wrapper fsdp_config.te_shard_fp8_weight",
        "there are no TransformerEngine layers; remove it",
        False,
    ),
    ("fsdp_config.reshard_after_forward", "use fsdp_config.sharding_strategy: FULL_SHARD or SHARD_GRAD_OP"),
    ("fsdp_config.ignored_modules", "every weight is sharded; remove it"),
    ("fsdp_config.load_planner fsdp_config.save_planner", "checkpoints have one format; remove it"),
    ("algorithms.alibi", "use model.attn_config.alibi: true"),
    ("algorithms.gated_linear_units", "use model.ffn_config.ffn_type: mptglu"),
    ("algorithms.low_precision_layernorm", "use model.norm_type: low_precision_layernorm"),
    ("callbacks.hf_checkpointer", "use export_at_end"),
    ("callbacks.nan_monitor", "use on_non_finite"),
    ("callbacks.system_metrics_monitor", "memory and throughput are always logged; remove it"),
    ("callbacks.optimizer_monitor", "the gradient norm is always logged; remove it"),
    ("callbacks.memory_snapshot callbacks.oom_observer", "use callbacks: {profiler: {profile_memory: true}}"),
    ("callbacks.generate_callback", "use `llmfoundry-lite generate` on checkpoints"),
    ("callbacks.eval_output_logging", "evaluate checkpoints with scripts/eval.py; .items.jsonl has every item"),
    ("callbacks.async_eval", "evaluate checkpoints with scripts/eval.py, all_checkpoints=true"),
    ("callbacks.loss_perp_v_len", "evaluate checkpoints with scripts/eval.py and icl_task_type: perplexity"),
    (
        "callbacks.early_stopper callbacks.kill_loss_spike callbacks.layer_freezing",
        "write a callback of your own: python:package.module:Class",
    ),
    ("callbacks.fdiff_metrics", "metrics.jsonl has every batch; remove it"),
    ("callbacks.global_lr_scaling", "use optimizer.lr, which may change in the middle of a run"),
    ("callbacks.mono_checkpoint_saver", "use `llmfoundry-lite checkpoint consolidate`"),
    ("callbacks.load_checkpoint", "use load_path"),
    ("callbacks.run_timeout", "use dist_timeout"),
    ("callbacks.scheduled_gc", "no garbage collection stops ranks one by one; remove it"),
    ("callbacks.env_logging", "config.yaml and the checkpoint's segments have it; remove it"),
    ("callbacks.mbmoe_tok_per_expert", "there is no mixture of experts; remove it"),
    ("callbacks.curriculum_learning callbacks.dataset_swap", "use train_loader.dataset.stages"),
    (
        "loggers.inmemory loggers.in_memory_logger loggers.mlflow loggers.mosaicml",
        "use wandb or tensorboard; metrics.jsonl is always written",
    ),
    ("loggers.wandb.log_artifacts", "checkpoints go to save_folder", False),
    ("optimizer.param_groups", "all weights have one rate and one decay; remove it", []),
    ("optimizer.amsgrad", "the optimizers are without it; remove it", False),
    ("scheduler.alpha", "use optimizer.lr", 1),
    ("train_loader.dataset.packing_ratio", "fine-tuning is absent here; pack text with `llmfoundry-lite data prepare`"),
    ("*.dataset.mlm_probability", "the next token is predicted; remove it"),
    ("*.dataset.sampling_method", "streams are sampled evenly in every epoch; remove it", "balanced"),
    ("*.dataset.sampling_granularity", "streams are sampled evenly in every epoch; remove it", 1),
    ("*.dataset.allow_unsafe_types", "pickles are never read; remove it", False),
    ("*.dataset.replication", "use tp_config or cp_config", 1),
    ("*.dataset.seq_parallel_replication", "use cp_config", 1),
    ("*.dataset.stream_name", "streams are folders or URLs; remove it", "stream"),
    ("*.dataset.stream_config", "streams are folders or URLs; remove it", {}),
)
LEFT_OUT = {key: LeftOut(instead, harmless) for keys, instead, *harmless in _ROWS for key in keys.split()}
"""Key -> what to use instead, with which it is refused by name."""

EVAL_LEFT_OUT = {
    "icl_subset_num_batches": LeftOut("use limit, which counts items"),
    "eval_loader": LeftOut("write a task with icl_task_type: perplexity"),
    "eval_loaders": LeftOut("write tasks with icl_task_type: perplexity"),
    "code_paths": LeftOut("put the folder on PYTHONPATH"),
    "run_name": LeftOut("use suite"),
    **dict.fromkeys(("callbacks", "loggers"), LeftOut("results are files in results_folder")),
}
"""The same in an evaluation's YAML."""


def refuse_fine_tuning(values: dict[str, Any]) -> None:
    """Raise ConfigError before anything else of such a file is found to be wrong: no other change would make it run."""
    for key in _keys_of("*.name", values):
        if get(values, key)[1] in ("finetuning", "fine_tuning"):
            raise ConfigError(
                f"{key}: {get(values, key)[1]}: fine-tuning is absent here: no loader of "
                "prompts and responses, no loss on responses alone, no adapter. Export a checkpoint "
                "(`llmfoundry-lite checkpoint export`) and fine-tune that with LLM Foundry or TRL; "
                "`llmfoundry-lite init DATA --like hf:NAME` trains a Hugging Face model on plain text"
            )


def drop_variables(values: dict[str, Any], layers: Sequence[Layer], cls: type) -> None:
    """Take out keys that the schema lacks and that `${key}` elsewhere names, in place.

    LLM Foundry's YAMLs of before 2024 have their variables at the top: data_local, global_seed. Its options must have
    been refused or translated before: one that a `${key}` names is an option still.
    """
    used = set(re.findall(r"\$\{(\w+)\}", str([layer.values for layer in layers])))
    for name in used - set(keys_of(cls)):
        values.pop(name, None)


def drop_keys(values: dict[str, Any], layers: Sequence[Layer], without_effect: Mapping[str, str]) -> list[str]:
    """Take out keys that are ignored, in place. Returns a note for each."""
    notes = []
    for pattern, reason in without_effect.items():
        for key in _keys_of(pattern, values):
            if get(values, key)[0]:
                pop(values, key)
                notes.append(f"{source_of(key, layers)}: {key} has no effect: {reason}")
    return notes


def _keys_of(pattern: str, values: dict[str, Any]) -> list[str]:
    if not pattern.startswith("*"):
        return [pattern]
    several = values.get("eval_loaders")
    labels = several if isinstance(several, dict) else ()
    blocks = ("train_loader", "eval_loader", *(f"eval_loaders.{label}" for label in labels))
    return [pattern.replace("*", block) for block in blocks]


def drop_values_without_effect(values: dict[str, Any], layers: Sequence[Layer]) -> list[str]:
    """Take out a shard degree of -1, which asks for the default; attn_impl triton, which LLM Foundry no longer has; and
    rope_hf_config where rope_impl, dail by default, ignores it there. Returns notes for the latter two."""
    if get(values, "fsdp_config.data_parallel_shard_degree")[1] == -1:
        pop(values, "fsdp_config.data_parallel_shard_degree")
    attention, key = get(values, "model.attn_config")[1], "model.attn_config.attn_impl"
    notes = []
    if isinstance(attention, dict) and attention.get("attn_impl") == "triton":
        pop(values, key)
        notes.append(f"{source_of(key, layers)}: {key} triton has no effect: LLM Foundry has removed it; auto chooses")
    scaling = attention.get("rope_hf_config") if isinstance(attention, dict) else None
    kind = scaling.get("type", "no_scaling") if isinstance(scaling, dict) else "no_scaling"
    if kind == "no_scaling" or not attention.get("rope") or attention.get("rope_impl", "dail") != "dail":
        return notes
    key = "model.attn_config.rope_hf_config"
    pop(values, key)
    return [*notes, f"{source_of(key, layers)}: {key} has no effect: rope_impl is dail; rope_impl: hf scales positions"]


def refuse_left_out_keys(
    values: dict[str, Any], layers: Sequence[Layer], left_out: Mapping[str, LeftOut] = LEFT_OUT
) -> None:
    """Raise ConfigError that names every key that is left out here; take out those with a harmless value."""
    refused = []
    for pattern, (instead, harmless) in left_out.items():
        for key in _keys_of(pattern, values):
            found, value = get(values, key)
            block = re.sub(r"^((?:eval_loaders\.)?[^.]+).*", r"\1", key)
            if not found or str(get(values, f"{block}.name")[1]).startswith("python:"):
                continue
            if value is None or value in harmless:
                pop(values, key)
            else:
                refused.append((key, instead))
    several = "options of LLM Foundry are left out here"
    refuse_keys(refused, layers, "LLM Foundry's option is left out here; ", several)
    if values.get("device_eval_batch_size") == "auto":
        key = "device_eval_batch_size"
        raise ConfigError(f"{source_of(key, layers)}: {key}: auto is for training; give a number of samples")
