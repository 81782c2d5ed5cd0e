"""Findings about a machine, and how the whole examination behaves."""

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
from llmfoundry_lite.hardware import GIB
from llmfoundry_machines.doctor import examine as examination
from llmfoundry_machines.doctor import machine
from llmfoundry_machines.doctor.examine import CHECKS, as_dict, examine, exit_code, print_table
from llmfoundry_machines.doctor.finding import CheckOptions, Finding, Status
from llmfoundry_machines.doctor.machine import Build, Device
from llmfoundry_machines.tests.doctor.broken_checks import answer, crash, hang, segfault
from llmfoundry_machines.tests.findings import QUICK, by_name

# ------------------------------------------------------------------------------------------------ devices

MI250 = Device("AMD Instinct MI250X/MI250", 104, 64 * GIB, 63 * GIB)
A100 = Device("NVIDIA A100-SXM4-80GB", 108, 80 * GIB, 79 * GIB)
BUSY_H100 = Device("NVIDIA H100 80GB HBM3", 132, 80 * GIB, 20 * GIB)


@pytest.mark.parametrize(
    ("devices", "status", "words"),
    [
        ([MI250] * 8, Status.PASS, "8 x AMD Instinct MI250X/MI250 (104 compute units), 64 GiB each; 2 of them are one"),
        ([MI250] * 7, Status.WARN, "half a card is missing"),
        ([MI250] * 7 + [A100], Status.WARN, "half a card is missing"),  # 8 devices, and not all of one kind
        (
            [Device("Voodoo 3", 1, 16 << 20, 16 << 20)],
            Status.WARN,
            "Voodoo 3 with 1 compute units is not in hardware.py: no MFU will be given",
        ),
        ([A100, BUSY_H100], Status.WARN, "not all the same"),
    ],
)
def test_devices_are_counted_and_those_that_are_odd_are_warned_of(devices, status, words, monkeypatch):
    monkeypatch.setattr(machine, "find_devices", lambda: devices)
    found = by_name(machine.check_devices(QUICK))
    assert found["devices"].status is status and words in found["devices"].detail
    assert (found["device memory free"].status is Status.WARN) == (BUSY_H100 in devices)


# ------------------------------------------------------------------------------------------------ versions

CUDA_BUILD = Build("2.13.0+cu130", "13.0", None, 0)
ROCM_BUILD = Build("2.11.0a0+git1234", None, "7.1", 0)
CPU_BUILD = Build("2.13.0+cpu", None, None, 0)
KFD, NVIDIA = "sys/class/kfd/kfd/topology/nodes/1/properties", "dev/nvidiactl"
INSTINCT, GRAPHICS = "cpu_cores_count 0\nsimd_count 416\n", "simd_count 32\n"


def check_versions(monkeypatch, build: Build, root: Path, file: str = "", content: str = "") -> dict[str, Finding]:
    if file:
        (root / file).parent.mkdir(parents=True)
        (root / file).write_text(content)
    monkeypatch.setattr(machine, "ROOT", root)
    monkeypatch.setattr(machine, "find_build", lambda: build)
    return by_name(machine.check_versions(QUICK))


@pytest.mark.parametrize(("torch", "status"), [("2.10.2+cu128", "fail"), ("2.4.0", "fail"), (ROCM_BUILD.torch, "pass")])
def test_a_torch_that_is_too_old_fails(torch, status, monkeypatch, tmp_path):
    found = check_versions(monkeypatch, CPU_BUILD._replace(torch=torch), tmp_path)["torch"]
    assert found.status == status and found.value == torch and "2.11 " in found.detail


@pytest.mark.parametrize(
    ("build", "file", "content", "status", "words"),
    [
        (CPU_BUILD, NVIDIA, "", Status.FAIL, "NVIDIA devices, which a CPU build of torch cannot use"),
        (CPU_BUILD, KFD, INSTINCT, Status.FAIL, "AMD devices, which a CPU build of torch cannot use"),
        (CUDA_BUILD, KFD, INSTINCT, Status.FAIL, "AMD devices, which a CUDA 13.0 build of torch cannot use"),
        (ROCM_BUILD, KFD, INSTINCT, Status.FAIL, "torch sees none of this machine's AMD devices"),
        (CUDA_BUILD, NVIDIA, "", Status.FAIL, "torch sees none of this machine's NVIDIA devices"),
        (CPU_BUILD, KFD, GRAPHICS, Status.PASS, "runs use the CPU"),  # a processor's graphics are no device
    ],
)
def test_devices_that_torch_cannot_use_fail(build, file, content, status, words, monkeypatch, tmp_path):
    for name in machine.VISIBILITY_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    found = check_versions(monkeypatch, build, tmp_path, file, content)["torch build"]
    assert found.status is status and words in found.detail


def test_devices_that_were_hidden_on_purpose_are_a_warning(monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found = check_versions(monkeypatch, CUDA_BUILD, tmp_path, NVIDIA)["torch build"]
    assert found.status is Status.WARN and found.fix == "unset CUDA_VISIBLE_DEVICES"


def test_a_package_of_another_version_is_named(monkeypatch):
    real = machine.version
    monkeypatch.setattr(machine, "version", lambda name: "0.1.2" if name == "safetensors" else real(name))
    found = by_name(machine.check_packages())["packages"]
    assert found.status is Status.WARN and "safetensors is 0.1.2, not >=0." in found.detail


# ------------------------------------------------------------------------------------------------ limits


def test_too_few_open_files_are_warned_of_with_the_command_that_raises_them():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        (finding,) = machine.check_limits(QUICK)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    may_raise = hard == resource.RLIM_INFINITY or hard >= machine.MIN_OPEN_FILES
    assert finding.status is Status.WARN and finding.value == 256
    assert finding.fix.startswith("ulimit -n " if may_raise else "raise nofile ")


def test_a_container_with_docker_s_default_of_shared_memory_is_warned_of(monkeypatch, tmp_path):
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "none", str(tmp_path)], capture_output=True)
    if mount.returncode:
        pytest.skip("may not mount a file system here")
    try:
        monkeypatch.setattr(machine, "SHARED_MEMORY", tmp_path)
        found = by_name(machine.check_shared_memory(QUICK))["/dev/shm"]
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)
    assert found.status is Status.WARN and "--ipc=host" in found.fix


# ------------------------------------------------------------------------------------------------ the examination


@pytest.mark.multiprocess
def test_a_check_that_crashes_dies_or_hangs_is_a_failure_of_that_check(capsys):
    checks = {"crash": crash, "segfault": segfault, "hang": hang, "answer": answer}
    findings = examine(CheckOptions(limit_seconds=4), checks)
    found = by_name(findings)
    assert list(found) == ["before", "crash", "segfault", "hang", "fine"]
    assert [finding.status for finding in findings] == ["pass", "fail", "fail", "fail", "pass"]
    assert found["crash"].detail == "ValueError: two lines"
    assert found["segfault"].detail == "its process was killed by SIGSEGV: about to read nothing"
    assert found["hang"].detail == "no answer within 4 s; ended"
    assert capsys.readouterr().err.splitlines() == [f"checking {name}" for name in checks]
    assert exit_code(findings) == 2


def test_warnings_do_not_fail_and_the_json_has_what_the_table_has():
    warning = Finding("disk", Status.WARN, 12.5, "MB/s", "slow", "buy another")
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
    print_table([Finding("disk fsync", Status.WARN, 712.4, "ms", fix=fix)], console)
    printed = console.export_text()
    assert all(len(line.rstrip()) <= width for line in printed.splitlines())
    assert "712 ms" in printed and all(word in printed for word in fix.split())
    assert printed.rstrip().endswith("1 warn")


@pytest.mark.parametrize(
    ("arguments", "message", "world_size"),
    [
        (["--folder", "s3:/bucket/run"], "did you mean s3://bucket/run?", "1"),
        (["--folder", "s4://bucket/run"], "s4://bucket/run", "1"),
        (["--json", "none/doctor.json"], "--json: none is not a folder", "1"),
        (["--json", "none/doctor.json"], "--json: none is not a folder", "2"),
        (["--json", "."], "--json: . is a folder; name a file in it", "1"),
        (
            ["--folder", "."],
            "doctor in a launch: it compares the launch's ranks, --alone examines this machine; leave out",
            "2",
        ),
    ],
)
def test_options_that_cannot_be_end_in_one_line(arguments, message, world_size, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", world_size)
    assert main.run(["doctor", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_bucket_is_examined_as_it_was_given(monkeypatch):
    given = []
    monkeypatch.setattr(examination, "doctor", lambda machine, json_file: given.append(machine.folder) or 0)
    assert main.run(["doctor", "--folder", "memory://bucket/run"]) == 0
    assert main.run(["doctor", "--folder", "/scratch"]) == 0
    assert given == ["memory://bucket/run", Path("/scratch")]


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
    assert result.stderr.splitlines() == [f"checking {name}" for name in CHECKS]
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


def test_what_was_examined_is_shown_where_its_json_cannot_be_written(tmp_path, capsys):
    found = [Finding("disk write", Status.PASS, detail="32 MiB with fsync")]
    with pytest.raises(OSError):
        examination.report(found, found, tmp_path / "removed" / "doctor.json")
    assert "32 MiB with fsync" in capsys.readouterr().out
