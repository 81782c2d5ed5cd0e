"""`device_train_microbatch_size: auto` finds what fits, on whatever ranks; and a step for which memory runs out."""

import json
import os
import re
import resource
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from composer.core import Callback
from torch import nn

from llmfoundry_lite.config.load_train import load_train_config
from llmfoundry_lite.errors import ConfigError
from llmfoundry_lite.training import memory
from llmfoundry_lite.training.memory import ResidentMeter, Search
from tests.helpers.launch import _train, launch, train
from tests.helpers.tiny import read_metrics, tiny_config, values, write_config

pytestmark = pytest.mark.multiprocess


@pytest.fixture(autouse=True)
def own_meter(monkeypatch):
    monkeypatch.setattr(memory, "device_meter", memory.device_meter)


class Measured(nn.Linear):
    """A model that tells its meter how many samples it was given."""

    exact_sums, num_stages = None, 1

    def __init__(self, meter, fits=1000):
        super().__init__(25, 5, bias=False)  # 500 bytes, and as many of gradients
        self.meter, self.fits = meter, fits

    def forward(self, batch):
        self.meter.sizes.append(len(batch["input_ids"]))
        if len(batch["input_ids"]) > self.fits:
            raise torch.OutOfMemoryError("HIP out of memory. Tried to allocate 2 GiB.")
        return super().forward(batch["input_ids"].float())

    def loss(self, outputs, batch):
        return outputs.sum()


class LinearMeter:
    """A device on which parameters and gradients take 1000 bytes, and each sample 100 more; the first step's
    collectives take `buffers` for good."""

    def __init__(self, limit, buffers=0):
        self.limit, self.buffers, self.sizes = limit, buffers, []

    def reset(self):
        pass

    def peak_bytes(self):
        return 1000 + 100 * self.sizes[-1]

    def limit_bytes(self):
        return self.limit - (self.buffers if self.sizes else 0)


def choose(limit, device_batch_size, num_slots=0, fits=1000, buffers=0):
    sizes = sizes_tried(limit, device_batch_size, num_slots, fits, buffers)
    return sizes[-1], max(sizes[:-1])


def sizes_tried(limit, device_batch_size, num_slots=0, fits=1000, buffers=0, *, has_state=False):
    """Return the sizes that were tried, in order; the last is the one chosen."""
    meter = LinearMeter(limit, buffers)
    model = Measured(meter, fits)
    optimizer = torch.optim.AdamW(model.parameters())
    if has_state:
        optimizer.state[model.weight] = {"exp_avg": torch.zeros(1)}
    memory.device_meter = lambda: meter
    size, _ = Search(model, optimizer, device_batch_size, range(1, device_batch_size + 1), 25).run([num_slots])  # type: ignore[arg-type]
    assert model.weight.grad is None
    return [*meter.sizes, size]


@pytest.mark.parametrize(
    ("limit", "device_batch_size", "expected"),
    [
        (10_000, 16, 16),  # all of it fits
        (2_000, 16, 8),  # 9 would, and 8 divides
        (2_000, 13, 7),  # 9 would; in two steps of 7 and 6
        (1_160, 16, 1),
        (10_000, 1, 1),
    ],
)
def test_the_most_that_fits_is_found_and_nothing_larger_tried(limit, device_batch_size, expected):
    size, largest_tried = choose(limit, device_batch_size)
    assert size == expected
    assert 1000 + 100 * largest_tried <= limit


def test_what_the_first_collectives_take_is_not_planned_for():
    assert choose(2_000, 16, buffers=500) == (4, 4)


@pytest.mark.parametrize(
    ("attn_impl", "compiles", "num_resets"), [("flex", None, 1), ("sdpa", {}, 1), ("sdpa", None, 0)]
)
def test_what_was_compiled_for_sizes_that_were_tried_is_forgotten(monkeypatch, attn_impl, compiles, num_resets):
    resets: list[None] = []
    monkeypatch.setattr(torch._dynamo, "reset", lambda: resets.append(None))
    monkeypatch.setattr(Search, "run", lambda *_: (4, ""))
    monkeypatch.setattr(memory, "layout_here", lambda config: SimpleNamespace(num_data_ranks=1, pipeline=1))
    monkeypatch.setattr(memory, "optimizer_slots", lambda config: [2])
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    names = {
        "device_train_microbatch_size": "auto",
        "global_train_batch_size": 8,
        "max_seq_len": 8,
        "exact_sums": False,
        "parts_of_largest_batch": 1,
    }
    options = {"reduces_every_microbatch": True, "compile_config": compiles, "first_microbatch_size": lambda _: 1}
    model: Any = SimpleNamespace(attn_impl=attn_impl)
    assert memory.choose_microbatch(SimpleNamespace(**names, **options), model, None) == 4  # type: ignore[arg-type]
    assert len(resets) == num_resets


@pytest.mark.parametrize(("num_stages", "num_rows"), [(2, 8 * 4), (1, 2)])
def test_a_pipeline_is_measured_with_all_microbatches_of_the_largest_batch(monkeypatch, num_stages, num_rows):
    """Its stages hold several at once. Elsewhere one microbatch is as good as any."""
    rows: list[int] = []
    monkeypatch.setattr(Search, "run", lambda search, _: (2, str(search.measure(2))))
    monkeypatch.setattr(memory, "layout_here", lambda config: SimpleNamespace(num_data_ranks=2, pipeline=num_stages))
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    monkeypatch.setattr(Search, "meter", LinearMeter(10_000), raising=False)
    monkeypatch.setattr(LinearMeter, "peak_bytes", lambda _: 0)
    model: Any = Measured(SimpleNamespace(sizes=rows))
    model.num_stages, model.attn_impl, model.model = num_stages, "sdpa", None
    model.train_on = lambda batch, *_, **__: rows.append(len(batch["input_ids"]))

    words = ["mpt-125m", "device_train_microbatch_size=auto", "global_train_batch_size=16", "max_duration=60ba"]
    schedule = "batch_size_schedule={10ba: 64, 60ba: 128}"
    memory.choose_microbatch(load_train_config([*words, "max_seq_len=25", schedule]).config, model, None)  # type: ignore[arg-type]
    assert rows == [num_rows]


def test_room_is_kept_for_an_optimizer_that_has_no_state_yet():
    size, _ = choose(3_000, 16, num_slots=2)
    assert size == 8  # 1000 bytes of state


def test_state_that_an_optimizer_has_is_not_counted_twice():
    assert sizes_tried(3_000, 16, num_slots=2, has_state=True)[-1] == 16


def test_each_size_tried_is_at_most_twice_the_last():
    assert sizes_tried(10_000, 16) == [1, 1, 2, 4, 8, 16, 16]


def test_one_sample_that_does_not_fit_is_refused_with_what_would_help():
    with pytest.raises(ConfigError, match=r"one sample of 25 tokens needs 0.00 GiB, and this device can give 0.00 GiB"):
        choose(900, 16)


@pytest.mark.parametrize(
    ("fits", "message"),
    [
        (0, "one sample of 25 tokens needs more than the 0.00 GiB that it got, and this device can give 0.00 GiB"),
        (3, "4 samples ran out of memory where 0.00 of 0.00 GiB were expected .*; set it to 2"),
    ],
)
def test_running_out_of_memory_is_one_line_too(fits, message):
    with pytest.raises(ConfigError, match=f"device_train_microbatch_size: auto: {message}"):
        choose(10_000, 16, fits=fits)


def choose_on_rank(limits):
    import torch.distributed as dist

    dist.init_process_group("gloo")
    print("chose", choose(limits[dist.get_rank()], 16))


def test_the_rank_with_the_least_memory_decides_for_all(tmp_path):
    result = launch(choose_on_rank, ([10_000, 1_500],), tmp_path, 2).check()
    assert result.outputs == ["chose (4, 4)\n"] * 2


def test_memory_of_a_process_is_measured():
    meter = ResidentMeter()
    meter.reset()
    before = meter.peak_bytes()
    block = torch.ones(1 << 24)
    assert meter.peak_bytes() - before > 0.9 * block.numel() * 4
    assert meter.limit_bytes() > before


@pytest.mark.slow
def test_auto_trains_the_same_run(tmp_path, data):
    for name, size in (("auto", "auto"), ("one", 1), ("all", None)):
        config = tiny_config(data, run_name=name, device_train_microbatch_size=size, max_duration="4ba")
        result = train([write_config(tmp_path / f"{name}.yaml", config)], tmp_path, 2).check()
        if name == "auto":
            assert "device_train_microbatch_size: auto is 4:" in result.output
    losses = {
        name: values(read_metrics(tmp_path / "runs" / name), "loss/train/total") for name in ("auto", "one", "all")
    }
    assert losses["auto"] == losses["all"]
    assert losses["auto"] == pytest.approx(losses["one"], abs=1e-5)
    manifest = json.loads((tmp_path / "runs/auto/checkpoints/ba4/manifest.json").read_text())
    assert '"device_train_microbatch_size": 4' in json.dumps(manifest)


class Budget(Callback):
    """Gives rank 0 memory for 2 samples at a time, the others for 5, whatever a sample takes here."""

    def __init__(self):
        sizes = []

        class Meter:
            def reset(self):
                pass

            def peak_bytes(self):
                return 10**8 * sizes[-1]

            def limit_bytes(self):
                return int(10**8 * (2.5 if os.environ["RANK"] == "0" else 5.5) / memory.MARGIN)

        def run_step(model, num_samples, *arguments, **options):
            sizes.append(num_samples)
            real(model, num_samples, *arguments, **options)

        real = memory.run_step
        memory.run_step, memory.device_meter = run_step, Meter


HYBRID = {"sharding_strategy": "HYBRID_SHARD", "data_parallel_shard_degree": 2}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_ranks", "changes"),
    [
        pytest.param(4, {"fsdp_config": HYBRID}, marks=pytest.mark.long),
        pytest.param(2, {"compile_config": {"backend": "aot_eager"}}, marks=pytest.mark.long),
        (2, {"fsdp_config": {"reduce_every_microbatch": False}}),
        (1, {"fsdp_config": {"reduce_every_microbatch": False}}),
    ],
    ids=["hybrid", "compiled", "accumulating", "alone"],
)
def test_auto_under_a_budget_trains_the_run_of_the_size_it_has_chosen(tmp_path, data, num_ranks, changes):
    """Before its first batch, and once more with an optimizer that has been restored."""
    config = tiny_config(data, autoresume=True, global_train_batch_size=16, max_duration="4ba", **changes)
    budget = {f"python:{__name__}:Budget": {}}
    for name, size, callbacks in (("auto", "auto", budget), ("fixed", 2, {})):
        config |= {"run_name": name, "device_train_microbatch_size": size, "callbacks": callbacks}
        path = write_config(tmp_path / f"{name}.yaml", config)
        for more in (["stop_after=2ba"], []):
            output = train([path, *more], tmp_path, num_ranks).check().output
            assert ("device_train_microbatch_size: auto is 2: " in output) == (name == "auto")
    runs = [read_metrics(tmp_path / "runs" / name) for name in ("auto", "fixed")]
    for key in ("loss/train/total", "grad_norm", "data/digest"):
        assert values(runs[0], key) == values(runs[1], key)


@pytest.mark.parametrize(("device_type", "is_said"), [("cuda", True), ("cpu", False)])
def test_a_size_that_nobody_gives_is_the_whole_batch_and_said_where_llm_foundry_measures(
    device_type, is_said, tmp_path, monkeypatch, capsys
):
    config = load_train_config([write_config(tmp_path / "run.yaml", tiny_config(tmp_path / "data"))]).config
    monkeypatch.setattr(memory.devices, "device_type", lambda: device_type)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    assert memory.choose_microbatch(config, None, None) == 8  # type: ignore[arg-type]
    assert ("not given, so each device computes its 8 samples at once; auto" in capsys.readouterr().out) == is_said


# ------------------------------------------------------------------------------------------------- out of memory


class Greed(Callback):
    """Asks for more than any machine has: torch's allocator is refused it, and says so in its own words."""

    def before_forward(self, state, logger):
        if int(state.timestamp.batch) == 2 and torch.distributed.get_rank() == 1:
            torch.empty(1 << 47, dtype=torch.uint8)


def test_running_out_of_memory_says_what_was_needed_what_there_was_and_what_would_help(tmp_path, data):
    settings = {"device_train_microbatch_size": 2, "callbacks": {f"python:{__name__}:Greed": {}}}
    config = tiny_config(data, run_name="greedy", max_duration="4ba", **settings)
    result = train([write_config(tmp_path / "greedy.yaml", config)], tmp_path, 2)
    assert result.exit_codes[1] == 2
    line = next(line for line in result.outputs[1].splitlines() if line.startswith("error: "))
    assert re.fullmatch(
        r"error: out of memory on rank 1 in batch 3: 131,072.00 GiB more were asked for with [\d.]+ of [\d.]+ GiB in "
        r"use; by the estimate 2 x \d+ tokens at a time take [\d.]+ GiB; what helps most: (\S+: \S+ \(saves about "
        r"[\d.]+ GiB\)(, )?|twice as many devices \(saves about [\d.]+ GiB\)(, )?){3}",
        line,
    ), line
    assert "Traceback" not in result.outputs[1]
    status = json.loads(Path(tmp_path, "runs/greedy/status.json").read_text())
    assert status["status"] == "failed"


def train_with_2_gib_more(arguments):
    limit = psutil.Process().memory_info().vms + (2 << 30)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    _train(arguments)


def test_memory_that_does_not_suffice_for_the_model_is_told_too(tmp_path, data):
    config = tiny_config(data, model__d_model=8192, model__n_heads=64, model__n_layers=16)
    path = write_config(tmp_path / "large.yaml", config)
    result = launch(train_with_2_gib_more, ([path],), tmp_path)
    assert result.exit_codes == [2], result.output
    pattern = (
        r"^error: out of memory on rank 0 while the run was built: [\d.]+ [GM]iB more were asked for .* 8 x 32 "
        r"tokens .*what helps most: "
    )
    assert re.search(pattern, result.output, re.MULTILINE), result.output
    assert "Traceback" not in result.output
