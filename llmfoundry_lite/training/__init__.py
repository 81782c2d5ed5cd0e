"""Training: one launch of a run on Composer's loop. Read the files in this order.

    train.py            the story of a launch: build, restore, fit, export, and how it ends
    builders.py         what it consists of, from the configuration's blocks
    trainer.py          Composer's Trainer with our training step; a table of how losses are averaged
    adapter.py          the model as Composer sees it: a batch -> a loss
    loss.py             cross-entropy without the logits of a whole batch
    gradient_step.py    between the backward pass and the optimizer
    optimizers.py, muon.py, schedule.py
    agreement.py        the exchange between two batches
    checkpointing.py    restore; what happens between two batches: leave, evaluate, save
    save_policy.py, failed_saves.py, run_state.py    when to save, what follows failures, the state besides tensors
    preemption.py       reasons to leave early, and leaving in time
    run_folder.py, log_file.py, mirrors.py           config.yaml, status.json, metrics.jsonl, wandb and others
    memory.py           `device_train_microbatch_size: auto`, and running out of memory
    monitor.py, in_context.py                        speed, dropout's seed, profiler; evaluation in context
    partners.py, run_handle.py                       other launches that train the same run

`docs/one-batch.md` lists Composer's events and who answers them, and `docs/how-a-launch-ends.md` signals and errors.
"""
