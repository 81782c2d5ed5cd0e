"""A causal language model of a type that is not ours: as transformers has it, or a refusal."""

import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

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

from llmfoundry_formats.plain_models import PlainModel, _sees_ahead
from llmfoundry_lite.config.eval_schema import TaskConfig
from llmfoundry_lite.config.model_schema import ModelConfig
from llmfoundry_lite.convert.huggingface import export_model
from llmfoundry_lite.evaluation.harness import evaluate
from llmfoundry_lite.evaluation.models import TreeModel, locate_and_load_model
from llmfoundry_lite.evaluation.results import Results
from tests.helpers.folders import OWN_CODE, VOCAB, edit_config, load, refusal
from tests.helpers.models import normal_model

TEXT = "the cat sat on a mat and the dog ran over a hill to see the sun go down"
GPT_NEO_X: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 32,
}


@pytest.fixture
def neox(folder) -> Path:
    torch.manual_seed(0)
    GPTNeoXForCausalLM(GPTNeoXConfig(**GPT_NEO_X)).save_pretrained(folder)
    return folder


def test_a_model_as_transformers_has_it_gives_the_scores_of_ours(tokenizer_folder, tmp_path):
    model = normal_model(ModelConfig(d_model=16, n_heads=2, n_layers=2, max_seq_len=64, vocab_size=VOCAB), std=0.2)
    folder = tmp_path / "model"
    export_model(model.state_dict(), model.config, folder, tokenizer_folder=tokenizer_folder)
    words = TEXT.split()
    questions = [{"query": words[i], "choices": [words[i + 1], words[i + 2]], "gold": i % 2} for i in range(16)]
    sentences = [{"context": " ".join(words[i : i + 4]), "continuation": words[i + 4]} for i in range(12)]
    tasks = []
    for kind, rows in (("multiple_choice", questions), ("language_modeling", sentences)):
        (tmp_path / f"{kind}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        uri = str(tmp_path / f"{kind}.jsonl")
        tasks.append(TaskConfig(label=kind, icl_task_type=kind, dataset_uri=uri, num_fewshot=[0, 2]))
    ours = locate_and_load_model(str(folder), device=torch.device("cpu"))
    assert isinstance(ours.model, TreeModel)
    plain = PlainModel(AutoModelForCausalLM.from_pretrained(folder).eval(), torch.device("cpu"))
    found, theirs = (
        evaluate(one, ours.tokenizer, tasks, Results(model="a", suite="s", source="")).tasks
        for one in (ours.model, plain)
    )
    assert len(found) == 4
    for name, task in found.items():
        assert theirs[name][task["metric"]] == task[task["metric"]]


def test_a_causal_model_of_another_type_runs_as_transformers_has_it(neox):
    assert isinstance(load(neox), PlainModel)


UNUSUAL: dict[str, dict[str, Any]] = {
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
    written = list(plain.generate(tokens, 8))
    for token in written:
        assert token == plain.logits(torch.tensor([tokens]), torch.tensor([len(tokens) - 1])).argmax()
        tokens.append(token)


def test_a_model_writes_without_cudnns_attention():
    """Which plans anew for each length."""
    is_asked: list[bool] = []
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt_neox", vocab_size=97, **UNUSUAL["gpt_neox"]))
    model.register_forward_pre_hook(lambda *_: is_asked.append(torch.backends.cuda.cudnn_sdp_enabled()))
    assert list(PlainModel(model.eval(), torch.device("cpu")).generate([3, 5], 2))
    assert is_asked == [False, False] and torch.backends.cuda.cudnn_sdp_enabled()


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
    assert (
        f"{min(load_file(first))} is in {last.name} and in another file; it is not clear which of them counts"
        in refusal(neox)
    )
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
    sizes: dict[str, Any] = {
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "hidden_size": 16,
        "intermediate_size": 32,
    }
    config = RobertaConfig(vocab_size=VOCAB, max_position_embeddings=34, **sizes)
    RobertaForCausalLM(config).save_pretrained(folder)
    assert "later tokens change its earlier logits, so it is no causal language model; its model_type is 'roberta'" in (
        refusal(folder)
    )
    edit_config(folder, is_decoder=True)
    model = load(folder)
    assert isinstance(model, PlainModel) and model.max_seq_len == 32  # two of its 34 positions are of padding


def plain_model(attention_mask, max_seq_len: int) -> PlainModel:
    """A token's logits are the mean of what it may see: `attention_mask(t, s)`."""

    class Mean(torch.nn.Module):
        config = GPTNeoXConfig(vocab_size=50, max_position_embeddings=max_seq_len)

        def __init__(self):
            super().__init__()
            self.embedding = torch.nn.Embedding(50, 50)

        def forward(self, input_ids):
            t = torch.arange(input_ids.size(1))
            sight_ts = torch.as_tensor(attention_mask(t[:, None], t[None])).float()
            return SimpleNamespace(logits=sight_ts / sight_ts.sum(dim=1, keepdim=True) @ self.embedding(input_ids))

    torch.manual_seed(0)
    return PlainModel(Mean(), torch.device("cpu"))


AHEAD = {
    "the next token": lambda t, s: s <= t + 1,
    "all, from the 21st on": lambda t, s: (s <= t) | ((t > 20) & (s > 20)),
    "all, from the 900th on": lambda t, s: (s <= t) | ((t > 900) & (s > 900)),
    "all of its block of 64": lambda t, s: (s <= t) | (s // 64 == t // 64),
    "the first five": lambda t, s: (s <= t) | (s < 5),
    "what is 100 tokens later": lambda t, s: (s <= t) | (s == t + 100),
}


@pytest.mark.parametrize("attention_mask", AHEAD.values(), ids=AHEAD)
def test_looking_ahead_is_found_wherever_it_begins(attention_mask):
    assert _sees_ahead(plain_model(attention_mask, 2048))


@pytest.mark.parametrize("max_seq_len", [1, 2, 3, 40, 5000])
def test_a_model_that_looks_back_is_accepted_at_any_length(max_seq_len):
    assert not _sees_ahead(plain_model(lambda t, s: (s <= t) & (s > t - 30), max_seq_len))
    assert not _sees_ahead(plain_model(lambda t, s: (s <= t) & (s // 32 == t // 32), max_seq_len))
    assert _sees_ahead(plain_model(lambda t, s: s + t > -1, max_seq_len)) == (max_seq_len > 1)


def test_a_model_of_one_position_is_loaded_and_asked(neox):
    edit_config(neox, max_position_embeddings=1)
    assert load(neox).max_seq_len == 1


def test_an_adapter_of_another_type_is_refused(neox):
    (neox / "adapter_config.json").write_text('{"base_model_name_or_path": "gpt2"}')
    assert "adapter_config.json says that an adapter belongs to the model" in refusal(neox)


def test_a_folders_own_code_is_never_run_whatever_the_terminal_answers(neox, tmp_path, monkeypatch):
    (neox / "mine.py").write_text(OWN_CODE.format(path=str(tmp_path / "ran")))
    code = {"AutoConfig": "mine.MyConfig", "AutoModelForCausalLM": "mine.MyModel"}
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 99))
    edit_config(neox, model_type="mine", auto_map=code)
    message = "needs its own code (mine.MyConfig, mine.MyModel), which is not run; expected a model that transformers"
    assert message in refusal(neox)
    edit_config(neox, model_type="gpt_neox")  # which transformers has itself
    assert isinstance(load(neox), PlainModel)
    assert not (tmp_path / "ran").exists()


def test_a_model_whose_weights_are_torn_or_missing_is_refused(neox):
    weights = neox / "model.safetensors"
    tensors = load_file(weights)
    save_file({name: tensor for name, tensor in tensors.items() if "final" not in name}, weights, {"format": "pt"})
    assert "model lacks weights of its model: gpt_neox.final_layer_norm.bias and 1 more" in refusal(neox)
    weights.write_bytes(weights.read_bytes()[:100])
    assert "model/model.safetensors: damaged: " in refusal(neox)


def test_a_model_in_bf16_gives_fp32_logits(neox):
    plain = locate_and_load_model(str(neox), device=torch.device("cpu"), precision="bf16").model
    ids = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        hidden = plain.model.gpt_neox(ids).last_hidden_state
        expected = hidden.float() @ plain.model.get_output_embeddings().weight.float().T
        logits = plain.model(ids).logits
    assert hidden.dtype == torch.bfloat16 and logits.dtype == torch.float32
    torch.testing.assert_close(logits, expected)
