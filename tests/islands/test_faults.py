"""Random faults of ranks, islands, links and the coordinator while a run trains. Every batch counts once."""

import json
import os
import random
import signal
import threading
import time
from contextlib import suppress

import numpy as np
import pytest

from llmfoundry_lite.bench.switch.band import measure_band, measure_deviation
from llmfoundry_lite.islands.messages import TOKEN
from tests.helpers.launch import start_training, train
from tests.helpers.tiny import read_metrics, tiny_config, values, write_config
from tests.islands.world import SECRET, Coordination, metrics_path

pytestmark = [pytest.mark.multiprocess, pytest.mark.long]

DEADLINE_SECONDS = 10.0
"""From a fault to the second batch after it, where an island and the coordinator are left."""
LAUNCH_SECONDS = 60.0
"""The same where all begin again, on two busy cores."""
SIZES = {"a": 2, "b": 1, "c": 1}
NUM_FAULTS = 25
KILL, FREEZE, KILL_ISLAND = "kill a rank", "freeze a rank", "kill an island"
COORDINATOR, CUT, FREEZE_LINKS, SLOW_LINKS = "kill the coordinator", "cut links", "freeze links", "slow links"
WEIGHTS = {KILL: 5, FREEZE: 4, KILL_ISLAND: 3, COORDINATOR: 2, CUT: 4, FREEZE_LINKS: 3, SLOW_LINKS: 3}


class Scene:
    """Three islands that are launched again whenever they end, their links, and a coordinator."""

    def __init__(self, folder, data):
        self.folder, self.data = folder, data
        self.links = folder / "links.json"
        self.set_links()
        self.coordinator = Coordination(folder, 1, silence=3.0, links=self.links)
        self.ranks = {}
        self.is_over = threading.Event()
        self.codes = []
        self.keepers = [threading.Thread(target=self.keep, args=(name,)) for name in SIZES]
        for keeper in self.keepers:
            keeper.start()

    def set_links(self, state="open", bits_per_second=None):
        self.links.write_text(json.dumps({"state": state, "bits_per_second": bits_per_second}))

    def keep(self, name):
        """As a scheduler does: when a rank ends the others are ended, and the same command is given again."""
        block = {"coordinator": f"127.0.0.1:{self.coordinator.port}", "name": name}
        changes = {"islands": block, "save_folder": str(self.folder / "saves"), "dist_timeout": 30}
        changes |= {"save_interval": "10ba", "save_num_checkpoints_to_keep": 2, "device_train_microbatch_size": 1}
        pace = {"python:tests.islands.faults:Pace": {"seconds": 0.1}}
        path = write_config(self.folder / f"{name}.yaml", configuration(self.data, callbacks=pace, **changes))
        while not self.is_over.is_set():
            started = start_training([path], self.folder, SIZES[name], env={TOKEN: SECRET})
            self.ranks[name] = started.processes
            while all(process.is_alive() for process in started.processes):
                time.sleep(0.02)
            for process in started.processes:
                process.join(4)
                process.kill()
                process.join()
            self.codes.append([process.exitcode for process in started.processes])

    def num_records(self):
        logs = [metrics_path(self.folder, name) for name in SIZES]
        return sum(log.read_bytes().count(b"\n") for log in logs if log.exists())

    def wait_for_records(self, count, seconds):
        started, before = time.monotonic(), self.num_records()
        while self.num_records() < before + count:
            assert time.monotonic() - started < seconds, f"nothing for {seconds} s\n{self.coordinator.lines[-3000:]}"
            time.sleep(0.02)
        return time.monotonic() - started

    def disturb(self, chance):
        """One fault: what it was, and how long it took until batches were finished again."""
        kind = chance.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        name = chance.choice(list(SIZES))
        members = self.coordinator.members()
        limit = DEADLINE_SECONDS if set(members) - {name} else LAUNCH_SECONDS
        if kind == COORDINATOR:
            self.coordinator.stop(signal.SIGKILL)
            self.coordinator.start()
            limit = LAUNCH_SECONDS
        elif kind in (CUT, FREEZE_LINKS, SLOW_LINKS):
            limit = DEADLINE_SECONDS
            self.set_links({CUT: "cut", FREEZE_LINKS: "frozen"}.get(kind, "open"), 4e6)
            threading.Timer(chance.choice((0.3, 1.0, 4.0)), self.set_links).start()
        else:
            ranks = self.ranks.get(name, [])
            for process in ranks if kind == KILL_ISLAND else [chance.choice(ranks)]:
                send(process.pid, signal.SIGSTOP if kind == FREEZE else signal.SIGKILL)
                if kind == FREEZE:  # and wakes up when the others have gone on without it
                    threading.Timer(6.0, send, (process.pid, signal.SIGCONT)).start()
        return kind, self.wait_for_records(2 * len(SIZES), limit)

    def end(self):
        self.is_over.set()
        for name in SIZES:
            (self.folder / "runs/run" / name / "STOP").touch()
        for keeper in self.keepers:
            keeper.join(60)
        self.coordinator.stop()


def send(pid, number):
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def configuration(data, **changes):
    return tiny_config(data, run_name="run", autoresume=True, max_duration="5000ba", **changes)


@pytest.mark.parametrize("seed", [0, 1])
def test_every_batch_counts_once_whatever_breaks_and_nothing_hangs(tmp_path, data, seed):
    chance, scene, took = random.Random(seed), Scene(tmp_path, data), {}
    try:
        scene.wait_for_records(10, LAUNCH_SECONDS)
        for _ in range(NUM_FAULTS):
            time.sleep(chance.random())  # anywhere in a batch
            kind, seconds = scene.disturb(chance)
            took.setdefault(kind, []).append(round(seconds, 2))
            scene.wait_for_records(chance.randrange(1, 20), LAUNCH_SECONDS)
    finally:
        scene.end()
    print(json.dumps(took))
    assert not {code for codes in scene.codes for code in codes} - {0, 1, 2, 75, -signal.SIGKILL, -signal.SIGSTOP}
    logs = [read_metrics(path.parent) for name in SIZES if (path := metrics_path(tmp_path, name)).exists()]
    last = max(record["batch"] for log in logs for record in log)
    alone = {}
    for size in (1, 2, 4):
        folder = tmp_path / f"alone-{size}"
        folder.mkdir()
        path = write_config(folder / "alone.yaml", configuration(data, stop_after=f"{last}ba"))
        train([path], folder, size).check()
        alone[size] = read_metrics(folder / "runs/run")
    digests = dict(zip(values(alone[1], "batch"), values(alone[1], "data/digest"), strict=True))
    joined = {record["batch"]: record for log in logs for record in log}
    assert sorted(joined) == list(range(1, last + 1))
    for log in logs:
        assert all(record["data/digest"] == digests[record["batch"]] for record in log)
    losses_rt = np.array([values(records, "loss/train/total") for records in alone.values()])
    deviation = measure_deviation([joined[batch]["loss/train/total"] for batch in sorted(joined)], losses_rt)
    assert deviation[-1] <= 2 * measure_band(losses_rt)[-1]
