"""How a rank ends when it is asked to leave."""

import os
import signal
import subprocess
import sys

import psutil
import pytest

from tests.helpers.launch import ROOT, free_port

WAITS = """
from llmfoundry_lite.ranks.ending import run_and_exit
from llmfoundry_lite.ranks.start import start_process_group

def main(arguments):
    print("begins", flush=True)
    start_process_group("cpu", 600.0)

run_and_exit(main)
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_rank_that_waits_for_others_leaves_though_they_never_come(number):
    """They may have been asked to leave a moment before. Python's handlers do not run while it waits."""
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    environment = os.environ | place | {"MASTER_PORT": str(free_port()), "PYTHONPATH": str(ROOT)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    rank = subprocess.Popen([sys.executable, "-c", WAITS], env=environment, **pipes)
    try:
        assert rank.stdout.readline() == "begins\n"
        port = int(environment["MASTER_PORT"])
        while not any(one.laddr.port == port for one in psutil.Process(rank.pid).net_connections()):
            assert rank.poll() is None
        rank.send_signal(number)
        _, said = rank.communicate(timeout=60)
    finally:
        rank.kill()
    reason = "preempted by SIGTERM" if number == signal.SIGTERM else "interrupted by Ctrl-C"
    assert (rank.returncode, said) == (75, f"{reason}; run the same command again\n")
