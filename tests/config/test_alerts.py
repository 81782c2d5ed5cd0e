"""The block `alerts`: its addresses are secrets, and one receiver is needed."""

import pytest

from llmfoundry_lite import launch_train
from llmfoundry_lite.config import layers
from llmfoundry_lite.config.auto_hardware import Choice
from llmfoundry_lite.config.load_train import find_observed, load_train_config, read_unchecked
from llmfoundry_lite.config.schema import as_dict
from llmfoundry_lite.errors import ConfigError
from tests.helpers.present import needs

SECRET = "https://hooks.example.org/services/hunter2"
FROM_ENV = "alerts.webhook=${oc.env:HOOK}"


@pytest.fixture(autouse=True)
def hook(monkeypatch):
    monkeypatch.setenv("HOOK", SECRET)


def load(*arguments):
    return load_train_config(["mpt-quickstart", *arguments], {}).config


def test_an_address_is_used_in_full_and_recorded_as_it_was_written():
    config = load(FROM_ENV, "alerts.apprise=['${oc.env:HOOK}/b']")
    assert config.alerts is not None and config.alerts.webhook == SECRET
    recorded = as_dict(config)["alerts"]
    assert recorded["webhook"] == "${oc.env:HOOK}" and recorded["apprise"] == ["${oc.env:HOOK}/b"]
    assert "began" not in recorded["events"]


@pytest.mark.parametrize("setting", [f"alerts.webhook={SECRET}", f"alerts.apprise=['{SECRET}']"])
def test_an_address_that_is_written_out_is_refused_and_not_quoted(setting):
    with pytest.raises(
        ConfigError, match=r"expected \$\{oc.env:NAME\}, because the text of a YAML is recorded"
    ) as caught:
        load(setting)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (["alerts.events=[failed]"], "alerts.webhook: missing, as are command and apprise; expected one of them"),
        (["alerts.command=[]"], "alerts.command: [] given, expected a list: a program and its arguments"),
        (["alerts.command=true"], "alerts.command: "),
        ([FROM_ENV, "alerts.events=[fail]"], "alerts.events: ['fail'] given, expected some of began, restarted"),
        ([FROM_ENV, "alerts.no_progress_minutes=0"], "alerts.no_progress_minutes: 0"),
        (["metrics_port=0"], "metrics_port: 0 given, expected a port, 1 to 65535"),
    ],
)
def test_what_does_not_work_is_refused(settings, expected):
    with pytest.raises(ConfigError) as caught:
        load(*settings)
    assert expected in str(caught.value)


def test_a_variable_that_is_no_url_is_refused_by_its_name(monkeypatch):
    monkeypatch.setenv("HOOK", "hunter2.example.org")
    with pytest.raises(ConfigError, match=r"alerts.webhook: '\$\{oc.env:HOOK\}' given, expected a variable with a URL"):
        load(FROM_ENV)


def observed_by(*arguments):
    values = read_unchecked(arguments, {})
    assert values is not None
    return find_observed(values)


def test_alerts_are_found_also_where_another_key_is_refused():
    found = observed_by("mpt-quickstart", FROM_ENV, "no_such_key=1", "metrics_port=9400")
    assert found is not None and found.alerts is not None and found.alerts.webhook == SECRET
    assert (found.run_name, found.metrics_port, found.metrics_host) == ("mpt-quickstart", 9400, "127.0.0.1")
    assert observed_by("mpt-quickstart") is None
    assert observed_by("mpt-quickstart", f"alerts.webhook={SECRET}") is None


class Loaded(BaseException):
    pass


@needs("llmfoundry_ops")
def test_files_are_read_once_for_the_observer_and_the_configuration(monkeypatch):
    choices = []
    found = []

    def choose_overlay():
        choices.append(layers.AUTO)
        return Choice({"precision": "fp32"}, "")

    def find(values):
        found.append(find_observed(values))

    def load_and_stop(*arguments, **named):
        raise Loaded(load_train_config(*arguments, **named).config)

    monkeypatch.setattr(layers, "choose_overlay", choose_overlay)
    monkeypatch.setattr(launch_train, "find_observed", find)
    monkeypatch.setattr(launch_train, "load_train_config", load_and_stop)
    arguments = ["mpt-quickstart", FROM_ENV, "hardware=auto", "metrics_port=9400", "save_folder=a/{run_name}"]
    with pytest.raises(Loaded) as caught:
        launch_train.launch(arguments)
    assert len(choices) == 1
    assert as_dict(caught.value.args[0]) == as_dict(load_train_config(arguments).config)
    assert found == [observed_by(*arguments)]
