"""Parts of a preparation, in any number and order, with kills and repeats, give the bytes of one machine."""

import itertools
import json
import os
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from llmfoundry_engines import join as join_module
from llmfoundry_engines import prepare_part as part_module
from llmfoundry_engines import reports, shared_folder, status
from llmfoundry_engines.join import join, join_shards
from llmfoundry_engines.part import Part, choose_items, choose_pieces, parse_part, part_of_folder
from llmfoundry_engines.prepare_part import prepare_part
from llmfoundry_engines.tests.part_runs import change_report, prepare_parts
from llmfoundry_lite.cli import main
from llmfoundry_lite.errors import DataError
from llmfoundry_lite.files import lock_folder
from llmfoundry_lite.prepare import best_fit
from llmfoundry_lite.prepare import prepare as prepare_module
from llmfoundry_lite.prepare.prepare import prepare
from llmfoundry_lite.prepare.request import PrepareRequest
from llmfoundry_lite.prepare.sources import Piece, open_source
from llmfoundry_lite.prepare.token_files import DISTRUST_FILE, TokenFiles
from tests.helpers.data import make_documents
from tests.helpers.preparing import SEQ_LEN, assert_same_result, plain, request

# Equal bytes


@pytest.mark.parametrize("count", [1, 3, 16])
def test_any_number_of_parts_in_any_order_gives_the_bytes_of_one_machine(
    wanted: PrepareRequest, expected: Path, tmp_path: Path, count: int
) -> None:
    """There are fewer than 16 units, so that some of 16 parts are empty."""
    assert 6 < len(list(open_source(wanted).units())) < 16
    numbers = list(range(1, count + 1))
    random.Random(count).shuffle(numbers)
    prepare_parts(wanted, tmp_path / "out", numbers, count)
    summary = join(tmp_path / "out")
    assert summary.splits["train"].shards > 3
    assert_same_result(tmp_path / "out", expected)


def test_a_tokenizer_is_trained_by_one_part_for_all(
    wanted: PrepareRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = replace(wanted, tokenizer="train:400")
    prepare(trained, tmp_path / "expected", num_workers=1)
    train, num_trained = prepare_module.train_tokenizer, itertools.count(1)

    def train_while_another_part_finishes(texts: list[str], vocab_size: int):
        if next(num_trained) == 1:
            prepare_part(trained, tmp_path / "out", Part(2, 3), num_workers=1)
            return train(texts[:50], vocab_size)  # it came too late, so this one must not be used
        return train(texts, vocab_size)

    monkeypatch.setattr(prepare_module, "train_tokenizer", train_while_another_part_finishes)
    prepare_parts(trained, tmp_path / "out", [1, 3], 3)
    assert next(num_trained) == 3, "the third part has used the tokenizer that is there"
    join(tmp_path / "out")
    assert_same_result(tmp_path / "out", tmp_path / "expected")


def test_one_sample_is_held_out_of_all_parts_together(wanted: PrepareRequest, tmp_path: Path) -> None:
    """The threshold is raised, so the counts in the reports are made again from the token files."""
    rare = replace(wanted, val_fraction=1e-9)
    assert prepare(rare, tmp_path / "expected", num_workers=1).splits["val"].samples
    prepare_parts(rare, tmp_path / "out", [3, 2, 1], 3)
    join(tmp_path / "out")
    assert_same_result(tmp_path / "out", tmp_path / "expected")


def test_what_is_skipped_and_lost_is_counted_over_all_parts(
    wanted: PrepareRequest, tmp_path: Path, tokenizer_folder: Path
) -> None:
    """Many characters are equally frequent, so that their order in the summary shows the order of adding."""
    for number in range(6):
        letters = "".join(chr(0x4E00 + number * 3 + index) for index in range(6))
        lines = [json.dumps({"text": f"{letters} {document}"}) for document in make_documents(40, seed=number)]
        plain(tmp_path / f"in/{number}.jsonl", "\n".join([*lines, "{", '{"body": 1}']).encode())
    backend = json.loads((tokenizer_folder / "tokenizer.json").read_text())
    backend["normalizer"] = {"type": "Replace", "pattern": {"Regex": "[\u4e00-\u9fff]"}, "content": ""}
    lossy = plain(tmp_path / "lossy/tokenizer.json", json.dumps(backend).encode()).parent
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        plain(lossy / name, (tokenizer_folder / name).read_bytes())
    skipping = replace(wanted, sources=(str(tmp_path / "in"),), tokenizer=str(lossy), on_error="skip")
    summary = prepare(skipping, tmp_path / "expected", num_workers=1, max_lost_text=0.5)
    assert summary.skipped["invalid_json"] == 6 and len(summary.lost_text["examples"]) == 8

    said: list[str] = []
    for number in (2, 3, 1):
        prepare_part(skipping, tmp_path / "out", Part(number, 3), num_workers=1, notify=said.append)
    assert len(said) == 3 and all("data join refuses the result if all parts together lose" in line for line in said)
    with pytest.raises(DataError, match=r"or allow it with --max-lost-text 0\.0\d$"):
        join(tmp_path / "out")
    join(tmp_path / "out", max_lost_text=0.5)
    assert_same_result(tmp_path / "out", tmp_path / "expected")


def test_one_machine_may_finish_what_parts_have_begun(wanted: PrepareRequest, expected: Path, tmp_path: Path) -> None:
    prepare_parts(wanted, tmp_path / "out", [2], 3)
    said: list[str] = []
    prepare(wanted, tmp_path / "out", num_workers=1, notify=said.append)
    assert said[0].startswith("carrying on in")
    assert_same_result(tmp_path / "out", expected)
    prepare_part(wanted, tmp_path / "out", Part(1, 3), num_workers=1, notify=said.append)
    assert said[-1] == f"{tmp_path / 'out'} is complete: all parts were joined there before"


# Kills and repeats


def test_a_part_that_was_killed_carries_on_and_a_complete_one_is_not_done_again(
    wanted: PrepareRequest, expected: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, written = TokenFiles.write, []

    def write_three(self, number, unit):
        if len(written) % 4 == 3:
            written.append(None)
            raise KeyboardInterrupt
        written.append(number)
        return write(self, number, unit)

    monkeypatch.setattr(TokenFiles, "write", write_three)
    num_kills = 0
    for number in (2, 1):
        while True:
            try:
                prepare_part(wanted, tmp_path / "out", Part(number, 2), num_workers=1)
                break
            except KeyboardInterrupt:
                num_kills += 1
                with pytest.raises(DataError, match=rf"{number}/2 is \d+ % done, as of \d s ago"):
                    join(tmp_path / "out")
    numbers = [number for number in written if number is not None]
    assert num_kills >= 3 and len(numbers) == len(set(numbers)), "no unit was tokenised twice"

    said: list[str] = []
    prepare_part(wanted, tmp_path / "out", Part(2, 2), num_workers=1, notify=said.append)
    assert said == ["part 2/2 is complete already"]
    join(tmp_path / "out")
    assert_same_result(tmp_path / "out", expected)


# Shards by parts


def test_shares_of_the_shards_are_taken_if_they_are_as_recorded(
    wanted: PrepareRequest, expected: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    prepare_parts(wanted, out, [1, 2], 2)
    assert join_shards(out, Part(4, 4)) > 0
    join_shards(out, Part(2, 4))
    shards = sorted((out / ".partial").rglob("*.mds"))
    assert 2 < len(shards) < len(list(expected.rglob("*.mds")))
    damaged, *others = shards
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
    plain(damaged.with_name("shard.09999.mds"), b"of another plan")
    times = {path.name: path.stat().st_mtime_ns for path in others}

    join(out)
    for path in others:
        moved = out / path.parent.name / path.name
        assert moved.stat().st_mtime_ns == times[path.name], "it was not written again"
    assert_same_result(out, expected)
    said: list[str] = []
    assert join_shards(out, Part(1, 4), notify=said.append) == 0
    assert join(out, notify=said.append).splits
    assert said == [f"{out} is complete: its parts were joined before"] * 2


@pytest.mark.parametrize("options", [{"compression": "zstd:3"}, {"pack": "best-fit"}])
def test_all_shards_may_be_written_by_shares(
    wanted: PrepareRequest, tmp_path: Path, monkeypatch, options: dict
) -> None:
    monkeypatch.setattr(best_fit, "WINDOW_TOKENS", 5_000)
    monkeypatch.setattr(best_fit, "WINDOW_SAMPLES", 1)
    changed = replace(wanted, **options)
    prepare(changed, tmp_path / "expected", num_workers=1)
    prepare_parts(changed, tmp_path / "out", [3, 1, 2], 3)
    written = [join_shards(tmp_path / "out", Part(number, 3)) for number in (3, 1, 2)]
    assert sum(written) == len(list((tmp_path / "expected").rglob("*.mds*")))
    join(tmp_path / "out")
    assert_same_result(tmp_path / "out", tmp_path / "expected")


def test_a_join_that_was_killed_while_it_published_is_made_good(
    wanted: PrepareRequest, expected: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, rename = tmp_path / "out", Path.rename
    prepare_parts(wanted, out, [1, 2], 2)

    def stop(path: Path, target: Path) -> Path:
        if target == out / "val":
            raise KeyboardInterrupt
        return rename(path, target)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "rename", stop)
        join(out)
    assert (out / "train").exists() and not (out / "summary.json").exists()
    join(out)
    assert_same_result(out, expected)


# Refusals


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_seq_len": 16}, "max_seq_len was 32 and is 16 now"),
        ({"tokenizer": "train:400"}, "tokenizer was '.*' and is 'train:400' now"),
        ({"on_error": "skip"}, "on_error was 'stop' and is 'skip' now"),
        ({"pack": "best-fit"}, "pack was 'concat' and is 'best-fit' now"),
    ],
)
def test_parts_of_another_request_are_refused_by_name(
    wanted: PrepareRequest, tmp_path: Path, change: dict, message: str
) -> None:
    prepare_parts(wanted, tmp_path / "out", [1], 2)
    with pytest.raises(DataError, match=rf"holds parts of another preparation: {message}; choose another --out, or r"):
        prepare_part(replace(wanted, **change), tmp_path / "out", Part(2, 2), num_workers=1)


def test_parts_of_another_input_or_release_are_refused(
    wanted: PrepareRequest, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    prepare_parts(wanted, out, [1], 2)
    with monkeypatch.context() as patch:
        patch.setattr(shared_folder, "current_releases", lambda: {"llmfoundry-lite": "9", "tokenizers": "8"})
        with pytest.raises(
            DataError, match=r"another preparation: releases was \{.*\} and is \{'llmfoundry-lite': '9'"
        ):
            prepare_part(wanted, out, Part(2, 2), num_workers=1)
        with pytest.raises(DataError, match=r"cannot be joined here: releases was .*; join it with the release of its"):
            join(out)
    more = plain(corpus / "e.txt", b"more")
    try:
        with pytest.raises(DataError, match=r"another preparation: the input has changed \(files 43, .* files 44"):
            prepare_part(wanted, out, Part(2, 2), num_workers=1)
    finally:
        more.unlink()


def test_an_input_that_changes_while_a_part_reads_it_leaves_no_report(
    wanted: PrepareRequest, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenize, file = part_module.tokenize_source, corpus / "d.jsonl"
    times = file.stat()

    def tokenize_then_change(*arguments):
        counts = tokenize(*arguments)
        os.utime(file, ns=(0, 0))
        return counts

    monkeypatch.setattr(part_module, "tokenize_source", tokenize_then_change)
    try:
        with pytest.raises(DataError, match=r"the input has changed.* complete, remove .* and run all parts again"):
            prepare_part(wanted, tmp_path / "out", Part(1, 1), num_workers=1)
    finally:
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    with pytest.raises(DataError, match="1 of 1 parts not complete"):
        join(tmp_path / "out")


def test_missing_parts_are_named_and_the_most_complete_number_of_parts_counts(
    wanted: PrepareRequest, expected: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    with pytest.raises(DataError, match=r"has no parts to join; prepare them there first"):
        join(out)
    prepare_parts(wanted, out, [4], 9)
    message = r"8 of 9 parts not complete: 1/9 has not begun; 2/9 has not begun; .*; and 3 more; run these with"
    with pytest.raises(DataError, match=message):
        join(out)
    prepare_parts(wanted, out, [1], 2)
    with pytest.raises(DataError, match=r"1 of 2 parts not complete: 2/2 has not begun; run these with"):
        join_shards(out, Part(1, 2))
    prepare_parts(wanted, out, [2], 2)
    join(out)
    assert_same_result(out, expected)


def test_an_encoder_that_one_part_found_to_differ_makes_others_incomplete(
    wanted: PrepareRequest, expected: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    prepare_parts(wanted, out, [1, 2], 2)
    change_report(out, Part(1, 2), {"is_fast": True})
    plain(out / ".partial" / DISTRUST_FILE, b"gigatoken and tokenizers differ")
    with pytest.raises(DataError, match="1 of 2 parts not complete: 1/2"):
        join(out)
    prepare_parts(wanted, out, [1], 2)
    join(out)
    assert_same_result(out, expected)


def test_neither_a_join_nor_the_same_part_nor_one_machine_runs_beside_a_part(
    wanted: PrepareRequest, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    prepare_parts(wanted, out, [1], 2)
    lock = lock_folder(out, is_shared=True)
    own_lock = lock_folder(out / ".partial/parts" / Part(1, 2).folder_name)
    try:
        for refused in (lambda: join(out), lambda: prepare(wanted, out, num_workers=1)):
            with pytest.raises(DataError, match="another preparation is running in"):
                refused()
        with pytest.raises(DataError, match=r"part 1/2 is running already, in .*out; wait for it"):
            prepare_parts(wanted, out, [1], 2)
        prepare_parts(wanted, out, [2], 2)
    finally:
        os.close(own_lock)
        os.close(lock)


def test_one_machine_may_finish_what_parts_have_begun_but_not_the_reverse(
    wanted: PrepareRequest, expected: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    prepare_parts(wanted, out, [2], 3)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(prepare_module, "pack_samples", interrupt)
        prepare(wanted, out, num_workers=1)
    with pytest.raises(DataError, match="holds an unfinished preparation without --part; finish it without --part"):
        prepare_parts(wanted, out, [1], 3)
    prepare(wanted, out, num_workers=1)
    assert_same_result(out, expected)
    with pytest.raises(DataError, match=r"max_seq_len was 32 and is 16 now; choose another --out, or remove .* first"):
        prepare_parts(replace(wanted, max_seq_len=16), out, [1], 3)


def test_a_second_join_beside_one_that_publishes_replaces_nothing(
    wanted: PrepareRequest, expected: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Act like a join where locks do nothing: the other one moves its folders before this one does."""
    out = tmp_path / "out"
    prepare_parts(wanted, out, [1], 1)
    publish = join_module.publish

    def publish_twice(*arguments) -> None:
        publish(*arguments)
        with pytest.raises(DataError, match=r"train is gone: another process publishes .*out; wait for it"):
            publish(*arguments)

    monkeypatch.setattr(join_module, "publish", publish_twice)
    join(out)
    assert_same_result(out, expected)


def interrupt(*arguments) -> None:
    """Stop as by Ctrl-C."""
    raise KeyboardInterrupt


def test_folders_of_others_are_left_alone(wanted: PrepareRequest, tmp_path: Path) -> None:
    precious = plain(tmp_path / "out/train/precious", b"mine")
    with pytest.raises(DataError, match="already contains train, not written by this command"):
        prepare_parts(wanted, tmp_path / "out", [1], 2)
    plain(tmp_path / "file/.partial", b"mine")
    with pytest.raises(DataError, match=r"is not of this command: it has no request\.json"):
        prepare_parts(wanted, tmp_path / "file", [1], 2)
    assert [path.name for path in (tmp_path / "file").iterdir()] == [".partial"]
    plain(tmp_path / "other/.partial/precious", b"mine")
    with pytest.raises(DataError, match=r"is not of this command: it has no request\.json"):
        prepare_parts(wanted, tmp_path / "other", [1], 2)
    assert precious.read_bytes() == b"mine" and (tmp_path / "other/.partial/precious").exists()


def test_a_join_leaves_folders_of_others_alone(wanted: PrepareRequest, tmp_path: Path) -> None:
    out = tmp_path / "out"
    prepare_parts(wanted, out, [1], 1)
    kept = plain(out / ".partial.backup/precious", b"mine")
    leftover = plain(out / ".partial.node7-42.unfinished/request.json", b"{}")
    join(out)
    assert kept.read_bytes() == b"mine" and not leftover.exists()

    other = tmp_path / "other"
    precious = plain(other / ".partial/precious", b"mine")
    summary = plain(other / "summary.json", b'{"of": "another program"}')
    with pytest.raises(DataError, match="is not a summary that this version of `data prepare` wrote"):
        join(other)
    summary.write_bytes((out / "summary.json").read_bytes())
    join(other)
    assert precious.read_bytes() == b"mine"


# Shares


@pytest.mark.parametrize("count", [1, 2, 5, 40])
def test_parts_divide_the_pieces_in_order_and_by_bytes(count: int) -> None:
    sizes = [4, 4, 1, 9, 0, 3, 30, 2, 2, 2, 0, 0, 7]
    pieces = [Piece(num_bytes=size, units=list) for size in sizes]
    ranges = [choose_pieces(pieces, sum(sizes), Part(number, count)) for number in range(1, count + 1)]
    assert ranges[0].first == 0 and ranges[-1].end == len(sizes)
    assert all(earlier.end == later.first for earlier, later in itertools.pairwise(ranges))
    assert [share.num_bytes for share in ranges] == [sum(sizes[share.first : share.end]) for share in ranges]
    assert all(share.num_bytes <= sum(sizes) / count + max(sizes) for share in ranges)
    assert part_of_folder("000009-of-000003") is None and part_of_folder("000001-of-999999") is None
    assert [len(choose_items(13, Part(number, count))) for number in range(1, count + 1)].count(13 // count) > 0


def test_a_stream_of_unknown_size_is_all_in_the_first_part() -> None:
    stream = [Piece(num_bytes=0, units=list)]
    assert [choose_pieces(stream, 0, Part(number, 2)).end for number in (1, 2)] == [1, 1]
    assert [choose_pieces(stream, 0, Part(number, 2)).first for number in (1, 2)] == [0, 1]


@pytest.mark.parametrize("text", ["", "3", "0/4", "5/4", "a/b", "1/0", "-1/4", "1/100001", "1/2/3"])
def test_a_part_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(DataError, match=f"--part {text}: expected the number of a part and the number of parts, such"):
        parse_part(text)


# The commands


def test_the_commands_prepare_parts_show_them_and_join(
    corpus: Path, tokenizer_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    out = str(tmp_path / "out")
    options = ["--out", out, "--tokenizer", str(tokenizer_folder), "--max-seq-len", str(SEQ_LEN)]
    part_command = ["data", "prepare", str(corpus), *options, "--num-workers", "1", "--part"]
    assert main.run([*part_command, "2/2"]) == 0
    assert f"when all parts are complete: llmfoundry-lite data join {out}" in capsys.readouterr().out
    assert main.run([*part_command, "1/2", "--overwrite"]) == 2
    assert "--overwrite with --part 1/2: it would discard the work of other parts" in capsys.readouterr().err
    assert main.run(["data", "join", out]) == 2
    assert "1 of 2 parts not complete: 1/2 has not begun" in capsys.readouterr().err

    assert main.run(["data", "prepare", "--status", out]) == 0
    shown = capsys.readouterr().out
    assert "not begun" in shown and "1 of 2 parts are complete" in shown and "core-hours left" in shown
    assert main.run([*part_command, "1/2"]) == 0
    assert main.run(["data", "prepare", "--status", out]) == 0
    assert "2 of 2 parts are complete; 100 % of" in capsys.readouterr().out
    assert main.run(["data", "join", out, "--part", "1/2"]) == 0
    assert main.run(["data", "join", out]) == 0
    assert "prepared in" in capsys.readouterr().out
    assert main.run(["data", "prepare", "--status", out]) == 0
    assert f"{out} is complete" in capsys.readouterr().out
    prepare(request(corpus, tokenizer_folder), tmp_path / "expected", num_workers=1)
    assert_same_result(tmp_path / "out", tmp_path / "expected")


def test_the_status_adds_up_speed_and_tells_who_runs_and_who_is_silent() -> None:
    running = reports.Progress(
        part="1/3", num_bytes=40_000_000, done_bytes=10_000_000, new_bytes=9_000_000, seconds=3.0, workers=3, host="a"
    )
    stopped = replace(running, part="2/3", done_bytes=20_000_000, host="b")
    statuses = [
        status.PartStatus(part=Part(1, 3), report=None, progress=running, age_seconds=3),
        status.PartStatus(part=Part(2, 3), report=None, progress=stopped, age_seconds=status.SILENT_SECONDS),
        status.PartStatus(part=Part(3, 3), report=None, progress=None, age_seconds=0),
    ]
    rows = status.table_of(statuses).rows
    assert [row[:3] for row in rows] == [
        ["1/3", "running", "25 %"],
        ["2/3", "stopped", "50 %"],
        ["3/3", "not begun", ""],
    ]
    assert status.describe_rest(statuses, 120_000_000, "data/mine") == [
        "0 of 3 parts are complete; 25 % of 120.0 MB is tokenised",
        "1.00 MB/s a core; 0.03 core-hours left, 0.01 hours on the 3 cores that work now",
    ]
    report = SimpleNamespace(num_bytes=9, new_bytes=9, seconds=1.0, workers=1)
    complete = status.PartStatus(part=Part(1, 1), report=report, progress=None, age_seconds=0)  # type: ignore[arg-type]
    lines = status.describe_rest([complete], 9, "data/my texts")
    assert "next: llmfoundry-lite data join 'data/my texts'" in lines


def test_progress_is_written_while_a_part_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports, "PROGRESS_SECONDS", 0.0)
    file = reports.ProgressFile(tmp_path, Part(1, 2), 100, 2)
    finished = SimpleNamespace(unit=SimpleNamespace(num_bytes=30), counts=None)
    file.add(finished)  # type: ignore[arg-type]
    file.add(SimpleNamespace(unit=SimpleNamespace(num_bytes=20), counts=object()))  # type: ignore[arg-type]
    progress = reports.load_progress(tmp_path)
    assert progress is not None and (progress.done_bytes, progress.new_bytes) == (50, 20)
