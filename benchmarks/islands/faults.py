"""Random faults of ranks, islands, links, the leader and the coordinator while three islands train one run.

    python -m benchmarks islands-faults --out results                   some 9 minutes on two busy cores
    python -m benchmarks islands-faults --way exact --out results       with exact sums, held against one world's bits
    python -m benchmarks islands-faults --way local --out results       with local steps, every 10
    python -m benchmarks islands-faults --way streaming --out results   in fragments that travel while islands compute

Three islands train a tiny model. Each owns a part of the sum. Gradients leave during the backward pass, over links on
which they are under way for as long as ranks compute: faults hit overlapped exchanges. Ranks are real, as the launcher
starts them; an island that has ended is launched again, as a scheduler would, and joins in the middle. For each fault:
seconds until two more batches are finished, and until those that had to leave have left. Nothing may take longer than
the deadline. In the end every batch is there once, with the data of a single world. The loss is held against the band
of three single worlds; with exact sums it must have their bits.

With local steps no single world trains the same. Instead each outer step must account for every row of its round: as
trained, or as lost with an island by name. Weights are compared at each outer step. `streaming` trains lost rows again.

`links.py` has links that can be cut, frozen or dead one way.
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
"""For batches to go on where an island and the coordinator are left; and for those to leave that have to."""
LAUNCH_SECONDS = 120.0
"""The same where all begin again, on two busy cores."""
FROZEN_SECONDS = 6.0
"""Seconds that a rank is frozen. It then wakes up where the others have gone on without it."""
LINK_SECONDS = (0.3, 1.0, 4.0)
LINK_BITS = 40e6
"""Bits per second of links between islands that nothing ails."""
LOCAL = ["islands.sync.every=10ba", "islands.check_weights_every=1"]
STREAMING = [f"islands.sync.{setting}" for setting in ("fragments=2", "delay=3ba", "lost_rows=retrain")]
WAYS = {
    "gradients": ("", []),
    "exact": (", exact sums", ["exact_sums=true"]),
    "local": (", local steps", LOCAL),
    "streaming": (", local steps in fragments", LOCAL + STREAMING),
}
"""`--way` -> words of the heading, and settings."""
MAX_BANDS = 2.0
"""The loss may be so many bands from that of the single worlds: rows are divided in many more ways than theirs."""
SHARE_WHOLE = 0.8
"""Share of faults that come when all islands train; the others come while one may still be on its way."""
SAVE_EVERY = 10

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
"""How often, of 50."""
BETWEEN_ISLANDS = {CUT: "cut", FREEZE_LINKS: "frozen", HALF_LINKS: "half", SLOW_LINKS: "open"}
WITHOUT_COORDINATOR = (KILL_COORDINATOR, FREEZE_COORDINATOR, ALL_WAYS)


class Fault(NamedTuple):
    kind: str
    target: str
    """The island, if it was one."""
    had_to_leave: float | None
    """Seconds until all launches had left that the fault had cut off; None: it had cut off none."""
    seconds: float
    """Until two more batches were finished, by any island."""
    others_left: bool
    """An island and the coordinator could go on."""

    @property
    def hung(self) -> float:
        """Seconds that something waited in vain. Launching anew is no waiting."""
        return max(self.had_to_leave or 0.0, self.seconds if self.others_left else 0.0)


def deal(num_faults: int, chance: random.Random) -> list[str]:
    """Kinds of faults in order: each at least once where there is room, then by their shares."""
    kinds = list(SHARES)
    more = [kind for kind, count in SHARES.items() for _ in range(count - 1)]
    chance.shuffle(more)
    dealt = kinds + more + chance.choices(kinds, list(SHARES.values()), k=max(0, num_faults - len(kinds + more)))
    dealt = dealt[:num_faults]
    chance.shuffle(dealt)
    return dealt


# --------------------------------------------------------------------------------------------------------- the scene


class Keeper:
    """One island: a process that has imported the code, whose forks are its ranks, launched again when they end."""

    def __init__(
        self,
        folder: Path,
        yaml: Path,
        name: str,
        num_ranks: int,
        settings: Sequence[str],
        program: str = "benchmarks.islands.paced",
    ):
        self.folder, self.name, self.num_ranks = folder, name, num_ranks
        self.arguments = [str(yaml), f"run_folder={folder / name}", *settings]
        self.log = Log(folder / name / "metrics.jsonl")
        self.newest = self.num_read = 0
        """The last batch in the log, and how many of its lines have been read."""
        self.codes: list[int] = []
        """Exit codes of launches that have ended."""
        self.is_over = threading.Event()
        mine, its = open_channel()
        command = [sys.executable, "-m", "llmfoundry_ops.server", str(its.fileno()), str(os.getpid())]
        command += [program, "llmfoundry_lite.training.train", *HEAVY]
        with (folder / f"{name}.txt").open("ab") as output:
            streams: dict[str, Any] = {"stdout": output, "stderr": output}
            self.server = subprocess.Popen(command, pass_fds=[its.fileno()], env=with_root(), **streams)
        its.close()
        self.channel = mine
        self.world: World | None = None

    def launch(self) -> int:
        """Run a launch to its end; return its exit code."""
        self.world = World(self.channel, lambda: self.server.poll() is not None, self.num_ranks)
        environment = {**NO_GPU, **rendezvous(), "OMP_NUM_THREADS": "1", TOKEN: SECRET}
        self.world.start(self.arguments, environment, self.folder / f"{self.name}-logs")
        return self.world.wait().code

    def keep(self) -> None:
        while not self.is_over.is_set() and self.server.poll() is None:
            self.codes.append(self.launch())

    def read_newest(self) -> int:
        """Return the last batch that the log has."""
        new = self.log.read()[self.num_read :]
        self.num_read += len(new)
        self.newest = max([self.newest, *(record["batch"] for record in new)])
        return self.newest

    def ranks(self) -> list[int]:
        """Return process ids."""
        processes = list(self.world.processes.values()) if self.world is not None else []
        return [process.pid for process in processes if process.code is None]

    def end(self) -> None:
        self.channel.close()
        self.server.kill()
        self.server.wait()


class Ways:
    """Connections to the coordinator, one for each island, which can fail without a process that dies."""

    def __init__(self, folder: Path, port: int):
        self.paths = {name: folder / f"way-{name}.json" for name in SIZES}
        self.addresses: dict[str, str] = {}
        self.set("open")
        is_ready = threading.Event()
        threading.Thread(target=lambda: asyncio.run(self._carry(port, is_ready)), daemon=True).start()
        is_ready.wait()

    async def _carry(self, port: int, is_ready: threading.Event) -> None:
        ways = {name: Links(path) for name, path in self.paths.items()}
        for name, way in ways.items():
            host, near = await way.through("127.0.0.1", port)
            self.addresses[name] = f"{host}:{near}"
        is_ready.set()
        await asyncio.gather(*(way.watch() for way in ways.values()))

    def set(self, state: str, names: Sequence[str] = tuple(SIZES)) -> None:
        for name in names:
            set_links(self.paths[name], state)


class Scene:
    """Three islands, their links, and a coordinator."""

    def __init__(self, folder: Path, settings: Sequence[str] = ()):
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
        command = [sys.executable, "-m", "benchmarks.islands.links"]
        command += [str(self.port), "1", str(SILENCE_SECONDS), str(self.links)]
        count = self.said.read_text().count("coordinating at") if self.said.exists() else 0
        with self.said.open("ab") as output:
            environment = with_root(**{TOKEN: SECRET})
            self.coordinator = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
        self.wait_for(lambda: self.said.read_text().count("coordinating at") > count, 60, "a coordinator")

    def kill_coordinator(self) -> None:
        self.coordinator.kill()
        self.coordinator.wait()

    def last_view(self) -> tuple[list[str], str]:
        """Return members and leader."""
        lines = [line for line in self.said.read_text().splitlines() if "; " in line and line.endswith(" saves")]
        if not lines:
            return [], ""
        rows, leader = lines[-1].split(": ", 1)[1].rsplit("; ", 1)
        return [part.split()[0] for part in rows.split(", ")], leader.split()[0]

    # ------------------------------------------------------------------------------------------------------ waiting

    def wait_for(self, is_there: Callable[[], Any], seconds: float, what: str) -> None:
        """Raises UserError after `seconds`."""

        def lost() -> UserError:
            words = last_lines(self.said, 15) if self.said.exists() else ""
            return UserError(f"bench islands --faults: waited {seconds:g} s in vain for {what}\n{words}")

        wait_for(is_there, seconds, lost)

    def top(self) -> int:
        """Return the last batch that any island has recorded. Launches also rewrite records of earlier batches."""
        return max(keeper.read_newest() for keeper in self.keepers.values())

    def wait_for_batches(self, count: int) -> None:
        top = self.top()
        self.wait_for(lambda: self.top() >= top + count, LAUNCH_SECONDS, "batches")

    def wait_for_all(self) -> None:
        """Wait until all islands train and none waits for another's state."""
        self.wait_for(lambda: set(self.last_view()[0]) == set(SIZES), LAUNCH_SECONDS, "all islands")
        self.wait_for_batches(2)

    # ----------------------------------------------------------------------------------------------------- the faults

    def disturb(self, kind: str, chance: random.Random) -> Fault:
        members, leader = self.last_view()
        name = leader if kind in (KILL_LEADER, KILL_SAVING, FREEZE_LEADER) else chance.choice(list(SIZES))
        keeper = self.keepers[name]
        if kind == KILL_SAVING:
            self.wait_for(lambda: self.is_saving(keeper), LAUNCH_SECONDS, "a save")
        cut_off: list[str] = []
        ends = {island: len(one.codes) for island, one in self.keepers.items()}
        top, started = self.top(), time.monotonic()
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
            whole = kind in (KILL_ISLAND, KILL_SAVING)
            for pid in ranks if whole else [chance.choice(ranks)] if ranks else []:
                self.signal(pid, freeze=kind in (FREEZE, FREEZE_LEADER))
        others_left = kind not in WITHOUT_COORDINATOR and (kind in BETWEEN_ISLANDS or bool(set(members) - {name}))
        gone: dict[str, float] = {}
        on_at: float | None = None

        def is_over() -> bool:
            nonlocal on_at
            now = time.monotonic() - started
            for island in cut_off:
                if len(self.keepers[island].codes) > ends[island]:
                    gone.setdefault(island, now)
            if on_at is None and kind not in WITHOUT_COORDINATOR and self.top() >= top + 2:
                on_at = now
            return len(gone) == len(cut_off) and (on_at is not None or not others_left)

        self.wait_for(is_over, LAUNCH_SECONDS, f"batches to go on after {kind} {name}")
        if undo is not None:
            undo()
        if on_at is None:
            self.wait_for(lambda: self.top() >= top + 2, LAUNCH_SECONDS, f"batches after {kind} {name}")
            on_at = time.monotonic() - started
        target = "" if kind in WITHOUT_COORDINATOR or kind in BETWEEN_ISLANDS else name
        return Fault(kind, target, max(gone.values()) if gone else None, on_at, others_left)

    def is_saving(self, keeper: Keeper) -> bool:
        """Return whether its last batch has just ended and is one that is saved."""
        before = keeper.newest
        return keeper.read_newest() > before and keeper.newest % SAVE_EVERY == 0 and keeper.newest == self.top()

    def signal(self, pid: int, *, freeze: bool) -> None:
        def send(number: int) -> None:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

        send(signal.SIGSTOP if freeze else signal.SIGKILL)
        if freeze:
            threading.Timer(FROZEN_SECONDS, send, (signal.SIGCONT,)).start()

    def thaw_coordinator(self) -> None:
        self.coordinator.send_signal(signal.SIGCONT)

    def replace_coordinator(self) -> None:
        self.kill_coordinator()
        self.start_coordinator()

    def finish(self) -> None:
        """Let all islands leave after a batch; the last one saves."""
        for name, keeper in self.keepers.items():
            keeper.is_over.set()
            (self.folder / name / "STOP").touch()
        for thread in self.threads:
            thread.join(LAUNCH_SECONDS)

    def end(self) -> None:
        """End all processes."""
        for keeper in self.keepers.values():
            keeper.is_over.set()
            keeper.end()
        if psutil.pid_exists(self.coordinator.pid):
            self.kill_coordinator()


def train_alone(
    folder: Path, yaml: Path, num_ranks: int, last: int, options: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Train the same batches in one world; return its records."""
    settings = [f"stop_after={last}ba", "device_train_microbatch_size=1", *options]
    keeper = Keeper(folder, yaml, f"alone-{num_ranks}", num_ranks, settings)
    try:
        if code := keeper.launch():
            raise UserError(f"bench islands --faults: a single world of {num_ranks} ranks left with {code}")
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
    """Disturb, check, print; with `out`, write islands-faults.json and .md there. Returns what the JSON holds.

    `way`: one of WAYS. With `exact` every batch must have the bits of a single world. Raises UserError when a run does
    not come back from a fault.
    """
    if way not in WAYS:
        raise UserError(f"--way: {way!r} given, expected {', '.join(WAYS)}")
    console, conditions, chance = open_console(), describe_conditions(), random.Random(seed)
    (words, settings), is_local = WAYS[way], way in ("local", "streaming")
    faults: list[Fault] = []
    loads: list[float] = []
    started = time.monotonic()
    with nullcontext(keep) if keep else tempfile.TemporaryDirectory() as folder:
        scene = Scene(Path(folder).resolve(), settings)
        try:
            scene.wait_for_all()
            for number, kind in enumerate(deal(num_faults, chance), 1):
                if chance.random() < SHARE_WHOLE:
                    scene.wait_for_all()
                scene.wait_for_batches(chance.randrange(1, 5))
                time.sleep(chance.random() * 0.3)  # anywhere in a batch
                faults.append(scene.disturb(kind, chance))
                loads.append(os.getloadavg()[0])
                told = f"{number}/{num_faults} {kind} {faults[-1].target}".rstrip()
                console.print(f"{told}: {faults[-1].seconds:.1f} s", highlight=False)
            scene.finish()
        finally:
            scene.end()
        logs = {name: keeper.log.read() for name, keeper in scene.keepers.items()}
        codes = {name: keeper.codes for name, keeper in scene.keepers.items()}
        last = max(record["batch"] for log in logs.values() for record in log)
        minutes = (time.monotonic() - started) / 60
        worlds = []
        for size in () if is_local else WORLDS:
            console.print(f"training: {last} batches alone on {size} ranks")
            worlds.append(train_alone(scene.folder, scene.yaml, size, last, settings))
    report = conditions | {"num_faults": num_faults, "seed": seed, "minutes": minutes, "load_during": max(loads)}
    report |= {"num_batches": last, "faults": [fault._asdict() for fault in faults], "codes": codes}
    report |= check_rounds(logs) if is_local else check(logs, worlds)
    report["longest_hang_seconds"] = max(fault.hung for fault in faults)
    report["passed"] = (
        report["longest_hang_seconds"] <= DEADLINE_SECONDS
        and not report["missing"]
        and not report["other_data"]
        and report["bands"] <= MAX_BANDS
        and not (way == "exact" and report["other_bits"])
        and not {code for some in codes.values() for code in some}
        - {EXIT_DONE, EXIT_FAILURE, EXIT_USER, EXIT_PREEMPTED}
    )
    how = f"{num_faults} faults in {minutes:.0f} minutes and {last} batches. Three islands of 2, 1 and 1 ranks."
    command = (
        f"python -m benchmarks islands-faults --num-faults {num_faults} --seed {seed}{f' --way {way}' * bool(words)}"
    )
    about = {"heading": f"Faults of islands{words}", "asked": ("num_faults", "seed")}
    about["name"] = f"islands-faults{f'-{way}' * bool(words)}"
    tell(report, how, table_of(faults), notes_of(report), **about, command=command, out=out)
    console.print("passed" if report["passed"] else "FAILED: see the notes", style="bold")
    return report


def check(logs: dict[str, list[dict[str, Any]]], worlds: Sequence[list[dict[str, Any]]]) -> dict[str, Any]:
    """Look for missing batches, other data than the single worlds', and a loss outside their band."""
    digests = {record["batch"]: record["data/digest"] for record in worlds[0]}
    joined = {record["batch"]: record for log in logs.values() for record in log}
    other = {r["batch"] for log in logs.values() for r in log if r["data/digest"] != digests.get(r["batch"])}
    missing = sorted(set(digests) ^ set(joined))
    losses = {record["batch"]: record["loss/train/total"] for record in worlds[0]}
    bits = [batch for batch, record in joined.items() if record["loss/train/total"] != losses.get(batch)]
    found = {"missing": missing, "other_data": sorted(other), "other_bits": bits, "bands": 0.0, "deviation": 0.0}
    if not missing:
        verdict = judge(read_series([joined[batch] for batch in sorted(joined)]), list(map(read_series, worlds)))
        found |= {"bands": verdict.largest_ratio, "deviation": verdict.final_deviation}
    return found


def check_rounds(logs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Look for missing batches, rounds with rows that are neither trained nor named as lost, and other weights."""
    batches = {record["batch"] for log in logs.values() for record in log}
    unnamed, named, again = set[int](), dict[int, int](), dict[int, int]()
    for record in (record for log in logs.values() for record in log if "islands/outer_norm" in record):
        named[record["batch"]], again[record["batch"]] = (
            record["islands/lost_in_round"],
            record["islands/again_in_round"],
        )
        counted = record["islands/samples"] + named[record["batch"]] - again[record["batch"]]
        if counted != record["islands/steps"] * SETTINGS["batch_size"]:
            unnamed.add(record["batch"])
    drifts = sum(max((r.get("islands/drifts", 0) for r in log), default=0) for log in logs.values())
    found = {"missing": sorted(set(range(1, max(batches) + 1)) - batches), "other_data": sorted(unnamed)}
    found |= {"num_lost": sum(named.values()), "num_again": sum(again.values()), "num_drifts": drifts}
    return {**found, "bands": 0.0, "other_bits": []}


def table_of(faults: Sequence[Fault]) -> Table:
    rows = []
    for kind in SHARES:
        some = [fault for fault in faults if fault.kind == kind]
        if not some:
            continue
        left = [fault.had_to_leave for fault in some if fault.had_to_leave is not None]
        on = [fault.seconds for fault in some if fault.others_left]
        anew = [fault.seconds for fault in some if not fault.others_left]
        rows.append((kind, str(len(some)), *(str(spread(one)) if one else "" for one in (on, left, anew))))
    headings = (
        *("fault", "times", "s until others have finished two batches", "s until those cut off have left"),
        "s until two batches, where all launch again",
    )
    return measured_table("what a fault costs", headings, rows)


def notes_of(report: dict[str, Any]) -> list[str]:
    def names(batches: Sequence[int]) -> str:
        return f"{len(batches)}" + (f" ({', '.join(map(str, batches[:10]))})" if batches else "")

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
