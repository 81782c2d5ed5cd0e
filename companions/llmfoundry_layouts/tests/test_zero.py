"""ZeRO-1: each rank has the optimizer's state of its rows; steps and checkpoints are those of any other sharding."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed import fake_pg  # noqa: F401 - registers the backend

from llmfoundry_layouts import zero
from llmfoundry_layouts.zero import rows_of, share_optimizer, step_together
from llmfoundry_lite.checkpoint.state import parameter_names
from llmfoundry_lite.config.layout import divide_devices, layout_of
from llmfoundry_lite.config.load_train import load_train_config
from llmfoundry_lite.config.model_schema import ModelConfig
from llmfoundry_lite.config.sharding_schema import FSDPConfig
from llmfoundry_lite.errors import ConfigError
from llmfoundry_lite.estimate import memory
from llmfoundry_lite.estimate.memory import estimate_training_memory
from llmfoundry_lite.parallel.fsdp import build_parallel_model
from llmfoundry_lite.parallel.mesh import build_mesh
from llmfoundry_lite.parallel.precision import PRECISIONS
from llmfoundry_lite.training.optimizers import clear_gradients, local
from tests.helpers.launch import launch
from tests.helpers.layouts import assert_same_run, run_in_launches
from tests.helpers.optimizers import build_small_optimizer
from tests.helpers.runs import run
from tests.helpers.tiny import tiny_config, write_config, write_data

SMALL = ModelConfig(d_model=32, n_heads=4, n_layers=2, max_seq_len=32, vocab_size=95)
ZERO = {"fsdp_config": {"sharding_strategy": "ZERO_1"}}
NAMES = ("adamw", "lion")


def steps_on_ranks(all_gather_bytes: int) -> None:
    """Two steps with every optimizer, the state shared out and not, from the same gradients."""
    dist.init_process_group("gloo")
    zero.GATHER_BYTES = all_gather_bytes
    told: dict[str, Any] = {}
    for name in NAMES:
        models, optimizers = [], []
        for strategy in ("NO_SHARD", "ZERO_1"):
            layout = divide_devices(FSDPConfig(sharding_strategy=strategy), dist.get_world_size())
            fsdp = FSDPConfig(sharding_strategy=strategy)
            model = build_parallel_model(SMALL, fsdp, PRECISIONS["fp32", "DEFAULT"], build_mesh(layout, "cpu"), 1)
            parameters = list(model.parameters())
            models.append(model)
            updated = parameters if strategy == "NO_SHARD" else rows_of(parameters)
            optimizers.append(build_small_optimizer(updated, name=name, lr=0.1, weight_decay=0.1))
        step_together(optimizers[1])
        for step in range(2):
            for model in models:
                tokens_bt = (torch.arange(64) * 7 + step + 13 * dist.get_rank()).view(2, 32) % 95
                model(tokens_bt).logsumexp(-1).mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                clear_gradients(optimizer)
        pairs = list(zip(models[0].parameters(), models[1].parameters(), strict=True))
        assert all(torch.equal(local(a), local(b)) for a, b in pairs), name
        assert all(b.grad is None for _, b in pairs)
        assert set(parameter_names(models[1], optimizers[1]).values()) >= {n for n, _ in models[1].named_parameters()}
        sizes = [
            sum(local(slot).numel() for slots in o.state.values() for slot in slots.values() if slot.ndim)
            for o in optimizers
        ]
        share = torch.tensor([float(sizes[1])])
        dist.all_reduce(share)
        told[name] = [sizes[0], share.item(), sizes[1]]
    if dist.get_rank() == 0:
        print(json.dumps(told))


@pytest.mark.multiprocess
def test_a_step_is_the_whole_one_s_to_the_bit_and_each_rank_has_its_share_of_the_state(tmp_path):
    result = launch(steps_on_ranks, (1 << 13,), tmp_path, 2).check()
    assert "Warning" not in result.output
    for name, (whole, together, share) in json.loads(result.output.splitlines()[-1]).items():
        assert together == whole, name
        assert share == pytest.approx(whole / 2, rel=0.02), name


# --------------------------------------------------------------------------------------------------- the same run


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return write_data(tmp_path_factory.mktemp("data"))


def config_of(data: Path, **changes: Any) -> dict[str, Any]:
    options = {"model__attn_config__fused_qkv": False, "model__n_layers": 4, "autoresume": True, "eval_interval": "2ba"}
    return tiny_config(data, **{**options, "max_duration": "4ba", "global_train_batch_size": 12, **changes})


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_run_changes_between_zero_and_every_other_sharding_at_any_checkpoint(tmp_path, data):
    config = config_of(data)
    run(tmp_path, config, "whole")
    full = {"fsdp_config": {"sharding_strategy": "FULL_SHARD"}}
    said = run_in_launches(tmp_path, config, [(3, ZERO), (2, full), (2, ZERO), (1, ZERO)])
    assert "sharding ZERO_1 -> FULL_SHARD" in said[1].output
    assert_same_run(tmp_path, "moved", "whole")


WAYS: dict[str, tuple[int, dict[str, Any]]] = {
    "stages": (4, {"pp_config": {"pipeline_parallel_degree": 2}, "device_train_microbatch_size": 2}),
    "divided layers": (4, {"tp_config": {"tensor_parallel_degree": 2}}),
    "microbatches, clipped by value": (
        2,
        {
            "device_train_microbatch_size": 2,
            "algorithms": {"gradient_clipping": {"clipping_type": "value", "clipping_threshold": 1e-3}},
        },
    ),
    "lion": (3, {"optimizer": {"name": "decoupled_lionw", "lr": 1e-3, "weight_decay": 0.1}}),
    "as much as fits": (2, {"device_train_microbatch_size": "auto"}),
}


@pytest.mark.long
@pytest.mark.multiprocess
@pytest.mark.parametrize("name", WAYS)
def test_zero_goes_with_every_other_way_to_compute(tmp_path, data, name):
    num_ranks, changes = WAYS[name]
    config = config_of(data, max_duration="3ba")
    run(tmp_path, config, "whole", **{key: changes[key] for key in changes if key in ("optimizer", "algorithms")})
    run(tmp_path, config, "zero", num_ranks, stop_after="2ba", **ZERO, **changes)
    run(tmp_path, config, "zero", num_ranks, **ZERO, **changes)
    assert_same_run(tmp_path, "zero", "whole")


# ---------------------------------------------------------------------------------------------------- what is asked


def load(tmp_path: Path, *arguments: str) -> Any:
    return load_train_config([write_config(tmp_path / "run.yaml", tiny_config(tmp_path, **ZERO)), *arguments]).config


def test_the_estimate_divides_the_state_alone(tmp_path):
    wide = ("model.d_model=512", "model.n_layers=8", "fsdp_config.sharding_strategy=NO_SHARD")
    whole = estimate_training_memory(load(tmp_path, *wide), layout_of(load(tmp_path, *wide), 4))
    config = load(tmp_path, *wide[:2])
    shared = estimate_training_memory(config, layout_of(config, 4))
    assert shared.optimizer_bytes == pytest.approx(whole.optimizer_bytes / 4)
    assert (shared.parameters_bytes, shared.gradients_bytes) == (whole.parameters_bytes, whole.gradients_bytes)
    assert memory.GATHER_BYTES == zero.GATHER_BYTES


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("fsdp_config.sharding_strategy=ZeRO-2", "'ZeRO-2' is not known; did you mean SHARD_GRAD_OP?"),
        ("fsdp_config.sharding_strategy=ZERO_3", "'ZERO_3' is not known; did you mean FULL_SHARD?"),
        ("fsdp_config.sharding_strategy=zero1", "'zero1' is not known; did you mean ZERO_1?"),
        (
            "fsdp_config.offload_optimizer=true",
            "fsdp_config.offload_optimizer: ZERO_1 keeps the whole model on each device; use FULL_SHARD, or remove one",
        ),
        (
            "fsdp_config.data_parallel_shard_degree=2",
            "only HYBRID_SHARD uses it, and sharding_strategy is ZERO_1; change that or remove this",
        ),
    ],
)
def test_other_libraries_words_are_answered_and_what_does_not_go_together_is_refused(tmp_path, argument, message):
    with pytest.raises(ConfigError) as error:
        load(tmp_path, argument)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_parameters_of_another_mesh_or_dtype_are_gathered_apart(monkeypatch):
    def parameter(mesh: str, dtype: torch.dtype, count: int = 4) -> Any:
        numbers = torch.zeros(count, dtype=dtype)
        facts = {"to_local": lambda: numbers, "element_size": numbers.element_size}
        return SimpleNamespace(device_mesh=mesh, dtype=dtype, device="cpu", **facts)

    monkeypatch.setattr(zero, "GATHER_BYTES", 40)
    fp32, bf16 = torch.float32, torch.bfloat16
    whole = [parameter("a", fp32), parameter("a", fp32), parameter("a", bf16), parameter("b", bf16)]
    whole += [parameter("b", bf16, 18), parameter("b", bf16, 1)]
    buckets = list(zero._divide_into_buckets(whole))
    assert [[whole.index(one) for one in bucket] for bucket in buckets] == [[0, 1], [2], [3], [4, 5]]


@pytest.mark.parametrize(
    ("divided", "expected", "shape"),
    [
        (Shard(1), Shard(0), (3, 2)),  # columns: replicas divide all the rows
        (Shard(0), _StridedShard(0, split_factor=2), (2, 4)),  # rows: they divide what is left of these
        (Replicate(), Shard(0), (3, 4)),
    ],
)
def test_replicas_divide_the_rows_that_others_have_left(divided, expected, shape):
    dist.init_process_group("fake", rank=0, world_size=4, store=dist.HashStore())
    try:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "tensor"))
        whole = distribute_tensor(torch.arange(24.0).view(6, 4), mesh, (Replicate(), divided), src_data_rank=None)
        (rows,) = rows_of([torch.nn.Parameter(whole)])
        assert (rows.placements, rows.shape, rows.to_local().shape) == ((expected, divided), (6, 4), shape)
    finally:
        dist.destroy_process_group()


def test_no_gradient_is_kept_after_a_step_for_the_rows_of_a_rank():
    """Clearing the parameters' gradients frees their memory only if nothing else refers to it."""
    dist.init_process_group("fake", rank=0, world_size=2, store=dist.HashStore())
    try:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("replicate",))
        whole = distribute_tensor(torch.ones(6, 4), mesh, (Replicate(),), src_data_rank=None)
        parameter = torch.nn.Parameter(whole)
        optimizer = share_optimizer({"w": parameter}, lambda named: torch.optim.SGD(list(named.values()), lr=0.1))
        parameter.grad = torch.ones_like(whole)
        optimizer.step()
        (rows,) = optimizer.param_groups[0]["params"]
        assert rows.shape == (6, 4) and rows.to_local().shape == (3, 4)
        assert rows.grad is None
    finally:
        dist.destroy_process_group()
