"""`open_dataset`: one order for any loop, stopped anywhere and carried on by any number of ranks."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from llmfoundry_lite.data.stateful import StatefulLoader, open_dataset
from llmfoundry_lite.errors import ConfigError, DataError
from tests.helpers.mds_writer import MDSWriter
from tests.helpers.numbered import SEQ_LEN, write_shards

WORDS = {"shuffle": True, "shuffle_seed": 3, "max_seq_len": SEQ_LEN, "global_batch_size": 12}
LENGTH = 8


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    return write_shards(tmp_path_factory.mktemp("stateful"))


def take(loaders: list[StatefulLoader], count: int) -> list[list[int]]:
    """The sample numbers of the next `count` global batches, of all ranks together."""
    found: list[list[int]] = []
    while len(found) < count:
        for parts in zip(*loaders, strict=True) if len(loaders) > 1 else ((batch,) for batch in loaders[0]):
            found.append(torch.cat([part["input_ids"] for part in parts])[:, 0].tolist())
            if len(found) == count:
                break
    return found


def ranks(shards, world_size: int, **more) -> list[StatefulLoader]:
    return [open_dataset(shards, rank=rank, world_size=world_size, **WORDS, **more) for rank in range(world_size)]


@pytest.mark.parametrize(("stop", "num_workers"), [(1, 0), (LENGTH - 1, 0), (LENGTH, 0), (LENGTH + 3, 2)])
def test_stopped_anywhere_other_ranks_carry_on_with_the_same_batches(shards, stop, num_workers):
    whole = take(ranks(shards, 1), 2 * LENGTH)
    first = ranks(shards, 3, num_workers=num_workers)
    found = take(first, stop)
    states = [json.dumps(loader.state_dict()) for loader in first]
    assert len(set(states)) == 1
    second = ranks(shards, 2, num_workers=num_workers)
    for loader in second:
        loader.load_state_dict(json.loads(states[0]))
    assert found + take(second, 2 * LENGTH - stop) == whole


def test_a_break_loses_and_repeats_nothing(shards):
    (loader,) = ranks(shards, 1)
    assert take([loader], 3) + take([loader], 4) + take([loader], 5) == take(ranks(shards, 1), 12)
    assert len(loader) == LENGTH and loader.state_dict()["epoch"] == 1


def test_a_batch_kept_at_the_end_has_rows_of_padding(shards):
    loader = open_dataset(shards, drop_last=False, **WORDS)
    assert len(loader) == LENGTH + 1
    last = [batch["input_ids"] for batch in loader][-1]
    assert last.shape == (12, SEQ_LEN) and int((last == -100).all(dim=1).sum()) == 8
    assert loader.state_dict()["epoch"] == 1


def test_it_refuses_to_be_wrapped_into_another_loader(shards):
    with pytest.raises(TypeError, match="this is a loader: iterate over it"):
        next(iter(DataLoader(open_dataset(shards, **WORDS), batch_size=None)))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"rank": 0, "world_size": 5}, DataError, "cannot be split evenly over 5 ranks"),
        ({"rank": 2, "world_size": 2}, ConfigError, "rank 2 of 2 given, expected 0 to 1"),
        ({"rank": 1}, ConfigError, "rank and world_size belong together"),
        ({"shuffle_sead": 3}, ConfigError, "did you mean open_dataset.shuffle_seed"),
        ({"global_batch_size": 0}, ConfigError, "global_batch_size is 0, expected a whole number"),
        ({"max_seq_len": 8.0}, ConfigError, "max_seq_len is 8.0, expected a whole number"),
        ({"num_workers": -1}, ConfigError, "num_workers is -1, expected a whole number from 0 on"),
        ({"rank": "0", "world_size": "2"}, ConfigError, "rank is '0', expected a whole number from 0 on"),
        ({"batch_size": 6}, ConfigError, "batch_size: unknown word; did you mean global_batch_size, of all ranks"),
        ({"seed": 6}, ConfigError, r"seed: unknown word; did you mean shuffle_seed\?"),
        ({"max_seq_len": SEQ_LEN + 1}, DataError, f"{SEQ_LEN} tokens, but max_seq_len is {SEQ_LEN + 1}; set"),
        ({"max_seq_len": SEQ_LEN - 1}, DataError, r"leaves .* % of the text out; .* allow_truncation: true"),
    ],
)
def test_what_cannot_be_is_refused(shards, changes, error, words):
    with pytest.raises(error, match=words):
        next(iter(open_dataset(shards, **{**WORDS, **changes})))


def test_numbers_and_paths_of_other_libraries_are_taken(shards):
    sizes = {name: np.int64(WORDS[name]) for name in ("global_batch_size", "max_seq_len")}
    seed, streams = {"shuffle": np.True_, "shuffle_seed": np.int32(3)}, {"streams": {"a": {"local": Path(shards)}}}
    words = {name: value for name, value in WORDS.items() if name not in ("shuffle", "shuffle_seed")}
    theirs = open_dataset(**{**words, **sizes, **seed, **streams}, rank=np.int64(1), world_size=np.uint8(2))
    ours = open_dataset(shards, **{**words, "shuffle": True, "shuffle_seed": 3}, rank=1, world_size=2)
    for batches in zip(theirs, ours, strict=True):
        assert torch.equal(*(batch["input_ids"] for batch in batches))


def test_shards_of_text_take_a_tokenizer_or_its_folder(tmp_path, tokenizer, tokenizer_folder):
    with MDSWriter(out=str(tmp_path), columns={"text": "str"}) as writer:
        writer.write({"text": "def one"})
    words = {"global_batch_size": 1, "max_seq_len": 2}
    for named in (tokenizer, tokenizer_folder, str(tokenizer_folder)):
        (batch,) = open_dataset(tmp_path, tokenizer=named, **words)
        assert batch["input_ids"][0].tolist() == tokenizer.encode("def one")[:2]
    with pytest.raises(TypeError, match="PathLike"):
        open_dataset(tmp_path, tokenizer=object(), **words)


def test_ranks_without_a_process_group_are_refused(shards, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"2 ranks were launched.*init_process_group"):
        open_dataset(shards, **WORDS)


def test_the_place_of_another_order_is_refused(shards):
    state = open_dataset(shards, **WORDS).state_dict()
    with pytest.raises(DataError, match="global_train_batch_size is 6"):
        open_dataset(shards, **{**WORDS, "global_batch_size": 6}).load_state_dict(state)
