"""Composer's launcher with less output: `python -m llmfoundry_lite.launch.composer_launcher -n 2 -m MODULE ...`.

`ranks.py` starts this as a process of its own. It is the only module outside `training` that imports Composer, which
takes seconds, so no other module imports this one.

The arguments are those of `composer`. Messages that it waits for ranks to end, and empty blocks of a rank's output, are
not printed.
"""

import re
import sys

from composer.cli import launcher

from llmfoundry_lite.ranks.output import ignore_output_errors

EMPTY_BLOCK = re.compile(
    r"-+Begin global rank \d+ (?:STDERR-+\n.*?|STDOUT-+\n\s*)-+End global rank \d+ \w+-+\n?", re.DOTALL
)
"""A block of a rank's standard error, or an empty block of its standard output.

`ranks.py` writes both into one file, which Composer would print twice: once as each of them."""


def print_without_noise(text: str) -> None:
    """Print a message of Composer's launcher. It replaces `print` in the launcher's module.

    Messages that it waits for ranks to end are dropped, and blocks of EMPTY_BLOCK are cut out.
    """
    if text.startswith("Waiting up to"):
        return
    print(EMPTY_BLOCK.sub("", text).rstrip())


if __name__ == "__main__":
    ignore_output_errors()
    launcher.print = print_without_noise  # type: ignore[attr-defined] - the module has no `print` of its own
    sys.exit(launcher.main())
