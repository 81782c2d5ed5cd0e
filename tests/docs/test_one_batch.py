"""The page "one batch, in Composer's events" names what Composer calls in our code, and what we replace in Composer."""

import ast
import re

import pytest
from composer import Trainer
from composer.core import Event

from llmfoundry_lite.training.trainer import ParallelTrainer
from tests.helpers.launch import ROOT

PAGE = (ROOT / "docs/one-batch.md").read_text()
PAGES = PAGE + (ROOT / "docs/how-a-launch-ends.md").read_text()
PACKAGE = ROOT / "llmfoundry_lite"
ANSWERED = {event.value for event in Event} | {"close", "post_close"}
"""Names of methods that Composer calls on callbacks and loggers."""


def classes_of(folder):
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                yield node


def methods_of(node):
    return {part.name for part in node.body if isinstance(part, ast.FunctionDef)}


def find_answers():
    for node in classes_of(PACKAGE / "training"):
        bases = {ast.unparse(base) for base in node.bases}
        if bases & {"Callback", "LoggerDestination"}:
            for method in sorted(methods_of(node) & ANSWERED):
                yield f"{node.name}.{method}"


@pytest.mark.parametrize("answer", [*find_answers()])
def test_the_page_names_every_method_that_composer_calls(answer):
    assert f"`{answer}`" in PAGE


def test_the_page_lists_every_private_method_that_replaces_composers():
    replaced = {name for name in vars(ParallelTrainer) if name.startswith("_") and not name.startswith("__")}
    replaced = {name for name in replaced if hasattr(Trainer, name)}
    assert replaced
    listed = set(re.findall(r"^\| `Trainer\.(\w+)` \|", PAGE, re.M))
    assert replaced <= listed


def test_methods_that_the_pages_name_exist():
    methods = {f"{node.name}.{name}" for node in classes_of(PACKAGE) for name in methods_of(node)}
    classes = {name.split(".")[0] for name in methods}
    named = set(re.findall(r"`([A-Z]\w+\.\w+)`", PAGES))
    ours = {name for name in named if name.split(".")[0] in classes}
    assert len(ours) > 30
    assert ours <= methods


def test_files_that_the_pages_name_exist():
    for file in re.findall(r"`([a-z]+/\w+\.py)`", PAGES):
        assert (PACKAGE / file).is_file(), file
