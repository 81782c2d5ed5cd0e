"""A tokenizer that code of the user's own builds: its files, what is refused, and what is never imported."""

import json
import re
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from llmfoundry_lite import own_code, preflight
from llmfoundry_lite.cli.data import data_prepare
from llmfoundry_lite.config.data_schema import TokenizerConfig
from llmfoundry_lite.config.layout import layout_of
from llmfoundry_lite.config.load_train import load_train_config
from llmfoundry_lite.convert.tokenizer import find_tokenizer
from llmfoundry_lite.data import own_tokenizer
from llmfoundry_lite.data.tokenizer import find_fingerprints, load_configured_tokenizer, load_tokenizer
from llmfoundry_lite.data.tokenizer_files import is_local_or_cached
from llmfoundry_lite.errors import ConfigError, DataError, OwnCodeError
from tests.helpers.launch import ROOT
from tests.helpers.tiny import tiny_config, write_config, write_data

HERE = f"python:{__name__}"
WORDS = f"{HERE}:build_words"
calls = []


def build_words(size=3, end="<end>"):
    """Return a tokenizer of transformers with `size` words and the token `end`."""
    calls.append(size)
    vocab = {f"w{number}": number for number in range(size)} | {end: size}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(vocab, unk_token="w0")), eos_token=end)


def build_endless():
    return Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))


class Slow:
    """A tokenizer whose files are not those of a fast one, as LLM Foundry's TiktokenTokenizerWrapper."""

    def save_pretrained(self, folder):
        (Path(folder) / "tokenizer_config.json").write_text("{}")


def build_nothing():
    return 3


def build_broken():
    raise RuntimeError("no such corpus")


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """Trust nothing, and remember no tokenizer."""
    monkeypatch.setattr(own_code, "_trusted_names", set())
    monkeypatch.setattr(own_tokenizer, "_files_by_call", {})
    calls.clear()


@pytest.fixture
def page(tmp_path, monkeypatch):
    """The page's example as the module `mine_tokens`. Returns the name of the tokenizer in its YAML."""
    section = (ROOT / "docs/own-parts.md").read_text().split("## A tokenizer\n")[1]
    code, *_ = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    (tmp_path / "mine_tokens.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    yield re.findall(r"name: (python:\S+)", section)[0]
    sys.modules.pop("mine_tokens", None)


def trusted(name):
    own_code.trust_code([name])
    return name


def test_it_is_built_once_with_its_arguments():
    config = TokenizerConfig(name=trusted(WORDS), kwargs={"size": 5})
    tokenizer = load_configured_tokenizer(config)
    assert (tokenizer.vocab_size, tokenizer.eos_token, tokenizer.eos_token_id) == (6, "<end>", 5)
    assert find_fingerprints(config) == {"tokenizer": tokenizer.fingerprint}
    assert load_tokenizer(WORDS).fingerprint != tokenizer.fingerprint
    assert calls == [5, 3]


def test_its_files_are_a_tokenizer_that_needs_no_code(tmp_path):
    tokenizer = load_tokenizer(trusted(WORDS))
    tokenizer.save(tmp_path)
    own_code._trusted_names.clear()
    assert load_tokenizer(tmp_path).fingerprint == tokenizer.fingerprint


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("build_nothing", r"returns a int, which is no tokenizer; return a tokenizers\.Tokenizer, or a PreTrained"),
        (
            "Slow",
            r"returns a Slow, whose save_pretrained writes no tokenizer\.json, as those of slow tokenizers; ",
        ),
        ("build_endless", r"returns a tokenizers\.Tokenizer without <\|endoftext\|>, which separates documents; add"),
    ],
)
def test_what_has_no_usable_files_is_refused(function, message):
    name = trusted(f"{HERE}:{function}")
    with pytest.raises(DataError, match=rf"^tokenizer {re.escape(name)} {message}"):
        load_tokenizer(name)


def test_mistakes_in_the_name_and_its_arguments_are_a_line():
    with pytest.raises(ConfigError, match=r"^tokenizer: python:.*: module .* has no Thing"):
        load_tokenizer(trusted(f"{HERE}:Thing"))
    with pytest.raises(ConfigError, match=r"^tokenizer: python:.* does not take these keys: .*'length'"):
        load_tokenizer(trusted(WORDS), {"length": 3})
    with pytest.raises(OwnCodeError, match=r"^tokenizer: python:.*:build_broken raises RuntimeError: no such corpus"):
        load_tokenizer(trusted(f"{HERE}:build_broken"))


def test_code_that_nobody_trusts_is_not_imported(tmp_path, monkeypatch):
    (tmp_path / "evil_tokens.py").write_text("raise SystemExit('it ran')")
    monkeypatch.syspath_prepend(tmp_path)
    name = "python:evil_tokens:T"
    assert not is_local_or_cached(name)
    assert find_fingerprints(TokenizerConfig(name=name)) == {}
    with pytest.raises(DataError, match=r"T is code, which only a launch .* import; give a folder with its tokenizer"):
        load_tokenizer(name)

    # Not even a name that this process trusts is run because a record has it.
    trusted(name)
    assert is_local_or_cached(name)
    assert find_tokenizer({"tokenizer": {"name": name}}, None, "a checkpoint") is None


def test_the_page_s_example_prepares_data(page, tmp_path):
    Path("texts.txt").write_text("naïve tea\n\n" * 50)
    data_prepare(out="data", tokenizer=page, max_seq_len=8, sources=["texts.txt"], num_workers=1, val_fraction=0.0)
    summary = json.loads(Path("data/summary.json").read_text())
    assert summary["request"]["tokenizer"] == summary["tokenizer"]["name"] == page
    assert summary["tokenizer"]["vocab_size"] == 257

    tokenizer = load_tokenizer("data/tokenizer")
    assert tokenizer.fingerprint == summary["tokenizer"]["fingerprint"]
    assert len(tokenizer.encode("naïve")) == 6
    assert tokenizer.decode(tokenizer.encode("naïve")) == "naïve"


def test_a_dry_run_imports_nothing_and_says_so(page, tmp_path):
    write_data(tmp_path / "data")
    path = write_config(tmp_path / "run.yaml", tiny_config(tmp_path / "data", tokenizer__name=page))
    config = load_train_config([path]).config
    for must_exist in (False, True):
        findings = preflight.check(config, layout_of(config, 1), must_exist=must_exist)
        [line] = [line for line in findings.not_checked if "tokenizer" in line]
        assert line.startswith(f"tokenizer.name: {page} is code of your own, which only a launch imports")
    assert "mine_tokens" not in sys.modules

    # A launch compares it with the model.
    trusted(page)
    with pytest.raises(ConfigError, match=r"model\.vocab_size: 96 is less than the tokenizer's 257 \(python:mine_tok"):
        preflight.check_own_tokenizer(config)
