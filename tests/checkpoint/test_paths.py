"""Places beside checkpoints."""

from llmfoundry_lite.checkpoint.local_folder import LocalFolder
from llmfoundry_lite.checkpoint.paths import put_tokenizer


def test_the_file_that_says_that_a_tokenizer_is_whole_is_written_last(monkeypatch, tmp_path):
    """After a kill in between, the next launch must not take the rest for all of it."""
    put = []
    monkeypatch.setattr(LocalFolder, "put", lambda self, name, content: put.append(name))
    put_tokenizer(str(tmp_path), {"a": b"", "b": b"", "c": b""}, last="b")
    assert put == ["a", "c", "b"]
