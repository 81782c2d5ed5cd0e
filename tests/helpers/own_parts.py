"""Parts of a run that a user might write: norm, feed-forward layer, attention, schedule. See docs/own-parts.md."""

import math

import torch
import torch.distributed as dist
from composer.loggers import LoggerDestination
from torch import nn

from llmfoundry_lite.models.mpt import Attention


class ScaleNorm(nn.Module):
    """One length for each vector instead of a weight for each element (Nguyen and Salazar 2019), times a tilt."""

    def __init__(self, normalized_shape, eps=1e-5, device=None, length=1.0, tilt=0.02):
        super().__init__()
        self.eps = eps
        self.first = {"length": ("constant", length), "tilt": ("normal", tilt)}
        self.length = nn.Parameter(torch.empty(1, device=device))
        self.tilt = nn.Parameter(torch.empty(normalized_shape, device=device))

    def initial_distribution(self, name):
        return self.first[name]

    def forward(self, x):
        size = x.square().mean(-1, keepdim=True).add(self.eps).rsqrt()
        return x * size * (self.length + self.tilt)


class SquaredReLU(nn.Module):
    """A feed-forward layer with relu(x)^2 (So et al. 2021), and a weight for each hidden unit."""

    def __init__(self, d_model, expansion_ratio, device=None, bias=True, power=2):
        super().__init__()
        hidden = int(d_model * expansion_ratio)
        self.power = power
        self.up = nn.Linear(d_model, hidden, bias=bias, device=device)
        self.scale = nn.Parameter(torch.empty(hidden, device=device))
        self.down = nn.Linear(hidden, d_model, bias=bias, device=device)
        self.down._is_residual = True  # pyright: ignore[reportArgumentType]
        self.flops_per_token = 6 * 2 * d_model * hidden

    def initial_distribution(self, name):
        return ("uniform", 0.9, 1.1) if name == "scale" else None

    def forward(self, x_btd):
        return self.down(self.up(x_btd).relu().pow(self.power) * self.scale)


class GatedAttention(Attention):
    """Our attention, and a gate for each channel of its output (Qiu et al. 2025, "Gated Attention")."""

    def __init__(self, config, gate_bias=1.0):
        super().__init__(config)
        self.gate_bias = gate_bias
        self.gate = nn.Linear(config.d_model, config.d_model)

    def initial_distribution(self, name):
        return ("constant", self.gate_bias) if name == "gate.bias" else None

    def forward(self, x_btd, mask, rotation, append_to_cache):
        return super().forward(x_btd, mask, rotation, append_to_cache) * self.gate(x_btd).sigmoid()


def softcap_attention(query, key, value, n_heads, kv_n_heads, softmax_scale=None, attn_bias=None, is_causal=False, **_):
    """Attention whose scores are kept below 20 in size (Gemma 2), with the arguments of LLM Foundry."""
    q = query.unflatten(-1, (n_heads, -1)).transpose(1, 2)
    k = key.unflatten(-1, (kv_n_heads, -1)).transpose(1, 2).repeat_interleave(n_heads // kv_n_heads, 1)
    v = value.unflatten(-1, (kv_n_heads, -1)).transpose(1, 2).repeat_interleave(n_heads // kv_n_heads, 1)
    scores = q @ k.mT * (softmax_scale or 1 / math.sqrt(q.size(-1)))
    scores = 20 * (scores / 20).tanh()
    if is_causal:
        attn_bias = torch.full_like(scores[0, 0], -math.inf).triu(1)
    if attn_bias is not None:
        scores = scores + attn_bias
    return (scores.softmax(-1) @ v).transpose(1, 2).flatten(-2), None, None


class Triangle:
    """A learning rate that rises until `peak`, a fraction of the run, and falls to 0 at the end (Smith 2017)."""

    def __init__(self, peak=0.5):
        self.peak = peak

    def __call__(self, state, ssr=1.0):
        done = state.timestamp.batch.value / state.max_duration.value
        return done / self.peak if done < self.peak else (1 - done) / (1 - self.peak)


class Tail(LoggerDestination):
    """Appends the loss of each batch to a file, and first the run's name."""

    def __init__(self, path):
        self.path = path

    def log_hyperparameters(self, hyperparameters):
        if "run_name" in hyperparameters:
            self.write(hyperparameters["run_name"])

    def log_metrics(self, metrics, step=None):
        if "loss/train/total" in metrics:
            self.write(f"{step} {metrics['loss/train/total']}")

    def write(self, line):
        if dist.get_rank() == 0:
            with open(self.path, "a") as file:
                file.write(f"{line}\n")
