"""Calls that end midway, as if they were killed."""

import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


class Killed(BaseException):
    pass


def call_again_after_each_write(call: Callable[[Path], Any], tmp_path: Path) -> int:
    """Call `call(folder)` and end it before its first file is in place, in another folder before its second, and so on.
    After each, call it again, whole. Returns the number of its files."""
    replace = os.replace
    for number in itertools.count():
        left = [number]

        def put_in_place(source: Any, target: Any, left: list[int] = left) -> None:
            if left[0] == 0:
                raise Killed
            left[0] -= 1
            replace(source, target)

        folder = tmp_path / f"ended-before-{number}"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "replace", put_in_place)
            try:
                call(folder)
                return number
            except Killed:
                pass
        call(folder)
    raise AssertionError("unreachable")
