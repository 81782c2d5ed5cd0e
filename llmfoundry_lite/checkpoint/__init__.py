"""Portable checkpoints: saved by any number of ranks, verified and restored by any other number.

docs/checkpoint-format.md describes the files. To understand the code, read the modules in this order:

1. `start` chooses the checkpoint that a launch begins from.
2. `save` and `restore` copy a model's state to a checkpoint and back. `state` names the tensors of model and optimizer,
   and `planning` decides which rank writes what. `state_digest` is a checksum that does not depend on how ranks divide
   tensors. `full_tensors` reads whole tensors in one process.
3. `store` holds the checkpoints of one run: it lists, publishes and removes them. `lease` decides which launch may
   write, and `commit` makes a save appear or disappear whole. `run_log` keeps the run's log beside them.
4. `manifest`, `grid` and `shards` are the format: JSON, arithmetic, and safetensors files with hashes. `verify` checks
   files against them.
5. `folder` is the interface to a disk (`local_folder`) or an object store (`remote_folder`); `open_folder` opens one.

`paths` resolves what users give, and `save_interval` computes how often to save. Only `state`, `planning`, `save`,
`restore`, `state_digest` and `full_tensors` import torch.
"""
