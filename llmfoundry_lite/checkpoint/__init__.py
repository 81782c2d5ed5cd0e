"""Portable checkpoints, format 2: saved by any number of ranks, verified and restored by any other number.

From the bottom up, without torch: `layouts` and `manifest` (the format), `folders`, `shards`, `lease`, `commit`,
`store`, `log_parts`, `verify`, `where`. With torch: `state`, `planning`, `save`, `restore`, `whole`. When to save, and
what a run's scalars are, is up to `training`.
"""
