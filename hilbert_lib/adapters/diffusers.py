"""Attention processors for models of Hugging Face's diffusers: windows on the latent grid, with text beside it.

    set_windows(transformer, {"transformer_blocks.*": Neighbourhood((64, 64), 17)})
    decoder.set_attn_processor(DecoderAttnProcessor())

The first is for FLUX, HunyuanVideo, CogVideoX and Wan, the second for LTX-2.5's video decoder. Read in diffusers
0.42.1.
"""

import inspect
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from hilbert_lib import checks
from hilbert_lib.adapters.natten import na3d
from hilbert_lib.attention.api import neighbourhood_attention
from hilbert_lib.internals import untraced
from hilbert_lib.patterns.neighbourhood import Neighbourhood

TEXT_PLACES = ("first", "last", "none")
# Where the text's tokens lie in the rows that a model attends over.
MODELS = {
    "FluxTransformer2DModel": "first",
    "CogVideoXTransformer3DModel": "first",
    "HunyuanVideoTransformer3DModel": "last",
    "WanTransformer3DModel": "none",
}
ARGUMENTS = ("attn", "hidden_states", "encoder_hidden_states", "attention_mask")  # and a rotary embedding


def set_windows(
    model: nn.Module, windows: Mapping[str, Neighbourhood], *, text: str | None = None, backend: str = "auto"
) -> nn.Module:
    """The model, in whose layers the latent's tokens attend to a window and to the text; text attends to all tokens.

    A layer keeps its projections, norms and rotary embedding: its processor runs as ever, but for the attention in it.
    Call it again for a latent of another size, or to change windows. A Neighbourhood as large as the grid is the
    model's own attention. torch.compile breaks the graph at each layer with a window.

    Args:
        model: a transformer of diffusers, changed in place.
        windows: a `Neighbourhood` of the latent's grid, after patches, by the names of layers as
            `model.attn_processors` has them, without ".processor". A name may hold `*`. The first that matches a layer
            counts; a layer that none matches keeps what it has.
        text: where the text's tokens lie: "first", "last" or "none". It is known for FLUX, CogVideoX, HunyuanVideo and
            Wan.
        backend: as in `neighbourhood_attention`.

    Raises:
        TypeError, ValueError: for a name that matches no layer, for a processor with arguments of its own (as of
            IP-Adapters), and for a model of which `text` is not known. When the model runs: where the grid does not
            fit the tokens, for a mask that is not one of keys, and for a matched layer that is no self-attention.
    """
    if not hasattr(model, "attn_processors"):
        raise TypeError(f"model must be a transformer of diffusers with attn_processors, got {type(model).__name__}")
    text = MODELS.get(type(model).__name__) if text is None else checks.one_of("text", text, TEXT_PLACES)
    if text is None:
        raise ValueError(f"text must be one of {', '.join(TEXT_PLACES)} for a {type(model).__name__}, got None")
    for name, near in windows.items():
        if not isinstance(near, Neighbourhood):
            raise TypeError(f"windows[{name!r}] must be a Neighbourhood, got {near!r}")
    processors = model.attn_processors
    unused = set(windows)
    for name, processor in processors.items():
        matching = [layers for layers in windows if fnmatchcase(name.removesuffix(".processor"), layers)]
        if matching:
            unused.discard(matching[0])
            unwrapped = processor.processor if isinstance(processor, WindowAttnProcessor) else processor
            processors[name] = WindowAttnProcessor(unwrapped, windows[matching[0]], text, backend)
    if unused:
        layers = ", ".join(name.removesuffix(".processor") for name in processors)
        raise ValueError(
            f"windows must name layers that no name before it has matched, got {sorted(unused)}; there are {layers}"
        )
    model.set_attn_processor(processors)
    return model


class WindowAttnProcessor:
    """A layer's own attention processor, in which `scaled_dot_product_attention` sees a window; `set_windows` makes it.

    Args:
        processor: the layer's own.
        neighbourhood: of the latent's grid.
        text: where the text's tokens lie, "first", "last" or "none".
        backend: as in `neighbourhood_attention`.
    """

    def __init__(self, processor: Callable, neighbourhood: Neighbourhood, text: str, backend: str):
        parameters = list(inspect.signature(processor.__call__).parameters)
        if tuple(parameters[:4]) != ARGUMENTS or len(parameters) != 5:
            raise TypeError(
                f"the processor of a layer must take {', '.join(ARGUMENTS)} and a rotary embedding; "
                f"{type(processor).__name__} takes {', '.join(parameters)}"
            )
        if getattr(processor, "_parallel_config", None) is not None:
            raise ValueError("windows are not served beside diffusers' context parallelism; set them without it")
        self.processor = processor
        self.neighbourhood = neighbourhood
        self.text = text
        self.backend = backend

    def __call__(
        self,
        attn: nn.Module,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: object = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """The result of the layer's own processor; the arguments are those that it takes."""
        return _processed(self, attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb)

    def attended(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
        """Attention of q, k, v (batch, heads, tokens, head_dim) over the window and the text."""
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        tokens, cells = q.shape[1], self.neighbourhood.length
        words = tokens - cells
        if words < 0 or (words and self.text == "none"):
            beside = "" if self.text == "none" else " and the text"
            raise ValueError(
                f"windows must be of a grid that holds the {tokens} tokens of a layer{beside}, got shape "
                f"{self.neighbourhood.shape}"
            )
        sizes = [words, cells] if self.text == "first" else [cells, words]
        parts = [x.split(sizes, 1) for x in (q, k, v)]
        hidden = None if mask is None else _hidden_keys(mask, q).split(sizes, 1)
        cells_part, words_part = (1, 0) if self.text == "first" else (0, 1)
        options = {"scale": scale, "backend": self.backend}
        if words:
            options |= dict(zip(("extra_q", "extra_k", "extra_v"), (part[words_part] for part in parts), strict=True))
        if hidden is not None:
            options["key_padding_mask"] = hidden[cells_part]
        if hidden is not None and words:
            options["extra_padding_mask"] = hidden[words_part]
        out = neighbourhood_attention(*(part[cells_part] for part in parts), self.neighbourhood, **options)
        if words:
            out = torch.cat(out[::-1] if self.text == "first" else out, 1)
        return out.transpose(1, 2)


@untraced
def _processed(windowed: WindowAttnProcessor, *arguments: object) -> Tensor | tuple[Tensor, Tensor]:
    # What a layer's own processor returns, with a window in the place of its attention.
    mode = _Windowed(windowed)
    with mode:
        results = windowed.processor(*arguments)
    if mode.calls != 1:
        raise ValueError(
            f"{type(windowed.processor).__name__} must call scaled_dot_product_attention once with as many keys as "
            f"queries, got {mode.calls} such calls: name self-attention layers alone, with diffusers' native backend"
        )
    return results


class _Windowed(TorchFunctionMode):
    # In it the self-attention of one processor is that of a window.
    def __init__(self, owner: WindowAttnProcessor):
        super().__init__()
        self.owner = owner
        self.calls = 0

    def __torch_function__(self, func: Callable, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        kwargs = kwargs or {}
        if func is not scaled_dot_product_attention:
            return func(*args, **kwargs)
        return self.attended(*args, **kwargs)

    def attended(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        # The arguments are those of `scaled_dot_product_attention`.
        if query.shape[2] != key.shape[2]:
            options = {"attn_mask": attn_mask, "dropout_p": dropout_p, "is_causal": is_causal, "scale": scale}
            return scaled_dot_product_attention(query, key, value, **options, enable_gqa=enable_gqa)
        if dropout_p or is_causal:
            raise ValueError(f"a window takes no dropout_p or is_causal, got {dropout_p} and {is_causal}")
        self.calls += 1
        return self.owner.attended(query, key, value, attn_mask, scale)


def _hidden_keys(mask: Tensor, q: Tensor) -> Tensor:
    # (batch, tokens) bool, True = no weight, of a mask of scaled_dot_product_attention that is alike for all queries.
    if mask.dtype != torch.bool or mask.dim() != 4 or tuple(mask.shape[1:3]) != (1, 1):
        raise ValueError(
            f"attention_mask must be bool (batch, 1, 1, tokens) beside a window, got {mask.dtype} {tuple(mask.shape)}"
        )
    return ~mask[:, 0, 0].expand(q.shape[0], -1)


class DecoderAttnProcessor:
    """The attention processor of LTX-2.5's video decoder (`LTX2VideoDiffusionDecoderModel`), on any device.

    It computes what NATTEN's does, and makes no mask of the grid, which in one stage of diffusers' own needs 167 GiB.
    Set it by `decoder.set_attn_processor(DecoderAttnProcessor())`.
    """

    def __call__(self, attn: nn.Module, hidden_states: Tensor, block_mask: object = None) -> Tensor:
        """Tokens (batch, frames, rows, columns, channels) to tokens of the same shape; block_mask must be None."""
        if block_mask is not None:
            raise ValueError("block_mask must be None: set this processor on all layers of a decoder")
        query, key, value = attn.project_qkv(hidden_states)
        out = na3d(query, key, value, attn.kernel_size, scale=1.0)  # query is scaled
        return attn.to_out[0](out.flatten(-2))
