"""Keys that have no effect where they stand: refused or noted. Every key of a YAML says where it has one."""

import re
from pathlib import Path

import pytest
import yaml

from llmfoundry_lite.config.eval_schema import TaskConfig
from llmfoundry_lite.config.fields import keys_of
from llmfoundry_lite.config.load_tasks import load_tasks
from llmfoundry_lite.config.load_train import load_train_config
from llmfoundry_lite.config.schema import TrainConfig, as_dict
from llmfoundry_lite.errors import ConfigError
from llmfoundry_lite.launch_train import main as train_main

RUN = """\
max_seq_len: 128
model: {name: mpt_causal_lm, d_model: 64, n_heads: 4, n_layers: 2, max_seq_len: 128, vocab_size: 512}
tokenizer: {name: gpt2}
train_loader: {name: text, dataset: {local: data, split: train}}
optimizer: {name: decoupled_adamw, lr: 1.0e-3}
scheduler: {name: cosine_with_warmup, t_warmup: 10ba}
max_duration: 100ba
global_train_batch_size: 8
"""
VALIDATION = "{name: text, dataset: {local: data, split: val}}"
NOTHING = "nothing is evaluated; eval_loader, eval_loaders or icl_tasks name what to evaluate"
NO_DECAY = (
    "only cosine_with_warmup, linear_decay_with_warmup and warmup_stable_decay use it, and scheduler.name is "
    "constant_with_warmup"
)
GENERATE = "callbacks.generate_callback={prompts: [a], interval: 9ba}"
LIKELIEST = "do_sample is false, which takes the likeliest token"
KAIMING = "only kaiming_normal_ and kaiming_uniform_ use it, and model.init_config.name is small_init_"
NORMS = "q and k have norms only with qk_ln or qk_gn; model.norm_type and model.norm_eps are for all others"
APART = "documents see each other without model.attn_config.attn_uses_sequence_id: true"
ATTENTION, INIT = "model.attn_config", "model.init_config"
OF_OUR_FFN = "python:a:b is not given it; remove it, or pass it with model.ffn_config.kwargs."

NOTED = {
    "scheduler.alpha_f=0.1;scheduler.name=constant_with_warmup": NO_DECAY,
    "scheduler.t_max=5ba;scheduler.name=constant_with_warmup": "constant_with_warmup has no end",
    "optimizer.eps=1e-6;optimizer.name=lion": "lion has none",
    f"{ATTENTION}.rope_theta=500000": f"{ATTENTION}.rope is false",
    f"{ATTENTION}.rope_impl=hf": f"{ATTENTION}.rope is false",
    f"{ATTENTION}.rope_hf_config.type=linear;{ATTENTION}.rope_hf_config.factor=2": f"{ATTENTION}.rope is false",
    f"{ATTENTION}.alibi_bias_max=16": f"{ATTENTION}.alibi is false",
    f"{ATTENTION}.norm_type=rmsnorm": NORMS,
    f"{ATTENTION}.norm_eps=1e-6": NORMS,
    f"{INIT}.init_std=0.02": "only baseline_ uses it, and model.init_config.name is kaiming_normal_",
    f"{INIT}.init_gain=1;{INIT}.name=small_init_": (
        f"only kaiming and xavier have a gain, and {INIT}.name is small_init_"
    ),
    f"{INIT}.fan_mode=fan_out;{INIT}.name=small_init_": KAIMING,
    f"{INIT}.init_nonlinearity=linear;{INIT}.name=small_init_": KAIMING,
    f"{INIT}.init_div_is_residual=false;{INIT}.name=neox_init_": "neox_init_ has its own scale for these weights",
    f"{INIT}.emb_init_uniform_lim=1;{INIT}.emb_init_std=0.02": f"{INIT}.emb_init_std takes precedence",
    "model.expansion_ratio=2;model.ffn_config.ffn_hidden_size=64": "model.ffn_config.ffn_hidden_size takes precedence",
    "model.ffn_config.ffn_act_fn={name: gelu};model.ffn_config.ffn_type=python:a:b": f"{OF_OUR_FFN}ffn_act_fn",
    "model.init_device=cpu": "every weight is made where it lives",
    "model.loss_fn=torch_crossentropy": "all choices but python: are the same chunked loss",
    "eval_interval=20ba": NOTHING,
    "eval_first=true": NOTHING,
    f"eval_first=true;eval_interval=0;eval_loader={VALIDATION}": "eval_interval is 0, which never evaluates",
    "device_eval_batch_size=4": NOTHING,
    "eval_subset_num_batches=4": "there is no eval_loader",
    "icl_limit=4": "there are no icl_tasks",
    "icl_task_folder=mine": "there are no icl_tasks",
    "save_keep_every_batches=50": "save_num_checkpoints_to_keep is -1, which keeps every checkpoint",
    "console_log_interval=10ba;log_to_console=false": "log_to_console is false",
    "fsdp_config.mixed_precision=PURE;precision=fp32": "precision is fp32, in which all is computed and reduced",
    "fsdp_config.activation_checkpointing_reentrant=true": "activation_checkpointing is false",
    "metrics_host=0.0.0.0": "there is no metrics_port",
    f"callbacks.generate_callback.temperature=2;{GENERATE}": LIKELIEST,
    f"callbacks.generate_callback.top_k=2;{GENERATE}": LIKELIEST,
    f"callbacks.generate_callback.top_p=0.9;{GENERATE}": LIKELIEST,
    "train_loader.prefetch_factor=4": "train_loader.num_workers is 0",
    "train_loader.persistent_workers=false": "train_loader.num_workers is 0",
    "train_loader.timeout=60": "train_loader.num_workers is 0",
    "train_loader.dataset.shuffle_block_size=1000": "train_loader.dataset.shuffle is false",
    "train_loader.dataset.cache_limit=1gb": "nothing is downloaded without a remote",
    "train_loader.dataset.download_retry=5": "nothing is downloaded without a remote",
    "train_loader.dataset.download_timeout=5": "nothing is downloaded without a remote",
    "train_loader.dataset.keep_zip=true": "nothing is downloaded without a remote",
    "train_loader.dataset.eos_token_id=1": APART,
    "train_loader.dataset.bos_token_id=1": APART,
    "train_loader.dataset.override_eos_token_id_mismatch_error=true": "train_loader.dataset.eos_token_id is not given",
    "train_loader.dataset.override_bos_token_id_mismatch_error=true": "train_loader.dataset.bos_token_id is not given",
    f"eval_loader.drop_last=true;eval_loader={VALIDATION}": "an evaluation never drops a sample",
    f"eval_loader.dataset.shuffle=true;eval_loader={VALIDATION}": (
        "an evaluation reads samples in the order of their files"
    ),
    f"eval_loaders.wiki.drop_last=true;eval_loaders.wiki={VALIDATION}": "an evaluation never drops a sample",
}
"""The key with its value, and further arguments -> the reason why the key has no effect."""

LOADING = "there is no load_path to load from; name a checkpoint there, or remove this"
MUON = "only muon uses it, and optimizer.name is decoupled_adamw; remove it"


def only(schedule: str) -> str:
    return f"only {schedule} uses it, and scheduler.name is cosine_with_warmup; remove it"


REFUSED = {
    "load_weights_only=true": LOADING,
    "load_cast=true": LOADING,
    "load_ignore_keys=[model/a]": LOADING,
    "callbacks.async_eval={interval: 5ba}": "there are no icl_tasks that it could evaluate; name them, or remove it",
    "max_skipped_batches=5": "on_non_finite is stop, which skips no batch; set it to skip, or remove this",
    "optimizer.kwargs={amsgrad: true}": (
        "only a python: optimizer is given them, and optimizer.name is decoupled_adamw; remove it"
    ),
    "model.norm_kwargs={weight: false}": (
        "only a python: norm is given them, and model.norm_type is low_precision_layernorm; remove it"
    ),
    f"{ATTENTION}.kwargs={{gate: 1}}": (
        f"only a python: attention is given them, and {ATTENTION}.attn_type is multihead_attention; remove it"
    ),
    "model.ffn_config.kwargs={depth: 2}": (
        "only a python: ffn_type is given them, and model.ffn_config.ffn_type is mptmlp; remove it"
    ),
    "model.ffn_config.ffn_hidden_size=64;model.ffn_config.ffn_type=python:a:b": f"{OF_OUR_FFN}ffn_hidden_size",
    "model.ffn_config.ffn_act_fn={name: silu};model.ffn_config.ffn_type=python:a:b": f"{OF_OUR_FFN}ffn_act_fn",
    "optimizer.adamw_lr=0.1": MUON,
    "optimizer.momentum=0.1": MUON,
    "optimizer.ns_steps=4": MUON,
    "optimizer.ns_dtype=fp32": MUON,
    "optimizer.adjust_lr_fn=original": MUON,
    "train_loader.kwargs={path: a}": "only a python: loader is given them, and train_loader.name is text; remove it",
    "scheduler.kwargs={power: 2}": (
        "only a python: schedule is given them, and scheduler.name is cosine_with_warmup; remove it"
    ),
    "scheduler.alpha_i=2": only("linear_decay_with_warmup"),
    "scheduler.t_decay=20ba": only("warmup_stable_decay"),
    "scheduler.decay=cosine": only("warmup_stable_decay"),
    "scheduler.t_scale=20ba": only("inv_sqrt_with_warmup"),
    "model.loss_kwargs={rate: 2}": "only a python: loss is given them, and model.loss_fn is auto; remove it",
    "scheduler.t_cooldown=20ba": only("inv_sqrt_with_warmup"),
    "scheduler.alpha_f_decay=1": only("inv_sqrt_with_warmup"),
    "scheduler.alpha_f_cooldown=1": only("inv_sqrt_with_warmup"),
}

ALWAYS = {
    # A block's `problems`, `config/check.py` and checks of companions refuse keys that do not go with others.
    "ModelConfig": """name d_model n_heads n_layers max_seq_len vocab_size resid_pdrop emb_pdrop learned_pos_emb
        embedding_fraction attn_config ffn_config init_config logit_scale no_bias norm_type norm_eps
        tie_word_embeddings mup""",
    "MupConfig": "base_width base_head_dim embedding_mult",
    "AttentionConfig": """attn_type kv_n_heads attn_pdrop attn_impl fused_qkv head_dim qkv_bias qk_ln qk_gn clip_qkv
        softmax_scale sliding_window_size attn_uses_sequence_id alibi rope rope_hf_config""",
    "RopeScaling": "factor low_freq_factor high_freq_factor original_max_position_embeddings",
    "FFNConfig": "ffn_type",
    "FFNActivation": "name approximate",
    "InitConfig": "name emb_init_std",
    # Only kwargs' own keys decide, and `config/check.py` notes those that nobody asks for.
    "TokenizerConfig": "name kwargs",
    # shuffle_seed also rounds the shares of streams, in an evaluation too.
    "TextDatasetConfig": """local remote split streams stages shuffle shuffle_seed max_seq_len epoch_size predownload
        validate_hash allow_unhashed_shards allow_truncation token_encoding_type""",
    # A stage's stream inherits from the one of its name before it, remote included.
    "StreamConfig": """local remote split proportion repeat choose download_retry download_timeout validate_hash
        keep_zip""",
    "StageConfig": "until streams",
    "LoaderConfig": "name dataset drop_last num_workers",
    "OptimizerConfig": "name lr betas weight_decay param_groups",
    # `tests/config/test_parameter_groups.py` has the keys that an optimizer does not take.
    "ParameterGroupConfig": "param_str_match lr weight_decay betas",
    "SchedulerConfig": "name t_warmup",
    "AlgorithmsConfig": "gradient_clipping",
    "GradientClippingConfig": "clipping_type clipping_threshold",
    "FSDPConfig": """sharding_strategy data_parallel_shard_degree reduce_every_microbatch activation_checkpointing
        activation_cpu_offload
        offload_optimizer plain_on_one_device""",
    # `config/check.py` notes what stands beside a degree of 1.
    "TensorParallelConfig": "tensor_parallel_degree sequence_parallel",
    "ContextParallelConfig": "context_parallel_degree kind",
    "PipelineConfig": "pipeline_parallel_degree schedule virtual_stages blocks num_microbatches",
    "CallbacksConfig": """speed_monitor lr_monitor memory_monitor runtime_estimator profiler hf_checkpointer
        generate_callback early_stopper kill_loss_spike extra""",
    "SpeedMonitorConfig": "window_size",
    "NoOptions": "",
    "ProfilerConfig": """skip_first wait warmup active repeat folder all_ranks record_shapes profile_memory
        with_stack""",
    "HFCheckpointerConfig": "save_interval save_folder precision",
    "GenerateConfig": "prompts interval max_new_tokens do_sample",
    "StragglersConfig": "interval threshold reports",
    "AlertsConfig": "webhook command apprise events no_progress_minutes loss_spike",
    "AsyncEvalConfig": "interval compute eval_run_config",  # what they mean to LLM Foundry, a note says
    "EarlyStopperConfig": "monitor dataloader_label patience min_delta",
    "KillLossSpikeConfig": "log_only patience outlier_multiplier window_size loss_cap",
    "LoggersConfig": "wandb tensorboard extra",
    "WandbConfig": "project entity group name tags names init_kwargs",
    "TensorboardConfig": "log_dir names",
    "TrainConfig": """model tokenizer train_loader optimizer scheduler max_duration global_train_batch_size max_seq_len
        run_name run_folder seed precision eval_loader eval_loaders loss_chunk_mib icl_tasks
        device_train_microbatch_size accumulate_train_batch_on_tokens exact_sums algorithms callbacks loggers
        batch_size_schedule seq_len_schedule
        fsdp_config tp_config cp_config pp_config on_non_finite save_folder save_interval digest_interval
        save_num_checkpoints_to_keep autoresume load_path stop_after stop_at max_wall_time preemption_grace_seconds
        takeover max_unsaved retry_for compile_config deterministic dist_timeout environment progress_bar
        log_to_console export_at_end python_log_level variables metadata stragglers console_format alerts
        metrics_port""",
    # `_build_task` refuses the others that a task's type does not have.
    "TaskConfig": "label icl_task_type dataset_uri num_fewshot fewshot_split metric metric_names has_categories "
    "cluster form",
}
"""Block -> keys that have an effect wherever they stand, or whose rule the comment names."""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(RUN)


def arguments_of(case: str) -> tuple[str, list[str]]:
    """Return the key, and the arguments in an order in which blocks come before keys within them."""
    first, *others = case.split(";")
    return first.partition("=")[0], ["run.yaml", *others, first]


@pytest.mark.parametrize("case", NOTED)
def test_a_key_without_effect_is_noted(case):
    key, arguments = arguments_of(case)
    noted = [note for note in load_train_config(arguments, {}).notes if f": {key} has no effect" in note]
    assert noted == [f"command line: {key} has no effect: {NOTED[case]}"]


@pytest.mark.parametrize("case", REFUSED)
def test_a_key_without_effect_is_refused_where_the_run_would_be_another_one(case):
    key, arguments = arguments_of(case)
    with pytest.raises(ConfigError) as error:
        load_train_config(arguments, {})
    assert str(error.value) == f"command line: {key}: {REFUSED[case]}"


@pytest.mark.parametrize(
    "arguments",
    [
        ["load_path=runs/a", "load_weights_only=true", "load_cast=true", "load_ignore_keys=[model/a]"],
        ["on_non_finite=skip", "max_skipped_batches=5"],
        ["scheduler.alpha_f=0.1", "scheduler.t_max=90ba", "optimizer.eps=1e-6"],
        ["model.attn_config={rope: true, rope_theta: 500000}", "model.expansion_ratio=2"],
        ["model.attn_config={alibi: true, alibi_bias_max: 16, qk_ln: true, norm_type: rmsnorm}"],
        ["model.init_config={name: baseline_, init_std: 0.02, emb_init_uniform_lim: 1}"],
        [f"eval_loader={VALIDATION}", "eval_first=true", "eval_interval=20ba", "device_eval_batch_size=4"],
        [f"eval_loader={VALIDATION}", "eval_loader.drop_last=false", "eval_subset_num_batches=2"],
        ["icl_tasks=[arc_easy]", "icl_limit=4", "eval_interval=20ba"],
        ["train_loader={num_workers: 2, prefetch_factor: 4, persistent_workers: false, timeout: 9}"],
        ["train_loader.dataset={shuffle: true, shuffle_block_size: 1000}"],
        ["train_loader.dataset={remote: s3://a, cache_limit: 1gb, download_retry: 5, keep_zip: true}"],
        ["train_loader.dataset={local: null, streams: {a: {local: a, remote: s3://a}}, cache_limit: 1gb}"],
        ["fsdp_config={mixed_precision: PURE, activation_checkpointing: true}"],
    ],
)
def test_a_key_is_not_noted_where_it_has_an_effect(arguments):
    assert load_train_config(["run.yaml", *arguments], {}).notes == []


@pytest.mark.parametrize(
    "argument", ["pin_memory=false", "prefetch_factor=4", "persistent_workers=false", "timeout=60"]
)
def test_a_loader_of_ones_own_is_not_given_the_options_of_ours(argument):
    ours = "{name: text, dataset: {local: data, split: train}}"
    Path("own.yaml").write_text(RUN.replace(ours, "{name: 'python:a:b', num_workers: 2}"))
    name = argument.partition("=")[0]
    assert load_train_config(["own.yaml", f"train_loader.{argument}"], {}).notes == [
        f"command line: train_loader.{name} has no effect: python:a:b is not given it; remove it, or pass it with "
        f"train_loader.kwargs.{name}"
    ]


def test_what_nobody_wrote_for_this_run_is_not_noted():
    """Overlays describe a machine for many runs; config.yaml of a run folder has every key."""
    Path("mine.yaml").write_text("overlay: hardware\ntrain_loader: {prefetch_factor: 4}\nmodel: {init_device: cpu}\n")
    with_overlay = load_train_config(["run.yaml", "mine.yaml", f"eval_loader={VALIDATION}", "eval_interval=9ba"], {})
    assert with_overlay.config.train_loader.prefetch_factor == 4 and with_overlay.notes == []
    Path("config.yaml").write_text(yaml.safe_dump(as_dict(with_overlay.config)))
    again = load_train_config(["config.yaml"], {})
    assert again.config.validation["eval_loader"].drop_last and again.notes == []


def test_exact_sums_refuse_kernels_that_vary_on_every_machine():
    exact = ["run.yaml", "exact_sums=true", "device_train_microbatch_size=1"]
    assert load_train_config([*exact, "deterministic=true"], {}).config.exact_sums
    with pytest.raises(ConfigError, match=r"^command line: deterministic: false given, but exact_sums needs kernels"):
        load_train_config([*exact, "deterministic=false"], {})


def test_notes_stand_in_the_dry_run(capsys):
    train_main(["run.yaml", "train_loader.prefetch_factor=4", "--dry-run"])
    first, *_ = capsys.readouterr().out.splitlines()
    assert first == "command line: train_loader.prefetch_factor has no effect: train_loader.num_workers is 0"


def test_a_constant_schedule_has_no_end_to_compare_a_warm_up_with():
    constant = ["run.yaml", "scheduler.name=constant_with_warmup"]
    for end in ("5ba", "500ba", "5sp"):
        (note,) = load_train_config([*constant, f"scheduler.t_max={end}"], {}).notes
        assert note == "command line: scheduler.t_max has no effect: constant_with_warmup has no end"


# --------------------------------------------------------------------------------------------------------- tasks

TEXT = "the text of a perplexity task has no prompts"
WRITES_NOTHING = "a language_modeling task generates nothing"
TASKS = {
    "kwargs: {a: 1}": "only a type of your own is given them, and icl_task_type is language_modeling",
    "metric_kwargs: {a: {b: 1}}": "metric_names has no metric of your own",
    "max_new_tokens: 5": WRITES_NOTHING,
    "early_stopping_criteria: [a]": WRITES_NOTHING,
    "do_normalization: false": WRITES_NOTHING,
    "cot_delimiter: a": WRITES_NOTHING,
    "hf_loading_vars: {split: test}": "dataset_uri is no hf://NAME",
    "hf_parsing_map: {context: [a]}": "dataset_uri is no hf://NAME",
    "fewshot_random_seed: 5": "num_fewshot is 0",
    "fewshot_fixed: true": "num_fewshot is 0",
    "fewshot_random_seed: 5, num_fewshot: 2, fewshot_fixed: true": "fewshot_fixed is true",
    "prompt_string: a, icl_task_type: perplexity": TEXT,
    "example_delimiter: a, icl_task_type: perplexity": TEXT,
    "continuation_delimiter: a, icl_task_type: perplexity": TEXT,
    "prelimiter: a, icl_task_type: perplexity": TEXT,
    "strip_dataset: false, icl_task_type: perplexity": TEXT,
    "tokenization: joint, icl_task_type: perplexity": TEXT,
    "choices_delimiter: a": "form is not letters",
    "letter_prefix: a": "form is not letters",
}


@pytest.mark.parametrize("case", TASKS)
def test_a_tasks_key_without_effect_is_noted(case):
    task = {"label": "mine", "icl_task_type": "language_modeling", "dataset_uri": "a.jsonl"}
    notes: list[str] = []
    task |= yaml.safe_load(f"{{{case}}}")
    load_tasks([task, {**task, "label": "yours"}], "evals", notes=notes)
    key = case.partition(":")[0]
    assert notes == [f"icl_tasks: {key} has no effect (mine and 1 more): {TASKS[case]}"]


# ------------------------------------------------------------------------------------------------- completeness


def blocks_of(block: type) -> dict[str, type]:
    """Return the blocks of a YAML by the names of their classes, except those of companions."""
    found = {block.__name__: block}
    for key in keys_of(block).values():
        if key.block is not None and key.block.__module__.startswith("llmfoundry_lite."):
            found |= blocks_of(key.block)
    return found


BLOCKS = blocks_of(TrainConfig) | {"TaskConfig": TaskConfig}


@pytest.mark.parametrize("name", BLOCKS)
def test_every_key_says_where_it_has_an_effect(name):
    """A new key gets a `Use`, and a case above; or it goes into ALWAYS, because it has an effect everywhere."""
    keys = {key for key in keys_of(BLOCKS[name]) if key != "islands"}
    always = set(ALWAYS[name].split())
    with_use = {key for key in keys if keys_of(BLOCKS[name])[key].setting.uses}
    assert always | with_use == keys and not always & with_use


def test_every_condition_of_a_key_has_a_case_here():
    tried = {re.split("[=:]", case)[0].rpartition(".")[2] for case in (*NOTED, *REFUSED, *TASKS)}
    conditional = {name for block in BLOCKS.values() for name, key in keys_of(block).items() if key.setting.uses}
    elsewhere = {"pin_memory", "save_fallback"}  # in the tests of loaders of one's own, and of islands
    assert conditional - elsewhere == tried - {"drop_last", "shuffle"}  # those two have an effect in the training data
