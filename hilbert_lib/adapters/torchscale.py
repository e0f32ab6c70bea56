"""Models of torchscale's LongNet with our attention in the place of theirs: Prov-GigaPath's slide encoder, for one.

    replace_attention(model)

Read in torchscale-gml 0.2.3. Copies of torchscale inside other packages, such as Prov-GigaPath's, are known by their
classes' names.
"""

from typing import Self

import torch
from torch import Tensor, nn

from hilbert_lib import checks
from hilbert_lib.attention.modules import MultiheadDilatedAttention
from hilbert_lib.attention.torchscale import layer_to_torchscale
from hilbert_lib.patterns.dilated import DilatedPattern


def replace_attention(model: nn.Module, *, key_padding: bool = True, backend: str = "auto") -> nn.Module:
    """The model, in which every layer of torchscale's dilated attention is a `LongNetAttention` with its weights.

    Outputs in evaluation equal theirs, where each dilation rate divides its segment length or the segment holds the
    whole sequence: elsewhere their code differs from its own rule. Gradients are exact; theirs hold the weights of
    branches constant. Parameters are new tensors: make the optimizer afterwards.

    Args:
        model: changed in place. It may be such a layer itself: then the new layer is returned.
        key_padding: whether padded tokens have no weight. With False they have weight, as in torchscale, which drops
            the mask; on a GPU more kernels serve calls without a mask.
        backend: as in `dilated_attention`.

    Raises:
        TypeError, ValueError: where the model has no such layer, for XPOS, multiway layers and `seq_parallel`.
    """
    checks.boolean("key_padding", key_padding)
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    layers = {name: layer for name, layer in model.named_modules() if _is_dilated(layer)}
    if not layers:
        raise ValueError(
            f"model must have layers of torchscale's DilatedAttention, got {type(model).__name__} with none"
        )
    for name, layer in layers.items():
        replaced = LongNetAttention.of(layer, name, key_padding=key_padding, backend=backend)
        if not name:
            return replaced
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, replaced)
    return model


def to_torchscale(model: nn.Module) -> dict[str, Tensor]:
    """The state dict of a model in torchscale's names, which the model had before `replace_attention`.

    Args:
        model: what `replace_attention` returned; or one `MultiheadDilatedAttention`.

    Raises:
        ValueError: for a layer without biases, or with fewer heads of k and v than of q, which torchscale has not.
    """
    state = model.state_dict()
    for name, layer in model.named_modules():
        if not isinstance(layer, MultiheadDilatedAttention):
            continue
        ours = f"{name}." if name else ""
        inner = {key.removeprefix(ours): state.pop(key) for key in list(state) if key.startswith(ours)}
        parent, _, attribute = name.rpartition(".")
        is_wrapped = attribute and isinstance(model.get_submodule(parent), LongNetAttention)
        prefix = name.removesuffix(attribute) if is_wrapped else ours
        state |= layer_to_torchscale(inner, prefix)
    return dict(state)


def _is_dilated(layer: nn.Module) -> bool:
    args = getattr(layer, "args", None)
    is_called_so = any(base.__name__ == "DilatedAttention" for base in type(layer).__mro__)
    return is_called_so and hasattr(args, "segment_length") and hasattr(args, "dilated_ratio")


class LongNetAttention(nn.Module):
    """A `MultiheadDilatedAttention` that is called as torchscale calls its attention layers.

    Args:
        attention: the layer, with batch_first.
        key_padding: whether padded tokens have no weight.
    """

    def __init__(self, attention: MultiheadDilatedAttention, key_padding: bool):
        super().__init__()
        self.attention = attention
        self.key_padding = key_padding

    @classmethod
    def of(cls, layer: nn.Module, name: str, *, key_padding: bool, backend: str) -> Self:
        """The layer with the weights of one of torchscale's; name is for errors."""
        args = layer.args
        if getattr(args, "seq_parallel", False):
            raise ValueError(
                f"args.seq_parallel of {name or 'the layer'} must be False, got True: `ring_dilated_attention` attends "
                "over several ranks"
            )
        segments, rates = tuple(args.segment_length), tuple(args.dilated_ratio)
        pattern = DilatedPattern(segments, rates, offsets="head_block", padding="zeros")
        prefix = f"{name}." if name else ""
        weights = {prefix + key: x for key, x in layer.state_dict().items()}
        eps = getattr(getattr(layer, "inner_attn_ln", None), "eps", 1e-5)
        options = {"norm_eps": eps, "dropout": layer.dropout, "backend": backend}
        attention = MultiheadDilatedAttention.from_torchscale(weights, prefix, pattern, layer.num_heads, **options)
        attention.requires_grad_(any(weight.requires_grad for weight in layer.parameters()))
        return cls(attention, key_padding).train(layer.training)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        incremental_state: dict[str, Tensor] | None = None,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        rel_pos: Tensor | None = None,
        is_first_step: bool = False,
        is_causal: bool = False,
    ) -> tuple[Tensor, None]:
        """Tokens (batch, seq, embed_dim) to tokens, and None in the place of weights; the arguments are torchscale's.

        Args:
            incremental_state: keys and values of earlier tokens, (batch, heads, seq, head_dim) each, to which those of
                query are added. Outputs are the rows of one causal call of all tokens.

        Raises:
            TypeError, ValueError: for a rel_pos, for an incremental_state of a layer that is not causal, and for other
                arguments that `MultiheadDilatedAttention` does not take.
        """
        if rel_pos is not None:
            raise ValueError("rel_pos must be None: dilated attention has no bias; set args.rel_pos_buckets to 0")
        padding = key_padding_mask if self.key_padding else None
        if incremental_state is None:
            options = {"key_padding_mask": padding, "attn_mask": attn_mask, "is_causal": is_causal}
            return self.attention(query, key, value, **options)
        if not is_causal or key is not query or padding is not None:
            raise ValueError(
                "incremental_state must be None unless the layer is causal self-attention without a key_padding_mask"
            )
        return self._continued(query, incremental_state), None

    def _continued(self, tokens: Tensor, state: dict[str, Tensor]) -> Tensor:
        # The output of tokens that follow those in the state, to which they are added.
        q, k, v = self.attention.project(tokens)
        if "prev_key" in state:
            k, v = (torch.cat([state[name].transpose(1, 2), x], 1) for name, x in (("prev_key", k), ("prev_value", v)))
        start = {"query_start": k.shape[1] - q.shape[1]} if k.shape[1] > q.shape[1] else {}
        attended = self.attention.attention(q, k, v, is_causal=True, **start).flatten(2)
        norm = self.attention.inner_norm
        out = self.attention.out_proj(attended if norm is None else norm(attended))
        # Last: a call that fails leaves the state as it was.
        state["prev_key"], state["prev_value"] = k.transpose(1, 2), v.transpose(1, 2)
        return out
