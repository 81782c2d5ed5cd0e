"""scripts/slurm and scripts/docker, as far as a machine without SLURM and without a container daemon can tell.

The batch scripts run for real; `srun` and `scontrol` are stand-ins that start two tasks with SLURM's variables and
write down what they were called with.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from composer.core import Callback

from tests.helpers.launch import ROOT, free_port
from tests.helpers.tiny import read_metrics, tiny_config, write_config, write_data

BUG = {f"python:{__name__}:Bug": {}}
BATCH_SCRIPTS = sorted((ROOT / "scripts/slurm").glob("train-*.sbatch"))
PREPARE = ROOT / "scripts/slurm/prepare.sbatch"
COMMON = ROOT / "scripts/slurm/common.sh"
DOCKERFILES = [ROOT / "scripts/docker/Dockerfile"]
SRUN = f"""#!{sys.executable}
import os, subprocess, sys
command = sys.argv[1:]
with open("srun.txt", "a") as log:
    log.write(" ".join(command) + chr(10))
while command[0].startswith("-"):
    command.pop(0)
step = {{"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NODELIST": "localhost",
        "SLURM_STEP_ID": "0", "SLURM_NODEID": "0"}}
tasks = [
    subprocess.Popen(
        command, env={{**os.environ, **step, "SLURM_PROCID": str(i), "SLURM_LOCALID": str(i)}}, start_new_session=True
    )
    for i in range(2)
]
with open("tasks.txt", "w") as file:
    file.write(" ".join(str(task.pid) for task in tasks))
codes = [task.wait() for task in tasks]
sys.exit(max(code if code >= 0 else 128 - code for code in codes))
"""
SCONTROL = '#!/bin/sh\necho "$@" >> scontrol.txt\n'


class Bug(Callback):
    def batch_end(self, state, logger):
        raise RuntimeError("a bug")


class Job:
    """A batch script that SLURM has started in `folder`, with the repository's scripts beside it."""

    def __init__(self, script, folder, *arguments, **environment):
        self.folder = folder
        programs = folder / "bin"
        programs.mkdir(exist_ok=True)
        for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
            (programs / name).write_text(text)
            (programs / name).chmod(0o755)
        if not (folder / "scripts").exists():
            (folder / "scripts").symlink_to(ROOT / "scripts")
        self.output = folder / "job.out"
        self.id = str(free_port())
        with self.output.open("w") as output:
            self.process = subprocess.Popen(
                ["bash", script, *arguments],
                cwd=folder,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={
                    **os.environ,
                    "PATH": f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}",
                    "PYTHONPATH": str(ROOT),
                    "OMP_NUM_THREADS": "1",
                    "SLURM_JOB_ID": self.id,
                    **environment,
                },
            )

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for leader in (self.process.pid, *self.tasks()):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(leader, signal.SIGKILL)

    def tasks(self):
        path = self.folder / "tasks.txt"
        return [int(pid) for pid in path.read_text().split()] if path.exists() else []

    def wait(self):
        return self.process.wait(timeout=180)

    def wait_for_batch(self, batch, run="tiny"):
        deadline = time.monotonic() + 180
        log = self.folder / "runs" / run / "metrics.jsonl"
        while not log.exists() or log.read_text().count("\n") < batch:
            assert self.process.poll() is None and time.monotonic() < deadline, self.output.read_text()
            time.sleep(0.05)

    def requeued(self):
        path = self.folder / "scontrol.txt"
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("data"))


@pytest.mark.parametrize("script", [*BATCH_SCRIPTS, PREPARE, COMMON], ids=lambda path: path.stem)
def test_the_batch_scripts_are_bash(script):
    subprocess.run(["bash", "-n", script], check=True)
    checker = shutil.which("shellcheck")
    if checker:
        subprocess.run([checker, script], check=True)


def test_the_batch_scripts_ask_for_what_the_run_needs():
    assert [path.name for path in BATCH_SCRIPTS] == ["train-cuda.sbatch", "train-rocm.sbatch"]
    for script in BATCH_SCRIPTS:
        options = dict(re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", script.read_text(), re.MULTILINE))
        assert options["signal"] == "USR1@120"  # with B: only the shell would hear it
        assert "preemption_grace_seconds=60" in COMMON.read_text()  # less than these, by a batch
        assert options["requeue"] == ""
        assert options["open-mode"] == "append"
        assert options["ntasks-per-node"] == options["gpus-per-node"]


@pytest.mark.long
@pytest.mark.multiprocess
def test_a_job_that_is_signalled_saves_is_requeued_and_carries_on_to_its_end(tmp_path, data):
    """Every process of both tasks gets the signal, loader workers too: that is what SLURM does with a step."""
    config = tiny_config(data, train_loader__num_workers=1, max_duration="100000ba")
    path = write_config(tmp_path / "tiny.yaml", config)
    end = str(int(time.time()) + 3600)
    with Job(BATCH_SCRIPTS[0], tmp_path, path, SLURM_JOB_END_TIME=end) as job:
        job.wait_for_batch(3)
        for task in job.tasks():
            os.killpg(task, signal.SIGUSR1)
        assert job.wait() == 75
        output = job.output.read_text()
        assert "preempted by SIGUSR1 at batch" in output
        assert "Traceback" not in output and "resource_tracker" not in output
        assert job.requeued() == [f"requeue {job.id}"]
    arguments = (tmp_path / "srun.txt").read_text()
    wall = int(re.findall(r"max_wall_time=(\d+)s", arguments)[0])
    assert 3600 - 90 - 60 < wall <= 3600 - 90
    assert "--kill-on-bad-exit=0" in arguments and "preemption_grace_seconds=60" in arguments
    assert "kill after 30 s" not in output

    last = json.loads((tmp_path / "runs/tiny/status.json").read_text())["batch"]
    with Job(BATCH_SCRIPTS[0], tmp_path, path, f"max_duration={last + 2}ba") as job:
        assert job.wait() == 0, job.output.read_text()
        assert f"carrying on from runs/tiny/checkpoints/ba{last}" in job.output.read_text()
        assert len(job.requeued()) == 1  # the one from before
    assert [record["batch"] for record in read_metrics(tmp_path / "runs/tiny")] == list(range(1, last + 3))


@pytest.mark.long
@pytest.mark.multiprocess
@pytest.mark.parametrize("how", ["scancel", "file"])
def test_a_job_that_is_to_stop_for_good_is_not_requeued(tmp_path, data, how):
    path = write_config(tmp_path / "tiny.yaml", tiny_config(data, max_duration="100000ba"))
    with Job(BATCH_SCRIPTS[0], tmp_path, path) as job:
        job.wait_for_batch(3)
        if how == "file":
            (tmp_path / f"STOP-{job.id}").touch()
        else:
            os.kill(job.process.pid, signal.SIGTERM)  # the batch script, too, is told when a job is cancelled
        for task in job.tasks():
            os.killpg(task, signal.SIGUSR1 if how == "file" else signal.SIGTERM)
        assert job.wait() == 75, job.output.read_text()
        assert job.requeued() == []
    last = json.loads((tmp_path / "runs/tiny/status.json").read_text())["batch"]
    assert (tmp_path / f"runs/tiny/checkpoints/ba{last}/manifest.json").exists()


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("changes", "code"),
    [({"model__n_heads": 5}, 2), pytest.param({"callbacks": BUG}, 1, marks=pytest.mark.long)],
    ids=["user", "bug"],
)
def test_a_job_that_fails_is_not_requeued(tmp_path, data, changes, code):
    path = write_config(tmp_path / "tiny.yaml", tiny_config(data, **changes))
    with Job(BATCH_SCRIPTS[1], tmp_path, path) as job:
        assert job.wait() == code, job.output.read_text()
        assert job.requeued() == []
    assert "max_wall_time" not in (tmp_path / "srun.txt").read_text()  # SLURM has not said when the job ends


# ----------------------------------------------------------------------------------------------------- containers


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_a_dockerfile_copies_what_it_uses_and_keeps_the_image_s_torch(path):
    """That the installation leaves another torch alone is tested for real in test_torch_releases.py."""
    text = path.read_text().replace("\\\n", " ")
    steps = [line.split(None, 1) for line in text.splitlines() if line.strip() and not line.startswith("#")]
    copied = {name for kind, rest in steps if kind == "COPY" for name in rest.split()[:-1]}
    assert copied
    for name in copied:
        assert (ROOT / name).exists(), name
    runs = [rest for kind, rest in steps if kind == "RUN"]
    read = re.findall(r"-r (\S+)", " ".join(runs))
    assert read and set(read) <= copied
    installs = [part for run in runs for part in run.split("&&") if "pip install" in part]
    assert any("-r requirements-without-torch.txt" in install for install in installs)
    assert all("--no-deps" in install for install in installs)
    assert sum(kind == "ARG" for kind, _ in steps) == 1 and steps[1] == ["FROM", "${BASE}"]
    assert [rest for kind, rest in steps if kind == "USER"][-1] != "root"


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
@pytest.mark.parametrize("guilty", [None, "-r requirements-without-torch.txt", "."])
def test_a_build_ends_where_a_step_has_replaced_torch(tmp_path, path, guilty):
    """The RUN steps in a shell, with stand-ins for python, and for a pip of which one call brings another torch."""
    (tmp_path / "torch").write_text("2.12.0+rocm")
    python = f"""#!/bin/sh
    [ "$*" = "-m pip install --no-deps {guilty}" ] && echo 2.13.0 > torch
    [ "$1" = -m ] || cat torch
    """
    commands = {"python3": python, "useradd": "#!/bin/sh\n", "chown": "#!/bin/sh\n"}
    for name, text in commands.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    text = path.read_text().replace("\\\n", " ")
    results = [
        subprocess.run(
            ["sh", "-c", run],
            cwd=tmp_path,
            env={"PATH": f"{tmp_path}:{os.environ['PATH']}"},
            capture_output=True,
            check=False,
        ).returncode
        for run in re.findall("^RUN (.*)$", text, re.MULTILINE)
    ]
    assert (results == [0, 0]) == (guilty is None)


ABORTED = """
import json, os, sys, time
from pathlib import Path
folder = Path("runs/tiny")
folder.mkdir(parents=True, exist_ok=True)
path = folder / "status.json"
status, *try_again = sys.argv[-2].removeprefix("metadata.s=").split("-")
path.write_text(json.dumps({"status": status, "batch": 4, "reason": "SIGUSR1", "try_again": bool(try_again)}))
age = float(sys.argv[-1].removeprefix("metadata.age="))
os.utime(path, (time.time() - age,) * 2)
if try_again:
    sys.exit(1)
os.abort()
"""


@pytest.mark.fault
@pytest.mark.parametrize(
    ("status", "age_seconds", "is_requeued"),
    [
        ("preempted", 0, True),
        ("failed", 0, False),
        ("preempted", 900, False),
        ("failed-by_a_fault", 0, True),
        ("failed-by_a_fault", 900, False),
    ],
)
def test_a_job_whose_ranks_abort_or_meet_a_fault_is_requeued_if_status_json_says_so(
    tmp_path, status, age_seconds, is_requeued
):
    """NCCL's watchdog aborts a rank whose peer has left; the launcher's exit code is then 134. After a fault that may
    pass, with batches that no save holds, it is 1."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts/slurm").symlink_to(ROOT / "scripts/slurm")
    (tmp_path / "scripts/train.py").write_text(ABORTED)
    config = write_config(tmp_path / "run.yaml", tiny_config(tmp_path / "data"))
    arguments = [config, f"metadata.s={status}", f"metadata.age={age_seconds}"]
    with Job(BATCH_SCRIPTS[0], tmp_path, *arguments) as job:
        assert job.wait() == (1 if "-" in status else 134), job.output.read_text()
        assert job.requeued() == ([f"requeue {job.id}"] if is_requeued else []), job.output.read_text()
