import csv
import io

import pytest
from rich.console import Console

from llmfoundry_lite.tables import Table, markdown_text


def test_names_stay_text_in_markdown():
    assert Table("", ["model", "a|b"], [["<script>x\x1b[2J", "[y](http://z)\n| c"]]).markdown() == [
        r"| model | a\|b |",
        "|---|---:|",
        r"| &lt;script&gt;x\x1b\[2J | \[y](http://z)\n\| c |",
    ]


def test_a_backslash_in_a_name_does_not_make_a_link_or_a_column():
    assert markdown_text(r"\[y](http://z) a\|b \\| C:\dir") == r"\\\[y](http://z) a\\\|b \\\\\| C:\dir"


@pytest.mark.parametrize("sign", ["=", "+", "-", "@", "\t=", "\r=", "\n="])
def test_a_name_in_a_csv_is_no_formula(sign):
    name = f'{sign}HYPERLINK("http://x","y")'
    rows = list(csv.reader(io.StringIO(Table("", ["model", name], [[name, "1"]]).csv(), newline="")))
    assert rows == [["model", f"'{name}"], [f"'{name}", "1"]]


def test_a_number_in_a_csv_stays_a_number():
    numbers = ["-0.5", "+3", "-1e-05", ".5", "-12%", "1,024", "", "ba-1=2"]
    assert list(csv.reader(io.StringIO(Table("", numbers, []).csv()))) == [numbers]


def test_numbers_are_to_the_right_where_they_are_said_to_be():
    assert Table("", ["a", "b", "c"], [], right=(2,)).markdown() == ["| a | b | c |", "|---|---|---:|"]


def test_on_a_narrow_console_words_are_kept_whole():
    console = Console(width=16, file=io.StringIO())
    Table("", ["run", "loss"], [["a [bold]name", "2.71828182845904"]]).print(console)
    assert "2.71828182845904" in console.file.getvalue() and "[bold]name" in console.file.getvalue()
