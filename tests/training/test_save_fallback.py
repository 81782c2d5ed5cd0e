"""Runs whose save_folder is away for a while, so that saves go to save_fallback: no batch is lost."""

import errno
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from composer.core import Callback

from llmfoundry_lite.checkpoint import fallback, local_folder
from llmfoundry_lite.checkpoint.store import CheckpointStore, open_checkpoint
from llmfoundry_lite.checkpoint.verify import verify_checkpoint
from tests.checkpoint.s3_server import RefusingProxy, s3_server
from tests.checkpoint.saves import names
from tests.helpers.launch import ROOT, Launch, train
from tests.helpers.tiny import read_metrics, tiny_config, values, write_config

pytestmark = [pytest.mark.multiprocess, pytest.mark.fault]

AWAY = OSError(errno.EIO, "away")
CALLBACK = "python:tests.training.test_save_fallback:Away"


class Away(Callback):
    """The disk below `place` fails until batch `end` begins, for files and folders whose path has the pattern `name`.

    kind: "all", or the method of `LocalFolder` that fails. rank: the only rank that it fails on. period: instead, it
    comes and goes, so many batches at a time. pause: seconds added to each batch.
    """

    def __init__(self, place, name="", end=0, kind="all", rank=None, period=0, pause=0.0):
        self.place, self.name, self.end, self.period, self.pause = place, re.compile(name), end, period, pause
        self.is_away = end > 0
        if rank not in (None, int(os.environ["RANK"])):
            return
        methods = ("names", "read", "put", "rename", "sink", "source", "sizes") if kind == "all" else (kind,)
        for method in methods:
            setattr(local_folder.LocalFolder, method, self.failing(getattr(local_folder.LocalFolder, method)))

    def failing(self, method):
        def call(folder, *arguments, **options):
            path = "/".join([str(folder.path), *(text for text in arguments if isinstance(text, str))])
            if self.is_away and str(folder.path).startswith(self.place) and self.name.search(path):
                raise AWAY
            return method(folder, *arguments, **options)

        return call

    def batch_start(self, state, logger):
        batch = int(state.timestamp.batch) + 1
        self.is_away = batch < self.end
        if self.period:
            self.is_away = batch // self.period % 2 == 1
        time.sleep(self.pause)


def places(tmp_path: Path, name: str = "run") -> tuple[Path, Path]:
    return tmp_path / f"{name}-first", tmp_path / f"{name}-second"


def run(tmp_path, data, num_ranks=1, *, name="run", away=None, **changes) -> Launch:
    first, second = places(tmp_path, name)
    settings = {"run_name": name, "save_folder": str(first), "save_fallback": str(second), "autoresume": True}
    settings |= {"save_interval": "2ba", "retry_for": "1s", **changes}
    if away is not None:
        settings["callbacks"] = {CALLBACK: {"place": str(first), **away}}
    return train([write_config(tmp_path / f"{name}.yaml", tiny_config(data, **settings))], tmp_path, num_ranks)


def saved_in(place: Path) -> list[str]:
    return names(CheckpointStore(place)) if place.exists() else []


def status(tmp_path, name="run"):
    return json.loads((tmp_path / f"runs/{name}/status.json").read_text())


def losses(tmp_path, name="run"):
    return values(read_metrics(tmp_path / "runs" / name), "loss/train/total")


@pytest.fixture(scope="module")
def good(tmp_path_factory, data):
    """The losses of ten batches that nothing disturbs."""
    folder = tmp_path_factory.mktemp("good")
    run(folder, data, name="good", save_fallback=None).check()
    return losses(folder, "good")


def test_saves_go_to_the_second_place_and_are_copied_when_the_first_is_back(tmp_path, data, good):
    result = run(tmp_path, data, away={"name": "-ba[3-7]-", "end": 8}).check()
    first, second = places(tmp_path)
    words = rf"warning: {first}/\.tmp-e1-ba4-.*: away; ba2 stands, and the next save goes to {second}\n"
    assert re.search(words, result.output), result.output
    assert re.search(r"saved ba\d in .*run-second, because saves to .*run-first fail: ", result.output)
    assert "copied ba" in result.output and "saved ba10\n" in result.output
    assert saved_in(second) == [] and {"ba2", "ba10"} < set(saved_in(first))
    for candidate in CheckpointStore(first).candidates():
        verify_checkpoint(candidate.open())
    assert losses(tmp_path) == good
    told = status(tmp_path)
    assert (told["status"], told["last_saved"], told["save_error"]) == ("done", "ba10", None)


def test_a_launch_that_ends_while_the_first_is_away_leaves_saves_that_the_next_copies(tmp_path, data, good):
    first, second = places(tmp_path)
    ended = run(tmp_path, data, away={"name": "-ba[3-9]-", "end": 99}, stop_at="7ba").check()
    told = status(tmp_path)
    assert (told["last_saved"], told["last_saved_in"]) == ("ba7", str(second))
    assert f"or: llmfoundry-lite checkpoint copy {second} {first}\n" in ended.output

    again = run(tmp_path, data).check()
    assert f"carrying on from {second}/ba7" in again.output
    assert f"copied ba7 to {first}" in again.output
    assert saved_in(second) == [] and losses(tmp_path) == good


class SlowCopies(Callback):
    """Each file is copied after `pause` seconds."""

    def __init__(self, pause):
        copy_file = fallback._copy_file

        def copy_later(*arguments):
            time.sleep(pause)
            copy_file(*arguments)

        fallback._copy_file = copy_later


@pytest.mark.slow
def test_a_finished_run_is_launched_again_to_copy_its_last_save(tmp_path, data):
    """Nothing is trained, and the launch waits for the copy all the same."""
    first, second = places(tmp_path)
    run(tmp_path, data, away={"name": "-ba([3-9]|10)-", "end": 99}).check()
    assert saved_in(second)[0] == "ba10"
    slow = {"python:tests.training.test_save_fallback:SlowCopies": {"pause": 1.0}}
    again = run(tmp_path, data, callbacks=slow).check()
    assert "nothing is trained: the run is done" in again.output and f"copied ba10 to {first}" in again.output
    assert saved_in(first)[0] == "ba10" and saved_in(second) == []


@pytest.mark.slow
def test_a_second_place_that_takes_no_claim_does_not_end_the_launch(tmp_path, data):
    first, second = places(tmp_path)
    second.mkdir()
    (second / ".leases").write_text("no folder")
    result = run(tmp_path, data, save_num_checkpoints_to_keep=1).check()
    assert "warning: save_fallback is not used by this launch: " in result.output
    assert "were not removed" not in result.output
    assert saved_in(first) == ["ba10"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "away",
    [
        {"name": "-ba[1-4]-", "end": 5},
        {"name": "-ba[3-5]-", "end": 6, "kind": "sink"},
        {"name": "-ba[3-5]-.*/manifest.json", "end": 6, "kind": "put"},
        {"name": "/.tmp-e1-ba[3-5]-", "end": 6, "kind": "rename"},
        {"name": "/.deleting-", "end": 9, "kind": "names"},
        {"name": "/.leases/.*renewed", "end": 9, "kind": "put"},
        {"name": "/.leases/", "end": 9, "kind": "read"},
    ],
    ids=["before the first save", "shard", "manifest", "commit", "retention", "renewals", "reads"],
)
def test_a_fault_at_any_phase_costs_no_batch_and_no_save(tmp_path, data, good, away):
    result = run(tmp_path, data, away=away, save_num_checkpoints_to_keep=2).check()
    assert "Traceback" not in result.output
    first, second = places(tmp_path)
    assert saved_in(first)[0] == "ba10" and len({*saved_in(first), *saved_in(second)}) <= 3
    assert losses(tmp_path) == good


@pytest.mark.slow
def test_two_ranks_save_into_one_place_though_the_first_fails_on_one(tmp_path, data):
    run(tmp_path, data, 2, name="good", save_fallback=None).check()
    away = {"name": "-ba[3-9]-", "end": 99, "kind": "sink", "rank": 1}
    ended = run(tmp_path, data, 2, away=away, stop_at="7ba").check()
    assert re.search(r"saved ba7 in .*run-second, because", ended.output)
    first, second = places(tmp_path)
    assert saved_in(second) == [] and saved_in(first)[0] == "ba7", "rank 0 can write there, and has copied"
    for candidate in CheckpointStore(first).candidates():
        assert len(candidate.open().manifest.files) == 2
    run(tmp_path, data, 2).check()
    assert losses(tmp_path) == losses(tmp_path, "good")


@pytest.mark.slow
def test_a_launch_that_begins_while_the_first_is_away_does_not_begin(tmp_path, data):
    """It cannot know whether another launch trains the run, whatever is in the second place."""
    first, second = places(tmp_path)
    run(tmp_path, data, away={"name": "-ba[3-9]-", "end": 99}, stop_at="5ba").check()
    first.rename(tmp_path / "elsewhere")
    first.write_text("no folder")
    result = run(tmp_path, data)
    assert result.exit_codes == [2] and saved_in(second)[0] == "ba5"
    assert "run-first" in result.output.splitlines()[-1]


@pytest.mark.long
def test_a_run_that_is_killed_at_random_moments_while_the_first_comes_and_goes(tmp_path, data):
    """Each launch resumes from the newest of both places, and the losses are those of a run that nothing disturbs."""
    settings = {"max_duration": "60ba", "save_interval": "1ba", "save_num_checkpoints_to_keep": 2}
    run(tmp_path, data, name="good", save_fallback=None, **settings).check()
    first, second = places(tmp_path)
    callbacks = {CALLBACK: {"place": str(first), "period": 3, "pause": 0.1}}
    config = tiny_config(data, run_name="run", save_folder=str(first), save_fallback=str(second), autoresume=True)
    write_config(tmp_path / "run.yaml", {**config, **settings, "callbacks": callbacks, "retry_for": "1s"})

    generator = random.Random(0)
    command = [sys.executable, str(ROOT / "scripts/train.py"), "run.yaml"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    newest, num_killed = 0, 0
    for _ in range(30):
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "start_new_session": True}
        process = subprocess.Popen(command, cwd=tmp_path, env=environment, **options)
        assert process.stdout is not None
        lines, num_saved, kill_after = [], 0, generator.randint(2, 6)
        for line in process.stdout:
            lines.append(line)
            num_saved += line.startswith(("saved ba", "copied ba"))
            if num_saved == kill_after and num_killed < 12:
                time.sleep(generator.random() * 0.3)  # any moment of what follows
                os.killpg(process.pid, signal.SIGKILL)
                num_killed += 1
                break
        code = process.wait()
        assert "Traceback" not in "".join(lines), "".join(lines)
        found = CheckpointStore(first, second=CheckpointStore(second)).newest_intact(verify_checkpoint).checkpoint
        assert found is not None and found.manifest.timestamp.batch >= newest
        newest = found.manifest.timestamp.batch
        if code == 0:
            break
    assert newest == 60 and code == 0 and num_killed >= 5
    assert losses(tmp_path) == losses(tmp_path, "good")


@pytest.mark.slow
def test_a_bucket_that_refuses_for_a_while_gets_copies_of_what_a_disk_has_taken(tmp_path, data, good):
    pytest.importorskip("moto")
    s3fs = pytest.importorskip("s3fs")
    refused = re.compile(r"e1-ba[345]-")
    with s3_server() as port:
        client = {"endpoint_url": f"http://127.0.0.1:{port}"}
        bucket = s3fs.S3FileSystem(key="test", secret="test", client_kwargs=client)
        bucket.mkdir("runs")
        proxy = RefusingProxy(port)
        proxy.refuses = lambda method, path, headers: "ExpiredToken" if refused.search(path) else None
        second = tmp_path / "second"
        settings = {"save_folder": "s3://runs/{run_name}", "save_fallback": str(second), "save_interval": "2ba"}
        config = tiny_config(data, run_name="run", retry_for="1s", autoresume=True, **settings)
        keys = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}
        environment = {**keys, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{proxy.port}", "AWS_MAX_ATTEMPTS": "1"}
        try:
            result = train([write_config(tmp_path / "run.yaml", config)], tmp_path, env=environment).check()
        finally:
            proxy.close()
        assert "renew the credentials; ba2 stands, and the next save goes to" in result.output
        assert bucket.exists("runs/run/ba10/manifest.json")
        kept_here = {name: open_checkpoint(second / name).manifest.save_id for name in saved_in(second)}
        assert all(refused.match(save_id) for save_id in kept_here.values()), "the bucket refuses these still"
    assert losses(tmp_path) == good
