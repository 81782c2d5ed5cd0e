"""What tests of several rooms read, and none changes."""

import pytest
from hypothesis import HealthCheck, settings

from tests.helpers.tiny import write_data

# The same examples everywhere, however long one takes: on a busy machine any may take more than 0.2 s, hypothesis's own
# deadline. Its examples are kept nowhere, or the two workers would share them.
settings.register_profile(
    "tests", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("tests")


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("data"))
