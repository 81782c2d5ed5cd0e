"""The job group of two islands in docs/skypilot.md."""

import re

import yaml

from llmfoundry_islands.block import settings_of
from llmfoundry_lite.config.load_train import load_train_config
from llmfoundry_lite.errors import EXIT_PREEMPTED
from tests.helpers.launch import ROOT


def test_the_islands_of_a_job_group_load_and_ask_the_coordinator_of_their_group():
    (group,) = re.findall(r"```yaml\n(.+?)```", (ROOT / "docs/skypilot.md").read_text(), re.DOTALL)
    header, coordinator, *islands = yaml.safe_load_all(group)
    assert [island["name"] for island in islands] == header["primary_tasks"]
    port = re.search(r"--listen 0.0.0.0:(\d+) --islands 2$", coordinator["run"])
    for island in islands:
        run, save_folder, options = re.fullmatch(
            r'RUN=(\S+) SAVE_FOLDER="(\S+)" OPTIONS="(.+)" bash scripts/sky/run.sh\n', island["run"]
        ).groups()
        options = options.replace("$SKYPILOT_JOBGROUP_NAME", header["name"]).replace("$(hostname -i)", "10.0.0.1")
        config = load_train_config([str(ROOT / run), f"save_folder={save_folder}", *options.split()], {}).config
        assert settings_of(config).coordinator == f"{coordinator['name']}-0.{header['name']}:{port[1]}"
        assert settings_of(config).name == island["name"]
        assert island["resources"]["job_recovery"]["recover_on_exit_codes"] == [EXIT_PREEMPTED]
