"""Text in CSV, parquet and arrow, as `data prepare` reads it."""

import csv
import gzip
import io
import json
import re
from dataclasses import replace
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from llmfoundry_formats import tables as formats
from llmfoundry_lite.data.tokenizer import Tokenizer
from llmfoundry_lite.errors import DataError
from llmfoundry_lite.prepare import sources
from llmfoundry_lite.prepare.prepare import prepare
from llmfoundry_lite.prepare.sources import open_source
from llmfoundry_lite.prepare.summary import print_summary
from tests.helpers.bombs import little_memory
from tests.helpers.data import make_documents
from tests.helpers.preparing import (
    NESTED_ROWS,
    assert_holds,
    assert_reads_nested,
    plain,
    request,
    texts_of,
    units_of,
    write_jsonl,
)

# Fields


def as_parquet(path: Path) -> Path:
    pq.write_table(pa.Table.from_pylist(NESTED_ROWS), path / "a.parquet")
    return path / "a.parquet"


def as_arrow(path: Path) -> Path:
    datasets.Dataset.from_list(NESTED_ROWS).save_to_disk(path / "saved")
    return path / "saved"


def as_hub(path: Path) -> str:
    plain(path / "a.jsonl", "\n".join(map(json.dumps, NESTED_ROWS)).encode())
    return f"hf:{path}"


@pytest.mark.parametrize("store", [as_parquet, as_arrow, as_hub])
def test_a_text_key_may_be_a_field_within_a_field_and_several_are_joined(store, tmp_path: Path) -> None:
    assert_reads_nested(store(tmp_path))


def test_a_key_with_a_dot_is_first_of_all_a_name(tmp_path: Path) -> None:
    pq.write_table(pa.table({"meta.text": ["a"]}), tmp_path / "a.parquet")
    assert texts_of(tmp_path / "a.parquet", text_key="meta.text") == ["a"]


def test_a_table_with_two_columns_of_the_name_or_a_torn_footer_is_named(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text"] * 2), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a.parquet has 2 columns named 'text'; rename all but one"):
        texts_of(tmp_path / "a.parquet", on_error="skip")
    torn = plain(tmp_path / "b.parquet", b"PAR1" + b"\x99" * 100 + (60).to_bytes(4, "little") + b"PAR1")
    with pytest.raises(DataError, match=r"b.parquet is not a parquet file: Couldn't deserialize"):
        texts_of(torn)


def test_a_parquet_file_without_the_column_is_counted_row_by_row_when_skipped(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    good, source = "word " * 99, tmp_path / "source"
    source.mkdir()
    pq.write_table(pa.table({"text": [good]}), source / "a.parquet")
    pq.write_table(pa.table({"body": ["x"] * 5}), source / "b.parquet", row_group_size=3)
    pq.write_table(pa.table({"text": [1, 2]}), source / "c.parquet")
    wanted = request(source, tokenizer_folder, on_error="skip")
    summary = prepare(wanted, tmp_path / "out", num_workers=1)
    assert (summary.skipped["missing_text_key"], summary.skipped["not_text"]) == (5, 2)
    assert summary.splits["train"].documents == 1
    assert f"{source}/b.parquet, row 1 has no 'text'; there are: body (choose one with --text-key)" in (
        summary.skipped_examples
    )
    printed = io.StringIO()
    print_summary(summary, "[red]\x1b[31m", Console(file=printed, width=400))
    assert "prepared in [red]\\x1b[31m" in printed.getvalue()
    assert "documents skipped: 5 missing_text_key, 2 not_text" in printed.getvalue()
    assert "b.parquet, row 1 has no 'text'" in printed.getvalue()


def test_a_parquet_file_gives_the_documents_in_it(tmp_path: Path, tokenizer: Tokenizer, tokenizer_folder: Path) -> None:
    documents = make_documents(12)
    pq.write_table(pa.table({"text": documents}), tmp_path / "a.parquet", row_group_size=5)
    wanted = request(tmp_path / "a.parquet", tokenizer_folder, val_fraction=0)
    summary = prepare(wanted, tmp_path / "out", num_workers=2)
    assert_holds(tmp_path / "out" / "train", summary, tokenizer, documents)


def test_a_file_that_is_no_parquet_is_named(tmp_path: Path, tokenizer_folder: Path) -> None:
    path = plain(tmp_path / "a.parquet", b"not parquet")
    with pytest.raises(DataError, match=r"a.parquet is not a parquet file") as raised:
        prepare(request(path, tokenizer_folder), tmp_path / "out", num_workers=1)
    assert "\n" not in str(raised.value)
    assert not list((tmp_path / "out").rglob("index.json"))


def test_a_bad_row_of_a_parquet_file_is_named_or_skipped(tmp_path: Path, tokenizer_folder: Path) -> None:
    texts = pa.array([b"good" * 100, b"\xff", b"good" * 100, None]).cast(pa.binary())
    unchecked = pa.StringArray.from_buffers(len(texts), *texts.buffers()[1:], texts.buffers()[0])
    pq.write_table(pa.table({"text": unchecked}), tmp_path / "a.parquet", row_group_size=1)
    wanted = request(tmp_path / "a.parquet", tokenizer_folder)
    with pytest.raises(DataError, match=r"a.parquet, row 2 is not valid UTF-8"):
        prepare(wanted, tmp_path / "out", num_workers=1)
    summary = prepare(replace(wanted, on_error="skip"), tmp_path / "out2", num_workers=1)
    assert (summary.skipped["invalid_utf8"], summary.skipped["not_text"]) == (1, 1)
    assert summary.splits["train"].documents == 2


# CSV


@pytest.mark.parametrize(("suffix", "delimiter"), [("csv", ","), ("tsv", "\t"), ("csv.gz", ","), ("tsv.gz", "\t")])
def test_rows_of_csv_may_hold_anything_that_quotes_protect(suffix: str, delimiter: str, tmp_path: Path) -> None:
    documents = ['two\nlines, "quoted"\ttab', "plain", "漢 and \r\n windows"]
    written = io.StringIO()
    csv.writer(written, delimiter=delimiter).writerows(
        [["id", "text"], *([str(i), d] for i, d in enumerate(documents))]
    )
    content = ("\ufeff" + written.getvalue() + "\n").encode()
    path = plain(tmp_path / f"a.{suffix}", gzip.compress(content) if suffix.endswith("gz") else content)
    assert texts_of(path) == documents
    assert sum(unit.num_bytes for unit in open_source(request(path, "")).units()) == path.stat().st_size


def test_bad_rows_of_csv_are_named_or_counted(tmp_path: Path) -> None:
    path = plain(tmp_path / "a.csv", b'id,text\n1,one\n2,"a"b\n3,two,three\n4,\xff\n5,five\n')
    with pytest.raises(DataError, match=r"a.csv, row 2 \(line 3\) does not parse as CSV \(.*\); repair it"):
        texts_of(path)
    ((texts, skipped),) = units_of(path, on_error="skip")
    assert texts == ["one", "five"]
    assert skipped.counts == {"invalid_csv": 2, "invalid_utf8": 1}
    assert skipped.examples[1] == f"{path}, row 3 has 3 fields, expected the 2 of the header"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"id,body\n1,x\n", r"a.csv, row 1 has no 'text'; there are: id, body \(choose one with --text-key\)"),
        (b"text,text\n1,x\n", "a.csv has 2 columns named 'text'; rename all but one"),
        (b'"i"d,text\n1,x\n', r"a.csv: its header \(line 1\) does not parse as CSV \(.*\); repair the file"),
        (b'text\none\n"two\nthree\n', r"a.csv: a quote that opens in line 3 or after is never closed \(.*\); repair"),
    ],
)
def test_csv_whose_rows_cannot_be_told_apart_is_refused(content: bytes, message: str, tmp_path: Path) -> None:
    path = plain(tmp_path / "a.csv", content)
    for on_error in ("stop",) if "--text-key" in message else ("stop", "skip"):
        with pytest.raises(DataError, match=message):
            texts_of(path, on_error=on_error)


def test_a_row_of_csv_has_a_bound_over_all_its_lines(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(formats, "MAX_DOCUMENT_BYTES", 1 << 20)
    content = gzip.compress(b"text\n" + b'"a\n",' * (1 << 20))
    with little_memory(100), pytest.raises(DataError, match=r"a.csv.gz, line \d+ is longer than 1 MiB"):
        texts_of(plain(tmp_path / "a.csv.gz", content))


def test_a_csv_file_may_be_longer_than_a_row_may_be(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(formats, "MAX_DOCUMENT_BYTES", 1000)
    rows = [f"row {number}" for number in range(400)]
    assert texts_of(plain(tmp_path / "a.csv", "\n".join(["text", *rows]).encode())) == rows


# Arrow, and data sets that `datasets` saved


def test_units_of_an_arrow_file_account_for_all_its_bytes(tmp_path: Path) -> None:
    """The progress bar ends at 100 %, though the record batches are smaller than the file."""
    path, table = tmp_path / "a.arrow", pa.table({"text": ["ten bytes."] * 1000})
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=300)
    size_bytes = path.stat().st_size
    units = list(formats.table_units(path, size_bytes, 3000))
    assert [(unit.start, unit.end) for unit in units] == [(0, 1), (1, 2), (2, 3), (3, 4)]
    assert sum(unit.num_bytes for unit in units) == size_bytes


def test_a_saved_data_set_is_read_in_its_order(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(sources, "MIN_UNIT_BYTES", 4000)
    documents = make_documents(3000, words=3)
    saved = datasets.Dataset.from_dict({"text": documents, "n": range(3000)})
    saved.save_to_disk(tmp_path / "one", num_shards=2)
    plain(tmp_path / "one" / "cache-0123.arrow", b"left by map")
    found = units_of(tmp_path / "one")
    assert [text for texts, _ in found for text in texts] == documents
    assert len(found) > 3
    datasets.DatasetDict({"train": saved, "test": saved.select(range(5))}).save_to_disk(tmp_path / "two")
    assert texts_of(tmp_path / "two", split="test") == documents[:5]
    with pytest.raises(DataError, match=r"two has no split 'val'; there are: train, test \(choose one with --split\)"):
        texts_of(tmp_path / "two", split="val")


def test_an_arrow_file_is_named_when_damaged_and_read_in_the_file_format(tmp_path: Path) -> None:
    table = pa.table({"text": pa.array(["a", None, "b"]).dictionary_encode()})
    with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(DataError, match=r"a.arrow, row 2: text is null, expected a string"):
        texts_of(tmp_path / "a.arrow")
    assert texts_of(tmp_path / "a.arrow", on_error="skip") == ["a", "b"]
    for content in (b"no arrow", (tmp_path / "a.arrow").read_bytes()[:-90]):
        with pytest.raises(DataError, match=r"b.arrow is damaged: "):
            texts_of(plain(tmp_path / "b.arrow", content))


# Data sets of the Hub


@pytest.mark.parametrize("name", ["sweep[1-3]", "a*", "a?", "[", "a::b", "line\nbreak[1]", "plain", "~"])
def test_a_hub_folder_is_read_and_no_other_that_its_name_matches_as_a_pattern(tmp_path: Path, name: str) -> None:
    for folder, text in ((name, "ours"), ("sweep1", "theirs"), ("ab", "theirs"), ("a", "theirs"), ("b", "theirs")):
        for place in (tmp_path / folder, tmp_path / folder / "deeper [2]"):
            place.mkdir(parents=True)
            write_jsonl(place / "train.jsonl", [text])
    assert texts_of(f"hf:{tmp_path / name}") == ["ours", "ours"]


def test_an_error_about_a_hub_folder_names_the_folder(tmp_path: Path) -> None:
    (tmp_path / "a[1]").mkdir()
    with pytest.raises(DataError, match=re.escape(f"hf:{tmp_path / 'a[1]'}: the data set cannot be opened: ")) as error:
        texts_of(f"hf:{tmp_path / 'a[1]'}")
    assert "/tmp/tmp" not in str(error.value)


def test_a_hub_data_set_is_streamed(tmp_path: Path, tokenizer: Tokenizer, tokenizer_folder: Path) -> None:
    documents = make_documents(40)
    folder = tmp_path / "set"
    folder.mkdir()
    write_jsonl(folder / "train.jsonl", documents[:25], key="content")
    write_jsonl(folder / "test.jsonl", documents[25:], key="content")
    wanted = request(f"hf:{folder}", tokenizer_folder, text_key="content", split="test", val_fraction=0)
    summary = prepare(wanted, tmp_path / "out", num_workers=1)
    assert_holds(tmp_path / "out" / "train", summary, tokenizer, documents[25:])

    with pytest.raises(DataError, match=r"row 1 has no 'text'; there are: id, content \(choose one with --text-key\)"):
        prepare(replace(wanted, text_key="text"), tmp_path / "out2", num_workers=1)
    with pytest.raises(DataError, match=r"cannot be opened: .*nosuch.*"):
        prepare(replace(wanted, split="nosuch"), tmp_path / "out3", num_workers=1)
