"""Dilated attention as `torch.nn` modules: of q, k and v, and with projections, to replace MultiheadAttention."""

from collections.abc import Callable, Mapping, Sequence
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from hilbert_lib import checks
from hilbert_lib.attention.api import computed
from hilbert_lib.attention.caches import KeyValueCache, check_cache
from hilbert_lib.attention.documents import check_documents, places_of
from hilbert_lib.attention.torchscale import layer_of_torchscale
from hilbert_lib.attention.transforms import Layer, refuse_tracers, refuse_vmap
from hilbert_lib.attention.validation import (
    LARGEST_HEAD_DIM,
    autocast_dtype,
    check_backend,
    check_dropout,
    check_dtype,
    check_scale,
)
from hilbert_lib.internals import assert_async, has_hooks, has_values
from hilbert_lib.ordering import Ordering
from hilbert_lib.patterns.dilated import DilatedPattern, check_dilated

KvOrdering = Ordering | Callable[[int], Ordering] | None
Prepare = Callable[..., tuple[Tensor, Tensor]] | None  # of q, k and where they lie


class DilatedAttention(Layer):
    """Exact dilated attention (LongNet, arXiv 2307.02486) of q, k and v, without parameters.

    Train and eval differ only by dropout. `kv_ordering` never changes the output, only where k and v are stored.
    torch.compile serves all lengths with one program, unless `kv_ordering` is a function of the length: its tables are
    constants of a program, so that each length is compiled apart. After torch._dynamo.config.recompile_limit lengths,
    8 by default, others run uncompiled, or raise under fullgraph=True: pad to few lengths.

    Args:
        pattern: which keys a query sees.
        dropout: share of attention probabilities dropped while training, in [0, 1); 0.0 by default.
        scale: factor of the scores; by default head_dim ** -0.5.
        kv_ordering: in which ordering the module stores k and v, which it gets in sequence order: None, to leave them
            so, the default; an `Ordering`, for sequences of its length alone; or a function from a length to one, such
            as `partial(Ordering.from_curve, "hilbert")`.
        backend: as in `dilated_attention`.

    Raises:
        TypeError, ValueError: naming the argument, its value and what is allowed.

    >>> q = k = v = torch.ones(1, 8, 2, 4)
    >>> DilatedAttention(DilatedPattern((4, 8), (1, 2)))(q, k, v, is_causal=True).shape
    torch.Size([1, 8, 2, 4])
    """

    shown = ("pattern", "dropout", "scale", "kv_ordering", "backend")
    is_spread = False  # over ranks

    def __init__(
        self,
        pattern: DilatedPattern,
        *,
        dropout: float = 0.0,
        scale: float | None = None,
        kv_ordering: KvOrdering = None,
        backend: str = "auto",
    ):
        super().__init__()
        self.pattern = check_dilated(pattern)
        if not (kv_ordering is None or isinstance(kv_ordering, Ordering) or callable(kv_ordering)):
            allowed = "None, an Ordering, or a function from a length to one"
            raise TypeError(f"kv_ordering must be {allowed}; got {kv_ordering!r}")
        self.dropout = check_dropout("dropout", dropout)  # eval would not refuse it
        self.scale = None if scale is None else check_scale(scale)
        self.kv_ordering = kv_ordering
        self.backend = check_backend(backend, DilatedPattern)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_padding_mask: Tensor | None = None,
        *,
        is_causal: bool = False,
        query_start: int | Tensor | None = None,
        key_start: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
    ) -> Tensor:
        """The output of `dilated_attention`, (batch, queries, heads, head_dim), whose arguments and errors these are.

        k and v are in sequence order, whatever `kv_ordering` is.
        """
        refuse_tracers(q, k, v)
        for name, x in (("q", q), ("k", k), ("v", v)):
            checks.dense_tensor(name, x)
        ordering = self.kv_ordering
        # `dilated_attention` refuses whatever else k and v may be.
        if k.dim() == v.dim() == 4 and k.shape[1] == v.shape[1]:
            if callable(ordering):
                ordering = ordering(k.shape[1]) if k.shape[1] else None  # no ordering has length 0
            if isinstance(ordering, Ordering):
                if ordering.length != k.shape[1]:
                    raise ValueError(f"kv_ordering must have the length of k ({k.shape[1]}), got {ordering.length}")
                k, v = ordering.apply(k, dim=1), ordering.apply(v, dim=1)
        return computed(
            q,
            k,
            v,
            self.pattern,
            is_causal=is_causal,
            scale=self.scale,
            dropout_p=self.dropout if self.training else 0.0,
            key_padding_mask=key_padding_mask,
            query_start=query_start,
            key_start=key_start,
            cu_seqlens=cu_seqlens,
            max_seqlen=max_seqlen,
            kv_ordering=ordering,
            backend=self.backend,
        )


class ProjectedAttention(Layer):
    """Self-attention between projections of tokens: their sizes, and the checks of tokens that are projected.

    `in_proj` makes q, k and v, and `out_proj` the output. Both are nn.Linear: adapters and quantisers put layers of
    their own in their place, which decide themselves what tokens they take.
    """

    in_proj: nn.Module
    attention: nn.Module | None  # of q, k and v: one over ranks may take its place; None where the module computes it

    def __init__(self, embed_dim: int, num_heads: int, kv_heads: int | None, prepare: Prepare):
        super().__init__()
        self.embed_dim = checks.integer("embed_dim", embed_dim, least=1, most=checks.LARGEST_EMBED_DIM)
        self.num_heads = checks.integer("num_heads", num_heads, least=1)
        self.kv_heads = self.num_heads if kv_heads is None else checks.integer("kv_heads", kv_heads, least=1)
        if self.embed_dim % self.num_heads:
            raise ValueError(f"num_heads must divide embed_dim {self.embed_dim}, got {self.num_heads}")
        self.head_dim = self.embed_dim // self.num_heads
        if self.head_dim > LARGEST_HEAD_DIM:
            raise ValueError(
                f"embed_dim / num_heads must be at most {LARGEST_HEAD_DIM}, got {self.embed_dim} / {self.num_heads} = "
                f"{self.head_dim}"
            )
        if self.num_heads % self.kv_heads:
            raise ValueError(f"kv_heads must divide num_heads {self.num_heads}, got {self.kv_heads}")
        self.prepare = check_prepare("prepare", prepare)
        self.register_load_state_dict_pre_hook(_rename_projections)

    @property
    def is_spread(self) -> bool:
        """Whether other ranks hold a part of the tokens."""
        return getattr(self.attention, "is_spread", False)

    def refuse_over_ranks(self, **options: object) -> None:
        """Raise ValueError for an option that is given, where other ranks hold a part of the tokens."""
        for name, value in options.items():
            if value is not None and self.is_spread:
                raise ValueError(f"{name} must be None where ranks share the tokens, got {type(value).__name__}")

    @property
    def projected_sizes(self) -> list[int]:
        """Rows of in_proj for q, k and v."""
        return [heads * self.head_dim for heads in (self.num_heads, self.kv_heads, self.kv_heads)]

    def project(self, tokens: Tensor) -> Sequence[Tensor]:
        """q, k and v of tokens (..., embed_dim): (..., heads, head_dim) each."""
        # Two views, not six: autograd makes a node for each.
        by_head = self.in_proj(tokens).unflatten(-1, (-1, self.head_dim))
        return by_head.split_with_sizes([self.num_heads, self.kv_heads, self.kv_heads], -2)

    def project_each(self, *tokens: Tensor) -> list[Tensor]:
        """q of the first tensor, k of the second and v of the third, shaped as in `project`."""
        if not _is_plain(self.in_proj):
            return [self.project(x)[n] for n, x in enumerate(tokens)]
        sizes, bias = self.projected_sizes, self.in_proj.bias
        biases = (None,) * 3 if bias is None else bias.split(sizes)
        parts = zip(tokens, self.in_proj.weight.split(sizes), biases, strict=True)
        return [linear(*part).unflatten(-1, (-1, self.head_dim)) for part in parts]

    def make_cache(
        self,
        batch: int,
        max_length: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> KeyValueCache:
        """An empty cache of keys and values, for calls with `cache=`: a prompt first, then one or more tokens a call.

        The outputs are those of one causal call of all tokens. `cache.lengths`, (batch,) int32 on the device, counts
        the tokens of each sequence; calls add to it, and it may be written in place between them. A GPU is not waited
        for: after the prompt, a CUDA graph of one step serves every step.

        Args:
            batch: sequences. max_length: tokens of each that there is room for.
            device, dtype: of the buffers; by default those of in_proj's weight, and dtype as autocast has it.

        Raises:
            TypeError, ValueError: for other arguments; where in_proj's weight does not tell device and dtype; for a
                module that cannot decode.

        >>> attention = MultiheadDilatedAttention(16, 4, DilatedPattern((4, 8), (1, 2)), batch_first=True)
        >>> cache = attention.make_cache(batch=2, max_length=8)
        >>> with torch.no_grad():
        ...     for tokens in torch.ones(2, 5, 16).split([3, 1, 1], dim=1):  # a prompt of 3 tokens, and two more
        ...         out, _ = attention(tokens, is_causal=True, cache=cache)
        >>> cache.lengths
        tensor([5, 5], dtype=torch.int32)
        """
        self.check_decoding()
        shape = checks.integer("batch", batch, least=1), checks.integer("max_length", max_length, least=1)
        factory = where_made(device, dtype)
        weight = getattr(self.in_proj, "weight", None)
        is_known = isinstance(weight, Tensor) and weight.is_floating_point()
        for name, known in (("device", is_known and weight.device), ("dtype", is_known and autocast_dtype(weight))):
            if factory[name] is None:
                if not is_known:
                    raise ValueError(f"{name} must be given where in_proj has no weight of real numbers, got None")
                factory[name] = known
        k = torch.zeros(*shape, self.kv_heads, self.head_dim, **factory)
        return KeyValueCache(k, torch.zeros_like(k), torch.zeros(shape[0], dtype=torch.int32, device=k.device))

    def check_decoding(self) -> None:
        """Raise ValueError unless calls of some tokens after others can equal one call of all."""
        raise NotImplementedError

    def check_tokens(
        self, name: str, x: Tensor, axes: Sequence[int], allowed: str, query: Tensor | None = None
    ) -> None:
        """Raise TypeError or ValueError unless an argument holds tokens that the module projects.

        axes: how many it may have. allowed: such tokens in words, with their size as {size}. query: what they must be
        shaped like, if anything.
        """
        checks.dense_tensor(name, x)
        query = x if query is None else query
        if x.dim() not in axes or x.shape[-1] != self.embed_dim or x.shape != query.shape:
            like = "" if x is query else f", shaped like query {tuple(query.shape)}"
            allowed = allowed.format(size=self.embed_dim)
            raise ValueError(f"{name} must be {allowed}{like}, got shape {tuple(x.shape)}")
        in_proj = self.in_proj
        if not _is_torchs(in_proj):
            return
        weight = in_proj.weight
        if x.device != weight.device:
            raise ValueError(f"{name} must be on the device of the parameters ({weight.device}), got {x.device}")
        if x.dtype != weight.dtype and autocast_dtype(x) != autocast_dtype(weight):
            raise TypeError(f"{name} must have the dtype of the parameters ({weight.dtype}), got {x.dtype}")


def check_prepare(name: str, prepare: object) -> Prepare:
    """The argument, if it is None or can be called; else TypeError."""
    if prepare is not None and not callable(prepare):
        raise TypeError(f"{name} must be None, or a function or module that returns q and k; got {prepare!r}")
    return prepare


def prepared(name: str, prepare: Callable, q: Tensor, k: Tensor, *places: object) -> tuple[Tensor, Tensor]:
    """q and k as a function of the user's makes them, in the shape and dtype that they have."""
    results = prepare(q, k, *places)
    if not isinstance(results, tuple | list) or len(results) != 2:
        got = f"{len(results)} values" if isinstance(results, tuple | list) else type(results).__name__
        raise TypeError(f"{name} must return q and k, got {got}")
    for which, x, before in zip("qk", results, (q, k), strict=True):
        checks.dense_tensor(f"{which} of {name}", x)
        if x.shape != before.shape:
            raise ValueError(f"{name} must return {which} with shape {tuple(before.shape)}, got {tuple(x.shape)}")
        if autocast_dtype(x) != autocast_dtype(before):
            raise TypeError(f"{name} must return {which} as {before.dtype}, got {x.dtype}")
    return tuple(results)


def _rename_projections(module: nn.Module, state_dict: dict[str, Tensor], prefix: str, *_: object) -> None:
    # The names of nn.MultiheadAttention, which `MultiheadDilatedAttention` once had, as ours.
    for kind in ("weight", "bias"):
        name, theirs = f"{prefix}in_proj.{kind}", f"{prefix}in_proj_{kind}"
        if name not in state_dict and theirs in state_dict:
            state_dict[name] = state_dict.pop(theirs)


def _is_torchs(layer: nn.Module) -> bool:
    # Whether a layer computes as nn.Linear does: offloading to another device writes a `forward` of its own into one.
    return type(layer) is nn.Linear and "forward" not in layer.__dict__


def _is_plain(layer: nn.Module) -> bool:
    # Whether parts of a layer's weight compute parts of its output. Quantisers and sharding have weights of their own.
    return _is_torchs(layer) and not has_hooks(layer) and type(layer.weight) in (Tensor, nn.Parameter)


def positions(
    q: Tensor, cache: KeyValueCache | None, key_start: Tensor | None = None, cu_seqlens: Tensor | None = None
) -> Tensor:
    """The position of each row of q in its sequence or document: (1, seq) or (batch, seq) int64."""
    if cu_seqlens is not None:
        return places_of(cu_seqlens, q.shape[1])[0][None]
    rows = torch.arange(q.shape[1], device=q.device)[None] if cache is None else cache.rows(q.shape[1])
    if key_start is None:
        return rows
    checks.rows_of_keys("key_start", key_start, "batch", q)
    return (rows - key_start.long()[:, None]).clamp(min=0)


def where_made(device: object, dtype: object) -> dict[str, object]:
    """The arguments device and dtype of a module's parameters, checked."""
    device = None if device is None else checks.device(device)
    return {"device": device, "dtype": None if dtype is None else check_dtype(dtype)}


class MultiheadDilatedAttention(ProjectedAttention):
    """Self-attention with projections, in the place of `torch.nn.MultiheadAttention`, also inside torch's layers:
    `layer.self_attn = MultiheadDilatedAttention(...)`.

    Parameters have the shapes and first values of nn.MultiheadAttention's, whose state dict it loads. Its own names are
    in_proj.weight and in_proj.bias: nn.MultiheadAttention takes them with an underscore for the dot. With one branch
    (w >= length, r = 1) it computes the same function. Fewer kv_heads make in_proj smaller.

    Its part `attention`, a `DilatedAttention`, may be replaced by a `RingDilatedAttention`: tokens are then this rank's
    shard of a sequence. It takes no cache, cu_seqlens or key_start.

    Args:
        embed_dim: size of a token.
        num_heads: query heads, a divisor of embed_dim; embed_dim / num_heads is 1 to 256.
        pattern: which keys a query sees.
        dropout, kv_ordering, backend: as in `DilatedAttention`.
        bias: whether the projections have one.
        batch_first: whether tokens are (batch, seq, embed_dim) rather than (seq, batch, embed_dim).
        kv_heads: heads of k and v, a divisor of num_heads; by default num_heads.
        norm_eps: eps of a LayerNorm between attention and out_proj (sub-LN), above 0; by default there is none.
        prepare: function or module (q, k, positions) -> (q, k) between in_proj and attention, such as rotary embedding
            or norms. q is (batch, seq, heads, head_dim), k (batch, seq, kv_heads, head_dim). positions are int64, (1,
            seq) or (batch, seq). They count from 0 in each packed document, and from key_start; rows before it have 0.
            Over ranks they count in the whole sequence.
        device, dtype: of the parameters; dtype is one that `dilated_attention` takes.

    Raises:
        TypeError, ValueError: if a size is no integer, out of range or not a divisor; if the pattern's mixing needs
            more kv_heads; for another device or dtype; as `DilatedAttention`.

    >>> attention = MultiheadDilatedAttention(16, 4, DilatedPattern((4, 8), (1, 2)), batch_first=True)
    >>> out, weights = attention(torch.ones(2, 8, 16))
    >>> out.shape, weights
    (torch.Size([2, 8, 16]), None)
    """

    # torch's encoder layers read it. Where it is True and no gradient is needed, they compute dense attention from the
    # weights instead of calling this module.
    _qkv_same_embed_dim = False
    shown = ("embed_dim", "num_heads", "kv_heads", "batch_first")

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        pattern: DilatedPattern,
        *,
        dropout: float = 0.0,
        bias: bool = True,
        batch_first: bool = False,
        kv_heads: int | None = None,
        kv_ordering: KvOrdering = None,
        backend: str = "auto",
        norm_eps: float | None = None,
        prepare: Prepare = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(embed_dim, num_heads, kv_heads, prepare)
        checks.boolean("bias", bias)
        checks.boolean("batch_first", batch_first)
        self.attention = DilatedAttention(pattern, dropout=dropout, kv_ordering=kv_ordering, backend=backend)
        pattern.check_heads(self.kv_heads)
        self.batch_first = batch_first
        factory = where_made(device, dtype)
        self.in_proj = _undrawn_linear(self.embed_dim, sum(self.projected_sizes), bias, factory)
        self.out_proj = nn.Linear(self.embed_dim, self.embed_dim, bias=bias, **factory)
        eps = None if norm_eps is None else checks.positive("norm_eps", norm_eps)
        self.inner_norm = None if eps is None else nn.LayerNorm(self.embed_dim, eps, **factory)
        self._reset_parameters()

    @classmethod
    def from_torchscale(
        cls,
        state_dict: Mapping[str, Tensor],
        prefix: str,
        pattern: DilatedPattern,
        num_heads: int,
        *,
        norm_eps: float = 1e-5,
        **options,
    ) -> Self:
        """The module with the weights of a layer of torchscale's LongNet, such as Prov-GigaPath's; batch_first.

        Outputs equal the layer's in evaluation if its pattern is given, with offsets="head_block", padding="zeros". Its
        code differs from its own rule where a rate does not divide a segment length that is shorter than the sequence.

        Args:
            state_dict: names and tensors of a whole model. prefix: of the layer, as in "encoder.layers.0.self_attn.".
            pattern, num_heads: of the layer. norm_eps: of its inner norm, if state_dict has one.
            options: dropout, kv_ordering, backend and prepare, as for the class.

        Raises:
            TypeError, ValueError: for a name that is missing or not known, or a tensor of another shape; XPOS and
                multiway layers have such names.

        >>> names = [f"attn.{name}_proj" for name in ("q", "k", "v", "out")]
        >>> weights = {f"{name}.weight": torch.eye(8) for name in names}
        >>> weights |= {f"{name}.bias": torch.ones(8) for name in names}
        >>> pattern = DilatedPattern((4, 8), (1, 2), offsets="head_block", padding="zeros")
        >>> MultiheadDilatedAttention.from_torchscale(weights, "attn.", pattern, num_heads=2).embed_dim
        8
        """
        layer = layer_of_torchscale(state_dict, prefix)
        weight, eps = layer["out_proj.weight"], norm_eps if "inner_norm.weight" in layer else None
        factory = {"batch_first": True, "device": weight.device, "dtype": weight.dtype}
        module = cls(len(weight), num_heads, pattern, norm_eps=eps, **factory, **options)
        module.load_state_dict(layer)
        return module

    @property
    def in_proj_weight(self) -> Tensor:
        """The weight of in_proj, by nn.MultiheadAttention's name for it, which torch's layers read."""
        return self.in_proj.weight

    @property
    def in_proj_bias(self) -> Tensor | None:
        """The bias of in_proj, by nn.MultiheadAttention's name for it."""
        return self.in_proj.bias

    def check_decoding(self) -> None:
        """Raise ValueError unless calls of some tokens after others can equal one call of all."""
        if self.is_spread:
            raise ValueError(f"attention must be a DilatedAttention for a cache, got {self.attention!r}")
        if self.attention.kv_ordering is not None:
            raise ValueError(f"kv_ordering must be None for a cache, got {self.attention.kv_ordering!r}")

    def reset_parameters(self) -> None:
        """Draw all parameters anew, as after `to_empty` of a module made on the meta device."""
        self.out_proj.reset_parameters()
        if self.inner_norm is not None:
            self.inner_norm.reset_parameters()
        self._reset_parameters()

    def _reset_parameters(self) -> None:
        # As in nn.MultiheadAttention: `out_proj` has drawn its weight before.
        nn.init.xavier_uniform_(self.in_proj.weight)
        if self.in_proj.bias is not None:
            nn.init.zeros_(self.in_proj.bias)
            nn.init.zeros_(self.out_proj.bias)

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        *,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        key_start: Tensor | None = None,
        cache: KeyValueCache | None = None,
    ) -> tuple[Tensor, None]:
        """Project, attend and project back; the arguments stand in nn.MultiheadAttention's order.

        Args:
            query: tokens, (batch, seq, embed_dim) with batch_first, otherwise (seq, batch, embed_dim), or (seq,
                embed_dim); on the parameters' device and of their dtype, unless autocast casts both. With batch_first
                also a strided nested tensor, which nn.TransformerEncoder makes of padded sequences in evaluation; the
                output is then nested too.
            key, value: tensors like query, of its shape; by default query itself.
            key_padding_mask: (batch, seq), or (seq,) for one sequence: bool, True = no weight; or, as torch's layers
                give it, floating with -inf for no weight and 0 otherwise. Floating values are checked: the host waits
                for the device, so a CUDA graph cannot capture the call. A compiled or exported program asserts them; a
                failed assertion on a GPU ends the process's use of it. Tokens without keys give the output
                projection's bias.
            need_weights: False; the weights are never all in memory.
            attn_mask: None, or with is_causal the causal mask, which is not checked, as in nn.MultiheadAttention.
            average_attn_weights: without effect, as no weights are returned.
            is_causal: whether keys after the query are excluded.
            cu_seqlens, max_seqlen: of documents in one sequence, as in `dilated_attention`.
            key_start: (batch,) int32 or int64, the row at which each sequence begins, where a batch is padded on the
                left, as in `dilated_attention`. With a cache it is the same in every call.
            cache: of `make_cache`. The tokens follow those of earlier calls, see them, and are added. It needs
                is_causal=True and a call without gradients; not with key_padding_mask or cu_seqlens. Where the prompts
                of a batch are padded on the right, write their lengths into `cache.lengths` after the first call.

        Returns:
            The output, shaped like query, and None in the place of the weights.

        Raises:
            TypeError, ValueError: where an argument is not one of these; as `dilated_attention`.
        """
        refuse_tracers(query, key, value, key_padding_mask)
        if need_weights:
            raise ValueError(f"need_weights must be False: the weights are never all in memory; got {need_weights!r}")
        if attn_mask is not None and not isinstance(attn_mask, Tensor):
            raise TypeError(f"attn_mask must be the causal mask, a tensor, or None; got {type(attn_mask).__name__}")
        if attn_mask is not None and not is_causal:
            raise ValueError(
                "attn_mask must be None unless is_causal=True: the pattern says which keys are seen; got a mask of "
                f"shape {tuple(attn_mask.shape)}"
            )
        key, value = query if key is None else key, query if value is None else value
        is_nested = isinstance(query, Tensor) and query.is_nested and query.layout is torch.strided
        others = (key_padding_mask, cu_seqlens, key_start, cache)
        alone = key is query and value is query and all(x is None for x in others)
        if alone and is_nested and self.batch_first:
            return self._attend_nested(query, attn_mask, is_causal), None
        allowed = "tokens of size {size} in 2 or 3 dimensions"
        self.check_tokens("query", query, (2, 3), allowed)
        for name, x in (("key", key), ("value", value)):
            if x is not query:
                self.check_tokens(name, x, (2, 3), allowed, query)
        self.refuse_over_ranks(cache=cache, cu_seqlens=cu_seqlens, key_start=key_start)
        padding = _as_bool(key_padding_mask)
        heads = self.project(query) if key is query and value is query else self.project_each(query, key, value)
        if query.dim() == 2:
            q, k, v = (x[None] for x in heads)
            padding = None if padding is None else padding[None]
        else:
            q, k, v = (x if self.batch_first else x.transpose(0, 1) for x in heads)
        if cache is not None:
            check_cache(cache, key_padding_mask=padding, cu_seqlens=cu_seqlens)
            if not is_causal:
                raise ValueError(f"is_causal must be True with a cache, got {is_causal!r}")
            cache.check_room(k)
        if self.prepare is not None:
            check_documents(q, cu_seqlens, max_seqlen)
            place = positions(q, cache, key_start, cu_seqlens)
            if self.is_spread:
                place = place + self.attention.first_position(q)
            q, k = prepared("prepare", self.prepare, q, k, place)
        options = {"cu_seqlens": cu_seqlens, "max_seqlen": max_seqlen, "key_start": key_start}
        options = {"is_causal": is_causal} | {name: x for name, x in options.items() if x is not None}
        attended = self._attend(q, k, v, padding, cache, options).flatten(2)
        out = self.out_proj(attended if self.inner_norm is None else self.inner_norm(attended))
        if cache is not None:
            cache.advance(q.shape[1])  # last: a call that fails counts no tokens
        if query.dim() == 2:
            return out[0], None
        return out if self.batch_first else out.transpose(0, 1), None

    def _attend(self, q, k, v, padding: Tensor | None, cache: KeyValueCache | None, options: dict) -> Tensor:
        # The output of `dilated_attention`, also of tokens that follow others.
        if cache is None:
            return self.attention(q, k, v, padding, **options)
        cache.write(k, v)
        if not cache.is_empty:
            k, v = cache.k, cache.v
            options = options | {"query_start": cache.lengths}
        return self.attention(q, k, v, padding, **options)

    def _attend_nested(self, query: Tensor, attn_mask: Tensor | None, is_causal: bool) -> Tensor:
        # In evaluation nn.TransformerEncoder makes nested tensors of padded sequences, and gives its layers no mask.
        if self.is_spread:  # each rank would have padding of its own between the tokens
            raise TypeError("query must be a dense tensor where ranks share the tokens, got a nested one")
        lengths = [len(tokens) for tokens in query.unbind()]
        padded = query.to_padded_tensor(0.0)
        ends = torch.tensor(lengths, device=query.device)
        is_padding = torch.arange(padded.shape[1], device=query.device) >= ends[:, None]
        # Not `self(...)`: hooks have run for this call.
        out, _ = self.forward(padded, key_padding_mask=is_padding, attn_mask=attn_mask, is_causal=is_causal)
        return torch.nested.as_nested_tensor([tokens[:end] for tokens, end in zip(out, lengths, strict=True)])


def _undrawn_linear(in_features: int, out_features: int, bias: bool, factory: dict[str, object]) -> nn.Linear:
    # Its values are drawn after those of out_proj, as nn.MultiheadAttention draws its own. Parameters are set by name:
    # `skip_init` would not heed what makes all parameters elsewhere, as accelerate's init_empty_weights does.
    layer = nn.Linear(in_features, out_features, bias=bias, device="meta")
    for name, parameter in list(layer.named_parameters()):
        setattr(layer, name, nn.Parameter(torch.empty(parameter.shape, **factory)))
    return layer


def _as_bool(mask: Tensor | None) -> Tensor | None:
    if mask is None:
        return None
    if not isinstance(mask, Tensor):
        raise TypeError(f"key_padding_mask must be a tensor or None, got {type(mask).__name__}")
    checks.dense_tensor("key_padding_mask", mask)
    if not mask.is_floating_point():
        return mask
    refuse_vmap("MultiheadDilatedAttention", mask)  # whose values are read
    padded = mask == -torch.inf
    allowed = padded | (mask == 0)
    message = "key_padding_mask must be bool, True = no weight, or hold 0 and -inf alone"
    # A program cannot branch on values, but asserts them where it runs; others have none.
    if torch.compiler.is_compiling() or not has_values(mask):
        assert_async(torch.all(allowed), message)
    elif not torch.all(allowed):
        raise ValueError(f"{message}; got {mask[~allowed][0].item()}")
    return padded
