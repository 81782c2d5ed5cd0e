"""Measure the share of an exchange that overlap with the backward pass hides, and count the bytes that islands send.

    python -m benchmarks islands-overlap --out results               about 4 minutes, on a busy machine too

Ranks of real launches would share the cores with proxies and exchange. To leave the cores out, ranks are threads here,
and their computation is sleep: a backward pass sleeps for each block and then passes the block's gradient on. The proxy
of `links.py`, in this process, holds the first island's link to a rate. Everything between a gradient and its sum is
the product's code.

Three kinds of steps alternate: without exchange, with gradients that are sent during the backward pass, and with
gradients that are sent after it. They are compared with a formula, in which X is the time of sending the whole gradient
over the first link, H is the backward pass after its first block, and X_last is the time of what comes last: max(X - H,
X_last).

Then the gradients of a small real model are packed, to see how many bytes exact sums take.
"""

import asyncio
import os
import statistics
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks.islands.links import Links, set_links
from llmfoundry_islands.coordination.owners import divide_sum, sent_gradients
from llmfoundry_islands.tensors.boxes import Box, rows_of
from llmfoundry_islands.tensors.exchange import Exchange, Ranks
from llmfoundry_islands.tensors.packing import pack_sums
from llmfoundry_islands.tensors.summing import Summing, SumPlan
from llmfoundry_lite.config.model_schema import AttentionConfig, ModelConfig
from llmfoundry_lite.models.initialise import initialise_weights
from llmfoundry_lite.models.mpt import MPT
from llmfoundry_lite.parallel.exact import GRID_BITS
from llmfoundry_lite.tables import Table
from llmfoundry_machines.bench.frame import describe_conditions, measured_table, open_console, tell

BLOCKS = {f"blocks.{i}.w": Box((0, 0), (512, 256)) for i in range(8)}
BOXES = {**BLOCKS, "wte": Box((0, 0), (1024, 256))}
"""Parameters of the one rank of each island: 1.3 M, a fifth of them outside of blocks."""
NUM_PARAMETERS = sum(box.size for box in BOXES.values())
FORWARD_SECONDS, BACKWARD_SECONDS = 1.0, 2.0
HIDDEN_SECONDS = BACKWARD_SECONDS * (1 - 1 / len(BLOCKS))
"""H of the formula: no gradient is sent before that of the first block has been computed."""
CASES = ((2, 50, False), (2, 12, False), (3, 25, True), (3, 25, False))
"""Number of islands, Mbit/s of the first one's link, and whether the sum has owners."""
REPEATS = 3
"""Steps of each kind, of which the median counts."""
SECRET = b"of this process alone"
NUM_7B = 6_649_286_656
"""Parameters of MPT-7B."""
SLOW_LINK = 10
"""How many times slower one link is than the others, in the table of bytes."""
NUM_STEPS = 20
"""Steps that the small model trains before its gradients are packed."""
BYTE_VALUES = 256
"""Its vocabulary: it reads text byte by byte."""


def run(*, out: Path | None = None) -> dict[str, Any]:
    """Time the steps, pack the gradients, print the tables, and return the report, which `out` also gets."""
    console, conditions = open_console(), describe_conditions()
    loads = [os.getloadavg()[0]]
    with tempfile.TemporaryDirectory() as folder:
        console.print("timing: ranks that sleep and exchange")
        paced = measure(Path(folder))
    loads.append(os.getloadavg()[0])
    console.print("packing: gradients of a small model")
    packed = pack_real_gradients()

    report = conditions | {"paced": paced, "packed": packed, "loads": loads}
    tables = measured_table("steps of islands", HEADINGS, list_rows(paced)), bytes_of_7b(packed["bytes"])
    # The target holds for gradients that are sent during the backward pass. The worst case counts.
    overlapped = [row for row in paced if row["early"]]
    worst, worst_by_measured_rate = (
        min(row[key] / row["seconds"] for row in overlapped) for key in ("expected", "expected_of_link")
    )
    report["reached"] = {"by the link's rate": worst, "by its measured rate": worst_by_measured_rate}

    introduction = (
        f"Ranks sleep {FORWARD_SECONDS:g} s forward and {BACKWARD_SECONDS:g} s backward, for {len(BLOCKS)} blocks; "
        f"{NUM_PARAMETERS:,} parameters, fp32; medians of {REPEATS} steps each."
    )
    notes = [
        f"0.95 of the formula with overlap: {verdict(worst)}, {worst:.3f} at least; by the rate that the link had "
        f"where gradients left after the backward pass: {verdict(worst_by_measured_rate)}, "
        f"{worst_by_measured_rate:.3f}; load average {loads[0]:.0f} before, {loads[1]:.0f} after, which delays the "
        "proxy",
        "by formula: the step without exchange and max(X - H, X_last), X the bytes that the first island sends over "
        "its link's rate, H the backward pass after its first block, X_last what is outside of blocks and comes last; "
        "with owners its sum comes back, another X_last",
        f"packed exact sums take {packed['bytes']:.2f} bytes a number: gradients of {packed['num_parameters']:,} "
        f"parameters after {NUM_STEPS} steps, of root mean square {packed['rms']:.1e}; float64 takes 8",
    ]
    heading, command = "What overlap hides of the exchange between islands", "python -m benchmarks islands-overlap"
    tell(
        report,
        introduction,
        *tables,
        notes,
        name="islands-overlap",
        heading=heading,
        command=command,
        asked=(),
        out=out,
    )
    return report


def verdict(ratio: float) -> str:
    """Say whether a ratio of formula to measurement reaches the target, 0.95."""
    return "reached" if ratio >= 0.95 else "MISSED"


def measure(folder: Path) -> list[dict[str, Any]]:
    """Time steps of every case in turns: without exchange, with gradients sent during the backward pass, and after it.

    Returns two rows for each case, for gradients sent during the backward pass (`early`) and after it. `expected` is
    the step by formula, with the link's set rate. `expected_of_link` uses the rate that the link had where nothing was
    hidden.
    """
    rows = []
    for num_islands, megabits, has_owners in CASES:
        # The first island's link is the slow one.
        links = dict.fromkeys("abcd"[:num_islands], 1.0) | {"a": 0.1}
        shares = divide_sum(links) if has_owners else {}
        with proxy(folder / "paced.json", megabits * 1e6) as through:
            exchanges = {name: Exchange(name, 0, "127.0.0.1", SECRET) for name in links}
            addresses = {name: exchange.address for name, exchange in exchanges.items()} | {
                "a": through(exchanges["a"].address)
            }
            plans = connect(exchanges, addresses, shares)
            seconds_of_rounds = [
                [train(exchanges, plans, is_early) for is_early in (None, True, False)] for _ in range(REPEATS)
            ]
            num_steps_with_exchange = 2 * REPEATS
            bytes_of_a = exchanges["a"].num_bytes / num_steps_with_exchange
            for exchange in exchanges.values():
                exchange.close()

        # Medians of the three kinds of steps, and what the formula says.
        alone, early, late = (statistics.median(seconds) for seconds in zip(*seconds_of_rounds, strict=True))
        gradient = sent_gradients(shares, "a", num_islands) * 32 * NUM_PARAMETERS / (megabits * 1e6)
        slower = (late - alone) / seconds_left(gradient, 0.0, has_owners)
        for hidden, seconds in ((HIDDEN_SECONDS, early), (0.0, late)):
            case = {"islands": num_islands, "megabits": megabits, "has_owners": has_owners, "early": hidden > 0}
            times = {"alone": alone, "seconds": seconds, "gradient_seconds": gradient}
            times["expected"] = alone + seconds_left(gradient, hidden, has_owners)
            times["expected_of_link"] = alone + seconds_left(slower * gradient, hidden, has_owners)
            rows.append(case | times | {"bytes": bytes_of_a / (2 * NUM_PARAMETERS)})
    return rows


def seconds_left(gradient: float, hidden: float, has_owners: bool) -> float:
    """Return the seconds of an exchange that the backward pass does not hide, by the formula.

    `gradient` is X and `hidden` is H, both in seconds; 0 for `hidden` if gradients are sent after the backward pass.
    With owners, the sum of what is sent last has to come back, which takes as long again.
    """
    last_bucket_seconds = gradient * BOXES["wte"].size / NUM_PARAMETERS
    return max(gradient - hidden, last_bucket_seconds) + (last_bucket_seconds if has_owners else 0.0)


def connect(
    exchanges: Mapping[str, Exchange], addresses: Mapping[str, tuple[str, int]], shares: dict[str, int]
) -> dict[str, SumPlan]:
    """Connect all islands with each other, and return the plan of each one's sum."""

    def meet(name: str) -> SumPlan:
        """Connect one island to all others."""
        others = {other: Ranks([addresses[other]], [BOXES]) for other in exchanges if other != name}
        exchanges[name].connect(1, BOXES, others)
        return SumPlan.of(name, BOXES, exchanges[name].overlaps, rows_of([BOXES]), shares)

    return {name: meet(name) for name in exchanges}


def train(exchanges: Mapping[str, Exchange], plans: Mapping[str, SumPlan], early: bool | None) -> float:
    """Run one step on all islands at once, and return its seconds.

    `early` says whether gradients are sent during the backward pass; None: nothing is exchanged.
    """
    gradients = {name: torch.ones(box.lengths) for name, box in BOXES.items()}

    def step(name: str) -> None:
        """Run one island's step: sleep as long as the computation takes, and exchange."""
        summing = None if early is None else Summing(exchanges[name], plans[name], 0, 1.0, is_exact=False)
        time.sleep(FORWARD_SECONDS)
        for block in reversed(BLOCKS):
            time.sleep(BACKWARD_SECONDS / len(BLOCKS))
            if summing and early:
                summing.put(block, gradients[block])
        if summing:
            summing.wait(gradients)

    with ThreadPoolExecutor(len(exchanges)) as pool:
        started = time.monotonic()
        list(pool.map(step, exchanges))
        return time.monotonic() - started


@contextmanager
def proxy(path: Path, bits_per_second: float) -> Any:
    """Run proxies in a thread, and yield a function that takes an address and returns the address of its proxy.

    Each direction has this rate. `path` is the file that describes the links.
    """
    set_links(path, bits_per_second=bits_per_second)
    loop, links = asyncio.new_event_loop(), Links(path)
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    through: Callable[[tuple[str, int]], tuple[str, int]] = lambda address: asyncio.run_coroutine_threadsafe(  # noqa: E731
        links.through(*address), loop
    ).result()
    try:
        yield through
    finally:
        asyncio.run_coroutine_threadsafe(end_tasks(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


async def end_tasks() -> None:
    """Cancel all tasks of the event loop, and wait until they have ended."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def list_rows(measured_rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Format the rows of `measure` under HEADINGS."""
    ways = {(2, False): "2 swap", (3, True): "3 with owners", (3, False): "3 all to all"}
    return [
        [
            *(ways[row["islands"], row["has_owners"]], f"{row['megabits']} Mbit/s"),
            "during the backward pass" if row["early"] else "after it",
            *(f"{row[key]:.2f}" for key in ("alone", "gradient_seconds", "expected", "seconds")),
            *(f"{row[key] / row['seconds']:.2f}" for key in ("expected", "expected_of_link")),
            f"{row['bytes']:.2f}",
        ]
        for row in measured_rows
    ]


HEADINGS = ["islands", "link of the first", "gradients leave", "without exchange, s", "X, s", "by formula, s"]
HEADINGS += ["measured, s", "formula / measured", "the same by the link's measured rate", "bytes a parameter, each way"]


# ---------------------------------------------------------------------------------------------------------- the bytes


def pack_real_gradients() -> dict[str, float]:
    """Train a small model on the source of Python's standard library, and pack the gradient of its last batch.

    Returns `bytes` for each number, `num_parameters`, and the gradient's root mean square, `rms`.
    """
    torch.manual_seed(17)
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("[a-h]*.py"))
    text = torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in paths)), dtype=torch.uint8).long()
    shape: dict[str, Any] = {"d_model": 128, "n_heads": 4, "n_layers": 4, "max_seq_len": 128, "vocab_size": BYTE_VALUES}
    with torch.device("meta"):
        model = MPT(ModelConfig(**shape, attn_config=AttentionConfig()), "sdpa")
    model.to_empty(device="cpu")
    initialise_weights(model, 17)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(NUM_STEPS):
        starts = torch.randint(len(text) - 128, (8,))
        tokens_bt = torch.stack([text[start : start + 128] for start in starts])
        logits_btv = model(tokens_bt)
        loss = F.cross_entropy(logits_btv[:, :-1].flatten(0, 1), tokens_bt[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    # Exact sums add multiples of 2^-GRID_BITS, so the gradient is rounded to them.
    gradient = (
        torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])
        .double()
        .numpy()
    )
    rounded_gradient = np.round(gradient * 2.0**GRID_BITS) * 2.0**-GRID_BITS
    bytes_per_number = len(pack_sums(rounded_gradient, GRID_BITS)) / len(gradient)
    return {
        "bytes": bytes_per_number,
        "num_parameters": len(gradient),
        "rms": float(np.sqrt(np.square(gradient).mean())),
    }


def bytes_of_7b(packed_bytes: float) -> Table:
    """Return a table of what each island sends and receives for a batch of MPT-7B, by formula.

    The first column is the least that any exchange has to send. `packed_bytes` is the measured size of a packed number.
    """
    rows = []
    for count in (2, 3, 4):
        names = "abcd"[:count]

        # All links alike, or island a's link SLOW_LINK times slower.
        equal, slow = dict.fromkeys(names, 1.0), {name: 1 / SLOW_LINK ** (name == "a") for name in names}
        gradients_sent = [2 * (count - 1) / count, sent_gradients({}, "a", count)]
        gradients_sent += [sent_gradients(divide_sum(links), "a", count) for links in (equal, slow)]
        fp32 = [f"{num_gradients * 4 * NUM_7B / 1e9:.1f}" for num_gradients in gradients_sent]
        exact = [
            f"{gradients_sent[1] * 8 * NUM_7B / 1e9:.1f}",
            f"{gradients_sent[2] * packed_bytes * NUM_7B / 1e9:.1f}",
        ]
        rows.append([f"{count}", *fp32, *exact])
    headings = ["islands", "least, fp32", "all to all", "owners", "owners, on a link ten times slower"]
    headings += ["exact, all to all, float64", "exact, owners, packed"]
    return measured_table("GB that an island of MPT-7B sends for a batch, and receives, by formula", headings, rows)
