"""`init --like RUN.yaml`: what of a YAML is kept, left out, replaced and listed, and that the result trains."""

import json
import re
from pathlib import Path

import pytest
import yaml

from llmfoundry_lite import companions
from llmfoundry_lite.cli import main
from llmfoundry_lite.companions import PART_KEYS, Companion
from llmfoundry_lite.config import part_names
from llmfoundry_lite.config.load_train import load_train_config
from llmfoundry_lite.errors import ConfigError
from llmfoundry_ops.commented_yaml import Comment, add_comments
from llmfoundry_ops.from_yaml import write_from_yaml
from llmfoundry_ops.registries import REGISTRIES, find_parts_from_registries
from tests.helpers.launch import train
from tests.helpers.tiny import read_metrics, values

FOUNDRY = """\
variables:
  data_local: ???
  max_seq_len: 2048
  global_seed: 11
  run_name:  # If left blank, will be read from env var $RUN_NAME
max_seq_len: ${variables.max_seq_len}
run_name: ${variables.run_name}
model:
  name: mpt_causal_lm
  init_device: meta
  d_model: 32
  n_heads: 2
  n_layers: 2
  expansion_ratio: 4
  max_seq_len: ${variables.max_seq_len}
  vocab_size: 50368
  attn_config:
    attn_impl: flash
tokenizer:
  name: EleutherAI/gpt-neox-20b
  kwargs:
    model_max_length: ${variables.max_seq_len}
train_loader:
  name: text
  dataset:
    local: ${variables.data_local}
    split: train
    shuffle: true
    max_seq_len: ${variables.max_seq_len}
    shuffle_seed: ${variables.global_seed}
  drop_last: true
  num_workers: 8
eval_loader:
  name: text
  dataset:
    local: ${variables.data_local}
    split: val
  num_workers: 8
scheduler:
  name: cosine_with_warmup
  t_warmup: 1ba
  alpha_f: 0.1
optimizer:
  name: decoupled_adamw
  lr: 6.0e-4
  betas:
  - 0.9
  - 0.95
  eps: 1.0e-08
  weight_decay: 0.0
algorithms:
  gradient_clipping:
    clipping_type: norm
    clipping_threshold: 1.0
max_duration: 2ba
eval_interval: 2ba
eval_subset_num_batches: 1
global_train_batch_size: 4
seed: ${variables.global_seed}
device_eval_batch_size: 2
device_train_microbatch_size: 2
precision: fp32
fsdp_config:
  sharding_strategy: FULL_SHARD
  limit_all_gathers: true
save_overwrite: true
callbacks:
  lr_monitor: {}
"""
OLD_FORM = """\
data_local: /data
global_seed: 5
max_seq_len: 512
code_paths: [/home/me/code]
model: {name: mpt_causal_lm, d_model: 32, n_heads: 2, n_layers: 2, vocab_size: 100}
tokenizer: {name: gpt2}
train_loader: {name: text, dataset: {local: "${data_local}", split: train}}
optimizer: {name: decoupled_adamw, lr: 1.0e-3}
scheduler: {name: constant_with_warmup, t_warmup: 0ba}
callbacks: {lr_monitor: {}, nan_monitor: {}, layer_freezing: {layer_names: [a, b]}}
global_train_batch_size: 512
max_duration: 1ep
seed: ${global_seed}
"""
PARTS = """\
model:
  norm_type: scalenorm
  fc_type: {name: quantised}
  init_config: {name: orthogonal_}
  attn_config: {attn_type: latent, latent_dim: 16}
  ffn_config: {ffn_type: squared_relu, power: 2}
optimizer: {name: sophia, rho: 0.04}
scheduler: {name: sawtooth, t_up: 1ba}
algorithms: {sandwich: {every: 3}}
callbacks: {weight_watcher: {every: 5}}
loggers: {neptune: {project: x}}
train_loader: {name: my_loader}
icl_tasks:
- {label: a, dataset_uri: a.jsonl, icl_task_type: rhyming, metric_names: [InContextLearningLMAccuracy, lead]}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory with a summary of prepared data."""
    monkeypatch.chdir(tmp_path)
    summarise(tmp_path)
    return tmp_path


def summarise(folder, num_val=40):
    (folder / "data").mkdir(exist_ok=True)
    splits = {"train": {"samples": 300}, "val": {"samples": num_val}}
    summary = {"max_seq_len": 64, "tokenizer": {"vocab_size": 500}, "splits": splits}
    (folder / "data/summary.json").write_text(json.dumps(summary))


def write(text, **changes):
    """Convert a YAML, with blocks and keys changed. Returns the printed lines, the new text and its values."""
    values = yaml.safe_load(text)
    for key, value in changes.items():
        is_block = isinstance(value, dict) and isinstance(values.get(key), dict)
        values[key] = {**values[key], **value} if is_block else value
    Path("run.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    path, lines = write_from_yaml(Path("data"), "run.yaml", Path("new.yaml"))
    text = path.read_text()
    path.unlink()
    return lines, text, yaml.safe_load(text)


def write_with_parts():
    return write(FOUNDRY, **yaml.safe_load(PARTS))


def test_the_run_is_kept_and_the_data_is_replaced(folder):
    lines, text, values = write(FOUNDRY)
    Path("new.yaml").write_text(text)
    config = load_train_config(["new.yaml"], {}).config
    assert config.model.d_model == 32 and config.model.vocab_size == 50368 and config.model.max_seq_len == 64
    assert config.optimizer.lr == 6e-4 and config.scheduler.name == "cosine_with_warmup" and config.seed == 11
    assert config.train_loader.dataset.local == "data" and config.eval_loader.dataset.split == "val"
    assert values["tokenizer"] == {"name": "${variables.data}/tokenizer"} and values["model"]["max_seq_len"] == (
        "${max_seq_len}"
    )
    assert values["variables"] == {"data": "data"} and values["run_name"] == "new"
    assert lines == [
        "taken from the data: tokenizer, train_loader, eval_loader, max_seq_len 64 for 2048",
        "2 keys (save_overwrite, fsdp_config.limit_all_gathers) without effect here, left out",
        "trains for 2ba, 0.0 epochs of the data",
    ]
    assert "\n#   save_overwrite: a checkpoint is never overwritten\n" in text


def test_variables_at_the_top_level_go_and_refused_keys_become_comments(folder):
    lines, text, values = write(OLD_FORM)
    assert "data_local" not in values and "global_seed" not in values and values["seed"] == 5
    assert values["global_train_batch_size"] == 256 and values["model"]["vocab_size"] == 512
    assert values["callbacks"] == {"lr_monitor": {}}
    assert "  # Left out: use on_non_finite\n  # nan_monitor: {}\n" in text
    assert "\n  # layer_freezing:\n  #   layer_names:\n  #   - a\n  #   - b\n" in text
    assert "\n# Left out: put the folder on PYTHONPATH and name the object: python:package.module:Thing\n" in text
    assert "\n# code_paths:\n# - /home/me/code\n" in text
    refused = "code_paths, callbacks.nan_monitor, callbacks.layer_freezing"
    assert f"3 keys ({refused}) that a launch refuses, now comments with what to use instead" in lines
    assert not any("a launch is refused" in line for line in lines)


def test_parts_from_registries_are_listed_with_what_to_write(folder):
    lines, text, values = write_with_parts()
    head = lines.index(
        "parts from registries: write python:package.module:Thing for each, or install a companion that has the name:"
    )
    listed = dict(re.findall(r"^  (.+) \(from the registry (\w+), ", line)[0] for line in lines[head + 1 : head + 9])
    assert listed == {
        "model.norm_type: scalenorm": "norms",
        "model.ffn_config.ffn_type: squared_relu": "ffns",
        "model.attn_config.attn_type: latent": "attention_classes",
        "scheduler.name: sawtooth": "schedulers",
        "optimizer.name: sophia": "optimizers",
        "callbacks.weight_watcher": "callbacks",
        "loggers.neptune": "loggers",
        "icl_tasks[0].icl_task_type: rhyming": "icl_datasets",
    }
    assert "icl_tasks[0].metric_names[1]: lead (from the registry metrics, to adapt: function(" in lines[head + 9]
    assert (
        "our loader reads it, and not train_loader.name: my_loader (from the registry dataloaders, to adapt: by "
        "device_batch_size and its arguments)"
    ) in lines
    needed = lines[-2].removeprefix("a launch is refused until these are named: ").split(", ")
    assert needed == [part.partition(":")[0] for part in listed]
    assert values["model"]["norm_type"] == "scalenorm" and values["model"]["attn_config"]["latent_dim"] == 16
    comment = (
        "# scalenorm is from the registry norms, works unchanged, with the width by position, not as "
        "normalized_shape=. Write python:package.module:Thing, or install a companion that has the name scalenorm. A "
        "launch is refused until then."
    )
    above = text[: text.index("  norm_type: scalenorm\n")].splitlines()[-3:]
    assert " ".join(line.strip().removeprefix("# ") for line in above) == comment.removeprefix("# ")


def test_parts_without_a_counterpart_become_comments(folder):
    lines, text, values = write_with_parts()
    assert values["model"]["init_config"] is None and "fc_type" not in values["model"]
    assert "  # fc_type:\n  #   name: quantised\n" in text and "  # sandwich:\n  #   every: 3\n" in text
    head = lines.index("parts without a counterpart here, now comments:")
    assert [line.split(" (")[0] for line in lines[head + 1 : head + 4]] == [
        "  model.init_config.name: orthogonal_",
        "  algorithms.sandwich",
        "  model.fc_type: quantised",
    ]


def test_a_launch_refuses_the_new_yaml_until_its_parts_are_named(folder):
    _, text, _ = write_with_parts()
    Path("new.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"'scalenorm' is not known; .*python:package.module:Thing; a companion that"):
        load_train_config(["new.yaml"], {})
    named = re.sub(
        r"(?m)^( *[a-z_]+: )(scalenorm|latent|squared_relu|sophia|sawtooth|rhyming)$", r"\1python:a:\2", text
    )
    named = named.replace("  weight_watcher:", "  python:a:Watcher:").replace("  neptune:", "  python:a:Neptune:")
    Path("new.yaml").write_text(named)
    config = load_train_config(["new.yaml"], {}).config
    assert config.model.ffn_config.kwargs == {"power": 2} and config.optimizer.kwargs["rho"] == 0.04


def test_a_name_that_an_installed_companion_has_is_kept(folder, monkeypatch):
    tiny = Companion(parts={"norms": {"scalenorm": "tiny:Norm"}, "callbacks": {"weight_watcher": "tiny:Watch"}})
    monkeypatch.setattr(companions, "find_companions", lambda: [tiny])
    part_names.find_names.cache_clear()
    lines, text, values = write(FOUNDRY, model={"norm_type": "scalenorm"}, callbacks={"weight_watcher": {"every": 5}})
    part_names.find_names.cache_clear()
    assert values["model"]["norm_type"] == "scalenorm" and values["callbacks"]["weight_watcher"] == {"every": 5}
    assert "from the registry" not in "".join(lines) + text and "refused" not in "".join(lines)


def test_a_part_of_foundry_that_is_absent_here_is_said_to_be_so(folder):
    lines, text, _ = write(FOUNDRY, model={"ffn_config": {"ffn_type": "mb_dmoe", "moe_num_experts": 4}})
    assert "  model.ffn_config.ffn_type: mb_dmoe (LLM Foundry's own: mixture of experts and" in "\n".join(lines)
    assert "# mb_dmoe is LLM Foundry's own: mixture of experts" in text


def test_environment_variables_are_copied_and_not_read(folder, monkeypatch):
    monkeypatch.setenv("BUCKET", "s3://secret")
    _, text, values = write(FOUNDRY, save_folder="${oc.env:BUCKET}/{run_name}", metadata={"a": "\\${b}"})
    assert values["save_folder"] == "${oc.env:BUCKET}/{run_name}" and "secret" not in text
    assert values["metadata"] == {"a": "\\${b}"}
    monkeypatch.delenv("BUCKET")
    lines, _, _ = write(FOUNDRY, save_folder="${oc.env:BUCKET}/x")
    assert "a launch is refused: new.yaml: save_folder: the environment variable BUCKET is not set; export it" in lines
    with pytest.raises(ConfigError, match=r"run.yaml: save_folder: \$\{paths"):
        write(FOUNDRY, save_folder="${paths.${oc.env:HOME}}")


def test_what_a_launch_refuses_besides_is_printed(folder):
    lines, _, _ = write(FOUNDRY, max_duration="3iter", metric="x")
    assert lines[-2].startswith("a launch is refused: new.yaml: max_duration: '3iter' given, expected")


def test_code_that_the_yaml_names_is_listed(folder):
    lines, _, _ = write(FOUNDRY, model={"norm_type": "python:mine.norms:Norm"}, callbacks={"python:mine:Beat": {}})
    assert "a launch runs the code that this YAML names: python:mine.norms:Norm, python:mine:Beat" in lines


def test_our_own_yaml_is_given_other_data(folder):
    _, text, _ = write(FOUNDRY)
    lines, again, _ = write(text)
    assert lines[0] == "taken from the data: tokenizer, train_loader, eval_loader" and len(lines) == 2
    assert yaml.safe_load(again) == yaml.safe_load(text)


def test_without_validation_data_nothing_is_evaluated(folder):
    summarise(folder, num_val=0)
    lines, _, values = write(FOUNDRY)
    assert not {"eval_loader", "eval_interval", "eval_subset_num_batches", "device_eval_batch_size"} & {*values}
    assert "the validation split has no samples" in lines[-1] and not any("refused" in line for line in lines)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model": {"name": "hf_causal_lm", "pretrained_model_name_or_path": "gpt2"}},
            "--like: run.yaml: model.name: hf_causal_lm loads gpt2, a Hugging Face model; to train on from its "
            "weights, give --like hf:gpt2, or the folder of the model",
        ),
        (
            {"model": {"name": "my_model"}},
            "--like: run.yaml: model.name: 'my_model' is no MPT; expected mpt_causal_lm, whose norms, feed-forward "
            "layers and attention may be your own (docs/own-parts.md)",
        ),
        ({"train_loader": {"name": "finetuning"}}, "run.yaml: train_loader.name: finetuning: fine-tuning is absent"),
        ({"model": None}, "--like: run.yaml has no block `model`, expected the YAML of a training run"),
        ({"run_name": "${nothing}"}, "run.yaml: run_name: ${nothing} names nothing"),
    ],
)
def test_a_yaml_that_is_no_run_of_an_mpt_is_refused(folder, changes, message):
    with pytest.raises(ConfigError) as error:
        write(FOUNDRY, **changes)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "models: [{model_name: a}]\nicl_tasks: tasks.yaml\n",
            "--like: run.yaml describes an evaluation, expected a training run; `llmfoundry-lite eval run.yaml` takes",
        ),
        ("a: [", "run.yaml: not valid YAML: "),
        (
            "a: !!python/object/apply:os.system [touch run]",
            "run.yaml: not valid YAML: could not determine a constructor",
        ),
        ("", "run.yaml: the file is empty"),
        ("overlay: hardware\nprecision: fp32\n", "run.yaml: a hardware overlay needs a run to lie on"),
    ],
)
def test_a_file_that_describes_no_run_is_refused(folder, text, message, capsys):
    Path("run.yaml").write_text(text)
    assert main.run(["init", "data", "--like", "run.yaml"]) == 2
    assert message in capsys.readouterr().err
    assert not Path("run-data.yaml").exists()


def test_a_key_is_commented_out_with_all_lines_of_its_value():
    text = "a:\n  b:\n  - 1\n  - c: 2\n  d: 'x\n\n    y'\n  e: 3\n"
    comments = [Comment(path=("a", name), text=f"no {name}", is_disabling=True) for name in ("b", "d")]
    assert yaml.safe_load(add_comments(text, comments)) == {"a": {"e": 3}}
    nested = [
        *comments,
        Comment(path=("a", "b", 1, "c"), text="inner"),
        Comment(path=("a",), text="no", is_disabling=True),
    ]
    assert yaml.safe_load(add_comments(text, nested)) is None
    assert "inner" not in add_comments(text, nested)


def test_every_kind_of_part_has_its_registry():
    names = [registry.name for registry in REGISTRIES]
    assert len({*names}) == len(names)
    # LLM Foundry has no registry of losses, or of readers.
    assert {*PART_KEYS} - {*names} <= {"losses", "readers"}


def test_names_of_foundry_are_no_parts_of_others():
    values = yaml.safe_load(FOUNDRY)
    values["callbacks"] = {"nan_monitor": {}, "curriculum_learning": {}, "speed_monitor": {}}
    values["loggers"] = {"mlflow": {}, "wandb": {}}
    values["algorithms"]["alibi"] = {}
    assert not find_parts_from_registries(values)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_yaml_of_foundry_trains_on_prepared_texts(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(20):
        (texts / f"{number}.txt").write_text(" ".join(str(number * place) for place in range(200)))
    words = ["--tokenizer", "train:300", "--max-seq-len", "32", "--val-fraction", "0.2", "--num-workers", "1"]
    assert main.run(["data", "prepare", "texts", "--out", "data", *words]) == 0
    Path("run.yaml").write_text(FOUNDRY)
    assert main.run(["init", "data", "--like", "run.yaml"]) == 0
    assert "wrote run-data.yaml; next: llmfoundry-lite train run-data.yaml --dry-run=here" in capsys.readouterr().out
    train(["run-data.yaml"], tmp_path).check()
    assert len(values(read_metrics(tmp_path / "runs/run-data"), "loss/train/total")) == 2


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("norm_type", 'x\u2028  loss_fn: python:evil:Boom\u2028  verbose: " #', "has a control character"),
        ("norm_type", "x\x85  loss_fn: python:evil:Boom", "has a control character"),
        ("norm_type", "python:${oc.env:NOPE,evil}:Boom", "which depends on the environment"),
        ("norm_type", '${oc.decode:"python:evil:Boom"}', "which depends on the environment"),
        ("a.b", 1, "the key 'a.b' cannot be copied"),
        ("a" * 200, 1, "cannot be copied"),
        ("x\n  loss_fn", 1, "cannot be copied"),
        ("deep", json.loads("[" * 30 + "]" * 30), "deep in each other"),
    ],
)
def test_no_comment_becomes_a_key_and_no_name_is_hidden(folder, key, value, problem):
    theirs = folder / "theirs.yaml"
    model = {"name": "mpt_causal_lm", "d_model": 64, "n_heads": 4, "n_layers": 2, key: value}
    theirs.write_text(yaml.safe_dump({"model": model, "train_loader": {"name": "text"}, "max_duration": "1ba"}))
    with pytest.raises(ConfigError, match=problem):
        write_from_yaml(Path("data"), str(theirs), folder / "new.yaml")
    assert not (folder / "new.yaml").exists()
