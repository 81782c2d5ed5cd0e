"""Checkpoints as LLM Foundry writes them: Composer's own Trainer and its saver, over a model with the same names.

transformers' MPT inside Composer's HuggingFaceModel has LLM Foundry's keys (`model.transformer.blocks.0.attn.Wqkv…`)
and keeps its configuration and tokenizer under state/integrations.
"""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

BATCH = 2


def build_trainer(folder: str, *, shard: bool = False):
    from composer import Trainer
    from composer.models import HuggingFaceModel
    from composer.utils.dist import get_sampler
    from transformers import MptConfig, MptForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    attention = {"attn_pdrop": 0, "alibi": True, "alibi_bias_max": 8}
    config = MptConfig(
        d_model=48,
        n_heads=4,
        n_layers=2,
        max_seq_len=32,
        vocab_size=97,
        attn_config=attention,
        tie_word_embeddings=True,
    )
    tokenizer = PreTrainedTokenizerFast.from_pretrained(f"{folder}/tokenizer")
    mpt = MptForCausalLM(config)
    model = HuggingFaceModel(mpt, tokenizer=tokenizer, use_logits=True)
    if shard:
        for block in mpt.transformer.blocks:
            fully_shard(block)
        fully_shard(model)
    tokens = torch.randint(97, (24, 32))
    samples = [{"input_ids": row, "labels": row, "attention_mask": torch.ones_like(row)} for row in tokens]
    return Trainer(
        model=model,
        optimizers=torch.optim.AdamW(model.parameters(), lr=1e-3),
        train_dataloader=DataLoader(samples, batch_size=4, sampler=get_sampler(samples) if shard else None),  # type: ignore[arg-type]
        max_duration=f"{BATCH}ba",
        save_folder=None if shard else f"{folder}/composer",
        save_interval="1ba",
        device="cpu",
        precision="fp32",
        progress_bar=False,
    )


def save_one_file(folder: str) -> None:
    """Leaves <folder>/composer/ep0-ba2-rank0.pt, and the Hugging Face folder of the same model beside it."""
    trainer = build_trainer(folder)
    trainer.fit()
    trainer.state.model.model.save_pretrained(f"{folder}/expected")  # type: ignore[operator, union-attr]
    trainer.close()


def save_sharded(folder: str) -> None:
    """Leaves <folder>/sharded/ep0-ba2: Composer's sharded save on two ranks, each with its part of every tensor."""
    from composer.utils import FSDPConfig
    from composer.utils.checkpoint import save_checkpoint

    dist.init_process_group("gloo")
    trainer = build_trainer(folder, shard=True)
    trainer.fit()
    trainer.state.fsdp_config = FSDPConfig(state_dict_type="sharded")  # Composer itself shards on GPUs alone
    save_checkpoint(trainer.state, f"{folder}/sharded/unused-{{rank}}")
    weights = trainer.state.model.model.state_dict()  # type: ignore[operator, union-attr]
    full = {name: tensor.full_tensor() for name, tensor in weights.items() if name != "lm_head.weight"}
    if dist.get_rank() == 0:
        torch.save(full, f"{folder}/sharded/full.pt")
    trainer.close()


def composer_file(path, model, **state):
    """Write what Composer's Trainer saves of a model, in one file."""
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    torch.save({"state": {"model": tensors, **state}, "rng": []}, path)
    return path
