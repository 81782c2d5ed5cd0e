"""Exchanges of ranks in a forward and a backward pass, counted by operation."""

from collections import defaultdict

from torch.utils._python_dispatch import TorchDispatchMode

HANDLES = ("wait_tensor", "_wrap_tensor_autograd")


class CountBytes(TorchDispatchMode):
    """Count bytes of whole messages in the model's own exchanges; FSDP's collectives are of another kind."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes: dict[str, int] = defaultdict(int)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        name = function.__name__.split(".")[0]
        if function.namespace == "_c10d_functional" and name not in HANDLES:
            largest = max(args[0].numel(), result.numel())
            self.num_bytes[name] += largest * result.element_size()
        return result
