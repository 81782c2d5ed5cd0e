"""A folder of our model types -> the model that is there, or a refusal: never another, and never a folder's code."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from llmfoundry_lite.config.model_schema import AttentionConfig, ModelConfig
from llmfoundry_lite.convert.huggingface import export_model
from llmfoundry_lite.evaluation.models import TreeModel
from tests.helpers.folders import VOCAB, load, refusal, write_foundry
from tests.helpers.models import normal_model
from tests.helpers.present import leave_out_companions

CPU = torch.device("cpu")
PLAIN = ModelConfig(d_model=16, n_heads=2, n_layers=4, max_seq_len=32, vocab_size=VOCAB)
TOKENS_BT = torch.arange(24)[None] * 13 % VOCAB


@pytest.mark.parametrize(
    "config",
    [
        PLAIN,
        replace(PLAIN, attn_config=AttentionConfig(rope=True)),
        replace(PLAIN, attn_config=AttentionConfig(alibi=True, qk_ln=True)),
        replace(PLAIN, attn_config=AttentionConfig(alibi=True), norm_type="rmsnorm", no_bias=True),
        replace(PLAIN, attn_config=AttentionConfig(alibi=True, sliding_window_size=4), no_bias=True),
        replace(PLAIN, attn_config=AttentionConfig(alibi=True), logit_scale=0.3, no_bias=True),
    ],
    ids=["learned positions", "RoPE", "qk_ln", "rmsnorm", "window", "logit_scale"],
)
def test_an_llm_foundry_folder_is_evaluated_as_the_model_it_describes(config, folder):
    model = normal_model(config)
    write_foundry(folder, model)
    loaded = load(folder)
    assert isinstance(loaded, TreeModel) and loaded.model.config == config
    assert torch.equal(loaded.model(TOKENS_BT), model(TOKENS_BT))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0 in config.json; this model only has null"),
        (
            {"attn_config": {"attn_logit_softcapping": 50.0}},
            "attn_config.attn_logit_softcapping is 50.0 in config.json",
        ),
        ({"logits_multiplier": 2}, "logits_multiplier is 2 in config.json, which is not known here and may change"),
        ({"attn_config": {"rope_factors": [1]}}, "attn_config.rope_factors is [1] in config.json, which is not known"),
        ({"ffn_config": 3}, "ffn_config is 3 in config.json; expected an object"),
        ({"n_layers": 3}, "tensor transformer.blocks.3."),
        ({"n_layers": 5}, "tensor transformer.blocks.4.norm_1.weight is missing"),
        ({"architectures": ["MptForCausalLM"]}, "attn_config.alibi is false in config.json; this model only has true"),
        (
            {"architectures": ["MptForCausalLM"], "attn_config": {"alibi": True}, "no_bias": True, "norm_eps": 0.1},
            "norm_eps is 0.1 in config.json; this model only has 1e-05",
        ),
        ({"architectures": ["MPTForTokens"]}, 'architectures is ["MPTForTokens"] in config.json; this model only has '),
        ({"auto_map": {"AutoModelForCausalLM": "mine.Mine"}}, "auto_map.AutoModelForCausalLM is 'mine.Mine' in config"),
        ({"layer_norm_epsilon": 1e-6}, "norm_eps is 1e-05 in config.json; this model only has 1e-06"),
        ({"quantization_config": {"bits": 4}}, 'quantization_config is {"bits": 4} in config.json, which is not known'),
    ],
)
def test_what_a_folder_of_our_types_says_is_understood_or_refused_by_name(changes, message, folder):
    write_foundry(folder, normal_model(PLAIN), **changes)
    assert refusal(folder).startswith(f"{folder}: {message}")


def test_weights_are_those_of_safetensors_where_both_are_there(folder):
    model = normal_model(PLAIN)
    write_foundry(folder, model)
    torch.save({}, folder / "pytorch_model.bin")
    found = load(folder).model.state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in load_file(folder / "model.safetensors").items())


def test_two_sets_of_weights_or_an_adapter_beside_them_are_refused(tmp_path, tokenizer_folder):
    folder = tmp_path / "model"
    config = replace(PLAIN, attn_config=AttentionConfig(alibi=True), no_bias=True)
    weights = normal_model(config).state_dict()
    export_model(weights, config, folder, tokenizer_folder=tokenizer_folder, max_shard_bytes=4_000)
    assert isinstance(load(folder), TreeModel)
    save_file(weights, folder / "model.safetensors")
    assert "holds model.safetensors and model.safetensors.index.json, which names other files" in refusal(folder)
    (folder / "model.safetensors").unlink()
    first, *_, last = sorted(folder.glob("model-*.safetensors"))
    tensors = load_file(first)
    save_file({**load_file(last), **{name: tensor + 1 for name, tensor in tensors.items()}}, last)
    assert f"{min(tensors)} is in {last.name} and in another file" in refusal(folder)
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "gpt2"}')
    assert "adapter_config.json says that an adapter belongs to the model, which is not read here" in refusal(folder)


def test_another_type_names_the_companion_that_runs_it(folder, monkeypatch):
    leave_out_companions(monkeypatch)
    (folder / "config.json").write_text('{"model_type": "gpt_neox"}')
    assert refusal(folder).endswith("; causal models of other types: needs the companion llmfoundry_formats")
