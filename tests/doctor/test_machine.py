"""What a machine has and has not, and how the whole examination behaves."""

import io
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from llmfoundry_lite.cli import main
from llmfoundry_lite.data import shared_memory as blocks_of_runs
from llmfoundry_lite.doctor import devices, limits, shared_memory, versions
from llmfoundry_lite.doctor.devices import Device
from llmfoundry_lite.doctor.examine import CHECKS, as_dict, examine, exit_code, print_table
from llmfoundry_lite.doctor.finding import Finding, Machine, Status
from llmfoundry_lite.doctor.versions import Build
from llmfoundry_lite.hardware import GIB
from tests.doctor.broken_checks import answer, crash, hang, segfault
from tests.helpers.findings import QUICK, by_name

# ------------------------------------------------------------------------------------------------ devices


def check_devices(*found: Device) -> dict[str, Finding]:
    return by_name(devices.check(QUICK, found))


def test_four_mi250_cards_are_eight_devices_of_a_known_kind():
    found = check_devices(*[Device("AMD Instinct MI250X/MI250", 104, 64 * GIB, 63 * GIB)] * 8)
    assert found["devices"].status is Status.PASS and found["devices"].value == "8"
    assert "8 x AMD Instinct MI250X/MI250" in found["devices"].detail
    assert "2 of them are one MI250 card" in found["devices"].detail


def test_half_a_card_missing_is_warned_of():
    found = check_devices(*[Device("AMD Instinct MI250X/MI250", 104, 64 * GIB, 63 * GIB)] * 7)
    assert found["devices"].status is Status.WARN and "half a card is missing" in found["devices"].detail


def test_a_device_that_the_table_does_not_know_gets_no_mfu():
    found = check_devices(Device("Voodoo 3", 1, 16 << 20, 16 << 20))
    assert found["devices"].status is Status.WARN
    assert "Voodoo 3 with 1 compute units is not in hardware.py: no MFU will be given" in found["devices"].detail


def test_devices_of_two_kinds_and_one_in_use_are_warned_of():
    a100 = Device("NVIDIA A100-SXM4-80GB", 108, 80 * GIB, 79 * GIB)
    found = check_devices(a100, Device("NVIDIA H100 80GB HBM3", 132, 80 * GIB, 20 * GIB))
    assert "not all the same" in found["devices"].detail
    assert found["device memory free"].status is Status.WARN and "device 1" in found["device memory free"].detail


# ------------------------------------------------------------------------------------------------ versions

CUDA_BUILD = Build(torch="2.13.0+cu130", cuda="13.0", hip=None, num_devices=0)
ROCM_BUILD = Build(torch="2.11.0a0+git1234", cuda=None, hip="7.1", num_devices=8)
CPU_BUILD = Build(torch="2.13.0+cpu", cuda=None, hip=None, num_devices=0)


KFD = "sys/class/kfd/kfd/topology/nodes/1/properties"
CONTENTS = {
    "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\n",
    KFD: "cpu_cores_count 0\nsimd_count 416\n",
}


def make_root(folder: Path, *files: str) -> Path:
    """A machine's device files and drivers."""
    for name in files:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(CONTENTS.get(name, ""))
    return folder


def check_torch(monkeypatch, build: Build, root: Path) -> dict[str, Finding]:
    monkeypatch.setattr(versions, "_check_communication", lambda build: ())  # asks a library that is not here
    return by_name(versions.check(QUICK, build, root))


@pytest.mark.parametrize("torch", ["2.10.2+cu128", "2.4.0"])
def test_a_torch_that_is_too_old_fails(torch, monkeypatch, tmp_path):
    build = Build(torch=torch, cuda=None, hip=None, num_devices=0)
    found = check_torch(monkeypatch, build, tmp_path)["torch"]
    assert found.status is Status.FAIL and found.value == torch and "2.11 is the oldest" in found.detail


def test_the_torch_of_a_rocm_image_is_new_enough(monkeypatch, tmp_path):
    found = check_torch(monkeypatch, ROCM_BUILD, make_root(tmp_path, KFD))
    assert found["torch"].status is found["torch build"].status is Status.PASS
    assert found["torch build"].value == "HIP 7.1"


@pytest.mark.parametrize(
    ("build", "file", "words"),
    [
        (CPU_BUILD, "dev/nvidiactl", "NVIDIA devices, which a CPU build of torch cannot use"),
        (CPU_BUILD, KFD, "AMD devices, which a CPU build of torch cannot use"),
        (CUDA_BUILD, KFD, "AMD devices, which a CUDA 13.0 build of torch cannot use"),
        (CUDA_BUILD, "dev/nvidiactl", "torch sees none of this machine's NVIDIA devices"),
    ],
)
def test_devices_that_torch_cannot_use_fail(build, file, words, monkeypatch, tmp_path):
    for name in versions.HIDING:
        monkeypatch.delenv(name, raising=False)
    found = check_torch(monkeypatch, build, make_root(tmp_path, file))["torch build"]
    assert found.status is Status.FAIL and words in found.detail


def test_the_graphics_of_a_processor_are_no_device(monkeypatch, tmp_path):
    monkeypatch.setitem(CONTENTS, KFD, "simd_count 32\n")
    found = check_torch(monkeypatch, CPU_BUILD, make_root(tmp_path, KFD))["torch build"]
    assert found.status is Status.PASS and "runs use the CPU" in found.detail


def test_devices_that_were_hidden_on_purpose_are_a_warning(monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    root = make_root(tmp_path, "dev/nvidiactl", "proc/driver/nvidia/version")
    found = check_torch(monkeypatch, CUDA_BUILD, root)
    assert found["torch build"].status is Status.WARN and found["torch build"].fix == "unset CUDA_VISIBLE_DEVICES"
    assert found["NVIDIA driver"].value == "580.95.05"


def test_a_package_of_another_version_is_named(monkeypatch):
    real = versions.version
    monkeypatch.setattr(versions, "version", lambda name: "0.1.2" if name == "safetensors" else real(name))
    found = by_name(versions._check_packages())["packages"]
    assert found.status is Status.WARN and "safetensors is 0.1.2, not >=0." in found.detail


# ------------------------------------------------------------------------------------------------ limits, leftovers


def test_too_few_open_files_are_warned_of_with_the_command_that_raises_them():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        (finding,) = limits.check(QUICK)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    may_raise = hard == resource.RLIM_INFINITY or hard >= limits.ENOUGH_FILES
    assert finding.status is Status.WARN and finding.value == 256
    assert finding.fix.startswith("ulimit -n " if may_raise else "raise nofile ")


LEAVE_BLOCKS = """
import mmap, os, signal, sys
for name in ("locals", "barrier"):
    with open(f"{sys.argv[1]}/910011_{name}", "w+b") as file:
        file.truncate(4096)
        block = mmap.mmap(file.fileno(), 4096)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(not blocks_of_runs.SHARED_MEMORY.is_dir(), reason="no /dev/shm on this system")
def test_what_a_killed_process_left_in_shared_memory_is_listed_by_owner_and_not_removed(monkeypatch, tmp_path):
    monkeypatch.setattr(blocks_of_runs, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert by_name(shared_memory.check(QUICK))["leftovers of runs"].status is Status.PASS

    assert subprocess.run([sys.executable, "-c", LEAVE_BLOCKS, str(tmp_path)]).returncode == -9
    found = by_name(shared_memory.check(QUICK))["leftovers of runs"]
    assert found.status is Status.WARN and found.value == 2
    assert f"2 of {shared_memory._user(os.geteuid())}" in found.detail
    assert len(list(tmp_path.glob("910011_*"))) == 2


@pytest.mark.skipif(not blocks_of_runs.SHARED_MEMORY.is_dir(), reason="no /dev/shm on this system")
def test_a_container_with_docker_s_default_of_shared_memory_is_warned_of(monkeypatch, tmp_path):
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "none", str(tmp_path)], capture_output=True)
    if mount.returncode:
        pytest.skip("may not mount a file system here")
    try:
        monkeypatch.setattr(blocks_of_runs, "SHARED_MEMORY", tmp_path)
        found = by_name(shared_memory.check(QUICK))["/dev/shm"]
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)
    assert found.status is Status.WARN and "--ipc=host" in found.fix


# ------------------------------------------------------------------------------------------------ the examination


@pytest.mark.multiprocess
def test_a_check_that_crashes_dies_or_hangs_is_a_failure_of_that_check():
    checks = {"crash": crash, "segfault": segfault, "hang": hang, "answer": answer}
    heard = []
    findings = examine(Machine(limit_seconds=4), checks, heard.append)
    found = by_name(findings)
    assert list(found) == ["before", "crash", "segfault", "hang", "fine"]
    assert [finding.status for finding in findings] == ["pass", "fail", "fail", "fail", "pass"]
    assert found["crash"].detail == "ValueError: two lines"
    assert found["segfault"].detail == "its process was killed by SIGSEGV: about to read nothing"
    assert found["hang"].detail == "no answer within 4 s; ended"
    assert heard == ["crash", "segfault", "hang", "answer", None]
    assert exit_code(findings) == 2


def test_warnings_do_not_fail_and_the_json_has_what_the_table_has():
    warning = Finding(check="disk", status=Status.WARN, value=12.5, unit="MB/s", detail="slow", fix="buy another")
    assert exit_code([warning]) == 0
    record = json.loads(json.dumps(as_dict([warning])))
    assert record["status"] == "pass" and record["host"] and record["versions"]["torch"]
    assert record["findings"] == [
        {
            "check": "disk",
            "status": "warn",
            "value": 12.5,
            "unit": "MB/s",
            "detail": "slow",
            "fix": "buy another",
            "seconds": 0.0,
        }
    ]


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_keeps_every_word_at_any_width(width):
    console = Console(width=width, record=True, file=io.StringIO())
    fix = "name a faster folder with save_folder: a local NVMe disk, or a parallel file system"
    print_table([Finding(check="disk fsync", status=Status.WARN, value=712.4, unit="ms", fix=fix)], console)
    printed = console.export_text()
    assert all(len(line.rstrip()) <= width for line in printed.splitlines())
    assert "712 ms" in printed and all(word in printed for word in fix.split())
    assert printed.rstrip().endswith("1 warn")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--folder", "s3://bucket/run"], "is not a folder of this machine"),
        (["--json", "none/doctor.json"], "--json: none is not a folder"),
        (["--json", "."], "--json: . is a folder; name a file in it"),
    ],
)
def test_options_that_cannot_be_end_in_one_line(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main.run(["doctor", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--folder", "."],
            "doctor in a launch: it compares the launch's ranks, --alone examines this machine; leave out",
        ),
        (["--json", "none/doctor.json"], "--json: none is not a folder"),
    ],
)
def test_so_they_do_in_a_launch(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main.run(["doctor", *arguments]) == 2
    assert message in capsys.readouterr().err


def run_doctor(tmp_path: Path, *arguments: str, **environment: str) -> tuple[subprocess.CompletedProcess, dict]:
    command = [sys.executable, "-m", "llmfoundry_lite.cli.main", "doctor", "--json", "doctor.json", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    return result, json.loads((tmp_path / "doctor.json").read_text())


@pytest.mark.slow
@pytest.mark.multiprocess
def test_the_command_examines_this_machine(tmp_path):
    result, record = run_doctor(tmp_path, "--quick", CUDA_VISIBLE_DEVICES="", HIP_VISIBLE_DEVICES="")
    assert result.returncode == 0, result.stdout + result.stderr
    assert [line.split()[1] for line in result.stderr.splitlines()] == list(CHECKS)  # which check is running
    found = {finding["check"]: finding for finding in record["findings"]}
    assert {"torch", "devices", "disk write", "gemm bf16", "memory", "all_reduce", "clock"} <= set(found)
    assert all(finding["check"] in result.stdout for finding in record["findings"])
    assert [path.name for path in tmp_path.iterdir()] == ["doctor.json"]


@pytest.mark.multiprocess
def test_a_torch_that_cannot_be_imported_is_found_and_not_a_traceback(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('libcudnn.so.9: cannot open shared object file')")
    result, record = run_doctor(tmp_path, "--quick", PYTHONPATH=str(tmp_path))
    assert result.returncode == 2 and "Traceback" not in result.stdout + result.stderr
    status = {finding["check"]: finding["status"] for finding in record["findings"]}
    assert status["versions"] == status["gemm"] == status["collectives"] == "fail"
    assert status["disk write"] in ("pass", "warn")  # how fast this machine's disk is does not matter
    first = next(finding for finding in record["findings"] if finding["status"] == "fail")
    assert "libcudnn.so.9: cannot open" in first["detail"] and "make install" in first["fix"]
