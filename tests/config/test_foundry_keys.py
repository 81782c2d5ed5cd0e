"""Every key of LLM Foundry 0.22's pre-training YAMLs is taken, passed over with a note, or refused by its name."""

import re
from pathlib import Path

import pytest

from llmfoundry_lite.config.fields import schema_keys
from llmfoundry_lite.config.foundry import LEFT_OUT, WITHOUT_EFFECT
from llmfoundry_lite.config.load_train import load_train_config
from llmfoundry_lite.config.schema import TrainConfig
from llmfoundry_lite.errors import ConfigError

# Fields of TrainConfig; arguments of what its registries build; keys that loaders, optimizers and models look up.
KEYS = {
    "": """model tokenizer optimizer scheduler train_loader device_train_batch_size device_eval_batch_size max_duration
        max_seq_len seed precision code_paths max_split_size_mb expandable_segments cuda_load_lazy dist_timeout
        fsdp_config tp_config accumulate_train_batch_on_tokens eval_interval eval_loader eval_loaders icl_tasks
        icl_tasks_str eval_gauntlet eval_gauntlet_str icl_subset_num_batches icl_seq_len loggers progress_bar
        log_to_console python_log_level console_log_interval log_config callbacks algorithms save_folder
        save_latest_filename save_overwrite save_weights_only save_filename save_interval save_num_checkpoints_to_keep
        load_path load_weights_only load_strict_model_weights load_ignore_keys save_ignore_keys only_hf_checkpoint
        only_composer_checkpoint train_subset_num_batches device_train_microbatch_size global_train_batch_size
        spin_dataloaders eval_subset_num_batches eval_first compile_config metadata flatten_metadata run_name autoresume
        profiler variables n_gpus device_train_grad_accum""",
    "model.": """name d_model n_heads n_layers head_dim expansion_ratio max_seq_len vocab_size resid_pdrop emb_pdrop
        learned_pos_emb attn_config ffn_config init_device logit_scale no_bias attention_bias embedding_fraction
        norm_type norm_eps use_cache init_config fc_type tie_word_embeddings use_pad_tok_in_ffn block_overrides
        final_logit_softcapping loss_fn use_train_metrics additional_train_metrics peft_config
        activation_checkpointing_target""",
    "model.attn_config.": """attn_type attn_pdrop attn_impl qk_ln qk_gn fused_qkv clip_qkv softmax_scale kv_n_heads
        attn_uses_sequence_id sliding_window_size attn_logit_softcapping alibi alibi_bias_max rope nope rope_theta
        rope_impl rope_dail_config rope_hf_config attn_temperature_tuning kv_dim fc_type""",
    "model.ffn_config.": "ffn_type ffn_act_fn ffn_hidden_size fc_type moe_num_experts moe_top_k moe_loss_weight",
    "model.init_config.": """name fan_mode init_nonlinearity init_div_is_residual emb_init_std emb_init_uniform_lim
        init_std init_gain verbose""",
    "tokenizer.": "name kwargs",
    "train_loader.": "name dataset drop_last num_workers pin_memory prefetch_factor persistent_workers timeout",
    "train_loader.dataset.": """max_seq_len token_encoding_type streams remote local split download_retry
        download_timeout validate_hash keep_zip epoch_size predownload cache_limit partition_algo num_canonical_nodes
        shuffle shuffle_algo shuffle_seed shuffle_block_size sampling_method sampling_granularity batching_method
        allow_unsafe_types replication stream_name stream_config eos_token_id bos_token_id mlm_probability
        override_eos_token_id_mismatch_error override_bos_token_id_mismatch_error seq_parallel_replication""",
    "train_loader.dataset.streams.*.": """remote local split proportion repeat choose download_retry download_timeout
        validate_hash keep_zip""",
    "optimizer.": "name lr betas eps weight_decay amsgrad disable_grad param_groups",
    "scheduler.": """name t_warmup t_max alpha alpha_i alpha_f scale_warmup t_scale t_cooldown alpha_f_decay
        alpha_f_cooldown""",
    "algorithms.": "gradient_clipping alibi gated_linear_units low_precision_layernorm",
    "algorithms.gradient_clipping.": "clipping_type clipping_threshold",
    "callbacks.": """system_metrics_monitor lr_monitor memory_monitor memory_snapshot speed_monitor runtime_estimator
        optimizer_monitor generate_callback early_stopper fdiff_metrics hf_checkpointer global_lr_scaling
        layer_freezing mono_checkpoint_saver scheduled_gc oom_observer eval_output_logging mbmoe_tok_per_expert
        run_timeout loss_perp_v_len env_logging nan_monitor kill_loss_spike load_checkpoint async_eval
        curriculum_learning dataset_swap""",
    "callbacks.hf_checkpointer.": """save_folder save_interval huggingface_folder_name precision overwrite
        mlflow_registered_model_name mlflow_logging_config flatten_imports final_register_only register_wait_seconds""",
    "callbacks.generate_callback.": """prompts interval batch_size max_new_tokens do_sample temperature top_k top_p
        use_cache""",
    "callbacks.early_stopper.": "monitor dataloader_label comp min_delta patience",
    "callbacks.kill_loss_spike.": "log_only patience outlier_multiplier window_size loss_cap",
    "callbacks.speed_monitor.": "window_size gpu_flops_available time_unit",
    "callbacks.runtime_estimator.": "skip_batches time_unit",
    "callbacks.memory_monitor.": "memory_keys dist_aggregate_batch_interval",
    "loggers.": "wandb tensorboard inmemory in_memory_logger mlflow mosaicml",
    "loggers.wandb.": "project group name entity tags log_artifacts rank_zero_only init_kwargs",
    "loggers.tensorboard.": "log_dir flush_interval rank_zero_only",
    "fsdp_config.": """activation_checkpointing activation_checkpointing_reentrant activation_cpu_offload auto_wrap
        te_checkpoint_wrapper te_shard_fp8_weight backward_prefetch backward_prefetch_limit cpu_offload
        data_parallel_shard_degree data_parallel_replicate_degree forward_prefetch forward_prefetch_limit
        ignored_modules keep_low_precision_grads limit_all_gathers load_monolith_rank0_only load_planner mixed_precision
        process_group save_planner sharded_ckpt_prefix_dir sharding_strategy state_dict_type sync_module_states
        use_orig_params verbose reshard_after_forward""",
    "tp_config.": "tensor_parallel_degree strategy",
}

YAML = Path(__file__).resolve().parents[2] / "yamls/pretrain/mpt-125m.yaml"


def every_key() -> list[str]:
    found = [prefix + key for prefix, keys in KEYS.items() for key in keys.split()]
    return found + [key.replace("train_loader", "eval_loader", 1) for key in found if key.startswith("train_loader.")]


def test_every_key_of_llm_foundry_is_known():
    ours = {key[:end] for key in schema_keys(TrainConfig) for end in [m.start() for m in re.finditer(r"\.|$", key)]}
    tables = {pattern.replace("*", loader) for pattern in {*LEFT_OUT, *WITHOUT_EFFECT} for loader in
              ("train_loader", "eval_loader")}  # fmt: skip
    assert not [key for key in every_key() if key not in ours | tables]


@pytest.mark.parametrize("key", [*LEFT_OUT])
def test_what_is_left_out_is_refused_by_its_name_with_what_to_use_instead(key):
    key = key.replace("*", "train_loader")
    with pytest.raises(ConfigError) as caught:
        load_train_config([str(YAML), f"{key}=[strange]"], {})
    assert str(caught.value) == (
        f"command line: {key}: LLM Foundry's option is left out here; "
        f"{(LEFT_OUT.get(key) or LEFT_OUT[key.replace('train_loader', '*')])}"
    )


def test_a_key_that_is_left_out_belongs_to_ones_own_optimizer_all_the_same():
    own = ["optimizer.name=python:torch.optim:AdamW", "optimizer.amsgrad=true", "optimizer.betas=null"]
    config = load_train_config([str(YAML), *own], {}).config
    assert config.optimizer.kwargs["amsgrad"] is True


def test_a_model_of_another_kind_is_named_before_options_that_are_left_out():
    """Without the options the file would be refused all the same."""
    own = ["model.name=hf_causal_lm", "expandable_segments=true", "eval_gauntlet=x.yaml"]
    with pytest.raises(
        ConfigError, match=r"^command line: model\.name: 'hf_causal_lm' is not known; .*init DATA --like hf:NAME"
    ):
        load_train_config([str(YAML), *own], {})


def test_adaptive_clipping_and_outlier_lions_are_named_as_left_out():
    for change, text in (
        (
            "algorithms.gradient_clipping.clipping_type=adaptive",
            "expected norm or value; adaptive clipping is left out",
        ),
        ("optimizer={name: adalr_lion, lr: 1e-4, outlier_threshold: 5}", "expected decoupled_adamw, adamw, lion,"),
    ):
        with pytest.raises(ConfigError, match=text):
            load_train_config([str(YAML), change], {})
