"""Tasks made from held-out modules: the right rows, the same everywhere, and none of the training text."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from llmfoundry_lite.cli import main
from llmfoundry_lite.config.load_eval import load_eval_config
from llmfoundry_lite.config.load_tasks import load_tasks
from llmfoundry_lite.data.baselines import read_tokens
from llmfoundry_lite.data.tokenizer import load_tokenizer
from llmfoundry_lite.evaluation.task_files import read_rows
from llmfoundry_lite.evaluation.tasks import prepare_task as ask
from llmfoundry_lite.prepare.prepare import prepare
from llmfoundry_lite.prepare.request import PrepareRequest
from scripts import make_tasks as own
from tests.helpers.pieces import Pieces

ROOT = Path(__file__).parents[1]
NAMES = ["next_line", "identifier_recall", "stdlib_text"]


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("made")
    assert main.run(["--out", str(out)], own.program) == 0
    return out


def rows(made: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (made / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


def test_questions_of_a_file_lie_as_far_apart_as_asked() -> None:
    assert list(own.apart([5, 7, 8, 2, 11, 10], 3)) == [5, 8, 2, 11]


def test_the_quickstarts_tasks_are_those_that_are_made(made: Path) -> None:
    config, *_ = load_eval_config([str(ROOT / "yamls/eval/quickstart.yaml"), "models.m=runs/m"])
    assert config.icl_tasks == NAMES == [name for name in NAMES if rows(made, name)]
    tasks = load_tasks(NAMES, str(ROOT / "evals"))
    assert [task.dataset_uri for task in tasks] == [f"data/eval/{name}.jsonl" for name in NAMES]


@pytest.mark.slow
def test_they_are_the_same_every_time(made: Path, tmp_path: Path) -> None:
    own.make_tasks(tmp_path, notify=lambda line: None)
    for name in NAMES:
        assert (tmp_path / f"{name}.jsonl").read_bytes() == (made / f"{name}.jsonl").read_bytes()


def test_rows_of_their_own_kind_are_replaced_and_no_others(made: Path, tmp_path: Path) -> None:
    row = rows(made, "next_line")[0]
    assert own.is_replaceable(tmp_path / "none.jsonl", row) and own.is_replaceable(made / "next_line.jsonl", row)
    for content in ("mine", '{"query": "mine"}\n', ""):
        (tmp_path / "next_line.jsonl").write_text(content)
        assert not own.is_replaceable(tmp_path / "next_line.jsonl", row)


def test_they_are_small_and_large_enough_to_say_something(made: Path) -> None:
    assert sum(path.stat().st_size for path in made.iterdir()) < 700_000
    assert len(rows(made, "next_line")) == own.NUM_QUESTIONS
    assert len(rows(made, "identifier_recall")) > 250
    for name in ("next_line", "identifier_recall"):
        shares = [sum(row["gold"] == k for row in rows(made, name)) / len(rows(made, name)) for k in range(4)]
        assert min(shares) > 0.18 and max(shares) < 0.32


def test_of_four_choices_only_the_right_one_is_given_away_by_the_context(made: Path) -> None:
    for row in rows(made, "next_line"):
        assert len({choice.strip() for choice in row["choices"]}) == 4
        assert not any(choice.strip() in row["query"] for choice in row["choices"])
    for row in rows(made, "identifier_recall"):
        assert [i for i, choice in enumerate(row["choices"]) if choice in row["query"]] == [row["gold"]]


def test_lines_of_comments_and_strings_are_not_asked_for() -> None:
    text = 'def f():\n    """Doc\n    more"""\n    x = 1  # why\n    # note\n    y = """a\n    b"""\n\n    return x\n'
    assert own.code_lines(text) == [0, 3, 5, 8]
    assert own.code_lines("def broken(:\n  '''") == []


def test_what_is_asked_is_what_preparing_the_library_holds_out(tmp_path: Path, monkeypatch) -> None:
    library = tmp_path / "library"
    library.mkdir()
    for i in range(60):
        (library / f"module_{i}.py").write_text(f"# marker_{i}_\n" + f"value_{i} = {i}\n" * 40)
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(library))
    out = tmp_path / "data"
    prepare(PrepareRequest(sources=("python-stdlib",), tokenizer="train:300", max_seq_len=16), out, num_workers=1)
    held_out = {marker for module in own.held_out_modules() for marker in re.findall(r"marker_\d+_", module.text)}
    tokenizer = load_tokenizer(out / "tokenizer")
    val = tokenizer.decode(read_tokens(out / "val").ravel().tolist())
    train = tokenizer.decode(read_tokens(out / "train").ravel().tolist())
    assert held_out and held_out == set(re.findall(r"marker_\d+_", val))
    assert not held_out & set(re.findall(r"marker_\d+_", train))


def test_a_library_without_anything_to_ask_about_is_one_line(tmp_path, monkeypatch, capsys) -> None:
    (tmp_path / "a.py").write_text("x = 1\n")
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    assert main.run(["--out", str(tmp_path / "out")], own.program) == 2
    assert capsys.readouterr().err.startswith("error: next_line: nothing in ")


def test_indentation_is_part_of_the_answer(made: Path) -> None:
    (task,) = load_tasks(["next_line"], str(ROOT / "evals"))
    tokenizer = Pieces()
    found = read_rows(replace(task, dataset_uri=str(made / "next_line.jsonl")))[:20]
    prepared = ask(task, found, 0, tokenizer, max_seq_len=512, tokenization="separate")
    for item, row in zip(prepared.items, found, strict=True):
        for request, choice in zip(item.requests, row["choices"], strict=True):
            assert tokenizer.decode(request.continuation) == "\n" + choice
            assert tokenizer.decode(request.context) == row["query"]
