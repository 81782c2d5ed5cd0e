"""`llmfoundry-lite data prepare`: documents -> tokens -> samples of equal length in MDS shards.

Read `prepare.py` first. Its docstring describes the result, and `prepare` is the whole command. `request.py` defines
what a user asks for. Then read the files in the order in which a document passes through them:

1. `listing.py` finds the files that `--source` names. `sources.py` cuts them, or the standard library, into pieces and
   these into units: parts that are the same in every launch, and that one worker reads at a time.
2. `contents.py` reads and decompresses a file, and `documents.py` reads the documents of a unit.
3. `token_files.py` is step 1: it tokenises units in several processes, and writes a token file for each.
   `token_unit.py` describes these files, and counts what they have for each split. `token_folder.py` says where they
   are: in a folder or, by a companion, in a bucket. `speed.py` says how long the rest takes.
4. `samples.py` is step 2: it plans the shards of each split by these counts, and writes them. `splits.py` divides
   documents into training and validation, `best_fit.py` decides which documents share a sample with `--pack best-fit`,
   and `shards.py` writes a shard.
5. `out_folder.py` publishes the result, and finds out how far an earlier launch has come. `summary.py` describes the
   result in summary.json.

Tokenizers are in `data/tokenizer.py`. Companions read tables, buckets and data sets of the Hugging Face Hub.
"""
