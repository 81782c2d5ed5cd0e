"""Islands: several launches, each with its own process group, train one run at once.

Read `block.py` first, which has the settings. Then `training/` (what a rank does), `tensors/` (what is sent between
islands) and `coordination/` (which island trains what). The README has one sentence on each file.
"""
