"""Decoding with a key-value cache: sampling by temperature, top-k and top-p."""

from collections.abc import Iterator

import torch
from torch import Tensor

from llmfoundry_lite.errors import NonFiniteError
from llmfoundry_lite.models.attention import for_any_width
from llmfoundry_lite.models.mpt import MPT, KeyValueCache
from llmfoundry_lite.models.products import logits_in_parts


@torch.no_grad()
def generate(
    model: MPT,
    prompt_t: Tensor,
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
) -> Iterator[int]:
    """Yield `max_new_tokens` tokens that follow the prompt (int64 [t], at least one), each as soon as it is chosen.

    Temperature 0 takes the likeliest token; `top_k` samples among the k likeliest, `top_p` among the fewest whose
    probabilities add up to p (Holtzman et al. 2020). Beyond the model's context length the window slides, and all of
    its tokens are computed again at their new positions. Logits are fp32 in every precision. Raises NonFiniteError.
    """
    generator = torch.Generator().manual_seed(seed)
    length = model.config.max_seq_len
    tokens_t = prompt_t[-length:]
    cache = KeyValueCache(model, 1, min(length, tokens_t.numel() + max_new_tokens))
    new_t = tokens_t
    for _ in range(max_new_tokens):
        if cache.length + new_t.numel() > length:
            cache.length, new_t = 0, tokens_t[-length:]
        with for_any_width():
            logits_v = model(new_t[None], cache=cache, head=_last_logits)
        check_finite(logits_v)
        new_t = sample(logits_v, temperature, top_k, top_p, generator)[None]
        tokens_t = torch.cat([tokens_t, new_t])
        yield int(new_t)


def _last_logits(hidden_btd: Tensor, unembedding_vd: Tensor) -> Tensor:
    with torch.autocast(hidden_btd.device.type, enabled=False):
        return torch.cat(list(logits_in_parts(hidden_btd[0, -1:].float(), unembedding_vd)), dim=-1)[0]


def check_finite(logits: Tensor) -> None:
    """Raise NonFiniteError for NaN or inf. A logit of -inf is a token that cannot be: not all may be that."""
    if not logits.max().isfinite():
        raise NonFiniteError("the model's logits are NaN or infinite; no next token can be chosen")


def sample(
    logits_v: Tensor, temperature: float, top_k: int | None, top_p: float | None, generator: torch.Generator
) -> Tensor:
    """Choose the next token. It is drawn on the host, so that a seed means the same on every device."""
    if temperature == 0:
        return logits_v.argmax()
    scaled_v = logits_v.cpu() / temperature
    if top_k is not None:
        threshold = scaled_v.topk(min(top_k, scaled_v.numel())).values[-1]
        scaled_v = scaled_v.masked_fill(scaled_v < threshold, float("-inf"))
    if top_p is not None:
        sorted_v, order_v = scaled_v.softmax(-1).sort(descending=True)
        # The first token whose predecessors already reach p is the first left out.
        is_left_out_v = sorted_v.cumsum(-1) - sorted_v >= top_p
        scaled_v = scaled_v.index_fill(0, order_v[is_left_out_v], float("-inf"))
    return torch.multinomial(scaled_v.softmax(-1), 1, generator=generator)[0].to(logits_v.device)
