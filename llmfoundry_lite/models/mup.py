"""Decide of which kind a parameter is for muP: how its shape depends on the width of the model.

`config/mup.py` says what follows from the kind.
"""

from torch import nn

from llmfoundry_lite.config.mup import Kind, kind_by_name
from llmfoundry_lite.models.own_parts import kind_in_part


def kind_of(name: str, num_dimensions: int, owner: tuple[nn.Module, str] | None) -> Kind:
    """Return the kind of a parameter of an MPT, whose full name is `name`.

    `owner` is what `find_owner` returns: the part of the user's own that has the parameter, and the parameter's name
    in it, or None. Such a part says itself of which kind it is. Raises ConfigError if it does not.
    """
    return kind_by_name(name, num_dimensions) if owner is None else kind_in_part(*owner)
