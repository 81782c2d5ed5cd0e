"""Whole rehearsals: the run's own code on devices that are not there."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile

import psutil
import pytest

from benchmarks.memory import MAX_EXCESS, compare, difference, find_cases
from benchmarks.papers.published import Published, published
from llmfoundry_layouts.stage_memory import estimate_stages
from llmfoundry_lite.cli.main import run
from llmfoundry_lite.config.layout import layout_of
from llmfoundry_lite.config.load_train import load_train_config
from llmfoundry_lite.errors import EXIT_DONE, EXIT_FAILURE, EXIT_USER
from llmfoundry_lite.estimate.memory import estimate_training_memory
from llmfoundry_lite.hardware import ACCELERATORS, GIB
from llmfoundry_planner.rehearse.fork_server import ForkServer, Job
from llmfoundry_planner.rehearse.report import describe
from llmfoundry_planner.rehearse.search import UNREHEARSED_BYTES, search
from tests.helpers.launch import ROOT

pytestmark = pytest.mark.slow

H100 = ACCELERATORS["H100-80GB"]
RUN = ["mpt-125m", "h100-8", "device_train_microbatch_size=8", "global_train_batch_size=128"]


@pytest.fixture(scope="module")
def server():
    """Start the server that each rehearsal is a fork of: one import for all."""
    before = os.getcwd()
    os.chdir(ROOT)
    with ForkServer() as server:
        yield server
    os.chdir(before)
    assert not server.folder.exists()


def rehearse(server, *overrides, device=H100, **options):
    options = {"num_devices": 8, "per_node": 8, "counts_operations": False, **options}
    return server.rehearse([*RUN, *overrides], device, **options)


def with_mistake(name):
    return f"callbacks={{'python:llmfoundry_planner.tests.rehearse.mistakes:{name}': {{}}}}"


def test_a_small_model_on_a_node_is_measured_beside_its_estimate(capfd, monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert run(["rehearse", *RUN, "--devices", "8"]) == EXIT_DONE
    text = capfd.readouterr().out
    found = re.search(r"allocated ([\d.]+), reserved ([\d.]+), of 78.40 GiB .*\n +estimate ([\d.]+)", text)
    assert found, text
    allocated, reserved, estimate = map(float, found.groups())
    assert allocated <= reserved
    assert allocated - 0.01 <= estimate <= 1.05 * allocated
    assert re.search(r"attention +flash, of scaled_dot_product_attention\n +assumed: torch prefers cuDNN's there", text)
    assert "all_gather bfloat16, 8 ranks within a node" in text
    assert "reduce_scatter float32, 8 ranks within a node" in text
    waits = re.findall(r"host waits +(\S+?):?\d*: (\d+) in a batch", text)
    assert waits == [("llmfoundry_lite/training/gradient_step.py", "1")], "of four microbatches"
    assert not list(tmp_path.glob("rehearse-*"))


def test_out_of_memory_is_the_allocators_own_and_one_line(server):
    outcome = rehearse(server, "device_train_microbatch_size=16", "model.n_layers=64", device=ACCELERATORS["A100-40GB"])
    assert outcome.exit_code == EXIT_USER and outcome.measurements["is_out_of_memory"]
    assert outcome.stderr.count("\n") == 1, outcome.stderr
    assert "out of memory on rank 0 in batch 1" in outcome.stderr and "of 39.20 GiB in use" in outcome.stderr
    assert "; what helps most: fsdp_config.activation_checkpointing: true" in outcome.stderr


@pytest.mark.parametrize(("duration", "counts_operations"), [("1ba", False), ("2ba", True)])
def test_a_run_too_short_to_be_measured_says_so(server, duration, counts_operations):
    overrides = ("model.n_layers=1", f"max_duration={duration}")
    outcome = rehearse(server, *overrides, counts_operations=counts_operations)
    assert outcome.exit_code == EXIT_USER
    assert outcome.stderr.endswith("give it a longer one: max_duration=100ba\n")


@pytest.mark.long
def test_documents_are_rehearsed_without_the_tokenizer(server):
    overrides = ("model.n_layers=1", "model.attn_config.attn_uses_sequence_id=true")
    overrides += ("device_train_microbatch_size=auto", "global_train_batch_size=64")
    outcome = rehearse(server, *overrides, counts_operations=True)
    assert outcome.exit_code == EXIT_DONE, outcome.stderr
    compiled = outcome.measurements["compiled"]
    assert compiled["attention"] == ["FlexAttention"] and compiled["kernels"]["sm_90"] > 1
    assert 0 <= compiled["num_before"] <= compiled["num_graphs"]
    assert outcome.measurements["collectives"] and outcome.measurements["flops"]


def test_a_device_between_those_that_torch_was_built_for_is_rehearsed(server):
    outcome = rehearse(server, "model.n_layers=1", device=ACCELERATORS["L4"])
    assert outcome.exit_code == EXIT_DONE, outcome.stderr


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("AddsHostTensor", "Expected all tensors to be on the same device"),
        ("MixesTypes", "same dtype"),
        ("CutsColumn", "mat1 and mat2 shapes cannot be multiplied"),
    ],
)
def test_what_a_device_refuses_is_refused(server, name, words):
    outcome = rehearse(server, with_mistake(name), "model.n_layers=2", "compile_config=null")
    assert outcome.exit_code == EXIT_FAILURE
    assert words in outcome.stderr


def test_the_search_finds_the_largest_microbatch_that_fits(server, capfd):
    arguments = ["mpt-350m", "h100-8"]  # 32 samples on a device
    config = load_train_config(arguments).config
    assert search(server, Job(arguments, config, ACCELERATORS["A100-40GB"], 8, 8)) == EXIT_DONE
    text = capfd.readouterr().out
    assert re.search(r"\n +16 +\d+\.\d\d +\d+\.\d\d", text) and re.search(r"\n +32 +out of +memory", text)
    assert text.endswith("device_train_microbatch_size=16\n")


@pytest.mark.long
def test_a_search_measures_the_optimizer_too_where_the_batch_is_not_cut(server, capfd):
    arguments = [*RUN, "model.n_layers=1"]
    config = load_train_config(arguments).config
    assert search(server, Job(arguments, config, H100, 8, 8)) == EXIT_DONE
    found = re.search(r"\n +16 +([\d.]+) ", capfd.readouterr().out)
    whole = rehearse(server, "model.n_layers=1", "device_train_microbatch_size=16").measurements
    assert whole["at_peak_bytes"]["optimizer"] > 0.04 * GIB
    assert found and float(found[1]) == round(whole["allocated_bytes"] / GIB, 2)


def test_an_island_is_rehearsed_without_its_coordinator(server):
    outcome = rehearse(
        server, "model.n_layers=1", "islands.coordinator=127.0.0.1:1", "islands.name=a", "save_folder=nowhere"
    )
    assert outcome.exit_code == EXIT_DONE, outcome.stderr


@pytest.mark.parametrize(
    ("device", "target"), [("H100-80GB", "sm_90"), pytest.param("A100-80GB", "sm_80", marks=pytest.mark.long)]
)
def test_compiled_blocks_are_built_for_the_device_that_is_named(server, device, target):
    overrides = ["compile_config={}", "model.n_layers=2", "model.attn_config.alibi=true"]
    outcome = rehearse(server, *overrides, device=ACCELERATORS[device], counts_operations=True)
    assert outcome.exit_code == EXIT_DONE, outcome.stderr
    compiled = outcome.measurements["compiled"]
    assert set(compiled["kernels"]) == {target} and compiled["kernels"][target] > 5
    assert compiled["attention"] == ["FlexAttention"]
    assert any(name.startswith("forward (llmfoundry_lite/models/mpt.py") for name in compiled["functions"])
    assert not compiled["breaks"] and not compiled["again"]


@pytest.mark.parametrize("recomputed", [False, True])
def test_plain_parameters_of_compiled_blocks_take_what_the_estimate_says(server, recomputed):
    """All blocks are one graph, though other tensors take the place of their parameters."""
    overrides = ["compile_config={}", "fsdp_config.plain_on_one_device=true", "global_train_batch_size=16"]
    overrides.append(f"fsdp_config.activation_checkpointing={str(recomputed).lower()}")
    outcome = rehearse(server, *overrides, num_devices=1, per_node=1, counts_operations=True)
    assert outcome.exit_code == EXIT_DONE, outcome.stderr
    found, config = outcome.measurements, load_train_config([*RUN, *overrides]).config
    estimate = estimate_training_memory(config, layout_of(config, 1, 1))
    assert found["allocated_bytes"] - 0.01 * GIB <= estimate.total_bytes <= 1.05 * found["allocated_bytes"]
    assert found["compiled"]["num_graphs"] == 2, "a block, and the loss"
    assert not found["compiled"]["breaks"] and not found["compiled"]["again"]


def test_graph_breaks_and_recompilations_are_counted(server):
    overrides = ["compile_config={backend: eager}", "model.n_layers=1"]
    broken = rehearse(server, *overrides, with_mistake("BreaksGraph"), counts_operations=True)
    assert broken.exit_code == EXIT_DONE, broken.stderr
    assert sum(broken.measurements["compiled"]["breaks"].values()) >= 1
    shortened = rehearse(server, *overrides, with_mistake("ShortensBatch"), counts_operations=True)
    assert shortened.exit_code == EXIT_DONE, shortened.stderr
    assert any("2048" in reason or "size" in reason for reason in shortened.measurements["compiled"]["again"])


STAGES = {
    "1f1b": (),
    "gpipe": (),
    "interleaved": (),
    "zero_bubble": (),
    "zbv": ("model.tie_word_embeddings=false",),
}
SPLIT_BACKWARD = ("zero_bubble", "zbv")
"""Schedules that cannot be compiled."""


@pytest.mark.parametrize(
    "schedule", [name if name == "zero_bubble" else pytest.param(name, marks=pytest.mark.long) for name in STAGES]
)
def test_each_stage_of_a_pipeline_computes_and_sends_its_part(server, schedule):
    """Two stages of eight layers on four devices each, eight microbatches: nothing is left out, FLOPs say."""
    overrides = (
        *("model.n_layers=8", "global_train_batch_size=256", "pp_config.pipeline_parallel_degree=2"),
        *(f"pp_config.schedule={schedule}", *STAGES[schedule]),
        *(["compile_config=null"] if schedule in SPLIT_BACKWARD else []),
    )
    # A rank sends something of each microbatch so often. With zbv it holds stages 0 and 3, or 1 and 2.
    num_links = {"interleaved": 3, "zbv": 2}.get(schedule, 1)
    for rank in (0, 4):
        outcome = rehearse(server, *overrides, rank=rank, counts_operations=True)
        assert outcome.exit_code == EXIT_DONE, outcome.stderr
        config = load_train_config([*RUN, *overrides]).config
        text = describe(Job([*RUN], config, H100, 8, 8), rank, outcome)
        held = "embeddings" if rank == 0 else "blocks"
        assert re.search(rf"stage +{1 + rank // 4} of 2, {schedule}: {held}", text), text
        share = re.search(r"this rank, ([\d.]+) of the formula", text)
        assert share and 0.98 < float(share[1]) < 1.06, text
        sent = {
            row[0]: row[3:]
            for row in outcome.measurements["collectives"]
            if row[0] in ("send", "recv") and row[2] == "bfloat16"
        }
        hidden_bytes = 8 * 2048 * 768 * 2
        assert sent["send"] == sent["recv"] == [8 * num_links, 8 * num_links * hidden_bytes]
        kinds = {row[0]: row[1] for row in outcome.measurements["collectives"]}
        assert kinds["reduce_scatter"] == "4 ranks within a node" and kinds["send"] == "2 ranks within a node"


@pytest.mark.parametrize(
    ("model", "overlay", "devices"),
    [
        *[("mpt-quickstart", "h100-8", "8"), ("mpt-1b", "h100-8", "1024"), ("mpt-quickstart", "mi300x-8", "1024")],
        pytest.param("mpt-125m", "h100-8", "1", marks=pytest.mark.long),
        pytest.param("mpt-350m", "h100-8", "8", marks=pytest.mark.long),
        pytest.param("mpt-3b", "h100-8", "1024", marks=pytest.mark.long),
        pytest.param("mpt-7b", "h100-8", "1024", marks=pytest.mark.long),
    ],
)
def test_the_estimate_is_at_most_five_percent_above_the_rehearsal_and_never_below(server, model, overlay, devices):
    (case,) = find_cases([model], [overlay], [devices])
    row = compare(server, case)
    assert not row["error"]
    assert 0 <= difference(row) <= MAX_EXCESS, row["rehearsed"]["at_peak_bytes"]


@pytest.mark.long
def test_so_it_is_for_every_overlay_and_model_that_ships():
    """Rehearses as many as fit into six minutes; `python -m benchmarks memory --out` carries on from there."""
    from benchmarks.memory import run as sweep

    assert sweep(minutes=6) == EXIT_DONE


PIPELINES = {
    "mpt-125m 8 1f1b": (0, 1),
    "mpt-125m 8 gpipe": (1,),
    "mpt-125m 8 interleaved": (0,),
    "mpt-125m 8 zero_bubble": (1,),
    "mpt-125m 8 zbv model.tie_word_embeddings=false": (0, 1),
    "mpt-1b 16 zero_bubble": (0, 1, 3),
    "mpt-1b 16 zbv model.tie_word_embeddings=false": (0, 2, 3),
    "mpt-1b 16 interleaved fsdp_config.activation_checkpointing=true": (0, 3),
    "mpt-7b 64 1f1b fsdp_config.activation_checkpointing=false": (0, 7),
    "mpt-350m 2 1f1b": (0, 1),
    "mpt-125m 4 1f1b precision=fp32": (0,),
    "mpt-125m 4 interleaved fsdp_config.mixed_precision=FULL": (1,),
}


@pytest.mark.parametrize(
    "name", [name if name.endswith("8 1f1b") else pytest.param(name, marks=pytest.mark.long) for name in PIPELINES]
)
def test_so_it_is_for_each_stage_of_a_pipeline(server, name):
    model, num_devices, schedule, *overrides = name.split()
    degree = {"64": 8, "16": 4}.get(num_devices, 2)
    num_data_ranks = int(num_devices) // degree
    size = 1 if model == "mpt-7b" else 4
    arguments = [model, "h100-8", f"pp_config.pipeline_parallel_degree={degree}", f"pp_config.schedule={schedule}"]
    arguments += [
        f"device_train_microbatch_size={size}",
        f"global_train_batch_size={num_data_ranks * size * 4 * degree}",
    ]
    arguments += [*overrides, *(["compile_config=null"] if schedule in SPLIT_BACKWARD else [])]
    config = load_train_config(arguments).config
    estimates = estimate_stages(config, layout_of(config, int(num_devices), 8))
    for place in PIPELINES[name]:
        check_estimate(server, arguments, int(num_devices), estimates[place][1], rank=place * num_data_ranks)


def check_estimate(server, arguments, num_devices, estimate, rank=0):
    options = {"num_devices": num_devices, "per_node": min(8, num_devices), "counts_operations": False}
    outcome = server.rehearse(arguments, H100, rank=rank, **options)
    assert outcome.exit_code == EXIT_DONE, outcome.stderr
    above = estimate.total_bytes / outcome.measurements["allocated_bytes"] - 1
    assert 0 <= above <= MAX_EXCESS, (rank, above, outcome.measurements["at_peak_bytes"])


DIVIDED = {
    "mpt-125m 8 cp_config.context_parallel_degree=2": 4,
    "mpt-125m 8 cp_config={context_parallel_degree:2,kind:gather}": 4,
    "mpt-1b 16 cp_config={context_parallel_degree:8,kind:gather} max_seq_len=8192 model.max_seq_len=8192": 4,
    "mpt-1b 16 cp_config.context_parallel_degree=2 tp_config={tensor_parallel_degree:2,sequence_parallel:true}": 4,
    "mpt-1b 16 tp_config={tensor_parallel_degree:8,sequence_parallel:true}": 4,
    "mpt-7b 64 tp_config={tensor_parallel_degree:8,sequence_parallel:true}": 2,
    "mpt-1b 8 fsdp_config.sharding_strategy=ZERO_1": 4,
    "mpt-1b 16 fsdp_config.sharding_strategy=ZERO_1 tp_config={tensor_parallel_degree:2,sequence_parallel:true}": 4,
    "mpt-125m 8 optimizer.name=muon": 4,
    "mpt-1b 64 optimizer.name=muon": 4,
    "mpt-350m 8 optimizer.name=muon fsdp_config.sharding_strategy=ZERO_1": 4,
    "mpt-350m 8 optimizer.name=muon cp_config.context_parallel_degree=2": 4,
    "mpt-125m 8 loss_chunk_mib=1024": 4,
    "mpt-125m 8 model.attn_config={head_dim:128,qkv_bias:true,rope:true}": 4,
    "mpt-125m 8 exact_sums=true": 4,
    "mpt-125m 1 exact_sums=true precision=fp32": 4,
    "mpt-1b 8 exact_sums=true fsdp_config.sharding_strategy=ZERO_1": 4,
    "mpt-1b 8 exact_sums=true fsdp_config.reduce_every_microbatch=true model.vocab_size=4096 loss_chunk_mib=16": 1,
    "mpt-7b 64 exact_sums=true": 2,
}
"""Run -> samples of a microbatch."""
SMALL = (
    "mpt-125m 8 cp_config.context_parallel_degree=2",
    "mpt-125m 8 exact_sums=true",
)
"""Those of the second tier. Each of them takes 10 s."""


@pytest.mark.parametrize(
    "name", [name if name in SMALL else pytest.param(name, marks=pytest.mark.long) for name in DIVIDED]
)
def test_so_it_is_for_every_way_to_divide_a_run(server, name):
    model, num_devices, *overrides = name.split()
    overrides = [text.replace(":", ": ").replace(",", ", ") for text in overrides]
    arguments, size = [model, "h100-8", *overrides], DIVIDED[name]
    layout = layout_of(load_train_config(arguments).config, int(num_devices), min(8, int(num_devices)))
    arguments += [
        f"device_train_microbatch_size={size}",
        f"global_train_batch_size={2 * size * layout.num_data_ranks}",
    ]
    estimate = estimate_training_memory(load_train_config(arguments).config, layout)
    check_estimate(server, arguments, int(num_devices), estimate)


LONG = [
    *("max_seq_len=65536", "model.max_seq_len=65536", "global_train_batch_size=2", "device_train_microbatch_size=1"),
    *("cp_config.context_parallel_degree=8", "model.attn_config.alibi=true", "model.n_layers=2"),
    *("model.attn_config.attn_uses_sequence_id=true", "train_loader.dataset.eos_token_id=0"),
]


@pytest.mark.long
@pytest.mark.parametrize("kind", ["heads", "gather"])
@pytest.mark.parametrize(("overlay", "device"), [("h100-8", "H100-80GB"), ("mi300x-8", "MI300X")])
def test_65536_tokens_with_alibi_and_documents_take_no_bias(server, overlay, device, kind):
    """A bias of two of 16 heads and 65,536 x 65,536 scores would take 16 GiB."""
    arguments = ["mpt-1b", overlay, *LONG, f"cp_config.kind={kind}"]
    outcome = server.rehearse(
        arguments, ACCELERATORS[device], num_devices=8, per_node=8, rank=0, counts_operations=True
    )
    assert outcome.exit_code == EXIT_DONE, outcome.stderr
    config = load_train_config(arguments).config
    estimated_bytes = estimate_training_memory(config, layout_of(config, 8, 8), ACCELERATORS[device]).total_bytes
    assert outcome.measurements["allocated_bytes"] < 8 * GIB
    assert 1 <= estimated_bytes / outcome.measurements["allocated_bytes"] <= {"heads": 1.05, "gather": 1.2}[kind]
    assert outcome.measurements["compiled"]["attention"] == ["FlexAttention"]


def tightest(device: str) -> list[Published]:
    """Return each model's published microbatch that leaves the least room, the fullest model first."""
    needs: dict[str, tuple[int, Published]] = {}
    for row in published():
        if row.device == device:
            config = load_train_config(row.arguments).config
            size = estimate_training_memory(config, layout_of(config, row.num_devices, 8)).total_bytes
            needs[row.arguments[0]] = max(needs.get(row.arguments[0], (0, row)), (size, row))
    return [row for _, row in sorted(needs.values(), reverse=True)]


@pytest.mark.parametrize("device", [pytest.param("A100-40GB", marks=pytest.mark.long), "H100-80GB"])
@pytest.mark.parametrize("which", [slice(1), pytest.param(slice(1, None), marks=pytest.mark.long)], ids=["one", "all"])
def test_published_microbatches_fit(server, device, which):
    """2 GiB are kept free for what is not rehearsed."""
    for row in tightest(device)[which]:
        options = {"num_devices": row.num_devices, "per_node": 8, "counts_operations": False}
        outcome = server.rehearse(row.arguments, ACCELERATORS[device], spare_bytes=UNREHEARSED_BYTES, **options)
        assert outcome.exit_code == EXIT_DONE, (row.name, outcome.stderr)


@pytest.mark.parametrize("victim", ["parent", "rank"])
def test_a_rehearsal_that_is_killed_leaves_nothing_behind(tmp_path, victim):
    command = [sys.executable, "-m", "llmfoundry_lite.cli.main", "rehearse", *RUN, "--devices", "8"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True) as parent:
        processes = []
        while parent.poll() is None and len(processes) < 2:
            with contextlib.suppress(subprocess.TimeoutExpired):
                parent.wait(0.2)
            processes = [child for child in descendants(parent.pid) if is_rehearsing(child)]
        assert len(processes) == 2 and list(tmp_path.glob("rehearse-*"))
        if victim == "parent":
            parent.kill()
        else:
            processes[1].send_signal(signal.SIGKILL)
        assert parent.stderr is not None
        said = parent.stderr.read()
    _, alive = psutil.wait_procs(processes, timeout=120)
    assert not alive and not list(tmp_path.glob("rehearse-*"))
    if victim == "rank":
        assert parent.returncode == EXIT_FAILURE
        assert said.endswith("error: rehearse: the process was killed by SIGKILL; this machine may be out of memory\n")


def descendants(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def is_rehearsing(process: psutil.Process) -> bool:
    try:
        return "llmfoundry_planner.rehearse.child" in process.cmdline()
    except psutil.NoSuchProcess:
        return False
