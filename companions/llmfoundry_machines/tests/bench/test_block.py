"""One layer's forward and backward, over batches and over lengths; what microbatches cost."""

import json
import re

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

from llmfoundry_lite import companions
from llmfoundry_lite.cli.main import app
from llmfoundry_lite.config.layout import Layout
from llmfoundry_lite.errors import ConfigError
from llmfoundry_lite.models.flops import count_flops_per_token, count_parameters
from llmfoundry_machines.bench import accumulation, block, steps
from tests.helpers.launch import launch


def test_a_layers_flops_are_the_models_with_one_layer_more():
    model = block.model_of(1600, 25, 1024)
    outside = 6 * (count_parameters(model) - 12 * 1600**2)
    in_layer = count_flops_per_token(model, 1024) - outside
    assert 3 * block.count_forward_flops(model, 2, with_attention=True) == 2 * 1024 * in_layer


def test_gpt2_xl_is_a_shape_with_the_published_number_of_parameters():
    assert count_parameters(steps.model_of("gpt2-xl", 1024, no_bias=False)) == 1_557_611_200


def test_without_attention_tokens_do_not_see_each_other_and_with_it_later_ones_are_not_seen():
    model = block.model_of(32, 4, 8)
    x_btd = torch.randn(1, 8, 32)
    other_btd = x_btd.clone()
    other_btd[:, 5, 0] += 1
    for implementation, seen in (("none", [5]), ("sdpa", [5, 6, 7]), ("reference", [5, 6, 7])):
        layer = block.build(model, torch.float32, implementation)
        changed_t = (layer(x_btd) - layer(other_btd)).abs().amax((0, 2)) > 1e-6
        assert changed_t.nonzero().flatten().tolist() == seen


def test_each_dtype_batch_and_attention_has_its_row(tmp_path):
    options = ["--width", "32", "--heads", "2", "--num-repeats", "2", "--out", str(tmp_path)]
    for name, points, rows in (
        ("block", ["--batches", "1,2", "--seq-len", "16", "--dtypes", "fp32,bf16"], 2 * 2 * 4),
        ("seqlen", ["--lengths", "16,32,64", "--attention", "sdpa"], 3 * 2),
    ):
        result = CliRunner().invoke(app, ["bench", name, *points, *options], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        report = json.loads((tmp_path / f"{name}.json").read_text())
        assert len(report["rows"]) == rows and report["left_out"] == []
        for row in report["rows"]:
            (least, most), (_, slowest) = row["least_and_most_seconds"]
            assert 0 < least <= row["forward_seconds"] <= most and 0 < row["backward_seconds"] <= slowest
        text = (tmp_path / f"{name}.md").read_text()
        assert re.search(r"\| \d\.\d{4} \(\d\.\d{4} to \d\.\d{4}\) \|", text)
        assert f"`llmfoundry-lite bench {name} {points[0]} {points[1]} " in text
        assert (tmp_path / f"{name}.png").stat().st_size > 10_000


def layers_of_parts() -> None:
    """Check on one of two ranks that a divided layer makes of its tokens what the whole layer makes of them."""
    dist.init_process_group("gloo")
    for heads in (4, 3):  # by heads, and by gathered keys
        model = block.model_of(48, heads, 16)
        divided = block.divide(model, 2)
        assert divided is not None
        build_context = companions.load("llmfoundry_layouts.context:build_context")
        context = build_context(divided, Layout(context=2, node_size=2), "cpu")
        x_btd = torch.randn(1, 16, 48, generator=torch.Generator().manual_seed(1))
        for implementation in ("sdpa", block.NONE):
            whole_btd = block.build(model, torch.float32, implementation)(x_btd)
            part_btd = block.build(model, torch.float32, implementation, context)(context.part(x_btd))
            torch.testing.assert_close(part_btd, context.part(whole_btd), rtol=1e-5, atol=1e-6)
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.multiprocess
def test_several_devices_divide_a_sample(tmp_path):
    launch(layers_of_parts, (), tmp_path / "ranks", num_ranks=2).check()
    options = ["--width", "32", "--heads", "2", "--num-repeats", "1", "--attention", "sdpa", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, ["bench", "seqlen", "--lengths", "9,16", "--devices", "1,2", *options])
    assert result.exit_code == 0, result.output
    rows = json.loads((tmp_path / "seqlen.json").read_text())["rows"]
    assert [(row["seq_len"], row["num_devices"], "error" in row) for row in rows] == [
        *[(9, 1, False)] * 2,
        *[(9, 2, True)] * 2,
        *[(16, 1, False)] * 2,
        *[(16, 2, False)] * 2,
    ]
    assert rows[2]["error"] == "9 tokens cannot be divided by 2"


def test_what_the_device_does_not_have_and_what_time_does_not_suffice_for_are_named(tmp_path, monkeypatch):
    def fail(*arguments):
        raise RuntimeError('"addmm" not implemented for Half\nat line 1')

    monkeypatch.setattr(block, "measure", fail)
    report = block.run("block", [(1, 16)], ["fp16"], d_model=32, n_heads=2, implementations=["sdpa"], num_repeats=1)
    assert [row["error"] for row in report["rows"]] == ['"addmm" not implemented for Half'] * 2
    assert block.build_table(report).rows[0][block.NUM_KEYS] == '"addmm" not implemented for Half'
    report = block.run("block", [(1, 16)], ["fp32"], d_model=32, n_heads=2, implementations=["sdpa"], minutes=0)
    assert report["left_out"] == ["fp32, 1 x 16, sdpa", "fp32, 1 x 16, none"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dtypes": ["fp8"]}, "--dtypes: 'fp8' given, expected one of fp32, fp16, bf16"),
        ({"implementations": ["flex"]}, "--attention: 'flex' given, expected one of sdpa, blocked, reference, none"),
        ({"n_heads": 7}, "--heads: 7 do not divide a width of 1600"),
    ],
)
def test_what_cannot_be_measured_is_refused(changes, words):
    with pytest.raises(ConfigError, match=words):
        block.run("block", [(1, 16)], **{"dtypes": ["fp32"], **changes})


def test_microbatches_are_held_against_the_whole_batch(tmp_path, monkeypatch):
    def measure(task):
        size = int(task["overrides"][-1].partition("=")[2])
        return {"step_seconds": [1.0 + 0.1 * (8 // size)], "peak_bytes": size << 30}

    monkeypatch.setattr(accumulation, "measure_in_a_process", measure)
    report = accumulation.run([4, 1, 8], "tiny", 64, 8, "fp32", 1, 1, out=tmp_path)
    rows = json.loads((tmp_path / "accumulation.json").read_text())["rows"]
    assert [(row["num_microbatches"], row["microbatch_size"]) for row in rows] == [(1, 8), (4, 2), (8, 1)]
    assert [row["times"] for row in rows] == pytest.approx([1.0, 1.4 / 1.1, 1.8 / 1.1])
    assert accumulation.build_table(report).rows[0][-1] == "8.00"
    assert (tmp_path / "accumulation.png").stat().st_size > 10_000
    options = "--microbatches 1,4,8 --shape tiny --seq-len 64 --batch-size 8 --dtype fp32 --num-steps 1 --num-rounds 1"
    assert f"`llmfoundry-lite bench accumulation {options}`" in (tmp_path / "accumulation.md").read_text()
    with pytest.raises(ConfigError, match="--microbatches: 3 do not divide a batch of 8 samples"):
        accumulation.run([3], "tiny", 64, 8, "fp32", 1, 1)
    with pytest.raises(ConfigError, match="--dtype: 'fp8' given, expected one of fp32, bf16"):
        accumulation.run([1], "tiny", 64, 8, "fp8", 1, 1)
