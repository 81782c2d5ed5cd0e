"""A feed-forward layer."""

from torch import nn


class SquaredReLU(nn.Module):
    """Two matrices with relu(x)^power between them (So et al. 2021 for a power of 2)."""

    like = "mptmlp"  # for dry runs and plans, which import nothing

    def __init__(self, d_model, expansion_ratio, device=None, bias=True, power=2):
        super().__init__()
        hidden = int(d_model * expansion_ratio)
        self.power = power
        self.up = nn.Linear(d_model, hidden, bias=bias, device=device)
        self.down = nn.Linear(hidden, d_model, bias=bias, device=device)

        # Its output is added to the residual stream, so its first weights are divided by `init_div_is_residual`.
        self.down._is_residual = True

        # A forward pass multiplies and adds for each weight of two matrices; a backward pass does so twice.
        self.flops_per_token = 6 * 2 * d_model * hidden

    def forward(self, x_btd):
        """Return [b, t, d]."""
        return self.down(self.up(x_btd).relu().pow(self.power))
