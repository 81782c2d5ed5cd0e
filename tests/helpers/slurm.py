"""A real Slurm of four nodes on this machine, for one test module: as any user, without munge, cgroups or a database.

    with Slurm(tmp_path) as slurm:
        print(slurm.run("srun", "-N2", "hostname").stdout)

It needs Debian's `slurm-wlm`, or the same programs from elsewhere. It ends with its `with` block, jobs included.
"""

import getpass
import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.launch import free_port

SBIN = f"{os.environ['PATH']}:/usr/sbin"
needs_slurm = pytest.mark.skipif(
    not all(shutil.which(name, path=SBIN) for name in ("slurmctld", "slurmd", "srun")),
    reason="slurmctld is not on this machine (Debian: slurm-wlm)",
)
NODES = [f"0x7f00000{number}" for number in (1, 2, 3, 4)]
"""Names that are addresses, 127.0.0.1 to 127.0.0.4 in hexadecimal: they resolve everywhere, without /etc/hosts."""
CONFIG = """
ClusterName=test{port}
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
CredType=cred/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,sched_min_interval=0,bf_interval=1
CompleteWait=0
KillWait=10
ReturnToService=2
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
NodeName=DEFAULT CPUs=8 CoresPerSocket=8 RealMemory=8000 Gres=gpu:4
"""
DEADLINE_SECONDS = 60


class Slurm:
    def __init__(self, folder: Path):
        self.folder = folder
        self.environment = {**os.environ, "PATH": SBIN, "SLURM_CONF": f"{folder}/slurm.conf"}
        self._daemons: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> "Slurm":
        host, folder = socket.gethostname().partition(".")[0], self.folder
        (folder / "state").mkdir(parents=True)
        lines = CONFIG.format(host=host, port=free_port(), user=getpass.getuser(), folder=folder).splitlines()
        for name in NODES:
            (folder / f"spool-{name}").mkdir()
            lines.append(f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={free_port()}")
        lines.append(f"PartitionName=all Nodes={','.join(NODES)} Default=YES MaxTime=INFINITE")
        devices = [folder / f"gpu{number}" for number in range(4)]
        for device in devices:
            device.touch()  # slurmd asks only whether they exist
        (folder / "slurm.conf").write_text("\n".join(lines) + "\n")
        (folder / "gres.conf").write_text(
            f"AutoDetect=off\nNodeName={','.join(NODES)} Name=gpu File={folder}/gpu[0-3]\n"
        )
        try:
            self._start("slurmctld", "-D", "-c")
            for name in NODES:
                self._start("slurmd", "-D", "-N", name)
            self.wait(lambda: len(self.run("sinfo", "-hN", "-t", "idle", "-o", "%N").stdout.split()) == len(NODES))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        """End jobs, then daemons: a step that no controller ends outlives them."""
        try:
            if self._daemons[0].poll() is None:
                self.run("scancel", "--full", "--user", getpass.getuser())
                self.run("scancel", "--full", "--signal=KILL", "--user", getpass.getuser())
                self.wait(lambda: not self.run("squeue", "-h", "-t", "R,CG,S", "-o", "%i").stdout.split())
        finally:
            for daemon in self._daemons:
                daemon.terminate()
            for daemon in self._daemons:
                try:
                    daemon.wait(timeout=5)
                except subprocess.TimeoutExpired:
                    daemon.kill()
                    daemon.wait()

    def _start(self, *command: str) -> None:
        with open(self.folder / "daemons.txt", "ab") as output:
            self._daemons.append(
                subprocess.Popen(
                    command, env=self.environment, stdout=output, stderr=output, cwd=self.folder, start_new_session=True
                )
            )

    def run(
        self, *command: str | Path, cwd: Path | None = None, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """One of Slurm's commands, to its end."""
        return subprocess.run(
            command,
            env={**self.environment, **environment},
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=DEADLINE_SECONDS,
            check=False,
        )

    def submit(self, *arguments: str | Path, cwd: Path, **environment: str) -> str:
        """The number of a batch job."""
        submitted = self.run("sbatch", "--parsable", *arguments, cwd=cwd, **environment)
        assert submitted.returncode == 0, submitted.stderr
        return submitted.stdout.strip()

    def show(self, job: str) -> dict[str, str]:
        """What `scontrol` says of a job."""
        return dict(re.findall(r"(\S+?)=(\S*)", self.run("scontrol", "show", "job", "-o", job).stdout))

    def release(self, job: str) -> None:
        """Let a job begin that Slurm holds for two minutes since it was requeued. Not at once: its node refuses it
        within the second in which its credential was revoked."""
        self.wait(lambda: (said := self.show(job))["JobState"] == "PENDING" and said["Reason"] == "BeginTime")
        self.run("scontrol", "update", f"jobid={job}", "StartTime=now+3")
        self.wait(lambda: self.show(job)["JobState"] != "PENDING")

    def wait(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not condition():
            is_up = all(daemon.poll() is None for daemon in self._daemons)
            assert is_up and time.monotonic() < deadline, self._last_words()
            time.sleep(0.1)

    def _last_words(self) -> str:
        paths = sorted([self.folder / "daemons.txt", *self.folder.glob("*.log")])
        return "".join(f"{path.name}: {path.read_text()[-2000:]}\n" for path in paths)
