"""Changes in the middle of a run: every key has a rule, and a key that may not change does not."""

import copy
from pathlib import Path

import pytest

from llmfoundry_lite.checkpoint.manifest import Segment
from llmfoundry_lite.config.blocks import find_blocks
from llmfoundry_lite.config.changes import (
    Change,
    find_changes,
    find_changes_to_record,
    find_model_changes,
    refuse_changes,
    rule_of,
    trained_values,
)
from llmfoundry_lite.config.fields import schema_keys
from llmfoundry_lite.config.layers import hardware_keys
from llmfoundry_lite.config.load_train import load_train_config
from llmfoundry_lite.config.schema import TrainConfig, as_dict
from llmfoundry_lite.errors import CheckpointError

YAML = str(Path(__file__).resolve().parents[2] / "yamls/pretrain/mpt-125m.yaml")


def resolved(*arguments):
    return as_dict(load_train_config([YAML, *arguments]).config)


def in_loaders(block: str, keys: str) -> dict[str, str]:
    return {f"{loader}.{block}": keys for loader in ("train_loader", "eval_loader", "eval_loaders.*")}


TABLE = {
    "freely": {
        "model.attn_config.": "attn_impl",
        "model.init_config.": """name fan_mode init_nonlinearity init_div_is_residual emb_init_std
            emb_init_uniform_lim init_std init_gain""",
        "model.": "init_device loss_fn",
        "tokenizer.": "name kwargs",
        **in_loaders(
            "dataset.",
            """local remote predownload cache_limit download_retry download_timeout validate_hash
            allow_unhashed_shards allow_truncation keep_zip
            override_eos_token_id_mismatch_error override_bos_token_id_mismatch_error""",
        ),
        **in_loaders("dataset.streams.*.", "local remote download_retry download_timeout validate_hash keep_zip"),
        **in_loaders(
            "dataset.stages.*.streams.*.", "local remote download_retry download_timeout validate_hash keep_zip"
        ),
        **in_loaders("", "num_workers pin_memory prefetch_factor persistent_workers timeout"),
        "": """run_name run_folder precision eval_first loss_chunk_mib device_eval_batch_size icl_task_folder
            device_train_microbatch_size fsdp_config tp_config cp_config pp_config max_skipped_batches
            save_folder save_fallback save_num_checkpoints_to_keep save_keep_every_batches autoresume load_path
            load_weights_only load_ignore_keys load_cast stop_after stop_at max_wall_time preemption_grace_seconds
            compile_config deterministic digest_interval dist_timeout environment progress_bar log_to_console
            console_log_interval
            export_at_end python_log_level variables metadata retry_for takeover
            max_unsaved stragglers console_format alerts metrics_port metrics_host""",
        "stragglers.": "interval threshold reports",
        "alerts.": "webhook command apprise events no_progress_minutes loss_spike",
        "callbacks.speed_monitor.": "window_size",
        "callbacks.": """lr_monitor memory_monitor runtime_estimator profiler hf_checkpointer generate_callback
            early_stopper kill_loss_spike async_eval extra""",
        "callbacks.async_eval.": "interval compute eval_run_config",
        "callbacks.hf_checkpointer.": "save_interval save_folder precision",
        "callbacks.generate_callback.": "prompts interval max_new_tokens do_sample temperature top_k top_p",
        "callbacks.early_stopper.": "monitor dataloader_label patience min_delta",
        "callbacks.kill_loss_spike.": "log_only patience outlier_multiplier window_size loss_cap",
        "callbacks.profiler.": """skip_first wait warmup active repeat folder all_ranks record_shapes profile_memory
            with_stack""",
        "loggers.": "wandb tensorboard extra",
        "loggers.wandb.": "names project entity group name tags init_kwargs",
        "loggers.tensorboard.": "names log_dir",
        "fsdp_config.": """sharding_strategy mixed_precision data_parallel_shard_degree reduce_every_microbatch
            activation_checkpointing activation_checkpointing_reentrant activation_cpu_offload offload_optimizer
            plain_on_one_device""",
        "tp_config.": "tensor_parallel_degree sequence_parallel",
        "cp_config.": "context_parallel_degree kind",
        "pp_config.": "pipeline_parallel_degree schedule virtual_stages blocks num_microbatches",
    },
    "logged": {
        "train_loader.": "kwargs",
        "train_loader.dataset.": "stages",
        **in_loaders("dataset.stages.*.", "until streams"),
        **in_loaders("dataset.stages.*.streams.*.", "split proportion repeat choose"),
        "optimizer.": "lr adamw_lr ns_dtype weight_decay",
        "optimizer.param_groups.*.": "lr adamw_lr weight_decay",
        "scheduler.": """name t_warmup t_max alpha_i alpha_f t_decay decay t_scale t_cooldown alpha_f_decay
            alpha_f_cooldown kwargs""",
        "": """exact_sums max_duration batch_size_schedule seq_len_schedule eval_loader eval_loaders eval_interval
            eval_subset_num_batches icl_tasks
            icl_limit on_non_finite save_interval""",
        **dict.fromkeys(["eval_loader.", "eval_loaders.*."], "name drop_last kwargs"),
        **dict.fromkeys(
            ["eval_loader.dataset.", "eval_loaders.*.dataset."],
            """split streams shuffle shuffle_seed shuffle_block_size max_seq_len epoch_size
            token_encoding_type eos_token_id bos_token_id stages""",
        ),
        **dict.fromkeys(
            ["eval_loader.dataset.streams.*.", "eval_loaders.*.dataset.streams.*."], "split proportion repeat choose"
        ),
        "algorithms.": "gradient_clipping",
        "algorithms.gradient_clipping.": "clipping_type clipping_threshold",
    },
    "never": {
        "model.": """name d_model n_heads n_layers expansion_ratio max_seq_len vocab_size resid_pdrop emb_pdrop
            learned_pos_emb embedding_fraction logit_scale no_bias norm_type norm_eps norm_kwargs loss_kwargs
            tie_word_embeddings mup""",
        "model.mup.": "base_width base_head_dim embedding_mult",
        "model.attn_config.": """attn_type kv_n_heads head_dim qkv_bias attn_pdrop fused_qkv qk_ln qk_gn norm_type
            norm_eps norm_kwargs kwargs clip_qkv softmax_scale sliding_window_size attn_uses_sequence_id alibi
            alibi_bias_max rope rope_theta rope_impl""",
        "model.attn_config.rope_hf_config.": """type factor low_freq_factor high_freq_factor
            original_max_position_embeddings""",
        "model.ffn_config.": "ffn_type ffn_hidden_size kwargs",
        "model.ffn_config.ffn_act_fn.": "name approximate",
        "train_loader.": "name drop_last",
        "train_loader.dataset.": """split streams shuffle shuffle_seed shuffle_block_size max_seq_len epoch_size
            token_encoding_type eos_token_id bos_token_id""",
        "train_loader.dataset.streams.*.": "split proportion repeat choose",
        "optimizer.": "name betas momentum ns_steps adjust_lr_fn eps param_groups kwargs",
        "optimizer.param_groups.*.": "param_str_match betas eps momentum kwargs",
        "": "global_train_batch_size max_seq_len seed accumulate_train_batch_on_tokens",
    },
}
"""Every key of the schema, and what the middle of a run may do to it: decided by hand, not read from the code."""


def test_every_key_of_the_schema_has_the_rule_that_was_decided():
    decided = {
        prefix + key: rule for rule, blocks in TABLE.items() for prefix, keys in blocks.items() for key in keys.split()
    }
    keys = [key for key in schema_keys(TrainConfig) if key.partition(".")[0] not in find_blocks()]
    assert {key: rule_of(key) for key in keys} == decided
    assert {rule_of(key) for key in hardware_keys()} == {"freely"}
    with pytest.raises(KeyError):
        rule_of("unknown")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("attn_config.attn_impl=sdpa", "attn_config.attn_impl=python:mine:attend"),
        ("attn_config.attn_impl=python:mine:attend", "attn_config.attn_impl=auto"),
        ("norm_type=layernorm", "norm_type=python:mine:Norm"),
        ("norm_kwargs={a: 1}", "norm_kwargs={a: 2}"),
        ("ffn_config={ffn_type: 'python:mine:Ffn', depth: 2}", "ffn_config={ffn_type: 'python:mine:Ffn', depth: 3}"),
    ],
)
def test_code_of_ones_own_stays_in_the_model(before, after):
    norm = ["model.norm_type=python:mine:Norm"] if before.startswith("norm_kwargs") else []
    configs = [resolved(*norm, f"model.{argument}") for argument in (before, after)]
    assert find_changes(*configs)["never"] and not find_changes(*configs)["freely"]
    assert find_model_changes(*configs)


@pytest.mark.parametrize(
    ("argument", "rule", "text"),
    [
        ("optimizer.lr=1e-5", "logged", "optimizer.lr 0.0006 -> 1e-05"),
        ("max_duration=9ba", "logged", "max_duration 4800ba -> 9ba"),
        ("seed=4", "never", "seed 17 -> 4"),
        ("train_loader.dataset.local=/elsewhere", "freely", None),
        ("precision=fp32", "freely", None),
    ],
)
def test_a_change_is_found_and_judged(argument, rule, text):
    found = find_changes(resolved(), resolved(argument))
    assert [name for name, changes in found.items() if changes] == [rule]
    assert text is None or [str(change) for change in found[rule]] == [text]


def test_a_microbatch_is_free_unless_attention_draws_its_dropout_for_it():
    layout = ["device_train_microbatch_size=2", "tp_config={tensor_parallel_degree: 2}"]
    residual = ["model.resid_pdrop=0.1", "model.emb_pdrop=0.1"]
    drawn = ["model.attn_config.attn_pdrop=0.1", "model.attn_config.attn_impl=sdpa"]
    assert not find_changes(resolved(*residual), resolved(*residual, *layout))["logged"]
    said = find_changes(resolved(*drawn), resolved(*drawn, *layout))["logged"]
    assert [change.key for change in said] == ["device_train_microbatch_size", "tp_config"]
    begun = find_changes(resolved(), resolved(*drawn, *layout))["logged"]
    assert {"device_train_microbatch_size", "tp_config"} <= {change.key for change in begun}


def test_one_of_several_validation_loaders_may_come_move_and_change():
    wiki = "eval_loaders={wiki: {num_workers: 1, dataset: {local: x, split: a}}}"
    found = find_changes(
        resolved("eval_loader=null", wiki),
        resolved("eval_loader=[{label: wiki, dataset: {local: y, split: b}}, {label: c4, dataset: {local: z}}]"),
    )
    assert [change.key for change in found["logged"]] == ["eval_loaders.wiki.dataset.split", "eval_loaders.c4"]
    assert {change.key for change in found["freely"]} == {
        *("eval_loaders.wiki.dataset.local", "eval_loaders.wiki.num_workers")
    }


def test_a_block_that_comes_or_goes_is_one_change():
    found = find_changes(resolved(), resolved("eval_loader=null", "fsdp_config=null"))
    assert [change.key for change in found["logged"]] == ["eval_loader"]
    assert [change.key for change in found["freely"]] == ["fsdp_config"]


def test_a_stream_may_lie_elsewhere_but_not_weigh_more():
    there = resolved()
    stream = {"local": "/a", "remote": None, "split": None, "proportion": 0.5, "repeat": None, "choose": None}
    there["train_loader"]["dataset"]["streams"] = {"web": stream}
    here = copy.deepcopy(there)
    here["train_loader"]["dataset"]["streams"]["web"] |= {"local": "/b", "proportion": 0.75}
    found = find_changes(there, here)
    assert found["freely"] == [Change("train_loader.dataset.streams.web.local", "/a", "/b")]
    assert found["never"] == [Change("train_loader.dataset.streams.web.proportion", 0.5, 0.75)]
    here["train_loader"]["dataset"]["streams"]["code"] = stream
    assert "train_loader.dataset.streams.code" in [change.key for change in find_changes(there, here)["never"]]


def test_a_checkpoint_of_another_release_has_the_defaults_of_what_it_does_not_say():
    there = resolved()
    del there["seed"], there["model"]["attn_config"]["qk_gn"]
    there["no_longer_known"] = 3
    assert not any(find_changes(there, resolved()).values())
    assert [str(change) for change in find_changes(there, resolved("seed=4"))["never"]] == ["seed 17 -> 4"]


def test_what_may_never_change_is_refused_in_one_line_that_says_what_to_do():
    with pytest.raises(CheckpointError) as caught:
        refuse_changes(find_changes(resolved(), resolved("seed=4", "optimizer.eps=1e-6"))["never"])
    assert str(caught.value) == (
        "optimizer.eps is 1e-06 here and 1e-08 in the checkpoint, seed is 4 here and 17 in the checkpoint; a run "
        "must resume with the values in its checkpoint: set optimizer.eps=1e-08 seed=17, or begin a new run "
        "with its weights (another run_name, load_path and load_weights_only=true)"
    )


def test_arguments_of_ones_own_callbacks_may_change_and_are_recorded():
    ema = "callbacks.extra.python:mine:Ema"
    before = resolved('callbacks={"python:mine:Ema": {beta: 0.5, loud: true}, "python:mine:Old": {}}')
    after = resolved('callbacks={"python:mine:Ema": {beta: 0.3, loud: true}}', 'loggers={"python:mine:Log": {}}')
    assert [*map(str, find_changes_to_record(before, after))] == [
        f"{ema}.beta 0.5 -> 0.3",
        "callbacks.extra.python:mine:Old left out",
    ]
    assert "optimizer.lr" in str(find_changes_to_record(before, resolved("optimizer.lr=3")))
    assert rule_of(f"{ema}.beta") == "freely", "another run's launches need not agree in it"


def test_a_change_is_told_without_the_keys_that_were_left_out():
    stages = ["train_loader.dataset.stages=[{until: 6ba},{streams: {x: {local: data/x, proportion: 1}}}]"]
    (change,) = find_changes(resolved(), resolved(*stages))["logged"]
    told = '[] -> [{"until": "6ba"}, {"streams": {"x": {"local": "data/x", "proportion": 1.0}}}]'
    assert str(change) == f"train_loader.dataset.stages {told}"
    segment = Segment(first_batch=1, last_batch=2, changes={change.key: [change.before, change.after]})
    assert segment.computed_with == [str(change)]


def test_launches_of_one_run_share_what_may_change_by_being_said_and_not_what_may_freely():
    here, there = (trained_values(resolved(*more)) for more in ([], ["optimizer.lr=1e-5", "seed=4", "run_name=b"]))
    assert {key for key in here if here[key] != there[key]} == {"optimizer.lr", "seed"}
    assert not {"run_name", "precision", "device_train_microbatch_size", "save_folder"} & here.keys()


def test_a_user_s_own_optimizer_is_recorded_with_what_it_is_given():
    own = ["optimizer={name: 'python:my.optim:Own', lr: 0.1, betas: [0.9, 0.99, 0.999], weight_decay: 0.3}"]
    recorded = resolved(*own)
    given = {"betas": [0.9, 0.99, 0.999], "weight_decay": 0.3}  # and no `eps`, which the file sets for AdamW
    assert recorded["optimizer"] == {"name": "python:my.optim:Own", "lr": 0.1, "kwargs": given}
    ours = {"betas": None, "eps": 1e-8, "weight_decay": 0.0, "momentum": None}  # other releases recorded these too
    before = {**recorded, "optimizer": {**recorded["optimizer"], **ours}}
    assert find_changes(before, recorded) == {"freely": [], "logged": [], "never": []}
    changed = find_changes(before, resolved(own[0].replace("0.3", "0.5")))
    assert list(map(str, changed["logged"])) == ["optimizer.kwargs.weight_decay 0.3 -> 0.5"]
