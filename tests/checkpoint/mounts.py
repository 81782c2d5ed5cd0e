"""A small disk of its own, for tests that fill it or take away the right to write. root ignores permissions."""

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


@contextmanager
def mounted(path: Path, size: str = "64m"):
    """A tmpfs at `path`; skips the test where none can be mounted."""
    if os.geteuid() or not shutil.which("mount"):
        pytest.skip("mounting a tmpfs needs root")
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(path)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("no tmpfs can be mounted here")
    try:
        yield Disk(path)
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)
