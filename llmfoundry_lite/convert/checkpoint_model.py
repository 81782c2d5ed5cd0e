"""Reads which model a checkpoint has, and compares it with the size of its tensors before it is built. No torch."""

from collections.abc import Sequence

from llmfoundry_lite.checkpoint.store import Checkpoint
from llmfoundry_lite.config.build import build_block
from llmfoundry_lite.config.check import check_model
from llmfoundry_lite.config.model_schema import ModelConfig
from llmfoundry_lite.errors import CheckpointError, ConfigError, DataError
from llmfoundry_lite.models.flops import find_size_mismatch
from llmfoundry_lite.own_code import trust_code

MODEL = "model/"
"""Beginning of the names of a model's tensors in a checkpoint."""


def read_model(checkpoint: Checkpoint, *, trusts_code: bool = False) -> ModelConfig:
    """Return the model configuration that a checkpoint's manifest records.

    A manifest may come from a stranger. If it names code, for a part of the model, the code runs only with
    `trusts_code`, by which the user has said that they trust its author.

    Only the sizes are compared with the checkpoint's tensors, so that a manifest cannot make a caller build a model
    that is far larger than they are. `evaluation.models.model_config_of` compares names and shapes, too.

    Raises DataError if the manifest does not say what model it is, describes an impossible one, or names code that is
    not trusted, and CheckpointError if the model is far larger than the tensors.
    """
    config = checkpoint.manifest.config
    if not isinstance(config, dict) or "model" not in config:
        raise DataError(f"models: {checkpoint.url} does not say what model it is; expected a checkpoint of a run")

    # The model is checked as a YAML file's is.
    try:
        model = build_block(ModelConfig, config["model"], "model")
        check_model(model)
        problem = find_size_mismatch(model, shapes_in(checkpoint))
    except (ConfigError, ArithmeticError) as error:  # ArithmeticError for sizes that overflow
        reason = str(error).removeprefix("configuration: ")
        raise DataError(f"{checkpoint.url}: its manifest describes a model that cannot be: {reason}") from error
    if problem is not None:
        raise misfit(checkpoint, problem)

    if model.own_parts and not trusts_code:
        code = ", ".join(f"model.{key} {name}" for key, name in model.own_parts.items())
        raise DataError(
            f"{checkpoint.url}: its model has parts that are code of its author: {code}; if you trust it, let it run: "
            "eval with trust_code=true, generate and replay with --trust-code, lf.load with trust_code=True; other "
            "commands run no such code"
        )
    trust_code(model.own_parts.values())
    return model


def shapes_in(checkpoint: Checkpoint) -> dict[str, Sequence[int]]:
    """Return the shape of each of the model's tensors in a checkpoint, by its name in the model's state dict.

    The checkpoint's "model/transformer.wte.weight" becomes "transformer.wte.weight". A tensor that several names share
    (tied embeddings) is under each of them. Tensors of the optimizer are left out.
    """
    manifest = checkpoint.manifest
    shapes: dict[str, Sequence[int]] = {}
    for name, record in manifest.tensors.items():
        if name.startswith(MODEL):
            shapes[name] = record.shape

    # An alias is a further name of a tensor that is stored once.
    for alias, name in manifest.aliases.items():
        if name in shapes:
            shapes[alias] = shapes[name]
    return {name.removeprefix(MODEL): shape for name, shape in shapes.items()}


def misfit(checkpoint: Checkpoint, problem: str) -> CheckpointError:
    """Return the error for a checkpoint whose configuration describes another model than its tensors.

    `problem` says how they differ.
    """
    return CheckpointError(
        f"{checkpoint.url}: its configuration does not fit its tensors: {problem}; the manifest was changed, or the "
        "weights are another program's: use another checkpoint"
    )
