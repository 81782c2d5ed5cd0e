import importlib.util
import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import yaml

from llmfoundry_lite import dry_run, preflight
from llmfoundry_lite.checkpoint import start as starting
from llmfoundry_lite.checkpoint.manifest import Timestamp
from llmfoundry_lite.checkpoint.open_folder import open_folder
from llmfoundry_lite.config.layout import Layout, layout_of
from llmfoundry_lite.config.load_train import load_train_config
from llmfoundry_lite.config.schema import as_dict
from llmfoundry_lite.config.spans import Duration
from llmfoundry_lite.data.tokenizer import load_tokenizer, train_tokenizer
from llmfoundry_lite.errors import CheckpointError, ConfigError, DataError
from llmfoundry_lite.hardware import GIB, Device
from llmfoundry_lite.launch_train import check as check_launch
from llmfoundry_lite.launch_train import main as train_main
from tests.helpers.launch import ROOT
from tests.helpers.present import leave_out_companions, needs
from tests.helpers.tiny import build_tokenizer, tiny_config, write_config, write_data


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = write_data(tmp_path_factory.mktemp("data"), num_train=60, num_val=9)
    return folder


def check(tmp_path, config, world_size=1, must_exist=True):
    loaded = load_train_config([write_config(tmp_path / "run.yaml", config)]).config
    return loaded, preflight.check(loaded, layout_of(loaded, world_size), must_exist=must_exist)


def write_summary(folder, tokenizer, max_seq_len=32):
    recorded = {
        "name": "trained here",
        "fingerprint": tokenizer.fingerprint,
        "vocab_size": tokenizer.vocab_size,
    }
    (folder / "summary.json").write_text(json.dumps({"max_seq_len": max_seq_len, "tokenizer": recorded}))


@pytest.mark.parametrize("must_exist", [True, False])
@pytest.mark.parametrize("key", ["local", "split", "dataset_uri"])
def test_a_name_that_is_too_long_for_a_file_is_one_of_no_file(tmp_path, data, key, must_exist):
    long = "x" * 5000
    build_tokenizer(tmp_path / "tokenizer")
    config = tiny_config(data, tokenizer__name=str(tmp_path / "tokenizer"))
    if key == "dataset_uri":
        config["icl_tasks"] = [{"label": "t", "icl_task_type": "language_modeling", "dataset_uri": long}]
    else:
        config["train_loader"]["dataset"][key] = long
    if must_exist:
        with pytest.raises(DataError, match="does not exist"):
            check(tmp_path, config)
    else:
        _, result = check(tmp_path, config, must_exist=False)
        assert any(long in note for note in result.not_checked)


def test_parts_of_ones_own_are_named_and_neither_imported_nor_counted(tmp_path, data, monkeypatch):
    (tmp_path / "parts_of_mine.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    own = {"model__norm_type": "python:parts_of_mine:Norm", "scheduler": {"name": "python:parts_of_mine:S", "peak": 2}}
    config, found = check(tmp_path, tiny_config(data, **own))
    text = dry_run.describe_launch(config, Layout(), found)
    assert (
        "\nown parts      python:parts_of_mine:Norm (model.norm_type): not counted in parameters, FLOPs and memory, "
        f"because {tmp_path}/parts_of_mine.py has no class Norm at the top level of the file\n" in text
    )
    assert ", python:parts_of_mine:S, peak 2, " in text
    own["model__norm_type"] = "python:parts_of_nobody:Norm"
    with pytest.raises(ConfigError, match=r"^model\.norm_type: .*: No module named 'parts_of_nobody'; is its folder"):
        check(tmp_path, tiny_config(data, **own))


def test_counts_samples_and_says_what_was_not_checked(tmp_path, data):
    config, found = check(tmp_path, tiny_config(data))
    assert found.num_samples == {"train": 60, "eval": 9}
    assert found.not_checked == [
        "tokenizer.name: tests/not-on-this-disk is neither a local folder nor in the Hub's cache"
    ]
    text = dry_run.describe_launch(config, Layout(), found)
    assert "batch          8 samples x 32 tokens = 256 tokens" in text
    assert f"train data     60 samples, {data}/train, 4 of them left out of each epoch" in text
    assert re.search(r"model FLOPs +[\d.]+ k per token, [\d.]+ M per batch", text)
    assert "10ba = 10 batches, 2.56 k tokens, 1.33 epochs" in text


def test_hours_are_told_by_a_measured_rate_and_many_epochs_are_remarked_on(tmp_path, data):
    changes = {"max_duration": "10000ba", "variables": {"tokens_per_second": 100}}
    config, found = check(tmp_path, tiny_config(data, **changes))
    text = dry_run.describe_launch(config, Layout(), found)
    assert "1,333.33 epochs, which learn this text by heart" in text
    assert ", 7.1 hours at 100 tokens per second" in text


@needs("llmfoundry_layouts")
def test_tensor_parallelism_across_nodes_is_warned_of(tmp_path, data):
    config, _ = check(
        tmp_path,
        tiny_config(data, tp_config={"tensor_parallel_degree": 4}, model__attn_config__fused_qkv=False),
        world_size=8,
    )
    for node_size in (None, 4, 8):
        assert "warning" not in dry_run.describe_launch(config, layout_of(config, 8, node_size), preflight.Preflight())
    text = dry_run.describe_launch(config, layout_of(config, 8, 2), preflight.Preflight())
    (line,) = [line for line in text.splitlines() if line.startswith("warning")]
    assert line == (
        "warning        tp_config.tensor_parallel_degree: groups of 4 devices span nodes of 2: every block exchanges "
        "over the network; a degree that divides 2 stays in a node"
    )


@needs("llmfoundry_layouts")
def test_a_launch_across_nodes_warns_of_slow_groups(tmp_path, data, monkeypatch):
    monkeypatch.chdir(tmp_path)
    groups = {"tp_config": {"tensor_parallel_degree": 4}, "device_train_microbatch_size": 2}
    path = write_config(tmp_path / "run.yaml", tiny_config(data, **groups))
    place = {"WORLD_SIZE": 8, "RANK": 0, "LOCAL_RANK": 0, "MASTER_ADDR": "n1", "MASTER_PORT": 29500}
    for key, value in place.items():
        monkeypatch.setenv(key, str(value))
    for node_size, num_warnings in ((2, 1), (4, 0)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(node_size))
        invocation, layout, _ = check_launch([path])
        assert layout.node_size == node_size
        assert len([note for note in invocation.notes if note.startswith("warning: tp_config")]) == num_warnings


def test_missing_data_stops_a_launch_and_is_noted_by_a_dry_run(tmp_path):
    config = tiny_config(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"train_loader.dataset: .*index.json does not exist; make it with"):
        check(tmp_path, config)
    _, found = check(tmp_path, config, must_exist=False)
    assert len([note for note in found.not_checked if "is not there" in note]) == 2


def test_a_refused_launch_is_recorded_beside_checkpoints_that_are_elsewhere(tmp_path):
    """Only where all keys are valid: a key that is not may be that of the folder."""
    config = tiny_config(tmp_path / "nowhere", run_folder=str(tmp_path / "run"))
    for number, changes in enumerate(({"no_such_key": 1}, {"save_folder": str(tmp_path / "run/saves")}, {})):
        folder = f"memory://refused/{number}"
        path = write_config(tmp_path / "run.yaml", {"save_folder": folder, **config, **changes})
        with pytest.raises((ConfigError, DataError)):
            check_launch([path])
        assert open_folder(folder).tree_sizes().keys() == ({"launches/early-end.json"} if number == 2 else set())
    record = json.loads(open_folder(folder).child("launches").read("early-end.json", 1 << 20))
    assert record["status"] == "failed" and "index.json does not exist" in record["reason"]
    with pytest.raises(DataError):
        check_launch([path, "--dry-run=here", "save_folder=memory://refused/dry"])
    assert open_folder("memory://refused/dry").names() == []


ROOM = Device("this machine's RAM", 8 * GIB, True)


def test_a_dry_run_for_this_machine_refuses_what_a_launch_here_would_stumble_over(tmp_path, data, monkeypatch):
    config, _ = check(tmp_path, tiny_config(data))
    with pytest.raises(ConfigError, match=r"^tokenizer.name: tests/not-on-this-disk is neither a local folder nor in"):
        preflight.check_here(config, Layout(), [ROOM])
    monkeypatch.setattr(preflight, "is_local_or_cached", lambda name: True)
    two = layout_of(config, 2)
    preflight.check_here(config, two, [ROOM])
    need = preflight.estimate_training_memory(config, two).total_bytes
    with pytest.raises(
        ConfigError, match=r"^memory: 2 ranks need about .* GiB by the estimate, and this machine's RAM"
    ):
        preflight.check_here(config, two, [ROOM._replace(free_bytes=2 * need - 1)])
    gpus = [Device("cuda:0", need, False), Device("cuda:1", need - 1, False)]
    with pytest.raises(ConfigError, match=r"^memory: each rank needs about .* and cuda:1 has .* free"):
        preflight.check_here(config, two, gpus)
    own_norm = replace(config, model=replace(config.model, norm_type="python:torch.nn:LayerNorm"))
    with pytest.raises(
        ConfigError, match=r"the estimate, without what python:torch\.nn:LayerNorm \(model\.norm_type\) tak"
    ):
        preflight.check_here(own_norm, two, [ROOM._replace(free_bytes=1)])
    with pytest.raises(ConfigError, match="4 ranks given, and this machine has 2 devices"):
        preflight.check_here(config, layout_of(config, 4), gpus)


def test_a_launch_that_compiles_needs_a_compiler_and_pythons_header(tmp_path, data, monkeypatch):
    config, _ = check(tmp_path, tiny_config(data, compile_config={}))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    none = r"^compile_config: torch.compile needs a C compiler on PATH \(gcc, clang or g\+\+; `apt-get install gcc`\)"
    with pytest.raises(ConfigError, match=rf"{none}; install it, or leave compiling out: compile_config=null$"):
        preflight.check(config, Layout(), must_exist=True)
    preflight.check(config, Layout(), must_exist=False)
    monkeypatch.setattr(preflight.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(
        ConfigError, match=rf"{none} and {tmp_path}/Python.h \(`apt-get install python3-dev`\); install"
    ):
        preflight.check(config, Layout(), must_exist=True)
    monkeypatch.setenv("CC", "/nowhere/cc")
    with pytest.raises(ConfigError, match=r"a C compiler \(CC: /nowhere/cc is none\)"):
        preflight.check(config, Layout(), must_exist=True)
    for without in ({"compile_config": None}, {"compile_config": {"backend": "aot_eager"}}):
        preflight.check(replace(config, **without), Layout(), must_exist=True)


def test_a_dry_run_lists_what_it_has_not_checked(tmp_path, data):
    config, found = check(tmp_path, tiny_config(data), must_exist=False)
    memory = "not checked    the memory of this machine's devices; --dry-run=here also checks"
    assert memory in dry_run.describe_launch(config, Layout(), found)
    assert memory not in dry_run.describe_launch(config, Layout(), found, is_for_here=True)


def test_a_dry_run_is_short_and_prints_the_yaml_when_asked(tmp_path, data, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    path, said = write_config(tmp_path / "run.yaml", tiny_config(data, device_eval_batch_size=None)), {}
    for option in ("--dry-run", "--dry-run=full"):
        train_main([path, option])
        said[option] = capsys.readouterr().out
    assert said["--dry-run=full"].endswith("\n" + said["--dry-run"])
    assert yaml.safe_load(said["--dry-run=full"].partition("\nrun ")[0])["model"]["d_model"] == 32
    names = [line[:14].strip() for line in said["--dry-run"].splitlines()]
    assert names[:7] == ["run", "start", "model", "model FLOPs", "devices", "batch", ""] and len(names) < 20
    assert (
        ", lr 0.01, weight decay 1e-05, cosine_with_warmup, warm-up 2ba, gradients clipped at 1\n" in said["--dry-run"]
    )


def test_a_dry_run_says_where_a_launch_would_begin(tmp_path, data, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def start(**changes):
        config, found = check(tmp_path, tiny_config(data, **changes))
        said = dry_run.describe_launch(config, Layout(), found).splitlines()
        unseen.append("".join(line for line in said if "fits this configuration" in line))
        return said[1].removeprefix("start          ")

    unseen = []
    assert start(autoresume=True) == "batch 1, from initial weights"
    assert start(load_path="runs/a", load_weights_only=True) == "the weights of runs/a"
    assert (
        start(save_folder="s3://a/b", autoresume=True)
        == "the newest save in s3://a/b, else batch 1, from initial weights"
    )
    assert unseen == [
        "",
        "not checked    load_path: runs/a, and whether it fits this configuration",
        "not checked    s3://a/b: what it holds, and whether that fits this configuration",
    ]
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "empty").mkdir()
    for given, meant in (("~/empty", f"{tmp_path}/empty"), (f"file://{tmp_path}/empty", f"file://{tmp_path}/empty")):
        assert start(load_path=given).startswith(f"refused: load_path: {meant} holds no intact checkpoint")
    shutil.copytree(ROOT / "tests/checkpoint/fixtures/format-2/1-ranks", tmp_path / "runs/tiny/checkpoints")
    assert start().startswith("refused: runs/tiny/checkpoints already holds ba3 of this run; carry on with autoresume=")
    assert start(autoresume=True).startswith("refused: the checkpoint was not saved by a training run; load_weights_on")


def test_a_dry_run_refuses_what_the_launch_would(tmp_path, data, monkeypatch):
    """It reads the checkpoint's configuration as a launch does."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / "tests/checkpoint/fixtures/format-2/1-ranks", tmp_path / "runs/tiny/checkpoints")
    config, found = check(tmp_path, tiny_config(data, autoresume=True))
    manifest = SimpleNamespace(config=as_dict(config), scalars={"timestamp": {}}, optimizer={}, fingerprints={})
    manifest.run_name = config.run_name
    manifest.timestamp = Timestamp(batch=2, sample=16, token=512)
    folder = SimpleNamespace(url="runs/tiny/checkpoints/ba2")
    newest = SimpleNamespace(name="ba2", manifest=manifest, folder=folder)
    monkeypatch.setattr(starting, "newest_of", lambda candidates: newest)

    def describe(config, **options):
        said = dry_run.describe_launch(config, Layout(), found, **options)
        unseen.append("not checked    the tensors and the data of ba2" in said)
        return said.splitlines()[1].removeprefix("start          ")

    unseen = []
    assert describe(config) == "carries on from runs/tiny/checkpoints/ba2"  # ba3 is there, and cannot be read
    assert unseen == [True]
    assert describe(replace(config, stop_at=Duration(16, "sp"))).endswith(
        "/ba2, where stop_at ends this launch: nothing is trained"
    )
    assert describe(replace(config, max_duration=Duration(2, "ba"))).endswith(
        "/ba2, where the run is done: nothing is trained"
    )
    assert describe(replace(config, max_duration=Duration(1, "ep"), stop_at=Duration(3, "ba"))).endswith("/ba2")
    other = replace(config, seed=18)
    refused = (
        f"seed is 18 here and {config.seed} in the checkpoint; a run must resume with the values in its checkpoint"
    )
    assert describe(other).startswith(f"refused: {refused}")
    with pytest.raises(CheckpointError, match=f"^{refused}"):
        describe(other, is_for_here=True)
    monkeypatch.setattr(starting, "newest_of", lambda candidates: None)
    assert describe(config).startswith("refused: runs/tiny/checkpoints: no checkpoint can be read; ")


def test_a_dry_run_for_this_machine_ends_with_2_where_data_are_missing(tmp_path, data, monkeypatch, capsys):
    path = write_config(tmp_path / "run.yaml", tiny_config(tmp_path / "nowhere"))
    monkeypatch.setattr(sys, "argv", ["train.py", path, "--dry-run=here"])
    with pytest.raises(DataError, match=r"index.json does not exist"):
        train_main(sys.argv[1:])
    train_main([path, "--dry-run"])
    assert "is not there" in capsys.readouterr().out


def test_too_few_samples_for_one_batch(tmp_path, data):
    with pytest.raises(DataError, match="60 samples do not make one batch of 64"):
        check(tmp_path, tiny_config(data, global_train_batch_size=64))


def test_an_index_that_is_none_is_named(tmp_path):
    folder = write_data(tmp_path / "data", num_train=20, num_val=5)
    (folder / "train/index.json").write_text("{")
    with pytest.raises(DataError, match=r"train/index.json is not an MDS index"):
        check(tmp_path, tiny_config(folder))


def test_the_tokenizer_must_be_the_one_that_made_the_shards(tmp_path):
    folder = write_data(tmp_path / "data", num_train=20, num_val=5)
    theirs, ours = train_tokenizer(["one two three"] * 3, 260), train_tokenizer(["uno dos tres"] * 3, 262)
    write_summary(folder, theirs)
    ours.save(tmp_path / "tokenizer")
    config = tiny_config(folder, model__vocab_size=300, tokenizer__name=str(tmp_path / "tokenizer"))
    with pytest.raises(DataError, match=r"is not the tokenizer that made train_loader\.dataset"):
        check(tmp_path, config)


@pytest.mark.parametrize("where", ["tokenizer_config.json", "special_tokens_map.json", "tokenizer.kwargs"])
def test_an_end_of_text_that_also_pads_is_noted_for_llm_foundry_learns_nothing_of_it(tmp_path, data, where):
    tokenizer = train_tokenizer(["one two three"] * 3, 260)
    tokenizer.save(tmp_path / "tokenizer")
    options = {"tokenizer__name": str(tmp_path / "tokenizer"), "model__vocab_size": 300}
    assert not check(tmp_path, tiny_config(data, **options))[1].notes
    pad = {"pad_token": tokenizer.eos_token}
    if where == "tokenizer.kwargs":
        options["tokenizer__kwargs"] = pad
    else:
        file = tmp_path / "tokenizer" / where
        file.write_text(json.dumps({**json.loads(file.read_text()), **pad}))
    [note] = check(tmp_path, tiny_config(data, **options))[1].notes
    assert "pads with its end of text, <|endoftext|>; it is learned here" in note


def test_a_vocabulary_smaller_than_the_tokenizers(tmp_path):
    folder = write_data(tmp_path / "data", num_train=20, num_val=5)
    tokenizer = train_tokenizer(["one two three"] * 3, 260)
    write_summary(folder, tokenizer)
    with pytest.raises(
        ConfigError, match=r"model.vocab_size: 96 is less than the 2\d\d of the tokenizer .*set it to 384"
    ):
        check(tmp_path, tiny_config(folder))
    (folder / "summary.json").unlink()
    tokenizer.save(tmp_path / "tokenizer")
    with pytest.raises(ConfigError, match=r"model.vocab_size: 96 is less than the tokenizer's 2\d\d"):
        check(tmp_path, tiny_config(folder, tokenizer__name=str(tmp_path / "tokenizer")))


def test_samples_shorter_than_the_run_wants(tmp_path):
    folder = write_data(tmp_path / "data", num_train=20, num_val=5)
    write_summary(folder, train_tokenizer(["one"], 257), max_seq_len=16)
    with pytest.raises(DataError, match="have 16 tokens, but max_seq_len is 32; set max_seq_len=16"):
        check(tmp_path, tiny_config(folder, model__vocab_size=300))


@pytest.mark.parametrize("block", ["train_loader", "eval_loader"])
@pytest.mark.parametrize("length_in", ["summary", "index"])
def test_samples_longer_than_the_run_reads_are_refused_unless_said(tmp_path, block, length_in):
    folder = write_data(tmp_path / "data", num_train=20, num_val=5)
    if length_in == "summary":
        write_summary(folder, train_tokenizer(["one"], 257), max_seq_len=32)
    else:
        for split in ("train", "val"):
            index = folder / split / "index.json"
            index.write_text(index.read_text().replace('"ndarray:uint16"', '"ndarray:uint16:32"'))
    other = "eval_loader" if block == "train_loader" else "train_loader"
    config = tiny_config(folder, model__vocab_size=300, **{f"{block}__dataset__max_seq_len": 24})
    split = "train" if block == "train_loader" else "val"
    where = f"{block}.dataset: samples of {folder}/{split} have 32 tokens"
    with pytest.raises(DataError) as error:
        check(tmp_path, config, must_exist=False)
    assert str(error.value) == (
        f"{where}, and max_seq_len 24 leaves 25 % of the text out; set max_seq_len=32, prepare the data again with "
        "--max-seq-len 24, or set allow_truncation: true in the loader's dataset"
    )
    config[block]["dataset"]["allow_truncation"] = True
    notes = check(tmp_path, config)[1].notes
    assert notes == [f"{where}; max_seq_len 24 leaves 25 % of the text out"] and other not in notes[0]


@pytest.mark.parametrize("content", ["{}", "[1]", "cut off {"])
def test_a_summary_of_another_tool_says_nothing(tmp_path, content):
    folder = write_data(tmp_path / "data", num_train=20, num_val=5)
    (folder / "summary.json").write_text(content)
    check(tmp_path, tiny_config(folder))


def test_each_of_several_validation_loaders_is_checked_by_its_label(tmp_path, data):
    loaders = [{"label": split, "dataset": {"local": str(data), "split": split}} for split in ("val", "gone")]
    config = tiny_config(data, eval_loader=loaders)
    loaded, found = check(tmp_path, config, must_exist=False)
    assert set(found.num_samples) == {"train", "eval/val"}
    assert "\neval/val data  " in dry_run.describe_launch(loaded, Layout(), found)
    with pytest.raises(DataError, match=r"eval_loaders\.gone\.dataset: .*gone/index\.json does not exist"):
        check(tmp_path, config)
    own = {"label": "own", "name": "python:not_a_module:build"}
    with pytest.raises(ConfigError, match=r"eval_loaders\.own\.name: .*No module named 'not_a_module'"):
        check(tmp_path, tiny_config(data, eval_loader=[own]))


def test_what_an_epoch_of_streams_leaves_out_is_not_guessed(tmp_path, data):
    streams = {"a": {"local": str(data), "repeat": 2.0}}
    config, found = check(tmp_path, tiny_config(data, train_loader={"dataset": {"split": "train", "streams": streams}}))
    assert f"train data     60 samples, {data}/train\n" in dry_run.describe_launch(config, Layout(), found)
    config, found = check(tmp_path, tiny_config(data, train_loader__dataset__epoch_size=500, max_duration="10ba"))
    text = dry_run.describe_launch(config, Layout(), found)
    assert "left out" not in text and "epochs" not in text


def test_the_folder_of_a_stream_is_its_own_split_or_the_data_sets(tmp_path, data):
    streams = {"a": {"local": str(data)}, "b": {"local": str(data), "split": "val"}, "c": {"local": "gone"}}
    config = tiny_config(data, train_loader={"dataset": {"split": "train", "streams": streams}})
    with pytest.raises(DataError, match=r"train_loader.dataset.streams.c: gone/train/index.json does not exist"):
        check(tmp_path, config)
    streams["c"]["remote"] = "s3://bucket/c"
    _, found = check(tmp_path, config)
    assert "train_loader.dataset.streams.c: gone/train will be filled from s3://bucket/c" in found.not_checked
    del streams["c"]
    assert check(tmp_path, config)[1].num_samples["train"] == 60 + 9


def test_text_needs_its_tokenizer_before_a_launch(tmp_path, monkeypatch):
    folder = write_data(tmp_path / "data", num_train=20, num_val=5)
    index = folder / "train/index.json"
    index.write_text(index.read_text().replace('"tokens"', '"text"'))
    with pytest.raises(
        ConfigError,
        match=r"tokenizer.name: tests/not-on-this-disk .* train_loader.dataset is text .*"
        r"`hf download tests/not-on-this-disk`",
    ):
        check(tmp_path, tiny_config(folder))
    _, found = check(tmp_path, tiny_config(folder), must_exist=False)
    assert found.not_checked[0].endswith("and train_loader.dataset is text that needs it")
    (tmp_path / "old").mkdir()
    leave_out_companions(monkeypatch)
    with pytest.raises(ConfigError, match=r"^tokenizer.name: .*/old: .* needs the companion llmfoundry_formats$"):
        check(tmp_path, tiny_config(folder, tokenizer={"name": str(tmp_path / "old")}), must_exist=False)


@pytest.mark.parametrize(
    ("module", "missing"),
    [("no_such_package.x", "no_such_package"), ("mine.gone.deep", "mine.gone"), ("mine.inner.gone", "mine.inner.gone")],
)
def test_a_module_of_ones_own_that_is_not_there(tmp_path, data, monkeypatch, module, missing):
    (tmp_path / "mine/inner").mkdir(parents=True)
    (tmp_path / "mine/inner/there.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    check(tmp_path, tiny_config(data, callbacks={"python:mine.inner.there:Thing": {}}))
    with pytest.raises(ConfigError, match=rf"^optimizer.name: .*: No module named '{missing}'; is its folder on"):
        check(tmp_path, tiny_config(data, optimizer={"name": f"python:{module}:Thing", "lr": 1}))


def test_a_dry_run_needs_neither_torch_nor_a_process_group(tmp_path, data):
    path = write_config(tmp_path / "run.yaml", tiny_config(data))
    code = (
        "import sys, runpy; sys.argv = ['train.py', sys.argv[1], '--dry-run']\n"
        "try: runpy.run_path('scripts/train.py', run_name='__main__')\n"
        "except SystemExit as end: assert not end.code\n"
        "assert 'torch' not in sys.modules and 'composer' not in sys.modules"
    )
    result = subprocess.run([sys.executable, "-c", code, path], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "memory         about" in result.stdout and "d_model:" not in result.stdout


def test_documents_cannot_be_kept_apart_without_the_tokenizer(tmp_path, data):
    config = tiny_config(data, model__attn_config={"attn_uses_sequence_id": True})
    with pytest.raises(ConfigError, match="attn_uses_sequence_id needs its end of text; fetch it first"):
        check(tmp_path, config)
    assert check(tmp_path, config, must_exist=False)[1].not_checked
    config["train_loader"]["dataset"]["bos_token_id"] = 3
    check(tmp_path, config)


def test_a_separator_that_is_not_the_tokenizers_is_refused_unless_told(tmp_path, data):
    build_tokenizer(tmp_path / "tokenizer")
    config = tiny_config(data, tokenizer__name=str(tmp_path / "tokenizer"))
    config["train_loader"]["dataset"]["eos_token_id"] = load_tokenizer(str(tmp_path / "tokenizer")).eos_token_id
    check(tmp_path, config)
    config["train_loader"]["dataset"]["eos_token_id"] += 1
    with pytest.raises(ConfigError, match=r"eos_token_id: 3 is not the tokenizer's, 2 .*set train_loader.dataset.over"):
        check(tmp_path, config)
    config["train_loader"]["dataset"]["override_eos_token_id_mismatch_error"] = True
    check(tmp_path, config)


@needs("llmfoundry_layouts")
def test_a_dry_run_lists_what_each_stage_holds_and_the_fullest(tmp_path, data):
    stages = {"pipeline_parallel_degree": 2, "schedule": "interleaved"}
    config, _ = check(tmp_path, tiny_config(data, pp_config=stages, model__n_layers=5), world_size=4)
    text = dry_run.describe_launch(config, layout_of(config, 4), preflight.Preflight())
    begin = text.splitlines().index("stages         interleaved")
    first, second = (line.strip() for line in text.splitlines()[begin + 1 : begin + 3])
    assert first.startswith("ranks 0-1: embeddings, block 0, blocks 2-3; ")
    assert second.startswith("ranks 2-3: block 1, block 4, last norm, head and loss; ")
    assert ["the fullest: about" in line for line in (first, second)].count(True) == 1
    assert "4 = 2 stages of blocks (pipeline) x 2 shares of a copy (shard)" in text


# ------------------------------------------------------------------------------------- a user's optimizer, wandb


def optimizer_bytes(config):
    return preflight.estimate_training_memory(config, Layout()).optimizer_bytes


def test_a_dry_run_says_what_is_not_known_of_a_user_s_own_optimizer(tmp_path, data, monkeypatch):
    own = {"name": "python:my.optim:Own", "lr": 0.01, "betas": [0.9, 0.99], "weight_decay": 0.3}
    config, found = check(tmp_path, tiny_config(data))
    assert "assumed" not in dry_run.describe_launch(config, Layout(), found)
    config = load_train_config([write_config(tmp_path / "run.yaml", tiny_config(data, optimizer=own))]).config
    text = dry_run.describe_launch(config, Layout(), found)
    assert (
        "optimizer      python:my.optim:Own, lr 0.01, betas [0.9, 0.99], weight_decay 0.3, its own defaults for all "
        "else, cosine_with_warmup"
    ) in text
    assert "\n               how much python:my.optim:Own keeps is not known; `optimizer` is assumed to be two" in text
    assert "as of AdamW; there is no source of my.optim\n" in text

    # Its class may tell.
    (tmp_path / "own_slots.py").write_text("class Own:\n    slots = ('first', 'second', 'slow')\nraise SystemExit\n")
    monkeypatch.syspath_prepend(tmp_path)
    own["name"] = "python:own_slots:Own"
    config = load_train_config([write_config(tmp_path / "run.yaml", tiny_config(data, optimizer=own))]).config
    text = dry_run.describe_launch(config, Layout(), found)
    assert (
        "\n               python:own_slots:Own keeps 12 bytes for each parameter; its class says so with slots\n"
        in text
    )
    assumed = optimizer_bytes(replace(config, optimizer=replace(config.optimizer, name="adamw", kwargs={})))
    assert optimizer_bytes(config) == 1.5 * assumed


@pytest.mark.parametrize("must_exist", [True, False])
def test_a_name_that_wandb_does_not_take_is_refused_with_the_nearest(tmp_path, data, must_exist):
    config = tiny_config(data, loggers={"wandb": {"init_kwargs": {"projct": "x"}}})
    with pytest.raises(ConfigError) as refused:
        check(tmp_path, config, must_exist=must_exist)
    assert str(refused.value) == (
        "loggers.wandb.init_kwargs.projct: wandb.init has no such argument; did you mean project?"
    )
    check(tmp_path, tiny_config(data, loggers={"wandb": {"init_kwargs": {"project": "x", "job_type": "y"}}}))


def test_a_variable_of_wandb_that_has_no_effect_is_told(tmp_path, data, monkeypatch):
    for name, value in {"RESUME": "must", "PROJECT": "theirs", "TAGS": "a,b", "ENTITY": "team", "DIR": "x"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    wandb = {"project": "ours", "tags": ["a", "b"], "init_kwargs": {"dir": "y"}}
    _, found = check(tmp_path, tiny_config(data, loggers={"wandb": wandb}))
    assert found.notes == [
        "loggers.wandb: WANDB_PROJECT=theirs has no effect: project is ours",
        "loggers.wandb: WANDB_DIR=x has no effect: dir is y",
        "loggers.wandb: WANDB_RESUME=must has no effect: resume is allow",
    ]


def test_wandb_that_is_not_installed_is_said_before_training(tmp_path, data, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "wandb" else find_spec(name))
    config = tiny_config(data, loggers={"wandb": {}})
    with pytest.raises(ConfigError, match=r"loggers\.wandb: wandb is not installed; pip install wandb"):
        check(tmp_path, config)
    assert "loggers.wandb: wandb is not installed" in check(tmp_path, config, must_exist=False)[1].not_checked


# ------------------------------------------------------------------------------------- what an evaluation will ask


GOOD = {"context": "a b", "continuation": " c"}


@pytest.mark.parametrize(
    ("rows", "task", "message"),
    [
        ([GOOD] * 2, {"num_fewshot": [0, 5]}, "has 2 rows, too few for 5 examples and a question"),
        ([GOOD, {"context": "a"}], {}, "line 2: no column 'continuation'"),
        ([], {}, "has no rows"),
        ([{**GOOD, "continuation": ""}], {}, "no item can be asked of a model of 32 tokens: 1 with an answer without"),
        ([{"text": "a"}, {"txt": "b"}], {"icl_task_type": "perplexity"}, "line 2: text is None, expected a text"),
        ([{"text": ""}], {"icl_task_type": "perplexity"}, "has no text"),
        ([{"context": "a", "answer": "b " * 90}], {"icl_task_type": "generation_task_with_answers"}, "longer than the"),
    ],
)
@pytest.mark.parametrize("must_exist", [True, False])
def test_a_task_that_can_never_be_asked_is_refused_before_training(
    tmp_path, data, spelling, rows, task, message, must_exist
):
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = {"label": "mine", "icl_task_type": "language_modeling", "dataset_uri": str(tmp_path / "mine.jsonl"), **task}
    config = tiny_config(data, icl_tasks=[asked], eval_interval="2ba", **spelling)
    with pytest.raises(DataError, match=message) as refused:
        check(tmp_path, config, must_exist=must_exist)
    assert str(refused.value).startswith("icl_tasks: mine: ")
    check(tmp_path, config | {"eval_interval": 0}, must_exist=must_exist)  # never asks it


def test_a_task_that_can_be_asked_is_no_hindrance(tmp_path, data, spelling):
    too_long = {"context": "a", "continuation": " b" * 90}
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [too_long, GOOD]))
    asked = {"label": "mine", "icl_task_type": "language_modeling", "dataset_uri": str(tmp_path / "mine.jsonl")}
    text = {"label": "text", "icl_task_type": "perplexity", "dataset_uri": str(data / "val")}
    config = tiny_config(data, icl_tasks=[asked, text], eval_interval="2ba", **spelling)
    _, found = check(tmp_path, config)
    assert not any("icl_tasks" in line for line in found.not_checked)
    absent = {**asked, "label": "absent", "dataset_uri": "nowhere.jsonl"}
    _, found = check(tmp_path, {**config, "icl_tasks": [absent]}, must_exist=False)
    assert "icl_tasks: absent: whether it can be asked, without nowhere.jsonl" in found.not_checked
    with pytest.raises(
        DataError, match="icl_tasks: mine: no item can be asked of a model of 32 tokens: 1 with an answer"
    ):
        check(tmp_path, {**config, "icl_limit": 1})


@pytest.fixture(scope="module")
def spelling(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(["a b c d"] * 3, 300).save(str(folder))
    return {"tokenizer__name": str(folder), "model__vocab_size": 384}


def test_of_a_folder_of_folders_the_first_is_checked(tmp_path, data):
    for name in ("0", "1"):
        shutil.copytree(data / "train", tmp_path / "nested" / name)
    config = tiny_config(data, train_loader={"dataset": {"local": str(tmp_path / "nested")}})
    _, found = check(tmp_path, config)
    assert f"train_loader.dataset: the folders in {tmp_path}/nested, except that of" in " ".join(found.not_checked)
    for index in (tmp_path / "nested").glob("*/index.json"):
        index.write_text(index.read_text().replace('"tokens"', '"image"'))
    with pytest.raises(DataError, match=r"nested/[01]/index.json has columns image; expected tokens or text"):
        check(tmp_path, config)
