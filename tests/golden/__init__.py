"""A record of what the product does, to compare before and after a change that shall change nothing."""
