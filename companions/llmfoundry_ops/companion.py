"""Commands that start runs, keep them going and watch them."""

from llmfoundry_lite.companions import Companion

COMPANION = Companion(
    commands={
        "init": "llmfoundry_ops.commands:init",
        "watch": "llmfoundry_ops.commands:watch_command",
        "relay": "llmfoundry_ops.commands:relay_command",
        "runs": "llmfoundry_ops.run_commands:runs",
    },
    examples=(
        "init my-texts/ --hours 8",
        "init data/mine --size 125m",
        "watch runs/mpt-1b",
        "relay relay.yaml",
        "runs ls s3://bucket",
        "runs prune s3://bucket --keep-last 2 --dry-run",
    ),
)
