"""How the help of a command looks: arguments by their names, and an example at the end, which parses as it stands."""

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
data show runs/mpt-1b --batch 1200 --loss
checkpoint ls runs/mpt-1b
checkpoint inspect runs/mpt-1b/checkpoints/ba200 --tensors
checkpoint verify s3://bucket/mpt-1b/ba200
checkpoint diff runs/a/checkpoints/ba200 runs/b/checkpoints/ba200
checkpoint export runs/mpt-1b exported --dtype bf16
checkpoint import hf:mosaicml/mpt-7b imported/mpt-7b
checkpoint consolidate runs/mpt-1b weights.safetensors
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
    """End the help of each command of a group, and of the groups in it, with its example."""
    for command in group.registered_commands:
        command.cls = Command
        mine = [example for example in examples if example.startswith(f"{path}{command.name} ")]
        if mine:  # train and eval have a help of their own
            command.epilog = f"\b\nExample: llmfoundry-lite {mine[0]}"  # \b: this line is never wrapped
    for below in group.registered_groups:
        assert below.typer_instance is not None
        add_examples(below.typer_instance, examples, f"{path}{below.name} ")
