"""Nodes, the links in and between them, and how long a collective takes on them: arithmetic, no torch.

A group of ranks is a ring: each link of it carries (n - 1) / n of the message, and the slowest link decides. What all
the groups of a node send to other nodes shares the node's adapters. (Thakur, Rabenseifner and Gropp 2005,
"Optimization of Collective Communication Operations in MPICH"; NCCL's rings do the same.)
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from llmfoundry_lite.config.layout import DIMENSIONS, Layout

LINK_SHARE = 0.8
"""Of a link's bandwidth that collectives reach: nccl-tests' bus bandwidth on NVLink 4 is 360 to 370 of 450 GB/s."""
IN_NODE_LATENCY_SECONDS = 3e-6
ACROSS_LATENCY_SECONDS = 10e-6
"""For each step of a ring. Order of magnitude, from nccl-tests with small messages."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Node:
    """One machine of a cluster. Bandwidths are in one direction."""

    num_devices: int
    link_bytes_per_second: float
    """Between devices of the node, for each device."""
    adapter_bytes_per_second: float
    """From the node to all others together."""
    power_watts: float
    """The most that the node draws, with its processors and fans."""
    source: str


def _gigabits(number: float) -> float:
    return number * 1e9 / 8


_HGX_H100 = "HGX H100: NVLink 4, 900 GB/s both ways; eight adapters of 400 Gbit/s as in DGX H100"
_PCIE = "PCIe 4.0 x16; one adapter of 100 Gbit/s taken for granted"
NODES: Mapping[str, Node] = {
    "V100-16GB": Node(
        num_devices=8,
        link_bytes_per_second=150e9,
        adapter_bytes_per_second=_gigabits(400),
        power_watts=3500.0,
        source="DGX-1V: NVLink 2, 300 GB/s both ways, four adapters of 100 Gbit/s",
    ),
    "A100-40GB": Node(
        num_devices=8,
        link_bytes_per_second=300e9,
        adapter_bytes_per_second=_gigabits(1600),
        power_watts=6500.0,
        source="DGX A100: NVLink 3, 600 GB/s both ways; eight adapters of 200 Gbit/s",
    ),
    "A100-PCIe-40GB": Node(
        num_devices=8,
        link_bytes_per_second=32e9,
        adapter_bytes_per_second=_gigabits(200),
        power_watts=3000.0,
        source="arXiv 2408.14158",
    ),
    "H100-80GB": Node(
        num_devices=8,
        link_bytes_per_second=450e9,
        adapter_bytes_per_second=_gigabits(3200),
        power_watts=10200.0,
        source=_HGX_H100,
    ),
    "H100-PCIe-80GB": Node(
        num_devices=8,
        link_bytes_per_second=64e9,
        adapter_bytes_per_second=_gigabits(400),
        power_watts=5000.0,
        source="PCIe 5.0 x16",
    ),
    "B200": Node(
        num_devices=8,
        link_bytes_per_second=900e9,
        adapter_bytes_per_second=_gigabits(3200),
        power_watts=14300.0,
        source="HGX B200: NVLink 5, 1800 GB/s both ways; eight adapters of 400 Gbit/s",
    ),
    "L4": Node(
        num_devices=8,
        link_bytes_per_second=32e9,
        adapter_bytes_per_second=_gigabits(100),
        power_watts=1500.0,
        source=_PCIE,
    ),
    "MI210": Node(
        num_devices=8,
        link_bytes_per_second=100e9,
        adapter_bytes_per_second=_gigabits(800),
        power_watts=4000.0,
        source="Infinity Fabric bridges of 100 GB/s each way; adapters as in the MI250 study",
    ),
    "MI250": Node(
        num_devices=8,
        link_bytes_per_second=100e9,
        adapter_bytes_per_second=_gigabits(800),
        power_watts=3000.0,
        source="MosaicML 2023, MI250 at scale: four cards and 800 Gbit/s a node; Infinity Fabric 3 between cards",
    ),
    "MI250X": Node(
        num_devices=8,
        link_bytes_per_second=100e9,
        adapter_bytes_per_second=100e9,
        power_watts=3000.0,
        source="Frontier, arXiv 2312.12705: 50 GB/s a link between cards, four Slingshot adapters of 25 GB/s",
    ),
    "MI300X": Node(
        num_devices=8,
        link_bytes_per_second=448e9,
        adapter_bytes_per_second=_gigabits(3200),
        power_watts=10000.0,
        source="MI300X platform: seven links of 64 GB/s; eight adapters of 400 Gbit/s",
    ),
}
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
    """The node that this accelerator usually comes in."""
    return NODES[_SAME_NODE.get(accelerator_name, accelerator_name)]


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
        """An all-gather that ends with `num_bytes` on each rank, or a reduce-scatter that begins with them."""
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
        """An all-reduce: a reduce-scatter, then an all-gather."""
        return 2 * self.gather_seconds(num_bytes)

    def exchange_seconds(self, num_bytes: float) -> float:
        """An all-to-all of `num_bytes` on each rank."""
        if self.size == 1:
            return 0.0
        in_node = (self.in_node - 1) / self.size * num_bytes / (LINK_SHARE * self.node.link_bytes_per_second)
        share = self.node.adapter_bytes_per_second / self.node.num_devices
        across = (self.size - self.in_node) / self.size * num_bytes / (LINK_SHARE * share)
        return max(in_node, across) + (ACROSS_LATENCY_SECONDS if self.num_nodes > 1 else IN_NODE_LATENCY_SECONDS)


def group_of(layout: Layout, dimension: str, node: Node) -> Group:
    """The group of rank 0 in this dimension; those of other ranks are alike."""
    size = getattr(layout, dimension)
    stride = math.prod(layout.degrees[DIMENSIONS.index(dimension) + 1 :])
    return Group(size=size, in_node=max(1, min(size, node.num_devices // stride)), node=node)


def send_seconds(layout: Layout, dimension: str, node: Node, num_bytes: float) -> float:
    """From a rank to its next neighbour in this dimension, while all the others do the same."""
    group = group_of(layout, dimension, node)
    if group.size == 1:
        return 0.0
    if group.num_nodes == 1:
        return num_bytes / (LINK_SHARE * node.link_bytes_per_second) + IN_NODE_LATENCY_SECONDS
    share = node.adapter_bytes_per_second / node.num_devices
    return num_bytes / (LINK_SHARE * share) + ACROSS_LATENCY_SECONDS
