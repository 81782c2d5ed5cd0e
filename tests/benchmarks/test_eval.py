"""the eval benchmark: our side of it on a tiny model, and what is made of two sides' answers."""

import json

import pytest

from benchmarks.__main__ import run_benchmark
from benchmarks.eval import eval as bench
from benchmarks.eval import parity

ROW = {"query": "the cat sat", "choices": ["on a mat", "over a hill"], "gold": 0}


def side(acc, sums, **changes):
    characters = [[10, 20]] * len(acc)
    return {"acc": acc, "acc_norm": acc, "log_probability": sums, "num_characters": characters, **changes}


@pytest.mark.slow
def test_our_side_is_measured_and_written_down(tmp_path, capsys):
    (tmp_path / "items.jsonl").write_text(f"{json.dumps(ROW)}\n" * 3)
    options = [
        "--data",
        str(tmp_path / "items.jsonl"),
        "--shape",
        "tiny",
        "--num-items",
        "3",
        "--out",
        str(tmp_path / "out"),
    ]
    assert run_benchmark(["eval", *options]) == 0
    assert "of the floor" in capsys.readouterr().out.replace("\n", " ")
    (found,) = json.loads((tmp_path / "out/eval.json").read_text())["suites"].values()
    assert found["items_per_second"] > 0
    assert 0 < found["of_the_floor"] < found["of_the_floor_with_logits"]
    assert "items.jsonl" in (tmp_path / "out/eval.md").read_text()


def test_items_are_rendered_with_their_examples_for_both_sides(tmp_path):
    suite = bench.Suite((3, 4), (1, 2), 4, 2, True, None)
    rows = bench.make_items(suite, 6)
    bench.write_rendered(rows, suite, 4, tmp_path / "t.jsonl")
    rendered = [json.loads(line) for line in (tmp_path / "t.jsonl").read_text().splitlines()]
    assert [row["choices"] for row in rendered] == [row["choices"] for row in rows[2:]]
    example = f"{rows[0]['query']}\nAnswer: {rows[0]['choices'][rows[0]['gold']]}\n{rows[1]['query']}\nAnswer: "
    assert all(row["query"].startswith(example) for row in rendered)
    assert rendered[0]["query"].endswith(f"{rows[2]['query']}\nAnswer:")


def test_speeds_are_ratios_within_rounds_and_decisions_are_counted():
    def timed(seconds, acc):
        return {**side(acc, [[-1.0, -2.0]] * 2), "n": 2, "seconds": seconds, "cpu_seconds": 2 * seconds}

    found = bench.compare([timed(seconds, [1, 0]) for seconds in (1.0, 2.0, 9.0)], [timed(8.0, [1, 1])] * 3)
    assert found["items_per_second"] == 1.0
    assert found["times"] == found["times_in_cpu_seconds"] == (8 / 9, 4.0, 8.0)
    assert (found["num_different"], found["largest_difference_nats"]) == ({"acc": 1, "acc_norm": 1}, 0.0)


def test_the_same_answers_are_the_same():
    found = parity.compare(
        side([1, 0], [[-1.0, -2.0], [-3.0, -2.0]]), side([1, 0], [[-1.0, -2.0], [-3.00005, -2.0]]), ""
    )
    assert found["largest_difference_nats"] == pytest.approx(5e-5)
    assert (found["acc"], found["acc_differ"], found["acc_norm_differ"]) == (0.5, 0, 0)
    assert parity.is_same(found)


def test_long_answers_may_differ_by_a_millionth():
    ours, close, far = ([[-2000.0, -2100.0]], [[-2000.001, -2100.0]], [[-2000.003, -2100.0]])
    assert parity.is_same(parity.compare(side([1], ours), side([1], close), "multiple_choice"))
    assert not parity.is_same(parity.compare(side([1], ours), side([1], far), "multiple_choice"))


@pytest.mark.parametrize(
    ("theirs", "differ", "rounding"),
    [
        (side([0], [[-1.0, -1.01]]), 1, 0),  # another answer from the same numbers
        (side([1], [[-1.0, -1.011]]), 0, 0),  # the same answer from other numbers
    ],
)
def test_other_answers_or_numbers_are_not_the_same(theirs, differ, rounding):
    found = parity.compare(side([1], [[-1.0, -1.01]]), theirs, "multiple_choice")
    assert (found["acc_differ"], found["acc_differ_by_rounding"]) == (differ, rounding)
    assert not parity.is_same(found)


def test_options_that_are_closer_than_the_sides_are_left_to_rounding():
    ours = side([1], [[-1.0, -1.00001]], num_characters=[[10, 10]])
    theirs = side([0], [[-1.00002, -1.0]], num_characters=[[10, 10]])
    found = parity.compare(ours, theirs, "multiple_choice")
    assert (found["acc_differ"], found["acc_differ_by_rounding"]) == (1, 1)
    assert parity.is_same(found)


def test_another_perplexity_is_not_the_same():
    ours, theirs = (side([1], [[-1.0]], perplexity=value) for value in (7.0, 7.01))
    for one in (ours, theirs):
        del one["acc_norm"]
    assert not parity.is_same(parity.compare(ours, theirs, "language_modeling"))
    assert not parity.is_same(parity.compare(ours, theirs, "perplexity"))
    assert parity.is_same(parity.compare(ours, {**theirs, "perplexity": 7.0}, "language_modeling"))


def test_forty_rows_are_a_document_of_held_out_text():
    rows = [{"context": f"a{i}", "continuation": "b"} for i in range(81)]
    texts = [row["text"] for row in parity.documents_of(rows)]
    assert [text.count("\n") for text in texts] == [39, 39, 0] and texts[2] == "a80 b"


def test_parity_wants_a_model_and_a_peer(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        run_benchmark(["eval-parity", "--data", str(tmp_path)])
    assert "required: --peer-python, --model" in capsys.readouterr().err
