"""What differs from the committed record on purpose."""

INTENDED: dict[str, str] = {}
"""Pattern of keys, as `fnmatch` has them -> why. Emptied when the record is made anew."""
