"""Items asked until a difference is decided: boundaries beside published ones, the order, and what is said."""

import json
import math

import numpy as np
import pytest

from benchmarks import sequential
from benchmarks.__main__ import run_benchmark
from llmfoundry_lite.cli import main
from llmfoundry_lite.errors import DataError
from llmfoundry_lite.evaluation.compare import compare, is_within
from llmfoundry_lite.evaluation.results import load_results
from llmfoundry_lite.evaluation.sequential import (
    LOOKS,
    OBRIEN_FLEMING,
    POCOCK,
    SPENDING,
    TEXT_CAUTION,
    Rule,
    adjusted_p,
    boundaries,
    in_order,
    nominal_level,
    plan_task,
)
from llmfoundry_lite.evaluation.significance import MIN_DOCUMENTS
from tests.helpers.results import choice, text, write_result


@pytest.mark.parametrize(
    ("spending", "published"),
    [(OBRIEN_FLEMING, (4.877, 3.357, 2.680, 2.290, 2.031)), (POCOCK, (2.438, 2.427, 2.410, 2.397, 2.386))],
)
def test_boundaries_are_those_published(spending, published):
    """Reboussin, DeMets, Kim and Lan, Computations for group sequential boundaries using the Lan-DeMets spending
    function method, Controlled Clinical Trials 21, 2000; R's ldbounds prints the same."""
    assert boundaries(tuple(k / 5 for k in range(1, 6)), 0.05, spending) == pytest.approx(published, abs=5e-4)


def test_documents_are_looked_at_with_caution_but_not_at_the_end():
    """The first look is at the fewest documents of which anything can be told."""
    plan = plan_task("t", "document", [f"item {i}" for i in range(10 * MIN_DOCUMENTS)], Rule())
    assert plan.looks == tuple(range(MIN_DOCUMENTS, 10 * MIN_DOCUMENTS + 1, MIN_DOCUMENTS))
    plain = [nominal_level(plan.shares(look), 0.05, plan.spending) for look in (9, 10)]
    assert [plan.nominal(look, 0.05) for look in (9, 10)] == pytest.approx([plain[0] / TEXT_CAUTION, plain[1]])


@pytest.mark.parametrize("spending", SPENDING)
def test_a_single_look_is_a_single_test(spending):
    assert boundaries((1.0,), 0.05, spending) == pytest.approx((1.959964,), abs=1e-6)
    assert adjusted_p(0.013, (1.0,), spending) == pytest.approx(0.013)


@pytest.mark.parametrize("spending", SPENDING)
def test_the_error_is_what_was_to_be_spent(spending):
    """Sums of normal numbers, at looks that are not equally far apart."""
    shares, level, draws = (0.15, 0.3, 0.7, 1.0), 0.2, 200_000
    steps = np.diff([0.0, *shares])
    sums = np.cumsum(np.random.default_rng(0).normal(0, np.sqrt(steps), (draws, 4)), axis=1)
    is_beyond = np.abs(sums) > np.array(boundaries(shares, level, spending)) * np.sqrt(shares)
    spent = [SPENDING[spending](share, level) for share in shares]
    assert [is_beyond[:, : k + 1].any(axis=1).mean() for k in range(4)] == pytest.approx(spent, abs=4e-3)
    assert spent[-1] == pytest.approx(level)


@pytest.mark.parametrize("spending", SPENDING)
def test_a_p_is_adjusted_to_the_level_that_it_just_reaches(spending):
    shares = LOOKS[:4]
    levels = (0.2, 0.6, 0.95, 0.998)  # up to the end of the bracket in which a level is sought
    for p in (1e-9, 1e-4, 0.003, 0.02, *(nominal_level(shares, level, spending) for level in levels)):
        level = adjusted_p(p, shares, spending)
        assert p < level < 1 and nominal_level(shares, level, spending) == pytest.approx(p, rel=1e-6)
    assert adjusted_p(1.0, shares, spending) == 1 and adjusted_p(0.0, shares, spending) == 0
    assert adjusted_p(0.9, shares) == 1.0  # no level that an interval has


def test_the_order_is_a_function_of_the_item():
    units = [f"item {i}" for i in range(1000)]
    order = in_order(units)
    assert order == in_order(units[::-1] * 2) and sorted(order) == sorted(units) and order != units
    assert [unit for unit in order if unit in set(units[:50])] == in_order(units[:50])
    assert order[:3] == ["item 680", "item 148", "item 798"]  # of every release: stored results were asked in it


def answers(n, seed, *, won=0.0, lost=0.0):
    """Two models' answers; which of them alone is right by chance."""
    drawn = np.random.default_rng(seed).random(n)
    return (drawn < 0.3 + lost).astype(int), ((drawn < 0.3) | (drawn > 1 - won)).astype(int)


def pair_of(folder, first, other, *, rule=Rule(), **options):  # noqa: B008
    paths = [write_result(folder, name, tasks) for name, tasks in (("base", first), ("ours", other))]
    (pair,) = compare(load_results(paths), sequential=rule, **options)
    return pair


def test_a_large_difference_is_decided_by_few_items_and_none_takes_all(tmp_path):
    base, ours = answers(1000, 0, won=0.3)
    same = answers(1000, 1, won=0.1, lost=0.1)
    pair = pair_of(tmp_path, {"big/0-shot": base, "no/0-shot": same[0]}, {"big/0-shot": ours, "no/0-shot": same[1]})
    big, none = pair.tasks
    assert (big.stage.num_asked, big.n, big.stage.look) == (200, 200, 2) and big.verdict.startswith("better by 0.")
    assert (none.n, none.stage.look, none.verdict) == (1000, 10, "no detectable difference")
    assert big.stage.plan.level == 0.025  # of two tests
    assert pair.mean is None and pair.sentence == ""
    assert "big/0-shot: 200 of 1,000 items asked, look 2 of 10 (obrien fleming, level 0.025)" in pair.notes


def test_interval_and_p_are_of_the_look_and_agree(tmp_path):
    base, ours = answers(1000, 0, won=0.08, lost=0.03)
    (task,) = pair_of(tmp_path, {"t/0-shot": base}, {"t/0-shot": ours}).tasks
    stage = task.stage
    assert 2 <= stage.look < 10 and task.is_detected and task.low > 0
    assert task.verdict == f"better by {task.difference:.3f} ({task.low:.3f} to {task.high:.3f})"
    whole = compare(load_results([tmp_path / "base.json", tmp_path / "ours.json"]))[0].tasks[0]
    assert whole.n == 1000 and whole.stage is None
    single = math.erfc((abs(task.wins - task.losses) - 0.5) / math.sqrt(2 * (task.wins + task.losses)))
    assert task.p == pytest.approx(adjusted_p(single, stage.plan.shares(stage.look))) and single < task.p < 0.05
    for level in (task.p * 0.999, task.p * 1.001):
        low, high = task.interval(level)
        assert (low > 0) == (level > task.p) and low < task.difference < high


def test_earlier_looks_decide_nothing(tmp_path):
    """Each look before the last one, by hand: its test does not reach its boundary."""
    base, ours = answers(1000, 0, won=0.08, lost=0.03)
    (task,) = pair_of(tmp_path, {"t/0-shot": base}, {"t/0-shot": ours}).tasks
    order = [int(unit.split()[1]) for unit in in_order([f"item {i}" for i in range(1000)])]
    limits = boundaries(LOOKS, 0.05)
    for look in range(1, task.stage.look + 1):
        asked = order[: 100 * look]
        change = ours[asked] - base[asked]
        distance = (abs(change.sum()) - 0.5) / math.sqrt(np.abs(change).sum())
        assert (distance > limits[look - 1]) == (look == task.stage.look)


def test_clusters_are_asked_whole(tmp_path):
    base, ours = answers(100, 4, won=0.5)

    def five_times(values):
        record, items = choice(np.repeat(values, 5))
        return record, [{**item, "cluster": str(item["index"] // 5)} for item in items]

    (task,) = pair_of(tmp_path, {"t/0-shot": five_times(base)}, {"t/0-shot": five_times(ours)}).tasks
    assert task.stage.plan.looks == tuple(range(10, 101, 10)) and task.stage.plan.num_items == 500
    assert task.n == 5 * task.stage.plan.looks[task.stage.look - 1] < 500


def test_documents_are_asked_whole(tmp_path):
    rng = np.random.default_rng(3)
    sizes = rng.integers(50, 500, 200).tolist()
    nats = [[(0.7 * size, size), (0.6 * size, size)] for size in sizes]
    less = [[(a * 0.97 + rng.normal(0, 0.5), size) for a, size in windows] for windows in nats]
    (task,) = pair_of(tmp_path, {"x/0-shot": text(nats)}, {"x/0-shot": text(less)}).tasks
    assert task.is_detected and task.n < 200 and task.stage.num_asked == 2 * task.n
    assert task.high < 0
    plan, look = task.stage.plan, task.stage.look
    assert plan.nominal(look, 0.05) == pytest.approx(nominal_level(plan.shares(look), 0.05) / 3)
    assert plan.nominal(10, 0.05) == nominal_level(LOOKS, 0.05)
    assert plan.adjusted(plan.nominal(look, 0.03), look) == pytest.approx(0.03)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        *((-0.01, 0.01, True), (-0.019, 0.019, True), (0.005, 0.01, True), (-0.01, -0.005, True)),
        *((-0.03, 0.01, False), (-0.01, 0.03, False), (-0.02, 0.01, False), (-0.01, 0.02, False)),
        *((0.05, 0.06, False), (-0.06, -0.05, False), (None, None, False)),
    ],
)
def test_an_interval_is_within_a_margin_with_both_of_its_ends(low, high, expected):
    assert is_within(0.02, low, high) == expected
    assert not is_within(None, low, high)


def test_within_a_margin_asking_stops_as_well(tmp_path):
    base, ours = answers(4000, 5, won=0.02, lost=0.02)
    (task,) = pair_of(tmp_path, {"t/0-shot": base}, {"t/0-shot": ours}, rule=Rule(margin=0.03)).tasks
    assert task.verdict == "no difference larger than 0.03" and task.stage.look < 10
    assert -0.03 < task.low < 0 < task.high < 0.03


def test_categories_are_all_asked_before_anything_is_decided(tmp_path):
    base, ours = answers(400, 6, won=0.5)
    rare = int(in_order([f"item {i}" for i in range(400)])[250].split()[1])

    def asked(values):
        record, items = choice(values, settings={"icl_task_type": "multiple_choice", "has_categories": True})
        items = [{**item, "category": "rare" if item["index"] == rare else "usual"} for item in items]
        usual = np.delete(np.asarray(values), rare).mean()
        return {**record, "acc_per_token": (usual + values[rare]) / 2}, items

    (task,) = pair_of(tmp_path, {"t/0-shot": asked(base)}, {"t/0-shot": asked(ours)}).tasks
    assert task.n > 250


def test_on_the_command_line(tmp_path, capsys):
    base, ours = answers(1000, 0, won=0.3)
    paths = [str(write_result(tmp_path, name, {"t/0-shot": a})) for name, a in (("base", base), ("ours", ours))]
    out = tmp_path / "out"
    assert main.run(["compare", "--sequential", *paths, "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "200" in printed and "1,000" in printed and "repeated confidence" in printed
    assert "| 200 of 1,000 |" in (out / "compare.md").read_text()
    (pair,) = json.loads((out / "compare.json").read_text())["comparisons"]
    assert pair["tasks"][0]["stage"]["plan"]["looks"][0] == 100 and pair["mean"] is None
    assert main.run(["compare", "--sequential", "--spending", "pocock", *paths]) == 0
    assert "100" in capsys.readouterr().out


HALF = [0, 1] * 30
LATER = [{**item, "index": item["index"] + 60} for item in choice(HALF)[1]]


@pytest.mark.parametrize(
    ("flags", "tasks", "message"),
    [
        ("--sequential", {"t/0-shot": choice(HALF, data_fingerprint="d")}, "not asked the same: the data (60 items ag"),
        ("--sequential", {"u/0-shot": HALF}, "base and ours have no task in common: t/0-shot against u/0-shot"),
        ("--sequential", {"t/0-shot": (choice(HALF)[0], LATER)}, "t/0-shot: 0 items, too few to be asked until a diff"),
        ("--sequential --all-metrics", {"t/0-shot": HALF}, "--all-metrics: a --sequential comparison stops"),
        ("--margin 0.02", {"t/0-shot": HALF}, "--margin: it is for a comparison that is --sequential"),
    ],
)
def test_what_cannot_be_compared_is_refused_in_a_line(tmp_path, capsys, flags, tasks, message):
    paths = [str(write_result(tmp_path, n, t)) for n, t in (("base", {"t/0-shot": HALF}), ("ours", tasks))]
    assert main.run(["compare", *flags.split(), *paths]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_too_few_items_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"t/0-shot: 5 items, too few to be asked until a difference is decided, which"):
        pair_of(tmp_path, {"t/0-shot": [0] * 5}, {"t/0-shot": [1] * 5})
    with pytest.raises(DataError, match=r"x/0-shot: 1 document, too few .* takes 20; leave the task out"):
        pair_of(tmp_path, {"x/0-shot": text([[(8.0, 10)] * 30])}, {"x/0-shot": text([[(7.0, 10)] * 30])})


def test_a_simulated_task_keeps_its_error_and_asks_less_when_much_differs():
    generator = np.random.default_rng(0)
    none = sequential.drawn("", OBRIEN_FLEMING, 500, 0.1, 0.1, 4000, generator)
    large = sequential.drawn("", OBRIEN_FLEMING, 500, 0.25, 0.05, 4000, generator)
    deviation = math.sqrt(0.05 * 0.95 / 4000)
    assert none.better + none.worse < 0.05 + 3 * deviation and none.covered > 0.95 - 3 * deviation
    assert none.asked > 0.98 and large.size == pytest.approx(8.16, abs=0.01)
    assert large.better > 0.999 and large.same > 0.999 and large.asked < 0.35 and large.covered > 0.95


@pytest.mark.slow
def test_the_bench_writes_what_it_finds(tmp_path):
    base, ours = answers(400, 0, won=0.3)
    paths = [str(write_result(tmp_path, name, {"t/0-shot": a})) for name, a in (("base", base), ("ours", ours))]
    assert run_benchmark(["sequential", *paths, "--num-draws", "200", "--out", str(tmp_path)]) == 0
    written = (tmp_path / "sequential.md").read_text()
    assert "Real pairs: 1 of 1 are decided, 1 of them as by all items" in written
    assert "| ours against base | t/0-shot | 400 |" in written and "exchanged at random: 1 pair" in written
    (pair,) = json.loads((tmp_path / "sequential.json").read_text())["pairs"]
    assert (pair["by_all"], pair["sequential"]) == ("better", "better") and pair["asked"] < 0.5
