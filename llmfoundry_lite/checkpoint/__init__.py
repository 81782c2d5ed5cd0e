"""Portable checkpoints, format 2: saved by any number of ranks, verified and restored by any other number.

Mechanism only; when to save and what a run's scalars are is `training`'s. From the bottom up: `layouts` (how tensors
are cut), `manifest` (types), `manifest_json` (the same as JSON), `folders` (on a disk or behind an fsspec URL),
`shards` (files of hashed blocks), `lease`, `store` (publishing, retention, search), `log_parts` (the run's log beside
them), `verify`, `where` (runs and folders by name); and, with torch, `state` (model and optimizer as named tensors),
`planning` (who writes what), `save`, `restore`, `whole` (one process: export, diff, consolidate).
Nothing here is pickled or unpickled.
"""
