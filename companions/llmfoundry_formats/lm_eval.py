"""Runs lm-evaluation-harness on a checkpoint, with our scorer and without an export.

python -m llmfoundry_formats.lm_eval --model llmfoundry_lite --model_args run=runs/mpt-1b --tasks arc_easy
composer -n 8 -m llmfoundry_formats.lm_eval --model llmfoundry_lite --model_args run=runs/mpt-1b --tasks arc_easy

lm_eval 0.4.13 finds models in a table, to which no entry point of a package can add. `register` adds ours; then
lm_eval's own command line runs. In Python, call `register()` before
`lm_eval.simple_evaluate(model="llmfoundry_lite", …)`. The model is in `lm_eval_model.py`.
"""

# pyright: reportMissingImports=false

import sys
from collections.abc import Sequence

from llmfoundry_lite.errors import ConfigError
from llmfoundry_lite.ranks.ending import run_and_exit


def main(arguments: Sequence[str]) -> None:
    """Run lm_eval's command line with our model. `arguments` are lm_eval's. Raises ConfigError."""
    register()
    from lm_eval.__main__ import cli_evaluate

    sys.argv[1:] = arguments
    cli_evaluate()


def register() -> None:
    """Add the model `llmfoundry_lite` to lm_eval's table. lm_eval imports it only when a user asks for it.

    Raises ConfigError if lm_eval is not installed, or is a release whose table is elsewhere.
    """
    try:
        import lm_eval.models  # noqa: F401  registers lm_eval's own models, so that ours comes after them
        from lm_eval.api.registry import model_registry
    except ImportError as error:
        raise ConfigError(
            f"lm_eval is not installed, or is not the release that this needs ({error}); pip install 'lm-eval==0.4.13'"
        ) from None
    model_registry.register("llmfoundry_lite", target="llmfoundry_formats.lm_eval_model:CheckpointLM")


if __name__ == "__main__":
    run_and_exit(main)
