"""The page of a comparison. `test_page_in_browser.py` tries it in Chromium."""

import base64
import hashlib
import json
import os
import subprocess
import sys
import warnings
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from llmfoundry_lite.cli import main
from llmfoundry_lite.evaluation.compare import compare
from llmfoundry_lite.evaluation.results import load_results
from llmfoundry_studies.page import FIRST_LINE, PARTS, content_of_models, format_count, render_page
from llmfoundry_studies.page_items import collect_items
from llmfoundry_studies.page_texts import MAX_NAME_CHARACTERS, MAX_TEXT_CHARACTERS, short_name
from tests.helpers.launch import PATHS
from tests.helpers.pages import HOSTILE, LONE_SURROGATE, hostile_result, question_task
from tests.helpers.results import choice, text, write_result

TASK = "quiz/0-shot"


class Page(HTMLParser):
    """A page's elements: how many of each tag, ids, what they refer to, texts, and the data of the list."""

    def __init__(self, html: str):
        super().__init__()
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.references: list[str] = []
        self.texts: list[str] = []
        self.rows: list[list[str]] = []
        """The texts of the cells of each row of a table."""
        self.handlers: list[str] = []
        self.policy = ""
        self._is_data = False
        self._is_in_cell = False
        self.data: Any = None
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        if tag == "tr":
            self.rows.append([])
        if tag in ("th", "td"):
            self.rows[-1].append("")
            self._is_in_cell = True
        self.tags.append(tag)
        if attributes.get("http-equiv") == "Content-Security-Policy":
            self.policy = str(attributes["content"])
        self.handlers += [name for name in attributes if name.startswith("on")]
        self._is_data = attributes.get("id") == "data"
        if "id" in attributes:
            self.ids.append(str(attributes["id"]))
        href = attributes.get("href") or ""
        if href:
            self.references.append(href)

    def handle_endtag(self, tag: str) -> None:
        if tag in ("th", "td"):
            self._is_in_cell = False

    def handle_data(self, data: str) -> None:
        if self._is_data:
            self.data = json.loads(data)
            self._is_data = False
        else:
            self.texts.append(data)
            if self._is_in_cell:
                self.rows[-1][-1] += data.replace("\n", "")


def write_pair(folder: Path, first=(1, 0) * 40, other=(1, 1) * 40) -> list[Path]:
    """Write the results of two models on a quiz and on a text."""
    documents = [[(1000.0 + i, 1000)] for i in range(30)]
    better_documents = [[(900.0 + 2 * i, 1000)] for i in range(30)]
    return [
        write_result(folder / "a", "base", {TASK: question_task(first), "held_out": text(documents)}),
        write_result(folder / "b", "ours", {TASK: question_task(other), "held_out": text(better_documents)}),
    ]


def render(paths: list[Path]) -> Page:
    """Return the page of results."""
    results = load_results(paths)
    return Page(render_page(content_of_models(results, compare(results), date="2026-11-30")))


def test_compare_writes_a_page_with_scores_verdicts_and_items(tmp_path, capsys):
    paths = write_pair(tmp_path)
    html = tmp_path / "new" / "page.html"
    assert main.run(["compare", *map(str, paths), "--html", str(html)]) == 0
    assert str(html) in capsys.readouterr().out

    page = Page(html.read_text())
    shown = " ".join(page.texts)
    for expected in ("ours against base", "better by 0.500", "better by 0.1234", "0.500", "1.000", "acc_per_token"):
        assert expected in shown
    [quiz, held_out] = page.data["tasks"]
    assert quiz["items"][1] == {
        "index": 1,
        "question": "Question 1?",
        "choices": ["yes 1", "no 1"],
        "gold": 0,
        "scores": [0.0, 1.0],
        "chosen": [1, 0],
        "log_probabilities": [[-6.0, -4.0], [-4.0, -6.0]],
        "lengths": [[2, 2], [2, 2]],
    }
    assert held_out["items"][0]["scores"] == [1.4427, 1.29843]


def test_the_scores_of_a_text_count_windows_and_documents(tmp_path):
    windows = [[(1000.0 + i, 1000)] * 3 for i in range(30)]
    paths = [
        write_result(tmp_path / name, name, {"held_out": text(windows, num_documents=30)}) for name in ("base", "ours")
    ]
    rows = [row for row in render(paths).rows if row[0] == "held_out"]
    assert rows[0][2] == "90 windows of 30 documents"
    assert rows[1][2] == "30"


def test_bits_per_byte_of_answers_say_that_less_is_better(tmp_path):
    tasks = {}
    for name, bits in (("base", 2.0), ("ours", 1.0)):
        record, items = question_task([1, 0] * 15)
        for number, item in enumerate(items):
            item["bpb"] = bits + 0.01 * (number % 5)
        tasks[name] = ({**record, "metric": "bpb", "bpb": bits + 0.02, "bpb_stderr": 0.01}, items)
    page = render([write_result(tmp_path / name, name, {TASK: task}) for name, task in tasks.items()])
    [task] = page.data["tasks"]
    assert task["less_is_better"] and not task["is_text"]
    assert task["label"] == "bits per byte of the right answer"
    assert task["items"][0]["scores"] == [2.0, 1.0]
    assert page.rows[4][:3] == ["quiz/0-shot", "bits per byte of the right answer", "30"]


def test_averages_of_accuracies_and_of_bits_are_not_in_one_row(tmp_path):
    bits = [{"bpb": 1.0}, {"bpb": 2.0}]
    record, items = choice([1, 0])
    record = record | {"metric": "bpb", "bpb": 1.5, "bpb_stderr": 0.5}
    in_bits = (record, [item | own for item, own in zip(items, bits, strict=True)])
    base = write_result(tmp_path / "base", "base", {"a/0-shot": in_bits, "b/0-shot": choice([1, 1, 0, 1])})
    ours = write_result(tmp_path / "ours", "ours", {"a/0-shot": in_bits, "c/0-shot": in_bits})
    page = render([base, ours])
    [average] = [row for row in page.rows if row and row[0].startswith("average")]
    assert any("0.750" in cell for cell in average)
    assert not any("1.5" in cell for cell in average)


def test_equal_results_give_equal_bytes(tmp_path):
    results = load_results(write_pair(tmp_path))
    pages = [render_page(content_of_models(results, compare(results), date="2026-11-30")) for _ in range(2)]
    assert pages[0] == pages[1]


def test_every_id_is_unique_and_every_reference_leads_to_one(tmp_path):
    paths = write_pair(tmp_path)
    paths.append(write_result(tmp_path / "c", "third", {TASK: question_task([0, 0] * 40)}))
    page = render(paths)
    assert len(page.ids) == len(set(page.ids))
    assert page.tags.count("svg") == 2
    assert page.references and all(reference.removeprefix("#") in page.ids for reference in page.references)
    assert page.tags.count("style") == 1, "matplotlib's style sheets would apply to the whole page"


def test_texts_of_strangers_stay_texts(tmp_path):
    clean = render(write_pair(tmp_path / "clean"))
    page = render([hostile_result(tmp_path / "a", "first"), hostile_result(tmp_path / "b", "other")])
    assert page.tags.count("script") == clean.tags.count("script") == 2
    assert not page.handlers
    assert not {"img", "iframe", "base", "link", "object"} & set(page.tags)
    [task] = page.data["tasks"]
    assert task["items"][0]["question"] == HOSTILE.replace(LONE_SURROGATE, "\ufffd")
    assert any(HOSTILE[:40] in data for data in page.texts), "names are shown as they are"


def test_the_page_allows_its_own_script_alone(tmp_path):
    results = load_results(write_pair(tmp_path))
    html = render_page(content_of_models(results, compare(results), date="2026-11-30"))
    script = (PARTS / "page.js").read_text()
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert Page(html).policy.startswith(f"default-src 'none'; script-src 'sha256-{digest}'; ")
    assert f"<script>{script}</script>" in html
    assert "http://" not in html.replace("http://www.w3.org/2000/svg", "") and "https://" not in html


def test_when_room_is_short_items_that_differ_are_kept(tmp_path):
    paths = write_pair(tmp_path, first=[1] * 90 + [0] * 10, other=[1] * 100)
    results = load_results(paths)
    everything = collect_items(results)
    assert everything.num_left_out == 0
    size = len(json.dumps(everything.tasks[0]["items"]))

    shortened = collect_items(results, max_bytes=size // 4)
    assert shortened.num_left_out == everything.num_items - shortened.num_items > 0
    kept = [item["index"] for item in shortened.tasks[0]["items"]]
    assert set(kept) > set(range(90, 100)), "the models differ on the last ten"
    assert kept == sorted(kept)


def test_a_long_text_is_cut_and_says_so(tmp_path):
    record, items = question_task([1, 0] * 5)
    items[0]["question"] = "a" * 10_000 + "end"
    paths = [write_result(tmp_path / name, name, {TASK: (record, items)}) for name in "ab"]
    [task] = collect_items(load_results(paths)).tasks
    question = task["items"][0]["question"]
    assert len(question) < MAX_TEXT_CHARACTERS + 100
    assert question.endswith("end") and "6,003 characters left out" in question
    assert len(short_name("x" * 1000)) == MAX_NAME_CHARACTERS


def test_an_item_that_one_model_was_not_asked_has_no_score_of_it(tmp_path):
    record, items = question_task([1, 0] * 20)
    less = {**record, "n": 39, "acc_per_token": sum(item["acc_per_token"] for item in items[1:]) / 39}
    paths = [
        write_result(tmp_path / "a", "a", {TASK: (record, items)}),
        write_result(tmp_path / "b", "b", {TASK: (less, items[1:])}),
    ]
    [task] = collect_items(load_results(paths)).tasks
    assert task["items"][0]["scores"] == [1.0, None]
    assert task["items"][0]["chosen"] == [0, None]


def test_results_without_texts_are_listed_by_their_index(tmp_path):
    paths = [write_result(tmp_path / name, name, {TASK: choice([1, 0] * 10)}) for name in "ab"]
    [task] = render(paths).data["tasks"]
    assert task["items"][3] == {"index": 3, "scores": [0.0, 0.0]}


def test_equal_prompts_are_stored_once(tmp_path):
    record, items = question_task([1, 0] * 5)
    for item in items:
        item["prompt_tokens"] = {"shared": ["Is", " it?"], "contexts": [[], []], "answers": [[" yes"], [" n", "o"]]}
    paths = [write_result(tmp_path / name, name, {TASK: (record, items)}) for name in "ab"]
    [task] = collect_items(load_results(paths)).tasks
    first, second = task["items"][0]["prompts"]
    assert first["shared"] == ["Is", " it?"] and first["answers"] == [[" yes"], [" n", "o"]]
    assert second == 0


def test_when_room_is_short_prompts_are_left_out_before_items(tmp_path):
    record, items = question_task([1, 0] * 20)
    for item in items:
        item["prompt_tokens"] = {"shared": ["word"] * 100, "contexts": [[], []], "answers": [[" yes"], [" no"]]}
    results = load_results([write_result(tmp_path / name, name, {TASK: (record, items)}) for name in "ab"])
    size = len(json.dumps(collect_items(results).tasks[0]["items"]))
    shortened = collect_items(results, max_bytes=size // 2)
    assert (shortened.num_left_out, shortened.num_without_prompt) == (0, 40)
    assert "prompts" not in shortened.tasks[0]["items"][0]


def test_checkpoints_of_a_run_have_curves(tmp_path):
    paths = []
    for batch in (100, 200, 300):
        facts = {"save_id": f"e1-ba{batch}-ab", "num_tokens_trained": batch * 1000, "source": f"runs/m/ba{batch}"}
        paths.append(write_result(tmp_path, f"m-ba{batch}", {TASK: question_task([1, 0] * 20)}, **facts))
    page = render(paths)
    assert "curves" in page.ids
    assert "training tokens" in page.texts
    assert "curves" not in render(write_pair(tmp_path)).ids


def test_skipped_tasks_are_not_on_the_page(tmp_path):
    html = tmp_path / "page.html"
    paths = write_pair(tmp_path)
    assert main.run(["compare", *map(str, paths), "--skip", "held_out", "--html", str(html)]) == 0
    assert [task["name"] for task in Page(html.read_text()).data["tasks"]] == [TASK]


def test_a_gauntlet_and_ranks_are_shown(tmp_path):
    gauntlet = tmp_path / "gauntlet.yaml"
    benchmarks = [{"name": "quiz", "num_fewshot": 0, "random_baseline": 0.5}]
    facts = {"weighting": "EQUAL", "subtract_random_baseline": True, "rescale_accuracy": True}
    categories = [{"name": "knowledge", "benchmarks": benchmarks}]
    gauntlet.write_text(json.dumps({"eval_gauntlet": {**facts, "categories": categories}}))
    paths = write_pair(tmp_path, first=[1] * 60 + [0] * 20, other=[1] * 80)
    paths.append(write_result(tmp_path / "c", "third", {TASK: question_task([1] * 80)}))
    html = tmp_path / "page.html"

    options = ["--gauntlet", str(gauntlet), "--html", str(html)]
    assert main.run(["compare", *map(str, paths), *options]) == 0
    page = Page(html.read_text())
    scores, *_ = [row for row in page.rows if row[0] == "gauntlet: knowledge"]
    assert scores[3:6] == ["0.500", "▲ 1.000", "▲ 1.000"]
    assert "ranks" not in page.ids
    assert "difference in the gauntlet's scores, ours minus base" in page.texts

    assert main.run(["compare", *map(str, paths), *options, "--all-pairs"]) == 0
    page = Page(html.read_text())
    assert "3 models, ranked" in page.texts
    ranks = [row[:2] for row in page.rows if row[0] in ("base", "ours", "third") and "(" in row[1]]
    assert ranks == [["ours", "1-2 (1.000)"], ["third", "1-2 (1.000)"], ["base", "3 (0.500)"]]
    assert "third against ours" in page.texts


def test_recipes_have_a_page_with_all_of_their_runs(tmp_path):
    answers = {"base": [[1, 0, 0, 0] * 20, [1, 0, 0, 1] * 20], "ours": [[1, 1, 1, 0] * 20, [1, 1, 1, 1] * 20]}
    arguments = []
    for recipe, runs in answers.items():
        paths = [write_result(tmp_path / f"{recipe}{i}", "m", {TASK: question_task(run)}) for i, run in enumerate(runs)]
        arguments.append(f"{recipe}={','.join(map(str, paths))}")
    html = tmp_path / "page.html"
    assert main.run(["compare", *arguments, "--html", str(html)]) == 0

    page = Page(html.read_text())
    assert page.data["models"] == ["base: base0/m", "base: base1/m", "ours: ours0/m", "ours: ours1/m"]
    assert page.data["tasks"][0]["items"][3]["scores"] == [0.0, 1.0, 0.0, 1.0]
    [row] = [row for row in page.rows if row[:2] == [TASK, "acc_per_token"]]
    assert row[3:5] == ["0.375", "0.875"]
    assert "ours against base" in page.texts
    assert "two runs say little about the noise of seeds" in " ".join(page.texts)

    assert main.run(["compare", *arguments, "--all-pairs", "--html", str(html)]) == 0
    assert "2 recipes, ranked" in Page(html.read_text()).texts


# ---------------------------------------------------------------------------------------------------------- the file


@pytest.mark.parametrize("kind", ["folder", "foreign file", "link", "file as folder"])
def test_a_path_that_is_no_page_is_refused_before_anything_is_read(kind, tmp_path, capsys):
    target = tmp_path / "page.html"
    foreign = tmp_path / "mine.html"
    foreign.write_text("<!DOCTYPE html> mine")
    if kind == "folder":
        target.mkdir()
    elif kind == "foreign file":
        target.write_text("<!DOCTYPE html> mine")
    elif kind == "link":
        target.symlink_to(foreign)
    else:
        target = foreign / "page.html"
    assert main.run(["compare", "missing-a.json", "missing-b.json", "--html", str(target)]) == 2
    messages = {
        "folder": f"--html: {target} is a folder, expected a file such as {target / 'compare.html'}",
        "foreign file": f"--html: {target} exists and is not a page that this command has written",
        "link": f"--html: {target} is a link, which would be written through",
        "file as folder": f"--html: {foreign} is a file, expected a folder",
    }
    assert messages[kind] in capsys.readouterr().err
    assert foreign.read_text() == "<!DOCTYPE html> mine"


def test_an_interval_of_an_accuracy_ends_at_0_and_1(tmp_path):
    page = render(write_pair(tmp_path, first=[1] + [0] * 39, other=[1] * 39 + [0]))
    assert "0.000 to 0.074" in page.texts
    assert "0.926 to 1.000" in page.texts


def test_names_in_chinese_are_drawn_without_a_warning(tmp_path):
    paths = [write_result(tmp_path / name, name, {"漢字/0-shot": question_task([1, 0] * 10)}) for name in "ab"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        page = render(paths)
    assert "漢字/0-shot" in page.texts


def test_a_page_that_cannot_be_written_is_one_line(tmp_path, capsys):
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    html = tmp_path / "link" / "page.html"
    assert main.run(["compare", *map(str, write_pair(tmp_path)), "--html", str(html)]) == 2
    assert capsys.readouterr().err == f"error: --html: {html} cannot be written: File exists; name another file\n"


def test_an_earlier_page_is_replaced(tmp_path):
    html = tmp_path / "page.html"
    html.write_text(f"{FIRST_LINE}\n<p>old")
    assert main.run(["compare", *map(str, write_pair(tmp_path)), "--html", str(html)]) == 0
    assert html.read_text().startswith(FIRST_LINE)
    assert "<p>old" not in html.read_text()


def test_a_page_needs_neither_torch_nor_streaming():
    code = "import sys, llmfoundry_studies.commands; print({'torch', 'streaming'} & set(sys.modules))"
    environment = {**os.environ, "PYTHONPATH": PATHS}
    imported = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert imported.stdout == "set()\n"


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (None, ""),
        (999, "999"),
        (1_315_950_592, "1.32 B"),
        (999_400_000, "999 M"),
        (999_948_288, "1 B"),
        (999_500, "1 M"),
    ],
)
def test_a_count_has_three_digits_and_its_unit(count, text):
    assert format_count(count) == text
