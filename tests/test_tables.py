import csv
import io

import pytest
from rich.console import Console

from llmfoundry_lite.tables import Table, latex_text, markdown_text


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


def test_a_latex_table_has_the_rules_of_booktabs_and_aligns_numbers():
    table = Table("", ["task", "accuracy"], [["arc_easy", "0.41 ± 0.02"], ["*", "-0.1"]])
    assert table.latex("Accuracy, 95 %.") == [
        r"\begin{table}",
        r"\centering",
        r"\small",
        r"\setlength{\tabcolsep}{4pt}",
        r"\providecommand{\resizebox}[3]{#3}",
        r"\caption{Accuracy, 95 \%.}",
        r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%",
        r"\begin{tabular}{lr}",
        r"\toprule",
        r"task & accuracy \\",
        r"\midrule",
        r"arc\_easy & 0.41 $\pm$ 0.02 \\",
        r"{}* & $-$0.1 \\",  # `\\*` would be another command
        r"\bottomrule",
        r"\end{tabular}}",
        r"\end{table}",
    ]


@pytest.mark.parametrize(
    ("text", "escaped"),
    [
        (r"\input{/etc/passwd}", r"\textbackslash{}input\{/etc/passwd\}"),
        ("a&b%c$d#e_f{g}h~i^j", r"a\&b\%c\$d\#e\_f\{g\}h\textasciitilde{}i\textasciicircum{}j"),
        ("<.001", r"\textless{}.001"),
        ('the "best"', "the ''best''"),
        ("-0.5 [-0.7, +.2] icl-0 5e-3 1-2", "$-$0.5 [$-$0.7, $+$.2] icl-0 5e-3 1-2"),
    ],
)
def test_a_name_in_latex_is_no_command(text, escaped):
    assert latex_text(text) == escaped
