"""The launcher of one node, the live view and the relay, as parts for the core."""

from llmfoundry_lite.companions import Companion

COMPANION = Companion(
    commands={
        "train -n": "llmfoundry_ops.commands:train_ranks",
        "watch": "llmfoundry_ops.commands:watch_command",
        "relay": "llmfoundry_ops.commands:relay_command",
    },
    examples=("watch runs/mpt-1b", "relay relay.yaml"),
    readers={"relay.jsonl": "llmfoundry_ops.report:describe_relay"},
)
