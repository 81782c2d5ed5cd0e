"""The imports of a training process, made when this module is imported.

`multiprocessing.set_forkserver_preload` takes names of modules. With this one, the server imports once what each of its
forks would import again.
"""

from llmfoundry_lite.ranks.lean_imports import HEAVY, import_lean

import_lean(*HEAVY)
