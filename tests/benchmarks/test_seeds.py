"""The simulation of recipes with several runs."""

import json

import numpy as np
import pytest

from benchmarks.__main__ import run_benchmark
from tests.helpers.present import needs

pytestmark = [needs("llmfoundry_machines"), needs("llmfoundry_studies")]


def test_the_page_says_how_many_runs_are_enough(tmp_path):
    assert run_benchmark(["seeds", "--num-draws", "3", "--out", str(tmp_path)]) == 0
    page = (tmp_path / "seeds.md").read_text()
    assert "With three runs a side, only a difference of 3.0 times the sd of runs" in page
    assert "| 5 | 2.0 |" in page
    record = json.loads((tmp_path / "seeds.json").read_text())
    assert len(record["cases"]) == 64
    assert {level["num_draws"] for level in record["levels"]} == {30}


def test_seeds_scatter_as_much_as_a_case_says():
    from benchmarks.seeds import draw_answers, probit_constants

    # So many items that the noise of single answers hardly counts.
    num_items, ratio = 20_000, 4.0
    item_variance, _ = probit_constants()
    draw = draw_answers(np.random.default_rng(0), num_items, (300, 2), ratio, 0.0)
    run_variance = draw.first_ru.sum(axis=1).var(ddof=1)
    noise_of_answers = 0.1 / num_items  # at most p (1 - p), less what the items' difficulty explains
    assert run_variance == pytest.approx(ratio * item_variance / num_items + noise_of_answers, rel=0.3)


def test_a_true_difference_is_drawn_as_asked():
    from benchmarks.seeds import draw_answers, draw_documents

    generator = np.random.default_rng(1)
    for draw_scores, difference in ((draw_answers, 0.1), (draw_documents, 0.05)):
        gains = []
        for _ in range(40):
            draw = draw_scores(generator, 2000, (2, 2), 0.25, difference)
            gains.append(draw.other_ru.sum(axis=1).mean() - draw.first_ru.sum(axis=1).mean())
        assert np.mean(gains) == pytest.approx(difference, abs=0.005)
