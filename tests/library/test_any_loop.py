"""The loops of docs/any-loop.md: stopped, carried on by other ranks, and beside a run that never stopped."""

import re
import subprocess
import sys

import pytest

from llmfoundry_lite.companions import search_path
from tests.helpers.launch import ROOT, free_port
from tests.helpers.present import needs

pytestmark = [pytest.mark.multiprocess, pytest.mark.long]

PAGE = (ROOT / "docs/any-loop.md").read_text()
PLAIN, TITAN = re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)
STORAGE = "from llmfoundry_formats.dcp import PortableStorageReader, PortableStorageWriter\n"
LOAD, SAVE = (f"dcp.{verb}(state, checkpoint_id=SAVED)" for verb in ("load", "save"))
PORTABLE = STORAGE + TITAN.replace('"titan"', '"titan/ba0"').replace(
    LOAD, "dcp.load(state, storage_reader=PortableStorageReader(SAVED))"
).replace(SAVE, "dcp.save(state, storage_writer=PortableStorageWriter(SAVED, overwrite=True))")
assert LOAD in TITAN and SAVE in TITAN


def losses(folder, num_ranks, *arguments) -> list[tuple[int, float]]:
    """(batch, loss) of each line."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--master-port", str(free_port())]
    command = [*torchrun, "--nproc-per-node", str(num_ranks), "loop.py", *map(str, arguments)]
    environment = {**search_path({"PYTHONPATH": str(ROOT)}), "OMP_NUM_THREADS": "1", "PATH": ""}
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    lines = [line.split() for line in result.stdout.splitlines()]
    return [(int(batch), float(loss)) for batch, loss in lines]


@pytest.mark.parametrize(
    ("program", "launches"),
    [
        (PLAIN, [(2, 20), (3, 40)]),
        (TITAN, [(2, 20), (4, 40, 2), (3, 60)]),
        pytest.param(PORTABLE, [(3, 10), (2, 35)], marks=needs("llmfoundry_formats")),
    ],
    ids=["plain torch", "torchtitan", "portable format"],
)
def test_a_loop_carries_on_with_other_ranks_as_if_it_had_never_stopped(world, tmp_path, program, launches):
    whole, moved = tmp_path / "whole", tmp_path / "moved"
    for folder in (whole, moved):
        folder.mkdir()
        (folder / "loop.py").write_text(program)
        (folder / "data").symlink_to(world / "data")
    expected = losses(whole, 1, launches[-1][1])
    found = [line for num_ranks, *arguments in launches for line in losses(moved, num_ranks, *arguments)]
    assert [batch for batch, _ in found] == list(range(1, launches[-1][1] + 1))
    assert [loss for _, loss in found] == pytest.approx([loss for _, loss in expected], abs=1e-4)
    assert found[-1][1] < found[0][1] - 0.5
