"""The last imports of the fork server of `launch.py`: what each rank would import again after its fork.

The garbage collector leaves the objects that are here by now alone. Otherwise the first full collection of each rank
would visit all of them, and copy the memory in which they are.
"""

import gc

import huggingface_hub.file_download  # noqa: F401

import llmfoundry_lite.dry_run
import llmfoundry_lite.launch_train  # noqa: F401

gc.collect()
gc.freeze()
