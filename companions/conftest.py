"""What tests of the core have, too."""

from tests.conftest import data, keep_environment, keep_environment_of_fixtures

__all__ = ["data", "keep_environment", "keep_environment_of_fixtures"]
