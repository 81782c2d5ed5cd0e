"""`eval -n` and `replay -n` start their ranks by composer, and end as these do."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from llmfoundry_lite.cli.main import run
from llmfoundry_lite.errors import ConfigError
from llmfoundry_lite.launch import ranks
from llmfoundry_lite.launch.ranks import refuse_other_launchers, run_ranks
from tests.helpers.launch import ROOT
from tests.helpers.present import leave_out_companions


@pytest.mark.parametrize(
    ("environment", "name"),
    [
        ({"RANK": "0"}, "composer"),
        ({"RANK": "3", "TORCHELASTIC_RUN_ID": "x"}, "torchrun"),
        ({"SLURM_STEP_NUM_TASKS": "8", "RANK": "1"}, "srun"),
    ],
    ids=["composer", "torchrun", "srun"],
)
def test_ranks_of_ranks_are_refused(environment, name):
    refuse_other_launchers({"SLURM_STEP_NUM_TASKS": "1"})
    with pytest.raises(ConfigError) as caught:
        refuse_other_launchers(environment)
    assert str(caught.value) == (f"-n: {name} has started this process as one of its ranks; leave out -n, or {name}")


@pytest.mark.multiprocess
def test_one_rank_is_a_process_whose_code_is_passed_on(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(ROOT)
    assert run_ranks("tests.launch.leaver", ["0=75"], 1, tmp_path) == 75
    assert capfd.readouterr().out == "rank 0 of 1 speaks\n" and not list(tmp_path.iterdir())


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", [pytest.param("composer", marks=pytest.mark.slow), "tests"])
def test_ranks_import_nothing_from_the_working_directory(tmp_path, monkeypatch, name):
    (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'marker')!r}, 'w')")
    monkeypatch.chdir(tmp_path)
    assert run_ranks("tests.launch.leaver", ["0=75"], 2 if name == "composer" else 1, tmp_path) == 75
    assert not (tmp_path / "marker").exists()


@pytest.mark.slow
@pytest.mark.multiprocess
def test_several_ranks_are_composer_s_and_have_their_logs(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(ROOT)
    logs = tmp_path / "of {ranks}"
    assert run_ranks("tests.launch.leaver", ["1=3"], 2, logs) == 3
    said = capfd.readouterr().out
    assert said.startswith("rank 0 of 2 speaks\n") and "global rank 1 STDOUT" in said
    assert "Waiting" not in said and "STDERR" not in said, "only what says something"
    assert (logs / "rank1.txt").read_text() == "rank 1 of 2 speaks\n"
    (tmp_path / "file").touch()
    with pytest.raises(
        ConfigError,
        match="file/logs: ranks cannot write their logs there: Not a directory; name another folder with --log-dir",
    ):
        run_ranks("tests.launch.leaver", [], 2, tmp_path / "file/logs")


@pytest.mark.slow
@pytest.mark.multiprocess
def test_where_composer_is_not_installed_torchrun_starts_them(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(ranks, "find_spec", lambda name: None)
    assert run_ranks("tests.launch.leaver", [], 2, tmp_path) == 0
    assert sorted(capfd.readouterr().out.splitlines()) == ["rank 0 of 2 speaks", "rank 1 of 2 speaks"]
    assert run_ranks("tests.launch.leaver", ["1=75"], 2, tmp_path) == 1


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_signal_goes_to_the_ranks(tmp_path, num_ranks):
    there = [tmp_path / str(rank) for rank in range(num_ranks)]
    words = [f"{rank}=wait:{path}" for rank, path in enumerate(there)]
    code = "from llmfoundry_lite.launch.ranks import run_ranks; from pathlib import Path; import sys\nsys.exit("
    code += f"run_ranks('tests.launch.leaver', {words}, {num_ranks}, Path({str(tmp_path)!r})))"
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)})
    while not all(path.exists() for path in there):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 75


def test_logs_of_ranks_are_not_written_through_links(tmp_path):
    kept = tmp_path / "kept.txt"
    kept.write_text("mine")
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "rank1.txt").symlink_to(kept)
    ranks._build_launcher(2, logs)
    assert not (logs / "rank1.txt").exists() and kept.read_text() == "mine"


def test_a_rank_that_has_ended_keeps_no_signal_from_the_others():
    ended, alive = (subprocess.Popen(["sleep", "60"]) for _ in range(2))
    processes = [psutil.Process(one.pid) for one in (ended, alive)]
    ended.kill()
    ended.wait()
    ranks._send(signal.SIGTERM, processes)
    assert alive.wait(10) == -signal.SIGTERM
    assert ranks._find_ranks(ended.pid, 2) == [], "no error where the launcher has ended"


def test_ranks_that_start_again_need_a_companion(monkeypatch, capsys, data, tmp_path):
    leave_out_companions(monkeypatch)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert run(["train", "-n", "2", "mpt-125m"]) == 2
    words = "error: train -n: needs the companion llmfoundry_ops; or composer -n 2 -m llmfoundry_lite.launch_train …\n"
    assert capsys.readouterr().err == words
