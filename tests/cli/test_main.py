import pytest

from llmfoundry_lite.cli import main


def test_bench_lists_its_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["bench", "--help"]) == 0
    printed = capsys.readouterr().out
    assert "  train " in printed and "  prepare " in printed


@pytest.mark.slow
@pytest.mark.multiprocess
def test_bench_prepare_prints_our_rate(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LLMFOUNDRY_COMMAND", raising=False)
    monkeypatch.setattr("shutil.which", lambda program: None)
    assert main.run(["bench", "prepare", "--text-bytes", "200000", "--max-seq-len", "256"]) == 0
    printed = capsys.readouterr().out
    assert "0.2 MB of text" in printed and " samples of 256 tokens" in printed
    assert "llmfoundry-lite data prepare" in printed and "MB/s" in printed
    assert "LLM Foundry convert_dataset_json: not measured" in printed
