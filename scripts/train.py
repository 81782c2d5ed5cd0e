"""Train a model.

composer -n 2 scripts/train.py yamls/pretrain/mpt-quickstart.yaml max_duration=20ba
python scripts/train.py yamls/pretrain/mpt-125m.yaml --dry-run
"""

import os
from collections.abc import Sequence

from llmfoundry_lite import preflight
from llmfoundry_lite.config.load_train import load_train_config
from llmfoundry_lite.errors import UserError, printable
from llmfoundry_lite.ranks.ending import run_and_exit
from llmfoundry_lite.ranks.rank import this_rank


def main(arguments: Sequence[str]) -> None:
    world_size = this_rank().world_size
    try:
        invocation = load_train_config(arguments)
        config = invocation.config
        found = preflight.check(config, world_size, must_exist=not invocation.dry_run)
    except UserError as error:
        if this_rank().local_rank == 0 and "--dry-run" not in arguments:
            preflight.record_refusal(arguments, str(error))
        raise
    if this_rank().rank == 0:
        for note in invocation.notes:
            print(printable(note))
    if invocation.dry_run:
        if this_rank().rank == 0:
            print(preflight.describe(config, world_size, found, this_rank().local_world_size))
        return

    for name, value in config.environment.items():
        os.environ.setdefault(name, value)  # before torch looks
    from llmfoundry_lite.training.train import train  # imports Composer, which takes seconds

    train(config)


if __name__ == "__main__":
    run_and_exit(main)
