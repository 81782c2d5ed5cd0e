"""The part of a recorded configuration that a replay takes; its text stays text, and its code stays outside."""

import pytest

from llmfoundry_lite.config.fields import keys_of
from llmfoundry_lite.config.layers import read_layers
from llmfoundry_lite.config.merge import merge_layers
from llmfoundry_lite.config.replayed import as_given, select_recorded
from llmfoundry_lite.config.schema import TrainConfig
from llmfoundry_lite.config.yaml_text import dump_record
from llmfoundry_lite.errors import ConfigError

CONFIG = {
    "seed": 0,
    "optimizer": {"name": "adamw", "lr": 0.1},
    "train_loader": {"dataset": {"local": "here", "stages": [{"streams": {"a": {"local": "there"}}}]}},
    "callbacks": {"extra": {"python:a:B": {"x": 1}}, "profiler": {"folder": "/"}},
    "environment": {},
    "run_name": "x",
    "save_folder": "s3://theirs",
    "unknown": 1,
}
USED = {
    *("accumulate_train_batch_on_tokens", "algorithms", "compile_config", "cp_config", "deterministic"),
    *("batch_size_schedule", "seq_len_schedule"),
    *("device_train_microbatch_size", "exact_sums", "fsdp_config", "global_train_batch_size", "loss_chunk_mib"),
    *("max_duration", "max_seq_len", "max_skipped_batches", "model", "on_non_finite", "optimizer", "pp_config"),
    *("precision", "scheduler", "seed", "tokenizer", "tp_config", "train_loader"),
}
TEXTS = [
    "1e5",
    "010",
    "1:30",
    "yes",
    "null",
    "~",
    "",
    "🙂",
    "a: b",
    "x\ny",
    "\x85",
    "- a",
    "!!python/name:os",
]


def select(given=(), *, trusts_code=False, **changes):
    return select_recorded(CONFIG | changes, given, trusts_code=trusts_code)


def test_keys_that_decide_arithmetic_or_data_are_used_and_others_are_left_out():
    keys = {name: key.setting for name, key in keys_of(TrainConfig).items()}
    assert {name for name, one in keys.items() if one.replay == "trusted"} == {"environment"}
    assert {name for name, one in keys.items() if one.replay == "used"} == USED
    assert {name for name, one in keys.items() if one.rule == "never"} <= USED


def test_what_decides_arithmetic_or_data_is_taken_and_nothing_else():
    assert select() == {key: CONFIG[key] for key in ("seed", "optimizer", "train_loader", "environment")}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"optimizer": {"name": "python:a:B"}}, r"optimizer\.name python:a:B"),
        ({"train_loader": {"name": "python:a:B"}}, r"train_loader\.name python:a:B"),
        ({"algorithms": {"x": [{"y": "python:a:B"}]}}, r"algorithms\.x\[0\]\.y python:a:B"),
        (
            {"environment": {"LD_PRELOAD": "x.so", "Y": "1"}},
            r"environment LD_PRELOAD, Y; .*leave.* out: environment=\{\}$",
        ),
        ({"compile_config": {"mode": "default", "options": {"cpp.cxx": "x"}}}, r"compile_config\.options; if"),
    ],
)
def test_code_is_refused_by_its_key_unless_it_is_trusted(changes, words):
    with pytest.raises(ConfigError, match=f"^replay: the run's configuration brings code of its author: {words}"):
        select(**changes)
    trusted = select(trusts_code=True, **changes)
    assert trusted.items() >= changes.items() and trusted["callbacks"] == {"extra": {"python:a:B": {"x": 1}}}
    assert select([*changes], **changes).keys().isdisjoint(changes), "what is given instead is not taken"


def test_plain_arguments_of_the_compiler_are_no_code():
    plain = {"mode": "max-autotune", "dynamic": False, "fullgraph": True, "backend": "inductor"}
    assert select(compile_config=plain)["compile_config"] == plain


def test_text_that_would_be_resolved_is_refused_and_asked_for_unless_it_is_given():
    dataset = {"local": "/b/${oc.env:SECRET}", "stages": [{"streams": {"a": {"local": "${seed}"}}}]}
    recorded = {"train_loader": {"dataset": dataset}}
    block = r"train_loader\.dataset"
    words = rf"^replay: {block}\.local is /b/\$\{{oc\.env:SECRET\}}, {block}\.stages\[0\]\.streams\.a\.local is "
    words += rf"\$\{{seed\}} in the run, which is not resolved here; give {block}\.local=… {block}\.stages=…$"
    with pytest.raises(ConfigError, match=words):
        select(**recorded)
    given = ["train_loader.dataset.local", "train_loader.dataset.stages"]
    assert select(given, **recorded)["train_loader"] == {"dataset": {}}
    assert select(loggers={"x": "${oc.env:SECRET}"}), "where nothing uses it, it may stand"


@pytest.mark.parametrize("remote", ["s3://${oc.env:BUCKET}/x", "https://me:***@host/x"])
def test_a_remote_that_is_not_whole_is_none(remote):
    dataset = {"local": "x", "remote": remote, "streams": {"a": {"remote": remote}, "b": {"remote": "s3://whole"}}}
    found = select(train_loader={"dataset": dataset})["train_loader"]["dataset"]
    assert found == {"local": "x", "remote": None, "streams": {"a": {"remote": None}, "b": {"remote": "s3://whole"}}}


def test_an_optimizer_of_the_users_keeps_the_arguments_that_it_was_called_with():
    block = {"name": "python:a:B", "lr": 0.1, "betas": None, "eps": 1e-8, "kwargs": {"k": 2}}
    assert as_given({"optimizer": block})["optimizer"] == {"name": "python:a:B", "lr": 0.1, "kwargs": {"k": 2}}
    assert as_given({"optimizer": block | {"name": "adamw"}})["optimizer"]["eps"] == 1e-8
    loader = {"name": "python:a:B", "kwargs": {}, "dataset": {"local": "x", "eos_token_id": 3}}
    assert as_given({"train_loader": loader})["train_loader"]["dataset"] == {"eos_token_id": 3}


@pytest.mark.parametrize("text", TEXTS, ids=ascii)
def test_text_is_read_again_as_it_was(tmp_path, text):
    values = {"x": text, "y": [text, 1e-05, 1e300, True, None, (0.9, 0.95)]}
    (tmp_path / "x.yaml").write_text(dump_record(values, keep_variables=False))
    found = merge_layers(read_layers([str(tmp_path / "x.yaml")]), TrainConfig)
    assert found == {"x": text, "y": [text, 1e-05, 1e300, True, None, [0.9, 0.95]]}
