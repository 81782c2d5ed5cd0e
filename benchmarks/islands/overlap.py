"""What overlap hides of an exchange, with the machine's cores left out: ranks are threads whose computing is sleep.

`speed` measures real launches, whose ranks, proxies and exchange share cores. Here a backward pass sleeps for a block
and passes its gradient on. Links are held to a rate by the same proxy, in this process. Everything between the
gradient and its sum is the product's.
"""

import asyncio
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.islands.links import Links, set_links
from llmfoundry_lite.islands.boxes import Box
from llmfoundry_lite.islands.exchange import Exchange, Ranks
from llmfoundry_lite.islands.owners import divide_sum, sent_gradients
from llmfoundry_lite.islands.summing import Plan, Summing

BLOCKS = {f"blocks.{i}.w": Box((0, 0), (512, 256)) for i in range(8)}
BOXES = {**BLOCKS, "wte": Box((0, 0), (1024, 256))}
"""Each island's one rank holds all: 1.3 M parameters, a fifth of them outside of blocks."""
NUM_PARAMETERS = sum(box.size for box in BOXES.values())
FORWARD_SECONDS, BACKWARD_SECONDS = 1.0, 2.0
CASES = ((2, 50, False), (2, 12, False), (3, 25, True), (3, 25, False))
"""Number of islands, Mbit/s of the first one's link, and whether the sum has owners."""
REPEATS = 3
SECRET = b"of this process alone"


def measure(folder: Path) -> list[dict[str, Any]]:
    """Time steps of every case side by side: without exchange, gradients leaving during the backward pass, after it."""
    found = []
    for num_islands, megabits, has_owners in CASES:
        links = dict.fromkeys("abcd"[:num_islands], 1.0) | {"a": 0.1}
        shares = divide_sum(links) if has_owners else {}
        with proxy(folder / "paced.json", megabits * 1e6) as through:
            exchanges = {name: Exchange(name, 0, "127.0.0.1", SECRET) for name in links}
            addresses = {name: one.address for name, one in exchanges.items()} | {"a": through(exchanges["a"].address)}
            plans = connect(exchanges, addresses, shares)
            steps = [[train(exchanges, plans, way) for way in (None, True, False)] for _ in range(REPEATS)]
            bytes_of_a = exchanges["a"].num_bytes / (2 * REPEATS)  # steps that exchange
            for one in exchanges.values():
                one.close()
        alone, *ways = (statistics.median(seconds) for seconds in zip(*steps, strict=True))
        for early, seconds in zip((True, False), ways, strict=True):
            gradient = sent_gradients(shares, "a", num_islands) * 32 * NUM_PARAMETERS / (megabits * 1e6)
            last = gradient * BOXES["wte"].size / NUM_PARAMETERS
            hidden = BACKWARD_SECONDS * (1 - 1 / len(BLOCKS)) if early else 0.0
            expected = alone + max(gradient - hidden, last)
            found.append(
                {
                    "islands": num_islands,
                    "megabits": megabits,
                    "has_owners": has_owners,
                    "early": early,
                    "alone": alone,
                    "seconds": seconds,
                    "expected": expected,
                    "gradient_seconds": gradient,
                    "bytes": bytes_of_a / (2 * NUM_PARAMETERS),
                }
            )
    return found


def connect(
    exchanges: Mapping[str, Exchange], addresses: Mapping[str, tuple[str, int]], shares: Mapping[str, int]
) -> dict[str, Plan]:
    def meet(name: str) -> Plan:
        others = {other: Ranks([addresses[other]], [BOXES]) for other in exchanges if other != name}
        exchanges[name].meet(1, BOXES, others)
        num_rows = {key: box.lengths[0] for key, box in BOXES.items()}
        return Plan.of(name, BOXES, exchanges[name].cuts, num_rows, shares)

    return {name: meet(name) for name in exchanges}


def train(exchanges: Mapping[str, Exchange], plans: Mapping[str, Plan], early: bool | None) -> float:
    """Return the seconds of one step of all islands; None: they exchange nothing."""
    gradients = {name: torch.ones(box.lengths) for name, box in BOXES.items()}

    def step(name: str) -> None:
        summing = None if early is None else Summing(exchanges[name], plans[name], 0, 1.0, is_exact=False)
        time.sleep(FORWARD_SECONDS)
        for block in reversed(BLOCKS):
            time.sleep(BACKWARD_SECONDS / len(BLOCKS))
            if summing and early:
                summing.put(block, gradients[block])
        if summing:
            summing.wait(gradients)

    with ThreadPoolExecutor(len(exchanges)) as pool:
        begun = time.monotonic()
        list(pool.map(step, exchanges))
        return time.monotonic() - begun


@contextmanager
def proxy(path: Path, bits_per_second: float) -> Any:
    """Give a function that returns the proxy's address of another; the proxy holds each direction to the rate."""
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
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def rows_of(found: Sequence[dict[str, Any]]) -> list[list[str]]:
    ways = {(2, False): "2 swap", (3, True): "3 with owners", (3, False): "3 all to all"}
    return [
        [
            *(ways[one["islands"], one["has_owners"]], f"{one['megabits']} Mbit/s"),
            "during the backward pass" if one["early"] else "after it",
            *(f"{one[key]:.2f}" for key in ("alone", "gradient_seconds", "expected", "seconds")),
            f"{one['expected'] / one['seconds']:.2f}",
            f"{one['bytes']:.2f}",
        ]
        for one in found
    ]


HEADINGS = ["islands", "link of the first", "gradients leave", "without exchange, s", "X, s", "by formula, s"]
HEADINGS += ["measured, s", "formula / measured", "bytes a parameter, each way"]
