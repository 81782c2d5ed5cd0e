"""Random faults of ranks, islands, links, the leader and the coordinator, while three islands train one run.

    python -m benchmarks islands-faults --out results                   about 9 minutes on two busy cores
    python -m benchmarks islands-faults --way exact --out results       with exact sums, to the bits of a single world
    python -m benchmarks islands-faults --way local --out results       with local steps, every 10
    python -m benchmarks islands-faults --way streaming --out results   in fragments that are sent while islands compute

Three islands train a tiny model. Each owns a part of the sum of gradients. Gradients are sent during the backward pass,
over links so slow that they take as long as the computation; so faults hit exchanges that overlap with it. Ranks are
real, as the launcher starts them. An island that has ended is launched again, as a scheduler would, and joins in the
middle of the run.

For each fault two times are measured: until two more batches are finished, and until those launches have left that have
to. Neither may be longer than DEADLINE_SECONDS. In the end every batch must be there once, with the data of a single
world (a launch without islands). The loss is compared with the band of three single worlds; with exact sums it must
have their bits.

With local steps, no single world trains the same. Instead, each outer step must account for every row of its round: as
trained, or as lost with an island by name. Weights are compared at each outer step. `streaming` trains lost rows again.

How this file is ordered: kinds of faults, `Keeper` (one island), `Ways` (connections to the coordinator), `Scene`
(everything together, and `disturb`, which causes a fault), then `run`, the checks, and the tables. `links.py` has links
that can be cut, frozen, or dead in one direction.
"""

import asyncio
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from benchmarks import Log, last_lines, wait_for, with_root
from benchmarks.islands.launches import SECRET
from benchmarks.islands.links import Links, set_links
from benchmarks.switch.band import judge, read_series
from benchmarks.switch.workshop import NO_GPU
from llmfoundry_islands.coordination.messages import TOKEN
from llmfoundry_lite.errors import EXIT_DONE, EXIT_FAILURE, EXIT_PREEMPTED, EXIT_USER, UserError
from llmfoundry_lite.ranks.lean_imports import HEAVY
from llmfoundry_lite.ranks.rank import rendezvous
from llmfoundry_lite.tables import Table
from llmfoundry_machines.bench.frame import describe_conditions, measured_table, open_console, spread, tell
from llmfoundry_machines.bench.steps import write_run
from llmfoundry_ops.launcher import World
from llmfoundry_ops.server import open_channel

SIZES = {"a": 2, "b": 1, "c": 1}
"""Ranks of each island."""
WORLDS = (1, 2, 4)
"""Ranks of the single worlds."""
SETTINGS = {"shape": "tiny", "seq_len": 64, "batch_size": 8, "num_steps": 6000}
SILENCE_SECONDS = 3.0
"""`islands coordinate --silence`. A rank leaves a silent coordinator after 4 s, see `coordination.member`."""
DEADLINE_SECONDS = 10.0
"""Limit for batches to go on where an island and the coordinator are left, and for those to leave that have to."""
LAUNCH_SECONDS = 120.0
"""Limit where all islands are launched again, on two busy cores. Longer waits end the benchmark."""
FROZEN_SECONDS = 6.0
"""Seconds that a rank is frozen: long enough that the others have gone on without it when it wakes up."""
LINK_SECONDS = (0.3, 1.0, 4.0)
"""Seconds until links between islands are repaired, one of which is drawn."""
LINK_BITS = 40e6
"""Bits per second of links between islands that are in order."""
LOCAL = ["islands.sync.every=10ba", "islands.check_weights_every=1"]
STREAMING = [f"islands.sync.{setting}" for setting in ("fragments=2", "delay=3ba", "lost_rows=retrain")]
WAYS = {
    "gradients": ("", []),
    "exact": (", exact sums", ["exact_sums=true"]),
    "local": (", local steps", LOCAL),
    "streaming": (", local steps in fragments", LOCAL + STREAMING),
}
"""`--way` -> words of the heading, and settings of the run."""
MAX_BANDS = 2.0
"""Largest deviation of the loss from the single worlds', in bands: rows are divided in many more ways than theirs."""
SHARE_WHOLE = 0.8
"""Share of the faults that wait until all islands train. The others come while one may still be starting."""
SAVE_EVERY = 10
"""Batches between saves."""

KILL, KILL_ISLAND, FREEZE = "a rank killed", "an island killed", "a rank frozen"
KILL_LEADER, KILL_SAVING = "the leader killed", "the leader killed as it saves"
FREEZE_LEADER = "the leader frozen"
KILL_COORDINATOR, FREEZE_COORDINATOR = "the coordinator killed", "the coordinator frozen"
ONE_WAY, ALL_WAYS = "an island's way to the coordinator half-open", "every way to the coordinator half-open"
CUT, FREEZE_LINKS, HALF_LINKS, SLOW_LINKS = "links cut", "links frozen", "links half-open", "links slowed to 4 Mbit/s"
SHARES = {
    KILL: 6,
    KILL_ISLAND: 5,
    FREEZE: 5,
    KILL_LEADER: 4,
    KILL_SAVING: 3,
    FREEZE_LEADER: 4,
    KILL_COORDINATOR: 4,
    FREEZE_COORDINATOR: 4,
    ONE_WAY: 4,
    ALL_WAYS: 2,
    CUT: 3,
    FREEZE_LINKS: 2,
    HALF_LINKS: 2,
    SLOW_LINKS: 2,
}
"""Number of faults of each kind in 50."""
# Faults of links between islands -> the state of the links, see links.py.
BETWEEN_ISLANDS = {CUT: "cut", FREEZE_LINKS: "frozen", HALF_LINKS: "half", SLOW_LINKS: "open"}
# Faults after which no island can go on, because none has a coordinator.
WITHOUT_COORDINATOR = (KILL_COORDINATOR, FREEZE_COORDINATOR, ALL_WAYS)


class Fault(NamedTuple):
    """Effects of one fault, in seconds from its beginning."""

    kind: str
    target: str
    """Name of the island that was hit. Empty if it was the coordinator or the links between islands."""
    had_to_leave: float | None
    """Until all launches had left that the fault cut off from the coordinator. None: it cut off none."""
    seconds: float
    """Until two more batches were finished by any island."""
    others_left: bool
    """Whether an island and the coordinator could go on without a new launch."""

    @property
    def hung(self) -> float:
        """Seconds that anything waited longer than it should have to. A new launch does not count as waiting."""
        return max(self.had_to_leave or 0.0, self.seconds if self.others_left else 0.0)


def deal(num_faults: int, chance: random.Random) -> list[str]:
    """Draw the kinds of this many faults, in order.

    Each kind occurs at least once if there is room for all, then by SHARES: 50 faults are dealt exactly as SHARES says.
    """
    kinds = list(SHARES)
    further_kinds = [kind for kind, count in SHARES.items() for _ in range(count - 1)]
    chance.shuffle(further_kinds)
    dealt = (
        kinds
        + further_kinds
        + chance.choices(kinds, list(SHARES.values()), k=max(0, num_faults - len(kinds + further_kinds)))
    )
    dealt = dealt[:num_faults]
    chance.shuffle(dealt)
    return dealt


# --------------------------------------------------------------------------------------------------------- the scene


class Keeper:
    """One island, which is launched again whenever it ends.

    A server process imports the code once, and its forks are the ranks of each launch. `launch` runs one launch, `keep`
    one after the other until `is_over` is set (meant for a thread), and `end` kills everything.
    """

    def __init__(
        self,
        folder: Path,
        yaml: Path,
        name: str,
        num_ranks: int,
        settings: Sequence[str],
        program: str = "benchmarks.islands.paced",
    ):
        """Start the server, but no launch. `settings` are arguments of the run, `program` is a rank's module."""
        self.folder, self.name, self.num_ranks = folder, name, num_ranks
        self.arguments = [str(yaml), f"run_folder={folder / name}", *settings]
        self.log = Log(folder / name / "metrics.jsonl")
        self.newest = self.num_read = 0
        """The last batch in the log, and the number of records that have been read."""
        self.codes: list[int] = []
        """Exit codes of the launches that have ended."""
        self.is_over = threading.Event()

        own_end, server_end = open_channel()
        command = [sys.executable, "-m", "llmfoundry_ops.server", str(server_end.fileno()), str(os.getpid())]
        command += [program, "llmfoundry_lite.training.train", *HEAVY]
        with (folder / f"{name}.txt").open("ab") as output:
            streams: dict[str, Any] = {"stdout": output, "stderr": output}
            self.server = subprocess.Popen(command, pass_fds=[server_end.fileno()], env=with_root(), **streams)
        server_end.close()
        self.channel = own_end
        self.world: World | None = None

    def launch(self) -> int:
        """Run one launch to its end, and return its exit code. Sets `world`."""
        self.world = World(self.channel, lambda: self.server.poll() is not None, self.num_ranks)
        environment = {**NO_GPU, **rendezvous(), "OMP_NUM_THREADS": "1", TOKEN: SECRET}
        self.world.start(self.arguments, environment, self.folder / f"{self.name}-logs")
        return self.world.wait().code

    def keep(self) -> None:
        """Launch the island again and again, until `is_over` is set or its server has died. Appends to `codes`."""
        while not self.is_over.is_set() and self.server.poll() is None:
            self.codes.append(self.launch())

    def read_newest(self) -> int:
        """Return the last batch that the log has. Sets `newest` and `num_read`."""
        new_records = self.log.read()[self.num_read :]
        self.num_read += len(new_records)
        self.newest = max([self.newest, *(record["batch"] for record in new_records)])
        return self.newest

    def ranks(self) -> list[int]:
        """Return the process ids of the ranks that run now."""
        processes = list(self.world.processes.values()) if self.world is not None else []
        return [process.pid for process in processes if process.code is None]

    def end(self) -> None:
        """Kill the server and, with it, its forks."""
        self.channel.close()
        self.server.kill()
        self.server.wait()


class Ways:
    """Connections to the coordinator, one for each island, which can fail although no process dies.

    Each is a proxy with a file of its own, see `links.py`. The proxies run in a thread. `addresses` has the one that
    each island dials.
    """

    def __init__(self, folder: Path, port: int):
        """Start the proxies for a coordinator at `port`, and wait until they accept connections."""
        self.paths = {name: folder / f"way-{name}.json" for name in SIZES}
        self.addresses: dict[str, str] = {}
        self.set("open")
        is_ready = threading.Event()
        threading.Thread(target=lambda: asyncio.run(self._carry(port, is_ready)), daemon=True).start()
        is_ready.wait()

    async def _carry(self, port: int, is_ready: threading.Event) -> None:
        """Start the proxies, then follow their files. Runs in the thread's event loop, and sets `addresses`."""
        links_of_islands = {name: Links(path) for name, path in self.paths.items()}
        for name, links in links_of_islands.items():
            host, proxy_port = await links.through("127.0.0.1", port)
            self.addresses[name] = f"{host}:{proxy_port}"
        is_ready.set()
        await asyncio.gather(*(links.watch() for links in links_of_islands.values()))

    def set(self, state: str, names: Sequence[str] = tuple(SIZES)) -> None:
        """Set the state of these islands' connections, by default of all."""
        for name in names:
            set_links(self.paths[name], state)


class Scene:
    """Three islands, their links, and a coordinator, all running from the constructor on. `end` has to be called.

    Attributes: `keepers` (name -> island), `ways` (connections to the coordinator), `links` (the file of the links
    between islands), and `said` (the file with the coordinator's output, from which members and leader are read).
    """

    def __init__(self, folder: Path, settings: Sequence[str] = ()):
        """Start the coordinator, the proxies and all islands. `settings` are further keys of the run."""
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.yaml = write_run(folder, SETTINGS, "fp32")
        self.links = folder / "links.json"
        set_links(self.links, "open", LINK_BITS)
        self.port = int(rendezvous()["MASTER_PORT"])
        self.said = folder / "coordinator.txt"
        self.start_coordinator()
        self.ways = Ways(folder, self.port)

        common = ["autoresume=true", f"save_folder={folder / 'saves'}", f"save_interval={SAVE_EVERY}ba"]
        common += ["save_num_checkpoints_to_keep=2", "device_train_microbatch_size=1", "dist_timeout=60", *settings]
        # Each island dials its own proxy of the coordinator.
        self.keepers = {
            name: Keeper(
                *(folder, self.yaml, name, size),
                [*common, f"islands.coordinator={self.ways.addresses[name]}", f"islands.name={name}"],
            )
            for name, size in SIZES.items()
        }
        self.threads = [threading.Thread(target=keeper.keep, daemon=True) for keeper in self.keepers.values()]
        for thread in self.threads:
            thread.start()

    # ---------------------------------------------------------------------------------------------- the coordinator

    def start_coordinator(self) -> None:
        """Start a coordinator at the scene's port, and wait until it serves. Sets `coordinator`."""
        command = [sys.executable, "-m", "benchmarks.islands.links"]
        command += [str(self.port), "1", str(SILENCE_SECONDS), str(self.links)]
        count = self.said.read_text().count("coordinating at") if self.said.exists() else 0
        with self.said.open("ab") as output:
            environment = with_root(**{TOKEN: SECRET})
            self.coordinator = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
        self.wait_for(lambda: self.said.read_text().count("coordinating at") > count, 60, "a coordinator")

    def kill_coordinator(self) -> None:
        """Kill the coordinator, and wait until it has ended."""
        self.coordinator.kill()
        self.coordinator.wait()

    def last_view(self) -> tuple[list[str], str]:
        """Return the members' names and the leader (the island that saves), as the coordinator last printed them.

        Its line is like "epoch 3, batch 41: a 4, b 2, c 2; a saves". Returns no members and an empty
        leader if it has printed none yet.
        """
        lines = [line for line in self.said.read_text().splitlines() if "; " in line and line.endswith(" saves")]
        if not lines:
            return [], ""
        rows, leader = lines[-1].split(": ", 1)[1].rsplit("; ", 1)
        members = [part.split()[0] for part in rows.split(", ")]
        return members, leader.split()[0]

    # ------------------------------------------------------------------------------------------------------ waiting

    def wait_for(self, is_there: Callable[[], Any], seconds: float, what: str) -> None:
        """Wait until `is_there` is true. Raises UserError, with the coordinator's output, after `seconds`."""

        def lost() -> UserError:
            """Build the error."""
            words = last_lines(self.said, 15) if self.said.exists() else ""
            return UserError(f"bench islands --faults: waited {seconds:g} s in vain for {what}\n{words}")

        wait_for(is_there, seconds, lost)

    def top(self) -> int:
        """Return the last batch that any island has recorded. Launches may also record earlier batches again."""
        return max(keeper.read_newest() for keeper in self.keepers.values())

    def wait_for_batches(self, count: int) -> None:
        """Wait until `count` more batches have been recorded by any island."""
        top = self.top()
        self.wait_for(lambda: self.top() >= top + count, LAUNCH_SECONDS, "batches")

    def wait_for_all(self) -> None:
        """Wait until all islands train, and none waits for another's state."""
        self.wait_for(lambda: set(self.last_view()[0]) == set(SIZES), LAUNCH_SECONDS, "all islands")
        self.wait_for_batches(2)

    # ----------------------------------------------------------------------------------------------------- the faults

    def disturb(self, kind: str, chance: random.Random) -> Fault:
        """Cause one fault, wait until the run goes on, and return how long that took.

        `kind` is a key of SHARES; `chance` draws the island that is hit and how. There are three cases:

        - The fault hits one island or the links between islands. Others go on at once, and it ends by itself or by a
          new launch.
        - It cuts islands off from the coordinator. Their launches have to leave, and the fault is undone when they
          have.
        - It takes the coordinator away. All launches have to leave, and batches go on only after it is undone.

        Raises UserError if the run does not go on within LAUNCH_SECONDS.
        """
        members, leader = self.last_view()
        name = leader if kind in (KILL_LEADER, KILL_SAVING, FREEZE_LEADER) else chance.choice(list(SIZES))
        keeper = self.keepers[name]
        if kind == KILL_SAVING:
            self.wait_for(lambda: self.is_saving(keeper), LAUNCH_SECONDS, "a save")

        # Cause the fault. `cut_off` are the islands whose launches have to leave, `undo` repairs it afterwards.
        cut_off: list[str] = []
        num_ended_launches = {island: len(other_keeper.codes) for island, other_keeper in self.keepers.items()}
        top_before, started = self.top(), time.monotonic()
        undo: Callable[[], None] | None = None
        if kind == KILL_COORDINATOR:
            self.kill_coordinator()
            cut_off, undo = members, self.start_coordinator
        elif kind == FREEZE_COORDINATOR:
            self.coordinator.send_signal(signal.SIGSTOP)
            cut_off, undo = members, chance.choice((self.thaw_coordinator, self.replace_coordinator))
        elif kind in (ONE_WAY, ALL_WAYS):
            names = [name] if kind == ONE_WAY else list(SIZES)
            cut_off = [island for island in names if island in members]
            self.ways.set(chance.choice(("half", "frozen")), names)
            undo = lambda: self.ways.set("open", names)  # noqa: E731
        elif kind in BETWEEN_ISLANDS:
            set_links(self.links, BETWEEN_ISLANDS[kind], 4e6)
            threading.Timer(chance.choice(LINK_SECONDS), set_links, (self.links, "open", LINK_BITS)).start()
        else:
            ranks = keeper.ranks()
            hits_whole_island = kind in (KILL_ISLAND, KILL_SAVING)
            if ranks and not hits_whole_island:
                ranks = [chance.choice(ranks)]
            for pid in ranks:
                self.signal(pid, freeze=kind in (FREEZE, FREEZE_LEADER))

        others_left = kind not in WITHOUT_COORDINATOR and (kind in BETWEEN_ISLANDS or bool(set(members) - {name}))

        left_after: dict[str, float] = {}
        went_on_after: float | None = None

        def is_over() -> bool:
            """Note who has left and whether batches go on. Return whether it is time for the repair."""
            nonlocal went_on_after
            now = time.monotonic() - started
            for island in cut_off:
                if len(self.keepers[island].codes) > num_ended_launches[island]:
                    left_after.setdefault(island, now)
            if went_on_after is None and kind not in WITHOUT_COORDINATOR and self.top() >= top_before + 2:
                went_on_after = now
            return len(left_after) == len(cut_off) and (went_on_after is not None or not others_left)

        # Wait, repair, and if all islands had to leave, wait for the new launches.
        self.wait_for(is_over, LAUNCH_SECONDS, f"batches to go on after {kind} {name}")
        if undo is not None:
            undo()
        if went_on_after is None:
            self.wait_for(lambda: self.top() >= top_before + 2, LAUNCH_SECONDS, f"batches after {kind} {name}")
            went_on_after = time.monotonic() - started
        target = "" if kind in WITHOUT_COORDINATOR or kind in BETWEEN_ISLANDS else name
        return Fault(kind, target, max(left_after.values()) if left_after else None, went_on_after, others_left)

    def is_saving(self, keeper: Keeper) -> bool:
        """Return whether the island's newest record is new, newest of all islands, and of a batch that is saved.

        Reads the log, so it returns true once for each such batch.
        """
        before = keeper.newest
        return keeper.read_newest() > before and keeper.newest % SAVE_EVERY == 0 and keeper.newest == self.top()

    def signal(self, pid: int, *, freeze: bool) -> None:
        """Kill a process, or freeze it for FROZEN_SECONDS. A process that has ended is ignored."""

        def send(number: int) -> None:
            """Send a signal, unless the process has ended."""
            with suppress(ProcessLookupError):
                os.kill(pid, number)

        send(signal.SIGSTOP if freeze else signal.SIGKILL)
        if freeze:
            threading.Timer(FROZEN_SECONDS, send, (signal.SIGCONT,)).start()

    def thaw_coordinator(self) -> None:
        """Let a frozen coordinator go on."""
        self.coordinator.send_signal(signal.SIGCONT)

    def replace_coordinator(self) -> None:
        """Kill the coordinator and start another one."""
        self.kill_coordinator()
        self.start_coordinator()

    def finish(self) -> None:
        """Let all islands leave after their batch, and wait until they have. The last one saves."""
        for name, keeper in self.keepers.items():
            keeper.is_over.set()
            (self.folder / name / "STOP").touch()
        for thread in self.threads:
            thread.join(LAUNCH_SECONDS)

    def end(self) -> None:
        """Kill all processes."""
        for keeper in self.keepers.values():
            keeper.is_over.set()
            keeper.end()
        if psutil.pid_exists(self.coordinator.pid):
            self.kill_coordinator()


def train_alone(
    folder: Path, yaml: Path, num_ranks: int, last_batch: int, options: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Train the same batches in one world, without islands, and return its records in order of the batches.

    Raises UserError if the launch fails.
    """
    settings = [f"stop_after={last_batch}ba", "device_train_microbatch_size=1", *options]
    keeper = Keeper(folder, yaml, f"alone-{num_ranks}", num_ranks, settings)
    try:
        if exit_code := keeper.launch():
            raise UserError(f"bench islands --faults: a single world of {num_ranks} ranks left with {exit_code}")
    finally:
        keeper.end()
    return [record for _, record in sorted(keeper.log.last_of_each_batch().items())]


# ---------------------------------------------------------------------------------------------------------- the whole


def run(
    *,
    num_faults: int = 50,
    seed: int = 17,
    way: str = "gradients",
    out: Path | None = None,
    keep: Path | None = None,
) -> dict[str, Any]:
    """Cause all faults, check the run, print the tables, and return the report. `out` gets islands-faults.json and .md.

    `seed` determines which faults come when. `way` is a key of WAYS, which adds its name to the files' names. The run
    is trained in `keep`, or in a temporary folder. Raises UserError when the run does not come back from a fault.
    """
    if way not in WAYS:
        raise UserError(f"--way: {way!r} given, expected {', '.join(WAYS)}")
    console, conditions, chance = open_console(), describe_conditions(), random.Random(seed)
    (heading_suffix, settings), is_local = WAYS[way], way in ("local", "streaming")
    faults: list[Fault] = []
    loads: list[float] = []
    started = time.monotonic()
    with nullcontext(keep) if keep else tempfile.TemporaryDirectory() as folder:
        scene = Scene(Path(folder).resolve(), settings)
        try:
            scene.wait_for_all()
            for fault_number, kind in enumerate(deal(num_faults, chance), 1):
                if chance.random() < SHARE_WHOLE:
                    scene.wait_for_all()
                scene.wait_for_batches(chance.randrange(1, 5))
                time.sleep(chance.random() * 0.3)  # anywhere in a batch
                faults.append(scene.disturb(kind, chance))
                loads.append(os.getloadavg()[0])
                progress = f"{fault_number}/{num_faults} {kind} {faults[-1].target}".rstrip()
                console.print(f"{progress}: {faults[-1].seconds:.1f} s", highlight=False)
            scene.finish()
        finally:
            scene.end()
        logs = {name: keeper.log.read() for name, keeper in scene.keepers.items()}
        codes = {name: keeper.codes for name, keeper in scene.keepers.items()}
        last_batch = max(record["batch"] for log in logs.values() for record in log)
        minutes = (time.monotonic() - started) / 60

        # Train the same batches without islands, to compare with. Local steps have no such run.
        worlds = []
        for size in () if is_local else WORLDS:
            console.print(f"training: {last_batch} batches alone on {size} ranks")
            worlds.append(train_alone(scene.folder, scene.yaml, size, last_batch, settings))

    report = conditions | {"num_faults": num_faults, "seed": seed, "minutes": minutes, "load_during": max(loads)}
    report |= {"num_batches": last_batch, "faults": [fault._asdict() for fault in faults], "codes": codes}
    report |= check_rounds(logs) if is_local else check(logs, worlds)
    report["longest_hang_seconds"] = max(fault.hung for fault in faults)

    report["passed"] = (
        report["longest_hang_seconds"] <= DEADLINE_SECONDS
        and not report["missing"]
        and not report["other_data"]
        and report["bands"] <= MAX_BANDS
        and not (way == "exact" and report["other_bits"])
        and not {code for codes_of_island in codes.values() for code in codes_of_island}
        - {EXIT_DONE, EXIT_FAILURE, EXIT_USER, EXIT_PREEMPTED}
    )
    introduction = (
        f"{num_faults} faults in {minutes:.0f} minutes and {last_batch} batches. Three islands of 2, 1 and 1 ranks."
    )
    command = f"python -m benchmarks islands-faults --num-faults {num_faults} --seed {seed}"
    command += f" --way {way}" * bool(heading_suffix)
    page = {"heading": f"Faults of islands{heading_suffix}", "asked": ("num_faults", "seed")}
    page["name"] = f"islands-faults{f'-{way}' * bool(heading_suffix)}"
    tell(report, introduction, table_of(faults), notes_of(report), **page, command=command, out=out)
    console.print("passed" if report["passed"] else "FAILED: see the notes", style="bold")
    return report


def check(logs: dict[str, list[dict[str, Any]]], worlds: Sequence[list[dict[str, Any]]]) -> dict[str, Any]:
    """Compare the islands' batches with those of the single worlds.

    `logs` has the records of each island, `worlds` those of each single world. Returns the batches that are missing (or
    too many), those with other data, those whose loss has other bits than in the first world, and the loss's largest
    and last deviation.
    """
    digests = {record["batch"]: record["data/digest"] for record in worlds[0]}
    # A batch that was trained again after a fault counts with its last record.
    newest_records = {record["batch"]: record for log in logs.values() for record in log}
    batches_with_other_data = {
        record["batch"]
        for log in logs.values()
        for record in log
        if record["data/digest"] != digests.get(record["batch"])
    }
    missing = sorted(set(digests) ^ set(newest_records))

    losses = {record["batch"]: record["loss/train/total"] for record in worlds[0]}
    batches_with_other_bits = [
        batch for batch, record in newest_records.items() if record["loss/train/total"] != losses.get(batch)
    ]

    # Without all batches, there is no series that could be compared.
    findings = {
        "missing": missing,
        "other_data": sorted(batches_with_other_data),
        "other_bits": batches_with_other_bits,
        "bands": 0.0,
        "deviation": 0.0,
    }
    if not missing:
        verdict = judge(
            read_series([newest_records[batch] for batch in sorted(newest_records)]), list(map(read_series, worlds))
        )
        findings |= {"bands": verdict.largest_ratio, "deviation": verdict.final_deviation}
    return findings


def check_rounds(logs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Check local steps: find missing batches, and rounds whose rows are neither trained nor reported as lost.

    Returns the keys of `check`, where `other_data` has those rounds, and the numbers of samples lost and trained again,
    and of islands whose weights differed after an outer step.
    """
    batches = {record["batch"] for log in logs.values() for record in log}
    unaccounted_rounds, lost_in_round, again_in_round = set[int](), dict[int, int](), dict[int, int]()
    for record in (record for log in logs.values() for record in log if "islands/outer_norm" in record):
        batch = record["batch"]
        lost_in_round[batch] = record["islands/lost_in_round"]
        again_in_round[batch] = record["islands/again_in_round"]
        # Rows that are trained again belong to an earlier round, where they were lost.
        accounted_rows = record["islands/samples"] + lost_in_round[batch] - again_in_round[batch]
        if accounted_rows != record["islands/steps"] * SETTINGS["batch_size"]:
            unaccounted_rounds.add(batch)

    drifts = sum(max((record.get("islands/drifts", 0) for record in log), default=0) for log in logs.values())
    findings = {"missing": sorted(set(range(1, max(batches) + 1)) - batches), "other_data": sorted(unaccounted_rounds)}
    findings |= {
        "num_lost": sum(lost_in_round.values()),
        "num_again": sum(again_in_round.values()),
        "num_drifts": drifts,
    }
    return {**findings, "bands": 0.0, "other_bits": []}


def table_of(faults: Sequence[Fault]) -> Table:
    """Return a table of how long faults of each kind took, with a row for each kind that occurred."""
    rows = []
    for kind in SHARES:
        faults_of_kind = [fault for fault in faults if fault.kind == kind]
        if not faults_of_kind:
            continue
        leave_seconds = [fault.had_to_leave for fault in faults_of_kind if fault.had_to_leave is not None]
        others_seconds = [fault.seconds for fault in faults_of_kind if fault.others_left]
        relaunch_seconds = [fault.seconds for fault in faults_of_kind if not fault.others_left]
        rows.append(
            (
                kind,
                str(len(faults_of_kind)),
                *(
                    str(spread(seconds)) if seconds else ""
                    for seconds in (others_seconds, leave_seconds, relaunch_seconds)
                ),
            )
        )
    headings = (
        *("fault", "times", "s until others have finished two batches", "s until those cut off have left"),
        "s until two batches, where all launch again",
    )
    return measured_table("what a fault costs", headings, rows)


def notes_of(report: dict[str, Any]) -> list[str]:
    """Return the notes below the table: what the checks found, and the conditions."""

    def names(batches: Sequence[int]) -> str:
        """Format a number of batches, with the first ten of them."""
        return f"{len(batches)}" + (f" ({', '.join(map(str, batches[:10]))})" if batches else "")

    # Local steps report rows, other runs report digests and losses.
    if "num_lost" in report:
        compared = [
            f"missing batches: {names(report['missing'])}; outer steps with rows that are neither trained nor reported "
            f"as lost: {names(report['other_data'])}",
            f"samples reported as lost: {report['num_lost']} of {8 * report['num_batches']}, of which "
            f"{report['num_again']} were trained in a later round; islands whose weights differed after an outer step: "
            f"{report['num_drifts']}",
        ]
    else:
        compared = [
            f"missing batches: {names(report['missing'])}; batches with other data than in a single launch: "
            f"{names(report['other_data'])}",
            f"batches whose loss differs in a bit from that of a single launch on {WORLDS[0]} rank: "
            f"{len(report['other_bits'])} of {report['num_batches']}",
            f"the loss differs from that of {len(WORLDS)} single launches by at most {report['bands']:.2f} of their "
            f"band ({MAX_BANDS:g} are allowed, because rows are divided in more ways), after the last batch by "
            f"{report['deviation']:.1e} nats",
        ]
    return [
        f"the longest time that anything hung: {report['longest_hang_seconds']:.1f} s; the limit is "
        f"{DEADLINE_SECONDS:g} s",
        *compared,
        f"the coordinator leaves out islands that are silent for {SILENCE_SECONDS:g} s; ranks exit if the coordinator "
        "is silent for 4 s",
        f"links between islands have {LINK_BITS / 1e6:g} Mbit/s, so that gradients are sent while ranks compute",
        "not counted: an island that has just been launched may wait a minute for the coordinator",
        "a half-open connection passes nothing back, or nothing at all; links between islands are repaired "
        f"after {', '.join(f'{seconds:g}' for seconds in LINK_SECONDS)} s",
        f"load average during the faults at most {report['load_during']:.1f}; islands are launched again as forks "
        "of a process that has imported the code",
    ]
