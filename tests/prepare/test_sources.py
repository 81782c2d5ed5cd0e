"""Kinds of input, fields, encodings; links, folders and files that cannot be read."""

import gzip
import json
import os
import subprocess
import sys
import zlib
from dataclasses import replace
from pathlib import Path

import datasets
import pytest
import zstandard

from llmfoundry_lite.errors import ConfigError, DataError
from llmfoundry_lite.prepare import contents, documents, listing, sources
from llmfoundry_lite.prepare import prepare as prepare_module
from llmfoundry_lite.prepare.listing import list_files
from llmfoundry_lite.prepare.prepare import prepare
from llmfoundry_lite.prepare.sources import open_source
from tests.helpers.data import make_documents
from tests.helpers.preparing import NESTED_ROWS, assert_reads_nested, plain, request, texts_of, units_of, write_jsonl
from tests.helpers.present import leave_out_companions, needs

# Fields


def test_a_text_key_may_be_a_field_within_a_field_and_several_are_joined(tmp_path: Path) -> None:
    assert_reads_nested(plain(tmp_path / "a.jsonl", "\n".join(map(json.dumps, NESTED_ROWS)).encode()))


def test_a_key_with_a_dot_is_first_of_all_a_name(tmp_path: Path) -> None:
    row = {"meta.text": "a", "meta": {"text": "b"}}
    assert texts_of(plain(tmp_path / "a.jsonl", json.dumps(row).encode()), text_key="meta.text") == ["a"]


def test_a_number_too_long_for_python_is_one_bad_line(tmp_path: Path) -> None:
    path = plain(tmp_path / "a.jsonl", b'{"text": "a", "n": ' + b"1" * 5000 + b'}\n{"text": "b"}\n')
    with pytest.raises(
        DataError, match=r"a.jsonl, line 1 does not parse as JSON \(Exceeds the limit .*\); expected one"
    ):
        texts_of(path)
    assert texts_of(path, on_error="skip") == ["b"]


# What a companion reads


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.tsv.gz", b"text\nx\n", "{0}/a.tsv.gz: rows of CSV, parquet and arrow"),
        ("b/c.parquet", b"", "{0}/b/c.parquet: rows of CSV, parquet and arrow"),
        ("hf:someone/texts", b"", "hf:someone/texts"),
    ],
)
def test_what_a_companion_reads_names_it_before_anything_is_read(
    name: str, content: bytes, message: str, tmp_path: Path, monkeypatch
) -> None:
    leave_out_companions(monkeypatch)
    plain(tmp_path / "a.jsonl", b'{"text": "x"}')
    if not name.startswith("hf:"):
        plain(tmp_path / name, content)
    with pytest.raises(ConfigError) as error:
        open_source(request(name if name.startswith("hf:") else tmp_path, ""))
    assert str(error.value) == f"{message.format(tmp_path)}: needs the companion llmfoundry_formats"


# Encodings


@pytest.mark.parametrize("encoding", ["latin-1", "utf-16", "utf-16-be", "cp1252", "utf-8-sig"])
@pytest.mark.parametrize("suffix", ["txt", "jsonl", pytest.param("csv", marks=needs("llmfoundry_formats")), "jsonl.gz"])
def test_text_in_other_encodings_arrives_as_utf8(encoding: str, suffix: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(sources, "MIN_UNIT_BYTES", 40)
    monkeypatch.setattr(contents, "BLOCK_BYTES", 7)
    documents = ["première", "deuxième ü", "Ä"] * 5
    text = {
        "txt": documents[0],
        "jsonl": "".join(json.dumps({"text": document}, ensure_ascii=False) + "\n" for document in documents),
        "csv": "text\n" + "\n".join(documents),
    }[suffix.removesuffix(".gz")]
    content = text.encode(encoding)
    path = plain(tmp_path / f"a.{suffix}", gzip.compress(content) if suffix.endswith("gz") else content)
    assert texts_of(path, encoding=encoding) == (documents[:1] if suffix == "txt" else documents)


@pytest.mark.parametrize("encoding", [None, "utf-8"])
def test_a_line_is_too_large_from_the_limit_on_and_the_last_one_needs_no_end(
    encoding: str | None, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(contents, "MAX_DOCUMENT_BYTES", 8)
    monkeypatch.setattr(contents, "BLOCK_BYTES", 3)
    path = plain(tmp_path / "a.jsonl", b"1234567\n12345678\n\n1234567890123456\nshort\nlast")
    lines = [line for line, _ in contents.read_lines(path, encoding)]
    assert lines == [b"1234567\n", contents.TOO_LARGE, b"\n", contents.TOO_LARGE, b"short\n", b"last"]
    path = plain(tmp_path / "b.jsonl", b"one\n1234567")
    assert [line for line, _ in contents.read_lines(path, encoding)] == [b"one\n", b"1234567"]


def test_bytes_that_an_encoding_does_not_know_are_named(tmp_path: Path) -> None:
    path = plain(tmp_path / "a.jsonl", b'{"text": "a"}\n{"text": "\xc3\xa9"}\n')
    with pytest.raises(DataError, match=r"a.jsonl, line 2 is not valid UTF-8"):
        texts_of(path, encoding="ascii")
    ((texts, skipped),) = units_of(path, encoding="ascii", on_error="skip")
    assert texts == ["a"] and skipped.counts == {"invalid_utf8": 1}
    with pytest.raises(DataError, match=r"b.txt is not valid UTF-8 \(byte 0\); --encoding names another encoding"):
        texts_of(plain(tmp_path / "b.txt", "text".encode("utf-16")))


# Compression


@pytest.mark.parametrize("padding", [b"\0" * 3, b"\0" * 2_000_000])
def test_gzip_padded_with_zeros_is_whole(padding: bytes, tmp_path: Path) -> None:
    member = gzip.compress(b'{"text": "good"}\n')
    assert texts_of(plain(tmp_path / "a.jsonl.gz", member + padding + member + padding)) == ["good", "good"]
    with pytest.raises(DataError, match=r"b.txt.gz is damaged: it does not decompress"):
        texts_of(plain(tmp_path / "b.txt.gz", member + b"\0garbage"))


BOMB = """
import sys
from llmfoundry_lite.prepare.documents import Skipped, read_documents
from llmfoundry_lite.prepare.request import PrepareRequest
from llmfoundry_lite.prepare.sources import open_source
skipped, wanted = Skipped(), PrepareRequest(sources=(sys.argv[1],), tokenizer="", max_seq_len=1, on_error="skip")
texts = [document.text for unit in open_source(wanted).units() for document in read_documents(unit, wanted, skipped)]
peak_kib = next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(texts, skipped.counts["too_large"], int(peak_kib) // 1024)
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a.txt.zst", "a.jsonl.zst", "a.jsonl.gz"])
def test_a_small_file_that_decompresses_to_gigabytes_takes_bounded_memory(name: str, tmp_path: Path) -> None:
    compressor = zstandard.ZstdCompressor().compressobj() if name.endswith("zst") else zlib.compressobj(1, wbits=31)
    pieces = [compressor.compress(b'{"text": "')] + [compressor.compress(b"a" * 2**24) for _ in range(48)]
    end = compressor.compress(b'"}\n{"text": "good"}\n') + compressor.flush()
    path = plain(tmp_path / name, b"".join([*pieces, end]))
    ended = subprocess.run([sys.executable, "-c", BOMB, path], capture_output=True, text=True, check=True)
    texts, num_large, peak_mib = ended.stdout.rsplit(maxsplit=2)
    assert texts == ("[]" if name == "a.txt.zst" else "['good']") and num_large == "1"
    assert int(peak_mib) < 700


def test_a_plain_document_has_a_bound_too(tmp_path: Path, monkeypatch) -> None:
    for module in (contents, documents):
        monkeypatch.setattr(module, "MAX_PLAIN_BYTES", 30)
    lines = b'{"text": "good"}\n{"text": "' + b"a" * 40 + b'"}\n'
    for name, content in (("a.txt", b"a" * 31), ("a.jsonl", lines)):
        with pytest.raises(DataError, match=r"has more than 4 GiB, the most that a document may have; repair it"):
            texts_of(plain(tmp_path / name, content))


@pytest.mark.timeout(60)
def test_pipes_beside_a_data_set_that_was_saved_are_not_waited_for(tmp_path: Path) -> None:
    plain(tmp_path / "a.jsonl", b'{"text": "good"}\n')
    for name in ("state.json", "dataset_dict.json", "b.jsonl"):
        os.mkfifo(tmp_path / name)
    assert texts_of(tmp_path) == ["good"]


# Data sets that `datasets` saved


def test_files_beside_a_saved_data_set_are_counted_as_ignored(tmp_path: Path) -> None:
    saved = datasets.Dataset.from_list([{"text": "a"}])
    datasets.DatasetDict({"train": saved, "test": saved}).save_to_disk(tmp_path)
    assert list_files([str(tmp_path)], split="train", on_error="stop").num_ignored == 0
    (tmp_path / "more").mkdir()
    for name in ("README.txt", "more/a.jsonl", "more/b.bin", ".hidden", "train/cache-1.arrow", "train/b.txt"):
        plain(tmp_path / name, b"{}")
    found = list_files([str(tmp_path)], split="train", on_error="stop")
    assert [path.name for path in found.files] == ["data-00000-of-00001.arrow"] and found.num_ignored == 5


@pytest.mark.parametrize("name", ["a.txt.gz", "a.jsonl.zst", "a.csv.gz"])
def test_a_compressed_file_of_no_bytes_is_a_bad_one(tmp_path: Path, name: str) -> None:
    path = plain(tmp_path / name, b"")
    plain(tmp_path / "b.txt", b"")
    reason = f"it has 0 bytes, so it is no whole {path.suffix} file"
    with pytest.raises(DataError, match=f"{name} cannot be read: {reason}; repair it, or leave such places out with"):
        list_files([str(tmp_path)], split="train", on_error="stop")
    found = list_files([str(tmp_path)], split="train", on_error="skip")
    assert [path.name for path in found.files] == ["b.txt"] and found.unreadable == [f"{path}: {reason}"]


# Folders


def test_links_to_folders_are_followed_once_and_circles_end(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "real").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    plain(tree / "real" / "a.txt", b"a")
    plain(tmp_path / "elsewhere" / "b.txt", b"b")
    (tree / "0-link").symlink_to(tree / "real")
    (tree / "far").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "back").symlink_to(tree)
    found = listing.list_files([str(tree)], split="train", on_error="stop")
    assert [str(path.relative_to(tree)) for path in found.files] == ["far/b.txt", "real/a.txt"]
    assert sorted(found.repeated) == [
        f"{tree}/0-link is the same folder as {tree}/real",
        f"{tree}/far/back is the same folder as {tree}",
    ]


def test_a_glob_takes_the_folders_and_names_the_dead_links_that_it_matches(tmp_path: Path) -> None:
    (tmp_path / "part-0").mkdir()
    plain(tmp_path / "part-0" / "a.txt", b"a")
    plain(tmp_path / "part-1.txt", b"b")
    os.mkfifo(tmp_path / "part-2.txt")
    found = listing.list_files([str(tmp_path / "part-*")], split="train", on_error="stop")
    assert [path.name for path in found.files] == ["a.txt", "part-1.txt"]
    assert found.num_ignored == 1
    with pytest.raises(DataError, match=r"\*-2\*: nothing here can be read"):
        listing.list_files([str(tmp_path / "*-2*")], split="train", on_error="stop")
    assert texts_of(tmp_path / "**" / "a*") == ["a"]
    (tmp_path / "part-3.txt").symlink_to(tmp_path / "gone.txt")
    with pytest.raises(DataError, match=r"part-3.txt cannot be read: it is a link to .*gone.txt, which does not exist"):
        listing.list_files([str(tmp_path / "part-*")], split="train", on_error="stop")
    found = listing.list_files([str(tmp_path / "**" / "*.txt")], split="train", on_error="skip")
    assert [sentence.partition(": ")[0] for sentence in found.unreadable] == [f"{tmp_path}/part-3.txt"]
    with pytest.raises(DataError, match="~nobody-here/a: no such file or folder"):
        texts_of("~nobody-here/a")


def test_a_file_under_two_names_is_read_once_and_said(tmp_path: Path, tokenizer_folder: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    write_jsonl(folder / "b.jsonl", make_documents(30))
    (folder / "a.jsonl").symlink_to(folder / "b.jsonl")
    (folder / "c.jsonl").hardlink_to(folder / "b.jsonl")
    said: list[str] = []
    wanted = request(folder, tokenizer_folder, sources=(str(folder), str(folder / "a.jsonl")), val_fraction=0)
    summary = prepare(wanted, tmp_path / "out", num_workers=1, notify=said.append)
    assert summary.splits["train"].documents == 30
    assert said == [
        f"{folder}/c.jsonl is the same file as {folder}/b.jsonl, so it is read once",
        f"{folder}/a.jsonl is the same file as {folder}/b.jsonl, so it is read once",
        f"{folder}/a.jsonl is the same file as {folder}/b.jsonl, so it is read once",
    ]


def test_links_that_lead_nowhere_stop_or_are_named(tmp_path: Path, tokenizer_folder: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    write_jsonl(folder / "b.jsonl", make_documents(30))
    (folder / "a.jsonl").symlink_to(tmp_path / "gone.jsonl")
    (folder / "circle").symlink_to(folder / "circle")
    os.mkfifo(folder / "pipe.txt")
    wanted = request(folder, tokenizer_folder)
    reason = f"{folder}/a.jsonl cannot be read: it is a link to {tmp_path}/gone.jsonl, which does not exist or cannot"
    with pytest.raises(DataError, match=reason + r" be reached; repair it, or leave such places out with --on-error"):
        prepare(wanted, tmp_path / "out", num_workers=1)
    summary = prepare(replace(wanted, on_error="skip"), tmp_path / "out", num_workers=1)
    assert [sentence.partition(": ")[0] for sentence in summary.unreadable] == [f"{folder}/a.jsonl", f"{folder}/circle"]
    assert summary.ignored_files == 1
    with pytest.raises(DataError, match=r"a.jsonl is a link to .*gone.jsonl, which does not exist"):
        open_source(request(folder / "a.jsonl", ""))


UNREADABLE = """
import os, sys
from llmfoundry_lite.prepare.listing import list_files
os.setuid(65534)
found = list_files([sys.argv[1]], split="train", on_error="skip")
print([path.name for path in found.files], found.unreadable)
try:
    list_files([sys.argv[1]], split="train", on_error="stop")
except Exception as error:
    print(error)
"""
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="becoming somebody else needs root")


def assert_nobody_finds(source: Path, files: list[str], unreadable: list[Path]) -> None:
    """A user who may not read everything finds these files. The first unreadable place stops; the others are named."""
    for place in filter(Path.exists, source.parents):
        if place.owner() == "root" and place.stat().st_mode & 0o005 != 0o005 and "pytest" in str(place):
            place.chmod(0o755)
    ended = subprocess.run([sys.executable, "-c", UNREADABLE, source], capture_output=True, text=True, check=True)
    assert ended.stdout.splitlines() == [
        f"{files} {[f'{path}: Permission denied' for path in unreadable]}",
        f"{unreadable[0]} cannot be read: Permission denied; repair it, or leave such places out with --on-error skip",
    ]


def test_a_glob_in_a_folder_that_looks_like_one_reads_that_folder(tmp_path: Path) -> None:
    for name in ("run[1]", "run1", "run[2]"):
        (tmp_path / name / "part").mkdir(parents=True)
        plain(tmp_path / name / "part/a.txt", name.encode())
    assert texts_of(tmp_path / "run[1]/*/*.txt") == texts_of(tmp_path / "run[1]/**") == ["run[1]"]
    assert texts_of(tmp_path / "run[12]/*/a.txt") == ["run1"]


@needs_root
@pytest.mark.parametrize("pattern", ["*/*.txt", "*/a.txt", "**/*.txt", "**", "cl*/[a-b].*"])
@pytest.mark.parametrize("mode", [0o000, 0o744], ids=["closed", "listed, not entered"])
def test_folders_that_a_glob_cannot_look_into_stop_or_are_named(tmp_path: Path, pattern: str, mode: int) -> None:
    for folder in ("closed", "clear"):
        plain(tmp_path / "in" / folder / "a.txt", folder.encode())
    (tmp_path / "in" / "closed").chmod(mode)
    assert_nobody_finds(tmp_path / "in" / pattern, ["a.txt"], [tmp_path / "in/closed"])


@needs_root
def test_folders_and_files_without_permission_stop_or_are_named(tmp_path: Path) -> None:
    plain(tmp_path / "in" / "closed" / "a.txt", b"a").parent.chmod(0)
    plain(tmp_path / "in" / "b.txt", b"b").chmod(0)
    plain(tmp_path / "in" / "c.txt", b"c")
    assert_nobody_finds(tmp_path / "in", ["c.txt"], [tmp_path / "in/closed", tmp_path / "in/b.txt"])


def test_a_name_that_is_no_utf8_is_read(tmp_path: Path, tokenizer_folder: Path) -> None:
    path = write_jsonl(Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.jsonl")), make_documents(30))
    summary = prepare(request(path, tokenizer_folder, val_fraction=0), tmp_path / "out", num_workers=1)
    assert summary.splits["train"].documents == 30


# An input that changes meanwhile


@pytest.mark.parametrize("change", ["rewrite", "remove"])
def test_an_input_that_is_written_to_meanwhile_is_not_published(
    change: str, tmp_path: Path, tokenizer_folder: Path, monkeypatch
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", make_documents(60))
    wanted = request(path, tokenizer_folder)
    tokenize = prepare_module.tokenize_source

    def tokenize_then_change(*arguments, **options):
        work = tokenize(*arguments, **options)
        path.unlink() if change == "remove" else path.write_bytes(path.read_bytes())
        return work

    with (
        monkeypatch.context() as patch,
        pytest.raises(
            DataError,
            match=r"the input has changed .*: it was written to while|was there when the preparation began and is",
        ),
    ):
        patch.setattr(prepare_module, "tokenize_source", tokenize_then_change)
        prepare(wanted, tmp_path / "out", num_workers=1)
    assert not (tmp_path / "out" / "summary.json").exists() and not (tmp_path / "out" / "train").exists()
    if change == "rewrite":
        with pytest.raises(DataError, match="unfinished preparation of something else: the input has changed"):
            prepare(wanted, tmp_path / "out", num_workers=1)
        assert prepare(wanted, tmp_path / "out", num_workers=1, overwrite=True).splits["train"].documents


def test_an_input_that_goes_away_while_it_is_read_is_one_line(tmp_path: Path, tokenizer_folder, monkeypatch) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", make_documents(60))
    tokenize = prepare_module.tokenize_source

    def remove_then_tokenize(*arguments, **options):
        path.unlink()
        return tokenize(*arguments, **options)

    monkeypatch.setattr(prepare_module, "tokenize_source", remove_then_tokenize)
    with pytest.raises(DataError, match=r"a\.jsonl cannot be read or written: No such file or directory$"):
        prepare(request(path, tokenizer_folder), tmp_path / "out", num_workers=1)
