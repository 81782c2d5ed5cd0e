"""Checks of a rank before it waits for the others."""

import socket

import psutil
import pytest
import torch
import torch.distributed as dist

from llmfoundry_lite.errors import ConfigError, MissingRanksError
from llmfoundry_lite.launch_eval import launch as launch_eval
from llmfoundry_lite.launch_train import launch as launch_train
from llmfoundry_lite.ranks.ending import run_and_exit
from llmfoundry_lite.ranks.rank import rank_variables
from llmfoundry_lite.ranks.start import choose_device, start_process_group
from tests.helpers.launch import launch


@pytest.fixture
def met(monkeypatch):
    """Calls of `init_process_group` by one rank of two, which do nothing."""
    calls = []
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("torch.distributed.init_process_group", lambda *args, **options: calls.append(args))
    return calls


def test_an_address_that_does_not_resolve_is_refused_before_ranks_wait_for_each_other(monkeypatch, met):
    def unknown(host, port):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr("socket.getaddrinfo", unknown)
    monkeypatch.setenv("MASTER_ADDR", "n1")
    with pytest.raises(ConfigError, match=r"MASTER_ADDR: 'n1' does not resolve on .* not known.*; set it to a name"):
        start_process_group("cpu", 600)
    assert met == []


@pytest.mark.parametrize("address", ["a" * 64, "a..b"])
def test_an_address_that_is_no_name_is_refused(monkeypatch, met, address):
    monkeypatch.setenv("MASTER_ADDR", address)
    with pytest.raises(ConfigError, match="does not resolve"):
        start_process_group("cpu", 600)


def test_a_name_server_that_does_not_answer_ends_no_run(monkeypatch, met, capsys):
    def busy(host, port):
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setattr("socket.getaddrinfo", busy)
    monkeypatch.setenv("MASTER_ADDR", "n1")
    start_process_group("cpu", 600)
    assert met == [("gloo",)]
    assert "MASTER_ADDR: 'n1' does not resolve on" in capsys.readouterr().err


JOINED = "Timed out after 601 seconds waiting for clients. 1/2 clients joined."
SILENT = "The client socket has timed out after 600000ms while trying to connect to (127.0.0.1, 29500)."


@pytest.mark.parametrize(
    ("rank", "error", "said"),
    [
        (0, dist.DistStoreError(JOINED), "1 of 2 ranks joined within 600 s at 127.0.0.1:29500; start the others"),
        (1, dist.DistNetworkError(SILENT), "rank 0 did not answer within 600 s at 127.0.0.1:29500; start the others"),
    ],
    ids=["rank 0", "rank 1"],
)
def test_ranks_that_do_not_come_are_told_with_the_variables_that_expect_them(monkeypatch, rank, error, said):
    """As for a process that has the variables of a launcher from its shell. It may pass, so the exit code is 75."""

    def meet(*arguments, **options):
        raise error

    for name, value in (rank_variables(rank, 2) | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(dist, "TCPStore", meet)
    with pytest.raises(MissingRanksError, match=f"^RANK is {rank} and WORLD_SIZE is 2, but {said}") as caught:
        start_process_group("cpu", 600)
    assert caught.value.exit_code == 75


def meet_for_ten_seconds() -> None:
    run_and_exit(lambda arguments: start_process_group("cpu", 10))


@pytest.mark.slow
@pytest.mark.multiprocess
def test_torch_s_words_for_ranks_that_do_not_come_are_understood(tmp_path):
    missing = launch(meet_for_ten_seconds, (), tmp_path, env={"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"})
    assert missing.exit_codes == [75]
    assert "error: RANK is 0 and WORLD_SIZE is 2, but 1 of 2 ranks joined within 10 s" in missing.output
    assert "Traceback" not in missing.output


def test_a_port_that_is_taken_is_named(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as other:
        for name, value in (rank_variables(0, 2) | {"MASTER_PORT": str(other.getsockname()[1])}).items():
            monkeypatch.setenv(name, value)
        with pytest.raises(MissingRanksError, match=r"^MASTER_PORT: 127\.0\.0\.1:\d+ cannot be listened on: Addr"):
            start_process_group("cpu", 600)


@pytest.mark.parametrize("start", ["train", "evaluate", "group"])
def test_every_way_to_begin_refuses_variables_that_make_no_launch(monkeypatch, start):
    monkeypatch.setenv("WORLD_SIZE", "2")
    calls = {
        "train": lambda: launch_train(["nowhere.yaml"]),
        "evaluate": lambda: launch_eval(["nowhere.yaml"]),
        "group": lambda: start_process_group("cpu", 600),
    }
    with pytest.raises(ConfigError, match="WORLD_SIZE is 2, and RANK is not set"):
        calls[start]()


def test_a_dry_run_asks_how_other_ranks_would_divide_a_run(monkeypatch):
    """`WORLD_SIZE=16 … --dry-run`, without a rank."""
    monkeypatch.setenv("WORLD_SIZE", "16")
    with pytest.raises(ConfigError, match=r"nowhere\.yaml"):
        launch_train(["nowhere.yaml", "--dry-run"])


def listen() -> None:
    start_process_group("cpu", 60.0)
    dist.barrier()
    connections = psutil.Process().net_connections("tcp")
    print(*sorted({one.laddr.ip for one in connections if one.status == psutil.CONN_LISTEN}))
    dist.barrier()


@pytest.mark.multiprocess
def test_ranks_of_one_node_listen_on_loopback_alone(tmp_path):
    """The store, and gloo's connections between ranks."""
    assert set(launch(listen, (), tmp_path, 2).check().outputs) == {"127.0.0.1\n"}


@pytest.mark.parametrize("local_rank", ["0", "3"])
def test_ranks_that_see_one_device_each_are_refused(monkeypatch, local_rank):
    """`srun --gpus-per-task=1` does so. Every rank is refused, though the first would find its device."""
    for name, value in {
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "4",
        "LOCAL_RANK": local_rank,
        "RANK": local_rank,
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(
        ConfigError, match=f"4 ranks on .*, and rank {local_rank} sees 1 device, expected 4: .*per-task"
    ):
        choose_device("cuda")


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_the_ranks_of_a_node_share_the_cores_that_they_may_use(monkeypatch, device_type):
    """That holds with GPUs too: else a save's check would take all cores, in each of 8 ranks."""
    threads = []
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr("os.cpu_count", lambda: 96)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(12)), raising=False)
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    assert choose_device(device_type).type == device_type
    assert threads == [3]
