"""The page of the library is made from its docstrings."""

import llmfoundry_lite as lf
from tests.helpers.library_page import ORDER, PAGE, build


def test_the_page_is_made_from_the_docstrings():
    assert PAGE.read_text() == build(), "run: python -m tests.helpers.library_page"


def test_the_page_has_every_public_name():
    assert {*lf.__all__} <= {*ORDER}
