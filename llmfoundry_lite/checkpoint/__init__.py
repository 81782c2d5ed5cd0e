"""Portable checkpoints, format 2: saved by any number of ranks, verified and restored by any other number.

Mechanism only; when to save and what a run's scalars are is `training`'s. From the bottom up: `codec`, `layouts` (how
tensors are cut) and `manifest` (types and their JSON), `places` (local folders and fsspec URLs), `shards` (files of
hashed blocks), `lease`, `store` (publishing, retention, search), `log_parts` (the run's log beside them), `verify`;
and, with torch, `state` (model and optimizer as named tensors), `exchange` (JSON between ranks), `planning` (who writes
what), `format` (saving), `restore` (loading), `whole` (one process: export, diff, consolidate).
Nothing here is pickled or unpickled.
"""
