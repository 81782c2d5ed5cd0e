"""Perplexity and bits per byte, against a loop over the text without any of the harness."""

import json
import math
import os
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers
from tokenizers.trainers import BpeTrainer

from llmfoundry_lite.config.eval_schema import TaskConfig
from llmfoundry_lite.config.model_schema import AttentionConfig, ModelConfig
from llmfoundry_lite.data import baselines
from llmfoundry_lite.data.spelling import LostText
from llmfoundry_lite.data.tokenizer import build_tokenizer, train_tokenizer
from llmfoundry_lite.errors import DataError
from llmfoundry_lite.evaluation.documents import prepare_text
from llmfoundry_lite.evaluation.harness import evaluate
from llmfoundry_lite.evaluation.means import bits_per_byte, bits_per_byte_error, by_document
from llmfoundry_lite.evaluation.models import TreeModel, separator_of
from llmfoundry_lite.evaluation.packing import Separator
from llmfoundry_lite.evaluation.results import Results
from llmfoundry_lite.evaluation.tables import _describe_irregularities
from tests.helpers.mds_writer import MDSWriter
from tests.helpers.models import normal_model

CPU = torch.device("cpu")
TEXT = "Grüße aus dem Süden — naïve façade, ½ of it: 東京.\r\nAnd a second line of words, some of them twice, twice.\n"


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["a second line of words, some of them twice. And the first of it."] * 20, 280)


@pytest.fixture(scope="module")
def model():
    config = ModelConfig(d_model=32, n_heads=4, n_layers=2, max_seq_len=16, vocab_size=280)
    return TreeModel(normal_model(config), CPU)


def task(path: Path) -> TaskConfig:
    return TaskConfig(label="text", icl_task_type="perplexity", dataset_uri=str(path))


def measure(model, tokenizer, path: Path):
    results = evaluate(model, tokenizer, [task(path)], Results(model="m", suite="s", source="here"))
    return results.tasks["text/0-shot"]


@torch.no_grad()
def by_hand(model, samples):
    """(nats, tokens) of samples of tokens: every one but the first of a sample predicted once, sixteen at a time; the
    last ones, which are fewer, from the sixteen tokens that end before the last."""
    nats, count = 0.0, 0
    for sample in samples:
        for start in range(1, len(sample), 16):
            end = min(start + 16, len(sample))
            window = torch.tensor([sample[max(0, end - 17) : end]])
            logits = model.model(window[:, :-1])[0].double()[start - end :]
            nats += float(torch.nn.functional.cross_entropy(logits, window[0, start - end :], reduction="sum"))
            count += end - start
    return nats, count


@pytest.mark.parametrize(("name", "texts"), [("a.txt", [TEXT]), ("a.ndjson", [TEXT, "", "short\u2028one"])])
def test_a_text_file_is_a_document_and_so_is_each_row_of_json_lines(tmp_path, model, tokenizer, name, texts) -> None:
    path = tmp_path / name
    lines = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)
    path.write_bytes((texts[0] if name == "a.txt" else lines).encode())
    found = measure(model, tokenizer, path)
    nats, count = by_hand(model, [[tokenizer.eos_token_id, *tokenizer.encode(text)] for text in texts])
    assert found["perplexity"] == pytest.approx(math.exp(nats / count), rel=1e-5)
    num_bytes = sum(len(text.encode()) for text in texts)
    assert found["bits_per_byte"] == pytest.approx(nats / math.log(2) / num_bytes, rel=1e-5)


def test_each_sample_of_an_mds_split_is_a_document_whose_first_token_is_given(tmp_path, model, tokenizer) -> None:
    ids = tokenizer.encode(TEXT)
    ids[5] = tokenizer.eos_token_id  # text has ended there: a token to be predicted, without bytes
    samples = [ids[:20], ids[20:40]]
    with MDSWriter(out=str(tmp_path / "val"), columns={"tokens": "ndarray:uint16"}) as writer:
        for sample in samples:
            writer.write({"tokens": np.array(sample, np.uint16)})
    found = measure(model, tokenizer, tmp_path / "val")
    nats, count = by_hand(model, samples)
    assert count == 38
    assert found["perplexity"] == pytest.approx(math.exp(nats / count), rel=1e-5)
    texts = [tokenizer.decode([*samples[0][1:5], *samples[0][6:]]), tokenizer.decode(samples[1][1:])]
    num_bytes = sum(len(text.encode()) for text in texts)
    assert found["bits_per_byte"] == pytest.approx(nats / math.log(2) / num_bytes, rel=1e-5)


def test_padding_of_a_split_is_neither_read_nor_predicted(tmp_path, model, tokenizer) -> None:
    ids = tokenizer.encode(TEXT)
    samples = [ids[:20], ids[20:27], ids[27:28]]  # of one token, nothing is predicted
    columns = {"tokens": "ndarray:uint16:20", "unpadded_length": "uint32"}
    with MDSWriter(out=str(tmp_path / "val"), columns=columns) as writer:
        for sample in samples:
            padded = np.array(sample + [tokenizer.eos_token_id] * (20 - len(sample)), np.uint16)
            writer.write({"tokens": padded, "unpadded_length": len(sample)})
    found = measure(model, tokenizer, tmp_path / "val")
    nats, count = by_hand(model, samples)
    assert found["perplexity"] == pytest.approx(math.exp(nats / count), rel=1e-5)
    num_bytes = sum(len(tokenizer.decode(sample[1:]).encode()) for sample in samples)
    assert found["bits_per_byte"] == pytest.approx(nats / math.log(2) / num_bytes, rel=1e-5)


def test_the_error_of_bits_per_byte_is_what_other_texts_of_the_kind_would_differ_by():
    """Estimate it from 2,000 texts of 50 documents, long ones easier, as they are drawn; no formula."""
    rng = np.random.default_rng(5)

    def draw():
        sizes = rng.integers(100, 2000, 50)
        rates = rng.normal(0.9, 0.1, 50) - sizes / 10000
        return [window for i in range(50) for window in windows_of(i, float(rates[i]), int(sizes[i]))]

    texts = [draw() for _ in range(2000)]
    spread = np.std([float(bits_per_byte(by_document(items).sum(axis=0))) for items in texts])
    errors = [bits_per_byte_error(items) for items in texts]
    assert np.mean(errors) == pytest.approx(spread, rel=0.05)


def windows_of(document, nats_per_byte, num_bytes):
    """Two, which err together."""
    half = {"index": document, "log_probability": [-nats_per_byte * num_bytes / 2], "num_characters": [num_bytes / 2]}
    return [half, half]


def test_the_error_of_bits_per_byte_by_hand():
    def item(document, bits, num_bytes):
        return {"index": document, "log_probability": [-bits * math.log(2)], "num_characters": [num_bytes]}

    # 12 bits of 8 bytes: 1.5. Residuals 6 - 1.5 x 4 = 0, 5 - 3 = 2 and 1 - 3 = -2, so sqrt(3 / 2 x 8) / 8.
    documents = [item(0, 4, 2), item(0, 2, 2), item(1, 5, 2), item(2, 1, 2)]
    assert bits_per_byte_error(documents) == pytest.approx(math.sqrt(12) / 8)
    # One document by its windows: 1.5 again, and residuals 1 and -1.
    assert bits_per_byte_error(documents[:2]) == pytest.approx(math.sqrt(2 / 1 * 2) / 4)
    assert bits_per_byte_error(documents[:1]) is None


def test_equal_documents_are_one_cluster(tmp_path, model, tokenizer) -> None:
    texts = [f"{TEXT} {number}" for number in range(4)]
    errors = []
    for copies in (1, 5):
        path = tmp_path / f"{copies}.jsonl"
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts * copies))
        found = measure(model, tokenizer, path)
        errors.append((found["num_documents"], found["bits_per_byte"], found["bits_per_byte_stderr"]))
    assert errors[1] == pytest.approx(errors[0])


@pytest.mark.parametrize("length", [1, 2, 5, 16])
def test_windows_are_those_of_lm_evaluation_harness(tmp_path, tokenizer, length) -> None:
    """Beside `get_rolling_token_windows` and `make_disjoint_window` of lm_eval 0.4.13, retold."""
    path = tmp_path / "a.txt"
    path.write_bytes(TEXT.encode())
    ids, expected, predicted = tokenizer.encode(TEXT), [], 0
    while predicted < len(ids):
        num = min(len(ids) - predicted, length)
        end = predicted + num
        inputs = [0, *ids[: num - 1]] if not predicted else ids[end - length - 1 : end - 1]
        expected.append((tuple(inputs[: len(inputs) - (num - 1)]), tuple(ids[predicted:end])))
        predicted = end
    found = prepare_text(task(path), tokenizer, max_seq_len=length, limit=None).items
    requests = [item.requests[0] for item in found]
    # Bytes add up wherever windows cut a character.
    assert sum(request.num_characters for request in requests) == len(TEXT.encode())
    assert tokenizer.eos_token_id == 0 and len(ids) % 16
    assert [(request.context, request.continuation) for request in requests] == expected


def test_tokens_between_documents_have_no_bytes(tmp_path, tokenizer) -> None:
    """Neither the end of a text nor a token of its own that begins one."""
    backend = tokenizers.Tokenizer.from_str(tokenizer.backend.to_str())
    begins = replace(tokenizer, backend=backend, vocab_size=tokenizer.vocab_size + 1, config={"bos_token": "<s>"})
    begins.backend.add_special_tokens(["<s>"])
    assert begins.bos_token_id not in (None, begins.eos_token_id)
    words = tokenizer.encode("cat")
    sample = [*words, begins.eos_token_id, begins.bos_token_id, *words]
    with MDSWriter(out=str(tmp_path / "val"), columns={"tokens": "ndarray:uint16"}) as writer:
        writer.write({"tokens": np.array([begins.bos_token_id, *sample], np.uint16)})
    found = prepare_text(task(tmp_path / "val"), begins, max_seq_len=64, limit=None)
    assert [item.requests[0].num_characters for item in found.items] == [len("catcat")]


def test_bits_per_byte_are_of_the_text_that_the_tokens_spell(tmp_path, model) -> None:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Split(" ", "isolated")
    letters = BpeTrainer(special_tokens=["<eos>"], show_progress=False)
    backend.train_from_iterator(["some words of Latin letters alone"], letters)
    lossy = build_tokenizer("lossy", backend, {"eos_token": "<eos>"})
    (tmp_path / "a.txt").write_text("some words αβγδ of Latin letters")
    (tmp_path / "b.txt").write_text("some words  of Latin letters")
    whole, kept = (measure(model, lossy, tmp_path / name) for name in ("a.txt", "b.txt"))
    assert whole["bits_per_byte"] == kept["bits_per_byte"] and "lost_text" not in kept
    assert whole["lost_text"]["share"] == 4 / 32 and whole["lost_text"]["lost_bytes"] == 8
    assert "12 % of characters do not come back (4 have no token" in next(_describe_irregularities(whole))
    assert whole["fingerprint"] != kept["fingerprint"]
    (tmp_path / "c.txt").write_text("αα some")
    assert measure(model, lossy, tmp_path / "c.txt")["lost_text"]["share"] == 2 / 7


def test_a_limit_counts_windows(tmp_path, tokenizer) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(TEXT.encode())
    assert len(prepare_text(task(path), tokenizer, max_seq_len=8, limit=3).items) == 3
    whole = prepare_text(task(path), tokenizer, max_seq_len=8, limit=None)
    for limit in (len(whole.items), 1000):
        assert prepare_text(task(path), tokenizer, max_seq_len=8, limit=limit).fingerprint == whole.fingerprint


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", "", "has no text"),
        ("a.jsonl", '{"text": ""}\n', "has no text"),
        ("a.jsonl", '{"text": "a"}\n{"body": "b"}\n', "line 2: text is None, expected a text"),
        ("a.jsonl", '{"text":' + "[" * 200_000, "line 1 is not JSON: too deep"),
        ("val/index.json", "[]", "is not an index of MDS version 2"),
        ("a.jsonl", '{"text": 3}\n', "line 1: text is 3, expected a text"),
        ("a.jsonl", '{"text": "a \\ud83d"}\n', "line 1 has half of a surrogate pair, such as"),
        ("val/index.json", '{"shards": []}', "is not an MDS split of tokens"),
    ],
)
def test_what_is_no_text_is_refused(tmp_path, tokenizer, name, content, message) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(content)
    place = path.parent if name.endswith("index.json") else path
    with pytest.raises(DataError) as caught:
        prepare_text(task(place), tokenizer, max_seq_len=8, limit=None)
    assert message in str(caught.value)
    assert str(place) in str(caught.value)


def test_a_compressed_split_is_read_and_a_damaged_one_refused(tmp_path, tokenizer) -> None:
    def write(name, **options):
        with MDSWriter(
            out=str(tmp_path / name), columns={"tokens": "ndarray:uint16"}, hashes=["xxh64"], **options
        ) as w:
            for first in (1, 50):
                w.write({"tokens": np.arange(first, first + 20, dtype=np.uint16)})
        return tmp_path / name

    def prepared(place):
        return prepare_text(task(place), tokenizer, max_seq_len=8, limit=None)

    whole, compressed = write("whole"), write("compressed", compression="zstd")
    assert prepared(compressed).items == prepared(whole).items
    for place, name in ((whole, "shard.00000.mds"), (compressed, "shard.00000.mds.zstd")):
        content = bytearray((place / name).read_bytes())
        content[-3] ^= 1
        (place / name).write_bytes(content)
        with pytest.raises(
            DataError, match=rf"not an MDS split of tokens \({name} is damaged: its xxh64 is not the one"
        ):
            prepared(place)


@pytest.mark.parametrize("dtype", ["int64", "int32", "uint16"])
def test_rows_of_bytes_are_read_as_what_they_are(tmp_path, tokenizer, dtype) -> None:
    """LLM Foundry writes any of these, and its index does not say which."""
    rows = np.arange(40).reshape(2, 20) * 7
    for name, column in (("bytes", "bytes"), ("arrays", "ndarray")):
        with MDSWriter(out=str(tmp_path / name), columns={"tokens": column}) as writer:
            for row in rows.astype(dtype):
                writer.write({"tokens": row.tobytes() if column == "bytes" else row})
    found = [
        prepare_text(task(tmp_path / name), tokenizer, max_seq_len=8, limit=None).items for name in ("bytes", "arrays")
    ]
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("column", "row", "message"),
    [
        ("bytes", b"12345", "its rows are bytes of no numbers below 280: neither int64, int32, uint16, uint8"),
        ("bytes", np.array([3, -4]).tobytes(), "its rows are bytes of no numbers below 280"),
        ("bytes", np.arange(250, 290).tobytes(), "its rows are bytes of no numbers below 280"),
        ("bytes", np.arange(250, 290, dtype=np.int32).tobytes(), "its rows are bytes of no numbers below 280"),
        ("ndarray", np.array([3, -4]), "-4 is no token"),
        ("ndarray", np.array([3.0, 4.0]), "column tokens holds ndarray, not a row of whole numbers"),
        ("json", [3, 4], "column tokens holds list, not a row of whole numbers"),
        ("pkl", [3, 4], "column tokens is of type pkl, which may run code when it is read"),
    ],
)
def test_rows_that_are_no_tokens_are_refused(tmp_path, tokenizer, column, row, message) -> None:
    with MDSWriter(out=str(tmp_path / "val"), columns={"tokens": column}) as writer:
        writer.write({"tokens": row})
    with pytest.raises(DataError, match=rf"is not an MDS split of tokens \(.*{re.escape(message)}"):
        prepare_text(task(tmp_path / "val"), tokenizer, max_seq_len=8, limit=None)


def test_a_large_split_is_read_by_shards_and_no_further_than_the_limit(tmp_path, tokenizer, monkeypatch) -> None:
    monkeypatch.setattr(baselines, "MAX_BYTES", 1000)
    with MDSWriter(out=str(tmp_path / "val"), columns={"tokens": "bytes"}, size_limit=1000) as writer:
        for _ in range(9):
            writer.write({"tokens": np.arange(1, 41).tobytes()})
    shards = sorted((tmp_path / "val").glob("*.mds"))
    assert sum(shard.stat().st_size for shard in shards) > 2000
    assert len(prepare_text(task(tmp_path / "val"), tokenizer, max_seq_len=40, limit=None).items) == 9
    shards[-1].unlink()
    assert len(prepare_text(task(tmp_path / "val"), tokenizer, max_seq_len=40, limit=2).items) == 2
    monkeypatch.setattr(baselines, "MAX_BYTES", 100)
    with pytest.raises(
        DataError, match=r"text: .*00000\.mds has more than 100 bytes, .*; write the data again in smaller"
    ):
        prepare_text(task(tmp_path / "val"), tokenizer, max_seq_len=40, limit=2)


def test_a_split_carries_the_text_that_its_preparation_lost(tmp_path, tokenizer) -> None:
    with MDSWriter(out=str(tmp_path / "val"), columns={"tokens": "ndarray:uint16"}) as writer:
        writer.write({"tokens": np.arange(1, 20, dtype=np.uint16)})
    assert prepare_text(task(tmp_path / "val"), tokenizer, max_seq_len=8, limit=None).lost_text is None
    lost = LostText(100, 120, 3, Counter(no_token=2), Counter("é")).as_json()
    (tmp_path / "summary.json").write_text(json.dumps({"splits": {}, "lost_text": lost}))
    assert prepare_text(task(tmp_path / "val"), tokenizer, max_seq_len=8, limit=None).lost_text == lost


def test_a_pipe_is_no_text_to_wait_for(tmp_path, tokenizer) -> None:
    os.mkfifo(tmp_path / "a.txt")
    with pytest.raises(DataError, match="cannot be read"):
        prepare_text(task(tmp_path / "a.txt"), tokenizer, max_seq_len=8, limit=None)


def test_the_separator_is_the_one_that_training_was_told() -> None:
    told = [{"bos_token_id": 3}, {"eos_token_id": 0}, {"eos_token_id": None}]
    found = [separator_of({"train_loader": {"dataset": dataset}}) for dataset in told]
    assert [*found, separator_of({})] == [Separator(3, begins=True), Separator(0), None, None]


@pytest.mark.parametrize("named", [None, Separator(7), Separator(7, begins=True)])
def test_documents_of_a_sample_do_not_see_each_other_where_training_keeps_them_apart(
    tmp_path, tokenizer, named
) -> None:
    """The number is eval/loss's: the same samples, through the model that is trained."""
    from llmfoundry_lite.parallel.precision import PRECISIONS
    from llmfoundry_lite.training.adapter import LanguageModel
    from llmfoundry_lite.training.in_context import ModelInTraining

    attention = AttentionConfig(alibi=True, attn_uses_sequence_id=True)
    config = ModelConfig(d_model=32, n_heads=4, n_layers=2, max_seq_len=16, vocab_size=280, attn_config=attention)
    mpt = normal_model(config)
    generator = np.random.default_rng(0)
    samples = generator.integers(1, 280, (6, 16))
    token, begins = named or (tokenizer.eos_token_id, False)
    samples[generator.random(samples.shape) < 0.2] = token
    with MDSWriter(out=str(tmp_path / "val"), columns={"tokens": "ndarray:uint16"}) as writer:
        for sample in samples:
            writer.write({"tokens": sample.astype(np.uint16)})
    found = measure(TreeModel(mpt, CPU, named), tokenizer, tmp_path / "val")
    precision, separators = PRECISIONS["fp32", "PURE"], (token, None)
    with torch.no_grad():
        batch = {"input_ids": torch.tensor(samples, dtype=torch.int64)}
        trained = [LanguageModel(mpt, precision, one, separator_begins=begins) for one in separators]
        both = [model(batch) for model in trained]
    loss, other = (float(outputs["loss_sum"] / outputs["num_tokens"]) for outputs in both)
    assert abs(loss - other) > 1e-3, "the samples are chosen for this"
    assert math.log(found["perplexity"]) == pytest.approx(loss, rel=1e-6)
    while_training = measure(ModelInTraining(trained[0], CPU), tokenizer, tmp_path / "val")
    assert math.log(while_training["perplexity"]) == pytest.approx(loss, rel=1e-6)
