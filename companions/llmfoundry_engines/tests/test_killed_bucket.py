"""Parts and joins into a bucket in processes that are killed at random moments. Units have their usual size here."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from llmfoundry_engines.tests.buckets import copy_of
from llmfoundry_lite.companions import search_path
from llmfoundry_lite.prepare.prepare import prepare
from tests.helpers.data import make_documents
from tests.helpers.preparing import SEQ_LEN, assert_same_result, request, write_jsonl


@pytest.mark.long
@pytest.mark.multiprocess
def test_parts_and_joins_that_are_killed_at_random_moments_give_equal_bytes(out: str, tmp_path: Path) -> None:
    """Three parts begin at once. Each is killed and begun again, and then the join is killed four times."""
    generator = random.Random(7)
    source = write_jsonl(tmp_path / "in.jsonl", make_documents(30_000, words=60))
    prepare(request(source, "train:400", size_limit_bytes=100_000), tmp_path / "expected", num_workers=1)
    options = ["--out", out, "--tokenizer", "train:400", "--max-seq-len", SEQ_LEN, "--size-limit", 100_000]
    environment = {**os.environ, **search_path()}

    def start(*command: object) -> subprocess.Popen:
        scratch = ["--scratch", tmp_path / "scratch"]
        arguments = [sys.executable, "-m", "llmfoundry_lite.cli.main", "data", *map(str, [*command, *scratch])]
        return subprocess.Popen(arguments, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)

    def start_part(number: int) -> subprocess.Popen:
        return start("prepare", source, *options, "--part", f"{number}/3", "--num-workers", 1)

    def kill(process: subprocess.Popen, max_seconds: float) -> None:
        time.sleep(generator.uniform(0.5, max_seconds))
        process.send_signal(signal.SIGKILL)
        process.communicate()

    processes = {number: start_part(number) for number in (1, 2, 3)}
    for number, process in list(processes.items()):
        kill(process, 6)
        processes[number] = start_part(number)
    for process in processes.values():
        _, error = process.communicate()
        assert process.returncode == 0, error.decode()
    for _ in range(4):
        kill(start("join", out), 5)
    final = start("join", out)
    _, error = final.communicate()
    assert final.returncode == 0, error.decode()
    assert_same_result(copy_of(out, tmp_path / "copy"), tmp_path / "expected")
    assert not list((tmp_path / "scratch").iterdir()), "a later launch removes what killed ones have left"
