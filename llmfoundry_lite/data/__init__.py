"""Training data: MDS shards -> batches of token ids, the same on any number of nodes, ranks and workers.

Read the files in this order:

1. `order.py` decides the order of samples, as a function of a few integers. `stages.py` does so for a run whose data
   changes at some batches. Neither reads a file.
2. `index_files.py` finds the indexes of the shards, and `shard_table.py` reads them. `streams.py` downloads, unpacks
   and checks shards, and `cache.py` decides when. `folder_locks.py` keeps two launches from downloading into one
   folder.
3. `opened_shards.py` opens the shards of a data set on all ranks together, by all of these. `rows.py` decodes a sample.
   A `TextDataset` (`dataset.py`) reads rows from opened shards, and keeps the position in the data.
4. `loader.py` makes batches in worker processes, and computes their digests. `stateful.py` is the public loader, which
   keeps track of its position.

`tokenizer.py` loads, trains and saves tokenizers. `tokenizer_files.py` finds and reads their files, and
`tokenizer_bounds.py` refuses malicious ones. `spelling.py` measures which text a tokenizer loses. `baselines.py` scores
simple models on shards, for reports. `recorded.py` finds the data of an earlier run, to read it again.
"""
