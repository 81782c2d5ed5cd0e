"""Portable checkpoints, format 2: saved by any number of ranks, verified and restored by any other number.

From the bottom up, without torch: `layouts` and `manifest` (the format), `folders` (on a disk or behind a URL),
`shards` (files of hashed blocks), `lease`, `commit`, `store` (publishing, retention, search), `log_parts`, `verify`,
`where`. With torch: `state` (model and optimizer as named tensors), `planning` (who writes what), `save`, `restore`,
`whole` (one process). Nothing here is pickled or unpickled; when to save, and what a run's scalars are, is up to
`training`.
"""
