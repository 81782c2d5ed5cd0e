"""Short names of companions' parts: what a launch makes of them, and that a record with one runs nothing."""

import json

import pytest

from llmfoundry_lite import companions
from llmfoundry_lite.companions import Companion
from llmfoundry_lite.config import part_names
from llmfoundry_lite.config.build import build_block
from llmfoundry_lite.config.fields import schema_keys, settings_along
from llmfoundry_lite.config.load_train import load_train_config
from llmfoundry_lite.config.model_schema import ModelConfig
from llmfoundry_lite.config.replayed import select_recorded
from llmfoundry_lite.config.schema import TrainConfig, as_dict
from llmfoundry_lite.errors import ConfigError
from llmfoundry_lite.own_code import PREFIX

TINY = Companion(
    parts={
        "norms": {"tilted": "tiny.norms:Tilted", "rmsnorm": "tiny.norms:Other"},
        "ffns": {"mixed": "tiny.ffns:Mixed"},
        "attention_classes": {"gated": "tiny.attention:Gated"},
        "attention_implementations": {"capped": "tiny.attention:capped"},
        "schedulers": {"triangle": "tiny.schedules:Triangle"},
        "optimizers": {"adalr_lion": "tiny.optimizers:AdaLRLion"},
        "dataloaders": {"books": "tiny.loaders:load"},
        "callbacks": {"heartbeat": "tiny.callbacks:Beat", "nan_monitor": "tiny.callbacks:NaN"},
        "loggers": {"tail": "tiny.loggers:Tail"},
    }
)
GIVEN = {
    "max_seq_len": 8,
    "global_train_batch_size": 8,
    "max_duration": "4ba",
    "tokenizer": {"name": "folder"},
    "model": {
        "norm_type": "tilted",
        "norm_kwargs": {"tilt": 0.1},
        "ffn_config": {"ffn_type": "mixed", "depth": 2},
        "attn_config": {"attn_type": "gated", "attn_impl": "capped", "qk_ln": True, "norm_type": "tilted"},
    },
    "scheduler": {"name": "triangle", "peak": 0.5},
    "optimizer": {"name": "adalr_lion", "lr": 0.1, "slope": 3},
    "train_loader": {"name": "books", "shelf": "a"},
    "eval_loader": {"name": "books", "shelf": "b"},
    "callbacks": {"heartbeat": {"every": 3, "loud": True}, "nan_monitor": None},
    "loggers": {"tail": {"path": "x"}},
}


def forget() -> None:
    part_names.find_names.cache_clear()


@pytest.fixture(autouse=True)
def companion(monkeypatch):
    monkeypatch.setattr(companions, "find_companions", lambda: [TINY])
    forget()
    yield
    forget()


def load(*arguments, **given):
    return load_train_config(["mpt-125m", *arguments], {}, given or None)


def test_a_short_name_means_what_its_import_path_means(tmp_path):
    run = tmp_path / "run.yaml"
    run.write_text(json.dumps({**GIVEN, "variables": {"norm": "tilted"}}))
    changes = ["model.norm_type=${variables.norm}", "callbacks.heartbeat.every=4"]
    loaded = load_train_config([str(run), *changes], {})
    config = loaded.config
    assert dict(config.own_code) == {
        "model.norm_type": "python:tiny.norms:Tilted",
        "model.attn_config.norm_type": "python:tiny.norms:Tilted",
        "model.attn_config.attn_type": "python:tiny.attention:Gated",
        "model.attn_config.attn_impl": "python:tiny.attention:capped",
        "model.ffn_config.ffn_type": "python:tiny.ffns:Mixed",
        "optimizer.name": "python:tiny.optimizers:AdaLRLion",
        "scheduler.name": "python:tiny.schedules:Triangle",
        "train_loader.name": "python:tiny.loaders:load",
        "eval_loader.name": "python:tiny.loaders:load",
        "callbacks": "python:tiny.callbacks:NaN",
        "loggers": "python:tiny.loggers:Tail",
    }
    assert config.model.ffn_config.kwargs == {"depth": 2} and config.optimizer.kwargs["slope"] == 3
    assert config.callbacks.extra["python:tiny.callbacks:Beat"] == {"every": 4, "loud": True}
    assert "tilted" not in str({key: value for key, value in as_dict(config).items() if key != "variables"})
    assert "scheduler.name: triangle is python:tiny.schedules:Triangle" in loaded.notes
    assert "callbacks: heartbeat is python:tiny.callbacks:Beat" in loaded.notes


def test_a_program_s_own_mapping_stays_as_it_is():
    callbacks = {"heartbeat": {"every": 3}}
    assert "python:tiny.callbacks:Beat" in load(callbacks=callbacks, run_name="x").config.callbacks.extra
    assert callbacks == {"heartbeat": {"every": 3}}


def test_every_key_that_takes_code_takes_short_names():
    keys_of_code = [key for key in schema_keys(TrainConfig) if PREFIX in settings_along(TrainConfig, key)[-1].choices]
    keys = [key for keys in companions.PART_KEYS.values() for key in keys if not key.endswith(".*")]
    assert sorted(keys_of_code) == sorted(keys)


def test_a_name_of_ours_stays_ours_and_that_is_said(capsys):
    assert load("model.norm_type=rmsnorm").config.model.norm_type == "rmsnorm"
    assert capsys.readouterr().err == (
        "warning: companion parts, norms, rmsnorm: left out: this package has one of that name\n"
    )


@pytest.mark.parametrize(
    ("given", "refused"),
    [
        ("model.norm_type=tiltd", "model.norm_type: 'tiltd' is not known; did you mean tilted?"),
        ("model.norm_type=x", "model.norm_type: 'x' is not known; use rmsnorm or low_precision_rmsnorm, layernorm or"),
        ("scheduler.name=x", "scheduler.name: 'x' is not known; expected constant_with_warmup, cosine_with_warmup,"),
        ("optimizer.name=adalr_loin", "optimizer.name: 'adalr_loin' is not known; did you mean adalr_lion?"),
        ("callbacks.heartbet={}", "callbacks.heartbet: unknown key; did you mean callbacks.heartbeat?"),
        ("loggers.file={}", "loggers.file: unknown key; valid keys here: wandb, tensorboard, tail, and python:"),
    ],
)
def test_an_unknown_name_is_answered_with_those_of_companions_too(given, refused):
    with pytest.raises(ConfigError) as caught:
        load(given)
    assert str(caught.value).startswith(f"command line: {refused}")


def test_one_callback_by_both_names_is_refused():
    with pytest.raises(ConfigError, match=r"^callbacks: .* are the same; keep one of them$"):
        load(callbacks={"heartbeat": {}, "python:tiny.callbacks:Beat": {}})


def test_an_overlay_may_not_name_code_by_a_short_name(tmp_path):
    overlay = tmp_path / "here.yaml"
    overlay.write_text("overlay: hardware\nmodel: {attn_config: {attn_impl: capped}}\n")
    with pytest.raises(
        ConfigError, match=r"here.yaml: model.attn_config.attn_impl: python:tiny.attention:capped given"
    ):
        load(str(overlay))


def test_a_record_with_a_short_name_runs_nothing():
    """A launch writes none, so that somebody has written it there by hand."""
    with pytest.raises(ConfigError, match=r"norm_type: 'tilted' is not known; use rmsnorm"):
        build_block(ModelConfig, {"norm_type": "tilted"})
    record = as_dict(load().config)
    record["model"]["norm_type"] = "tilted"
    record["optimizer"] = {"name": "adalr_lion", "lr": 0.1}
    with pytest.raises(ConfigError) as caught:
        select_recorded(record, [], trusts_code=False)
    for name in ("model.norm_type python:tiny.norms:Tilted", "optimizer.name python:tiny.optimizers:AdaLRLion"):
        assert name in str(caught.value)
