"""Conversion of models between portable checkpoints and the formats of other programs.

Read `hf_format.py` first: it describes what a Hugging Face model format is. `hf_formats.py` has the formats themselves,
and `huggingface.py` exports and imports a model with them. `files.py` reads and writes the folders, and
`tokenizer_proof.py` checks that transformers reads an exported tokenizer in the same way. `to_checkpoint.py` publishes
imported weights as a checkpoint. `checkpoint_model.py` and `tokenizer.py` find the model and tokenizer of a checkpoint.
"""
