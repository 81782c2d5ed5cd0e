"""Training on a real Slurm of four nodes, which is all on this machine: preempted, killed and moved, nothing is lost.

What a run logs is compared with the same run to which nothing happens. A requeued job's two minutes are skipped.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from composer.core import Callback

from llmfoundry_lite.ranks.rank import this_rank
from llmfoundry_ops.journal import read_allocations
from tests.helpers.launch import PATHS, ROOT, train
from tests.helpers.signals import wait_until_told
from tests.helpers.slurm import NODES, Slurm, SlurmWithQos, needs_slurm, needs_slurmdbd
from tests.helpers.tiny import read_metrics, tiny_config, values, write_config

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess, needs_slurm]
SCRIPT = "scripts/slurm/train-cuda.sbatch"
ON_A_NODE = ("--ntasks-per-node=1", "--gpus-per-node=1", "--cpus-per-task=1")
TRAIN = (sys.executable, "scripts/train.py", "tiny.yaml")
LEAVES_AT, LAST = 5, 12


class Leave(Callback):
    """In one batch of the first launch, ranks wait until they are asked to leave, so that the batch is always the
    same."""

    def batch_start(self, state, logger):
        there = Path(f"there-{state.run_name}-{this_rank().rank}")
        if int(state.timestamp.batch) + 1 == LEAVES_AT and not there.exists():
            there.touch()
            wait_until_told(state)


LEAVE = {f"python:{__name__}:Leave": {}}


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    with Slurm(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def config(data):
    return tiny_config(data, max_duration=f"{LAST}ba", dist_timeout=60)


@pytest.fixture(scope="module")
def expected(config, tmp_path_factory):
    """Return the log of the run on two ranks to which nothing happens."""
    folder = tmp_path_factory.mktemp("whole")
    train([write_config(folder / "tiny.yaml", config)], folder, 2).check()
    return read_metrics(folder / "runs/tiny")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder to submit from, with the repository's scripts, asked for with our programs."""
    (tmp_path / "scripts").symlink_to(ROOT / "scripts")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", PATHS)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return tmp_path


def assert_same(run: Path, expected: list[dict]) -> None:
    records = read_metrics(run)
    for key in ("batch", "data/digest", "loss/train/total"):
        assert values(records, key) == values(expected, key)


def wait_until_there(slurm: Slurm, folder: Path, job: str, num_ranks: int = 2) -> None:
    def look() -> bool:
        assert slurm.show(job)["JobState"] in ("PENDING", "RUNNING", "CONFIGURING"), output_of(folder, job)
        return len(list(folder.glob("there-*"))) == num_ranks

    slurm.wait(look)


def output_of(folder: Path, job: str) -> str:
    return (folder / f"llmfoundry-lite-{job}.out").read_text()


def assert_close(run: Path, expected: list[dict]) -> None:
    """Check that a run on other ranks has the same data, and losses that agree."""
    records = read_metrics(run)
    assert values(records, "data/digest") == values(expected, "data/digest")
    assert values(records, "loss/train/total") == pytest.approx(values(expected, "loss/train/total"), abs=1e-4)


def submit(slurm: Slurm, folder: Path, config: dict, *options: str) -> str:
    """Submit a job on two nodes, one rank on each."""
    write_config(folder / "tiny.yaml", config)
    return slurm.submit(*options, "--nodes=2", *ON_A_NODE, SCRIPT, "tiny.yaml", cwd=folder)


def last_batch(folder: Path) -> int:
    return read_metrics(folder / "runs/tiny")[-1]["batch"]


def test_srun_needs_no_launcher(slurm, folder, config, expected):
    write_config(folder / "tiny.yaml", config)
    result = slurm.run("srun", "-N2", *ON_A_NODE, *TRAIN, cwd=folder)
    assert result.returncode == 0, result.stdout + result.stderr
    assert_same(folder / "runs/tiny", expected)


def test_a_run_that_is_preempted_is_requeued_and_carries_on(slurm, folder, config, expected):
    job = submit(slurm, folder, {**config, "callbacks": LEAVE}, "--partition=low")
    wait_until_there(slurm, folder, job)
    other = slurm.submit("--partition=high", "--nodes=2", "--exclusive", "--wrap=true", cwd=folder)
    slurm.wait_for_end(other, "COMPLETED")
    assert last_batch(folder) == LEAVES_AT
    slurm.release(job)
    slurm.wait_for_end(job, "COMPLETED")
    assert slurm.show(job)["Restarts"] == "1"
    assert "preempted by SIGUSR1 at batch 5" in output_of(folder, job)
    assert_same(folder / "runs/tiny", expected)


def test_a_run_that_is_requeued_on_fewer_nodes_carries_on_with_those(slurm, folder, config, expected):
    job = submit(slurm, folder, {**config, "callbacks": LEAVE}, "--partition=low")
    wait_until_there(slurm, folder, job)
    other = slurm.submit("--partition=high", "-w", NODES[0], "--exclusive", "--wrap=sleep 600", cwd=folder)
    slurm.wait(lambda: slurm.show(other)["JobState"] == "RUNNING")
    fewer = slurm.run("scontrol", "update", f"jobid={job}", "NumNodes=1", "NumTasks=1", "NumCPUs=1")
    assert fewer.returncode == 0, fewer.stderr
    slurm.release(job)
    slurm.wait_for_end(job, "COMPLETED")
    assert slurm.show(job)["NodeList"] == NODES[1]
    slurm.run("scancel", other)
    assert_close(folder / "runs/tiny", expected)


def test_doctor_examines_two_nodes(slurm, folder):
    program = (sys.executable, "-m", "llmfoundry_lite", "doctor", "--quick", "--json", "doctor.json")
    result = slurm.run("srun", "-N2", *ON_A_NODE, *program, cwd=folder)
    assert result.returncode == 0, result.stdout + result.stderr
    findings = {row["check"]: row for row in json.loads((folder / "doctor.json").read_text())["findings"]}
    assert findings["products"]["detail"] == "exact on 2 ranks"
    assert re.search(r"rank 0 on \S+ \(node 0\) and rank 1 on \S+ \(node 1\)", findings["link"]["detail"])


@pytest.mark.long
def test_at_the_time_limit_a_run_saves_and_is_requeued(slurm, folder, config, expected):
    """The signal comes two minutes before the limit, or up to a minute earlier."""
    job = submit(slurm, folder, {**config, "callbacks": LEAVE}, "--time=4")
    wait_until_there(slurm, folder, job)
    slurm.release(job)
    assert "preempted by SIGUSR1 at batch 5" in output_of(folder, job)
    slurm.wait_for_end(job, "COMPLETED")
    assert slurm.show(job)["Restarts"] == "1"
    assert_same(folder / "runs/tiny", expected)


@pytest.mark.long
def test_a_run_that_is_cancelled_saves_and_is_not_requeued(slurm, folder, config, expected):
    job = submit(slurm, folder, {**config, "callbacks": LEAVE})
    wait_until_there(slurm, folder, job)
    slurm.run("scancel", job)
    slurm.wait_for_end(job, "CANCELLED")
    assert slurm.show(job)["Restarts"] == "0"
    assert json.loads((folder / "runs/tiny/status.json").read_text())["status"] == "preempted"
    assert (folder / f"runs/tiny/checkpoints/ba{LEAVES_AT}/manifest.json").exists()
    slurm.wait_for_end(submit(slurm, folder, config), "COMPLETED")
    assert_same(folder / "runs/tiny", expected)


@pytest.mark.long
def test_each_task_of_an_array_leaves_and_comes_back_by_itself(slurm, folder, config, expected):
    text, here = (ROOT / SCRIPT).read_text(), "source scripts/slurm/common.sh"
    assert text.count(here) == 1
    (folder / "array.sbatch").write_text(text.replace(here, f'set -- "$@" "run_name=$SLURM_ARRAY_TASK_ID"\n{here}'))
    write_config(folder / "tiny.yaml", {**config, "callbacks": LEAVE})
    array = slurm.submit("--array=0-2", *ON_A_NODE, "array.sbatch", "tiny.yaml", cwd=folder)
    tasks = [f"{array}_{number}" for number in range(3)]
    slurm.wait(lambda: len(list(folder.glob("there-*"))) == 3)
    for task in (tasks[1], tasks[2], tasks[0]):
        assert slurm.show(task)["JobState"] == "RUNNING"
        slurm.run("scancel", "--signal=USR1", task)
        slurm.release(task)
    for number, task in enumerate(tasks):
        slurm.wait_for_end(task, "COMPLETED")
        assert slurm.show(task)["Restarts"] == "1"
        assert_close(folder / f"runs/{number}", expected)


@pytest.mark.long
@pytest.mark.fault
def test_a_run_that_loses_a_node_is_requeued_on_others(slurm, folder, config, expected):
    job = submit(slurm, folder, {**config, "callbacks": LEAVE, "save_interval": "2ba"})
    wait_until_there(slurm, folder, job)
    slurm.wait((folder / "runs/tiny/checkpoints/ba2/manifest.json").exists)
    lost = slurm.show(job)["BatchHost"]
    slurm.run("scontrol", "update", f"nodename={lost}", "state=down", "reason=test")
    try:
        slurm.release(job)
        slurm.wait_for_end(job, "COMPLETED")
    finally:
        slurm.run("scontrol", "update", f"nodename={lost}", "state=resume")
    assert slurm.show(job)["Restarts"] == "1" and lost not in slurm.show(job)["NodeList"]
    assert_same(folder / "runs/tiny", expected)


@pytest.mark.long
@pytest.mark.fault
def test_a_step_that_is_killed_ends_the_job_and_its_last_save_stands(slurm, folder, config, expected):
    job = submit(slurm, folder, {**config, "callbacks": LEAVE, "save_interval": "2ba"})
    wait_until_there(slurm, folder, job)
    slurm.wait((folder / "runs/tiny/checkpoints/ba2/manifest.json").exists)
    slurm.run("scancel", "--signal=KILL", f"{job}.0")
    slurm.wait_for_end(job, "FAILED")
    assert slurm.show(job)["Restarts"] == "0" and slurm.show(job)["ExitCode"] == "137:0"
    slurm.wait_for_end(submit(slurm, folder, {**config, "save_interval": "2ba"}), "COMPLETED")
    assert_same(folder / "runs/tiny", expected)


@pytest.mark.long
def test_a_relay_goes_from_a_partition_that_preempts_to_another(slurm, folder, config, expected):
    write_config(folder / "tiny.yaml", {**config, "callbacks": LEAVE})
    sites = {}
    for partition in ("low", "all"):
        words = ("--wait", "--no-requeue", f"--job-name=relay-{partition}", f"--partition={partition}", "--nodes=2")
        launch = " ".join(("sbatch", *words, *ON_A_NODE, SCRIPT, "tiny.yaml", "{arguments}"))
        sites[partition] = {"launch": launch, "leave": f"scancel --signal=USR1 --name=relay-{partition}"}
    relay = {"run": "runs/tiny", "policy": "on_preemption", "sites": sites, "rest": "0.1s"}
    (folder / "relay.yaml").write_text(yaml.safe_dump(relay, sort_keys=False))
    command = [sys.executable, "-m", "llmfoundry_lite", "relay", "relay.yaml"]
    with subprocess.Popen(command, cwd=folder, env=slurm.environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            slurm.wait(lambda: len(list(folder.glob("there-*"))) == 2)
            other = slurm.submit("--partition=high", "--nodes=2", "--exclusive", "--wrap=sleep 600", cwd=folder)
            output, _ = process.communicate(timeout=300)
        finally:
            process.kill()
    slurm.run("scancel", other)
    assert process.returncode == 0, output
    assert [(one.site, one.ended) for one in read_allocations(folder / "runs/tiny")] == [
        ("low", "preempted"),
        ("all", "done"),
    ]
    assert_same(folder / "runs/tiny", expected)


@pytest.mark.long
@needs_slurmdbd
def test_a_run_in_a_low_qos_is_preempted_requeued_and_carries_on(tmp_path_factory, folder, config, expected):
    with SlurmWithQos(tmp_path_factory.mktemp("qos")) as slurm:
        job = submit(slurm, folder, {**config, "callbacks": LEAVE}, "--qos=low")
        wait_until_there(slurm, folder, job)
        other = slurm.submit("--qos=normal", "--nodes=4", "--exclusive", "--wrap=true", cwd=folder)
        slurm.wait_for_end(other, "COMPLETED")
        slurm.release(job)
        slurm.wait_for_end(job, "COMPLETED")
        assert slurm.show(job)["Restarts"] == "1"
    assert "preempted by SIGUSR1 at batch 5" in output_of(folder, job)
    assert_same(folder / "runs/tiny", expected)
