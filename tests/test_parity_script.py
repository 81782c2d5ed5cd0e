"""scripts/parity_llm_foundry.py: what it needs no LLM Foundry for."""

import pytest
import torch
from safetensors.torch import save_file

from scripts import parity_llm_foundry as parity


@pytest.mark.parametrize("change", [0.0, 1e-3])
def test_a_model_equals_itself_and_no_other(change, tmp_path, capsys, monkeypatch):
    model, inputs = parity.build_ours("attn_uses_sequence_id, alibi")
    assert inputs["documents"].max() > 0
    exact, low = parity.compute_twice(model, inputs, parity.call_ours)
    place = tmp_path / parity.file_name("attn_uses_sequence_id, alibi")
    place.mkdir()
    name = "transformer.blocks.1.attn.Wqkv.weight"
    save_file({**exact, name: exact[name] * (1 + change)}, place / "exact.safetensors")
    save_file(low, place / "low.safetensors")
    monkeypatch.setattr(parity, "read_folder", lambda _place: exact["logits"])
    assert parity.compare("attn_uses_sequence_id, alibi", exact, low, tmp_path) == (not change)
    assert ("differs" in capsys.readouterr().out) == bool(change)


@pytest.mark.parametrize("option", parity.OPTIONS)
def test_every_option_is_a_model_of_ours(option):
    model, inputs = parity.build_ours(option)
    with torch.no_grad():
        assert parity.call_ours(model, inputs).shape == (3, 50, 130)
