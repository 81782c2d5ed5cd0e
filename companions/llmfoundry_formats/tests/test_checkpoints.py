"""Checkpoints of Composer's Trainer and of torch.distributed.checkpoint become portable ones."""

import pickle
import shutil
from dataclasses import asdict

import pytest
import torch
import torch.distributed.checkpoint as dcp_state
import torch.distributed.checkpoint.metadata as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.filesystem import _StorageInfo

from llmfoundry_formats.dcp import PortableStorageReader
from llmfoundry_formats.tests.composer_saves import composer_file, save_one_file, save_sharded
from llmfoundry_lite import own_code
from llmfoundry_lite.checkpoint.full_tensors import load_full_tensors
from llmfoundry_lite.checkpoint.store import CheckpointStore, open_checkpoint
from llmfoundry_lite.checkpoint.verify import verify_checkpoint
from llmfoundry_lite.config.build import build_block
from llmfoundry_lite.config.model_schema import ModelConfig
from llmfoundry_lite.convert.to_checkpoint import import_checkpoint
from llmfoundry_lite.errors import ConfigError
from llmfoundry_lite.models.mpt import MPT
from tests.helpers.importing import refusal, run
from tests.helpers.launch import launch
from tests.helpers.models import SMALL, random_model
from tests.helpers.tiny import build_tokenizer, tiny_config, write_config


@pytest.fixture(scope="module")
def saves(tmp_path_factory):
    """Saves by Composer's Trainer: composer/ep0-ba2-rank0.pt and expected/, sharded/ep0-ba2 and sharded/full.pt."""
    folder = tmp_path_factory.mktemp("composer")
    build_tokenizer(folder / "tokenizer")
    launch(save_one_file, (str(folder),), folder, 1).check()
    launch(save_sharded, (str(folder),), folder, 2).check()
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


def test_parts_of_one_s_own_are_imported_by_the_yaml_that_names_them(tmp_path, monkeypatch):
    monkeypatch.setattr(own_code, "_trusted_names", set())
    source = composer_file(tmp_path / "ep0-ba1-rank0.pt", random_model(SMALL))
    model = asdict(SMALL) | {"norm_type": "python:torch.nn:LayerNorm"}
    path = write_config(tmp_path / "train.yaml", {**tiny_config(tmp_path), "model": model})
    imported = import_checkpoint(str(source), str(tmp_path / "out"), trust_pickle=True, config=[path])
    recorded = imported.checkpoint.manifest.config["model"]
    assert recorded["norm_type"] == "python:torch.nn:LayerNorm" and "norm_kwargs" not in recorded


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
