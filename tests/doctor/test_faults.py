"""Machines that are broken in one place: a bit, a disk, a link, a rank. The real checks run, and must say so."""

import ctypes
import errno
import os
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from llmfoundry_lite.doctor import bandwidth, clock, collectives, disk, gemm, memory
from llmfoundry_lite.doctor.examine import examine
from llmfoundry_lite.doctor.finding import Finding, Machine, Status

QUICK = Machine(quick=True)


def by_name(findings: Iterable[Finding]) -> dict[str, Finding]:
    findings = list(findings)
    assert all(finding.fix for finding in findings if finding.status in (Status.WARN, Status.FAIL))
    return {finding.check: finding for finding in findings}


def statuses(findings: Iterable[Finding]) -> dict[str, Status]:
    return {name: finding.status for name, finding in by_name(findings).items()}


def flip_bit(values: torch.Tensor, index: int, bit: int) -> None:
    """Of a contiguous tensor on the CPU, whatever its dtype."""
    address = values.data_ptr() + index * values.element_size() + bit // 8
    ctypes.c_uint8.from_address(address).value ^= 1 << bit % 8


# ------------------------------------------------------------------------------------------------ matrix products


@pytest.mark.parametrize(("dtype", "bit"), [(torch.float32, 8), (torch.bfloat16, 0), (torch.float16, 0)])
@pytest.mark.parametrize("where", ["input", "output"])
def test_one_low_bit_that_is_always_flipped_in_one_precision_is_found_there_alone(dtype, bit, where):
    """fp32's lowest bit of an input is below what a sum of 256 keeps, so bit 8 is flipped there."""

    def multiply(a_mk: torch.Tensor, b_kn: torch.Tensor) -> torch.Tensor:
        if a_mk.dtype == dtype and where == "input":
            a_mk = a_mk.clone()
            flip_bit(a_mk, 777, bit)
        result_mn = a_mk @ b_kn
        if a_mk.dtype == dtype and where == "output":
            flip_bit(result_mn, 4321, bit)
        return result_mn

    found = by_name(gemm.check(QUICK, multiply))
    broken = f"gemm {gemm.NAMES[dtype]}"
    assert {name for name, finding in found.items() if finding.status is Status.FAIL} == {broken}
    assert "sums are wrong" in found[broken].detail


def test_a_bit_that_flips_now_and_then_is_found_by_computing_again():
    calls = []

    def multiply(a_mk: torch.Tensor, b_kn: torch.Tensor) -> torch.Tensor:
        result_mn = a_mk @ b_kn
        calls.append(a_mk)
        if len(calls) == 3:  # the second of the real products, lowest bit: within every bound
            flip_bit(result_mn, 99, 0)
        return result_mn

    found = by_name(gemm.check(QUICK, multiply))
    assert "1 of 65536 sums changed" in found["gemm fp32"].detail
    assert found["gemm bf16"].status is found["gemm fp16"].status is Status.PASS


def test_products_in_tf32_are_not_taken_for_fp32():
    def multiply(a_mk: torch.Tensor, b_kn: torch.Tensor) -> torch.Tensor:
        def to_tf32(values: torch.Tensor) -> torch.Tensor:  # 10 bits of fraction of 23
            return (values.view(torch.int32) & ~0x1FFF).view(torch.float32) if values.dtype == torch.float32 else values

        return to_tf32(a_mk) @ to_tf32(b_kn)

    found = by_name(gemm.check(QUICK, multiply))
    assert found["gemm fp32"].status is Status.FAIL and "TF32 although" in found["gemm fp32"].detail
    assert "NVIDIA_TF32_OVERRIDE" in found["gemm fp32"].fix


def test_a_product_that_is_not_a_number_is_wrong():
    found = by_name(gemm.check(QUICK, lambda a_mk, b_kn: (a_mk @ b_kn) * float("nan")))
    assert {finding.status for finding in found.values()} == {Status.FAIL}


def test_sums_carried_in_bf16_exceed_the_bound():
    """Signs stay exact in bf16, so only the real numbers show it."""

    def multiply(a_mk: torch.Tensor, b_kn: torch.Tensor) -> torch.Tensor:
        if a_mk.dtype != torch.bfloat16:
            return a_mk @ b_kn
        total = torch.zeros(a_mk.shape[0], b_kn.shape[1], dtype=torch.bfloat16)
        for part in range(0, a_mk.shape[1], 32):
            total += a_mk[:, part : part + 32] @ b_kn[part : part + 32]
        return total

    found = by_name(gemm.check(QUICK, multiply))
    assert "times what rounding allows" in found["gemm bf16"].detail


# ------------------------------------------------------------------------------------------------ memory


def test_a_flipped_bit_in_memory_is_found_with_its_address():
    count = 0

    def write(chunk: torch.Tensor, values: torch.Tensor) -> None:
        nonlocal count
        chunk.copy_(values)
        count += 1
        if count == 3:
            flip_bit(chunk, 1000, 17)

    (finding,) = memory.check(QUICK, write)
    assert finding.status is Status.FAIL
    assert "1 words are wrong; at byte 0x1f40 bits 0x0000000000020000 are flipped" in finding.detail


def test_a_bit_that_is_stuck_is_found_whichever_way():
    for stick in (lambda word: word & ~4, lambda word: word | 4):

        def write(chunk: torch.Tensor, values: torch.Tensor, stick=stick) -> None:
            chunk.copy_(values)
            chunk[5] = stick(int(chunk[5]))

        (finding,) = memory.check(QUICK, write)
        assert finding.status is Status.FAIL


def test_two_addresses_that_are_one_are_found():
    def write(chunk: torch.Tensor, values: torch.Tensor) -> None:
        chunk.copy_(values)
        chunk[256] = chunk[0]

    (finding,) = memory.check(QUICK, write)
    assert finding.status is Status.FAIL and "1 words are wrong; at byte 0x800 " in finding.detail


# ------------------------------------------------------------------------------------------------ the disk


def test_a_disk_that_is_slow_to_sync_is_warned_of(tmp_path):
    def fsync(descriptor: int) -> None:
        os.fsync(descriptor)
        time.sleep(0.6)

    found = by_name(disk.check(Machine(folder=tmp_path, quick=True), fsync))
    assert found["disk write"].status is found["disk fsync"].status is Status.WARN
    assert found["disk write"].value < 60 and found["disk fsync"].value > 600
    assert "save_folder" in found["disk fsync"].fix
    assert found["disk read"].status is Status.PASS


def test_a_disk_that_gives_other_bytes_back_fails(tmp_path):
    def fsync(descriptor: int) -> None:
        os.fsync(descriptor)
        byte = os.pread(descriptor, 1, 5 << 20)
        os.pwrite(descriptor, bytes([byte[0] ^ 1]), 5 << 20)

    found = by_name(disk.check(Machine(folder=tmp_path, quick=True), fsync))
    assert found["disk read"].status is Status.FAIL
    assert "1 of 32 MiB are not what was written, from MiB 5 on" in found["disk read"].detail


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
    found = by_name(disk.check(Machine(folder=small_disk, quick=True)))
    assert found["disk free"].status is Status.WARN and "it is memory" in found["disk free"].detail
    assert found["disk write"].status is Status.FAIL
    assert "No space left on device" in found["disk write"].detail
    assert f"free space in {small_disk}" in found["disk write"].fix


def test_a_folder_that_is_not_there_fails_with_the_command_that_makes_it(tmp_path):
    (finding,) = disk.check(Machine(folder=tmp_path / "none"))
    assert finding.status is Status.FAIL and finding.fix.startswith(f"mkdir -p {tmp_path}/none")


# ------------------------------------------------------------------------------------------------ collectives


def corrupt_one_element(rank: int) -> None:
    """The last rank's part of a large reduction arrives with one element off by one."""
    real = dist.all_reduce

    def all_reduce(values: torch.Tensor, *arguments, **options):
        if rank == dist.get_world_size() - 1 and len(values) > 1000:
            values[1000] += 1
        return real(values, *arguments, **options)

    dist.all_reduce = all_reduce


def swap_halves(rank: int) -> None:
    """Everything arrives, in the wrong place."""
    real = dist.all_gather_into_tensor

    def all_gather(out: torch.Tensor, values: torch.Tensor):
        real(out, values)
        out.copy_(out.roll(len(values)))

    dist.all_gather_into_tensor = all_gather


def die(rank: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def hang(rank: int) -> None:
    if rank == 1:
        signal.pause()


def examine_collectives(sabotage=None, **options) -> dict[str, Finding]:
    check = partial(collectives.check, sabotage=sabotage)
    return by_name(examine(Machine(quick=True, **options), {"collectives": check}))


@pytest.mark.multiprocess
def test_whole_collectives_pass_on_three_ranks():
    found = examine_collectives(num_ranks=3)
    assert set(found) == {collectives.READY, *collectives.COLLECTIVES}
    assert {finding.status for finding in found.values()} == {Status.PASS}


@pytest.mark.multiprocess
def test_one_wrong_element_of_one_rank_fails_that_collective_alone():
    found = examine_collectives(corrupt_one_element)
    assert {name for name, finding in found.items() if finding.status is Status.FAIL} == {"all_reduce"}
    assert "rank 0 got 1 of 262144 elements wrong, the first at 1000: " in found["all_reduce"].detail


@pytest.mark.multiprocess
def test_right_elements_in_the_wrong_place_fail():
    found = examine_collectives(swap_halves)
    assert {name for name, finding in found.items() if finding.status is Status.FAIL} == {"all_gather"}


@pytest.mark.multiprocess
def test_a_rank_that_dies_is_named_well_before_the_time_is_up():
    began = time.monotonic()
    found = examine_collectives(die)
    assert time.monotonic() - began < Machine().ranks_limit_seconds / 2
    assert list(found) == [collectives.READY, "all_reduce"]
    assert found["all_reduce"].status is Status.FAIL
    assert "rank 1 was killed by SIGKILL" in found["all_reduce"].detail


@pytest.mark.multiprocess
def test_a_rank_that_hangs_ends_with_the_checks_own_time():
    found = examine_collectives(hang, ranks_limit_seconds=4)
    assert list(found) == [collectives.READY, "all_reduce"]
    assert found["all_reduce"].status is Status.FAIL
    assert "within 4 s" in found["all_reduce"].detail or "Timed out" in found["all_reduce"].detail


# ------------------------------------------------------------------------------------------------ clocks


def test_a_clock_that_jumps_and_is_not_kept_right_is_warned_of(tmp_path):
    began = time.time()

    def wall() -> float:
        now = time.time()
        return now + 3600 * (now > began + 0.1)

    found = by_name(clock.check(Machine(folder=tmp_path, quick=True), wall, lambda: clock.STA_UNSYNC))
    assert {name: finding.status for name, finding in found.items()} == dict.fromkeys(found, Status.WARN)
    assert found["clock pace"].value == pytest.approx(3600e3, rel=1e-3)
    assert found["clock of the folder"].value == pytest.approx(-3600e3, rel=1e-3)


def test_a_kernel_that_does_not_tell_is_no_reason_to_warn(tmp_path):
    found = statuses(clock.check(Machine(folder=tmp_path, quick=True), kernel_status=lambda: None))
    assert found == {"clock pace": Status.PASS, "clock": Status.SKIP, "clock of the folder": Status.PASS}


# ------------------------------------------------------------------------------------------------ bandwidth


@pytest.mark.parametrize(("slower", "status"), [(4.0e12, Status.PASS), (1.2e12, Status.WARN)])
def test_a_device_slower_than_its_datasheet_is_warned_of(slower, status):
    devices = [torch.device("cuda", 0), torch.device("cuda", 1)]
    finding = bandwidth.judge_rates("memory copy", [4.1e12, slower], devices, [4.8e12, 4.8e12], 0.6)
    assert finding.status is status and bool(finding.fix) == (status is Status.WARN)
    assert finding.detail.startswith(f"cuda:1, the slowest of 2; {slower / 4.8e12:.0%} of the datasheet's 4,800")
