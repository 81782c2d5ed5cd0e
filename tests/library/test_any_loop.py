"""The loops of docs/any-loop.md: stopped, carried on by other ranks, and beside a run that never stopped."""

import re
import subprocess
import sys
from typing import NamedTuple

import pytest

import llmfoundry_lite as lf
from llmfoundry_lite.companions import search_path
from tests.helpers.launch import ROOT, free_port
from tests.helpers.present import needs

pytestmark = [pytest.mark.multiprocess, pytest.mark.long]

# ------------------------------------------------------------------------------------------------- the programs

PAGE = (ROOT / "docs/any-loop.md").read_text()
PLAIN_PROGRAM, TITAN_PROGRAM = re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)
"""The page's two blocks of Python."""


def replace_once(program: str, old: str, new: str) -> str:
    assert program.count(old) == 1, f"{old} is expected once in the program"
    return program.replace(old, new)


def save_in_portable_format(program: str) -> str:
    """Return torchtitan's loop as docs/other-tools.md has it: with the storage reader and writer of this package."""
    program = replace_once(
        program, 'SAVED, last_batch, shared_by = "titan"', 'SAVED, last_batch, shared_by = "titan/ba0"'
    )
    program = replace_once(
        program,
        "dcp.load(state, checkpoint_id=SAVED)",
        "dcp.load(state, storage_reader=PortableStorageReader(SAVED))",
    )
    program = replace_once(
        program,
        "dcp.save(state, checkpoint_id=SAVED)",
        "dcp.save(state, storage_writer=PortableStorageWriter(SAVED, overwrite=True))",
    )
    return "from llmfoundry_formats.dcp import PortableStorageReader, PortableStorageWriter\n" + program


PORTABLE_PROGRAM = save_in_portable_format(TITAN_PROGRAM)


# ------------------------------------------------------------------------------------------------- their launches


class Launch(NamedTuple):
    """A launch of a loop, which stops after `last_batch`."""

    num_ranks: int
    last_batch: int
    ranks_per_sample: int = 1
    """Ranks that share their samples; only torchtitan's loop has such."""


class Line(NamedTuple):
    """What the loop prints after each batch."""

    batch: int
    loss: float


def train(folder, launch: Launch) -> list[Line]:
    """Run `folder`/loop.py with torchrun, and return what it prints."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--master-port", str(free_port())]
    command = [*torchrun, "--nproc-per-node", str(launch.num_ranks), "loop.py", str(launch.last_batch)]
    if launch.ranks_per_sample > 1:
        command.append(str(launch.ranks_per_sample))
    environment = {**search_path({"PYTHONPATH": str(ROOT)}), "OMP_NUM_THREADS": "1", "PATH": ""}
    process = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stderr

    lines = []
    for text in process.stdout.splitlines():
        batch, loss = text.split()
        lines.append(Line(int(batch), float(loss)))
    return lines


@pytest.fixture
def make_folder(world, tmp_path):
    """A function: name, program -> a new folder with the data and with the program as loop.py."""

    def make(name, program):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "loop.py").write_text(program)
        (folder / "data").symlink_to(world / "data")
        return folder

    return make


@pytest.fixture
def num_batches_of_epoch(world):
    """The number of batches of an epoch, as the page's loops open the data."""
    loader = lf.open_dataset(
        str(world / "data/mine"), split="train", shuffle=True, global_batch_size=12, max_seq_len=32
    )
    return sum(1 for _ in loader)


@pytest.mark.parametrize(
    ("program", "launches"),
    [
        pytest.param(PLAIN_PROGRAM, [Launch(2, 17), Launch(3, 40)], id="plain torch"),
        pytest.param(TITAN_PROGRAM, [Launch(2, 17), Launch(4, 36, ranks_per_sample=2), Launch(3, 60)], id="torchtitan"),
        pytest.param(
            PORTABLE_PROGRAM,
            [Launch(3, 10), Launch(2, 35)],
            marks=needs("llmfoundry_formats"),
            id="portable format",
        ),
    ],
)
def test_a_loop_carries_on_with_other_ranks_as_if_it_had_never_stopped(
    make_folder, num_batches_of_epoch, program, launches
):
    for launch in launches[:-1]:
        is_end_of_epoch = launch.last_batch % num_batches_of_epoch == 0
        assert not is_end_of_epoch, "a stop at the end of an epoch does not need the position within it"

    last_batch = launches[-1].last_batch
    uninterrupted = train(make_folder("uninterrupted", program), Launch(1, last_batch))

    folder = make_folder("resumed", program)
    resumed = []
    for launch in launches:
        resumed += train(folder, launch)

    assert [line.batch for line in resumed] == list(range(1, last_batch + 1))
    assert [line.loss for line in resumed] == pytest.approx([line.loss for line in uninterrupted], abs=1e-4)
    assert resumed[-1].loss < resumed[0].loss - 0.5, "the loop learns"
