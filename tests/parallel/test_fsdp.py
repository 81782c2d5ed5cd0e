"""When gradients are summed over ranks, what activation checkpointing keeps, and what a run chooses by its size."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from llmfoundry_lite.config.schema import FSDPConfig, ModelConfig
from llmfoundry_lite.errors import ConfigError
from llmfoundry_lite.models.mpt import MPT
from llmfoundry_lite.parallel.fsdp import build_parallel_model
from llmfoundry_lite.parallel.mesh import build_mesh
from llmfoundry_lite.parallel.precision import PRECISIONS
from llmfoundry_lite.training.gradients import GradientStep

SMALL = ModelConfig(d_model=32, n_heads=4, n_layers=2, max_seq_len=32, vocab_size=96)


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def build(fsdp: FSDPConfig, config: ModelConfig = SMALL, precision: str = "fp32", attn_impl: str = "sdpa"):
    mesh, table = build_mesh(fsdp, "cpu", 1, 1), PRECISIONS[precision, fsdp.mixed_precision]
    return build_parallel_model(config, fsdp, table, mesh, seed=1, attn_impl=attn_impl)


def build_sharded(fsdp: FSDPConfig, config: ModelConfig = SMALL, precision: str = "fp32"):
    """As on several devices, though there is one."""
    model = build(fsdp, config)
    other = MPT(config)
    other.load_state_dict(model.state_dict())
    table = PRECISIONS[precision, fsdp.mixed_precision]
    policy = MixedPrecisionPolicy(param_dtype=table.parameters, reduce_dtype=table.reduction)
    for module in (*other.transformer.blocks, other):
        fully_shard(module, mesh=build_mesh(fsdp, "cpu", 1, 1), mp_policy=policy)
    return other


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def step(model):
    tokens_bt = torch.arange(64).view(2, 32)
    with FlopCounterMode(display=False) as counter:
        loss = model(tokens_bt).logsumexp(-1).mean()
        loss.backward()
    gradients = {name: whole(p.grad) for name, p in model.named_parameters()}
    return loss.item(), gradients, counter.get_total_flops()


@pytest.mark.parametrize("every", [False, True])
def test_a_batch_of_three_microbatches_sums_its_gradients_as_told(one_rank, every):
    model = build_sharded(FSDPConfig())
    step_guard = GradientStep(SimpleNamespace(model=model), None, "stop", 1, reduces_every_microbatch=every)
    batch = {"input_ids": torch.arange(5 * 32).view(5, 32) % 96}
    state = SimpleNamespace(
        batch=batch, device_train_microbatch_size=2, device=SimpleNamespace(_device=torch.device("cpu"))
    )
    step_guard.before_train_batch(state, None)
    has_gradients = []
    for tokens_bt in batch["input_ids"].split(2):
        step_guard.before_forward(state, None)
        model(tokens_bt).logsumexp(-1).mean().backward()
        has_gradients.append(model.transformer.norm_f.weight.grad is not None)
    assert has_gradients == ([True] * 3 if every else [False, False, True])


def test_selective_checkpointing_recomputes_no_matrix_product_and_a_full_one_all(one_rank):
    plain, full, selective = (
        step(build(FSDPConfig(activation_checkpointing=mode))) for mode in (False, True, "selective")
    )
    for loss, gradients, _ in (full, selective):
        assert loss == plain[0]
        assert all(torch.equal(gradients[name], plain[1][name]) for name in gradients)
    assert plain[2] == selective[2] < full[2]


def test_a_compiler_nobody_knows_is_refused_before_anything_is_built(one_rank):
    mesh = build_mesh(FSDPConfig(), "cpu", 1, 1)
    with pytest.raises(ConfigError, match=r"^compile_config.backend: 'foo' given, expected one of .*inductor"):
        build_parallel_model(SMALL, FSDPConfig(), PRECISIONS["fp32", "PURE"], mesh, 1, {"backend": "foo"})


class Calls(TorchDispatchMode):
    """Counts the operations of one name."""

    def __init__(self, name: str):
        super().__init__()
        self.name, self.count = name, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.__name__ == self.name
        return func(*args, **kwargs or {})


@pytest.mark.parametrize(("mode", "times"), [(False, 1), ("selective", 1), (True, 2)])
def test_selective_checkpointing_keeps_what_blocked_attention_computed(one_rank, mode, times):
    model = build(FSDPConfig(activation_checkpointing=mode), attn_impl="blocked")
    with Calls("blocked_attention.default") as calls:
        step(model)
    assert calls.count == times * SMALL.n_layers


def test_a_block_kept_from_its_gradient_sum_gives_it_with_the_last_microbatch(one_rank):
    model = build_sharded(FSDPConfig())
    expected = {name: 2 * gradient for name, gradient in step(build(FSDPConfig()))[1].items()}
    model.set_requires_gradient_sync(False)
    model(torch.arange(64).view(2, 32)).logsumexp(-1).mean().backward()
    assert all(p.grad is None for p in model.parameters())
    model.set_requires_gradient_sync(True)
    _, gradients, _ = step(model)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name])


@pytest.mark.parametrize("precision", ["fp32", "amp_bf16", "amp_fp16"])
def test_one_device_computes_without_fsdp_what_fsdp_computes(one_rank, precision):
    plain, sharded = build(FSDPConfig(), precision=precision), build_sharded(FSDPConfig(), precision=precision)
    assert not any(isinstance(p, DTensor) for p in plain.parameters())
    assert all(p.dtype == torch.float32 for p in plain.parameters())
    (loss, gradients, _), (expected_loss, expected, _) = step(plain), step(sharded)
    assert loss == expected_loss
    assert all(torch.equal(gradients[name], expected[name]) for name in expected)
    assert all(p.dtype == torch.float32 for p in plain.parameters())


def test_offloading_the_optimizer_asks_nothing_of_a_cpu(one_rank):
    loss, gradients, _ = step(build(FSDPConfig(offload_optimizer=True)))
    assert loss == step(build(FSDPConfig()))[0]
    assert all(gradient.device.type == "cpu" for gradient in gradients.values())


def test_large_models_are_sharded_and_summed_after_each_microbatch_by_default(train_config):
    small, large = train_config, replace(train_config, model=replace(SMALL, d_model=4096, n_layers=32))
    assert small.sharding.sharding_strategy == "NO_SHARD" and not small.reduces_every_microbatch
    assert large.sharding.sharding_strategy == "FULL_SHARD" and large.reduces_every_microbatch
    every = replace(small, fsdp_config=FSDPConfig(reduce_every_microbatch=True))
    assert every.reduces_every_microbatch


@pytest.fixture
def train_config(tmp_path):
    from llmfoundry_lite.config.load_train import load_train_config
    from tests.helpers.tiny import tiny_config, write_config

    config = tiny_config(tmp_path)
    config["fsdp_config"] = None
    return load_train_config([write_config(tmp_path / "tiny.yaml", config)]).config
