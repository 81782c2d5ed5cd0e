"""The commands of docs/large-data.md work as they stand there."""

import re
import shlex
import shutil
from pathlib import Path

import pytest

from llmfoundry_lite.cli import main
from llmfoundry_lite.prepare.prepare import prepare
from llmfoundry_lite.prepare.request import PrepareRequest
from tests.helpers.data import make_documents
from tests.helpers.launch import ROOT
from tests.helpers.numbered import write_shards
from tests.helpers.preparing import assert_same_result, write_jsonl


@pytest.mark.slow
def test_the_commands_of_the_page_give_the_bytes_of_one_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of its commands in its order, but those with Ray or a bucket.

    After the first join, the shares find that the work is done.
    """
    monkeypatch.chdir(tmp_path)
    Path("corpus").mkdir()
    write_shards(Path("data/spark/0"))
    Path("data/spark/0/index.json").unlink()
    Path("more").mkdir()
    write_jsonl(Path("more/news.jsonl"), make_documents(100, seed=9))
    for number in range(4):
        write_jsonl(Path("corpus") / f"{number}.jsonl", make_documents(700, seed=number))
    page = (ROOT / "docs/large-data.md").read_text(encoding="utf-8")
    commands = re.findall(r"^llmfoundry-lite (data .*)$", page, re.MULTILINE)
    assert len(commands) == 17
    for command in commands:
        if "--engine ray" in command or "s3://" in command:  # test_ray.py, test_bucket_sources.py, test_bucket.py
            continue
        workers = ["--num-workers", "1"] if "--part 1/3" in command else []
        assert main.run([*shlex.split(command), *workers]) == 0, command
    shutil.rmtree("data/big/streams")
    request = PrepareRequest(sources=("corpus/",), tokenizer="train:32768", max_seq_len=2048)
    prepare(request, "expected", num_workers=1)
    assert_same_result(Path("data/big"), Path("expected"))
