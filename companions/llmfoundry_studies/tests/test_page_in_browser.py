"""The page of a comparison in Chromium: its list is filtered, searched and opened as by a reader's hand.

Steps of a reader are a script that a copy of the page runs, and that writes what it sees into the page. The copy's
policy allows scripts, which the page itself does not. Addresses are tried on the page as it is.
"""

import http.server
import json
import re
import shutil
import subprocess
import threading
from html import unescape
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from llmfoundry_lite.evaluation.compare import compare
from llmfoundry_lite.evaluation.results import load_results
from llmfoundry_studies.page import content_of_models, render_page
from tests.helpers.pages import HOSTILE, LONE_SURROGATE, hostile_result, question_task
from tests.helpers.results import text, write_result

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

pytestmark = [pytest.mark.slow, pytest.mark.skipif(BROWSER is None, reason="needs Chromium: apt-get install chromium")]

REPLACEMENT = "\ufffd"

LOOK = """
const look = () => ({
  count: document.getElementById("count").textContent,
  outcomes: [...document.querySelectorAll("#outcomes button")].map((button) => button.textContent),
  rows: [...document.querySelectorAll(".row")].map((row) => row.textContent),
  open: [...document.querySelectorAll(".item")].map((item) => item.textContent),
  address: decodeURIComponent(location.hash),
});
"""
"""JavaScript that returns what a reader sees of the list."""


def write_page(path: Path, result_paths: list[Path]) -> Path:
    """Write the page of results, and return its path."""
    results = load_results(result_paths)
    path.write_text(render_page(content_of_models(results, compare(results), date="2026-11-30")))
    return path


def browse(page: Path, fragment: str, folder: Path) -> tuple[str, str]:
    """Open a page in Chromium. Returns its document after the scripts have run, and the messages on its console."""
    command = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}"]
    command += ["--enable-logging=stderr", "--virtual-time-budget=5000", "--dump-dom", f"{page.as_uri()}#{fragment}"]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    messages = [line for line in finished.stderr.splitlines() if "CONSOLE" in line]
    return finished.stdout, "\n".join(messages)


def act(page: Path, steps: str, folder: Path) -> Any:
    """Run the steps of a reader, JavaScript that returns JSON, and return what they return. The console stays empty."""
    html = page.read_text()
    html = re.sub(r"script-src [^;]*;", "script-src 'unsafe-inline';", html, count=1)
    runner = f"<script>{LOOK} document.title = JSON.stringify((() => {{ {steps} }})());</script></body>"
    copy = page.with_name("acted.html")
    copy.write_text(html.replace("</body>", runner))
    document, messages = browse(copy, "", folder)
    assert not messages
    title = re.search(r"<title>(.*?)</title>", document, re.DOTALL)
    assert title is not None
    return json.loads(unescape(title[1]))


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """Return the page of two models: 40 items of each outcome, and 20 documents."""
    folder = tmp_path_factory.mktemp("page")
    first = [1, 0, 1, 0] * 40
    other = [1, 1, 0, 0] * 40
    documents = [[(1000.0 + 10 * (i % 7), 1000)] for i in range(20)]
    better = [[(980.0 + 12 * (i % 5), 1000)] for i in range(20)]
    return write_page(
        folder / "page.html",
        [
            write_result(folder / "a", "base", {"quiz/0-shot": question_task(first), "held_out": text(documents)}),
            write_result(folder / "b", "ours", {"quiz/0-shot": question_task(other), "held_out": text(better)}),
        ],
    )


def test_a_reader_filters_searches_and_opens_an_item(page, tmp_path):
    steps = """
    const seen = [look()];
    const choose = (id, value, event) => {
      document.getElementById(id).value = value;
      document.getElementById(id).dispatchEvent(new Event(event));
    };
    const press = (label) =>
      [...document.querySelectorAll("button")].find((button) => button.textContent.includes(label)).click();
    choose("task", "quiz/0-shot", "change"); seen.push(look());
    press("Lost"); seen.push(look());
    choose("search", "QUESTION 14", "input"); seen.push(look());
    document.querySelector(".row").click(); seen.push(look());
    document.querySelector(".row").click(); seen.push(look());
    choose("search", "", "input"); press("All"); press("Next"); seen.push(look());
    choose("task", "held_out", "change"); seen.push(look());
    return seen;
    """
    start, quiz, lost, found, opened, closed, second_page, texts = act(page, steps, tmp_path)

    assert start["count"] == "180 of 180 items, 1 to 50 shown"
    assert quiz["outcomes"] == ["All 160", "▲ Won 40", "▼ Lost 40", "● Both right 40", "○ Both wrong 40"]
    assert len(lost["rows"]) == 40 and all("Lost" in row for row in lost["rows"])
    assert [row.split("?")[0] for row in found["rows"]] == [f"▼ LostQuestion {i}" for i in (14, 142, 146)]
    assert opened["address"] == "#task=quiz/0-shot&outcome=lost&search=QUESTION+14&open=quiz/0-shot:14"
    [item] = opened["open"]
    assert "Question 14?" in item and "yes 14✓ right answer−4.00−2.000✓ chosen−6.00−3.000" in item
    assert "no 14−6.00−3.000−4.00−2.000✗ chosen" in item
    assert closed["open"] == []
    assert second_page["count"] == "160 of 180 items, 51 to 100 shown"
    assert [outcome.rsplit(" ", 1)[0] for outcome in texts["outcomes"]] == ["All", "▲ Won", "▼ Lost"]


def test_an_address_leads_to_an_item_on_a_later_page(page, tmp_path):
    document, messages = browse(page, f"task={quote('quiz/0-shot')}&open={quote('quiz/0-shot:120')}", tmp_path)
    assert not messages
    assert document.count('class="item"') == 1
    assert "Question 120?" in document and "page 3 of 4" in document


def test_a_document_is_won_by_fewer_bits(page, tmp_path):
    steps = """
    document.getElementById("task").value = "held_out";
    document.getElementById("task").dispatchEvent(new Event("change"));
    document.querySelector(".row").click();
    return look();
    """
    seen = act(page, steps, tmp_path)
    assert seen["rows"][0].startswith("▲ Wondocument 1: base 1.4427, ours 1.4138")
    assert "bits per bytebaseours1.44271.4138" in seen["open"][0]


def test_any_two_of_several_models_are_compared(tmp_path):
    answers = {"base": [1, 0] * 20, "ours": [1, 1] * 20, "third": [0, 0] * 20}
    paths = [write_result(tmp_path / name, name, {"quiz/0-shot": question_task(answers[name])}) for name in answers]
    steps = """
    const outcomes = [];
    for (const [first, other] of [["0", "1"], ["0", "2"], ["1", "2"]]) {
      for (const [id, value] of [["first", first], ["other", other]]) {
        document.getElementById(id).value = value;
        document.getElementById(id).dispatchEvent(new Event("change"));
      }
      outcomes.push(look().outcomes);
    }
    return outcomes;
    """
    ours_with_base, third_with_base, third_with_ours = act(write_page(tmp_path / "p.html", paths), steps, tmp_path)
    assert ours_with_base == ["All 40", "▲ Won 20", "▼ Lost 0", "● Both right 20", "○ Both wrong 0"]
    assert third_with_base == ["All 40", "▲ Won 0", "▼ Lost 20", "● Both right 0", "○ Both wrong 20"]
    assert third_with_ours == ["All 40", "▲ Won 0", "▼ Lost 40", "● Both right 0", "○ Both wrong 0"]


def test_hostile_texts_run_nothing_and_load_nothing(tmp_path):
    requests: list[str] = []

    class Recorder(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            requests.append(self.path)
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Recorder)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    hostile = f"{HOSTILE}<img src={url}/image><script src={url}/script></script><link rel=stylesheet href={url}/style>"
    try:
        paths = [hostile_result(tmp_path / name, name, hostile) for name in "ab"]
        page = write_page(tmp_path / "page.html", paths)
        task = f"{hostile.replace(LONE_SURROGATE, REPLACEMENT)}/0-shot"
        document, messages = browse(page, f"open={quote(f'{task}:1')}", tmp_path)
    finally:
        server.shutdown()
        server.server_close()
    assert requests == []
    assert not messages, "a policy that stops something says so on the console"
    assert "<title>broken" not in document
    assert document.count("<script") == 2
    assert document.count('class="item"') == 1, "the item is open, with its texts in it"

    # Characters that would reverse the text after them are escapes, except in values of options, which nobody sees.
    seen = re.sub(r'<option value="[^"]*"', "", document)
    assert "\u202e" not in seen
    assert r"\u202e" in seen
