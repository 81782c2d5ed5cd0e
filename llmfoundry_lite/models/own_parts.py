"""Parts of a model that are the user's own: what each is called with, how its parameters are first drawn, and checks.

A configuration names such a part by its import path, `norm_type: python:mine.norms:ScaleNorm`. The protocols below are
the signatures, which are those that LLM Foundry's registries call. The `build_` functions import a part, build it, and
refuse what could not be sharded, initialised or saved: buffers, parameters of another dtype than fp32, and parameters
of which nobody says how they are drawn. In each forward pass, the output of a part is checked.

`docs/own-parts.md` is the page for users. `mpt.py` calls these functions, and `initialise.py` draws what
`initial_distribution` says.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from llmfoundry_lite.config.fields import is_number
from llmfoundry_lite.config.model_schema import AttentionConfig, ModelConfig
from llmfoundry_lite.config.mup import Kind
from llmfoundry_lite.errors import ConfigError, OwnCodeError, join_with_or
from llmfoundry_lite.own_code import call_object, import_object

# ---------------------------------------------------------------------------------------------------- the signatures


class Norm(Protocol):
    """A norm, called as `Thing(normalized_shape, eps=…, device=…, **norm_kwargs)`; it returns an `nn.Module`."""

    def __init__(self, normalized_shape: int, *, eps: float, device: Any, **norm_kwargs: Any):
        """Build the norm of vectors with `normalized_shape` elements.

        `eps` is the key `norm_eps` beside `norm_type`, and `norm_kwargs` are the keys of that block. `device` is None:
        tensors are made where torch makes them by default, which is often the meta device.
        """

    def __call__(self, x: Tensor) -> Tensor:
        """Normalise the last dimension of `x`. Returns its shape and dtype."""
        ...


class FeedForward(Protocol):
    """A feed-forward layer, called as `Thing(d_model=…, expansion_ratio=…, device=…, bias=…, **kwargs)`.

    It returns an `nn.Module`.
    """

    def __init__(self, *, d_model: int, expansion_ratio: int | float, device: Any, bias: bool, **kwargs: Any):
        """Build the layer. `bias` is false with `no_bias`, `device` is None, and `kwargs` are those of `ffn_config`."""

    def __call__(self, x_btd: Tensor) -> Tensor:
        """Return what is added to the residual stream, [b, t, d], for normalised inputs [b, t, d] of the same dtype."""
        ...


class Attention(Protocol):
    """A layer of attention, called as `Thing(config, **kwargs)`; it returns an `nn.Module`.

    A subclass of `mpt.Attention` needs to replace only what differs. LLM Foundry calls its attention classes with the
    keys of `attn_config` instead, and passes each a bias and a cache of its own, so that those need to be adapted.
    """

    def __init__(self, config: ModelConfig, **kwargs: Any):
        """Build the layer. `config` is the whole block `model`, and `kwargs` are those of `attn_config`."""

    def __call__(self, x_btd: Tensor, mask: Any, rotation: Any, append_to_cache: Any) -> Tensor:
        """Return what is added to the residual stream, [b, t, d], in the dtype of `x_btd`.

        The arguments are those of `mpt.Attention.forward`.
        """
        ...


# ------------------------------------------------------------------------------------------------ building and checking


def _call(name: str, key: str, block: str, kwargs: Mapping[str, Any], /, *arguments: Any, **options: Any) -> Any:
    """Import one of the user's own parts and call it, with the arguments of `own_code.call_object`."""
    with torch.device("cpu"):  # tensors that the user's module makes when it is imported need their values
        import_object(name, key)
    try:
        return call_object(name, key, block, kwargs, *arguments, **options)
    except OwnCodeError as error:
        cause = error.__cause__
        if isinstance(cause, RuntimeError) and "meta" in str(cause):  # also NotImplementedError, which is one
            cause.add_note(
                f"{key}: {name} is built without memory first, on torch's meta device, where tensors have no values; "
                "compute with Python's numbers in the constructor, or with tensors in forward"
            )
        raise


def build_ffn(config: ModelConfig) -> nn.Module:
    """Build the user's own feed-forward layer. Raises ConfigError for one that cannot be built or trained."""
    ffn = config.ffn_config
    key = "model.ffn_config.ffn_type"
    layer = _call(
        ffn.ffn_type,
        key,
        "model.ffn_config",
        ffn.kwargs,
        d_model=config.d_model,
        expansion_ratio=config.expansion_ratio,
        device=None,
        bias=not config.no_bias,
    )
    return _adopt(layer, ffn.ffn_type, key)


def build_attention(config: ModelConfig) -> nn.Module:
    """Build the user's own layer of attention. Raises ConfigError for one that cannot be built or trained."""
    attention = config.attn_config
    key = "model.attn_config.attn_type"
    layer = _call(attention.attn_type, key, "model.attn_config", attention.kwargs, config)
    return _adopt(layer, attention.attn_type, key)


def build_norm(config: ModelConfig | AttentionConfig, width: int, *, has_bias: bool) -> nn.Module:
    """Build the user's own norm, for vectors of `width` elements.

    `config` is the block whose `norm_type` names it. Without `has_bias`, its biases are removed, as LLM Foundry does
    with `no_bias`. Raises ConfigError for a norm that cannot be built or trained.
    """
    block_key = "model" if isinstance(config, ModelConfig) else "model.attn_config"
    key = f"{block_key}.norm_type"
    norm = _call(
        config.norm_type, key, f"{block_key}.norm_kwargs", config.norm_kwargs, width, eps=config.norm_eps, device=None
    )
    has_lost_bias = False
    if isinstance(norm, nn.Module) and not has_bias:
        for module in norm.modules():
            if isinstance(getattr(module, "bias", None), nn.Parameter):
                module.register_parameter("bias", None)
                has_lost_bias = True
    return _adopt(norm, config.norm_type, key, is_norm=True, has_lost_bias=has_lost_bias)


MARK = "_own_part_of_llmfoundry_lite"
"""Attribute of a module that is a part of the user's own. It has an `OwnPart`."""


class OwnPart(NamedTuple):
    """Where a part of the user's own comes from."""

    name: str
    """Its import path."""
    key: str
    """The dotted key that names it."""
    is_norm: bool
    has_lost_bias: bool
    """`no_bias` has removed a bias of it."""


def _adopt(part: Any, name: str, key: str, *, is_norm: bool = False, has_lost_bias: bool = False) -> nn.Module:
    """Mark a part as the user's own, and return it. Raises ConfigError if it is no module, or cannot be trained.

    FSDP divides the rows of each parameter, checkpoints hold parameters alone, and the optimizer updates all of them.
    """
    if not isinstance(part, nn.Module):
        raise ConfigError(f"{key}: {name} returns {type(part).__name__}, expected a torch.nn.Module")
    if hasattr(part, MARK):
        raise ConfigError(f"{key}: {name} returns the same module twice, expected a new one for each place")
    setattr(part, MARK, OwnPart(name, key, is_norm, has_lost_bias))
    buffer = next(part.named_buffers(), None)
    if buffer is not None:
        buffer_name, _ = buffer
        raise ConfigError(
            f"{key}: {name} has a buffer, {buffer_name}, which no checkpoint holds; keep a number, and make the tensor "
            "in forward, or make it a parameter"
        )
    unregistered = next(_find_unregistered(part), None)
    if unregistered is not None:
        attribute, kind = unregistered
        raise ConfigError(
            f"{key}: {name}: its attribute {attribute} has a {kind} that is not registered, so it gets no memory; "
            "make tensors in forward, and keep parameters and layers in nn.ParameterList and nn.ModuleList"
        )
    for parameter_name, parameter in part.named_parameters():
        is_checked_already = find_owner(part, parameter_name) != (part, parameter_name)
        if is_checked_already:
            continue
        problem = _describe_problem(part, parameter_name, parameter)
        if problem:
            raise ConfigError(f"{key}: {name}: its parameter {parameter_name} {problem}")
    part.register_forward_hook(_check_output_of_part)
    return part


def _check_output_of_part(part: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
    """Check what a part of the user's own has returned. torch calls this hook after each forward pass of the part."""
    mark = mark_of(part)
    check_output(output, arguments[0], mark.name, mark.key)


def check_output(output: Any, like: Tensor, name: str, key: str) -> None:
    """Raise ConfigError unless the user's own part `name` has returned a tensor of the shape and dtype of `like`.

    A later layer would fail otherwise, with a traceback that does not name the part. With autocast, another dtype is no
    error, because layers cast their inputs.
    """
    if not isinstance(output, Tensor):
        raise ConfigError(f"{key}: {name} returns {type(output).__name__}, expected {_describe_tensor(like)}")
    is_cast_later = torch.is_autocast_enabled(like.device.type)
    has_right_dtype = output.dtype == like.dtype or is_cast_later
    if output.shape != like.shape or not has_right_dtype:
        raise ConfigError(f"{key}: {name} returns {_describe_tensor(output)}, expected {_describe_tensor(like)}")


def _describe_tensor(tensor: Tensor) -> str:
    """Return shape and dtype of a tensor, such as `[2, 64, 32] in float32`."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{list(tensor.shape)} in {dtype}"


def _find_unregistered(part: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield (attribute, "tensor" or "layer") for what a part keeps where torch does not look for it.

    That is a tensor as a plain attribute, or in a list, a tuple or a dict, and a layer with parameters in one of these.
    """
    registered_modules = set(part.modules())
    for module_name, module in part.named_modules():
        for attribute, value in vars(module).items():
            if attribute in ("_parameters", "_buffers", "_modules"):
                continue
            values: list[Any] = [value]
            if isinstance(value, dict):
                values = list(value.values())
            elif isinstance(value, list | tuple):
                values = list(value)
            full_name = f"{module_name}.{attribute}" if module_name else attribute
            for element in values:
                if isinstance(element, Tensor):
                    yield full_name, "tensor"
                if isinstance(element, nn.Module) and element not in registered_modules:
                    has_parameters = next(element.parameters(), None) is not None
                    if has_parameters:
                        yield full_name, "layer"


def refuse_shared_parameters(model: nn.Module) -> None:
    """Raise ConfigError if two layers in the user's own parts have one parameter.

    The model is built without memory, and every layer gets memory of its own afterwards, so the two would be trained
    apart. A layer that a part keeps under two names has its parameters once, and is no problem.
    """
    names_of_parameters: dict[nn.Parameter, str] = {}
    for part in find_own_parts(model):
        mark = mark_of(part)
        for module_name, module in part.named_modules():
            for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
                parameter_name = f"{module_name}.{name}" if module_name else name
                if parameter in names_of_parameters:
                    raise ConfigError(
                        f"{mark.key}: {mark.name}: its parameter {parameter_name} is also the parameter "
                        f"{names_of_parameters[parameter]} of a layer of yours; they would be trained apart, so keep "
                        "one layer, and call it twice"
                    )
                names_of_parameters[parameter] = parameter_name


def refuse_random_layers(model: nn.Module) -> None:
    """Raise ConfigError for a layer in the user's own parts that draws from torch's generator. Call it for exact sums.

    Nothing of a generator is saved, and each rank has its own, so that no other start could draw the same numbers.
    Calls of functions such as `F.dropout` cannot be seen here.
    """
    for part in find_own_parts(model):
        mark = mark_of(part)
        for module_name, module in part.named_modules():
            drops = isinstance(module, _DropoutNd) and module.p > 0
            if drops or isinstance(module, nn.RReLU):
                raise ConfigError(
                    f"exact_sums: does not go with {mark.key}: {mark.name}: its layer {module_name or 'itself'} is "
                    f"{module}, which draws other numbers on each rank and after each start; remove the layer, or use "
                    "model.resid_pdrop"
                )


def kind_in_part(part: nn.Module, parameter_name: str) -> Kind:
    """Return of which kind a parameter of the user's own part is for muP.

    The part's method `mup_kind` is asked first, with the parameter's name in the part, and then that of the inner
    module which has the parameter. Parameters of one dimension are vectors unless a method says otherwise.

    Raises ConfigError for an answer that is no kind, and for a matrix of which nobody says the kind: its shape does not
    tell which of its dimensions grow with the width of the model.
    """
    mark = mark_of(part)
    module_name, _, name = parameter_name.rpartition(".")
    module = part.get_submodule(module_name)
    for owner, name_there in ((part, parameter_name), (module, name)):
        ask = getattr(owner, "mup_kind", None)
        answer = ask(name_there) if callable(ask) else None
        if answer in KINDS_IN_PARTS:
            return answer
        if answer is not None:
            raise ConfigError(
                f"{mark.key}: {mark.name}: mup_kind({parameter_name!r}) returns {answer!r}, expected "
                f"{join_with_or(KINDS_IN_PARTS)}, or None"
            )
    if module.get_parameter(name).ndim == 1:
        return "vector"
    raise ConfigError(
        f"model.mup: does not know how {parameter_name} of {mark.name} ({mark.key}) depends on the width; give "
        f"{type(part).__name__} a method mup_kind(name) that returns 'hidden' for a matrix from width to width, and "
        "'input' for one whose inputs do not grow with the width"
    )


def refuse_unknown_kinds(model: nn.Module) -> None:
    """Raise ConfigError if muP's kind of a parameter in the user's own parts is not known. Call it for muP."""
    for part in find_own_parts(model):
        for parameter_name, _ in part.named_parameters():
            kind_in_part(part, parameter_name)


def _describe_problem(part: nn.Module, parameter_name: str, parameter: nn.Parameter) -> str:
    """Return why a parameter of a part cannot be trained, and what to do; empty if it can be."""
    if parameter.ndim == 0:
        return "has no dimension, and FSDP divides rows; give it the shape [1]"
    if parameter.dtype != torch.float32:
        return f"is {parameter.dtype}, expected torch.float32; the run's precision decides what is computed in"
    if not parameter.requires_grad:
        return "has requires_grad=False, and every parameter is trained here; make the tensor in forward"
    if initial_values(part, parameter_name) is None:
        return (
            f"has the shape {list(parameter.shape)} and nobody says how it is drawn; give {type(part).__name__} a "
            "method initial_distribution(name) that returns ('normal', std), ('uniform', low, high) or "
            "('constant', value)"
        )
    return ""


# -------------------------------------------------------------------------------------------------------- first values

LAYERS = (nn.Linear, nn.Embedding)
"""Modules whose weights `init_config` draws, in the user's own parts too."""
NORM_LAYERS = (nn.LayerNorm, nn.RMSNorm)
"""Modules of torch whose weights begin with 1, and biases with 0."""
BY_SCHEME = ("scheme",)
"""First values by the scheme that `init_config` names, like those of a layer of ours."""

NUM_NUMBERS = {"normal": 1, "uniform": 2, "constant": 1}
"""Name of a distribution -> how many numbers describe it."""

KINDS_IN_PARTS: tuple[Kind, ...] = ("hidden", "input", "output", "vector")
"""Kinds for muP that a part can name. What an output computes, its part divides by m itself."""

InitialValues = tuple[Any, ...]
"""("normal", std), ("uniform", low, high), ("constant", value) or BY_SCHEME."""


def initial_values(part: nn.Module, parameter_name: str) -> InitialValues | None:
    """Return how a parameter of the user's own part is first drawn; None if nobody says so.

    The part's method `initial_distribution` is asked first, with the parameter's name in the part, and then that of the
    inner module which has the parameter. After that come the weights of linear layers and embeddings, whose scheme is
    that of `init_config`, and the weights (1) and biases (0) of norms.

    Raises ConfigError for an answer of another form.
    """
    module_name, _, name = parameter_name.rpartition(".")
    module = part.get_submodule(module_name)
    for owner, name_there in ((part, parameter_name), (module, name)):
        ask = getattr(owner, "initial_distribution", None)
        if callable(ask):
            answer = ask(name_there)
            if answer is not None:
                return _check_answer(answer, part, parameter_name)

    num_dimensions = module.get_parameter(name).ndim
    if isinstance(module, LAYERS):
        # A subclass may have more parameters than torch's layers, or others.
        is_of_torch = (name, num_dimensions) in (("weight", 2), ("bias", 1))
        return BY_SCHEME if is_of_torch else None
    is_vector = num_dimensions == 1
    is_in_norm = isinstance(module, NORM_LAYERS) or mark_of(part).is_norm
    if is_in_norm and is_vector and name in ("weight", "bias"):
        return ("constant", 1.0 if name == "weight" else 0.0)
    return None


def mark_of(part: nn.Module) -> OwnPart:
    """Return the mark of a part of the user's own."""
    mark: Any = getattr(part, MARK)
    return mark


def find_owner(module: nn.Module, parameter_name: str) -> tuple[nn.Module, str] | None:
    """Find the innermost part of the user's own, in `module` or `module` itself, that has a parameter.

    Returns the part and the parameter's name in it; None for a parameter of our own layers.
    """
    found = None
    name_inside = parameter_name
    while True:
        if hasattr(module, MARK):
            found = (module, name_inside)
        child_name, dot, rest = name_inside.partition(".")
        if not dot:
            return found
        module = module.get_submodule(child_name)
        name_inside = rest


def find_own_parts(model: nn.Module) -> Iterator[nn.Module]:
    """Yield each part of a model that is the user's own. Parts inside another one belong to it, and are left out."""
    if hasattr(model, MARK):
        yield model
        return
    for child in model.children():
        yield from find_own_parts(child)


def _check_answer(answer: Any, part: nn.Module, parameter_name: str) -> InitialValues:
    """Return the answer of a method `initial_distribution`. Raises ConfigError for one that has another form."""
    mark = mark_of(part)
    parts = list(answer) if isinstance(answer, tuple | list) else []
    kind = parts[0] if parts else None
    numbers = parts[1:]
    is_known = isinstance(kind, str) and NUM_NUMBERS.get(kind) == len(numbers)
    if not is_known or not all(is_number(number) and math.isfinite(number) for number in numbers):
        raise ConfigError(
            f"{mark.key}: {mark.name}: initial_distribution({parameter_name!r}) returns {answer!r}, expected "
            "('normal', std), ('uniform', low, high), ('constant', value) or None, with finite numbers"
        )
    is_negative = kind == "normal" and numbers[0] < 0
    is_reversed = kind == "uniform" and numbers[0] > numbers[1]
    if is_negative or is_reversed:
        raise ConfigError(
            f"{mark.key}: {mark.name}: initial_distribution({parameter_name!r}) returns {answer!r}, expected a std of "
            "0 or more, and a low that is not above high"
        )
    return (kind, *numbers)
