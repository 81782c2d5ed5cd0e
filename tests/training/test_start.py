"""Where a launch begins is decided before anything is built, and no run starts over silently."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from llmfoundry_lite.checkpoint.manifest import Manifest, Timestamp
from llmfoundry_lite.checkpoint.run_log import write_log as write_log_parts
from llmfoundry_lite.checkpoint.start import Start, check_fit, choose_start
from llmfoundry_lite.checkpoint.store import CheckpointStore
from llmfoundry_lite.config.load_train import load_train_config
from llmfoundry_lite.config.schema import as_dict
from llmfoundry_lite.errors import CheckpointError
from tests.checkpoint.saves import write_draft
from tests.helpers.tiny import tiny_config, write_config


def config_of(folder, **changes):
    path = write_config(folder / "tiny.yaml", tiny_config(folder / "data", run_folder=str(folder / "run"), **changes))
    return load_train_config([path]).config


def write_log(folder: Path, *records):
    (folder / "run").mkdir()
    (folder / "run/metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def refusal(folder, **changes):
    with pytest.raises(CheckpointError) as caught:
        choose_start(config_of(folder, **changes), {})
    return str(caught.value).replace(str(folder) + "/", "")


def test_a_run_with_a_log_and_no_checkpoint_is_not_started_over_silently(tmp_path):
    write_log(tmp_path, {"batch": 0, "eval/loss": 4.0}, {"batch": 1}, {"batch": 2})
    assert refusal(tmp_path) == (
        "run/metrics.jsonl has batches of this run up to 2, and run/checkpoints holds no checkpoint to carry on from; "
        "to start over, choose another run_name or remove run"
    )
    start = choose_start(config_of(tmp_path, autoresume=True), {})
    assert start.url is None
    assert start.note.endswith("has batches of this run up to 2, none of them saved yet: they are trained again")


@pytest.mark.fault
@pytest.mark.parametrize("autoresume", [True, False])
def test_a_run_whose_checkpoints_have_gone_is_never_started_over(tmp_path, autoresume):
    """Such as when their disk is not mounted."""
    write_log(tmp_path, {"batch": 1}, {"batch": 2, "checkpoint/bytes": 7})
    assert refusal(tmp_path, autoresume=autoresume) == (
        "run/metrics.jsonl has batches of this run up to 2 and says that it was saved, but run/checkpoints holds no "
        "checkpoint; is its disk mounted, is save_folder the same? to start over, choose another run_name or remove run"
    )


def test_a_log_of_no_batch_is_no_hindrance(tmp_path):
    write_log(tmp_path, {"batch": 0, "eval/loss": 4.0})
    assert choose_start(config_of(tmp_path), {}) == Start()


@pytest.mark.parametrize("is_said", [False, True])
def test_a_default_that_has_changed_since_does_not_change_a_run(tmp_path, is_said):
    optimizer = {"name": "decoupled_adamw", "lr": 0.1}
    recorded = as_dict(config_of(tmp_path, optimizer={**optimizer, "weight_decay": 0.0}))
    manifest = Manifest(
        save_id="s",
        timestamp=Timestamp(batch=1),
        config=recorded,
        optimizer={},
        scalars={"timestamp": {}},
    )
    if is_said:
        check_fit(config_of(tmp_path, optimizer={**optimizer, "weight_decay": 1e-5}), {}, manifest)
        return
    with pytest.raises(CheckpointError, match=r"optimizer.weight_decay is 1e-05 here and 0.0 in .* set optimizer\.w"):
        check_fit(config_of(tmp_path, optimizer=optimizer), {}, manifest)


def save_of(folder: Path, run_name: str, log: bytes = b"") -> None:
    """Publish ba2 of a run of that name in `shared`, with its log."""
    store = CheckpointStore(folder / "shared")
    lease = store.acquire()
    draft = write_draft(store, lease, 2)
    state = {"config": as_dict(config_of(folder)), "optimizer": {}, "scalars": {"timestamp": {}}}
    parts = write_log_parts(store, draft.save_id, log, ()) if log else ()
    store.publish(replace(draft, run_name=run_name, log=parts, **state), lease)


def test_another_run_s_checkpoint_is_not_carried_on_by_a_new_run(tmp_path):
    """Two experiments with one save_folder: the second would train nothing, and hold the first one's log."""
    save_of(tmp_path, "first", b'{"batch": 1}\n{"batch": 2}\n')
    shared = {"save_folder": str(tmp_path / "shared"), "autoresume": True}
    words = (
        "shared/ba2 is a checkpoint of the run first, but this run is second, and its folder run does not continue "
        "that run; give each run its own folder, such as save_folder=shared/{run_name}, or continue that run "
        "(run_name=first), or begin with its weights in another save_folder (load_path=shared/ba2 "
        "load_weights_only=true)"
    )
    assert refusal(tmp_path, run_name="second", **shared) == words
    assert refusal(tmp_path, run_name="second", **{**shared, "autoresume": False}) == words
    # Both began before either had saved: the folder's log is another run's.
    write_log(tmp_path, {"batch": 1, "loss/train/total": 2.0})
    assert refusal(tmp_path, run_name="second", **shared) == words
    assert choose_start(config_of(tmp_path, run_name="first", **shared), {}).checkpoint_name == "ba2"


@pytest.mark.parametrize("has_copy_of_log", [True, False])
def test_a_renamed_run_that_has_carried_on_here_goes_on(tmp_path, has_copy_of_log):
    save_of(tmp_path, "first", b'{"batch": 1}\n{"batch": 2}\n' if has_copy_of_log else b"")
    write_log(tmp_path, {"batch": 1}, {"batch": 2}, {"batch": 3})
    config = config_of(tmp_path, run_name="second", save_folder=str(tmp_path / "shared"), autoresume=True)
    assert choose_start(config, {}).checkpoint_name == "ba2"


def finish(folder: Path) -> CheckpointStore:
    """Publish ba4 of the run `tiny`, which is then at its end."""
    store = CheckpointStore(folder / "run/checkpoints")
    lease = store.acquire()
    config = config_of(folder, max_duration="4ba")
    state = {"config": as_dict(config), "optimizer": {}, "scalars": {"timestamp": {}}, "run_name": config.run_name}
    store.publish(replace(write_draft(store, lease, 4), **state), lease)
    return store


def test_a_finished_run_is_not_launched_with_what_it_has_not_trained_with(tmp_path):
    """A sweep whose run_name is forgotten: the second run would train nothing, say done, and record its own lr."""
    finish(tmp_path)
    own = {"autoresume": True, "max_duration": "4ba"}
    optimizer = config_of(tmp_path).optimizer
    changed = {"name": optimizer.name, "lr": 2 * optimizer.lr}
    assert refusal(tmp_path, **own, optimizer=changed) == (
        "run/checkpoints/ba4 is the end of the run tiny (max_duration=4ba), so nothing is trained with optimizer.lr "
        f"{optimizer.lr} -> {2 * optimizer.lr}; choose another run_name for another run, or a longer max_duration, or "
        "leave the change out"
    )
    assert "eval_subset_num_batches -1 -> 3" in refusal(tmp_path, **own, eval_subset_num_batches=3)
    longer = config_of(tmp_path, **{**own, "max_duration": "8ba"}, optimizer=changed)
    for config in (config_of(tmp_path, **own, save_interval="2ba"), longer):
        assert choose_start(config, {}).checkpoint_name == "ba4"


def test_a_new_run_does_not_begin_at_the_end_of_the_one_it_loads(tmp_path):
    """A sweep that fine-tunes a finished run: each run would train nothing, and say done."""
    store = finish(tmp_path)
    loaded = {"run_folder": str(tmp_path / "next"), "run_name": "next", "load_path": store.root.url}
    values = tiny_config(tmp_path / "data", **loaded, max_duration="4ba")

    def start(**changes):
        path = write_config(tmp_path / "next.yaml", {**values, **changes})
        return choose_start(load_train_config([path]).config, {})

    with pytest.raises(
        CheckpointError, match=r"ba4 is at batch 4, where a run with max_duration=4ba is done, so nothing"
    ):
        start()
    assert start(max_duration="8ba").url == store.root.url
    assert start(load_weights_only=True).url == store.root.url


def test_weights_of_others_are_answered_with_how_to_import_them(tmp_path):
    torch.save({"state": {}}, tmp_path / "ep0-ba10-rank0.pt")
    words = refusal(tmp_path, load_path=str(tmp_path / "ep0-ba10-rank0.pt"))
    assert words.startswith(
        "load_path: ep0-ba10-rank0.pt: a file, and a checkpoint is a folder; `llmfoundry-lite checkpoint import "
        "ep0-ba10-rank0.pt OUT` makes one of a checkpoint of Composer or LLM Foundry (a pickle: add --trust-pickle), "
    )
    for name, file, option in (("sharded", ".metadata", " --trust-pickle"), ("model", "config.json", "")):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).touch()
        words = refusal(tmp_path, load_path=str(tmp_path / name))
        assert f"`llmfoundry-lite checkpoint import {name} OUT{option}` makes one" in words
    words = refusal(tmp_path, load_path=str(tmp_path / "nowhere"))
    assert words == (
        "load_path: nowhere holds no intact checkpoint; expected one (…/ba200), a folder of them, or a run directory"
    )


@pytest.mark.fault
@pytest.mark.parametrize("autoresume", [True, False])
def test_a_run_whose_checkpoints_were_all_set_aside_is_never_started_over(tmp_path, autoresume):
    (tmp_path / "run/checkpoints/.damaged-ba4-c0ffee").mkdir(parents=True)
    assert refusal(tmp_path, autoresume=autoresume) == (
        "run/checkpoints holds no checkpoint but .damaged-ba4-c0ffee, set aside as damaged; rename one to its ba… to "
        "try it again, or move the folder away to start again from batch 1"
    )
