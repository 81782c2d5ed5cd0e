"""Reading MDS: the order on real files and processes, what samples may look like, and every error's text."""

import json
import multiprocessing
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from streaming import MDSWriter
from streaming.base.spanner import Spanner

from llmfoundry_lite.data import text
from llmfoundry_lite.data.lazy_arrays import ShardBounds
from llmfoundry_lite.data.loader import TextLoader, batch_digest, build_text_loader, format_digest
from llmfoundry_lite.data.text import PAD_TOKEN, TextDataset, build_text_dataset
from llmfoundry_lite.errors import DataError
from tests.helpers.launch import launch

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

SEQ_LEN = 8


def write_shards(folder: Path, num_samples: int = 100, size_limit: int = 1_000, first: int = 0, **options) -> Path:
    """Samples that begin with their own number: [n, n + 1, …]; about ten in a shard."""
    with MDSWriter(out=str(folder), columns={"tokens": "bytes"}, size_limit=size_limit, **options) as writer:
        for number in range(first, first + num_samples):
            writer.write({"tokens": np.arange(number, number + SEQ_LEN).tobytes()})
    return folder


def open_data(folder: Path | None, **settings) -> TextDataset:
    settings = {"max_seq_len": SEQ_LEN, "global_batch_size": 12, "shuffle": True, "shuffle_seed": 3} | settings
    if folder:
        settings["local"] = str(folder)
    return build_text_dataset(**settings)


def numbers(loader: TextLoader) -> list[list[int]]:
    """The sample numbers of every batch that is left in the epoch."""
    return [batch["input_ids"][:, 0].tolist() for batch in loader]


def numbers_of(dataset: TextDataset, num_workers: int = 0, **options) -> list[list[int]]:
    return numbers(build_text_loader(dataset, num_workers=num_workers, **options))


def flat(batches: list[list[int]]) -> list[int]:
    return [number for batch in batches for number in batch]


def expected_numbers(dataset: TextDataset, epoch: int = 0) -> list[list[int]]:
    order = dataset.order
    return order.epoch(epoch).sample_ids(range(order.num_lanes), range(order.num_batches)).tolist()


@pytest.fixture
def shards(tmp_path) -> Path:
    return write_shards(tmp_path / "mds")


@pytest.fixture
def as_rank(monkeypatch):
    """Make this process one rank of a larger world, each rank on a machine of its own, without the other ranks."""
    monkeypatch.setattr(text, "maybe_init_dist", lambda: False)
    monkeypatch.setattr("streaming.base.dataset.maybe_init_dist", lambda: False)

    def become(rank: int, world_size: int) -> None:
        for name, value in {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}.items():
            monkeypatch.setenv(name, str(value))

    return become


# Order and state ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_loader_yields_the_global_batches_in_order_epoch_after_epoch(shards, num_workers):
    dataset = open_data(shards)
    loader = build_text_loader(dataset, num_workers=num_workers, persistent_workers=num_workers == 3)
    assert len(loader) == 8 and dataset.order.dropped_samples == 4
    assert [numbers(loader) for _ in range(3)] == [expected_numbers(dataset, epoch) for epoch in range(3)]


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
        assert resumed.state_dict(0, False) == state  # before the first batch
        loader = build_text_loader(resumed, num_workers=resumed_workers)
        assert numbers(loader) == expected_numbers(resumed, 1)[batches_done:]
        assert numbers(loader) == expected_numbers(resumed, 2)


def test_state_counts_from_where_this_launch_began_if_asked_to(shards):
    dataset = open_data(shards)
    dataset.load_state_dict(dataset.state_dict(36, True))
    next(iter(build_text_loader(dataset)))
    assert dataset.state_dict(12, from_beginning=False)["sample_in_epoch"] == 48
    assert dataset.state_dict(48, from_beginning=True)["sample_in_epoch"] == 48


def test_going_back_to_an_earlier_epoch_works_with_persistent_workers(shards):
    dataset = open_data(shards)
    loader = build_text_loader(dataset, num_workers=2, persistent_workers=True)
    state = dataset.state_dict(60, True)
    for _ in range(3):
        numbers(loader)
    dataset.load_state_dict(state)
    assert numbers(loader) == expected_numbers(dataset, 0)[5:]
    assert numbers(loader) == expected_numbers(dataset, 1)


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


def test_samples_are_found_in_the_shards_where_streamingdataset_finds_them():
    sizes = np.array([3, 1, 0, 2000, 1, 1, 5])
    ours, theirs = ShardBounds(sizes), Spanner(sizes.copy())
    assert [ours[sample] for sample in range(2011)] == [theirs[sample] for sample in range(2011)]
    for outside in (-1, 2011):
        with pytest.raises(IndexError):
            ours[outside]


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


def test_evaluation_of_a_part_takes_the_same_part_every_time(shards):
    dataset = open_data(None, streams={"some": {"local": str(shards), "choose": 30}}, evaluation=True)
    first, second = numbers_of(dataset), numbers_of(dataset)
    assert first == second and len(set(flat(first))) == 31  # and padding


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


def test_digests_can_be_summed_in_int64_tensors():
    parts = [batch_digest(torch.randint(0, 9, (3, 4))) for _ in range(8)]
    signed = torch.tensor([part - 2**64 if part >= 2**63 else part for part in parts])
    assert format_digest(int(signed.sum())) == format_digest(sum(parts))
    assert format_digest(0x0123) == "0000000000000123"


def test_the_digest_is_this_one_for_ever():
    assert format_digest(batch_digest(torch.arange(32).reshape(4, 8))) == "b8e8119f9e2a5a04"


# What samples look like ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ["ndarray:int32", "ndarray:uint16", f"ndarray:int64:{SEQ_LEN + 2}", "bytes"])
def test_shards_of_llm_foundry_load_unchanged_and_are_cut_to_length(tmp_path, encoding):
    dtype = "int64" if encoding == "bytes" else encoding.split(":")[1]
    with MDSWriter(out=str(tmp_path / "mds"), columns={"tokens": encoding}, compression="zstd") as writer:
        for number in range(24):
            tokens = np.arange(number, number + SEQ_LEN + 2).astype(dtype)
            writer.write({"tokens": tokens.tobytes() if encoding == "bytes" else tokens})
    batch = next(iter(build_text_loader(open_data(tmp_path / "mds", evaluation=True))))["input_ids"]
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


def test_a_cache_limit_is_kept_by_evicting_and_downloading_again(tmp_path, downloads):
    remote = write_shards(tmp_path / "remote", num_samples=600, size_limit=2_000)
    num_shards, limit = len(list(remote.glob("*.mds"))), 24_000
    dataset = open_data(
        tmp_path / "cache", remote=str(remote), cache_limit=limit, shuffle_block_size=24, global_batch_size=2
    )

    def is_cached(name: str) -> bool:
        return (tmp_path / "cache" / name).exists()

    seen, largest = [], 0
    for batch in build_text_loader(dataset):
        seen.append(batch["input_ids"][:, 0].tolist())
        largest = max(largest, sum(path.stat().st_size for path in remote.iterdir() if is_cached(path.name)))
    assert seen == expected_numbers(dataset)
    # StreamingDataset counts a shard when it has arrived, so each of its two threads may exceed the limit by one.
    assert largest <= limit + 2 * 2_000 < sum(path.stat().st_size for path in remote.iterdir())
    # Two lanes, each reading shards one after another: no shard is fetched over and over.
    assert num_shards <= len(downloads) <= num_shards + 6


def test_a_rank_downloads_only_the_shards_of_its_lanes(tmp_path, downloads, as_rank):
    remote = write_shards(tmp_path / "remote", num_samples=1_200)
    num_shards, counts = len(list(remote.glob("*.mds"))), []
    for rank in range(4):
        as_rank(rank, 4)
        dataset = open_data(tmp_path / f"cache-{rank}", remote=str(remote), global_batch_size=4)
        numbers_of(dataset)
        counts.append(len(downloads) - sum(counts))
    assert max(counts) <= num_shards / 4 + 2


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
    assert message.startswith(f"cannot open the data set {tmp_path / 'no'}")


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


def test_a_flipped_bit_is_found_by_its_hash_or_by_the_vocabulary(tmp_path):
    shards = write_shards(tmp_path / "mds", hashes=["xxh64"])
    path = shards / "shard.00003.mds"
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    message = message_of(numbers_of, open_data(shards, validate_hash="xxh64"))
    assert message.startswith(f"{path} is damaged: its xxh64 is not the one in index.json")
    message = message_of(numbers_of, open_data(shards, vocab_size=1_000))
    assert message.startswith(f"{path}, sample ") and "is outside the vocabulary of 1000" in message
    assert "leave validate_hash out" in message_of(open_data, shards, validate_hash="sha1")


def test_a_damaged_download_is_not_kept(tmp_path):
    remote = write_shards(tmp_path / "remote", hashes=["xxh64"])
    content = bytearray((remote / "shard.00003.mds").read_bytes())
    content[-3] ^= 1
    (remote / "shard.00003.mds").write_bytes(content)
    dataset = open_data(tmp_path / "cache", remote=str(remote), validate_hash="xxh64")
    assert "Checksum failure" in message_of(numbers_of, dataset)
    assert not (tmp_path / "cache" / "shard.00003.mds").exists()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_shard_that_cannot_be_downloaded_ends_the_run_instead_of_the_epoch(tmp_path, num_workers):
    remote = write_shards(tmp_path / "remote")
    (remote / "shard.00003.mds").unlink()
    message = message_of(numbers_of, open_data(tmp_path / "cache", remote=str(remote)), num_workers)
    assert message.startswith(f"cannot get {tmp_path / 'cache' / 'shard.00003.mds'} from {remote}: ")


def test_tokens_outside_the_vocabulary_are_named_with_shard_and_sample(shards):
    message = message_of(numbers_of, open_data(shards, evaluation=True, vocab_size=70), 2)
    assert f"{shards}/shard.0000" in message and "sample " in message
    assert "token id 70 is outside the vocabulary of 70: the tokenizer does not match" in message


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
    assert "11 bytes of tokens are not whole int64 numbers; set token_encoding_type" in message_of(
        numbers_of, open_data(short)
    )


def test_folders_that_are_ambiguous_or_unnamed_are_refused(shards, tmp_path):
    assert "neither is set" in message_of(open_data, None)
    assert "both are set" in message_of(open_data, shards, streams={"a": {"local": "x"}})
    assert "`local` is not set" in message_of(open_data, None, remote="s3://bucket/data")
    twice = {"a": {"local": str(shards)}, "b": {"local": f"{shards}/"}}
    assert "streams a and b both use the folder" in message_of(open_data, None, streams=twice)
    weights = {"a": {"local": str(shards), "repeat": 2, "choose": 3}}
    assert message_of(open_data, None, streams=weights).startswith("stream a: At most one of")
    assert "stream a: " in message_of(open_data, None, streams={"a": {"local": str(shards), "propotion": 1}})


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
    shutil.copytree(shards, tmp_path / "more")
    more = open_data(write_shards(tmp_path / "longer", num_samples=101))
    assert "would repeat and skip samples" in message_of(more.load_state_dict, state)
