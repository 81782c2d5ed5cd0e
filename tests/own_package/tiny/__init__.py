"""Parts of a run, as an example of a companion. `companion.py` lists them."""
