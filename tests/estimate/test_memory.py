"""The memory estimate: a case by hand, the right things grow, and activations as autograd really keeps them."""

from dataclasses import replace

import pytest
import torch

from llmfoundry_lite.config.layout import Layout
from llmfoundry_lite.config.load_train import load_train_config
from llmfoundry_lite.config.model_schema import AttentionConfig, FFNConfig, ModelConfig
from llmfoundry_lite.config.optimizer_schema import OptimizerConfig
from llmfoundry_lite.estimate.memory import estimate_training_memory
from llmfoundry_lite.estimate.model_memory import MemoryEstimate, Portion, count_block_per_token, count_logits
from llmfoundry_lite.hardware import MIB
from llmfoundry_lite.models.attention import choose_implementation
from llmfoundry_lite.models.flops import count_parameters
from llmfoundry_lite.models.mpt import MPT
from tests.helpers.plans import config_of, estimate_memory, moments_of

SMALL = ModelConfig(d_model=64, n_heads=4, n_layers=4, max_seq_len=64, vocab_size=160)
SEVEN_BILLION = ModelConfig(d_model=4096, n_heads=32, n_layers=32)
SHALLOW = ModelConfig(d_model=768, n_heads=12, n_layers=2)


def test_a_small_case_by_hand():
    """d=2, one head, one block, s=4, V=8, no biases, fp32, one device, two samples of four tokens."""
    model = ModelConfig(d_model=2, n_heads=1, n_layers=1, max_seq_len=4, vocab_size=8, no_bias=True)
    embeddings, block, last_norm = 8 * 2 + 4 * 2, 12 * 2 * 2 + 2 * 2, 2
    parameters = embeddings + block + last_norm
    tokens, d, f, heads, fp32 = 8, 2, 8, 1, 4
    norms = 2 * (fp32 * d + 2 * fp32 + fp32 * d)  # input, mean and deviation, output
    attention = fp32 * (3 * d + d) + fp32 * heads  # q, k, v, output, one normaliser per head
    feed_forward = fp32 * (f + f)  # before and after GELU
    around = 2 * fp32 * d  # input and output of the last norm
    assert estimate_memory(model, seq_len=4, microbatch_size=2, precision="fp32") == MemoryEstimate(
        parameters_bytes=4 * parameters,
        gradients_bytes=4 * parameters,
        optimizer_bytes=8 * parameters,
        unsharded_bytes=4 * parameters,
        activations_bytes=tokens * (norms + attention + feed_forward + around),
        # Logits and log-probabilities, the hidden states' gradient. The embedding's comes after the softmax.
        logits_bytes=2 * 4 * tokens * 8 + 4 * tokens * d,
    )


def test_copies_share_the_state_of_zero_1_also_where_they_divide_samples():
    """Four pairs of ranks have copies, two pairs divide samples: each has a quarter of AdamW's two moments."""
    layout = Layout(replicate=2, context=2, tensor=2, has_whole_copies=True)
    alone, shared = (
        estimate_training_memory(config_of(SMALL, precision="fp32", sharding_strategy=strategy), layout)
        for strategy in ("NO_SHARD", "ZERO_1")
    )
    assert alone.optimizer_bytes == 2 * alone.parameters_bytes
    assert shared.optimizer_bytes == alone.optimizer_bytes / 4
    assert shared.parameters_bytes == alone.parameters_bytes


def test_one_device_holds_its_gradient_once_and_copies_nothing_in_fp32():
    """Without FSDP only the gradient of one matrix stands beside the whole, in the backward pass."""
    model = ModelConfig(d_model=16, n_heads=1, n_layers=1, max_seq_len=4, vocab_size=1, no_bias=True)
    options = {"seq_len": 4, "microbatch_size": 2, "reduce_every_microbatch": False}
    alone = estimate_memory(model, precision="fp32", has_fsdp=False, **options)
    assert alone.gradients_bytes == alone.parameters_bytes
    assert alone.unsharded_bytes == 4 * 16 * 64
    shared = estimate_memory(model, precision="fp32", **options)
    assert shared.unsharded_bytes > 2 * alone.unsharded_bytes
    half = estimate_memory(model, has_fsdp=False, **options)
    assert half.unsharded_bytes == alone.parameters_bytes // 2 + (2 + 4) * 16 * 64


def test_parameters_that_are_cast_once_a_batch_stay_in_16_bits():
    """Compiled too, there is no FSDP. Recomputed blocks would hold one copy at a time."""
    options = {"seq_len": 2048, "microbatch_size": 4}
    for recomputed, kept_bytes in ((False, 0), (True, 2 * 12 * 768 * 768)):
        usual, plain = (
            moments_of(
                replace(SHALLOW, no_bias=True),
                **options,
                has_fsdp=is_plain and not recomputed,
                plain_on_one_device=is_plain,
                activation_checkpointing=recomputed,
            )["in_loss"]
            for is_plain in (False, True)
        )
        norms_bytes = 2 * 2 * 768 * recomputed
        assert plain.unsharded_bytes - usual.unsharded_bytes == kept_bytes + norms_bytes
        assert plain.gradients_bytes == usual.gradients_bytes


def test_one_device_holds_the_gradient_of_hidden_states_in_the_loss():
    model = ModelConfig(d_model=2, n_heads=1, n_layers=1, max_seq_len=4, vocab_size=64, no_bias=True)
    later, alone = (
        estimate_memory(model, seq_len=4, microbatch_size=2, precision="fp32", has_fsdp=False, num_microbatches=number)
        for number in (2, 1)
    )
    assert later.logits_bytes == 2 * 4 * 8 * 64 + 4 * 8 * 2  # as by hand above
    assert later.gradients_bytes == later.parameters_bytes
    assert alone.gradients_bytes == 0


def test_exact_sums_wait_and_are_reduced_in_float64():
    options = {"seq_len": 64, "microbatch_size": 1, "precision": "fp32", "layout": Layout(shard=2)}
    plain, exact = (
        moments_of(SMALL, reduce_every_microbatch=False, exact_sums=exact_sums, **options)
        for exact_sums in (False, True)
    )
    assert exact["in_loss"].gradients_bytes == 2 * plain["in_loss"].gradients_bytes == 8 * count_parameters(SMALL)
    more_bytes = exact["at_first_block"].unsharded_bytes - plain["at_first_block"].unsharded_bytes
    assert more_bytes == 4 * (12 * 64 * 64 + 13 * 64), "the buffer of one block's reduction"
    shared = moments_of(SMALL, reduce_every_microbatch=True, exact_sums=True, **options)["in_loss"]
    assert shared.gradients_bytes == 2 * shared.parameters_bytes


def test_lion_takes_most_in_its_step():
    options = ["mpt-1b", "device_train_microbatch_size=1", "fsdp_config.activation_checkpointing=true"]
    adamw = estimate_training_memory(load_train_config(options).config, Layout())
    lion = estimate_training_memory(load_train_config([*options, "optimizer.name=decoupled_lionw"]).config, Layout())
    assert adamw.activations_bytes and not lion.activations_bytes
    assert lion.gradients_bytes == 2 * lion.parameters_bytes


def test_rows_that_devices_do_not_divide_are_gathered_with_their_padding():
    """192 rows on 1,024 devices: one row on each that has any, and 1,024 where they are gathered."""
    narrow = ModelConfig(d_model=192, n_heads=6, n_layers=4, max_seq_len=256, vocab_size=4096, no_bias=True)
    many, few = (
        estimate_memory(narrow, seq_len=256, microbatch_size=1, precision="fp32", layout=Layout(shard=n))
        for n in (1024, 64)
    )
    block = 4 * (3 * 1024 * 192 + 1024 * 768 + 2 * 1024)  # padded: Wqkv, out_proj, up_proj; down_proj; norms
    assert many.unsharded_bytes > 2 * block > few.unsharded_bytes


@pytest.mark.parametrize(
    "model",
    [
        SMALL,
        SEVEN_BILLION,
        replace(SMALL, tie_word_embeddings=False, attn_config=AttentionConfig(attn_type="multiquery_attention")),
        replace(SMALL, attn_config=AttentionConfig(qk_ln=True, fused_qkv=False)),
        replace(SMALL, no_bias=True, attn_config=AttentionConfig(head_dim=40, qkv_bias=True, qk_ln=True)),
        replace(SMALL, attn_config=AttentionConfig(head_dim=40, qkv_bias=False, fused_qkv=False)),
        replace(SMALL, ffn_config=FFNConfig(ffn_type="mptglu"), norm_type="rmsnorm"),
    ],
)
def test_the_shapes_of_all_parameters_add_up(model):
    estimate = estimate_memory(model, seq_len=64, microbatch_size=1)
    assert estimate.parameters_bytes == 4 * count_parameters(model)


def test_published_activation_formula():
    """Korthikanti et al. 2022: 34 bytes per token, width and block in 16 bits, 2 of them dropout's masks."""
    one, two = (
        estimate_memory(replace(SEVEN_BILLION, n_layers=n), seq_len=2048, microbatch_size=8).activations_bytes
        for n in (8, 9)
    )
    assert (two - one) / (8 * 2048 * 4096) == pytest.approx(32, rel=0.005)


RECOMPUTED = {"activation_checkpointing": True, "microbatch_size": 16}
ALIBI = replace(SEVEN_BILLION, attn_config=AttentionConfig(alibi=True, attn_impl="sdpa"))
OPTIONS = {"seq_len": 512, "microbatch_size": 4, "layout": Layout(shard=4)}


def total(model: ModelConfig = SEVEN_BILLION, **options) -> int:
    return estimate_memory(model, **{**OPTIONS, **options}).total_bytes


@pytest.mark.parametrize(
    ("less", "more"),
    [
        ({"microbatch_size": 2}, {}),
        ({"seq_len": 256}, {}),
        ({"layout": Layout(shard=8)}, {}),
        ({"activation_checkpointing": "selective"}, {}),
        ({"activation_checkpointing": True}, {"activation_checkpointing": "selective"}),
        ({}, {"reduce_every_microbatch": False}),
        ({**RECOMPUTED, "activation_cpu_offload": True}, RECOMPUTED),
        ({}, {"sharding_strategy": "SHARD_GRAD_OP"}),
        ({}, {"precision": "fp32"}),
        ({}, {"precision": "tf32"}),
        ({}, {"mixed_precision": "FULL"}),
        ({"mixed_precision": "PURE"}, {}),
        ({}, {"exact_sums": True}),
        ({"optimizer": OptimizerConfig(name="lion", lr=1e-4)}, {}),
        ({"model": SHALLOW, "loss_chunk_mib": 32}, {"model": SHALLOW}),
        ({"model": replace(SEVEN_BILLION, n_layers=31)}, {}),
        ({"model": replace(SEVEN_BILLION, vocab_size=32768)}, {}),
        ({}, {"model": replace(SEVEN_BILLION, norm_type="layernorm")}),
        ({"model": replace(SEVEN_BILLION, learned_pos_emb=False)}, {"model": ALIBI}),
    ],
)
def test_what_should_cost_more_does(less, more):
    assert total(**less) < total(**more)


@pytest.mark.parametrize(
    ("options", "makes_bias"),
    [
        ({}, False),
        ({"attn_impl": "flash"}, False),
        ({"attn_impl": "flex"}, False),
        ({"attn_impl": "sdpa"}, True),
        ({"attn_impl": "torch"}, True),
        ({"attn_pdrop": 0.1}, True),
        ({"head_dim": 8}, True),
    ],
)
@pytest.mark.parametrize("mask", [{"alibi": True}, {"sliding_window_size": 9}, {"attn_uses_sequence_id": True}])
def test_a_bias_is_counted_where_a_gpu_makes_one(options, mask, makes_bias):
    """The same choice as `choose_implementation`'s, for all but plain attention."""
    config = replace(SMALL, learned_pos_emb=False, attn_config=AttentionConfig(**options))
    masked = replace(config, attn_config=replace(config.attn_config, **mask))
    more = total(masked, seq_len=4096) - total(config, seq_len=4096)
    hidden_bytes = 4 * 4096 * config.q_dim * 2
    assert more >= 4096 * 4096 * 2 if makes_bias else more <= 2 * hidden_bytes
    chosen, _ = choose_implementation(masked, "cuda", torch.bfloat16)
    assert (chosen == "sdpa") == makes_bias


def test_sharding_divides_what_it_shares_and_nothing_else():
    whole, half = (estimate_memory(SEVEN_BILLION, **{**OPTIONS, "layout": Layout(shard=n)}) for n in (1, 2))
    for part in ("parameters_bytes", "gradients_bytes", "optimizer_bytes"):
        assert getattr(whole, part) == 2 * getattr(half, part)
    for part in ("unsharded_bytes", "activations_bytes", "logits_bytes"):
        assert getattr(whole, part) == getattr(half, part)


def measure_saved_bytes(config: ModelConfig, dtype: torch.dtype, *, autocast: bool) -> int:
    """Storage that autograd keeps after a forward pass of 2 x 64 tokens, without parameters or copies of them."""
    torch.set_num_threads(1)
    model = MPT(config).to(torch.float32 if autocast else dtype)
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    shapes = {shape for p in model.parameters() if p.ndim == 2 for shape in (p.shape, p.t().shape)}
    saved: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        is_weight = tensor.untyped_storage().data_ptr() in weights or (autocast and tensor.shape in shapes)
        if not is_weight:
            saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    hidden = []
    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", dtype, enabled=autocast),
    ):
        model(torch.zeros(2, 64, dtype=torch.int64), head=lambda hidden_btd, _: hidden.append(hidden_btd))
    saved[hidden[0].untyped_storage().data_ptr()] = hidden[0]
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


KINDS = {
    "learned": SMALL,
    "alibi": replace(SMALL, no_bias=True, attn_config=AttentionConfig(alibi=True, attn_impl="sdpa")),
    "clip-qkv": replace(SMALL, attn_config=AttentionConfig(clip_qkv=3.0)),
    "qk-ln": replace(SMALL, attn_config=AttentionConfig(qk_ln=True)),
    "layernorm": replace(SMALL, norm_type="layernorm", expansion_ratio=3),
    "grouped": replace(SMALL, attn_config=AttentionConfig(attn_type="multiquery_attention")),
    "rope": replace(SMALL, attn_config=AttentionConfig(rope=True)),
    "window": replace(SMALL, attn_config=AttentionConfig(sliding_window_size=7, attn_impl="sdpa")),
    "wide-heads": replace(SMALL, attn_config=AttentionConfig(head_dim=64)),
    "gated": replace(SMALL, ffn_config=FFNConfig(ffn_type="mptglu")),
    "untied": replace(SMALL, tie_word_embeddings=False, embedding_fraction=0.5),
}


@pytest.mark.parametrize("config", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize(
    ("precision", "mixed_precision"), [("fp32", "DEFAULT"), ("amp_bf16", "DEFAULT"), ("amp_bf16", "FULL")]
)
def test_activations_are_within_five_percent_of_what_autograd_keeps(config, precision, mixed_precision):
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    measured_bytes = measure_saved_bytes(config, dtype, autocast=mixed_precision == "FULL")
    wide = replace(config, vocab_size=1 << 16)  # so that the loss takes most, when all are kept
    estimate = estimate_memory(
        wide, seq_len=64, microbatch_size=2, precision=precision, mixed_precision=mixed_precision
    )
    assert estimate.activations_bytes == pytest.approx(measured_bytes, rel=0.05)


def test_the_estimate_reads_as_one_line():
    text = str(estimate_memory(SEVEN_BILLION, seq_len=2048, microbatch_size=4, layout=Layout(shard=8)))
    assert text.startswith("about ") and " GiB per device: parameters 3.10, " in text and "\n" not in text
    options = {"seq_len": 64, "microbatch_size": 64, "has_fsdp": False}
    small, alone = (str(estimate_memory(SMALL, num_microbatches=number, **options)) for number in (2, 1))
    assert " MiB per device: parameters 0.8" in small and ", gradients 0.8" in small
    assert ", gradients none yet, optimizer " in alone, "it holds the most in the loss"


def test_a_chunk_of_logits_takes_their_bf16_an_fp32_copy_and_log_probabilities():
    def in_loss(mib: int) -> int:
        return moments_of(SEVEN_BILLION, seq_len=2048, microbatch_size=8, loss_chunk_mib=mib)["in_loss"].logits_bytes

    # Of 16,384 tokens and 50,368 words: 13 chunks of at most 1,280 tokens, or 7 of 2,432.
    assert in_loss(512) - in_loss(256) == (2432 - 1280) * 50_368 * (2 + 4 + 4)
    small, large = (load_train_config(["mpt-1b", f"loss_chunk_mib={mib}"]).config for mib in (256, 1024))
    few, many = (estimate_training_memory(config, Layout(shard=8)).total_bytes for config in (small, large))
    assert few < many


def test_a_loss_of_ones_own_is_not_compiled_with_the_model():
    own = "model.loss_fn=python:mine:Loss"
    given = {"eager": ["compile_config=null"], "compiled": ["compile_config={}"], "own": ["compile_config={}", own]}
    configs = {
        name: load_train_config(["mpt-125m", "model.norm_type=layernorm", *words]).config
        for name, words in given.items()
    }
    logits = {name: count_logits(Portion(config, Layout(shard=8))) for name, config in configs.items()}
    assert logits["compiled"] < logits["own"] == logits["eager"]
    blocks = {name: count_block_per_token(Portion(config, Layout(shard=8))) for name, config in configs.items()}
    assert blocks["compiled"] == blocks["own"] < blocks["eager"]


def test_a_compiler_times_kernels_with_a_buffer_of_the_cache():
    """The H100's has 50 MiB. A tenth of that is left for what `estimate_training_memory` rounds up."""
    eager, compiled = (
        estimate_training_memory(load_train_config(["mpt-125m", f"compile_config={given}"]).config, Layout(shard=8))
        for given in ("null", "{}")
    )
    assert 45 * MIB < compiled.workspaces_bytes - eager.workspaces_bytes < 55 * MIB
