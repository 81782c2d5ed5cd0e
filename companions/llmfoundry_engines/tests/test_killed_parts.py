"""Parts in processes, which are killed at random moments. Units have their usual size here."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from llmfoundry_engines.join import join
from llmfoundry_lite.companions import search_path
from llmfoundry_lite.prepare.prepare import prepare
from tests.helpers.data import make_documents
from tests.helpers.preparing import SEQ_LEN, assert_same_result, request, write_jsonl


@pytest.mark.multiprocess
@pytest.mark.parametrize("count", [pytest.param(3, marks=pytest.mark.slow), pytest.param(16, marks=pytest.mark.long)])
def test_processes_that_are_killed_at_random_moments_give_equal_bytes(
    tokenizer_folder: Path, tmp_path: Path, count: int
) -> None:
    """All parts begin at once; three processes are killed, and begun again."""
    generator = random.Random(count)
    source = write_jsonl(tmp_path / "in.jsonl", make_documents(4000, words=60))
    prepare(request(source, "train:400", size_limit_bytes=200_000), tmp_path / "expected", num_workers=1)
    out = tmp_path / "out"
    options = ["--out", out, "--tokenizer", "train:400", "--max-seq-len", SEQ_LEN, "--size-limit", 200_000]
    environment = {**os.environ, **search_path()}

    def start(number: int) -> subprocess.Popen:
        command = ["data", "prepare", source, *options, "--part", f"{number}/{count}", "--num-workers", 1]
        arguments = [sys.executable, "-m", "llmfoundry_lite.cli.main", *map(str, command)]
        return subprocess.Popen(arguments, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)

    for first in range(1, count + 1, 3):
        processes = {number: start(number) for number in range(first, min(first + 3, count + 1))}
        if first == 1:
            for number, process in list(processes.items()):
                time.sleep(generator.uniform(0.5, 2.5))
                process.send_signal(signal.SIGKILL)
                process.communicate()
                processes[number] = start(number)
        for process in processes.values():
            _, error = process.communicate()
            assert process.returncode == 0, error.decode()
    join(out)
    assert_same_result(out, tmp_path / "expected")
