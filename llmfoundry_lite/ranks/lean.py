"""The imports of a training process, for a server that forks such processes: `multiprocessing`'s forkserver."""

from llmfoundry_lite.ranks.lean_imports import HEAVY, import_lean

import_lean(*HEAVY)
