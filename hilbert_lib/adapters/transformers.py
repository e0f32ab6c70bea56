"""Attention for models of Hugging Face's transformers: sliding windows, dilated attention, windows on images.

    register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="hilbert_window")

    replace_attention(longformer)

transformers makes one mask for each kind of layer before the first layer runs. In its place stands a `VisibleRows`: the
few numbers and tensors that say which rows see which. Every layer hands it to its attention function.

Layers of Longformer, Swin and DiNAT have attention of their own, which no implementation replaces. Their classes are
replaced, by subclasses with another `forward`. Read in transformers 5.24.
"""

from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from hilbert_lib.attention.api import attend, neighbourhood_attention
from hilbert_lib.checks import LARGEST_SIZE
from hilbert_lib.internals import assert_async
from hilbert_lib.patterns.dilated import DilatedPattern
from hilbert_lib.patterns.neighbourhood import Neighbourhood

WINDOW, DILATED, GRID = "hilbert_window", "hilbert_dilated", "hilbert_grid"
MOST_CLASS_TOKENS = 2  # DeiT has one of class and one of distillation
DENSE = DilatedPattern((LARGEST_SIZE,), (1,))
# Arguments of attention functions that change what is computed, and have no counterpart here.
UNSERVED = ("softcap", "position_bias", "output_attentions", "head_mask", "cu_seq_lens_q", "cu_seq_lens_k")


def register() -> None:
    """Make "hilbert_window", "hilbert_dilated" and "hilbert_grid" known to transformers as attention implementations.

    "hilbert_window" serves the sliding windows and the full layers that a model has, causal or not. Learned sinks, as
    gpt-oss has them, are served. "hilbert_dilated" serves full layers alone. Its pattern is `config.hilbert_pattern`: a
    dictionary of the arguments of `DilatedPattern`, which `save_pretrained` keeps with the model.

    Both serve dynamic and static caches, and batches that are padded on the left or the right. A padded sequence gets
    the values that it gets alone.

    "hilbert_grid" serves vision transformers: ViT, DINOv2 with registers, DINOv3. Each patch sees a window of the
    image, and all class and register tokens. These see all. The window is `config.hilbert_neighbourhood`: a dictionary
    of the arguments of `Neighbourhood`, whose shape counts patches. Tokens before the patches are class and register
    tokens.

    Errors, TypeError and ValueError, are raised by the model: for packed documents and for masks of another kind, for
    a softcap, a bias of positions and `output_attentions`, and for dropout beside a window.

    Raises:
        ModuleNotFoundError: where transformers is not installed.
    """
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    for name, attention in ((WINDOW, window_attention), (DILATED, dilated_attention), (GRID, grid_attention)):
        AttentionInterface.register(name, attention)
        AttentionMaskInterface.register(name, partial(visible_rows, name))


class VisibleRows(BlockMask):
    """Rows of k that the rows of q see, in the place of a mask.

    It is a BlockMask by name alone: of that class `generate` hands a mask on as it is.

    Args:
        sides: (batch, 1, queries, keys), the shape of the mask that it stands for.
        window: how many rows a query sees, or how far to both sides if is_causal is False; None for all.
        is_causal: whether rows of k after the query are excluded.
        query_start: the row of k at which q begins, a number or a (batch,) tensor.
        key_offset: tokens that came before k's first row, and that the cache has dropped.
        padding: (batch, keys) bool, True = no weight; or None.
    """

    def __init__(
        self,
        sides: tuple[int, int, int, int],
        window: int | None,
        is_causal: bool,
        query_start: int | Tensor,
        key_offset: int,
        padding: Tensor | None,
    ):
        self.sides = sides
        self.window = window
        self.is_causal = is_causal
        self.query_start = query_start
        self.key_offset = key_offset
        self.padding = padding

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Sides of the mask that it stands for."""
        return self.sides

    def __repr__(self) -> str:
        return f"VisibleRows(sides={self.sides}, window={self.window}, is_causal={self.is_causal})"


def visible_rows(
    implementation: str,
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable | None = None,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    **options,
) -> VisibleRows:
    """`VisibleRows` of a kind of layer; arguments as of the functions in transformers' `AttentionMaskInterface`."""
    # torch.compile does not let a program look into a function: its code alone is compared. Masks with a function of
    # the user's are made with vmap. Packed documents are looked for where no mask is given, and forbid to skip it.
    is_plain = allow_is_causal_skip or allow_is_bidirectional_skip
    may_be_packed = attention_mask is None and not is_plain and q_length > 1
    if torch.compiler.is_compiling() and (use_vmap or may_be_packed):
        raise ValueError(
            f"{implementation!r} needs an attention_mask (batch, tokens) under torch.compile: without one transformers "
            "takes a sequence for packed documents. A mask function of your own is not served"
        )
    window, is_causal = _kind_of(mask_function, local_size, implementation)
    padding = _padding(attention_mask, kv_offset, kv_length)
    if padding is not None and implementation == DILATED and window is None:
        _check_holes(padding)
    # A tensor of its own: a static cache counts the one that it gave here on, before the first layer attends.
    query_start = q_offset - kv_offset
    if isinstance(query_start, Tensor):
        query_start = query_start.reshape(1).expand(batch_size)
    return VisibleRows((batch_size, 1, q_length, kv_length), window, is_causal, query_start, kv_offset, padding)


def _kind_of(mask_function: Callable, local_size: int | None, implementation: str) -> tuple[int | None, bool]:
    # The window and causality of a mask function of transformers.
    from transformers import masking_utils as masks

    kinds = [(masks.causal_mask_function, None, True), (masks.bidirectional_mask_function, None, False)]
    if local_size is not None:
        kinds += [
            (masks.sliding_window_causal_mask_function(local_size), local_size, True),
            (masks.sliding_window_bidirectional_mask_function(local_size), local_size, False),
        ]
    for mask, window, is_causal in kinds:
        if _are_same(mask_function, mask):
            return window, is_causal
    raise ValueError(
        f"{implementation!r} serves causal and bidirectional masks, with or without a sliding window; this model makes "
        "another: of packed documents, blocks, chunks or a function of its own"
    )


def _are_same(function: object, reference: object) -> bool:
    # Whether two functions have one code and equal values around it: transformers makes its functions anew each time.
    if isinstance(function, tuple) and isinstance(reference, tuple):
        return len(function) == len(reference) and all(map(_are_same, function, reference))
    if not (hasattr(function, "__code__") and hasattr(reference, "__code__")):
        return type(function) is type(reference) and function == reference
    if function.__code__ is not reference.__code__ or torch.compiler.is_compiling():
        return function.__code__ is reference.__code__
    return _are_same(_closed_over(function), _closed_over(reference))


def _closed_over(function: Callable) -> tuple:
    return tuple(cell.cell_contents for cell in function.__closure__ or ())


def _padding(attention_mask: Tensor | None, kv_offset: int, kv_length: int) -> Tensor | None:
    # (batch, kv_length) bool, True = padding, of a mask of all tokens so far; None where no token is padding.
    if attention_mask is None:
        return None
    visible = attention_mask[:, kv_offset : kv_offset + kv_length].bool()
    if not torch.compiler.is_compiling() and bool(visible.all()):
        return None  # rows after those of the mask lie after q, too
    return ~nn.functional.pad(visible, (0, kv_length - visible.shape[1]))


def _check_holes(padding: Tensor) -> None:
    # Padding between tokens is no place to count positions from.
    begins = (padding[:, :-1] & ~padding[:, 1:]).sum(1) + ~padding[:, 0]
    message = "attention_mask must hide tokens before and after a sequence alone, got a hidden token between two others"
    if torch.compiler.is_compiling():
        assert_async((begins <= 1).all(), message)
    elif bool((begins > 1).any()):
        raise ValueError(f"{message}; pad prompts on the left")


def window_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: VisibleRows,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options,
) -> tuple[Tensor, None]:
    """Attention over a sliding window or over all rows: (batch, queries, heads, head_dim), and None for weights.

    Args:
        query, key, value: (batch, heads, seq, head_dim), as transformers has them.
        attention_mask: what `visible_rows` made.
        options: of which `s_aux` (heads,) are the logits of learned sinks.
    """
    rows = _checked(attention_mask, key, WINDOW, options)
    arguments = {"scale": scaling, "key_padding_mask": rows.padding, **_starts(rows, WINDOW)}
    if rows.window is None:
        return _attended(query, key, value, DENSE, options, dropout_p=dropout, is_causal=rows.is_causal, **arguments)
    _refuse_dropout(dropout, WINDOW)
    window = rows.window if rows.is_causal else 2 * rows.window + 1
    near = Neighbourhood((key.shape[2],), window, is_causal=rows.is_causal, edge="shift" if rows.is_causal else "clip")
    return _attended(query, key, value, near, options, **arguments)


def dilated_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: VisibleRows,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options,
) -> tuple[Tensor, None]:
    """Attention by the pattern of `module.config`: (batch, queries, heads, head_dim), and None for weights.

    The arguments are those of `window_attention`.
    """
    rows = _checked(attention_mask, key, DILATED, options)
    if rows.window is not None or rows.key_offset != 0:
        raise ValueError(
            f"{DILATED!r} serves layers that see all tokens, got one with a sliding window (of {rows.window}) or a "
            "cache that drops tokens: make all layers full, as by config.sliding_window = None"
        )
    arguments = {"scale": scaling, "dropout_p": dropout, "is_causal": rows.is_causal, **_starts(rows, DILATED)}
    if rows.padding is not None:
        # Each sequence begins at its first row that is none of the padding.
        visible = ~rows.padding
        first = visible.int().argmax(1)
        arguments["key_start"] = torch.where(visible.any(1), first, visible.shape[1])
        if not rows.is_causal:
            arguments["key_padding_mask"] = rows.padding
    pattern = _pattern_of(module, "hilbert_pattern", DILATED)
    return _attended(query, key, value, pattern, options, **arguments)


def grid_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: VisibleRows | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options,
) -> tuple[Tensor, None]:
    """Attention of patches over a window of the image: (batch, tokens, heads, head_dim), and None for weights.

    The arguments are those of `window_attention`; the window is that of `module.config`.
    """
    if attention_mask is None:  # a model without masks, such as DINOv3
        _refuse_unserved(GRID, options)
        padding = None
    else:
        rows = _checked(attention_mask, key, GRID, options)
        if rows.is_causal or rows.window is not None:
            raise ValueError(f"{GRID!r} serves layers in which all tokens see all, got {rows}")
        padding = rows.padding
    if query.shape[2] != key.shape[2]:
        raise ValueError(f"query must have the {key.shape[2]} rows of key for {GRID!r}, got {query.shape[2]}")
    near = _pattern_of(module, "hilbert_neighbourhood", GRID)
    classes = key.shape[2] - near.length
    registers = getattr(module.config, "num_register_tokens", None) or 0
    if not 0 <= classes <= MOST_CLASS_TOKENS + registers:  # patches of a larger image would be taken for class tokens
        raise ValueError(
            f"config.hilbert_neighbourhood must have the shape of the image in patches for {GRID!r}, got shape "
            f"{near.shape} for {key.shape[2]} tokens, of which up to {MOST_CLASS_TOKENS + registers} may be class and "
            "register tokens"
        )
    _refuse_dropout(dropout, GRID)
    sizes = [classes, near.length]
    (extra_q, q), (extra_k, k), (extra_v, v) = (x.transpose(1, 2).split(sizes, 1) for x in (query, key, value))
    arguments = {"scale": scaling}
    if classes:
        arguments |= {"extra_q": extra_q, "extra_k": extra_k, "extra_v": extra_v}
    if padding is not None:
        extra_padding, arguments["key_padding_mask"] = padding.split(sizes, 1)
        if classes:
            arguments["extra_padding_mask"] = extra_padding
    out = neighbourhood_attention(q, k, v, near, **arguments)
    return (torch.cat(out[::-1], 1) if classes else out), None


def _checked(attention_mask: object, key: Tensor, implementation: str, options: dict) -> VisibleRows:
    if not isinstance(attention_mask, VisibleRows):
        got = "none" if attention_mask is None else f"a {type(attention_mask).__name__}"
        raise TypeError(
            f"attention_mask must be left out, or (batch, tokens), so that transformers makes the mask of "
            f"{implementation!r}; this layer got {got}"
        )
    _refuse_unserved(implementation, options)
    if key.shape[2] != attention_mask.sides[3]:
        raise ValueError(f"key must have the {attention_mask.sides[3]} rows of the mask, got {key.shape[2]}")
    return attention_mask


def _refuse_unserved(implementation: str, options: dict) -> None:
    for name in UNSERVED:
        if options.get(name) is not None and options[name] is not False:
            raise ValueError(f"{implementation!r} does not serve {name}, got {options[name]!r}")


def _refuse_dropout(dropout: float, implementation: str) -> None:
    if dropout:
        raise ValueError(f"attention_dropout must be 0 beside a window for {implementation!r}, got {dropout}")


def _starts(rows: VisibleRows, implementation: str) -> dict[str, int | Tensor]:
    # Where q begins, unless it has the rows of k.
    _, _, queries, keys = rows.sides
    if isinstance(rows.query_start, Tensor):
        return {"query_start": rows.query_start}
    if queries == keys and rows.query_start == 0:
        return {}
    if not rows.is_causal:
        raise ValueError(
            f"{implementation!r} serves self-attention; a bidirectional layer has {queries} queries and {keys} keys"
        )
    return {"query_start": rows.query_start}


# What a configuration may hold for an implementation, with an example.
OF_CONFIG = {
    "hilbert_pattern": (DilatedPattern, {"segment_lengths": [2048, 16384], "dilation_rates": [1, 8]}),
    "hilbert_neighbourhood": (Neighbourhood, {"shape": [14, 14], "window": 7}),
}


def _pattern_of(module: nn.Module, name: str, implementation: str) -> DilatedPattern | Neighbourhood:
    kind, example = OF_CONFIG[name]
    arguments = getattr(getattr(module, "config", None), name, None)
    if not isinstance(arguments, dict):
        raise TypeError(
            f"config.{name} must be a dictionary of the arguments of {kind.__name__} for {implementation!r}, such as "
            f"{example}; got {arguments!r}"
        )
    return kind(**arguments)


def _attended(
    query: Tensor, key: Tensor, value: Tensor, pattern: DilatedPattern | Neighbourhood, options: dict, **arguments
) -> tuple[Tensor, None]:
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    sink = options.get("s_aux")
    if sink is None:
        return attend(q, k, v, pattern, **arguments), None
    out, lse = attend(q, k, v, pattern, return_lse=True, **arguments)
    # The share of the keys in a softmax that a logit without a value has joined.
    share = torch.sigmoid(lse - sink.to(lse.dtype)[:, None])  # (batch, heads, queries)
    return (out * share.transpose(1, 2)[..., None]).to(out.dtype), None


def replace_attention(model: nn.Module) -> nn.Module:
    """The model, in which every attention layer of Longformer, Swin or DiNAT computes by `neighbourhood_attention`.

    Layers keep their parameters and names. Outputs and gradients are those of the model. Longformer's global
    tokens, Swin's shifted windows and the biases of Swin and DiNAT are served. DiNAT runs without NATTEN.

    Args:
        model: changed in place. It may be such a layer itself.

    Raises:
        TypeError, ValueError: where the model has no such layer. When the model runs: for `output_attentions`, for
            dropout of attention weights while training, and for an image that is smaller than Swin's window.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    layers = [(layer, forward) for layer in model.modules() if (forward := LAYERS.get(_name_of(type(layer))))]
    if not layers:
        raise ValueError(
            f"model must have layers of Longformer, Swin or DiNAT of transformers, got {type(model).__name__} with none"
        )
    for layer, forward in layers:
        layer.__class__ = _subclass(type(layer), forward)
    return model


def _name_of(layer_class: type) -> str:
    # Its last module and its name, such as "modeling_swin.SwinLayer"; empty unless it is of transformers.
    package, _, module = layer_class.__module__.rpartition(".")
    return f"{module}.{layer_class.__name__}" if package.startswith("transformers.models.") else ""


@cache
def _subclass(layer_class: type, forward: Callable) -> type:
    # Gradient checkpointing wraps the `forward` of a subclass, and would miss one that is an attribute of the layer.
    def reduced(layer: nn.Module) -> tuple:
        return _empty_layer, (layer_class, forward), layer.__dict__

    members = {"forward": forward, "__reduce__": reduced, "__module__": __name__}
    return type(f"Hilbert{layer_class.__name__}", (layer_class,), members)


def _empty_layer(layer_class: type, forward: Callable) -> nn.Module:
    # What pickle fills: it finds no class by name that was made while a program runs.
    subclass = _subclass(layer_class, forward)
    return subclass.__new__(subclass)


def longformer_attention(
    layer: nn.Module,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    is_index_masked: Tensor | None = None,
    is_index_global_attn: Tensor | None = None,
    is_global_attn: bool | None = None,
    output_attentions: bool = False,
) -> tuple[Tensor]:
    """Longformer's attention (arXiv 2004.05150): a window, and global tokens with projections of their own.

    Args:
        layer: a `LongformerSelfAttention`.
        hidden_states: (batch, seq, hidden_size).
        is_index_masked, is_index_global_attn: (batch, seq) bool, True = padding, and True = a global token.
    """
    _check_layer(layer, layer.dropout, output_attentions)

    def heads_of(rows: Tensor) -> Tensor:
        return rows.unflatten(-1, (layer.num_heads, layer.head_dim))

    q, k, v = (heads_of(project(hidden_states)) for project in (layer.query, layer.key, layer.value))
    near = Neighbourhood((q.shape[1],), 2 * layer.one_sided_attn_window_size + 1, edge="clip")
    if not is_global_attn:
        out = neighbourhood_attention(q, k, v, near, key_padding_mask=is_index_masked)
        return (out.masked_fill(is_index_masked[..., None, None], 0.0).flatten(2),)
    # Global tokens are hidden in windows, since all queries see them as extra keys. Their number differs by sequence.
    most = int(is_index_global_attn.sum(1).max())
    rows = is_index_global_attn.int().argsort(dim=1, descending=True, stable=True)[:, :most]  # (batch, most)
    is_missing = ~is_index_global_attn.gather(1, rows)
    extra_k, extra_v = (x.take_along_dim(rows[..., None, None], 1) for x in (k, v))
    hidden = is_index_masked | is_index_global_attn
    extra = {"extra_k": extra_k, "extra_v": extra_v, "extra_padding_mask": is_missing}
    out = neighbourhood_attention(q, k, v, near, key_padding_mask=hidden, **extra)
    out = out.masked_fill(is_index_masked[..., None, None], 0.0)
    # Global tokens see all tokens.
    global_q = heads_of(layer.query_global(hidden_states.take_along_dim(rows[..., None], 1)))
    global_k, global_v = (heads_of(project(hidden_states)) for project in (layer.key_global, layer.value_global))
    seen = ~is_index_masked[:, None, None]
    global_rows = (x.transpose(1, 2) for x in (global_q, global_k, global_v))
    global_out = nn.functional.scaled_dot_product_attention(*global_rows, attn_mask=seen).transpose(1, 2)
    return (out.index_put(is_index_global_attn.nonzero(as_tuple=True), global_out[~is_missing]).flatten(2),)


def dinat_attention(layer: nn.Module, hidden_states: Tensor, output_attentions: bool = False) -> tuple[Tensor]:
    """DiNAT's attention (arXiv 2209.15001): a dilated window with a bias by relative position.

    Args:
        layer: a `NeighborhoodAttention` of transformers' DiNAT.
        hidden_states: (batch, rows, columns, channels).
    """
    _check_layer(layer, layer.dropout.p, output_attentions)
    grid = tuple(hidden_states.shape[1:3])
    q, k, v = (
        project(hidden_states).flatten(1, 2).unflatten(-1, (layer.num_attention_heads, -1))
        for project in (layer.query, layer.key, layer.value)
    )
    near = Neighbourhood(grid, layer.kernel_size, layer.dilation)
    return (neighbourhood_attention(q, k, v, near, bias=layer.rpb).flatten(2).unflatten(1, grid),)


def swin_layer(
    layer: nn.Module,
    hidden_states: Tensor,
    input_dimensions: tuple[int, int],
    always_partition: bool = False,
    output_attentions: bool = False,
    **options,
) -> tuple[Tensor, None]:
    """A layer of Swin (arXiv 2103.14030) whose tokens are neither rolled nor cut into windows.

    Args:
        layer: a `SwinLayer`.
        hidden_states: (batch, rows * columns, channels).
        input_dimensions: rows and columns.
        always_partition: whether the window stays as large as it is on a smaller image.
    """
    attention = layer.attention
    _check_layer(layer, attention.attention_dropout, output_attentions or attention.config.output_attentions)
    window = attention.relative_position_bias.window_size[0]
    if not always_partition:
        # Before the layer takes a smaller window, which it would keep for all later images.
        if min(input_dimensions) < window:
            raise ValueError(
                f"input_dimensions must be at least the window {window} of the layer, got {input_dimensions}"
            )
        layer.set_shift_and_window_size(input_dimensions)
    if layer.window_size != window:
        raise ValueError(f"layer.window_size must be that of its bias, {window}, got {layer.window_size}")
    height, width = input_dimensions
    cells = layer.layernorm_before(hidden_states).unflatten(1, (height, width))
    cells, _ = layer.maybe_pad(cells, height, width)
    attended = _shifted_windows(attention, cells, window, layer.shift_size)[:, :height, :width]
    hidden_states = hidden_states + layer.drop_path(layer.dropout(attended.flatten(1, 2)))
    return hidden_states + layer.dropout(layer.mlp(layer.layernorm_after(hidden_states))), None


def _shifted_windows(attention: nn.Module, cells: Tensor, window: int, shift: int) -> Tensor:
    # Attention over cells (batch, rows, columns, channels): windows side by side, moved by a shift.
    grid = tuple(cells.shape[1:3])
    q, k, v = (
        project(cells).unflatten(-1, (attention.num_attention_heads, -1))
        for project in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    table = attention.relative_position_bias.relative_position_bias_table  # (entries of both axes, heads)
    # Swin counts from the key to the query, and we from the query to the key.
    bias = table.unflatten(0, (2 * window - 1,) * 2).flip(0, 1).permute(2, 0, 1)
    options = {"scale": attention.scaling, "bias": bias}
    if shift:
        # The first window begins `window - shift` cells before the image, and the last one ends `shift` cells after it.
        before = window - shift
        k, v = (nn.functional.pad(x, (0, 0, 0, 0, before, shift, before, shift)) for x in (k, v))
        is_outside = cells.new_zeros(1, *grid, dtype=torch.bool)
        is_outside = nn.functional.pad(is_outside, (before, shift, before, shift), value=True)
        options["key_padding_mask"] = is_outside.flatten(1).expand(len(cells), -1)
        options["query_box"] = tuple((before, before + side) for side in grid)
    near = Neighbourhood(tuple(k.shape[1:3]), window, stride=window)
    out = neighbourhood_attention(*(x.flatten(1, 2) for x in (q, k, v)), near, **options)
    return attention.o_proj(out.flatten(2)).unflatten(1, grid)


def _check_layer(layer: nn.Module, dropout: float, output_attentions: bool) -> None:
    if output_attentions:
        raise ValueError(f"output_attentions must be False, got {output_attentions}: no attention weights are made")
    if layer.training and dropout:
        raise ValueError(f"attention_probs_dropout_prob must be 0 while training, got {dropout}")


LAYERS = {
    "modeling_longformer.LongformerSelfAttention": longformer_attention,
    "modeling_swin.SwinLayer": swin_layer,
    "modeling_dinat.NeighborhoodAttention": dinat_attention,
}
