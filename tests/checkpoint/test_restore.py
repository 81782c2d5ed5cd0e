"""One process: what a model and its optimizer hold comes back exactly, or nothing changes and the reason is said."""

import os
import pickle
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from llmfoundry_lite.checkpoint import save as saving
from llmfoundry_lite.checkpoint.full_tensors import compare, consolidate, diff, diff_scalars, load_full_tensors
from llmfoundry_lite.checkpoint.restore import load, load_newest
from llmfoundry_lite.checkpoint.save import Saver
from llmfoundry_lite.checkpoint.store import CheckpointStore, open_checkpoint
from llmfoundry_lite.checkpoint.verify import verify_checkpoint
from llmfoundry_lite.errors import CheckpointError, ConfigError, DamagedCheckpointError
from llmfoundry_lite.training.optimizers import Lion
from tests.checkpoint.mounts import mounted
from tests.checkpoint.ranks import about, build, save_now, step, whole_state
from tests.checkpoint.saves import flip, names


def train(num_steps=2, optimizer="adamw", seed=0):
    model, opt = build("plain", optimizer, seed)
    for i in range(num_steps):
        step(model, opt, i)
    return model, opt


def save(folder, model, optimizer, batch=2):
    save_now(Saver(CheckpointStore(folder)), model, optimizer, batch)
    return f"{folder}/ba{batch}"


def assert_same(a, b):
    assert a.keys() == b.keys()
    assert [name for name in a if a[name].dtype != b[name].dtype or not torch.equal(a[name], b[name])] == []


@pytest.mark.parametrize("optimizer", ["adamw", "lion"])
@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_training_goes_on_bit_for_bit(tmp_path, optimizer, num_steps):
    model, opt = train(num_steps, optimizer)
    url = save(tmp_path, model, opt)
    fresh, fresh_opt = build("plain", optimizer, seed=5)
    load(url, fresh, fresh_opt)
    assert_same(whole_state(fresh, fresh_opt), whole_state(model, opt))
    assert [step(fresh, fresh_opt, i) for i in range(3)] == [step(model, opt, i) for i in range(3)]
    assert_same(whole_state(fresh, fresh_opt), whole_state(model, opt))


def test_restoring_replaces_state_that_was_there(tmp_path):
    model, opt = train(0)
    url = save(tmp_path, model, opt)
    other, other_opt = train(3, seed=3)
    load(url, other, other_opt)
    assert not other_opt.state, "saved before the first step: no moments, and no dummy ones either"
    assert_same(whole_state(other, other_opt), whole_state(model, opt))


def test_groups_and_hyperparameters_come_back_but_not_how_a_step_is_computed(tmp_path):
    model, opt = train()
    opt.param_groups[0]["lr"], opt.param_groups[1]["initial_lr"] = 0.125, 0.5
    url = save(tmp_path, model, opt)
    fresh, _ = build("plain", seed=5)
    parameters = [p for p in fresh.parameters() if p.requires_grad]
    other = torch.optim.AdamW([{"params": parameters[:2]}, {"params": parameters[2:]}], lr=9.0, foreach=True)
    load(url, fresh, other)
    assert (other.param_groups[0]["lr"], other.param_groups[0]["weight_decay"]) == (0.125, 0.3)
    assert other.param_groups[1]["initial_lr"] == 0.5
    assert (other.param_groups[0]["foreach"], other.param_groups[0]["fused"]) == (True, None)
    assert step(fresh, other, 9) == step(model, opt, 9)


def test_a_save_is_of_its_moment_though_training_goes_on(tmp_path):
    model, opt = train()
    saver = Saver(CheckpointStore(tmp_path))
    saver.take_lease()
    expected = whole_state(model, opt)
    saver.save(model, opt, about(2))
    for i in range(3):
        step(model, opt, i)
    saver.wait()
    fresh, fresh_opt = build("plain", seed=5)
    load(f"{tmp_path}/ba2", fresh, fresh_opt)
    assert_same(whole_state(fresh, fresh_opt), expected)


def test_numbers_are_of_their_moment_though_their_owner_goes_on(tmp_path):
    model, opt = train()
    saver = Saver(CheckpointStore(tmp_path))
    saver.take_lease()
    seen = {"batches": [1, 2]}
    saver.save(model, opt, about(2, callbacks=seen))
    seen["batches"].append(3)
    saver.wait()
    assert open_checkpoint(tmp_path / "ba2").manifest.scalars == {"callbacks": {"batches": [1, 2]}}


def test_waiting_for_the_save_before_counts_as_stall(tmp_path, monkeypatch):
    model, opt = train()
    clock = [0.0]

    def on_phase(phase):
        clock[0] += 100.0 * (phase == "before manifest")

    monkeypatch.setattr(saving, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    saver = Saver(CheckpointStore(tmp_path, on_phase=on_phase))
    saver.take_lease()
    saver.save(model, opt, about(2))  # whose manifest is written when somebody asks for it
    saver.save(model, opt, about(3))
    saved = saver.wait()
    assert saved is not None and (saved.stall_seconds, saved.durable_seconds) == (100.0, 200.0)


def test_saves_in_a_row_use_one_buffer_and_know_their_parents(tmp_path):
    model, opt = train()
    saver = Saver(CheckpointStore(tmp_path), parent_save_id="e0-ba0-abc")
    saver.take_lease()
    save_now(saver, model, opt, 2)
    address = saver._staging.content.data_ptr()
    saver.save(model, opt, about(3))
    earlier = saver.save(model, opt, about(4))
    assert earlier is not None and earlier.name == "ba3"
    saver.wait()
    assert saver._staging.content.data_ptr() == address
    manifests = [open_checkpoint(tmp_path / name).manifest for name in ("ba2", "ba3", "ba4")]
    ids = ["e0-ba0-abc", *(m.save_id for m in manifests)]
    assert [m.parent_save_id for m in manifests] == ids[:-1]


def test_a_save_with_other_tensors_than_the_one_before_has_all_of_them(tmp_path):
    model, opt = train()
    saver = Saver(CheckpointStore(tmp_path))
    saver.take_lease()
    save_now(saver, model, None, 1)
    save_now(saver, model, opt, 2)
    fresh, fresh_opt = build("plain", "adamw", seed=5)
    load(f"{tmp_path}/ba2", fresh, fresh_opt)
    assert_same(whole_state(fresh, fresh_opt), whole_state(model, opt))


# ---------------------------------------------------------------------------------------------------------- strictness


def wider():
    model = build("plain")[0]
    model.embed = nn.Embedding(12, 6)
    model.head.weight = model.embed.weight
    return model


def with_one_more():
    model = build("plain")[0]
    model.extra = nn.Parameter(torch.zeros(3))
    return model


def untied():
    model = build("plain")[0]
    model.head.weight = nn.Parameter(torch.zeros(11, 6))
    return model


def in_bf16():
    return build("plain")[0].to(torch.bfloat16)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (wider, r"model/embed.weight is \[11, 6\], this run needs \[12, 6\]"),
        (with_one_more, "this run has model/extra, which the checkpoint lacks"),
        (untied, "this run has model/head.weight, which the checkpoint lacks"),
        (in_bf16, "model/gain is F32, this run keeps BF16; load_cast=true converts"),
    ],
)
def test_another_model_is_refused_by_name_and_left_alone(tmp_path, other, words):
    url = save(tmp_path, *train())
    model = other()
    before = whole_state(model, None)
    with pytest.raises(CheckpointError, match=words) as caught:
        load(url, model)
    assert not isinstance(caught.value, DamagedCheckpointError)
    assert_same(whole_state(model, None), before)


def test_keys_can_be_left_out_and_dtypes_cast(tmp_path):
    trained, opt = train()
    url = save(tmp_path, trained, opt)
    model = with_one_more()
    load(url, model, ignore_keys=["model/extra"])
    assert torch.equal(model.embed.weight, trained.embed.weight)
    model = in_bf16()
    load(url, model, cast=True)
    assert torch.equal(model.embed.weight, trained.embed.weight.bfloat16())


@pytest.mark.parametrize(
    "pattern", ["model/embed.weight", "optim/embed.weight/exp_avg_sq", "optim/embed.weight/*", "*embed.weight*"]
)
def test_what_is_left_out_has_no_optimizer_state_and_trains_on(tmp_path, pattern):
    url = save(tmp_path, *train())
    model, opt = build("plain", seed=5)
    before = model.embed.weight.detach().clone()
    load(url, model, opt, ignore_keys=[pattern])
    assert torch.equal(before, model.embed.weight) == pattern.startswith(("model/", "*"))
    assert model.embed.weight not in opt.state and len(opt.state[model.gain]) == 3
    step(model, opt, 9)
    assert (opt.state[model.embed.weight]["step"], opt.state[model.gain]["step"]) == (1, 3)


def test_a_pattern_that_leaves_nothing_out_is_refused(tmp_path):
    url = save(tmp_path, *train())
    with pytest.raises(CheckpointError, match=r"load_ignore_keys: model/emb\.\* is no tensor.*such as model/blocks\.0"):
        load(url, build("plain")[0], ignore_keys=["model/emb.*"])


def test_the_caller_may_object_before_anything_changes(tmp_path):
    url = save(tmp_path, *train())

    def object_to(manifest):
        raise CheckpointError(f"made by {manifest.run_name}")

    model, opt = train(seed=5)
    before = whole_state(model, opt)
    with pytest.raises(CheckpointError, match="made by tiny"):
        load(url, model, opt, check=object_to)
    assert_same(whole_state(model, opt), before)


def test_another_optimizer_or_other_groups_are_refused(tmp_path):
    url = save(tmp_path, *train())
    model = build("plain")[0]
    parameters = [p for p in model.parameters() if p.requires_grad]
    with pytest.raises(CheckpointError, match=r"holds the state of AdamW, this run uses Lion; load_weights_only"):
        load(url, model, Lion(parameters, lr=0.1))
    with pytest.raises(CheckpointError, match=r"parameters form other groups there \(2\) than here \(1\)"):
        load(url, model, torch.optim.AdamW(parameters))
    with pytest.raises(CheckpointError, match=r"optimizer: the checkpoint has .*, which this run lacks"):
        load(url, model, torch.optim.AdamW(parameters[:2]))
    weights_only = save(tmp_path / "w", model, None)
    with pytest.raises(CheckpointError, match="holds no optimizer state; load_weights_only: true"):
        load(weights_only, model, torch.optim.AdamW(parameters))


def test_an_optimizer_of_another_model_is_refused(tmp_path):
    model, _ = train()
    _, opt = train()
    with pytest.raises(CheckpointError, match="is not a parameter of the model; build the optimizer from"):
        save(tmp_path, model, opt)


# -------------------------------------------------------------------------------------------------- damage and failure


@pytest.mark.fault
def test_damage_leaves_the_model_untouched_and_the_newest_intact_is_used(tmp_path):
    model, opt = train()
    store = CheckpointStore(tmp_path)
    saver = Saver(store)
    saver.take_lease()
    for batch in (2, 3, 4):
        save_now(saver, model, opt, batch)
    shard = tmp_path / "ba4" / "shard-00000.safetensors"
    flip(shard, shard.stat().st_size - 17)
    (tmp_path / "ba3" / "shard-00000.safetensors").unlink()
    fresh, fresh_opt = build("plain", seed=5)
    before = whole_state(fresh, fresh_opt)
    with pytest.raises(DamagedCheckpointError, match=r"ba4/shard-00000.safetensors: bytes .* \(in (model|optim)/"):
        load(tmp_path / "ba4", fresh, fresh_opt)
    assert_same(whole_state(fresh, fresh_opt), before)
    restored = load_newest(store, fresh, fresh_opt, lease=saver.lease)
    assert restored.manifest is not None and restored.manifest.timestamp.batch == 2
    assert [("ba4" in a, "ba3" in b) for a, b in [restored.notes]] == [(True, True)]
    assert_same(whole_state(fresh, fresh_opt), whole_state(model, opt))
    assert names(store) == ["ba3", "ba2"], "what is incomplete is not moved"


@pytest.mark.fault
@pytest.mark.parametrize("has_lease", [True, False])
def test_every_damaged_one_is_passed_over_once_and_set_aside_under_a_lease_alone(tmp_path, monkeypatch, has_lease):
    """The newest has lost a shard, the next is damaged in its manifest, and the third in a shard."""
    model, opt = train()
    store = CheckpointStore(tmp_path)
    saver = Saver(store)
    saver.take_lease()
    for batch in (2, 3, 4, 5):
        save_now(saver, model, opt, batch)
    (tmp_path / "ba5" / "shard-00000.safetensors").unlink()
    flip(tmp_path / "ba4" / "manifest.json", 100)
    flip(shard := tmp_path / "ba3" / "shard-00000.safetensors", shard.stat().st_size - 17)
    newest_intact, searches = store.newest_intact, []

    def search(*arguments, **options):
        searches.append(options)
        assert len(searches) <= 2, "the third is found again and again"
        return newest_intact(*arguments, **options)

    monkeypatch.setattr(store, "newest_intact", search)
    restored = load_newest(store, *build("plain", seed=5), lease=saver.lease if has_lease else None)
    assert restored.manifest is not None and restored.manifest.timestamp.batch == 2
    assert sorted(batch for note in restored.notes for batch in (2, 3, 4, 5) if f"/ba{batch}" in note) == [3, 4, 5]
    is_set_aside = [not (tmp_path / f"ba{batch}").exists() for batch in (5, 4, 3)]
    assert is_set_aside == [False, has_lease, has_lease], "what is incomplete is not moved"


def test_a_save_that_does_not_fit_is_not_passed_over(tmp_path):
    save(tmp_path, *train())
    with pytest.raises(CheckpointError, match="this run needs"):
        load_newest(CheckpointStore(tmp_path), wider())


def test_nothing_saved_is_not_an_error(tmp_path):
    assert load_newest(CheckpointStore(tmp_path / "none"), build("plain")[0]).manifest is None


@pytest.mark.fault
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("where", ["model", "optimizer"])
def test_a_poisoned_state_is_never_published(tmp_path, value, where):
    model, opt = train()
    url = save(tmp_path, model, opt)
    target = model.gain.data if where == "model" else opt.state[model.gain]["exp_avg"]
    target[1] = value
    saver = Saver(CheckpointStore(tmp_path))
    saver.take_lease()
    saver.save(model, opt, about(3))
    with pytest.raises(CheckpointError, match=r"not saved: non-finite values in (model/gain|optim/gain/exp_avg)"):
        saver.wait()
    assert names(CheckpointStore(tmp_path)) == ["ba2"]
    verify_checkpoint(open_checkpoint(url))
    target[1] = 0.5
    save_now(saver, model, opt, 4)


def test_finite_values_whose_sum_is_out_of_range_are_saved(tmp_path):
    model, opt = train()
    model.gain.data.fill_(torch.finfo(torch.float32).max)
    save(tmp_path, model, opt)
    assert names(CheckpointStore(tmp_path)) == ["ba2"]


@pytest.mark.fault
def test_a_bug_in_the_background_keeps_its_traceback(tmp_path, monkeypatch):
    model, opt = train()
    saver = Saver(CheckpointStore(tmp_path))
    saver.take_lease()

    def broken(*args, **kwargs):
        raise KeyError("oops")

    monkeypatch.setattr("llmfoundry_lite.checkpoint.save.write_shard", broken)
    saver.save(model, opt, about(3))
    with pytest.raises(KeyError, match="oops"):
        saver.wait()


# ------------------------------------------------------------------------------------------------------- no pickle


class Bomb:
    def __reduce__(self):
        return (Path("exploded").touch, ())


@pytest.mark.fault
def test_a_pickle_in_the_folder_is_never_opened(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model, opt = train()
    url = save(tmp_path, model, opt)
    for name in (".metadata", "__0_0.distcp", "model.pt", "shard-00001.safetensors"):
        (Path(url) / name).write_bytes(pickle.dumps(Bomb()))

    def forbidden(*args, **kwargs):
        raise AssertionError("unpickled")

    for module, name in ((pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (torch, "load"), (torch, "save")):
        monkeypatch.setattr(module, name, forbidden)
    monkeypatch.setattr(pickle, "dumps", forbidden)
    load(url, model, opt)
    load_full_tensors(url)
    verify_checkpoint(open_checkpoint(url))
    save_now(Saver(CheckpointStore(tmp_path)), model, opt, 3)
    assert not Path("exploded").exists()


# ----------------------------------------------------------------------------------------------------------- tools


def test_diff_finds_the_largest_differences(tmp_path):
    model, opt = train()
    a = save(tmp_path / "a", model, opt)
    with torch.no_grad():
        model.gain[1] += 0.5
        model.embed.weight[3, 2] *= 1.25
    opt.param_groups[0]["lr"] = 0.5
    b = save(tmp_path / "b", model, opt)
    found = {d.name: d for d in diff(a, b) if d.num_different or d.note}
    assert found.keys() == {"model/gain", "model/embed.weight"}
    assert found["model/gain"].max_absolute == pytest.approx(0.5)
    assert found["model/embed.weight"].max_relative == pytest.approx(0.2)
    assert found["model/embed.weight"].num_different == 1
    changed = diff_scalars(open_checkpoint(a).manifest, open_checkpoint(b).manifest)
    assert changed == [("optimizer.groups[0].options.lr", 0.01, 0.5)]


def test_diff_names_what_is_only_in_one_or_of_another_shape(tmp_path):
    a, b = save(tmp_path / "a", *train()), save(tmp_path / "b", wider(), None)
    notes = {d.name: d.note for d in diff(a, b) if d.note}
    assert notes["model/embed.weight"] == "shape [11, 6] and [12, 6]"
    assert notes["optim/gain/exp_avg"].startswith("only in ")


@pytest.mark.parametrize(
    ("a", "b", "num_different", "largest"),
    [
        ([float("nan"), 1.0], [float("nan"), 1.0], 0, 0.0),
        ([float("nan"), 1.0], [0.0, 1.0], 1, float("nan")),
        ([2**60, 7, 2**62], [2**60 + 1, 7, 2**62], 1, 0.0),
    ],
    ids=["nan in both", "nan in one", "one as doubles"],
)
def test_what_counts_as_a_difference(a, b, num_different, largest):
    found = compare("t", "", torch.tensor(a), torch.tensor(b))
    assert (found.num_different, str(found.max_absolute)) == (num_different, str(largest))


def test_consolidated_weights_are_one_plain_file(tmp_path):
    model, opt = train()
    url = save(tmp_path, model, opt)
    weights = load_file(consolidate(url, tmp_path / "out" / "weights.safetensors"))
    assert_same(weights, {k: v for k, v in model.state_dict().items() if k != "head.weight"})
    everything = load_file(consolidate(url, tmp_path / "all.safetensors", everything=True))
    expected = {k: v for k, v in whole_state(model, opt).items() if not k.startswith("number/")}
    assert_same(everything, expected)


@pytest.mark.fault
def test_consolidating_replaces_an_earlier_consolidation_and_nothing_else(tmp_path):
    url = save(tmp_path / "run", *train())
    shard = next(path for path in Path(url).iterdir() if path.suffix == ".safetensors")
    theirs = tmp_path / "theirs.safetensors"
    save_file({"w": torch.ones(2)}, theirs)
    (tmp_path / "text").write_text("mine")
    (tmp_path / "folder").mkdir()
    copied = shutil.copy(shard, tmp_path / "copied.safetensors")
    os.mkfifo(tmp_path / "pipe")
    for path in (theirs, tmp_path / "text", tmp_path / "folder", Path(copied), tmp_path / "pipe"):
        before = path.read_bytes() if path.is_file() else None
        with pytest.raises(CheckpointError, match="exists and is not an earlier consolidation; give another name"):
            consolidate(url, path)
        assert before == (path.read_bytes() if path.is_file() else None)
    ours = consolidate(url, tmp_path / "ours.safetensors", everything=True)
    assert len(load_file(consolidate(url, ours))) < len(load_file(consolidate(url, ours, everything=True)))


@pytest.mark.fault
def test_consolidating_takes_no_url_for_a_path(tmp_path, monkeypatch):
    url = save(tmp_path / "run", *train())
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="s3:/bucket/x: a URL given, expected a path of this machine"):
        consolidate(url, "s3://bucket/x")
    assert not (tmp_path / "s3:").exists()


@pytest.mark.fault
def test_consolidating_onto_a_read_only_disk_is_an_error_in_a_line(tmp_path):
    url = save(tmp_path / "run", *train())
    with mounted(tmp_path / "disk") as disk:
        disk.make_read_only()
        with pytest.raises(CheckpointError, match="not written: Read-only file system") as caught:
            consolidate(url, disk.path / "x.safetensors")
    assert caught.value.is_transient


@pytest.mark.fault
@pytest.mark.parametrize(
    "name", ["manifest.json", "shard", "new.safetensors", "sub/new.safetensors", "../ba999", "link"]
)
def test_consolidating_writes_nothing_into_a_checkpoint(tmp_path, name):
    url = Path(save(tmp_path / "run", *train()))
    shard = next(path.name for path in url.iterdir() if path.suffix == ".safetensors")
    before = {path.name: path.read_bytes() for path in url.iterdir()}
    (tmp_path / "link").symlink_to(url)
    target = tmp_path / "link" / "new" if name == "link" else url / name.replace("shard", shard)
    with pytest.raises(CheckpointError, match=r"is a checkpoint, or has the name of one in a folder of checkpoints; g"):
        consolidate(str(url), target)
    assert before == {path.name: path.read_bytes() for path in url.iterdir()}
    assert not (tmp_path / "run" / "ba999").exists()
