"""Attention implementations for models of Hugging Face's transformers: sliding windows, and dilated attention.

    register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="hilbert_window")

transformers makes one mask for each kind of layer before the first layer runs. In its place stands a `VisibleRows`: the
few numbers and tensors that say which rows see which. Every layer hands it to its attention function. Read in
transformers 5.24.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from hilbert_lib.attention.api import attend
from hilbert_lib.checks import LARGEST_SIZE
from hilbert_lib.internals import assert_async
from hilbert_lib.patterns.dilated import DilatedPattern
from hilbert_lib.patterns.neighbourhood import Neighbourhood

WINDOW, DILATED = "hilbert_window", "hilbert_dilated"
DENSE = DilatedPattern((LARGEST_SIZE,), (1,))
# Arguments of attention functions that change what is computed, and have no counterpart here.
UNSERVED = ("softcap", "position_bias", "output_attentions", "head_mask", "cu_seq_lens_q", "cu_seq_lens_k")


def register() -> None:
    """Make "hilbert_window" and "hilbert_dilated" known to transformers as attention implementations.

    "hilbert_window" serves the sliding windows and the full layers that a model has, causal or not. Learned sinks, as
    gpt-oss has them, are served. "hilbert_dilated" serves full layers alone. Its pattern is `config.hilbert_pattern`: a
    dictionary of the arguments of `DilatedPattern`, which `save_pretrained` keeps with the model.

    Both serve dynamic and static caches, and batches that are padded on the left or the right. A padded sequence gets
    the values that it gets alone. Their errors, TypeError and ValueError, are raised by the model: for packed documents
    and for masks of another kind, for a softcap, a bias of positions and `output_attentions`, and for dropout beside a
    window.

    Raises:
        ModuleNotFoundError: where transformers is not installed.
    """
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    for name, attention in ((WINDOW, window_attention), (DILATED, dilated_attention)):
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
    if dropout:
        raise ValueError(f"attention_dropout must be 0 beside a sliding window for {WINDOW!r}, got {dropout}")
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
    return _attended(query, key, value, _pattern_of(module), options, **arguments)


def _checked(attention_mask: object, key: Tensor, implementation: str, options: dict) -> VisibleRows:
    if not isinstance(attention_mask, VisibleRows):
        got = "none" if attention_mask is None else f"a {type(attention_mask).__name__}"
        raise TypeError(
            f"attention_mask must be left out, or (batch, tokens), so that transformers makes the mask of "
            f"{implementation!r}; this layer got {got}"
        )
    for name in UNSERVED:
        if options.get(name) is not None and options[name] is not False:
            raise ValueError(f"{implementation!r} does not serve {name}, got {options[name]!r}")
    if key.shape[2] != attention_mask.sides[3]:
        raise ValueError(f"key must have the {attention_mask.sides[3]} rows of the mask, got {key.shape[2]}")
    return attention_mask


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


def _pattern_of(module: nn.Module) -> DilatedPattern:
    arguments = getattr(getattr(module, "config", None), "hilbert_pattern", None)
    if not isinstance(arguments, dict):
        raise TypeError(
            f"config.hilbert_pattern must be a dictionary of the arguments of DilatedPattern for {DILATED!r}, such as "
            f"{{'segment_lengths': [2048, 16384], 'dilation_rates': [1, 8]}}; got {arguments!r}"
        )
    return DilatedPattern(**arguments)


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
