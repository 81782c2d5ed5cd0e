"""Readers of the user's own, `--reader .eml=python:…`: workers, parts, appending, mistakes."""

import gzip
import json
import re
import sys
from pathlib import Path

import pytest

from llmfoundry_lite import companions, own_code
from llmfoundry_lite.cli.data import data_append, data_join, data_prepare
from llmfoundry_lite.companions import Companion
from llmfoundry_lite.data.tokenizer import train_tokenizer
from llmfoundry_lite.errors import ConfigError, DataError
from llmfoundry_lite.prepare.own_readers import find_readers_for, find_registered_readers
from llmfoundry_lite.prepare.prepare import prepare
from llmfoundry_lite.prepare.request import PrepareRequest
from tests.helpers.launch import ROOT
from tests.helpers.present import needs

MAIL = "From: ann\nSubject: tea {i}\n\nthe cat sat on mat {i} and drank tea\n\x1e"


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Mails, a tokenizer, and the page's reader as the module `own_mails_…`, in the working directory."""
    monkeypatch.chdir(tmp_path)
    train_tokenizer(["the cat sat on a mat and drank tea 1 2 3"] * 3, 300).save("tokenizer")
    page = (ROOT / "docs/own-parts.md").read_text().split("## Readers for `data prepare`")[1]
    code, *_ = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    module = f"own_mails_{tmp_path.name.replace('-', '_')}"
    Path(f"{module}.py").write_text(code)
    Path("mails").mkdir()
    for number in range(6):
        content = "".join(MAIL.format(i=10 * number + i) for i in range(10)).encode()
        if number == 5:
            Path("mails/5.mbx.gz").write_bytes(gzip.compress(content))
        else:
            Path(f"mails/{number}.mbx").write_bytes(content)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))  # for workers
    monkeypatch.setattr(own_code, "_trusted_names", set())
    return tmp_path


def reader(here: Path) -> str:
    return f".mbx=python:own_mails_{here.name.replace('-', '_')}:read_mails"


def run(out: str, reader: str | None, **options) -> dict:
    """Run `data prepare` on the mails, and return its summary."""
    options = {"num_workers": 1, "val_fraction": 0.2, **options}
    readers = [reader] if reader else None
    data_prepare(out=out, tokenizer="tokenizer", max_seq_len=8, sources=["mails"], reader=readers, **options)
    return json.loads(Path(out, "summary.json").read_text())


def shards(out: str) -> dict[str, bytes]:
    return {path.relative_to(out).as_posix(): path.read_bytes() for path in sorted(Path(out).rglob("*.mds"))}


def test_the_reader_of_the_page_turns_files_into_documents(here, capsys):
    summary = run("data", reader(here))
    assert summary["request"]["readers"] == [reader(here)]
    assert sum(split["documents"] for split in summary["splits"].values()) == 60
    held_out = [json.loads(line)["text"] for line in Path("data/val/text.jsonl").read_text().splitlines()]
    assert held_out and all(re.fullmatch(r"the cat sat on mat \d+ and drank tea", text) for text in held_out)
    run("data", reader(here))
    assert "is complete" in capsys.readouterr().out
    with pytest.raises(DataError, match="readers was"):
        run("data", f".mbx=python:{__name__}:read_numbers")


@pytest.mark.slow
def test_workers_make_the_shards_of_one(here):
    run("one", reader(here))
    run("two", reader(here), num_workers=2)
    assert shards("one") == shards("two") and shards("one")


@pytest.mark.slow
@needs("llmfoundry_engines")
def test_parts_make_the_shards_of_one_and_more_is_appended(here, capsys):
    run("one", reader(here))
    for part in ("1/2", "2/2"):
        data_prepare(
            out="parts",
            tokenizer="tokenizer",
            max_seq_len=8,
            sources=["mails"],
            reader=[reader(here)],
            num_workers=1,
            val_fraction=0.2,
            part=part,
        )
    own_code._trusted_names.clear()
    data_join("parts")  # which needs no reader
    assert shards("one") == shards("parts")

    # A reader that the data set names is not run, unless the user names it again.
    with pytest.raises(DataError, match=r"mails: nothing here can be read; expected"):
        data_append("one", ["mails"], name="more")
    data_append("one", ["mails"], name="more", reader=[reader(here)], num_workers=1)
    summary = json.loads(Path("one/streams/more/summary.json").read_text())
    assert summary["request"]["readers"] == [reader(here)]


def test_a_reader_that_nobody_has_named_is_not_imported(here):
    request = PrepareRequest(sources=("mails",), tokenizer="tokenizer", max_seq_len=8, readers=(reader(here),))
    with pytest.raises(ConfigError, match=r"--reader: python:own_mails_\w+:read_mails is code that is not trusted"):
        prepare(request, "data", num_workers=1)
    assert not any(name.startswith(f"own_mails_{here.name}") for name in sys.modules)


def test_a_file_that_the_reader_refuses_is_one_document(here):
    Path("mails/bad.mbx").write_bytes(b"no mail at all")
    with pytest.raises(DataError, match=r"bad.mbx, document 1 cannot be read by python:\w+:read_mails: no empty line"):
        run("data", reader(here))
    summary = run("data", reader(here), on_error="skip", overwrite=True)
    assert summary["skipped"]["unreadable"] == 1
    assert sum(split["documents"] for split in summary["splits"].values()) == 60


def test_a_parser_s_own_error_is_of_its_file(here):
    Path("mails/bad.mbx").write_bytes(b"no mail at all")
    reader = f".mbx=python:{__name__}:read_strictly"
    message = r"bad.mbx, document 1 cannot be read by .*:read_strictly: KeyError: 'mail' \(test_own_readers.py, line"
    with pytest.raises(DataError, match=message):
        run("data", reader)
    assert run("data", reader, on_error="skip", overwrite=True)["skipped"]["unreadable"] == 1


@pytest.mark.parametrize(
    ("reader", "message"),
    [
        (None, "mails: nothing here can be read; expected"),
        ("mbx=python:x:y", "--reader mbx=python:x:y: expected SUFFIX=python:package.module:function"),
        (".mbx=x:y", "--reader .mbx=x:y: expected SUFFIX=python:package.module:function"),
        (".mbx=python:not_there:y", "--reader: python:not_there:y: No module named 'not_there'; is its folder on"),
        (
            f".mbx=python:{__name__}:read_numbers",
            f"--reader: python:{__name__}:read_numbers yields a int for mails/0.mbx",
        ),
    ],
)
def test_a_mistake_is_named(here, reader, message):
    with pytest.raises((DataError, ConfigError)) as error:
        run("data", reader)
    assert message in str(error.value)


def read_numbers(file, name):
    yield 1


def read_strictly(file, name):
    content = file.read()
    if not content.count(b"\n"):
        raise KeyError("mail")
    yield content.decode()


@pytest.fixture
def companion(here, monkeypatch):
    """A companion that registers the page's reader for .mbx, and one for .txt, which is a suffix of ours."""
    address = reader(here).partition("python:")[2]
    readers = {".mbx": address, ".txt": address, ".eml": address}
    monkeypatch.setattr(companions, "find_companions", lambda: [Companion(parts={"readers": readers})])
    find_registered_readers.cache_clear()
    yield
    find_registered_readers.cache_clear()


def test_a_companion_s_reader_needs_no_option_and_is_recorded(here, companion, capsys):
    summary = run("data", None)
    assert summary["request"]["readers"] == [reader(here)]  # and none for .eml, of which there is no file
    output = capsys.readouterr()
    assert f".mbx files are read by {reader(here).partition('=')[2]}, of a companion" in output.out
    assert "readers, .txt: left out: this package has one of that name" in output.err

    # The same as with the option.
    run("data", reader(here))
    assert "is complete" in capsys.readouterr().out


def test_the_option_wins_over_a_companion_s_reader(companion, capsys):
    given = f".mbx=python:{__name__}:read_strictly"
    assert find_readers_for(["mails"], [given]) == []
    assert find_readers_for(["nothing", "python-stdlib"], []) == []
    assert len(find_readers_for(["mails/*.mbx"], [])) == 1
    assert len(find_readers_for(["s3://bucket/mails"], [])) == 2  # which is not listed
