"""Prov-GigaPath's attention layer beside torchscale's own code, with the same weights: single calls in turn, and each
back to back.

A layer has its projections, inner norm and output: 16 heads of 48, five branches, bfloat16. torchscale's needs the
packages torchscale-gml and einops; torch's FlashAttention-2 stands in for flash-attn, and its lse is given no gradient,
as there. A backward gives the gradients of the input and of all parameters. Errors are of the output, or of the
input's gradient, against ours in float32; torchscale's backward holds the branches' weights constant, which shows.
"""

from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace

import click
import torch
from torch import Tensor, nn

from hilbert_lib import DilatedPattern, MultiheadDilatedAttention
from hilbert_lib.internals import dense_operators
from hilbert_lib.lab.pairs import Results, Side, relative_difference, run_back_to_back, run_sides

EMBED, HEADS = 768, 16
PATTERN = DilatedPattern.geometric(offsets="head_block", padding="zeros")


def flash(q: Tensor, k: Tensor, v: Tensor, dropout=0.0, bias=None, softmax_scale=None, is_causal=False):
    """torch's FlashAttention-2 as torchscale calls flash-attn's: (batch, seq, heads, head_dim), and lse."""
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    op = dense_operators.flash_attention if q.is_cuda else dense_operators.flash_attention_for_cpu
    out, lse, *_ = op(*heads_first, dropout, is_causal)
    return out.transpose(1, 2), lse.detach()


def layers(device: torch.device) -> dict[str, nn.Module]:
    """Theirs, ours with its weights, and ours in float32."""
    from torchscale.component import dilated_attention, multihead_attention

    multihead_attention.flash_attn_func = flash
    options = {"segment_length": PATTERN.segment_lengths, "dilated_ratio": PATTERN.dilation_rates}
    options |= {"flash_attention": True, "seq_parallel": False, "multiway": False, "layernorm_eps": 1e-5}
    args = SimpleNamespace(**options, xpos_rel_pos=False, xpos_scale_base=512)
    torch.manual_seed(0)
    theirs = dilated_attention.DilatedAttention(args, EMBED, HEADS, self_attention=True, subln=True)
    theirs = theirs.to(device, torch.bfloat16).eval()
    weights = theirs.state_dict()
    make = partial(MultiheadDilatedAttention.from_torchscale, prefix="", pattern=PATTERN, num_heads=HEADS)
    exact = make({name: x.float() for name, x in weights.items()})
    return {"ours": make(weights).eval(), "torchscale": theirs, "exact": exact.eval()}


def sides(length: int, device: torch.device) -> Iterator[tuple[Side, Side]]:
    """Ours and torchscale's, forward and then backward.

    Args:
        length: tokens.
        device: where they compute.
    """
    found = layers(device)
    given = torch.randn(2, 1, length, EMBED, device=device, dtype=torch.bfloat16)
    x, dout = given.unbind()

    def leaves(layer: nn.Module, x: Tensor) -> list[Tensor]:
        return [x, *(parameter for _, parameter in sorted(layer.named_parameters()))]

    def forward(layer: nn.Module, x: Tensor) -> Tensor:
        return layer(x, x, x)[0]

    def backward(layer: nn.Module, x: Tensor, out: Tensor, dout: Tensor) -> Results:
        return torch.autograd.grad(out, leaves(layer, x), dout, retain_graph=True)

    def graph(layer: nn.Module, dtype: torch.dtype) -> tuple:
        own = x.detach().to(dtype).requires_grad_()
        return layer, own, forward(layer, own), dout.to(dtype)

    for direction in ("forward", "backward"):
        made = graph(found["exact"], torch.float32)
        exact = (made[2].detach(),) if direction == "forward" else backward(*made)[:1]
        del made
        pair = []
        for name in ("ours", "torchscale"):
            made = graph(found[name], torch.bfloat16)

            def run(made=made, direction=direction) -> Results:
                return (forward(*made[:2]).detach(),) if direction == "forward" else backward(*made)[:1]

            about = {"sweep": "layer", "direction": direction, "length": length, "embed": EMBED, "heads": HEADS}
            pair.append(Side(name, about, run, partial(relative_difference, exact=exact)))
        yield tuple(pair)


@click.command(help=__doc__)
@click.option("--length", "lengths", type=click.IntRange(min=1), multiple=True, default=(1000, 10_000, 70_000))
@click.option("--out", default="", help="Folder whose results.jsonl keeps the records; without it nothing is written.")
def main(lengths, out) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for length in lengths:
        run_sides(sides(length, device), device=device, output_dir=out, seconds=0.5)
        if device.type == "cuda":
            run_back_to_back(sides(length, device), device=device, output_dir=out)


if __name__ == "__main__":
    main()
