"""`llmfoundry-lite checkpoint …`: what is printed, what is refused, and that looking needs no torch."""

import json
import shutil
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from llmfoundry_lite.checkpoint.local_folder import LocalFolder
from llmfoundry_lite.checkpoint.retention import prune
from llmfoundry_lite.checkpoint.store import CheckpointStore
from llmfoundry_lite.checkpoint.verify import verify_checkpoint
from llmfoundry_lite.cli import main
from llmfoundry_lite.errors import CheckpointError
from llmfoundry_lite.ranks.ending import Preempted, report_error
from tests.checkpoint.saves import flip, save, write_draft
from tests.helpers.present import needs
from tests.helpers.tiny import write_config

TORCHLESS = """
import json, sys, time
started = time.monotonic()
from llmfoundry_lite.cli import main
code = main.run(sys.argv[1:])
print(json.dumps([code, "torch" in sys.modules, time.monotonic() - started]))
"""


@pytest.fixture
def folder(tmp_path):
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    lease = store.acquire()
    for batch in (1, 2, 3):
        save(store, lease, batch)
    return tmp_path / "run"


def run(capsys, *arguments):
    code = main.run(["checkpoint", *map(str, arguments)])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


@pytest.mark.parametrize("command", [["ls"], ["inspect"], ["verify"], ["prune", "--keep", "1"]])
def test_looking_at_checkpoints_needs_no_torch(folder, command):
    name, *options = command
    arguments = ["checkpoint", name, str(folder), *options]
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-c", TORCHLESS, *arguments], capture_output=True, text=True)
    code, has_torch, seconds = json.loads(done.stdout.splitlines()[-1])
    assert (code, has_torch) == (0, False), done.stderr
    print(f"{name}: {seconds:.2f} s, {time.monotonic() - started:.2f} s with the start of Python")


@pytest.mark.parametrize("command", [["ls"], ["inspect"], ["verify"], ["diff"]])
def test_nothing_there_is_an_error_of_one_line(tmp_path, capsys, command):
    name, *options = command
    places = [tmp_path / "nowhere"] * (2 if name == "diff" else 1)
    assert run(capsys, name, *places, *options) == (
        2,
        "",
        f"error: {tmp_path}/nowhere: no such folder; expected a checkpoint, a folder of them, or a run directory\n",
    )
    (tmp_path / "nowhere").mkdir()
    code, out, err = run(capsys, name, *places, *options)
    assert (code, out) == (2, "") and err.count("\n") == 1
    assert "nowhere: no checkpoints here; expected one (…/ba200), a folder of them" in err


@pytest.mark.parametrize("form", ["{}", "{}/", "file://{}", "{}/checkpoints", "{}/../link"])
def test_a_run_may_be_named_in_many_ways(folder, capsys, form):
    (folder.parent / "link").symlink_to(folder)
    code, out, _ = run(capsys, "ls", form.format(folder))
    assert code == 0 and "ba3" in out


@pytest.mark.parametrize(
    "command",
    ["ls", "inspect", "verify", "diff", "prune", pytest.param("average", marks=needs("llmfoundry_studies"))],
)
def test_a_run_that_saves_elsewhere_is_found_by_its_record_and_loses_nothing(folder, tmp_path, capsys, command):
    saves = tmp_path / "disk" / "checkpoints"
    saves.parent.mkdir()
    (folder / "checkpoints").rename(saves)
    write_config(folder / "config.yaml", {"save_folder": str(saves)})
    operands = {"diff": [folder, folder], "prune": [folder, "--keep", 1]}.get(command, [folder])
    if command == "average":
        operands += ["--out", tmp_path / "mean", "--last", 2]
    code, out, err = run(capsys, command, *operands)
    found = f"{folder} saves in {saves} by its config.yaml"
    if command == "prune":
        advice = "nothing is removed by a recorded path; give that folder instead"
        assert (code, out, err) == (2, "", f"error: {found}, and {advice}\n")
    else:
        assert err.startswith(f"{found}\n")
        assert (code == 0 and "ba3" in out) or (command == "average" and "has no mean" in err)
    assert len(CheckpointStore(saves).names()) == 3

    write_config(folder / "config.yaml", {"save_folder": "http://10.0.0.1/saves"})
    code, _, err = run(capsys, command, *operands)
    assert code == 2 and "its checkpoints are in http://10.0.0.1/saves, which is not opened unasked; give that" in err


def test_ls_lists_the_newest_first_and_names_the_damaged(folder, capsys):
    (folder / "checkpoints" / "ba2" / "manifest.json").write_text("{}")
    code, out, _ = run(capsys, "ls", folder)
    names = [line.split()[0] for line in out.splitlines() if line.strip().startswith("ba")]
    assert (code, names) == (0, ["ba3", "ba1", "ba2"])
    assert "ba2 is damaged: " in out


def test_ls_names_saves_whose_files_are_not_there_or_not_of_their_size(folder, capsys):
    saves = folder / "checkpoints"
    (saves / "ba3" / "shard-00001.safetensors").unlink()
    with (saves / "ba2" / "shard-00000.safetensors").open("r+b") as file:
        file.truncate(1000)
    manifest = (saves / "ba1" / "manifest.json").read_bytes()
    (saves / "ba1" / "manifest.json").write_bytes(manifest[: len(manifest) // 2])
    save(CheckpointStore(saves), CheckpointStore(saves).acquire(), 4)
    (saves / ".damaged-ba2-0a1b2c").mkdir()
    code, out, _ = run(capsys, "ls", folder)
    rows = [line.split()[0] for line in out.splitlines() if line.strip().startswith("ba") and " is " not in line]
    assert (code, rows) == (0, ["ba4"])
    assert f"ba3 is incomplete: {saves}/ba3/shard-00001.safetensors: missing\n" in out
    assert f"ba2 is damaged: {saves}/ba2/shard-00000.safetensors: has 1,000 bytes, expected" in out
    assert f"ba1 is damaged: {saves}/ba1/manifest.json: " in out
    assert ".damaged-ba2-0a1b2c was set aside as damaged; `checkpoint prune` removes it" in out


def test_a_checkpoint_that_was_renamed_is_named(folder, capsys):
    saves = folder / "checkpoints"
    (saves / "ba3").rename(saves / "final")
    (saves / "notes").mkdir()
    (saves / "notes.txt").write_text("lr 0.001")
    code, out, _ = run(capsys, "ls", folder)
    assert code == 0 and "ba3" not in out
    assert out.splitlines()[-1] == (
        "final is a checkpoint by another name: runs pass it over; give its own path, or rename it to ba<batch>"
    )
    for name in ("ba1", "ba2"):
        shutil.rmtree(saves / name)
    code, _, err = run(capsys, "ls", folder)
    assert code == 2 and "no checkpoints here but final, which is no batch's name; expected one" in err


def test_only_damaged_saves_are_no_empty_folder(tmp_path, capsys):
    (tmp_path / ".damaged-ba2-0a1b2c").mkdir()
    code, _, err = run(capsys, "ls", tmp_path)
    assert code == 2 and "no checkpoints here but .damaged-ba2-0a1b2c, set aside as damaged; expected" in err


def test_verify_names_every_damaged_checkpoint_of_a_folder(folder, capsys):
    saves = folder / "checkpoints"
    code, out, err = run(capsys, "verify", folder)
    assert (code, err) == (0, "")
    assert out.splitlines() == [f"{saves}/ba{batch}: intact, 1 tensors, 0.8 MB" for batch in (3, 2, 1)]
    flip(saves / "ba3" / "shard-00001.safetensors", -200)
    flip(saves / "ba1" / "shard-00000.safetensors", -200)
    code, out, err = run(capsys, "verify", folder)
    assert (code, out) == (2, f"{saves}/ba2: intact, 1 tensors, 0.8 MB\n")
    newest, oldest, last = err.splitlines()
    assert newest.startswith(f"ba3 is damaged: {saves}/ba3/shard-00001.safetensors: bytes") and "(in model/w)" in newest
    assert oldest.startswith(f"ba1 is damaged: {saves}/ba1/shard-00000.safetensors: bytes")
    assert last == f"error: {saves}: 2 of 3 checkpoints did not pass: ba3, ba1"


def test_verify_of_one_checkpoint_looks_at_no_other(folder, capsys):
    flip(folder / "checkpoints" / "ba1" / "shard-00000.safetensors", -200)
    assert run(capsys, "verify", folder / "checkpoints" / "ba3")[0] == 0
    code, out, err = run(capsys, "verify", folder / "checkpoints" / "ba1")
    assert (code, out) == (2, "") and "ba1/shard-00000.safetensors: bytes" in err


def test_a_checkpoint_that_is_removed_while_a_folder_is_verified_is_not_damaged(folder, capsys, monkeypatch):
    def remove_while_reading(found, on_read):
        if found.name == "ba3":
            prune(CheckpointStore(folder / "checkpoints"), None, keep_newest=1)
        verify_checkpoint(found, on_read)

    monkeypatch.setattr("llmfoundry_lite.checkpoint.verify.verify_checkpoint", remove_while_reading)
    code, out, err = run(capsys, "verify", folder)
    assert (code, err) == (0, "")
    assert out.endswith("ba3: intact, 1 tensors, 0.8 MB\nba2: removed meanwhile\nba1: removed meanwhile\n")


def test_verify_shows_how_far_it_is_on_a_terminal(folder, capsys, monkeypatch):
    monkeypatch.setattr("llmfoundry_lite.cli.checkpoint_output.PROGRESS_BYTES", 1)
    monkeypatch.setenv("FORCE_COLOR", "1")
    code, out, err = run(capsys, "verify", folder)
    assert code == 0 and out.count("\n") == 3
    assert "ba3" in err and "808.4/808.4 kB" in err.replace("\x1b[0m", "")


def test_a_folder_that_cannot_be_listed_while_it_is_verified_is_said_in_one_line(folder, capsys, monkeypatch):
    def refuse(self):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(LocalFolder, "sizes", refuse)
    code, out, err = run(capsys, "verify", folder)
    assert (code, out) == (2, "")
    assert err.startswith(f"ba3 is unreadable: {folder}/checkpoints/ba3: cannot be read on host ")
    assert err.count("\n") == 4 and err.endswith("3 of 3 checkpoints did not pass: ba3, ba2, ba1\n")


def test_inspect_says_what_it_passed_over(folder, capsys):
    (folder / "checkpoints" / "ba3" / "shard-00000.safetensors").unlink()
    code, out, err = run(capsys, "inspect", folder)
    assert code == 0 and "ba2" in out.splitlines()[0]
    assert err.startswith("passed over incomplete checkpoint: ") and "missing" in err


def test_checkpoints_of_a_folder_are_listed_once(folder, capsys, monkeypatch):
    """A listing of a bucket reads the beginning of each manifest."""
    listings = []
    candidates = CheckpointStore.candidates
    monkeypatch.setattr(CheckpointStore, "candidates", lambda store: (listings.append(store), candidates(store))[1])
    run(capsys, "inspect", folder)
    assert len(listings) == 1


def test_prune_keeps_what_it_has_hashed(folder, capsys):
    flip(folder / "checkpoints" / "ba3" / "shard-00000.safetensors", -1)  # sizes and header are still right
    code, out, err = run(capsys, "prune", folder, "--keep", "1", "--dry-run")
    assert (code, out) == (0, "would remove ba1; kept ba2, ba3 (damaged)\n")
    assert err.startswith("ba3 is damaged: ") and err.count("\n") == 1
    assert len(list((folder / "checkpoints").glob("ba*"))) == 3
    assert run(capsys, "prune", folder, "--keep", "1") == (0, "removed ba1; kept ba2, ba3 (damaged)\n", err)
    assert sorted(path.name for path in (folder / "checkpoints").glob("ba*")) == ["ba2", "ba3"]


def test_prune_where_nothing_is_whole_removes_nothing_and_says_so(folder, capsys):
    for batch in (1, 2, 3):
        flip(folder / "checkpoints" / f"ba{batch}" / "shard-00000.safetensors", -1)
    code, out, err = run(capsys, "prune", folder, "--keep", "1")
    assert (code, out) == (2, "")
    assert err.endswith("error: " + f"{folder}/checkpoints: none of its checkpoints is whole, so none is removed\n")
    assert len(list((folder / "checkpoints").glob("ba*"))) == 3


def test_prune_names_what_was_set_aside_and_frees_what_is_older_than_all_that_stay(folder, capsys):
    saves = folder / "checkpoints"
    for name in (".damaged-ba1-0a1b2c", ".damaged-ba5-0a1b2c", ".damaged-notes"):
        (saves / name).mkdir()
        (saves / name / "shard-00000.safetensors").write_bytes(b"half")
    code, out, _ = run(capsys, "prune", folder, "--keep", "2")
    assert (code, out) == (0, "removed ba1, .damaged-ba1-0a1b2c; kept ba2, ba3, .damaged-ba5-0a1b2c (set aside)\n")
    assert sorted(path.name for path in saves.glob(".damaged*")) == [".damaged-ba5-0a1b2c", ".damaged-notes"]


def test_diff_of_two_saves_counts_what_differs(folder, capsys):
    code, out, _ = run(capsys, "diff", folder / "checkpoints" / "ba1", folder / "checkpoints" / "ba3")
    assert code == 0 and "1 of 1 tensors and 0 numbers differ" in out
    assert "model/w" in out and "100,000" in out and "2.000e+00" in out
    assert "0 of 1 tensors and 0 numbers differ" in run(capsys, "diff", folder, folder)[1]


HOSTILE = "run\x1b]0;owned\x07\x1b[2J\u202e\rx"


@pytest.mark.fault
def test_names_from_files_cannot_steer_the_terminal(tmp_path, capsys):
    store = CheckpointStore(tmp_path / HOSTILE)
    lease = store.acquire()
    for batch in (1, 2):
        store.publish(replace(write_draft(store, lease, batch), run_name=HOSTILE, parent_save_id=HOSTILE), lease)
    (tmp_path / HOSTILE / "ba2" / "shard-00000.safetensors").unlink()
    commands = [["ls"], ["inspect", "--tensors"], ["verify"], ["diff", tmp_path / "x\x1b[2J"]]
    for command, *options in commands:
        _, out, err = run(capsys, command, tmp_path / HOSTILE, *options)
        assert not [c for c in out + err if not c.isprintable() and c != "\n"]
        assert r"run\x1b]0;owned\x07" in (out + err).replace("\n", "")


@pytest.mark.fault
def test_a_launch_reports_names_that_cannot_steer_the_terminal(capsys):
    for error in (CheckpointError(HOSTILE), Preempted(HOSTILE), RuntimeError(HOSTILE)):
        report_error(error)
        shown = capsys.readouterr().err
        assert r"run\x1b]0;owned\x07\x1b[2J\u202e\rx" in shown
        assert not [c for c in shown if not c.isprintable() and c != "\n"]
