import pytest

from benchmarks.__main__ import run_benchmark


def test_benchmarks_are_listed(capsys):
    assert run_benchmark(["--help"]) == 0
    assert "  prepare " in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.multiprocess
def test_bench_prepare_prints_our_rate(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LLMFOUNDRY_COMMAND", raising=False)
    monkeypatch.setattr("shutil.which", lambda program: None)
    assert run_benchmark(["prepare", "--text-bytes", "200000", "--max-seq-len", "256"]) == 0
    printed = capsys.readouterr().out
    assert "0.2 MB of text" in printed and " samples of 256 tokens" in printed
    assert "llmfoundry-lite data prepare" in printed and "MB/s" in printed
    assert "LLM Foundry convert_dataset_json: not measured" in printed
