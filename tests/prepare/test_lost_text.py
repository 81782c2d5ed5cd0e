"""Text that the tokenizer loses: counted in every unit, said, refused above a share."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, trainers
from typer.testing import CliRunner

from llmfoundry_lite.cli import main
from llmfoundry_lite.errors import DataError
from llmfoundry_lite.prepare import token_files
from llmfoundry_lite.prepare.prepare import prepare
from llmfoundry_lite.prepare.summary import load_summary
from tests.helpers.preparing import SEQ_LEN, request, write_jsonl

LATIN, GREEK = "alpha beta gamma delta " * 50, "αβγδ" * 50


@pytest.fixture(scope="module")
def lossy(tmp_path_factory) -> Path:
    """A tokenizer of Latin letters that leaves out all others."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Split(" ", "isolated")
    backend.train_from_iterator([LATIN], trainers.BpeTrainer(special_tokens=["<eos>"], show_progress=False))
    folder = tmp_path_factory.mktemp("lossy")
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))
    return folder


def test_lost_text_is_refused_with_its_share_and_what_to_do(tmp_path: Path, lossy: Path) -> None:
    wanted = request(write_jsonl(tmp_path / "in.jsonl", [LATIN, GREEK] * 20), lossy, val_fraction=0)
    with pytest.raises(DataError) as error:
        prepare(wanted, tmp_path / "out", num_workers=1)
    assert str(error.value) == (
        f"{tmp_path}/in.jsonl: by tokenizer {lossy} 15 % of characters do not come back (2,400 have no token; most "
        "often 'α' 'β' 'γ' 'δ'); choose a tokenizer that spells the text, such as train:32768, or allow it with "
        "--max-lost-text 0.15"
    )
    assert not (tmp_path / "out" / "summary.json").exists()


def test_allowed_lost_text_is_in_the_summary_and_no_work_is_done_twice(tmp_path: Path, lossy: Path) -> None:
    out, source = tmp_path / "out", write_jsonl(tmp_path / "in.jsonl", [LATIN, GREEK] * 20)
    with pytest.raises(DataError, match="do not come back"):
        prepare(request(source, lossy), out, num_workers=1)
    options = ["--out", out, "--tokenizer", lossy, "--max-seq-len", SEQ_LEN, "--num-workers", 1]
    command = ["data", "prepare", source, *options, "--max-lost-text", 0.15]
    result = CliRunner().invoke(main.app, list(map(str, command)))
    assert "1 pieces of the input are tokenised already" in result.output
    assert "text: 15 % of characters do not come back (2,400 have no token" in " ".join(result.output.split())
    lost = load_summary(out).lost_text
    assert lost["characters"] == 16384 and lost["share"] == 2400 / 16384 and lost["lost_bytes"] == 4800


def test_a_tokenizer_that_loses_text_is_refused_before_the_rest_is_read(tmp_path, lossy, monkeypatch) -> None:
    monkeypatch.setattr(token_files, "MIN_CHARACTERS_TO_REJECT", 10_000)
    for number in range(4):
        write_jsonl(tmp_path / f"{number}.jsonl", [GREEK if number < 2 else LATIN] * 300)
    wanted = request(tmp_path / "*.jsonl", lossy, val_fraction=0)
    for _ in range(2):  # the same again, although the first units are there
        with pytest.raises(DataError, match=r"100 % of characters .*--max-lost-text 1$"):
            prepare(wanted, tmp_path / "out", num_workers=1)
        assert [path.name for path in (tmp_path / "out/.partial/units").iterdir()] == ["00000000-00000000.npz"]


def test_text_that_comes_back_is_silent(tmp_path: Path, tokenizer_folder: Path, capsys) -> None:
    wanted = request(write_jsonl(tmp_path / "in.jsonl", [LATIN, GREEK]), tokenizer_folder)
    lost = prepare(wanted, tmp_path / "out", num_workers=1, max_lost_text=0).lost_text
    assert lost["share"] == 0 and lost["characters"] == len(LATIN + GREEK)


def test_the_advice_allows_what_was_lost():
    assert [token_files.round_up_to_percent(share) for share in (0.0101, 0.014, 0.2, 0.999)] == [0.02, 0.02, 0.2, 1.0]
