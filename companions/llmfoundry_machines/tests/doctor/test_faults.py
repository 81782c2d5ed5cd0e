"""Machines that are broken in one place: a bit, a disk, a link, a rank. The real checks run, and must say so."""

import ctypes
import errno
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from llmfoundry_lite.checkpoint.open_folder import open_folder
from llmfoundry_lite.checkpoint.remote_folder import RemoteFolder, RemoteSource
from llmfoundry_lite.hardware import ACCELERATORS
from llmfoundry_machines.doctor import collectives, folder, speed
from llmfoundry_machines.doctor.examine import examine
from llmfoundry_machines.doctor.finding import CheckOptions, Finding, Status
from llmfoundry_machines.tests.findings import QUICK, by_name


def flip_bit(values: torch.Tensor, index: int, bit: int) -> None:
    """Flip one bit of a contiguous tensor on the CPU, of any dtype."""
    address = values.data_ptr() + index * values.element_size() + bit // 8
    ctypes.c_uint8.from_address(address).value ^= 1 << bit % 8


# ------------------------------------------------------------------------------------------------ matrix products


def check_products(monkeypatch, multiply: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> dict[str, Finding]:
    monkeypatch.setattr(torch, "matmul", multiply)
    return by_name(speed.check_gemm(QUICK))


def failed(found: dict[str, Finding]) -> set[str]:
    return {name for name, finding in found.items() if finding.status is Status.FAIL}


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "bit"), [(torch.float32, 8), (torch.bfloat16, 0), (torch.float16, 0)])
@pytest.mark.parametrize("where", ["input", "output"])
def test_one_low_bit_that_is_always_flipped_in_one_precision_is_found_there_alone(dtype, bit, where, monkeypatch):
    """fp32's lowest bit of an input is below what a sum of 256 keeps, so bit 8 is flipped there."""

    def multiply(a_mk: torch.Tensor, b_kn: torch.Tensor) -> torch.Tensor:
        if a_mk.dtype == dtype and where == "input":
            a_mk = a_mk.clone()
            flip_bit(a_mk, 777, bit)
        result_mn = a_mk @ b_kn
        if a_mk.dtype == dtype and where == "output":
            flip_bit(result_mn, 4321, bit)
        return result_mn

    found = check_products(monkeypatch, multiply)
    broken = f"gemm {speed.DTYPE_NAMES[dtype]}"
    assert failed(found) == {broken} and "sums are wrong" in found[broken].detail


def lose_the_end(product_mn: torch.Tensor, a_mk: torch.Tensor, b_kn: torch.Tensor, count: int) -> None:
    """The part of a long sum behind its 256th term is lost."""
    product_mn.copy_(a_mk[:, :256] @ b_kn[:256])


def miss_one_of_five(product_mn: torch.Tensor, a_mk: torch.Tensor, b_kn: torch.Tensor, count: int) -> None:
    """Only in long sums."""
    if a_mk.shape[1] > 256 and count % 5 == 4:
        product_mn[3, 5] += 2


def miss_one_of_twenty(product_mn: torch.Tensor, a_mk: torch.Tensor, b_kn: torch.Tensor, count: int) -> None:
    """Change the lowest bit of a real product, which is within every bound."""
    if a_mk.shape[1] == 256 and count % 20 == 19:
        flip_bit(product_mn, 99, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (lose_the_end, "sums are wrong"),
        (miss_one_of_five, "1 of 65536 sums changed"),
        (miss_one_of_twenty, "(5 of 99 times)"),
    ],
)
def test_products_that_are_wrong_in_long_sums_or_now_and_then_are_found(dtype, fault, words, monkeypatch):
    monkeypatch.setattr(speed, "LONG_SECONDS", 60.0)  # this machine may be busy
    monkeypatch.setattr(speed, "UNIT_ROUNDOFF", {dtype: speed.UNIT_ROUNDOFF[dtype]})
    count = 0

    def multiply(a_mk: torch.Tensor, b_kn: torch.Tensor) -> torch.Tensor:
        nonlocal count
        product_mn = a_mk @ b_kn
        if a_mk.dtype == dtype:
            count += 1
            fault(product_mn, a_mk, b_kn, count)
        return product_mn

    found = check_products(monkeypatch, multiply)
    broken = f"gemm {speed.DTYPE_NAMES[dtype]}"
    assert failed(found) == {broken} and words in found[broken].detail


def multiply_in_tf32(a_mk: torch.Tensor, b_kn: torch.Tensor) -> torch.Tensor:
    def to_tf32(values: torch.Tensor) -> torch.Tensor:  # 10 bits of fraction of 23
        return (values.view(torch.int32) & ~0x1FFF).view(torch.float32) if values.dtype == torch.float32 else values

    return to_tf32(a_mk) @ to_tf32(b_kn)


def sum_in_bf16(a_mk: torch.Tensor, b_kn: torch.Tensor) -> torch.Tensor:
    """Signs stay exact in bf16, so only the real numbers show it."""
    if a_mk.dtype != torch.bfloat16:
        return a_mk @ b_kn
    total = torch.zeros(a_mk.shape[0], b_kn.shape[1], dtype=torch.bfloat16)
    for part in range(0, a_mk.shape[1], 32):
        total += a_mk[:, part : part + 32] @ b_kn[part : part + 32]
    return total


def test_products_of_too_little_precision_are_found(monkeypatch):
    found = check_products(monkeypatch, multiply_in_tf32)["gemm fp32"]
    assert found.status is Status.FAIL and "TF32 although" in found.detail and "NVIDIA_TF32_OVERRIDE" in found.fix
    assert "times what rounding allows" in check_products(monkeypatch, sum_in_bf16)["gemm bf16"].detail


def test_a_product_that_is_not_a_number_is_wrong(monkeypatch):
    assert len(failed(check_products(monkeypatch, lambda a_mk, b_kn: (a_mk @ b_kn) * float("nan")))) == 3


# ------------------------------------------------------------------------------------------------ memory


def flip_one_bit(chunk: torch.Tensor, number: int) -> None:
    if number == 3:
        flip_bit(chunk, 1000, 17)


def stick(chunk: torch.Tensor, number: int) -> None:
    chunk[5] = int(chunk[5]) | 4


def mirror(chunk: torch.Tensor, number: int) -> None:
    chunk[256] = chunk[0]


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (flip_one_bit, "at byte 0x1f40 bits 0x0000000000020000 are flipped"),
        (stick, "at byte 0x28 bits 0x0000000000000004 are flipped"),
        (mirror, "at byte 0x800 "),
    ],
)
def test_a_fault_of_the_memory_is_found_with_its_address(fault, words, monkeypatch):
    real, count = torch.Tensor.copy_, 0

    def copy(chunk: torch.Tensor, values: torch.Tensor, *arguments, **options) -> torch.Tensor:
        nonlocal count
        real(chunk, values, *arguments, **options)
        count += 1
        fault(chunk, count)
        return chunk

    monkeypatch.setattr(torch.Tensor, "copy_", copy)
    (finding,) = speed.check_memory(QUICK)
    assert finding.status is Status.FAIL and f"1 words are wrong; {words}" in finding.detail


# ------------------------------------------------------------------------------------------------ the disk


def check_disk(tmp_path: Path) -> dict[str, Finding]:
    return by_name(folder.check_disk(CheckOptions(folder=tmp_path, quick=True)))


def test_a_disk_that_is_slow_to_sync_is_warned_of(tmp_path, monkeypatch):
    real = os.fsync

    def fsync(descriptor: int) -> None:
        real(descriptor)
        time.sleep(0.6)

    monkeypatch.setattr(os, "fsync", fsync)
    found = check_disk(tmp_path)
    assert found["disk write"].status is found["disk fsync"].status is Status.WARN
    assert found["disk write"].value < 60 and found["disk fsync"].value > 600
    assert "save_folder" in found["disk fsync"].fix


def test_a_disk_that_gives_other_bytes_back_fails(tmp_path, monkeypatch):
    """One bit is flipped, and two MiB come back whole from each other's place."""
    real, calls = os.fsync, []

    def fsync(descriptor: int) -> None:
        real(descriptor)
        calls.append(descriptor)
        if len(calls) == 1:
            byte = os.pread(descriptor, 1, 5 << 20)
            os.pwrite(descriptor, bytes([byte[0] ^ 1]), 5 << 20)
            first, second = os.pread(descriptor, 1 << 20, 6 << 20), os.pread(descriptor, 1 << 20, 7 << 20)
            os.pwrite(descriptor, second, 6 << 20)
            os.pwrite(descriptor, first, 7 << 20)

    monkeypatch.setattr(os, "fsync", fsync)
    found = check_disk(tmp_path)["disk read"]
    assert found.status is Status.FAIL
    assert "3 of 32 MiB are not what was written; MiB 5 from byte 5,242,880 on; MiB 6 from" in found.detail


def test_a_file_that_ends_too_early_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "read", lambda descriptor, size: b"")
    found = check_disk(tmp_path)["disk read"]
    assert found.status is Status.FAIL and "the file ends after 0 of " in found.detail


def test_a_disk_that_reads_at_5_mb_a_second_is_warned_of(tmp_path, monkeypatch):
    monkeypatch.setattr(folder, "LIMIT_SECONDS", 0.5)
    real = os.read

    def read(descriptor: int, size: int) -> bytes:
        time.sleep(size / 5e6)
        return real(descriptor, size)

    monkeypatch.setattr(os, "read", read)
    found = check_disk(tmp_path)["disk read"]
    assert found.status is Status.WARN and 0.1 < found.value < 5.1
    assert "100 MB/s is the least" in found.detail and "save_folder" in found.fix


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """A file system of 2 MiB that is full."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(tmp_path)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("may not mount a file system here")
    with open(tmp_path / "other", "wb") as file:
        try:
            file.write(bytes(4 << 20))
            file.flush()
        except OSError as error:
            assert error.errno == errno.ENOSPC
            file.truncate(2 << 20)
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_full_disk_fails_and_says_what_to_do(small_disk):
    found = check_disk(small_disk)
    assert found["disk free"].status is Status.WARN and "it is memory" in found["disk free"].detail
    assert found["disk write"].status is Status.FAIL
    assert "No space left on device" in found["disk write"].detail
    assert f"free space in {small_disk}" in found["disk write"].fix


def test_a_folder_that_is_not_there_fails_with_the_command_that_makes_it(tmp_path):
    (finding,) = folder.check_disk(CheckOptions(folder=tmp_path / "none"))
    assert finding.status is Status.FAIL and finding.fix.startswith(f"mkdir -p {tmp_path}/none")


# ----------------------------------------------------------------------------------------------------- bucket


def check_bucket(name: str) -> dict[str, Finding]:
    return by_name(folder.check_disk(CheckOptions(folder=f"memory://doctor/{name}", quick=True)))


def test_a_sound_bucket_passes_and_nothing_stays_in_it():
    found = check_bucket("sound")
    assert [*found] == ["bucket write", "bucket read", "bucket lease", "bucket remove"]
    assert {one.status for one in found.values()} == {Status.PASS}
    assert open_folder("memory://doctor/sound").names() == []


def test_a_bucket_where_a_lease_can_be_taken_twice_fails(monkeypatch):
    put = RemoteFolder.put
    monkeypatch.setattr(RemoteFolder, "put", lambda self, name, data, **_: put(self, name, data))
    found = check_bucket("twice")["bucket lease"]
    assert found.status is Status.FAIL and "two launches of a run could save at once" in found.detail


def test_a_bucket_that_lists_late_or_returns_other_bytes_fails(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(RemoteFolder, "sizes", lambda self: {})
        found = check_bucket("late")["bucket read"]
    assert found.status is Status.FAIL and "the listing shows None bytes" in found.detail

    def read_zeros(self, offset, buffers):
        for buffer in buffers:
            buffer[:] = bytes(len(buffer))

    monkeypatch.setattr(RemoteSource, "read_into", read_zeros)
    found = check_bucket("zeros")["bucket read"]
    assert found.status is Status.FAIL and "32 of 32 MiB are not what was written" in found.detail


def test_credentials_that_may_not_write_or_remove_fail_with_what_they_lack(monkeypatch):
    def refuse(self, *arguments, **options):
        raise PermissionError(errno.EACCES, "Access Denied")

    with monkeypatch.context() as patch:
        patch.setattr(RemoteFolder, "remove_all", refuse)
        found = check_bucket("keeps")["bucket remove"]
    assert found.status is Status.FAIL and "Access Denied" in found.detail
    assert "read, write, list and delete in memory://doctor/keeps" in found.fix
    monkeypatch.setattr(RemoteFolder, "sink", refuse)
    (found,) = check_bucket("closed").values()
    assert (found.check, found.status) == ("bucket write", Status.FAIL)


# ------------------------------------------------------------------------------------------------ collectives


def swap_halves(rank: int) -> None:
    """Everything arrives, in the wrong place."""
    real = collectives.all_gather_single

    def all_gather(out: torch.Tensor, values: torch.Tensor):
        real(out, values)
        out.copy_(out.roll(len(values)))

    collectives.all_gather_single = all_gather


def move_by_251(rank: int) -> None:
    real = dist.broadcast

    def broadcast(values: torch.Tensor, src: int):
        real(values, src)
        if len(values) > 1000:
            values.copy_(values.roll(251))

    dist.broadcast = broadcast


def run_an_hour_ahead(rank: int) -> None:
    if rank == 1:
        real = time.time
        time.time = lambda: real() + 3600


def hang(rank: int) -> None:
    if rank == 1:
        signal.pause()


def die(rank: int) -> None:
    dist.barrier()  # else it may be gone before the other has its process group
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def corrupt_one_element(rank: int) -> None:
    """The last rank's part of a large reduction arrives with one element off by one."""
    real = dist.all_reduce

    def all_reduce(values: torch.Tensor, *arguments, **options):
        if rank == dist.get_world_size() - 1 and len(values) > 1000:
            values[1000] += 1
        return real(values, *arguments, **options)

    dist.all_reduce = all_reduce


def check_broken(fault: Callable[[int], None], machine: CheckOptions) -> Iterator[Finding]:
    """Each rank, a fork of this process, meets the fault when its process group stands."""
    real = collectives.read_clock

    def read_clock(device: torch.device) -> collectives.RankResult:
        fault(dist.get_rank())
        return real(device)

    collectives.read_clock = read_clock
    yield from collectives.check_collectives(machine)


def examine_collectives(fault: Callable[[int], None], **options) -> dict[str, Finding]:
    return by_name(examine(CheckOptions(quick=True, **options), {"collectives": partial(check_broken, fault)}))


@pytest.mark.multiprocess
def test_whole_collectives_pass_on_three_ranks():
    found = examine_collectives(abs, num_ranks=3)
    assert list(found) == [collectives.READY, collectives.CLOCKS, *collectives.COLLECTIVES]
    assert {finding.status for finding in found.values()} == {Status.PASS}


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("fault", "broken", "words"),
    [
        (corrupt_one_element, "all_reduce", "rank 0 got 1 of 262144 elements wrong, the first at 1000: "),
        (swap_halves, "all_gather", ""),
        (move_by_251, "broadcast", ""),
    ],
)
def test_elements_that_are_wrong_or_have_moved_fail_that_collective_alone(fault, broken, words):
    found = examine_collectives(fault)
    assert failed(found) == {broken} and words in found[broken].detail


@pytest.mark.multiprocess
def test_ranks_whose_clocks_are_an_hour_apart_are_warned_of():
    found = examine_collectives(run_an_hour_ahead)[collectives.CLOCKS]
    assert found.status is Status.WARN and found.value == pytest.approx(3600e3, abs=1e3)
    assert "2 ranks on 1 host, read right after a barrier; rank 1 on " in found.detail


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("fault", "limit_seconds", "words"),
    [(die, 10 * CheckOptions().limit_seconds, "rank 1 was killed by SIGKILL"), (hang, 4, "")],
)
def test_a_rank_that_dies_or_hangs_ends_the_check_in_time(fault, limit_seconds, words):
    """A death ends the check long before its limit; a hang ends it at the limit, here 4 s."""
    found = examine_collectives(fault, ranks_limit_seconds=limit_seconds)
    assert list(found) == [collectives.READY, collectives.CLOCKS]
    detail = found[collectives.CLOCKS].detail
    assert found[collectives.CLOCKS].status is Status.FAIL and words in detail
    assert words or "within 4 s" in detail or "Timed out" in detail


def test_a_rank_that_dies_before_others_have_come_as_far_is_the_reason():
    found = collectives.summarise_step(collectives.READY, {1: collectives.RankResult()}, {1: "was killed"}, 2, 1, 1200)
    assert found.detail == "2 ranks over gloo: rank 1 was killed"


# ------------------------------------------------------------------------------------------------ clocks


@pytest.mark.parametrize(("ahead", "status"), [(0, Status.PASS), (3600, Status.WARN)])
def test_a_clock_that_is_not_kept_right_and_not_the_file_server_s_is_warned_of(ahead, status, tmp_path, monkeypatch):
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + ahead)
    monkeypatch.setattr(folder, "kernel_clock_status", lambda: folder.STA_UNSYNC * bool(ahead))
    monkeypatch.setattr(folder, "is_shared", lambda path: True)
    found = by_name(folder.check_clock(CheckOptions(folder=tmp_path)))
    assert [finding.status for finding in found.values()] == [status, status]
    assert found["clock of the folder"].value == pytest.approx(-ahead * 1e3, rel=1e-3, abs=100)


def test_a_kernel_that_does_not_tell_and_a_local_folder_are_no_reason_to_warn(tmp_path, monkeypatch):
    monkeypatch.setattr(folder, "kernel_clock_status", lambda: None)
    found = by_name(folder.check_clock(CheckOptions(folder=tmp_path)))
    assert [finding.status for finding in found.values()] == [Status.SKIP, Status.SKIP]


# ------------------------------------------------------------------------------------------------ bandwidth


@pytest.mark.parametrize(("slower", "status"), [(4.0e12, Status.PASS), (1.2e12, Status.WARN)])
def test_a_device_slower_than_its_datasheet_is_warned_of(slower, status):
    finding = speed.compare_with_datasheet("memory copy", [4.1e12, slower], [4.8e12, 4.8e12], 0.6)
    assert finding.status is status and bool(finding.fix) == (status is Status.WARN)
    assert finding.detail.startswith(f"device 1, the slowest of 2; {slower / 4.8e12:.0%} of the datasheet's 4,800")


def test_a_copy_within_a_device_counts_what_it_reads_and_what_it_writes(monkeypatch):
    """A datasheet's bandwidth is of both: half of it would make every healthy device a slow one."""
    h200 = ACCELERATORS["H200"]
    monkeypatch.setattr(speed, "device_type", lambda: "cpu")  # no bus, no matrix units
    monkeypatch.setattr(speed, "all_devices", lambda: [torch.device("cpu")] * 2)
    monkeypatch.setattr(speed, "accelerator", lambda device: h200)
    seconds_per_byte = 2 / (0.9 * h200.memory_bandwidth_bytes_per_second)
    monkeypatch.setattr(speed, "measure_copy", lambda size, repeats, source, target: size * seconds_per_byte)
    (finding,) = speed.check_bandwidth(QUICK)
    assert finding.status is Status.PASS and "90% of the datasheet's" in finding.detail
