"""Decoding with a key-value cache: sampling by temperature, top-k and top-p."""

from collections.abc import Iterator

import torch
from torch import Tensor

from llmfoundry_lite.errors import NonFiniteError
from llmfoundry_lite.models.attention import without_cudnn
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

    Temperature 0 takes the likeliest token. `top_k` samples among the k likeliest ones, and `top_p` among the fewest
    whose probabilities add up to p (Holtzman et al. 2020, "The Curious Case of Neural Text Degeneration"). The same
    seed draws the same tokens on every device, up to the rounding of logits, which are fp32 in every precision.

    Once the text is longer than the model's context, the oldest tokens are dropped, one for each new token. All tokens
    in the context are then computed again, because their positions have changed.

    Raises NonFiniteError if the model's logits are NaN or infinite.
    """
    generator = torch.Generator().manual_seed(seed)
    max_context = model.config.max_seq_len
    tokens_t = prompt_t[-max_context:]
    cache = KeyValueCache(model, 1, min(max_context, tokens_t.numel() + max_new_tokens))
    uncached_t = tokens_t  # first the prompt, then the token that was chosen last

    for _ in range(max_new_tokens):
        # The context is full: empty the cache, and compute the newest tokens again at new positions.
        if cache.length + uncached_t.numel() > max_context:
            cache.length = 0
            uncached_t = tokens_t[-max_context:]

        with without_cudnn():
            logits_v = model(uncached_t[None], cache=cache, head=_last_token_logits)
        check_finite(logits_v)
        next_token = sample_token(logits_v, temperature, top_k, top_p, generator)

        uncached_t = next_token[None]
        tokens_t = torch.cat([tokens_t, uncached_t])
        yield int(next_token)


def _last_token_logits(hidden_btd: Tensor, unembedding_vd: Tensor) -> Tensor:
    """Compute the logits [v] of the last token of the only row, in fp32. A `Head` of the model."""
    with torch.autocast(hidden_btd.device.type, enabled=False):
        parts = list(logits_in_parts(hidden_btd[0, -1:].float(), unembedding_vd))
        return torch.cat(parts, dim=-1)[0]


def check_finite(logits: Tensor) -> None:
    """Raise NonFiniteError if the largest logit is NaN or infinite.

    Single logits may be -inf, which is how a token is excluded. If all are, no token is left to choose.
    """
    if not logits.max().isfinite():
        raise NonFiniteError("the model's logits are NaN or infinite; no next token can be chosen")


def sample_token(
    logits_v: Tensor, temperature: float, top_k: int | None, top_p: float | None, generator: torch.Generator
) -> Tensor:
    """Choose the next token from its logits [v]. Returns its id, int64 [], on the device of the logits.

    Temperature 0 takes the likeliest token. Otherwise logits are divided by the temperature, all tokens but the `top_k`
    likeliest are excluded, then all but the fewest likeliest whose probabilities add up to `top_p`, and one of the
    remaining tokens is drawn. It is drawn on the host, so that a seed means the same on every device.
    """
    if temperature == 0:
        return logits_v.argmax()

    scaled_v = logits_v.cpu() / temperature
    if top_k is not None:
        threshold = scaled_v.topk(min(top_k, scaled_v.numel())).values[-1]  # the k-th largest logit
        scaled_v = scaled_v.masked_fill(scaled_v < threshold, float("-inf"))
    if top_p is not None:
        sorted_v, order_v = scaled_v.softmax(-1).sort(descending=True)
        # A token is kept unless the likelier ones before it already add up to p. So at least one is kept.
        probability_before_v = sorted_v.cumsum(-1) - sorted_v
        is_left_out_v = probability_before_v >= top_p
        scaled_v = scaled_v.index_fill(0, order_v[is_left_out_v], float("-inf"))
    return torch.multinomial(scaled_v.softmax(-1), 1, generator=generator)[0].to(logits_v.device)
