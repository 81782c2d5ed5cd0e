"""A small disk of its own, for tests that fill it, take away the right to write, or take it away; and one rank's view
of a folder that other ranks see. root ignores permissions."""

import ctypes
import os
import shutil
import subprocess
from contextlib import contextmanager
from pathlib import Path

import pytest


class Disk:
    def __init__(self, path: Path):
        self.path = path

    def make_read_only(self) -> None:
        subprocess.run(["mount", "-o", "remount,ro", str(self.path)], check=True)

    def take_away(self) -> None:
        """Unmount the disk, as when a network disk's server is lost: the empty folder below it appears."""
        subprocess.run(["umount", "-l", str(self.path)], check=True)


@contextmanager
def mounted(path: Path, size: str = "64m"):
    """Mount a tmpfs at `path`; skip the test where that is impossible."""
    if os.geteuid() or not shutil.which("mount"):
        pytest.skip("mounting a tmpfs needs root")
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(path)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("no tmpfs can be mounted here")
    try:
        yield Disk(path)
    finally:
        if path.is_mount():
            subprocess.run(["umount", "-l", str(path)], check=True)


CLONE_NEWNS = 0x00020000


def need_namespaces() -> None:
    """Skip the test where `hide` cannot work."""
    if os.geteuid() or not shutil.which("unshare"):
        pytest.skip("a mount namespace needs root")
    if subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode:
        pytest.skip("no mount namespace can be made here")


def hide(folder: Path | str) -> None:
    """Hide `folder` from this process and its children below an empty disk, as on a node whose mount failed."""
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNS):
        raise OSError(ctypes.get_errno(), "unshare")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "none", str(folder)], check=True)
