"""What only a GPU can show. `make gpu-check` runs these; elsewhere they are skipped."""

from dataclasses import replace

import pytest
import torch

from llmfoundry_lite.config.model_schema import AttentionConfig
from llmfoundry_lite.models.attention import build_mask, number_documents
from llmfoundry_lite.models.generate import generate
from tests.helpers.launch import train
from tests.helpers.models import BASE, EOS, FAMILY, random_model, random_tokens, with_implementation
from tests.helpers.tiny import read_metrics, tiny_config, values, write_config, write_data

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.multiprocess,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

CPU = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("data"))


def run(tmp_path, config, name, env=None, **changes):
    path = write_config(tmp_path / f"{name}.yaml", {**config, "run_name": name, **changes})
    train([path], tmp_path, env=env).check()
    return read_metrics(tmp_path / "runs" / name)


def losses(records):
    return values(records, "loss/train/total")


@pytest.mark.parametrize(
    ("precision", "mixed_precision", "band"),
    [
        *(("fp32", "DEFAULT", 1e-3), ("amp_bf16", "PURE", 0.06), ("amp_bf16", "DEFAULT", 0.05)),
        *(("amp_bf16", "FULL", 0.03), ("amp_fp16", "DEFAULT", 0.02)),
    ],
)
def test_a_gpu_computes_the_run_a_cpu_computes(tmp_path, data, precision, mixed_precision, band):
    config = tiny_config(data, max_duration="30ba", eval_interval="30ba")
    reference = run(tmp_path, config, "cpu", CPU)
    low = {"precision": precision, "fsdp_config": {"mixed_precision": mixed_precision}}
    records = run(tmp_path, config, "gpu", **low)
    assert values(records, "data/digest") == values(reference, "data/digest")
    assert losses(records) == pytest.approx(losses(reference), abs=band)
    assert values(records, "eval/loss") == pytest.approx(values(reference, "eval/loss"), abs=band)


def test_a_run_moves_from_cpu_to_gpu_and_back(tmp_path, data):
    config = tiny_config(data, autoresume=True, max_duration="30ba")
    whole = run(tmp_path, config, "whole", CPU)
    for env in (CPU, None, CPU):
        records = run(tmp_path, config, "moved", env, stop_after="10ba")
    assert values(records, "data/digest") == values(whole, "data/digest")
    assert losses(records) == pytest.approx(losses(whole), abs=2e-3)


def test_compiled_blocks_compute_the_same_losses(tmp_path, data):
    config = tiny_config(data, max_duration="10ba")
    assert losses(run(tmp_path, config, "compiled", compile_config={})) == pytest.approx(
        losses(run(tmp_path, config, "eager")), abs=1e-3
    )


@pytest.mark.parametrize("with_documents", [False, True], ids=["one document", "documents"])
@pytest.mark.parametrize("name", ["alibi", "grouped rope", "window alibi grouped", "learned"])
def test_flex_and_sdpa_compute_logits_and_gradients_of_the_definition(name, with_documents):
    """FlexAttention's backward pass exists on GPUs alone, and its kernels only for lengths and widths they like."""
    model = random_model(replace(FAMILY[name], d_model=192, max_seq_len=256)).cuda()
    tokens_bt = torch.randint(model.config.vocab_size, (2, 256), generator=torch.Generator().manual_seed(1)).cuda()
    documents_bt = number_documents(tokens_bt, EOS) if with_documents else None
    results = {}
    for attn_impl in ("reference", "sdpa", "flex"):
        other = with_implementation(model, attn_impl).cuda()
        logits_btv = other(tokens_bt, documents_bt=documents_bt)
        logits_btv.logsumexp(-1).sum().backward()
        results[attn_impl] = logits_btv.detach(), {key: p.grad for key, p in other.named_parameters()}
    for attn_impl in ("sdpa", "flex"):
        torch.testing.assert_close(results[attn_impl][0], results["reference"][0], rtol=1e-3, atol=1e-3)
        for key, expected in results["reference"][1].items():
            error = (results[attn_impl][1][key] - expected).norm() / expected.norm().clamp(min=1e-3)
            assert float(error) == pytest.approx(0, abs=1e-2), f"{attn_impl}: {key}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_kv_heads", [4, 2])
def test_the_last_queries_of_plain_text_see_what_is_before_them(dtype, num_kv_heads):
    """Context parallelism of kind `gather` asks for these."""
    q_bthk = torch.randn(2, 128, 4, 64, device="cuda", dtype=dtype).requires_grad_()
    k_bsgk, v_bsgk = (torch.randn(2, 384, num_kv_heads, 64, device="cuda", dtype=dtype).requires_grad_() for _ in "kv")
    found = []
    for implementation in ("reference", "sdpa"):
        mask = build_mask(AttentionConfig(), implementation, None, torch.arange(256, 384, device="cuda")[None], 384)
        out_bthk = mask.attend(q_bthk, k_bsgk, v_bsgk)
        found.append((out_bthk, *torch.autograd.grad(out_bthk.float().square().sum(), (q_bthk, k_bsgk, v_bsgk))))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 0.8, "top_k": 50, "top_p": 0.9}])
def test_text_is_written_on_a_gpu(sampling):
    prompt_t = random_tokens(BASE)[0, :8]
    written = list(generate(random_model(BASE).cuda(), prompt_t.cuda(), 2 * BASE.max_seq_len, **sampling))
    assert len(written) == 2 * BASE.max_seq_len
    assert [token < BASE.vocab_size for token in written] == pytest.approx([True] * len(written))  # a number: a GPU's


def test_an_offloaded_optimizer_trains_the_same_run(tmp_path, data):
    config = tiny_config(data, max_duration="10ba")
    offloaded = run(tmp_path, config, "offloaded", fsdp_config={"offload_optimizer": True})
    assert losses(offloaded) == pytest.approx(losses(run(tmp_path, config, "plain")), abs=1e-4)


def test_a_known_gpu_reports_its_mfu(tmp_path, data):
    from llmfoundry_lite.devices import accelerator

    records = run(tmp_path, tiny_config(data, precision="amp_bf16"), "mfu")
    known = accelerator() is not None
    assert all(("throughput/device/mfu" in record) == known for record in records)
