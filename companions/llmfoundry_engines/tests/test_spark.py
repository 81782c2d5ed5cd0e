"""Shards that `dataframe_to_mds` of mosaicml-streaming writes from Spark: they train as they are, merged or not."""

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from streaming.base.util import merge_index

from tests.helpers.mds_writer import MDSWriter
from tests.helpers.runs import metrics, run
from tests.helpers.tiny import SEQ_LEN, VOCAB_SIZE, tiny_config, values

COLUMNS = {"tokens": "ndarray:int32"}
OPTIONS: dict[str, Any] = {"columns": COLUMNS, "compression": "zstd", "hashes": ["xxh64"], "size_limit": 4000}
"""Arguments of MDSWriter. `zstd` is the default of `dataframe_to_mds`."""


def tokens_of(number: int) -> list[int]:
    """The tokens of a sample."""
    return [(number * 7 + position) % VOCAB_SIZE for position in range(SEQ_LEN)]


def write_by_the_writer(out: Path, num_samples: int, *, merges: bool) -> None:
    """Make the calls that `dataframe_to_mds` makes: a writer for each task, and a list of indexes to merge."""
    tasks = {task: range(first, num_samples, 5) for first, task in enumerate((8, 9, 10, 11, 12))}
    for task, numbers in tasks.items():
        with MDSWriter(out=str(out / str(task)), **OPTIONS) as writer:
            for number in numbers:
                writer.write({"tokens": np.array(tokens_of(number), np.int32)})
    if merges:
        merge_index([(str(out / str(task) / "index.json"), "") for task in tasks], str(out), keep_local=True)


def write_by_spark(out: Path, num_samples: int, *, merges: bool) -> None:
    """Write a data frame of five partitions, in two tasks at a time."""
    from pyspark.sql import SparkSession
    from pyspark.sql.types import ArrayType, IntegerType, StructField, StructType
    from streaming.base.converters import dataframe_to_mds

    builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    spark = builder.config("spark.driver.memory", "1g").getOrCreate()
    schema = StructType([StructField("tokens", ArrayType(IntegerType()))])
    frame = spark.createDataFrame([(tokens_of(number),) for number in range(num_samples)], schema).repartition(5)
    dataframe_to_mds(frame, merge_index=merges, mds_kwargs={"out": str(out), **OPTIONS})
    spark.stop()


@pytest.fixture(params=[pytest.param("writer", marks=pytest.mark.slow), pytest.param("spark", marks=pytest.mark.long)])
def write(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """The function that writes the shards."""
    if request.param == "writer":
        return write_by_the_writer
    pytest.importorskip("pyspark")
    if shutil.which("java") is None:
        pytest.skip("Spark needs Java")
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
    return write_by_spark


@pytest.mark.multiprocess
def test_folders_of_spark_train_merged_and_not(tmp_path, write):
    digests = []
    for name, merges in (("merged", True), ("plain", False)):
        write(tmp_path / name, 120, merges=merges)
        assert (tmp_path / name / "index.json").exists() == merges
        dataset = {"local": str(tmp_path / name), "shuffle": True}
        config = tiny_config(tmp_path, train_loader={"dataset": dataset}, eval_loader=None, max_duration="5ba")
        run(tmp_path, config, name)
        digests.append(values(metrics(tmp_path, name), "data/digest"))
    assert len(digests[0]) == 5
    if write is write_by_the_writer:  # Spark's own merged index has the order of tasks, and 10 is before 8 in ours
        assert digests[0] != digests[1]
        merge_index(str(tmp_path / "plain"), keep_local=True)
        run(tmp_path, config, "again")
        assert values(metrics(tmp_path, "again"), "data/digest") == digests[1]
