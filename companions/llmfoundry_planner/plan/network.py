"""Links in and between nodes, what ranks exchange over them in a step, and how long that takes. Arithmetic, no torch.

A group of ranks is a ring: each link of it carries (n - 1) / n of the message, and the slowest link decides. What all
the groups of a node send to other nodes shares the node's adapters. (Thakur, Rabenseifner and Gropp 2005,
"Optimization of Collective Communication Operations in MPICH"; NCCL's rings do the same.) Tests count the exchanges on
real ranks.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from llmfoundry_lite.config.layout import DIMENSIONS, Layout
from llmfoundry_lite.errors import ConfigError
from llmfoundry_planner.plan.rates import (
    ACROSS_LATENCY_SECONDS,
    IN_NODE_LATENCY_SECONDS,
    JITTER,
    LINK_SHARE,
    MI250_JITTER,
    SLINGSHOT_JITTER,
)


@dataclass(kw_only=True, slots=True, frozen=True)
class Node:
    """One machine of a cluster. Bandwidths are in one direction."""

    num_devices: int
    link_bytes_per_second: float
    """Between devices of the node, for each device."""
    adapter_bytes_per_second: float
    """From the node to all others together."""
    power_watts: float
    """Maximum draw of the node, with its processors and fans."""
    source: str
    jitter: float = JITTER
    """Share of a step that each doubling of such nodes adds."""

    def doublings(self, num_devices: int) -> float:
        """Count how often one node is doubled for so many devices."""
        return math.log2(max(1.0, num_devices / self.num_devices))


def _node(
    link_gigabytes: float, adapter_gigabits: float, power_watts: float, source: str, jitter: float = JITTER
) -> Node:
    return Node(
        num_devices=8,
        link_bytes_per_second=link_gigabytes * 1e9,
        adapter_bytes_per_second=adapter_gigabits * 1e9 / 8,
        power_watts=power_watts,
        source=source,
        jitter=jitter,
    )


# fmt: off
NODES: Mapping[str, Node] = {
    "V100-16GB": _node(150, 400, 3500, "DGX-1V: NVLink 2, 300 GB/s both ways, four adapters of 100 Gbit/s"),
    "A100-40GB": _node(300, 1600, 6500, "DGX A100: NVLink 3, 600 GB/s both ways; eight adapters of 200 Gbit/s"),
    "A100-PCIe-40GB": _node(32, 200, 3000, "arXiv 2408.14158"),
    "H100-80GB": _node(450, 3200, 10200, "HGX H100: NVLink 4, 900 GB/s both ways; "
        "eight adapters of 400 Gbit/s as in DGX H100"),
    "H100-PCIe-80GB": _node(64, 400, 5000, "PCIe 5.0 x16"),
    "B200": _node(900, 3200, 14300, "HGX B200: NVLink 5, 1800 GB/s both ways; eight adapters of 400 Gbit/s"),
    "L4": _node(32, 100, 1500, "PCIe 4.0 x16; one adapter of 100 Gbit/s taken for granted"),
    "MI210": _node(100, 800, 4000, "Infinity Fabric bridges of 100 GB/s each way; adapters as in the MI250 study"),
    "MI250": _node(100, 800, 3000, "MosaicML 2023, MI250 at scale: four cards and 800 Gbit/s a node; "
        "Infinity Fabric 3 between cards; jitter from its 159 of 166 TFLOP/s on 32 nodes", MI250_JITTER),
    "MI250X": _node(100, 800, 3000, "Frontier, arXiv 2312.12705: 50 GB/s a link between cards, "
        "four Slingshot adapters of 25 GB/s; jitter from its strong scaling of 175B", SLINGSHOT_JITTER),
    "MI300X": _node(448, 3200, 10000, "MI300X platform: seven links of 64 GB/s; eight adapters of 400 Gbit/s"),
}
# fmt: on
_SAME_NODE = {
    "V100-32GB": "V100-16GB",
    "A100-80GB": "A100-40GB",
    "A100-PCIe-80GB": "A100-PCIe-40GB",
    "H200": "H100-80GB",
    "A10": "L4",
    "RTX-4090": "L4",
    "MI325X": "MI300X",
}


def find_node(accelerator_name: str) -> Node:
    """Return the node that this accelerator usually comes in. Raises ConfigError for one without."""
    name = _SAME_NODE.get(accelerator_name, accelerator_name)
    if name not in NODES:
        raise ConfigError(f"{accelerator_name} has no node in llmfoundry_planner/plan/network.py; add its links there")
    return NODES[name]


@dataclass(kw_only=True, slots=True, frozen=True)
class Group:
    """Ranks that exchange, as the links see them."""

    size: int
    in_node: int
    """Ranks of the group in each node that it has a part in."""
    node: Node

    @property
    def num_nodes(self) -> int:
        return -(-self.size // self.in_node)

    def gather_seconds(self, num_bytes: float) -> float:
        """Time an all-gather that ends with `num_bytes` on each rank, or a reduce-scatter that begins with them."""
        if self.size == 1:
            return 0.0
        seconds = [0.0]
        if self.in_node > 1:
            share = (self.size - 1) / self.size * num_bytes
            seconds.append(share / (LINK_SHARE * self.node.link_bytes_per_second))
        if self.num_nodes > 1:
            # Every node has num_devices / in_node such groups at once, each with its share of the adapters.
            adapters = self.node.adapter_bytes_per_second * self.in_node / self.node.num_devices
            seconds.append((self.num_nodes - 1) / self.num_nodes * num_bytes / (LINK_SHARE * adapters))
        latency = self.num_nodes * (self.in_node - 1) * IN_NODE_LATENCY_SECONDS
        latency += (self.num_nodes - 1) * ACROSS_LATENCY_SECONDS
        return max(seconds) + latency

    def reduce_seconds(self, num_bytes: float) -> float:
        """Time an all-reduce: a reduce-scatter, then an all-gather."""
        return 2 * self.gather_seconds(num_bytes)

    def exchange_seconds(self, num_bytes: float) -> float:
        """Time an all-to-all of `num_bytes` on each rank."""
        if self.size == 1:
            return 0.0
        in_node = (self.in_node - 1) / self.size * num_bytes / (LINK_SHARE * self.node.link_bytes_per_second)
        share = self.node.adapter_bytes_per_second / self.node.num_devices
        across = (self.size - self.in_node) / self.size * num_bytes / (LINK_SHARE * share)
        return max(in_node, across) + (ACROSS_LATENCY_SECONDS if self.num_nodes > 1 else IN_NODE_LATENCY_SECONDS)


def group_of(layout: Layout, dimension: str, node: Node) -> Group:
    """Return the group of rank 0 in this dimension; those of other ranks are alike."""
    size = getattr(layout, dimension)
    stride = math.prod(layout.degrees[DIMENSIONS.index(dimension) + 1 :])
    return Group(size=size, in_node=max(1, min(size, node.num_devices // stride)), node=node)


def send_seconds(layout: Layout, dimension: str, node: Node, num_bytes: float) -> float:
    """Time a message from a rank to its next neighbour in this dimension, while all the others send too."""
    group = group_of(layout, dimension, node)
    if group.size == 1:
        return 0.0
    if group.num_nodes == 1:
        return num_bytes / (LINK_SHARE * node.link_bytes_per_second) + IN_NODE_LATENCY_SECONDS
    share = node.adapter_bytes_per_second / node.num_devices
    return num_bytes / (LINK_SHARE * share) + ACROSS_LATENCY_SECONDS
