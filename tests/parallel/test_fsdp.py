"""When gradients are summed over ranks, what activation checkpointing keeps, and what a run chooses by its size."""

import datetime
import json
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from llmfoundry_lite.config.layout import Layout, divide_devices
from llmfoundry_lite.config.model_schema import AttentionConfig, ModelConfig
from llmfoundry_lite.config.sharding_schema import FSDPConfig
from llmfoundry_lite.errors import ConfigError
from llmfoundry_lite.models.flex_attention import compile_to_one_operation
from llmfoundry_lite.models.mpt import MPT
from llmfoundry_lite.parallel.fsdp import build_parallel_model
from llmfoundry_lite.parallel.mesh import build_mesh
from llmfoundry_lite.parallel.precision import PRECISIONS
from llmfoundry_lite.parallel.recompute import checkpoint_activations
from llmfoundry_lite.training.gradient_step import GradientStep
from tests.helpers.launch import launch

SMALL = ModelConfig(d_model=32, n_heads=4, n_layers=2, max_seq_len=32, vocab_size=96)


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def build(fsdp: FSDPConfig, config: ModelConfig = SMALL, precision: str = "fp32", attn_impl: str = "sdpa", **options):
    mesh, table = build_mesh(divide_devices(fsdp, 1), "cpu"), PRECISIONS[precision, fsdp.mixed_precision]
    return build_parallel_model(config, fsdp, table, mesh, seed=1, attn_impl=attn_impl, **options)


def build_sharded(fsdp: FSDPConfig, config: ModelConfig = SMALL, precision: str = "fp32"):
    """Build a model that is sharded as on several devices, though there is one."""
    model = build(fsdp, config)
    other = MPT(config)
    other.load_state_dict(model.state_dict())
    table = PRECISIONS[precision, fsdp.mixed_precision]
    policy = MixedPrecisionPolicy(param_dtype=table.parameters, reduce_dtype=table.reduction)
    for module in (*other.transformer.blocks, other):
        fully_shard(module, mesh=build_mesh(divide_devices(fsdp, 1), "cpu"), mp_policy=policy)
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


def as_trained(model, mixed_precision="DEFAULT"):
    return SimpleNamespace(model=model, precision=PRECISIONS["amp_bf16", mixed_precision])


@pytest.mark.parametrize("every", [False, True])
def test_a_batch_of_three_microbatches_sums_its_gradients_as_told(one_rank, every):
    model = build_sharded(FSDPConfig())
    step_guard = GradientStep(
        model=as_trained(model), on_non_finite="stop", max_skipped_batches=1, reduces_every_microbatch=every
    )
    batch = {"input_ids": torch.arange(5 * 32).view(5, 32) % 96}
    step_guard.begin(3, torch.device("cpu"))
    has_gradients = []
    for tokens_bt in batch["input_ids"].split(2):
        step_guard.before_forward()
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
    mesh = build_mesh(Layout(), "cpu")
    with pytest.raises(ConfigError, match=r"^compile_config.backend: 'foo' given, expected one of .*inductor"):
        build_parallel_model(SMALL, FSDPConfig(), PRECISIONS["fp32", "PURE"], mesh, 1, {"backend": "foo"})


@torch.library.custom_op("llmfoundry_lite_tests::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    COMPUTED.append(x.shape)
    return x * 2


doubled.register_fake(torch.empty_like)
doubled.register_autograd(lambda ctx, gradient: gradient * 2)
COMPUTED: list[torch.Size] = []


@pytest.mark.slow
def test_selective_checkpointing_keeps_what_the_compiled_attention_computed(one_rank):
    """FlexAttention is compiled by itself, and on CPUs has no backward pass: another operation stands in for it."""

    class Compiled(torch.nn.Module):
        def forward(self, x):
            return torch.sin(compile_to_one_operation(doubled)(x))

    block, x = Compiled(), torch.ones(3, requires_grad=True)
    checkpoint_activations(block, FSDPConfig(activation_checkpointing="selective"))
    COMPUTED.clear()
    block(x).sum().backward()
    assert len(COMPUTED) == 1
    torch.testing.assert_close(x.grad, 2 * torch.cos(2 * x.detach()))


class Calls(TorchDispatchMode):
    """Counts the operations of one name."""

    def __init__(self, name: str):
        super().__init__()
        self.name, self.count = name, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.__name__ == self.name
        return func(*args, **kwargs or {})


def test_alibi_s_slopes_reach_the_device_once_and_are_not_saved():
    model = MPT(replace(SMALL, attn_config=AttentionConfig(alibi=True)))
    counts = []
    for _ in range(2):
        with Calls("lift_fresh.default") as calls, torch.no_grad():
            model(torch.zeros(1, 8, dtype=torch.int64))
        counts.append(calls.count)
    assert counts == [1, 0]
    assert not any("slopes" in name for name in model.state_dict())


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


FP32_IN_ATTENTION = {
    "angles": (AttentionConfig(rope=True), "sdpa"),
    "biases": (AttentionConfig(alibi=True, alibi_bias_max=7), "reference"),
    "slopes": (AttentionConfig(alibi=True, alibi_bias_max=7), "flex"),
}
"""Numbers that blocks are given in fp32, and whose 16-bit values would differ."""


@pytest.mark.parametrize("precision", ["amp_bf16", "amp_fp16"])
@pytest.mark.parametrize("numbers", FP32_IN_ATTENTION)
def test_fsdp_leaves_what_attention_is_given_in_fp32_as_one_device_does(one_rank, numbers, precision):
    options, attn_impl = FP32_IN_ATTENTION[numbers]
    config = replace(SMALL, attn_config=options)
    plain, sharded = (
        build(FSDPConfig(offload_optimizer=is_sharded), config, precision, attn_impl) for is_sharded in (False, True)
    )
    assert isinstance(sharded, FSDPModule) and not isinstance(plain, FSDPModule)
    tokens_bt = torch.arange(64).view(2, 32)
    with torch.no_grad():
        assert torch.equal(sharded(tokens_bt), plain(tokens_bt))


def train(model, num_batches=2):
    """Return losses of microbatches, and of an evaluation after each step; then all parameters."""
    guard = GradientStep(
        model=as_trained(model), on_non_finite="stop", max_skipped_batches=1, reduces_every_microbatch=False
    )
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for batch in range(num_batches):
        guard.begin(3, torch.device("cpu"))
        optimizer.zero_grad()
        for tokens_bt in ((torch.arange(6 * 32) * 7 + batch) % 96).view(3, 2, 32):
            guard.before_forward()
            loss = model(tokens_bt).float().logsumexp(-1).mean()
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        with torch.no_grad():
            losses.append(model(tokens_bt).float().logsumexp(-1).mean().item())
    for module in model.modules():  # FSDP leaves parameters whole after an evaluation
        if isinstance(module, FSDPModule):
            module.reshard()
    return losses, [whole(p).detach() for p in model.parameters()]


@pytest.mark.parametrize(
    ("compiled", "precision", "mode"),
    [
        (None, "amp_bf16", False),
        (None, "amp_bf16", True),
        ({"backend": "aot_eager"}, "fp32", False),
        ({"backend": "aot_eager"}, "amp_fp16", False),
    ],
)
def test_plain_parameters_cast_once_a_batch_train_the_same_to_the_bit(one_rank, compiled, precision, mode):
    torch._dynamo.reset()
    usual, plain = (
        build(
            FSDPConfig(plain_on_one_device=is_plain, activation_checkpointing=mode),
            precision=precision,
            compile_config=compiled,
        )
        for is_plain in (False, True)
    )
    assert isinstance(usual, FSDPModule) == (compiled is not None)
    assert not isinstance(plain, FSDPModule) and not any(isinstance(p, DTensor) for p in plain.parameters())
    (losses, parameters), (expected_losses, expected) = train(plain), train(usual)
    assert losses == expected_losses
    assert all(map(torch.equal, parameters, expected))


def test_compiled_blocks_that_recompute_stay_with_fsdp(one_rank):
    """A compiler may leave them to be recomputed eagerly, by parameters that are fp32 again."""
    recomputing = FSDPConfig(plain_on_one_device=True, activation_checkpointing=True)
    model = build(recomputing, precision="amp_bf16", compile_config={"disable": True})
    assert isinstance(model, FSDPModule)
    losses, _ = train(model, 1)
    assert all(map(math.isfinite, losses))


def test_a_batch_casts_each_parameter_once_and_hooks_of_parameters_run_for_each_microbatch(one_rank):
    model = build(FSDPConfig(plain_on_one_device=True), precision="amp_bf16")
    train(model, 1)  # which makes the copies
    called, norm = [], model.transformer.norm_f.weight
    norm.register_post_accumulate_grad_hook(lambda parameter: called.append(parameter.grad.dtype))
    with Calls("_foreach_copy_.default") as casts:
        train(model, 2)
    assert casts.count == 2 * (SMALL.n_layers + 1)
    assert called == 2 * 3 * [torch.float32]


def test_copies_of_the_batch_before_are_not_used(one_rank):
    model = build(FSDPConfig(plain_on_one_device=True), precision="amp_bf16")
    step(model)
    model.zero_grad()
    with pytest.raises(AssertionError, match="renew_copies was not called"):
        step(model)


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


CASES = [
    ("HYBRID_SHARD", "DEFAULT", "each microbatch", 4),
    ("HYBRID_SHARD", "DEFAULT", "each microbatch", 1),
    ("NO_SHARD", "DEFAULT", "each microbatch", 4),
    ("NO_SHARD", "DEFAULT", "each microbatch", 1),
    ("NO_SHARD", "DEFAULT", "each batch", 1),
    ("HYBRID_SHARD", "PURE", "each microbatch", 1),
]
"""Sharding, mixed precision, when gradients are reduced, samples of a microbatch."""


def step_on_four_ranks():
    """Says how often a batch of one and of four microbatches is summed over replicas, its gradient, and how long the
    groups wait."""
    timeout = datetime.timedelta(seconds=1234)
    dist.init_process_group("gloo", timeout=timeout)
    rank, calls, all_reduce = dist.get_rank(), [], dist.all_reduce
    dist.all_reduce = lambda *args, **options: calls.append(1) or all_reduce(*args, **options)
    batch = {"input_ids": (torch.arange(4 * 32) + 7 * rank).view(4, 32) % 96}
    told = {"counts": {}, "gradients": {}}
    for case in CASES:
        strategy, mixed_precision, reduces, size = case
        fsdp = FSDPConfig(sharding_strategy=strategy)
        model = build_parallel_model(
            SMALL, fsdp, PRECISIONS["fp32", "DEFAULT"], build_mesh(divide_devices(fsdp, 4, 2), "cpu"), 1
        )
        every = reduces == "each microbatch"
        guard = GradientStep(
            model=as_trained(model, mixed_precision),
            on_non_finite="stop",
            max_skipped_batches=1,
            reduces_every_microbatch=every,
        )
        guard.begin(-(-len(batch["input_ids"]) // size), torch.device("cpu"))
        calls.clear()
        for tokens_bt in batch["input_ids"].split(size):
            guard.before_forward()
            (model(tokens_bt).logsumexp(-1).mean() * size / 4).backward()
        told["counts"][str(case)] = len(calls)
        told["gradients"][str(case)] = [whole(p.grad).norm().item() for p in model.parameters()]
    mesh = build_mesh(Layout(replicate=2, tensor=2), "cpu")
    told["timeouts"] = {
        dimension: mesh.get_group(dimension)._get_backend(torch.device("cpu")).options._timeout.seconds
        for dimension in mesh.mesh_dim_names
    }
    if rank == 0:
        print(json.dumps(told))


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory):
    result = launch(step_on_four_ranks, (), tmp_path_factory.mktemp("ranks"), 4, local_world_size=2).check()
    return json.loads(result.output.splitlines()[-1])


@pytest.mark.multiprocess
@pytest.mark.parametrize("strategy", ["HYBRID_SHARD", "NO_SHARD"])
def test_replicas_sum_their_gradients_once_a_batch_whatever_the_number_of_microbatches(four_ranks, strategy):
    names = [str(case) for case in CASES if case[:2] == (strategy, "DEFAULT")]
    assert {four_ranks["counts"][name] for name in names} == {SMALL.n_layers + 1}  # blocks, and what is around them
    for name in names:
        assert four_ranks["gradients"][name] == pytest.approx(four_ranks["gradients"][names[0]], rel=1e-5)


@pytest.mark.multiprocess
def test_replicas_that_sum_in_16_bits_do_so_after_each_microbatch(four_ranks):
    """FSDP2 would keep what is not summed yet in 16 bits, and the microbatches' sum with it."""
    assert four_ranks["counts"][str(CASES[-1])] == 4 * (SMALL.n_layers + 1)


@pytest.mark.multiprocess
def test_the_groups_of_a_mesh_wait_as_long_as_the_launch(four_ranks):
    assert len(four_ranks["timeouts"]) == 3
    assert set(four_ranks["timeouts"].values()) == {1234}
