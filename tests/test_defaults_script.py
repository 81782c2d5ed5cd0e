"""scripts/defaults_llm_foundry.py: what it needs no LLM Foundry for."""

import pytest

from scripts.defaults_llm_foundry import INTENDED, compare, print_differences


@pytest.mark.parametrize(
    ("key", "value", "found"),
    [
        ("optimizer[decoupled_adamw].weight_decay", 1e-5, None),
        ("optimizer[decoupled_adamw].weight_decay", 0.5, "0.5 there; optimizer.weight_decay is 1e-05 here"),
        ("model.attn_config.norm_eps", 1e-5, None),
        ("model.attn_config.norm_eps", 1e-6, "1e-06 there; model.attn_config.norm_eps is 1e-05 here"),
        ("scheduler[inv_sqrt_with_warmup].alpha_f_decay", 0.0, None),
        ("train_loader.dataset.streams.web.proportion", None, None),
        ("fsdp_config.data_parallel_shard_degree", -1, None),
        ("fsdp_config.mixed_precision", "PURE", '"PURE" there; fsdp_config.mixed_precision is "DEFAULT" here'),
        ("cuda_load_lazy", False, None),
        ("eval.max_seq_len", None, None),
        ("eval.seed", 17, None),
        ("eval.colour", 1, "1 is refused: colour: unknown key; nothing here is spelled like it"),
    ],
)
def test_a_default_that_does_something_else_when_it_is_said_is_found(key, value, found):
    differences = list(compare({key: value}).values())
    assert [text[: len(found or "")] for text in differences] == ([found] if found else [])


def test_a_difference_without_a_reason_and_a_reason_without_a_difference_are_named(capsys):
    listed = dict.fromkeys(INTENDED, "differs")
    assert print_differences(listed) == []
    assert print_differences({**listed, "seed": "18 there"}) == ["seed"]
    listed.pop("run_name")
    assert print_differences(listed) == ["run_name"]
    assert "seed: 18 there\n    UNLISTED" in capsys.readouterr().out
