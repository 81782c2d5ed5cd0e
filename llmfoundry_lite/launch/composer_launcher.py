"""Composer's launcher, with less to read: `python -m llmfoundry_lite.launch.composer_launcher -n 2 -m MODULE ...`.

`ranks.py` starts this as a process of its own. It is the one module outside `training` that imports Composer, and
nothing imports it: `launch` itself has to answer quickly, and `import composer` takes seconds.

The arguments are those of `composer`. What differs is what it prints: not that it waits for ranks which it has asked to
end, and of each rank's output no block that is empty.
"""

import re
import sys

from composer.cli import launcher

from llmfoundry_lite.ranks.output import ignore_output_errors

EMPTY_BLOCK = re.compile(
    r"-+Begin global rank \d+ (?:STDERR-+\n.*?|STDOUT-+\n\s*)-+End global rank \d+ \w+-+\n?", re.DOTALL
)
"""A rank's standard error, which `ranks.py` has written into the same file as its standard output, so that this would
show it twice; or a standard output without anything in it."""


def print_without_noise(text: str) -> None:
    """Print a message of Composer's launcher, in place of its `print`, but without what tells a user nothing.

    Left out are messages that it waits for ranks which it has told to end, and empty blocks of a rank's output.
    """
    if text.startswith("Waiting up to"):
        return
    print(EMPTY_BLOCK.sub("", text).rstrip())


if __name__ == "__main__":
    ignore_output_errors()
    launcher.print = print_without_noise  # type: ignore[attr-defined] - the module has no `print` of its own
    sys.exit(launcher.main())
