"""docs/alerts.md: its keys load, and its tables and its message have what the code has."""

import json
import re
from dataclasses import fields

import yaml

from llmfoundry_lite.config.callbacks_schema import EVENTS
from llmfoundry_lite.config.load_train import load_train_config
from llmfoundry_ops.alerts import Alert
from llmfoundry_ops.prometheus import LOGGED
from tests.helpers.launch import ROOT

PAGE = (ROOT / "docs/alerts.md").read_text()


def blocks(language):
    return re.findall(rf"^```{language}\n(.+?)^```", PAGE, re.MULTILINE | re.DOTALL)


def test_the_block_of_the_page_is_a_configuration(tmp_path, monkeypatch):
    monkeypatch.setenv("ALERT_URL", "https://example.org/hunter2")
    monkeypatch.setenv("SLACK", "slack://hunter2")
    path = tmp_path / "alerts.yaml"
    path.write_text(blocks("yaml")[0])
    config = load_train_config(["mpt-quickstart", str(path)], {}).config
    assert config.alerts is not None and config.alerts.webhook == "https://example.org/hunter2"
    assert config.alerts.apprise == ["slack://hunter2"] and "began" not in config.alerts.events


def test_the_trial_of_the_page_is_a_launch(monkeypatch):
    monkeypatch.setenv("ALERT_URL", "https://example.org/hunter2")
    (words,) = re.findall(r"^ALERT_URL=\S+ llmfoundry-lite train (.+)$", PAGE, re.MULTILINE)
    config = load_train_config([word.replace("'", "") for word in re.findall(r"(?:'[^']*'|\S)+", words)], {}).config
    assert config.alerts is not None and config.alerts.events == ["began", "failed", "ended"]


def test_the_page_lists_every_event_metric_and_field():
    alerts, _, metrics = PAGE.partition("## Console lines as JSON")
    names = re.findall(r"^\| `(\w+)` \|", alerts + metrics.partition("## Metrics")[2], re.MULTILINE)
    assert [name for name in names if not name.startswith("llmfoundry_")] == [*EVENTS]
    assert {*re.findall(r"llmfoundry_\w+", PAGE)} >= {name for name, metric in LOGGED.items() if not metric.is_counter}
    assert {*json.loads(blocks("json")[0])} == {field.name for field in fields(Alert)}
    assert yaml.safe_load(blocks("yaml")[1])["scrape_configs"]
