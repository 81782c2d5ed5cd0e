"""Environments of their own, made by uv: links into its cache."""

import os
import shutil

import pytest

from tests.helpers.launch import ROOT


def find_uv() -> str:
    """The uv of this machine, or the one that `make install` has brought. Skips the test where there is none."""
    found = shutil.which("uv") or str(ROOT / ".tools/bin/uv")
    if not os.access(found, os.X_OK):
        pytest.skip("uv is neither on the PATH nor in .tools")
    return found
