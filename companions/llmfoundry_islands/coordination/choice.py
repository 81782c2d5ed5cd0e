"""The choice of islands that train together: those that train the same run and can divide a batch, the fastest first.

Every island that is not refused can divide a batch alone. Some combinations cannot, because each island has whole
microbatches. The functions take names, and all islands by their names.
"""

import math
from collections.abc import Mapping, Sequence
from ipaddress import ip_address
from itertools import combinations

from llmfoundry_islands.coordination.division import Pace, divide
from llmfoundry_islands.coordination.island import Island
from llmfoundry_lite.errors import ConfigError

MAX_TRIED = 10
"""If all islands together cannot divide a batch, every combination of this many of the fastest is tried."""


def choose_joiners(
    members: Sequence[str], waiting: Sequence[str], islands: Mapping[str, Island], num_rows: int
) -> list[str]:
    """Return the waiting islands with which the members can divide a batch of `num_rows`.

    An island that does not fit alone may fit together with another one, so all are tried again after each that fits.
    """
    joiners: list[str] = []
    remaining = list(waiting)
    while remaining:
        name = remaining.pop(0)
        if not why_not_divisible([*members, *joiners, name], islands, num_rows):
            joiners.append(name)
            remaining = [other for other in waiting if other not in joiners]
    return joiners


def choose_members(members: Sequence[str], islands: Mapping[str, Island], num_rows: int) -> list[str]:
    """Return the members that go on: all of them, or the fastest combination if they cannot divide a batch together.

    A combination that has the run's weights comes first. There is always one, because each island can divide a batch
    alone (`why_refused`).
    """
    if not why_not_divisible(members, islands, num_rows):
        return list(members)
    rates = {name: pace.rate for name, pace in paces_of(members, islands).items()}
    fastest = sorted(members, key=lambda name: -rates[name])[:MAX_TRIED]

    def quality(choice: Sequence[str]) -> tuple[bool, float]:
        has_state = any(islands[name].has_state for name in choice)
        return has_state, sum(rates[name] for name in choice)

    choices = [choice for count in range(1, len(fastest) + 1) for choice in combinations(fastest, count)]
    choices.sort(key=quality, reverse=True)
    return sorted(next(choice for choice in choices if not why_not_divisible(choice, islands, num_rows)))


def why_not_divisible(names: Sequence[str], islands: Mapping[str, Island], num_rows: int) -> str:
    """Return why these islands cannot divide a batch of `num_rows`. The result is empty if they can."""
    try:
        divide(num_rows, paces_of(names, islands))
    except ConfigError as error:
        return str(error)
    return ""


def paces_of(names: Sequence[str], islands: Mapping[str, Island]) -> dict[str, Pace]:
    """Return the islands' paces: by measured rates if all of them have one, and else by `islands.weight`."""
    are_measured = all(islands[name].rate.value for name in names)
    paces = {}
    for name in names:
        island = islands[name]
        rate = (are_measured and island.rate.value) or island.facts["weight"]
        data_ranks = island.facts["data_ranks"]
        paces[name] = Pace(data_ranks, island.facts["microbatch"], float(rate), data_ranks * island.facts["unit"])
    return paces


# Who is refused -------------------------------------------------------------------------------------------------------


def why_refused(island: Island, islands: Mapping[str, Island]) -> str:
    """Return why an island cannot take part. The result is empty if it can.

    It cannot if its ranks contradict each other, it cannot divide a batch alone, or it differs from another one of
    `islands`, which are by name.
    """
    common_facts = ("fingerprints", "rows", "microbatch", "unit", "batch", "data_ranks")
    for hello in island.hellos.values():
        if any(hello[key] != island.facts[key] for key in common_facts):
            return f"{island.name}: its ranks differ in their configuration"
    reason = why_not_divisible([island.name], islands, island.facts["rows"])
    if reason:
        return reason
    for other in islands.values():
        if other is island or not other.has_all_ranks:
            continue
        reason = _difference(island, other)
        if not reason and _tensors_of(other) != _tensors_of(island):
            reason = f"{island.name} and {other.name} differ in their parameters; islands train one run"
        reason = reason or _out_of_reach(island, other) or _out_of_reach(other, island)
        if reason:
            return reason
    return ""


def _difference(island: Island, other: Island) -> str:
    """Return which setting differs between two islands that must train the same. The result is empty if none does."""
    fingerprints = island.facts["fingerprints"]
    other_fingerprints = other.facts["fingerprints"]
    keys = sorted({*fingerprints, *other_fingerprints})
    differing = [key for key in keys if fingerprints.get(key) != other_fingerprints.get(key)]
    if not differing and island.facts["rows"] != other.facts["rows"]:
        differing = ["global_train_batch_size"]
    if not differing:
        return ""
    return f"{island.name} and {other.name} differ in {', '.join(differing)}; islands train one run"


def _out_of_reach(island: Island, other: Island) -> str:
    """Return why the ranks of `other` cannot reach those of `island`. The result is empty if no reason is known.

    A loopback address is out of reach if the coordinator has seen the two islands' connections come from different
    hosts (`host` of their hellos, which `serve` adds).
    """
    other_hosts = {hello.get("host") for hello in other.hellos.values()}
    for hello in island.hellos.values():
        listening_address, _ = hello["address"]
        is_on_other_host = bool(other_hosts - {hello.get("host")})
        if ip_address(listening_address).is_loopback and is_on_other_host:
            return (
                f"{island.name} listens at {listening_address}, where {other.name} on another host does not reach it; "
                "give islands.address an address of its host"
            )
    return ""


def _tensors_of(island: Island) -> dict[str, int]:
    """Return each tensor's number of elements.

    The boxes that an island's ranks hold of a tensor are equal, or do not overlap. So it is the sum over different
    boxes.
    """
    different_boxes = {}
    for hello in island.hellos.values():
        for name, box in hello["boxes"].items():
            different_boxes[name, str(box)] = box
    sizes: dict[str, int] = {}
    for (name, _), (_, lengths) in different_boxes.items():
        sizes[name] = sizes.get(name, 0) + math.prod(lengths)
    return sizes
