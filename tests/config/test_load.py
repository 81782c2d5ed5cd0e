"""Every mistake in a configuration is one line that names file, key, what was given and what to write instead."""

import os
import subprocess
import sys
import typing
from pathlib import Path

import pytest
import yaml

from llmfoundry_lite.config.check import check_batch
from llmfoundry_lite.config.eval_schema import EvalConfig, TaskConfig
from llmfoundry_lite.config.fields import keys_of
from llmfoundry_lite.config.layout import find_data_ranks, layout_of
from llmfoundry_lite.config.load_train import LoadedTrain, load_train_config
from llmfoundry_lite.config.schema import TrainConfig, as_dict, data_label
from llmfoundry_lite.config.shipped import find_yaml
from llmfoundry_lite.config.spans import Duration
from llmfoundry_lite.errors import ConfigError
from llmfoundry_lite.models.flops import count_parameters
from tests.helpers.foundry import FOUNDRY
from tests.helpers.present import needs

RUN = """\
variables: {length: 128, width: 64}
max_seq_len: ${variables.length}
model:
  name: mpt_causal_lm
  d_model: ${variables.width}
  n_heads: 4
  n_layers: 2
  max_seq_len: ${variables.length}
  vocab_size: 512
tokenizer: {name: gpt2}
train_loader: {name: text, dataset: {local: data, split: train}}
optimizer: {name: decoupled_adamw, lr: 1.0e-3}
scheduler: {name: cosine_with_warmup, t_warmup: 10ba}
max_duration: 100ba
global_train_batch_size: 8
"""

OVERLAY = """\
overlay: hardware
device_train_microbatch_size: 4
precision: fp32
fsdp_config: {sharding_strategy: SHARD_GRAD_OP}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The working directory, with run.yaml and overlay.yaml: messages name files as they were given."""
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(RUN)
    Path("overlay.yaml").write_text(OVERLAY)
    return tmp_path


def load(*arguments: str, **environ: str) -> LoadedTrain:
    return load_train_config(["run.yaml", *arguments], environ)


def refusal(*arguments: str) -> str:
    with pytest.raises(ConfigError) as error:
        load_train_config(arguments, {})
    message = str(error.value)
    assert "\n" not in message
    return message


MISTAKES = dict(
    line.split(" -> ")
    for line in Path(__file__).with_name("mistakes.txt").read_text().splitlines()
    if line and not line.startswith("#")
)


@pytest.mark.parametrize("argument", MISTAKES)
def test_a_mistake_is_named_with_its_key_and_what_to_write_instead(argument):
    assert refusal("run.yaml", argument) == MISTAKES[argument]


def test_an_older_yaml_of_llm_foundry_has_its_variables_at_the_top():
    old = RUN.replace("local: data", "local: '${data_local}', remote: '${data_remote}'")
    Path("old.yaml").write_text(f"data_local: ./c4\ndata_remote:\nglobal_seed: 17\n{old}seed: ${{global_seed}}\n")
    loaded = load_train_config(["old.yaml", "data_local=mine", "model.attn_config.attn_impl=triton"], {})
    assert (loaded.config.train_loader.dataset.local, loaded.config.seed) == ("mine", 17)
    assert "command line: model.attn_config.attn_impl triton has no effect: LLM Foundry has removed it; auto " in str(
        loaded.notes
    )
    assert refusal("old.yaml", "train_subset_num_batches=3", "eval_interval=${train_subset_num_batches}ba") == (
        "command line: train_subset_num_batches: LLM Foundry's option is left out here; use max_duration"
    )
    assert refusal("old.yaml", "dat_local=mine") == (
        "command line: dat_local: unknown key; nothing here is spelled like it; a value of your own, for ${…}, stands "
        "under variables; a companion that is not installed may have it"
    )


# ------------------------------------------------------------------------------------------ files and arguments


def test_every_unknown_key_is_named_at_once_by_file():
    Path("more.yaml").write_text("model: {d_modle: 3, n_layers: 2}\nmax_durations: 1\n")
    assert refusal("run.yaml", "more.yaml", "optimizer.learning_rate=1") == (
        "3 unknown keys: more.yaml: model.d_modle (did you mean model.d_model?), max_durations (did you mean "
        "max_duration?); "
        "command line: optimizer.learning_rate (did you mean optimizer.lr?)"
    )


def test_every_option_that_is_left_out_is_named_at_once():
    assert refusal("run.yaml", "eval_gauntlet=x", "profiler.skip_first=1").startswith(
        "2 options of LLM Foundry are left out here: command line: eval_gauntlet (write the tasks under icl_tasks, or "
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: [1]", "more.yaml: model: [1] given, expected a block of `key: value` lines"),
        ("model: {1: 2}", "more.yaml: model.1: unknown key; valid keys here"),
        ("callbacks: {1: 2}", "more.yaml: callbacks.1: unknown key; one of your own is named by its import path"),
    ],
)
def test_a_list_or_a_number_where_names_belong_is_refused(text, message):
    Path("more.yaml").write_text(text)
    assert refusal("run.yaml", "more.yaml").startswith(message)
    assert "given both as a list and as a block" in refusal("run.yaml", "model=[1]", "model.d_model=3")


def test_a_path_that_is_not_utf_8_is_one_line():
    odd = os.fsdecode(b"r\xffn")
    assert "codec can't encode" in refusal("run.yaml", f"run_folder={odd}")
    assert "no such file" in refusal(f"{odd}.yaml")


def test_a_fine_tuning_run_is_refused_as_such():
    Path("tune.yaml").write_text("model: {name: hf_causal_lm}\ntrain_loader: {name: finetuning}\neval_gauntlet: x\n")
    assert refusal("tune.yaml").startswith("tune.yaml: train_loader.name: finetuning: fine-tuning is absent here: ")
    Path("more.yaml").write_text("model: {name: hf_causal_lm}\nexpandable_segments: true\n")
    assert refusal("more.yaml").startswith("more.yaml: model.name: 'hf_causal_lm' is not known; ")


def test_a_missing_block_and_a_missing_key_are_named():
    Path("short.yaml").write_text(RUN.replace("max_duration: 100ba\n", "").replace(", lr: 1.0e-3", ""))
    assert refusal("short.yaml") == "short.yaml: optimizer.lr: missing; expected a number"
    assert refusal("short.yaml", "optimizer.lr=1") == (
        "short.yaml: max_duration: missing; expected a number with a unit, ba, ep, sp or tok, such as 100ba"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: {a: 1\nb: [", "not valid YAML: did not find expected ',' or '}', line 2, column 2"),
        ("a: 1\na: 2\n", "not valid YAML: found duplicate key a, line 2, column 1"),
        ("- a\n- b\n", "expected `key: value` at the top level, found list"),
        ("", "the file is empty"),
    ],
)
def test_a_file_that_cannot_be_read_says_where(text, message):
    Path("broken.yaml").write_text(text)
    assert refusal("broken.yaml") == f"broken.yaml: {message}"


def test_a_missing_file_names_its_neighbour():
    assert refusal("rnu.yaml") == "rnu.yaml: no such file; did you mean run.yaml?"
    assert refusal("nowhere/mpt.yaml") == "nowhere/mpt.yaml: no such file"
    assert refusal("mpt-1b.yaml") == "mpt-1b.yaml: no such file; did you mean mpt-1b, which comes with the package?"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no YAML file given; try mpt-quickstart, which comes with the package"),
        (["run.yaml", "seed"], "'seed' is neither a .yaml file nor key=value"),
        (["run.yaml", "model..d_model=3"], "'model..d_model=3' is neither a .yaml file nor key=value"),
        (
            ["run.yaml", "callbacks.python:foo.bar:Baz=null"],
            "'callbacks.python:foo.bar:Baz=null' is neither a .yaml file nor key=value",
        ),
        (
            ["run.yaml", "--dry"],
            "unknown option --dry; expected YAML files, key=value pairs, --dry-run, --dry-run=full or --dry-run=here",
        ),
        (
            ["run.yaml", "seed=1", "model=[1"],
            "cannot read model=[1: did not find expected ',' or ']', line 2, column 1",
        ),
        (["run.yaml", "overlay=hardware"], "overlay: belongs in a YAML file, whose keys it limits"),
    ],
)
def test_arguments_that_cannot_be_read_are_named(arguments, message):
    assert refusal(*arguments) == f"command line: {message}"


@pytest.mark.parametrize("text", ["&a", "---", "!!null x"])
def test_a_name_of_which_yaml_reads_nothing_is_not_taken_for_null(text):
    """Such as a name that a script has made. With null the run would have the YAML's name."""
    words = f"command line: run_name: {text!r} given, which YAML reads as nothing; write it in quotes"
    assert refusal("run.yaml", f"run_name={text}") == words


def test_several_lines_are_not_joined_to_one_value():
    """Such as the output of a command that has found two folders: YAML reads the end of a line as a space."""
    words = "command line: save_folder: 'saves/a\\nsaves/b' given, several lines; give one, or write them in quotes"
    assert refusal("run.yaml", "save_folder=saves/a\nsaves/b") == words
    assert load("save_folder=saves/a\n").config.save_folder == "saves/a"


def test_a_variable_on_the_command_line_that_nothing_names_is_refused():
    """A sweep over it would train the same run each time."""
    words = "command line: variables.{0}: no value names ${{variables.{0}}}, so it has no effect; {1}"
    assert refusal("run.yaml", "variables.lr=0.1") == words.format("lr", "set the key itself")
    assert refusal("run.yaml", "variables.lenght=32") == words.format("lenght", "did you mean variables.length?")
    assert load("variables.lr=0.1", "optimizer.lr=${variables.lr}").config.optimizer.lr == 0.1
    assert load("variables.length=32", "variables.tokens_per_second=7").config.max_seq_len == 32
    Path("more.yaml").write_text("variables: {other: 1}\n")
    assert load("more.yaml", "metadata=${variables}", "variables.lr=0.1").config.metadata["lr"] == 0.1
    assert load("more.yaml").config.variables["other"] == 1


def test_defaults_give_way_to_files_in_order_and_files_to_arguments():
    Path("second.yaml").write_text("seed: 2\noptimizer: {lr: 2.0}\nmodel: {n_layers: 3}\n")
    config = load("second.yaml", "seed=3").config
    assert (config.seed, config.optimizer.lr, config.model.n_layers) == (3, 2.0, 3)
    assert (config.optimizer.name, config.model.d_model, config.precision) == ("decoupled_adamw", 64, "amp_bf16")
    assert load("variables.length=32").config.model.max_seq_len == 32


def test_dry_run_is_an_option_and_may_stand_anywhere():
    assert load_train_config(["--dry-run", "run.yaml"], {}).dry_run == "plan"
    assert [load("--dry-run=full").dry_run, load("--dry-run=here").dry_run, load().dry_run] == ["full", "here", ""]


# -------------------------------------------------------------------------------------------------- overlays


def test_a_hardware_overlay_sets_how_the_run_is_computed():
    config = load("overlay.yaml").config
    assert (config.device_train_microbatch_size, config.precision) == (4, "fp32")
    assert config.fsdp_config is not None and config.fsdp_config.sharding_strategy == "SHARD_GRAD_OP"
    assert load("overlay.yaml", "precision=amp_fp16").config.precision == "amp_fp16"


def test_an_overlay_named_by_hardware_lies_over_all_files_wherever_it_stands():
    Path("more.yaml").write_text("device_train_microbatch_size: 2\n")
    for arguments in (("hardware=overlay.yaml", "more.yaml"), ("more.yaml", "hardware=overlay.yaml")):
        assert load(*arguments).config.device_train_microbatch_size == 4
    assert load("overlay.yaml", "more.yaml").config.device_train_microbatch_size == 2


def test_an_overlay_may_not_change_what_is_trained():
    Path("overlay.yaml").write_text(OVERLAY + "optimizer: {lr: 1}\n")
    message = refusal("run.yaml", "overlay.yaml")
    assert message.startswith(
        "overlay.yaml: optimizer.lr: a hardware overlay may not change what is trained; set it in the run's YAML "
        "(an overlay may set precision, loss_chunk_mib, "
    )


def test_an_overlay_needs_a_run_and_a_known_kind():
    expected = "overlay.yaml: a hardware overlay needs a run to lie on; name the run's YAML before it"
    assert refusal("overlay.yaml", "run.yaml") == expected
    Path("overlay.yaml").write_text("overlay: software\n")
    assert refusal("run.yaml", "overlay.yaml") == (
        "overlay.yaml: overlay: 'software' is not a kind of overlay; expected hardware"
    )


# ------------------------------------------------------------------------------------------- names and values


def test_the_run_is_named_by_its_key_the_environment_or_its_file():
    assert load().config.run_name == "run"
    assert load(RUN_NAME="from-env").config.run_name == "from-env"
    assert load("run_name=0", RUN_NAME="from-env").config.run_name == "0"
    assert load("run_name=null", RUN_NAME="from-env").config.run_name == "from-env"
    config = load("run_name=7", RUN_NAME="from-env").config
    assert (config.run_name, config.run_folder) == ("7", "runs/7")
    assert load("run_name=a", "run_folder=/scratch/{run_name}/x").config.run_folder == "/scratch/a/x"
    config = load("run_name=a", "run_folder={run_name}", "save_folder={run_name}/x").config
    assert (config.run_folder, config.save_folder) == ("a", "a/x")


def test_a_name_that_the_environment_gives_is_said():
    """The variable may be left in the shell by an earlier run, whose folder this one would take."""
    note = "run_name: old, by the environment variable RUN_NAME; run_name=NAME names another"
    assert note in load(RUN_NAME="old").notes
    assert not any("RUN_NAME" in note for note in [*load("run_name=new", RUN_NAME="old").notes, *load().notes])


def test_a_tilde_is_the_home_folder_and_is_recorded_as_it_was_written(monkeypatch):
    """Shells replace it in `key=~/folder`, YAML files do not."""
    monkeypatch.setenv("HOME", "/home/ada")
    data = ("train_loader.dataset.local=~/data", "tokenizer.name=~/tokenizer")
    given = ("run_folder=~/runs/{run_name}", "save_folder=~/saves", "load_path=~/other", *data)
    config = load(*given, "run_name=x").config
    assert (config.run_folder, config.save_folder, config.load_path) == (
        *("/home/ada/runs/x", "/home/ada/saves", "/home/ada/other"),
    )
    assert (config.train_loader.dataset.local, config.tokenizer.name) == ("/home/ada/data", "/home/ada/tokenizer")
    recorded = as_dict(config)
    assert (recorded["save_folder"], recorded["train_loader"]["dataset"]["local"]) == ("~/saves", "~/data")


def test_an_empty_name_does_not_become_the_yaml_s():
    """As of a shell variable that is not set, in a sweep of runs."""
    wanted = "'' given, expected the name of a folder: letters and digits, and . _ - after the first"
    assert refusal("run.yaml", "run_name=''") == f"command line: run_name: {wanted}"
    with pytest.raises(ConfigError) as error:
        load(RUN_NAME="")
    assert str(error.value) == f"the environment: RUN_NAME: {wanted}"


def test_question_marks_stand_for_a_value_that_a_later_layer_gives():
    marked = RUN.replace("max_duration: 100ba", "max_duration: ???\nrun_name: ???\nsave_folder: ???")
    assert marked != RUN
    Path("marked.yaml").write_text(marked)
    assert refusal("marked.yaml", "run_name=a", "save_folder=null") == (
        "marked.yaml: max_duration: ??? stands for a value that must be given; give one"
    )
    config = load_train_config(["marked.yaml", "run_name=a", "max_duration=7ba", "save_folder=null"], {}).config
    assert (config.run_name, str(config.max_duration), config.save_folder) == ("a", "7ba", None)


def test_a_run_s_name_stands_in_every_folder_of_the_run():
    keys = ["run_folder", "save_folder", "load_path", "loggers.tensorboard.log_dir", "callbacks.profiler.folder"]
    keys += ["callbacks.hf_checkpointer.save_folder"]
    given = [f"{key}=x/{{run_name}}/y" for key in keys]
    config = load("run_name=a", "callbacks.hf_checkpointer.save_interval=1ba", *given).config
    assert config.loggers.tensorboard is not None
    assert config.callbacks.profiler is not None
    assert config.callbacks.hf_checkpointer is not None
    found = {config.run_folder, config.save_folder, config.load_path, config.loggers.tensorboard.log_dir}
    found |= {config.callbacks.profiler.folder, config.callbacks.hf_checkpointer.save_folder}
    assert found == {"x/a/y"}


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("null", "runs/a/checkpoints"),
        ("x/{run_name}", "./x/a/"),
        ("file:///x/{run_name}", "/x/a/second"),
        ("s3://b/a/saves", "s3://b/{run_name}"),
    ],
)
def test_the_second_place_of_saves_is_another_place(first, second):
    message = refusal("run.yaml", "run_name=a", f"save_folder={first}", f"save_fallback={second}")
    assert "save_fallback: " in message and "expected another place, on another disk or in another bucket" in message
    assert load("run_name=a", f"save_folder={first}", "save_fallback=y/{run_name}").config.save_fallback == "y/a"


@pytest.mark.parametrize(
    "key",
    [
        *("run_folder", "save_folder", "save_fallback", "load_path"),
        *("train_loader.dataset.local", "train_loader.dataset.remote"),
        *("loggers.tensorboard.log_dir", "callbacks.profiler.folder", "callbacks.hf_checkpointer.save_folder"),
    ],
)
@pytest.mark.parametrize(("written", "meant"), [("{runname}/x", "{run_name}"), ("s3:/b/x", "s3://b/x")])
def test_a_folder_s_misspelt_placeholder_or_url_is_no_folder_s_name(key, written, meant):
    message = refusal("run.yaml", "callbacks.hf_checkpointer.save_interval=1ba", f"{key}={written}")
    assert message.startswith(f"command line: {key}: {written!r} given, expected a folder")
    assert f"; did you mean {meant}?" in message
    if key != "train_loader.dataset.remote":  # which must be a URL that can be downloaded from
        load("callbacks.hf_checkpointer.save_interval=1ba", f"{key}=./s3:/b/x")


def test_a_folder_from_a_variable_is_named_as_it_was_written(monkeypatch):
    monkeypatch.setenv("BUCKET", "s3:/u:secret@b/{x}")
    assert refusal("run.yaml", "save_folder=${oc.env:BUCKET}/x") == (
        "command line: save_folder: '${oc.env:BUCKET}/x' given, expected a folder or a URL; did you mean s3://…? A "
        "folder of that name is given as ./${oc.env:BUCKET}/x"
    )
    monkeypatch.setenv("BUCKET", "s3://u:secret{x}@b")
    load("save_folder=${oc.env:BUCKET}/x")


def test_a_folder_with_braces_that_is_there_can_be_loaded_from():
    Path("saves/{runname}").mkdir(parents=True)
    assert load("load_path=saves/{runname}").config.load_path == "saves/{runname}"
    assert "in which nothing replaces {runname}; did you" in refusal("run.yaml", "save_folder=saves/{runname}")
    assert refusal("run.yaml", "save_folder=saves/{rank}").endswith(
        "a folder or a URL, in which nothing replaces {rank}"
    )


@pytest.mark.parametrize(
    ("text", "value", "unit"),
    [
        ("4800ba", 4800, "ba"),
        ("2.5e9tok", 2_500_000_000, "tok"),
        ("1_000sp", 1000, "sp"),
        (3, 3, "ep"),
        ("3 ep", 3, "ep"),
    ],
)
def test_spans_are_read_as_composer_reads_them(text, value, unit):
    assert Duration.parse(text) == Duration(value, unit)
    assert str(Duration.parse(text)) == f"{value}{unit}"


WIKI = "{label: wiki, name: text, dataset: {local: w, split: val, num_canonical_nodes: 8}}"
C4 = "{label: c4, name: 'python:my.data:build', path: /c4}"


def test_keys_without_effect_are_one_line_and_a_dry_run_gives_their_reasons():
    keys = ["n_gpus=8", "spin_dataloaders=true"]
    (line,) = load(*keys).notes
    assert line == "2 keys have no effect (spin_dataloaders, n_gpus); --dry-run says why"
    assert "command line: n_gpus has no effect: the launcher sets the number of ranks" in load(*keys, "--dry-run").notes


@pytest.mark.parametrize("key", ["eval_loader", "eval_loaders"])
def test_a_list_of_validation_loaders_is_read_by_their_labels(key):
    invocation = load(f"{key}=[{WIKI}, {C4}]")
    config = invocation.config
    assert {block: loader.name for block, loader in config.validation.items()} == {
        "eval_loaders.wiki": "text",
        "eval_loaders.c4": "python:my.data:build",
    }
    assert [data_label(block) for block in config.loaders] == ["train", "eval/wiki", "eval/c4"]
    assert config.eval_loader is None and config.eval_loaders["c4"].kwargs == {"path": "/c4"}
    assert "eval_loaders.wiki.dataset.num_canonical_nodes has no effect" in invocation.notes[0]
    Path("again.yaml").write_text(yaml.safe_dump(as_dict(load(f"{key}=[{WIKI}]").config)))
    assert load_train_config(["again.yaml"], {}).config.eval_loaders == {"wiki": config.eval_loaders["wiki"]}


def test_a_later_list_or_null_replaces_the_validation_data_before_it():
    Path("more.yaml").write_text(f"eval_loader: [{WIKI}, {C4}]")
    assert not load("more.yaml", "eval_loader=null").config.validation
    assert not load("more.yaml", "eval_loaders=null").config.validation
    assert [*load("more.yaml", f"eval_loader=[{C4}]").config.validation] == ["eval_loaders.c4"]
    assert [*load("eval_loader.dataset.local=x", "more.yaml", "eval_loader=null").config.validation] == []
    assert [*load("more.yaml", "eval_loaders=null", "eval_loader={dataset: {local: x}}").config.validation] == [
        "eval_loader"
    ]
    config = load("more.yaml", "eval_loaders.wiki.num_workers=3").config
    assert config.eval_loaders["wiki"].num_workers == 3 and len(config.validation) == 2
    Path("disk.yaml").write_text("overlay: hardware\neval_loaders: {wiki: {dataset: {local: /scratch/w}}}")
    assert load("more.yaml", "disk.yaml").config.eval_loaders["wiki"].dataset.local == "/scratch/w"


@pytest.mark.parametrize(
    ("loaders", "message"),
    [
        ("[{name: text}]", "eval_loader[0].label: missing; expected a name for its loss without dots, such as wiki"),
        ("[{label: a.b}]", "eval_loader[0].label: 'a.b' given; expected a name for its loss without dots, such as"),
        (f"[{WIKI}, {WIKI}]", "eval_loader[1].label: wiki given twice; each loss needs a name of its own"),
        ("[wiki]", "eval_loader[0]: 'wiki' given, expected a block of `key: value` lines"),
        ("[{label: w, dataset: {}}]", "eval_loaders.w.dataset.local: missing; expected the folder of an MDS data set"),
        ("[{label: w, num_workers: -1}]", "eval_loaders.w.num_workers: -1 given, expected 0 or more"),
        ("[{label: w, names: text}]", "eval_loaders.w.names: unknown key; did you mean eval_loaders.w.name?"),
        ("[{label: w, name: strange}]", "eval_loaders.w.name: 'strange' is not known; expected text or python:"),
        ("[{label: w, name: finetuning}]", "eval_loaders.w.name: finetuning: fine-tuning is absent here"),
        (
            "[{label: w, dataset: {local: x, replication: 2}}]",
            "eval_loaders.w.dataset.replication: LLM Foundry's option is left out here; use tp_config or cp_config",
        ),
    ],
)
def test_a_mistake_in_a_list_of_validation_loaders_is_named_by_its_label(loaders, message):
    assert refusal("run.yaml", f"eval_loader={loaders}").startswith(f"command line: {message}")


def test_one_validation_loader_does_not_go_with_several():
    Path("more.yaml").write_text(f"eval_loader: [{WIKI}]")
    assert refusal("run.yaml", "more.yaml", "eval_loader.num_workers=2") == (
        "command line: eval_loader.num_workers: there are eval_loaders, wiki; write eval_loaders.wiki.num_workers, or "
        "keep one of eval_loader and eval_loaders"
    )
    assert refusal("run.yaml", f"eval_loader=[{WIKI}]", f"eval_loaders=[{C4}]") == (
        "command line: eval_loader: eval_loaders given too; keep one of them"
    )


def test_every_number_has_a_range():
    numbers = {
        f"{block.__name__}.{name}"
        for block in (TrainConfig, EvalConfig, TaskConfig)
        for name, key in walk_keys(block)
        if {int, float} & {key.hint, *typing.get_args(key.hint)}
        and not (key.setting.checks or key.setting.choices or key.setting.parse)
    }
    assert numbers == {"TaskConfig.fewshot_random_seed"}


def walk_keys(block, path=""):
    for name, key in keys_of(block).items():
        yield path + name, key
        if key.block:
            yield from walk_keys(key.block, f"{path}{name}.")


def test_objects_of_ones_own_keep_their_keyword_arguments():
    config = load(
        "optimizer={name: 'python:my.optim:SGD', lr: 0.1, momentum: 0.9}",
        "callbacks={'python:my.callbacks:Probe': {every: 3}}",
        "eval_loader={name: 'python:my.data:build', num_workers: 2, path: /data}",
    ).config
    assert config.optimizer.kwargs == {"momentum": 0.9}
    assert config.callbacks.extra == {"python:my.callbacks:Probe": {"every": 3}}
    assert config.eval_loader is not None and config.eval_loader.kwargs == {"path": "/data"}
    assert refusal("run.yaml", "train_loader.dataset.local=x", "train_loader.name=python:a:b") == (
        "command line: train_loader.dataset.local: python:a:b is not given it; remove it, and write its own arguments "
        "beside its name"
    )
    own = "train_loader={name: 'python:a:b', dataset: {eos_token_id: 3}, x: 1, timeout: 3}"
    Path("own.yaml").write_text(
        RUN.replace("train_loader: {name: text, dataset: {local: data, split: train}}", own.replace("=", ": ", 1))
    )
    Path("cpu.yaml").write_text(
        "overlay: hardware\ntrain_loader: {num_workers: 0, pin_memory: false, dataset: {remote: s3://a}}"
    )
    with_overlay = load_train_config(["own.yaml", "cpu.yaml"], {})
    assert with_overlay.config.train_loader.kwargs == {"x": 1}
    assert [note for note in with_overlay.notes if "not given" in note] == [
        "own.yaml: train_loader.timeout has no effect: python:a:b is not given it; remove it, or pass it with "
        "train_loader.kwargs.timeout"
    ]
    assert refusal("run.yaml", "callbacks={'python:my.callbacks': {}}") == (
        "command line: callbacks: 'python:my.callbacks' given, expected an import path, python:package.module:Thing"
    )


@pytest.mark.parametrize(
    ("argument", "note"),
    [
        (
            "fsdp_config={plain_on_one_device: true, offload_optimizer: true}",
            "fsdp_config.plain_on_one_device has no effect: fsdp_config.offload_optimizer needs FSDP2 on one "
            "device too",
        ),
        (
            "fsdp_config={plain_on_one_device: true, activation_checkpointing: true};compile_config={}",
            "fsdp_config.plain_on_one_device has no effect: activation_checkpointing of compiled blocks needs FSDP2 on "
            "one device too",
        ),
        ("fsdp_config.limit_all_gathers=true", "fsdp_config.limit_all_gathers has no effect: FSDP2 always does this"),
        (
            "train_loader.dataset.shuffle_algo=py1s",
            "train_loader.dataset.shuffle_algo has no effect: there is one order, for every world size",
        ),
        (
            "eval_interval=500;eval_loader={name: text, dataset: {local: data, split: val}}",
            "eval_interval: 500 counts epochs; 500 batches are 500ba",
        ),
        ("save_interval=500", "save_interval: 500 counts epochs; 500 batches are 500ba"),
        (
            "scheduler.t_warmup=200ba",
            "scheduler.t_warmup: 200ba is longer than the run, 100ba: the learning rate never reaches lr",
        ),
        ("scheduler.t_max=200ba", "scheduler.t_max: 200ba is longer than the run, 100ba: the schedule does not end"),
    ],
)
def test_what_has_no_effect_or_may_not_be_meant_is_noted(argument, note):
    assert load(*argument.split(";")).notes == [f"command line: {note}"]


def test_scaling_that_llm_foundry_ignores_is_left_out_and_said():
    rope, scaling = "model.attn_config.rope=true", "model.attn_config.rope_hf_config={type: linear, factor: 2}"
    ignored, used = load(rope, scaling), load(rope, scaling, "model.attn_config.rope_impl=hf")
    assert ignored.notes == [
        "command line: model.attn_config.rope_hf_config has no effect: rope_impl is dail; "
        "rope_impl: hf scales positions"
    ]
    assert ignored.config.model.attn_config.rope_hf_config.type == "no_scaling"
    assert used.config.model.attn_config.rope_hf_config.type == "linear" and not used.notes


def test_options_of_a_tokenizer_that_nobody_asks_for_are_noted():
    options = "tokenizer.kwargs={model_max_length: 128, eos_token: '</s>', use_fast: true}"
    assert load(options).notes == [
        "command line: tokenizer.kwargs.eos_token has no effect: the tokenizer's own files decide"
    ]


def test_the_weight_decay_of_a_run_is_in_its_record():
    assert as_dict(load().config)["optimizer"]["weight_decay"] == 1e-5
    assert as_dict(load("optimizer.name=adamw").config)["optimizer"]["weight_decay"] == 0.0
    assert as_dict(load("optimizer.weight_decay=0.1").config)["optimizer"]["weight_decay"] == 0.1


def test_a_window_below_two_batches_is_noted_for_it_shuffles_nothing():
    window = "train_loader.dataset.shuffle_block_size"
    assert load("train_loader.dataset.shuffle=true", f"{window}=15").notes == [
        f"command line: {window}: 15 is less than two batches of 8: shards are shuffled, their samples are not; "
        "set it to 800 or more, or leave it out"
    ]
    assert load("train_loader.dataset.shuffle=true", f"{window}=16").notes == []


def test_a_bare_integer_counts_epochs_and_is_noted():
    note = "command line: max_duration: 10 counts epochs; 10 batches are 10ba"
    assert load("max_duration=10", "scheduler.t_warmup=0.1dur").notes == [note]
    assert refusal("run.yaml", "max_duration=10", "scheduler.t_warmup=80sp") == (
        "command line: scheduler.t_warmup: 80sp given, expected a span in ep, the unit of max_duration, or in dur; "
        "a share of the run is written 0.1dur; max_duration: 10 counts epochs"
    )


def test_composers_schedules_mix_batches_and_epochs():
    assert load("max_duration=1ep", "scheduler.t_warmup=100ba").config.scheduler.t_warmup == Duration(100, "ba")
    load("scheduler.t_warmup=1ep", "scheduler.t_max=2ep")
    stable = refusal("run.yaml", "scheduler.name=warmup_stable_decay", "scheduler.t_warmup=1ep")
    assert stable.startswith("command line: scheduler.t_warmup: 1ep given, expected a span in ba, the unit of max")


def test_the_schedule_is_counted_in_the_unit_of_the_run():
    load("max_duration=2000tok", "scheduler.t_warmup=0ba")  # nothing is nothing in any unit, and t_scale is not used
    inverse_root = ("scheduler.name=inv_sqrt_with_warmup", "scheduler.t_warmup=0ba", "max_duration=800sp")
    assert refusal("run.yaml", *inverse_root) == (
        "command line: scheduler.t_scale: missing; expected a span in sp, the unit of max_duration, or in dur"
    )
    assert refusal("run.yaml", *inverse_root, "scheduler.t_scale=1ba") == (
        "command line: scheduler.t_scale: 1ba given, expected a span in sp, the unit of max_duration, or in dur; "
        "that is 8sp"
    )
    assert load(*inverse_root, "scheduler.t_scale=8sp").config.scheduler.t_scale == Duration(8, "sp")


def test_a_decay_is_a_span_after_the_warm_up():
    stable = ("scheduler.name=warmup_stable_decay", "max_duration=20ba", "scheduler.t_warmup=10ba")
    assert load(*stable).config.scheduler.t_decay == Duration(0.1, "dur")
    load(*stable, "scheduler.t_decay=10ba")
    assert refusal("run.yaml", *stable, "scheduler.t_decay=11ba") == (
        "command line: scheduler.t_decay: 11ba after a warm-up of 10ba is more than t_max, 1.0dur (max_duration: "
        "20ba); shorten one of them"
    )
    assert refusal("run.yaml", *stable, "scheduler.t_decay=160sp") == (
        "command line: scheduler.t_decay: 160sp given, expected a span in ba, the unit of max_duration, or in dur; "
        "that is 20ba"
    )
    assert refusal("run.yaml", *stable, "scheduler.decay=sqrt").startswith(
        "command line: scheduler.decay: 'sqrt' is not known; "
    )
    assert "did you mean warmup_stable_decay?" in refusal("run.yaml", "scheduler.name=wsd")


@pytest.mark.parametrize(
    ("argument", "owner"),
    [
        ("decay=linear", "warmup_stable_decay"),
        ("t_decay=20ba", "warmup_stable_decay"),
        ("t_scale=20ba", "inv_sqrt_with_warmup"),
        ("alpha_i=0.5", "linear_decay_with_warmup"),
    ],
)
def test_what_another_schedule_would_use_is_refused(argument, owner):
    key = argument.partition("=")[0]
    assert refusal("run.yaml", f"scheduler.{argument}") == (
        f"command line: scheduler.{key}: only {owner} uses it, and scheduler.name is cosine_with_warmup; remove it"
    )
    load(f"scheduler.{argument}", f"scheduler.name={owner}")


def test_a_configuration_as_a_run_folder_has_it_is_accepted_again(tmp_path):
    for name in ("cosine_with_warmup", "warmup_stable_decay", "inv_sqrt_with_warmup"):
        config = load(f"scheduler.name={name}", "scheduler.t_scale=1ba").config
        Path("config.yaml").write_text(yaml.safe_dump(as_dict(config)))
        assert as_dict(load_train_config(["config.yaml"], {}).config) == as_dict(config)


def test_the_same_blocks_serve_a_smaller_cluster_with_a_degree_of_1():
    tensor = "tp_config={tensor_parallel_degree: 1, sequence_parallel: true}"
    stages = ("pp_config={pipeline_parallel_degree: 1, schedule: interleaved, blocks: [1, 1]}", "model.n_layers=2")
    assert load(tensor, *stages).notes == [
        "command line: tp_config: sequence_parallel without effect, for tensor_parallel_degree is 1",
        "command line: pp_config: schedule, blocks without effect, for pipeline_parallel_degree is 1",
    ]
    assert load("tp_config.tensor_parallel_degree=1", "cp_config={}", "pp_config={}").notes == []
    assert load("tp_config={tensor_parallel_degree: 2, sequence_parallel: true}").notes == []


@pytest.mark.parametrize(
    "argument",
    [
        "model.fc_type=torch",
        "model.attn_config.rope=false",
        "model.attn_config.sliding_window_size=-1",
        "save_folder=null",
        "load_path=null",
        "autoresume=false",
        "train_subset_num_batches=-1",
        "eval_interval=0",
        "callbacks=null",
    ],
)
def test_values_that_ask_for_what_we_do_anyway_are_accepted(argument):
    assert load(argument).notes == []


def test_evaluation_reads_as_many_samples_as_fit_unless_the_batch_counts():
    """Its loss is the same whatever they are; a subset of so many batches is not."""
    assert load().config.eval_batch_size == 8192 // 128
    assert load("device_train_microbatch_size=auto").config.eval_batch_size == 8192 // 128
    assert load("device_train_microbatch_size=4").config.eval_batch_size == 4
    assert load("device_train_microbatch_size=4", "device_eval_batch_size=3").config.eval_batch_size == 3
    assert load("device_train_microbatch_size=4", "eval_subset_num_batches=2").config.eval_batch_size == 4


def test_an_evaluation_of_a_subset_counts_batches_of_the_run_whatever_the_hardware():
    assert load().config.eval_subset_samples is None
    for device in ("device_eval_batch_size=3", "device_train_microbatch_size=2"):
        config = load("eval_subset_num_batches=2", "global_train_batch_size=16", device).config
        assert config.eval_subset_samples == 32


def test_a_microbatch_that_is_measured_is_not_said_to_be_known():
    sizes = [load(f"device_train_microbatch_size={given}").config.first_microbatch_size(8) for given in (4, "auto")]
    assert (*sizes, load().config.first_microbatch_size(8)) == (4, 1, 8)


# ------------------------------------------------------------------------------------------------- world size


def check_world(config, world_size):
    check_batch(config, layout_of(config, world_size))


def test_a_batch_that_cannot_be_shared_names_the_worlds_that_can():
    with pytest.raises(ConfigError) as error:
        check_world(load().config, 3)
    assert str(error.value) == (
        "global_train_batch_size: 8 cannot be shared evenly by 3 devices; start with a number of devices that divides "
        "it (1, 2, 4, 8) or change the batch size"
    )


def test_a_copy_of_the_model_is_shared_by_a_number_of_devices_that_divides_them():
    hybrid = "fsdp_config={sharding_strategy: HYBRID_SHARD, data_parallel_shard_degree: 4}"
    check_world(load(hybrid).config, 4)
    with pytest.raises(ConfigError) as error:
        check_world(load(hybrid).config, 2)
    assert str(error.value) == (
        "fsdp_config.data_parallel_shard_degree: 4 does not divide the 2 devices of this launch; use 1 or 2"
    )


def test_a_microbatch_larger_than_the_devices_share_names_the_largest():
    config = load("device_train_microbatch_size=4").config
    check_world(config, 2)
    with pytest.raises(ConfigError) as error:
        check_world(config, 4)
    assert str(error.value) == (
        "device_train_microbatch_size: 4 is more than the 2 samples each device gets (8 / 4 devices); "
        "set it to 2 or less"
    )


@pytest.mark.parametrize(
    ("size", "world_size", "refused"),
    [
        (
            4,
            4,
            "device_train_microbatch_size: 4 is more than the 2 samples each device gets (8 / 4 devices); "
            "start 1 or 2 devices, or set it, in a new run, to 2 or less",
        ),
        (
            4,
            3,
            "global_train_batch_size: 8 cannot be shared evenly by 3 devices; start with a number of devices that "
            "divides it, in microbatches of 4 samples (1, 2) or change the batch size",
        ),
        (
            3,
            2,
            "device_train_microbatch_size: 3 does not divide the 4 samples of each device; with exact_sums every "
            "microbatch has as many; set it to 1, 2 or 4",
        ),
    ],
)
def test_with_exact_sums_all_numbers_of_ranks_that_are_possible_are_named_at_once(size, world_size, refused):
    config = load("exact_sums=true", f"device_train_microbatch_size={size}").config
    with pytest.raises(ConfigError) as error:
        check_world(config, world_size)
    assert str(error.value) == refused


@pytest.mark.parametrize(
    ("changes", "size", "fitting"),
    [
        ((), None, [1, 2, 4, 8]),
        ((), 2, [1, 2, 4]),
        ((), 3, []),
        (("fsdp_config={sharding_strategy: HYBRID_SHARD, data_parallel_shard_degree: 4}",), None, [4, 8]),
        pytest.param(
            ("pp_config={pipeline_parallel_degree: 2, schedule: 1f1b}",),
            *(2, [1, 2]),
            marks=needs("llmfoundry_layouts"),
        ),
    ],
)
def test_the_ranks_that_are_named_are_those_that_a_launch_takes(changes, size, fitting):
    exact = ("exact_sums=true", f"device_train_microbatch_size={size}") if size else ()
    config = load(*changes, *exact).config
    assert find_data_ranks(config, size) == fitting
    for count in range(1, 9):
        world_size = count * config.pipeline.pipeline_parallel_degree
        try:
            check_world(config, world_size)
            is_possible = True
        except ConfigError:
            is_possible = False
        assert is_possible == (count in fitting)


def test_the_quickstart_says_how_many_ranks_can_carry_it_on():
    config = load_train_config(["mpt-quickstart"], {}).config
    for world_size in (1, 2):
        check_world(config, world_size)
    with pytest.raises(ConfigError, match=r"; start 1 or 2 devices, or set it, in a new run, to 2 or less$"):
        check_world(config, 4)
    path = find_yaml("mpt-quickstart")
    assert path is not None
    text = path.read_text()
    assert "so at most 2 ranks can share one" in text and "every number of ranks" not in text


# --------------------------------------------------------------------------------- LLM Foundry's shipped MPT runs

SHIPPED = {
    # name: d_model, n_heads, n_layers, batch, max_duration, lr, parameters
    "mpt-125m": (768, 12, 12, 256, "4800ba", 6.0e-4, 125_311_488),
    "mpt-350m": (1024, 16, 24, 256, "13400ba", 3.0e-4, 355_985_408),
    "mpt-760m": (1536, 12, 24, 256, "29000ba", 2.5e-4, 760_470_528),
    "mpt-1b": (2048, 16, 24, 512, "24800ba", 2.0e-4, 1_315_950_592),
    "mpt-3b": (2560, 20, 32, 512, "51500ba", 1.6e-4, 2_651_837_440),
    "mpt-7b": (4096, 32, 32, 1024, "63900ba", 1.2e-4, 6_658_859_008),
    "mpt-13b": (5120, 40, 40, 1024, "124000ba", 1.0e-4, 12_853_954_560),
    "mpt-30b": (7168, 56, 48, 2048, "143100ba", 1.0e-4, 29_975_214_080),
    "mpt-70b": (8192, 64, 80, 2048, "333800ba", 8.0e-5, 64_862_437_376),
    "mpt-small-cpu": (16, 4, 4, 256, "10ba", 6.0e-4, 823_200),
}


def assert_is_shipped_run(config, name: str) -> None:
    model = config.model
    shape = (model.d_model, model.n_heads, model.n_layers)
    run = (config.global_train_batch_size, str(config.max_duration), config.optimizer.lr)
    assert (*shape, *run, count_parameters(model)) == SHIPPED[name]


@pytest.mark.parametrize("name", [name for name in SHIPPED if name != "mpt-small-cpu"])
def test_llm_foundry_words_resolve_to_the_runs_they_name(name):
    d_model, n_heads, n_layers, batch, max_duration, lr, _ = SHIPPED[name]
    Path(f"{name}.yaml").write_text(
        FOUNDRY.format(
            d_model=d_model, n_heads=n_heads, n_layers=n_layers, batch=batch, max_duration=max_duration, lr=lr
        )
    )
    invocation = load_train_config([f"{name}.yaml"], {})
    assert_is_shipped_run(invocation.config, name)
    assert invocation.config.run_name == name and invocation.config.train_loader.dataset.remote is None
    assert [note.split(" has no effect")[0] for note in invocation.notes] == [
        f"{name}.yaml: fsdp_config.limit_all_gathers",
        f"{name}.yaml: eval_loader.dataset.shuffle",  # the training data's block serves here for both
        f"{name}.yaml: eval_loader.drop_last",
    ]
    check_world(invocation.config, 8)


@pytest.mark.skipif("LLM_FOUNDRY_ROOT" not in os.environ, reason="LLM_FOUNDRY_ROOT names no checkout of LLM Foundry")
@pytest.mark.parametrize("name", SHIPPED)
def test_the_files_that_llm_foundry_ships_load_unchanged(name):
    files = list(Path(os.environ["LLM_FOUNDRY_ROOT"]).rglob(f"pretrain/{name}.yaml"))
    assert len(files) == 1
    assert_is_shipped_run(load_train_config([str(files[0])], {}).config, name)


def packed(*arguments: str) -> LoadedTrain:
    """A YAML of packed documents, written as bytes, as LLM Foundry has it."""
    dataset = "train_loader.dataset."
    own = [f"{dataset}token_encoding_type=uint16", "model.attn_config.attn_uses_sequence_id=true", *arguments]
    return load(*own)


def test_packed_documents_of_llm_foundry_load_with_its_words():
    dataset = packed("train_loader.dataset.eos_token_id=0").config.train_loader.dataset
    assert (dataset.token_encoding_type, dataset.eos_token_id, dataset.bos_token_id) == ("uint16", 0, None)
    notes = load("train_loader.dataset.bos_token_id=1").notes
    assert notes == [
        "command line: train_loader.dataset.bos_token_id has no effect: documents see each other without "
        "model.attn_config.attn_uses_sequence_id: true"
    ]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["train_loader.dataset.token_encoding_type=float16"], "'float16' is not known; expected int8, int16,"),
        (["train_loader.dataset.eos_token_id=0", "train_loader.dataset.bos_token_id=1"], "both eos_token_id and bos"),
        (["train_loader.dataset.eos_token_id=999999"], "999999 is outside model.vocab_size"),
        (["model.vocab_size=300", "train_loader.dataset.eos_token_id=300"], "300 is outside model.vocab_size, 300"),
        (
            ["train_loader.dataset.eos_token_id=0", "eval_loader={dataset: {local: x, eos_token_id: 1}}"],
            "eval_loader.dataset.eos_token_id: 1 is not that of train_loader.dataset, 0; the model divides "
            "documents of both alike: give both loaders the same one",
        ),
    ],
)
def test_separators_that_contradict_each_other_are_refused(arguments, text):
    with pytest.raises(ConfigError, match=text):
        packed(*arguments)


def test_reading_a_configuration_needs_no_torch():
    code = "import llmfoundry_lite.config.load_train, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
