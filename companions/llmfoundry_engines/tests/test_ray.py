"""A preparation on a Ray cluster of three nodes, which are processes on this machine."""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from llmfoundry_engines import ray_engine
from llmfoundry_lite.cli import main
from llmfoundry_lite.errors import ConfigError, DataError
from llmfoundry_lite.prepare.prepare import prepare
from tests.helpers.data import make_documents
from tests.helpers.preparing import SEQ_LEN, assert_same_result, request, write_jsonl

NUM_NODES = 3
OBJECT_STORE_BYTES = 80 << 20
"""The smallest store that Ray accepts. Nothing is put into it."""


@pytest.fixture(scope="module")
def cluster():
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 1, "object_store_memory": OBJECT_STORE_BYTES, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=node)
    try:
        for _ in range(NUM_NODES - 1):
            cluster.add_node(num_cpus=1, object_store_memory=OBJECT_STORE_BYTES)
        ray.init(address=cluster.address, log_to_driver=False)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


@pytest.mark.long
@pytest.mark.multiprocess
def test_tasks_on_several_nodes_with_kills_give_the_bytes_of_one_machine(cluster, tmp_path: Path, monkeypatch) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", make_documents(6000))
    wanted = request(source, "train:400", size_limit_bytes=100_000)
    prepare(wanted, tmp_path / "expected", num_workers=1)
    units = tmp_path / "out/.partial/units"
    num_kills = 0

    def kill_three_tasks() -> None:
        """Kill a process that runs a part, each time when there is another token file."""
        nonlocal num_kills
        num_files = 0
        while num_kills < 3:
            time.sleep(0.05)
            names = list(units.glob("*.npz")) if units.is_dir() else []
            if len(names) <= num_files:
                continue
            for process in psutil.Process().children(recursive=True):
                if process.name().startswith("ray::run_part") or "ray::run_part" in " ".join(process.cmdline()):
                    os.kill(process.pid, signal.SIGKILL)
                    num_kills += 1
                    num_files = len(names)
                    break

    killer = threading.Thread(target=kill_three_tasks, daemon=True)
    killer.start()
    monkeypatch.chdir(tmp_path)
    summary = ray_engine.prepare_with_ray(wanted, "out", num_parts=7)
    assert summary.splits["train"].shards > 3
    assert num_kills == 3
    assert_same_result(tmp_path / "out", tmp_path / "expected")


@pytest.mark.long
@pytest.mark.multiprocess
def test_an_error_of_a_task_is_the_error_of_the_command(cluster, tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"text": "a"}\n{\n')
    with pytest.raises(DataError, match=r"in\.jsonl, line 2 does not parse as JSON"):
        ray_engine.prepare_with_ray(request(path, "train:400"), tmp_path / "out", num_parts=2)


def test_without_ray_the_command_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(
        ConfigError, match=r"--engine ray needs the package ray on all nodes: pip install 'llmfoundry-lit"
    ):
        ray_engine.import_ray()


def test_an_engine_is_neither_a_part_nor_of_a_number_of_processes(tmp_path: Path, capsys) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", make_documents(3))
    options = ["--out", str(tmp_path / "out"), "--tokenizer", "train:400", "--max-seq-len", str(SEQ_LEN)]
    command = ["data", "prepare", str(source), *options, "--engine", "ray"]
    for option, value in (("--part", "1/2"), ("--num-workers", "2")):
        assert main.run([*command, option, value]) == 2
        assert f"--engine ray with {option}: Ray divides the work; leave {option} out" in capsys.readouterr().err
