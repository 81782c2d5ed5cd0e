"""Fixtures shared with the tests of checkpoints and of evaluation."""

from tests.checkpoint.conftest import one_thread, url
from tests.evaluation.conftest import folder, tokenizer_folder

__all__ = ["folder", "one_thread", "tokenizer_folder", "url"]
