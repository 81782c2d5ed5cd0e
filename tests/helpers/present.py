"""Cases of the companions that are here: the core's own tests run without any."""

from collections.abc import Iterable
from typing import TypeVar

import pytest

from llmfoundry_lite.companions import list_missing, missing

Case = TypeVar("Case")


def present(cases: Iterable[Case]) -> list[Case]:
    """Leave out cases whose command, the first word, belongs to a companion that is not here."""
    return [case for case in cases if command_of(case) not in list_missing()]


def needs(name: str) -> pytest.MarkDecorator:
    """Skip a test where the companion that has this part is not here."""
    return pytest.mark.skipif(name in list_missing(), reason=str(missing(name)))


def command_of(case: object) -> str:
    while isinstance(case, (list, tuple)):
        case = case[0]
    words = str(case).rpartition("llmfoundry-lite ")[2].split()
    return words[0] if words else ""
