"""Is this machine fit for a run: one check per file, each a `check(machine)` that yields what it found."""
