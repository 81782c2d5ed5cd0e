"""Kernels that give the same digits every time: who asks for them, where, and what is said."""

import dataclasses

import pytest
import torch
from torch._inductor import config as inductor_config

from llmfoundry_lite.config.load_train import load_train_config
from llmfoundry_lite.errors import ConfigError
from llmfoundry_lite.launch_replay import with_equal_digits
from llmfoundry_lite.training.train import choose_kernels

EXACT = load_train_config(["mpt-quickstart"]).config
PLAIN = dataclasses.replace(EXACT, exact_sums=False)


@pytest.fixture(autouse=True)
def torch_as_it_was(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    yield
    torch.use_deterministic_algorithms(False)
    inductor_config.deterministic = False
    setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)  # noqa: B010 - a property of a module


def is_switched_on() -> bool:
    return torch.are_deterministic_algorithms_enabled() and inductor_config.deterministic


def test_on_a_gpu_exact_sums_ask_for_them_and_one_line_says_so(capfd):
    assert choose_kernels(EXACT, "cuda").deterministic is True and is_switched_on()
    said = capfd.readouterr().out
    assert said.startswith("deterministic: true, as exact_sums needs on ") and said.count("\n") == 1


@pytest.mark.parametrize(("config", "device_type"), [(EXACT, "cpu"), (PLAIN, "cuda"), (PLAIN, "cpu")])
def test_elsewhere_nothing_changes_and_nothing_is_said(capfd, config, device_type):
    assert choose_kernels(config, device_type) is config and not is_switched_on()
    assert not capfd.readouterr().out


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_what_the_user_writes_is_done_and_not_repeated(capfd, device_type):
    for config in (PLAIN, EXACT):
        asked = dataclasses.replace(config, deterministic=True)
        assert choose_kernels(asked, device_type) == asked and is_switched_on()
    assert not capfd.readouterr().out


@pytest.mark.skipif(torch.version.cuda is None, reason="rocBLAS has no such variable")
def test_a_workspace_with_which_torch_would_stop_at_the_first_product_is_refused_before(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:2")
    with pytest.raises(ConfigError, match=r"^CUBLAS_WORKSPACE_CONFIG: :4096:2 given, .* need :4096:8 or :16:8; unset"):
        choose_kernels(EXACT, "cuda")
    assert choose_kernels(dataclasses.replace(EXACT, deterministic=True), "cpu") and is_switched_on()


def test_a_replay_asks_for_them_on_a_gpu_whatever_the_run_had(capfd):
    for config in (PLAIN, dataclasses.replace(EXACT, deterministic=False)):
        assert with_equal_digits(config, "cuda").deterministic is True
        assert capfd.readouterr().out.startswith("deterministic: true, for a replay on ")
        assert with_equal_digits(config, "cpu") is config
    asked = dataclasses.replace(PLAIN, deterministic=True)
    assert with_equal_digits(asked, "cuda") is with_equal_digits(asked, "cpu") is asked
    assert not capfd.readouterr().out
