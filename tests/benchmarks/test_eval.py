"""The eval benchmark: our side of it on a tiny model, and what is made of two sides' answers."""

import json
import sys

import pytest

from benchmarks.__main__ import run_benchmark
from benchmarks.eval import eval as bench
from benchmarks.eval import parity, prompts
from llmfoundry_lite.errors import DataError

# ---------------------------------------------------------------------------------------------------- our side


@pytest.mark.slow
def test_our_side_is_measured_and_written_down(tmp_path, capsys):
    item = {"query": "the cat sat", "choices": ["on a mat", "over a hill"], "gold": 0}
    items = tmp_path / "items.jsonl"
    items.write_text(f"{json.dumps(item)}\n" * 3)
    out = tmp_path / "out"
    options = ["--data", str(items), "--shape", "tiny", "--num-items", "3", "--out", str(out)]
    assert run_benchmark(["eval", *options]) == 0

    assert "of the floor" in capsys.readouterr().out.replace("\n", " ")
    assert "items.jsonl" in (out / "eval.md").read_text()
    (figures,) = json.loads((out / "eval.json").read_text())["suites"].values()
    assert figures["items_per_second"] > 0
    assert 0 < figures["of_the_floor"] < figures["of_the_floor_with_logits"]


# -------------------------------------------------------------------------------------------------------- items

TWO_FIXED_EXAMPLES = bench.Suite(
    words=(3, 4),
    choice_words=(1, 2),
    num_choices=4,
    num_fewshot=2,
    is_fixed=True,
    wanted=None,
)


@pytest.fixture
def rows():
    """Two examples, and the four items that follow them."""
    return bench.make_items(TWO_FIXED_EXAMPLES, 6)


@pytest.fixture
def rendered(rows, tmp_path):
    """The four items as both sides read them."""
    path = tmp_path / "rendered.jsonl"
    bench.write_rendered(rows, TWO_FIXED_EXAMPLES, 4, path)
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_rendered_items_have_the_choices_of_the_rows_after_the_examples(rows, rendered):
    assert [item["choices"] for item in rendered] == [row["choices"] for row in rows[2:]]


def test_rendered_items_begin_with_the_examples_and_end_with_their_query(rows, rendered):
    """The first example has its right choice, the second one begins with its query."""
    first, second = rows[:2]
    right_choice = first["choices"][first["gold"]]
    examples = f"{first['query']}\nAnswer: {right_choice}\n{second['query']}\nAnswer: "
    for row, item in zip(rows[2:], rendered, strict=True):
        assert item["query"].startswith(examples)
        assert item["query"].endswith(f"\n{row['query']}\nAnswer:")


def test_forty_rows_are_a_document_of_held_out_text():
    """So 81 rows are three documents, with a row in each line."""
    rows = [{"context": f"a{i}", "continuation": "b"} for i in range(81)]
    texts = [document["text"] for document in parity.documents_of(rows)]
    assert [text.count("\n") + 1 for text in texts] == [40, 40, 1]
    assert texts[2] == "a80 b"


# ------------------------------------------------------------------------------------------------- speeds


def answers(right, log_probabilities, num_characters=(10, 20)):
    """A side's answers to some items.

    right: for each item, 1 if the side chose the right option, by sums and per character alike, and else 0.
    log_probabilities: for each item, those of its options.
    num_characters: the lengths of an item's options.
    """
    return {
        "acc": right,
        "acc_norm": right,
        "log_probability": log_probabilities,
        "num_characters": [list(num_characters)] * len(right),
    }


def round_of(seconds, right):
    """A round in which a side has answered two items in this time, with twice as many seconds on its processors."""
    times = {"n": 2, "seconds": seconds, "cpu_seconds": 2 * seconds}
    return answers(right, [[-1.0, -2.0], [-1.0, -2.0]]) | times


@pytest.fixture
def comparison_of_rounds():
    """Three rounds. Ours takes 1, 2 and 9 seconds, the peer always 8, and the sides differ in the second item."""
    ours = [round_of(seconds, right=[1, 0]) for seconds in (1.0, 2.0, 9.0)]
    theirs = [round_of(8.0, right=[1, 1])] * 3
    return bench.compare(ours, theirs)


def test_our_speed_is_that_of_the_median_round(comparison_of_rounds):
    assert comparison_of_rounds["items_per_second"] == 1.0


def test_speeds_are_compared_within_rounds(comparison_of_rounds):
    lowest_median_and_highest = (8 / 9, 4.0, 8.0)
    assert comparison_of_rounds["times"] == lowest_median_and_highest
    assert comparison_of_rounds["times_in_cpu_seconds"] == lowest_median_and_highest


def test_different_decisions_are_counted(comparison_of_rounds):
    assert comparison_of_rounds["num_different"] == {"acc": 1, "acc_norm": 1}
    assert comparison_of_rounds["largest_difference_nats"] == 0.0


# ------------------------------------------------------------------------------------------------- parity


def test_the_same_answers_are_the_same():
    """A log-probability may differ by less than 1e-4 nats."""
    ours = answers([1, 0], [[-1.0, -2.0], [-3.0, -2.0]])
    theirs = answers([1, 0], [[-1.0, -2.0], [-3.00005, -2.0]])
    comparison = parity.compare(ours, theirs, "multiple_choice")
    assert comparison["largest_difference_nats"] == pytest.approx(5e-5)
    assert comparison["acc"] == 0.5
    assert comparison["acc_differ"] == 0
    assert comparison["acc_norm_differ"] == 0
    assert parity.is_same(comparison)


@pytest.mark.parametrize(("log_probability", "is_same"), [(-2000.001, True), (-2000.003, False)])
def test_long_answers_may_differ_by_a_millionth(log_probability, is_same):
    ours = answers([1], [[-2000.0, -2100.0]])
    theirs = answers([1], [[log_probability, -2100.0]])
    assert parity.is_same(parity.compare(ours, theirs, "multiple_choice")) == is_same


def test_another_answer_from_the_same_numbers_is_not_the_same():
    ours = answers([1], [[-1.0, -1.01]])
    theirs = answers([0], [[-1.0, -1.01]])
    comparison = parity.compare(ours, theirs, "multiple_choice")
    assert comparison["acc_differ"] == 1
    assert comparison["acc_differ_by_rounding"] == 0
    assert not parity.is_same(comparison)


def test_the_same_answer_from_other_numbers_is_not_the_same():
    ours = answers([1], [[-1.0, -1.01]])
    theirs = answers([1], [[-1.0, -1.011]])
    comparison = parity.compare(ours, theirs, "multiple_choice")
    assert comparison["acc_differ"] == 0
    assert comparison["acc_differ_by_rounding"] == 0
    assert not parity.is_same(comparison)


def test_options_that_are_closer_than_the_sides_are_left_to_rounding():
    """The sides are 2e-5 nats from each other, and our options 1e-5."""
    ours = answers([1], [[-1.0, -1.00001]], num_characters=(10, 10))
    theirs = answers([0], [[-1.00002, -1.0]], num_characters=(10, 10))
    comparison = parity.compare(ours, theirs, "multiple_choice")
    assert comparison["acc_differ"] == 1
    assert comparison["acc_differ_by_rounding"] == 1
    assert parity.is_same(comparison)


def text_with_perplexity(perplexity):
    """A side's answers to a task of text, whose items have a single option and no accuracy per character."""
    return {"acc": [1], "log_probability": [[-1.0]], "num_characters": [[10, 20]], "perplexity": perplexity}


@pytest.mark.parametrize("kind", ["language_modeling", "perplexity"])
def test_another_perplexity_is_not_the_same(kind):
    comparison = parity.compare(text_with_perplexity(7.0), text_with_perplexity(7.01), kind)
    assert not parity.is_same(comparison)


def test_an_equal_perplexity_is_the_same():
    comparison = parity.compare(text_with_perplexity(7.0), text_with_perplexity(7.0), "language_modeling")
    assert parity.is_same(comparison)


@pytest.mark.parametrize(("their_bits", "is_same"), [(0.500001, True), (0.5001, False)])
def test_bits_per_byte_are_compared_by_item(their_bits, is_same):
    """The mean of both sides is the same."""
    ours = {**answers([1, 0], [[-1.0, -2.0]] * 2), "bpb": [0.5, 1.5]}
    theirs = {**answers([1, 0], [[-1.0, -2.0]] * 2), "bpb": [their_bits, 2 - their_bits]}
    comparison = parity.compare(ours, theirs, "letters")
    assert comparison["bpb"] == comparison["peer_bpb"] == 1.0
    assert comparison["largest_difference_bpb"] == pytest.approx(their_bits - 0.5)
    assert parity.is_same(comparison) == is_same


def test_parity_wants_a_model_and_a_peer(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        run_benchmark(["eval-parity", "--data", str(tmp_path)])
    assert "required: --peer-python, --model" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------------- prompts

# The three templates of nanochat, in a few lines. White space of a question stays, as in nanochat.
TEMPLATES = """
def render(contexts, answers, delimiter, examples):
    shown = "".join(f"{context}{delimiter}{answer}\\n\\n" for context, answer in examples)
    return [f"{shown}{context}{delimiter}{answer}" for context, answer in zip(contexts, answers)]

def render_prompts_mc(row, delimiter, examples):
    shown = [(example["query"], example["choices"][example["gold"]]) for example in examples]
    return render([row["query"]] * len(row["choices"]), row["choices"], delimiter, shown)

def render_prompts_schema(row, delimiter, examples):
    return render(row["context_options"], [row["continuation"]] * 2, delimiter, [])

def render_prompts_lm(row, delimiter, examples):
    shown = [(example["context"].strip(), example["continuation"]) for example in examples]
    return render([row["context"].strip()], [row["continuation"]], delimiter, shown)
"""


def test_prompts_are_compared_with_a_program_that_separates_examples_by_a_blank_line(tmp_path, capsys):
    (tmp_path / "nanochat").mkdir()
    (tmp_path / "nanochat/core_eval.py").write_text(TEMPLATES)
    assert run_benchmark(["eval-prompts", "--nanochat", str(tmp_path), "--out", str(tmp_path / "out")]) == 0
    tasks = json.loads((tmp_path / "out/eval-prompts.json").read_text())["tasks"]
    verdicts = {task["name"]: task.get("nanochat") for task in tasks}
    assert verdicts["hellaswag/0-shot"] == "same"
    assert verdicts["hellaswag/10-shot"] == "same, with a blank line between examples"
    assert verdicts["piqa/10-shot"] == '"Answer: With " | "\\nAnswer: With"'
    assert verdicts["mmlu/5-shot"] is None
    assert len(verdicts) == 23


def test_a_difference_of_prompts_is_shown_from_its_first_character_on():
    ours = ["Q: who? A: I", "Q: who? A: you"]
    theirs = ["Q: who? A: I", "Q: who?\nA: you"]
    assert prompts.describe_difference(ours, ours) == "same"
    assert prompts.describe_difference(ours, theirs) == '" A: you" | "\\nA: you"'
    assert prompts.describe_difference(ours, theirs[:1]) == "2 options | 1 options"


def test_a_program_that_ends_on_a_task_is_named():
    with (
        prompts._start("nanochat", [sys.executable, "nanochat", "/nowhere"]) as program,
        pytest.raises(DataError, match="nanochat has failed on a task; its error is above"),
    ):
        program.render(kind="schema")
