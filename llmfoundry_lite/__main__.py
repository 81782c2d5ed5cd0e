"""The `llmfoundry-lite` program, and `python -m llmfoundry_lite`.

It handles signals before it imports the command line (`cli/main.py`), which takes a moment.
"""

import sys

from llmfoundry_lite.ranks.signals import leave_with_75_when_asked

LEAVE_WITH_75 = ("train", "eval", "relay")
"""Commands that a scheduler may preempt. Their exit code 75 tells it to run them again."""


def main() -> None:
    """Run the command line. If a signal stops a command of LEAVE_WITH_75 during its imports, it exits with code 75."""
    has_command = len(sys.argv) > 1
    if has_command and sys.argv[1] in LEAVE_WITH_75:
        leave_with_75_when_asked()

    # Only now, because a signal may arrive while this is imported.
    from llmfoundry_lite.cli.main import main

    main()


if __name__ == "__main__":
    main()
