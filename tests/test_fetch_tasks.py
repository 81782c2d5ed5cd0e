"""Public tasks' data: upstream rows, made by hand in the Hub's shape, become LLM Foundry's columns."""

import functools
import hashlib
import json
import socket
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import datasets
import pytest

from llmfoundry_lite.cli import main
from llmfoundry_lite.config.load_tasks import load_tasks
from llmfoundry_lite.evaluation.task_files import read_rows
from scripts.fetch_tasks import CORE_FILES, ORIGINS, PublishedFile, convert_rows, program

ROOT = Path(__file__).parents[1]
COUNCIL = "The city councilmen refused the demonstrators a permit because they feared violence."
JIM = "Jim signaled the barman and gestured toward his bathroom key."
GAP = "There is a gap in the wall. You can see the garden through it ."


def winograd(text, pronoun, options, label):
    at = text.index(f" {pronoun} ") + 1
    return {"text": text, "pronoun": pronoun, "pronoun_loc": at, "options": options, "label": label, "quote": ""}


UPSTREAM = {
    "arc_easy": {
        "question": "Which piece of safety equipment is used to keep mold spores from entering the respiratory system?",
        "choices": {
            "text": ["safety goggles", "breathing mask", "rubber gloves", "lead apron"],
            "label": ["1", "2", "3", "4"],
        },
        "answerKey": "2",
    },
    "boolq": {"question": "is it so", "passage": "It is so.", "answer": True},
    "hellaswag": {
        "activity_label": "Baking cookies",
        "ctx_a": "A female chef in white uniform shows a stack of baking pans in a large kitchen presenting them.",
        "ctx_b": "the pans",
        "endings": [
            "contain egg yolks and baking soda.",
            "are then sprinkled with brown sugar.",
            "are placed in a strainer on the counter.",
            "are filled with pastries and loaded into the oven.",
        ],
        "label": "3",
    },
    "piqa": {
        "goal": "dresser",
        "sol1": "replace drawer with bobby pin",
        "sol2": "finish, woodgrain with  bobby pin",
        "label": 1,
    },
    "winograd": winograd(COUNCIL, "they", ["The city councilmen", "The demonstrators"], 0),
    "winogrande": {
        "sentence": "Sarah was a much better surgeon than Maria so _ always got the easier cases.",
        "option1": "Sarah",
        "option2": "Maria",
        "answer": "2",
    },
    "lambada_openai": {
        "text": "In my palm is a clear stone, and inside it is a small ivory statuette. A guardian angel.\n\n"
        '"Figured if '
        "you're going to be out at night getting hit by cars, you might as well have some backup.\"\n\nI look at him, "
        "feeling stunned. Like this is some sort of sign. But as I stare at Harlin, his mouth curved in a confident "
        "grin, I don't care about signs"
    },
    "copa": {
        "premise": "I wanted to conserve energy.",
        "choice1": "I swept the floor in the unoccupied room.",
        "choice2": "I shut off the light in the unoccupied room.",
        "question": "effect",
        "label": 1,
    },
    "openbook_qa": {
        "question_stem": "Predators eat",
        "choices": {"text": ["lions", "humans", "bunnies", "grass"], "label": ["A", "B", "C", "D"]},
        "answerKey": "C",
    },
}
UPSTREAM["arc_challenge"] = UPSTREAM["arc_easy"]
ALGEBRA = {
    "question": "What is 2 + 3? ",
    "subject": "abstract_algebra",
    "choices": ["4", "5", "6", "7"],
    "answer": 1,
}
TASKS = [name for name in ORIGINS if name != "mmlu"]

# The rows of ARC, HellaSwag, PIQA, Winograd, COPA and LAMBADA stand like this in LLM Foundry's scripts/eval/local_data.
CONVERTED = {
    "arc_easy": {
        "query": "Question: Which piece of safety equipment is used to keep mold spores from entering the respiratory "
        "system?",
        "choices": ["safety goggles", "breathing mask", "rubber gloves", "lead apron"],
        "gold": 1,
    },
    "hellaswag": {
        "query": "Baking cookies: A female chef in white uniform shows a stack of baking pans in a large kitchen "
        "presenting them. The pans",
        "choices": UPSTREAM["hellaswag"]["endings"],
        "gold": 3,
    },
    "piqa": {
        "query": "Question: dresser\n",
        "choices": ["replace drawer with bobby pin", "finish, woodgrain with  bobby pin"],
        "gold": 1,
    },
    "lambada_openai": {
        "context": UPSTREAM["lambada_openai"]["text"].removesuffix(" signs"),
        "continuation": "signs",
    },
    "boolq": {
        "query": "Passage: It is so.\nQuestion: is it so?",
        "choices": ["no", "yes"],
        "gold": 1,
        "passage": "It is so.",
    },
    "openbook_qa": {"query": "Predators eat", "choices": ["lions", "humans", "bunnies", "grass"], "gold": 2},
    "winogrande": {
        "context_options": [
            "Sarah was a much better surgeon than Maria so Sarah",
            "Sarah was a much better surgeon than Maria so Maria",
        ],
        "continuation": "always got the easier cases.",
        "gold": 1,
    },
    "copa": {
        "query": "I wanted to conserve energy, therefore",
        "choices": ["i swept the floor in the unoccupied room.", "i shut off the light in the unoccupied room."],
        "gold": 1,
    },
    "winograd": {
        "context_options": [
            "The city councilmen refused the demonstrators a permit because the city councilmen",
            "The city councilmen refused the demonstrators a permit because the demonstrators",
        ],
        "continuation": "feared violence.",
        "gold": 0,
    },
}


def convert(name, row):
    return next(iter(convert_rows(name, [row])))


@pytest.mark.parametrize("name", CONVERTED)
def test_an_upstream_row_becomes_a_question(name: str) -> None:
    assert convert(name, UPSTREAM[name]) == CONVERTED[name]


def test_a_possessive_pronoun_becomes_a_possessive_name_and_a_name_that_opens_a_sentence_keeps_its_capital() -> None:
    assert convert("winograd", winograd(JIM, "his", ["Jim", "The barman"], 1))["context_options"] == [
        "Jim signaled the barman and gestured toward Jim's",
        "Jim signaled the barman and gestured toward the barman's",
    ]
    assert convert("winograd", winograd(GAP, "it", ["The gap", "The wall"], 0))["continuation"] == "."
    opens = winograd("Anne saw the man. He was  glad.", "He", ["Anne", "The man"], 1)
    assert convert("winograd", opens)["context_options"][1] == "Anne saw the man. The man"


def test_wikihows_marks_are_taken_out_of_hellaswag() -> None:
    row = {**UPSTREAM["hellaswag"], "ctx_a": "[header] How to bake [title] Mix. [step] Stir.", "ctx_b": ""}
    assert convert("hellaswag", row)["query"] == "Baking cookies: How to bake. Mix. Stir."


def test_a_row_of_another_shape_is_one_line() -> None:
    with pytest.raises(main.UserError) as caught:
        convert("piqa", {"goal": "x", "sol1": "a", "sol2": "b"})
    assert str(caught.value) == (
        "piqa: row 0 of baber/piqa is not of the expected shape (KeyError: 'label'); its columns are goal, sol1, sol2"
    )
    with pytest.raises(main.UserError, match="no label"):
        convert("piqa", {**UPSTREAM["piqa"], "label": -1})


def test_every_task_that_can_be_fetched_has_its_yaml_and_its_rows_pass_its_checks(tmp_path, monkeypatch) -> None:
    tasks = load_tasks(TASKS, str(ROOT / "evals"))
    assert [task.label for task in tasks] == TASKS
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        datasets,
        "load_dataset",
        lambda repository, configuration, split: [UPSTREAM[name_of(repository, configuration)]],
    )
    assert main.run([], program) == 0
    for task in tasks:
        (row,) = read_rows(task)
        assert set(row) == {*task.task_type.columns, *filter(None, [task.cluster])}


def name_of(repository: str, configuration: str | None) -> str:
    found = [n for n, o in ORIGINS.items() if (o.repository, o.configuration) == (repository, configuration)]
    assert len(found) == 1
    return found[0]


def test_what_is_there_stays_unless_forced(tmp_path, monkeypatch, capsys) -> None:
    fetched = []

    def load(repository, configuration, split):
        fetched.append(repository)
        return [UPSTREAM["copa"]] * 100

    monkeypatch.setattr(datasets, "load_dataset", load)
    command = ["copa", "--out", str(tmp_path)]
    assert main.run(command, program) == main.run(command, program) == 0
    assert capsys.readouterr().out == (
        f"copa: 100 rows, 0.02 MB in {tmp_path}/copa.jsonl\ncopa: {tmp_path}/copa.jsonl is there already\n"
    )
    assert fetched == ["aps/super_glue"]
    assert main.run([*command, "--force"], program) == 0
    assert len(fetched) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["copa.jsonl"]


def test_other_rows_than_the_published_ones_are_said_to_be_so(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: [UPSTREAM["copa"]])
    assert main.run(["copa", "--out", str(tmp_path)], program) == 0
    said = capsys.readouterr().out
    assert "copa: published results are about 100 rows; these are not comparable with them" in said


def test_a_hub_that_does_not_answer_is_one_line_and_leaves_nothing_half_done(tmp_path, monkeypatch, capsys) -> None:
    def load(repository, configuration, split):
        if repository == "allenai/openbookqa":
            raise ConnectionError("no route\nto host")
        return [UPSTREAM["copa"]] * 100

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert main.run(["copa", "openbook_qa", "piqa", "--out", str(tmp_path)], program) == 75
    assert capsys.readouterr().err == (
        "error: openbook_qa: allenai/openbookqa cannot be had from the Hugging Face Hub (ConnectionError: no route to "
        "host); tasks fetched so far are kept; this may pass: run the same command again\n"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["copa.jsonl"]


def test_a_misspelt_task_is_refused_before_anything_is_fetched(tmp_path, capsys) -> None:
    assert main.run(["copa", "arc_esay", "--out", str(tmp_path / "new")], program) == 2
    assert capsys.readouterr().err.startswith("error: arc_esay is no task that can be fetched; expected arc_challenge,")
    assert not (tmp_path / "new").exists()


# ------------------------------------------------------------------------------------------------------------- CORE

ROWS = b'{"context": "op i doubles i.\\nop 4 =", "continuation": "8"}\n' * 3


@pytest.fixture
def published(tmp_path, monkeypatch):
    """A folder with the files of CORE as LLM Foundry's repository has them, all with the same rows."""
    folder = tmp_path / "local_data"
    blob_id = hashlib.sha1(b"blob %d\0" % len(ROWS) + ROWS).hexdigest()
    for name, file in CORE_FILES.items():
        (folder / file.path).parent.mkdir(parents=True, exist_ok=True)
        (folder / file.path).write_bytes(ROWS)
        monkeypatch.setitem(CORE_FILES, name, PublishedFile(file.path, blob_id, 3))
    return folder


def fetch(folder: Path, *arguments: str) -> int:
    return main.run([*arguments, "--out", str(folder / "data")], program)


def test_the_suite_core_is_copied_from_a_clone_of_llm_foundry(tmp_path, published, capsys) -> None:
    assert fetch(tmp_path, "--suite", "core", "--core-source", str(published)) == 0
    copies = sorted(path.relative_to(tmp_path / "data") for path in (tmp_path / "data").rglob("*.jsonl"))
    assert [path.with_suffix("").as_posix() for path in copies] == sorted(CORE_FILES)
    assert {(tmp_path / "data" / path).read_bytes() for path in copies} == {ROWS}
    lines = capsys.readouterr().out.splitlines()
    assert lines[2] == (
        f"core/bigbench_qa_wikidata: 3 rows, 0.00 MB in {tmp_path}/data/core/bigbench_qa_wikidata.jsonl (3 of 21)"
    )


def test_a_file_of_core_is_downloaded(tmp_path, published) -> None:
    handler = functools.partial(SimpleHTTPRequestHandler, directory=str(published))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        assert fetch(tmp_path, "core/copa", "--core-source", f"http://127.0.0.1:{server.server_port}/") == 0
        server.shutdown()
    assert (tmp_path / "data/core/copa.jsonl").read_bytes() == ROWS


def test_a_file_of_core_with_other_content_is_refused(tmp_path, published, capsys) -> None:
    path = published / CORE_FILES["core/copa"].path
    path.write_bytes(ROWS.replace(b"8", b"9"))
    assert fetch(tmp_path, "core/copa", "--core-source", str(published)) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: core/copa: {path} is not the published file: its git hash is ")
    assert f", expected {CORE_FILES['core/copa'].blob_id}; give --core-source a clone" in error
    assert not (tmp_path / "data/core/copa.jsonl").exists()


def test_a_server_that_cannot_be_reached_may_be_tried_again(tmp_path, capsys) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), SimpleHTTPRequestHandler) as server:
        port = server.server_port  # which nobody listens to from here on
    assert fetch(tmp_path, "core/copa", "--core-source", f"http://127.0.0.1:{port}") == 75
    error = capsys.readouterr().err
    assert f"core/copa: http://127.0.0.1:{port}/commonsense_reasoning/copa.jsonl cannot be read" in error
    assert "--core-source also takes the folder of a clone" in error
    assert error.endswith("tasks fetched so far are kept; this may pass: run the same command again\n")


def test_an_answer_that_is_no_http_is_one_line(tmp_path, capsys) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=answer_nonsense, args=(server,), daemon=True).start()
        port = server.getsockname()[1]
        assert fetch(tmp_path, "core/copa", "--core-source", f"http://127.0.0.1:{port}") == 2
    assert "copa.jsonl cannot be read (nonsense" in capsys.readouterr().err


def answer_nonsense(server: socket.socket) -> None:
    connection, _ = server.accept()
    with connection:
        connection.recv(65536)
        connection.sendall(b"nonsense\r\n\r\n")


def test_an_unknown_suite_is_refused(tmp_path, capsys) -> None:
    assert fetch(tmp_path, "--suite", "cores") == 2
    assert capsys.readouterr().err == "error: --suite cores: no such suite; expected core, mmlu\n"


# ------------------------------------------------------------------------------------------------------------- MMLU


def test_the_examples_of_mmlu_come_before_its_questions(tmp_path, monkeypatch, capsys) -> None:
    splits = {"dev": [{**ALGEBRA, "question": "What is 1 + 3?", "answer": 0}], "test": [ALGEBRA]}
    asked = []

    def load(repository, configuration, split):
        asked.append((repository, configuration))
        return splits[split]

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert fetch(tmp_path, "--suite", "mmlu") == 0
    assert asked == [("cais/mmlu", "all")] * 2
    rows = [json.loads(line) for line in (tmp_path / "data/mmlu.jsonl").read_text().splitlines()]
    assert [row["split"] for row in rows] == ["dev", "test"]
    assert rows[1] == {
        "query": "What is 2 + 3? ",
        "choices": ["4", "5", "6", "7"],
        "gold": 1,
        "category": "abstract algebra",
        "split": "test",
    }
    assert "mmlu: published results are about 14327 rows" in capsys.readouterr().out
