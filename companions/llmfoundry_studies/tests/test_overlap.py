"""Items that occur in training data are found, and no others."""

import json
import random

import numpy as np
import pytest

from llmfoundry_lite.cli import main
from llmfoundry_lite.config.eval_schema import TaskConfig
from llmfoundry_lite.config.load_tasks import load_tasks
from llmfoundry_lite.data.tokenizer import load_tokenizer
from llmfoundry_lite.errors import DataError
from llmfoundry_lite.evaluation.results import load_results
from llmfoundry_lite.prepare.prepare import prepare
from llmfoundry_studies import overlap
from llmfoundry_studies.clean import divide_results
from llmfoundry_studies.ngrams import NgramTable, WordHasher, hash_ngrams, split_words
from llmfoundry_studies.overlap import Search, find_overlap, question_and_answer, read_documents, read_task
from tests.helpers.preparing import request, write_jsonl
from tests.helpers.results import choice, write_result
from tests.helpers.tiny import build_tokenizer

NUM_ITEMS = 60
PLANTED = [3, 17, 40]
"""Items whose question and right answer stand in the training data."""
PLANTED_QUESTION = 25
"""Item of which the question alone stands there."""
SHORT = 59
"""Item that is too short to be looked for."""


def sentence(generator: random.Random, num_words: int) -> str:
    """Return words that no other sentence has in this order."""
    return " ".join(f"w{generator.randrange(5000)}" for _ in range(num_words))


@pytest.fixture(scope="module")
def rows() -> list[dict]:
    """Rows of a multiple-choice task."""
    generator = random.Random(1)
    rows = []
    for index in range(NUM_ITEMS):
        length = 2 if index == SHORT else 20
        choices = [sentence(generator, 3) for _ in range(4)]
        rows.append({"query": sentence(generator, length), "choices": choices, "gold": index % 4})
    return rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory, rows):
    """A folder with a task, and training data of many shards in which some of its items are planted."""
    folder = tmp_path_factory.mktemp("overlap")
    (folder / "task.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "task.yaml").write_text(
        f"label: planted\ndataset_uri: {folder}/task.jsonl\nicl_task_type: multiple_choice\nnum_fewshot: [0]\n"
    )

    generator = random.Random(2)
    documents = [sentence(generator, 200) for _ in range(120)]
    for index in PLANTED:
        row = rows[index]
        text = f"{row['query'].upper()}?\n- {row['choices'][row['gold']]}!"  # other capitals and punctuation
        documents[index] = f"{documents[index]} {text} {documents[index]}"
    documents[80] += " " + rows[PLANTED_QUESTION]["query"]
    documents[81] += " " + rows[SHORT]["query"]
    # The wrong answers of an item do not count.
    documents[82] += " " + " ".join(rows[50]["choices"][:2])
    write_jsonl(folder / "texts.jsonl", documents)
    wanted = request(folder / "texts.jsonl", "train:300", val_fraction=0.0, size_limit_bytes=8192)
    prepare(wanted, folder / "data", num_workers=1)
    assert len(list((folder / "data/train").glob("*.mds"))) > 20
    return folder


def found_in(folder) -> dict[int, tuple[int, bool]]:
    """Return the marked items: index -> number of n-grams found, and whether the answer is among them."""
    tasks = load_tasks([str(folder / "task.yaml")], "evals")
    [found] = find_overlap(tasks, folder / "data/train", load_tokenizer(folder / "data/tokenizer"))
    return {item.index: (len(item.found_at), item.has_answer(13)) for item in found.marked}


def test_planted_items_are_found_and_no_others(folder):
    whole_item = 20 + 3 - 13 + 1
    question_alone = 20 - 13 + 1
    expected = dict.fromkeys(PLANTED, (whole_item, True))
    assert found_in(folder) == expected | {PLANTED_QUESTION: (question_alone, False)}


def test_documents_of_padded_samples_are_read_without_padding(folder, tmp_path):
    texts = [f"w{number} w{number + 1}" for number in range(20)]
    source = write_jsonl(tmp_path / "texts.jsonl", texts)
    wanted = request(source, folder / "data/tokenizer", val_fraction=0.0, pack="best-fit")
    assert prepare(wanted, tmp_path / "data", num_workers=1).splits["train"].padding_fraction
    batches = read_documents(tmp_path / "data/train", load_tokenizer(folder / "data/tokenizer"))
    assert sorted(text for _, batch in batches for text in batch if text) == sorted(texts)


def test_an_n_gram_hash_depends_on_the_order_and_the_words_alone():
    hasher = WordHasher()
    hashes = hash_ngrams(hasher.hash_words(split_words("A b, c! D e f")), 3).tolist()
    assert hashes[1] == hash_ngrams(hasher.hash_words(["b", "c", "d"]), 3).item()
    assert hashes[1] != hash_ngrams(hasher.hash_words(["d", "c", "b"]), 3).item()
    assert len(set(hashes)) == len(hashes) == 4


def test_the_table_finds_all_of_its_hashes_and_nothing_else():
    generator = random.Random(3)
    inside = [generator.getrandbits(64) for _ in range(2000)]
    outside = [generator.getrandbits(64) for _ in range(2000)]
    same_filter_bits = [(one >> 24 << 24 ^ 1 << 40) | one & 0xFFFFFF for one in inside[:500]]
    looked_up = np.array([*outside, *inside, *same_filter_bits], np.uint64)
    assert NgramTable(inside).find(looked_up).tolist() == list(range(2000, 4000))
    assert NgramTable([]).find(looked_up).tolist() == []


def test_equal_hashes_of_other_words_are_no_match(folder, monkeypatch):
    monkeypatch.setattr(overlap, "MAX_SHARED_BY", 10**6)  # all n-grams have one hash here
    monkeypatch.setattr(overlap.WordHasher, "hash_words", lambda self, words: np.ones(len(words), np.uint64))
    found = found_in(folder)
    assert set(found) == {*PLANTED, PLANTED_QUESTION}


def test_the_command_writes_marks_by_which_results_are_divided(folder, tmp_path, capsys):
    out = tmp_path / "overlap"
    command = ["data", "overlap", str(folder / "data"), "--task", str(folder / "task.yaml"), "--out", str(out)]
    assert main.run(command) == 0
    assert "planted" in capsys.readouterr().out
    facts = json.loads((out / "overlap.json").read_text())["tasks"]["planted"]
    assert facts["marked"] == sorted([*PLANTED, PLANTED_QUESTION])
    assert (facts["num_with_answer"], facts["num_unchecked"]) == (3, 1)
    lines = [json.loads(line) for line in (out / "planted.jsonl").read_text().splitlines()]
    assert [line["index"] for line in lines] == [*sorted([*PLANTED, PLANTED_QUESTION]), SHORT]
    assert lines[-1]["reason"] == "has 5 words"

    answers = [int(index in PLANTED) for index in range(NUM_ITEMS)]
    task = choice(answers, data_fingerprint=facts["data_fingerprint"])
    paths = [write_result(tmp_path / name, name, {"planted/0-shot": task}) for name in ("a", "b")]
    parts = divide_results(load_results(paths), out)
    assert [len(results.items["planted/0-shot"]) for results in parts.clean] == [56, 56]
    assert [len(results.items["planted/0-shot"]) for results in parts.marked] == [4, 4]
    assert main.run(["compare", *map(str, paths), "--overlap", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "Items that are not in the training data" in printed
    assert "Items that are in the training data" in printed

    # The parts are compared by the metric that is asked for, as the whole is.
    command = ["compare", *map(str, paths), "--overlap", str(out), "--metric", "acc_norm"]
    assert main.run(command) == 0
    assert "acc_per_token" not in capsys.readouterr().out


def test_results_on_other_rows_are_refused(folder, tmp_path):
    out = tmp_path / "overlap"
    command = ["data", "overlap", str(folder / "data"), "--task", str(folder / "task.yaml"), "--out", str(out)]
    assert main.run(command) == 0
    path = write_result(tmp_path / "a", "a", {"planted/0-shot": choice([0, 1] * 10)})
    with pytest.raises(DataError, match="evaluated on other rows than those in"):
        divide_results(load_results([path]), out)


def test_a_schema_question_is_its_right_context():
    config = TaskConfig(label="w", icl_task_type="schema", dataset_uri="w.jsonl")
    row = {"context_options": ["The cup", "The box"], "continuation": "was too small", "gold": 1}
    assert question_and_answer(config, row) == ("The box", "was too small")


@pytest.mark.parametrize("content", ["{}", "[]", '{"tasks": {"a": {"marked": ["x"], "data_fingerprint": "y"}}}', "no"])
def test_a_stranger_s_summary_is_refused_in_one_line(tmp_path, content):
    (tmp_path / "overlap.json").write_text(content)
    with pytest.raises(DataError, match="is not a summary that `data overlap` has written"):
        divide_results([], tmp_path)


def test_an_instruction_that_all_items_share_marks_none(tmp_path, rows):
    instruction = " ".join(f"w{number}" for number in range(6000, 6020))
    shared = [{**row, "query": f"{instruction} {row['query']}"} for row in rows]
    (tmp_path / "task.jsonl").write_text("".join(json.dumps(row) + "\n" for row in shared))
    config = TaskConfig(label="t", icl_task_type="multiple_choice", dataset_uri=str(tmp_path / "task.jsonl"))
    task = read_task(config)
    search = Search([task], 13)
    search.mark_items_in(f"{instruction} and something else", 0)
    assert task.marked == []


def test_the_tokenizer_of_other_data_is_refused(folder, tmp_path, capsys):
    build_tokenizer(tmp_path / "other")
    command = ["data", "overlap", str(folder / "data"), "--task", str(folder / "task.yaml"), "--out", str(tmp_path)]
    assert main.run([*command, "--tokenizer", str(tmp_path / "other")]) == 2
    assert "was prepared with another tokenizer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("It's 9 o'clock.", ["it", "s", "9", "o", "clock"]),
        ("\u4f60\u597d World", ["\u4f60", "\u597d", "world"]),
        ("\u0939\u093f\u0928\u094d\u0926\u0940", ["\u0939\u093f\u0928\u094d\u0926\u0940"]),
    ],
)
def test_words_of_other_scripts(text, words):
    assert split_words(text) == words
