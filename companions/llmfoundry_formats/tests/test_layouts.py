"""Folders of GPT-2, Llama, Mistral and Qwen become our model, or are refused in one line."""

from dataclasses import replace
from operator import attrgetter

import pytest
import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from llmfoundry_lite.config.model_schema import AttentionConfig, ModelConfig
from llmfoundry_lite.convert import huggingface
from llmfoundry_lite.convert.huggingface import build_hf_config, convert_from_hugging_face, export_model
from llmfoundry_lite.errors import ExportError, UserError
from llmfoundry_lite.evaluation.models import locate_model
from tests.helpers.folders import VOCAB, edit_config, load, refusal
from tests.helpers.models import (
    LLAMA,
    QWEN2,
    QWEN3,
    SMALL,
    assert_computes_the_same,
    normal_model,
    random_model,
    to_hugging_face,
    with_attention,
    with_scaling,
)

CPU = torch.device("cpu")
MISTRAL = with_attention(LLAMA, sliding_window_size=8)
PLAIN = ModelConfig(d_model=16, n_heads=2, n_layers=4, max_seq_len=32, vocab_size=VOCAB)
TOKENS_BT = torch.arange(24)[None] * 13 % VOCAB


def test_ntk_scaling_is_read_as_the_theta_that_it_is():
    config = with_scaling(LLAMA, type="ntk", factor=4.0)
    read, _ = convert_from_hugging_face(to_hugging_face(random_model(config)), build_hf_config(config))
    assert read == with_attention(LLAMA, rope_theta=500 * 4.0 ** (12 / 10))


LLAMA_3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 500.0,
}
"""One of a head's six frequencies stays, two are mixed and three are divided."""


IMPOSSIBLE = "config.json describes a model that cannot be: "
ROPE = "rope_parameters"


@pytest.mark.parametrize(
    ("base", "change", "message"),
    [
        (SMALL, {"activation_function": "tanh"}, 'activation_function is "tanh" in config.json; this model only has "'),
        (SMALL, {"n_head": None}, "n_head is null in config.json; expected a whole number"),
        (SMALL, {"n_layer": 2}, "tensor transformer.h.2.ln_1.weight has no place"),
        (SMALL, {"n_layer": 4}, "tensor transformer.h.3.ln_1.weight is missing"),
        (
            SMALL,
            {"n_layer": 10**9},
            "config.json describes another model than its tensors: it has 1,000,000,000 layers, and there are 40",
        ),
        (SMALL, {"n_inner": "x"}, 'n_inner is "x" in config.json; expected a whole number above 0'),
        (SMALL, {"resid_pdrop": None}, IMPOSSIBLE),
        (SMALL, {"embd_pdrop": 1.5}, IMPOSSIBLE),
        (LLAMA, {"attention_bias": True}, "attention_bias is true in config.json and mlp_bias is not; this model has"),
        (
            LLAMA,
            {"mlp_bias": True},
            "mlp_bias is true in config.json and attention_bias is not; this model has both or",
        ),
        (LLAMA, {"head_dim": 16}, "tensor model.layers.0.self_attn.q_proj.weight has shape [48, 48], the model's con"),
        (QWEN3, {"attention_bias": True}, "attention_bias is true in config.json; this model only has false"),
        (QWEN2, {"use_sliding_window": True}, "use_sliding_window is true in config.json; this model only has false"),
        (MISTRAL, {"sliding_window": 0}, "sliding_window is 0 in config.json; expected a whole number above 0"),
        (QWEN2, {"layer_types": ["sliding_attention"] * 3}, "layer_types is ["),
        (
            LLAMA,
            {"hidden_act": "gelu_fast"},
            'hidden_act is "gelu_fast" in config.json; this model only has "silu" or ',
        ),
        (
            LLAMA,
            {ROPE: {"rope_type": "llama3", "factor": 8.0, "rope_theta": 500000.0}},
            f"{ROPE}.low_freq_factor is missing in config.json; rope_type llama3 needs it",
        ),
        (
            LLAMA,
            {ROPE: {"rope_type": "dynamic", "factor": 8.0, "original_max_position_embeddings": 16}},
            f"{ROPE}.original_max_position_embeddings is 16 in config.json; rope_type dynamic does not have it",
        ),
        (
            LLAMA,
            {ROPE: {**LLAMA_3, "low_freq_factor": 4.0}},
            f"{IMPOSSIBLE}model.attn_config.rope_hf_config.high_freq_factor: 4.0",
        ),
        (
            LLAMA,
            {ROPE: None, "rope_scaling": {"type": "yarn", "factor": 8.0}},
            'rope_scaling.rope_type is "yarn" in config.json; this model only has',
        ),
        (LLAMA, {ROPE: {"rope_type": "linear"}}, f"{ROPE}.factor is missing in config.json; rope_type linea"),
        (LLAMA, {"rms_norm_eps": "8"}, f"{IMPOSSIBLE}rms_norm_eps: '8' given, expected a number"),
        (LLAMA, {"rms_norm_eps": -1.0}, f"{IMPOSSIBLE}rms_norm_eps: -1.0 given, expected a number above 0"),
        (
            LLAMA,
            {ROPE: {"rope_theta": float("inf")}},
            f"{IMPOSSIBLE}model.attn_config.rope_theta: inf given, expected a finite",
        ),
        (
            LLAMA,
            {"num_key_value_heads": 4},
            "tensor model.layers.0.self_attn.k_proj.weight has shape [24, 48], the mode",
        ),
        (LLAMA, {"tie_word_embeddings": True}, "lm_head.weight differs from the input embedding, and tie_word_embeddi"),
    ],
)
def test_what_cannot_be_read_is_named_in_one_line(base, change, message):
    hf_config = {**huggingface.build_hf_config(base), **change}
    with pytest.raises(ExportError) as error:
        convert_from_hugging_face(to_hugging_face(random_model(base)), hf_config, "folder")
    assert str(error.value).startswith(f"folder: {message}") and "\n" not in str(error.value)


THEIR_LLAMA = {
    "hidden_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "intermediate_size": 128,
    "max_position_embeddings": 32,
    "vocab_size": 97,
}
THEIR_OWN = {
    "gpt2": GPT2Config(n_embd=48, n_head=4, n_layer=3, n_positions=32, vocab_size=97),
    "llama": LlamaConfig(**THEIR_LLAMA, rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}),
    "llama 3": LlamaConfig(**THEIR_LLAMA, rope_parameters=LLAMA_3),
    "mistral": MistralConfig(**THEIR_LLAMA, sliding_window=6),
    "mistral without a window": MistralConfig(**THEIR_LLAMA, sliding_window=None, head_dim=16),
    "qwen2": Qwen2Config(**THEIR_LLAMA, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**THEIR_LLAMA),
}


@pytest.mark.parametrize("name", THEIR_OWN)
def test_a_model_that_transformers_made_and_saved_computes_the_same_here(name, tmp_path):
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(THEIR_OWN[name]).eval()
    assert_computes_the_same(theirs, tmp_path)


def test_what_config_json_leaves_out_is_transformers_default():
    """Older writers leave out what has the default of their class."""
    for config, keys in (
        (LLAMA, {"rms_norm_eps": "norm_eps", "attention_dropout": "attn_config.attn_pdrop"}),
        (
            SMALL,
            {
                "layer_norm_epsilon": "norm_eps",
                "attn_pdrop": "attn_config.attn_pdrop",
                "resid_pdrop": "resid_pdrop",
                "embd_pdrop": "emb_pdrop",
            },
        ),
    ):
        hf_config = huggingface.build_hf_config(config)
        theirs = CONFIG_MAPPING[hf_config["model_type"]]()
        for key in keys:
            del hf_config[key]
        read, _ = convert_from_hugging_face(to_hugging_face(random_model(config)), hf_config)
        assert {key: attrgetter(ours)(read) for key, ours in keys.items()} == {
            key: getattr(theirs, key) for key in keys
        }


def test_marks_that_only_our_exports_have_are_not_believed_of_others():
    """Norms of transformers are in fp32, and its GPT-2 has positions, also where they are still zeros."""
    hf_config = huggingface.build_hf_config(LLAMA)
    del hf_config["norm_type"]
    assert convert_from_hugging_face(to_hugging_face(random_model(LLAMA)), hf_config)[0].norm_type == "rmsnorm"
    hf_config, state = huggingface.build_hf_config(SMALL), to_hugging_face(random_model(SMALL))
    del hf_config["learned_pos_emb"]
    state["transformer.wpe.weight"] = torch.zeros_like(state["transformer.wpe.weight"])
    assert convert_from_hugging_face(state, hf_config)[0].learned_pos_emb


def test_a_window_that_config_json_leaves_out_is_transformers_default():
    hf_config = huggingface.build_hf_config(MISTRAL)
    del hf_config["sliding_window"]
    config, _ = convert_from_hugging_face(to_hugging_face(random_model(MISTRAL)), hf_config)
    assert config.attn_config.sliding_window_size + 1 == MistralConfig().sliding_window


@pytest.mark.parametrize(
    ("config", "scaling"),
    [
        (with_scaling(LLAMA, type="llama3", factor=8.0, original_max_position_embeddings=64), {}),
        (with_scaling(LLAMA, type="linear", factor=2.0), {"rope_scaling": {"type": "linear", "factor": 2.0}}),
    ],
)
def test_the_older_spelling_of_rope_is_read(config, scaling):
    hf_config = {**huggingface.build_hf_config(config), **scaling}
    del hf_config["rope_parameters"]
    hf_state = to_hugging_face(random_model(LLAMA))
    assert convert_from_hugging_face(hf_state, hf_config)[0] == config


def test_biases_trained_elsewhere_after_our_export_are_kept():
    config = replace(SMALL, no_bias=True)
    hf_state = to_hugging_face(random_model(config))
    hf_state["transformer.ln_f.bias"] = torch.ones(48)
    imported_config, state_dict = convert_from_hugging_face(hf_state, huggingface.build_hf_config(config))
    assert not imported_config.no_bias and state_dict["transformer.norm_f.bias"].sum() == 48


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_softcap_that_these_types_do_not_have_is_refused_before_weights_are_read(kind, folder):
    attention = AttentionConfig(rope=kind == "llama")
    config = replace(PLAIN, attn_config=attention, no_bias=True)
    if kind == "llama":
        config = replace(config, norm_type="rmsnorm", ffn_config=replace(config.ffn_config, ffn_type="mptglu"))
    model = normal_model(config)
    out = folder / "out"
    export_model(model.state_dict(), config, out, tokenizer_folder=folder)
    assert torch.equal(load(out).model(TOKENS_BT), model(TOKENS_BT))
    edit_config(out, final_logit_softcapping=30.0)
    with pytest.raises(UserError, match=r"final_logit_softcapping is 30\.0 in config\.json, which is not known here"):
        locate_model(str(out), device=CPU)


def test_ropes_that_contradict_each_other_are_refused(folder):
    config = replace(PLAIN, attn_config=AttentionConfig(rope=True), no_bias=True, norm_type="rmsnorm")
    config = replace(config, ffn_config=replace(config.ffn_config, ffn_type="mptglu"))
    export_model(normal_model(config).state_dict(), config, folder / "out", tokenizer_folder=folder)
    edit_config(folder / "out", rope_scaling={"rope_type": "linear", "factor": 2.0})
    assert refusal(folder / "out").endswith("rope_parameters and rope_scaling differ in rope_type in config.json")
