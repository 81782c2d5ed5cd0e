"""A norm with one parameter."""

import torch
from torch import nn


class ScaleNorm(nn.Module):
    """Scales each vector to one learned length (Nguyen and Salazar 2019)."""

    def __init__(self, normalized_shape, eps=1e-5, device=None, length=1.0):
        super().__init__()
        self.eps = eps
        self.first_length = length
        self.length = nn.Parameter(torch.empty(1, device=device))

    def initial_distribution(self, name):
        """Return how the values of a parameter are drawn; what the constructor writes into it is lost."""
        return ("constant", self.first_length)

    def forward(self, x):
        """Return `x` divided by its root mean square and times the length, in its shape and dtype."""
        scale = x.square().mean(-1, keepdim=True).add(self.eps).rsqrt()
        return x * scale * self.length
