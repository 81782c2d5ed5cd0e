"""Weights from elsewhere become a checkpoint like any other."""

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch._utils

import llmfoundry_lite
from llmfoundry_lite.config.build import build_block
from llmfoundry_lite.config.model_schema import ModelConfig
from llmfoundry_lite.convert.huggingface import export_model
from llmfoundry_lite.convert.to_checkpoint import import_checkpoint
from llmfoundry_lite.data.tokenizer import load_tokenizer, train_tokenizer
from llmfoundry_lite.errors import CheckpointError, ConfigError, DataError
from llmfoundry_lite.evaluation.models import locate_model
from tests.helpers.importing import folder_of, refusal, run
from tests.helpers.launch import train
from tests.helpers.models import ALIBI, LLAMA, SMALL, random_model
from tests.helpers.present import leave_out_companions, needs
from tests.helpers.readers import find_unpickling
from tests.helpers.tiny import (
    SEQ_LEN,
    VOCAB_SIZE,
    read_metrics,
    tiny_config,
    values,
    write_config,
    write_data,
)

READS_OTHERS = needs("llmfoundry_formats")
PACKAGE = Path(llmfoundry_lite.__file__).parent


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(ALIBI, id="mpt"),
        pytest.param(SMALL, id="gpt2", marks=READS_OTHERS),
        pytest.param(replace(SMALL, no_bias=True), id="gpt2-no-bias", marks=READS_OTHERS),
        pytest.param(LLAMA, id="llama", marks=READS_OTHERS),
    ],
)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_export_import_export_is_bit_equal(tmp_path, capsys, config, dtype):
    folder_of(tmp_path / "one", config, dtype)
    assert run(capsys, "import", tmp_path / "one", tmp_path / "imported")[0] == 0
    assert run(capsys, "verify", tmp_path / "imported")[0] == 0
    assert run(capsys, "export", tmp_path / "imported", tmp_path / "two", "--dtype", dtype)[0] == 0
    names = {path.name for path in (tmp_path / "one").iterdir()}
    assert names == {path.name for path in (tmp_path / "two").iterdir()} and "tokenizer.json" in names
    for name in names - {"tokenizer.json", "tokenizer_config.json"}:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes(), name


def test_the_manifest_says_what_is_known_and_no_more(tmp_path, capsys):
    folder_of(tmp_path / "hf", ALIBI)
    manifest = import_checkpoint(str(tmp_path / "hf"), str(tmp_path / "out")).checkpoint.manifest
    assert build_block(ModelConfig, manifest.config["model"], "model") == ALIBI
    assert manifest.config.keys() == {"model", "tokenizer"}
    assert Path(manifest.config["tokenizer"]["name"]) == tmp_path / "out" / "tokenizer"
    assert manifest.fingerprints.keys() == {"tokenizer"}
    assert (manifest.run_name, manifest.segments, manifest.optimizer) == (None, (), None)
    assert manifest.scalars == {"imported_from": {"kind": "Hugging Face", "source": str(tmp_path / "hf")}}
    printed = run(capsys, "inspect", tmp_path / "out")[1]
    assert "imported from" in printed and "optimizer     none" in printed and "batch" not in printed


@pytest.mark.multiprocess
def test_a_run_begins_with_imported_weights(tmp_path, capsys):
    config = replace(ALIBI, d_model=32, n_layers=2, max_seq_len=SEQ_LEN, vocab_size=VOCAB_SIZE)
    folder_of(tmp_path / "hf", config, "bf16")
    assert run(capsys, "import", tmp_path / "hf", tmp_path / "imported")[0] == 0
    frozen = {"load_path": str(tmp_path / "imported/ba0"), "max_duration": "1ba", "scheduler__t_warmup": "1ba"}
    frozen |= {"model__no_bias": True, "model__attn_config": {"alibi": True}}
    run_config = tiny_config(write_data(tmp_path / "data"), **frozen)
    path = write_config(tmp_path / "tiny.yaml", run_config)
    refused = train([path], tmp_path)
    assert refused.exit_codes == [2] and "load_weights_only=true" in refused.output, refused.output
    train([path, "load_weights_only=true"], tmp_path, 2).check()
    assert values(read_metrics(tmp_path / "runs/tiny"), "lr") == [0.0]  # in the first batch of a warm-up nothing moves
    printed = run(capsys, "diff", tmp_path / "imported", tmp_path / "runs/tiny")[1]
    assert printed.count("only in b") == 28 and "28 of 42 tensors" in printed, "the optimizer's alone"


REPLACES = "already holds {}, which the import would replace; give another folder, or remove it"


@pytest.mark.fault
@pytest.mark.parametrize(
    ("name", "words"),
    [
        *((name, REPLACES) for name in ("tokenizer", "ba0", "latest.json")),
        (".damaged-ba4-0a1b2c", "holds {}, which may be all that is left of a run; give another folder"),
        (".replaced-e1-ba4-0a1b2c3d4e5f", "already holds {}; give another folder, or remove it"),
    ],
)
def test_what_lies_in_the_folder_already_stays_as_it_is(tmp_path, name, words):
    folder_of(tmp_path / "hf")
    (tmp_path / "out" / name).mkdir(parents=True)
    if name.startswith("."):
        (tmp_path / "out" / name / "shard-00000.safetensors").write_bytes(b"x")
    before = sorted((tmp_path / "out").rglob("*"))
    with pytest.raises(CheckpointError) as error:
        import_checkpoint(str(tmp_path / "hf"), str(tmp_path / "out"))
    assert str(error.value) == f"{tmp_path}/out: {words.format(name)}"
    assert sorted((tmp_path / "out").rglob("*")) == before


def test_an_export_has_the_tokenizer_of_its_weights_or_none(tmp_path, capsys):
    folder_of(tmp_path / "hf")
    import_checkpoint(str(tmp_path / "hf"), str(tmp_path / "out"))
    copy = tmp_path / "elsewhere"
    shutil.copytree(tmp_path / "out", copy)
    train_tokenizer(["something else"] * 3, 280).save(tmp_path / "out" / "tokenizer")  # where the manifest points to
    train_tokenizer(["something else"] * 3, 280).save(tmp_path / "other")

    code, _, err = run(capsys, "export", tmp_path / "out", tmp_path / "one")
    assert (code, err.count("\n")) == (2, 1) and not (tmp_path / "one").exists()
    assert "out/ba0 was trained with another tokenizer (sha256:" in err and "--tokenizer … to export" in err
    assert run(capsys, "export", tmp_path / "out", tmp_path / "one", "--tokenizer", tmp_path / "other")[0] == 2
    assert run(capsys, "export", tmp_path / "out", tmp_path / "one", "--tokenizer", tmp_path / "nowhere")[0] == 2
    assert not (tmp_path / "one").exists()

    assert run(capsys, "export", copy, tmp_path / "two")[0] == 0, "the copy beside the checkpoint is the right one"
    right = load_tokenizer(copy / "tokenizer").fingerprint
    assert load_tokenizer(tmp_path / "two").fingerprint == right
    assert run(capsys, "export", tmp_path / "out", tmp_path / "three", "--tokenizer", copy / "tokenizer")[0] == 0
    assert load_tokenizer(tmp_path / "three").fingerprint == right
    code, out, _ = run(capsys, "export", tmp_path / "out", tmp_path / "four", "--tokenizer", "none")
    assert code == 0 and out.endswith("four, without a tokenizer\n")
    assert not (tmp_path / "four/tokenizer.json").exists()


@pytest.mark.multiprocess
def test_a_run_s_tokenizer_travels_with_its_checkpoints(tmp_path, capsys, monkeypatch):
    tokenizer = train_tokenizer(["some words of some kind"] * 3, 280)
    tokenizer.save(tmp_path / "mine")
    config = tiny_config(write_data(tmp_path / "data"), tokenizer__name=str(tmp_path / "mine"), model__vocab_size=280)
    saves = {"max_duration": "2ba", "save_interval": "1ba", "save_folder": str(tmp_path / "bucket")}
    train([write_config(tmp_path / "tiny.yaml", {**config, **saves})], tmp_path).check()
    shutil.rmtree(tmp_path / "mine")
    (tmp_path / "bucket").rename(tmp_path / "moved")
    subject = locate_model(str(tmp_path / "moved"), device=torch.device("cpu"))
    assert subject.tokenizer.fingerprint == tokenizer.fingerprint
    assert run(capsys, "export", tmp_path / "moved", tmp_path / "hf")[0] == 0
    assert load_tokenizer(tmp_path / "hf").fingerprint == tokenizer.fingerprint
    with monkeypatch.context() as inside:
        inside.chdir(tmp_path / "moved/ba2")
        assert run(capsys, "export", ".", tmp_path / "from-inside")[0] == 0
    assert load_tokenizer(tmp_path / "from-inside").fingerprint == tokenizer.fingerprint
    train_tokenizer(["something else"] * 3, 280).save(tmp_path / "moved/tokenizer")
    with pytest.raises(DataError, match=r"trained with another tokenizer \(sha256:.*\) than the copy beside it"):
        locate_model(str(tmp_path / "moved"), device=torch.device("cpu"))


@pytest.mark.fault
@pytest.mark.parametrize("target", ["ba7", "ba0/export", ".leases/x", "ba0"])
def test_nothing_is_exported_or_imported_into_a_checkpoint_or_to_where_one_would_be(tmp_path, capsys, target):
    folder_of(tmp_path / "hf")
    import_checkpoint(str(tmp_path / "hf"), str(tmp_path / "run"))
    before = sorted(map(str, (tmp_path / "run").rglob("*")))
    code, _, told = run(capsys, "export", tmp_path / "run", tmp_path / "run" / target)
    assert code == 2 and "has the name of one in a folder of checkpoints; give a place outside it" in told
    assert "checkpoint" in refusal(tmp_path / "hf", tmp_path / "run" / target)
    assert before == sorted(map(str, (tmp_path / "run").rglob("*")))


def test_weights_that_are_no_numbers_become_no_checkpoint(tmp_path):
    weights = dict(random_model(ALIBI).state_dict())
    weights["transformer.norm_f.weight"] = weights["transformer.norm_f.weight"] / 0
    export_model(weights, ALIBI, tmp_path / "folder")
    message = refusal(tmp_path / "folder", tmp_path / "out")
    assert message.startswith("transformer.norm_f.weight holds NaN or infinity") and not (tmp_path / "out").exists()


def test_what_is_there_is_never_replaced(tmp_path):
    folder_of(tmp_path / "hf")
    import_checkpoint(str(tmp_path / "hf"), str(tmp_path / "out"))
    with pytest.raises(CheckpointError, match=r"out: already holds ba0; give another folder, or remove it"):
        import_checkpoint(str(tmp_path / "hf"), str(tmp_path / "out"))
    with pytest.raises(CheckpointError, match=r"ba0: a checkpoint itself"):
        import_checkpoint(str(tmp_path / "hf"), str(tmp_path / "out" / "ba0"))
    assert "a file; give a folder" in refusal(tmp_path / "hf", tmp_path / "hf" / "config.json")
    assert "a portable checkpoint already" in refusal(tmp_path / "out" / "ba0", tmp_path / "other")


def test_sources_that_are_none_are_refused_by_name(tmp_path):
    out = tmp_path / "out"
    assert "nowhere: no such file or folder; for a model of the Hub write hf:" in refusal(tmp_path / "nowhere", out)
    assert f"{'x' * 300}: no such file or folder" in refusal("x" * 300, out)
    assert "copy it to a local disk first" in refusal("s3://bucket/hf", out)
    (tmp_path / "saves" / "ep0-ba2").mkdir(parents=True)
    (tmp_path / "saves" / "ep0-ba10-rank0.pt").touch()
    message = refusal(tmp_path / "saves", out)
    assert "neither a Hugging Face folder" in message and message.endswith(
        "did you mean " + str(tmp_path / "saves/ep0-ba10-rank0.pt") + "?"
    )
    (tmp_path / "x.safetensors").touch()
    assert "give the folder that has its config.json" in refusal(tmp_path / "x.safetensors", out)


def test_what_a_companion_reads_is_left_to_it(tmp_path, monkeypatch):
    (tmp_path / "ep0-ba1").mkdir()
    for source in (tmp_path / "ep0-ba1/.metadata", tmp_path / "ep0-ba1-rank0.pt"):
        source.touch()
        leave_out_companions(monkeypatch)
        with pytest.raises(
            ConfigError, match="checkpoints of Composer and DCP: needs the companion llmfoundry_formats"
        ):
            import_checkpoint(str(source.parent if source.name == ".metadata" else source), str(tmp_path / "out"))


@pytest.mark.parametrize("form", ["~/imported", "file://{}/imported"])
def test_a_tokenizer_lies_beside_what_was_imported_however_its_folder_is_written(tmp_path, monkeypatch, form):
    home, here = tmp_path / "home", tmp_path / "here"
    home.mkdir()
    here.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(here)
    folder_of(tmp_path / "model")
    out = form.format(home)
    imported = import_checkpoint(str(tmp_path / "model"), out)
    assert load_tokenizer(home / "imported/tokenizer").fingerprint in imported.checkpoint.manifest.fingerprints.values()
    assert not list(here.iterdir())
    (home / "a-file").touch()
    for place, words in (
        ("imported/ba0", "a checkpoint itself"),
        ("imported", "already holds ba0"),
        ("a-file", "a file"),
    ):
        assert words in refusal(tmp_path / "model", out.replace("imported", place))


def test_nothing_here_unpickles_and_an_evaluation_asks_for_tensors_alone():
    assert not find_unpickling(PACKAGE) and not find_unpickling(PACKAGE.parent / "scripts")
    sources = {str(path.relative_to(PACKAGE)): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}
    asked = {path: re.findall(r"read_weights_file\((.*?)\)", text) for path, text in sources.items()}
    assert {path: found for path, found in asked.items() if found} == {
        "convert/to_checkpoint.py": ["path, is_trusted=True"],
        "evaluation/models.py": ["path, is_trusted=False"],
    }
    assert "import_checkpoint" not in "".join(text for path, text in sources.items() if path.startswith("training/"))
