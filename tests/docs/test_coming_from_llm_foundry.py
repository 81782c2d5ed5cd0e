"""The page for those who come from LLM Foundry names the keys that the code has in its tables, and no others."""

import re

import pytest

from llmfoundry_lite.companions import import_address
from llmfoundry_lite.config.fields import schema_keys, settings_along
from llmfoundry_lite.config.foundry import EVAL_LEFT_OUT, HARMLESS, LEFT_OUT, WITHOUT_EFFECT
from llmfoundry_lite.config.load_tasks import TASK_WITHOUT_EFFECT, THEIR_METRICS
from llmfoundry_lite.config.scalars import TASK_SYNONYMS
from llmfoundry_lite.config.schema import TrainConfig
from llmfoundry_lite.config.task_types import TASK_TYPES
from llmfoundry_lite.training.mirrors import FOUNDRY_NAMES
from scripts.defaults_llm_foundry import INTENDED
from tests.helpers.launch import ROOT
from tests.helpers.markdown import section
from tests.helpers.present import needs

OF_OTHER_KINDS = [
    key for key in schema_keys(TrainConfig) if settings_along(TrainConfig, key)[-1].instead and "*" not in key
]
PAGE = (ROOT / "docs/coming-from-llm-foundry.md").read_text()


def rows(heading: str) -> list[list[str]]:
    lines = [line for line in section(PAGE, heading).splitlines() if line.startswith("|")]
    return [line.strip().strip("|").split(" | ") for line in lines[2:]]


def quoted(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def keys(heading: str) -> list[str]:
    return [key for row in rows(heading) for key in quoted(row[0])]


@pytest.mark.parametrize(
    ("heading", "table"),
    [
        ("Accepted without effect", WITHOUT_EFFECT),
        ("Left out", LEFT_OUT),
        ("Values that are left out", OF_OTHER_KINDS),
        ("Other defaults", INTENDED),
        ("Evaluation", EVAL_LEFT_OUT),
    ],
)
def test_a_table_has_every_key_of_the_code_once(heading, table):
    assert sorted(keys(heading)) == sorted(table)


def test_keys_with_harmless_values_are_marked():
    marked = {key for row in rows("Left out") if quoted(row[2]) for key in quoted(row[0])}
    assert marked == {*HARMLESS}


def test_keys_of_tasks_without_effect_are_named():
    listed = section(PAGE, "Evaluation").rsplit("Nor do a task's", 1)[1]
    assert quoted(listed)[: len(TASK_WITHOUT_EFFECT)] == list(TASK_WITHOUT_EFFECT)
    assert quoted(listed)[len(TASK_WITHOUT_EFFECT) :] == [*TASK_SYNONYMS, *TASK_SYNONYMS.values()]


def test_keys_that_load_unchanged_are_keys_of_ours():
    ours = {part for key in schema_keys(TrainConfig) for part in key.split(".")}
    assert not {key for row in rows("Loads unchanged") for key in quoted(row[1])} - ours


def test_metrics_have_the_names_of_the_code():
    theirs, ours = ([name for row in rows("Metric names") for name in quoted(row[i])] for i in (0, 1))
    theirs.remove("LanguagePerplexity")
    renamed = {key: name.format(optimizer="DecoupledAdamW") for key, (name, _) in FOUNDRY_NAMES.items()}
    named = dict(zip(ours, theirs, strict=True))
    of_tasks = {key: named.pop(key) for key in ours if key.startswith("eval/icl/")}
    assert named == renamed
    assert {name.rpartition("/")[2] for name in of_tasks.values()} == THEIR_METRICS
    kinds = ("multiple_choice", "language_modeling", "generation_task_with_answers")
    for kind, (key, name) in zip(kinds, of_tasks.items(), strict=True):
        task_type = TASK_TYPES[kind]
        assert (key.rpartition("/")[2], name.rpartition("/")[2]) == (task_type.metrics[0], task_type.foundry_metric)
        assert key.split("/")[2:-1] == name.split("/")[1:-1] and name.startswith("metrics/")


@needs("llmfoundry_ops")
def test_registries_are_those_of_the_table():
    table = import_address("llmfoundry_ops.registries:REGISTRIES")
    shown = [[cell.strip() for cell in row] for row in rows("Registries")]
    assert shown == [[f"`llmfoundry.{row.name}`", row.here, row.call] for row in table]


def test_the_absence_of_fine_tuning_is_said():
    assert "**Fine-tuning is absent.**" in PAGE
