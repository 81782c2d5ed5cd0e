"""Where a step's time goes: the parts of a trace add up to its steps."""

import json

import pytest
from typer.testing import CliRunner

from llmfoundry_lite.cli.main import app
from llmfoundry_lite.errors import DataError
from llmfoundry_machines.bench import profile
from llmfoundry_machines.bench.profile import ATTENTION, DATA, EXPOSED, HIDDEN, HOST, OPTIMIZER, PARTS, PRODUCTS, REST
from llmfoundry_machines.bench.steps import write_run

MAIN, OTHER, STREAM = 1, 2, 7


def event(name, begin, end, *, thread=MAIN, cat="cpu_op", **args):
    return {"ph": "X", "pid": 0, "tid": thread, "cat": cat, "name": name, "ts": begin, "dur": end - begin, "args": args}


def step(begin, end, number=1):
    return event(f"ProfilerStep#{number}", begin, end, cat="user_annotation")


CPU = [
    step(0, 100_000),
    event("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 0, 5_000, cat="user_annotation"),
    event("aten::linear", 10_000, 30_000),
    event("aten::copy_", 11_000, 12_000),
    event("llmfoundry_lite::blocked_attention", 30_000, 40_000),
    event("aten::bmm", 31_000, 39_000),
    event("autograd::engine::evaluate_function: AddmmBackward0", 40_000, 52_000),
    event("aten::mm", 41_000, 51_000),
    event("aten::native_layer_norm", 52_000, 55_000),
    event("FSDP::post_backward_reduce", 55_000, 75_000, cat="user_annotation"),
    event("c10d::_reduce_scatter_base_", 56_000, 57_000),
    event("gloo:reduce_scatter", 50_000, 70_000, thread=OTHER),
    event("Optimizer.step#AdamW.step", 80_000, 90_000, cat="user_annotation"),
    event("aten::_fused_adamw_", 81_000, 89_000),
]


def test_every_moment_of_a_step_is_counted_once():
    (parts,) = profile.break_down(CPU)
    assert {part: round(seconds * 1e3) for part, seconds in parts.items()} == {
        PRODUCTS: 30,
        ATTENTION: 10,
        REST: 3,
        OPTIMIZER: 10,
        EXPOSED: 16,
        DATA: 5,
        HOST: 26,
        HIDDEN: 4,
    }
    assert sum(parts[part] for part in PARTS) == pytest.approx(0.1)


def test_on_a_device_its_kernels_compute_and_the_host_is_what_keeps_it_waiting():
    """A kernel counts as what launched it. Between kernels a collective shows; beside them it is hidden."""
    calls = [
        event("aten::mm", 0, 10, **{"External id": 1}),
        event("aten::scaled_dot_product_attention", 10, 30, **{"External id": 2}),
        event("aten::mm", 12, 20, **{"External id": 3}),
        event("Optimizer.step#AdamW.step", 30, 60, cat="user_annotation", **{"External id": 4}),
        event("aten::_fused_adamw_", 31, 40, **{"External id": 5}),
        event("enumerate(DataLoader)#x.__next__", 700, 800, cat="user_annotation"),
    ]
    kernels = [
        ("nvjet_tst_128x64", 100, 200, 1),
        ("cutlass_80_gemm", 200, 300, 3),
        ("vectorized_elementwise_kernel", 300, 350, 99),
        ("sm90_xmma_gemm_bf16", 350, 400, 99),
        ("ncclDevKernel_AllGather_RING_LL", 380, 500, 98),
        ("multi_tensor_apply_kernel", 600, 700, 5),
    ]
    device = [event(n, b, e, thread=STREAM, cat="kernel", **{"External id": i}) for n, b, e, i in kernels]
    (parts,) = profile.break_down([step(0, 1000), *calls, *device])
    assert {part: round(seconds * 1e6) for part, seconds in parts.items()} == {
        PRODUCTS: 150,
        ATTENTION: 100,
        REST: 50,
        OPTIMIZER: 100,
        EXPOSED: 100,
        DATA: 100,
        HOST: 400,
        HIDDEN: 20,
    }


def test_steps_of_one_trace_are_averaged():
    events = [step(0, 100, 3), event("aten::mm", 0, 50), step(100, 300, 4), event("aten::mm", 100, 250)]
    steps = profile.break_down(events)
    assert [round(one[PRODUCTS] * 1e6) for one in steps] == [50, 150]
    assert profile.mean_step(steps) == pytest.approx(150e-6)
    rows = profile.build_table("a trace", steps).rows
    assert rows[0] == ["matrix products", "0.0001", "66.7%"] and rows[-2][2] == "100.0%"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("no JSON", "is not a trace of torch's profiler"),
        ("{}", "is not a trace of torch's profiler"),
        (json.dumps({"traceEvents": [3]}), "is not a trace of torch's profiler"),
        (json.dumps({"traceEvents": [event("aten::mm", 0, 1)]}), "the trace has no ProfilerStep"),
    ],
)
def test_what_is_no_trace_is_refused(content, words, tmp_path):
    path = tmp_path / "trace.json"
    path.write_text(content)
    with pytest.raises(DataError, match=words):
        profile.run([str(path)])


@pytest.mark.slow
def test_a_run_is_traced_and_its_tables_add_up(tmp_path):
    settings = {"shape": "tiny", "seq_len": 32, "batch_size": 4, "num_steps": 8}
    yaml = write_run(tmp_path, settings, "fp32")
    command = ["bench", "profile", str(yaml), "fsdp_config.sharding_strategy=FULL_SHARD", "-n", "2", "--active", "2"]
    result = CliRunner().invoke(app, [*command, "--out", str(tmp_path / "out")], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "out/profile.json").read_text())
    assert list(report["traces"]) == ["rank0.ba6.json", "rank1.ba6.json"]
    assert (tmp_path / "out/profile.png").stat().st_size > 5_000
    assert str(tmp_path) not in (tmp_path / "out/profile.md").read_text()
    for name, steps in report["traces"].items():
        events = profile.read_trace(tmp_path / "out" / name)
        spans = [e["dur"] / 1e6 for e in events if profile.STEP.fullmatch(e["name"])]
        assert [sum(one[part] for part in PARTS) for one in steps] == pytest.approx(spans)
        for one in steps:
            assert min(one[PRODUCTS], one[OPTIMIZER], one[DATA], one[HOST], one[REST]) > 0
            assert one[EXPOSED] + one[HIDDEN] > 0
