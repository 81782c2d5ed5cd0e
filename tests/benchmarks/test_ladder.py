"""The ladder: the law of losses, the n-gram, the launches and what is held out."""

import itertools
import math

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE

from benchmarks.ladder import data, ladder, law, plan
from llmfoundry_lite.config.load_train import load_train_config
from llmfoundry_lite.errors import UserError
from llmfoundry_lite.models.flops import count_parameters

SIZES = [5e4, 1e5, 2e5, 4e5]


def test_a_known_law_comes_back():
    sizes = np.array(SIZES)
    losses = np.stack([1.2 + 40 * sizes**-0.3, 9 * sizes**-0.1])
    found = law.fit(SIZES, losses)
    assert found.exponent == pytest.approx([0.3, 0.1], abs=1e-6)
    assert found.floor == pytest.approx([1.2, 0], abs=1e-6)
    assert found.at(8e5) == pytest.approx([1.2 + 40 * 8e5**-0.3, 9 * 8e5**-0.1])


def test_the_interval_holds_what_comes_about_as_often_as_it_says(monkeypatch):
    """Measured losses and the one to come stray from the law by the given deviation."""
    monkeypatch.setattr(law, "NUM_DRAWS", 300)
    generator, hits, deviation = np.random.default_rng(0), 0, 0.01
    truth = lambda size: 1.2 + 40 * size**-0.3  # noqa: E731
    num_bytes = np.full(40, 1000.0)
    for _ in range(40):
        bits = [truth(size) + generator.normal(0, deviation) for size in SIZES]
        documents = [np.stack([num_bytes * b * math.log(2), num_bytes], axis=1) for b in bits]
        found = law.predict(SIZES, documents, 8e5, deviation)
        assert found["bits_low"] < found["bits"] < found["bits_high"]
        hits += found["bits_low"] <= truth(8e5) + generator.normal(0, deviation) <= found["bits_high"]
    assert 35 <= hits < 40


def test_the_expected_loss_has_no_noise_and_its_interval_that_of_the_run_to_come(monkeypatch):
    monkeypatch.setattr(law, "NUM_DRAWS", 1000)
    num_bytes, deviation = np.full(40, 1000.0), 0.01
    bits = 1.2 + 40 * np.array(SIZES) ** -0.3
    documents = [np.stack([num_bytes * b * math.log(2), num_bytes], axis=1) for b in bits]
    found = law.predict(SIZES, documents, SIZES[1], deviation)  # where the fit alone is surer than a run
    assert found["bits"] == pytest.approx(bits[1], abs=1e-6)
    assert found["bits_high"] - found["bits_low"] > 4 * deviation


def test_an_n_gram_counts_as_by_hand_and_its_probabilities_add_up_to_one():
    tokens = np.array([0, 1, 2, 0, 1, 1, 2, 0, 1, 2])
    model = law.NGram(tokens, vocab_size=3, order=2)
    # Pairs: 01 three times, 12 three times, 20 twice, 11 once. Once 1, twice 1: a discount of 1/3; of single tokens,
    # by how many different ones precede them (0: 1, 1: 2, 2: 1), once 2, twice 1: 1/2.
    after_1 = (2 - 1 / 2) / 4 + (1 / 2 * 3 / 4) / 3
    expected = (1 - 1 / 3) / 4 + (1 / 3 * 2 / 4) * after_1
    assert model.nats(np.array([1, 1])) == pytest.approx(-math.log(expected))
    for order in (1, 3, 5):
        model = law.NGram(tokens, vocab_size=3, order=order)
        texts = itertools.product(range(3), repeat=4)
        assert sum(math.exp(-model.nats(np.array([0, *text]))) for text in texts) == pytest.approx(1)


def test_bits_are_of_bytes_and_each_text_begins_anew(tmp_path, monkeypatch):
    monkeypatch.setattr(plan, "TOKENS_PER_PARAMETER", 1)
    tokenizer = Tokenizer(BPE({"\0": 0, "a": 1, "é": 2}, []))
    (tmp_path / "data" / "tokenizer").mkdir(parents=True)
    tokenizer.save(str(tmp_path / "data" / "tokenizer" / "tokenizer.json"))
    (tmp_path / "text").mkdir()
    for name, texts in {"train": ["aé" * 15_000], "split_text": ["é", "é"], "domain_text": ["a"]}.items():
        data.write_rows(tmp_path / "text" / f"{name}.jsonl", [{"text": text} for text in texts])
    ngram = ladder.measure_text(tmp_path, [plan.Shape(16, 1)])[-1]
    # Nearly all of what is read is a é a é; after the beginning only a was ever seen, once.
    found = {part.partition("_")[0]: bits for part, bits in ngram.items() if part != "model"}
    model = law.NGram(np.array([0, *[1, 2] * 15_000])[: plan.Shape(16, 1).num_batches * 2048], plan.VOCAB_SIZE)
    assert found["split"] == pytest.approx(2 * model.nats(np.array([0, 2])) / 4 / math.log(2))
    assert found["domain"] == pytest.approx(model.nats(np.array([0, 1])) / math.log(2))


def test_a_prediction_stands_once_it_was_made(tmp_path):
    (tmp_path / "16x2-32x2-48x2-64x3.json").write_text('{"bits": 1.5, "at_batch": 0}')
    shapes = plan.parse_shapes(["16x2", "32x2", "48x2", "64x3"])
    assert ladder.predict(tmp_path, shapes[:3], shapes[3])["bits"] == 1.5


def test_compressors_are_measured_in_bits_per_byte():
    found = law.compressed(["ab" * 500, "é" * 500])
    assert all(0 < bits < 8 * 200 / 2000 for bits in found.values())


def test_launches_go_on_where_a_run_stopped_and_each_moves():
    assert plan.launches_of(100) == [("A", 1, 70), ("B", 71, 80), ("C", 81, 100)]
    assert plan.launches_of(100, done=75) == [("B", 76, 80), ("C", 81, 100)]
    assert plan.launches_of(100, done=80) == [("C", 81, 100)]
    assert plan.launches_of(100, done=100) == []


def test_a_size_has_the_parameters_that_its_model_has():
    size = plan.Shape(48, 3)
    arguments = [str(plan.HERE / "run.yaml"), str(plan.HERE / "A.yaml")]
    arguments += [f"{key}={value}" for key, value in plan.options_of(size, 0.04, 17, "a").items()]
    config = load_train_config(arguments).config
    assert count_parameters(config.model) == size.num_parameters
    num_tokens = size.num_batches * config.global_train_batch_size * config.max_seq_len
    assert num_tokens == pytest.approx(20 * size.num_parameters, rel=0.001)
    assert (config.max_seq_len, config.model.vocab_size) == (plan.SEQ_LEN, plan.VOCAB_SIZE)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        (["16x2", "32x2", "40x2", "64x2"], "'40x2' given, expected a width of 16s x layers"),
        (["16x2", "32x2", "48x2", "0x2"], "'0x2' given"),
        (["16x2", "32x2", "48x2"], "expected four or more"),
        (["16x2", "48x2", "32x2", "64x2"], "each larger than the one before"),
        (["16x2", "32x2", "32x2", "64x2"], "each larger than the one before"),
    ],
)
def test_sizes_that_make_no_ladder_are_refused(sizes, words):
    with pytest.raises(UserError, match=words):
        plan.parse_shapes(sizes)


def test_each_file_is_in_one_part_and_equal_files_in_none_but_one(tmp_path):
    root = tmp_path / "packages"
    for i in range(60):
        for package in ("code", "sympy"):
            path = root / package / f"{i}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"# {package} {i}\n" + "x = 1  # a line of a file\n" * 40)
    (root / "code" / "copy.py").write_bytes((root / "code" / "1.py").read_bytes())
    (root / "code" / "binary.py").write_bytes(b"\xff\xfe")
    (root / "codespell_lib").mkdir()
    (root / "codespell_lib" / "words.txt").write_text("wrods")
    found = dict(data.texts(root))
    assert len(found) == 120
    assert {name.partition("/")[0] for name in found} == {"code", "sympy"}
    with pytest.raises(UserError, match="files held out for split, expected 20; install more packages"):
        data.collect(tmp_path, root)
