"""The commands that this companion adds to `llmfoundry-lite`: `bench` measures a machine, and `doctor` checks it.

The core reads `COMPANION` without importing torch. It imports `commands.py` only if the user calls one of the commands.
"""

from llmfoundry_lite.companions import Companion

COMPANION = Companion(
    commands={
        "bench": "llmfoundry_machines.commands:bench",
        "doctor": "llmfoundry_machines.commands:doctor_command",
    },
    examples=(
        "doctor --folder /scratch",
        "bench mfu --out measured",
        "bench scaling --devices 1,2,4,8 --out measured",
        "bench compare there/block.json here/block.json",
        "bench profile mpt-125m --out measured",
        "bench block --out measured",
        "bench seqlen --lengths 2048,8192 --out measured",
        "bench accumulation --microbatches 1,2,4 --out measured",
        "bench memory --out measured",
        "bench mup mpt-quickstart --widths 64,128,256 --out measured",
    ),
)
