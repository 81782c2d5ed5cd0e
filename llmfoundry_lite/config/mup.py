"""muP, the maximal update parametrisation: how initial weights, learning rates and multipliers depend on the width.

Yang et al. 2022, "Tensor Programs V: Tuning Large Neural Networks via Zero-Shot Hyperparameter Transfer". A learning
rate that is best for a narrow base model is then about the best for wider models, too. All rules are relative to the
base model. With m the width over that of the base model (`ModelConfig.width_mult`), table 8 of the paper says for Adam:

    kind     parameters                               initial std      learning rate
    input    embeddings of tokens and positions       as in the base   as in the base
    output   untied output embedding                  as in the base   as in the base, and logits are divided by m
    hidden   matrices from width to width             / sqrt(m)        / m
    vector   biases and norms                         as in the base   as in the base

The paper's table says nothing of weight decay and eps:

- Weight decay removes the same share of a weight in each step as in the base model, so the coefficient that torch
  multiplies by the learning rate is multiplied by m where the rate is divided by m. So does `MuAdamW` of the authors'
  package (microsoft/mup, `mup/optim.py`). Wang and Aitchison 2024, "How to set AdamW's weight decay as you scale model
  and dataset size", found that the learning rate does not transfer otherwise.
- Adam's eps is divided by m for all parameters, because all gradients are. So does CompleteP at a fixed depth (Dey et
  al. 2025, "Don't be lazy: CompleteP enables compute-efficient deep transformers", equation 40 as cited in the authors'
  EleutherAI/nanoGPT-mup). `MuAdamW` leaves eps as it is, by which updates shrink in wide models as soon as gradients
  are not much larger than eps (Everett et al. 2024, "Scaling Exponents Across Parameterizations and Optimizers").

Scores of attention are proportional to 1 / head dimension, and not to 1 / sqrt(head dimension). Tied embeddings are an
input, and divide the logits by m like an output.

`models/mup.py` says of which kind a parameter is, and `models/initialise.py` draws it. `config/parameter_groups.py`
divides parameters by their factors of the learning rate, and `ModelConfig` has the multipliers.
"""

import math
from dataclasses import dataclass
from typing import Literal

from llmfoundry_lite.config.fields import POSITIVE, REQUIRED, setting
from llmfoundry_lite.config.optimizer_schema import OptimizerConfig
from llmfoundry_lite.config.optimizers import OPTIMIZERS
from llmfoundry_lite.config.parameter_groups import Factors

Kind = Literal["input", "output", "hidden", "vector"]
"""How a parameter's shape depends on the width; see the table above."""
INPUTS = ("wte.weight", "wpe.weight")
"""Ends of the names of the embeddings of tokens and of positions."""
OUTPUT = "lm_head.weight"
"""End of the name of the output embedding, if it is not tied to the input embedding."""


@dataclass(kw_only=True, slots=True, frozen=True)
class MupConfig:
    """muP: the base model, from which this model takes over learning rate, initial weights and multipliers."""

    base_width: int = setting(REQUIRED, POSITIVE)
    """d_model of the base model. Its other widths, such as ffn_hidden_size, are in the same ratio to those here."""
    base_head_dim: int | None = setting(None, POSITIVE)
    """Width of a head in the base model. Default: as here, because wider models have more heads."""
    embedding_mult: float = setting(1.0, POSITIVE)
    """Factor of the embeddings where they enter the first block. It is the same for all widths, and can be tuned."""


HIDDEN_LR_EXPONENTS = {"adam": 1.0, "match_rms_adamw": 0.5, "original": 0.0}
"""How an optimizer's updates depend on the learning rate -> x, if the rate of hidden matrices is divided by m^x.

adam: each element of an update is about as large as the rate, so that the update adds up over the inputs. That holds
    for Lion, too, whose elements are the rate or its negative.
match_rms_adamw: muon's updates with this `adjust_lr_fn` have a spectral norm of 0.2 rate sqrt(width). Features learn at
    the same speed for all widths if that norm does not depend on the width (Yang, Simon and Bernstein 2023, "A Spectral
    Condition for Feature Learning").
original: muon's updates have a spectral norm of rate sqrt(max(1, rows / columns)), which does not depend on the width.
"""


def kind_by_name(name: str, num_dimensions: int) -> Kind:
    """Return the kind of a parameter of our own layers, whose full name is `name`."""
    if name.endswith(INPUTS):
        return "input"
    if name.endswith(OUTPUT):
        return "output"
    return "hidden" if num_dimensions > 1 else "vector"


def initial_std_factor(kind: Kind, width_mult: float) -> float:
    """Return a parameter's initial standard deviation over that of the base model."""
    return 1.0 / math.sqrt(width_mult) if kind == "hidden" else 1.0


def updates_of(optimizer: OptimizerConfig) -> str:
    """Return the key of HIDDEN_LR_EXPONENTS that describes how an optimizer updates the matrices of the blocks."""
    if optimizer.name == "muon":
        return optimizer.adjust_lr_fn or "match_rms_adamw"
    return "adam"


def learning_rate_factor(kind: Kind, width_mult: float, updates: str = "adam") -> float:
    """Return a parameter's learning rate over that of the base model. `updates` is a key of HIDDEN_LR_EXPONENTS."""
    return width_mult ** -HIDDEN_LR_EXPONENTS[updates] if kind == "hidden" else 1.0


def factors_of_kind(
    kind: Kind, optimizer: OptimizerConfig, width_mult: float, *, is_matrix_of_block: bool = False
) -> Factors:
    """Return what the optimizer's settings are multiplied by for parameters of a kind.

    `is_matrix_of_block` says whether the parameter is a matrix of a block, which muon does not leave to AdamW.
    """
    updates = updates_of(optimizer) if is_matrix_of_block else "adam"
    lr = learning_rate_factor(kind, width_mult, updates)
    # A step shrinks weights by the same share as in the base model. Where torch multiplies the coefficient by the
    # learning rate, it makes up for the rate's factor.
    decay_follows_schedule = OPTIMIZERS[optimizer.name].decay_follows_schedule
    return Factors(lr=lr, weight_decay=1.0 if decay_follows_schedule else 1.0 / lr, eps=1.0 / width_mult)
