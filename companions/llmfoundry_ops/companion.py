"""The launcher of one node, and the relay, as parts for the core."""

from llmfoundry_lite.companions import Companion

COMPANION = Companion(
    commands={"train -n": "llmfoundry_ops.commands:train_ranks", "relay": "llmfoundry_ops.commands:relay_command"},
    examples=("relay relay.yaml",),
    readers={"relay.jsonl": "llmfoundry_ops.report:describe_relay"},
)
