"""Coordinators and islands as processes: the real commands, each with its output in a file.

`running` is the usual entry: it starts a coordinator and yields an `Islands`, which launches islands of one run.
`Launched` is one process. Everything is killed when the block of `running` ends.
"""

import json
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks import ROOT, Log, kill_with_children, last_lines, wait_for, with_root
from benchmarks.switch.workshop import Cluster, Workshop, environment_for
from llmfoundry_islands.coordination.messages import TOKEN
from llmfoundry_lite.errors import UserError

SECRET = secrets.token_hex(32)
"""Token of all coordinators and islands that this process starts."""
DEADLINE_SECONDS = 300.0
"""Longest wait for any one thing. On a busy machine, the imports of a launch take half a minute."""
SILENCE_SECONDS = 4.0
"""The coordinator leaves an island out that has been silent for this long."""


class Launched:
    """A running command, with its output in a file. `kill` ends it together with all processes that it has started."""

    dies = False
    """Whether it is expected to die, so that its end is not an error. Set by the caller."""

    def __init__(self, command: Sequence[str], folder: Path, environment: dict[str, str], output: Path):
        self.command, self.output = command, output
        with output.open("ab") as file:
            self.process = subprocess.Popen(
                command, cwd=folder, env=environment, stdout=file, stderr=file, start_new_session=True
            )

    @property
    def is_over(self) -> bool:
        """Whether the command has ended."""
        return self.process.poll() is not None

    def kill(self) -> None:
        """Kill the command and all its child processes."""
        kill_with_children(self.process)

    def check(self) -> None:
        """Wait for the end of the command. Raises UserError with its last lines if it fails."""
        exit_code = self.process.wait(DEADLINE_SECONDS * 4)
        if exit_code != 0:
            raise UserError(f"{' '.join(self.command)}: exit code {exit_code}\n{last_lines(self.output)}")


class Islands:
    """The launches of one run, and where they write their records. Without a coordinator, a launch trains alone."""

    def __init__(self, workshop: Workshop, run: str, address: str = "", **settings: Any):
        """`settings` are keys of the configuration with `__` for the dot. Without `address`, launches train alone."""
        self.workshop, self.run, self.address = workshop, run, address
        self.settings = [f"{key.replace('__', '.')}={json.dumps(value)}" for key, value in settings.items()]
        self.launched: list[Launched] = []

    def start(self, cluster: Cluster, *arguments: str, wrong: str = "") -> Launched:
        """Launch this run on a cluster, as an island with the cluster's letter as its name.

        `wrong` names a mistake of `wrong.py`. The launcher is torchrun, because Composer's launcher would import
        Composer once more.
        """
        program = ["-m", "benchmarks.islands.wrong", wrong] if wrong else [str(ROOT / "scripts" / "train.py")]
        island_name = cluster.letter
        command = [cluster.python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
        command += [str(cluster.num_ranks), *program, "run.yaml", f"{island_name}.yaml", f"run_name={self.run}"]

        # Several launches of one run share its checkpoints, but have run folders of their own.
        if self.address:
            command += [f"islands.coordinator={self.address}", f"islands.name={island_name}"]
            command += [f"save_folder={self.workshop.folder / 'saves' / self.run}"]

        environment = {**environment_for(cluster), **cluster.environment, TOKEN: SECRET}
        output = self.workshop.folder / f"{self.run}-{island_name}.txt"
        launched = Launched([*command, *self.settings, *arguments], self.workshop.folder, environment, output)
        self.launched.append(launched)
        return launched

    def log(self, cluster: Cluster) -> Log:
        """Return the metrics log of this run on a cluster. Several islands have one each, in folders of their own."""
        folder = self.workshop.run_folder(self.run)
        return Log((folder / cluster.letter if self.address else folder) / "metrics.jsonl")

    def wait_for(self, is_there: Callable[[], bool], what: str) -> None:
        """Wait until `is_there` is true. Raises UserError after DEADLINE_SECONDS, or when a launch fails.

        `what` says in the error what was waited for.
        """

        def failed_launches() -> list[Launched]:
            """Return the launches that have ended although they should not have."""
            expected_codes = (None, 0, -signal.SIGKILL)
            return [
                launch for launch in self.launched if launch.process.poll() not in expected_codes and not launch.dies
            ]

        def lost() -> UserError:
            """Build the error, with the last lines of those launches, or of all if none has ended."""
            words = "\n".join(last_lines(launch.output) for launch in failed_launches() or self.launched)
            return UserError(f"bench islands: {self.run}: waited in vain for {what}\n{words}")

        wait_for(is_there, DEADLINE_SECONDS, lost, failed_launches)

    def end(self) -> None:
        """Kill all launches that are still running."""
        for launch in self.launched:
            if not launch.is_over:
                launch.kill()


@contextmanager
def coordinated(
    workshop: Workshop, run: str, num_islands: int, links: Path | None = None, silence: float = SILENCE_SECONDS
) -> Iterator[str]:
    """Start a coordinator for `num_islands`, and yield its address. It is killed when the block ends.

    With `links`, the islands' connections to each other go through proxies that follow this file, see `links.py`.
    `silence` is in seconds.
    """
    if links is None:
        command = ["llmfoundry_lite", "islands", "coordinate", "--listen", "127.0.0.1:0"]
        command += ["--islands", str(num_islands), "--silence", str(silence)]
    else:
        command = ["benchmarks.islands.links", "0", str(num_islands), str(silence), str(links)]
    output = workshop.folder / f"{run}-coordinator.txt"
    environment = with_root(**{TOKEN: SECRET})
    launched = Launched([sys.executable, "-m", *command], workshop.folder, environment, output)
    try:

        def address() -> str:
            """Return the address that the coordinator has printed, or an empty text if it has not done so yet."""
            return output.read_text().partition("coordinating at ")[2].partition(",")[0]

        def lost() -> UserError:
            """Build the error for a coordinator that does not start."""
            return UserError(f"bench islands: the coordinator does not come: {last_lines(output)}")

        yield wait_for(address, DEADLINE_SECONDS, lost, lambda: launched.is_over)
    finally:
        launched.kill()


@contextmanager
def running(
    workshop: Workshop, run: str, num_islands: int, links: Path | None = None, **settings: Any
) -> Iterator[Islands]:
    """Start a coordinator, and yield the Islands of a run. All their processes are killed when the block ends.

    `settings` are those of `Islands`, `links` that of `coordinated`.
    """
    with coordinated(workshop, run, num_islands, links) as address:
        islands = Islands(workshop, run, address, **settings)
        try:
            yield islands
        finally:
            islands.end()


def last_batch(log: Log) -> int:
    """Return the batch of the newest record, or 0 if there is none yet."""
    records = log.read()
    return records[-1]["batch"] if records else 0
