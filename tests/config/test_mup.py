"""The block `model.mup`: what is refused, what a dry run prints, and what a record has."""

import pytest

from llmfoundry_lite.config.layout import layout_of
from llmfoundry_lite.config.load_train import load_train_config
from llmfoundry_lite.config.mup import factors_of_kind
from llmfoundry_lite.config.optimizer_schema import OptimizerConfig
from llmfoundry_lite.config.parameter_groups import Factors, check_groups, divide_parameters
from llmfoundry_lite.config.schema import as_dict
from llmfoundry_lite.dry_run import describe_launch
from llmfoundry_lite.errors import ConfigError
from llmfoundry_lite.models.names import list_parameters
from llmfoundry_lite.preflight import Preflight
from tests.helpers.tiny import tiny_config, write_config

WIDE = ("model.d_model=128", "model.n_heads=16", "model.mup={base_width: 32}")


def load(tmp_path, *arguments):
    return load_train_config([write_config(tmp_path / "run.yaml", tiny_config(tmp_path / "data")), *arguments]).config


def mup_lines(config):
    lines = describe_launch(config, layout_of(config, 1), Preflight()).splitlines()
    first = next(index for index, line in enumerate(lines) if line.startswith("muP"))
    return lines[first : first + 6]


def test_a_dry_run_prints_what_depends_on_the_width(tmp_path):
    assert mup_lines(load(tmp_path, *WIDE)) == [
        "muP            m = 4, width 128 over the base width 32",
        "               kind     parameters              initial std   learning rate   multiplier",
        "               input    embeddings              x 1           0.01            x 1",
        "               hidden   matrices of the blocks  x 0.5         0.0025          scores of attention x 0.3536",
        "               vector   norms, biases           x 1           0.01",
        "               output   tied to the input                                     logits x 0.25",
    ]


def test_a_dry_run_has_an_untied_output_and_muons_rates(tmp_path):
    muon = "optimizer={name: muon, lr: 0.02, adamw_lr: 0.004}"
    lines = mup_lines(load(tmp_path, *WIDE, muon, "model.tie_word_embeddings=false"))
    assert lines[3].split()[6:] == ["0.5", "0.01", "scores", "of", "attention", "x", "0.3536"]
    assert lines[5].split() == ["output", "lm_head", "x", "1", "0.004", "logits", "x", "0.25"]


GROUPS = "optimizer.param_groups=[{param_str_match: norm|bias, weight_decay: 0}, {param_str_match: up_proj, lr: 0.03}]"


@pytest.mark.parametrize(("width", "hidden_rates"), [(128, ("0.0025", "0.0075")), (16, ("0.02", "0.06"))])
def test_a_dry_run_shows_the_true_rates_of_groups(tmp_path, width, hidden_rates):
    """The width is four times that of the base model, or half of it."""
    config = load(tmp_path, *WIDE, f"model.d_model={width}", f"model.n_heads={width // 8}", GROUPS)
    lines = describe_launch(config, layout_of(config, 1), Preflight()).splitlines()
    first = next(index for index, line in enumerate(lines) if line.startswith("groups"))
    rates = [line.split(", ")[1] for line in lines[first : first + 4]]
    # Group 0 has embeddings and matrices. The norms and biases have one rate, and so have the matrices of up_proj.
    assert rates == ["lr 0.01", f"lr {hidden_rates[0]}", "lr 0.01", f"lr {hidden_rates[1]}"]
    assert "'norm|bias'" in lines[first + 2] and "'up_proj'" in lines[first + 3]
    # The rate of the block `optimizer` is not that of every group, so the table has factors.
    factor = f"x {32 / width:g}"
    assert f"  {factor}  " in mup_lines(config)[3]


@pytest.mark.parametrize(
    ("name", "adjust_lr_fn", "lr", "weight_decay"),
    [
        ("decoupled_adamw", None, 1 / 4, 1),
        ("adamw", None, 1 / 4, 4),
        ("decoupled_lionw", None, 1 / 4, 1),
        ("lion", None, 1 / 4, 4),
        ("muon", None, 1 / 2, 2),
        ("muon", "match_rms_adamw", 1 / 2, 2),
        ("muon", "original", 1, 1),
    ],
)
def test_each_optimizer_has_its_factors_at_four_times_the_width(name, adjust_lr_fn, lr, weight_decay):
    optimizer = OptimizerConfig(name=name, lr=0.1, adjust_lr_fn=adjust_lr_fn)
    factors = factors_of_kind("hidden", optimizer, 4.0, is_matrix_of_block=True)
    assert factors == Factors(lr=lr, weight_decay=weight_decay, eps=1 / 4)
    for kind in ("input", "output", "vector"):
        assert factors_of_kind(kind, optimizer, 4.0) == Factors(eps=1 / 4)
    # Muon leaves it to AdamW.
    adam = factors_of_kind("hidden", optimizer, 4.0)
    assert adam.lr == 1 / 4 and adam.weight_decay in (1, 4)


def test_factors_multiply_eps_and_muons_other_rate():
    optimizer = OptimizerConfig(name="muon", lr=0.1, adamw_lr=0.4, eps=1e-6, weight_decay=0.2)
    (group,) = divide_parameters(["a"], optimizer, lambda name: Factors(lr=0.5, weight_decay=2.0, eps=0.25))
    settings = group.settings
    assert (settings.lr, settings.adamw_lr, settings.weight_decay, settings.eps) == (0.05, 0.2, 0.4, 2.5e-7)


def test_an_empty_group_is_named_by_its_own_place(tmp_path):
    """With muP the first group is divided, so that places among the divided groups are others."""
    config = load(tmp_path, *WIDE, "optimizer.param_groups=[{param_str_match: proj}, {param_str_match: nothing}]")
    groups = divide_parameters(
        list_parameters(config.model), config.optimizer, lambda name: Factors(lr=0.5 if "proj" in name else 1)
    )
    with pytest.raises(ConfigError, match=r"^optimizer.param_groups\[1\].param_str_match: 'nothing' matches no"):
        check_groups(groups)


def test_without_mup_neither_a_dry_run_nor_a_record_mentions_it(tmp_path):
    config = load(tmp_path)
    assert "muP" not in describe_launch(config, layout_of(config, 1), Preflight())
    assert "mup" not in as_dict(config)["model"]
    recorded = as_dict(load(tmp_path, *WIDE))["model"]["mup"]
    assert recorded == {"base_width": 32, "base_head_dim": None, "embedding_mult": 1.0}


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["model.mup={}"], "model.mup.base_width"),
        (["model.mup={base_width: 0}"], "model.mup.base_width: 0"),
        (["model.mup={base_width: 20}"], "model.mup.base_head_dim: the base model, of width 20, has no whole number"),
        (
            ["model.mup={base_width: 16}", "optimizer={name: 'python:mine:Sgd', lr: 0.1}"],
            "model.mup: does not know how the updates of optimizer.name: python:mine:Sgd depend on the width; use ",
        ),
    ],
)
def test_what_does_not_go_is_refused(tmp_path, arguments, error):
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, *arguments)
    assert error in str(caught.value)
