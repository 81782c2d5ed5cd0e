"""Fixtures that tests of data sets and of their preparation share."""

from tests.helpers.data import downloads, tokenizer, tokenizer_folder  # noqa: F401
