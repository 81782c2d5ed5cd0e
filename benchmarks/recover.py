"""Time and batches lost to a fault: ranks and launchers are killed and frozen at random while a run trains.

python -m benchmarks recover --num-faults 50 --peer-faults 6 --out results

For each fault: seconds to the next finished batch, and batches that were trained again. In the end every loss, gradient
norm and digest is compared with a run that nobody disturbed. `torchrun --max-restarts` has the same run beside it.
"""

import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from benchmarks import last_lines, wait_for
from llmfoundry_lite.errors import DataError
from llmfoundry_machines.bench import frame
from llmfoundry_machines.bench.steps import SHAPES, write_run

KILL_RANK, FREEZE_RANK = "a rank killed", "a rank frozen"
KILL_LAUNCHER, FREEZE_LAUNCHER = "the launcher killed", "the launcher frozen"
SHARES = {KILL_RANK: 0.5, FREEZE_RANK: 0.25, KILL_LAUNCHER: 0.15, FREEZE_LAUNCHER: 0.1}
"""Share of the faults. torchrun's agent is left alone: its ranks would live on when it is killed."""
FROZEN_SECONDS = 15.0
"""Seconds after which the launcher goes on. They are longer than the silence by which a rank counts as frozen."""
BATCHES_BETWEEN = (3, 10)
COLLECTIVE_SECONDS = 30
"""`dist_timeout` of both sides; torchrun learns of a frozen rank by it."""
DEADLINE_SECONDS = 300.0
MAX_BATCHES = 20_000
"""More than are trained: a run ends soon after its last fault."""
COMPARED = ("loss/train/total", "grad_norm", "data/digest")
PEER_ENVIRONMENT = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Without it torchrun's restarted ranks meet the addresses of those before them. Ours has no use for it."""


class Fault(NamedTuple):
    kind: str
    seconds: float
    """From the signal to the record of the next finished batch."""
    since_noticed: float | None
    """The same from the launcher's word that it starts again, where it says so."""
    batches: int
    """Had been finished, and were trained again."""


@dataclass
class Side:
    """A launcher, and where its ranks are."""

    name: str
    command: Callable[[Path, int], list[str]]
    """Arguments: the YAML and the most restarts."""
    ranks: Callable[[psutil.Process], list[psutil.Process]]
    """Number of the launcher's process."""
    kinds: tuple[str, ...]
    word: str | None = None
    """In its output: it has noticed, and starts again."""


OURS = Side(
    "llmfoundry-lite train",
    lambda yaml, restarts: [
        *(sys.executable, "-m", "llmfoundry_lite", "train", "-n", "2", "--max-restarts", str(restarts), str(yaml))
    ],
    lambda launcher: [rank for server in launcher.children() for rank in server.children()],
    (KILL_RANK, FREEZE_RANK, KILL_LAUNCHER, FREEZE_LAUNCHER),
    word="; restart ",
)
TORCHRUN = Side(
    "torchrun",
    lambda yaml, restarts: [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", str(restarts)),
        *("-m", "llmfoundry_lite.train", str(yaml)),
    ],
    lambda launcher: launcher.children(),
    (KILL_RANK, FREEZE_RANK),
)


class Log:
    """A run's metrics.jsonl as it grows."""

    def __init__(self, path: Path):
        self.path = path
        self.records: list[dict[str, Any]] = []
        self._offset = 0

    def read(self) -> list[dict[str, Any]]:
        """Return all records so far. A line that a killed process left unfinished waits for its successor."""
        if self.path.exists():
            with self.path.open() as file:
                file.seek(self._offset)
                while (line := file.readline()).endswith("\n"):
                    self._offset = file.tell()
                    self.records.append(json.loads(line))
        return self.records

    def last_of_each_batch(self) -> dict[int, dict[str, Any]]:
        return {record["batch"]: record for record in self.read()}


class Disturbed:
    """A run under one launcher, and its faults."""

    def __init__(self, side: Side, folder: Path, settings: dict[str, Any], num_faults: int, seed: int):
        self.side = side
        self.num_faults = num_faults
        self.chance = random.Random(seed)
        folder.mkdir()
        yaml = write_run(folder, settings, "fp32")
        options = ("save_interval=auto", "save_num_checkpoints_to_keep=2", f"dist_timeout={COLLECTIVE_SECONDS}")
        self.command = [*side.command(yaml, num_faults + 1), *options, "autoresume=true"]
        self.log = Log(folder / "run/metrics.jsonl")
        self.output = folder / "output.txt"
        self.faults: list[Fault] = []
        """That it has come back from."""

    def run(self, note: Callable[[str], None]) -> None:
        """Train until the last fault is over; without faults, to the end. Raises DataError if the run stays away."""
        faults = self.faults
        self.process = self.launch()
        try:
            for number in range(self.num_faults):
                self.wait(self.chance.randint(*BATCHES_BETWEEN))
                time.sleep(self.chance.random() * self.seconds_a_batch())  # anywhere in a batch
                shares = [SHARES[kind] for kind in self.side.kinds]
                kind = self.side.kinds[number] if number < len(self.side.kinds) else None
                faults.append(self.disturb(kind or self.chance.choices(self.side.kinds, shares)[0]))
                note(f"{self.side.name}: {number + 1}/{self.num_faults} {faults[-1].kind}: {faults[-1].seconds:.1f} s")
            if self.num_faults:
                self.wait(BATCHES_BETWEEN[1])
            elif code := self.process.wait(DEADLINE_SECONDS * 10):
                raise DataError(f"bench recover: {self.side.name} ended with {code}: {self.last_words()}")
        finally:
            kill_with_children(self.process)

    def launch(self) -> subprocess.Popen[bytes]:
        with self.output.open("ab") as output:
            return subprocess.Popen(self.command, stdout=output, stderr=output, env=os.environ | PEER_ENVIRONMENT)

    def disturb(self, kind: str) -> Fault:
        before = self.log.read()[-1]
        seen, said = len(self.log.records), self.words()
        started = time.monotonic()
        if kind == FREEZE_LAUNCHER:
            self.process.send_signal(signal.SIGSTOP)
        elif kind == KILL_LAUNCHER:
            self.process.kill()
            self.process.wait()
            self.process = self.launch()  # as a scheduler would
        else:
            rank = self.chance.choice(self.side.ranks(psutil.Process(self.process.pid)))
            rank.send_signal(signal.SIGKILL if kind == KILL_RANK else signal.SIGSTOP)
        noticed: list[float] = []

        def next_batch() -> dict[str, Any] | None:
            if not noticed and self.words() > said:
                noticed.append(time.monotonic())
            new = [one for one in self.log.read()[seen:] if kind == FREEZE_LAUNCHER or one["launch"] > before["launch"]]
            return new[0] if new else None

        first = self.wait_for(next_batch)
        now = time.monotonic()
        finished = [record["batch"] for record in self.log.records if record["launch"] <= before["launch"]][-1]
        if kind == FREEZE_LAUNCHER:
            finished = before["batch"]
            time.sleep(FROZEN_SECONDS)
            self.process.send_signal(signal.SIGCONT)
        return Fault(kind, now - started, now - noticed[0] if noticed else None, finished - first["batch"] + 1)

    def words(self) -> int:
        """Count how often the launcher has printed that it starts again."""
        return self.output.read_text(errors="replace").count(self.side.word) if self.side.word else 0

    def wait(self, num_batches: int) -> None:
        have = len(self.log.read())
        self.wait_for(lambda: len(self.log.read()) >= have + num_batches)

    def wait_for(self, is_there: Callable[[], Any]) -> Any:
        def lost() -> DataError:
            return DataError(f"bench recover: {self.side.name} did not come back: {self.last_words()}")

        return wait_for(is_there, DEADLINE_SECONDS, lost, lambda: self.process.poll() is not None)

    def seconds_a_batch(self) -> float:
        return statistics.median(record["time/batch_seconds"] for record in self.log.read()[-20:])

    def last_words(self) -> str:
        return last_lines(self.output, 3, " | ")


def kill_with_children(process: subprocess.Popen[bytes]) -> None:
    """Kill a launcher and its ranks, which outlive the launchers of composer and torchrun."""
    family = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    process.kill()
    for one in family:
        with suppress(psutil.NoSuchProcess):
            one.kill()
    process.wait()
    psutil.wait_procs(family, DEADLINE_SECONDS)


def run(
    shape: str = "10m",
    seq_len: int = 128,
    batch_size: int = 8,
    num_faults: int = 50,
    peer_faults: int = 6,
    seed: int = 17,
    out: Path | None = None,
) -> dict[str, Any]:
    """Disturb both sides, print and write the table, return the report.

    Raises ConfigError for an unknown shape, and, after the report, DataError for a run of ours that does not come back.
    """
    frame.check_names("--shape", [shape], SHAPES)
    console = frame.open_console()
    conditions = frame.describe_conditions()
    settings = {"shape": shape, "seq_len": seq_len, "batch_size": batch_size, "num_steps": MAX_BATCHES}
    found: dict[str, list[Fault]] = {}
    differing: dict[str, int] = {}
    lost: dict[str, DataError] = {}
    with tempfile.TemporaryDirectory() as folder:
        for side, count in ((OURS, num_faults), (TORCHRUN, peer_faults)):
            if not count:
                continue
            runs = [
                Disturbed(side, Path(folder, f"{side.name} {name}"), settings, faults, seed)
                for name, faults in (("disturbed", count), ("left alone", 0))
            ]
            found[side.name] = runs[0].faults
            try:
                runs[0].run(lambda text: console.print(text, highlight=False))
                runs[1].command.append(f"stop_after={max(runs[0].log.last_of_each_batch())}ba")
                runs[1].run(lambda text: None)
                differing[side.name] = count_differing(*(run.log.last_of_each_batch() for run in runs))
            except DataError as error:
                console.print(str(error), highlight=False)
                lost[side.name] = error
    command = frame.format_command(
        "python -m benchmarks recover", shape=shape, num_faults=num_faults, peer_faults=peer_faults
    )
    report = tell_faults(conditions | settings, found, differing, list(lost), command, out)
    if OURS.name in lost:
        raise lost[OURS.name]
    return report


def count_differing(disturbed: dict[int, dict[str, Any]], alone: dict[int, dict[str, Any]]) -> int:
    """Count batches whose loss, gradient norm or digest differs in a bit, and batches that one run lacks."""
    batches = disturbed.keys() | alone.keys()
    return sum(
        any(disturbed.get(batch, {}).get(key) != alone.get(batch, {}).get(key) for key in COMPARED) for batch in batches
    )


def tell_faults(
    report: dict[str, Any],
    found: dict[str, list[Fault]],
    differing: dict[str, int],
    lost: list[str],
    command: str,
    out: Path | None,
) -> dict[str, Any]:
    rows, records = [], []
    for name, faults in found.items():
        for kind in SHARES:
            if not (some := [fault for fault in faults if fault.kind == kind]):
                continue
            seconds, batches = frame.spread(f.seconds for f in some), frame.spread(f.batches for f in some)
            again = f"{batches.median:g} ({batches.least:g} to {batches.most:g})"
            since = [f.since_noticed for f in some if f.since_noticed is not None]
            rows.append((name, kind, str(len(some)), str(seconds), str(frame.spread(since)) if since else "", again))
            records += [{"side": name, **fault._asdict()} for fault in some]
    table = frame.measured_table(
        "What a fault costs",
        ("launcher", "fault", "times", "s to the next finished batch", "since it was noticed", "batches trained again"),
        rows,
        num_keys=2,
    )
    notes = [f"{name}: {count} batches differ from the run left alone" for name, count in differing.items()]
    notes += [f"{name}: did not come back from fault {len(found[name]) + 1}" for name in lost]
    notes.append(
        f"a frozen rank: noticed after 10 to 12 s here, by torchrun after `dist_timeout`, {COLLECTIVE_SECONDS} s"
    )
    notes.append("a killed launcher: the same command is given again at once, and imports anew")
    notes.append(f"a frozen launcher: its ranks train on; it goes on after {FROZEN_SECONDS:g} s")
    report |= {"faults": records, "differing": differing, "lost": lost}
    heading, asked = "What a fault costs", ("shape", "seq_len")
    frame.tell(report, table, notes, name="recover", heading=heading, command=command, asked=asked, out=out)
    return report
