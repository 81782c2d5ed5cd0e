"""Prompts and tokens, written out by hand: `context|answer` for every option of an item."""

import json
import re
from dataclasses import replace
from typing import Any

import pytest
import tokenizers
import torch
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from llmfoundry_lite.config.eval_schema import TaskConfig
from llmfoundry_lite.config.load_eval import load_eval_config
from llmfoundry_lite.config.load_tasks import load_tasks
from llmfoundry_lite.data.tokenizer import load_tokenizer, train_tokenizer
from llmfoundry_lite.errors import ConfigError, DataError
from llmfoundry_lite.evaluation.documents import prepare_text
from llmfoundry_lite.evaluation.harness import Prompt, generate_answer
from llmfoundry_lite.evaluation.prompts import choose_examples, is_correct
from llmfoundry_lite.evaluation.task_files import read_rows
from llmfoundry_lite.evaluation.tasks import prepare_task
from tests.helpers.pieces import Pieces


class Characters(Pieces):
    """` a` is two tokens: no space is put before answers."""

    pattern = r"(?s)."


QUESTIONS = [
    {"query": "Is ice cold?", "choices": ["yes", "no way"], "gold": 0},
    {"query": "Is fire cold?", "choices": ["yes", "no way"], "gold": 1},
    {"query": "Who barks?", "choices": ["cats", "dogs", "some fish"], "gold": 1},
]
SCHEMAS = [
    {"context_options": ["Ann saw Bob, for Ann", "Ann saw Bob, for Bob"], "continuation": "hid.", "gold": 1},
    {"context_options": ["Ann fed Bob, for Ann", "Ann fed Bob, for Bob"], "continuation": "cooks.", "gold": 0},
    {"context_options": ["Ann hit Bob, so Ann", "Ann hit Bob, so Bob"], "continuation": "fell.", "gold": 1},
]
PASSAGES = [
    {"context": "One two", "continuation": "three"},
    {"context": "Red, amber,", "continuation": "green"},
    {"context": "Salt and", "continuation": "pepper mill"},
]
RIDDLES = [
    {"context": "2 + 2?", "answer": "4", "aliases": ["four"], "chain_of_thought": "Two twos."},
    {"context": "3 + 3?", "answer": "6", "aliases": [], "chain_of_thought": ""},
    {"context": "4 + 4?", "answer": "8"},
]
ROWS = {
    "multiple_choice": QUESTIONS,
    "schema": SCHEMAS,
    "language_modeling": PASSAGES,
    "generation_task_with_answers": RIDDLES,
}


def task(kind="multiple_choice", **changes):
    return TaskConfig(**{"label": "t", "icl_task_type": kind, "dataset_uri": "t.jsonl", **changes})


def ask(config, rows=None, shots=0, tokenizer: Any = None, max_seq_len=100, tokenization="separate", **changes):
    rows = ROWS[config.icl_task_type] if rows is None else rows
    tokenizer = tokenizer or Pieces()
    found = prepare_task(config, rows, shots, tokenizer, max_seq_len=max_seq_len, tokenization=tokenization, **changes)
    texts = [
        [f"{tokenizer.decode(r.context)}|{tokenizer.decode(r.continuation)}" for r in i.requests] for i in found.items
    ]
    return found, texts


def texts_of(config, **changes):
    return ask(config, **changes)[1]


# ------------------------------------------------------------------------------------------------------ zero-shot

ICE, ANN = "Is ice cold?", "Ann saw Bob, for "
FIRST = {
    # (type, delimiter) -> what LLM Foundry asks about the first row, and what lm-evaluation-harness asks
    ("multiple_choice", " "): ([f"{ICE}| yes", f"{ICE}| no way"],) * 2,
    ("multiple_choice", "\nAnswer: "): ([f"{ICE}\nAnswer:| yes", f"{ICE}\nAnswer:| no way"],) * 2,
    ("multiple_choice", "\n"): ([f"{ICE}| yes", f"{ICE}| no way"], [f"{ICE}|\nyes", f"{ICE}|\nno way"]),
    ("multiple_choice", ""): ([f"{ICE}| yes", f"{ICE}| no way"], [f"{ICE}|yes", f"{ICE}|no way"]),
    ("schema", " "): ([f"{ANN}Ann| hid.", f"{ANN}Bob| hid."],) * 2,
    ("schema", "\n"): ([f"{ANN}Ann| hid.", f"{ANN}Bob| hid."], [f"{ANN}Ann|\nhid.", f"{ANN}Bob|\nhid."]),
    # LLM Foundry puts the delimiter after examples alone.
    ("schema", "\nAnswer: "): ([f"{ANN}Ann| hid.", f"{ANN}Bob| hid."],) * 2,
    # What `Annhid` swallows of the context stays with it.
    ("schema", ""): ([f"{ANN}Ann| hid.", f"{ANN}Bob| hid."], [f"{ANN}Ann|.", f"{ANN}Bob|."]),
    ("language_modeling", "\n"): (["One two| three"], ["One two|\nthree"]),
    # Nothing of `One twothree` is beyond the context: skipped, and the second row is the first that is asked.
    ("language_modeling", ""): (["One two| three"], ["Red, amber,|green"]),
    ("generation_task_with_answers", ""): (["2 + 2?|"],) * 2,
    ("generation_task_with_answers", "\nAnswer: "): (["2 + 2?\nAnswer:|"],) * 2,
}


@pytest.mark.parametrize(("kind", "delimiter"), FIRST)
def test_a_question_alone(kind, delimiter):
    separate, joint = FIRST[kind, delimiter]
    config = task(kind, continuation_delimiter=delimiter)
    assert texts_of(config, tokenization="separate")[0] == separate
    assert texts_of(config, tokenization="joint")[0] == joint


def test_a_tasks_own_tokenization_wins():
    config = task(continuation_delimiter="", tokenization="joint")
    found, texts = ask(config, tokenization="separate")
    assert texts[0][0] == "Is ice cold?|yes"
    assert found.settings["tokenization"] == "joint"


def test_a_tokenizer_that_adds_the_space_itself_gets_none():
    assert texts_of(task(), tokenizer=Characters())[0] == ["Is ice cold?|yes", "Is ice cold?|no way"]


def test_without_strip_dataset_the_space_at_a_contexts_end_stays():
    assert texts_of(task(strip_dataset=False))[0][0] == "Is ice cold? | yes"


def test_the_first_token_of_a_text_is_predicted_from_an_end_of_text():
    """LLM Foundry reads the prediction of position -1, the last of the padding."""
    rows = [{"context": "", "continuation": "hello"}]
    for tokenization in ("separate", "joint"):
        (text,) = texts_of(task("language_modeling", continuation_delimiter=""), rows=rows, tokenization=tokenization)[
            0
        ]
        assert text.replace("| ", "|") == "<eos>|hello"


# ------------------------------------------------------------------------------------------------------- few-shot

FIXED = {"fewshot_fixed": True}
FULL = {
    **FIXED,
    "prompt_string": "Answer.",
    "prelimiter": "Q: ",
    "example_delimiter": "\n\n",
    "continuation_delimiter": "\nA: ",
}


@pytest.mark.parametrize("tokenization", ["separate", "joint"])
@pytest.mark.parametrize(
    ("kind", "plain", "full"),
    [
        (
            "multiple_choice",
            "Is ice cold? yes\nIs fire cold? no way\nWho barks?| dogs",
            "Answer.\n\nQ: Is ice cold?\nA: yes\n\nQ: Is fire cold?\nA: no way\n\nQ: Who barks?\nA:| dogs",
        ),
        (
            "schema",
            "Ann saw Bob, for Bob hid.\nAnn fed Bob, for Ann cooks.\nAnn hit Bob, so Bob| fell.",
            "Answer.\n\nQ: Ann saw Bob, for Bob\nA: hid.\n\nQ: Ann fed Bob, for Ann\nA: cooks."
            "\n\nQ: Ann hit Bob, so Bob\nA:| fell.",
        ),
        (
            "language_modeling",
            "One two three\nRed, amber, green\nSalt and| pepper mill",
            "Answer.\n\nQ: One two\nA: three\n\nQ: Red, amber,\nA: green\n\nQ: Salt and\nA:| pepper mill",
        ),
        (
            "generation_task_with_answers",
            "2 + 2? Two twos.4\n3 + 3? 6\n4 + 4?|",
            "Answer.\n\nQ: 2 + 2?\nA: Two twos.4\n\nQ: 3 + 3?\nA: 6\n\nQ: 4 + 4?\nA:|",
        ),
    ],
)
def test_two_examples_before_a_question(kind, plain, full, tokenization):
    for settings, expected in ((FIXED, plain), (FULL, full)):
        ((*_, last),) = texts_of(task(kind, **settings), shots=2, tokenization=tokenization)
        gold = last if kind != "multiple_choice" else texts_of(task(kind, **settings), shots=2)[0][1]
        assert gold == expected


@pytest.mark.parametrize(
    ("kind", "before", "apart", "jointly"),
    [
        ("multiple_choice", "\n", f"{ICE}\nyes\nIs fire cold?| yes", f"{ICE}\nyes\nIs fire cold?|\nyes"),
        ("schema", "", f"{ANN}Bobhid.\nAnn fed Bob, for Ann| cooks.", f"{ANN}Bobhid.\nAnn fed Bob, for Ann|."),
        ("language_modeling", "\n", "One two\nthree\nRed, amber,| green", "One two\nthree\nRed, amber,|\ngreen"),
        ("generation_task_with_answers", "", "2 + 2?Two twos.4\n3 + 3?|", "2 + 2?Two twos.4\n3 + 3?|"),
    ],
)
def test_a_question_after_an_example(kind, before, apart, jointly):
    config = task(kind, continuation_delimiter=before, **FIXED)
    assert texts_of(config, shots=1)[0][0] == apart
    assert texts_of(config, shots=1, tokenization="joint")[0][0] == jointly


def test_a_schema_question_after_a_prompt_has_the_delimiter_and_alone_has_none():
    config = task("schema", continuation_delimiter=" so:", strip_dataset=False)
    found, texts = ask(config)
    assert texts[0] == [f"{ANN}Ann| hid.", f"{ANN}Bob| hid."]
    assert found.settings["continuation_delimiter"] == "", "results with it are of another question"
    assert texts_of(replace(config, continuation_delimiter=" "))[0][0] == f"{ANN}Ann| hid."
    assert texts_of(replace(config, prompt_string="Who?"))[0][0] == f"Who?\n{ANN}Ann so:| hid."


def test_a_prompt_alone_is_followed_by_the_delimiter():
    config = task(prompt_string="Answer.", prelimiter="Q: ")
    assert texts_of(config)[0][0] == "Answer.\nQ: Is ice cold?| yes"


def test_reasoning_stands_before_the_answer_of_an_example():
    config = task("generation_task_with_answers", cot_delimiter=" So ", **FIXED)
    assert texts_of(config, shots=1)[0] == ["2 + 2? Two twos. So 4\n3 + 3?|"]


def test_the_delimiter_stands_before_the_answer_of_an_example_without_reasoning_too():
    """The model's own answer is read from there. A file without reasoning has no delimiter."""
    config = task("generation_task_with_answers", cot_delimiter=" So ", **FIXED)
    assert texts_of(config, rows=RIDDLES[1:], shots=1) == [["3 + 3?  So 6\n4 + 4?|"]]
    assert texts_of(config, rows=RIDDLES[2:] * 2, shots=1) == [["4 + 4? 8\n4 + 4?|"]]


def many(num):
    return [{"context": f"c{i}", "continuation": f"a{i}"} for i in range(num)]


def shown(text):
    return re.findall(r"c(\d+) a", text)


def test_an_item_is_never_among_its_own_examples():
    texts = texts_of(task("language_modeling"), rows=many(4), shots=3)
    for index, (text,) in enumerate(texts):
        assert sorted([*shown(text), str(index)]) == ["0", "1", "2", "3"]


def test_examples_depend_on_the_seed_and_the_item_alone():
    """LLM Foundry draws them one item after the other from one generator: what comes before decides."""
    config = task("language_modeling")
    texts = texts_of(config, rows=many(30), shots=4)
    assert texts_of(config, rows=many(30), shots=4, limit=7) == texts[:7]
    assert choose_examples(config, range(30), 20, 4) == [int(n) for n in shown(texts[20][0])]
    assert len({tuple(shown(text)) for (text,) in texts}) > 25
    assert texts_of(replace(config, fewshot_random_seed=1), rows=many(30), shots=4) != texts


def test_fixed_examples_are_the_first_rows_which_are_not_asked():
    found, texts = ask(task("language_modeling", **FIXED), rows=many(5), shots=2)
    assert [shown(text) for (text,) in texts] == [["0", "1"]] * 3
    assert [item.index for item in found.items] == [2, 3, 4]


def test_with_categories_examples_come_from_the_items_own():
    """LLM Foundry makes a data set of each; one too small shows what it has."""
    rows = [{**row, "category": "even" if i % 2 == 0 else "odd"} for i, row in enumerate(many(9))]
    rows += [{**row, "category": "alone"} for row in many(10)[9:]]
    config = task("language_modeling", has_categories=True)
    found, texts = ask(config, rows=rows, shots=3)
    for index, (text,) in enumerate(texts[:9]):
        assert len(set(shown(text)) - {str(index)}) == 3 and {int(i) % 2 for i in shown(text)} == {index % 2}
    assert shown(texts[9][0]) == [] and [item.num_missing_examples for item in found.items] == [0] * 9 + [3]
    fixed, texts = ask(replace(config, fewshot_fixed=True), rows=rows[:9], shots=1)
    assert [item.index for item in fixed.items] == [2, 3, 4, 5, 6, 7, 8]
    assert [shown(text) for (text,) in texts] == [["0"], ["1"]] * 3 + [["0"]]
    with pytest.raises(DataError, match="has 5 rows in its largest category, too few for 5 examples and a question"):
        ask(config, rows=rows, shots=5)


def test_what_decides_examples_or_errors_is_in_the_fingerprint():
    rows = [{**row, "category": "a", "passage": i // 2} for i, row in enumerate(many(6))]
    plain = task("language_modeling")
    found = [ask(config, rows=rows)[0] for config in (plain, replace(plain, has_categories=True))]
    found.append(ask(replace(plain, cluster="passage"), rows=rows)[0])
    assert len({prepared.fingerprint for prepared in found}) == 3
    assert len({prepared.data_fingerprint for prepared in found}) == 1
    assert [prepared.settings.get("has_categories") for prepared in found] == [None, True, None]
    assert [item.cluster for item in found[2].items] == ["0", "0", "1", "1", "2", "2"]
    spaced = [{**row, "context": f" {row['context']} "} for row in rows]
    assert ask(replace(plain, strip_dataset=False), rows=spaced)[0].data_fingerprint == found[0].data_fingerprint


# --------------------------------------------------------------------------------------------- a beginning of text


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """Llama's way: `<s>` before every text, `▁` for a space and before the first word, which makes " a" two tokens."""
    words = ["Is", "ice", "fire", "cold?", "yes", "no", "way", "Answer."]
    vocabulary = {word: i for i, word in enumerate(["<unk>", "<s>", "</s>", "▁", *(f"▁{word}" for word in words)])}
    backend = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    backend.decoder = decoders.Replace("▁", "_")
    backend.add_special_tokens(["<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    folder = tmp_path_factory.mktemp("llama")
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    return load_tokenizer(folder)


@pytest.mark.parametrize("tokenization", ["separate", "joint"])
def test_a_beginning_of_text_stands_once_and_never_in_an_answer(llama, tokenization):
    words = {"tokenizer": llama, "tokenization": tokenization, "max_seq_len": 20}
    (item, _) = ask(task(), rows=QUESTIONS[:2], **words)[0].items
    assert [list(request.context) for request in item.requests] == [[1, 4, 5, 7]] * 2  # <s> Is ice cold?
    assert [list(request.continuation) for request in item.requests] == [[8], [9, 10]]  # yes; no way

    config = task(prompt_string="Answer.", example_delimiter=" ", fewshot_fixed=True)
    (item,) = ask(config, rows=QUESTIONS[:2], shots=1, **words)[0].items
    # Apart, the context after the examples is a text of its own, with a ▁ before its first space.
    between = [3] if tokenization == "separate" else []
    assert list(item.requests[1].context) == [1, 11, 4, 5, 7, 8, *between, 4, 6, 7]
    assert list(item.requests[1].continuation) == [9, 10]

    rows = [{"context": "", "continuation": "yes"}]
    (item,) = ask(task("language_modeling", continuation_delimiter=""), rows=rows, **words)[0].items
    assert (item.requests[0].context, item.requests[0].continuation) == ((1,), (8,))


@pytest.mark.parametrize("file", ["tokenizer_config.json", "special_tokens_map.json"])
def test_without_a_beginning_an_empty_context_is_the_beginning_of_text_token_if_there_is_one(llama, tmp_path, file):
    """So does lm-evaluation-harness; a tokenizer may have one that no template puts before a text, such as BLOOM's."""
    stored = json.loads(llama.backend.to_str()) | {"post_processor": None}
    (tmp_path / "tokenizer.json").write_text(json.dumps(stored))
    for bos, token in (("<s>", 1), (None, 2)):
        contents = {"tokenizer_config.json": {"eos_token": "</s>"}, "special_tokens_map.json": {}}
        contents[file] |= {"bos_token": bos} if bos else {}
        for name, content in contents.items():
            (tmp_path / name).write_text(json.dumps(content))
        tokenizer = load_tokenizer(tmp_path)
        tokenizer.save(tmp_path / "saved")
        for each in (tokenizer, load_tokenizer(tmp_path / "saved")):
            rows = [{"context": "", "continuation": "yes"}]
            (item,) = ask(task("language_modeling", continuation_delimiter=""), rows=rows, tokenizer=each)[0].items
            (tmp_path / "t.txt").write_text("Is ice cold?")
            config = task("perplexity", dataset_uri=str(tmp_path / "t.txt"))
            (text,) = prepare_text(config, each, max_seq_len=9, limit=None).items
            assert item.requests[0].context == text.requests[0].context == (token,)


def test_a_beginning_of_text_is_trimmed_with_the_context_as_elsewhere(llama):
    (item,) = ask(task(), rows=QUESTIONS[:1], tokenizer=llama, max_seq_len=4)[0].items
    assert [request.context for request in item.requests] == [(4, 5, 7), (5, 7)]
    assert [request.num_trimmed for request in item.requests] == [1, 2]


def test_a_model_is_asked_to_write_after_the_beginning_of_text(llama):
    rows = [{"context": "Is ice cold?", "answer": "yes"}]
    for tokenization in ("separate", "joint"):
        (item,) = ask(task("generation_task_with_answers"), rows=rows, tokenizer=llama, tokenization=tokenization)[
            0
        ].items
        assert item.requests[0].context == (1, 4, 5, 7)


# --------------------------------------------------------------------------------------------------------- tokens


@pytest.fixture(scope="module")
def bpe():
    return train_tokenizer(["the cat sat on a mat. cats eat fish\n    return self.cats\n"] * 50, 300)


def test_where_separate_and_joint_tokens_differ_in_a_real_tokenizer(bpe):
    """`cats` is one token; apart, `cat` and `s` stay two."""
    rows = [{"context": "the cat", "continuation": "s eat"}]
    config = task("language_modeling", continuation_delimiter="")
    (item,) = ask(config, rows=rows, tokenizer=bpe, tokenization="joint")[0].items
    whole = bpe.encode("the cats eat")
    before = bpe.encode("the cat")
    assert whole[: len(before)] != before, "the case is chosen for this"
    # The context is what it is alone; the answer is what the whole has beyond that length.
    assert item.requests[0].context == tuple(before)
    assert item.requests[0].continuation == tuple(whole[len(before) :]) == tuple(bpe.encode(" eat"))

    (item,) = ask(config, rows=rows, tokenizer=bpe, tokenization="separate")[0].items
    assert item.requests[0].context == tuple(before)
    assert item.requests[0].continuation == tuple(bpe.encode(" s eat"))


def test_indentation_belongs_to_the_answer_when_tokenised_together(bpe):
    rows = [{"query": "the cat", "choices": ["    return self", "    eat"], "gold": 0}]
    config = task(continuation_delimiter="\n", tokenization="joint")
    (item,) = ask(config, rows=rows, tokenizer=bpe)[0].items
    whole = bpe.encode("the cat\n    return self")
    assert item.requests[0].context + item.requests[0].continuation == tuple(whole)
    assert bpe.decode(item.requests[0].continuation) == "\n    return self"
    assert [r.num_characters for r in item.requests] == [15, 7]


def test_a_long_context_loses_its_beginning_and_that_is_counted():
    rows = [{"context": "a b c d e f", "continuation": "g h"}, {"context": "a", "continuation": "b"}]
    config = task("language_modeling")
    found, texts = ask(config, rows=rows, max_seq_len=5)
    assert texts == [[" d e f| g h"], ["a| b"]]
    assert [item.requests[0].num_trimmed for item in found.items] == [3, 0]
    # The last token is never read, so that one more of the context fits, as lm-evaluation-harness has it.
    assert texts_of(config, rows=rows, max_seq_len=5, tokenization="joint")[0] == [" c d e f| g h"]


def test_an_answer_that_leaves_no_room_for_a_context_is_skipped_and_counted():
    """At exactly the model's length LLM Foundry keeps the whole context: context[-0:]."""
    rows = [{"context": "a b c", "continuation": "d e f g"}, {"context": "a", "continuation": "b"}]
    found, texts = ask(task("language_modeling"), rows=rows, max_seq_len=4)
    assert texts == [["a| b"]]
    assert found.skipped == {"an answer longer than the model, first in row 1": 1}
    # No item was trimmed, and still fewer were asked than of a longer model.
    assert found.fingerprint != ask(task("language_modeling"), rows=rows)[0].fingerprint
    assert texts_of(task("language_modeling"), rows=rows, max_seq_len=5)[0] == [" c| d e f g"]
    assert texts_of(task("language_modeling"), rows=rows, max_seq_len=4, tokenization="joint")[0] == [" c| d e f g"]


def test_an_answer_without_tokens_is_skipped_and_counted():
    rows = [*QUESTIONS, {"query": "Is it?", "choices": ["yes", ""], "gold": 0}]
    found, _ = ask(task(), rows=rows)
    assert found.skipped == {"an answer without tokens, first in row 4": 1}
    assert [item.index for item in found.items] == [0, 1, 2]


def test_an_answer_that_joins_its_context_in_one_token_is_skipped_and_says_why():
    """lm-evaluation-harness ends there. LLM Foundry tokenises apart."""
    config = task("language_modeling", continuation_delimiter="")
    found, _ = ask(config, tokenization="joint")
    reason = "an answer that shares its only token with the context (tokenization: separate keeps them apart)"
    reason += ", first in row 1"
    assert found.skipped == {reason: 1} and [item.index for item in found.items] == [1, 2]
    assert not ask(config)[0].skipped


def test_items_may_have_different_numbers_of_choices():
    """LLM Foundry takes the first row's number for all."""
    rows = [QUESTIONS[0], {"query": "Which?", "choices": list("abcde"), "gold": 4}, QUESTIONS[2]]
    assert [len(texts) for texts in texts_of(task(), rows=rows)] == [2, 5, 3]


def test_equal_choices_are_noticed():
    rows = [QUESTIONS[0], {"query": "Which?", "choices": ["a", "b", "a "], "gold": 0}]
    assert [item.has_duplicates for item in ask(task(), rows=rows)[0].items] == [False, True]


def test_a_metric_of_choices_is_refused_where_there_are_none():
    given = {"label": "t", "icl_task_type": "language_modeling", "dataset_uri": "t.jsonl", "metric": "acc_norm"}
    with pytest.raises(ConfigError, match="metric: acc_norm needs choices, and a language_modeling task has none"):
        load_tasks([given], "evals")


# ---------------------------------------------------------------------------------------------------- fingerprint


def test_results_can_be_compared_when_what_is_asked_is_the_same():
    def print_of(config=None, **changes):
        return ask(config or task(), **changes)[0].fingerprint

    same = print_of()
    assert print_of(task(label="other", dataset_uri="elsewhere.jsonl")) == same
    assert print_of(max_seq_len=50) == same
    others = [
        print_of(shots=1),
        print_of(tokenization="joint"),
        print_of(limit=2),
        print_of(rows=QUESTIONS[::-1]),
        print_of(task(prompt_string="!")),
        print_of(task(fewshot_random_seed=1)),
        print_of(max_seq_len=4),
        print_of(max_seq_len=5),
    ]
    assert len({same, *others}) == len(others) + 1


# ----------------------------------------------------------------------------------------------------- generation


class Scripted:
    """Writes given tokens, whatever it reads."""

    device = torch.device("cpu")
    max_seq_len = 6
    vocab_size = 1000
    shares_prefixes = False

    def __init__(self, tokenizer, text):
        self.tokens = [*tokenizer.encode(text), *[tokenizer.eos_token_id] * 9]

    def score(self, inputs, wanted):
        raise AssertionError("nothing to score here")

    def generate(self, context, num_tokens):
        return iter(self.tokens)


def written(text, num_tokens=20, stops=()):
    tokenizer: Any = Pieces()
    model: Any = Scripted(tokenizer, text)
    return generate_answer(model, tokenizer, Prompt(tokenizer.encode("a b c d"), num_tokens, stops))


def test_an_answer_ends_with_the_text_a_stop_or_its_length():
    assert written(" one two.") == " one two."
    assert written(" one two three", 2) == " one two"
    # A stop is a text: in LLM Foundry "." is a pattern that matches everything.
    assert written(" one two. three", stops=[".", "\n\n"]) == " one two"


def test_room_is_left_for_the_longest_answer_with_its_reasoning():
    config = task("generation_task_with_answers", cot_delimiter=" So ")
    rows = [{"context": "a b c d e f g h i j", "answer": "x"}, *RIDDLES]
    found, _ = ask(config, rows=rows, max_seq_len=20)
    # " Two twos. So 4" is 5 tokens, and the model may reason for ten more.
    assert found.config.max_new_tokens == 15
    assert found.items[0].requests[0].num_trimmed == 5
    assert ask(replace(config, max_new_tokens=12), rows=rows, max_seq_len=20)[0].items[0].requests[0].num_trimmed == 2
    assert ask(replace(config, cot_delimiter=""), rows=rows)[0].config.max_new_tokens == 4


def test_other_stop_tokens_than_the_end_of_text_make_another_generation_task(monkeypatch):
    config, plain, chat = task("generation_task_with_answers"), Pieces(), Pieces()
    stops = frozenset([chat.eos_token_id, *chat.encode("."), 1 << 40])  # the last is no token
    monkeypatch.setattr(Pieces, "stop_token_ids", property(lambda self: stops if self is chat else {self.eos_token_id}))
    first, other = (ask(config, tokenizer=each)[0] for each in (plain, chat))
    assert "stop_tokens" not in first.settings
    assert other.settings == first.settings | {"stop_tokens": ["."]}
    assert first.fingerprint != other.fingerprint
    assert ask(task(), tokenizer=chat)[0].fingerprint == ask(task(), tokenizer=plain)[0].fingerprint


def test_the_beginning_of_text_takes_one_of_the_tokens_for_an_answer_as_in_llm_foundry():
    config, rows = task("generation_task_with_answers"), [{"context": "a b c d e f g h", "answer": "x y"}]
    plain, begun = Pieces(), Pieces()
    begun.beginning = [7]
    room = [ask(config, rows=rows, max_seq_len=8, tokenizer=t)[0] for t in (plain, begun)]
    assert [found.config.max_new_tokens for found in room] == [2, 3]
    # LLM Foundry leaves the prompt what the longest answer leaves, and trims beginning and prompt as one.
    assert [len(found.items[0].requests[0].context) for found in room] == [6, 5]


def test_a_question_none_of_whose_answers_can_be_right_is_skipped_and_counted():
    config = task("generation_task_with_answers")
    rows = [{"context": "a", "answer": "The", "aliases": ["!", "an"]}, {"context": "b", "answer": "The Who"}]
    found, _ = ask(config, rows=rows)
    assert [item.index for item in found.items] == [1]
    assert found.skipped == {"answers with nothing but punctuation and articles, first in row 1": 1}


@pytest.mark.parametrize(
    ("text", "answers", "right"),
    [
        (" The Beatles, of course", ["Beatles"], True),
        ("beatles", ["The Beatles"], True),
        ("Rolling Stones", ["Beatles", "rolling stones"], True),
        ("the Who", ["Beatles"], False),
        ("anything", ["The"], False),  # nothing is left of it, and everything begins with nothing
    ],
)
def test_an_answer_counts_after_clean_up(text, answers, right):
    assert is_correct(task("generation_task_with_answers"), text, answers) == right


def test_without_clean_up_case_counts_and_reasoning_does_not():
    config = task("generation_task_with_answers", do_normalization=False, cot_delimiter="The answer is ")
    assert is_correct(config, " 1 + 1. The answer is 2", ["2"])
    assert not is_correct(config, " 2. The answer is 3", ["2"])
    assert not is_correct(config, "beatles", ["Beatles"])
    # A model that corrects itself is taken at its last word.
    assert is_correct(config, " The answer is 3. No. The answer is 2", ["2"])
    assert not is_correct(config, " The answer is 2. No. The answer is 3", ["2"])


# ----------------------------------------------------------------------------------------------------------- files


def rows_of(tmp_path, content, kind="multiple_choice", **changes):
    path = tmp_path / "t.jsonl"
    path.write_text(content, encoding="utf-8")
    return read_rows(task(kind, dataset_uri=str(path), **changes))


GOOD = json.dumps(QUESTIONS[0]) + "\n"
BY = "expected a text or a whole number, because"


@pytest.mark.parametrize(
    ("content", "kind", "message"),
    [
        ("\n\n", "multiple_choice", " has no rows"),
        (GOOD + '{"query": "", "choices": []}', "multiple_choice", ", line 2: no column 'gold'; a multiple_choice"),
        ('{"context": "q"}', "language_modeling", ", line 1: no column 'continuation'; a language_modeling task"),
        (GOOD.replace('"gold": 0', '"gold": 2'), "multiple_choice", ", line 1: gold is 2, expected 0 to 1"),
        (GOOD.replace('"gold": 0', '"gold": "1"'), "multiple_choice", ", line 1: gold is '1', expected 0 to 1"),
        (GOOD.replace(', "no way"', ""), "multiple_choice", ", line 1: ['yes'] given, expected two or more texts to"),
        ('{"context_options": null, "continuation": "", "gold": 0}', "schema", ", line 1: None given, expected two or"),
        (GOOD.replace('"Is ice cold?"', "3"), "multiple_choice", ", line 1: query is 3, expected a text"),
        ('{"context": "", "answer": "", "aliases": "b"}', "generation_task_with_answers", "aliases is 'b', expected t"),
        ("[1]", "multiple_choice", ", line 1 is not a JSON object"),
        (
            GOOD.replace("ice", "\\ud83d\\ude00 \\uD83D"),
            "multiple_choice",
            ", line 1 has half of a surrogate pair, such as",
        ),
        (GOOD + '{"query":' + "[" * 200_000, "multiple_choice", ", line 2 is not JSON: too deep"),
        (GOOD + "{", "multiple_choice", ", line 2 is not JSON: Expecting property name enclosed in double quotes: "),
    ],
)
def test_what_is_wrong_with_a_file_is_said_with_its_line(tmp_path, content, kind, message):
    with pytest.raises(DataError) as caught:
        rows_of(tmp_path, content, kind)
    assert str(caught.value).startswith(f"t: {tmp_path}/t.jsonl") and message in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "columns", "message"),
    [
        ({"has_categories": True}, {}, "no column 'category', which has_categories asks for"),
        ({"has_categories": True}, {"category": None}, f"category is None, {BY} has_categories asks for"),
        ({"has_categories": True}, {"category": ["ice"]}, BY),
        ({"has_categories": True}, {"category": 1.5}, BY),
        ({"cluster": "passage"}, {}, f"passage is None, {BY} cluster names"),
    ],
)
def test_columns_that_are_asked_for_must_be_there(tmp_path, changes, columns, message):
    with pytest.raises(DataError, match=f"line 1: .*{message}"):
        rows_of(tmp_path, json.dumps({**QUESTIONS[0], **columns}), **changes)


def test_the_same_questions_have_the_same_fingerprints_however_a_file_is_written(tmp_path):
    plain = "".join(json.dumps(row) + "\n" for row in QUESTIONS)
    turned = "".join(json.dumps(dict(reversed(row.items()))) + "\n" for row in QUESTIONS)
    escaped = plain.replace("e", "\\u0065").replace('"qu\\u0065ry"', '"query"').replace('"choic\\u0065s"', '"choices"')
    assert escaped != plain
    contents = (plain, plain.replace("\n", "\r\n"), "\ufeff" + plain, turned, escaped, plain.rstrip("\n"))
    prepared = [ask(task(), rows=rows_of(tmp_path, content))[0] for content in contents]
    assert len({(found.fingerprint, found.data_fingerprint) for found in prepared}) == 1


def test_items_that_ask_the_same_are_counted_and_are_a_cluster():
    rows = [{**row, "passage": f"p{i}"} for i, row in enumerate(QUESTIONS)]
    alone = ask(task(), rows=rows)[0]
    assert alone.num_repeated == 0 and {item.cluster for item in alone.items} == {None}
    twice = ask(task(), rows=[*rows, {**rows[0], "passage": "other"}, rows[1], rows[0]])[0]
    assert twice.num_repeated == 3
    assert [item.cluster for item in twice.items][-3:] == ["0", "1", "0"]
    assert len({item.cluster for item in twice.items}) == len(rows)


def test_clusters_that_ask_the_same_are_one():
    rows = [{**row, "passage": f"p{i // 2}"} for i, row in enumerate(QUESTIONS)]
    rows += [{**rows[0], "passage": "q"}, {**rows[0], "query": "Another?", "passage": "q"}]
    clusters = [item.cluster for item in ask(task(cluster="passage"), rows=rows)[0].items]
    assert (
        clusters[:2] == clusters[-2:] == ["p0", "p0"]
        and len(set(clusters)) == len({row["passage"] for row in rows}) - 1
    )


def test_a_line_ends_where_json_says_and_a_byte_order_mark_is_no_text(tmp_path):
    row = {"context": "one\u2028two\x85", "continuation": "three"}
    found = rows_of(tmp_path, "\ufeff" + json.dumps(row, ensure_ascii=False) + "\n", "language_modeling")
    assert found == [{"context": "one\u2028two", "continuation": "three"}]


def test_strip_dataset_takes_white_space_off_texts_and_not_off_choices(tmp_path):
    content = json.dumps({"query": " Is it?\n", "choices": [" yes", "no"], "gold": 0})
    assert rows_of(tmp_path, content) == [{"query": "Is it?", "choices": [" yes", "no"], "gold": 0}]
    assert rows_of(tmp_path, content, strip_dataset=False) == [json.loads(content)]


# ------------------------------------------------------------------------------------------------------ task lists

THEIR_LIST = """
icl_tasks:
-
  label: gsm8k
  dataset_uri: eval/local_data/gsm8k.jsonl
  num_fewshot: [0, 10]
  icl_task_type: generation_task_with_answers
  cot_delimiter: "The answer is "
  continuation_delimiter: "\\n\\nA:"
  question_prelimiter: "Q: "
  do_normalization: false
  metric_names:
  - InContextLearningGenerationExactMatchAccuracy
  early_stopping_criteria:
  - "\\n\\n"
  - "Question:"
-
  label: mmlu
  dataset_uri: hf://cais/mmlu
  num_fewshot: [5]
  batch_size: 4
  icl_task_type: multiple_choice
  has_categories: true
  prompt_string: "Questions:"
  example_delimiter: "\\n\\n"
  hf_loading_vars:
    split: test
    name: all
  hf_parsing_map:
    query: [question]
    choices: [choices]
-
  label: jeopardy
  dataset_uri: eval/local_data/jeopardy_all.jsonl
  num_fewshot: 3
  icl_task_type: language_modeling
"""


def test_llm_foundrys_task_lists_load_unchanged(tmp_path):
    path = tmp_path / "tasks.yaml"
    path.write_text(THEIR_LIST)
    gsm8k, mmlu, jeopardy = load_tasks([str(path)], "evals")
    notes: list[str] = []
    load_tasks([str(path)], "evals", notes=notes)
    assert notes == [], "an exact match is what a generation task has here"
    path.write_text(THEIR_LIST.replace("ExactMatchAccuracy", "CodeEvalAccuracy"))
    load_tasks([str(path)], "evals", notes=notes)
    assert notes == [
        "icl_tasks: metric_names: InContextLearningGenerationCodeEvalAccuracy is not computed (gsm8k); metric has "
        "acc_per_token, acc, acc_norm, acc_per_byte, bpb"
    ]
    assert (gsm8k.num_fewshot, mmlu.num_fewshot, jeopardy.num_fewshot) == ([0, 10], [5], [3])
    assert (gsm8k.prelimiter, gsm8k.cot_delimiter, gsm8k.continuation_delimiter) == ("Q: ", "The answer is ", "\n\nA:")
    assert (gsm8k.do_normalization, gsm8k.early_stopping_criteria) == (False, ["\n\n", "Question:"])
    assert (mmlu.has_categories, mmlu.prompt_string, mmlu.example_delimiter) == (True, "Questions:", "\n\n")
    assert mmlu.hf_loading_vars == {"split": "test", "name": "all"}
    assert mmlu.hf_parsing_map == {"query": ["question"], "choices": ["choices"]}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("continuation_delimeter: x", "did you mean icl_tasks[0].continuation_delimiter?"),
        ("icl_task_type: multi_choice", "icl_task_type: 'multi_choice' is not known; did you mean multiple_choice?"),
        ("num_fewshot: [-1]", "num_fewshot: [-1] given, expected one number or more, 0 or above"),
        (
            "metric: accuracy",
            "metric: 'accuracy' is not known; expected acc_per_token, acc, acc_norm, acc_per_byte, bpb or python:",
        ),
        ("tokenization: apart", "tokenization: 'apart' is not known; expected separate or joint"),
        ("icl_task_type: perplexity\n  cluster: x", "cluster: 'x' given, but documents are a text's clusters"),
        ("max_new_tokens: 0", "max_new_tokens: 0 given, expected a number above 0"),
        (
            "early_stopping_criteria: ['']",
            "early_stopping_criteria: [''] given, expected no empty text, at which every",
        ),
    ],
)
def test_a_wrong_key_or_value_of_a_task_is_one_line(tmp_path, line, message):
    key = line.split(":")[0]
    lines = ["label: t", "dataset_uri: t.jsonl", "icl_task_type: schema", "num_fewshot: [0]"]
    body = [kept for kept in lines if not kept.startswith(key)] + [line]
    path = tmp_path / "tasks.yaml"
    path.write_text("icl_tasks:\n- " + "\n  ".join(body) + "\n")
    with pytest.raises(ConfigError) as caught:
        load_tasks([str(path)], "evals")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_text_has_no_examples_to_show(tmp_path):
    with pytest.raises(ConfigError, match=r"t: num_fewshot: \[5\] given, and a text has no examples; remove it"):
        load_tasks([{"label": "t", "dataset_uri": "t", "icl_task_type": "perplexity", "num_fewshot": 5}], str(tmp_path))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("icl_subset_num_batches: 4", "LLM Foundry's option is left out here; use limit, which counts items"),
        ("eval_gauntlet: g.yaml", "eval_gauntlet: g.yaml does not exist; data_root=FOLDER says where its path begins"),
        ("limits: 4", "limits: unknown key; did you mean limit?"),
        (
            "models: [{model_name: a}]",
            "icl.yaml: models[0]: 'a' is not evaluated here; expected an MPT's load_path, or",
        ),
    ],
)
def test_a_key_of_an_evaluation_elsewhere_is_answered_with_ours(tmp_path, line, message):
    path = tmp_path / "icl.yaml"
    path.write_text("\n".join(["icl_tasks: [arc]", *(["models: {a: b}"] if "models" not in line else []), line]))
    with pytest.raises(ConfigError) as caught:
        load_eval_config([str(path)])
    assert message in str(caught.value)


def test_a_misspelt_block_is_named_though_no_yaml_file_is_given():
    with pytest.raises(ConfigError, match=r"command line: modles: unknown key; did you mean models\?"):
        load_eval_config(["modles.a=runs/a"])


def test_a_named_task_may_be_changed_in_place(tmp_path):
    (tmp_path / "arc.yaml").write_text(
        "label: arc\nicl_task_type: multiple_choice\ndataset_uri: arc.jsonl\nprelimiter: Q\nnum_fewshot: [0]\n"
    )
    plain, five = load_tasks(["arc", {"label": "arc", "num_fewshot": 5, "prelimiter": ""}], str(tmp_path))
    assert (plain.num_fewshot, plain.prelimiter) == ([0], "Q")
    assert (five.num_fewshot, five.prelimiter, five.dataset_uri) == ([5], "", "arc.jsonl")
    (mine,) = load_tasks([{"label": "arc", "dataset_uri": "mine.jsonl"}], str(tmp_path))
    assert (mine.icl_task_type, mine.prelimiter, mine.dataset_uri) == ("multiple_choice", "Q", "mine.jsonl")


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([{"label": "arcs", "num_fewshot": [5]}], "icl_tasks[0].label: {folder} has no task 'arcs'; did you mean arc?"),
        ([{"label": "arc", "num_shots": 5}], "icl_tasks[0].num_shots: unknown key; did you mean icl_tasks[0].num_few"),
        ([{"label": "arc", "num_fewshot": [5]}, "many"], "icl_tasks: arc/5-shot is listed twice; remove one, or"),
        ([{"label": "many", "num_fewshot": [5]}], "{folder}/many.yaml holds a list of tasks; icl_tasks[0]: change"),
        (["wrong"], "{folder}/wrong.yaml: icl_tasks: 'arc' given, expected a list of tasks"),
    ],
)
def test_a_change_that_cannot_be_is_one_line(tmp_path, entries, message):
    task_text = "label: arc\nicl_task_type: multiple_choice\ndataset_uri: arc.jsonl\n"
    (tmp_path / "arc.yaml").write_text(task_text)
    (tmp_path / "many.yaml").write_text("icl_tasks: [{label: arc, num_fewshot: [0, 5]}]")
    (tmp_path / "wrong.yaml").write_text("icl_tasks: arc")
    with pytest.raises(ConfigError) as caught:
        load_tasks(entries, str(tmp_path))
    assert message.format(folder=tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)
