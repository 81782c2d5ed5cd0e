"""Twenty preemptions in one run: any signal, at any time, carried on with any number of ranks and any sharding.

Ranks tell what they are about to do through a pipe, and a generator with a fixed seed says at which of these moments
which of them is sent what. The signal then arrives whenever it arrives: in a step, a collective, a save, an evaluation.
"""

import json
import os
import random
import signal
import threading
from pathlib import Path

import numpy as np
import psutil
import pytest
from composer.core import Callback

from benchmarks.switch.band import Series, judge, measure_band, measure_deviation
from llmfoundry_lite.checkpoint.full_tensors import load_full_tensors
from llmfoundry_lite.checkpoint.store import open_checkpoint
from llmfoundry_lite.checkpoint.verify import verify_checkpoint
from llmfoundry_lite.ranks.status import read_status
from tests.helpers.launch import train
from tests.helpers.tiny import read_metrics, tiny_config, values, write_config

pytestmark = [pytest.mark.long, pytest.mark.multiprocess]

NUM_PREEMPTIONS, NUM_BATCHES, BATCH_SIZE, EVERY = 20, 200, 12, 5
MOMENTS = ("fit_start", "batch_start", "before_backward", "batch_end", "batch_checkpoint")
SHARDINGS = [
    None,
    {"sharding_strategy": "FULL_SHARD"},
    {"sharding_strategy": "SHARD_GRAD_OP"},
    {"sharding_strategy": "NO_SHARD"},
]
HYBRID = {"sharding_strategy": "HYBRID_SHARD", "data_parallel_shard_degree": 2}
PIPE = "moments"


class Tell(Callback):
    """Writes `rank pid batch moment` into a pipe, a line for each of MOMENTS."""

    def __init__(self, pipe: str):
        self.pipe = os.open(pipe, os.O_WRONLY)

    def run_event(self, event, state, logger):
        if event.value in MOMENTS:
            line = f"{os.environ['RANK']} {os.getpid()} {int(state.timestamp.batch)} {event.value}\n"
            os.write(self.pipe, line.encode())  # shorter than PIPE_BUF: never torn


class Preempter:
    """Reads the pipe of one launch; when a rank tells of the chosen moment, sends the signal."""

    def __init__(self, pipe: Path, num_ranks: int, chosen: tuple[int, str] | None, number: int, victims: list[int]):
        self.num_ranks, self.chosen, self.number, self.victims = num_ranks, chosen, number, victims
        self.sent = False
        # Read and write: opening does not wait for a writer, and reading does not end when a launch does.
        self.pipe = os.fdopen(os.open(pipe, os.O_RDWR), buffering=1, closefd=True)
        self.thread = threading.Thread(target=self.read, daemon=True)
        self.thread.start()

    def read(self) -> None:
        pids: dict[int, int] = {}
        for line in self.pipe:
            if line == "end\n":
                return
            rank, pid, batch, moment = line.split()
            pids[int(rank)] = int(pid)
            due = self.chosen is not None and int(batch) >= self.chosen[0] and moment == self.chosen[1]
            if due and not self.sent and len(pids) == self.num_ranks:
                processes = [psutil.Process(pid) for pid in pids.values()]
                for victim in self.victims:
                    os.kill(pids[victim], self.number)
                self.sent = True
                if self.number == signal.SIGKILL:
                    end_as_a_launcher_does(processes)

    def close(self, pipe: Path) -> None:
        pipe_end = os.open(pipe, os.O_WRONLY)
        os.write(pipe_end, b"end\n")
        self.thread.join()
        os.close(pipe_end)
        self.pipe.close()


def end_as_a_launcher_does(processes: list[psutil.Process], timeout_seconds: float = 30) -> None:
    """`composer` gives those beside a dead rank 30 s: they may wait for it in shared memory, without a timeout."""
    _, alive = psutil.wait_procs(processes, timeout_seconds)
    for process in alive:
        process.kill()


@pytest.fixture
def run(tmp_path, data):
    """Return the function that launches. The data set is remote, so that there is a cache to leave things in."""
    dataset = {"remote": str(data), "local": str(tmp_path / "cache"), "split": "train"}
    config = tiny_config(
        data,
        autoresume=True,
        max_duration=f"{NUM_BATCHES}ba",
        save_interval=f"{EVERY}ba",
        eval_interval=f"{3 * EVERY}ba",
        global_train_batch_size=BATCH_SIZE,
        preemption_grace_seconds=30,
        dist_timeout=60,
    )

    def launch(name, num_ranks=1, num_workers=0, **changes):
        loader = {"dataset": {**dataset, "shuffle": True, "shuffle_seed": 3}, "num_workers": num_workers}
        changes = {"run_name": name, "train_loader": loader, **changes}
        path = write_config(tmp_path / f"{name}.yaml", {**config, **changes})
        return train([path], tmp_path, num_ranks, timeout_seconds=300)

    return launch


def series(tmp_path, name):
    records = read_metrics(tmp_path / "runs" / name)
    assert [record["batch"] for record in records] == list(range(1, NUM_BATCHES + 1))
    validation = {record["batch"]: record["eval/loss"] for record in records if "eval/loss" in record}
    columns = (values(records, key) for key in ("loss/train/total", "data/digest", "lr"))
    return Series(**dict(zip(("losses", "digests", "learning_rates"), columns, strict=True)), validation=validation)


def test_twenty_random_preemptions_leave_the_run_as_it_would_have_been(tmp_path, run):
    generator = random.Random(20)
    pipe = tmp_path / PIPE
    os.mkfifo(pipe)
    tell = {f"python:{__name__}:Tell": {"pipe": str(pipe)}}
    story, reached = [], 0
    for _ in range(NUM_PREEMPTIONS):
        num_ranks = generator.choice([1, 2, 3, 4])
        sharding = generator.choice([*SHARDINGS, *([HYBRID] if num_ranks == 4 else [])])
        number = generator.choice([signal.SIGTERM, signal.SIGUSR1, signal.SIGKILL])
        everyone = generator.random() < 0.5
        victims = list(range(num_ranks)) if everyone else [generator.randrange(num_ranks)]
        moment = (reached + generator.randint(0, 9), generator.choice(MOMENTS))
        if moment[1] == "fit_start":  # comes once, wherever the launch begins
            moment = (0, "fit_start")
        preempter = Preempter(pipe, num_ranks, moment, number, victims)
        result = run("moved", num_ranks, generator.choice([0, 2]), fsdp_config=sharding, callbacks=tell)
        preempter.close(pipe)
        story.append((num_ranks, sharding, signal.Signals(number).name, victims, moment, result.exit_codes))
        print(story[-1], *(tail(output) for output in result.outputs), sep="\n")  # shown when the test fails
        assert preempter.sent
        status = read_status(tmp_path / "runs/moved")
        assert status is not None
        if number == signal.SIGKILL:
            killed = [code for rank, code in enumerate(result.exit_codes) if rank in victims]
            others = [code for rank, code in enumerate(result.exit_codes) if rank not in victims]
            assert set(killed) == {-9} and set(others) <= {1, -9}, story
            assert status["status"] == "failed", story  # of a killed rank 0, whose process is gone
        else:
            assert set(result.exit_codes) == {75}, story
            assert status["status"] == "preempted"
            assert status["batch"] == 0 or saved(tmp_path, status["batch"]), story
        reached = max([reached, *(record["batch"] for record in written(tmp_path))])
        assert reached < NUM_BATCHES - 10, "the run ended before it could be preempted so often; make it longer"
    run("moved", 2).check()
    assert json.loads((tmp_path / "runs/moved/status.json").read_text())["status"] == "done"

    for name, num_ranks in (("one", 1), ("two", 2), ("four", 4)):
        run(name, num_ranks).check()
    uninterrupted = [series(tmp_path, name) for name in ("one", "two", "four")]
    verdict = judge(series(tmp_path, "moved"), uninterrupted)
    assert verdict.same_data, story
    assert verdict.first_other_learning_rate is None
    assert verdict.inside, (verdict, story)
    for part in ("model", "exp_avg", "exp_avg_sq"):  # the same statistic, over the values of the state
        *others, moved = (final_state(tmp_path, name, part) for name in ("one", "two", "four", "moved"))
        deviation, band = measure_deviation(moved, others)[-1], measure_band(others)[-1]
        assert deviation <= band, (part, deviation, band, story)

    left = {path.suffix for path in (tmp_path / "cache").rglob("*") if path.is_file()}
    assert left == {".mds", ".json", ".txt"}, left
    names = {path.name for path in (tmp_path / "runs/moved/checkpoints").iterdir()}
    assert not [name for name in names if name.startswith(".") and name != ".leases"], names
    for name in names:
        if name.startswith("ba"):
            verify_checkpoint(open_checkpoint(tmp_path / "runs/moved/checkpoints" / name))


def tail(output):
    """Return the end of an output, without torch's C++ frames."""
    lines = [line for line in output.splitlines() if not line.startswith(("frame #", "Exception raised", "["))]
    return "\n".join(lines[-12:])


def written(tmp_path):
    """Return the whole lines of the log so far."""
    path = tmp_path / "runs/moved/metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def saved(tmp_path, batch):
    return (tmp_path / f"runs/moved/checkpoints/ba{batch}/manifest.json").exists()


def final_state(tmp_path, name, part):
    """Return all values of the weights, or of a slot of the optimizer, after the last batch."""
    tensors = load_full_tensors(tmp_path / "runs" / name / f"checkpoints/ba{NUM_BATCHES}", prefix="")
    chosen = [key for key in sorted(tensors) if key.startswith(f"{part}/") or key.endswith(f"/{part}")]
    return np.concatenate([tensors[key].flatten().numpy() for key in chosen])
