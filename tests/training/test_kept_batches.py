"""A mistake that is met in mid-run loses no batch that a save can keep."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from composer.core import Callback
from torch.utils.data import DataLoader, IterableDataset

from llmfoundry_lite.data.tokenizer import train_tokenizer
from llmfoundry_lite.errors import DataError
from tests.helpers.runs import attempt, losses, metrics, run, saved_names, status
from tests.helpers.tiny import SEQ_LEN, tiny_config

pytestmark = pytest.mark.multiprocess

ROWS = '{"context": "a word", "continuation": " more"}\n' * 2


class ChangeFile(Callback):
    """Writes something else into a file before the batch after `batch`."""

    def __init__(self, path: str, batch: int):
        self.path, self.batch = path, batch

    def batch_start(self, state, logger):
        if int(state.timestamp.batch) + 1 == self.batch:
            Path(self.path).write_text("{}\n")


class Fail(Callback):
    """Fails at an event after `batch`, on every rank or on one."""

    def __init__(self, event: str, batch: int, rank: int | None = None):
        self.batch, self.rank = batch, rank
        setattr(self, event, self.fail)

    def fail(self, state, logger):
        if int(state.timestamp.batch) == self.batch and self.rank in (None, int(os.environ["RANK"])):
            raise KeyError("a mistake of mine")


class Rows(IterableDataset):
    """Rows of one token each. On rank 1 the one at `missing` cannot be read."""

    def __init__(self, missing: int):
        self.missing = missing

    def __len__(self) -> int:
        return 64

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for index in range(64):
            if index == self.missing and os.environ["RANK"] == "1":
                raise DataError("the next shard is missing")
            yield {"input_ids": torch.full((SEQ_LEN,), index)}


def read_rows(missing: int, device_batch_size: int, **options: Any) -> DataLoader:
    return DataLoader(Rows(missing), batch_size=device_batch_size)


def named(thing: Any, **arguments: Any) -> dict[str, Any]:
    return {f"python:{__name__}:{thing.__name__}": arguments}


def unreadable(missing: int) -> dict[str, Any]:
    return {"name": f"python:{__name__}:read_rows", "missing": missing}


def with_tasks(tmp_path: Path, data: Path, **changes: Any) -> dict[str, Any]:
    train_tokenizer(["some words"] * 3, 300).save(str(tmp_path / "tokenizer"))
    task = {"label": "mine", "icl_task_type": "language_modeling", "dataset_uri": str(tmp_path / "mine.jsonl")}
    (tmp_path / "mine.jsonl").write_text(ROWS)
    asking = {"icl_tasks": [task], "eval_loader": None, "eval_interval": "3ba", "max_duration": "4ba"}
    reading = {"tokenizer__name": str(tmp_path / "tokenizer"), "model__vocab_size": 384, "save_interval": "100ba"}
    return tiny_config(data, autoresume=True, **{**asking, **reading, **changes})


def test_a_task_whose_file_has_changed_costs_no_batch(tmp_path, data):
    config = with_tasks(tmp_path, data)
    callbacks = named(ChangeFile, path=str(tmp_path / "mine.jsonl"), batch=2)
    result = attempt(tmp_path, config, "moved", callbacks=callbacks)
    assert result.exit_codes == [2]
    assert result.output.index("saved ba3") < result.output.index("error: mine: ")
    assert "no column 'context'" in status(tmp_path, "moved")["reason"]
    assert saved_names(tmp_path, "moved") == {"ba3"} and len(losses(tmp_path, "moved")) == 3

    (tmp_path / "mine.jsonl").write_text(ROWS)
    run(tmp_path, config, "moved")
    assert [record["launch"] for record in metrics(tmp_path, "moved")] == [1, 1, 1, 2]
    assert "eval/icl/mine/0-shot/acc" in metrics(tmp_path, "moved")[2], "the evaluation has been made up"


@pytest.mark.slow
@pytest.mark.parametrize("event", ["batch_end", "batch_checkpoint", "batch_start", "eval_start", "fit_end"])
def test_a_callback_that_fails_on_all_ranks_costs_no_batch(tmp_path, data, event):
    batch = 4 if event == "fit_end" else 3
    config = tiny_config(data, autoresume=True, eval_interval="3ba", max_duration="4ba", save_interval="100ba")
    run(tmp_path, config, "whole", 2)
    result = attempt(tmp_path, config, "moved", 2, callbacks=named(Fail, event=event, batch=batch))
    assert result.exit_codes == [1, 1] and "KeyError: 'a mistake of mine'" in result.output
    assert saved_names(tmp_path, "moved") == {f"ba{batch}"}
    run(tmp_path, config, "moved", 2)
    assert losses(tmp_path, "moved") == losses(tmp_path, "whole")
    for name in ("moved", "whole"):
        assert "eval/loss" in metrics(tmp_path, name)[2]


@pytest.mark.slow
def test_a_rank_that_fails_alone_does_not_wait_for_the_others(tmp_path, data):
    config = tiny_config(data, eval_interval=0, max_duration="4ba", save_interval="100ba")
    result = attempt(tmp_path, config, "alone", 2, callbacks=named(Fail, event="batch_end", batch=3, rank=1))
    assert 1 in result.exit_codes and "a mistake of mine" in result.output
    assert saved_names(tmp_path, "alone") == set()


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [{"train_loader": unreadable(13), "eval_loader": None}, {"eval_loader": unreadable(7), "eval_interval": "3ba"}],
    ids=["training", "validation"],
)
def test_data_that_one_rank_cannot_read_costs_no_batch(tmp_path, data, changes):
    config = tiny_config(data, autoresume=True, max_duration="6ba", save_interval="100ba", **changes)
    result = attempt(tmp_path, config, "moved", 2)
    assert result.exit_codes == [2, 2], result.outputs
    assert result.output.count("error: the next shard is missing") == 1
    assert saved_names(tmp_path, "moved") == {"ba3"} and len(losses(tmp_path, "moved")) == 3
