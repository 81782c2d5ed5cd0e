"""Fixtures that the core's tests of `data prepare` have, too."""

from tests.helpers.data import tokenizer, tokenizer_folder

__all__ = ["tokenizer", "tokenizer_folder"]
