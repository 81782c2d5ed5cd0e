"""Nothing that a launch writes or prints has a secret from the environment or from a URL."""

import sys
from pathlib import Path

import pytest

from llmfoundry_lite.config.schema import WandbConfig
from llmfoundry_lite.training.mirrors import WandbMirror
from tests.helpers.launch import train
from tests.helpers.tiny import tiny_config, write_config

SECRETS = {"FROM_ENV": "hunter2env", "FROM_DECODE": "hunter2decode"}


def secrets_in(folder: Path, output: str) -> list[str]:
    texts = {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file() and not path.is_symlink()}
    return [name for name, content in {**texts, "output": output.encode()}.items() if b"hunter2" in content]


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


@pytest.mark.slow
def test_wandb_is_not_told_of_credentials_on_the_command_line(tmp_path, monkeypatch):
    """It records the arguments of the process."""
    monkeypatch.setattr(sys, "argv", ["train.py", "save_folder=s3://user:hunter2@host/b"])
    monkeypatch.setattr("wandb.init", lambda **_: sys.argv[1])
    mirror = WandbMirror(WandbConfig(), "run", tmp_path, {})
    assert mirror.run == "save_folder=s3://user:***@host/b"
