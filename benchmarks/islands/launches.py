"""Coordinators and islands as processes: the real commands, each with its output in a file."""

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
DEADLINE_SECONDS = 300.0
"""For the next thing to happen; a launch that imports on a busy machine takes half a minute."""
SILENCE_SECONDS = 4.0


class Launched:
    """A command that runs, until it ends or is killed with all that it has started."""

    dies = False
    """True: it is expected to die."""

    def __init__(self, command: Sequence[str], folder: Path, environment: dict[str, str], output: Path):
        self.command, self.output = command, output
        with output.open("ab") as file:
            self.process = subprocess.Popen(
                command, cwd=folder, env=environment, stdout=file, stderr=file, start_new_session=True
            )

    @property
    def is_over(self) -> bool:
        return self.process.poll() is not None

    def kill(self) -> None:
        kill_with_children(self.process)

    def check(self) -> None:
        """Raises UserError with its last words unless it ends, and ends well."""
        code = self.process.wait(DEADLINE_SECONDS * 4)
        if code != 0:
            raise UserError(f"{' '.join(self.command)}: exit code {code}\n{last_lines(self.output)}")


class Islands:
    """Launches of one run, and where they leave their records."""

    def __init__(self, shop: Workshop, run: str, address: str = "", **settings: Any):
        """`settings`: keys of the configuration, with `__` for the dot. Without `address`, launches train alone."""
        self.shop, self.run, self.address = shop, run, address
        self.settings = [f"{key.replace('__', '.')}={json.dumps(value)}" for key, value in settings.items()]
        self.launched: list[Launched] = []

    def start(self, cluster: Cluster, *arguments: str, wrong: str = "") -> Launched:
        """By torchrun: Composer's launcher imports Composer once more, for nothing. `wrong`: see `wrong`."""
        entry = ["-m", "benchmarks.islands.wrong", wrong] if wrong else [str(ROOT / "scripts" / "train.py")]
        name = cluster.letter
        command = [cluster.python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
        command += [str(cluster.num_ranks), *entry, "run.yaml", f"{name}.yaml", f"run_name={self.run}"]
        if self.address:
            command += [f"islands.coordinator={self.address}", f"islands.name={name}"]
            command += [f"save_folder={self.shop.folder / 'saves' / self.run}"]
        environment = {**environment_for(cluster), **cluster.environment, TOKEN: SECRET}
        output = self.shop.folder / f"{self.run}-{name}.txt"
        launched = Launched([*command, *self.settings, *arguments], self.shop.folder, environment, output)
        self.launched.append(launched)
        return launched

    def log(self, cluster: Cluster) -> Log:
        folder = self.shop.run_folder(self.run)
        return Log((folder / cluster.letter if self.address else folder) / "metrics.jsonl")

    def wait_for(self, is_there: Callable[[], bool], what: str) -> None:
        """Raises UserError when a launch ends before, or nothing comes."""

        def over() -> list[Launched]:
            ended = (None, 0, -signal.SIGKILL)
            return [one for one in self.launched if one.process.poll() not in ended and not one.dies]

        def lost() -> UserError:
            words = "\n".join(last_lines(one.output) for one in over() or self.launched)
            return UserError(f"bench islands: {self.run}: waited in vain for {what}\n{words}")

        wait_for(is_there, DEADLINE_SECONDS, lost, over)

    def end(self) -> None:
        for one in self.launched:
            if not one.is_over:
                one.kill()


@contextmanager
def coordinated(
    shop: Workshop, run: str, num_islands: int, links: Path | None = None, silence: float = SILENCE_SECONDS
) -> Iterator[str]:
    """A coordinator's address while it runs; with `links`, connections between islands go as that file says."""
    if links is None:
        command = ["llmfoundry_lite", "islands", "coordinate", "--listen", "127.0.0.1:0"]
        command += ["--islands", str(num_islands), "--silence", str(silence)]
    else:
        command = ["benchmarks.islands.links", "0", str(num_islands), str(silence), str(links)]
    output = shop.folder / f"{run}-coordinator.txt"
    environment = with_root(**{TOKEN: SECRET})
    launched = Launched([sys.executable, "-m", *command], shop.folder, environment, output)
    try:

        def address() -> str:
            return output.read_text().partition("coordinating at ")[2].partition(",")[0]

        def lost() -> UserError:
            return UserError(f"bench islands: the coordinator does not come: {last_lines(output)}")

        yield wait_for(address, DEADLINE_SECONDS, lost, lambda: launched.is_over)
    finally:
        launched.kill()


@contextmanager
def running(
    shop: Workshop, run: str, num_islands: int, links: Path | None = None, **settings: Any
) -> Iterator[Islands]:
    """Islands of one run, with their coordinator; nothing of them is left afterwards."""
    with coordinated(shop, run, num_islands, links) as address:
        islands = Islands(shop, run, address, **settings)
        try:
            yield islands
        finally:
            islands.end()


def last_batch(log: Log) -> int:
    records = log.read()
    return records[-1]["batch"] if records else 0
