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

# ------------------------------------------------------------------------------------------------- the law of losses

SIZES = [5e4, 1e5, 2e5, 4e5]
"""Parameters of the models whose losses are measured."""
NEXT_SIZE = 8e5
FLOOR = 1.2
SCALE = 40
EXPONENT = 0.3


def bits_by_law(size):
    """The bits per byte of a model of `size` parameters, by the law that these tests presume."""
    return FLOOR + SCALE * size**-EXPONENT


def equal_documents(bits_per_byte):
    """The [nats, bytes] of 40 documents of 1,000 bytes, as `law.predict` takes them for each size."""
    num_bytes = np.full(40, 1000.0)
    nats = num_bytes * bits_per_byte * math.log(2)
    return np.stack([nats, num_bytes], axis=1)


def test_a_fit_recovers_the_law_that_made_the_losses():
    """Also a law without a floor, in the second row."""
    sizes = np.array(SIZES)
    fitted = law.fit(SIZES, np.stack([bits_by_law(sizes), 9 * sizes**-0.1]))
    assert fitted.exponent == pytest.approx([EXPONENT, 0.1], abs=1e-6)
    assert fitted.floor == pytest.approx([FLOOR, 0], abs=1e-6)
    assert fitted.at(NEXT_SIZE) == pytest.approx([bits_by_law(NEXT_SIZE), 9 * NEXT_SIZE**-0.1])


DEVIATION = 0.01
"""Standard deviation of a run from the law, in bits per byte."""


def test_the_interval_of_95_percent_holds_nearly_all_runs_to_come(monkeypatch):
    """Measured losses and the one to come stray from the law by the given deviation. 38 of 40 are expected."""
    monkeypatch.setattr(law, "NUM_DRAWS", 300)
    generator = np.random.default_rng(0)
    num_inside = 0
    for _ in range(40):
        documents = [equal_documents(bits_by_law(size) + generator.normal(0, DEVIATION)) for size in SIZES]
        predicted = law.predict(SIZES, documents, NEXT_SIZE, DEVIATION)
        assert predicted["bits_low"] < predicted["bits"] < predicted["bits_high"]

        bits_to_come = bits_by_law(NEXT_SIZE) + generator.normal(0, DEVIATION)
        if predicted["bits_low"] <= bits_to_come <= predicted["bits_high"]:
            num_inside += 1
    assert 35 <= num_inside < 40


@pytest.fixture
def prediction_at_a_measured_size(monkeypatch):
    """From losses that lie on the law. At this size the fit alone is surer than a single run."""
    monkeypatch.setattr(law, "NUM_DRAWS", 1000)
    documents = [equal_documents(bits_by_law(size)) for size in SIZES]
    return law.predict(SIZES, documents, SIZES[1], DEVIATION)


def test_the_expected_loss_has_no_noise(prediction_at_a_measured_size):
    assert prediction_at_a_measured_size["bits"] == pytest.approx(bits_by_law(SIZES[1]), abs=1e-6)


def test_the_interval_has_the_noise_of_the_run_to_come(prediction_at_a_measured_size):
    """95 % of the runs to come are within 1.96 deviations on either side; the fit adds to that."""
    width = prediction_at_a_measured_size["bits_high"] - prediction_at_a_measured_size["bits_low"]
    assert width > 4 * DEVIATION


def test_a_prediction_that_was_made_is_not_made_again(tmp_path):
    (tmp_path / "16x2-32x2-48x2-64x3.json").write_text('{"bits": 1.5, "at_batch": 0}')
    *smaller, next_shape = plan.parse_shapes(["16x2", "32x2", "48x2", "64x3"])
    assert ladder.predict(tmp_path, smaller, next_shape)["bits"] == 1.5


# -------------------------------------------------------------------------------------------------- the baselines

TOKENS = np.array([0, 1, 2, 0, 1, 1, 2, 0, 1, 2])


def test_a_bigram_has_the_probability_that_is_computed_by_hand():
    """Of token 1 after token 1.

    Pairs: 0 1 three times, 1 2 three times, 2 0 twice, 1 1 once. So one pair occurs once and one twice, which makes a
    discount of 1 / (1 + 2). Single tokens count by how many different ones precede them: 0 has 1, 1 has 2, 2 has 1. So
    two tokens have one and one has two, which makes a discount of 2 / (2 + 2).
    """
    probability_of_1 = (2 - 1 / 2) / 4 + (1 / 2 * 3 / 4) / 3  # discounted, and interpolated with one of three tokens
    probability_of_1_after_1 = (1 - 1 / 3) / 4 + (1 / 3 * 2 / 4) * probability_of_1
    bigram = law.NGram(TOKENS, vocab_size=3, order=2)
    assert bigram.nats(np.array([1, 1])) == pytest.approx(-math.log(probability_of_1_after_1))


@pytest.mark.parametrize("order", [1, 3, 5])
def test_the_probabilities_of_all_texts_add_up_to_one(order):
    """All texts of four tokens after token 0."""
    ngram = law.NGram(TOKENS, vocab_size=3, order=order)
    total_probability = 0.0
    for text in itertools.product(range(3), repeat=4):
        total_probability += math.exp(-ngram.nats(np.array([0, *text])))
    assert total_probability == pytest.approx(1)


TRAINING_TEXT = "aé" * 15_000
BEGIN, A, E = 0, 1, 2
"""The ids of the tokens that separates documents, of a, and of é, which has two bytes."""
SMALLEST = plan.Shape(16, 1)


@pytest.fixture
def bits_of_ngram(tmp_path, monkeypatch):
    """The n-gram's bits per byte by name of the text: the split is é twice, the domain is a."""
    monkeypatch.setattr(plan, "TOKENS_PER_PARAMETER", 1)
    (tmp_path / "data/tokenizer").mkdir(parents=True)
    tokenizer = Tokenizer(BPE({"\0": BEGIN, "a": A, "é": E}, []))
    tokenizer.save(str(tmp_path / "data/tokenizer/tokenizer.json"))
    (tmp_path / "text").mkdir()
    for name, texts in {"train": [TRAINING_TEXT], "split_text": ["é", "é"], "domain_text": ["a"]}.items():
        data.write_rows(tmp_path / f"text/{name}.jsonl", [{"text": text} for text in texts])

    *_, ngram_row = ladder.measure_text(tmp_path, [SMALLEST])
    return {"split": ngram_row["split_text/0-shot"], "domain": ngram_row["domain_text/0-shot"]}


@pytest.fixture
def bits_of_first_token(bits_of_ngram):
    """A function: token -> its bits at the beginning of a text, by an n-gram of what `bits_of_ngram` trains on."""
    num_tokens = SMALLEST.num_batches * plan.BATCH * plan.SEQ_LEN
    training_tokens = np.array([BEGIN, *[A, E] * 15_000])
    ngram = law.NGram(training_tokens[:num_tokens], plan.VOCAB_SIZE)
    return lambda token: ngram.nats(np.array([BEGIN, token])) / math.log(2)


def test_each_text_begins_anew_and_its_bits_are_of_bytes(bits_of_ngram, bits_of_first_token):
    """In one text, the second é would follow the first one. Two texts of two bytes have four bytes."""
    assert bits_of_ngram["split"] == pytest.approx(2 * bits_of_first_token(E) / 4)


def test_the_domain_has_the_bits_of_its_own_text(bits_of_ngram, bits_of_first_token):
    assert bits_of_ngram["domain"] == pytest.approx(bits_of_first_token(A))


def test_compressors_are_measured_in_bits_per_byte():
    """Two texts of 1,000 bytes each, which any compressor reduces to less than 200 bytes together."""
    bits_by_compressor = law.compressed(["ab" * 500, "é" * 500])
    assert bits_by_compressor
    for compressor, bits in bits_by_compressor.items():
        assert 0 < bits < 8 * 200 / 2000, compressor


# ------------------------------------------------------------------------------------------------- sizes and launches


@pytest.mark.parametrize(
    ("num_done", "launches"),
    [
        (0, [("A", 1, 70), ("B", 71, 80), ("C", 81, 100)]),
        (75, [("B", 76, 80), ("C", 81, 100)]),
        (80, [("C", 81, 100)]),
        (100, []),
    ],
)
def test_launches_go_on_where_a_run_stopped_and_each_moves(num_done, launches):
    """Each launch is a site, its first and its last batch."""
    assert plan.launches_of(100, done=num_done) == launches


SIZE = plan.Shape(d_model=48, n_layers=3)


@pytest.fixture(scope="module")
def config():
    """The configuration with which SIZE is trained."""
    options = plan.options_of(SIZE, lr=0.04, seed=17, name="a")
    files = [str(plan.HERE / "run.yaml"), str(plan.HERE / "A.yaml")]
    return load_train_config([*files, *(f"{key}={value}" for key, value in options.items())]).config


def test_a_size_has_the_parameters_that_its_model_has(config):
    assert count_parameters(config.model) == SIZE.num_parameters


def test_a_size_is_trained_on_twenty_tokens_per_parameter(config):
    num_tokens = SIZE.num_batches * config.global_train_batch_size * config.max_seq_len
    assert num_tokens == pytest.approx(20 * SIZE.num_parameters, rel=0.001)


def test_the_constants_of_the_plan_are_those_of_the_run(config):
    assert config.max_seq_len == plan.SEQ_LEN
    assert config.model.vocab_size == plan.VOCAB_SIZE


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        pytest.param(
            ["16x2", "32x2", "40x2", "64x2"],
            "'40x2' given, expected a width of 16s x layers",
            id="a width of no whole heads",
        ),
        pytest.param(["16x2", "32x2", "48x2", "0x2"], "'0x2' given", id="no width"),
        pytest.param(["16x2", "32x2", "48x2"], "expected four or more", id="too few"),
        pytest.param(["16x2", "48x2", "32x2", "64x2"], "each larger than the one before", id="a smaller one"),
        pytest.param(["16x2", "32x2", "32x2", "64x2"], "each larger than the one before", id="the same twice"),
    ],
)
def test_sizes_that_make_no_ladder_are_refused(sizes, message):
    with pytest.raises(UserError, match=message):
        plan.parse_shapes(sizes)


# ----------------------------------------------------------------------------------------------------- the texts


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    """Folders of packages: 60 files of `code`, 60 of `sympy`, and three that are not taken.

    The three are a copy of another file, a file that is not UTF-8, and one of the package that is left out.
    """
    folder = tmp_path_factory.mktemp("packages")
    for package in ("code", "sympy"):
        (folder / package).mkdir()
        for i in range(60):
            text = f"# {package} {i}\n" + "x = 1  # a line of a file\n" * 40
            (folder / package / f"{i}.py").write_text(text)

    (folder / "code/copy.py").write_bytes((folder / "code/1.py").read_bytes())
    (folder / "code/binary.py").write_bytes(b"\xff\xfe")
    (folder / data.LEFT_OUT).mkdir()
    (folder / data.LEFT_OUT / "words.txt").write_text("wrods")
    return folder


@pytest.fixture(scope="module")
def names_of_texts(packages):
    """The paths of the files that are taken, within the folder of packages."""
    return [name for name, _ in data.texts(packages)]


def test_of_equal_files_one_is_taken(names_of_texts):
    equal_files = {"code/1.py", "code/copy.py"}
    assert len(equal_files.intersection(names_of_texts)) == 1
    assert len(names_of_texts) == 120


def test_lists_of_words_and_what_is_no_text_are_not_taken(names_of_texts):
    assert {name.partition("/")[0] for name in names_of_texts} == {"code", "sympy"}
    assert "code/binary.py" not in names_of_texts


def test_too_few_files_to_hold_out_are_refused(packages, tmp_path):
    """1 in 64 of the files of `code` is held out for the split."""
    with pytest.raises(UserError, match="files held out for split, expected 20; install more packages"):
        data.collect(tmp_path, packages)
