"""Parts of the user's own in a YAML: their arguments, what is refused beside them, and what estimates say of them."""

import json
import re
from pathlib import Path

import pytest
import yaml

from llmfoundry_lite.config.changes import find_changes, find_model_changes
from llmfoundry_lite.config.counted_model import describe_unknown_parts
from llmfoundry_lite.config.data_schema import TextDatasetConfig
from llmfoundry_lite.config.fields import schema_keys
from llmfoundry_lite.config.layers import leaf_keys
from llmfoundry_lite.config.load_train import load_train_config
from llmfoundry_lite.config.model_schema import RECORDED_IF_GIVEN, FFNConfig, ModelConfig, as_record
from llmfoundry_lite.config.schema import as_dict
from llmfoundry_lite.convert.huggingface import describe_export_problem
from llmfoundry_lite.errors import ConfigError
from tests.helpers.tiny import tiny_config, write_config

OWN_FFN = "model.ffn_config={ffn_type: 'python:mine:Ffn', depth: 2, kwargs: {rate: 0.5}}"
COSINE = {"name": "cosine_with_warmup", "t_warmup": "10ba", "alpha_f": 0.1}
OWN_NORM = "model.norm_type=python:mine:Norm"


def load(tmp_path: Path, *arguments: str):
    path = write_config(tmp_path / "run.yaml", tiny_config(tmp_path / "data"))
    return load_train_config([path, *arguments]).config


def test_keys_that_are_not_ours_are_arguments(tmp_path):
    config = load(
        tmp_path,
        OWN_FFN,
        "model.ffn_config.moe_num_experts=8",  # of LLM Foundry, which is refused without a part of one's own
        "model.attn_config={attn_type: 'python:mine:Attention', rope: true, gate: {bias: 1}}",
        "scheduler={name: 'python:mine:Schedule', t_warmup: 10ba, peak: 2}",
        "loggers={'python:mine:Log': null}",
    )
    assert config.model.ffn_config.kwargs == {"depth": 2, "rate": 0.5, "moe_num_experts": 8}
    assert config.model.attn_config.kwargs == {"gate": {"bias": 1}} and config.model.attn_config.rope
    assert config.scheduler.kwargs == {"t_warmup": "10ba", "peak": 2}
    assert config.loggers.extra == {"python:mine:Log": {}}

    # A record is read as it was written.
    recorded = tmp_path / "recorded.yaml"
    recorded.write_text(json.dumps(as_dict(config)))
    again = load_train_config([str(recorded)]).config
    assert again.model == config.model and again.scheduler == config.scheduler and again.loggers == config.loggers


@pytest.mark.parametrize(
    ("words", "kwargs", "dropped"),
    [
        (["scheduler.name=python:mine:S", "scheduler.peak=2"], {"peak": 2}, "t_warmup, alpha_f"),
        (["scheduler={name: 'python:mine:S', alpha_f: 0}"], {"alpha_f": 0}, "t_warmup"),
        (["own.yaml"], {"peak": 3}, "t_warmup, alpha_f"),
        (
            ["own.yaml", "scheduler.name=python:mine:S", "scheduler.t_warmup=5ba"],
            {"peak": 3, "t_warmup": "5ba"},
            "alpha_f",
        ),
    ],
)
def test_a_schedule_gets_no_keys_of_another_one(tmp_path, monkeypatch, words, kwargs, dropped):
    monkeypatch.chdir(tmp_path)
    write_config(tmp_path / "run.yaml", tiny_config(tmp_path / "data", scheduler={**COSINE}))
    Path("own.yaml").write_text("scheduler: {name: 'python:mine:S', peak: 3}\n")
    loaded = load_train_config(["run.yaml", *words])
    assert loaded.config.scheduler.kwargs == kwargs
    [note] = [note for note in loaded.notes if "is not given" in note]
    assert note.endswith(
        f"scheduler.name: python:mine:S is not given {dropped}, which an earlier file sets for another one; to pass "
        "them, give them with the name"
    )


MUON = {"name": "muon", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.2}
GROUPED = {"name": "adamw", "lr": 0.1, "param_groups": [{"param_str_match": "norm", "betas": [0.8, 0.9]}]}
MINE = {"name": "python:mine:A", "lr": 0.1, "kwargs": {"rate": 1, "inner": {"a": 1}}, "depth": {"b": 1}, "gate": 1}


@pytest.mark.parametrize(
    ("block", "base", "later", "expected", "dropped"),
    [
        ("optimizer", MUON, {"name": "python:mine:A", "lr": 0.2}, {"lr": 0.2, "kwargs": {}}, "momentum, weight_decay"),
        ("optimizer", MUON, {"name": "python:mine:A", "momentum": 1}, {"kwargs": {"momentum": 1}}, "weight_decay"),
        (
            "optimizer",
            MINE,
            {"name": "python:mine:B", "kwargs": {"inner": {"c": 2}}, "depth": {"d": 2}},
            {"lr": 0.1, "kwargs": {"inner": {"c": 2}, "depth": {"d": 2}}},
            "kwargs.rate, kwargs.inner.a, depth.b, gate",
        ),
        ("optimizer", GROUPED, {"name": "python:mine:A"}, {"lr": 0.1, "param_groups": []}, "param_groups"),
        # The last one is ours, whose schema has no such keys.
        ("optimizer", MINE, {"name": "adamw"}, {"lr": 0.1, "kwargs": {}}, "kwargs.rate, kwargs.inner.a, depth.b, gate"),
        ("scheduler", {"name": "python:mine:A", "peak": 1}, {"name": "constant_with_warmup"}, {"kwargs": {}}, "peak"),
        (
            "model.ffn_config",
            {"ffn_type": "mptglu", "ffn_hidden_size": 64, "ffn_act_fn": {"name": "silu"}},
            {"ffn_type": "python:mine:F"},
            {"ffn_hidden_size": None, "kwargs": {}},
            "ffn_hidden_size, ffn_act_fn.name",
        ),
        (
            "model.attn_config",
            {"attn_type": "python:mine:A", "gate": 1, "rope": True, "kwargs": {"width": 2}},
            {"attn_type": "python:mine:B", "depth": 1},
            {"rope": True, "kwargs": {"depth": 1}},
            "gate, kwargs.width",
        ),
        (
            "model",
            {"norm_type": "python:mine:N", "norm_kwargs": {"tilt": 1}},
            {"norm_type": "rmsnorm"},
            {},
            "norm_kwargs.tilt",
        ),
        (
            "model.attn_config",
            {"qk_ln": True, "norm_type": "python:mine:N", "norm_kwargs": {"tilt": 1}},
            {"norm_type": "python:mine:M"},
            {"qk_ln": True, "norm_kwargs": {}},
            "norm_kwargs.tilt",
        ),
        (
            "train_loader",
            {"name": "python:mine:L", "path": "x", "num_workers": 2},
            {"name": "python:mine:M"},
            {"num_workers": 2, "kwargs": {}},
            "path",
        ),
        (
            "train_loader",
            {"dataset": {"local": "x", "eos_token_id": 3}, "num_workers": 2},
            {"name": "python:mine:L", "rate": 1},
            {"num_workers": 2, "dataset": TextDatasetConfig(eos_token_id=3), "kwargs": {"rate": 1}},
            "dataset.local",
        ),
    ],
)
def test_a_part_gets_no_keys_of_the_one_that_it_replaces(tmp_path, block, base, later, expected, dropped):
    """The first of the files has the rest of the run, the second the block `base`, the third the block `later`."""
    *outer_keys, last_key = block.split(".")
    run = tiny_config(tmp_path / "data")
    if not outer_keys:
        del run[block]
    files = [run]
    for values in (base, later):
        nested = {last_key: values}
        for key in reversed(outer_keys):
            nested = {key: nested}
        files.append(nested)
    paths = [write_config(tmp_path / f"{index}.yaml", values) for index, values in enumerate(files)]

    loaded = load_train_config(paths)
    found = loaded.config
    for name in block.split("."):
        found = getattr(found, name)
    assert {key: getattr(found, key) for key in expected} == expected
    [note] = [note for note in loaded.notes if "is not given" in note]
    assert f" is not given {dropped}, which an earlier file sets for another one; " in note
    assert load_train_config(paths[:2] + paths[1:]).notes == loaded.notes, "naming it twice changes nothing"


OWN_LOSS = "model.loss_fn=python:mine:L"


@pytest.mark.parametrize("part", [OWN_NORM, OWN_LOSS, "model.attn_config.norm_type=python:mine:N"])
@pytest.mark.parametrize(
    ("typo", "error"),
    [
        ("model.tie_word_embedings=false", "unknown key; did you mean model.tie_word_embeddings"),
        ("model.fc_type=other", "fc_type"),
        ("model.attn_config.alibii=true", "did you mean model.attn_config.alibi?"),
    ],
)
def test_a_norm_or_a_loss_hides_no_mistake_in_the_rest_of_its_block(tmp_path, part, typo, error):
    """The mistake is in a file, which the part is named after."""
    key, _, value = typo.partition("=")
    config = tiny_config(tmp_path / "data")
    block = config["model"]
    *outer_keys, last_key = key.split(".")[1:]
    for outer_key in outer_keys:
        block = block.setdefault(outer_key, {})
    block[last_key] = yaml.safe_load(value)
    path = write_config(tmp_path / "run.yaml", config)
    for words in ([], [part]):
        with pytest.raises(ConfigError, match=re.escape(error)):
            load_train_config([path, *words])


def test_settings_of_the_part_that_is_named_again_are_kept(tmp_path):
    """Three files name ours, the user's, and ours again."""
    ours = {"name": "adamw", "lr": 0.1, "betas": [0.7, 0.8], "weight_decay": 0.3}
    layers = [
        tiny_config(tmp_path / "data", optimizer=ours),
        {"optimizer": {"name": "python:mine:A", "gate": 1, "weight_decay": 0.5}},
        {"optimizer": {"name": "adamw"}},
    ]
    paths = [write_config(tmp_path / f"{index}.yaml", values) for index, values in enumerate(layers)]
    loaded = load_train_config(paths)
    assert loaded.config.optimizer.betas == (0.7, 0.8)
    assert loaded.config.optimizer.weight_decay is None, "the user's optimizer had set it last"
    [note] = [note for note in loaded.notes if "is not given" in note]
    assert " is not given weight_decay, gate, which" in note


@pytest.mark.parametrize(
    ("block", "named", "key", "nearest"),
    [
        ("optimizer", {"name": "adamw", "lr": 0.1}, "param_gruops", "param_groups"),
        ("scheduler", {**COSINE}, "t_wramup", "t_warmup"),
        ("model.ffn_config", {"ffn_type": "mptmlp"}, "ffn_act_fnn", "ffn_act_fn"),
        ("model.attn_config", {"attn_type": "multihead_attention"}, "attn_pdrp", "attn_pdrop"),
    ],
)
def test_a_misspelt_key_of_ours_is_refused_also_beside_an_own_part(tmp_path, block, named, key, nearest):
    """A later file names a part of the user's own, which is given none of the keys of the other one."""
    path = write_config(tmp_path / "run.yaml", tiny_config(tmp_path / "data"))
    name_key = next(iter(named))

    def load(key):
        values = {**named, key: 1}
        for name in reversed(block.split(".")):
            values = {name: values}
        base = write_config(tmp_path / "base.yaml", values)
        return load_train_config([path, base, f"{block}.{name_key}=python:mine:P"])

    with pytest.raises(ConfigError) as caught:
        load(key)
    assert str(caught.value).endswith(f"base.yaml: {block}.{key}: unknown key; did you mean {block}.{nearest}?")
    assert any("is not given" in note and "zzz" in note for note in load("zzz").notes)


def test_arguments_that_are_a_reference_belong_to_the_file_that_has_it(tmp_path):
    layers = [
        tiny_config(tmp_path / "data", optimizer=MUON, variables={"mine": {"rate": 2}}),
        {"optimizer": {"name": "python:mine:A", "kwargs": "${variables.mine}"}},
    ]
    paths = [write_config(tmp_path / f"{index}.yaml", values) for index, values in enumerate(layers)]
    assert load_train_config(paths).config.optimizer.kwargs == {"rate": 2}


def test_a_layer_of_unknown_size_that_is_not_sharded_is_noted(tmp_path):
    path = write_config(tmp_path / "run.yaml", tiny_config(tmp_path / "data", fsdp_config=None))
    words = ": python:mine:Ffn is taken to be as large as a layer of ours, with which each device has the whole model"
    assert any(words in note for note in load_train_config([path, OWN_FFN], {"WORLD_SIZE": "2"}).notes)
    assert not any("as large as a layer of ours" in note for note in load_train_config([path, OWN_FFN], {}).notes)
    sharded = "fsdp_config.sharding_strategy=FULL_SHARD"
    for others in ([OWN_FFN, sharded], [OWN_NORM], []):
        assert not any(
            "as large as a layer of ours" in note
            for note in load_train_config([path, *others], {"WORLD_SIZE": "2"}).notes
        )


def test_a_run_without_own_parts_is_recorded_as_earlier_releases_did(tmp_path):
    """They refuse keys that they do not know, and compare configurations that launches and reports record."""
    record = as_dict(load(tmp_path))
    keys_of_model = {*schema_keys(ModelConfig)} - {*leaf_keys(record["model"])}
    keys_of_mup = {"mup.base_width", "mup.base_head_dim", "mup.embedding_mult"}
    assert keys_of_model == {*RECORDED_IF_GIVEN, *keys_of_mup}
    assert "kwargs" not in record["scheduler"] and record["loggers"] == {"wandb": None, "tensorboard": None}
    assert record["optimizer"]["kwargs"] == {} and record["callbacks"]["extra"] == {}  # as they did
    assert as_record(ModelConfig()).keys() == record["model"].keys()

    own = load(tmp_path, OWN_NORM, "model.norm_kwargs={tilt: 1}", "scheduler={name: 'python:mine:S'}").model
    assert as_record(own)["norm_kwargs"] == {"tilt": 1} and "kwargs" not in as_record(own)["ffn_config"]


@pytest.mark.parametrize("kwargs", ["3", "[1]", "text"])
@pytest.mark.parametrize("block", ["optimizer={name: 'python:a:B', lr: 1,", "scheduler={name: 'python:a:B',"])
def test_kwargs_must_be_a_block(tmp_path, block, kwargs):
    with pytest.raises(ConfigError, match=r"\.kwargs: .* given, expected a block of `key: value` lines"):
        load(tmp_path, f"{block} kwargs: {kwargs}}}")


@pytest.mark.parametrize(
    "degree", ["tp_config.tensor_parallel", "cp_config.context_parallel", "pp_config.pipeline_parallel"]
)
@pytest.mark.parametrize(
    "part",
    [
        *(OWN_NORM, OWN_FFN, "model.attn_config.attn_type=python:mine:A"),
        *("model.attn_config.attn_impl=python:mine:attend", "model.loss_fn=python:mine:Loss"),
    ],
)
def test_only_fsdp_divides_a_part(tmp_path, part, degree):
    with pytest.raises(ConfigError) as error:
        load(tmp_path, part, f"{degree}_degree=2")
    key = part.partition("=")[0]
    assert str(error.value).startswith(f"command line: {degree}_degree: 2 given, but nothing is known of how {key}"), (
        error.value
    )
    assert str(error.value).endswith(f"remove {degree}_degree, because only FSDP divides parts of your own")
    load(tmp_path, part, f"{degree}_degree=1")


def test_a_loss_changes_in_no_run_and_stays_with_no_weights(tmp_path):
    ours, own = (as_dict(load(tmp_path, *words)) for words in ([], ["model.loss_fn=python:mine:Loss"]))
    other = as_dict(load(tmp_path, "model.loss_fn=python:mine:Loss", "model.loss_kwargs={rate: 2}"))
    assert list(map(str, find_changes(ours, own)["never"])) == ["model.loss_fn auto -> python:mine:Loss"]
    [change] = find_changes(own, other)["never"]
    assert change.key.startswith("model.loss_kwargs")
    assert find_model_changes(ours, own) == find_model_changes(own, other) == [], "these weights compute the same"
    assert load(tmp_path, "model.loss_fn=python:mine:Loss").own_code == [("model.loss_fn", "python:mine:Loss")]


def test_a_tokenizer_gets_its_own_arguments_and_no_others(tmp_path):
    base = write_config(tmp_path / "base.yaml", tiny_config(tmp_path / "data", tokenizer__kwargs={"use_fast": True}))
    loaded = load_train_config([base, "tokenizer={name: 'python:mine:T', kwargs: {size: 3}, end: x}"])
    assert loaded.config.tokenizer.kwargs == {"size": 3, "end": "x"}
    assert ("tokenizer.name", "python:mine:T") in loaded.config.own_code
    assert not any("has no effect" in note for note in loaded.notes)
    assert as_dict(loaded.config)["tokenizer"] == {"name": "python:mine:T", "kwargs": {"size": 3, "end": "x"}}
    with pytest.raises(ConfigError, match=r"tokenizer\.name: .*expected an import path, python:package\.module:Thing"):
        load(tmp_path, "tokenizer.name=python:mine")


def test_a_part_cannot_be_exported():
    own = ModelConfig(norm_type="python:mine:Norm", ffn_config=FFNConfig(ffn_type="python:mine:Ffn"))
    assert describe_export_problem(own) == (
        "model.norm_type python:mine:Norm, model.ffn_config.ffn_type python:mine:Ffn: no format of transformers has "
        "parts that are not of this package, so the model cannot be exported; keep the training checkpoint, which "
        "holds everything"
    )


def test_estimates_name_the_parts_that_they_do_not_know(tmp_path):
    config = load(tmp_path, OWN_NORM, OWN_FFN)
    assert describe_unknown_parts(config.model) == (
        "python:mine:Norm (model.norm_type), python:mine:Ffn (model.ffn_config.ffn_type)"
    )
    assert describe_unknown_parts(load(tmp_path).model) == ""
    assert hash(config.model) == hash(load(tmp_path, OWN_NORM, OWN_FFN).model)


@pytest.mark.parametrize(
    ("run", "overlay", "words", "expected"),
    [
        (
            "python:mine:f",
            "sdpa",
            (),
            r"overlay\.yaml: .*attn_impl: sdpa given, but python:mine:f of .*run\.yaml belongs",
        ),
        ("'${oc.env:F,python}:mine:f'", "sdpa", (), r"overlay\.yaml: .*attn_impl: sdpa given, but \$\{oc"),
        ("sdpa", "python:mine:f", (), r"overlay\.yaml: .*attn_impl: python:mine:f given, but code of your own belongs"),
        ("sdpa", "'${oc.env:F,python}:mine:f'", (), r"overlay\.yaml: .*: python:mine:f given, but code of your own"),
        ("python:mine:f", "sdpa", ("attn_impl=python:mine:f",), None),
        ("python:mine:f", "python:mine:g", ("attn_impl=reference",), None),
        ("sdpa", "reference", (), None),
    ],
)
def test_an_overlay_neither_names_nor_replaces_code_of_the_model(tmp_path, run, overlay, words, expected):
    path = tmp_path / "overlay.yaml"
    path.write_text(f"overlay: hardware\nmodel: {{attn_config: {{attn_impl: {overlay}}}}}\n")
    config = tiny_config(tmp_path / "data")
    config["model"]["attn_config"] = {"attn_impl": yaml.safe_load(run)}
    arguments = [write_config(tmp_path / "run.yaml", config), f"hardware={path}"]
    arguments += [f"model.attn_config.{word}" for word in words]
    if expected is None:
        load_train_config(arguments)
        return
    with pytest.raises(ConfigError, match=expected):
        load_train_config(arguments)
