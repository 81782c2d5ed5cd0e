"""Texts that a model was asked: questions and options in the items' records, and prompts token by token."""

import json
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers

from llmfoundry_lite.config.eval_schema import TaskConfig
from llmfoundry_lite.data.tokenizer import build_tokenizer, load_tokenizer
from llmfoundry_lite.errors import DataError
from llmfoundry_lite.evaluation.compare import compare
from llmfoundry_lite.evaluation.harness import DataRank, TaskRunner, run_task
from llmfoundry_lite.evaluation.results import load_results
from llmfoundry_lite.evaluation.scoring import Score
from llmfoundry_lite.evaluation.summaries import scored_item
from llmfoundry_lite.evaluation.tasks import prepare_task
from llmfoundry_lite.evaluation.token_texts import TokenTexts, prompt_tokens
from tests.helpers.pieces import Pieces
from tests.helpers.results import choice, write_result

ROWS = {
    "multiple_choice": {"query": "Is ice cold? ", "choices": ["yes", "no way"], "gold": 1},
    "schema": {"context_options": ["Ann saw Bob, for Ann", "Ann saw Bob, for Bob"], "continuation": "hid.", "gold": 1},
    "language_modeling": {"context": "One two", "continuation": "three"},
    "generation_task_with_answers": {"context": "2 + 2?", "answer": "4", "aliases": ["four"]},
}
QUESTIONS = {
    "multiple_choice": ("Is ice cold?", ["yes", "no way"]),
    "schema": ("hid.", ["Ann saw Bob, for Ann", "Ann saw Bob, for Bob"]),
    "language_modeling": ("One two", ["three"]),
    "generation_task_with_answers": ("2 + 2?", None),
}


def prepare(kind, tokenizer: Any = None, shots=0, max_seq_len=100, rows=None, **changes):
    config = TaskConfig(label="t", icl_task_type=kind, dataset_uri="t.jsonl", **changes)
    rows = rows or [{key: value.strip() if isinstance(value, str) else value for key, value in ROWS[kind].items()}] * 3
    if tokenizer is None:
        tokenizer = Pieces()
    return prepare_task(config, rows, shots, tokenizer, max_seq_len=max_seq_len, tokenization="separate", limit=1)


def records_of(task, monkeypatch, *, keep_prompts, tokenizer):
    """The records that a run of the task has, with scores made up."""
    from llmfoundry_lite.evaluation import harness

    monkeypatch.setattr(
        harness, "score_all", lambda model, name, groups, *rest: [Score(-1.0, True) for group in groups for _ in group]
    )
    monkeypatch.setattr(
        harness, "generate_answers", lambda model, tokenizer, name, prompts, *rest: ["4"] * len(prompts)
    )
    no_model: Any = None
    runner = TaskRunner(no_model, tokenizer, 100, DataRank(0, 1), lambda *_: None, keep_prompts)
    return run_task(runner, task)


@pytest.mark.parametrize("kind", ROWS)
def test_an_item_keeps_its_question_and_options_without_examples(kind, monkeypatch):
    tokenizer = Pieces()
    task = prepare(kind, tokenizer, shots=2, prelimiter="Q: ", prompt_string="Answer. ")
    _, (item,) = records_of(task, monkeypatch, keep_prompts=False, tokenizer=tokenizer)
    question, choices = QUESTIONS[kind]
    assert item["question"] == question and item.get("choices") == choices
    assert "prompt_tokens" not in item
    assert set(task.items[0].examples) == {1, 2}
    if kind == "schema":
        assert item["gold"] == 1 and len(item["log_probability"]) == 2


def test_a_prompt_that_is_kept_has_the_tokens_of_each_option(monkeypatch):
    tokenizer = Pieces()
    task = prepare("multiple_choice", tokenizer, shots=1)
    record, (item,) = records_of(task, monkeypatch, keep_prompts=True, tokenizer=tokenizer)
    assert item["prompt_tokens"] == {
        "shared": ["Is", " ice", " cold", "?", " no", " way", "\n", "Is", " ice", " cold", "?"],
        "contexts": [[], []],
        "answers": [[" yes"], [" no", " way"]],
    }
    without, (plain,) = records_of(task, monkeypatch, keep_prompts=False, tokenizer=tokenizer)
    assert {key: item[key] for key in plain} == plain
    changed = ("items_hash", "seconds")
    assert {key: value for key, value in record.items() if key not in changed} == {
        key: value for key, value in without.items() if key not in changed
    }


def test_the_contexts_of_a_schema_differ_after_a_shared_beginning():
    tokenizer: Any = Pieces()
    (item,) = prepare("schema", tokenizer).items
    assert prompt_tokens(item, TokenTexts(tokenizer)) == {
        "shared": ["Ann", " saw", " Bob", ",", " for"],
        "contexts": [[" Ann"], [" Bob"]],
        "answers": [[" hid", "."], [" hid", "."]],
    }


def test_texts_of_tokens_join_to_the_text_whatever_bytes_they_cut(tokenizer_folder):
    tokenizer = load_tokenizer(tokenizer_folder)
    token_texts = TokenTexts(tokenizer)
    ids = tokenizer.encode(" the cat é 中\n")
    texts = token_texts.of(ids)
    assert "".join(texts) == " the cat é 中\n" and len(texts) == len(ids)
    assert "the" in texts and texts[texts.index("é") - 1] == ""
    assert token_texts.of([*tokenizer.encode("a"), tokenizer.eos_token_id]) == ["a", tokenizer.eos_token]
    cut = tokenizer.encode("中")[:2]
    assert token_texts.of(cut) == ["", "\ufffd"]
    # Bytes that begin no character are shown after four of them, however many follow.
    [wrong] = tokenizer.encode("é")[-1:]
    assert token_texts.of([wrong] * 6) == ["", "", "", "\ufffd" * 4, "", "\ufffd" * 2]


def test_tokens_of_sentencepiece_keep_the_space_before_them():
    """Its decoder leaves out the first space of a text, and spells unknown characters byte by byte."""
    vocabulary = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "t", "▁a"]
    ids = {token: number for number, token in enumerate(vocabulary)}
    backend = tokenizers.Tokenizer(models.BPE(ids, [("▁", "a")], unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    pieces = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(pieces)
    backend.add_special_tokens(["</s>"])
    tokenizer = build_tokenizer("llama-like", backend, {"eos_token": "</s>"})
    assert TokenTexts(tokenizer).of([1, *tokenizer.encode("a é\nat")]) == ["</s>", " a", " ", "", "é", "\n", "a", "t"]


# ------------------------------------------------------------------------------------------------------ comparisons


def asked(texts, **changes):
    """A task of ten items, of which the first have these questions; without texts as older releases wrote it."""
    record, items = choice([1] * 10, **changes)
    for item, text in zip(items, texts, strict=False):
        item |= {"question": text, "choices": ["a", "b"], "gold": 0, "num_characters": [1, 1]}
    return record, items


def refusal(folder, first, other):
    paths = [write_result(folder, name, {"t/0-shot": task}) for name, task in (("base", first), ("ours", other))]
    with pytest.raises(DataError) as error:
        compare(load_results(paths))
    return str(error.value)


def test_questions_of_equal_length_are_told_apart_by_their_texts(tmp_path):
    changes = {"data_fingerprint": "sha256:e", "fingerprint": "b"}
    said = refusal(tmp_path, asked(["x", "y", "z"]), asked(["x", "w", "z"], **changes))
    assert "row 2 is the first with another question" in said
    # One of them has no texts: the lengths are what is left.
    old = asked([], **changes)
    for item in old[1]:
        item |= {"gold": 0, "num_characters": [1, 1]}
    old[1][2]["num_characters"] = [1, 2]
    assert "row 3 is the first with another question" in refusal(tmp_path, asked(["x", "y", "z"]), old)


@pytest.mark.parametrize(
    "change",
    [
        {"question": 3},
        {"choices": "ab"},
        {"choices": ["a", None]},
        {"choices": ["a", "b", "c"]},
        {"gold": 2},
        {"gold": True},
        {"answers": [1]},
        {"text": None},
        {"num_tokens": ["1"]},
        {"num_tokens": [float("nan")]},
        {"prompt_tokens": ["a"]},
        {"prompt_tokens": {"shared": ["a"], "contexts": [[]], "answers": [["b"], ["c"]]}},
        {"prompt_tokens": {"shared": ["a"], "contexts": [[]], "answers": [[3]]}},
    ],
)
def test_an_item_whose_texts_no_evaluation_writes_is_refused(tmp_path, change):
    record, items = asked(["x"])
    items[0] |= change
    path = write_result(tmp_path, "base", {"t/0-shot": (record, items)})
    good = write_result(tmp_path, "ours", {"t/0-shot": asked(["x"])})
    with pytest.raises(DataError, match="are not those that the result was made from"):
        load_results([path, good])


def test_items_without_texts_are_read_and_compared_as_before(tmp_path):
    paths = [write_result(tmp_path, name, {"t/0-shot": asked([])}) for name in ("base", "ours")]
    (pair,) = compare(load_results(paths))
    assert pair.tasks[0].verdict == "the same on every item"


def test_a_question_is_written_as_one_line_of_json(tmp_path):
    task = prepare("language_modeling", rows=[{"context": "a\u2028\n b", "continuation": "c"}] * 2)
    (item,) = task.items
    line = json.dumps(scored_item(task, item, [Score(-1.0, True)]))
    assert len(line.splitlines()) == 1 and json.loads(line)["question"] == "a\u2028\n b"


def test_a_question_asked_by_letters_keeps_the_texts_of_its_choices():
    tokenizer: Any = Pieces()
    (item,) = prepare("multiple_choice", tokenizer, form="letters").items
    assert item.choices == ("yes", "no way") and item.question == "Is ice cold?"
    assert prompt_tokens(item, TokenTexts(tokenizer))["answers"] == [[" A"], [" B"]]
