"""What tests of several rooms read, and none changes."""

import os
from collections.abc import Iterator
from importlib.util import find_spec

import pytest
from hypothesis import HealthCheck, settings

from llmfoundry_lite import errors
from tests.helpers.tiny import write_data

# Benchmarks print with a companion's tables; the core's own tests run without any companion.
collect_ignore = [] if find_spec("llmfoundry_machines") else ["benchmarks"]

# The same examples everywhere, however long one takes: on a busy machine any may take more than 0.2 s, hypothesis's own
# deadline. Its examples are kept nowhere, or the two workers would share them.
settings.register_profile(
    "tests", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("tests")


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("data"))


def _keep_environment() -> Iterator[None]:
    """Training in this process sets a rank's variables, and the next test's launch would take itself for a rank. A
    secret of one test may be plain text in another."""
    before = dict(os.environ)
    yield
    errors._known_secrets.clear()
    for name in os.environ.keys() - before:
        del os.environ[name]
    os.environ.update(before)


keep_environment = pytest.fixture(autouse=True)(_keep_environment)
keep_environment_of_fixtures = pytest.fixture(autouse=True, scope="module")(_keep_environment)
