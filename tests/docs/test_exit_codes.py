"""Exit codes have one meaning, which `errors.EXIT_MEANINGS` has. docs/moving-a-run.md and the help say it in its words,
and other pages point there."""

import re

import pytest

from llmfoundry_lite.errors import EXIT_MEANINGS
from llmfoundry_lite.launch_train import HELP
from tests.helpers.launch import ROOT
from tests.helpers.markdown import section

MEANING_OF_1 = re.compile(r"\b1\b[^.;|]{0,25}\bbug\b|\bbug\b[^.;|]{0,40}\b1\b")
"""A place that says what exit code 1 means."""
TEXTS = [
    *(path for path in ROOT.glob("*.md") if path.name != "CHANGELOG.md"),  # which tells what was
    *(ROOT / "docs").glob("*.md"),
    *(ROOT / "companions").glob("*/README.md"),
    *(path for path in (ROOT / "scripts").rglob("*") if path.suffix in (".sh", ".sbatch", ".yaml", ".py")),
    *(ROOT / "llmfoundry_lite").rglob("*.py"),
    *(ROOT / "companions").glob("*/*.py"),
]


def test_the_table_of_exit_codes_says_what_the_code_says():
    table = section((ROOT / "docs/moving-a-run.md").read_text(), "Exit codes")
    rows = dict(re.findall(r"^\| (\d+) \| (.+?) \|", table, re.M))
    assert {int(code): meaning.replace("`", "") for code, meaning in rows.items()} == EXIT_MEANINGS


def test_the_help_of_train_names_every_exit_code():
    told = re.findall(r"^ +(\d+)  (.+)$", HELP.partition("Exit codes:")[2], re.M)
    assert {int(code): meaning for code, meaning in told} == EXIT_MEANINGS


@pytest.mark.parametrize("name", ["docs/promises.md", "docs/troubleshooting.md", "docs/skypilot.md"])
def test_pages_that_speak_of_exit_codes_point_to_the_table(name):
    assert "(moving-a-run.md#exit-codes)" in (ROOT / name).read_text()


def test_no_text_gives_exit_code_1_another_meaning():
    """A fault that may pass ends a run with 1, too, so that no page or script may call 1 a bug and stop there."""
    others = []
    for path in TEXTS:
        text = " ".join(re.sub(r"^\s*#+", "", path.read_text(), flags=re.M).split())
        for found in MEANING_OF_1.finditer(text):
            around = text[found.start() : found.end() + 40]
            if "may pass" not in around:
                others.append(f"{path.relative_to(ROOT)}: {around}")
    assert others == []
