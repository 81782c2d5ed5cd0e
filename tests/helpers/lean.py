"""For the fork server of `launch.py`: the imports of a launch without components of the user's own."""

from llmfoundry_lite.training.lean_imports import HEAVY, import_lean

import_lean(*HEAVY)
