"""Format the help of commands: arguments without their types in Python, and an example at the end.

The tests parse each example, so it is a command line that works as it is.
"""

from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperCommand

EXAMPLES = """\
list models
generate runs/mpt-1b --prompt "Once upon a time"
report runs/a100 runs/mi250 --price A100-80GB=2.5 --price MI250=1.2 --out compared
compare results/icl-zero-shot/base.json results/icl-zero-shot/ours.json --out compared
replay runs/mpt-1b ba100..ba110 -n 8
data prepare my-texts/ --out data/mine --tokenizer train:32768 --max-seq-len 2048
data join data/mine
data append data/mine more-texts/ --name news
data ls s3://bucket/data
data index data/spark
data show runs/mpt-1b --batch 1200 --loss
data overlap data/mine --task arc_easy --task piqa --out overlap
checkpoint ls runs/mpt-1b
checkpoint inspect runs/mpt-1b/checkpoints/ba200 --tensors
checkpoint verify s3://bucket/mpt-1b/ba200
checkpoint diff runs/a/checkpoints/ba200 runs/b/checkpoints/ba200
checkpoint export runs/mpt-1b exported --dtype bf16
checkpoint import hf:mosaicml/mpt-7b imported/mpt-7b
checkpoint copy /nvme/mpt-1b s3://bucket/mpt-1b
checkpoint consolidate runs/mpt-1b weights.safetensors
checkpoint average runs/mpt-1b --last 5 --out averaged/mpt-1b
checkpoint prune runs/mpt-1b --keep 3 --keep-every 1000 --dry-run
""".splitlines()


class Command(TyperCommand):
    """A command whose help leaves out Python's names of types, such as `list[str]` beside an argument."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the sections of arguments and options."""
        arguments: list[tuple[str, str]] = []
        options: list[tuple[str, str]] = []
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is None:  # hidden
                continue
            name, text = record
            if parameter.param_type_name == "argument":
                arguments.append((name.partition(" <")[0], text))
            else:
                options.append((name.replace(" range>", ">"), text))  # the text has the range
        for heading, rows in (("Arguments", arguments), ("Options", options)):
            if rows:
                with formatter.section(heading):
                    formatter.write_dl(rows)


def add_examples(group: typer.Typer, examples: Sequence[str], path: str = "") -> None:
    """Add an example to the end of the help of each command in a group, and in the groups inside it.

    `examples` are command lines without the program's name. The first one that begins with a command's name is its
    example. `path` is the names of the groups around it, with a final space: `checkpoint `.
    """
    for command in group.registered_commands:
        command.cls = Command
        examples_of_command = [example for example in examples if example.startswith(f"{path}{command.name} ")]
        # `train` and `eval` have no example here, because they print a help of their own.
        if examples_of_command:
            command.epilog = f"\b\nExample: llmfoundry-lite {examples_of_command[0]}"  # \b keeps the line unwrapped
    for inner_group in group.registered_groups:
        assert inner_group.typer_instance is not None
        add_examples(inner_group.typer_instance, examples, f"{path}{inner_group.name} ")
