"""The batch scripts, ranks and a relay's site on a real Slurm of four nodes, which is all on this machine.

Ranks are stand-ins that write down what they are told; a requeued job's two minutes are skipped.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from llmfoundry_ops.journal import read_allocations
from tests.helpers.launch import PATHS, ROOT
from tests.helpers.slurm import NODES, Slurm, needs_slurm

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess, needs_slurm]
SCRIPT = "scripts/slurm/train-cuda.sbatch"
ONE_TASK = ("--ntasks-per-node=1", "--gpus-per-node=1", "--cpus-per-task=2")
LEAVES_LAST = """
import os, sys, time
task = os.environ["SLURM_ARRAY_TASK_ID"]
with open(f"starts-{task}.txt", "a") as file:
    print(*sys.argv[1:], "for", os.environ["SRUN_CPUS_PER_TASK"], "CPUs", file=file)
if task == "1":
    sys.exit(75)
time.sleep(600)
"""
TRAINS = """
import sys
from pathlib import Path
from llmfoundry_ops.tests.trainer import main
words = [word.split("=", 1) for word in sys.argv[1:]]
sys.exit(main(Path("runs/x"), 100_000, {"site": "slurm", **dict(words)}))
"""
TELLS = """
import json, os
from llmfoundry_lite.ranks.ending import run_and_exit
NAMES = "RANK", "LOCAL_RANK", "NODE_RANK", "MASTER_ADDR", "SLURMD_NODENAME"
run_and_exit(lambda arguments: print(json.dumps([os.environ[name] for name in NAMES])))
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    with Slurm(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder to submit from, with the repository's batch scripts. Who asks from here asks with our programs."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts/slurm").symlink_to(ROOT / "scripts/slurm")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    return tmp_path


def write_program(folder: Path, text: str) -> None:
    (folder / "scripts/train.py").write_text(f"import sys\nsys.path[:0] = {PATHS!r}.split(':')\n{text}")


def test_a_requeued_task_of_an_array_comes_back_alone(slurm, folder):
    """The last task has the number of the whole array."""
    write_program(folder, LEAVES_LAST)
    array = slurm.submit(*ONE_TASK, "--array=0-1", "--time=60", SCRIPT, cwd=folder)
    last, first = f"{array}_1", f"{array}_0"
    slurm.wait(lambda: slurm.show(last)["Restarts"] == "1" and slurm.show(first)["JobState"] == "RUNNING")
    assert slurm.show(last)["JobId"] == array
    assert slurm.show(first)["Restarts"] == "0"
    (line,) = (folder / "starts-1.txt").read_text().splitlines()
    assert 3600 - 90 - 60 < int(re.findall(r"max_wall_time=(\d+)s", line)[0]) <= 3600 - 90
    assert "for 2 CPUs" in line

    (folder / f"STOP-{last}").touch()
    slurm.release(last)
    slurm.wait(lambda: slurm.show(last)["JobState"] == "FAILED")  # with 75, for good
    assert len((folder / "starts-1.txt").read_text().splitlines()) == 2
    assert slurm.show(first)["Restarts"] == "0"
    slurm.run("scancel", array)


def test_ranks_have_what_the_script_has_where_sbatch_hands_on_nothing(slurm, folder):
    """Some centres have this default; srun would then hand on nothing either, not even PATH."""
    write_program(folder, "import os; open('told.txt', 'w').write(os.environ['PATH'])")
    job = slurm.submit(*ONE_TASK, "--export=NONE", SCRIPT, cwd=folder)
    slurm.wait(lambda: slurm.show(job)["JobState"] in ("COMPLETED", "FAILED"))
    assert (folder / "told.txt").read_text()


def test_ranks_that_are_dealt_out_node_by_node_are_refused(slurm, folder):
    write_program(folder, TELLS)
    step = ("srun", "-N2", "--ntasks-per-node=2", "--distribution=cyclic", sys.executable, "scripts/train.py")
    result = slurm.run(*step, cwd=folder)
    assert result.returncode == 2
    assert result.stdout == ""
    said = sorted(line for line in result.stderr.splitlines() if line.startswith("error: "))
    fix = "give each node consecutive ranks, in the order of the nodes (--distribution=block)"
    assert said == [
        f"error: srun: node 0 has the ranks 0, 2, expected 0, 1; {fix}",
        f"error: srun: node 1 has the ranks 1, 3, expected 2, 3; {fix}",
    ]


def test_a_heterogeneous_step_of_unlike_nodes_is_refused(slurm, folder):
    write_program(folder, TELLS)
    program = (sys.executable, "scripts/train.py")
    result = slurm.run("srun", "-n2", "-w", NODES[0], *program, ":", "-n1", "-w", NODES[1], *program, cwd=folder)
    assert result.returncode == 2
    assert result.stdout == ""
    said = {line for line in result.stderr.splitlines() if line.startswith("error: ")}
    fix = "every node must have the same number (--ntasks-per-node)"
    assert said == {f"error: srun: nodes have 2, 1 tasks; {fix}"}


def test_a_cluster_ends_with_the_process_that_has_it(tmp_path):
    """It ends however that process dies, and so do the jobs."""
    program = (
        "import os, signal, sys, pathlib, tests.helpers.slurm as helper\n"
        "slurm = helper.Slurm(pathlib.Path(sys.argv[1])).__enter__()\n"
        "job = slurm.submit('--wrap', 'exec sleep 600', cwd=slurm.folder)\n"
        "slurm.wait(lambda: slurm.show(job)['JobState'] == 'RUNNING')\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "slurm")]
    assert subprocess.run(command, cwd=ROOT, check=False).returncode == -signal.SIGKILL
    configuration = f"SLURM_CONF={tmp_path}/slurm/slurm.conf\0"
    deadline = time.monotonic() + 30
    while processes_with(configuration) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert (tmp_path / "slurm/slurmctld.log").exists()
    assert processes_with(configuration) == []


def processes_with(variable: str) -> list[str]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if variable in (process / "environ").read_text(errors="replace"):
                found.append((process / "cmdline").read_text())
    return found


def test_ranks_meet_on_rank_0_s_node(slurm, folder):
    """Also in a step over two components, in the order of its list of nodes."""
    write_program(folder, TELLS)
    program = (sys.executable, "scripts/train.py")
    components = ("srun", "-n2", "-w", NODES[0], *program, ":", "-n2", "-w", NODES[3], *program)
    for step in (("srun", "-N2", "--ntasks-per-node=2", *program), components):
        result = slurm.run(*step, cwd=folder)
        assert result.returncode == 0, result.stderr
        ranks = sorted(json.loads(line) for line in result.stdout.splitlines())
        assert [rank[:3] for rank in ranks] == [["0", "0", "0"], ["1", "1", "0"], ["2", "0", "1"], ["3", "1", "1"]]
        assert {address for *_, address, _ in ranks} == {ranks[0][-1]}
    assert ranks[0][-1] == NODES[0]


def test_a_relay_s_site_ends_when_its_job_ends(slurm, folder):
    """A job with the scripts' own name is not asked to leave instead."""
    write_program(folder, TRAINS)
    other = slurm.submit("-n1", "--job-name=llmfoundry-lite", "--wrap", "srun sleep 600", cwd=folder)
    job = f"sbatch --wait --no-requeue --job-name=x-relay {' '.join(ONE_TASK)} {SCRIPT} {{arguments}}"
    here = f"PYTHONPATH={PATHS} {sys.executable} -m llmfoundry_ops.tests.trainer runs/x 100 site=here {{arguments}}"
    sites = {
        "slurm": {"launch": job, "leave": "scancel --signal=USR1 --name=x-relay"},
        "here": {"launch": here},
    }
    relay = {"run": "runs/x", "policy": "on_preemption", "sites": sites, "rest": "0.1s"}
    (folder / "relay.yaml").write_text(yaml.safe_dump(relay, sort_keys=False))
    run = folder / "runs/x"
    environment = slurm.environment | {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "llmfoundry_lite", "relay", "relay.yaml"]
    with subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            slurm.wait(lambda: (run / "metrics.jsonl").exists())
            slurm.run("bash", "-c", sites["slurm"]["leave"])
            output, _ = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 0, output
    assert [(one.site, one.ended) for one in read_allocations(run)] == [("slurm", "preempted"), ("here", "done")]
    assert slurm.run("squeue", "-h", "-o", "%i").stdout.split() == [other]
    assert slurm.show(other)["JobState"] == "RUNNING"
    slurm.run("scancel", other)
