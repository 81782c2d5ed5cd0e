"""What tests of checkpoints have, too."""

from tests.checkpoint.conftest import one_thread, url

__all__ = ["one_thread", "url"]
