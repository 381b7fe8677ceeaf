"""The kind of each weight in its model: hidden matrix, stacked experts, embedding, head or vector."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import Literal, NamedTuple, get_args

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from merit_optim.optim import validate
from merit_optim.optim.names import COMPILED

Kind = Literal["hidden", "experts", "embedding", "head", "vector"]
KINDS: tuple[Kind, ...] = get_args(Kind)

# A tied weight has the first of the kinds that its owners give it.
_PRECEDENCE: tuple[Kind, ...] = ("embedding", "head", "experts", "hidden", "vector")

# Names that torch.compile, DataParallel, FSDP, activation checkpointing and peft insert into a model's.
_WRAPPERS = frozenset(
    {COMPILED, "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
    | {"base_layer", "original_module"}
)
_CONVOLUTIONS = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)

# Raw parameters with such names are tables of learned vectors. "token" must come last: not token_mixer.
_TABLE_NAME = re.compile(
    r"(^|_)(pos|position\w*|emb\w*|posemb\w*|tokens?$|latents?(_\dd)?$|latent_query$|queries$"
    r"|ape|wte|wpe)(_|$)"
)
_PATCH_NAME = re.compile(r"(^|[_.])(patch|emb)")

# Raw parameters with such names act element by element, however many dimensions they have: the stacked
# biases of experts, biases and scales per head (Transformer-XL's are bias_u and bias_v), Mamba's decay rates
# and skips.
_ELEMENT_WISE_NAME = re.compile(r"(bias(es)?(_[uv])?|scale|gamma|beta|A_log)$|^D$")
_LETTERS_OF_A_SHAPE = re.compile(r"_[A-Z]+$")  # torchtitan's mlp1_bias_EG is a bias for each expert

# Attention whose raw matrices are (width, heads, width of a head), and those that map from the width.
_SPLITS_HEADS = {"XLNetRelativeAttention": ("q", "k", "v", "r"), "FunnelRelMultiheadAttention": ("r_kernel",)}

# DistilBERT's pre_classifier and timm's pre_logits are hidden layers before the head.
_HEAD_NAME = re.compile(
    r"(?!pre_)(\w+_)?(heads?(_linear)?|classifiers?|logits|prediction|pred)"
    r"|score|qa_outputs?|embed_out|unembed\w*|predictions|seq_relationship"
)
# In models without another head: a model that drafts tokens joins hidden states by a layer of this name.
_HEAD_NAME_ALONE = "fc"
# Attention has layers with these names too: they are heads only beside the embeddings, or beside the blocks,
# as in the last stage of a pipeline.
_HEAD_NAME_BESIDE = re.compile(r"out|output|output_layer|out_proj|output_projection|proj_out|decoder|readout")
_POSITION_NAME = re.compile(r"(^|_)(pos|wpe)")


class _Place(NamedTuple):
    """A module, its names from the model down without wrappers, and whether it is in a repeated block."""

    path: tuple[str, ...]
    module: nn.Module
    in_block: bool
    above: nn.Module | None
    """The module that it is in."""

    @property
    def name(self) -> str:
        """The module's name in its parent; empty for the model."""
        return self.path[-1] if self.path else ""


def kinds_of(model: nn.Module) -> dict[nn.Parameter, Kind]:
    """Return the kind of every parameter, from the modules that own it and from tying, not just its shape.

    - ``"vector"``: parameters with fewer than two dimensions, or that act element-wise (biases, norms) or on
      each channel by itself (depthwise convolutions).
    - ``"embedding"``: tables with a row for each token or position, weights tied to one, and the
      embedding of image patches.
    - ``"head"``: the layer that maps hidden states to tokens or labels, unless it is tied.
    - ``"experts"``: matrices stacked in one tensor (experts, rows, columns).
    - ``"hidden"``: all other matrices and convolutions, including LoRA's and the routers of experts.

    Frozen parameters have a kind too. A tied parameter has the most specific kind; "embedding" wins.

    Args:
        model: the model whose parameters to sort, also in wrappers (``torch.compile``, ``DataParallel``).

    Examples:
        >>> import torch
        >>> model = torch.nn.Sequential(
        ...     torch.nn.Embedding(10, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 10)
        ... )
        >>> list(kinds_of(model).values())
        ['embedding', 'hidden', 'vector', 'head', 'vector']
    """
    validate.model(model)
    places = _places(model)
    heads = _heads(list(places.values()))
    kinds: dict[nn.Parameter, Kind] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        if param.requires_grad:
            validate.has_shape(name, param)
        is_shaped: bool = not is_lazy(param)  # annotated, since mypy takes is_lazy for certain after it
        if not is_shaped:
            continue  # a frozen lazy parameter is not trained
        owner, leaf = _owner(name)
        kind = _kind(places[owner], leaf, param, heads)
        kinds[param] = min(kind, kinds.get(param, kind), key=_PRECEDENCE.index)
    return kinds


def _kind(place: _Place, leaf: str, param: Tensor, heads: Collection[nn.Module]) -> Kind:
    """The kind that one owner gives a parameter."""
    owner = place.module
    is_raw = not _is_layer(owner)
    in_container = isinstance(owner, nn.ParameterList | nn.ParameterDict)
    # The name of a raw parameter: its module's for a "weight", both names in a container, else its leaf's.
    called = (place.name, leaf) if in_container else (place.name if leaf == "weight" else leaf,)
    names = [_LETTERS_OF_A_SHAPE.sub("", name) for name in called]
    if param.ndim < 2:
        return "vector"
    is_whole = is_raw and _is_only_matrix(owner)  # a layer of the user's own, which its name describes
    names_of_table = [*names, place.name] if is_whole else names
    is_table = is_raw and (any(map(_TABLE_NAME.search, names_of_table)) or _holds_queries(owner, leaf))
    is_of_embedding = _is_embedding(owner) or (in_container and _is_embedding(place.above))
    if is_of_embedding or is_table or _embeds_patches(place):
        return "embedding"
    if param.numel() == max(param.shape) and not (_is_linear(owner) and leaf == "weight"):
        return "vector"
    # TransformerEngine's LayerNormMLP has matrices too: fc1_weight and fc2_weight.
    is_of_norm = "Norm" in type(owner).__name__ and not leaf.endswith("_weight")
    if is_raw and (is_of_norm or any(map(_ELEMENT_WISE_NAME.search, names))):
        return "vector"
    if _is_depthwise(owner, leaf, param):
        return "vector"
    if owner in heads and not leaf.startswith("lora"):
        return "head"
    # Not in a list: blocks may be nothing but raw parameters.
    is_outside = not place.in_block and not any(part.isdigit() for part in place.path)
    names_of_head = [*called, place.name] if is_whole else called
    if is_raw and is_outside and any(map(_HEAD_NAME.fullmatch, names_of_head)):
        return "head"
    if is_raw and param.ndim >= 3 and _matrices_with_heads(owner) is None:
        # A leading dimension of 1 is the batch that learned queries are repeated over.
        is_batch = param.shape[0] == 1 and not _says_experts(place)
        return "embedding" if is_batch else "experts"
    # This includes routers of experts, which are Linears with few rows; ``kind_of`` can make them vectors.
    return "hidden"


def transposed_in(model: nn.Module) -> set[nn.Parameter]:
    """Return the weights that are stored as (inputs, outputs), the transpose of a Linear's."""
    modules = dict(model.named_modules(remove_duplicate=False))
    transposed = set()
    for name, param in model.named_parameters(remove_duplicate=False):
        owner, leaf = _owner(name)
        if param.ndim > 1 and _is_transposed(modules[owner], leaf):
            transposed.add(param)
    return transposed


# --- modules -------------------------------------------------------------------------------------------


def _places(model: nn.Module) -> dict[str, _Place]:
    """Every module by its name."""
    places: dict[str, _Place] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        path = tuple(part for part in name.split(".") if part and part not in _WRAPPERS)
        above = places.get(name.rpartition(".")[0]) if name else None
        in_block = above is not None and (above.in_block or _is_repeated(module, above.module))
        places[name] = _Place(path, module, in_block, None if above is None else above.module)
    return places


def _is_repeated(module: nn.Module, parent: nn.Module) -> bool:
    """Whether a module is one block of a stack. A single layer is not a block."""
    if _is_layer(module) or next(module.children(), None) is None:
        return False
    if isinstance(parent, nn.ModuleList):
        return True
    # A Sequential or a ModuleDict can be a whole model, with blocks and other modules.
    stacked = isinstance(parent, nn.Sequential | nn.ModuleDict)
    return stacked and sum(type(sibling) is type(module) for sibling in parent.children()) > 1


def _owner(name: str) -> tuple[str, str]:
    """The names of the module that uses a parameter, and of the parameter in it.

    ``head.parametrizations.weight.original`` is the weight of ``head``.
    """
    *above, leaf = name.split(".")
    if leaf.startswith("original") and above[-2:-1] == ["parametrizations"]:
        *above, _, parametrized = above
        leaf = parametrized + leaf.removeprefix("original")
    return ".".join(above), leaf


def _is_embedding(module: nn.Module | None) -> bool:
    return isinstance(module, nn.Embedding | nn.EmbeddingBag) or "Embedding" in type(module).__name__


def _is_linear(module: nn.Module) -> bool:
    """Whether this is a linear layer: torch's, Hugging Face's (Conv1D), or a tensor-parallel library's."""
    if isinstance(module, nn.Linear):
        return True
    name, shape = type(module).__name__, _weight_shape(module)
    return shape is not None and len(shape) == 2 and ("Linear" in name or _is_conv1d(module))


def _is_conv1d(module: nn.Module) -> bool:
    """Whether this is Hugging Face's Conv1D."""
    return _is_a(module, "Conv1D")


def _is_a(module: nn.Module, name: str) -> bool:
    """Whether a module is of a class with this name, also as a subclass that torch makes of it."""
    return any(kind.__name__ == name for kind in type(module).__mro__)


def _matrices_with_heads(module: nn.Module) -> tuple[str, ...] | None:
    """The raw (width, heads, width of a head) matrices that map from the width; None for other modules."""
    return next((names for kind, names in _SPLITS_HEADS.items() if _is_a(module, kind)), None)


def _holds_queries(module: nn.Module, leaf: str) -> bool:
    """Whether a raw matrix holds learned queries. Beside a raw key it would be a projection."""
    return leaf == "query" and "key" not in dict(module.named_parameters(recurse=False))


def _is_transposed(module: nn.Module, leaf: str) -> bool:
    """Whether a module's matrix is (inputs, outputs). Most experts of Hugging Face say so themselves."""
    if (with_heads := _matrices_with_heads(module)) is not None:
        return leaf in with_heads  # and not its output projection
    says_so = getattr(module, "is_transposed", None) is True
    return says_so or _is_conv1d(module) or _is_a(module, "Llama4TextExperts")


def _is_only_matrix(module: nn.Module) -> bool:
    """Whether a module has a single matrix, and no modules in it."""
    has_children = next(module.children(), None) is not None
    return not has_children and sum(param.ndim > 1 for param in module.parameters()) == 1


def _is_convolution(module: nn.Module) -> bool:
    name, shape = type(module).__name__, _weight_shape(module)
    return isinstance(module, _CONVOLUTIONS) or (shape is not None and len(shape) > 2 and "Conv" in name)


def _is_depthwise(module: nn.Module, leaf: str, param: Tensor) -> bool:
    """Whether this is the weight of a convolution that mixes no channels, as before Mamba's recurrence."""
    is_grouped = _is_convolution(module) and getattr(module, "groups", 1) > 1
    return is_grouped and leaf.startswith("weight") and param.shape[1] == 1


def _is_layer(module: nn.Module) -> bool:
    return _is_linear(module) or _is_convolution(module)


def _weight_shape(module: nn.Module) -> tuple[int, ...] | None:
    for name, param in module.named_parameters(recurse=False):
        if name == "weight" and not is_lazy(param):
            return tuple(param.shape)
    return None


def _embeds_patches(place: _Place) -> bool:
    """Whether a layer turns image patches into tokens; like a table, it is not a hidden matrix."""
    nearest = ".".join([part for part in place.path if not part.isdigit()][-2:])
    if _is_convolution(place.module):
        return _PATCH_NAME.search(nearest) is not None
    return _is_linear(place.module) and re.search(r"patch_?(emb|proj)", nearest) is not None


def _says_experts(place: _Place) -> bool:
    names = ".".join([*place.path, type(place.module).__name__]).lower()
    return "expert" in names or "moe" in names


# --- output heads --------------------------------------------------------------------------------------


def _heads(places: list[_Place]) -> set[nn.Module]:
    """The layers that map hidden states to tokens or labels."""
    layers = {
        place.module: place
        for place in places
        if _is_layer(place.module) and not any(part.lower().startswith("lora") for part in place.path)
    }
    heads = {layer for place in places for layer in _last_layers(_declared_head(place.module), layers)}
    outside = {module: place for module, place in layers.items() if not place.in_block}
    for place in places:
        if _HEAD_NAME.fullmatch(place.name):
            heads.update(
                layer for layer in _last_layers(place.module, outside) if not _transforms(layers[layer])
            )

    tables = {
        place: sizes
        for place in places
        if _is_embedding(place.module) and not place.in_block and (sizes := _sizes(place.module))
    }
    # A layer may well have as many outputs as there are positions.
    token_tables = {table: sizes for table, sizes in tables.items() if not _POSITION_NAME.search(table.name)}
    blocks = [place.path for place in places if place.in_block]
    levels_of_blocks = {path[:depth] for path in blocks for depth in range(len(path) - 1)}
    square: list[nn.Module] = []
    for module, place in outside.items():
        # By such a name, and if square, a head is at the level of the embeddings or blocks, or above. BERT's
        # pooler and attention outputs are not.
        level = place.path[:-1]
        beside = [table for table in tables if table.path[: len(level)] == level]
        num_outputs, num_inputs = sizes = _sizes(module) or (0, 0)
        is_square = num_outputs == num_inputs
        is_beside = beside or (level in levels_of_blocks and not is_square)
        is_named = is_beside and _HEAD_NAME_BESIDE.fullmatch(place.name)
        if is_named or (sizes in token_tables.values() and not is_square):
            heads.add(module)
        elif sizes in [token_tables.get(table) for table in beside]:
            square.append(module)
    named_alone = [place.module for place in places if place.name == _HEAD_NAME_ALONE]
    alone = {layer for module in named_alone for layer in _last_layers(module, outside)}
    # If the vocabulary is as large as the width, every square matrix has a head's shape: take the last one.
    return heads or alone or set(square[-1:])


def _transforms(place: _Place) -> bool:
    """Whether this is the hidden layer before a tied head, as in ModernBERT's module ``head``."""
    num_outputs, num_inputs = _sizes(place.module) or (0, 1)
    return place.name == "dense" and num_outputs == num_inputs


def _declared_head(module: nn.Module) -> nn.Module | None:
    """The output layer that a Hugging Face model declares."""
    method = getattr(module, "get_output_embeddings", None)
    if not callable(method):
        return None
    try:
        head = method()
    except (AttributeError, NotImplementedError):  # a submodel may not have one
        return None
    return head if isinstance(head, nn.Module) else None


def _last_layers(module: nn.Module | None, layers: Collection[nn.Module]) -> Iterator[nn.Module]:
    """The last layer of a module, or of each of its children if it is a list or dict."""
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        for child in module.children():
            yield from _last_layers(child, layers)
    elif module is not None:
        yield from [layer for layer in module.modules() if layer in layers][-1:]


def _sizes(module: nn.Module) -> tuple[int, int] | None:
    """Rows and width of an embedding, outputs and inputs of a linear layer."""
    if isinstance(module, nn.Linear):
        return module.out_features, module.in_features
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return module.num_embeddings, module.embedding_dim
    shape = _weight_shape(module)
    if shape is None or len(shape) != 2:
        return None
    rows, columns = shape
    return (columns, rows) if _is_conv1d(module) else (rows, columns)
