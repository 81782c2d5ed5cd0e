"""The `llmfoundry-lite` program, and `python -m llmfoundry_lite`. It handles signals from the first moment on."""

import sys

from llmfoundry_lite.ranks.signals import leave_with_75_when_asked

LEAVE_WITH_75 = ("train", "eval", "relay")


def main() -> None:
    if sys.argv[1:2] and sys.argv[1] in LEAVE_WITH_75:
        leave_with_75_when_asked()
    from llmfoundry_lite.cli.main import main

    main()


if __name__ == "__main__":
    main()
