"""Training: one launch of a run, on Composer's loop. Read the files in this order; in brackets, Composer's events.

    train.py            the story of a launch: build, restore, fit, export, and how it ends
    builders.py         builds the parts from the blocks of the YAML; its list of callbacks is the order of their calls
    trainer.py          Composer's Trainer with our training step [each batch; it fires BEFORE_TRAIN_BATCH to
                        AFTER_TRAIN_BATCH]; a table of how losses are averaged
    adapter.py          the model as Composer sees it: a batch -> a loss; the metric of an evaluation
    loss.py             cross-entropy without the logits of a whole batch
    gradient_step.py    between the backward pass and the optimizer: norm, clipping, batches that are not finite
    optimizers.py, muon.py          AdamW and Lion; Muon
    schedule.py         the learning rate [FIT_START, BATCH_START]
    agreement.py        the one exchange between two batches; reads the next batch ahead
    start.py            which checkpoint a launch starts from, and the restore of weights and optimizer
    checkpointing.py    restore [AFTER_LOAD]; reset the energy meter [FIT_START]; agree and evaluate [BATCH_END,
                        EVAL_BATCH_START, EVAL_BATCH_END]; save, or leave [BATCH_CHECKPOINT]; wait for the last save
                        [FIT_END]
    save_policy.py, failed_saves.py, run_state.py    when to save; failed saves; the state besides tensors
    save_texts.py       what a launch says of its saves: messages, and fields of status.json
    after_save.py       after each save, on rank 0: the tokenizer beside it, and removing old ones
    second_place.py     which save is in `save_fallback` and why, and when it is copied
    preemption.py       reasons to leave early, and leaving in time: signals, a deadline, the file STOP
    run_folder.py       the run's files, as a logger [BATCH_CHECKPOINT after the callbacks, FIT_END]: config.yaml,
                        status.json, metrics.jsonl
    log_file.py, mirrors.py         metrics.jsonl as a file; wandb, TensorBoard and the console
    memory.py           `device_train_microbatch_size: auto`, and running out of memory
    monitor.py          dropout's seed [BATCH_START], speed [FIT_START, BATCH_END], profiler [FIT_START,
                        BATCH_CHECKPOINT, FIT_END]
    in_context.py       evaluation of in-context tasks, called by checkpointing.py
    launch_role.py, run_handle.py      other launches that train the same run, and what they may touch of this one

`docs/one-batch.md` follows one batch through these events. `docs/how-a-launch-ends.md` explains signals and errors.
"""
