"""scripts/sky, as far as a machine without SkyPilot can tell: its shape, and the shell parts with stand-ins.

Where SkyPilot is installed, its own schemas have the last word.
"""

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
import yaml

from llmfoundry_lite.config.load_train import load_train_config
from llmfoundry_lite.errors import EXIT_PREEMPTED
from tests.helpers.launch import ROOT

SKY = ROOT / "scripts/sky"
SCRIPTS = sorted(SKY.glob("*.sh"))
COMPOSER = f"""#!{sys.executable}
import os, pathlib, signal, sys, threading
pathlib.Path("composer.txt").write_text(" ".join(sys.argv[1:]))
asked = threading.Event()
signal.signal(signal.SIGTERM, lambda number, frame: asked.set())
pathlib.Path("pid").write_text(str(os.getpid()))
code = int(os.environ["CODE"])
if code == 75:
    asked.wait(60)
    os.system("sleep 0.2")  # saves
os._exit(code)
"""


@pytest.fixture(scope="module")
def task():
    return yaml.safe_load((SKY / "train.yaml").read_text())


def test_it_runs_on_either_vendor_and_is_recovered_when_it_says_75(task):
    resources = task["resources"]
    wanted = [option["accelerators"].split(":")[0] for option in resources["any_of"]]
    assert {"H100", "MI300"} <= set(wanted)
    for option in resources["any_of"]:
        if option["accelerators"].startswith("MI"):
            assert "rocm" in option["image_id"]
    assert resources["job_recovery"]["recover_on_exit_codes"] == [EXIT_PREEMPTED]
    assert resources["job_recovery"]["max_restarts_on_errors"] == 0  # a user's mistake or a bug comes again each time


def test_what_it_lays_over_a_run_loads_and_saves_into_the_bucket(task):
    words = task["run"].split(" bash ")[0]
    folder = re.fullmatch(r'SAVE_FOLDER="(.+)"', words)
    assert folder
    save_folder = folder[1].replace("${BUCKET}", task["envs"]["BUCKET"])
    arguments = [str(ROOT / task["envs"]["RUN"]), "hardware=auto", "autoresume=true", f"save_folder={save_folder}"]
    config = load_train_config([*arguments, *task["envs"]["OPTIONS"].split()], {}).config
    assert config.save_folder == "s3://my-bucket/mpt-1b"
    assert config.train_loader.dataset.local in task["file_mounts"]
    assert config.preemption_grace_seconds < 25  # composer kills after 30
    (hook,) = task["config"]["hooks"]
    assert hook["timeout"] > config.preemption_grace_seconds and "preemption" in hook["events"]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_its_scripts_are_bash_and_are_those_that_it_names(task, script):
    subprocess.run(["bash", "-n", script], check=True)
    if checker := shutil.which("shellcheck"):
        subprocess.run([checker, script], check=True)
    assert f"scripts/sky/{script.name}" in (SKY / "train.yaml").read_text()


@pytest.fixture
def node(tmp_path):
    """Starts run.sh as SkyPilot does on a node, with a composer that writes down how it was called."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "composer").write_text(COMPOSER)
    (programs / "composer").chmod(0o755)
    (tmp_path / "scripts").symlink_to(ROOT / "scripts")

    def begin(code=0, **environment):
        path = f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        fixed = {"RUN": "run.yaml", "SAVE_FOLDER": "s3://b/{run_name}", "OPTIONS": "a=b c=d", "CODE": str(code)}
        more = {"PATH": path, "PYTHONPATH": str(ROOT), **fixed, **environment}
        return subprocess.Popen(["bash", SKY / "run.sh"], cwd=tmp_path, env=os.environ | more)

    return begin


def test_every_node_has_its_place_among_all(node, tmp_path):
    places = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_GPUS_PER_NODE": "8"}
    assert node(**places, SKYPILOT_NODE_IPS="10.0.0.1\n10.0.0.2").wait(60) == 0
    words = (tmp_path / "composer.txt").read_text()
    assert "-n 8 --world_size 16 --base_rank 8 --node_rank 1 --master_addr 10.0.0.1 " in words
    assert words.endswith("run.yaml hardware=auto autoresume=true save_folder=s3://b/{run_name} a=b c=d")


def test_a_machine_without_accelerators_has_one_rank(node, tmp_path):
    assert node(SKYPILOT_NUM_GPUS_PER_NODE="0").wait(60) == 0
    assert (tmp_path / "composer.txt").read_text().startswith("-n 1 --world_size 1 --base_rank 0 ")


def test_a_job_that_is_told_to_end_lets_its_ranks_save_and_says_75(node, tmp_path):
    process, deadline = node(code=75), time.monotonic() + 60
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 75


def test_a_job_that_is_told_to_end_before_its_ranks_have_begun_says_75(node, tmp_path):
    """By a program that the script runs before composer."""
    (tmp_path / "bin/date").write_text(f'#!/bin/sh\nkill -TERM $PPID\nexec {shutil.which("date")} "$@"\n')
    (tmp_path / "bin/date").chmod(0o755)
    assert node().wait(60) == 75
    assert not (tmp_path / "composer.txt").exists()


def test_a_composer_that_does_not_listen_yet_is_ended_and_that_is_75_too(node, tmp_path):
    (tmp_path / "bin/composer").write_text("#!/bin/sh\nkill -TERM $PPID\nexec sleep 60\n")
    assert node().wait(30) == 75


FAULT = {"status": "failed", "last_saved": "ba3", "failed_saves": 2}


@pytest.mark.parametrize(
    ("code", "status", "expected"),
    [
        (2, None, 2),
        (1, None, 1),
        (134, {"status": "preempted"}, 75),
        (1, {**FAULT, "try_again": True}, 75),
        (1, FAULT, 1),
        (2, {**FAULT, "try_again": True}, 2),
    ],
)
def test_codes_that_are_not_75_stay_unless_the_run_says_that_it_is_to_go_on(node, tmp_path, code, status, expected):
    from tests.helpers.tiny import tiny_config, write_config

    write_config(tmp_path / "run.yaml", tiny_config(tmp_path / "data"))
    if status:
        (tmp_path / "runs/tiny").mkdir(parents=True)
        path = tmp_path / "runs/tiny/status.json"
        path.write_text(json.dumps({**status, "batch": 3, "reason": "SIGTERM"}))
        later = time.time() + 3600
        os.utime(path, (later, later))
    assert node(code=code, OPTIONS="").wait(60) == expected


def test_before_a_machine_goes_its_runs_are_asked_to_leave_and_waited_for(tmp_path):
    (tmp_path / "scripts/sky").mkdir(parents=True)
    shutil.copy(SKY / "leave.sh", tmp_path / "scripts/sky")
    for name, status in (("a", "running"), ("b", "done"), ("c/island", "running")):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "status.json").write_text(json.dumps({"status": status, "batch": 3}))
    process = subprocess.Popen(["bash", tmp_path / "scripts/sky/leave.sh"])
    deadline = time.monotonic() + 60
    for name in ("a", "c/island"):
        while not (tmp_path / "runs" / name / "STOP").exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert process.poll() is None
    for name in ("a", "c/island"):
        (tmp_path / "runs" / name / "status.json").write_text(json.dumps({"status": "preempted", "batch": 3}))
    assert process.wait(60) == 0
    assert not (tmp_path / "runs/b/STOP").exists(), "it would stop the next launch there"


VALIDATE = """
import sys, yaml, sky
from sky.utils import common_utils, dag_utils, schemas
task = yaml.safe_load(open(sys.argv[1]))
common_utils.validate_schema(task, schemas.get_task_schema(), "task: ")
common_utils.validate_schema(task["resources"], schemas.get_resources_schema(), "resources: ")
for mount in task.pop("file_mounts").values():  # which a Task would look for in the cloud
    common_utils.validate_schema(mount, schemas.get_storage_schema(), "file_mounts: ")
print(sorted(str(option.accelerators) for option in sky.Task.from_yaml_config(task).resources))
dag = dag_utils.load_dag_from_yaml_str(sys.argv[2], secrets_overrides=[("LLMFOUNDRY_LITE_ISLANDS_TOKEN", "secret")])
print(dag.is_job_group(), dag.name, dag.primary_tasks, [task.name for task in dag.tasks])
"""


@pytest.fixture(scope="module")
def group():
    """The job group of two islands in docs/skypilot.md."""
    (block,) = re.findall(r"```yaml\n(.+?)```", (ROOT / "docs/skypilot.md").read_text(), re.DOTALL)
    return block


@pytest.mark.long
def test_skypilot_itself_parses_the_task_and_the_group(group):
    """SKYPILOT_PYTHON names the Python of an environment that has it; it need not be this one."""
    python = os.environ.get("SKYPILOT_PYTHON", sys.executable)
    if subprocess.run([python, "-c", "import sky"], capture_output=True, check=False).returncode != 0:
        pytest.skip("SkyPilot is not installed")
    command = [python, "-c", VALIDATE, str(SKY / "train.yaml"), group]
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    assert "{'H100': 8}" in result.stdout and "{'MI300': 8}" in result.stdout
    assert "True mpt-1b ['nvidia', 'amd'] ['coordinator', 'nvidia', 'amd']" in result.stdout
