"""Declares to the core what this companion adds: the command `islands`, and the block `islands` of a run's YAML.

The core reads `COMPANION` without importing anything else of the companion. Modules are named as strings, and imported
when the command or the block is used.
"""

from llmfoundry_lite.companions import Companion

COMPANION = Companion(
    commands={"islands": "llmfoundry_islands.commands:islands"},
    examples=("islands coordinate --listen 10.0.0.1:7070 --islands 2",),
    blocks={"islands": "llmfoundry_islands.block:BLOCK"},
)
