"""The model of a checkpoint, held against the size of its tensors before it is built. No torch."""

from collections.abc import Sequence

from llmfoundry_lite.checkpoint.store import Checkpoint
from llmfoundry_lite.config.build import build_block
from llmfoundry_lite.config.check import check_model
from llmfoundry_lite.config.model_schema import ModelConfig
from llmfoundry_lite.errors import CheckpointError, ConfigError, DataError
from llmfoundry_lite.models.flops import find_size_mismatch

MODEL = "model/"
"""Beginning of the names of a model's tensors in a checkpoint."""


def read_model(checkpoint: Checkpoint) -> ModelConfig:
    """Return the configuration of a checkpoint's model.

    Raises DataError if the checkpoint does not say what model it is, CheckpointError if that is far larger than its
    tensors. `evaluation.models.model_config_of` compares names and shapes, too.
    """
    config = checkpoint.manifest.config
    if not isinstance(config, dict) or "model" not in config:
        raise DataError(f"models: {checkpoint.url} does not say what model it is; expected a checkpoint of a run")
    try:
        model = build_block(ModelConfig, config["model"], "model")
        check_model(model)
        problem = find_size_mismatch(model, shapes_in(checkpoint))
    except (ConfigError, ArithmeticError) as error:  # the second for a width beyond any number
        reason = str(error).removeprefix("configuration: ")
        raise DataError(f"{checkpoint.url}: its manifest describes a model that cannot be: {reason}") from error
    if problem is not None:
        raise misfit(checkpoint, problem)
    return model


def shapes_in(checkpoint: Checkpoint) -> dict[str, Sequence[int]]:
    """Return the shape of each of the model's tensors in a checkpoint, by name.

    A tensor that several names share (tied embeddings) is under each of them.
    """
    manifest = checkpoint.manifest
    shapes = {name: record.shape for name, record in manifest.tensors.items() if name.startswith(MODEL)}
    shapes |= {alias: shapes[name] for alias, name in manifest.aliases.items() if name in shapes}
    return {name.removeprefix(MODEL): shape for name, shape in shapes.items()}


def misfit(checkpoint: Checkpoint, problem: str) -> CheckpointError:
    """Return the error for a checkpoint whose configuration describes another model than its tensors.

    `problem` says how they differ.
    """
    return CheckpointError(
        f"{checkpoint.url}: its configuration does not fit its tensors: {problem}; the manifest was changed, or the "
        "weights are another program's: use another checkpoint"
    )
