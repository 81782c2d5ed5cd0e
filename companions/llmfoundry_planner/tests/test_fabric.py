"""Networks and all-reduces beside those that were published (arXiv 2408.14158): Fire-Flyer 2 and a DGX A100 cluster."""

import pytest

from llmfoundry_lite.cli.main import run
from llmfoundry_lite.errors import ConfigError
from llmfoundry_lite.hardware import MIB
from llmfoundry_planner.plan.fabric import fat_tree, one_for_each_device, ring_rate, staged_limits, zoned


def test_two_zones_have_122_switches():
    """1,200 nodes and 200 storage servers: 40 leaves and 20 spines in each zone of 800 ports, and two between them."""
    fabric = zoned(1200, 200, radix=40)
    assert (fabric.num_ports, fabric.leaves, fabric.spines, fabric.num_switches) == (800, 40, 20, 122)


def test_one_tree_for_ten_thousand_ports_has_at_most_six_percent_fewer_switches_than_published():
    """500 leaves and 500 spines, as published; 250 cores are the fewest without oversubscription, published are 320."""
    fabric = one_for_each_device(1250, 0, radix=40)
    assert (fabric.leaves, fabric.spines, fabric.cores) == (500, 500, 250)
    assert 0.94 * 1320 <= fabric.num_switches <= 1320


def test_a_tree_has_two_layers_as_long_as_they_suffice():
    assert fat_tree("", 800, 40).cores == 0 and fat_tree("", 801, 40).cores > 0
    with pytest.raises(ConfigError, match="16,001 ports do not fit a fat tree of three layers of 40-port switches"):
        fat_tree("", 16_001, 40)


def test_latency_slows_a_ring_of_many_devices():
    small, large = (ring_rate(4000, size * MIB) / ring_rate(16, size * MIB) for size in (186, 186_000))
    assert small < 0.4 and large > 0.9, "a longer message hides the latency"


def test_staging_is_bound_by_at_most_a_quarter_more_than_was_reached():
    """6.3 to 8.1 GB/s were reached. The bound is 10: software and the tree's latency take the rest."""
    limits = staged_limits(8)
    assert min(limits, key=limits.__getitem__) == "adapter"
    assert 8.1e9 <= min(limits.values()) <= 1.25 * 8.1e9
    assert min(limits.values()) > 1.3 * ring_rate(16, 186 * MIB)


def test_the_command_tells_both_with_price_and_power(capsys):
    assert (
        run(["fabric", "--nodes", "1200", "--storage", "200", "--switch-price", "10000", "--switch-watts", "500"]) == 0
    )
    out = capsys.readouterr().out
    assert "122 switches (2 x 40 leaves, 20 spines; 2 between zones), 1,220,000 dollars, 61.0 kW" in out
    assert "staged through processors 10.0 GB/s, bound by the adapter" in out
    assert run(["fabric", "--nodes", "100000"]) == 2


@pytest.mark.parametrize(
    ("option", "words"),
    [
        (["--ports", "5"], "--ports: 5 given, expected an even number: half of a switch's ports go up"),
        (["--nodes", "1", "--per-node", "1"], "--nodes: 1 device has nothing to exchange"),
        (["--message", "inf"], "--message: inf given, expected MiB, such as 186"),
    ],
)
def test_what_no_network_has_is_refused(capsys, option, words):
    assert run(["fabric", "--nodes", "1200", *option]) == 2
    assert words in capsys.readouterr().err
