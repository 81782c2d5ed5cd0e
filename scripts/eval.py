"""Evaluate models in context.

python scripts/eval.py yamls/eval/icl-zero-shot.yaml models.ours=runs/mpt-1b models.base=runs/other/checkpoints/ba400
composer -n 8 scripts/eval.py yamls/eval/icl-zero-shot.yaml models.ours=runs/mpt-1b
python scripts/eval.py --all-checkpoints runs/mpt-1b     # a learning curve, on the tasks in evals/ whose data are here
"""

import os
from collections.abc import Sequence

from llmfoundry_lite.config.load_eval import load_eval_config
from llmfoundry_lite.ranks.ending import run_and_exit


def main(arguments: Sequence[str]) -> None:
    config, tasks = load_eval_config(arguments)
    for name, value in config.environment.items():
        os.environ.setdefault(name, value)  # before torch looks

    from llmfoundry_lite.suite import run_suite  # imports torch

    run_suite(config, tasks)


if __name__ == "__main__":
    run_and_exit(main)
