"""The `llmfoundry-lite` program, and `python -m llmfoundry_lite`. It handles signals from the first moment on."""

import sys

from llmfoundry_lite.ranks.signals import leave_with_75_when_asked

LEAVE_WITH_75 = ("train", "eval", "relay")
"""Commands that a scheduler may preempt. Exit code 75 asks it to run them again."""


def main() -> None:
    """Run the command line. A long command that a signal asks to leave during its imports exits with code 75."""
    has_command = len(sys.argv) > 1
    if has_command and sys.argv[1] in LEAVE_WITH_75:
        leave_with_75_when_asked()

    # This import takes a moment, in which a signal may arrive.
    from llmfoundry_lite.cli.main import main

    main()


if __name__ == "__main__":
    main()
