"""Reading MDS: the order on real files and processes, what samples may look like, and every error's text."""

import errno
import functools
import gc
import json
import multiprocessing
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import boto3
import numpy as np
import pytest
import torch
import xxhash
from streaming.base.compression import compress
from streaming.base.hashing import get_hashes
from streaming.base.storage.download import DOWNLOADER_MAPPINGS, S3Downloader
from streaming.base.util import bytes_to_int, number_abbrev_to_int

from llmfoundry_lite.config.data_schema import COUNTS, HASHES, REMOTES, SIZES
from llmfoundry_lite.data import cache
from llmfoundry_lite.data.dataset import TextDataset
from llmfoundry_lite.data.loader import batch_digest, build_text_loader, format_digest
from llmfoundry_lite.data.opened_shards import OpenedShards
from llmfoundry_lite.data.order import EpochOrder, SampleOrder
from llmfoundry_lite.data.rows import PAD_TOKEN
from llmfoundry_lite.data.streams import ORIGIN, ShardFolder, make_download_name
from llmfoundry_lite.errors import CheckpointError, DataError
from llmfoundry_lite.ranks.ending import run_and_exit
from tests.checkpoint.s3_server import s3_server
from tests.helpers.bombs import MIB, little_memory, small_files
from tests.helpers.launch import ROOT, launch
from tests.helpers.mds_writer import MDSWriter
from tests.helpers.numbered import SEQ_LEN, numbers, numbers_of, open_data, write_shards

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def flat(batches: list[list[int]]) -> list[int]:
    return [number for batch in batches for number in batch]


def expected_numbers(dataset: TextDataset, epoch: int = 0) -> list[list[int]]:
    order = dataset.order
    return order.build_epoch(epoch).sample_ids(range(order.batch_size), range(order.num_batches)).tolist()


@pytest.fixture
def shards(tmp_path) -> Path:
    return write_shards(tmp_path / "mds")


# Order and state ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_loader_yields_the_global_batches_in_order_epoch_after_epoch(shards, num_workers):
    dataset = open_data(shards)
    loader = build_text_loader(dataset, num_workers=num_workers, persistent_workers=num_workers == 3)
    assert len(loader) == 8 and dataset.order.num_samples == 8 * dataset.order.batch_size + 4
    assert [numbers(loader) for _ in range(3)] == [expected_numbers(dataset, epoch) for epoch in range(3)]


def test_a_rank_without_rows_of_its_own_has_those_of_an_earlier_batch_alone(shards):
    dataset = open_data(shards)
    dataset.resume_with_rows([], 0, 3 * dataset.order.batch_size, [2], 2)
    of_epoch = expected_numbers(dataset)
    assert numbers(build_text_loader(dataset)) == [[of_epoch[i - 2][2]] for i in range(3, 8)]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_rows_of_an_earlier_batch_come_beside_those_of_each_batch(shards, num_workers):
    dataset = open_data(shards)
    batch_size = dataset.order.batch_size
    dataset.resume_with_rows(range(2), 0, 3 * batch_size, [2, batch_size - 1], 2)
    of_epoch = expected_numbers(dataset)
    expected = [[*of_epoch[i][:2], of_epoch[i - 2][2], of_epoch[i - 2][-1]] for i in range(3, 8)]
    assert numbers(build_text_loader(dataset, num_workers=num_workers)) == expected


@pytest.mark.parametrize(("saved_workers", "resumed_workers"), [(0, 3), (2, 0)])
def test_resuming_anywhere_continues_with_the_next_batch(shards, saved_workers, resumed_workers):
    for batches_done in (0, 5, 8):
        dataset = open_data(shards)
        loader = build_text_loader(dataset, num_workers=saved_workers)
        numbers(loader)  # epoch 0
        for _, _ in zip(range(max(1, batches_done)), loader, strict=False):
            pass  # 0 batches done: the first has been read, but not trained on yet
        state = dataset.state_dict(batches_done * 12, True)
        assert (state["epoch"], state["sample_in_epoch"], state["seed"]) == (1, batches_done * 12, 3)

        resumed = open_data(shards)
        resumed.load_state_dict(json.loads(json.dumps(state)))
        loader = build_text_loader(resumed, num_workers=resumed_workers)
        assert numbers(loader) == expected_numbers(resumed, 1)[batches_done:]
        assert numbers(loader) == expected_numbers(resumed, 2)


def test_workers_share_what_the_rank_has_laid_out_and_imported(shards, monkeypatch):
    rank = os.getpid()

    def only_in_the_rank(order, epoch):
        assert os.getpid() == rank
        return EpochOrder(order, epoch)

    monkeypatch.setattr(SampleOrder, "build_epoch", only_in_the_rank)
    dataset = open_data(shards)
    dataset.load_state_dict(dataset.state_dict(36, True) | {"epoch": 2})
    assert numbers_of(dataset, num_workers=2) == expected_numbers(dataset, 2)[3:]
    loader = build_text_loader(dataset, num_workers=1)
    loader.collate_fn = lambda rows: gc.get_freeze_count()
    assert next(iter(loader)) > 10_000  # objects that the garbage collector leaves where they are


LEAVE_WITH_WORKERS = """
import sys
from llmfoundry_lite.data.loader import build_text_loader
from tests.helpers.numbered import open_data
loader = build_text_loader(open_data(sys.argv[1]), num_workers=1, persistent_workers=sys.argv[2] == "kept")
batches = iter(loader)
next(batches)
if sys.argv[2] == "kept":
    list(batches)
"""


@pytest.mark.parametrize("workers", ["kept", pytest.param("in the middle of an epoch", marks=pytest.mark.long)])
def test_a_rank_that_ends_does_not_wait_for_its_workers(shards, workers):
    command = [sys.executable, "-c", LEAVE_WITH_WORKERS, str(shards), workers]
    subprocess.run(command, cwd=ROOT, check=True, timeout=300)  # a hang, not a slow machine


@pytest.mark.parametrize("world_size", [2, 3, 12])
def test_simulated_ranks_read_their_columns_of_the_global_batches(shards, as_rank, world_size):
    ranks = []
    for rank in range(world_size):
        as_rank(rank, world_size)
        dataset = open_data(shards)
        dataset.load_state_dict(dataset.state_dict(24, True))
        ranks.append(numbers_of(dataset))
    together = [[number for part in parts for number in part] for parts in zip(*ranks, strict=True)]
    assert together == expected_numbers(dataset)[2:]


def test_streams_are_mixed_as_their_weights_say(tmp_path):
    streams = {
        "small": {"local": str(write_shards(tmp_path / "a", 30)), "proportion": 0.75},
        "large": {"local": str(write_shards(tmp_path / "b", 70, first=30)), "proportion": 0.25},
    }
    dataset = open_data(None, streams=streams, epoch_size=120)
    seen = flat(numbers_of(dataset))
    counts = np.bincount(seen, minlength=100)
    assert counts[:30].sum() == 90 and (counts[:30] == 3).all()
    assert counts[30:].sum() == 30 and counts[30:].max() == 1

    streams = {
        "small": {"local": str(tmp_path / "a"), "repeat": 2.5},
        "large": {"local": str(tmp_path / "b"), "choose": 21},
    }
    dataset = open_data(None, streams=streams)
    counts = np.bincount(flat(numbers_of(dataset, num_workers=2)), minlength=100)
    assert counts[:30].sum() == 75 and set(counts[:30]) == {2, 3}
    assert counts[30:].sum() == 21 and counts[30:].max() == 1


def read_as_rank(folder: Path, state: dict, num_workers: int, out: Path) -> None:
    """On a rank of its own: the rest of an epoch, the next one, and one evaluation."""
    multiprocessing.set_start_method("fork", force=True)  # for the DataLoader's workers, as in a launched process
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.distributed.init_process_group("gloo", rank=rank, world_size=world_size)
    dataset = open_data(folder)
    dataset.load_state_dict(state)
    loader = build_text_loader(dataset, num_workers=num_workers, persistent_workers=True)
    training = [numbers(loader), numbers(loader)]
    evaluation = numbers_of(open_data(folder, evaluation=True), num_workers)
    (out / f"{rank}.json").write_text(json.dumps({"training": training, "evaluation": evaluation}))
    torch.distributed.destroy_process_group()


@pytest.mark.multiprocess
def test_two_real_ranks_with_workers_read_what_one_rank_reads(shards, tmp_path):
    dataset = open_data(shards)
    launch(read_as_rank, (shards, dataset.state_dict(36, True), 2, tmp_path), tmp_path, num_ranks=2).check()
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    for epoch, first_batch in ((0, 3), (1, 0)):
        together = [a + b for a, b in zip(*(rank["training"][epoch] for rank in ranks), strict=True)]
        assert together == expected_numbers(dataset, epoch)[first_batch:]
    together = [a + b for a, b in zip(*(rank["evaluation"] for rank in ranks), strict=True)]
    assert flat(together) == [*range(100), *[PAD_TOKEN] * 8]


# Evaluation ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [0, 2])
def test_evaluation_reads_everything_once_and_pads_the_last_batch(shards, num_workers):
    dataset = open_data(shards, evaluation=True)
    loader = build_text_loader(dataset, num_workers=num_workers)
    for _ in range(2):  # the same every time
        batches = [batch["input_ids"] for batch in loader]
        assert [tuple(batch.shape) for batch in batches] == [(12, SEQ_LEN)] * 9 and len(loader) == 9
        rows = torch.cat(batches)
        assert rows[:100, 0].tolist() == list(range(100))
        assert (rows[100:] == PAD_TOKEN).all()


@pytest.mark.parametrize(("num_ranks", "batch"), [(1, 1), (2, 8), (4, 12), (3, 99)])
def test_an_evaluation_of_a_subset_is_of_the_same_samples_on_any_ranks_in_any_batch(shards, as_rank, num_ranks, batch):
    found = []
    for rank in range(num_ranks):
        as_rank(rank, num_ranks)
        found += flat(numbers_of(open_data(shards, evaluation=True, global_batch_size=batch, max_samples=30)))
    assert sorted(number for number in found if number != PAD_TOKEN) == [*range(30)]


def test_a_rank_without_any_sample_still_evaluates_as_many_batches(tmp_path, as_rank):
    folder = write_shards(tmp_path / "mds", num_samples=13)
    as_rank(3, 4)
    assert numbers_of(open_data(folder, evaluation=True)) == [[9, 10, 11], [PAD_TOKEN] * 3]
    as_rank(0, 4)
    assert numbers_of(open_data(folder, evaluation=True)) == [[0, 1, 2], [12, PAD_TOKEN, PAD_TOKEN]]


def test_training_without_drop_last_pads_too(shards):
    dataset = open_data(shards, drop_last=False)
    seen = flat(numbers_of(dataset, num_workers=2))
    assert sorted(seen) == [*[PAD_TOKEN] * 8, *range(100)]


# Digest -------------------------------------------------------------------------------------------------------------


def test_digest_depends_on_the_rows_but_not_on_their_order_or_place():
    tokens_bt = torch.randint(0, 1000, (6, 16), generator=torch.Generator().manual_seed(0))
    digest = batch_digest(tokens_bt)
    assert digest == batch_digest(tokens_bt.flip(0))
    assert digest == (batch_digest(tokens_bt[:2]) + batch_digest(tokens_bt[2:])) % 2**64
    assert digest == batch_digest(torch.cat([tokens_bt, torch.full((2, 16), PAD_TOKEN)]))
    changed_bt = tokens_bt.clone()
    changed_bt[3, 5] += 1
    assert digest != batch_digest(changed_bt)
    assert digest != batch_digest(torch.cat([tokens_bt, tokens_bt[:1]]))
    changed_bt[0, 1:] = PAD_TOKEN
    assert batch_digest(changed_bt[:1]) != 0, "a row that is partly padding counts"


def test_digests_can_be_summed_in_int64_tensors():
    parts = [batch_digest(torch.randint(0, 9, (3, 4))) for _ in range(8)]
    signed = torch.tensor([part - 2**64 if part >= 2**63 else part for part in parts])
    assert format_digest(int(signed.sum())) == format_digest(sum(parts))
    assert format_digest(0x0123) == "0000000000000123"


def test_the_digest_is_this_one_for_ever():
    assert format_digest(batch_digest(torch.arange(32).reshape(4, 8))) == "b8e8119f9e2a5a04"


# What samples look like ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ["ndarray:int32", "ndarray:uint16", f"ndarray:int64:{SEQ_LEN + 2}", "bytes"])
def test_shards_of_llm_foundry_load_unchanged_and_are_cut_where_that_is_allowed(tmp_path, encoding):
    dtype = "int64" if encoding == "bytes" else encoding.split(":")[1]
    with MDSWriter(out=str(tmp_path / "mds"), columns={"tokens": encoding}, compression="zstd") as writer:
        for number in range(24):
            tokens = np.arange(number, number + SEQ_LEN + 2).astype(dtype)
            writer.write({"tokens": tokens.tobytes() if encoding == "bytes" else tokens})
    dataset = open_data(tmp_path / "mds", evaluation=True, allow_truncation=True)
    batch = next(iter(build_text_loader(dataset)))["input_ids"]
    assert batch.dtype == torch.int64
    assert batch.tolist() == [list(range(number, number + SEQ_LEN)) for number in range(12)]


def test_bytes_of_another_type_are_read_as_token_encoding_type_says(tmp_path):
    with MDSWriter(out=str(tmp_path), columns={"tokens": "bytes"}) as writer:
        for _ in range(12):
            writer.write({"tokens": np.arange(SEQ_LEN, dtype=np.uint16).tobytes()})
    rows = next(iter(build_text_loader(open_data(tmp_path, token_encoding_type="uint16"))))["input_ids"]
    assert rows[0].tolist() == list(range(SEQ_LEN))


class LetterTokenizer:
    def encode(self, text: str) -> list[int]:
        return [ord(letter) - ord("a") for letter in text]


@pytest.mark.parametrize("vocab_size", [200, 50_000, 200_000, None])
@pytest.mark.parametrize("read_as", ["int64", "int32", "uint16"])
@pytest.mark.parametrize("written_as", ["int64", "int32", "uint16"])
def test_bytes_of_another_type_than_declared_are_refused_and_the_right_one_is_named(
    tmp_path, written_as, read_as, vocab_size
):
    ids = np.random.default_rng(1).integers(1, min(vocab_size or 65_536, np.iinfo(written_as).max), (12, 64))
    with MDSWriter(out=str(tmp_path), columns={"tokens": "bytes"}) as writer:
        for row in ids.astype(written_as):
            writer.write({"tokens": row.tobytes()})
    dataset = open_data(tmp_path, token_encoding_type=read_as, vocab_size=vocab_size, max_seq_len=64)
    if read_as == written_as:
        assert len(next(iter(build_text_loader(dataset)))["input_ids"])
    else:
        message = message_of(numbers_of, dataset)
        assert f"the bytes of a row are {written_as} numbers, and are read as {read_as}; set" in message
        assert message.endswith(f"set token_encoding_type: {written_as} in the loader's dataset")


def test_a_row_that_is_mostly_padding_tells_no_type(tmp_path):
    with MDSWriter(out=str(tmp_path), columns={"tokens": "bytes"}) as writer:
        for _ in range(12):
            writer.write({"tokens": np.array([7, *[0] * 7], np.uint16).tobytes()})
    rows = next(iter(build_text_loader(open_data(tmp_path, token_encoding_type="uint16"))))["input_ids"]
    assert rows[0].tolist() == [7, *[0] * 7]


def test_shards_of_text_are_tokenized_cut_and_padded(tmp_path):
    with MDSWriter(out=str(tmp_path), columns={"text": "str"}) as writer:
        for words in ["abc", "abcdefghijkl", ""] * 4:
            writer.write({"text": words})
    dataset = open_data(tmp_path, tokenizer=LetterTokenizer(), evaluation=True, vocab_size=20)
    rows = next(iter(build_text_loader(dataset)))["input_ids"][:3].tolist()
    assert rows == [[0, 1, 2, *[PAD_TOKEN] * 5], [0, 1, 2, 3, 4, 5, 6, 7], [PAD_TOKEN] * 8]


# Downloads ----------------------------------------------------------------------------------------------------------


def test_each_shard_is_downloaded_once(shards, tmp_path, downloads):
    dataset = open_data(tmp_path / "cache", remote=str(shards))
    for epoch in range(2):
        assert numbers_of(dataset) == expected_numbers(dataset, epoch)
    assert sorted(downloads) == sorted(path.name for path in shards.glob("*.mds"))


@pytest.mark.parametrize("split", [None, "train"])
def test_a_cache_limit_is_kept_by_evicting_and_downloading_again(tmp_path, downloads, split):
    remote = write_shards(tmp_path / "remote" / (split or ""), num_samples=600, size_limit=2_000)
    num_shards, limit = len(list(remote.glob("*.mds"))), 24_000
    options = {"remote": str(tmp_path / "remote"), "split": split, "cache_limit": limit}
    dataset = open_data(tmp_path / "cache", shuffle_block_size=24, global_batch_size=2, **options)

    def is_cached(name: str) -> bool:
        return (tmp_path / "cache" / (split or "") / name).exists()

    seen, largest = [], 0
    for batch in build_text_loader(dataset):
        seen.append(batch["input_ids"][:, 0].tolist())
        largest = max(largest, sum(path.stat().st_size for path in remote.iterdir() if is_cached(path.name)))
    assert seen == expected_numbers(dataset)
    # Files come and go while they are counted here.
    assert largest <= limit + 2 * 2_000 < sum(path.stat().st_size for path in remote.iterdir())
    # Two row indices, each reading shards one after another: no shard is fetched over and over.
    assert num_shards <= len(downloads) <= num_shards + 6


def test_a_shard_that_is_to_be_read_next_gives_no_room_to_another(tmp_path):
    remote = write_shards(tmp_path / "remote", num_samples=600, size_limit=2_000)
    limit = (remote / "index.json").stat().st_size + 4 * max(path.stat().st_size for path in remote.glob("*.mds"))
    cache = open_data(tmp_path / "cache", remote=str(remote), cache_limit=limit).cache
    for shard in range(4):
        cache.ensure_present(shard)
    assert cache.is_ready(0)
    cache.ensure_present(4)
    assert [os.path.exists(cache.path(shard)) for shard in range(5)] == [True, False, True, True, True]


def test_a_shard_that_the_remote_has_lost_stays_and_makes_room_once_alone(tmp_path):
    remote = write_shards(tmp_path / "remote", num_samples=600, size_limit=2_000)
    limit = (remote / "index.json").stat().st_size + 4 * max(path.stat().st_size for path in remote.glob("*.mds"))
    cache = open_data(tmp_path / "cache", remote=str(remote), cache_limit=limit).cache
    for shard in range(4):
        cache.ensure_present(shard)
    (remote / Path(cache.path(0)).name).unlink()
    for shard in (4, 5):
        cache.ensure_present(shard)
    assert [os.path.exists(cache.path(shard)) for shard in range(6)] == [True, False, True, True, True, True]


def test_a_shard_that_is_still_coming_takes_its_room_already(tmp_path, monkeypatch):
    remote = write_shards(tmp_path / "remote", num_samples=600, size_limit=2_000)
    limit = (remote / "index.json").stat().st_size + 4 * max(path.stat().st_size for path in remote.glob("*.mds"))
    cache = open_data(tmp_path / "cache", remote=str(remote), cache_limit=limit).cache
    for shard in range(4):
        cache.ensure_present(shard)
    has_begun, may_come = threading.Event(), threading.Event()
    fetch_shard = cache.folders[0].fetch_shard

    def fetch_the_first_late(reader, *, replace):
        if not has_begun.is_set():
            has_begun.set()
            assert may_come.wait(60)
        return fetch_shard(reader, replace=replace)

    monkeypatch.setattr(cache.folders[0], "fetch_shard", fetch_the_first_late)
    other = threading.Thread(target=cache.ensure_present, args=(4,))
    other.start()
    assert has_begun.wait(60)
    cache.ensure_present(5)
    may_come.set()
    other.join()
    assert [os.path.exists(cache.path(shard)) for shard in range(6)] == [False, False, True, True, True, True]


def test_training_says_which_shard_it_waits_for(tmp_path, monkeypatch):
    dataset = open_data(tmp_path / "cache", remote=str(write_shards(tmp_path / "remote")))
    lines, has_spoken = [], threading.Event()
    monkeypatch.setattr(cache, "WAIT_MESSAGE_SECONDS", 0.01)
    monkeypatch.setattr(cache, "print", lambda line, flush: (lines.append(line), has_spoken.set()), raising=False)
    fetch_shard = dataset.folders[0].fetch_shard

    def fetch_late(reader, *, replace):
        assert has_spoken.wait(60)
        return fetch_shard(reader, replace=replace)

    monkeypatch.setattr(dataset.folders[0], "fetch_shard", fetch_late)
    assert numbers_of(dataset) == expected_numbers(dataset)
    assert lines[0].startswith(f"waiting for {tmp_path / 'remote'}: shard.")


def test_a_rank_downloads_only_the_shards_of_its_row_indices(tmp_path, downloads, as_rank):
    remote = write_shards(tmp_path / "remote", num_samples=1_200)
    num_shards, counts = len(list(remote.glob("*.mds"))), []
    for rank in range(4):
        as_rank(rank, 4)
        dataset = open_data(tmp_path / f"cache-{rank}", remote=str(remote), global_batch_size=4)
        numbers_of(dataset)
        counts.append(len(downloads) - sum(counts))
    assert max(counts) <= num_shards / 4 + 2


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_a_cache_limit_never_removes_what_no_remote_has(tmp_path, compression):
    only, remote = write_shards(tmp_path / "a", 100, compression=compression), tmp_path / "b"
    write_shards(remote, 600, 2_000, 100, compression=compression)
    before = [files_of(only), files_of(remote)]
    streams = {"a": {"local": str(only), "repeat": 2}, "b": {"local": str(tmp_path / "cache"), "remote": str(remote)}}
    dataset = open_data(None, streams=streams, cache_limit=20_000, shuffle_block_size=24, global_batch_size=2)
    assert numbers_of(dataset) == expected_numbers(dataset)
    assert before[0].items() <= files_of(only).items() and before[1] == files_of(remote)
    assert sum(map(len, files_of(tmp_path / "cache").values())) <= 20_000
    assert len(list((tmp_path / "cache").glob("*.mds"))) < len(list(remote.glob("*.mds*")))


@pytest.mark.parametrize("name", ["{}/", "{}/../mds", "file://{}", "{}-link"])
def test_a_remote_that_is_the_folder_itself_is_none(tmp_path, name):
    shards = write_shards(tmp_path / "mds", 300, compression="zstd")
    (tmp_path / "mds-link").symlink_to(shards)
    before = files_of(shards)
    dataset = open_data(shards, remote=name.format(shards), cache_limit=5_000)
    assert numbers_of(dataset) == expected_numbers(dataset)
    assert before.items() <= files_of(shards).items()


@pytest.mark.parametrize("remote_has", ["only the index", "links to the cache"])
@pytest.mark.parametrize("compression", [None, "zstd"])
def test_a_cache_limit_never_removes_what_the_remote_has_not_or_only_links_to(tmp_path, remote_has, compression):
    cache, remote = write_shards(tmp_path / "cache", 300, compression=compression), tmp_path / "remote"
    remote.mkdir()
    shutil.copyfile(cache / "index.json", remote / "index.json")
    if remote_has == "links to the cache":
        for path in cache.glob("*.mds*"):
            (remote / path.name).symlink_to(path)
    for path in sorted(cache.glob("*.mds*"))[10:]:  # these have to be brought
        (remote / path.name).unlink(missing_ok=True)
        shutil.move(path, remote)
    before = files_of(cache)
    limited = {"remote": str(remote), "cache_limit": 16_000, "shuffle_block_size": 24, "global_batch_size": 2}
    dataset = open_data(cache, **limited)
    assert numbers_of(dataset) == expected_numbers(dataset)
    assert before.items() <= files_of(cache).items() and len(list(cache.glob("*.mds"))) < len(dataset.cache.table)


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_a_cache_limit_never_removes_what_its_remote_has_lost_meanwhile(tmp_path, compression):
    remote, cache = write_shards(tmp_path / "remote", 300, compression=compression), tmp_path / "cache"
    numbers_of(open_data(cache, remote=str(remote)))
    last, *lost = sorted(remote.glob("*.mds*"), reverse=True)
    for path in lost:
        path.unlink()
    (cache / last.name.partition(".zstd")[0]).unlink()  # so that there is one to bring
    before = files_of(cache)
    dataset = open_data(cache, remote=str(remote), cache_limit=16_000)
    assert numbers_of(dataset) == expected_numbers(dataset)
    assert before.items() <= files_of(cache).items()


@pytest.fixture(params=["copied", pytest.param("served", marks=pytest.mark.slow)])
def bucket(request, tmp_path, monkeypatch) -> Iterator[tuple[Path, Callable[[], None]]]:
    """A folder, and what brings `s3://bucket/mds` to its state: the transport replaced by copies, or a real server."""
    folder = tmp_path / "bucket"
    if request.param == "copied":

        def copy(self, remote, local, timeout):
            shutil.copyfile(folder / Path(remote).name, local)

        monkeypatch.setattr(S3Downloader, "_download_file_impl", copy)
        yield folder, lambda: None
        return
    with s3_server() as port:
        credentials = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_DEFAULT_REGION": "us-east-1"}
        for name, value in {**credentials, "S3_ENDPOINT_URL": f"http://127.0.0.1:{port}"}.items():
            monkeypatch.setenv(name, value)
        bucket = boto3.resource("s3", endpoint_url=f"http://127.0.0.1:{port}").create_bucket(Bucket="bucket")

        def upload() -> None:
            bucket.objects.all().delete()
            for path in folder.iterdir():
                bucket.upload_file(str(path), f"mds/{path.name}")

        yield folder, upload


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_a_cache_limit_never_removes_what_a_bucket_has_not_shown_to_hold(tmp_path, bucket, downloads, compression):
    """Shards fetched from the bucket are evicted, an earlier launch's too. Shards from elsewhere stay."""
    remote, upload = bucket
    write_shards(remote, 300, compression=compression, hashes=["xxh64"])
    upload()
    settings = {"remote": "s3://bucket/mds", "download_retry": 1}
    limited = {**settings, "cache_limit": 20_000, "shuffle_block_size": 24, "global_batch_size": 2}
    num_shards = len(list(remote.glob("shard*")))
    for name in ("cache", "copied"):
        numbers_of(open_data(tmp_path / name, **settings))
        (tmp_path / name / "shard.00020.mds").unlink()
    (tmp_path / "copied" / ORIGIN).unlink()
    before = files_of(tmp_path / "copied")
    downloads.clear()
    dataset = open_data(tmp_path / "cache", **limited)
    assert numbers_of(dataset) == expected_numbers(dataset)
    assert len(list((tmp_path / "cache").glob("*.mds"))) < num_shards and len(downloads) <= num_shards + 6
    assert not list((tmp_path / "cache").glob("*.part"))
    assert numbers_of(open_data(tmp_path / "copied", **limited)) == expected_numbers(dataset)
    assert before.items() <= files_of(tmp_path / "copied").items()


def test_a_damaged_shard_that_the_remote_lacks_is_kept_and_named(tmp_path):
    remote, cache = write_shards(tmp_path / "remote", hashes=["xxh64"]), tmp_path / "cache"
    numbers_of(open_data(cache, remote=str(remote)))
    path = flip_a_bit(cache / "shard.00003.mds")
    (remote / path.name).unlink()
    before = files_of(cache)
    message = message_of(numbers_of, open_data(cache, remote=str(remote), download_retry=1))
    assert message.startswith(f"{path} is damaged: its xxh64 is not the one in index.json; cannot get it again from")
    assert before == files_of(cache)


def test_a_folder_that_lacks_what_its_index_compressed_is_read_and_kept(tmp_path):
    """StreamingDataset removes shards that were decompressed, and lost their compressed form, as leftovers."""
    shards = write_shards(tmp_path / "mds", compression="zstd")
    numbers_of(open_data(shards))
    for path in shards.glob("*.zstd"):
        path.unlink()
    dataset = open_data(shards)
    assert numbers_of(dataset) == expected_numbers(dataset)


def test_a_remote_given_as_a_file_url_is_downloaded(shards, tmp_path):
    dataset = open_data(tmp_path / "cache", remote=f"file://{shards}")
    assert numbers_of(dataset) == expected_numbers(dataset)


@pytest.mark.parametrize("name", ["a\nb", "a?b", "a#b", "a\tb"])
def test_a_remote_that_the_transport_reads_as_another_is_refused_in_a_line(tmp_path, name):
    message = message_of(open_data, tmp_path / "cache", remote=f"s3://bucket/{name}")
    assert "is not possible in its URL; give the data another name" in message and "\n" not in message


@pytest.mark.parametrize("name", ["mds[1]", "mds*", "a\nb"])
def test_names_like_patterns_are_read_as_they_are(tmp_path, name):
    write_shards(tmp_path / "mds1", num_samples=30)
    dataset = open_data(tmp_path / name / "cache", remote=str(write_shards(tmp_path / name / "remote")))
    assert numbers_of(dataset) == expected_numbers(dataset)


@pytest.mark.parametrize("name", ["shard.00003.mds", "index.json"])
def test_a_pipe_in_the_place_of_a_file_is_named_and_not_waited_for(tmp_path, name):
    shards = write_shards(tmp_path / "mds", hashes=["xxh64"])
    (shards / name).unlink()
    os.mkfifo(shards / name)
    message = message_of(lambda: numbers_of(open_data(shards)))
    assert f"{shards}" in message and name in message and "not a regular file" in message


def test_only_downloads_of_ours_that_were_left_are_removed(tmp_path):
    remote, cache = write_shards(tmp_path / "remote"), tmp_path / "cache"
    cache.mkdir()
    left = [make_download_name("shard.00000.mds"), make_download_name("index.json") + ".tmp"]
    for name in ("film.part", "film.part.tmp", *left):
        (cache / name).write_text("")
        os.utime(cache / name, (0, 0))
    open_data(cache, remote=str(remote))
    assert sorted(path.name for path in cache.glob("*.part*")) == ["film.part", "film.part.tmp"]


def test_a_cache_of_data_that_was_prepared_again_is_refused(tmp_path):
    remote, cache = write_shards(tmp_path / "remote"), tmp_path / "cache"
    numbers_of(open_data(cache, remote=str(remote)))
    shutil.rmtree(remote)
    write_shards(remote, num_samples=110)
    message = message_of(open_data, cache, remote=str(remote))
    assert message.startswith(f"{cache}/index.json is not the index.json of {remote}, so old and new samples would be")
    (cache / "index.json").unlink()
    assert f"{cache} holds shards without the index.json" in message_of(open_data, cache, remote=str(remote))
    assert list(cache.glob("*.part*")) == []
    shutil.rmtree(cache)
    assert len(flat(numbers_of(open_data(cache, remote=str(remote))))) == 108


# Errors -------------------------------------------------------------------------------------------------------------


def message_of(function, *arguments, **settings) -> str:
    with pytest.raises(DataError) as caught:
        function(*arguments, **settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_missing_folder_and_missing_index_are_named(tmp_path):
    assert f"there is no data folder {tmp_path / 'no'}" in message_of(open_data, tmp_path / "no")
    assert f"{tmp_path} has no index.json" in message_of(open_data, tmp_path)
    write_shards(tmp_path / "train")
    write_shards(tmp_path / "val")
    assert "set `split` to one of: train, val" in message_of(open_data, tmp_path)
    assert "stream code: there is no data folder" in message_of(
        open_data, None, streams={"code": {"local": str(tmp_path / "no")}}
    )


@pytest.mark.parametrize("content", ["", "{", "[]", '{"version": 1, "shards": []}', '{"version": 2, "shards": []}'])
def test_damaged_index_is_named(shards, content):
    (shards / "index.json").write_text(content)
    assert str(shards / "index.json") in message_of(open_data, shards)


def test_missing_remote_is_named(tmp_path):
    message = message_of(open_data, tmp_path / "cache", remote=str(tmp_path / "no"))
    assert message.startswith(f"cannot get index.json of {tmp_path / 'no'}: ")


def test_an_index_that_leaves_out_samples_of_a_shard_is_found(shards):
    index = json.loads((shards / "index.json").read_text())
    index["shards"][1]["samples"] -= 2
    (shards / "index.json").write_text(json.dumps(index, sort_keys=True))
    with pytest.raises(DataError, match=r"shard.00001.mds is damaged: it holds (\d+) samples, \d+ by its index.json"):
        numbers_of(open_data(shards))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_truncated_shard_is_named(shards, num_workers):
    path = shards / "shard.00003.mds"
    path.write_bytes(path.read_bytes()[:-100])
    message = message_of(numbers_of, open_data(shards), num_workers)
    assert message.startswith(f"{path} is damaged: it has ") and message.endswith("prepare the data again")


def test_shard_with_a_damaged_header_is_named(shards):
    path = shards / "shard.00003.mds"
    content = bytearray(path.read_bytes())
    content[4:48] = b"\x7f" * 44
    path.write_bytes(content)
    assert message_of(numbers_of, open_data(shards)).startswith(f"{path}, sample ")


def flip_a_bit(path: Path) -> Path:
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    return path


def test_a_flipped_bit_is_found_by_its_hash_or_by_the_vocabulary(tmp_path):
    shards = write_shards(tmp_path / "mds", hashes=["xxh64"])
    path = flip_a_bit(shards / "shard.00003.mds")
    message = message_of(numbers_of, open_data(shards))
    assert message.startswith(f"{path} is damaged: its xxh64 is not the one in index.json; prepare the data again")
    assert "leave validate_hash out" in message_of(open_data, shards, validate_hash="sha1")
    path = flip_a_bit(write_shards(tmp_path / "unhashed") / "shard.00003.mds")
    message = message_of(numbers_of, open_data(path.parent, vocab_size=1_000))
    assert message.startswith(f"{path}, sample ") and "is outside the vocabulary of 1000" in message


def test_a_flipped_bit_is_found_where_another_shard_has_no_hash(tmp_path):
    shards = write_shards(tmp_path / "mds", hashes=["xxh64"])
    content = json.loads((shards / "index.json").read_text())
    content["shards"][1]["raw_data"]["hashes"] = {}
    (shards / "index.json").write_text(json.dumps(content, sort_keys=True))
    path = flip_a_bit(shards / "shard.00003.mds")
    assert "shard.00001.mds has no hash, and other shards have one" in message_of(open_data, shards)
    message = message_of(numbers_of, open_data(shards, allow_unhashed_shards=True))
    assert message.startswith(f"{path} is damaged: its xxh64 is not the one in index.json")


def test_a_flipped_bit_in_a_cache_is_found_and_mended(tmp_path, downloads):
    remote, cache = write_shards(tmp_path / "remote", hashes=["xxh64"]), tmp_path / "cache"
    numbers_of(open_data(cache, remote=str(remote)))
    flip_a_bit(cache / "shard.00003.mds")
    dataset = open_data(cache, remote=str(remote))
    downloads.clear()
    assert numbers_of(dataset) == expected_numbers(dataset)
    assert downloads == ["shard.00003.mds"]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_truncated_zstd_download_is_asked_for_again(tmp_path, downloads, num_workers):
    remote, cache = write_shards(tmp_path / "remote", compression="zstd", hashes=["xxh64"]), tmp_path / "cache"
    cache.mkdir()
    shutil.copy(remote / "index.json", cache)
    name = "shard.00003.mds.zstd"
    (cache / name).write_bytes((remote / name).read_bytes()[:-10])
    dataset = open_data(cache, remote=str(remote))
    assert numbers_of(dataset, num_workers) == expected_numbers(dataset)
    assert num_workers or downloads.count(name) == 1


def join_fetching_threads() -> None:
    """Wait for threads that waited for the first, and try its shard next: an error waits for none."""
    for thread in threading.enumerate():
        if thread.name.startswith("shard-fetch"):
            thread.join()


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_a_remote_that_is_damaged_itself_is_named_and_nothing_is_kept(tmp_path, downloads, compression):
    remote = write_shards(tmp_path / "remote", hashes=["xxh64"], compression=compression)
    path = flip_a_bit(remote / ("shard.00003.mds" + (".zstd" if compression else "")))
    dataset = open_data(tmp_path / "cache", remote=str(remote))
    message = message_of(numbers_of, dataset)
    assert message.startswith(f"cannot get {tmp_path / 'cache' / 'shard.00003.mds'} from {remote}: it arrives damaged")
    join_fetching_threads()
    assert not list((tmp_path / "cache").glob("shard.00003*")) and downloads.count(path.name) >= 2


@pytest.mark.parametrize("compression", ["br:1", "bz2", "gz", "snappy", "zstd"])  # br packs the bomb for 4 s
def test_a_shard_that_unpacks_to_more_than_its_index_states_stops_there_and_is_not_kept(tmp_path, compression):
    """262 kB unpacked to 8 GiB, in memory and in the cache; its index said 2.5 MB."""
    shards = write_shards(tmp_path / "mds", size_limit=1 << 20, compression=compression)
    bomb = compress(compression, bytes(128 * MIB))
    index = json.loads((shards / "index.json").read_text())
    [shard] = index["shards"]
    shard["zip_data"]["bytes"] = (shards / shard["zip_data"]["basename"]).write_bytes(bomb)
    shard["raw_data"]["bytes"] = MIB
    (shards / "index.json").write_text(json.dumps(index))
    message = ""
    for attempt in range(3):  # other threads of this process, which have nothing to do with it, allocate too
        dataset = open_data(shards)
        try:
            with small_files(2), little_memory(112):
                message = message_of(numbers_of, dataset)
                join_fetching_threads()
            break
        except AssertionError:
            if attempt == 2:
                raise
    assert "unpacks to more than 1,048,576 bytes, its size according to index.json" in message
    assert sorted(path.name for path in shards.iterdir()) == ["index.json", shard["zip_data"]["basename"]]


@pytest.mark.parametrize("compression", ["br", "bz2", "gz", "snappy", "zstd:22"])
def test_shards_of_every_compression_are_read(tmp_path, compression):
    dataset = open_data(write_shards(tmp_path / "mds", compression=compression, hashes=["xxh64"]))
    assert numbers_of(dataset) == expected_numbers(dataset)


@pytest.mark.parametrize("is_short", [True, False])
def test_a_shard_that_unpacks_to_something_else_is_not_kept(tmp_path, is_short):
    shards = write_shards(tmp_path / "mds", compression="zstd", hashes=["xxh64"])
    index = json.loads((shards / "index.json").read_text())
    for shard in index["shards"]:
        packed = compress("zstd", b"short" if is_short else bytes(shard["raw_data"]["bytes"]))
        (shards / shard["zip_data"]["basename"]).write_bytes(packed)
        shard["zip_data"] |= {"bytes": len(packed), "hashes": {"xxh64": xxhash.xxh64_hexdigest(packed)}}
    (shards / "index.json").write_text(json.dumps(index))
    assert "unpacks to something else: it" in message_of(numbers_of, open_data(shards))
    join_fetching_threads()
    assert not [*shards.glob("*.mds"), *shards.glob("*.part")]


def test_a_shard_that_is_replaced_while_it_is_read_is_named(tmp_path):
    shards = write_shards(tmp_path / "mds", hashes=["xxh64"])
    dataset = open_data(shards)
    numbers_of(dataset)
    shutil.rmtree(shards)
    write_shards(shards, first=1, hashes=["xxh64"])
    assert f"{shards}/shard.000" in (message := message_of(numbers_of, dataset)) and "is damaged: its xxh64" in message


def test_a_shard_that_rots_after_it_was_verified_is_named(tmp_path):
    """Size and time of the file are as before, so that nothing but its bytes tells."""
    shards = write_shards(tmp_path / "mds", hashes=["xxh64"])
    dataset = open_data(shards)
    numbers_of(dataset)
    for path in shards.glob("*.mds"):
        status, content = path.stat(), path.read_bytes()
        path.write_bytes(content[:4] + bytes([255]) * (len(content) - 4))
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert "is damaged: its xxh64" in message_of(numbers_of, dataset)


def test_a_disk_that_fails_is_named_with_its_node(shards, monkeypatch):
    def fail(path, info):
        raise OSError(errno.EIO, os.strerror(errno.EIO), path)

    monkeypatch.setattr(cache, "find_damage", fail)
    message = message_of(numbers_of, open_data(shards))
    assert f" cannot be read on {socket.gethostname()}: [Errno 5] Input/output error" in message


def test_shared_memory_that_is_too_small_is_named(shards, monkeypatch):
    def fail(*arguments, **options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(np, "save", fail)
    assert "no space left in /dev/shm for the table of shards" in message_of(open_data, shards)


def test_an_index_that_came_damaged_is_brought_again_when_the_remote_is_mended(tmp_path):
    remote, cache = write_shards(tmp_path / "remote"), tmp_path / "cache"
    whole = (remote / "index.json").read_bytes()
    (remote / "index.json").write_bytes(whole[:100])
    assert "index.json" in message_of(open_data, cache, remote=str(remote))
    (remote / "index.json").write_bytes(whole)
    assert len(numbers_of(open_data(cache, remote=str(remote)))) == 8


def test_a_shard_that_is_missing_where_there_is_no_remote_is_named(shards):
    (shards / "shard.00003.mds").unlink()
    message = message_of(numbers_of, open_data(shards))
    assert f"cannot get {shards / 'shard.00003.mds'} which is not there, and no `remote` has it" in message


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_shard_that_cannot_be_downloaded_ends_the_run_instead_of_the_epoch(tmp_path, num_workers):
    remote = write_shards(tmp_path / "remote")
    (remote / "shard.00003.mds").unlink()
    message = message_of(numbers_of, open_data(tmp_path / "cache", remote=str(remote)), num_workers)
    assert message.startswith(f"cannot get {tmp_path / 'cache' / 'shard.00003.mds'} from {remote}: ")


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(("number", "expected"), [(errno.ETIMEDOUT, 75), (errno.EACCES, 2)])
def test_whose_fault_a_download_is_comes_out_of_a_worker_process_too(
    tmp_path, monkeypatch, num_workers, number, expected
):
    remote, download = write_shards(tmp_path / "remote"), ShardFolder.download

    def fail(self, name):
        if name.startswith("shard.00003"):
            raise OSError(number, os.strerror(number))
        return download(self, name)

    dataset = open_data(tmp_path / "cache", remote=str(remote))
    monkeypatch.setattr(ShardFolder, "download", fail)
    with pytest.raises(DataError, match=f"^cannot get .*{os.strerror(number)}$") as caught:
        numbers_of(dataset, num_workers)
    assert caught.value.exit_code == expected


def test_tokens_outside_the_vocabulary_are_named_with_shard_and_sample(shards):
    message = message_of(numbers_of, open_data(shards, evaluation=True, vocab_size=70), 2)
    assert f"{shards}/shard.0000" in message and "sample " in message
    assert "token id 70 is outside the vocabulary of 70: the tokenizer does not match" in message


@pytest.mark.parametrize("encoding", ["ndarray:uint16", "ndarray:uint16:8"])
def test_longer_samples_are_refused_at_their_first_row_or_where_the_index_tells(tmp_path, encoding):
    with MDSWriter(out=str(tmp_path), columns={"tokens": encoding}) as writer:
        for i in range(4):
            writer.write({"tokens": np.full(8, i, np.uint16)})
    words = "8 tokens, and max_seq_len 6 leaves 25 % of the text out; set max_seq_len=8, prepare"
    with pytest.raises(DataError, match=words):
        dataset = open_data(tmp_path, max_seq_len=6, global_batch_size=2)
        assert not encoding.endswith("8"), "the index tells"
        next(iter(dataset))
    cut = open_data(tmp_path, max_seq_len=6, global_batch_size=2, allow_truncation=True)
    assert next(iter(cut)).shape == (6,)


def test_samples_shorter_than_max_seq_len_are_refused_with_both_remedies(shards):
    message = message_of(numbers_of, open_data(shards, max_seq_len=9))
    assert (
        "has 8 tokens, but max_seq_len is 9; set max_seq_len=8, or prepare the data again with --max-seq-len 9"
        in message
    )


def test_columns_that_cannot_be_read_are_named(tmp_path):
    def write(name: str, columns: dict, sample: dict) -> Path:
        with MDSWriter(out=str(tmp_path / name), columns=columns) as writer:
            for _ in range(12):
                writer.write(sample)
        return tmp_path / name

    other = write("other", {"prompt": "str", "label": "int"}, {"prompt": "a", "label": 1})
    assert "has no column tokens or text, only label, prompt" in message_of(open_data, other)
    words = write("words", {"text": "str"}, {"text": "a"})
    assert "holds text, not tokens: name a tokenizer" in message_of(open_data, words)
    floats = write("floats", {"tokens": "ndarray:float32"}, {"tokens": np.zeros(SEQ_LEN, np.float32)})
    assert "not a row of whole numbers" in message_of(numbers_of, open_data(floats))
    short = write("short", {"tokens": "bytes"}, {"tokens": b"12345678901"})
    message = message_of(numbers_of, open_data(short))
    assert "11 bytes of tokens are not whole int64 numbers" in message and "set token_encoding_type" in message


def test_folders_that_are_ambiguous_or_unnamed_are_refused(shards, tmp_path):
    assert "neither is set" in message_of(open_data, None)
    assert "both are set" in message_of(open_data, shards, streams={"a": {"local": "x"}})
    assert "`local` is not set" in message_of(open_data, None, remote="s3://bucket/data")
    twice = {"a": {"local": str(shards)}, "b": {"local": f"{shards}/"}}
    assert "streams a and b both use the folder" in message_of(open_data, None, streams=twice)
    weights = {"a": {"local": str(shards), "repeat": 2, "choose": 3}}
    assert message_of(open_data, None, streams=weights).startswith("stream a: At most one of")


def test_two_data_sets_of_a_run_may_not_download_into_one_folder(shards, tmp_path):
    first = open_data(tmp_path / "cache", remote=str(shards))
    message = message_of(open_data, tmp_path / "cache", remote=str(shards))
    assert f"two data sets of this run download into {tmp_path / 'cache'}" in message
    numbers_of(first)
    assert numbers_of(open_data(tmp_path / "cache"))  # without remote, any number may read a complete folder


def test_batches_that_cannot_be_are_refused(shards, as_rank):
    assert "an epoch of 100 samples is smaller than one global batch of 101" in message_of(
        open_data, shards, global_batch_size=101
    )
    as_rank(0, 5)
    assert "a global batch of 12 samples cannot be split evenly over 5 ranks" in message_of(open_data, shards)


@pytest.mark.parametrize("epoch_size", [10**12, "10t"])
def test_an_epoch_of_too_many_repeats_is_refused_at_once(shards, epoch_size):
    words = "at most 16777216 can be; use a smaller epoch_size or"
    assert words in message_of(open_data, shards, epoch_size=epoch_size)


def test_a_state_of_another_run_is_refused(shards, tmp_path):
    dataset = open_data(shards)
    state = dataset.state_dict(24, True)
    assert "global_train_batch_size is 12, but the checkpoint was trained with 6" in message_of(
        dataset.load_state_dict, state | {"global_batch_size": 6}
    )
    assert "set train_loader.dataset.shuffle_seed=4 to carry on" in message_of(
        dataset.load_state_dict, state | {"seed": 4}
    )
    assert "is not between two global batches" in message_of(dataset.load_state_dict, state | {"sample_in_epoch": 30})
    stock = {"epoch": 0, "sample_in_epoch": 24, "num_canonical_nodes": 1, "shuffle_seed": 3}
    assert "lacks seed, global_batch_size, order" in message_of(dataset.load_state_dict, stock)
    more = open_data(write_shards(tmp_path / "longer", num_samples=101))
    message = message_of(more.load_state_dict, state)
    assert f"not what the checkpoint was trained with: {tmp_path / 'longer'} holds sizes:" in message
    assert "version 2 of the sample order" in message_of(dataset.load_state_dict, state | {"order_version": 2})
    old = {key: state[key] for key in ("epoch", "sample_in_epoch", "seed", "global_batch_size", "order")}
    assert "would repeat and skip samples" in message_of(more.load_state_dict, old)


def test_data_prepared_again_in_the_same_shape_is_refused_unless_the_checkpoint_is_too_old_to_tell(tmp_path):
    def prepared(name: str, first: int) -> TextDataset:
        return open_data(write_shards(tmp_path / name, first=first, hashes=["xxh64"]))

    state = prepared("before", 0).state_dict(24, True)
    prepared("copy", 0).load_state_dict(state)
    again = prepared("again", 1)
    message = message_of(again.load_state_dict, state)
    assert f"{tmp_path / 'again'} holds xxh64:" in message and "the data in the checkpoint was xxh64:" in message
    for key in ("content", "streams", "order_version"):
        del state[key]
    again.load_state_dict(state)
    assert again._next_position == (0, 24)


def test_equal_streams_in_another_order_are_refused(tmp_path):
    streams = {
        name: {"local": str(write_shards(tmp_path / name, first=first, hashes=["xxh64"]))}
        for name, first in (("web", 0), ("code", 100))
    }
    state = open_data(None, streams=streams).state_dict(24, True)
    swapped = open_data(None, streams={name: streams[name] for name in ("code", "web")})
    message = message_of(swapped.load_state_dict, state)
    assert "the streams stand in another order: 'web', 'code' in the checkpoint" in message
    renamed = {f"my {name}": stream for name, stream in streams.items()}
    open_data(None, streams=renamed).load_state_dict(state)


# Nodes --------------------------------------------------------------------------------------------------------------


def read_on_node(folders: list[Path], remote: Path | None, out: Path) -> None:
    """On each of two nodes of one rank, on this machine: an epoch, written down; exit code 2 if it is refused."""
    multiprocessing.set_start_method("fork", force=True)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.distributed.init_process_group("gloo", rank=rank, world_size=world_size)

    def read(arguments) -> None:
        dataset = open_data(folders[rank], remote=remote and str(remote), cache_limit=30_000 if remote else None)
        (out / f"{rank}.json").write_text(json.dumps(numbers_of(dataset, num_workers=2)))
        torch.distributed.destroy_process_group()

    run_and_exit(read)


@pytest.mark.multiprocess
@pytest.mark.parametrize("sharing", ["one cache", "a cache each", "one folder"])
def test_two_nodes_on_one_machine_read_one_data_set(tmp_path, sharing):
    remote = write_shards(tmp_path / "remote", 600, hashes=["xxh64"])
    folders = {
        "one cache": [tmp_path / "cache"] * 2,
        "a cache each": [tmp_path / "cache-0", tmp_path / "cache-1"],
        "one folder": [remote] * 2,
    }[sharing]
    arguments = (folders, None if sharing == "one folder" else remote, tmp_path)
    launch(read_on_node, arguments, tmp_path, num_ranks=2, local_world_size=1).check()
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    together = [a + b for a, b in zip(*ranks, strict=True)]
    assert together == expected_numbers(open_data(remote))


@pytest.mark.multiprocess
def test_nodes_whose_shards_are_cut_differently_are_refused_before_the_first_batch(tmp_path):
    folders = [
        write_shards(tmp_path / "a", hashes=["xxh64"]),
        write_shards(tmp_path / "b", 100, 2_000, hashes=["xxh64"]),
    ]
    result = launch(read_on_node, (folders, None, tmp_path), tmp_path, num_ranks=2, local_world_size=1)
    assert result.exit_codes == [2, 2] and not list(tmp_path.glob("*.json"))
    host = socket.gethostname()
    assert (
        f"error: node 1 ({host}) reads other data than node 0 ({host}): the data: {folders[1]} on node" in result.output
    )
    cuts = re.findall(r"100 samples in (\d+) shards", result.output)
    assert len(set(cuts)) == 2 and "give every node the same data" in result.output


def open_with_faults(shards: Path, out: Path) -> None:
    """On each of three ranks, the last a node of its own: what each is told when something fails on one of them."""
    rank, told = int(os.environ["RANK"]), []
    torch.distributed.init_process_group("gloo", rank=rank, world_size=3)

    def fail(error, *arguments):
        raise error

    for error in (TypeError("a bug"), OSError("a bad disk")):
        for place, faulty in FAULTS.items():
            with pytest.MonkeyPatch.context() as patch:
                if rank == faulty:
                    patch.setattr(OpenedShards, place, functools.partial(fail, error))
                with pytest.raises((DataError, CheckpointError, TypeError)) as caught:
                    open_data(shards)
                told.append(str(caught.value))
    with pytest.raises(DataError) as caught:
        open_data(shards if rank != 2 else out / "no")
    told.append(str(caught.value))
    open_data(shards)
    (out / f"{rank}.json").write_text(json.dumps(told))
    torch.distributed.destroy_process_group()


FAULTS = {"_write_table": 2, "_build_order": 1, "_count_epoch_samples": 2, "_check_columns": 1}
"""Where something fails, and on which rank."""


@pytest.mark.multiprocess
def test_an_error_of_one_rank_is_everybodys(shards, tmp_path):
    launch(open_with_faults, (shards, tmp_path), tmp_path, num_ranks=3, local_world_size=2).check()
    told = zip(*(json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(3)), strict=True)
    for faulty in FAULTS.values():
        words = list(next(told))
        assert words.pop(faulty) == "a bug" and words == [f"rank {faulty}: TypeError: a bug"] * 2
    for _ in FAULTS:
        assert next(told) == (f"cannot open the data set {shards}: a bad disk",) * 3
    assert all(words.startswith(f"there is no data folder {tmp_path / 'no'};") for words in next(told))


def test_the_configuration_knows_streaming_s_remotes_hashes_and_units():
    """It answers in its own words before anything starts, and without importing streaming."""
    assert {*REMOTES.split(), "", "dbfs-uc"} == set(DOWNLOADER_MAPPINGS)
    assert set(HASHES.split()) <= get_hashes()
    assert [number_abbrev_to_int(f"1{unit}") for unit in COUNTS] == [*COUNTS.values()]
    assert [bytes_to_int(f"1{unit}") for unit in SIZES] == [*SIZES.values()]
