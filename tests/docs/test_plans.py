"""Pages of predictions hold what their commands print."""

import re
import shlex

import pytest

from benchmarks.papers import frontier
from llmfoundry_lite.cli.main import run
from tests.helpers.launch import ROOT

PAGES = ROOT / "docs/measurements"
JOINED = re.findall(r"^\$ llmfoundry-lite (.*)\n(joined .*)$", (PAGES / "join.md").read_text(), re.M)


def test_the_page_of_two_clusters_has_commands():
    assert len(JOINED) >= 5


@pytest.mark.parametrize(("command", "printed"), JOINED, ids=[command for command, _ in JOINED])
def test_where_a_second_cluster_pays_is_what_plan_prints(command, printed, capsys):
    assert run(shlex.split(command)) == 0
    assert printed in capsys.readouterr().out.splitlines()


def test_the_guide_names_the_links_of_that_page():
    """Of as many devices, and the run's own batch."""
    least = {}
    for command, printed in JOINED[:4]:
        devices = re.search(r"--join mi250:(\d+)", command)
        assert devices
        least[devices[1]] = round(float(printed.split()[-3]))
    guide = (ROOT / "docs/islands.md").read_text()
    assert f"7B from {least['8']} Gbit/s on 8 + 8 devices, from {least['64']} on 64 + 64" in guide


def test_the_page_of_frontier_has_the_rows_that_its_benchmark_prints(tmp_path):
    frontier.run(tmp_path)
    printed, kept = ((folder / "frontier.md").read_text().splitlines() for folder in (tmp_path, PAGES))
    rows = [line for line in printed if line.startswith("|")]
    assert len(rows) > 14 and rows == [line for line in kept if line.startswith("|")]


@pytest.mark.slow
@pytest.mark.parametrize("model", ["mpt-7b", "mpt-30b", "mpt-70b"])
def test_the_table_of_large_runs_is_what_plan_prints(model, capsys):
    page = (PAGES / "plan.md").read_text()
    options = re.search(r"`llmfoundry-lite plan RUN (.*?)`", page)
    assert options
    assert run(["plan", model, *options[1].split()]) == 0
    expected = re.search(rf"^## {model}\n\n(.*?)\n(?=## |\Z)", page, re.M | re.S)
    assert expected and capsys.readouterr().out.strip() == expected[1].strip()
