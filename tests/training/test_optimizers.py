import pytest
import torch
from composer.optim import DecoupledAdamW

from llmfoundry_lite.config.schema import OptimizerConfig
from llmfoundry_lite.training.optimizers import build_adamw, build_lion


def steps(optimizer, parameter, rates=(0.1, 0.05, 0.02)):
    generator = torch.Generator().manual_seed(1)
    for rate in rates:
        parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
    return parameter.detach().clone()


def parameter():
    return torch.nn.Parameter(torch.linspace(-1, 1, 24).view(4, 6))


def test_decoupled_adamw_is_composers():
    options = {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.01}
    ours, theirs = parameter(), parameter()
    result = steps(build_adamw([ours], OptimizerConfig(name="decoupled_adamw", **options)), ours)
    torch.testing.assert_close(result, steps(DecoupledAdamW([theirs], **options), theirs), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "expected"), [("decoupled_adamw", 1e-5), ("adamw", 0.0), ("lion", 0.0), ("decoupled_lionw", 0.0)]
)
def test_without_a_weight_decay_there_is_composers(name, expected):
    options = OptimizerConfig(name=name, lr=0.1)
    assert options.decay == expected
    assert name != "decoupled_adamw" or DecoupledAdamW([parameter()], lr=0.1).defaults["weight_decay"] == expected
    build = build_adamw if "adamw" in name else build_lion
    decay = build([parameter()], options).param_groups[0]["weight_decay"]
    assert decay == (expected / 0.1 if name == "decoupled_adamw" else expected)


def test_adamw_is_torchs():
    ours, theirs = parameter(), parameter()
    config = OptimizerConfig(name="adamw", lr=0.1, betas=(0.9, 0.95), weight_decay=0.1)
    expected = steps(torch.optim.AdamW([theirs], lr=0.1, betas=(0.9, 0.95), weight_decay=0.1), theirs)
    torch.testing.assert_close(steps(build_adamw([ours], config), ours), expected)


@pytest.mark.parametrize(("name", "decay"), [("lion", 0.1), ("decoupled_lionw", 0.01)])
def test_lion_follows_its_paper(name, decay):
    ours, rates = parameter(), (0.1, 0.05, 0.02)
    result = steps(build_lion([ours], OptimizerConfig(name=name, lr=0.1, weight_decay=decay)), ours, rates)
    p, moment, generator = parameter().detach(), torch.zeros(4, 6), torch.Generator().manual_seed(1)
    for rate in rates:
        gradient = torch.randn(p.shape, generator=generator)
        shrink = rate * decay if name == "lion" else rate / 0.1 * decay
        p = p * (1 - shrink) - rate * torch.sign(0.9 * moment + 0.1 * gradient)
        moment = 0.99 * moment + 0.01 * gradient
    torch.testing.assert_close(result, p)


def test_without_gradients_a_step_changes_nothing():
    for build, name in ((build_adamw, "adamw"), (build_lion, "lion")):
        p = parameter()
        optimizer = build([p], OptimizerConfig(name=name, lr=0.1, weight_decay=0.5))
        optimizer.step()
        assert torch.equal(p, parameter())
        assert not optimizer.state
