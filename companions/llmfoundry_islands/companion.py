"""The command and the block that islands add."""

from llmfoundry_lite.companions import Companion

COMPANION = Companion(
    commands={"islands": "llmfoundry_islands.commands:islands"},
    examples=("islands coordinate --listen 10.0.0.1:7070 --islands 2",),
    blocks={"islands": "llmfoundry_islands.block:BLOCK"},
)
