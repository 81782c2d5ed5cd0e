"""A pre-training YAML in LLM Foundry's words."""

FOUNDRY = """\
variables: {{data_local: ./my-copy-c4, data_remote: null, max_seq_len: 2048, global_seed: 17, run_name: null}}
max_seq_len: ${{variables.max_seq_len}}
run_name: ${{variables.run_name}}
model:
  {{name: mpt_causal_lm, init_device: meta, d_model: {d_model}, n_heads: {n_heads}, n_layers: {n_layers},
    max_seq_len: "${{variables.max_seq_len}}", expansion_ratio: 4, vocab_size: 50368,
    attn_config: {{attn_impl: flash}}}}
tokenizer: {{name: EleutherAI/gpt-neox-20b, kwargs: {{model_max_length: "${{variables.max_seq_len}}"}}}}
train_loader: &loader
  name: text
  dataset:
    {{local: "${{variables.data_local}}", remote: "${{variables.data_remote}}", split: train, shuffle: true,
      max_seq_len: "${{variables.max_seq_len}}", shuffle_seed: "${{variables.global_seed}}"}}
  drop_last: true
  num_workers: 8
eval_loader: *loader
scheduler: {{name: cosine_with_warmup, t_warmup: 100ba, alpha_f: 0.1}}
optimizer: {{name: decoupled_adamw, lr: {lr}, betas: [0.9, 0.95], eps: 1.0e-08, weight_decay: 0.0}}
algorithms: {{gradient_clipping: {{clipping_type: norm, clipping_threshold: 1.0}}}}
max_duration: {max_duration}
eval_interval: 500ba
eval_first: false
eval_subset_num_batches: -1
global_train_batch_size: {batch}
seed: ${{variables.global_seed}}
device_eval_batch_size: 4
device_train_microbatch_size: 4
precision: amp_bf16
fsdp_config:
  {{sharding_strategy: FULL_SHARD, mixed_precision: PURE, activation_checkpointing: true, limit_all_gathers: true,
    activation_checkpointing_reentrant: false, activation_cpu_offload: false}}
progress_bar: false
log_to_console: true
console_log_interval: 1ba
callbacks: {{speed_monitor: {{window_size: 10}}, lr_monitor: {{}}, memory_monitor: {{}}, runtime_estimator: {{}}}}
"""
"""To be formatted with the shape and the length of a run."""
