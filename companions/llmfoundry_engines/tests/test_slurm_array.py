"""The batch script `scripts/slurm/prepare.sbatch`, on a real Slurm of four nodes, which is all on this machine."""

import os
import sys
from pathlib import Path

import pytest

from llmfoundry_lite.companions import search_path
from llmfoundry_lite.prepare.prepare import prepare
from tests.helpers.data import make_documents
from tests.helpers.launch import ROOT
from tests.helpers.preparing import SEQ_LEN, assert_same_result, request, write_jsonl
from tests.helpers.slurm import Slurm, needs_slurm

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess, needs_slurm]
SCRIPT = str(ROOT / "scripts/slurm/prepare.sbatch")


def test_an_array_of_jobs_with_a_killed_task_gives_the_bytes_of_one_machine(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", search_path()["PYTHONPATH"])
    source = write_jsonl(tmp_path / "in.jsonl", make_documents(6000))
    wanted = request(source, "train:400", size_limit_bytes=100_000)
    prepare(wanted, tmp_path / "expected", num_workers=1)
    out = tmp_path / "out"
    options = ["--out", out, "--tokenizer", "train:400", "--max-seq-len", SEQ_LEN, "--size-limit", 100_000]
    arguments = [SCRIPT, str(source), *map(str, options)]
    with Slurm(tmp_path / "slurm") as slurm:
        # A task of three, without the number of all: SLURM does not tell it.
        alone = slurm.submit("--array=2", "--cpus-per-task=1", *arguments, cwd=tmp_path)
        slurm.wait_for_end(f"{alone}_2", "FAILED")
        (output,) = tmp_path.glob(f"*-{alone}-2.out")
        assert "set PARTS to the number of all parts, or submit --array=1-N" in output.read_text()

        # The whole array. One task is killed while it works, and runs again.
        array = slurm.submit("--array=1-3", "--cpus-per-task=1", *arguments, cwd=tmp_path)
        slurm.wait(lambda: slurm.show(f"{array}_2")["JobState"] == "RUNNING")
        slurm.run("scontrol", "requeue", f"{array}_2")
        slurm.release(f"{array}_2")
        joining = slurm.submit(f"--dependency=afterok:{array}", "--cpus-per-task=1", SCRIPT, "join", out, cwd=tmp_path)
        slurm.wait_for_end(joining, "COMPLETED")
    assert_same_result(out, tmp_path / "expected")
