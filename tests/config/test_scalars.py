"""Text stays as it was written where the schema says text; numbers are read as LLM Foundry reads them, or refused."""

import dataclasses
import json
import typing
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from llmfoundry_lite.checkpoint.open_folder import open_folder
from llmfoundry_lite.config.changes import find_changes
from llmfoundry_lite.config.eval_schema import EvalConfig, GauntletConfig, TaskConfig
from llmfoundry_lite.config.fields import keys_of
from llmfoundry_lite.config.layers import read_layers
from llmfoundry_lite.config.load_eval import load_eval_config
from llmfoundry_lite.config.load_train import load_train_config
from llmfoundry_lite.config.merge import lay_over, merge_layers
from llmfoundry_lite.config.scalars import AMBIGUOUS_NUMBER
from llmfoundry_lite.config.schema import TrainConfig, as_dict
from llmfoundry_lite.config.spans import Duration
from llmfoundry_lite.config.yaml_text import dump_record, dump_yaml, read_record, read_yaml
from llmfoundry_lite.errors import CheckpointError, ConfigError, mask_credentials

AWKWARD = """
    010 007 008 5e12345 7e40404 5e12 1:30 3:55:00 1_000 0x10 0b11 1.10 1e-3 +5 -0 .5 5. .inf .nan 010e 1.2.3 0o17
    on off yes no No true True 2026-11-28 2026-11-28T01:02:03
"""
SPELLINGS = AWKWARD.split()
QUOTED = '"${v}"'
BLOCKS = [TrainConfig, EvalConfig, TaskConfig, GauntletConfig]


def text_fields(block: type, path: tuple[str, ...] = ()) -> typing.Iterator[tuple[str, ...]]:
    """Yield the path of every key that takes text and no number. [] stands for a list, 010 for a name."""
    for name, key in keys_of(block).items():
        hint = key.setting.written or key.hint
        options = typing.get_args(hint) if typing.get_origin(hint) is not dict and typing.get_args(hint) else (hint,)
        if typing.get_origin(hint) is list:
            options = (hint,)
        if str in options and not {int, float, bool} & set(options):
            yield (*path, name)
        yield from ((*path, name, "[]") for one in options if one == list[str])
        yield from ((*path, name, "010") for one in options if one == dict[str, str])
        if key.block is not None:
            yield from text_fields(key.block, (*path, name, *{list: ["[]"], dict: ["010"]}.get(key.container, [])))


CASES = [(block, path) for block in BLOCKS for path in text_fields(block)]


def nested(path: tuple[str, ...], value: str) -> str:
    """Write the YAML, in one line."""
    for part in reversed(path):
        value = f"[{value}]" if part == "[]" else f"{{{part}: {value}}}"
    return value


def found(values: Any, path: tuple[str, ...]) -> Any:
    for part in path:
        values = values[0] if part == "[]" else values[part]
    return values


@pytest.mark.parametrize("block", BLOCKS)
def test_text_arrives_as_it_was_written(block, tmp_path):
    """From a file, from the command line, and through a variable: each field in some spellings, all fields in all."""
    file, variables = tmp_path / "x.yaml", tmp_path / "v.yaml"
    for number, path in enumerate(path for one, path in CASES if one is block):
        for spelling in ("010", *SPELLINGS[number % 27 :: 27]):
            file.write_text(f"{nested(path, spelling)}\n")
            variables.write_text(f"v: {spelling}\n")
            through = f"{path[0]}={nested(path[1:], QUOTED)}"
            direct = f"{path[0]}={nested(path[1:], spelling)}"
            for arguments in ([str(file)], [direct], [str(variables), through], [f"v={spelling}", through]):
                value = found(merge_layers(read_layers(arguments, for_training=False), block), path)
                assert (value, type(value)) == (spelling, str), arguments


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_stays_in_text(spelling):
    arguments = [
        f"v={spelling}",
        "run_name=${v}",
        f"save_folder={spelling}",
        f"loggers.wandb.tags=[{spelling}, '${{v}}']",
    ]
    values = merge_layers(read_layers(arguments, for_training=False), TrainConfig)
    assert values["run_name"] == values["save_folder"] == spelling
    assert values["loggers"]["wandb"]["tags"] == [spelling, spelling]


def test_there_are_text_fields_in_every_block():
    """The table above would be empty if it did not find them."""
    names = {(block.__name__, ".".join(path)) for block, path in CASES}
    assert len(names) > 90
    assert {
        ("TrainConfig", "loggers.wandb.tags.[]"),
        ("TrainConfig", "train_loader.dataset.streams.010.local"),
        ("TrainConfig", "environment.010"),
        ("TrainConfig", "icl_tasks"),
        ("EvalConfig", "models.010"),
    } <= names


def test_a_variable_is_text_in_text_and_a_number_in_a_number():
    arguments = ["v=1_000", "seed=${v}", "run_name=${v}", "save_folder=s3://b/${v}/{run_name}", "metadata.n=${v}"]
    values = merge_layers(read_layers(arguments, for_training=False), TrainConfig)
    assert values == {
        "v": 1000,
        "seed": 1000,
        "run_name": "1_000",
        "save_folder": "s3://b/1_000/{run_name}",
        "metadata": {"n": 1000},
    }


RUN = """\
model: {name: mpt_causal_lm, d_model: 64, n_heads: 4, n_layers: 2, vocab_size: 512, max_seq_len: 128}
max_seq_len: 128
tokenizer: {name: gpt2}
train_loader: {name: text, dataset: {local: data, split: train}}
optimizer: {name: decoupled_adamw, lr: 1.0e-3}
scheduler: {name: cosine_with_warmup, t_warmup: 10ba}
max_duration: 100ba
global_train_batch_size: 8
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(RUN)


def load(*arguments: str, **environ: str) -> TrainConfig:
    return load_train_config(["run.yaml", *arguments], environ).config


@pytest.mark.parametrize("name", ["010", "008", "5e12345", "7e40404", "1_000", "no", "0x10"])
def test_runs_of_different_names_have_different_folders(run, name):
    config = load(f"run_name={name}", "variables.data=010", "train_loader.dataset.local=${variables.data}")
    assert (config.run_name, config.run_folder, config.train_loader.dataset.local) == (name, f"runs/{name}", "010")
    assert load(RUN_NAME=name).run_folder == f"runs/{name}"
    Path("config.yaml").write_text(dump_record(as_dict(config)))
    again = load_train_config(["config.yaml"], {}).config
    assert as_dict(again) == as_dict(config)
    assert yaml.safe_load(Path("config.yaml").read_text()) == json.loads(json.dumps(as_dict(config)))


def test_a_path_that_looks_like_a_variable_is_recorded_for_launches_and_for_readers(run):
    Path("odd.yaml").write_text(r"tokenizer: {name: 'a\${b}'}" + "\n" + r"metadata: {note: 'x\\\${y}\${z}'}")
    config = load("odd.yaml")
    assert (config.tokenizer.name, config.metadata["note"]) == ("a${b}", "x\\${y}${z}")
    Path("config.yaml").write_text(dump_record(as_dict(config)))
    assert as_dict(load_train_config(["config.yaml"], {}).config) == as_dict(config)
    assert read_record(Path("config.yaml").read_bytes()) == json.loads(json.dumps(as_dict(config)))


def test_a_whole_float_is_a_count(run):
    loader = load("train_loader.dataset.epoch_size=1e6", "train_loader.dataset.cache_limit=1e11").train_loader
    assert (loader.dataset.epoch_size, loader.dataset.cache_limit) == (10**6, 10**11)
    config = load("max_duration=2.0", "save_interval=1e2", "device_train_microbatch_size=8.0", "run_name=1e2")
    assert (config.max_duration, config.save_interval.span) == (Duration(2, "ep"), Duration(100, "ep"))
    assert (config.max_duration.written, config.save_interval.written, config.device_train_microbatch_size) == (
        2,
        100,
        8,
    )
    assert config.run_name == "1e2"


def test_a_span_is_parsed_once_and_recorded_as_it_was_written(run):
    config = load("max_duration=1_000ba", "save_interval=90s", "retry_for=1:30", "eval_interval=0")
    assert config.max_duration == Duration(1000, "ba") and config.save_interval.seconds == 90
    assert config.retry_for.seconds == 90 and not config.evaluates
    written = {"max_duration": "1_000ba", "save_interval": "90s", "retry_for": "1:30", "eval_interval": 0}
    assert {key: as_dict(config)[key] for key in written} == written


@pytest.mark.parametrize(
    "text", ["\\" * 10**6, "\\" * 10**6 + "${", "\\" * 10**6 + "${oc.x}"], ids=("none", "one", "oc")
)
def test_a_megabyte_of_backslashes_is_recorded_and_read(text):
    """In linear time: a search from each of them would take hours."""
    assert read_record(dump_record({"x": text})) == {"x": text}


def test_an_argument_has_no_comments(run):
    config = load("save_folder=/data/run #1", "loggers.wandb.tags=[a, 'b #2'] # c", "tokenizer.name='x #3'")
    assert (config.save_folder, config.loggers.wandb.tags) == ("/data/run #1", ["a", "b #2"])
    assert (config.tokenizer.name, load("run_folder=#1").run_folder) == ("x #3", "#1")
    with pytest.raises(ConfigError, match="seed: '5 #1' given, expected a whole number"):
        load("seed=5 #1")


def test_null_leaves_a_key_out(run):
    for nothing in ("null", "~"):
        assert load(f"run_name={nothing}", f"save_folder={nothing}").run_folder == "runs/run"
    assert load("run_name='null'").run_name == "null"


@pytest.mark.parametrize(
    ("argument", "problem"),
    {
        "seed=010": "'010' given, expected a whole number; YAML 1.1 reads it as octal, 8, so write that or 10",
        "dist_timeout=10:00": "'10:00' given, expected a number; YAML 1.1 reads it to base 60, so write 600",
        "model.n_layers=-0_11": "'-0_11' given, expected a whole number; YAML 1.1 reads it as octal, -9, so write that "
        "or -11",
        "seed=008": "'008' given, expected a whole number",
        "seed='010.5'": "'010.5' given, expected a whole number",
        "dist_timeout=1:30.5": "'1:30.5' given, expected a number; YAML 1.1 reads it to base 60, so write 90.5",
    }.items(),
)
def test_a_number_of_two_meanings_is_refused_with_both(run, argument, problem):
    with pytest.raises(ConfigError) as error:
        load(argument)
    assert str(error.value) == f"command line: {argument.partition('=')[0]}: {problem}"


def test_a_time_with_colons_is_a_time(run):
    config = load("max_wall_time=1:30", "seed=07")
    assert config.max_wall_time is not None
    assert (config.max_wall_time.seconds, config.max_wall_time.written, config.seed) == (90, "1:30", 7)


def test_an_evaluation_keeps_names_of_models_tasks_and_suite(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text('{"query": "a", "choices": ["b", "c"], "gold": 0}\n')
    task = "{label: 1_0, icl_task_type: multiple_choice, dataset_uri: rows.jsonl, num_fewshot: 0"
    task += ", question_prelimiter: 0x10}"  # LLM Foundry's old name
    Path("suite.yaml").write_text(f"models: {{010: runs/a, 8: 5e12}}\nsuite: 5e12345\nicl_tasks: [{task}]\n")
    config, tasks, *_ = load_eval_config(["suite.yaml", "models.1e3=0x10"])
    assert config.models == {"010": "runs/a", "8": "5e12", "1e3": "0x10"}
    assert (config.suite, tasks[0].label) == ("5e12345", "1_0")
    assert tasks[0].prelimiter == "0x10"
    Path("old.yaml").write_text(
        f"models: [{{model_name: 1e3, model: {{name: mpt_causal_lm}}, load_path: 5e12}}]\nicl_tasks: [{task}]\n"
    )
    assert load_eval_config(["old.yaml"]).config.models == {"1e3": "5e12"}


# ---------------------------------------------------------------------------------------------------- YAML text


@given(st.text(st.sampled_from("0123456789+-._eExbonf:"), min_size=1, max_size=8))
def test_numbers_are_those_of_omegaconf_but_for_two_meanings(text):
    try:
        theirs = OmegaConf.from_dotlist([f"x={text}"]).x
    except Exception:
        return
    ours = read_yaml(text)
    if isinstance(ours, dict | list):
        return
    ours = getattr(ours, "value", ours)
    if isinstance(theirs, str) or theirs is None:
        assert ours == theirs or (isinstance(ours, float) and set("._") & set(text))  # -.5 and 1_.e5 are numbers here
    elif theirs == ours or theirs != theirs:
        assert type(theirs) is type(ours)
    else:
        assert ours == text
        assert AMBIGUOUS_NUMBER.fullmatch(text) or theirs == float("inf") or ":" in text


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(), st.lists))
def test_text_that_looks_like_something_else_is_written_in_quotes(value):
    def plain(read: Any) -> Any:
        return [plain(one) for one in read] if isinstance(read, list) else getattr(read, "value", read)

    assert plain(read_yaml(dump_yaml({"x": [value]}))["x"]) == [value]


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_is_written_in_quotes_where_it_must(spelling):
    assert read_yaml(dump_yaml([spelling])) == [spelling] == yaml.safe_load(dump_yaml([spelling]))
    assert not hasattr(read_yaml(dump_yaml([spelling]))[0], "value")
    assert dump_yaml([spelling]).startswith("- '") == (spelling not in ("010e", "1.2.3"))


@pytest.mark.parametrize(
    ("text", "problem"),
    {
        "a: 1\na: 2": "found duplicate key a",
        "x: &x [*x]": "an alias within its own value",
        "a: &a [1,1,1,1,1,1,1,1,1]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a,*a]\nc: &c [*b,*b,*b,*b,*b,*b,*b,*b,*b]\n"
        "d: &d [*c,*c,*c,*c,*c,*c,*c,*c,*c]\n": "aliases make more than 100 values",
        "[" * 5000 + "]" * 5000: "nested too deeply",
        "x: !!python/object/apply:os.system [ls]": "could not determine a constructor",
        "x: !!binary aGk=": "could not determine a constructor",
    }.items(),
)
def test_yaml_that_says_nothing_we_can_record_is_refused(text, problem):
    with pytest.raises(yaml.YAMLError, match=problem):
        read_yaml(text)


def test_merge_keys_still_work():
    assert read_yaml("a: &a {x: 1, y: 2}\nb: {<<: *a, y: 3}")["b"] == {"x": "1", "y": "3"}


# ------------------------------------------------------------------------------------------- environment variables

SECRET = "hunter2 ${x},'q'"
WITH_SECRETS = """
variables: {token: "${oc.env:SECRET}", url: "s3://u:${oc.env:SECRET}@h"}
loggers:
  wandb: {entity: "team-${oc.env:SECRET}", tags: ["${oc.env:SECRET}"], init_kwargs: {key: "${variables.token}"}}
callbacks: {"python:mine:Hook": {token: "${oc.decode:${oc.env:QUOTED}}", url: "${variables.url}/x"}}
save_folder: s3://u:${oc.env:SECRET}@h/{run_name}
train_loader: {dataset: {remote: "${variables.url}"}}
tokenizer: {name: "${oc.env:SECRET,'a, b'}"}
environment: {HF_TOKEN: "${oc.env:SECRET}"}
metadata: {note: "${oc.env:ABSENT,${oc.env:SECRET}}"}
"""


@pytest.fixture
def secret(run, monkeypatch):
    monkeypatch.setenv("SECRET", SECRET)
    monkeypatch.setenv("QUOTED", "'hunter2 too'")
    Path("secret.yaml").write_text(WITH_SECRETS)
    return load("secret.yaml")


def test_text_of_a_variable_is_used_and_recorded_as_it_was_written(secret):
    wandb, hook = secret.loggers.wandb, secret.callbacks.extra["python:mine:Hook"]
    assert (wandb.entity, wandb.tags, wandb.init_kwargs) == (f"team-{SECRET}", [SECRET], {"key": SECRET})
    assert (hook["token"], hook["url"]) == ("hunter2 too", f"s3://u:{SECRET}@h/x")
    assert secret.save_folder == f"s3://u:{SECRET}@h/run" and secret.tokenizer.name == SECRET
    recorded = as_dict(secret)
    assert "hunter2" not in dump_record(recorded) + json.dumps(recorded)
    assert recorded["loggers"]["wandb"]["init_kwargs"] == {"key": "${oc.env:SECRET}"}
    assert recorded["save_folder"] == "s3://u:${oc.env:SECRET}@h/{run_name}"
    assert recorded["metadata"] == {"note": "${oc.env:ABSENT,${oc.env:SECRET}}"}


def test_a_launch_from_the_record_resolves_variables_again(secret, monkeypatch):
    Path("config.yaml").write_text(dump_record(as_dict(secret)))
    again = load_train_config(["config.yaml"], {}).config
    assert again == dataclasses.replace(secret, optimizer=again.optimizer)
    assert as_dict(again) == as_dict(secret)
    monkeypatch.setenv("SECRET", "other")
    assert load_train_config(["config.yaml"], {}).config.tokenizer.name == "other"


def test_whatever_decides_what_is_trained_is_recorded_as_it_came_out(run, monkeypatch):
    for name, value in {
        "LR": "0.5",
        "NAME": "lion",
        "SPAN": "7ba",
        "SPLIT": "train",
        "RUN": "x",
        "YES": "true",
    }.items():
        monkeypatch.setenv(name, value)
    config = load(
        "optimizer.lr=${oc.decode:${oc.env:LR}}",
        "optimizer.name=${oc.env:NAME}",
        "max_duration=${oc.env:SPAN}",
        "train_loader.dataset.split=${oc.env:SPLIT}",
        "train_loader.dataset.shuffle=${oc.decode:${oc.env:YES}}",
        "run_name=${oc.env:RUN}",
        "run_folder=runs/${oc.env:RUN}",
    )
    recorded = as_dict(config)
    assert "oc." not in json.dumps(recorded)
    assert (recorded["optimizer"]["lr"], recorded["optimizer"]["name"], recorded["run_name"]) == (0.5, "lion", "x")
    before = as_dict(load("optimizer.lr=0.25", "optimizer.name=lion"))
    assert "optimizer.lr 0.25 -> 0.5" in map(str, find_changes(before, recorded)["logged"])


def test_arguments_of_ones_own_optimizer_and_loader_are_recorded_as_they_came_out(run, monkeypatch):
    monkeypatch.setenv("KIND", "x")
    values = {"kwargs": {"kind": "${oc.env:KIND}"}}
    own = {"optimizer": {"name": "python:a:B", **values}, "train_loader": {"name": "python:a:B", **values}}
    Path("own.yaml").write_text(dump_yaml(own | {"metadata": {"kind": "${oc.env:KIND}"}}))
    read = merge_layers(read_layers(["own.yaml"]), TrainConfig)
    assert read["optimizer"]["kwargs"] == read["train_loader"]["kwargs"] == {"kind": "x"}
    assert read["metadata"]["kind"].written == "${oc.env:KIND}"
    assert not hasattr(read["optimizer"]["kwargs"]["kind"], "written")


def test_a_secret_among_these_arguments_is_recorded_as_it_was_written(run, monkeypatch):
    monkeypatch.setenv("KIND", "x")
    monkeypatch.setenv("SOME_TOKEN", "hunter2")
    inner = {"auth": {"api_key": "${oc.env:KIND}"}, "login": "${oc.env:SOME_TOKEN}"}
    own = {"name": "python:a:B", "kwargs": inner}
    Path("run.yaml").write_text(dump_yaml({**yaml.safe_load(RUN), "train_loader": own}))
    config = load()
    assert config.train_loader.kwargs == {"auth": {"api_key": "x"}, "login": "hunter2"}
    assert as_dict(config)["train_loader"]["kwargs"] == inner
    assert mask_credentials("no such login: hunter2") == "no such login: ***"


@pytest.mark.parametrize(
    ("chosen", "recorded"),
    {
        "${variables.${oc.env:WHICH}}": "s3://x/data",
        "${oc.select:variables.${oc.env:WHICH},zz}": "s3://x/data",
        "${variables.${variables.which}}": "s3://x/data",
        "${variables.secrets.${oc.env:WHICH}}": "s3://${oc.env:SECRET}",
        "${oc.select:variables.nothing,${oc.env:SECRET}}": "${oc.env:SECRET}",
        "${oc.env:${oc.env:INDIRECT}}": "${oc.env:${oc.env:INDIRECT}}",
        r"a\\${oc.env:SECRET}": r"a\${oc.env:SECRET}",
    }.items(),
)
def test_a_variable_that_chooses_another_is_recorded_as_what_it_chose(run, monkeypatch, chosen, recorded):
    for name, value in {"WHICH": "x", "SECRET": "hunter2", "INDIRECT": "SECRET"}.items():
        monkeypatch.setenv(name, value)
    Path("v.yaml").write_text(
        "variables: {x: s3://x/data, which: '${oc.env:WHICH}', secrets: {x: 's3://${oc.env:SECRET}'}}\n"
        f"tokenizer: {{name: '{chosen}'}}\n"
    )
    config = load("v.yaml")
    assert as_dict(config)["tokenizer"]["name"] == recorded
    Path("config.yaml").write_text(dump_record(as_dict(config)))
    assert load_train_config(["config.yaml"], {}).config.tokenizer.name == config.tokenizer.name


def test_text_where_a_number_belongs_is_refused_with_the_remedy(run, monkeypatch):
    monkeypatch.setenv("LR", "0.5")
    with pytest.raises(ConfigError) as error:
        load("optimizer.lr=${oc.env:LR}")
    assert str(error.value) == (
        "command line: optimizer.lr: '${oc.env:LR}' given, expected a number; a variable is text, so write "
        "${oc.decode:${oc.env:LR}}"
    )
    assert load("optimizer.lr=${oc.decode:${oc.env:LR}}").optimizer.lr == 0.5


def test_a_masked_url_of_a_record_is_refused_in_one_line(run):
    config = load("save_folder=s3://user:hunter2@host/b", "metadata.from=https://h/x?sig=hunter2")
    assert config.save_folder == "s3://user:hunter2@host/b"
    Path("config.yaml").write_text(dump_record(as_dict(config)))
    assert "hunter2" not in Path("config.yaml").read_text()
    with pytest.raises(ConfigError) as error:
        load_train_config(["config.yaml", "metadata.from=null"], {})
    assert str(error.value) == (
        "config.yaml: save_folder: s3://user:***@host/b: credentials are not recorded; give them here, by "
        "${oc.env:NAME}"
    )
    assert load_train_config(["config.yaml", "metadata.from=null", "save_folder=s3://u:p@h/b"], {})
    with pytest.raises(CheckpointError, match=r"^s3://user:\*\*\*@host/b: credentials are not recorded"):
        open_folder("s3://user:***@host/b")


def test_a_recorded_variable_is_not_resolved_by_whoever_reads_the_run(secret):
    recorded = as_dict(secret)
    config = lay_over(recorded, {"train_loader": {"dataset": {"local": "here"}}})
    assert config["tokenizer"]["name"] == recorded["tokenizer"]["name"] == "${oc.env:SECRET,'a, b'}"
    assert config["train_loader"]["dataset"]["local"] == "here"
    with pytest.raises(CheckpointError, match="recorded as it was written, and only a launch resolves it"):
        open_folder(recorded["save_folder"])
