"""`eval follow=true`: a run's checkpoints are evaluated as they appear, until its training ends."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

import llmfoundry_lite.launch_eval
from llmfoundry_lite.checkpoint.store import CheckpointStore, open_checkpoint
from llmfoundry_lite.config.load_eval import load_eval_config
from llmfoundry_lite.errors import ConfigError, DataError
from llmfoundry_lite.evaluation import suite
from llmfoundry_studies.curves import gather_curves, read_folder
from llmfoundry_studies.followed_run import FollowedRun
from tests.checkpoint.s3_server import RefusingProxy, s3_server
from tests.helpers.launch import PATHS, launch, train
from tests.helpers.tiny import reading_texts, tiny_config, write_config, write_texts

QUICKLY = ["follow_interval=0.1s", "follow_patience=2s"]
BATCHES = (2, 4, 6, 8)


def write_tasks(folder: Path) -> None:
    """Write a task of questions and a text into the folder `evals`."""
    words = ["abc", "cde", "fgh", "bad"]
    rows = [{"query": words[i % 4], "choices": [words[(i + 1) % 4], words[(i // 4) % 4]], "gold": 0} for i in range(16)]
    texts = [{"text": " ".join(words[(i * j) % 4] for j in range(6))} for i in range(8)]
    (folder / "evals").mkdir()
    for label, kind, lines in (("choice", "multiple_choice", rows), ("words", "perplexity", texts)):
        (folder / f"{label}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        task = {"label": label, "icl_task_type": kind, "dataset_uri": f"{label}.jsonl"}
        (folder / f"evals/{label}.yaml").write_text(json.dumps(task))


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """The folder of a run of eight batches that saved every second one."""
    folder = tmp_path_factory.mktemp("trained")
    data = write_texts(folder / "data")
    config = tiny_config(data, **reading_texts(data), max_duration="8ba", save_interval="2ba")
    train([write_config(folder / "tiny.yaml", config)], folder).check()
    return folder / "runs/tiny"


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """A working directory with tasks, and an empty folder for a run that is published bit by bit."""
    monkeypatch.chdir(tmp_path)
    write_tasks(tmp_path)
    (tmp_path / "run").mkdir()
    return tmp_path


def publish(trained: Path, run: Path, *batches: int) -> None:
    """Let checkpoints of the trained run appear in another folder, each at once."""
    tokenizer = trained / "checkpoints/tokenizer"
    if tokenizer.exists():
        shutil.copytree(tokenizer, run / "tokenizer", dirs_exist_ok=True)
    for batch in batches:
        shutil.copytree(trained / f"checkpoints/ba{batch}", run / f".tmp-{batch}")
        (run / f".tmp-{batch}").rename(run / f"ba{batch}")


def follow(*arguments: str) -> None:
    """Follow the folder `run`, with short waits."""
    llmfoundry_lite.launch_eval.main(["follow=true", "models.m=run", "suite=s", *QUICKLY, *arguments])


def evaluated(folder: Path) -> list[str]:
    """Return the names of the results in a suite's folder."""
    return sorted(path.name.removesuffix(".items.jsonl") for path in (folder / "results/s").glob("*.items.jsonl"))


def start_following(folder: Path) -> subprocess.Popen:
    """Start a process that follows the folder `run`, with a long patience."""
    command = [sys.executable, "-m", "llmfoundry_lite", "eval", "follow=true", "models.m=run", "suite=s"]
    environment = {**os.environ, "PYTHONPATH": PATHS, "OMP_NUM_THREADS": "1"}
    options = {"stderr": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return subprocess.Popen([*command, "follow_interval=0.1s"], cwd=folder, env=environment, **options)


def wait_for_row(folder: Path, model: str) -> None:
    """Wait until the table of results has a row of a model."""
    table = folder / "results/s/table.csv"
    deadline = time.monotonic() + 60
    while not (table.exists() and model in table.read_text()):
        assert time.monotonic() < deadline, f"{model} was not evaluated"
        time.sleep(0.02)


# -------------------------------------------------------------------------------------------- configuration


def test_keys_of_following_have_no_effect_without_it(here):
    notes = load_eval_config(["models.m=run", "follow_interval=5s"]).notes
    assert "follow_interval has no effect: follow is false" in notes
    notes = load_eval_config(["models.m=run", "follow_interval=5s", "follow=true"]).notes
    assert notes == []


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("follow_interval=10m", "follow_interval: 10m given, expected less than dist_timeout, 600 s"),
        ("follow_interval=0s", "follow_interval: 0s given, expected more than 0"),
        ("follow_patience=30s", "follow_patience: 30s given, expected at least follow_interval, 60s"),
        ("models.base=hf:gpt2", "models.base: hf:gpt2 is not a run, and follow=true evaluates the checkpoints of runs"),
    ],
)
def test_what_cannot_be_followed_is_refused_at_once(here, argument, message):
    with pytest.raises(ConfigError) as error:
        load_eval_config(["models.m=run", "follow=true", argument])
    assert str(error.value).startswith(f"command line: {message}")


# ------------------------------------------------------------------------------------------------ following


@pytest.mark.slow
def test_a_run_is_followed_while_it_trains(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_tasks(tmp_path)
    data = write_texts(tmp_path / "data")
    config = tiny_config(data, **reading_texts(data), max_duration="60ba", save_interval="20ba")
    path = write_config(tmp_path / "tiny.yaml", config)
    launches = []
    training = threading.Thread(target=lambda: launches.append(train([path], tmp_path)))
    training.start()
    llmfoundry_lite.launch_eval.main(
        ["follow=true", "models.m=runs/tiny", "suite=s", "follow_interval=0.1s", "follow_patience=60s"]
    )
    training.join()
    launches[0].check()
    captured = capsys.readouterr()
    assert captured.err.startswith("m: waiting for its first checkpoint: runs/tiny does not exist")
    assert captured.err.endswith("m: the last checkpoint is ba60: its training is done\n")
    rows = [line.split()[0] for line in captured.out.splitlines() if line.startswith("m-ba")]
    assert rows == ["m-ba20", "m-ba40", "m-ba60"]
    all_results, _ = read_folder(tmp_path / "results/s")
    curves = gather_curves(all_results).curves
    assert {curve.task for curve in curves} == {"choice/0-shot", "words/0-shot"}
    assert all([point.model for point in curve.points] == rows for curve in curves)


@pytest.mark.slow
def test_a_launch_that_was_killed_is_carried_on_without_repeating_anything(here, trained, capsys):
    publish(trained, here / "run", 2)
    killed = start_following(here)
    wait_for_row(here, "m-ba2")
    killed.kill()
    killed.communicate()

    # A second one is told to leave while it waits.
    publish(trained, here / "run", 4)
    before = (here / "results/s/m-ba2.json").stat().st_mtime_ns
    asked = start_following(here)
    wait_for_row(here, "m-ba4")
    asked.send_signal(signal.SIGTERM)
    _, errors = asked.communicate(timeout=60)
    assert asked.returncode == 75
    assert errors.splitlines()[-1] == "preempted by SIGTERM; run the same command again"

    publish(trained, here / "run", 6, 8)
    follow()
    output, errors = capsys.readouterr()
    assert (here / "results/s/m-ba2.json").stat().st_mtime_ns == before
    assert [line.split(":")[0] for line in errors.splitlines() if "acc_per_token" in line] == ["m-ba6", "m-ba8"]
    rows = [line.split()[0] for line in output.splitlines() if line.startswith("m-ba")]
    assert rows == ["m-ba2", "m-ba4", "m-ba6", "m-ba8"]


@pytest.mark.slow
def test_removed_and_damaged_checkpoints_are_named_and_not_fatal(here, trained, capsys, monkeypatch):
    publish(trained, here / "run", *BATCHES)
    shard = here / "run/ba4/shard-00000.safetensors"
    content = bytearray(shard.read_bytes())
    content[-17] ^= 1  # of a tensor; the last bytes are hashes
    shard.write_bytes(content)
    evaluate_one = suite.evaluate_one

    def remove_sixth(config, tasks, model):
        """Remove a checkpoint just before its weights are read."""
        if model.results.model == "m-ba6":
            shutil.rmtree(here / "run/ba6")
        return evaluate_one(config, tasks, model)

    monkeypatch.setattr(suite, "evaluate_one", remove_sixth)
    follow()
    errors = capsys.readouterr().err
    assert "models.m-ba4: passed over damaged checkpoint: run/ba4/shard-00000.safetensors" in errors
    assert "models.m-ba6: passed over run/ba6, which was removed meanwhile" in errors
    assert evaluated(here) == ["m-ba2", "m-ba8"]


@pytest.mark.slow
def test_a_run_that_dies_is_said_after_the_patience(here, trained, capsys):
    publish(trained, here / "run", 2)
    with pytest.raises(DataError, match="run is at ba2, which is not the end of its training, 8ba") as error:
        follow()
    assert error.value.exit_code == 1
    assert "m-ba2" in capsys.readouterr().out  # the table comes before the error

    with pytest.raises(
        DataError, match=r"models.gone: runs/gone does not exist; waited 1 s \(follow_patience\)"
    ) as error:
        llmfoundry_lite.launch_eval.main(
            ["follow=true", "models.gone=runs/gone", "icl_tasks=[choice]", *QUICKLY, "follow_patience=1s"]
        )
    assert error.value.exit_code == 2


@pytest.mark.slow
def test_a_batch_that_was_saved_again_replaces_its_results(here, trained, capsys):
    publish(trained, here / "run", 8)
    follow()
    first = json.loads((here / "results/s/m-ba8.json").read_text())

    # The run has gone back to an earlier checkpoint, and another save is in this place now.
    shutil.rmtree(here / "run/ba8")
    save_again(trained / "checkpoints/ba8", CheckpointStore("run"))
    capsys.readouterr()
    follow()
    assert "models.m-ba8: a later launch has saved it again; its results are replaced" in capsys.readouterr().err
    again = json.loads((here / "results/s/m-ba8.json").read_text())
    assert again["save_id"] != first["save_id"]
    assert again["tasks"]["words/0-shot"]["bits_per_byte"] == first["tasks"]["words/0-shot"]["bits_per_byte"]


def save_again(checkpoint: Path, store: CheckpointStore) -> None:
    """Publish the files of a checkpoint once more, as the save of another launch."""
    manifest = open_checkpoint(checkpoint).manifest
    lease = store.acquire()
    save_id = store.new_save_id(lease, manifest.timestamp.batch)
    folder, _ = store.open_draft(save_id)
    for path in checkpoint.iterdir():
        if path.name != "manifest.json":
            folder.put(path.name, path.read_bytes())
    store.publish(replace(manifest, save_id=save_id, lease_epoch=lease.epoch, log=()), lease)
    store.release(lease)


def follow_on_a_rank() -> None:
    """Follow a run as one of several ranks."""
    follow("fsdp=true", "follow_patience=60s")


@pytest.mark.slow
@pytest.mark.multiprocess
def test_several_ranks_follow_as_one(here, trained):
    publish(trained, here / "run", 2, 4)

    def publish_last() -> None:
        """Publish the last checkpoint once the others are evaluated."""
        wait_for_row(here, "m-ba4")
        publish(trained, here / "run", 8)

    publisher = threading.Thread(target=publish_last)
    publisher.start()
    launch(follow_on_a_rank, (), here, 2).check()
    publisher.join()
    assert evaluated(here) == ["m-ba2", "m-ba4", "m-ba8"]


# ------------------------------------------------------------------------------------------------- a bucket


@pytest.fixture
def bucket(monkeypatch):
    """A bucket on a local server, behind a proxy that counts requests: (file system, proxy)."""
    s3fs = pytest.importorskip("s3fs")
    pytest.importorskip("moto")
    with s3_server() as port:
        proxy = RefusingProxy(port)
        endpoint = f"http://127.0.0.1:{port}"
        fs = s3fs.S3FileSystem(key="test", secret="test", client_kwargs={"endpoint_url": endpoint})
        fs.mkdir("runs")
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.port}")
        for name, value in (("ACCESS_KEY_ID", "test"), ("SECRET_ACCESS_KEY", "test"), ("DEFAULT_REGION", "us-east-1")):
            monkeypatch.setenv(f"AWS_{name}", value)
        yield fs, proxy
        proxy.close()


def upload(fs, trained: Path, batch: int) -> None:
    """Let a checkpoint of the trained run appear in the bucket, its manifest last, as a save does."""
    checkpoint = trained / f"checkpoints/ba{batch}"
    for path in sorted(checkpoint.iterdir(), key=lambda path: path.name == "manifest.json"):
        fs.put_file(str(path), f"runs/tiny/ba{batch}/{path.name}")


@pytest.mark.slow
def test_a_run_in_a_bucket_is_followed_with_few_requests(here, trained, bucket, capsys):
    fs, proxy = bucket
    requests: list[str] = []
    proxy.refuses = lambda method, path, headers: requests.append(f"{method} {path}")
    for path in (trained / "checkpoints/tokenizer").iterdir():
        fs.put_file(str(path), f"runs/tiny/tokenizer/{path.name}")
    upload(fs, trained, 2)

    # A look at an unchanged bucket lists the checkpoints and the leases, and reads no manifest.
    run = FollowedRun("m", "s3://runs/tiny", 60)
    run.look()
    requests.clear()
    run.look()
    assert len(requests) <= 3
    assert all(request.startswith("GET /runs?list-type=2") for request in requests)

    def upload_others() -> None:
        """Upload the other checkpoints once the first is evaluated."""
        wait_for_row(here, "m-ba2")
        for batch in BATCHES[1:]:
            upload(fs, trained, batch)

    uploader = threading.Thread(target=upload_others)
    uploader.start()
    llmfoundry_lite.launch_eval.main(
        ["follow=true", "models.m=s3://runs/tiny", "suite=s", "follow_interval=0.2s", "follow_patience=60s"]
    )
    uploader.join()
    assert evaluated(here) == ["m-ba2", "m-ba4", "m-ba6", "m-ba8"]
    assert "m: the last checkpoint is ba8: its training is done" in capsys.readouterr().err
