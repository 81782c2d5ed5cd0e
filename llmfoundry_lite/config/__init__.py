"""From the text of YAML files to a frozen configuration, without torch: a wrong key is answered in less than a second.

Read the files in this order.

What a configuration is:

- `spans.py`: durations (`4800ba`), times (`3h55m`) and save intervals, parsed.
- `fields.py`: `setting`, which makes a dataclass field with the rules of its key, and functions that read the rules.
- `schema.py`: `TrainConfig`, with its blocks in `model_schema.py`, `data_schema.py`, `optimizer_schema.py`,
  `sharding_schema.py` and `callbacks_schema.py`; `eval_schema.py`: `EvalConfig`; `blocks.py`: blocks that companions
  add.

How it is loaded (`load_train.py`, `load_eval.py` and `load_tasks.py` call these in order):

1. `yaml_text.py` reads YAML text. `shipped.py` finds the package's files by name, `auto_hardware.py` the overlay of
   `hardware=auto`.
2. `layers.py` keeps each file, and the `key=value` arguments, as a layer.
3. `merge.py` merges the layers, and `resolve.py` resolves `${…}` in the merged values.
4. `scalars.py` decides by the schema whether a scalar is text or a number.
5. `foundry.py` drops or refuses keys of LLM Foundry that this package does not have.
6. `build.py` fills the dataclasses, and refuses unknown keys and bad values.
7. `check.py` checks keys against each other, and `surprises.py` warns of settings that are perhaps not meant; `uses.py`
   finds keys that have no effect.

What is derived from it: `layout.py` divides devices into copies, shards and parts of the model, `data_stages.py` finds
the first batch of each stage of the data, and `wandb_init.py` makes the arguments of `wandb.init`.

How it is compared: `changes.py` compares a launch with the checkpoint that it resumes from, and `replayed.py` selects
the keys of a recorded configuration that a replay uses.
"""
