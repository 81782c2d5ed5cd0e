"""Decide of which kind a parameter is for muP: how its shape depends on the width of the model.

`config/mup.py` says what follows from the kind.
"""

from torch import Tensor, nn

from llmfoundry_lite.config.mup import Kind
from llmfoundry_lite.models.own_parts import kind_in_part

INPUTS = ("wte.weight", "wpe.weight")
"""Ends of the names of the embeddings of tokens and of positions."""
OUTPUT = "lm_head.weight"
"""End of the name of the output embedding, if it is not tied to the input embedding."""


def kind_of(name: str, parameter: Tensor, owner: tuple[nn.Module, str] | None) -> Kind:
    """Return the kind of a parameter of an MPT, whose full name is `name`.

    `owner` is what `find_owner` returns: the part of the user's own that has the parameter, and the parameter's name
    in it, or None. Such a part says itself of which kind it is, or the model could not have been built.
    """
    if owner is not None:
        kind = kind_in_part(*owner)
        assert kind is not None, "refused when the model was built"
        return kind
    if name.endswith(INPUTS):
        return "input"
    if name.endswith(OUTPUT):
        return "output"
    return "hidden" if parameter.ndim > 1 else "vector"
