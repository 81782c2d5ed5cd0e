"""A datatrove pipeline whose last step tokenises gives the shards of one machine."""

from pathlib import Path

import pytest

from llmfoundry_engines.join import join
from llmfoundry_lite.errors import ConfigError, DataError
from llmfoundry_lite.prepare.prepare import prepare
from tests.helpers.data import folder_bytes, make_documents
from tests.helpers.preparing import SEQ_LEN, request, write_jsonl

pytest.importorskip("datatrove")
pytest.importorskip("orjson")  # its reader of JSON lines needs it

from llmfoundry_engines import datatrove_step
from llmfoundry_engines.datatrove_step import PrepareShards

NUM_TASKS = 2


@pytest.mark.slow
def test_the_tasks_of_a_pipeline_give_the_shards_of_one_machine(
    tokenizer_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tasks read every second file; after a filter, the documents are those of one machine in this order."""
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.filters import LambdaFilter
    from datatrove.pipeline.readers import JsonlReader

    monkeypatch.setattr(datatrove_step, "UNIT_CHARACTERS", 4000)  # tasks run in this process
    kept = []
    (tmp_path / "raw").mkdir()
    for number in range(4):
        documents = make_documents(80, seed=number)
        write_jsonl(tmp_path / f"raw/{number}.jsonl", documents)
        kept.append(write_jsonl(tmp_path / f"kept-{number}.jsonl", [text for text in documents if "a" in text]))
    in_order = [str(kept[number]) for number in (0, 2, 1, 3)]
    wanted = request("", tokenizer_folder, val_fraction=0.1, size_limit_bytes=9000)
    prepare(
        request("", tokenizer_folder, sources=tuple(in_order), val_fraction=0.1, size_limit_bytes=9000),
        tmp_path / "expected",
        num_workers=1,
    )

    def steps() -> list:
        shards = PrepareShards(
            tmp_path / "out", tokenizer=wanted.tokenizer, max_seq_len=SEQ_LEN, val_fraction=0.1, size_limit_bytes=9000
        )
        return [JsonlReader(str(tmp_path / "raw")), LambdaFilter(lambda document: "a" in document.text), shards]

    for logs in ("first", "again"):  # all tasks of the second are complete
        LocalPipelineExecutor(steps(), tasks=NUM_TASKS, workers=1, logging_dir=str(tmp_path / logs)).run()
    join(tmp_path / "out")
    for name in ("train", "val", "tokenizer"):
        assert folder_bytes(tmp_path / "out" / name) == folder_bytes(tmp_path / "expected" / name)
    assert len(list((tmp_path / "out/train").glob("*.mds"))) > 2


def test_tasks_of_another_number_are_refused(tokenizer_folder: Path, tmp_path: Path) -> None:
    step = PrepareShards(tmp_path / "out", tokenizer=str(tokenizer_folder), max_seq_len=SEQ_LEN)
    step.run(iter(()), 0, 2)
    with pytest.raises(DataError, match=r"the input has changed \(tasks 2 then, tasks 3 now\)"):
        step.run(iter(()), 1, 3)


def test_a_pipeline_cannot_train_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="tokenizer train:400: a pipeline cannot train one"):
        PrepareShards(tmp_path, tokenizer="train:400", max_seq_len=SEQ_LEN)


def test_documents_that_are_gone_are_not_taken_for_none() -> None:
    texts = datatrove_step.OnceOnly(iter(["a"]))
    assert [unit.content for unit in texts.units()] == [("a",)]
    with pytest.raises(DataError, match="run the pipeline again"):
        list(texts.units())
