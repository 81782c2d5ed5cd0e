"""A run belongs to one launch at a time: a second one is refused before it builds anything, a new one takes over."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmfoundry_lite.checkpoint import lease as leases
from llmfoundry_lite.checkpoint.lease import Lease, Renewals
from llmfoundry_lite.checkpoint.store import CheckpointStore
from llmfoundry_lite.launch_train import main
from llmfoundry_lite.ranks.codec import write_json
from llmfoundry_lite.ranks.ending import run_and_exit
from tests.helpers.launch import Launch, launch
from tests.helpers.tiny import tiny_config, write_config

pytestmark = pytest.mark.multiprocess
FOLDER = "runs/tiny/checkpoints"
POISON = {"python:tests.training.test_failures:PoisonGradient": {"rank": 0, "batch": 2}}


def train_renewing(path: str) -> None:
    leases.RENEWAL_SECONDS = 0.005
    sys.argv = ["scripts/train.py", path]
    run_and_exit(main)


def train_while_another_machine_does(path: str) -> None:
    """Train here while the holder, on another machine, renews its lease."""
    leases.RENEWAL_SECONDS, leases.POLL_SECONDS = 0.005, 0.05
    store = CheckpointStore(FOLDER)
    holder = store.leases.current_holder()
    assert holder is not None
    Renewals(store.leases, Lease(holder.epoch, holder.owner))
    sys.argv = ["scripts/train.py", path]
    run_and_exit(main)


def run(tmp_path: Path, data: Path, function: Callable[..., None] = train_renewing, **changes: object) -> Launch:
    config = tiny_config(data, **{"max_duration": "2ba", "autoresume": True, **changes})
    return launch(function, (write_config(tmp_path / "tiny.yaml", config),), tmp_path)


def move_claim_elsewhere(tmp_path: Path) -> None:
    """Let the last launch be one on another machine, which has not ended."""
    claim, renewals = (tmp_path / FOLDER / ".leases" / f"00000001{kind}.json" for kind in ("", ".renewed"))
    claim.write_bytes(write_json(json.loads(claim.read_bytes()) | {"boot": "another", "host": "gpu-17", "pid": 42}))
    renewals.unlink()


def said_by(tmp_path: Path, number: int) -> dict[str, Any]:
    return json.loads((tmp_path / FOLDER / f".leases/{number:08d}.renewed.json").read_bytes())


def test_a_second_launch_is_refused_before_it_builds_anything_and_takes_over_when_told(tmp_path, data):
    """Each launch renews its lease meanwhile, and releases it however it ends."""
    run(tmp_path, data, stop_after="1ba").check()
    said = said_by(tmp_path, 1)
    assert said["released"] and said["renewals"] > 1

    move_claim_elsewhere(tmp_path)
    refused = run(tmp_path, data, train_while_another_machine_does)
    assert refused.exit_codes == [2]
    *before, last = refused.output.strip().splitlines()
    assert last.startswith(f"error: {FOLDER}: another launch trains this run now (host gpu-17, process 42, run tiny);")
    assert "takeover=true" in last
    assert not [line for line in before if line.startswith(("attention:", "carrying on"))]
    assert not (tmp_path / FOLDER / ".leases/00000002.json").exists()

    fails = {"on_non_finite": "stop", "callbacks": POISON}
    taken = run(tmp_path, data, train_while_another_machine_does, takeover=True, **fails)
    assert taken.exit_codes == [2]
    assert f"takeover: this launch takes {FOLDER} from host gpu-17, process 42, run tiny\n" in taken.output
    assert f"carrying on from {FOLDER}/ba1" in taken.output
    said = said_by(tmp_path, 2)
    assert said["released"] and said["renewals"] > 1
