"""Parts of a model that a user might write: a norm, a feed-forward layer and attention. `docs/own-parts.md` shows them."""

import torch
from torch import nn


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
