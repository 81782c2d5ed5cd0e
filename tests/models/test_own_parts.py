"""Parts of a model that are the user's own code: what builds them, draws them, and what is refused."""

import functools
import math
import re
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from composer.core import Time, Timestamp
from composer.loggers import LoggerDestination
from torch import nn

from llmfoundry_lite import own_code
from llmfoundry_lite.config.load_train import load_train_config
from llmfoundry_lite.config.model_schema import AttentionConfig, FFNConfig, InitConfig, ModelConfig
from llmfoundry_lite.errors import ConfigError, OwnCodeError
from llmfoundry_lite.models.flops import count_flops_per_token, count_parameters
from llmfoundry_lite.models.initialise import initialise_weights
from llmfoundry_lite.models.mpt import MPT, Attention, KeyValueCache
from llmfoundry_lite.models.own_parts import find_own_parts, refuse_random_layers
from llmfoundry_lite.models.parameters import parameter_shapes
from llmfoundry_lite.own_code import call_object, trust_code
from llmfoundry_lite.parallel.exact import ExactSums
from llmfoundry_lite.parallel.fsdp import build_parallel_model
from llmfoundry_lite.ranks.ending import describe_error
from llmfoundry_lite.training.builders import build_own_schedule
from llmfoundry_lite.training.model_counts import describe_own_parts, find_flops_per_token
from tests.helpers.launch import ROOT
from tests.helpers.own_parts import SquaredReLU
from tests.helpers.tiny import tiny_config, write_config

PARTS = "python:tests.helpers.own_parts"
HERE = f"python:{__name__}"
SMALL = ModelConfig(d_model=32, n_heads=4, n_layers=2, max_seq_len=16, vocab_size=96)
TOKENS_BT = torch.arange(16)[None]


@pytest.fixture(autouse=True)
def _only_what_a_test_trusts(monkeypatch):
    """Forget after each test which code it has trusted."""
    monkeypatch.setattr(own_code, "_trusted_names", set())


def build(config: ModelConfig) -> Any:
    """Build a model with its initial weights, as a launch of its user does."""
    trust_code(config.own_parts.values())
    with torch.device("meta"):
        model = MPT(config)
    model.to_empty(device="cpu")
    initialise_weights(model, seed=17)
    return model


def test_a_norm_of_torch_is_the_same_as_ours():
    ours = build(replace(SMALL, norm_type="layernorm"))
    own = build(replace(SMALL, norm_type="python:torch.nn:LayerNorm"))
    for (name, weight), (own_name, own_weight) in zip(ours.state_dict().items(), own.state_dict().items(), strict=True):
        assert name == own_name and torch.equal(weight, own_weight), name
    assert torch.equal(ours(TOKENS_BT), own(TOKENS_BT))


def test_a_norm_gets_its_arguments_and_draws_by_its_own_method():
    model = build(replace(SMALL, norm_type=f"{PARTS}:ScaleNorm", norm_eps=0.5, norm_kwargs={"length": 3.0}))
    norm = model.transformer.blocks[1].norm_2
    assert norm.eps == 0.5 and norm.length.tolist() == [3.0]
    assert 0.01 < norm.tilt.std().item() < 0.03
    assert not torch.equal(norm.tilt, model.transformer.blocks[0].norm_2.tilt)
    model(TOKENS_BT).sum().backward()
    assert all(parameter.grad is not None for parameter in norm.parameters())


def test_norms_of_q_and_k_have_their_own_key():
    attention = AttentionConfig(qk_ln=True, norm_type="python:torch.nn:RMSNorm", norm_eps=0.25)
    model = build(replace(SMALL, attn_config=attention))
    assert isinstance(model.transformer.blocks[0].attn.q_ln, nn.RMSNorm)
    assert model.transformer.blocks[0].attn.q_ln.eps == 0.25
    assert type(model.transformer.norm_f).__name__ == "Norm"


def test_no_bias_removes_the_biases_of_a_norm():
    config = replace(SMALL, norm_type="python:torch.nn:LayerNorm", no_bias=True)
    model = build(config)
    names = dict(model.named_parameters())
    assert "transformer.norm_f.weight" in names and "transformer.norm_f.bias" not in names
    _, *lines = describe_own_parts(config, model)
    assert lines == ["model.norm_type: python:torch.nn:LayerNorm: its bias is removed, because of model.no_bias"]

    with_bias = replace(config, no_bias=False)
    assert len(describe_own_parts(with_bias, build(with_bias))) == 1


def test_a_feed_forward_layer_gets_what_llm_foundry_gives_it():
    ffn = FFNConfig(ffn_type=f"{PARTS}:SquaredReLU", kwargs={"power": 3})
    model = build(replace(SMALL, expansion_ratio=1.5, no_bias=True, ffn_config=ffn))
    layer = model.transformer.blocks[1].ffn
    assert layer.up.weight.shape == (48, 32) and layer.up.bias is None and layer.power == 3
    assert 0.9 <= layer.scale.min().item() < layer.scale.max().item() <= 1.1
    assert layer.up.weight.std().item() == pytest.approx(math.sqrt(2 / 32), rel=0.1)  # kaiming
    assert layer.down.weight.std().item() == pytest.approx(math.sqrt(2 / 48) / 2, rel=0.1)  # and sqrt(2 * 2 blocks)


def test_attention_of_ones_own_decodes_as_it_computes_whole_rows():
    attention = AttentionConfig(attn_type=f"{PARTS}:GatedAttention", rope=True, kwargs={"gate_bias": -1.0})
    model = build(replace(SMALL, attn_config=attention))
    assert model.transformer.blocks[0].attn.gate.bias.tolist() == [-1.0] * 32
    check_decoding(model)


@pytest.mark.parametrize("options", [{}, {"alibi": True}, {"sliding_window_size": 3}], ids=str)
def test_a_function_gets_what_attention_needs(options):
    own = build(replace(SMALL, attn_config=AttentionConfig(attn_impl=f"{HERE}:plain_attention", **options)))
    ours = build(replace(SMALL, attn_config=AttentionConfig(**options)))
    assert torch.allclose(own(TOKENS_BT), ours(TOKENS_BT), atol=1e-5)


def plain_attention(query, key, value, *, n_heads, kv_n_heads, softmax_scale, attn_bias, is_causal, **_):
    """Compute attention as ours does."""
    q, k, v = (
        x.unflatten(-1, (num_heads, -1)).transpose(1, 2)
        for x, num_heads in ((query, n_heads), (key, kv_n_heads), (value, kv_n_heads))
    )
    out = nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=attn_bias, is_causal=is_causal, scale=softmax_scale
    )
    return out.transpose(1, 2).flatten(-2)


plain_attention.flops_per_token = 12 * 32 * 16  # pyright: ignore[reportFunctionMemberAccess]


def test_a_function_is_told_whether_the_model_is_training(monkeypatch):
    told = []

    def attend(query, *_, training, dropout_p, **__):
        told.append((training, dropout_p))
        return query

    monkeypatch.setattr(sys.modules[__name__], "plain_attention", attend)
    for dropout_p in (0.0, 0.5):
        attention = AttentionConfig(attn_impl=f"{HERE}:plain_attention", attn_pdrop=dropout_p)
        model = build(replace(SMALL, n_layers=1, attn_config=attention))
        model.train()(TOKENS_BT)
        model.eval()(TOKENS_BT)
    assert told == [(True, 0.0), (False, 0.0), (True, 0.5), (False, 0.0)]


def test_a_function_computes_attention_wherever_the_model_is_built():
    model = build(replace(SMALL, attn_config=AttentionConfig(attn_impl=f"{PARTS}:softcap_attention", alibi=True)))
    assert model.transformer.attn_impl == f"{PARTS}:softcap_attention"
    check_decoding(model)

    # A row that is a tree of prefixes: the second half continues the beginning.
    sees_bts = torch.ones(16, 16, dtype=torch.bool).tril()
    sees_bts[8:, 4:8] = False
    positions_bt = torch.tensor([[*range(8), *range(4, 12)]])
    tree = model(TOKENS_BT, positions_bt=positions_bt, attention_mask_bts=sees_bts[None])
    row = torch.cat([TOKENS_BT[:, :4], TOKENS_BT[:, 8:]], dim=1)
    assert torch.allclose(tree[:, 8:], model(row)[:, 4:], atol=1e-5)


def check_decoding(model: MPT) -> None:
    """Compare the logits of whole rows with those of the same tokens, one after another."""
    cache = KeyValueCache(model, 1, 16)
    with torch.no_grad():
        steps = [model(TOKENS_BT[:, t : t + 1], cache=cache) for t in range(16)]
        assert torch.allclose(torch.cat(steps, dim=1), model(TOKENS_BT), atol=1e-5)


def test_a_norm_of_ones_own_in_attention_of_ones_own_draws_itself():
    attention = AttentionConfig(attn_type=f"{PARTS}:GatedAttention", qk_ln=True, norm_type=f"{PARTS}:ScaleNorm")
    model = build(replace(SMALL, attn_config=attention))
    assert model.transformer.blocks[0].attn.q_ln.length.tolist() == [1.0]
    assert 0 < model.transformer.blocks[0].attn.q_ln.tilt.std().item() < 0.04

    # A vector called weight begins with 1 in a norm alone, and the layer around it is none.
    plain = replace(attention, norm_type=f"{HERE}:Plain", norm_kwargs={"weight": [32]})
    model = build(replace(SMALL, attn_config=plain))
    assert model.transformer.blocks[0].attn.q_ln.weight.tolist() == [1.0] * 32


@pytest.mark.parametrize(
    ("changes", "is_known"),
    [
        ({"norm_type": "python:torch.nn:LayerNorm"}, True),
        ({"ffn_config": FFNConfig(ffn_type=f"{PARTS}:SquaredReLU")}, True),
        ({"attn_config": AttentionConfig(attn_type=f"{PARTS}:GatedAttention")}, False),
        ({"attn_config": AttentionConfig(attn_impl=f"{PARTS}:softcap_attention")}, False),
        ({"attn_config": AttentionConfig(attn_impl=f"{HERE}:plain_attention")}, True),
    ],
    ids=["norm", "feed-forward", "attention", "function", "function that says it"],
)
def test_flops_are_known_only_if_each_part_says_its_own(changes, is_known):
    config = replace(SMALL, **changes)
    model = build(config)
    run: Any = SimpleNamespace(model=config, max_seq_len=16)
    flops = find_flops_per_token(run, model, run.max_seq_len)
    assert (flops is not None) is is_known
    if is_known:
        # 6 for each parameter of matrix products and norms, as ours count. The example does not count its two vectors.
        assert flops == pytest.approx(count_flops_per_token(SMALL, 16), rel=0.02)
    num_unknown = sum(p.numel() for part in find_own_parts(model) for p in part.parameters())
    assert count_parameters(config) + num_unknown == sum(p.numel() for p in model.parameters())


class AlikeNorm(nn.LayerNorm):
    """A norm of torch, which says that it is like ours."""

    like = "layernorm"


class Alike(SquaredReLU):
    """A layer with a vector more than ours, which says that it is like ours."""

    like = "mptmlp"

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        del self.flops_per_token


def test_a_layer_that_says_what_it_is_like_counts_the_flops_of_that_layer():
    config = replace(SMALL, ffn_config=FFNConfig(ffn_type=f"{HERE}:Alike"))
    run: Any = SimpleNamespace(model=config, max_seq_len=16)
    assert find_flops_per_token(run, build(config), 16) == count_flops_per_token(SMALL, 16)


def test_a_layer_that_says_its_flops_counts_these_once():
    config = replace(SMALL, ffn_config=FFNConfig(ffn_type=f"{HERE}:Alike"))
    run: Any = SimpleNamespace(model=config, max_seq_len=16)
    model = build(config)
    for part in find_own_parts(model):
        part.flops_per_token = 1000  # type: ignore[assignment]
    without_layers = count_flops_per_token(config, 16)
    assert find_flops_per_token(run, model, 16) == without_layers + 2 * 1000


def test_a_norm_that_says_what_it_is_like_counts_its_own_parameters_once():
    config = replace(SMALL, norm_type=f"{HERE}:AlikeNorm")
    run: Any = SimpleNamespace(model=config, max_seq_len=16)
    assert find_flops_per_token(run, build(config), 16) == count_flops_per_token(SMALL, 16)


def test_a_launch_says_that_a_layer_has_other_parameters_than_the_one_it_is_like():
    config = replace(SMALL, norm_type=f"{HERE}:AlikeNorm", ffn_config=FFNConfig(ffn_type=f"{HERE}:Alike"))
    model = build(config)
    total = sum(parameter.numel() for parameter in model.parameters())
    # Two blocks with 2 * 32 * 128 weights, 160 biases and 128 numbers more than ours; five norms of 2 * 32.
    assert describe_own_parts(config, model) == [
        f"own parts: {2 * 8480 + 320:,} of the model's {total:,} parameters",
        f"model.ffn_config.ffn_type: {HERE}:Alike has 16,960 parameters, and mptmlp, which its class says it is like, "
        "has 16,704, by which memory was estimated; correct `like` there",
    ]
    assert describe_own_parts(SMALL, build(SMALL)) == []


def test_the_page_for_users_describes_a_run_that_can_be_built(tmp_path, monkeypatch):
    page = (ROOT / "docs/own-parts.md").read_text()
    code, *_ = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    settings, *_ = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    (tmp_path / "mine.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    config = tiny_config(tmp_path / "data")
    written = yaml.safe_load(settings)
    config["model"] |= written.pop("model")
    config |= written
    run = load_train_config([write_config(tmp_path / "run.yaml", config)]).config

    model = build(run.model)
    model(TOKENS_BT).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert find_flops_per_token(run, model, run.max_seq_len) is None, "attention does not say"
    trust_code(name for _, name in run.own_code)
    schedule = build_own_schedule(run.scheduler)
    state: Any = SimpleNamespace(timestamp=Timestamp(batch=2), max_duration=Time.from_timestring("10ba"))
    assert schedule is not None and schedule(state) == 0.5
    (name, arguments), *_ = run.loggers.extra.items()
    assert arguments == {"path": "losses.txt"}
    assert isinstance(call_object(name, "loggers", "loggers", arguments), LoggerDestination)
    assert {key for key, _ in run.own_code} == {
        "model.norm_type",
        "model.ffn_config.ffn_type",
        "model.attn_config.attn_type",
        "model.attn_config.attn_impl",
        "model.loss_fn",
        "scheduler.name",
        "loggers",
    }
    sys.modules.pop("mine")


def test_code_that_nobody_trusts_is_not_imported(tmp_path, monkeypatch):
    (tmp_path / "evil.py").write_text("raise SystemExit('it ran')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"model\.norm_type: python:evil:Norm is code that is not trusted here"):
        MPT(replace(SMALL, norm_type="python:evil:Norm"))


class Plain(nn.Module):
    """A norm whose parameters a test chooses."""

    def __init__(self, normalized_shape, eps, device, **tensors):
        super().__init__()
        for name, shape in tensors.items():
            if name == "buffer":
                self.register_buffer(name, torch.zeros(shape))
            elif name == "plain":
                self.plain = torch.arange(shape[0])
            elif name == "listed":
                self.listed = [nn.Parameter(torch.zeros(shape))]
            elif name == "layers":
                self.layers = {"mix": nn.Linear(*shape)}
            elif name == "frozen":
                self.frozen = nn.Parameter(torch.zeros(shape), requires_grad=False)
            else:
                dtype = torch.bfloat16 if name == "short" else torch.float32
                self.register_parameter(name, nn.Parameter(torch.zeros(shape, dtype=dtype)))


class Answers(Plain):
    """A norm with an `initial_distribution` that a test chooses."""

    def __init__(self, normalized_shape, eps, device, answer=("gaussian", 1), **tensors):
        super().__init__(normalized_shape, eps, device, **tensors)
        self.answer = answer

    def initial_distribution(self, name):
        return self.answer


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (["normal", math.nan], "with finite numbers"),
        (["constant", math.inf], "with finite numbers"),
        (["normal", -0.1], "expected a std of 0 or more"),
        (["uniform", 1, 0], "a low that is not above high"),
    ],
)
def test_first_values_that_are_no_distribution_are_refused(answer, message):
    with pytest.raises(ConfigError, match=message):
        build(replace(SMALL, norm_type=f"{HERE}:Answers", norm_kwargs={"gate": [3], "answer": answer}))


REFUSED = {
    "gate of which nobody says how it is drawn": (
        f"{HERE}:Plain",
        {"gate": [32]},
        r"model\.norm_type: python:\S+:Plain: its parameter gate has the shape \[32\] and nobody says how it is drawn; "
        r"give Plain a method initial_distribution\(name\)",
    ),
    "matrix called weight": (f"{HERE}:Plain", {"weight": [32, 32]}, "parameter weight has the shape"),
    "buffer": (f"{HERE}:Plain", {"buffer": [3]}, "has a buffer, buffer, which no checkpoint holds"),
    "tensor": (f"{HERE}:Plain", {"plain": [3]}, "its attribute plain has a tensor that is not registered"),
    "tensor in a list": (f"{HERE}:Plain", {"listed": [3]}, "its attribute listed has a tensor that is not registered"),
    "layer in a dict": (f"{HERE}:Plain", {"layers": [3, 3]}, "its attribute layers has a layer that is not registered"),
    "scalar": (f"{HERE}:Plain", {"weight": []}, "parameter weight has no dimension, and FSDP divides rows"),
    "dtype": (f"{HERE}:Plain", {"short": [3]}, r"parameter short is torch.bfloat16, expected torch.float32"),
    "frozen": (f"{HERE}:Plain", {"frozen": [3]}, "parameter frozen has requires_grad=False"),
    "wrong answer": (f"{HERE}:Answers", {"gate": [3]}, r"initial_distribution\('gate'\) returns \('gaussian', 1\)"),
    "nothing to call": ("python:math:pi", {}, r"model\.norm_type: python:math:pi is a float, expected a class or"),
    "a function": (f"{HERE}:no_module", {}, "returns int, expected a torch.nn.Module"),
    "unknown argument": (
        f"{PARTS}:ScaleNorm",
        {"size": 3},
        r"model\.norm_kwargs: python:\S+:ScaleNorm does not take these keys: .*unexpected keyword argument 'size'",
    ),
    "argument that it gets anyway": (
        f"{PARTS}:ScaleNorm",
        {"eps": 3, "device": "cpu"},
        r"model\.norm_kwargs: eps, device given, which python:\S+:ScaleNorm gets in any case, by other keys; remove it",
    ),
    "no attribute": (f"{PARTS}:Missing", {}, "module tests.helpers.own_parts has no Missing"),
    "no such file": ("python:not_here.norms:Norm", {}, "No module named 'not_here'; is its folder on PYTHONPATH"),
}


def no_module(*_, **__):
    """Return something that is no part of a model."""
    return 3


@pytest.mark.parametrize("case", REFUSED)
def test_a_norm_that_cannot_be_trained_is_refused(case):
    name, arguments, message = REFUSED[case]
    with pytest.raises(ConfigError) as error:
        build(replace(SMALL, norm_type=name, norm_kwargs=arguments))
    assert re.search(message, str(error.value)) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("thing", "message"),
    [
        ("Tied", r"parameter b\.weight is also the parameter a\.weight of a layer of yours; they would"),
        ("TiedToOthers", r"parameter a\.weight is also the parameter a\.weight of a layer of yours"),
        ("one_norm", "returns the same module twice, expected a new one for each place"),
    ],
)
def test_parameters_that_layers_share_are_refused(thing, message):
    one_norm.cache_clear()
    TiedToOthers.weight = nn.Parameter(torch.empty(32, device="meta"))
    with pytest.raises(ConfigError, match=message):
        build(replace(SMALL, norm_type=f"{HERE}:{thing}"))


class Returns(nn.Module):
    """A norm, a feed-forward layer or attention whose output a test changes."""

    def __init__(self, *_, change, **__):
        super().__init__()
        self.change = change

    def forward(self, x, *_):
        return CHANGES[self.change](x)


def returns(query, *_, **__):
    return query[:, 1:], None


CHANGES: dict[str, Any] = {
    "dtype": lambda x: x.double(),
    "width": lambda x: x[..., :1],
    "tuple": lambda x: (x, None),
}
RETURNED = {
    "dtype": r"\[1, 16, 32\] in float64, expected \[1, 16, 32\] in float32",
    "width": r"\[1, 16, 1\] in float32, expected \[1, 16, 32\] in float32",
    "tuple": r"tuple, expected \[1, 16, 32\] in float32",
}


@pytest.mark.parametrize("change", RETURNED)
@pytest.mark.parametrize("key", ["norm_type", "ffn_config.ffn_type", "attn_config.attn_type", "attn_config.norm_type"])
def test_an_output_of_another_shape_or_dtype_names_the_part(key, change):
    name = f"{HERE}:Returns"
    arguments = {"change": change}
    configs = {
        "norm_type": {"norm_type": name, "norm_kwargs": arguments},
        "ffn_config.ffn_type": {"ffn_config": FFNConfig(ffn_type=name, kwargs=arguments)},
        "attn_config.attn_type": {"attn_config": AttentionConfig(attn_type=name, kwargs=arguments)},
        "attn_config.norm_type": {"attn_config": AttentionConfig(qk_ln=True, norm_type=name, norm_kwargs=arguments)},
    }
    model = build(replace(SMALL, **configs[key]))
    with pytest.raises(ConfigError, match=rf"^model\.{key}: {name} returns {RETURNED[change]}$"):
        model(TOKENS_BT)


def test_an_output_of_a_function_of_another_shape_names_it():
    name = f"{HERE}:returns"
    model = build(replace(SMALL, attn_config=AttentionConfig(attn_impl=name)))
    message = rf"^model\.attn_config\.attn_impl: {name} returns \[1, 15, 32\] in float32, expected \[1, 16, 32\]"
    with pytest.raises(ConfigError, match=message):
        model(TOKENS_BT)


def test_another_dtype_is_no_error_with_autocast():
    name = f"{PARTS}:SquaredReLU"
    model = build(replace(SMALL, ffn_config=FFNConfig(ffn_type=name)))
    with torch.autocast("cpu", torch.bfloat16):
        assert model.transformer.blocks[0].ffn(torch.ones(1, 2, 32)).dtype == torch.bfloat16


def test_a_layer_that_a_part_keeps_under_two_names_stays_one():
    norm = build(replace(SMALL, norm_type=f"{HERE}:Twice")).transformer.norm_f
    assert norm.b.weight is norm.a.weight and norm.b.weight.tolist() == [1.0] * 32


class Twice(nn.Module):
    """A norm that keeps one layer under two names."""

    def __init__(self, normalized_shape, eps, device):
        super().__init__()
        self.a = nn.LayerNorm(normalized_shape, device=device)
        self.b = self.a

    def forward(self, x):
        return self.b(self.a(x))


class Tied(Twice):
    """A norm with two layers that have one weight."""

    def __init__(self, normalized_shape, eps, device):
        super().__init__(normalized_shape, eps, device)
        self.b = nn.LayerNorm(normalized_shape, device=device)
        self.b.weight = self.a.weight


class TiedToOthers(Twice):
    """A norm whose weight all norms have."""

    weight: nn.Parameter

    def __init__(self, normalized_shape, eps, device):
        super().__init__(normalized_shape, eps, device)
        self.a.weight = TiedToOthers.weight


def test_layers_that_draw_random_numbers_are_refused_for_exact_sums():
    drops = replace(SMALL, norm_type=f"{HERE}:Drops", norm_kwargs={"p": 0.1}, resid_pdrop=0.1)
    refuse_random_layers(build(replace(drops, norm_kwargs={"p": 0.0})))
    anything: Any = None
    with pytest.raises(ConfigError, match=r"^exact_sums: does not go with model\.norm_type: .* its layer drop is Drop"):
        build_parallel_model(drops, anything, anything, anything, seed=17, sums=ExactSums())


class Drops(Twice):
    """A norm that drops some of its outputs."""

    def __init__(self, normalized_shape, eps, device, p):
        super().__init__(normalized_shape, eps, device)
        self.drop = nn.Dropout(p)


@functools.cache
def one_norm(normalized_shape, eps, device):
    """Return the same norm each time."""
    return nn.LayerNorm(normalized_shape, device=device)


def test_shapes_may_depend_on_the_number_of_blocks():
    model = build(replace(SMALL, attn_config=AttentionConfig(attn_type=f"{HERE}:OneForEachBlock")))
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    assert shapes["transformer.blocks.1.attn.steps"] == (2,)
    assert [*parameter_shapes(model.config).items()] == [*shapes.items()]


class OneForEachBlock(Attention):
    """Attention with as many numbers as the model has blocks."""

    def __init__(self, config):
        super().__init__(config)
        self.steps = nn.Parameter(torch.zeros(config.n_layers))

    def initial_distribution(self, name):
        return ("constant", 1.0) if name == "steps" else None


@pytest.mark.parametrize("shape", [[32], [32, 32]], ids=["vector", "matrix"])
@pytest.mark.parametrize("name", ["scale", "weight"])
def test_the_scheme_draws_the_weights_of_linear_layers_alone(shape, name):
    config = replace(SMALL, norm_type=f"{HERE}:Scaled", norm_kwargs={"name": name, "shape": shape})
    if name == "weight" and len(shape) == 2:
        build(config)
        return
    with pytest.raises(ConfigError, match=rf"parameter mix\.{name} has the shape .* and nobody says how it is drawn"):
        build(config)


class Scaled(nn.Module):
    """A norm with a linear layer that has one parameter more, or another one."""

    def __init__(self, normalized_shape, eps, device, name, shape):
        super().__init__()
        self.mix = nn.Linear(normalized_shape, normalized_shape, device=device)
        self.mix.register_parameter(name, nn.Parameter(torch.zeros(shape)))


def test_a_constructor_that_reads_a_tensor_says_where_and_why():
    with pytest.raises(OwnCodeError, match=r"^model\.norm_type: .*:ReadsTensor raises RuntimeError: .*meta") as error:
        build(replace(SMALL, norm_type=f"{HERE}:ReadsTensor"))
    printed = describe_error(error.value)
    assert "ReadsTensor is built without memory first" in printed
    assert "self.scale = torch.ones(3).sum().item()" in printed, "the traceback leads to the user's line"


class ReadsTensor(nn.LayerNorm):
    """A norm that computes a number by tensors."""

    def __init__(self, normalized_shape, eps, device):
        super().__init__(normalized_shape, eps)
        self.scale = torch.ones(3).sum().item()


@pytest.mark.parametrize("key", ["norm_type", "attn_impl"])
def test_tensors_of_the_users_module_have_values(tmp_path, monkeypatch, key):
    (tmp_path / "mine.py").write_text("import torch\nfrom torch.nn import LayerNorm\nTABLE = torch.arange(4)\n")
    monkeypatch.syspath_prepend(tmp_path)
    name = "python:mine:LayerNorm"
    configs = {"norm_type": {"norm_type": name}, "attn_impl": {"attn_config": AttentionConfig(attn_impl=name)}}
    build(replace(SMALL, **configs[key]))
    assert sys.modules.pop("mine").TABLE.tolist() == [0, 1, 2, 3]


def test_an_own_part_says_first_how_linear_layers_and_norms_inside_begin():
    values = InitConfig(name="baseline_", init_std=0.5)
    model = build(replace(SMALL, norm_type=f"{HERE}:LearnedNorm", init_config=values))
    norm = model.transformer.norm_f
    assert 0.4 < norm.mix.weight.std().item() < 0.6
    assert norm.mix.bias.abs().max().item() == 0
    assert 0.4 / 2 < norm.out.weight.std().item() < 0.6 / 2  # sqrt(2 * 2 blocks)
    assert norm.inner.weight.tolist() == [1.0] * 32 and norm.inner.bias.tolist() == [0.0] * 32
    assert 0 <= norm.inner_own.tilt.min().item() < norm.inner_own.tilt.max().item() <= 2


class LearnedNorm(nn.Module):
    """A norm with layers of torch in it, and a layer that says itself how it begins."""

    def __init__(self, normalized_shape, eps, device):
        super().__init__()
        self.mix = nn.Linear(normalized_shape, normalized_shape, device=device)
        self.out = nn.Linear(normalized_shape, normalized_shape, device=device)
        self.out._is_residual = True  # type: ignore[assignment]
        self.inner = nn.LayerNorm(normalized_shape, device=device)
        self.inner_own = Uniform(normalized_shape)


class Uniform(nn.Module):
    """A layer of one vector."""

    def __init__(self, width):
        super().__init__()
        self.tilt = nn.Parameter(torch.empty(width))

    def initial_distribution(self, name):
        return ("uniform", 0, 2)
