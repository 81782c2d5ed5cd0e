"""Links in and between nodes, and the time of an exchange over them. Arithmetic, no torch.

A group of n ranks exchanges in a ring: each link of it carries (n - 1) / n of the message, and the slowest link
decides. All groups of a node that reach other nodes share the node's adapters. (Thakur, Rabenseifner and Gropp 2005,
"Optimization of Collective Communication Operations in MPICH"; NCCL's rings do the same.)

`NODES` has the nodes that accelerators are sold in, `group_of` says how a layout's group lies in them, and `Group` and
`send_seconds` give times. `exchanges.py` says what is exchanged.
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
    """From each device to the others of the node."""
    adapter_bytes_per_second: float
    """From the node to all other nodes together."""
    power_watts: float
    """Maximum draw of the node, with its processors and fans."""
    source: str
    """Where the numbers come from."""
    jitter: float = JITTER
    """Share of a step that each doubling of the number of such nodes adds."""

    def doublings(self, num_devices: int) -> float:
        """Return how often the number of nodes doubles from one node to `num_devices`: 2 for four nodes, 0 for one."""
        num_nodes = max(1.0, num_devices / self.num_devices)
        return math.log2(num_nodes)


def _node(
    link_gigabytes: float, adapter_gigabits: float, power_watts: float, source: str, jitter: float = JITTER
) -> Node:
    """Return a node of 8 devices. As in datasheets, `link_gigabytes` is in GB/s and `adapter_gigabits` in Gbit/s."""
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
"""Name of an accelerator -> the node that it usually comes in."""
_SAME_NODE = {
    "V100-32GB": "V100-16GB",
    "A100-80GB": "A100-40GB",
    "A100-PCIe-80GB": "A100-PCIe-40GB",
    "H200": "H100-80GB",
    "A10": "L4",
    "RTX-4090": "L4",
    "MI325X": "MI300X",
}
"""Accelerator -> the one in NODES whose node it has."""


def find_node(accelerator_name: str) -> Node:
    """Return the node that an accelerator of the hardware table usually comes in. Raises ConfigError if it has none."""
    name = _SAME_NODE.get(accelerator_name, accelerator_name)
    if name not in NODES:
        raise ConfigError(f"{accelerator_name} has no node in llmfoundry_planner/plan/network.py; add its links there")
    return NODES[name]


@dataclass(kw_only=True, slots=True, frozen=True)
class Group:
    """A group of ranks that exchange something, and how it lies in the nodes.

    All devices of a node are in a group of the same kind, and all these groups exchange at the same time.
    """

    size: int
    """Ranks of the group."""
    in_node: int
    """Ranks of the group in each node that has some of them."""
    node: Node

    @property
    def num_nodes(self) -> int:
        """Nodes that have ranks of the group."""
        return -(-self.size // self.in_node)

    def gather_seconds(self, num_bytes: float) -> float:
        """Return the time of an all-gather that leaves `num_bytes` on each rank.

        A reduce-scatter that begins with `num_bytes` on each rank takes as long.
        """
        if self.size == 1:
            return 0.0

        in_node_seconds = 0.0
        if self.in_node > 1:
            sent_bytes = (self.size - 1) / self.size * num_bytes
            in_node_seconds = sent_bytes / (LINK_SHARE * self.node.link_bytes_per_second)

        across_seconds = 0.0
        if self.num_nodes > 1:
            # A node has num_devices / in_node groups, which divide its adapters.
            adapter_rate = self.node.adapter_bytes_per_second * self.in_node / self.node.num_devices
            across_seconds = (self.num_nodes - 1) / self.num_nodes * num_bytes / (LINK_SHARE * adapter_rate)

        # Each step of the ring has a latency, which depends on whether it leaves the node.
        latency_seconds = self.num_nodes * (self.in_node - 1) * IN_NODE_LATENCY_SECONDS
        latency_seconds += (self.num_nodes - 1) * ACROSS_LATENCY_SECONDS
        return max(in_node_seconds, across_seconds) + latency_seconds

    def reduce_seconds(self, num_bytes: float) -> float:
        """Return the time of an all-reduce of `num_bytes`: a reduce-scatter, then an all-gather."""
        return 2 * self.gather_seconds(num_bytes)

    def exchange_seconds(self, num_bytes: float) -> float:
        """Return the time of an all-to-all in which each rank divides its `num_bytes` evenly among the group."""
        if self.size == 1:
            return 0.0

        in_node_bytes = (self.in_node - 1) / self.size * num_bytes
        in_node_seconds = in_node_bytes / (LINK_SHARE * self.node.link_bytes_per_second)

        adapter_rate = self.node.adapter_bytes_per_second / self.node.num_devices
        across_bytes = (self.size - self.in_node) / self.size * num_bytes
        across_seconds = across_bytes / (LINK_SHARE * adapter_rate)

        latency_seconds = ACROSS_LATENCY_SECONDS if self.num_nodes > 1 else IN_NODE_LATENCY_SECONDS
        return max(in_node_seconds, across_seconds) + latency_seconds


def group_of(layout: Layout, dimension: str, node: Node) -> Group:
    """Return the group of rank 0 in a dimension of a layout, such as "shard". The groups of other ranks are like it.

    Ranks of a group lie as far apart as the inner dimensions are large. Example: with 8 devices in a node and tensor
    groups of 2, a shard group of 16 has every second rank, so 4 of them in each of 4 nodes.
    """
    size = getattr(layout, dimension)
    inner_degrees = layout.degrees[DIMENSIONS.index(dimension) + 1 :]
    stride = math.prod(inner_degrees)
    in_node = max(1, min(size, node.num_devices // stride))
    return Group(size=size, in_node=in_node, node=node)


def send_seconds(layout: Layout, dimension: str, node: Node, num_bytes: float) -> float:
    """Return the time in which each rank sends `num_bytes` to the next rank of its group in this dimension.

    All ranks send at the same time, so the devices of a node divide its adapters.
    """
    group = group_of(layout, dimension, node)
    if group.size == 1:
        return 0.0
    if group.num_nodes == 1:
        return num_bytes / (LINK_SHARE * node.link_bytes_per_second) + IN_NODE_LATENCY_SECONDS
    adapter_rate = node.adapter_bytes_per_second / node.num_devices
    return num_bytes / (LINK_SHARE * adapter_rate) + ACROSS_LATENCY_SECONDS
