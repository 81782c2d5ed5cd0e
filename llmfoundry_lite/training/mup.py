"""Factors of learning rates, weight decay and eps in a model with muP: they depend on the kind of a parameter.

`config/mup.py` has the rules, and `config/parameter_groups.py` applies the factors to the groups of an optimizer.
"""

from collections.abc import Mapping

from llmfoundry_lite.config.mup import factors_of_kind
from llmfoundry_lite.config.optimizer_schema import OptimizerConfig
from llmfoundry_lite.config.parameter_groups import Factors, FactorsOf
from llmfoundry_lite.errors import ConfigError
from llmfoundry_lite.models.mup import kind_of
from llmfoundry_lite.models.names import is_matrix_of_block
from llmfoundry_lite.models.own_parts import find_owner
from llmfoundry_lite.training.optimizers import OptimizerContext


def build_factors(
    config: OptimizerConfig,
    context: OptimizerContext,
    names_here: Mapping[str, str],
    num_dimensions: Mapping[str, int],
) -> FactorsOf | None:
    """Return the function from a parameter's name in checkpoints to its factors; None if all of them are 1.

    names_here: the parameters of this rank, their names in checkpoints -> those in `context.model`.
    num_dimensions: number of dimensions of all parameters, by name.
    """
    model_config = context.model_config
    if model_config.width_mult == 1:
        return None

    def factors_of(name: str) -> Factors:
        """Return a parameter's factors. Raises ConfigError for a matrix that muon cannot give its own rate."""
        # A pipeline has other names than its modules, and no parts of the user's own.
        owner = find_owner(context.model, names_here[name]) if model_config.own_parts and name in names_here else None
        kind = kind_of(name, num_dimensions[name], owner)
        is_matrix = is_matrix_of_block(name, num_dimensions[name])
        if config.name == "muon" and is_matrix and kind != "hidden":
            raise ConfigError(
                "model.mup: muon orthogonalises all matrices of the blocks, and mup_kind of a part of your own says "
                f"that {name} is no hidden matrix; use decoupled_adamw, or leave mup out"
            )
        return factors_of_kind(kind, config, model_config.width_mult, is_matrix_of_block=is_matrix)

    return factors_of
