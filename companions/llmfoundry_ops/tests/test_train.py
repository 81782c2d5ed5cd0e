"""`llmfoundry-lite train -n 2` as users run it."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from llmfoundry_lite.ranks.status import read_status
from llmfoundry_ops.processes import is_running
from tests.helpers.launch import ROOT
from tests.helpers.tiny import build_tokenizer, read_metrics, tiny_config, values, write_config, write_data

DEADLINE_SECONDS = 240
NUM_BATCHES = 150
"""So many that no run ends before a busy machine kills it."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("launcher")
    data = write_data(folder / "data")
    changes = {"max_duration": f"{NUM_BATCHES}ba", "save_interval": "3ba", "save_num_checkpoints_to_keep": 3}
    write_config(folder / "run.yaml", tiny_config(data, **changes))
    return folder


def begin(
    folder: Path, *arguments: str, num_ranks: int = 2, command: str = "train", file: str = "run.yaml"
) -> subprocess.Popen[str]:
    line = (sys.executable, "-m", "llmfoundry_lite", command, "-n", str(num_ranks), file, *arguments)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(line, cwd=folder, env=environment, **pipes)


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def wait_for_batch(run: Path, number: int) -> None:
    """Wait until this many batches have been logged, counting those trained twice."""
    log = run / "metrics.jsonl"
    wait_until(lambda: log.exists() and len(log.read_text().splitlines()) >= number)


def ranks_of(launcher: subprocess.Popen[str]) -> list[psutil.Process]:
    """Return the ranks in order: the server forks rank 0 first."""
    (server,) = psutil.Process(launcher.pid).children()
    return sorted(server.children(), key=lambda process: process.create_time())


def test_a_mistake_is_answered_before_anything_starts(folder):
    launcher = begin(folder, "model.d_modle=64")
    output, _ = launcher.communicate(timeout=DEADLINE_SECONDS)
    assert launcher.returncode == 2
    assert output.startswith("error: ") and len(output.splitlines()) == 1 and "d_model" in output


def test_a_dry_run_is_one_of_all_ranks(folder):
    launcher = begin(folder, "--dry-run", num_ranks=4)
    output, _ = launcher.communicate(timeout=DEADLINE_SECONDS)
    assert launcher.returncode == 0
    assert "devices        4 = 4 shares of a copy (shard)" in output


@pytest.mark.slow
def test_ranks_that_are_killed_and_frozen_cost_seconds_and_no_digit(folder):
    whole = begin(folder, "run_name=whole", "save_interval=20ba")
    output, _ = whole.communicate(timeout=DEADLINE_SECONDS)
    assert whole.returncode == 0, output

    launcher, run = begin(folder, "run_name=cut"), folder / "runs/cut"
    wait_for_batch(run, 8)
    ranks_of(launcher)[1].kill()
    wait_for_batch(run, 22)
    ranks_of(launcher)[0].send_signal(signal.SIGSTOP)
    output, _ = launcher.communicate(timeout=DEADLINE_SECONDS)
    assert launcher.returncode == 0, output
    assert "launcher: rank 1 was killed by SIGKILL; restart 1 of 3, from the newest save" in output
    assert "launcher: rank 0 is frozen: it has done nothing for 10 s; restart 2 of 3, from the newest save" in output
    for key in ("loss/train/total", "data/digest", "grad_norm"):
        assert values(read_metrics(run), key) == values(read_metrics(folder / "runs/whole"), key)
    assert len(values(read_metrics(run), "loss/train/total")) == NUM_BATCHES


@pytest.mark.long
def test_after_a_killed_launcher_the_next_launch_carries_on_and_leaves_when_asked(folder):
    launcher, run = begin(folder, "run_name=left"), folder / "runs/left"
    wait_for_batch(run, 8)
    ranks = ranks_of(launcher)
    launcher.kill()
    launcher.communicate(timeout=DEADLINE_SECONDS)  # rank 0 has the other end, too
    wait_until(lambda: not any(is_running(rank.pid) for rank in ranks))

    launcher = begin(folder, "run_name=left", "autoresume=true")
    wait_for_batch(run, 16)
    launcher.send_signal(signal.SIGTERM)
    output, _ = launcher.communicate(timeout=DEADLINE_SECONDS)
    assert launcher.returncode == 75, output
    assert "carrying on from" in output and "preempted by SIGTERM at batch" in output
    assert read_status(run)["status"] == "preempted"


@pytest.mark.slow
def test_ranks_that_evaluate_find_what_one_finds(folder):
    """Logs and restarts are where the command says."""
    train = begin(folder, "run_name=asked", "max_duration=2ba", "--log-dir", "said", "--max-restarts", "0")
    output, _ = train.communicate(timeout=DEADLINE_SECONDS)
    assert train.returncode == 0, output
    assert (folder / "said/rank1.txt").exists() and not (folder / "runs/asked/logs").exists()

    task = {"label": "choice", "icl_task_type": "multiple_choice", "dataset_uri": "choice.jsonl", "num_fewshot": [0]}
    items = [
        {"query": "a b a"[: 1 + 2 * (number % 3)], "choices": ["a", "b"], "gold": number % 2} for number in range(9)
    ]
    (folder / "choice.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    build_tokenizer(folder / "tokenizer")
    suite = {"models": {"ours": "runs/asked"}, "icl_tasks": [task], "tokenizer": "tokenizer"}
    (folder / "eval.yaml").write_text(json.dumps(suite))
    found = []
    for num_ranks in (1, 2):
        again = (f"suite=of{num_ranks}", "--log-dir", f"logs{num_ranks}")
        evaluation = begin(folder, *again, command="eval", file="eval.yaml", num_ranks=num_ranks)
        output, _ = evaluation.communicate(timeout=DEADLINE_SECONDS)
        assert evaluation.returncode == 0, output
        found.append(json.loads((folder / f"results/of{num_ranks}/ours.json").read_text())["tasks"]["choice/0-shot"])
    assert found[0]["n"] == 9
    assert all(found[0][key] == found[1][key] for key in ("fingerprint", "acc", "acc_norm", "acc_per_token"))
    assert (folder / "logs2/rank1.txt").exists()


CRASHES = """
import os
from composer import Callback

class Crash(Callback):
    def __init__(self, how):
        self.how = how

    def batch_end(self, state, logger):
        is_rank_1 = os.environ["RANK"] == "1"
        if int(state.timestamp.batch) == 2 and (is_rank_1 or self.how == "abort"):
            os.write(2, b"[W1130 a library speaks")
            if self.how == "abort":
                os.abort()
            raise RuntimeError("two\\nlines")
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["abort", "raise"])
def test_every_line_of_a_launch_is_one_json_object(folder, how):
    (folder / "crashes.py").write_text(CRASHES)
    name = f"json-{how}"
    callback = f"callbacks={{python:crashes:Crash: {{how: {how}}}}}"
    launcher = begin(
        folder, f"run_name={name}", "console_format=json", "max_duration=4ba", "--max-restarts", "1", callback
    )
    output, _ = launcher.communicate(timeout=DEADLINE_SECONDS)
    output += (folder / "runs" / name / "logs/rank1.txt").read_text()
    lines = [json.loads(line) for line in output.splitlines()]
    assert launcher.returncode == 1
    assert {line["run"] for line in lines} == {name} and all(line["time"].endswith("Z") for line in lines)

    batches = [line for line in lines if line.get("event") == "batch"]
    assert [line["batch"] for line in batches] == [1, 1] and all(line["loss/train/total"] > 0 for line in batches)
    texts = [line["text"] for line in lines]
    assert "[W1130 a library speaks" in texts
    assert any(text.startswith("launcher: ") and "restart 1 of 1, from the newest save" in text for text in texts)
    errors = [line for line in lines if line["level"] == "error"]
    assert errors[-1]["event"] == "ended" or how == "raise"
    tracebacks = [line["text"] for line in errors if line["text"].startswith("Traceback")]
    assert all(text.endswith("RuntimeError: two\nlines") for text in tracebacks)
    assert bool(tracebacks) == (how == "raise")


def test_a_mistake_is_one_json_object_too(folder):
    launcher = begin(folder, "console_format=json", "model.d_modle=64")
    output, _ = launcher.communicate(timeout=DEADLINE_SECONDS)
    (line,) = map(json.loads, output.splitlines())
    assert launcher.returncode == line["exit_code"] == 2
    assert (line["level"], line["event"]) == ("error", "ended") and "d_model" in line["text"]
