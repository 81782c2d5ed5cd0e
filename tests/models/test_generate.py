"""Which tokens sampling may choose."""

import torch

from llmfoundry_lite.models.generate import sample_token

LOGITS_V = torch.tensor([0.2, 0.5, 0.05, 0.25]).log()


def chosen(**options) -> set[int]:
    generator = torch.Generator().manual_seed(1)
    options = {"temperature": 1.0, "top_k": None, "top_p": None, **options}
    return {int(sample_token(LOGITS_V, generator=generator, **options)) for _ in range(200)}


def test_the_fewest_tokens_whose_probabilities_add_up_to_p_are_drawn_from():
    assert chosen(top_p=0.4) == {1}
    assert chosen(top_p=0.6) == {1, 3}
    assert chosen(top_p=0.9) == {0, 1, 3}
    assert chosen(top_p=0.96) == {0, 1, 2, 3}


def test_the_k_likeliest_tokens_are_drawn_from_and_the_likeliest_without_temperature():
    assert chosen(top_k=2) == {1, 3}
    assert chosen(top_k=9) == {0, 1, 2, 3}
    assert chosen(top_k=3, top_p=0.5) == {1}
    assert chosen(temperature=0) == {1}
