"""`llmfoundry-lite runs prune`: retention over many runs, on a disk and in a bucket."""

import shutil

import pytest

from llmfoundry_lite.checkpoint.fallback import copy_checkpoint
from llmfoundry_lite.checkpoint.open_folder import open_folder
from llmfoundry_lite.checkpoint.run_log import read_log
from llmfoundry_lite.checkpoint.store import CheckpointStore, open_checkpoint
from llmfoundry_lite.cli import main
from llmfoundry_ops.space import Retention, carry_out, format_size, plan_runs
from llmfoundry_ops.tests.buckets import record_launch, save_with_log
from tests.checkpoint.s3_server import s3_server
from tests.checkpoint.saves import flip, names, save, saved
from tests.helpers.reported import record, write_run


@pytest.fixture(params=["disk", "bucket"])
def root(request, tmp_path):
    return str(tmp_path / "saves") if request.param == "disk" else f"memory://space/{tmp_path.name}"


def prune(root, *arguments):
    return main.run(["runs", "prune", root, *arguments])


def test_each_run_keeps_its_newest_and_every_so_many(root, capsys):
    for name in ("one", "two"):
        saved(f"{root}/{name}", 1, 2, 3, 4, 5)
    arguments = ("--keep-last", "2", "--keep-every", "2ba")
    assert prune(root, *arguments, "--dry-run", "-v") == 0
    shown = capsys.readouterr().out
    files = [line.split() for line in shown.splitlines() if line.endswith(" B") and "/ba" in line]
    assert {path.removeprefix(f"{root}/").split("/")[1] for path, *_ in files} == {"ba1", "ba3"}
    assert {path.rsplit("/", 1)[1] for path, *_ in files} == {
        *("manifest.json", "shard-00000.safetensors", "shard-00001.safetensors"),
    }
    num_bytes = sum(int(size.replace(",", "")) for _, size, _ in files)
    assert f"would free {format_size(num_bytes)}: 4 saves of 2 runs" in shown
    assert names(CheckpointStore(f"{root}/one")) == ["ba5", "ba4", "ba3", "ba2", "ba1"]

    assert prune(root, *arguments, "--yes") == 0
    assert f"freed {format_size(num_bytes)}: 4 saves of 2 runs" in capsys.readouterr().out
    for name in ("one", "two"):
        assert names(CheckpointStore(f"{root}/{name}")) == ["ba5", "ba4", "ba2"]
    assert prune(root, *arguments, "--yes") == 0
    assert "freed 0 B: 0 saves of 0 runs" in capsys.readouterr().out


def test_a_checkpoint_is_read_whole_before_older_ones_go(tmp_path, capsys):
    for name in ("damaged", "none-intact", "nothing-to-remove"):
        saved(tmp_path / name, 1, 2, 3)
    flip(
        tmp_path / "damaged/ba3/shard-00000.safetensors", 200_000
    )  # in the tensor, where sizes and headers do not tell
    for batch in (1, 2, 3):
        (tmp_path / f"none-intact/ba{batch}/shard-00001.safetensors").unlink()
    for batch in (1, 2):
        shutil.rmtree(tmp_path / f"nothing-to-remove/ba{batch}")

    assert prune(str(tmp_path), "--keep-last", "1", "--dry-run") == 0
    out, err = capsys.readouterr()
    assert "2 saves of 1 runs\nthe checkpoints that stay were not read, only" in out and err == ""
    assert prune(str(tmp_path), "--keep-last", "1", "--yes") == 0
    out, err = capsys.readouterr()
    assert names(CheckpointStore(tmp_path / "damaged")) == ["ba3", "ba2"]
    assert names(CheckpointStore(tmp_path / "none-intact")) == ["ba3", "ba2", "ba1"]
    assert "ba3 is damaged" in out and "ba3 is incomplete; ba2 is incomplete; ba1 is incomplete" in out
    assert err.splitlines() == [f"verifying ba{batch} of damaged, 808.4 kB" for batch in (3, 2)]


class Killed(BaseException):
    pass


def kill_mid_prune(phase):
    if phase == "mid-prune":
        raise Killed


def test_a_removal_that_was_killed_midway_is_finished_by_the_next(root):
    saved(f"{root}/tiny", 1, 2, 3)
    (plan,) = plan_runs(root, Retention(keep_last=1))
    assert plan.store is not None
    plan.store.on_phase = kill_mid_prune
    with pytest.raises(Killed):
        carry_out([plan])
    assert names(CheckpointStore(f"{root}/tiny")) == ["ba3", "ba2"]

    (plan,) = plan_runs(root, Retention(keep_last=1))
    assert plan.removal.names == ["ba2"]
    assert len([path for path in plan.files if path.endswith(".safetensors")]) == 4  # with those of ba1
    assert carry_out([plan]) == []
    assert {path.split("/")[0] for path in open_folder(f"{root}/tiny").tree_sizes()} == {
        ".leases",
        "ba3",
        "latest.json",
    }


@pytest.mark.slow
@pytest.mark.fault
def test_runs_on_s3_are_listed_and_freed_by_two_removals(monkeypatch, capsys):
    """The first removal is killed midway. The second one also removes what the first has left."""
    s3fs = pytest.importorskip("s3fs")
    pytest.importorskip("moto")
    with s3_server() as port:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.setenv(name, "test")
        s3fs.S3FileSystem.clear_instance_cache()
        s3fs.S3FileSystem().mkdir("space")
        for name in ("one", "two"):
            lease = save_with_log(f"s3://space/team/{name}", 2)
            save_with_log(f"s3://space/team/{name}", 20, lease)
            record_launch(f"s3://space/team/{name}", lease, status="failed", batch=21, reason="out of memory")

        plans = plan_runs("s3://space", Retention(keep_last=1))
        assert plans[0].store is not None
        plans[0].store.on_phase = kill_mid_prune
        with pytest.raises(Killed):
            carry_out(plans)
        assert prune("s3://space", "--keep-last", "1", "--yes") == 0
        left = open_folder("s3://space/team").tree_sizes()
        assert not [path for path in left if "-ba2-" in path or "/ba2/" in path]
        assert main.run(["runs", "ls", "s3://space"]) == 0
        assert "".join(capsys.readouterr().out.split()).endswith("outofmemory")
        assert [plan.files for plan in plan_runs("s3://space", Retention(keep_last=1))] == [{}, {}]
    s3fs.S3FileSystem.clear_instance_cache()


def test_what_was_saved_between_the_list_and_the_removal_stays(root):
    store, lease = saved(f"{root}/tiny", 1, 2, 3)
    (plan,) = plan_runs(root, Retention(keep_last=2))
    save(store, lease, 1)  # the batch is trained again
    save(store, lease, 4)
    assert carry_out([plan]) == []
    assert names(store) == ["ba4", "ba3", "ba2", "ba1"]


def test_parts_of_the_log_go_with_the_last_save_that_refers_to_them(root):
    lease = save_with_log(f"{root}/tiny", 1)
    for batch in (2, 3):
        save_with_log(f"{root}/tiny", batch, lease)
    (plan,) = plan_runs(root, Retention(keep_last=1))
    parts = sorted(path for path in plan.files if path.startswith("log/"))
    assert [path.split("-")[1] for path in parts] == ["ba1", "ba2"]
    assert any("leased to host" in note for note in plan.notes)
    assert carry_out([plan]) == []
    (part,) = open_folder(f"{root}/tiny/log").names()
    assert "-ba3-" in part


def test_the_log_of_an_older_save_that_is_copied_here_meanwhile_stays(root):
    save_with_log(f"{root}-elsewhere/tiny", 1)
    for batch in (2, 3):
        save_with_log(f"{root}/tiny", batch)
    (plan,) = plan_runs(root, Retention(keep_last=1))
    store = CheckpointStore(f"{root}/tiny")
    copy = copy_checkpoint(open_checkpoint(f"{root}-elsewhere/tiny/ba1"), store, is_newest=False)
    assert carry_out([plan]) == []
    assert names(store) == ["ba3", "ba1"]
    assert read_log(copy).notes == []


def test_the_best_by_a_number_of_the_log_stay(tmp_path):
    losses = {1: 3.0, 2: 1.0, 3: 2.0, 4: 4.0, 5: None}
    log = [record(batch) | ({} if loss is None else {"eval/loss": loss}) for batch, loss in losses.items()]
    write_run(tmp_path / "runs/tiny", log)
    saved(tmp_path / "runs/tiny/checkpoints", *losses)
    saved(tmp_path / "runs/no-log", 1, 2)
    best = {"keep_last": 1, "keep_best": 2, "by": "eval/loss"}
    plans = {plan.run: plan for plan in plan_runs(str(tmp_path / "runs"), Retention(**best))}
    assert plans["tiny"].removal.names == ["ba1", "ba4"]
    assert plans["no-log"].removal.names == [] and plans["no-log"].notes[0].startswith("nothing is removed: ")
    (plan,) = plan_runs(str(tmp_path / "runs/tiny"), Retention(**best, highest_is_best=True))
    assert plan.removal.names == ["ba2", "ba3"]
    (plan,) = plan_runs(str(tmp_path / "runs/tiny"), Retention(keep_last=1, keep_best=1, by="eval/other"))
    assert plan.removal.names == [] and "no checkpoint has a eval/other of its batch" in plan.notes[0]


def test_saves_that_were_set_aside_are_listed_and_removed_when_asked(tmp_path, capsys):
    store, _ = saved(tmp_path / "runs/tiny", 1, 2)
    (tmp_path / "runs/tiny/ba3").mkdir()
    shutil.move(tmp_path / "runs/tiny/ba3", tmp_path / "runs/tiny/.damaged-ba3-a1b2c3")
    (tmp_path / "runs/tiny/.damaged-ba3-a1b2c3/shard").write_bytes(b"x" * 1500)
    assert prune(str(tmp_path / "runs"), "--keep-last", "5", "--yes") == 0
    out = " ".join(capsys.readouterr().out.split())
    assert ".damaged-ba3-a1b2c3 (1.5 kB)" in out and "--set-aside removes them" in out
    assert prune(str(tmp_path / "runs"), "--keep-last", "5", "--set-aside", "--yes") == 0
    assert "freed 1.5 kB: 1 saves of 1 runs" in capsys.readouterr().out
    assert (store.set_aside_saves(), names(store)) == ([], ["ba2", "ba1"])


def test_runs_behind_links_are_left_alone(tmp_path, capsys):
    saved(tmp_path / "elsewhere/tiny", 1, 2)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/tiny").symlink_to(tmp_path / "elsewhere/tiny")
    assert prune(str(tmp_path / "runs"), "--keep-last", "1", "--yes") == 2
    assert "no runs here" in capsys.readouterr().err


def test_checkpoints_behind_a_link_in_a_run_folder_are_left_alone(tmp_path, capsys):
    store, _ = saved(tmp_path / "elsewhere", 1, 2)
    write_run(tmp_path / "runs/tiny", [record(1), record(2)])
    (tmp_path / "runs/tiny/checkpoints").symlink_to(tmp_path / "elsewhere")
    assert prune(str(tmp_path / "runs"), "--keep-last", "1", "--yes") == 0
    assert names(store) == ["ba2", "ba1"]
    assert "link" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "either --dry-run, which lists, or --yes"),
        (("--dry-run", "--yes"), "either --dry-run, which lists, or --yes"),
        (("--keep-best", "2", "--yes"), "--keep-best and --by go together"),
        (("--keep-every", "5ep", "--yes"), "--keep-every: 5ep given, expected a number of batches such as 10000ba"),
        (("--keep-every", "many", "--yes"), "--keep-every: many given, expected"),
    ],
)
def test_a_prune_that_asks_for_too_little_or_too_much_removes_nothing(tmp_path, capsys, arguments, words):
    store, _ = saved(tmp_path / "tiny", 1, 2)
    assert prune(str(tmp_path), "--keep-last", "1", *arguments) == 2
    assert words in capsys.readouterr().err
    assert names(store) == ["ba2", "ba1"]


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (2_500_000, "2.5 MB"), (10**16, "10,000.0 TB")],
)
def test_a_size_is_in_decimal_units(num_bytes, text):
    assert format_size(num_bytes) == text
