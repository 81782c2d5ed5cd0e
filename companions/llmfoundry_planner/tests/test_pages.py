"""Pages of predictions hold what their commands print."""

import re

import pytest

from benchmarks.islands import join
from benchmarks.papers import frontier
from llmfoundry_lite.cli.main import run
from tests.helpers.launch import ROOT

PAGES = ROOT / "docs/measurements"


def rows_of_two_clusters(cases) -> list[str]:
    pairs = {case: join.plan_pair(*case) for case in cases}
    tables = join.table_of_answers(pairs), join.table_of_links(pairs)
    return [line for table in tables for line in table.markdown()[2:]]


@pytest.mark.parametrize(
    "cases", [[("mpt-7b", 8)], pytest.param(join.CASES, marks=pytest.mark.slow)], ids=["one", "all"]
)
def test_the_page_of_two_clusters_has_the_rows_that_its_benchmark_prints(cases):
    page = (PAGES / "join.md").read_text().splitlines()
    rows = rows_of_two_clusters(cases)
    assert len(rows) == 5 * len(cases) and set(rows) <= set(page)


def test_the_guide_names_the_links_of_that_page():
    """The page has the same number of devices, and the run's own batch."""
    page = (PAGES / "join.md").read_text()
    found = {
        devices: re.search(rf"^\| mpt-7b \| {devices} \+ {devices} \| pays \| (\d+)\S* Gbit/s", page, re.M)
        for devices in ("8", "64")
    }
    least = {devices: match and round(float(match[0].split()[-2])) for devices, match in found.items()}
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
