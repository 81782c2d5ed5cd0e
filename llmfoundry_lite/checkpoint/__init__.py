"""Portable checkpoints: saved by any number of ranks, verified and restored by any other number.

Modules from the bottom up, without torch: `grid`, `manifest`, `folder`, `local_folder`, `remote_folder`, `open_folder`,
`shards`, `lease`, `commit`, `store`, `log_lines`, `log_parts`, `verify`, `paths`, `start`. With torch: `state`,
`planning`, `save`, `restore`, `full_tensors`.
"""
