"""Machines that are broken in one place: a bit, a disk, a link, a rank. The real checks run, and must say so."""

import ctypes
import errno
import itertools
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from llmfoundry_lite.doctor import bandwidth, clock, collectives, disk, gemm, memory
from llmfoundry_lite.doctor.examine import examine
from llmfoundry_lite.doctor.finding import Finding, Machine, Status
from tests.helpers.findings import QUICK, by_name, corrupt_one_element, die


def flip_bit(values: torch.Tensor, index: int, bit: int) -> None:
    """Of a contiguous tensor on the CPU, whatever its dtype."""
    address = values.data_ptr() + index * values.element_size() + bit // 8
    ctypes.c_uint8.from_address(address).value ^= 1 << bit % 8


# ------------------------------------------------------------------------------------------------ matrix products


@pytest.mark.slow
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


@pytest.mark.long
@pytest.mark.parametrize("dtype", list(gemm.NAMES))
def test_products_that_are_wrong_in_long_sums_alone_are_found(dtype):
    """The part of a sum behind its 256th product is lost."""

    def multiply(a_mk: torch.Tensor, b_kn: torch.Tensor) -> torch.Tensor:
        end = 256 if a_mk.dtype == dtype else None
        return a_mk[:, :end] @ b_kn[:end]

    found = by_name(gemm.check(QUICK, multiply))
    broken = f"gemm {gemm.NAMES[dtype]}"
    assert {name for name, finding in found.items() if finding.status is Status.FAIL} == {broken}
    assert "64 x 768 x 2304 of MPT-125M: " in found[broken].detail


@pytest.mark.long
@pytest.mark.parametrize("dtype", list(gemm.NAMES))
def test_one_wrong_product_in_twenty_is_found(dtype):
    count = 0

    def multiply(a_mk: torch.Tensor, b_kn: torch.Tensor) -> torch.Tensor:
        nonlocal count
        result_mn = a_mk @ b_kn
        count += a_mk.dtype == dtype
        if a_mk.dtype == dtype and count % 20 == 19:
            flip_bit(result_mn, 99, 0)
        return result_mn

    found = by_name(gemm.check(QUICK, multiply))
    broken = f"gemm {gemm.NAMES[dtype]}"
    assert {name for name, finding in found.items() if finding.status is Status.FAIL} == {broken}
    assert "(5 of 99 times)" in found[broken].detail


def test_large_products_that_are_wrong_now_and_then_are_found(monkeypatch):
    """Every fifth, and only those of more than 256 terms."""
    monkeypatch.setattr(gemm, "LAYER_SECONDS", 60.0)  # this machine may be busy
    count = 0

    def multiply(a_mk: torch.Tensor, b_kn: torch.Tensor) -> torch.Tensor:
        nonlocal count
        product_mn = a_mk.float() @ b_kn.float()  # much faster on most CPUs
        if a_mk.dtype == torch.float32 and a_mk.shape[1] > 256:
            count += 1
            product_mn[3, 5] += 2 * (count % 5 == 4)
        return product_mn.to(a_mk.dtype)

    found = by_name(gemm.check(QUICK, multiply))
    assert found["gemm fp32"].status is Status.FAIL
    assert "768 x 2304 of MPT-125M: 1 of 147456 sums changed" in found["gemm fp32"].detail


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

    kind = disk.OTHER._replace(read_bytes_per_second=0.0)  # this machine's own disk may be busy
    found = by_name(disk.check(Machine(folder=tmp_path, quick=True), fsync, kind=kind))
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
    assert "1 of 32 MiB are not what was written: MiB 5 at byte 5,242,880 holds other" in found["disk read"].detail


def test_blocks_that_come_back_from_another_place_are_found(tmp_path):
    """Every MiB comes back whole, from the place where its neighbour was written."""

    def fsync(descriptor: int) -> None:
        os.fsync(descriptor)
        first, second = os.pread(descriptor, 1 << 20, 6 << 20), os.pread(descriptor, 1 << 20, 7 << 20)
        if first[:8] == second[:8] and first[8:16] < second[8:16]:  # once
            os.pwrite(descriptor, second, 6 << 20)
            os.pwrite(descriptor, first, 7 << 20)

    found = by_name(disk.check(Machine(folder=tmp_path, quick=True), fsync))["disk read"]
    assert found.status is Status.FAIL
    assert "2 of 32 MiB are not what was written: MiB 6 at byte 6,291,456 holds what was written to byte 7,340,032" in (
        found.detail
    )


def test_a_file_that_ends_too_early_fails(tmp_path):
    parts = iter([b"", b""])
    machine = Machine(folder=tmp_path, num_ranks=1, quick=True)
    findings = {f.check: f for f in disk.check(machine, read=lambda _descriptor, _size: next(parts))}
    assert findings["disk read"].status is Status.FAIL
    assert "the file ends after 0 of " in findings["disk read"].detail


def test_a_disk_that_reads_at_5_mb_a_second_is_warned_of(tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "LIMIT_SECONDS", 0.5)

    def read(descriptor: int, size: int) -> bytes:
        time.sleep(size / 5e6)
        return os.read(descriptor, size)

    found = by_name(disk.check(Machine(folder=tmp_path, quick=True), read=read, kind=disk.NVME))["disk read"]
    assert found.status is Status.WARN and 0.1 < found.value < 5.1
    assert "300 MB/s is the least for a disk on NVMe" in found.detail and "save_folder" in found.fix


@pytest.mark.parametrize(
    ("name", "rotational", "kind"), [("nvme0n1", 0, "disk on NVMe"), ("sda", 0, "solid-state disk")]
)
@pytest.mark.parametrize("is_partition", [False, True])
def test_the_kind_of_a_disk_is_read_from_the_system(tmp_path, monkeypatch, name, rotational, kind, is_partition):
    monkeypatch.setattr(disk, "_file_system", lambda folder: "ext4")
    device = tmp_path / "sys/devices" / name
    (device / "queue").mkdir(parents=True)
    (device / "queue/rotational").write_text("0\n")
    (device / "part1").mkdir()
    number = tmp_path.stat().st_dev
    link = tmp_path / f"sys/dev/block/{os.major(number)}:{os.minor(number)}"
    link.parent.mkdir(parents=True)
    link.symlink_to(device / "part1" if is_partition else device)
    assert disk.find_kind(tmp_path, tmp_path).name == kind
    (device / "queue/rotational").write_text("1\n")
    assert disk.find_kind(tmp_path, tmp_path).name == ("turning disk" if name == "sda" else kind)
    monkeypatch.setattr(disk, "_file_system", lambda folder: "nfs4")
    assert disk.find_kind(tmp_path, tmp_path) is disk.NETWORK


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


def swap_halves(rank: int) -> None:
    """Everything arrives, in the wrong place."""
    real = dist.all_gather_into_tensor

    def all_gather(out: torch.Tensor, values: torch.Tensor):
        real(out, values)
        out.copy_(out.roll(len(values)))

    dist.all_gather_into_tensor = all_gather


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


def examine_collectives(sabotage=None, **options) -> dict[str, Finding]:
    check = partial(collectives.check, sabotage=sabotage)
    return by_name(examine(Machine(quick=True, **options), {"collectives": check}))


@pytest.mark.multiprocess
def test_whole_collectives_pass_on_three_ranks():
    found = examine_collectives(num_ranks=3)
    assert set(found) == {collectives.READY, collectives.CLOCKS, *collectives.COLLECTIVES}
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
def test_elements_that_moved_by_a_short_period_fail():
    found = examine_collectives(move_by_251)
    assert {name for name, finding in found.items() if finding.status is Status.FAIL} == {"broadcast"}


@pytest.mark.multiprocess
def test_ranks_whose_clocks_are_an_hour_apart_are_warned_of():
    found = examine_collectives(run_an_hour_ahead)[collectives.CLOCKS]
    assert found.status is Status.WARN and found.value == pytest.approx(3600e3, abs=1e3)
    assert "2 ranks on 1 host, read right after a barrier; rank 1 on " in found.detail


@pytest.mark.multiprocess
def test_a_rank_that_dies_is_named_well_before_the_time_is_up():
    found = examine_collectives(die, ranks_limit_seconds=10 * Machine().limit_seconds)  # else the check would be ended
    assert list(found) == [collectives.READY, collectives.CLOCKS]
    assert found[collectives.CLOCKS].status is Status.FAIL
    assert "rank 1 was killed by SIGKILL" in found[collectives.CLOCKS].detail


@pytest.mark.multiprocess
def test_a_rank_that_hangs_ends_with_the_checks_own_time():
    found = examine_collectives(hang, ranks_limit_seconds=4)
    assert list(found) == [collectives.READY, collectives.CLOCKS]
    words = found[collectives.CLOCKS].detail
    assert found[collectives.CLOCKS].status is Status.FAIL and ("within 4 s" in words or "Timed out" in words)


# ------------------------------------------------------------------------------------------------ clocks


def test_a_clock_that_jumps_and_is_not_kept_right_is_warned_of(tmp_path, monkeypatch):
    slept = []
    monkeypatch.setattr(time, "sleep", slept.append)

    def wall() -> float:
        return time.time() + 3600 * bool(slept)

    found = check_clock(
        tmp_path, wall, kernel_status=lambda: clock.STA_UNSYNC, board=time.time, is_shared=lambda folder: True
    )
    warned = {name for name, finding in found.items() if finding.status is Status.WARN}
    assert warned == {"clock pace", "clock", "clock of the folder", "clock of the board"}
    assert found["clock pace"].value == pytest.approx(3600e3, rel=1e-3)
    assert found["clock of the folder"].value == pytest.approx(-3600e3, rel=1e-3)


def check_clock(folder, *arguments, **options):
    options = {"dated": (), "kernel_status": lambda: 0, **options}
    return by_name(clock.check(Machine(folder=folder, quick=True), *arguments, **options))


def test_a_machine_that_is_busy_between_two_readings_has_no_clock_that_jumps(tmp_path):
    """Another process may have the processor just then; one reading in three, here."""
    count, sleep = itertools.count(), time.sleep

    def wall() -> float:
        now = time.time()
        if next(count) % 3 == 0:
            sleep(0.05)
        return now

    found = check_clock(tmp_path, wall)["clock pace"]
    assert found.status is Status.PASS and abs(found.value) < 10, found


@pytest.mark.parametrize("hours", [-1, 1])
def test_an_hour_s_error_is_found_without_a_file_server(tmp_path, hours):
    """The clock runs evenly and the disk's times are its own: the board's clock alone knows."""
    found = check_clock(tmp_path, board=lambda: time.time() - 3600 * hours)
    assert {name for name, finding in found.items() if finding.status is Status.WARN} == {"clock of the board"}
    assert found["clock of the board"].value == pytest.approx(-3600 * hours, abs=1)
    assert found["clock of the folder"].status is Status.SKIP
    assert "nothing was compared" in found["clock of the folder"].detail


def test_a_clock_that_was_set_back_is_found_by_files_from_the_future(tmp_path):
    (tmp_path / "ba100").mkdir()
    (tmp_path / "ba100/manifest.json").touch()
    os.utime(tmp_path / "ba100/manifest.json", (time.time() + 3600,) * 2)
    found = check_clock(tmp_path)["clock and files"]
    assert found.status is Status.WARN and found.value == pytest.approx(3600, abs=5)
    assert "ba100/manifest.json was written 3,600 s in the future" in found.detail


def test_a_hardware_clock_that_counts_local_time_is_not_hours_wrong(tmp_path, monkeypatch):
    monkeypatch.setenv("TZ", "Europe/Helsinki")
    time.tzset()
    try:
        (tmp_path / "sys/class/rtc/rtc0").mkdir(parents=True)
        (tmp_path / "sys/class/rtc/rtc0/since_epoch").write_text("1700007200\n")
        assert clock._board_clock(tmp_path) == 1700007200
        (tmp_path / "etc").mkdir()
        (tmp_path / "etc/adjtime").write_text("0.0 0 0.0\n0\nLOCAL\n")
        assert clock._board_clock(tmp_path) == 1700000000
    finally:
        monkeypatch.undo()
        time.tzset()
    assert clock._board_clock(tmp_path / "none") is None


def test_a_kernel_that_does_not_tell_is_no_reason_to_warn(tmp_path):
    found = check_clock(tmp_path, kernel_status=lambda: None, board=lambda: None, is_shared=lambda folder: True)
    assert {name: finding.status for name, finding in found.items()} == {
        "clock pace": Status.PASS,
        "clock": Status.SKIP,
        "clock of the folder": Status.PASS,
        "clock of the board": Status.SKIP,
        "clock and files": Status.PASS,
    }


# ------------------------------------------------------------------------------------------------ bandwidth


@pytest.mark.parametrize(("slower", "status"), [(4.0e12, Status.PASS), (1.2e12, Status.WARN)])
def test_a_device_slower_than_its_datasheet_is_warned_of(slower, status):
    devices = [torch.device("cuda", 0), torch.device("cuda", 1)]
    finding = bandwidth.judge_rates("memory copy", [4.1e12, slower], devices, [4.8e12, 4.8e12], 0.6)
    assert finding.status is status and bool(finding.fix) == (status is Status.WARN)
    assert finding.detail.startswith(f"cuda:1, the slowest of 2; {slower / 4.8e12:.0%} of the datasheet's 4,800")
