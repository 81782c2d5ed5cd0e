"""Decoding: extend a prompt token by token."""

import torch

from llmfoundry_lite.models.mpt import MPT


@torch.no_grad()
def generate(
    model: MPT,
    prompt_t: torch.Tensor,
    num_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
) -> torch.Tensor:
    """Prompt, int64 [t], followed by up to `num_tokens` sampled tokens; the window slides at the model's length.

    Temperature 0 takes the likeliest token; `top_k` samples among the k likeliest.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens_t = prompt_t
    for _ in range(num_tokens):
        window_t = tokens_t[-model.config.max_seq_len :]
        logits_v = model(window_t[None], head=_last_logits)
        tokens_t = torch.cat([tokens_t, _sample(logits_v, temperature, top_k, generator)[None]])
    return tokens_t


def _last_logits(hidden_btd: torch.Tensor, unembedding_vd: torch.Tensor) -> torch.Tensor:
    return (hidden_btd[0, -1] @ unembedding_vd.T).float()


def _sample(logits_v: torch.Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> torch.Tensor:
    if temperature == 0:
        return logits_v.argmax()
    logits_v = logits_v.cpu() / temperature
    if top_k is not None:
        threshold = logits_v.topk(min(top_k, logits_v.numel())).values[-1]
        logits_v = logits_v.masked_fill(logits_v < threshold, float("-inf"))
    return torch.multinomial(logits_v.softmax(-1), 1, generator=generator)[0].to(logits_v.device)
