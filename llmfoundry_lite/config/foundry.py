"""LLM Foundry's words that we know and do without: ignored with a note, or refused with what to use instead."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from llmfoundry_lite.config.build import name_all
from llmfoundry_lite.config.layers import Layer, get, pop, source_of
from llmfoundry_lite.errors import ConfigError

WITHOUT_EFFECT = {
    "log_config": "the resolved configuration is always written to config.yaml",
    "save_overwrite": "a checkpoint is never overwritten",
    "spin_dataloaders": "no batch is ever replayed to find one's place",
    "save_filename": "checkpoints have fixed names",
    "save_latest_filename": "checkpoints have fixed names",
    "save_ignore_keys": "a checkpoint is always whole",
    "load_strict_model_weights": "weights are always checked strictly; load_ignore_keys names exceptions",
    "icl_subset_num_batches": "icl_limit counts items",
    "icl_seq_len": "contexts may be as long as the model's",
    "flatten_metadata": "metadata is logged as it is",
    "n_gpus": "the launcher knows",
    "model.use_cache": "training keeps no cache",
    "model.use_pad_tok_in_ffn": "samples have no padding",
    "model.verbose": "`--dry-run` shows the model",
    "model.init_config.verbose": "`--dry-run` shows the model",
    "fsdp_config.limit_all_gathers": "FSDP2 always does",
    "fsdp_config.use_orig_params": "FSDP2 always does",
    "fsdp_config.sync_module_states": "every rank makes the same weights",
    "fsdp_config.state_dict_type": "state is always saved sharded and loads anywhere",
    "fsdp_config.backward_prefetch": "FSDP2 always prefetches",
    "fsdp_config.forward_prefetch": "FSDP2 always prefetches",
    "fsdp_config.verbose": "`--dry-run` shows the sharding",
    "fsdp_config.flatten_parameters": "FSDP2 keeps parameters apart",
    "fsdp_config.load_monolith_rank0_only": "weights are read by the ranks that need them",
    "fsdp_config.sharded_ckpt_prefix_dir": "checkpoints have fixed names",
    "fsdp_config.auto_wrap": "each block is sharded by itself",
    "fsdp_config.backward_prefetch_limit": "FSDP2 always prefetches",
    "fsdp_config.forward_prefetch_limit": "FSDP2 always prefetches",
    "scheduler.scale_warmup": "no schedule is scaled",
    "model.use_train_metrics": "the training loss is always logged",
    "callbacks.memory_monitor.memory_keys": "peak memory is always logged",
    "callbacks.memory_monitor.dist_aggregate_batch_interval": "peak memory is always logged",
    "callbacks.speed_monitor.gpu_flops_available": "the table of accelerators has it",
    "callbacks.speed_monitor.time_unit": "times are logged in seconds",
    "callbacks.runtime_estimator.skip_batches": "the time that remains is always logged",
    "callbacks.runtime_estimator.time_unit": "times are logged in seconds",
    "loggers.wandb.rank_zero_only": "rank 0 logs for all",
    "loggers.tensorboard.rank_zero_only": "rank 0 logs for all",
    "loggers.tensorboard.flush_interval": "each batch is written at once",
    "tp_config.strategy": "attention and feed-forward layers are both divided",
    "*.dataset.num_canonical_nodes": "sample order does not depend on nodes",
    "*.dataset.shuffle_algo": "there is one order, for every world size",
    "*.dataset.partition_algo": "there is one order, for every world size",
    "*.dataset.batching_method": "streams are mixed in proportion in every batch",
}
"""Accepted, ignored, and said so."""

IN_CONTEXT = "write the tasks under icl_tasks, or evaluate checkpoints with scripts/eval.py"

OWN_CALLBACK = "write a callback of your own: python:package.module:Class"

NOT_LOGGED_TO = "use wandb or tensorboard; metrics.jsonl is always written"

NO_EXPERTS = "there is no mixture of experts; use ffn_type: mptmlp or mptglu"

EXPERTS = (
    *("moe_num_experts", "moe_top_k", "moe_loss_weight", "moe_world_size", "moe_jitter_eps"),
    *("moe_normalize_expert_weights", "moe_weight_parallelism", "uniform_expert_assignment"),
)

LEFT_OUT = {
    "save_weights_only": "use `llmfoundry-lite checkpoint export`",
    "icl_tasks_str": IN_CONTEXT,
    "eval_gauntlet": IN_CONTEXT,
    "eval_gauntlet_str": IN_CONTEXT,
    "code_paths": "put the folder on PYTHONPATH and name the object: python:package.module:Thing",
    "profiler": "write callbacks: {profiler: {wait: 1, warmup: 1, active: 2}}",
    "device_train_grad_accum": "use device_train_microbatch_size",
    "device_train_batch_size": "use global_train_batch_size",
    "expandable_segments": "set PYTORCH_CUDA_ALLOC_CONF in the environment",
    "max_split_size_mb": "set PYTORCH_CUDA_ALLOC_CONF in the environment",
    "cuda_load_lazy": "set CUDA_MODULE_LOADING in the environment",
    "train_subset_num_batches": "use max_duration",
    "only_hf_checkpoint": "use export_at_end",
    "only_composer_checkpoint": "use export_at_end",
    **{f"model.ffn_config.{key}": NO_EXPERTS for key in EXPERTS},
    "model.block_overrides": "every block has the same shape here",
    "model.fc_type": "layers are torch's; remove it",
    "model.attn_config.fc_type": "layers are torch's; remove it",
    "model.ffn_config.fc_type": "layers are torch's; remove it",
    "model.activation_checkpointing_target": "use fsdp_config.activation_checkpointing: true or selective",
    "model.peft_config": "every weight is trained; remove it",
    "model.attn_config.rope_dail_config": "positions are always turned in fp32, and there is no xpos; remove it",
    "model.attn_config.nope": "use learned_pos_emb: false",
    "model.attn_config.kv_dim": "k and v are as wide as d_model; remove it",
    "model.attn_config.attn_logit_softcapping": "use qk_ln or clip_qkv",
    "model.attn_config.attn_temperature_tuning": "use softmax_scale",
    "model.head_dim": "it is d_model / n_heads; remove it",
    "model.attention_bias": "use no_bias",
    "model.final_logit_softcapping": "use logit_scale",
    "fsdp_config.cpu_offload": "use fsdp_config.offload_optimizer",
    "fsdp_config.data_parallel_replicate_degree": "use fsdp_config.data_parallel_shard_degree with HYBRID_SHARD",
    "fsdp_config.keep_low_precision_grads": "use fsdp_config.mixed_precision",
    "fsdp_config.te_checkpoint_wrapper": "there are no TransformerEngine layers; remove it",
    "fsdp_config.te_shard_fp8_weight": "there are no TransformerEngine layers; remove it",
    "algorithms.alibi": "use model.attn_config.alibi: true",
    "algorithms.gated_linear_units": "use model.ffn_config.ffn_type: mptglu",
    "algorithms.low_precision_layernorm": "use model.norm_type: low_precision_layernorm",
    "callbacks.hf_checkpointer": "use export_at_end",
    "callbacks.nan_monitor": "use on_non_finite",
    "callbacks.system_metrics_monitor": "memory and throughput are always logged; remove it",
    "callbacks.optimizer_monitor": "the gradient norm is always logged; remove it",
    "callbacks.memory_snapshot": "use callbacks: {profiler: {profile_memory: true}}",
    "callbacks.oom_observer": "use callbacks: {profiler: {profile_memory: true}}",
    "callbacks.generate_callback": "use `llmfoundry-lite generate` on checkpoints",
    "callbacks.eval_output_logging": "evaluate checkpoints with scripts/eval.py; .items.jsonl has every item",
    "callbacks.async_eval": "evaluate checkpoints with scripts/eval.py, all_checkpoints=true",
    "callbacks.loss_perp_v_len": "evaluate checkpoints with scripts/eval.py and icl_task_type: perplexity",
    "callbacks.early_stopper": OWN_CALLBACK,
    "callbacks.kill_loss_spike": OWN_CALLBACK,
    "callbacks.layer_freezing": OWN_CALLBACK,
    "callbacks.fdiff_metrics": "metrics.jsonl has every batch; remove it",
    "callbacks.global_lr_scaling": "use optimizer.lr, which may change in the middle of a run",
    "callbacks.mono_checkpoint_saver": "use `llmfoundry-lite checkpoint consolidate`",
    "callbacks.load_checkpoint": "use load_path",
    "callbacks.run_timeout": "use dist_timeout",
    "callbacks.scheduled_gc": "no garbage collection stops ranks one by one; remove it",
    "callbacks.env_logging": "config.yaml and the checkpoint's segments have it; remove it",
    "callbacks.mbmoe_tok_per_expert": "there is no mixture of experts; remove it",
    "callbacks.curriculum_learning": "use another run with load_path, load_weights_only and the other data",
    "callbacks.dataset_swap": "use another run with load_path, load_weights_only and the other data",
    "loggers.inmemory": NOT_LOGGED_TO,
    "loggers.in_memory_logger": NOT_LOGGED_TO,
    "loggers.mlflow": NOT_LOGGED_TO,
    "loggers.mosaicml": NOT_LOGGED_TO,
    "loggers.wandb.log_artifacts": "checkpoints go to save_folder",
    "optimizer.param_groups": "all weights have one rate and one decay; remove it",
    "optimizer.disable_grad": "every weight is trained; remove it",
    "optimizer.amsgrad": "the optimizers are without it; remove it",
    "scheduler.alpha": "use optimizer.lr",
    "model.additional_train_metrics": "the training loss is always logged; remove it",
    "fsdp_config.reshard_after_forward": "use fsdp_config.sharding_strategy: FULL_SHARD or SHARD_GRAD_OP",
    "fsdp_config.ignored_modules": "every weight is sharded; remove it",
    "fsdp_config.process_group": "use fsdp_config.data_parallel_shard_degree with HYBRID_SHARD",
    "fsdp_config.load_planner": "checkpoints have one format; remove it",
    "fsdp_config.save_planner": "checkpoints have one format; remove it",
    "train_loader.dataset.packing_ratio": "fine-tuning is absent here; pack text with `llmfoundry-lite data prepare`",
    "*.dataset.mlm_probability": "the next token is predicted; remove it",
    "*.dataset.sampling_method": "streams are sampled evenly in every epoch; remove it",
    "*.dataset.sampling_granularity": "streams are sampled evenly in every epoch; remove it",
    "*.dataset.allow_unsafe_types": "pickles are never read; remove it",
    "*.dataset.replication": "use tp_config or cp_config",
    "*.dataset.seq_parallel_replication": "use cp_config",
    "*.dataset.stream_name": "streams are folders or URLs; remove it",
    "*.dataset.stream_config": "streams are folders or URLs; remove it",
}
"""Refused by name, with what to use instead, unless the value says what we do anyway."""

EVAL_LEFT_OUT = {
    "icl_subset_num_batches": "use limit, which counts items",
    "eval_loader": "write a task with icl_task_type: perplexity",
    "eval_loaders": "write tasks with icl_task_type: perplexity",
    "code_paths": "put the folder on PYTHONPATH",
    "callbacks": "results are files in results_folder",
    "run_name": "use suite",
    "loggers": "results are files in results_folder",
}
"""The same in an evaluation's YAML."""

HARMLESS_VALUES = {
    "model.fc_type": ("torch", {"name": "torch"}),
    "model.attn_config.fc_type": ("torch", {"name": "torch"}),
    "model.ffn_config.fc_type": ("torch", {"name": "torch"}),
    "fsdp_config.cpu_offload": (False,),
    "fsdp_config.keep_low_precision_grads": (False,),
    "fsdp_config.te_checkpoint_wrapper": (False,),
    "fsdp_config.te_shard_fp8_weight": (False,),
    "model.attn_config.nope": (False,),
    "model.attn_config.rope_dail_config": (
        {"type": "original"},
        {"type": "original", "pos_idx_in_fp32": True},
        {"type": "original", "pos_idx_in_fp32": True, "xpos_scale_base": 512},
    ),
    "model.attn_config.attn_temperature_tuning": ({"floor_scale": 8192, "attn_scale": 0.0}, {"attn_scale": 0.0}),
    "train_subset_num_batches": (-1,),
    "cuda_load_lazy": (False,),
    "save_weights_only": (False,),
    "only_hf_checkpoint": (False,),
    "only_composer_checkpoint": (False,),
    "loggers.wandb.log_artifacts": (False,),
    "optimizer.param_groups": ([],),
    "optimizer.disable_grad": ([],),
    "optimizer.amsgrad": (False,),
    "scheduler.alpha": (1,),
    "model.additional_train_metrics": ([],),
    "*.dataset.sampling_method": ("balanced",),
    "*.dataset.sampling_granularity": (1,),
    "*.dataset.allow_unsafe_types": (False,),
    "*.dataset.replication": (1,),
    "*.dataset.seq_parallel_replication": (1,),
    "*.dataset.stream_name": ("stream",),
    "*.dataset.stream_config": ({},),
}


def refuse_fine_tuning(values: dict[str, Any], layers: Sequence[Layer]) -> None:
    """Before anything else of such a file is found to be wrong: no other change would make it run."""
    for key in _keys_of("*.name", values):
        if get(values, key)[1] in FINE_TUNING_LOADERS:
            raise ConfigError(
                f"{source_of(key, layers)}: {key}: {get(values, key)[1]}: fine-tuning is absent here: no loader of "
                "prompts and responses, no loss on responses alone, no Hugging Face model or adapter to be trained. "
                "Export a "
                "checkpoint (`llmfoundry-lite checkpoint export`) and fine-tune that with LLM Foundry or TRL"
            )


FINE_TUNING_LOADERS = ("finetuning", "fine_tuning")


def drop_keys_without_effect(values: dict[str, Any], layers: Sequence[Layer]) -> list[str]:
    notes = []
    for pattern, reason in WITHOUT_EFFECT.items():
        for key in _keys_of(pattern, values):
            if get(values, key)[0]:
                pop(values, key)
                notes.append(f"{source_of(key, layers)}: {key} has no effect: {reason}")
    return notes


def _keys_of(pattern: str, values: dict[str, Any]) -> list[str]:
    """`*` stands for the loaders."""
    if not pattern.startswith("*"):
        return [pattern]
    several = values.get("eval_loaders")
    labels = several if isinstance(several, dict) else ()
    blocks = ("train_loader", "eval_loader", *(f"eval_loaders.{label}" for label in labels))
    return [pattern.replace("*", block) for block in blocks]


def drop_values_without_effect(values: dict[str, Any], layers: Sequence[Layer]) -> list[str]:
    """Take out a shard degree of -1, which asks for the default, and rope_hf_config where rope_impl, dail by default,
    ignores it in LLM Foundry. Returns a note for the latter."""
    if get(values, "fsdp_config.data_parallel_shard_degree")[1] == -1:
        pop(values, "fsdp_config.data_parallel_shard_degree")
    attention = get(values, "model.attn_config")[1]
    scaling = attention.get("rope_hf_config") if isinstance(attention, dict) else None
    kind = scaling.get("type", "no_scaling") if isinstance(scaling, dict) else "no_scaling"
    if kind == "no_scaling" or not attention.get("rope") or attention.get("rope_impl", "dail") != "dail":
        return []
    key = "model.attn_config.rope_hf_config"
    pop(values, key)
    return [f"{source_of(key, layers)}: {key} has no effect: rope_impl is dail; rope_impl: hf scales positions"]


def refuse_left_out_keys(
    values: dict[str, Any], layers: Sequence[Layer], left_out: Mapping[str, str] = LEFT_OUT
) -> None:
    """Raises ConfigError that names every key of LLM Foundry's that is left out here."""
    refused = []
    for pattern, instead in left_out.items():
        for key in _keys_of(pattern, values):
            found, value = get(values, key)
            block = re.sub(r"^((?:eval_loaders\.)?[^.]+).*", r"\1", key)
            if not found or str(get(values, f"{block}.name")[1]).startswith("python:"):
                continue
            if value is None or value in HARMLESS_VALUES.get(pattern, ()):
                pop(values, key)
                continue
            refused.append((key, instead))
    if len(refused) == 1:
        (key, instead) = refused[0]
        raise ConfigError(f"{source_of(key, layers)}: {key}: LLM Foundry's option is left out here; {instead}")
    if refused:
        raise ConfigError(name_all(refused, layers, "options of LLM Foundry are left out here"))
    if values.get("device_eval_batch_size") == "auto":
        key = "device_eval_batch_size"
        raise ConfigError(f"{source_of(key, layers)}: {key}: auto is for training; give a number of samples")
