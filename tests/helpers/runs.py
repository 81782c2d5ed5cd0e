"""Short runs in several launches, for the tests of resuming."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmfoundry_lite.checkpoint.manifest import MANIFEST
from llmfoundry_lite.checkpoint.manifest_json import encode
from llmfoundry_lite.checkpoint.store import open_checkpoint
from tests.helpers.launch import Launch, train
from tests.helpers.resave import resave_into
from tests.helpers.tiny import read_metrics, values, write_config

Environment = dict[str, str] | None


def run(
    tmp_path: Path, config: dict[str, Any], name: str, num_ranks: int = 1, env: Environment = None, **changes: Any
) -> Launch:
    """One launch of run `name`, which must end well."""
    return attempt(tmp_path, config, name, num_ranks, env, **changes).check()


def attempt(
    tmp_path: Path, config: dict[str, Any], name: str, num_ranks: int = 1, env: Environment = None, **changes: Any
) -> Launch:
    path = write_config(tmp_path / f"{name}.yaml", {**config, "run_name": name, **changes})
    return train([path], tmp_path, num_ranks, env=env)


def carry_on(
    tmp_path: Path, config: dict[str, Any], there: str, batch: int, here: str, num_ranks: int = 1, **changes: Any
) -> None:
    """Run `here` begins with a copy of what `there` saved at `batch`; what it found goes to `resaved/<here>`."""
    copy_save(tmp_path, there, batch, here)
    callbacks = {**config.get("callbacks", {}), **resave_into(tmp_path / "resaved" / here)}
    run(tmp_path, config, here, num_ranks, **{"callbacks": callbacks, **changes})


def copy_save(tmp_path: Path, there: str, batch: int, here: str) -> None:
    """Give run `here` a copy of what `there` saved at `batch`, as its own: a checkpoint of another run is refused."""
    copy = saves(tmp_path, here) / f"ba{batch}"
    shutil.copytree(saves(tmp_path, there) / f"ba{batch}", copy)
    (copy / MANIFEST).write_bytes(encode(replace(open_checkpoint(copy).manifest, run_name=here)))


def saves(tmp_path: Path, name: str) -> Path:
    return tmp_path / "runs" / name / "checkpoints"


def saved_names(tmp_path: Path, name: str) -> set[str]:
    return {path.name for path in saves(tmp_path, name).glob("ba*")}


def metrics(tmp_path: Path, name: str) -> list[dict[str, Any]]:
    return read_metrics(tmp_path / "runs" / name)


def losses(tmp_path: Path, name: str) -> list[float]:
    return values(metrics(tmp_path, name), "loss/train/total")


def status(tmp_path: Path, name: str) -> dict[str, Any]:
    return json.loads((tmp_path / "runs" / name / "status.json").read_text())
