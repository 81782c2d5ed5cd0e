"""`llmfoundry-lite fabric`: the network of a cluster before it is bought. Arithmetic, no torch.

    llmfoundry-lite fabric --nodes 1200 --storage 200

It counts the switches of two networks, with their price and power, and how fast an all-reduce can be on each. The first
has an adapter for each node and two or more zones, which are fat trees of two layers joined by a few links; processors
add up (HFReduce, arXiv 2408.14158). The second is one fat tree of three layers with an adapter for each device; devices
form a ring. Rates are limits of bandwidth, and software reaches less.
"""

from dataclasses import dataclass

from llmfoundry_lite.errors import ConfigError
from llmfoundry_lite.hardware import MIB
from llmfoundry_planner.plan.rates import ACROSS_LATENCY_SECONDS, LINK_SHARE

# The node of the published cluster, Fire-Flyer 2: devices on PCIe, without links between them.
RING_PATH_BYTES_PER_SECOND = 9.6e9
"""From one device's memory to an adapter and into the next node's device, over PCIe 4.0 behind a processor. Computed
from the best published rate of a ring there, 4.8 GB/s, for which every byte passes twice."""
MEMORY_BYTES_PER_SECOND = 16 * 25.6e9
"""Two sockets with eight channels of DDR4-3200 each."""
PORT_BYTES_PER_SECOND = 32e9
"""PCIe 4.0 x16."""
DEVICES_PER_PORT = 2
"""Devices that share a PCIe port of the processor, at worst."""
ADAPTER_BYTES_PER_SECOND = 25e9
"""One adapter of 200 Gbit/s."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Fabric:
    """A network of one or more equal fat trees, the zones, without oversubscription.

    In every switch as many links go up as down. Leaves connect nodes and storage, spines connect leaves, and in a tree
    of three layers cores connect spines.
    """

    name: str
    num_ports: int
    """Ports of a tree for nodes and storage."""
    leaves: int
    """Switches of a tree in the lowest layer."""
    spines: int
    cores: int
    """Switches of a tree in the third layer; 0 in a tree of two layers."""
    num_zones: int = 1

    @property
    def num_joining(self) -> int:
        """Switches that join the zones: one for each, if there are several."""
        return self.num_zones if self.num_zones > 1 else 0

    @property
    def num_switches(self) -> int:
        """Switches of all zones together."""
        return self.num_zones * (self.leaves + self.spines + self.cores) + self.num_joining


def fat_tree(name: str, num_ports: int, radix: int, num_zones: int = 1) -> Fabric:
    """Return the fat tree with the fewest switches that has `num_ports` ports in each zone.

    With switches of `radix` ports, r, two layers connect up to r² / 2 ports and three up to r³ / 4. Example: 800 ports
    with switches of 40 take 40 leaves and 20 spines. Raises ConfigError if three layers do not suffice.
    """
    half_radix = radix // 2
    max_ports_of_two_layers = radix * half_radix
    max_ports = max_ports_of_two_layers * half_radix
    if num_ports > max_ports:
        raise ConfigError(
            f"{num_ports:,} ports do not fit a fat tree of three layers of {radix}-port switches ({max_ports:,})"
        )

    # Half of a leaf's ports go down. All ports of the top layer do, so it needs half as many switches.
    leaves = -(-num_ports // half_radix)
    top_switches = -(-leaves * half_radix // radix)
    if num_ports <= max_ports_of_two_layers:
        spines = top_switches
        cores = 0
    else:
        spines = leaves
        cores = top_switches
    return Fabric(name=name, num_ports=num_ports, leaves=leaves, spines=spines, cores=cores, num_zones=num_zones)


def zoned(num_nodes: int, num_storage: int, radix: int = 40, num_zones: int = 2) -> Fabric:
    """Return a network in zones: each node has one adapter, in one zone, and each storage server one in every zone.

    Nodes read their data within their zone, so that the zones need few links between each other.
    """
    ports_per_zone = -(-num_nodes // num_zones) + num_storage
    return fat_tree(f"{num_zones} zones, an adapter for each node", ports_per_zone, radix, num_zones)


def one_for_each_device(num_nodes: int, num_storage: int, per_node: int = 8, radix: int = 40) -> Fabric:
    """Return a network of one tree in which each of a node's `per_node` devices has an adapter."""
    return fat_tree("one tree, an adapter for each device", num_nodes * per_node + num_storage, radix)


def ring_rate(num_devices: int, num_bytes: float) -> float:
    """Return the rate of an all-reduce in a ring of all devices, in bytes of the message per second.

    A ring of n devices takes 2 (n - 1) steps. In each of them a device sends 1 / n of the message, after a latency.
    """
    num_steps = 2 * (num_devices - 1)
    sending_seconds = num_steps / num_devices * num_bytes / RING_PATH_BYTES_PER_SECOND
    return num_bytes / (sending_seconds + num_steps * ACROSS_LATENCY_SECONDS)


def staged_limits(num_devices: int) -> dict[str, float]:
    """Return what limits an all-reduce through the processors' memory, each in bytes of the message per second.

    The keys are "memory", "pcie" and "adapter". The smallest value is the rate that can be reached.

    The devices of a node, `num_devices`, copy the message to the host, where the processors add up. Nodes add up along
    a double binary tree, and the devices copy the result back (HFReduce, arXiv 2408.14158).
    """
    # How often memory is read or written for each byte of the message: each device's copy is written and read, and the
    # sum of the node is written. In the tree, another node's byte comes up (written; two reads for the sum, which is
    # written) and goes on (read), and the result comes down (written) and goes on (read), which makes 7. Copies to the
    # devices read twice for all of them (GDRCopy).
    memory_accesses = 2 * num_devices + 1 + 7 + 2
    return {
        "memory": LINK_SHARE * MEMORY_BYTES_PER_SECOND / memory_accesses,
        "pcie": LINK_SHARE * PORT_BYTES_PER_SECOND / DEVICES_PER_PORT,
        "adapter": LINK_SHARE * ADAPTER_BYTES_PER_SECOND / 2,
    }


def describe(
    num_nodes: int,
    num_storage: int,
    *,
    per_node: int,
    radix: int,
    num_zones: int,
    switch_dollars: float | None,
    switch_watts: float | None,
    message_bytes: float,
) -> str:
    """Return the text of `llmfoundry-lite fabric`: both networks, their all-reduce, and published figures beside them.

    per_node: devices in a node. radix: ports of a switch. message_bytes: size of the all-reduce. Price and power are
    printed if they are given. Raises ConfigError if a network is larger than a fat tree can be.
    """
    zones = zoned(num_nodes, num_storage, radix, num_zones)
    single_tree = one_for_each_device(num_nodes, num_storage, per_node, radix)
    lines = [f"{num_nodes:,} nodes of {per_node} devices, {num_storage:,} storage servers, switches of {radix} ports"]
    for fabric in (zones, single_tree):
        cores = f", {fabric.cores} cores" if fabric.cores else ""
        joining = f"; {fabric.num_joining} between zones" if fabric.num_joining else ""
        layers = f"{fabric.num_zones} x {fabric.leaves} leaves, {fabric.spines} spines{cores}{joining}"
        facts = [f"{fabric.num_switches:,} switches ({layers})"]
        if switch_dollars is not None:
            facts.append(f"{fabric.num_switches * switch_dollars:,.0f} dollars")
        if switch_watts is not None:
            facts.append(f"{fabric.num_switches * switch_watts / 1000:,.1f} kW")
        lines.append(f"  {fabric.name}: {', '.join(facts)}")
    switch_share = zones.num_switches / single_tree.num_switches
    lines.append(f"  the first has {switch_share:.1%} of the second's switches")

    num_devices = num_nodes * per_node
    limits = staged_limits(per_node)
    bottleneck = min(limits, key=limits.__getitem__)
    lines += [
        f"all-reduce of {message_bytes / MIB:.0f} MiB over {num_devices:,} devices on PCIe, at most",
        f"  staged through processors {limits[bottleneck] / 1e9:.1f} GB/s, bound by the {bottleneck}",
        f"  a ring of devices {ring_rate(num_devices, message_bytes) / 1e9:.1f} GB/s",
        "published (arXiv 2408.14158): 122 switches and 1,320; 6.3 to 8.1 GB/s staged, 1.6 to 4.8 in a ring;",
        "  83% of a DGX A100's rate at 60% of its cost, 1.38 times as much for it",
    ]
    return "\n".join(lines)
