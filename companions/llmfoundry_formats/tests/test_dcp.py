"""The portable format behind torch.distributed.checkpoint, for scripts that know nothing else of this package."""

import errno
import itertools
import json
import os
import uuid
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from llmfoundry_formats import dcp as dcp_writer
from llmfoundry_formats.dcp import PortableStorageReader, PortableStorageWriter
from llmfoundry_lite.checkpoint import local_folder, manifest_json, restore
from llmfoundry_lite.checkpoint.full_tensors import consolidate
from llmfoundry_lite.checkpoint.manifest import DCP_STATE
from llmfoundry_lite.checkpoint.manifest_json import encode
from llmfoundry_lite.checkpoint.save import Saver
from llmfoundry_lite.checkpoint.staging import as_bytes
from llmfoundry_lite.checkpoint.store import CheckpointStore, open_checkpoint
from llmfoundry_lite.checkpoint.verify import verify_checkpoint
from llmfoundry_lite.cli.main import run as command
from llmfoundry_lite.errors import CheckpointError, DataError
from llmfoundry_lite.evaluation.models import locate_model
from llmfoundry_lite.ranks.codec import write_json
from llmfoundry_lite.ranks.identity import start_ticks
from tests.checkpoint.ranks import build, save_now, step
from tests.checkpoint.saves import flip
from tests.helpers.launch import launch

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def save(state, where, **options):
    dcp.save(state, storage_writer=PortableStorageWriter(where, **options))


def load(state, where, **options):
    dcp.load(state, storage_reader=PortableStorageReader(where, **options))
    return state


def refused(call, *arguments, **options):
    """The last line of what DCP raises, which is no Exception."""
    with pytest.raises(CheckpointException) as caught:
        call(*arguments, **options)
    return str(caught.value).strip().splitlines()[-1]


def small(scale=1.0):
    return {"model": {"w": scale * torch.arange(12.0).view(3, 4)}, "step": int(3 * scale)}


def test_every_kind_of_leaf_comes_back_bit_for_bit(url):
    shared = torch.ones(3)
    state = {
        "model": {"w": torch.randn(4, 6).t(), "bf16": torch.randn(5).bfloat16(), "shared": shared, "again": shared},
        "scalar": torch.tensor(7),
        "empty": torch.empty(0, 4),
        "strided": torch.arange(10.0)[::2],
        "f8": torch.arange(6).to(torch.float8_e4m3fn),
        "mask": torch.tensor([0.0, -torch.inf, torch.nan]),
        "list": [torch.ones(2), {"q": torch.tensor(True)}],
        "values": {"none": None, "tuple": (1, "x"), "$": {"$": 2**70}, "nan": float("nan"), "bytes": b"\x00\xff"},
        "name.with.dots": 1.5,
    }
    save(state, f"{url}/ba7")
    checkpoint = open_checkpoint(f"{url}/ba7")
    verify_checkpoint(checkpoint)
    assert checkpoint.manifest.timestamp.batch == 7 and "model/w" in checkpoint.manifest.tensors

    def blank(value):
        if isinstance(value, dict):
            return {key: blank(inside) for key, inside in value.items()}
        if isinstance(value, list):
            return [blank(inside) for inside in value]
        return torch.zeros_like(value) if isinstance(value, torch.Tensor) else "unset"

    def bits(value):
        if isinstance(value, dict):
            return {key: bits(inside) for key, inside in value.items()}
        if isinstance(value, list):
            return [bits(inside) for inside in value]
        is_tensor = isinstance(value, torch.Tensor)
        return (value.dtype, value.shape, as_bytes(value.contiguous()).tobytes()) if is_tensor else repr(value)

    assert bits(load(blank(state), f"{url}/ba7")) == bits(state)


def test_a_checkpoint_that_is_there_is_replaced_only_when_asked_and_nothing_else_ever_is(tmp_path):
    where = tmp_path / "a[1]" / "ba2"
    save(small(), where)
    assert "ba2: already exists; give another name, or pass overwrite=True" in refused(save, small(), where)
    save(small(2.0), where, overwrite=True)
    assert load(small(0.0), where)["step"] == 6
    foreign = tmp_path / "a[1]" / "ba3"
    foreign.mkdir()
    (foreign / "notes.txt").write_text("mine")
    assert "ba3: holds notes.txt and is not a checkpoint" in refused(save, small(), foreign, overwrite=True)
    (tmp_path / "ba4").write_text("mine")
    assert "ba4: a file; give another name" in refused(save, small(), tmp_path / "ba4", overwrite=True)
    assert "is a checkpoint, or has the name of one" in refused(save, small(), where / "ba5")
    for name in ("step-3", "a[1]/ba002"):
        assert f"{name}: the name of a checkpoint is ba and" in refused(save, small(), tmp_path / name, overwrite=True)
    assert sorted(os.listdir(tmp_path)) == ["a[1]", "ba4"] and os.listdir(foreign) == ["notes.txt"]
    where.rename(where.with_name(".replaced-e9-ba2-abc"))  # where a kill in the middle of replacing it leaves it
    assert "ba2: already exists" in refused(save, small(), where)
    assert load(small(0.0), where)["step"] == 6


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"a": {"odd": object()}}, "a.odd: builtins.object given, expected None, bool"),
        ({"a": (torch.ones(2),)}, "a[0]: torch.Tensor given"),
        ({"a": torch.ones(2, dtype=torch.complex64)}, "a: torch.complex64, torch.strided given, expected a dense"),
        ({"a": torch.eye(2).to_sparse()}, "a: torch.float32, torch.sparse_coo given"),
        ({"model/a": torch.ones(2)}, "model/a: names must not begin with model/"),
    ],
)
def test_what_the_format_has_no_words_for_is_refused_by_name_and_not_pickled(tmp_path, state, said):
    assert said in refused(save, state, tmp_path / "ba1")
    assert CheckpointStore(tmp_path).candidates() == []


def test_a_flipped_byte_and_a_lost_file_are_refused_at_load_and_change_nothing(tmp_path):
    save(small(), tmp_path / "ba1")
    path = tmp_path / "ba1" / "shard-00000.safetensors"
    flip(path, 4096 + 5)
    state = small(0.0)
    said = refused(load, state, tmp_path / "ba1")
    assert "ba1/shard-00000.safetensors: bytes 0 to" in said and "are not what was written (in model/w)" in said
    assert not state["model"]["w"].any() and state["step"] == 0
    path.unlink()
    assert "ba1/shard-00000.safetensors: missing" in refused(load, state, tmp_path / "ba1")
    flip(tmp_path / "ba1" / "manifest.json", 300)
    assert "manifest.json: the checksum does not match" in refused(load, state, tmp_path / "ba1")


def test_boxes_of_a_tensor_that_overlap_each_get_their_bytes(tmp_path):
    """As two names of one tensor may ask for it, divided otherwise: rows 0 and 1, rows 1 and 2, and a column."""
    whole = {"v": -torch.arange(12.0).view(3, 4), "w": torch.arange(12.0).view(3, 4)}
    save({"model": whole}, tmp_path / "ba1")
    boxes = [((0, 0), (2, 4)), ((1, 0), (2, 4)), ((0, 2), (3, 1))]
    items, targets = [], {}
    for name, (number, (offsets, lengths)) in itertools.product(whole, enumerate(boxes)):
        place = MetadataIndex(f"{name}.{number}")
        targets[place] = torch.zeros(lengths)
        items.append(
            ReadItem(
                type=LoadItemType.TENSOR,
                dest_index=place,
                dest_offsets=torch.Size((0, 0)),
                storage_index=MetadataIndex(f"model.{name}"),
                storage_offsets=torch.Size(offsets),
                lengths=torch.Size(lengths),
            )
        )
    planner: Any = SimpleNamespace(
        resolve_tensor=lambda item: targets[item.dest_index], commit_tensor=lambda item, target: None
    )
    reader = PortableStorageReader(tmp_path / "ba1")
    reader.read_metadata()
    reader.read_data(LoadPlan(items), planner).wait()
    for name, (number, ((row, column), (height, width))) in itertools.product(whole, enumerate(boxes)):
        expected = whole[name][row : row + height, column : column + width]
        assert torch.equal(targets[MetadataIndex(f"{name}.{number}")], expected)


def test_another_dtype_is_converted_only_when_asked(tmp_path):
    save(small(), tmp_path / "ba1")
    state = {"model": {"w": torch.zeros(3, 4, dtype=torch.bfloat16)}}
    assert "model.w is torch.float32, the state dict's is torch.bfloat16; cast=True" in refused(
        load, state, tmp_path / "ba1"
    )
    assert load(state, tmp_path / "ba1", cast=True)["model"]["w"].equal(small()["model"]["w"].bfloat16())


@pytest.mark.fault
def test_a_full_disk_raises_and_the_next_save_clears_what_is_left(tmp_path, monkeypatch):
    save(small(), tmp_path / "ba1")

    def full(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(local_folder, "WRITE", full)
        assert "shard-00000.safetensors: not written: No space left" in refused(save, small(), tmp_path / "ba2")
    assert [name for name in os.listdir(tmp_path) if name.startswith("ba")] == ["ba1"]
    save(small(), tmp_path / "ba3")
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".tmp")]


def test_a_process_that_has_saved_and_runs_on_keeps_no_other_from_saving(tmp_path):
    def becomes_its_parents(lease):
        claim = tmp_path / f".leases/{lease:08d}.json"
        parent = {"pid": os.getppid(), "started": start_ticks(os.getppid())}
        claim.write_bytes(write_json(json.loads(claim.read_bytes()) | parent))

    save(small(), tmp_path / "ba1")
    becomes_its_parents(1)
    save(small(), tmp_path / "ba2")
    assert CheckpointStore(tmp_path).acquire().epoch == 3
    becomes_its_parents(3)
    assert "on this machine is saving here; stop it" in refused(save, small(), tmp_path / "ba3")


def test_an_old_checkpoint_that_cannot_be_read_is_not_replaced(tmp_path, monkeypatch):
    save(small(), tmp_path / "ba1")

    def fails(*arguments):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(dcp_writer, "head_of", fails)
    said = refused(save, small(), tmp_path / "ba1", overwrite=True)
    assert "CheckpointError" in said and f"{tmp_path}/ba1: cannot be read: Input/output error" in said


def test_a_manifest_without_the_values_is_damaged(tmp_path, monkeypatch, capfd):
    save(small(), tmp_path / "ba1")
    broken = replace(open_checkpoint(tmp_path / "ba1").manifest, scalars={DCP_STATE: {"paths": {}}})
    with monkeypatch.context() as patch:
        patch.setattr(manifest_json, "check_manifest", lambda *arguments: None)
        (tmp_path / "ba1/manifest.json").write_bytes(encode(broken))
    assert command(["checkpoint", "inspect", str(tmp_path / "ba1")]) == 2
    assert "scalars: torch.distributed.checkpoint: expected values and paths" in capfd.readouterr().err


def test_values_go_where_the_planner_has_them_and_other_planners_are_refused(tmp_path):
    class Other(DefaultLoadPlanner):
        pass

    class Own(DefaultLoadPlanner):
        def load_bytes(self, read_item, value):
            pytest.fail("a pickle is asked for")

    def loaded(planner):
        state = {"step": 0, "w": torch.zeros(2)}
        dcp.load(state, storage_reader=PortableStorageReader(tmp_path / "ba1"), planner=planner)
        return state["step"]

    save({"step": 3, "w": torch.ones(2)}, tmp_path / "ba1")
    assert loaded(Other()) == loaded(Other(flatten_state_dict=False, flatten_sharded_tensors=False)) == 3
    assert "Own given, expected a planner derived from DefaultLoadPlanner, with its load_" in refused(loaded, Own())


def test_plans_of_an_earlier_save_are_refused(tmp_path):
    planner = DefaultSavePlanner(enable_plan_caching=True)
    planner._cached_plans_key = uuid.uuid4().hex
    dcp.save(small(), planner=planner, storage_writer=PortableStorageWriter(tmp_path / "ba1"))
    said = refused(dcp.save, small(), planner=planner, storage_writer=PortableStorageWriter(tmp_path / "ba2"))
    assert "enable_plan_caching=True given to the planner; leave it out" in said
    with pytest.raises(CheckpointError, match="use_collectives=False given; leave it out"):
        dcp.save(small(), use_collectives=False, storage_writer=PortableStorageWriter(tmp_path / "ba2"))


def test_the_weights_of_a_run_load_as_any_others_and_a_run_begins_with_others(tmp_path):
    model, optimizer = build("plain")
    step(model, optimizer, 0)
    save_now(Saver(CheckpointStore(tmp_path)), model, optimizer, 1)
    other, _ = build("plain", seed=5)
    load({"model": other.state_dict()}, tmp_path / "ba1")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    once = {name: tensor for name, tensor in model.state_dict().items() if name != "head.weight"}  # tied
    save({"model": once}, tmp_path / "ba2")
    third, _ = build("plain", seed=6)
    restore.load(tmp_path / "ba2", third)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), third.parameters(), strict=True))


def test_what_needs_a_model_says_so(tmp_path):
    save({"w": torch.ones(3)}, tmp_path / "ba1")
    with pytest.raises(DataError, match="ba1 does not say what model it is; expected a checkpoint of a run"):
        locate_model(str(tmp_path / "ba1"), device=torch.device("cpu"))
    with pytest.raises(CheckpointError, match=r"none of its tensors is named model/…; --everything writes all"):
        consolidate(tmp_path / "ba1", tmp_path / "out.safetensors")


# --------------------------------------------------------------------------------------------------- several ranks


def plain_script(folder, is_saving):
    """FSDP2 and AdamW, and a mesh of two dimensions where there are four ranks."""
    dist.init_process_group("gloo")
    torch.manual_seed(0 if is_saving else 1)
    model = nn.Sequential(nn.Embedding(13, 7), nn.Linear(7, 11), nn.LayerNorm(11), nn.Linear(11, 3))
    model.register_buffer("zero_d", torch.tensor(1.0 if is_saving else 0.0))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for seed in range(3 if is_saving else 1):
        torch.manual_seed(seed)
        model(torch.randint(13, (4, 6))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    weights, moments = get_state_dict(model, optimizer)
    slots: Any = moments["state"]
    state = {"model": weights, "optim": moments, "step": 3 if is_saving else 0, "names": ["a"] if is_saving else []}
    state["everywhere"] = torch.ones(5) if is_saving else torch.zeros(5)
    if is_saving:
        save(state, f"{folder}/ba3")
        future: Any = dcp.async_save(state, storage_writer=PortableStorageWriter(f"{folder}/ba4"))
        getattr(future, "upload_completion", future).result()
    else:
        load(state, f"{folder}/ba4")
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
        assert (state["step"], state["names"]) == (3, ["a"])
    flat = {}
    for key, value in [("", state["everywhere"]), *weights.items(), *slots.items()]:
        for slot, tensor in value.items() if isinstance(value, dict) else [("", value)]:
            flat[f"{key}/{slot}"] = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    if is_saving and dist.get_rank() == 0:
        torch.save(flat, f"{folder}/expected.pt")
    if not is_saving:
        expected = torch.load(f"{folder}/expected.pt")
        assert expected.keys() == flat.keys() and all(torch.equal(expected[key], flat[key]) for key in flat)
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_plain_fsdp_script_saves_on_two_ranks_and_loads_on_one_and_on_three(tmp_path, capsys):
    folder = tmp_path / "run"
    folder.mkdir()
    launch(plain_script, (str(folder), True), tmp_path, 2).check()
    for num_ranks in (1, 3):
        launch(plain_script, (str(folder), False), tmp_path, num_ranks).check()
    manifest = open_checkpoint(folder / "ba3").manifest
    assert manifest.state_digest == open_checkpoint(folder / "ba4").manifest.state_digest
    owners = [record.grid.files for name, record in manifest.tensors.items() if record.shape == () or "every" in name]
    assert {len(files) for files in owners} == {1}, "what every rank has is written once"
    for arguments in (["verify", folder / "ba3"], ["ls", folder], ["inspect", folder / "ba4"]):
        assert command(["checkpoint", *map(str, arguments)]) == 0
    out = capsys.readouterr().out
    assert "ba3: intact, 30 tensors" in out and "values of torch.distributed.checkpoint" in out


def mesh_script(folder):
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2))
    whole = torch.arange(105.0).view(7, 5, 3)
    placements = list(itertools.product([Shard(0), Shard(1), Replicate()], repeat=2))

    def state(values, shift):
        turned = placements[shift:] + placements[:shift]
        return {str(i): distribute_tensor(values.clone(), mesh, placement) for i, placement in enumerate(turned)}

    save(state(whole, 0), f"{folder}/ba1")
    for shift in (0, 4):
        loaded = load(state(torch.zeros_like(whole), shift), f"{folder}/ba1")
        assert all(torch.equal(tensor.full_tensor(), whole) for tensor in loaded.values())

    class Losing(DefaultSavePlanner):
        def finish_plan(self, new_plan):
            plan = super().finish_plan(new_plan)
            if dist.get_rank() == 1:
                plan.items.pop()
            return plan

    with pytest.raises(CheckpointException, match="values are there; a chunk is missing"):
        dcp.save(state(whole, 0), planner=Losing(), storage_writer=PortableStorageWriter(f"{folder}/ba2"))
    with pytest.raises(CheckpointException, match=r"on 2: builtins\.object given"):
        save({**state(whole, 0), f"on {dist.get_rank()}": object() if dist.get_rank() == 2 else 1}, f"{folder}/ba3")
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.multiprocess
def test_every_placement_on_a_mesh_of_two_dimensions_loads_as_every_other(tmp_path):
    launch(mesh_script, (str(tmp_path / "run"),), tmp_path, 4).check()
    verify_checkpoint(open_checkpoint(tmp_path / "run" / "ba1"))
    assert [found.name for found in CheckpointStore(tmp_path / "run").candidates()] == ["ba1"]
