"""A name -> the model that is there, or a refusal: never another model, and never a folder's own code."""

import io
import json
import pickle
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    RobertaConfig,
    RobertaForCausalLM,
    XLNetConfig,
    XLNetLMHeadModel,
)

from llmfoundry_lite.config.schema import AttentionConfig, ModelConfig
from llmfoundry_lite.convert.huggingface import export_model
from llmfoundry_lite.data.tokenizer import load_tokenizer, train_tokenizer
from llmfoundry_lite.errors import DataError, UserError
from llmfoundry_lite.evaluation.models import PlainModel, TreeModel, _sees_ahead, find_subject, load_subject
from llmfoundry_lite.models.mpt import MPT

CPU = torch.device("cpu")
VOCAB = 320
PLAIN = ModelConfig(d_model=16, n_heads=2, n_layers=4, max_seq_len=32, vocab_size=VOCAB)
GPT_NEO_X = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 32,
}
TOKENS_BT = torch.arange(24)[None] * 13 % VOCAB


def random_model(config: ModelConfig) -> MPT:
    torch.manual_seed(0)
    model = MPT(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(["the cat sat on a mat"] * 3, 300).save(folder)
    return folder


@pytest.fixture
def folder(tmp_path, tokenizer_folder) -> Path:
    """With a tokenizer, and no model yet."""
    load_tokenizer(tokenizer_folder).save(tmp_path / "model")
    return tmp_path / "model"


def write_foundry(folder: Path, model: MPT, **changes) -> None:
    """As LLM Foundry's checkpointer has it: a pickle, and a config.json that names code of its own."""
    code = {"AutoConfig": "configuration_mpt.MPTConfig", "AutoModelForCausalLM": "modeling_mpt.MPTForCausalLM"}
    marks = {"model_type": "mpt", "architectures": ["MPTForCausalLM"], "auto_map": code, "init_device": "cpu"}
    (folder / "config.json").write_text(json.dumps({**asdict(model.config), **marks, **changes}))
    torch.save(model.state_dict(), folder / "pytorch_model.bin")


def edit_config(folder: Path, **changes) -> None:
    hf_config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**hf_config, **changes}))


def load(folder: Path):
    return load_subject(str(folder), device=CPU).model


def refusal(folder: Path) -> str:
    with pytest.raises(UserError) as error:
        load(folder)
    assert "\n" not in str(error.value)
    return str(error.value)


# ------------------------------------------------------------------------------------------------- our model types


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
def test_a_pickled_llm_foundry_folder_is_evaluated_as_the_model_it_describes(config, folder):
    model = random_model(config)
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
@pytest.mark.parametrize("suffix", ["bin", "safetensors"])
def test_what_a_folder_of_our_types_says_is_understood_or_refused_by_name(changes, message, suffix, folder):
    model = random_model(PLAIN)
    write_foundry(folder, model, **changes)
    if suffix == "safetensors":
        save_file(model.state_dict(), folder / "model.safetensors")
        (folder / "pytorch_model.bin").unlink()
    assert refusal(folder).startswith(f"{folder}: {message}")


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_softcap_that_these_types_do_not_have_is_refused_before_weights_are_read(kind, folder):
    attention = AttentionConfig(rope=kind == "llama")
    config = replace(PLAIN, attn_config=attention, no_bias=True)
    if kind == "llama":
        config = replace(config, norm_type="rmsnorm", ffn_config=replace(config.ffn_config, ffn_type="mptglu"))
    model = random_model(config)
    out = folder / "out"
    export_model(model.state_dict(), config, out, tokenizer_folder=folder)
    assert torch.equal(load(out).model(TOKENS_BT), model(TOKENS_BT))
    edit_config(out, final_logit_softcapping=30.0)
    with pytest.raises(UserError, match=r"final_logit_softcapping is 30\.0 in config\.json, which is not known here"):
        find_subject(str(out), device=CPU)


def test_ropes_that_contradict_each_other_are_refused(folder):
    config = replace(PLAIN, attn_config=AttentionConfig(rope=True), no_bias=True, norm_type="rmsnorm")
    config = replace(config, ffn_config=replace(config.ffn_config, ffn_type="mptglu"))
    export_model(random_model(config).state_dict(), config, folder / "out", tokenizer_folder=folder)
    edit_config(folder / "out", rope_scaling={"rope_type": "linear", "factor": 2.0})
    assert refusal(folder / "out").endswith("rope_parameters and rope_scaling differ in rope_type in config.json")


class Opens:
    """A pickle of this creates a file."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return io.open, (str(self.path), "w")


def test_a_pickle_of_more_than_tensors_is_refused_and_not_run(folder, tmp_path):
    model = random_model(PLAIN)
    write_foundry(folder, model)
    torch.save({**model.state_dict(), "more": Opens(tmp_path / "ran")}, folder / "pytorch_model.bin")
    message = refusal(folder)
    assert "pytorch_model.bin: a pickle that holds more than tensors (io.open)" in message
    assert "llmfoundry-lite checkpoint import FOLDER OUT --trust-pickle" in message
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Opens(tmp_path / "ran"), protocol=2))
    assert "pytorch_model.bin: " in refusal(folder) and not (tmp_path / "ran").exists()


# ------------------------------------------------------------------------------------------- transformers' own types


@pytest.fixture
def neox(folder) -> Path:
    torch.manual_seed(0)
    GPTNeoXForCausalLM(GPTNeoXConfig(**GPT_NEO_X)).save_pretrained(folder)
    return folder


def test_a_causal_model_of_another_type_runs_as_transformers_has_it(neox):
    assert isinstance(load(neox), PlainModel)


UNUSUAL = {
    "openai-gpt": {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64},
    "mamba": {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
    "gpt_neox": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64},
}
"""Keeps nothing from one token to the next, a state of its own kind, and what most models keep."""


@pytest.mark.parametrize("kind", UNUSUAL)
def test_a_model_writes_what_it_finds_likeliest_whatever_it_keeps_between_tokens(kind):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, vocab_size=97, **UNUSUAL[kind]))
    plain, tokens = PlainModel(model.eval(), torch.device("cpu")), [3, 5, 7, 11, 13]
    written = list(plain.write(tokens, 8))
    for token in written:
        assert token == plain.logits(torch.tensor(tokens), torch.tensor([len(tokens) - 1]))[0].argmax()
        tokens.append(token)


def test_weights_that_transformers_would_ignore_make_up_or_misread_are_refused(neox):
    edit_config(neox, num_hidden_layers=3)
    assert "has weights that its model has no place for: gpt_neox.layers.3." in refusal(neox)
    edit_config(neox, num_hidden_layers=5)
    assert "lacks weights of its model: gpt_neox.layers.4." in refusal(neox)
    edit_config(neox, num_hidden_layers=4, intermediate_size=48)
    assert "is no causal language model that transformers loads: " in refusal(neox)
    edit_config(neox, intermediate_size=32, final_logit_softcapping=30.0)
    assert refusal(neox).endswith(
        "final_logit_softcapping is 30.0 in config.json, and transformers' gpt_neox ignores it; expected a model that "
        "has it"
    )
    edit_config(neox, final_logit_softcapping=None, model_type=None)
    assert refusal(neox).endswith("config.json has no model_type, which says what the weights are of")


def test_weights_that_transformers_would_take_for_others_are_refused(neox):
    weights = load_file(neox / "model.safetensors")
    name = "gpt_neox.layers.1.mlp.dense_h_to_4h.weight"
    for dtype, said in ((torch.int8, "I8"), (torch.float8_e4m3fn, "F8_E4M3")):
        save_file({**weights, name: weights[name].to(dtype)}, neox / "model.safetensors", metadata={"format": "pt"})
        assert refusal(neox) == (
            f"models: {neox}: tensor {name} is {said}, and config.json has no quantization_config; expected F32, BF16, "
            "F16, F64"
        )
    (neox / "model.safetensors").unlink()
    model = GPTNeoXForCausalLM(GPTNeoXConfig(**GPT_NEO_X))
    model.save_pretrained(neox, max_shard_size="6KB")
    first, *_, last = sorted(neox.glob("model-*.safetensors"))
    twice = {**load_file(last), **load_file(first)}
    save_file(twice, last, metadata={"format": "pt"})
    assert f"{min(load_file(first))} is in {last.name} and in another file; it cannot be told which" in refusal(neox)
    save_file(weights, neox / "model.safetensors", metadata={"format": "pt"})
    assert "holds model.safetensors and model.safetensors.index.json, which names other files" in refusal(neox)


def test_a_model_without_a_limit_to_its_length_is_probed_too(folder):
    torch.manual_seed(0)
    config = XLNetConfig(vocab_size=VOCAB, d_model=16, n_layer=2, n_head=2, d_inner=32)
    XLNetLMHeadModel(config).save_pretrained(folder)
    assert "later tokens change its earlier logits" in refusal(folder)


def test_why_transformers_takes_no_config_is_said_whole(neox):
    edit_config(neox, max_position_embeddings="8")
    assert "'max_position_embeddings': TypeError: Field 'max_position_embeddings' expected int" in refusal(neox)


def test_a_model_that_sees_later_tokens_is_refused(folder):
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 32}
    config = RobertaConfig(vocab_size=VOCAB, max_position_embeddings=34, **sizes)
    RobertaForCausalLM(config).save_pretrained(folder)
    assert "later tokens change its earlier logits, so it is no causal language model; its model_type is 'roberta'" in (
        refusal(folder)
    )
    edit_config(folder, is_decoder=True)
    model = load(folder)
    assert isinstance(model, PlainModel) and model.max_seq_len == 32  # two of its 34 positions are of padding


def plain_model(may_see, max_seq_len: int) -> PlainModel:
    """A token's logits are the mean of what it may see: `may_see(t, s)`."""

    class Mean(torch.nn.Module):
        config = GPTNeoXConfig(vocab_size=50, max_position_embeddings=max_seq_len)

        def __init__(self):
            super().__init__()
            self.embedding = torch.nn.Embedding(50, 50)

        def forward(self, input_ids):
            t = torch.arange(input_ids.size(1))
            sight_ts = torch.as_tensor(may_see(t[:, None], t[None])).float()
            return SimpleNamespace(logits=sight_ts / sight_ts.sum(dim=1, keepdim=True) @ self.embedding(input_ids))

    torch.manual_seed(0)
    return PlainModel(Mean(), CPU)


AHEAD = {
    "the next token": lambda t, s: s <= t + 1,
    "all, from the 21st on": lambda t, s: (s <= t) | ((t > 20) & (s > 20)),
    "all, from the 900th on": lambda t, s: (s <= t) | ((t > 900) & (s > 900)),
    "all of its block of 64": lambda t, s: (s <= t) | (s // 64 == t // 64),
    "the first five": lambda t, s: (s <= t) | (s < 5),
    "what is 100 tokens later": lambda t, s: (s <= t) | (s == t + 100),
}


@pytest.mark.parametrize("may_see", AHEAD.values(), ids=AHEAD)
def test_looking_ahead_is_found_wherever_it_begins(may_see):
    assert _sees_ahead(plain_model(may_see, 2048))


@pytest.mark.parametrize("max_seq_len", [1, 2, 3, 40, 5000])
def test_a_model_that_looks_back_is_accepted_at_any_length(max_seq_len):
    assert not _sees_ahead(plain_model(lambda t, s: (s <= t) & (s > t - 30), max_seq_len))
    assert not _sees_ahead(plain_model(lambda t, s: (s <= t) & (s // 32 == t // 32), max_seq_len))
    assert _sees_ahead(plain_model(lambda t, s: s + t > -1, max_seq_len)) == (max_seq_len > 1)


def test_a_model_of_one_position_is_loaded_and_asked(neox):
    edit_config(neox, max_position_embeddings=1)
    assert load(neox).max_seq_len == 1


# ------------------------------------------------------------------------------------------------- a folder's code


CODE = """
from pathlib import Path
Path({path!r}).write_text("ran")
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, PreTrainedTokenizerFast
class MyConfig(GPTNeoXConfig):
    model_type = "mine"
class MyModel(GPTNeoXForCausalLM):
    config_class = MyConfig
class MyTokenizer(PreTrainedTokenizerFast):
    pass
"""


def test_a_folders_own_code_is_never_run_whatever_the_terminal_answers(neox, tmp_path, monkeypatch):
    (neox / "mine.py").write_text(CODE.format(path=str(tmp_path / "ran")))
    code = {"AutoConfig": "mine.MyConfig", "AutoModelForCausalLM": "mine.MyModel"}
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 99))
    edit_config(neox, model_type="mine", auto_map=code)
    message = (
        "needs code of its own (mine.MyConfig, mine.MyModel), which is not run; expected a model that transformers"
    )
    assert message in refusal(neox)
    edit_config(neox, model_type="gpt_neox")  # which transformers has itself
    assert isinstance(load(neox), PlainModel)
    assert not (tmp_path / "ran").exists()


def test_a_tokenizers_own_code_is_never_run(folder, tmp_path, monkeypatch):
    (folder / "mine.py").write_text(CODE.format(path=str(tmp_path / "ran")))
    (folder / "tokenizer.json").rename(folder / "vocab.json")
    tokens = {"tokenizer_class": "MyTokenizer", "auto_map": {"AutoTokenizer": ["mine.MyTokenizer", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps({**tokens, "eos_token": "<|endoftext|>"}))
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 99))
    with pytest.raises(DataError) as error:
        load_tokenizer(folder)
    assert str(error.value) == (
        f"tokenizer {folder} needs code of its own, which is not run; expected a folder with a tokenizer.json"
    )
    assert not (tmp_path / "ran").exists()


def test_weights_are_those_of_safetensors_where_both_are_there(folder):
    model = random_model(PLAIN)
    write_foundry(folder, model)
    save_file(model.state_dict(), folder / "model.safetensors")
    torch.save({}, folder / "pytorch_model.bin")
    found = load(folder).model.state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in load_file(folder / "model.safetensors").items())


def test_two_sets_of_weights_or_an_adapter_beside_them_are_refused(tmp_path, tokenizer_folder):
    folder = tmp_path / "model"
    weights = random_model(PLAIN).state_dict()
    export_model(weights, PLAIN, folder, tokenizer_folder=tokenizer_folder, max_shard_bytes=4_000)
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


def test_an_adapter_of_another_type_is_refused(neox):
    (neox / "adapter_config.json").write_text('{"base_model_name_or_path": "gpt2"}')
    assert "adapter_config.json says that an adapter belongs to the model" in refusal(neox)
