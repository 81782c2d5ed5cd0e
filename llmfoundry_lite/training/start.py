"""The start of a launch: where it starts, the restore of weights and optimizer, and how it differs from the run so far.

`find_start` chooses the checkpoint before the model is built. It checks the manifest, and refuses a run that another
launch is training. `restore_tensors` reads the checkpoint when the model is there. `checkpoint/start.py` has the rules
by which a checkpoint is chosen, and `checkpointing.py` restores what a run has besides tensors.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch.distributed as dist
from composer.core import State

from llmfoundry_lite.checkpoint.lease import LeaseRequest
from llmfoundry_lite.checkpoint.manifest import Manifest
from llmfoundry_lite.checkpoint.open_folder import open_folder
from llmfoundry_lite.checkpoint.restore import Restored, load, load_newest
from llmfoundry_lite.checkpoint.save import Saver
from llmfoundry_lite.checkpoint.start import Start, check_fit, choose_start, open_run_store
from llmfoundry_lite.checkpoint.store import CheckpointStore
from llmfoundry_lite.config.changes import Change
from llmfoundry_lite.config.schema import TrainConfig
from llmfoundry_lite.data.tokenizer import find_fingerprints
from llmfoundry_lite.errors import CheckpointError, printable
from llmfoundry_lite.ranks.exchange import broadcast_json, raising_on_all_ranks
from llmfoundry_lite.training.adapter import LanguageModel
from llmfoundry_lite.training.run_state import build_segment, find_differences
from llmfoundry_lite.training.second_place import describe_missing_save


