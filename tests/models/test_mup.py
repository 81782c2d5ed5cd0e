"""muP in the model: initial weights, multipliers, and that nothing at all changes at the base width."""

from dataclasses import replace

import pytest
import torch

from llmfoundry_lite.config.model_schema import AttentionConfig, FFNConfig, InitConfig, ModelConfig
from llmfoundry_lite.config.mup import MupConfig
from llmfoundry_lite.errors import ConfigError
from llmfoundry_lite.models.initialise import initialise_weights
from llmfoundry_lite.models.mpt import MPT
from llmfoundry_lite.models.mup import kind_of
from llmfoundry_lite.models.own_parts import find_owner
from llmfoundry_lite.own_code import trust_code
from tests.helpers.models import FAMILY, random_tokens

BASE = ModelConfig(d_model=64, n_heads=4, n_layers=2, max_seq_len=32, vocab_size=97)
MUP = MupConfig(base_width=64)
WIDE = replace(BASE, d_model=256, n_heads=16, mup=MUP)
SCHEMES = "kaiming_normal_ kaiming_uniform_ xavier_normal_ xavier_uniform_ small_init_ neox_init_ baseline_ default_"


def initialised(config: ModelConfig) -> MPT:
    model = MPT(config)
    initialise_weights(model, 7)
    return model.eval()


def kind(model: MPT, name: str) -> str:
    return kind_of(name, model.get_parameter(name).ndim, find_owner(model, name))


def init_of(scheme: str) -> InitConfig:
    return InitConfig(name=scheme, init_std=0.02 if scheme == "baseline_" else None)


@pytest.mark.parametrize("case", FAMILY)
def test_at_the_base_width_every_bit_is_that_of_a_model_without_mup(case):
    plain = initialised(FAMILY[case])
    same = initialised(replace(FAMILY[case], mup=MupConfig(base_width=FAMILY[case].d_model)))
    for ours, theirs in zip(same.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    tokens_bt = random_tokens(plain.config)
    assert torch.equal(same(tokens_bt), plain(tokens_bt))


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("scheme", SCHEMES.split())
def test_hidden_matrices_shrink_with_the_root_of_the_width_and_nothing_else_does(scheme, tied):
    options = {"init_config": init_of(scheme), "tie_word_embeddings": tied}
    base = initialised(replace(BASE, **options))
    wide = initialised(replace(WIDE, **options))
    for name, tensor in wide.named_parameters():
        factor = 0.5 if kind(wide, name) == "hidden" else 1
        expected = factor * base.get_parameter(name).std().item()
        assert tensor.std().item() == pytest.approx(expected, rel=0.15), name


def test_kinds_of_all_parameters():
    model = MPT(replace(WIDE, tie_word_embeddings=False))
    kinds = {name: kind(model, name) for name, _ in model.named_parameters()}
    hidden = {name for name, kind in kinds.items() if kind == "hidden"}
    assert {name.split("blocks.")[1][2:] for name in hidden} == {
        "attn.Wqkv.weight", "attn.out_proj.weight", "ffn.up_proj.weight", "ffn.down_proj.weight"
    }  # fmt: skip
    assert kinds["transformer.wte.weight"] == kinds["transformer.wpe.weight"] == "input"
    assert kinds["lm_head.weight"] == "output"
    assert all(name.endswith("bias") or "norm" in name for name, kind in kinds.items() if kind == "vector")


def test_logits_and_scores_are_divided_relative_to_the_base_model():
    assert WIDE.logit_multiplier == 0.25 and WIDE.softmax_scale is None
    assert replace(WIDE, logit_scale=3.0).logit_multiplier == 0.75
    assert replace(WIDE, logit_scale="inv_sqrt_d_model").logit_multiplier == 0.25 / 8

    # Four heads that are four times as wide: 1 / head dimension, and equal to 1 / sqrt at the base.
    wider = replace(WIDE, n_heads=4, mup=replace(MUP, base_head_dim=16))
    assert wider.softmax_scale == 0.25 * 16 / 64
    scaled = replace(wider, attn_config=AttentionConfig(softmax_scale=0.5))
    assert scaled.softmax_scale == 0.5 * 16 / 64
    assert replace(WIDE, attn_config=AttentionConfig(softmax_scale=0.5)).softmax_scale == 0.5


def test_multipliers_are_what_the_forward_pass_computes():
    model = initialised(replace(WIDE, mup=replace(MUP, embedding_mult=4.0), tie_word_embeddings=False))
    plain = MPT(replace(WIDE, mup=None, tie_word_embeddings=False)).eval()
    state = dict(model.state_dict())
    state["transformer.wte.weight"] = state["transformer.wte.weight"] * 4
    state["transformer.wpe.weight"] = state["transformer.wpe.weight"] * 4
    plain.load_state_dict(state)
    tokens_bt = random_tokens(model.config)
    assert torch.equal(model(tokens_bt), plain(tokens_bt) * 0.25)


def test_a_base_model_without_whole_heads_is_refused_and_named():
    assert list(replace(WIDE, mup=replace(MUP, base_width=72)).problems()) == [
        "mup.base_head_dim: the base model, of width 72, has no whole number of heads of 16; give the width of its "
        "heads"
    ]
    assert not list(replace(WIDE, mup=MupConfig(base_width=72, base_head_dim=18)).problems())


PARTS = """
import torch
from torch import nn

class Ffn(nn.Module):
    def __init__(self, d_model, expansion_ratio, device=None, bias=True):
        super().__init__()
        self.up = nn.Linear(d_model, 2 * d_model, bias=bias, device=device)
        self.down = nn.Linear(2 * d_model, d_model, bias=bias, device=device)
    def forward(self, x):
        return self.down(self.up(x).relu())

class Kinds(Ffn):
    def mup_kind(self, name):
        return "hidden" if name.endswith("weight") else None

class Wrong(Ffn):
    def mup_kind(self, name):
        return "inputs"

class Through8(nn.Module):
    # From the width to 8 numbers and back.
    def __init__(self, d_model, expansion_ratio, device=None, bias=True):
        super().__init__()
        self.read = nn.Linear(d_model, 8, bias=bias, device=device)
        self.write = nn.Linear(8, d_model, bias=bias, device=device)
    def forward(self, x):
        return self.write(self.read(x))
    def mup_kind(self, name):
        return {"read.weight": "output", "write.weight": "input"}.get(name)
"""


@pytest.fixture
def parts(tmp_path, monkeypatch):
    (tmp_path / "mup_parts.py").write_text(PARTS)
    monkeypatch.syspath_prepend(tmp_path)
    names = {name: f"python:mup_parts:{name}" for name in ("Ffn", "Kinds", "Wrong", "Through8")}
    trust_code(names.values())
    return names


def test_a_part_of_ones_own_says_how_its_matrices_depend_on_the_width(parts):
    with pytest.raises(ConfigError) as error:
        MPT(replace(WIDE, ffn_config=FFNConfig(ffn_type=parts["Ffn"])))
    assert str(error.value) == (
        "model.mup: does not know how up.weight of python:mup_parts:Ffn (model.ffn_config.ffn_type) depends on the "
        "width; give Ffn a method mup_kind(name) that returns 'hidden' for a matrix from width to width, and 'input' "
        "for one whose inputs do not grow with the width"
    )
    with pytest.raises(
        ConfigError, match=r"mup_kind\('up.weight'\) returns 'inputs', expected hidden, input, output or vector"
    ):
        MPT(replace(WIDE, ffn_config=FFNConfig(ffn_type=parts["Wrong"])))

    config = replace(WIDE, ffn_config=FFNConfig(ffn_type=parts["Kinds"]))
    wide, base = initialised(config), initialised(replace(config, d_model=64, n_heads=4))
    name = "transformer.blocks.0.ffn.up.weight"
    assert kind(wide, name) == "hidden" and kind(wide, name.replace("weight", "bias")) == "vector"
    assert (wide.get_parameter(name).std() / base.get_parameter(name).std()).item() == pytest.approx(0.5, rel=0.05)


@pytest.mark.parametrize("scheme", SCHEMES.split())
def test_inputs_and_outputs_of_a_part_are_drawn_as_in_the_base_model(parts, scheme):
    config = replace(WIDE, ffn_config=FFNConfig(ffn_type=parts["Through8"]), init_config=init_of(scheme))
    wide, base = initialised(config), initialised(replace(config, d_model=64, n_heads=4))
    for name in ("read.weight", "write.weight"):
        stds = [model.get_parameter(f"transformer.blocks.0.ffn.{name}").std().item() for model in (wide, base)]
        assert stds[0] == pytest.approx(stds[1], rel=0.15)
