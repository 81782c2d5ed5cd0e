"""A real Slurm of four nodes on this machine, for one test module: as any user, without munge, cgroups or a database.

    with Slurm(tmp_path) as slurm:
        print(slurm.run("srun", "-N2", "hostname").stdout)

It needs Debian's `slurm-wlm`, or the same programs from elsewhere. It ends with its `with` block, jobs included, or
with the process that has it, however that dies.
"""

import getpass
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.launch import ROOT, free_port

SBIN = "/usr/sbin"
"""Where Debian has the daemons, which is not on everybody's path."""
needs_slurm = pytest.mark.skipif(
    not all(shutil.which(name, path=f"{os.environ['PATH']}:{SBIN}") for name in ("slurmctld", "slurmd", "srun")),
    reason="slurmctld is not on this machine (Debian: slurm-wlm)",
)
needs_slurmdbd = pytest.mark.skipif(
    not all(shutil.which(name, path=f"{os.environ['PATH']}:{SBIN}") for name in ("slurmdbd", "mariadbd")),
    reason="slurmdbd or mariadbd is not on this machine (Debian: slurmdbd, mariadb-server)",
)
NODES = [f"0x7f00000{number}" for number in (1, 2, 3, 4)]
"""Names that are addresses, 127.0.0.1 to 127.0.0.4 in hexadecimal: they resolve everywhere, without /etc/hosts."""
CONFIG = """
ClusterName=test{port}
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
FirstJobId={port}
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
PreemptType=preempt/{preempted_by}
PreemptMode=REQUEUE
{user_signal}
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,sched_min_interval=0,bf_interval=1
CompleteWait=0
KillWait=30
ReturnToService=2
StateSaveLocation={folder}/state
SlurmdSpoolDir={spool}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
NodeName=DEFAULT CPUs=8 CoresPerSocket=8 RealMemory=8000 Gres=gpu:4
"""
DATABASE = """
AuthType=auth/none
DbdHost=localhost
DbdAddr=127.0.0.1
DbdPort={port}
SlurmUser={user}
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={database_port}
StorageUser=slurm
StorageLoc=slurm
LogFile={folder}/slurmdbd.log
PidFile={folder}/slurmdbd.pid
"""
PARTITIONS = """
PartitionName=all Nodes={nodes} Default=YES MaxTime=INFINITE
PartitionName=low Nodes={pair} MaxTime=INFINITE GraceTime=60
PartitionName=high Nodes={pair} PriorityTier=10 MaxTime=INFINITE PreemptMode=OFF
"""
"""A job in `high` preempts those in `low`, which are told and have a minute."""
ENDS = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "OUT_OF_MEMORY")
DEADLINE_SECONDS = 180


class Slurm:
    preempted_by = "partition_prio"

    def __init__(self, folder: Path):
        self.folder = folder
        self.configuration = folder / "slurm.conf"
        self.spool = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
        """For sockets, whose paths have at most 108 characters."""
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._reaper: subprocess.Popen[bytes] | None = None

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "PATH": f"{os.environ['PATH']}:{SBIN}", "SLURM_CONF": str(self.configuration)}

    def __enter__(self) -> "Slurm":
        (self.folder / "state").mkdir(parents=True)
        self._write_configuration()
        try:
            # It waits for the end of its input, which is at the latest the end of this process.
            reaper = [sys.executable, "-m", "tests.helpers.reaper", f"SLURM_CONF={self.configuration}", self.spool]
            self._reaper = subprocess.Popen(reaper, cwd=ROOT, stdin=subprocess.PIPE, start_new_session=True)
            self._start_daemons()
            self.wait(
                lambda: len(self.run("sinfo", "-hN", "-p", "all", "-t", "idle").stdout.splitlines()) == len(NODES)
            )
        except BaseException:
            self.__exit__()
            raise
        return self

    def _write_configuration(self) -> None:
        host, folder = socket.gethostname().partition(".")[0], self.folder
        version = tuple(map(int, re.findall(r"\d+", self.run("slurmctld", "-V").stdout)[:2]))
        user_signal = "SlurmctldParameters=preempt_" if version < (23, 2) else "PreemptParameters="
        text = CONFIG.format(
            host=host,
            port=free_port(),
            user=getpass.getuser(),
            folder=folder,
            spool=self.spool,
            preempted_by=self.preempted_by,
            user_signal=f"{user_signal}send_user_signal",
        )
        for name in NODES:
            (self.spool / name).mkdir()
            text += f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={free_port()}\n"
        text += PARTITIONS.format(nodes=",".join(NODES), pair=",".join(NODES[:2]))
        self.configuration.write_text(text)
        for number in range(4):
            (folder / f"gpu{number}").touch()  # slurmd asks only whether they exist
        (folder / "gres.conf").write_text(
            f"AutoDetect=off\nNodeName={','.join(NODES)} Name=gpu File={folder}/gpu[0-3]\n"
        )

    def _start_daemons(self) -> None:
        self._start("slurmctld", "-D", "-c")
        for name in NODES:
            self._start("slurmd", "-D", "-N", name)

    def __exit__(self, *error: object) -> None:
        """End jobs, then daemons: a step that no controller ends outlives them, until the reaper comes."""
        try:
            if self._daemons and all(daemon.poll() is None for daemon in self._daemons):
                self.run("scancel", "--full", "--user", getpass.getuser())
                self.run("scancel", "--full", "--signal=KILL", "--user", getpass.getuser())
                self.wait(lambda: not self.run("squeue", "-h", "-t", "R,CG,S", "-o", "%i").stdout.split())
        finally:
            if self._reaper is not None and self._reaper.stdin is not None:
                self._reaper.stdin.close()
                for process in (*self._daemons, self._reaper):
                    process.wait()

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
        """Return what `scontrol` says of a job."""
        return dict(re.findall(r"(\S+?)=(\S*)", self.run("scontrol", "show", "job", "-o", job).stdout))

    def wait_for_end(self, job: str, state: str) -> None:
        """Raises AssertionError when the job ends otherwise."""
        self.wait(lambda: self.show(job)["JobState"] in ENDS)
        said = self.show(job)
        output = Path(said["StdOut"])
        assert said["JobState"] == state, output.read_text() if output.exists() else said

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


class SlurmWithQos(Slurm):
    """With a database: jobs of the QOS `normal` preempt those of `low`, which are told and have a minute."""

    preempted_by = "qos"

    def _write_configuration(self) -> None:
        super()._write_configuration()
        self._database_port, port = free_port(), free_port()
        with self.configuration.open("a") as file:
            file.write("AccountingStorageType=accounting_storage/slurmdbd\nAccountingStorageHost=127.0.0.1\n")
            file.write(f"AccountingStoragePort={port}\n")
        configuration = self.folder / "slurmdbd.conf"
        names = {"user": getpass.getuser(), "folder": self.folder}
        configuration.write_text(DATABASE.format(port=port, database_port=self._database_port, **names))
        configuration.chmod(0o600)

    def _start_daemons(self) -> None:
        data, user = f"--datadir={self.folder}/database", f"--user={getpass.getuser()}"
        made = self.run("mariadb-install-db", "--no-defaults", data, user)
        assert made.returncode == 0, made.stdout + made.stderr
        own = (f"--socket={self.spool}/database", f"--pid-file={self.folder}/database.pid")
        address = ("--bind-address=127.0.0.1", f"--port={self._database_port}")
        self._start("mariadbd", "--no-defaults", "--skip-grant-tables", data, user, *own, *address)
        self.wait((self.spool / "database").exists)
        self._start("slurmdbd", "-D")
        self.wait(lambda: self.run("sacctmgr", "-n", "list", "qos").returncode == 0)
        cluster = re.findall(r"ClusterName=(\w+)", self.configuration.read_text())[0]
        commands = (f"add cluster {cluster}", "add qos low", "modify qos low set GraceTime=60")
        for command in (*commands, "modify qos normal set Preempt=low"):
            result = self.run("sacctmgr", "-i", *command.split())
            assert result.returncode == 0, result.stdout + result.stderr
        super()._start_daemons()
