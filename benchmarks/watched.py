"""Measure whether a training step is slower when everything watches the run, beside the same run that nothing watches.

    python -m benchmarks watched --num-rounds 4 --out results

Both runs have the same ranks, data and saves. The watched one sends alerts to a receiver in this process, serves
metrics that are read once a second, prints JSON, keeps a second place for saves and compares the times of its ranks
in every batch, which is a hundred times as often as by default. The runs take turns. What is compared is the median
time of a batch, the CPU time of all processes of a launch, and every loss and digest, which must be the same.
"""

import http.server
import json
import os
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import Log, last_lines
from llmfoundry_lite.checkpoint.store import open_checkpoint
from llmfoundry_lite.errors import DataError
from llmfoundry_machines.bench import frame
from llmfoundry_machines.bench.steps import SHAPES, write_run

PLAIN = "nothing watches"
WATCHED = "everything watches"
SAVE_INTERVAL = 20
"""Batches between two saves, in both runs."""
SKIPPED_BATCHES = 10
"""Batches at the beginning of a launch that are not timed: memory is reserved and caches are filled in them."""
SCRAPE_SECONDS = 1.0
"""Time between two readings of the metrics."""
SAME = ("loss/train/total", "data/digest", "grad_norm")
"""Numbers of each batch that must be the same in both runs. The digest of the last state is compared as well."""


class Launch(NamedTuple):
    """A launch that has been measured."""

    batch_seconds: float
    """Median time of a batch."""
    cpu_seconds: float
    """CPU time of the launch and all its processes that have ended with it."""
    records: list[list[Any]]
    """For each batch, the numbers that must be the same in both runs."""
    last_digest: str | None
    """Digest of weights and optimizer state after the last batch."""
    num_alerts: int
    """Alerts that were received."""
    num_readings: int
    """Number of times that the metrics were read."""


def run(
    shape: str = "10m", seq_len: int = 128, num_batches: int = 100, num_rounds: int = 4, out: Path | None = None
) -> dict[str, Any]:
    """Measure both runs in turns on 2 ranks, print the table, write it into `out`, and return the report.

    `passed` in the report says whether all losses, digests and norms are the same. Raises ConfigError for an unknown
    shape, and DataError for a launch that fails.
    """
    frame.check_names("--shape", [shape], SHAPES)
    console, conditions = frame.open_console(), frame.describe_conditions()
    settings = {"shape": shape, "seq_len": seq_len, "batch_size": 8, "num_steps": num_batches}
    with tempfile.TemporaryDirectory(prefix="bench-watched-") as folder, receive_alerts() as receiver:
        yaml = write_run(Path(folder), settings, "fp32")
        sides = {
            PLAIN: partial(measure_launch, yaml, Path(folder), None),
            WATCHED: partial(measure_launch, yaml, Path(folder), receiver),
        }
        console.print("a round that is not timed", highlight=False)
        for measure in sides.values():
            measure()
        launches, _ = frame.take_turns(sides, num_rounds, console)

    first = launches[PLAIN][0]
    passed = True
    for launch in [*launches[PLAIN], *launches[WATCHED]]:
        passed = passed and launch.records == first.records and launch.last_digest == first.last_digest
    report = conditions | settings | {"num_rounds": num_rounds, "passed": passed}
    for name in ("batch_seconds", "cpu_seconds"):
        report[name] = {side: [getattr(launch, name) for launch in launches[side]] for side in launches}

    table = frame.measured_table(
        "A run on 2 ranks, watched and not",
        ("", "ms a batch", "of the run that nothing watches", "CPU seconds of a launch", "of that run's"),
        [build_row(report, side) for side in launches],
    )
    num_alerts = [launch.num_alerts for launch in launches[WATCHED]]
    num_readings = [launch.num_readings for launch in launches[WATCHED]]
    same = "are the same in all launches" if passed else "DIFFER between launches"
    notes = [
        f"the run: {shape}, {seq_len} tokens a sample, 8 samples a batch, a save every {SAVE_INTERVAL} batches",
        f"{', '.join(SAME)} of each batch, and the digest of the last state, {same}, to the last bit",
        f"alerts received in a watched launch: {frame.spread(num_alerts):.0f}; metrics read: "
        f"{frame.spread(num_readings):.0f} times",
    ]
    command = f"python -m benchmarks watched --shape {shape} --num-batches {num_batches} --num-rounds {num_rounds}"
    frame.tell(
        report,
        table,
        notes,
        name="watched",
        heading="What watching a run costs",
        command=command,
        asked=("shape", "seq_len"),
        out=out,
    )
    return report


def build_row(report: dict[str, Any], side: str) -> tuple[str, str, str, str, str]:
    """Return the row of the table for one of the two runs."""
    batch_ms = [1000 * seconds for seconds in report["batch_seconds"][side]]
    cpu_seconds = report["cpu_seconds"][side]
    batch_ratio = frame.ratios(report["batch_seconds"][side], report["batch_seconds"][PLAIN])
    cpu_ratio = frame.ratios(cpu_seconds, report["cpu_seconds"][PLAIN])
    return side, f"{frame.spread(batch_ms):.1f}", str(batch_ratio), f"{frame.spread(cpu_seconds):.1f}", str(cpu_ratio)


# ------------------------------------------------------------------------------------------------------ one launch


def measure_launch(yaml: Path, folder: Path, receiver: "Receiver | None") -> Launch:
    """Train the run once from its beginning in a new folder, and measure it. With a `receiver`, everything watches.

    Raises DataError with the launch's last lines if it fails.
    """
    with tempfile.TemporaryDirectory(dir=folder, prefix="launch-") as launch_folder:
        run_folder = Path(launch_folder, "run")
        options = [f"run_folder={run_folder}", f"save_interval={SAVE_INTERVAL}ba"]
        options += ["log_to_console=true", "console_log_interval=1ba"]
        environment = dict(os.environ)
        port = None
        if receiver is None:
            options.append("stragglers=null")
        else:
            port = find_free_port()
            options += ["alerts.webhook=${oc.env:ALERT_URL}", f"metrics_port={port}", "console_format=json"]
            options += [f"save_fallback={launch_folder}/second", "stragglers.interval=1ba"]
            environment["ALERT_URL"] = receiver.url
            receiver.num_received = 0

        output = Path(launch_folder, "output.txt")
        command = [sys.executable, "-m", "llmfoundry_lite", "train", "-n", "2", str(yaml), *options]
        used_before = resource.getrusage(resource.RUSAGE_CHILDREN)
        with output.open("wb") as file, read_metrics(port) as readings:
            exit_code = subprocess.run(command, env=environment, stdout=file, stderr=file).returncode
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        if exit_code != 0:
            raise DataError(f"bench watched: a launch ended with {exit_code}: {last_lines(output, 3, ' | ')}")

        by_batch = Log(run_folder / "metrics.jsonl").last_of_each_batch()
        timed = [record["time/batch_seconds"] for batch, record in by_batch.items() if batch > SKIPPED_BATCHES]
        return Launch(
            batch_seconds=statistics.median(timed),
            cpu_seconds=used.ru_utime + used.ru_stime - used_before.ru_utime - used_before.ru_stime,
            records=[[record.get(name) for name in SAME] for record in by_batch.values()],
            last_digest=read_digest(run_folder, max(by_batch)),
            num_alerts=receiver.num_received if receiver is not None else 0,
            num_readings=readings["answers"],
        )


def find_free_port() -> int:
    """Return a port of loopback that nothing listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def read_digest(run_folder: Path, batch: int) -> str | None:
    """Return the digest of weights and optimizer state in the checkpoint after a batch."""
    return open_checkpoint(run_folder / f"checkpoints/ba{batch}").manifest.state_digest


class Receiver(http.server.ThreadingHTTPServer):
    """Receiver of alerts on loopback, which counts them."""

    num_received = 0

    @property
    def url(self) -> str:
        """Address to which alerts are sent."""
        return f"http://127.0.0.1:{self.server_port}/"


class CountAlerts(http.server.BaseHTTPRequestHandler):
    """Answers each alert, and counts it."""

    server: Receiver

    def do_POST(self) -> None:
        """Count an alert that is valid JSON."""
        content = self.rfile.read(int(self.headers["Content-Length"]))
        json.loads(content)
        self.server.num_received += 1
        self.send_response(204)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""


@contextmanager
def receive_alerts() -> Iterator[Receiver]:
    """Run a receiver of alerts in a thread."""
    server = Receiver(("127.0.0.1", 0), CountAlerts)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def read_metrics(port: int | None) -> Iterator[Counter[str]]:
    """Read a launch's metrics once a second in a thread, if it serves any. Yields how often, as "answers"."""
    readings: Counter[str] = Counter()
    is_over = threading.Event()

    def read() -> None:
        while not is_over.wait(SCRAPE_SECONDS):
            with suppress(OSError):  # the launch does not serve them yet, or has ended
                urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5).read()
                readings["answers"] += 1

    if port is None:
        yield readings
        return
    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield readings
    finally:
        is_over.set()
        thread.join()
