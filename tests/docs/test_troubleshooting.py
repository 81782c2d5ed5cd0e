"""Each message on the page is one that the code prints: its fixed parts stand in one text of the sources, in order."""

import ast
import re

import pytest

from llmfoundry_lite.companions import PACKAGES, is_installed
from tests.helpers.launch import ROOT

PAGE = (ROOT / "docs/troubleshooting.md").read_text()
MESSAGES = [two or one for two, one in re.findall(r"^\| (?:``(.+?)``|`(.+?)`) \|", PAGE, re.M)]
GAP = "\0"


def texts_of(node: ast.AST):
    """Every text but comments, with a gap where a value is put in. Texts that stand side by side are one."""
    comments = {id(child.value) for child in ast.walk(node) if isinstance(child, ast.Expr)}
    for child in ast.walk(node):
        if id(child) in comments:
            continue
        if isinstance(child, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else GAP for part in child.values)
        elif isinstance(child, ast.Constant) and isinstance(child.value, str):
            yield child.value


@pytest.fixture(scope="module")
def texts():
    sources = [path for folder in ("llmfoundry_lite", "companions") for path in (ROOT / folder).rglob("*.py")]
    return [text for path in sources if "tests" not in path.parts for text in texts_of(ast.parse(path.read_text()))]


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_is_one_that_the_code_prints(texts, message):
    parts = [part.strip() for part in message.split("…") if part.strip()]
    assert sum(map(len, parts)) >= len("not written")
    pattern = re.compile(".*".join(map(re.escape, parts)), re.S)
    is_printed = any(pattern.search(text) for text in texts)
    if not is_printed and not all(map(is_installed, PACKAGES)):
        pytest.skip("perhaps of a companion that is not here")
    assert is_printed


def test_the_page_has_the_thirty_commonest():
    assert len(MESSAGES) >= 30
    assert len(set(MESSAGES)) == len(MESSAGES)
