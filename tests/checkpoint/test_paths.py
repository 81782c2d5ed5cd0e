"""Places beside checkpoints."""

from llmfoundry_lite.checkpoint.local_folder import LocalFolder
from llmfoundry_lite.checkpoint.paths import TOKENIZER_FILE, put_tokenizer
from llmfoundry_lite.data import tokenizer_files


def test_the_file_that_says_that_a_tokenizer_is_whole_is_written_last(monkeypatch, tmp_path):
    """After a kill in between, the next launch must not take the rest for all of it."""
    put = []
    monkeypatch.setattr(LocalFolder, "put", lambda self, name, content: put.append(name))
    put_tokenizer(str(tmp_path), dict.fromkeys(("a", "tokenizer.json", "z"), b""))
    assert put == ["a", "z", "tokenizer.json"] and TOKENIZER_FILE == tokenizer_files.TOKENIZER_FILE
