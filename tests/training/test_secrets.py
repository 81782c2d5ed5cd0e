"""Nothing that a launch writes or prints has a secret from the environment or from a URL."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from llmfoundry_lite import dry_run
from llmfoundry_lite.checkpoint.store import open_checkpoint
from llmfoundry_lite.cli.main import run as run_command
from llmfoundry_lite.companions import is_installed
from llmfoundry_lite.config.callbacks_schema import WandbConfig
from llmfoundry_lite.config.load_train import load_train_config
from llmfoundry_lite.launch_train import check
from llmfoundry_lite.training.mirrors import WandbMirror
from llmfoundry_lite.training.run_state import build_segment, find_differences, with_references
from tests.helpers.launch import PATHS, train
from tests.helpers.recorded import HERE, write_run
from tests.helpers.tiny import tiny_config, write_config

SECRETS = {"FROM_ENV": "hunter2env", "FROM_DECODE": "hunter2decode"}


def secrets_in(folder: Path, output: str) -> list[str]:
    texts = {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file() and not path.is_symlink()}
    return [name for name, content in {**texts, "output": output.encode()}.items() if b"hunter2" in content]


def test_a_segment_has_no_value_that_came_from_a_variable(tmp_path, data, monkeypatch):
    """It goes into every checkpoint, and from there into reports."""
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    for name, value in {**SECRETS, "HF_TOKEN": "hunter2shell", "NCCL_ALGO": "Tree"}.items():
        monkeypatch.setenv(name, value)
    given = {"KEY": "${oc.env:FROM_ENV}", "HF_TOKEN": "hunter2yaml", "NCCL_ALGO": "Ring", "NCCL_PROTO": "LL"}
    path = write_config(tmp_path / "tiny.yaml", tiny_config(data, environment=given))
    config = load_train_config([path]).config
    assert config.environment["KEY"] == "hunter2env"
    monkeypatch.setenv("KEY", "hunter2env")  # as a launch sets it
    here = build_segment(config, SimpleNamespace(attn_impl="torch"), 1, 2)
    assert here.environment == {**given, "NCCL_ALGO": "Tree", "HF_TOKEN": "***"}, "as the shell has it, but for secrets"

    before = replace(here, environment={"KEY": "hunter2old", "NCCL_ALGO": "Ring"})
    assert with_references([before], config)[0].environment == {"KEY": "${oc.env:FROM_ENV}", "NCCL_ALGO": "Ring"}
    assert not any("hunter2" in text for text in find_differences(before, here))
    assert "NCCL_ALGO Ring -> Tree" in find_differences(before, here)


def test_carrying_on_names_no_secret_that_the_yaml_has(tmp_path, data, monkeypatch):
    """The line `carrying on from ... (...)` lists what has changed; a save has nothing to compare a secret with."""
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    path = write_config(tmp_path / "tiny.yaml", tiny_config(data, environment={"HF_TOKEN": "hunter2yaml"}))
    here = build_segment(load_train_config([path]).config, SimpleNamespace(attn_impl="torch"), 1, 2)
    for name, recorded in {"now": here.environment, "before": {"HF_TOKEN": "hunter2yaml"}}.items():
        write_run(tmp_path / name, tiny_config(data), (6,), segments=(replace(HERE, environment=recorded),))
        last = open_checkpoint(str(tmp_path / name / "checkpoints/ba6")).manifest.segments[-1]
        assert not [text for text in find_differences(last, here) if "HF_TOKEN" in text]


def test_a_report_on_a_save_of_an_earlier_release_hides_secrets_by_their_names(tmp_path, data, capsys):
    """Values of all variables were recorded."""
    recorded = replace(HERE, environment={"WANDB_API_KEY": "hunter2", "NCCL_ALGO": "Ring", "KEY": "${oc.env:X}"})
    write_run(tmp_path / "run", tiny_config(data), (6,), segments=(recorded,))
    assert run_command(["report", str(tmp_path / "run"), "--out", str(tmp_path / "out")]) == 0
    told = capsys.readouterr().out + "".join(path.read_text() for path in (tmp_path / "out").glob("report.[jm]*"))
    assert "hunter2" not in told
    assert "WANDB_API_KEY=***" in told and "NCCL_ALGO=Ring" in told and "KEY=${oc.env:X}" in told


@pytest.mark.parametrize("shell", ["hunter2shell", None])
def test_a_dry_run_does_not_print_a_secret_that_the_shell_or_the_yaml_has(tmp_path, data, monkeypatch, shell):
    if shell is not None:
        monkeypatch.setenv("HF_TOKEN", shell)
    path = write_config(tmp_path / "tiny.yaml", tiny_config(data, environment={"HF_TOKEN": "hunter2yaml"}))
    invocation, layout, found = check([path, "--dry-run"])
    told = dry_run.describe_launch(invocation.config, layout, found)
    assert "HF_TOKEN=***" in told and "hunter2" not in told
    assert ("HF_TOKEN=***, as the shell has it" in told) == (shell is not None)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_no_checkpoint_no_export_and_no_report_has_a_secret(tmp_path, data):
    config = tiny_config(
        data,
        max_duration="4ba",
        save_interval="2ba",
        environment={"KEY": "${oc.env:FROM_ENV}"},
        metadata={"key": "${oc.env:FROM_DECODE}"},
        loggers={"tensorboard": {}},
    )
    if is_installed("llmfoundry_ops"):
        config["callbacks"] = {"generate_callback": {"prompts": ["a"], "interval": "2ba"}}
    path = write_config(tmp_path / "tiny.yaml", config)
    outputs = [train([path, "stop_after=2ba"], tmp_path, env=SECRETS).check().output]
    outputs.append(train([path, "autoresume=true"], tmp_path, env=SECRETS).check().output)
    run = tmp_path / "runs/tiny"
    assert run_command(["report", str(run), "--out", str(run / "reported"), "--csv"]) == 0
    assert (run / "checkpoints/ba4/manifest.json").exists()
    assert secrets_in(run, "".join(outputs)) == []


@pytest.mark.slow
@pytest.mark.multiprocess
def test_no_file_of_a_run_and_no_line_of_a_launch_has_a_secret(tmp_path, data):
    loggers = {"wandb": {"project": "tests", "init_kwargs": {"config_exclude_keys": ["${oc.env:FROM_ENV}"]}}}
    config = tiny_config(
        data,
        max_duration="2ba",
        save_folder="memory://user:hunter2url@host/saves?token=hunter2token",
        loggers=loggers,
        environment={"MY_TOKEN": "${oc.env:FROM_ENV}"},
        metadata={"key": "${oc.decode:${oc.env:FROM_DECODE}}"},
    )
    path = write_config(tmp_path / "tiny.yaml", config)
    env = {**SECRETS, "WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    argument = "metadata.url=https://hunter2cli@host/x"
    dry = train([path, argument, "--dry-run=full"], tmp_path, env=env).check()
    assert "memory://user:***@host/saves?token=***" in dry.output and "hunter2" not in dry.output
    launch = train([path, argument], tmp_path, env=env).check()
    run = tmp_path / "runs/tiny"
    assert secrets_in(run, launch.output) == []
    recorded = (run / "config.yaml").read_text()
    assert "${oc.env:FROM_ENV}" in recorded and "${oc.decode:${oc.env:FROM_DECODE}}" in recorded
    assert list(run.glob("wandb/offline-run-*/files/*"))

    again = train([str(run / "config.yaml")], tmp_path, env=env)
    assert again.exit_codes == [2] and "save_folder: memory://user:***@host" in again.output
    assert "credentials are not recorded; give them here, by ${oc.env:NAME}" in again.output
    assert secrets_in(run, again.output) == []


SETTINGS_OF_WANDB = """
from pathlib import Path
from llmfoundry_lite.config.callbacks_schema import WandbConfig
from llmfoundry_lite.training.mirrors import WandbMirror
mirror = WandbMirror(WandbConfig(), "run", Path("run"), {})
print("settings:", mirror.run.settings.base_url, mirror.run.project)
mirror.close()
"""


@pytest.mark.slow
def test_wandb_obeys_no_settings_of_the_working_directory(tmp_path):
    """A `base_url` there would get the API key of whoever trains in somebody's folder."""
    (tmp_path / "run").mkdir()
    (tmp_path / "wandb").mkdir()
    (tmp_path / "wandb/settings").write_text("[default]\nbase_url = http://theirs.invalid\nproject = theirs\n")
    own = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    environment = own | {"PYTHONPATH": PATHS, "WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    command = [sys.executable, "-P", "-c", SETTINGS_OF_WANDB]
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert "settings: " in ended.stdout and "theirs" not in ended.stdout, ended.stdout + ended.stderr


@pytest.mark.slow
def test_wandb_is_not_told_of_credentials_on_the_command_line(tmp_path, monkeypatch):
    """It records the arguments of the process."""
    monkeypatch.setattr(sys, "argv", ["train.py", "save_folder=s3://user:hunter2@host/b"])
    monkeypatch.setattr("wandb.init", lambda **_: sys.argv[1])
    mirror = WandbMirror(WandbConfig(), "run", tmp_path, {})
    assert mirror.run == "save_folder=s3://user:***@host/b"
