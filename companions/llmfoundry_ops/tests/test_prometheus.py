"""The metrics of a run: names by Prometheus' rules, numbers of the run, and a dashboard that asks for no others."""

import json
import re
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from llmfoundry_ops.prometheus import LOGGED, STATES, Numbers, RunCollector
from llmfoundry_ops.rank_times import RankTime
from tests.helpers.launch import ROOT

DASHBOARD = ROOT / "docs/grafana-dashboard.json"
LINE = {metric.key: 1.5 for metric in LOGGED.values()}


@pytest.fixture
def numbers():
    numbers = Numbers(run_name='a"b', run_folder="runs/a", host="gpu003", state="running", launch=2, batch=40)
    numbers.saved_at = 1.0
    numbers.logged = dict(LINE)
    numbers.validation = {"": 2.5, "books": 3.5}
    slow = RankTime(rank=5, host="gpu007", stage=0, own_seconds=0.4, median_seconds=0.2, waiting_seconds=0.0, ratio=2.0)
    even = replace(slow, rank=6, stage=1, own_seconds=0.2, median_seconds=0.1, waiting_seconds=0.2)
    numbers.rank_times = [slow, even]
    numbers.num_slow_ranks = 1
    return numbers


def samples_of(numbers):
    registry = CollectorRegistry()
    registry.register(RunCollector(lambda: numbers))
    text = generate_latest(registry).decode()
    families = text_string_to_metric_families(text)
    return [sample for family in families for sample in family.samples]


def test_numbers_of_the_run_are_metrics_with_its_name(numbers):
    samples = samples_of(numbers)
    values = {sample.name: sample.value for sample in samples if not {"set", "rank"} & sample.labels.keys()}
    assert values["llmfoundry_batch"] == 40 and values["llmfoundry_launch"] == 2
    assert values["llmfoundry_tokens_total"] == values["llmfoundry_loss"] == 1.5
    assert values["llmfoundry_save_age_seconds"] > 1e9
    assert {sample.labels["run"] for sample in samples} == {'a"b'}
    losses = {s.labels["set"]: s.value for s in samples if s.name == "llmfoundry_validation_loss"}
    assert losses == {"": 2.5, "books": 3.5}
    assert values["llmfoundry_slow_ranks"] == 1
    medians = {s.labels["stage"]: s.value for s in samples if s.name == "llmfoundry_rank_own_median_seconds"}
    assert medians == {"0": 0.2, "1": 0.1}
    waiting = {s.labels["rank"]: s.value for s in samples if s.name == "llmfoundry_rank_waiting_seconds"}
    own = {s.labels["rank"]: s.value for s in samples if s.name == "llmfoundry_rank_own_seconds"}
    assert (own, waiting) == ({"5": 0.4, "6": 0.2}, {"5": 0.0, "6": 0.2})
    assert {s.labels["host"] for s in samples if "rank" in s.labels} == {"gpu007"}


def test_exactly_one_state_is_1(numbers):
    states = {s.labels["state"]: s.value for s in samples_of(numbers) if s.name == "llmfoundry_state"}
    assert states == {state: float(state == "running") for state in STATES}


def test_what_is_not_known_is_left_out():
    names = {sample.name for sample in samples_of(Numbers(run_name="a", run_folder="runs/a", host="gpu003"))}
    assert names == {
        *("llmfoundry_run_info", "llmfoundry_state", "llmfoundry_batch", "llmfoundry_idle_seconds"),
        *("llmfoundry_failed_saves", "llmfoundry_save_in_fallback"),
    }


def test_the_dashboard_asks_only_for_metrics_that_exist(numbers):
    known = {sample.name for sample in samples_of(numbers)}
    dashboard = json.loads(DASHBOARD.read_text())
    asked = {*re.findall(r"llmfoundry_(?!lite)\w+", json.dumps(dashboard))}
    assert all(target["expr"] for panel in dashboard["panels"] for target in panel["targets"])
    assert asked <= known
    assert {"llmfoundry_loss", "llmfoundry_state", "llmfoundry_save_age_seconds"} <= asked
