"""Microbatches that LLM Foundry has published, as runs of ours: they must not be said to be out of memory.

Source: mosaicml/llm-foundry, scripts/train/benchmarking/README.md at commit 8c8dd48; two rows of three.
"""

from typing import NamedTuple

TABLE = """
H100-80GB 70b recomputed: 2048x256x8x1 2048x128x8x1 2048x32x2x16
H100-80GB 30b recomputed: 2048x256x8x1 2048x128x8x1 8192x8x1x21 2048x32x14x3 2048x16x10x3 1024x8x6x21
H100-80GB 13b recomputed: 2048x256x16x1 2048x128x16x1 32768x8x1x3 4096x8x10x3
H100-80GB 7b plain: 2048x256x6x1 2048x128x6x1 2048x8x6x1
H100-80GB 3b grad-op: 2048x256x8x1 2048x128x8x1
H100-80GB 1b grad-op: 2048x256x12x1 2048x128x12x1
H100-80GB 13b plain: 2048x64x2x1 2048x16x2x1 2048x8x2x1
H100-80GB 7b recomputed: 65536x8x1x2 32768x8x2x2 4096x8x16x2
H100-80GB 3b recomputed: 65536x8x1x2 32768x8x3x6
H100-80GB 3b plain: 8192x8x3x6 4096x8x5x6 2048x32x6x3 2048x16x10x3 512x8x40x6
H100-80GB 1b recomputed: 65536x8x1x2
H100-80GB 1b plain: 16384x8x2x4 8192x8x3x4 2048x64x20x1 2048x32x20x1 2048x8x14x1 1024x8x18x4
H100-80GB 760m plain: 32768x8x1x2 16384x8x3x2 4096x8x12x2 2048x32x24x1 2048x8x24x2 1024x8x48x2
H100-80GB 3b recomputed fp8: 32768x8x3x6
H100-80GB 3b fp8: 8192x8x3x6 512x8x40x6
H100-80GB 1b fp8: 32768x8x1x4 512x8x56x4
A100-80GB 70b recomputed pure: 2048x64x8x4
A100-80GB 30b recomputed: 8192x8x1x21 4096x8x1x21 1024x8x6x21 512x8x12x21
A100-80GB 13b recomputed: 16384x8x3x3 8192x8x5x3 1024x8x40x3
A100-80GB 13b plain: 2048x8x2x3
A100-80GB 7b recomputed: 32768x8x2x2 16384x8x4x2 4096x8x16x2
A100-80GB 7b plain: 2048x8x6x2
A100-80GB 3b recomputed: 65536x8x1x2 32768x8x3x6
A100-80GB 3b plain: 8192x8x3x6 4096x8x5x6 1024x8x20x6 512x8x40x6
A100-80GB 1b plain: 32768x8x1x4 16384x8x2x4 4096x8x7x4 2048x8x14x4 512x8x56x4
A100-80GB 760m recomputed: 65536x8x1x2
A100-80GB 760m plain: 16384x8x3x2 8192x8x6x2 2048x8x24x2 1024x8x48x2
A100-80GB 350m plain: 65536x8x1x2 32768x8x2x2 8192x8x8x2 4096x8x16x2 1024x8x64x2 512x8x128x2
A100-80GB 125m plain: 32768x8x2x2 16384x8x4x2 4096x8x16x2 2048x8x40x2 1024x8x64x2 512x8x128x2
A100-40GB 70b recomputed pure: 2048x64x2x1
A100-40GB 30b recomputed pure: 2048x128x6x1
A100-40GB 13b recomputed pure: 8192x8x1x16 4096x8x2x16 2048x64x16x1 2048x32x14x1 2048x8x4x16 1024x8x8x16
A100-40GB 7b recomputed pure: 16384x8x1x4 8192x8x3x4 2048x128x18x1 2048x64x18x1 2048x16x16x1 2048x8x12x4 512x8x48x4
A100-40GB 3b recomputed pure: 32768x8x1x4
A100-40GB 3b pure: 8192x8x1x8 4096x8x2x8 2048x64x6x1 2048x32x6x1 2048x8x5x8 1024x8x10x8
A100-40GB 1b recomputed pure: 32768x8x1x4
A100-40GB 1b pure: 16384x8x1x8 4096x8x4x8 2048x128x10x1 2048x32x10x1 2048x16x8x1 1024x8x16x8 512x8x32x8
A100-40GB 760m pure: 16384x8x1x4 8192x8x3x4 2048x128x12x1 2048x64x12x1 2048x16x12x1 2048x8x12x4 512x8x48x4
A100-40GB 350m pure: 32768x8x1x4 8192x8x4x4 4096x8x8x4 2048x64x18x1 2048x32x18x1 2048x8x16x4 1024x8x32x4
A100-40GB 125m pure: 32768x8x1x4 16384x8x2x3 4096x8x13x3 2048x128x26x1 2048x32x26x1 2048x16x26x1 1024x8x52x3 512x8x104x3
"""
"""Device, model, how it was run; then sequence length x devices x microbatch x microbatches of a batch."""

WAYS = {
    "recomputed": ["fsdp_config.activation_checkpointing=true"],
    "pure": ["fsdp_config.mixed_precision=PURE"],
    "grad-op": ["fsdp_config.sharding_strategy=SHARD_GRAD_OP"],
    "fp8": [],  # what is stored is bf16
    "plain": [],
}
WITHOUT_FILE = {"760m": ["model.d_model=1536", "model.n_layers=24", "model.n_heads=12"]}


class Published(NamedTuple):
    device: str
    num_devices: int
    arguments: list[str]
    """Of a run."""

    @property
    def name(self) -> str:
        return " ".join([self.device, str(self.num_devices), *self.arguments])


def published() -> list[Published]:
    rows = []
    for line in TABLE.strip().splitlines():
        head, points = line.split(": ")
        device, model, *ways = head.split()
        for point in points.split():
            seq_len, num_devices, microbatch_size, num_microbatches = map(int, point.split("x"))
            arguments = [
                f"mpt-{'1b' if model in WITHOUT_FILE else model}",
                *WITHOUT_FILE.get(model, ()),
                *(
                    "fsdp_config={sharding_strategy: FULL_SHARD}",
                    "precision=amp_bf16",
                    "model.vocab_size=50368",
                    "model.no_bias=false",
                ),
                *(f"max_seq_len={seq_len}", f"model.max_seq_len={seq_len}"),
                f"device_train_microbatch_size={microbatch_size}",
                f"global_train_batch_size={num_devices * microbatch_size * num_microbatches}",
                *(override for way in ways for override in WAYS[way]),
            ]
            rows.append(Published(device, num_devices, arguments))
    return rows
