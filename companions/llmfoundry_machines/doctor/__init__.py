"""Is this machine fit for a run, and are all nodes of a launch? Each check is a function that yields findings."""
