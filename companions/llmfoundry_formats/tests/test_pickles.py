"""Pickles are read only when trusted, and never run."""

import io
import os
import pickle
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch._utils
import torch.distributed.checkpoint.metadata as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING as MemoryFormat

import llmfoundry_formats
from llmfoundry_formats.pickles import StandIn, TensorsOnly, read_torch_file
from llmfoundry_formats.tests.composer_saves import composer_file
from llmfoundry_lite.checkpoint.full_tensors import load_full_tensors
from llmfoundry_lite.convert.to_checkpoint import import_checkpoint
from llmfoundry_lite.errors import CheckpointError
from tests.helpers.bombs import MIB, little_memory
from tests.helpers.folders import VOCAB, load, write_foundry
from tests.helpers.folders import refusal as not_loaded
from tests.helpers.importing import folder_of, refusal
from tests.helpers.models import SMALL, normal_model, random_model
from tests.helpers.readers import find_unpickling
from tests.helpers.tiny import build_tokenizer


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


def test_a_pytorch_bin_is_read_only_when_trusted(tmp_path):
    model = folder_of(tmp_path / "hf")
    torch.save(load_file(tmp_path / "hf" / "model.safetensors"), tmp_path / "hf" / "pytorch_model.bin")
    (tmp_path / "hf" / "model.safetensors").unlink()
    assert refusal(tmp_path / "hf", tmp_path / "out").endswith("if you trust where it comes from, add --trust-pickle")
    imported = import_checkpoint(str(tmp_path / "hf"), str(tmp_path / "out"), trust_pickle=True)
    assert imported.notes == ["pytorch_model.bin was read by torch's weights-only reader"]
    weights = load_full_tensors(imported.checkpoint.url)
    assert all(torch.equal(weights[name], tensor) for name, tensor in model.state_dict().items())


def test_a_file_of_something_else_is_refused(tmp_path):
    (tmp_path / "x.pt").write_bytes(b"not a pickle")
    message = refusal(tmp_path / "x.pt", tmp_path / "out", trust_pickle=True)
    assert "x.pt: not a file of torch.save, or cut off" in message


class Opens:
    """A pickle of this creates a file."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return io.open, (str(self.path), "w")


def test_a_pickled_llm_foundry_folder_is_evaluated_as_the_model_it_describes(tmp_path):
    model, folder = normal_model(replace(SMALL, vocab_size=VOCAB)), tmp_path / "model"
    build_tokenizer(folder)
    write_foundry(folder, model)
    (folder / "model.safetensors").unlink()
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    tokens_bt = torch.arange(24)[None] * 13 % VOCAB
    assert torch.equal(load(folder).model(tokens_bt), model(tokens_bt))
    torch.save({**model.state_dict(), "more": Opens(tmp_path / "ran")}, folder / "pytorch_model.bin")
    message = not_loaded(folder)
    assert "pytorch_model.bin: a pickle that holds more than tensors (io.open)" in message
    assert "llmfoundry-lite checkpoint import FOLDER OUT --trust-pickle" in message
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Opens(tmp_path / "ran"), protocol=2))
    assert "pytorch_model.bin: " in not_loaded(folder) and not (tmp_path / "ran").exists()


def test_one_module_of_all_companions_may_unpickle():
    assert find_unpickling(Path(llmfoundry_formats.__file__).parents[1]) == ["llmfoundry_formats/pickles.py"]
