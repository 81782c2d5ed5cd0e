"""What tests do with and without companions: the core's own tests run without any."""

from collections.abc import Iterable
from typing import TypeVar

import pytest

from llmfoundry_lite import companions
from llmfoundry_lite.companions import find_missing, is_installed

Case = TypeVar("Case")


def present(cases: Iterable[Case]) -> list[Case]:
    """Leave out cases whose command, the first word, belongs to a companion that is not here."""
    missing = find_missing("commands")
    return [case for case in cases if command_of(case) not in missing]


def needs(package: str) -> pytest.MarkDecorator:
    """Skip a test where this companion is not here."""
    return pytest.mark.skipif(not is_installed(package), reason=f"needs the companion {package}")


def leave_out_companions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the rest of a test see no companion, as where none is installed."""
    monkeypatch.setattr(companions, "find_spec", lambda package: None)
    monkeypatch.setattr(companions, "find_companions", list)


def command_of(case: object) -> str:
    while isinstance(case, (list, tuple)):
        case = case[0]
    words = str(case).rpartition("llmfoundry-lite ")[2].split()
    return words[0] if words else ""
