"""What tests of several rooms read, and none changes."""

import pytest

from tests.helpers.tiny import write_data


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("data"))
