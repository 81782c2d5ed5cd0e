"""A cluster's network before it is bought: switches, price and power of fat trees, and what an all-reduce reaches.

    llmfoundry-lite fabric --nodes 1200 --storage 200

Two zones that are fat trees of two layers each, and are joined by a few links, stand beside one fat tree of three
layers with an adapter for each device. An all-reduce through the processors' memory (HFReduce, arXiv 2408.14158) stands
beside a ring of devices. Both are limits of bandwidth: software reaches less. Arithmetic, no torch.
"""

from dataclasses import dataclass

from llmfoundry_lite.errors import ConfigError
from llmfoundry_lite.hardware import MIB
from llmfoundry_planner.plan.rates import ACROSS_LATENCY_SECONDS, LINK_SHARE

RING_PATH_BYTES_PER_SECOND = 9.6e9
"""From one device's memory to an adapter and into the next node's device, over PCIe 4.0 behind a processor. Implied by
the best published rate of a ring there, 4.8 GB/s, of which every byte passes twice."""
# Fire-Flyer 2's node.
MEMORY_BYTES_PER_SECOND = 16 * 25.6e9
"""Two sockets with eight channels of DDR4-3200 each."""
PORT_BYTES_PER_SECOND = 32e9
"""PCIe 4.0 x16."""
DEVICES_PER_PORT = 2
"""Devices that share a PCIe port of the processor, at worst."""
ADAPTER_BYTES_PER_SECOND = 25e9


@dataclass(kw_only=True, slots=True, frozen=True)
class Fabric:
    """Fat trees without oversubscription: as many links up as down, in every switch."""

    name: str
    num_ports: int
    """Ports of a tree for nodes and storage."""
    leaves: int
    spines: int
    cores: int
    """Switches of a tree, by layer."""
    num_zones: int = 1
    """Trees."""

    @property
    def num_joining(self) -> int:
        """Switches between zones."""
        return self.num_zones if self.num_zones > 1 else 0

    @property
    def num_switches(self) -> int:
        return self.num_zones * (self.leaves + self.spines + self.cores) + self.num_joining


def fat_tree(name: str, num_ports: int, radix: int, num_zones: int = 1) -> Fabric:
    """Count the fewest switches of `radix` ports, in two layers if they suffice, else in three.

    Raises ConfigError if three do not.
    """
    half = radix // 2
    if num_ports > radix * half * half:
        raise ConfigError(
            f"{num_ports:,} ports do not fit a fat tree of three layers of {radix}-port switches "
            f"({radix * half * half:,})"
        )
    leaves = -(-num_ports // half)
    top = -(-leaves * half // radix)
    spines, cores = (top, 0) if num_ports <= radix * half else (leaves, top)
    return Fabric(name=name, num_ports=num_ports, leaves=leaves, spines=spines, cores=cores, num_zones=num_zones)


def zoned(num_nodes: int, num_storage: int, radix: int = 40, num_zones: int = 2) -> Fabric:
    """Give each node one adapter, and storage one in every zone, so that zones need few links to each other."""
    ports = -(-num_nodes // num_zones) + num_storage
    return fat_tree(f"{num_zones} zones, an adapter for each node", ports, radix, num_zones)


def one_for_each_device(num_nodes: int, num_storage: int, per_node: int = 8, radix: int = 40) -> Fabric:
    return fat_tree("one tree, an adapter for each device", num_nodes * per_node + num_storage, radix)


def ring_rate(num_devices: int, num_bytes: float) -> float:
    """Return a ring's bytes of the message per second, through all devices: 2 (n - 1) steps, each with its latency."""
    seconds = 2 * (num_devices - 1) / num_devices * num_bytes / RING_PATH_BYTES_PER_SECOND
    return num_bytes / (seconds + 2 * (num_devices - 1) * ACROSS_LATENCY_SECONDS)


def staged_limits(num_devices: int) -> dict[str, float]:
    """Return what bounds an all-reduce staged through processors: name -> bytes of the message per second.

    Devices copy to the host, where processors add; nodes add along a double binary tree; devices copy back. For each
    byte the memory is written and read once for each device on the way in, and read twice on the way out (GDRCopy);
    one sum is written; and of the tree each node receives one byte up (write, two reads, a write), sends one (read),
    receives one down (write) and passes it on (read).
    """
    operations = 2 * num_devices + 1 + 7 + 2
    return {
        "memory": LINK_SHARE * MEMORY_BYTES_PER_SECOND / operations,
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
    """Return lines for people. Raises ConfigError if no tree is large enough."""
    small = zoned(num_nodes, num_storage, radix, num_zones)
    large = one_for_each_device(num_nodes, num_storage, per_node, radix)
    lines = [f"{num_nodes:,} nodes of {per_node} devices, {num_storage:,} storage servers, switches of {radix} ports"]
    for fabric in (small, large):
        cores = f", {fabric.cores} cores" if fabric.cores else ""
        joining = f"; {fabric.num_joining} between zones" if fabric.num_joining else ""
        each = f"{fabric.num_zones} x {fabric.leaves} leaves, {fabric.spines} spines{cores}{joining}"
        parts = [f"{fabric.num_switches:,} switches ({each})"]
        if switch_dollars is not None:
            parts.append(f"{fabric.num_switches * switch_dollars:,.0f} dollars")
        if switch_watts is not None:
            parts.append(f"{fabric.num_switches * switch_watts / 1000:,.1f} kW")
        lines.append(f"  {fabric.name}: {', '.join(parts)}")
    lines.append(f"  the first has {small.num_switches / large.num_switches:.1%} of the second's switches")
    num_devices = num_nodes * per_node
    limits = staged_limits(per_node)
    least = min(limits, key=limits.__getitem__)
    lines += [
        f"all-reduce of {message_bytes / MIB:.0f} MiB over {num_devices:,} devices on PCIe, at most",
        f"  staged through processors {limits[least] / 1e9:.1f} GB/s, bound by the {least}",
        f"  a ring of devices {ring_rate(num_devices, message_bytes) / 1e9:.1f} GB/s",
        "published (arXiv 2408.14158): 122 switches and 1,320; 6.3 to 8.1 GB/s staged, 1.6 to 4.8 in a ring;",
        f"  83% of a DGX A100's rate at 60% of its cost, {0.83 / 0.60:.2f} times as much for it",
    ]
    return "\n".join(lines)
