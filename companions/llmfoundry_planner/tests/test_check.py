"""`llmfoundry-lite plan --check RUN`."""

from dataclasses import replace

import pytest

from llmfoundry_lite.cli import main
from llmfoundry_lite.config.load_train import load_train_config
from llmfoundry_lite.config.schema import as_dict
from tests.helpers.reported import H100, TOKENS, on_cpu, on_gpu, record, write_run


def test_a_plan_is_checked_against_a_run(tmp_path, capsys):
    settings = as_dict(load_train_config(["mpt-125m", "global_train_batch_size=640"]).config)
    records = [record(b, num_devices=8, seconds=0.01, throughput__device__mfu=12.5e12 / 312e12) for b in range(1, 21)]
    gpu = replace(on_gpu(1, 10, 8, "NVIDIA A100-SXM4-80GB"), device_train_microbatch_size=40, shard_degree=8)
    run = write_run(tmp_path / "run", records, [gpu, on_cpu(11, 20)], **settings)
    assert main.run(["plan", "--check", run]) == 0
    lines = capsys.readouterr().out.splitlines()
    measured, predicted = (int(word.replace(",", "")) for word in lines[2].split()[4:6])
    assert lines[2].split()[:4] == ["1-10", "8", "x", "A100-80GB"] and measured == TOKENS / 0.01 / 8
    assert predicted == pytest.approx(142_830, rel=0.1), "LLM Foundry's table: 2 x 40 samples of 2,048 on 8 devices"
    assert lines[3] == "11-20: AMD EPYC is not in the table, no prediction"
    assert lines[4].startswith("predicted A100-80GB: software of 2023: ")
    (tmp_path / "run/config.yaml").unlink()
    assert main.run(["plan", "--check", run]) == 2
    assert "config.yaml is not there; it says what was trained" in capsys.readouterr().err


def test_stages_and_parts_of_samples_are_checked_too(tmp_path, capsys):
    """A pipeline of two waits 1 of 17 here, and for the stage with the head. Three stages fit no two devices."""
    settings = as_dict(load_train_config(["mpt-125m"]).config)
    records = [record(b, device=H100, num_devices=2, seconds=0.01) for b in range(1, 51)]
    spans = [on_gpu(1, 10), on_gpu(11, 20), on_gpu(21, 30), on_gpu(31, 40), on_gpu(41, 50)]
    said: list[dict[str, str]] = [{}, {"pipeline": "2 stages, 1f1b"}, {"context": "2, heads"}]
    said.append({"pipeline": "3 stages, gpipe"})
    said.append({"pipeline": "\x1b[31m"})
    segments = [
        replace(span, device_train_microbatch_size=16, sharding="NO_SHARD", **words)
        for span, words in zip(spans, said, strict=True)
    ]
    run = write_run(tmp_path / "run", records, segments, **settings | {"run_name": "${oc.env:HOME}"})
    assert main.run(["plan", "--check", run]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("${oc.env:HOME}: "), "somebody else's, perhaps"
    alone, staged, parted = (int(line.split()[5].replace(",", "")) for line in lines[2:5])
    assert 0.6 < staged / alone < 16 / 17 and 0.5 < parted / alone < 1
    assert lines[6].startswith("41-50: no prediction: ")
    assert lines[5].startswith("31-40: no prediction: pp_config.pipeline_parallel_degree: 3 does not divide the 2 ")
