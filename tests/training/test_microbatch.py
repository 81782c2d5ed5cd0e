"""`device_train_microbatch_size: auto` finds what fits, whatever the ranks differ in, and changes no gradient."""

import json

import pytest
import torch
from torch import nn

from llmfoundry_lite.errors import ConfigError
from llmfoundry_lite.training.microbatch import ResidentMeter, choose_microbatch_size
from tests.helpers.launch import launch, train
from tests.helpers.tiny import read_metrics, tiny_config, values, write_config

pytestmark = pytest.mark.multiprocess


class Measured(nn.Linear):
    """A model that tells its meter how many samples it was given."""

    def __init__(self, meter):
        super().__init__(25, 5, bias=False)  # 500 bytes, and as many of gradients
        self.meter = meter

    def forward(self, batch):
        self.meter.sizes.append(len(batch["input_ids"]))
        return super().forward(batch["input_ids"].float())

    def loss(self, outputs, batch):
        return outputs.sum()


class LinearMeter:
    """A device on which parameters and gradients take 1000 bytes, and each sample 100 more."""

    def __init__(self, limit):
        self.limit, self.sizes = limit, []

    def reset(self):
        pass

    def peak_bytes(self):
        return 1000 + 100 * self.sizes[-1]

    def limit_bytes(self):
        return self.limit


def choose(limit, device_batch_size, num_slots=0):
    meter = LinearMeter(limit)
    model = Measured(meter)
    size, _ = choose_microbatch_size(
        model,  # type: ignore[arg-type]
        torch.optim.AdamW(model.parameters()),
        device_batch_size,
        25,
        num_slots,
        meter,
    )
    assert model.weight.grad is None
    return size, max(meter.sizes)


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


def test_room_is_kept_for_an_optimizer_that_has_no_state_yet():
    size, _ = choose(3_000, 16, num_slots=2)
    assert size == 8  # 1000 bytes of state


def test_one_sample_that_does_not_fit_is_refused_with_what_would_help():
    with pytest.raises(
        ConfigError, match=r"one sample of 25 tokens needs .*FULL_SHARD.*activation_checkpointing: true"
    ):
        choose(900, 16)


def choose_on_rank(limits):
    import torch.distributed as dist

    dist.init_process_group("gloo")
    print("chose", choose(limits[dist.get_rank()], 16))


def test_the_rank_with_the_least_memory_decides_for_all(tmp_path):
    result = launch(choose_on_rank, ([10_000, 1_500],), tmp_path, 2).check()
    assert result.outputs == ["chose (4, 4)\n"] * 2


def test_memory_of_a_process_is_measured():
    meter = ResidentMeter(num_local_ranks=1)
    meter.reset()
    before = meter.peak_bytes()
    block = torch.ones(1 << 24)
    assert meter.peak_bytes() - before > 0.9 * block.numel() * 4
    assert meter.limit_bytes() > before


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
