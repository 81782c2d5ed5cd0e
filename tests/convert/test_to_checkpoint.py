"""Weights from elsewhere become a checkpoint like any other; pickles are read only when trusted, and never run."""

import io
import os
import pickle
import re
import shutil
import zipfile
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
import torch._utils
import torch.distributed.checkpoint as dcp_state
import torch.distributed.checkpoint.metadata as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING as MemoryFormat

import llmfoundry_lite
from llmfoundry_formats.dcp import PortableStorageReader
from llmfoundry_formats.pickles import StandIn, TensorsOnly, read_torch_file
from llmfoundry_formats.tests import composer_saves
from llmfoundry_lite.checkpoint.full_tensors import load_full_tensors
from llmfoundry_lite.checkpoint.store import CheckpointStore, open_checkpoint
from llmfoundry_lite.checkpoint.verify import verify_checkpoint
from llmfoundry_lite.cli import main
from llmfoundry_lite.config.build import build_block
from llmfoundry_lite.config.model_schema import ModelConfig
from llmfoundry_lite.convert.huggingface import export_model
from llmfoundry_lite.convert.to_checkpoint import import_checkpoint
from llmfoundry_lite.data.tokenizer import load_tokenizer, train_tokenizer
from llmfoundry_lite.errors import CheckpointError, ConfigError, DataError, ExportError
from llmfoundry_lite.evaluation.models import find_subject
from llmfoundry_lite.models.mpt import MPT
from tests.helpers.bombs import MIB, little_memory
from tests.helpers.launch import launch, train
from tests.helpers.models import ALIBI, LLAMA, SMALL, random_model
from tests.helpers.tiny import (
    SEQ_LEN,
    VOCAB_SIZE,
    build_tokenizer,
    read_metrics,
    tiny_config,
    values,
    write_config,
    write_data,
)

PACKAGE = Path(llmfoundry_lite.__file__).parent


def run(capsys, *arguments):
    code = main.run(["checkpoint", *map(str, arguments)])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def folder_of(path, config=ALIBI, dtype="fp32"):
    build_tokenizer(path.parent / "tokenizer")
    model = random_model(config)
    export_model(model.state_dict(), config, path, tokenizer_folder=path.parent / "tokenizer", dtype=dtype)
    return model


def refusal(source, out, **options):
    with pytest.raises((CheckpointError, ExportError)) as error:
        import_checkpoint(str(source), str(out), **options)
    assert "\n" not in str(error.value)
    assert not (Path(out) / "ba0").exists()
    return str(error.value)


# --------------------------------------------------------------------------------------------------- Hugging Face


@pytest.mark.parametrize(
    "config", [ALIBI, SMALL, replace(SMALL, no_bias=True), LLAMA], ids=["mpt", "gpt2", "gpt2-no-bias", "llama"]
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
    folder_of(tmp_path / "hf", SMALL)
    manifest = import_checkpoint(str(tmp_path / "hf"), str(tmp_path / "out")).checkpoint.manifest
    assert build_block(ModelConfig, manifest.config["model"], "model") == SMALL
    assert manifest.config.keys() == {"model", "tokenizer"}
    assert Path(manifest.config["tokenizer"]["name"]) == tmp_path / "out" / "tokenizer"
    assert manifest.fingerprints.keys() == {"tokenizer"}
    assert (manifest.run_name, manifest.segments, manifest.optimizer) == (None, (), None)
    assert manifest.scalars == {"imported_from": {"kind": "Hugging Face", "source": str(tmp_path / "hf")}}
    printed = run(capsys, "inspect", tmp_path / "out")[1]
    assert "imported from" in printed and "optimizer     none" in printed and "batch" not in printed


@pytest.mark.multiprocess
def test_a_run_begins_with_imported_weights(tmp_path, capsys):
    config = replace(SMALL, d_model=32, n_layers=2, max_seq_len=SEQ_LEN, vocab_size=VOCAB_SIZE)
    folder_of(tmp_path / "hf", config, "bf16")
    assert run(capsys, "import", tmp_path / "hf", tmp_path / "imported")[0] == 0
    frozen = {"load_path": str(tmp_path / "imported/ba0"), "max_duration": "1ba", "scheduler__t_warmup": "1ba"}
    run_config = tiny_config(write_data(tmp_path / "data"), **frozen)
    path = write_config(tmp_path / "tiny.yaml", run_config)
    refused = train([path], tmp_path)
    assert refused.exit_codes == [2] and "load_weights_only=true" in refused.output, refused.output
    train([path, "load_weights_only=true"], tmp_path, 2).check()
    assert values(read_metrics(tmp_path / "runs/tiny"), "lr") == [0.0]  # in the first batch of a warm-up nothing moves
    printed = run(capsys, "diff", tmp_path / "imported", tmp_path / "runs/tiny")[1]
    assert printed.count("only in b") == 56 and "56 of 84 tensors" in printed, "the optimizer's alone"


def test_a_model_of_the_hub_comes_from_the_cache(tmp_path, monkeypatch):
    import huggingface_hub

    def unreachable(*args, **kwargs):
        raise ConnectionError

    def cached(name, local_files_only=False, **options):
        assert (name, local_files_only) == ("owner/name", True)
        return str(tmp_path / "hf")

    folder_of(tmp_path / "hf")
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", unreachable)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", cached)
    imported = import_checkpoint("hf:owner/name", str(tmp_path / "out"))
    assert imported.checkpoint.manifest.scalars["imported_from"]["source"] == "hf:owner/name"
    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    words = "hf:owner/name: not in the local cache, and the Hugging Face Hub cannot be reached (ConnectionError)"
    assert refusal("hf:owner/name", tmp_path / "other").startswith(words)


def test_a_pytorch_bin_is_read_only_when_trusted(tmp_path):
    model = folder_of(tmp_path / "hf")
    torch.save(load_file(tmp_path / "hf" / "model.safetensors"), tmp_path / "hf" / "pytorch_model.bin")
    (tmp_path / "hf" / "model.safetensors").unlink()
    assert refusal(tmp_path / "hf", tmp_path / "out").endswith("if you trust where it comes from, add --trust-pickle")
    imported = import_checkpoint(str(tmp_path / "hf"), str(tmp_path / "out"), trust_pickle=True)
    assert imported.notes == ["pytorch_model.bin was read by torch's weights-only reader"]
    weights = load_full_tensors(imported.checkpoint.url)
    assert all(torch.equal(weights[name], tensor) for name, tensor in model.state_dict().items())


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
    subject = find_subject(str(tmp_path / "moved"), device=torch.device("cpu"))
    assert subject.tokenizer.fingerprint == tokenizer.fingerprint
    assert run(capsys, "export", tmp_path / "moved", tmp_path / "hf")[0] == 0
    assert load_tokenizer(tmp_path / "hf").fingerprint == tokenizer.fingerprint
    with monkeypatch.context() as inside:
        inside.chdir(tmp_path / "moved/ba2")
        assert run(capsys, "export", ".", tmp_path / "from-inside")[0] == 0
    assert load_tokenizer(tmp_path / "from-inside").fingerprint == tokenizer.fingerprint
    train_tokenizer(["something else"] * 3, 280).save(tmp_path / "moved/tokenizer")
    with pytest.raises(DataError, match=r"trained with another tokenizer \(sha256:.*\) than the copy beside it"):
        find_subject(str(tmp_path / "moved"), device=torch.device("cpu"))


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
    assert "copy it to a local disk first" in refusal("s3://bucket/hf", out)
    (tmp_path / "saves" / "ep0-ba2").mkdir(parents=True)
    (tmp_path / "saves" / "ep0-ba10-rank0.pt").touch()
    message = refusal(tmp_path / "saves", out)
    assert "neither a Hugging Face folder" in message and message.endswith(
        "did you mean " + str(tmp_path / "saves/ep0-ba10-rank0.pt") + "?"
    )
    (tmp_path / "x.pt").write_bytes(b"not a pickle")
    assert "x.pt: not a file of torch.save, or cut off" in refusal(tmp_path / "x.pt", out, trust_pickle=True)


# ------------------------------------------------------------------------------------------ LLM Foundry / Composer


@pytest.fixture(scope="module")
def saves(tmp_path_factory):
    """Of Composer's Trainer: composer/ep0-ba2-rank0.pt and expected/, sharded/ep0-ba2 and sharded/full.pt."""
    folder = tmp_path_factory.mktemp("composer")
    build_tokenizer(folder / "tokenizer")
    launch(composer_saves.save_one_file, (str(folder),), folder, 1).check()
    launch(composer_saves.save_sharded, (str(folder),), folder, 2).check()
    return folder


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_checkpoint_of_composers_trainer_becomes_a_portable_one(saves, tmp_path, capsys):
    source = saves / "composer" / "ep0-ba2-rank0.pt"
    code, out, err = run(capsys, "import", source, tmp_path / "no")
    assert (code, out) == (2, "") and err.count("\n") == 1
    assert "ep0-ba2-rank0.pt: a pickle, which can run code when it is read" in err and "--trust-pickle" in err
    code, out, err = run(capsys, "import", source, tmp_path / "out", "--trust-pickle")
    assert code == 0, err
    assert "not carried   optimizer state, position in the data" in out
    assert "holds datetime.timedelta, so it was read with stand-ins" in out and "nothing in it was run" in out
    checkpoint = open_checkpoint(tmp_path / "out" / "ba0")
    verify_checkpoint(checkpoint)
    config = build_block(ModelConfig, checkpoint.manifest.config["model"], "model")
    assert (config.d_model, config.n_layers, config.attn_config.alibi, config.no_bias) == (48, 2, True, True)
    expected = load_file(saves / "expected" / "model.safetensors")
    weights = load_full_tensors(checkpoint.url)
    assert weights.keys() == expected.keys() == MPT(config).state_dict().keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    assert "tokenizer" in checkpoint.manifest.fingerprints
    assert run(capsys, "export", tmp_path / "out", tmp_path / "hf")[0] == 0
    exported = load_file(tmp_path / "hf" / "model.safetensors")
    assert all(torch.equal(exported[name], expected[name]) for name in expected)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_sharded_checkpoint_is_put_together_and_a_lost_shard_named(saves, tmp_path):
    source = saves / "sharded" / "ep0-ba2"
    assert {path.name for path in source.iterdir()} == {".metadata", "__0_0.distcp", "__1_0.distcp"}
    assert ".metadata: a pickle" in refusal(source, tmp_path / "out")
    imported = import_checkpoint(str(source), str(tmp_path / "out"), trust_pickle=True)
    expected = torch.load(saves / "sharded" / "full.pt", weights_only=True)
    weights = load_full_tensors(imported.checkpoint.url)
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    one_file = import_checkpoint(str(saves / "composer/ep0-ba2-rank0.pt"), str(tmp_path / "mono"), trust_pickle=True)
    assert imported.checkpoint.manifest.config["model"] == one_file.checkpoint.manifest.config["model"]
    assert imported.checkpoint.manifest.fingerprints == one_file.checkpoint.manifest.fingerprints
    shutil.copytree(source, tmp_path / "lossy")
    (tmp_path / "lossy" / "__1_0.distcp").unlink()
    assert "lossy/__1_0.distcp: missing" in refusal(tmp_path / "lossy", tmp_path / "none", trust_pickle=True)


def composer_file(path, model, **state):
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    torch.save({"state": {"model": tensors, **state}, "rng": []}, path)
    return path


def test_the_yaml_says_what_model_it_is_when_the_checkpoint_does_not(tmp_path):
    source = composer_file(tmp_path / "ep0-ba1-rank0.pt", random_model(SMALL))
    out = tmp_path / "out"
    assert refusal(source, out, trust_pickle=True).endswith("add --config and the YAML it was trained with")
    model = {
        key: value for key, value in asdict(SMALL).items() if key in ("d_model", "n_heads", "n_layers", "vocab_size")
    }
    run_config = {**tiny_config(tmp_path), "model": {"name": "mpt_causal_lm", "max_seq_len": 32, **model}}
    path = write_config(tmp_path / "train.yaml", run_config)
    imported = import_checkpoint(str(source), str(out), trust_pickle=True, config=[path])
    assert build_block(ModelConfig, imported.checkpoint.manifest.config["model"], "model") == SMALL
    assert imported.notes == ["ep0-ba1-rank0.pt was read by torch's weights-only reader"]
    with pytest.raises(ConfigError, match=r"train\.yam: no such file|neither a \.yaml"):
        import_checkpoint(str(source), str(tmp_path / "more"), trust_pickle=True, config=[str(tmp_path / "train.yam")])


def test_tensors_that_do_not_fit_are_listed(tmp_path):
    source = composer_file(tmp_path / "ep0-ba1-rank0.pt", random_model(SMALL))
    run_config = {**tiny_config(tmp_path), "model": {"name": "mpt_causal_lm", "d_model": 48, "n_heads": 4}}

    def with_model(**changes):
        config = {**run_config, "model": {**run_config["model"], "max_seq_len": 32, "vocab_size": 97, **changes}}
        path = write_config(tmp_path / "train.yaml", config)
        return refusal(source, tmp_path / "out", trust_pickle=True, config=[path])

    missing = with_model(n_layers=4)
    assert "tensor transformer.blocks.3.norm_1.weight is missing" in missing
    assert "likewise transformer.blocks.3.norm_1.bias, transformer.blocks.3.attn.Wqkv.weight" in missing
    assert missing.endswith("and 3 more")
    unknown = with_model(n_layers=3, no_bias=True)
    assert "tensor transformer.blocks.0.norm_1.bias has no place" in unknown and "likewise" in unknown
    misshapen = with_model(n_layers=3, expansion_ratio=2)
    assert "ffn.up_proj.weight has shape [192, 48], the model's configuration says [96, 48]; likewise" in misshapen


# -------------------------------------------------------------------------------------------------------- pickles


class Bomb:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize("trust_pickle", [False, True])
def test_a_malicious_pickle_is_never_run(tmp_path, trust_pickle):
    exploded = tmp_path / "exploded"
    hostile = composer_file(tmp_path / "ep0-ba1-rank0.pt", random_model(SMALL), integrations=Bomb(exploded))
    (tmp_path / "old.pt").write_bytes(pickle.dumps(Bomb(exploded)))
    (tmp_path / "sharded").mkdir()
    (tmp_path / "sharded" / ".metadata").write_bytes(pickle.dumps(Bomb(exploded)))
    for source in (hostile, tmp_path / "old.pt", tmp_path / "sharded"):
        message = refusal(source, tmp_path / "out", trust_pickle=trust_pickle)
        assert ("--trust-pickle" in message) != trust_pickle
    assert not exploded.exists()
    torch.load(hostile, weights_only=False)
    assert exploded.exists(), "or this test could not fail"


class Getattr:
    """`getattr(owner, name)`, to be done by whoever unpickles it."""

    def __init__(self, owner, name):
        self.arguments = owner, name

    def __reduce__(self):
        return getattr, self.arguments


def test_a_member_of_an_enumeration_may_be_named_as_python_3_11_2_names_it_and_nothing_else(tmp_path):
    def read(content):
        (tmp_path / ".metadata").write_bytes(pickle.dumps(content))
        with open(tmp_path / ".metadata", "rb") as file:
            return TensorsOnly(file).load()

    member = MemoryFormat.TORCH_CONTIGUOUS_FORMAT
    assert read(Getattr(MemoryFormat, member.name)) is member
    assert isinstance(read(Getattr(MemoryFormat, member.name)), MemoryFormat)
    assert isinstance(read(Getattr(Path, "touch")), StandIn)
    assert isinstance(read(Getattr(torch.Size, "numel")), StandIn)


def named(module, name):
    return b"c" + module.encode() + b"\n" + name.encode() + b"\n"


def with_attribute(target, name, value):
    """A pickle of `target` after `setattr(target, name, value)`, as BUILD does it to whatever is on the stack."""
    return b"\x80\x04" + target + b"(N}\x8c" + bytes([len(name)]) + name.encode() + value + b"stb."


DCP = "torch.distributed.checkpoint.metadata"
INSTANCE = named(DCP, "BytesStorageMetadata") + b")\x81"


@pytest.mark.fault
@pytest.mark.parametrize(
    ("target", "name"),
    [
        (named("torch._utils", "_rebuild_tensor_v2"), "__defaults__"),
        (named(DCP, "Metadata"), "__eq__"),
        (named(DCP, "MetadataIndex"), "__hash__"),
        (named("torch", "float32"), "itemsize"),
        (named("os", "system"), "__call__"),
        (INSTANCE, "__class__"),
    ],
    ids=["function", "class", "frozen class", "dtype", "stand-in", "instance"],
)
def test_a_pickle_sets_no_attribute_of_what_is_torchs_or_ours(tmp_path, target, name):
    def attributes():
        owners = (torch._utils._rebuild_tensor_v2, dcp.Metadata, dcp.MetadataIndex, StandIn)
        return [getattr(owner, name, None) for owner in owners]

    before = attributes()
    (tmp_path / "old.pt").write_bytes(with_attribute(target, name, named("torch", "Size")))
    message = refusal(tmp_path / "old.pt", tmp_path / "out", trust_pickle=True)
    assert "old.pt: cannot be read: it sets attributes of " in message
    assert attributes() == before


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


PLACES = {
    "more dimensions": {"offset": (0, 0, 0)},
    "before the file": {"begin": -5},
    "negative length": {"length": -5},
    "length beyond all machines": {"length": 1 << 70},
    "size beyond all machines": {"size": 1 << 62},
    "a name that is none": {"name": 5},
}


@pytest.mark.fault
@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_metadata_that_lies_of_where_tensors_are_is_refused_in_one_line(tmp_path, place):
    said = {"offset": (0,), "begin": 0, "length": 10, "size": 4, "name": "__0_0.distcp", **place}
    offset = torch.Size(said["offset"])
    chunk = dcp.ChunkStorageMetadata(offset, torch.Size([4] * len(offset)))
    tensor = dcp.TensorStorageMetadata(dcp.TensorProperties(torch.float32), torch.Size([said["size"]]), [chunk])
    where = _StorageInfo(said["name"], said["begin"], said["length"])
    metadata = dcp.Metadata({"w": tensor}, {"w": ("state", "model", "w")}, {dcp.MetadataIndex("w", offset): where})
    (tmp_path / "ep0-ba1").mkdir()
    (tmp_path / "ep0-ba1" / ".metadata").write_bytes(pickle.dumps(metadata))
    (tmp_path / "ep0-ba1" / "__0_0.distcp").write_bytes(bytes(100))
    message = refusal(tmp_path / "ep0-ba1", tmp_path / "out", trust_pickle=True)
    assert "ep0-ba1: damaged: " in message and "\n" not in message


@pytest.mark.fault
@pytest.mark.parametrize("kind", ["sparse", "meta"])
def test_weights_without_values_of_their_own_are_refused(tmp_path, kind):
    model = {
        f"model.{name}": tensor.to_sparse() if kind == "sparse" else tensor.to("meta")
        for name, tensor in random_model(SMALL).state_dict().items()
    }
    torch.save({"state": {"model": model}}, tmp_path / "ep0-ba1-rank0.pt")
    yaml = write_config(tmp_path / "run.yaml", tiny_config(tmp_path) | {"model": asdict(SMALL)})
    message = refusal(tmp_path / "ep0-ba1-rank0.pt", tmp_path / "out", trust_pickle=True, config=[yaml])
    assert "is a tensor without values of its own" in message


@pytest.mark.fault
@pytest.mark.parametrize("trust_pickle", [False, True])
def test_a_tensor_with_the_shape_of_terabytes_and_four_stored_is_refused(tmp_path, trust_pickle):
    huge = {name: torch.zeros(1).expand(1 << 20, 1 << 20) for name in random_model(SMALL).state_dict()}
    torch.save(huge if not trust_pickle else {"state": {"model": huge}}, path := tmp_path / "ep0-ba1-rank0.pt")
    with pytest.raises(CheckpointError) as caught:
        read_torch_file(path, str(path), is_trusted=trust_pickle)
    size = f"has {1 << 42:,} bytes, and 4 are stored; save its values"
    assert str(caught.value) == f"{path}: a tensor of shape [1048576, 1048576] {size}"


def test_a_mask_that_was_expanded_and_tensors_that_share_memory_are_read(tmp_path):
    weight = torch.arange(6.0)
    content = {"mask": torch.ones(1).expand(64, 64), "tied": [weight, {"again": weight[2:].view(2, 2)}]}
    content["itself"] = [content["tied"]] * 2
    torch.save(content, tmp_path / "a.pt")
    found = read_torch_file(tmp_path / "a.pt", "a.pt", is_trusted=False).content
    assert found["mask"].sum() == 4096 and found["itself"][1][1]["again"].tolist() == [[2, 3], [4, 5]]


@pytest.mark.fault
def test_a_file_of_torch_that_is_packed_inside_is_refused(tmp_path):
    """A few kB unpack to gigabytes, and torch takes the packed bytes of a tensor for its values."""
    torch.save({"w": torch.ones(3)}, tmp_path / "plain.pt")
    with zipfile.ZipFile(tmp_path / "plain.pt") as plain, zipfile.ZipFile(tmp_path / "packed.pt", "w", 8) as packed:
        for name in plain.namelist():
            packed.writestr(name, plain.read(name))
    with pytest.raises(CheckpointError, match=r"packed.pt: .*data.pkl in it is packed, which torch.save never does"):
        read_torch_file(tmp_path / "packed.pt", "packed.pt", is_trusted=True)


@pytest.mark.fault
def test_a_pickle_gets_no_memory_for_bytes_that_it_only_announces():
    announced = b"\x80\x05" + pickle.BYTEARRAY8 + (64 * MIB).to_bytes(8, "little") + b"x."
    with little_memory(32), pytest.raises(KeyError):
        TensorsOnly(io.BytesIO(announced)).load()


@pytest.mark.timeout(60)
def test_a_pipe_in_a_pickle_s_place_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(pipe := tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=f"{pipe}: cannot be read: not a regular file"):
        read_torch_file(pipe, str(pipe), is_trusted=True)


def test_a_record_is_given_its_fields_and_no_others():
    index = dcp.MetadataIndex("w", torch.Size([1]))
    vars(index)["__reduce__"] = "more"
    found = TensorsOnly(io.BytesIO(pickle.dumps(index))).load()
    assert found == dcp.MetadataIndex("w", torch.Size([1])) and vars(found).keys() == {"fqn", "offset", "index"}


UNPICKLES = re.compile(
    r"\b(import|from)\s+(pickle|cPickle|_pickle|dill|cloudpickle|joblib|shelve|marshal)\b|\bpickle\.\w|\b[Uu]npickler\b"
    r"|torch\.(load|save|serialization|package)\b|from torch import .*\b(load|save)\b|allow_pickle\s*=\s*True"
    r"|(gather|broadcast|scatter|send|recv)_object|object_list|all_gather_object|_MaybePickler"
    r"|\b(dcp|dist_cp)\.(load|save|async_save)\b|FileSystem(Reader|Writer)|HuggingFaceStorage|torch\.hub\b|jit\.load"
)


def test_one_module_may_unpickle_and_two_may_ask_it_to_one_of_them_for_tensors_alone():
    sources = {path.relative_to(PACKAGE): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}
    sources |= {path: path.read_text() for path in sorted((PACKAGE.parent / "scripts").glob("*.py"))}
    code = {path: re.sub(r'""".*?"""|#[^\n]*|"[^"\n]*"', "", text, flags=re.S) for path, text in sources.items()}
    assert [str(path) for path, text in code.items() if UNPICKLES.search(text)] == ["convert/pickles.py"]
    asks = re.compile(r"\bllmfoundry_lite\.convert(\.| import )pickles\b")
    users = [str(path) for path, text in code.items() if asks.search(text)]
    assert users == ["convert/to_checkpoint.py", "evaluation/models.py"]
    asked = re.findall(r"read_torch_file\([^\n]*", code[Path("evaluation/models.py")])
    assert asked == ["read_torch_file(path, str(path), is_trusted=False).content)"]
    assert "import_checkpoint" not in "".join(text for path, text in code.items() if "training" in path.parts)


class Odd:
    """A class of somebody else's."""


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_folder_of_torch_distributed_checkpoint_is_imported_with_all_that_is_plain_in_it(tmp_path, capsys):
    weight = torch.randn(4, 3).bfloat16()
    state = {"layers.0.weight": weight, "optimizer": {"state": [{"step": torch.tensor(5.0)}], "lr": 0.1}, "odd": Odd()}
    dcp_state.save(state, checkpoint_id=tmp_path / "step-5")
    source, out = tmp_path / "step-5", tmp_path / "out"
    assert "a pickle, which can run code when it is read" in refusal(source, out)
    assert "leave out --config" in refusal(source, out, trust_pickle=True, config=["a.yaml"])
    code, said, err = run(capsys, "import", source, out, "--trust-pickle")
    assert code == 0, err
    assert "2 tensors" in said and "note: odd is not carried: it holds more than plain values" in said
    verify_checkpoint(open_checkpoint(out / "ba0"))
    loaded = {"layers.0.weight": torch.zeros_like(weight), "optimizer": {"state": [{"step": torch.ones(())}], "lr": 0}}
    dcp_state.load(loaded, storage_reader=PortableStorageReader(out / "ba0"))
    assert torch.equal(loaded["layers.0.weight"], weight)
    assert loaded["optimizer"] == state["optimizer"]
    (source / "__0_0.distcp").unlink()
    assert "step-5/__0_0.distcp: missing" in refusal(source, tmp_path / "none", trust_pickle=True)
    assert not CheckpointStore(tmp_path / "none").candidates()
