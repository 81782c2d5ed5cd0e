"""Folders that plain `transformers` loads: same logits, nothing half-written, a reason when it cannot be."""

import contextlib
import json
import os
import re
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    MptConfig,
)

from llmfoundry_lite.config.model_schema import AttentionConfig, FFNActivation, FFNConfig, ModelConfig, RopeScaling
from llmfoundry_lite.config.mup import MupConfig
from llmfoundry_lite.convert import files, huggingface
from llmfoundry_lite.convert.files import published, write_json
from llmfoundry_lite.convert.huggingface import (
    build_hf_config,
    choose_format,
    convert_from_hugging_face,
    describe_export_problem,
    export_model,
    find_readable_format,
    import_model,
)
from llmfoundry_lite.convert.multipliers import fold_multipliers, without_multipliers
from llmfoundry_lite.errors import ConfigError, ExportError
from llmfoundry_lite.models.mpt import MPT
from tests.helpers.models import (
    ALIBI,
    LLAMA,
    QWEN2,
    QWEN3,
    SMALL,
    assert_computes_the_same,
    random_model,
    random_tokens,
    to_hugging_face,
    with_activation,
    with_attention,
    with_scaling,
)
from tests.helpers.present import leave_out_companions, needs
from tests.helpers.tiny import build_tokenizer

READS_OTHERS = needs("llmfoundry_formats")
MISTRAL = with_attention(LLAMA, sliding_window_size=8)
MUP = MupConfig(base_width=24, embedding_mult=4.0)
LAYOUTS = {
    "mpt": ALIBI,
    "mpt-six-heads": replace(ALIBI, n_heads=6),
    "mpt-clip-and-scale": with_attention(ALIBI, clip_qkv=0.5, softmax_scale=0.05),
    "gpt2": SMALL,
    "gpt2-no-bias": replace(SMALL, no_bias=True),
    "gpt2-no-positions": replace(SMALL, learned_pos_emb=False),
    "gpt2-expansion": replace(SMALL, expansion_ratio=2.5, n_heads=6, norm_eps=1e-3),
    "gpt2-softmax-scale": with_attention(SMALL, softmax_scale=1.0),
    "gpt2-gelu-by-tanh": with_activation(SMALL, approximate="tanh"),
    "gpt2-untied": replace(SMALL, tie_word_embeddings=False, norm_type="layernorm"),
    "mpt-untied": replace(ALIBI, tie_word_embeddings=False),
    "llama": LLAMA,
    "llama-one-kv-head": with_attention(LLAMA, attn_type="multiquery_attention", kv_n_heads=None),
    "llama-bias-tied": replace(LLAMA, no_bias=False, tie_word_embeddings=True, norm_type="low_precision_rmsnorm"),
    "llama-linear": with_scaling(LLAMA, type="linear", factor=2.0),
    "llama-dynamic": replace(with_scaling(LLAMA, type="dynamic", factor=2.0), max_seq_len=16),
    "llama-3": with_scaling(LLAMA, type="llama3", factor=8.0, original_max_position_embeddings=64),
    "llama-heads-of-another-width": with_attention(LLAMA, head_dim=16),
    "mistral": MISTRAL,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "qwen3-heads-of-another-width": with_attention(QWEN3, head_dim=16),
    "mpt-mup": replace(ALIBI, mup=MUP),
    "mpt-mup-wider-heads": replace(with_attention(ALIBI, clip_qkv=0.5), mup=replace(MUP, base_head_dim=3)),
    "gpt2-mup-wider-heads": replace(SMALL, logit_scale="inv_sqrt_d_model", mup=replace(MUP, base_head_dim=3)),
    "llama-mup": replace(LLAMA, mup=replace(MUP, base_head_dim=3)),
    "llama-mup-scaled": replace(with_attention(LLAMA, softmax_scale=0.5), logit_scale=0.5, mup=MUP),
    "qwen3-mup": replace(QWEN3, mup=replace(MUP, base_head_dim=3)),
    "llama-width": replace(LLAMA, ffn_config=replace(LLAMA.ffn_config, ffn_hidden_size=80)),
}


@pytest.fixture(scope="module", params=LAYOUTS, ids=str)
def exported(request, tmp_path_factory) -> tuple[ModelConfig, MPT, Path]:
    """A model, and the folder it was exported to."""
    return export(LAYOUTS[request.param], tmp_path_factory.mktemp("exported"))


def export(config: ModelConfig, folder: Path, **options) -> tuple[ModelConfig, MPT, Path]:
    model = random_model(config)
    export_model(model.state_dict(), config, folder / "out", **options)
    return config, model, folder / "out"


def assert_same_logits(config: ModelConfig, model: MPT, folder: Path) -> None:
    theirs, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert theirs.dtype == torch.float32
    tokens_bt = random_tokens(config)
    assert (theirs.eval()(tokens_bt).logits - model(tokens_bt)).abs().max() < 1e-5


def test_plain_transformers_gives_our_logits_within_1e5(exported):
    assert_same_logits(*exported)


def test_transformers_generates_with_its_cache_what_we_would(exported):
    config, model, folder = exported
    theirs = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokens_bt = random_tokens(config)[:1, :8]
    expected_bt = tokens_bt
    for _ in range(6):
        expected_bt = torch.cat([expected_bt, model(expected_bt)[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(theirs.generate(tokens_bt, max_new_tokens=6, do_sample=False), expected_bt)


@pytest.mark.parametrize(
    "exported",
    [pytest.param(name, marks=[] if name.startswith("mpt") else READS_OTHERS) for name in LAYOUTS],
    indirect=True,
)
def test_export_and_import_return_every_bit(exported):
    config, model, folder = exported
    imported_config, state_dict = import_model(folder)
    assert imported_config == without_multipliers(config)
    plain_state = fold_multipliers(model.state_dict(), config)
    assert state_dict.keys() == plain_state.keys()
    assert all(torch.equal(state_dict[name], tensor) for name, tensor in plain_state.items())


@pytest.mark.parametrize(
    "base",
    [
        pytest.param(ALIBI, id="mpt"),
        pytest.param(SMALL, id="gpt2", marks=READS_OTHERS),
        pytest.param(LLAMA, id="llama", marks=READS_OTHERS),
    ],
)
def test_three_matrices_travel_as_the_layout_has_them_and_return_as_one(base, tmp_path):
    config, model, folder = export(with_attention(base, fused_qkv=False), tmp_path)
    assert_same_logits(config, model, folder)
    imported_config, state_dict = import_model(folder)
    assert imported_config == base
    three = [model.state_dict()[f"transformer.blocks.1.attn.W{part}.weight"] for part in "qkv"]
    assert torch.equal(state_dict["transformer.blocks.1.attn.Wqkv.weight"], torch.cat(three))


@READS_OTHERS
def test_multipliers_are_folded_into_three_matrices_too(tmp_path):
    """Llama's folders do not say whether q, k and v were one matrix, so they return as one."""
    one_matrix = replace(with_attention(LLAMA, softmax_scale=0.5), logit_scale=0.5, mup=MUP)
    config, model, folder = export(with_attention(one_matrix, fused_qkv=False), tmp_path)
    assert_same_logits(config, model, folder)
    imported_config, state_dict = import_model(folder)
    assert imported_config == without_multipliers(one_matrix)
    plain_state = fold_multipliers(model.state_dict(), config)
    three = [plain_state[f"transformer.blocks.1.attn.W{part}.weight"] for part in "qkv"]
    assert torch.equal(state_dict["transformer.blocks.1.attn.Wqkv.weight"], torch.cat(three))


def test_ntk_scaling_travels_as_the_theta_that_it_is(tmp_path):
    config, model, folder = export(with_scaling(LLAMA, type="ntk", factor=4.0), tmp_path)
    assert_same_logits(config, model, folder)


def test_several_shards_hold_the_same_weights(exported, tmp_path):
    config, _, one_folder = exported
    _, _, folder = export(config, tmp_path, max_shard_bytes=40_000)
    shards = sorted(folder.glob("*.safetensors"))
    assert len(shards) > 2 and not (folder / "model.safetensors").exists()
    sizes = [[t.nbytes for t in load_file(shard).values()] for shard in shards]
    assert all(sum(held) <= 40_000 or len(held) == 1 for held in sizes), sizes
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {shard.name for shard in shards}
    one = load_file(one_folder / "model.safetensors")
    many = {name: tensor for shard in shards for name, tensor in load_file(shard).items()}
    assert one.keys() == many.keys() and all(torch.equal(one[name], many[name]) for name in one)
    assert not AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)[1]["missing_keys"]


def test_bf16_halves_the_file_and_loads_as_bf16(tmp_path):
    model = random_model(ALIBI)
    export_model(model.state_dict(), ALIBI, tmp_path / "fp32")
    export_model(model.state_dict(), ALIBI, tmp_path / "bf16", dtype="bf16")
    sizes = [(tmp_path / name / "model.safetensors").stat().st_size for name in ("fp32", "bf16")]
    assert sizes[1] < 0.6 * sizes[0]
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "bf16").dtype == torch.bfloat16


def test_tokenizer_and_its_end_of_text_travel_along(tmp_path):
    build_tokenizer(tmp_path / "tokenizer")
    (tmp_path / "tokenizer" / "notes.txt").write_text("not the tokenizer's")
    export_model(random_model(ALIBI).state_dict(), ALIBI, tmp_path / "out", tokenizer_folder=tmp_path / "tokenizer")
    assert AutoTokenizer.from_pretrained(tmp_path / "out").eos_token_id == 2
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert theirs.config.eos_token_id == 2 and theirs.generation_config.eos_token_id == 2
    assert not (tmp_path / "out" / "notes.txt").exists()
    assert AutoTokenizer.from_pretrained(tmp_path / "out").model_max_length == ALIBI.max_seq_len


# -------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    "config",
    [ALIBI, *(pytest.param(config, marks=READS_OTHERS) for config in (SMALL, LLAMA, MISTRAL, QWEN2, QWEN3))],
    ids=lambda it: choose_format(it).title[:7],
)
def test_every_refusal_names_the_key_that_is_at_fault(config):
    """Each key alone, with values that it cannot have. Where a width is another, a tensor's shape shows it."""
    config = replace(config, n_layers=1)
    state, described = to_hugging_face(random_model(config)), build_hf_config(config)
    layout = find_readable_format(described, "here")
    num_refused = 0
    for key in [*sorted(layout.known_keys), "brand_new", "attn_config.brand_new"]:
        *blocks, name = key.split(".")
        for value in ("no such", {"brand_new": 1}, True):
            changed = block = json.loads(json.dumps(described))
            for part in blocks:
                block[part] = block.get(part) or {}
                block = block[part]
            block[name] = value
            try:
                convert_from_hugging_face(state, changed, "here")
            except ExportError as error:
                num_refused += 1
                assert re.search(rf"\b{name}\b|brand_new|here: tensor ", str(error)), (key, value, str(error))
    assert num_refused > len(layout.fields)


@pytest.mark.parametrize(
    ("config", "option"),
    [
        (replace(ALIBI, no_bias=False), "model.no_bias: false"),
        (with_attention(ALIBI, alibi_bias_max=4), "model.attn_config.alibi_bias_max: 4"),
        (with_attention(ALIBI, qk_ln=True), "model.attn_config.qk_ln: true"),
        (replace(ALIBI, expansion_ratio=5), "model.expansion_ratio: 5"),
        (replace(ALIBI, logit_scale=0.5), "model.logit_scale: 0.5"),
        (with_attention(SMALL, qk_ln=True), "model.attn_config.qk_ln: true"),
        (with_attention(SMALL, clip_qkv=6.0), "model.attn_config.clip_qkv: 6.0"),
        (with_attention(SMALL, softmax_scale=0.05), "model.attn_config.softmax_scale: 0.05"),
        (replace(SMALL, logit_scale="inv_sqrt_d_model"), "model.logit_scale: inv_sqrt_d_model"),
        (with_attention(SMALL, rope=True), "model.ffn_config.ffn_type: mptmlp"),
        (replace(LLAMA, norm_type="layernorm"), "model.norm_type: layernorm"),
        (with_attention(LLAMA, qk_ln=True), "model.attn_config.qk_ln: true"),
        (with_attention(LLAMA, qk_gn=True), "model.attn_config.norm_type: low_precision_layernorm"),
        (with_attention(QWEN3, norm_eps=0.5), "model.attn_config.norm_eps: 0.5"),
        (with_attention(QWEN3, sliding_window_size=4), "model.attn_config.sliding_window_size: 4"),
        (with_attention(SMALL, head_dim=16), "model.attn_config.head_dim: 16"),
        (with_attention(ALIBI, qkv_bias=True), "model.attn_config.qkv_bias: true"),
        (with_attention(LLAMA, clip_qkv=6.0), "model.attn_config.clip_qkv: 6.0"),
        (with_attention(LLAMA, softmax_scale=1.0), "model.attn_config.softmax_scale: 1.0"),
        (replace(LLAMA, logit_scale=0.5), "model.logit_scale: 0.5"),
        (with_attention(SMALL, qk_gn=True), "model.attn_config.qk_gn: true"),
        (with_attention(ALIBI, qk_gn=True), "model.attn_config.qk_gn: true"),
        (with_attention(SMALL, sliding_window_size=4), "model.attn_config.sliding_window_size: 4"),
        (with_attention(ALIBI, sliding_window_size=4), "model.attn_config.sliding_window_size: 4"),
        (with_attention(ALIBI, attn_type="multiquery_attention"), "model.attn_config.attn_type: multiquery_attention"),
        (
            with_attention(SMALL, attn_type="grouped_query_attention", kv_n_heads=2),
            "model.attn_config.attn_type: grouped_query_attention",
        ),
        (replace(SMALL, norm_type="rmsnorm"), "model.norm_type: rmsnorm"),
        (replace(ALIBI, norm_type="rmsnorm"), "model.norm_type: rmsnorm"),
        (replace(ALIBI, ffn_config=FFNConfig(ffn_type="mptglu")), "model.ffn_config.ffn_type: mptglu"),
        (replace(SMALL, ffn_config=FFNConfig(ffn_type="mptglu")), "model.ffn_config.ffn_type: mptglu"),
        (replace(ALIBI, ffn_config=FFNConfig(ffn_hidden_size=40)), "model.ffn_config.ffn_hidden_size: 40"),
        (with_activation(ALIBI, name="silu"), "model.ffn_config.ffn_act_fn.name: silu"),
        (with_activation(ALIBI, approximate="tanh"), "model.ffn_config.ffn_act_fn.approximate: tanh"),
    ],
)
def test_what_no_layout_can_express_is_refused_by_name(config, option, tmp_path):
    reason = describe_export_problem(config)
    assert reason is not None and reason.startswith(f"{option} cannot be expressed in transformers'")
    with pytest.raises(ExportError) as error:
        export_model(random_model(config).state_dict(), config, tmp_path / "out")
    assert str(error.value) == f"{tmp_path / 'out'}: {reason}" and "\n" not in reason
    assert list(tmp_path.iterdir()) == []


def test_multipliers_that_are_powers_of_2_are_folded_without_rounding():
    config = replace(ALIBI, mup=MupConfig(base_width=24, embedding_mult=4.0))
    model = random_model(config)
    plain = MPT(without_multipliers(config))
    plain.load_state_dict(fold_multipliers(model.state_dict(), config))
    tokens_bt = random_tokens(config)
    assert torch.equal(plain(tokens_bt), model(tokens_bt))
    assert not torch.equal(model(tokens_bt), with_weights(replace(config, mup=None), model)(tokens_bt))


def with_weights(config: ModelConfig, model: MPT) -> MPT:
    other = MPT(config)
    other.load_state_dict(model.state_dict())
    return other


def test_a_missing_or_misshapen_tensor_is_named(tmp_path):
    state_dict = dict(random_model(SMALL).state_dict())
    norm = state_dict.pop("transformer.norm_f.weight")
    with pytest.raises(ExportError, match=r"tensor transformer\.norm_f\.weight is missing"):
        export_model(state_dict, SMALL, tmp_path / "out")
    with pytest.raises(ExportError, match=r"norm_f\.weight has shape \[5\], the model's configuration says \[48\]"):
        export_model({**state_dict, "transformer.norm_f.weight": norm[:5]}, SMALL, tmp_path / "out")
    with pytest.raises(ExportError, match="tensor other has no place"):
        export_model({**random_model(SMALL).state_dict(), "other": norm}, SMALL, tmp_path / "out")


@pytest.mark.parametrize(
    "error",
    [
        OSError(28, "No space left on device"),
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
    ids=["system", "safetensors"],
)
def test_a_full_disk_may_pass_and_leaves_the_earlier_export_and_no_draft(error, tmp_path, monkeypatch):
    _, model, folder = export(ALIBI, tmp_path)

    def full(*_args, **_kwargs):
        raise error

    monkeypatch.setattr(files, "save_file", full)
    with pytest.raises(ExportError, match="cannot be written: No space left on device") as caught:
        export_model(random_model(ALIBI, seed=1).state_dict(), ALIBI, folder)
    assert caught.value.is_transient
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    name = "transformer.wte.weight"
    assert torch.equal(import_model(folder)[1][name], model.state_dict()[name])


def test_others_may_read_an_export_as_far_as_they_may_read_files_here(tmp_path):
    export_model(random_model(ALIBI).state_dict(), ALIBI, tmp_path / "out")
    modes = {path.name: path.stat().st_mode for path in (tmp_path / "out").iterdir()}
    assert modes["model.safetensors"] == modes["config.json"]


def test_an_earlier_export_is_replaced_and_other_folders_are_not_touched(tmp_path):
    export_model(random_model(SMALL).state_dict(), SMALL, tmp_path / "out")
    export_model(random_model(ALIBI).state_dict(), ALIBI, tmp_path / "out")
    assert import_model(tmp_path / "out")[0] == ALIBI and [path.name for path in tmp_path.iterdir()] == ["out"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(ExportError, match=r"exists and is not an earlier export, because it has no export\.json that"):
        export_model(random_model(SMALL).state_dict(), SMALL, tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "years of work"


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "vocab.json"])
def test_an_export_that_somebody_has_changed_is_theirs(name, tmp_path):
    weights = random_model(SMALL).state_dict()
    export_model(weights, SMALL, tmp_path / "out")
    file = tmp_path / "out" / name
    file.write_bytes((file.read_bytes() if file.exists() else b"") + b" ")
    with pytest.raises(ExportError) as error:
        export_model(weights, SMALL, tmp_path / "out")
    assert str(error.value) == (
        f"{tmp_path / 'out'}: exists and is not an earlier export, because {name} is not what an export wrote; give "
        "another folder or remove this one"
    )
    assert file.read_bytes().endswith(b" ") and [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_model_that_others_saved_under_the_same_names_is_never_replaced(tmp_path):
    export_model(random_model(SMALL).state_dict(), SMALL, tmp_path / "out")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    theirs.lm_head.weight.data += 1  # trained further
    theirs.save_pretrained(tmp_path / "out")
    theirs.save_pretrained(tmp_path / "theirs")
    for folder in ("out", "theirs"):
        weights = (tmp_path / folder / "model.safetensors").read_bytes()
        with pytest.raises(ExportError, match="exists and is not an earlier export"):
            export_model(random_model(SMALL).state_dict(), SMALL, tmp_path / folder)
        assert (tmp_path / folder / "model.safetensors").read_bytes() == weights


def in_a_process_of_its_own(function) -> int:
    """Its exit status."""
    if not (child := os.fork()):
        with contextlib.suppress(BaseException):
            function()
        os._exit(1)
    return os.waitpid(child, 0)[1]


@pytest.mark.fault
@pytest.mark.parametrize("num_renames", [0, 1, 2])
def test_an_export_killed_at_a_rename_loses_neither_model(num_renames, tmp_path):
    first, second = random_model(ALIBI).state_dict(), random_model(ALIBI, seed=1).state_dict()
    export_model(first, ALIBI, tmp_path / "out")
    rename, done = Path.rename, []

    def killing(self, target):
        if len(done) == num_renames:
            os.kill(os.getpid(), signal.SIGKILL)
        done.append(rename(self, target))

    def replace_it():
        Path.rename = killing
        shutil.rmtree = lambda *_args, **_options: len(done) == 2 and os.kill(os.getpid(), signal.SIGKILL)
        export_model(second, ALIBI, tmp_path / "out")

    assert in_a_process_of_its_own(replace_it) == signal.SIGKILL
    assert (tmp_path / "out").exists() == (num_renames != 1)
    with pytest.raises(RuntimeError), published(tmp_path / "out"):  # the next export fails while it writes
        raise RuntimeError
    name = "transformer.wte.weight"
    expected = second if num_renames == 2 else first
    assert torch.equal(import_model(tmp_path / "out")[1][name], expected[name])
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_of_two_exports_to_one_folder_the_second_is_refused(tmp_path):
    with published(tmp_path / "out") as draft:
        write_json(draft / "config.json", {})
        with pytest.raises(ExportError, match="out: another export is writing it; wait for that one"):
            export_model(random_model(SMALL).state_dict(), SMALL, tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"config.json", "export.json"}


# --------------------------------------------------------------------------------------------------- imports


def test_a_pickled_folder_is_refused_by_name(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mpt"}))
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ExportError, match=r"pytorch_model\.bin is a pickle, which can run code"):
        import_model(tmp_path)


@pytest.mark.parametrize(("kind", "shown"), [("bloom", "'bloom'"), ([], "[]")])
def test_a_type_that_is_not_ours_is_refused_with_those_that_are(kind, shown):
    with pytest.raises(ExportError) as error:
        convert_from_hugging_face({}, {"model_type": kind}, "folder")
    expected = "expected mpt, gpt2, llama, mistral, qwen2 or qwen3"
    assert str(error.value) == f"folder: model_type {shown} cannot be read; {expected}"


def test_a_layout_of_another_family_names_the_companion_before_weights_are_read(tmp_path, monkeypatch):
    leave_out_companions(monkeypatch)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ConfigError) as error:
        import_model(tmp_path)
    name = "folders of GPT-2, Llama, Mistral and Qwen"
    assert str(error.value) == f"{tmp_path}: {name}: needs the companion llmfoundry_formats"


def test_an_mpt_that_transformers_made_and_saved_computes_the_same_here(tmp_path):
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(
        MptConfig(d_model=48, n_heads=4, n_layers=3, max_seq_len=32, vocab_size=97)
    ).eval()
    assert_computes_the_same(theirs, tmp_path)


def test_a_damaged_file_is_named(tmp_path):
    export_model(random_model(ALIBI).state_dict(), ALIBI, tmp_path / "out")
    weights = tmp_path / "out" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ExportError, match=r"model\.safetensors: damaged"):
        import_model(tmp_path / "out")


def test_what_llama_3_does_to_angles_changes_logits():
    """So that agreement with transformers says something."""
    config = LAYOUTS["llama-3"]
    model, plain = random_model(config), MPT(with_scaling(LLAMA, type="no_scaling"))
    plain.load_state_dict(model.state_dict())
    tokens_bt = random_tokens(config)
    assert (model(tokens_bt) - plain(tokens_bt)).abs().max() > 0.1


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.float8_e4m3fn, torch.complex64])
def test_weights_that_are_packed_are_not_taken_for_numbers(dtype):
    hf_state = to_hugging_face(random_model(ALIBI))
    name = "transformer.blocks.1.ffn.up_proj.weight"
    with pytest.raises(ExportError) as error:
        convert_from_hugging_face(
            {**hf_state, name: hf_state[name].to(dtype)}, huggingface.build_hf_config(ALIBI), "folder"
        )
    kind = str(dtype).removeprefix("torch.")
    assert str(error.value) == f"folder: tensor {name} is {kind}; expected fp32, bf16 or fp16"


@pytest.mark.parametrize("weight_map", [None, [], "x", {"a": None}, {"a": ["x"]}])
def test_an_index_that_names_no_files_is_refused(weight_map, tmp_path):
    export_model(random_model(ALIBI).state_dict(), ALIBI, tmp_path / "out", max_shard_bytes=40_000)
    index = tmp_path / "out" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ExportError) as error:
        import_model(tmp_path / "out")
    assert str(error.value) == f"{index}: weight_map gives no file for each tensor; copy the file again from its source"


def test_json_of_any_depth_is_refused_in_one_line(tmp_path):
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(ExportError, match=r"config\.json: cannot be read as JSON: "):
        import_model(tmp_path)


def test_a_head_that_should_be_the_embedding_is_dropped_or_refused():
    model = random_model(ALIBI)
    hf_state = to_hugging_face(model)
    head = hf_state["transformer.wte.weight"].clone()
    _, state_dict = convert_from_hugging_face({**hf_state, "lm_head.weight": head}, huggingface.build_hf_config(ALIBI))
    assert "lm_head.weight" not in state_dict
    with pytest.raises(ExportError, match=r"lm_head\.weight differs from the input embedding"):
        convert_from_hugging_face({**hf_state, "lm_head.weight": head + 1}, huggingface.build_hf_config(ALIBI))


FOUNDRY_SIZES = {
    "model_type": "mpt",
    "d_model": 48,
    "n_heads": 4,
    "n_layers": 3,
    "max_seq_len": 32,
    "vocab_size": 97,
    "norm_eps": 1e-5,
}
"""SMALL's, as the config.json of an LLM Foundry folder has them."""

FOUNDRY = {
    **FOUNDRY_SIZES,
    "learned_pos_emb": False,
    "norm_type": "rmsnorm",
    "no_bias": True,
    "attention_bias": False,
    "embedding_fraction": 0.5,
    "tie_word_embeddings": False,
    "attn_config": {
        "attn_type": "grouped_query_attention",
        "kv_n_heads": 2,
        "attn_impl": "flash",
        "fused_qkv": False,
        "qk_gn": True,
        "sliding_window_size": 8,
        "attn_uses_sequence_id": True,
        "attn_temperature_tuning": {"floor_scale": 8192, "attn_scale": 0.0},
        "rope": True,
        "rope_theta": 500,
        "rope_impl": "hf",
        "rope_dail_config": {"type": "original", "pos_idx_in_fp32": True, "xpos_scale_base": 512},
        "rope_hf_config": {
            "type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
        "kv_dim": None,
    },
    "ffn_config": {"ffn_type": "mptglu", "ffn_hidden_size": 80, "ffn_act_fn": {"name": "silu"}, "fc_type": "torch"},
}


def test_llm_foundry_folders_keep_biases_and_learned_positions():
    config = replace(SMALL, attn_config=AttentionConfig(qk_ln=True), logit_scale="inv_sqrt_d_model")
    model = random_model(config)
    foundry = {
        **FOUNDRY_SIZES,
        "no_bias": False,
        "logit_scale": "inv_sqrt_d_model",
        "attn_config": {"attn_type": "multihead_attention", "attn_impl": "flash", "alibi": False, "qk_ln": True},
        "ffn_config": {"ffn_type": "mptmlp"},
    }
    imported_config, state_dict = convert_from_hugging_face(model.state_dict(), foundry)
    assert imported_config == config
    MPT(imported_config).load_state_dict(state_dict)


@pytest.mark.parametrize("norms", [{}, {"norm_type": "rmsnorm", "norm_eps": 1e-2}], ids=["default", "its own"])
@pytest.mark.parametrize("kind", ["qk_ln", "qk_gn"])
def test_norms_of_q_and_k_in_llm_foundry_folders_do_not_follow_the_models(kind, norms):
    config = replace(SMALL, norm_type="rmsnorm", norm_eps=1e-6, attn_config=AttentionConfig(**{kind: True}, **norms))
    model = random_model(config)
    foundry = {**FOUNDRY_SIZES, "norm_type": "rmsnorm", "norm_eps": 1e-6, "attn_config": {kind: True, **norms}}
    imported_config, _ = convert_from_hugging_face(model.state_dict(), foundry)
    assert imported_config == config
    norm = model.transformer.blocks[0].attn.q_ln
    assert (norm.bias is None, norm.eps) == ((True, 1e-2) if norms else (False, 1e-5))


@pytest.mark.parametrize(("architecture", "has_biases"), [("MptForCausalLM", False), ("MPTForCausalLM", True)])
def test_a_config_that_lacks_no_bias_has_its_writers_default(architecture, has_biases):
    config = replace(SMALL, no_bias=not has_biases, attn_config=AttentionConfig(alibi=True))
    foundry = {**FOUNDRY_SIZES, "architectures": [architecture], "attn_config": {"alibi": True}}
    if architecture == "MptForCausalLM":
        foundry["layer_norm_epsilon"] = foundry.pop("norm_eps")
    imported_config, _ = convert_from_hugging_face(random_model(config).state_dict(), foundry)
    assert imported_config.no_bias is not has_biases


def test_rope_in_an_llm_foundry_folder_is_dails_unless_said_and_has_no_scaling():
    attention = {"rope": True, "rope_hf_config": {"type": "linear", "factor": 4.0}}
    model = random_model(replace(SMALL, learned_pos_emb=False))
    foundry = {**FOUNDRY_SIZES, "learned_pos_emb": False, "attn_config": attention}
    config, _ = convert_from_hugging_face(model.state_dict(), foundry)
    assert (config.attn_config.rope_impl, config.attn_config.rope_hf_config) == ("dail", RopeScaling())
    attention["rope_impl"] = "hf"
    config, _ = convert_from_hugging_face(model.state_dict(), foundry)
    assert config.attn_config.rope_hf_config == RopeScaling(type="linear", factor=4.0)


def test_llm_foundry_folders_of_the_whole_family_are_read():
    attention = AttentionConfig(
        attn_type="grouped_query_attention",
        kv_n_heads=2,
        fused_qkv=False,
        qk_gn=True,
        sliding_window_size=8,
        attn_uses_sequence_id=True,
        rope=True,
        rope_theta=500,
        rope_impl="hf",
        rope_hf_config=RopeScaling(type="llama3", factor=8.0, original_max_position_embeddings=16),
    )
    ffn = FFNConfig(ffn_type="mptglu", ffn_hidden_size=80, ffn_act_fn=FFNActivation(name="silu"))
    config = replace(
        SMALL,
        no_bias=True,
        norm_type="rmsnorm",
        learned_pos_emb=False,
        embedding_fraction=0.5,
        tie_word_embeddings=False,
        attn_config=attention,
        ffn_config=ffn,
    )
    weights = random_model(config).state_dict()
    imported_config, state_dict = convert_from_hugging_face(weights, FOUNDRY)
    assert imported_config == config and state_dict.keys() == weights.keys()


@pytest.mark.parametrize(
    ("block", "change", "message"),
    [
        ("attn_config", {"rope_hf_config": {"type": "yarn"}}, 'attn_config.rope_hf_config.type is "yarn"'),
        ("attn_config", {"rope_impl": "dail", "rope_dail_config": {"type": "xpos"}}, 'rope_dail_config.type is "xpos"'),
        ("attn_config", {"attn_logit_softcapping": 30.0}, "attn_config.attn_logit_softcapping is 30.0"),
        ("attn_config", {"attn_temperature_tuning": {"attn_scale": 0.1}}, "attn_temperature_tuning.attn_scale is 0.1"),
        ("attn_config", {"kv_n_heads": None}, "kv_n_heads is null"),
        ("ffn_config", {"ffn_type": "mb_dmoe"}, 'ffn_config.ffn_type is "mb_dmoe"'),
        ("ffn_config", {"ffn_act_fn": {"name": "tanh"}}, 'ffn_config.ffn_act_fn.name is "tanh"'),
        (None, {"attention_bias": True}, "attention_bias is true"),
        (None, {"head_dim": 16}, "head_dim is 16"),
        (None, {"n_layers": 0}, "n_layers is 0"),
    ],
)
def test_what_llm_foundry_has_and_we_have_not_is_named(block, change, message):
    foundry = {**FOUNDRY, **(change if block is None else {block: {**FOUNDRY[block], **change}})}
    with pytest.raises(ExportError) as error:
        convert_from_hugging_face({}, foundry, "folder")
    assert f"{message} in config.json; " in str(error.value)


def test_heads_that_do_not_divide_one_another_are_refused():
    foundry = {**FOUNDRY, "attn_config": {**FOUNDRY["attn_config"], "kv_n_heads": 3}}
    with pytest.raises(
        ExportError, match=r"folder: config\.json describes a model that cannot be: .*kv_n_heads: 3 does"
    ):
        convert_from_hugging_face({}, foundry, "folder")
