"""The models that are measured, by name: about that many parameters."""

from collections.abc import Iterable
from typing import Any

from llmfoundry_lite.config.schema import ModelConfig
from llmfoundry_lite.errors import ConfigError
from llmfoundry_lite.models.flops import count_flops_per_token

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"d_model": 64, "n_heads": 4, "n_layers": 2, "vocab_size": 512},
    "10m": {"d_model": 256, "n_heads": 4, "n_layers": 7, "vocab_size": 16384},
    "40m": {"d_model": 512, "n_heads": 8, "n_layers": 7, "vocab_size": 32768},
    "125m": {"d_model": 768, "n_heads": 12, "n_layers": 12, "vocab_size": 50368},
    "350m": {"d_model": 1024, "n_heads": 16, "n_layers": 24, "vocab_size": 50368},
    "1b": {"d_model": 2048, "n_heads": 16, "n_layers": 24, "vocab_size": 50368},
    "3b": {"d_model": 2560, "n_heads": 20, "n_layers": 32, "vocab_size": 50368},
    "7b": {"d_model": 4096, "n_heads": 32, "n_layers": 32, "vocab_size": 50368},
}
NAMES = ", ".join(SHAPES)
DTYPES = ("fp32", "bf16")


def model_of(shape: str, max_seq_len: int, **changes: Any) -> ModelConfig:
    return ModelConfig(**{"max_seq_len": max_seq_len, "no_bias": True, **SHAPES[shape], **changes})


def check_shapes(option: str, names: Iterable[str]) -> None:
    """Raises ConfigError for a name that the table does not have."""
    for name in names:
        if name not in SHAPES:
            raise ConfigError(f"{option}: {name!r} given, expected one of {NAMES}")


def check_dtype(dtype: str) -> None:
    """Raises ConfigError for one that no run is measured in."""
    if dtype not in DTYPES:
        raise ConfigError(f"--dtype: {dtype!r} given, expected one of {', '.join(DTYPES)}")


def count_step_flops(shape: str, seq_len: int, batch_size: int) -> int:
    """Model FLOPs of a training step."""
    return count_flops_per_token(model_of(shape, seq_len), seq_len) * batch_size * seq_len
