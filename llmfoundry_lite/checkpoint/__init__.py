"""Portable checkpoints: saved by any number of ranks, verified and restored by any other number.

Modules from the bottom up, without torch: `grid`, `manifest`, `folder`, `local_folder`, `remote_folder`, `open_folder`,
`shards`, `lease`, `commit`, `store`, `run_log`, `verify`, `paths`, `start`. Beside them stands `save_interval`. With
torch: `state`, `planning`, `save`, `restore`, `full_tensors`.
"""
