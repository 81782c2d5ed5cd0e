"""Portable checkpoints, format 2: saved by any number of ranks, verified and restored by any other number.

Modules from the bottom up, without torch: `layouts`, `manifest`, `folders`, `shards`, `lease`, `commit`, `store`,
`log_parts`, `verify`, `paths`. With torch: `state`, `planning`, `save`, `restore`, `full_tensors`.
"""
