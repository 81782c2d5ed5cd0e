"""Local steps over slow links: the loss at equal tokens, the bytes, and the share of the time spent on computation.

    python -m benchmarks islands-local --out results                   about 25 minutes on two quiet cores

Two and four islands of one rank each train a small MPT with an outer step after every 10, 50, 100 and 500 batches. Two
islands also exchange in int8, and in fragments that are sent while they compute. One world, a launch without islands,
trains the same batches for comparison. The loss is that of the validation data after the last outer step.

A proxy holds each link between two islands to a rate and a delay (`links.py`). The coordinator's links are not slowed.
Ranks are forks of processes that have imported the code, one for each island (`faults.Keeper`).

A cell of the tables is a number of islands, batches between outer steps, and a variant; it has a run for each seed.
"""

import json
import math
import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import Log
from benchmarks.islands.faults import Keeper
from benchmarks.islands.launches import coordinated
from benchmarks.islands.links import set_links
from benchmarks.switch.figure import COLOURS, QUIET
from benchmarks.switch.switch import configuration, prepare_data
from benchmarks.switch.workshop import Workshop
from llmfoundry_lite.config.model_schema import AttentionConfig, ModelConfig
from llmfoundry_lite.errors import UserError
from llmfoundry_lite.models.flops import count_parameters
from llmfoundry_lite.report.canvas import fixed_settings, plt, save_figure
from llmfoundry_lite.report.log import LOSS, SECONDS
from llmfoundry_lite.tables import Table
from llmfoundry_machines.bench.frame import describe_conditions, measured_table, open_console, tell

NAMES = "abcd"
"""Islands."""
ROWS, SEQ_LEN = 8, 32
"""Samples of a batch, and tokens of a sample."""
BITS_PER_SECOND, DELAY_SECONDS = 10e6, 0.05
"""Links between islands, each way."""
STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}
"""Number of seeds -> the factor of a 95 % interval of the mean (Student's t)."""
SILENCE_SECONDS = 60.0
"""So long that no island is left out on a busy machine."""
EXACT_BATCHES = 8
"""Batches of the run with exact sums, which is only timed."""
VARIANTS = {
    "": [],
    "int8": ["dtype=int8"],
    "4 fragments, delay 12": ["fragments=4", "delay=12ba"],
    "4 fragments, delay 5, int8": ["fragments=4", "delay=5ba", "dtype=int8"],
}
"""Name -> settings of local steps. All except the first are trained by two islands, every VARIED batches."""
VARIED = 100
# What was trained, bytes, what was found, source.
PUBLISHED = (
    ("DiLoCo, 8 workers, every 500", "500 times less", "loss as synchronous or lower", "arXiv 2311.08105"),
    ("INTELLECT-1, 10B, every 100, int8", "400 times less", "83-96 % of the time computing", "arXiv 2412.01152"),
    ("Streaming DiLoCo, 4 bits, overlapped", "100 times less bandwidth", "similar quality", "arXiv 2501.18512"),
)


def run(
    *,
    data: Path = Path("data/python-stdlib"),
    num_batches: int = 500,
    every: Sequence[int] = (100, 500, 50, 10),
    num_seeds: int = 3,
    costly_seeds: int = 1,
    minutes: float = 60.0,
    out: Path | None = None,
    keep: Path | None = None,
) -> dict[str, Any]:
    """Train all cells, print the tables, and return the report. `out` gets islands-local.json, .md and .png.

    `every` are the numbers of batches between outer steps. Cells of four islands, and those with outer steps every 10
    batches, have only `costly_seeds` seeds. No run begins after `minutes`; the number of those left is reported. Raises
    UserError.
    """
    console, conditions = open_console(), describe_conditions()
    prepare_data(data)

    # Every cell with its number of seeds. The first seed of all cells is trained before the second.
    cells = [((1, 0, ""), num_seeds)]
    cells += [((2, interval, ""), costly_seeds if interval < 50 else num_seeds) for interval in every]
    cells += [((2, VARIED, variant), num_seeds) for variant in VARIANTS if variant]
    cells += [((4, interval, ""), costly_seeds) for interval in every]
    runs_left = [
        (*cell, seed) for seed in range(num_seeds) for cell, num_seeds_of_cell in cells if seed < num_seeds_of_cell
    ]
    runs: list[dict[str, Any]] = []
    started = time.monotonic()
    with nullcontext(keep) if keep else tempfile.TemporaryDirectory() as folder:
        trainer = RunTrainer(Path(folder).resolve(), data.resolve(), num_batches)
        try:
            exact = trainer.train(2, 0, "", 0, EXACT_BATCHES)
            while runs_left and time.monotonic() - started < 60 * minutes:
                try:
                    runs.append(trainer.train(*runs_left[0]))
                except UserError as error:
                    # On a busy machine, a rank may take the coordinator for dead. The run is repeated.
                    console.print(f"again: {error}", highlight=False)
                    continue
                runs_left.pop(0)
                shown = {key: runs[-1][key] for key in ("islands", "every", "variant", "seed", "loss", "seconds")}
                console.print(json.dumps(shown), highlight=False)
        finally:
            trainer.end()

    report = conditions | {"num_batches": num_batches, "num_seeds": num_seeds, "costly_seeds": costly_seeds}
    report |= {"num_left": len(runs_left), "minutes": (time.monotonic() - started) / 60}
    report |= {"num_parameters": trainer.num_parameters, "runs": runs, "exact": exact, "passed": True}
    present(report, out)
    return report


def present(report: dict[str, Any], out: Path | None) -> None:
    """Add the means of all cells to the report, and print it. With `out`, write it there."""
    cells = sorted({cell_of(run) for run in report["runs"]})
    report["cells"] = [summarise(report["runs"], *cell) for cell in cells]
    introduction = (
        f"{report['num_batches']} batches of {ROWS} x {SEQ_LEN} tokens, {report['num_parameters'] / 1e6:.1f} M "
        f"parameters, fp32. Each link: {BITS_PER_SECOND / 1e6:g} Mbit/s each way, {DELAY_SECONDS * 2e3:g} ms there and "
        "back."
    )
    page = {"name": "islands-local", "heading": "Local steps over slow links", "plot": plot}
    seeds = f"--num-seeds {report['num_seeds']} --costly-seeds {report['costly_seeds']}"
    command, asked = f"python -m benchmarks islands-local {seeds}", ("num_batches", "num_seeds", "costly_seeds")
    tell(
        report,
        introduction,
        table_of(report),
        notes_of(report),
        published(),
        command=command,
        asked=asked,
        **page,
        out=out,
    )


class RunTrainer:
    """Trains the runs, one after the other, on processes that have imported the code. `end` has to be called."""

    def __init__(self, folder: Path, data: Path, num_batches: int):
        """Write the YAML, a smaller run than that of the switch benchmark, and start each island's server."""
        self.folder, self.num_runs = folder, 0
        config = configuration(data, num_batches, num_batches, "fp32", 17)
        config |= {"max_seq_len": SEQ_LEN, "global_train_batch_size": ROWS, "device_train_microbatch_size": 8}
        config |= {"eval_subset_num_batches": 64, "device_eval_batch_size": 8, "save_interval": "100000ba"}
        config["model"] |= {"max_seq_len": SEQ_LEN, "n_layers": 2}
        config["optimizer"]["lr"] = 2e-3
        for key in ("train_loader", "eval_loader"):
            config[key]["dataset"].pop("shuffle_seed", None)

        # Count the parameters without building the model.
        shape = config["model"]
        model = {key: value for key, value in shape.items() if key not in ("name", "attn_config")}
        self.num_parameters = count_parameters(
            ModelConfig(name="mpt_causal_lm", **model, attn_config=AttentionConfig(fused_qkv=True))
        )
        self.workshop = Workshop(folder=folder, config=config | {"export_at_end": False}, clusters=())
        self.workshop.prepare()
        self.links = folder / "links.json"
        set_links(self.links, "open", BITS_PER_SECOND, DELAY_SECONDS)
        yaml = folder / "run.yaml"
        self.keepers = [Keeper(folder, yaml, name, 1, [], "llmfoundry_lite.launch_train") for name in NAMES]

    def train(self, count: int, every: int, variant: str, seed: int, stop_after: int | None = None) -> dict[str, Any]:
        """Train one run to its end, and return its row of the report.

        `count` is the number of islands, and `every` the batches between outer steps; 0 for exact sums, or for one
        world without islands. `variant` is a key of VARIANTS. Raises UserError when an island fails.
        """
        self.num_runs += 1
        name = f"run-{self.num_runs}"
        settings = [f"run_name={name}", f"seed={17 + seed}", f"save_folder={self.folder / 'saves' / name}"]
        settings += [f"train_loader.dataset.shuffle_seed={17 + seed}"]
        settings += [f"stop_after={stop_after}ba"] if stop_after else []
        settings += [f"islands.sync.{setting}" for setting in (f"every={every}ba", *VARIANTS[variant])] if every else []

        cell = {"islands": count, "every": every, "variant": variant, "seed": seed}
        if count == 1:
            return cell | self._record([self._launch(self.keepers[0], name, settings)])
        # Several islands: a coordinator, and a thread for each island's launch.
        with (
            coordinated(self.workshop, name, count, self.links, SILENCE_SECONDS) as address,
            ThreadPoolExecutor(count) as pool,
        ):

            def launch(keeper: Keeper) -> Log:
                """Train one island to its end, and return its log."""
                island_settings = [f"islands.coordinator={address}", f"islands.name={keeper.name}"]
                return self._launch(keeper, name, [*settings, *island_settings])

            return cell | self._record(list(pool.map(launch, self.keepers[:count])))

    def _launch(self, keeper: Keeper, run: str, settings: Sequence[str]) -> Log:
        """Run one launch to its end, and return its log. Raises UserError if it fails."""
        run_folder = self.folder / "runs" / run / keeper.name
        keeper.arguments = [str(self.folder / "run.yaml"), *settings, f"run_folder={run_folder}"]
        if exit_code := keeper.launch():
            raise UserError(f"bench islands-local: {run}: {keeper.name} left with {exit_code}, see {self.folder}")
        return Log(run_folder / "metrics.jsonl")

    def _record(self, logs: Sequence[Log]) -> dict[str, Any]:
        """Summarise a run by the logs of its islands.

        Losses, seconds and bytes are those of the first island. `compute_seconds` are those of the slowest island. An
        exchange lasts from the arrival of its last island until the commit: that is the shortest time that any island
        waited for it. The last exchange comes after the last batch's time, so it is added.
        """
        records_of_islands = [[record for _, record in sorted(log.last_of_each_batch().items())] for log in logs]
        first, last = records_of_islands[0], records_of_islands[0][-1]
        computing = max(
            sum(record.get("islands/compute_seconds", 0.0) for record in records) for records in records_of_islands
        )

        def waited(record: dict[str, Any]) -> float:
            """Return the seconds that an island waited for the exchange after this batch."""
            return record["islands/exchange_seconds"] + record["islands/decision_seconds"]

        exchanged_batches = [
            records_of_batch
            for records_of_batch in zip(*records_of_islands, strict=True)
            if "islands/exchange_seconds" in records_of_batch[0]
        ]
        exchanges = [min(map(waited, records_of_batch)) for records_of_batch in exchanged_batches]
        # Without local steps, every batch has the loss of the whole; with them, only outer steps do.
        is_synchronous = "islands/loss" not in last
        losses = [
            (record["batch"], record[LOSS if is_synchronous else "islands/loss"])
            for record in first
            if is_synchronous or "islands/loss" in record
        ]
        return {
            "loss": last.get("eval/loss"),
            "seconds": sum(record[SECONDS] for record in first) + (0.0 if is_synchronous else waited(last)),
            "compute_seconds": computing,
            "exchange_seconds": statistics.fmean(exchanges) if exchanges else None,
            "bytes": sum(record.get("islands/bytes", 0) for record in first),
            "num_batches": len(first),
            "tokens": last["time/token"],
            "losses": losses,
        }

    def end(self) -> None:
        """Kill all processes."""
        for keeper in self.keepers:
            keeper.end()


# ------------------------------------------------------------------------------------------------------ what it shows


def cell_of(run: dict[str, Any]) -> tuple[int, int, str]:
    """Return the cell that a run belongs to: islands, batches between outer steps, variant."""
    return run["islands"], run["every"], run["variant"]


def summarise(runs: Sequence[dict[str, Any]], count: int, every: int, variant: str) -> dict[str, Any]:
    """Return the means of one cell over its seeds.

    `difference` is the loss less that of one world with the same seed, `half` half of its 95 % interval (None for one
    seed).
    """
    loss_of_one_world = {run["seed"]: run["loss"] for run in runs if run["islands"] == 1}
    runs_of_cell = [run for run in runs if cell_of(run) == (count, every, variant)]
    # Pairs of the same seed, so that the seed's own effect drops out.
    differences = [run["loss"] - loss_of_one_world[run["seed"]] for run in runs_of_cell]
    num_seeds = len(runs_of_cell)
    half_interval = STUDENT[num_seeds] * statistics.stdev(differences) / math.sqrt(num_seeds) if num_seeds > 1 else None
    means = {"islands": count, "every": every, "variant": variant, "seeds": num_seeds, "half": half_interval}
    means |= {
        "loss": statistics.fmean(run["loss"] for run in runs_of_cell),
        "difference": statistics.fmean(differences),
    }

    for key in ("seconds", "compute_seconds", "exchange_seconds", "bytes"):
        values = [run[key] for run in runs_of_cell if run[key] is not None]
        means[key] = statistics.fmean(values) if values else None
    return means


def table_of(report: dict[str, Any]) -> Table:
    """Return a table with a row for each cell."""
    rows = []
    gradient_bytes = 4 * report["num_parameters"] * report["num_batches"]
    for cell in report["cells"]:
        count, every, half = cell["islands"], cell["every"], cell["half"]
        # Gradients that an island would send and receive without local steps, to and from each other island.
        num_gradients = 2 * (count - 1)
        difference = f"{cell['difference']:+.3f}" + ("" if half is None else f" ± {half:.3f}") if every else ""
        bytes_cells = (
            [f"{cell['bytes'] / 1e6:,.0f}", f"{num_gradients * gradient_bytes / cell['bytes']:.0f}"]
            if every
            else ["", ""]
        )
        exchange_cells = [f"{cell['exchange_seconds']:.1f}"] if every else [""]
        compute_cells = [f"{cell['compute_seconds'] / cell['seconds']:.0%}"] if every else [""]
        name = "a single launch" if count == 1 else f"{count} islands, every {every}"
        name += f", {cell['variant']}" * bool(cell["variant"])
        rows.append(
            [
                name,
                str(cell["seeds"]),
                f"{cell['loss']:.3f}",
                difference,
                *bytes_cells,
                f"{cell['seconds']:.0f}",
                *exchange_cells,
                *compute_cells,
            ]
        )
    headings = [
        "",
        "seeds",
        "loss, nats",
        "above a single launch",
        "MB of an island",
        "times fewer",
        "s",
        "s of an exchange",
    ]
    return measured_table("local steps compared with a single launch", [*headings, "computing"], rows)


def published() -> Table:
    """Return the table of what others have published."""
    return Table("what was published", ["", "bytes", "found", "source"], [list(row) for row in PUBLISHED], ())


def notes_of(report: dict[str, Any]) -> list[str]:
    """Return the notes below the tables."""
    exact = report["exact"]
    per_batch = exact["seconds"] / exact["num_batches"]
    return [
        "loss: on the validation data after the last outer step, and its difference to a single launch with the same "
        "seeds, with a 95 % interval if there are several seeds. The islands use the single launch's learning rate, "
        "untuned",
        "MB: sent and received by one island; times fewer: compared with a gradient of every batch, both ways, to all "
        "others",
        f"two exact islands over the same link: {per_batch:.1f} s per batch, over {exact['num_batches']} batches; "
        f"{report['num_batches']} would take {per_batch * report['num_batches'] / 60:.0f} minutes",
        "computing: the slowest island's share of the time. All ranks share two cores with other work, so compare "
        f"seconds only within this table; load average before the run {report['load_average']:.1f}",
        "s of an exchange: from the arrival of the last island to the commit. Fragments have been sent by then, and an "
        "exchange is of one fragment",
        *([f"the time was not enough for {report['num_left']} runs more"] if report["num_left"] else ()),
    ]


@fixed_settings()
def plot(report: dict[str, Any], path: Path) -> None:
    """Draw the loss by batch, and the difference to one world by the bytes that were sent, as a PNG.

    The left panel has one seed of the runs without a variant; the right one has all cells.
    """
    figure = plt.figure(figsize=(11, 4.6), layout="constrained", dpi=150)
    left, right = figure.subplots(1, 2, width_ratios=(1.5, 1))
    colour_of_interval = dict(
        zip(sorted({cell["every"] for cell in report["cells"]} - {0}), (*COLOURS, "#8c564b"), strict=False)
    )
    # Left: single losses of a launch are noisy, so their means are drawn.
    for run in sorted(report["runs"], key=lambda run: run["every"]):
        if run["seed"] != report["runs"][0]["seed"] or run["islands"] > 2 or run["variant"]:
            continue
        batches, losses = np.array(run["losses"]).T
        if run["islands"] == 1:
            means = np.convolve(losses, np.ones(10) / 10, "valid")
            left.plot(batches[9:], means, color=QUIET, lw=2.5, alpha=0.6, label="one world, means of 10 batches")
        else:
            label = f"two islands, local steps, every {run['every']}"
            left.plot(batches, losses, "o-", ms=3, lw=1, color=colour_of_interval[run["every"]], label=label)
    left.set_xlabel("batch")
    left.set_ylabel("training loss of a round, nats per token")
    left.legend(frameon=False, fontsize=8.5)
    # Right: the marker says the number of islands or the variant, the colour the interval.
    markers = {(2, ""): "o", (4, ""): "s"}
    for marker, variant in zip("^vD", (variant for variant in VARIANTS if variant), strict=True):
        markers[2, variant] = marker
    for (count, variant), marker in markers.items():
        for cell in (cell for cell in report["cells"] if (cell["islands"], cell["variant"]) == (count, variant)):
            place, style = (cell["bytes"] / 1e6, cell["difference"], cell["half"]), {"fmt": marker, "capsize": 3}
            right.errorbar(*place, color=colour_of_interval[cell["every"]], **style)
        right.plot([], [], marker, color=QUIET, label=variant or f"{count} islands")
    right.legend(frameon=False, fontsize=8.5, title="colour: every, as on the left", title_fontsize=8.5)
    right.axhline(0.0, color=QUIET, lw=0.8)
    right.set_xscale("log")
    right.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    right.set_xlabel("MB sent and received by an island")
    right.set_ylabel("validation loss less one world's, nats")
    figure.suptitle("Local steps are another run than one world's: what they cost and save", fontsize=11)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25, linewidth=0.6)
    save_figure(figure, path)
