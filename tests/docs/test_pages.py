"""Pages: their links lead somewhere, and each is in the site's navigation."""

import os
import re
import shutil
import subprocess
import tomllib

import pytest

from tests.helpers.environments import find_uv
from tests.helpers.launch import ROOT
from tests.helpers.markdown import anchors, links

PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_to_a_file_and_a_heading(page):
    for link in links(page.read_text()):
        if re.match(r"https?:", link) or ("companions/" in link and not (ROOT / "companions").exists()):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target.read_text()), link


def test_every_page_is_in_the_navigation_and_on_the_first_page():
    nav = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["nav"]
    values = [value for entry in nav for value in entry.values()]
    listed = [page for value in values for page in ([value] if isinstance(value, str) else value)]
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    assert sorted(listed) == sorted(pages)
    assert pages - set(links((ROOT / "docs/index.md").read_text())) == {"index.md"}


@pytest.fixture
def build(tmp_path):
    uv = find_uv()
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    shutil.copy(ROOT / "zensical.toml", tmp_path)
    command = (uv, "run", "--quiet", "--isolated", "--project", ROOT, "--only-group", "docs", "zensical", "build")
    environment = {name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"}

    def call():
        return subprocess.run(
            [*command, "--strict"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
        )

    return call


@pytest.mark.slow
def test_the_site_builds_strictly_and_fetches_nothing_from_elsewhere(build, tmp_path):
    result = build()
    assert result.returncode == 0, result.stdout + result.stderr
    for page in (tmp_path / "site").rglob("index.html"):
        assert not re.findall(r'(?:src|<link[^>]*href)="https?://', page.read_text()), page
    with (tmp_path / "docs/index.md").open("a") as file:
        file.write("\n[a broken link](nothing.md) and [a broken anchor](data.md#nothing)\n")
    broken = build()
    assert broken.returncode != 0
    assert "2 issues found" in broken.stdout + broken.stderr
