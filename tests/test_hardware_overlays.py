"""yamls/hardware: the same run on other machines; how it is computed there, never what is trained."""

import re
import shutil
import subprocess
import sys

import pytest
import torch
import yaml

from llmfoundry_lite.checkpoint.store import open_checkpoint
from llmfoundry_lite.config.layers import hardware_keys, is_for_hardware, leaf_keys
from llmfoundry_lite.config.layout import layout_of
from llmfoundry_lite.config.load_train import load_train_config
from llmfoundry_lite.errors import ConfigError
from llmfoundry_lite.estimate.memory import estimate_training_memory
from llmfoundry_lite.hardware import ACCELERATORS, GIB
from tests.helpers.foundry import FOUNDRY
from tests.helpers.launch import ROOT, train
from tests.helpers.present import needs
from tests.helpers.tiny import read_metrics, tiny_config, values, write_config, write_data

DEVICES = {
    "a100-40gb-8": ("A100-40GB", 8),
    "a100-80gb-8": ("A100-80GB", 8),
    "h100-8": ("H100-80GB", 8),
    "h200-8": ("H200", 8),
    "mi250-4": ("MI250", 8),
    "mi300x-8": ("MI300X", 8),
    "cpu": (None, 2),
}
"""Overlay -> row of the table of accelerators, devices of a node."""
PRETRAIN = sorted(path.stem for path in (ROOT / "yamls/pretrain").glob("*.yaml"))


def overlay(name):
    return str(ROOT / f"yamls/hardware/{name}.yaml")


def test_every_overlay_is_listed_here_and_says_where_it_has_run():
    assert {path.stem for path in (ROOT / "yamls/hardware").glob("*.yaml")} == set(DEVICES)
    for name in set(DEVICES) - {"cpu"}:
        words = (
            "One H100 has run this overlay" if name == "h100-8" else "This overlay has not run on this hardware yet."
        )
        assert words in (ROOT / f"yamls/hardware/{name}.yaml").read_text()


@pytest.mark.parametrize("run", PRETRAIN)
@pytest.mark.parametrize("name", DEVICES)
def test_every_overlay_lies_over_every_run_and_one_sample_fits(name, run):
    config = load_train_config([str(ROOT / f"yamls/pretrain/{run}.yaml"), overlay(name)], {}).config
    assert config.device_train_microbatch_size == "auto"
    device, num_devices = DEVICES[name]
    if device is not None:
        num_nodes = {"mpt-22b": 8, "mpt-30b": 8, "mpt-70b": 8, "mpt-175b": 64, "mpt-1t": 384}.get(run, 1)
        # A copy in each node is too large of the largest models; `yamls/layouts` has how those are divided.
        is_too_large = run in ("mpt-175b", "mpt-1t") and config.sharding.sharding_strategy == "HYBRID_SHARD"
        # Blocks of a trillion, gathered whole, take 98 GiB on any number of devices.
        is_too_large |= run == "mpt-1t" and ACCELERATORS[device].memory_bytes < 98 * GIB
        assert fits(config, device, num_nodes, num_devices) != is_too_large


def fits(config, device, num_nodes, num_devices):
    needed = estimate_training_memory(config, layout_of(config, num_nodes * num_devices, num_devices)).total_bytes
    # Beside the tensors: the device's context, libraries, communication buffers and fragments.
    return needed + 4 * GIB < ACCELERATORS[device].memory_bytes * 0.95


@pytest.mark.parametrize("name", sorted(set(DEVICES) - {"cpu"}))
def test_an_overlay_keeps_the_model_in_a_node_only_where_every_run_fits_there(name):
    device, num_devices = DEVICES[name]
    largest, middle = (str(ROOT / f"yamls/pretrain/mpt-{size}.yaml") for size in ("70b", "7b"))
    hybrid = load_train_config([largest, overlay(name), "fsdp_config.sharding_strategy=HYBRID_SHARD"], {}).config
    fits_in_node = fits(hybrid, device, 32, num_devices)
    config = load_train_config([middle, overlay(name)], {}).config
    assert config.sharding.sharding_strategy == ("HYBRID_SHARD" if fits_in_node else "FULL_SHARD")
    layouts = (layout_of(config, n, num_devices) for n in (8, 256))
    one_node, many = (estimate_training_memory(config, layout).total_bytes / GIB for layout in layouts)
    assert round(one_node) == 16
    assert round(many) == (16 if fits_in_node else 4)


@pytest.mark.parametrize("name", DEVICES)
def test_an_overlay_changes_nothing_of_what_is_trained(name):
    run = str(ROOT / "yamls/pretrain/mpt-1b.yaml")
    layers = yaml.safe_load((ROOT / f"yamls/hardware/{name}.yaml").read_text())
    assert layers.pop("overlay") == "hardware"
    for key in leaf_keys(layers):
        assert is_for_hardware(key)
    plain, laid = load_train_config([run], {}).config, load_train_config([run, overlay(name)], {}).config
    for block in ("optimizer", "scheduler", "algorithms", "tokenizer", "eval_loader", "precision", "seed", "model"):
        assert getattr(plain, block) == getattr(laid, block)
    assert plain.train_loader.dataset == laid.train_loader.dataset
    assert plain.global_train_batch_size == laid.global_train_batch_size


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("global_train_batch_size", "global_train_batch_size: 64"),
        ("optimizer.lr", "optimizer: {lr: 1.0}"),
        ("scheduler.t_warmup", "scheduler: {t_warmup: 1ba}"),
        ("max_duration", "max_duration: 10ba"),
        ("seed", "seed: 18"),
        ("train_loader.dataset.shuffle", "train_loader: {dataset: {shuffle: false}}"),
        ("train_loader.dataset.shuffle_seed", "train_loader: {dataset: {shuffle_seed: 4}}"),
        ("train_loader.dataset.streams.a.proportion", "train_loader: {dataset: {streams: {a: {proportion: 1}}}}"),
        ("model.n_layers", "model: {n_layers: 3}"),
        ("algorithms.gradient_clipping.clipping_threshold", "algorithms: {gradient_clipping: {clipping_threshold: 2}}"),
        ("variables.seed", "variables: {seed: 18}"),
    ],
)
def test_an_overlay_that_touches_training_is_refused_by_key(tmp_path, key, text):
    path = tmp_path / "theirs.yaml"
    path.write_text(f"overlay: hardware\ndevice_train_microbatch_size: auto\n{text}\n")
    with pytest.raises(ConfigError, match=re.escape(f"{path}: {key}: a hardware overlay may not change")):
        load_train_config([str(ROOT / "yamls/pretrain/mpt-125m.yaml"), str(path)], {})


@pytest.mark.parametrize("name", DEVICES)
def test_a_file_of_llm_foundry_s_takes_an_overlay(tmp_path, name):
    shape = {"d_model": 768, "n_heads": 12, "n_layers": 12, "lr": 6e-4, "max_duration": "4800ba", "batch": 256}
    (tmp_path / "theirs.yaml").write_text(FOUNDRY.format(**shape))
    config = load_train_config([str(tmp_path / "theirs.yaml"), overlay(name)], {}).config
    assert config.device_train_microbatch_size == "auto"
    assert config.sharding.mixed_precision == "PURE"  # the run's own


def test_the_command_line_has_the_last_word():
    arguments = [str(ROOT / "yamls/pretrain/mpt-125m.yaml"), overlay("h100-8")]
    options = ["device_train_microbatch_size=4", "fsdp_config.sharding_strategy=NO_SHARD", "environment.A=b"]
    config = load_train_config([*options, *arguments], {}).config
    assert config.device_train_microbatch_size == 4
    assert config.sharding.sharding_strategy == "NO_SHARD"
    assert config.environment == {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "A": "b"}


@needs("llmfoundry_islands")
def test_the_documentation_lists_what_an_overlay_may_set():
    text = (ROOT / "docs/moving-a-run.md").read_text()
    listed = text[text.index("may set only keys that depend") : text.index("Any other key")]
    words = {word.rsplit(".", 1)[-1] for word in re.findall(r"`([\w.]+)`", listed)}
    assert words == {key.rsplit(".", 1)[-1] for key in hardware_keys()}


def test_a_dry_run_shows_the_hardware_s_environment_and_what_stands():
    arguments = ["yamls/pretrain/mpt-7b.yaml", "yamls/hardware/mi300x-8.yaml", "--dry-run"]
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8", "GPU_MAX_HW_QUEUES": "4"}
    result = subprocess.run(
        [sys.executable, "scripts/train.py", *arguments],
        cwd=ROOT,
        env={"PATH": "", **place},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "environment    HIP_FORCE_DEV_KERNARG=1\n" in result.stdout
    assert "environment    GPU_MAX_HW_QUEUES=4, as the shell has it, not 2\n" in result.stdout
    assert "16 device(s) x 64 samples in microbatches as large as fit" in result.stdout
    assert "about 15.79 GiB per device" in result.stdout  # sharded within each node of 8


def test_a_long_grace_is_questioned():
    run = str(ROOT / "yamls/pretrain/mpt-125m.yaml")
    assert load_train_config([run, "preemption_grace_seconds=25"], {}).notes == []
    assert load_train_config([run, "preemption_grace_seconds=60"], {}).notes == [
        "command line: preemption_grace_seconds: 60 is for srun alone; `composer` and `torchrun` kill after 30 s "
        "(25 or less leaves them time)"
    ]
    with_alerts = load_train_config([run, "preemption_grace_seconds=21", "alerts.command=[page-me]"], {})
    assert with_alerts.notes[0].endswith("after 30 s (20 or less leaves them time for the last alert)")
    for srun in ({"WORLD_SIZE": "8", "SLURM_STEP_NUM_TASKS": "8"}, {"SLURM_STEP_NUM_TASKS": "1"}):
        assert load_train_config([run, "preemption_grace_seconds=60"], srun).notes == []
    composer = {"WORLD_SIZE": "1", "SLURM_STEP_NUM_TASKS": "1"}
    assert len(load_train_config([run, "preemption_grace_seconds=60"], composer).notes) == 1


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_run_carried_on_under_another_overlay_says_what_is_different_and_sees_the_same_data(tmp_path):
    """1 rank under one overlay, 2 under another, against the run that nobody moved."""
    config = tiny_config(write_data(tmp_path / "data"), autoresume=True, max_duration="6ba", precision="amp_bf16")
    run = write_config(tmp_path / "run.yaml", config)
    here = write_config(tmp_path / "here.yaml", {"overlay": "hardware", "environment": {"HERE": "yes"}})
    other = {
        "overlay": "hardware",
        "device_train_microbatch_size": 1,
        "fsdp_config": {
            "sharding_strategy": "HYBRID_SHARD",
            "mixed_precision": "PURE",
            "data_parallel_shard_degree": 1,
        },
        "model": {"attn_config": {"attn_impl": "reference"}},
        "environment": {"THERE": 1},
    }
    there = write_config(tmp_path / "there.yaml", other)
    train([run, "run_name=whole"], tmp_path).check()
    train([run, here, "stop_after=3ba"], tmp_path).check()
    output = train([run, there], tmp_path, 2).check().output
    assert (
        "carrying on from runs/tiny/checkpoints/ba3 (devices 1 -> 2, sharding FULL_SHARD -> HYBRID_SHARD, "
        "shard degree none -> 1, microbatch 8 -> 1, precision amp_bf16 DEFAULT -> amp_bf16 PURE, "
        "attention blocked -> reference, HERE yes -> none, THERE none -> 1)"
    ) in output
    first, second = open_checkpoint(tmp_path / "runs/tiny/checkpoints/ba6").manifest.segments
    assert (first.first_batch, first.last_batch, second.first_batch, second.last_batch) == (1, 3, 4, 6)
    assert (first.sharding, second.sharding) == ("FULL_SHARD", "HYBRID_SHARD")
    assert (first.precision, second.precision) == ("amp_bf16 DEFAULT", "amp_bf16 PURE")
    assert (first.shard_degree, second.shard_degree) == (None, 1)
    assert (first.attention, second.attention) == ("blocked", "reference")
    assert (first.environment, second.environment) == ({"HERE": "yes"}, {"THERE": "1"})
    assert second.torch == torch.__version__
    whole, moved = read_metrics(tmp_path / "runs/whole"), read_metrics(tmp_path / "runs/tiny")
    assert values(moved, "data/digest") == values(whole, "data/digest")
    assert values(moved, "loss/train/total") == pytest.approx(values(whole, "loss/train/total"), abs=0.05)


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("name", ["cpu", "mi250-4"])
def test_an_overlay_runs(tmp_path, name):
    """On CPUs, one of another machine's too: sharding, loader and microbatch are real, its environment idle."""
    config = tiny_config(write_data(tmp_path / "data"), max_duration="2ba")
    shutil.copy(overlay(name), tmp_path / f"{name}.yaml")
    result = train([write_config(tmp_path / "run.yaml", config), f"{name}.yaml"], tmp_path, 2).check()
    assert "device_train_microbatch_size: auto is 4: " in result.output
    assert len(read_metrics(tmp_path / "runs/tiny")) == 2
