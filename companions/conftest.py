"""Tests of companions have the fixtures of the core's."""

from tests.conftest import data, keep_environment, keep_environment_of_fixtures

__all__ = ["data", "keep_environment", "keep_environment_of_fixtures"]
