"""Portable checkpoints: saved by any number of ranks, verified and restored by any other number.

A checkpoint is a folder, `ba200`, with a manifest in JSON and one safetensors file for each rank that saved it.
docs/checkpoint-format.md describes the files. The modules form five groups; read them in this order:

1. The format on disk. `manifest` has the dataclasses of a checkpoint, and `manifest_json` their JSON. `grid` computes
   which file holds which part (chunk) of a tensor. `shards` writes and reads safetensors files with hashes, and
   `verify` compares files with the manifest.
2. Storage. `folder` is the interface to a folder, `local_folder` implements it for disks and `remote_folder` for object
   stores; `open_folder` chooses by the path or URL. `commit` makes a save appear or disappear whole. `lease` decides
   which launch may write. `store` puts these together: it lists, publishes and removes the checkpoints of one run.
   `retention` decides which of them are old. `run_log` keeps copies of the run's log beside them, and `paths` resolves
   what users give. `fallback` copies saves between a run's two places.
3. Saving. `state` names the tensors of model and optimizer, `planning` decides which rank writes which chunk, `staging`
   copies the chunks, and `save` writes them in the background. `state_digest` is a checksum that does not depend on how
   ranks divide tensors. `save_interval` computes how often to save.
4. Restoring. `start` chooses the checkpoint that a launch begins from, by manifests alone. `restore` reads a checkpoint
   into model and optimizer on all ranks.
5. Tools. `full_tensors` reads whole tensors in one process, to export, compare or consolidate them.

To follow one save, begin with `Saver` in `save`; to follow one restore, with `load_newest` in `restore`. Only `state`,
`planning`, `staging`, `save`, `restore`, `state_digest` and `full_tensors` import torch.

Words: a *save* is one act of saving with a unique `save_id`, a *draft* is its files before they are committed, and a
*checkpoint* is a committed save. A *lease epoch* is the number of a launch's claim to write; later launches have higher
ones. A *shard* is a rank's file, a *chunk* a rectangular part of a tensor in it, and a *block* 1 MiB that has a hash.
"""
