"""Tokens that follow a module's cache have the outputs of one call of all tokens of their sequence."""

import copy
from dataclasses import dataclass, field

import pytest
import torch
from cases import refusals
from torch import nn

from hilbert_lib import DilatedPattern, MultiheadDilatedAttention, NeighbourhoodAttention, Ordering
from hilbert_lib.attention import grid_module
from hilbert_lib.attention.caches import KeyValueCache

pytestmark = pytest.mark.usefixtures("compiled_code_is_forgotten")
EMBED, HEADS, ROOM = 16, 4, 26
PROMPTS = (5, 9, 1)  # of three sequences; 12 tokens follow each
STEPS = (1, 3, 1, 1, 4, 2)
DILATED = DilatedPattern((6, 24), (1, 4))


class Turned(nn.Module):
    """q and k turned by their positions; q is also made larger by its own."""

    def forward(self, q, k, positions):
        if isinstance(positions, tuple):  # the side of a whole grid
            positions = torch.arange(*positions)[None]
        angle = positions[..., None, None] * torch.tensor([0.7, 0.2], dtype=torch.float64)
        pairs = (torch.view_as_complex(x.double().unflatten(-1, (2, 2))) for x in (q, k))
        turned = tuple(torch.view_as_real(x * (1j * angle).exp()).flatten(-2).to(q.dtype) for x in pairs)
        return turned[0] * (1 + 0.1 * positions[..., None, None]).to(q.dtype), turned[1]


def multihead(pattern=DILATED, **options) -> MultiheadDilatedAttention:
    torch.manual_seed(0)
    return MultiheadDilatedAttention(EMBED, HEADS, pattern, **{"batch_first": True, "kv_heads": 2, **options})


def line(window=(5,), **options) -> NeighbourhoodAttention:
    torch.manual_seed(0)
    return NeighbourhoodAttention(EMBED, HEADS, window, **{"is_causal": True, "kv_heads": 2, **options})


@dataclass
class Decoder:
    """One function of tokens for both kinds of module, as decoding calls it."""

    module: nn.Module
    options: dict = field(default_factory=dict)  # of each call

    def __call__(self, x, **options):
        if isinstance(self.module, NeighbourhoodAttention):
            return self.module(x, **self.options, **options)
        return self.module(x, is_causal=True, **self.options, **options)[0]


MODULES = {
    "dilated": lambda: Decoder(multihead()),
    "rates that divide nothing": lambda: Decoder(multihead(DilatedPattern((7, 20), (2, 3), offsets="branch"))),
    "keys of zeros": lambda: Decoder(multihead(DilatedPattern((6, 24), (1, 4), padding="zeros"), norm_eps=1e-5)),
    "dilated, prepared": lambda: Decoder(multihead(prepare=Turned())),
    "groups of heads": lambda: Decoder(multihead(DilatedPattern((8, 16), (1, 2), mixing="head_groups"))),
    "the reference": lambda: Decoder(multihead(backend="reference")),
    "window": lambda: Decoder(line(5)),
    "window, prepared": lambda: Decoder(line(prepare=Turned(), dilation=2)),
    "window, bias": lambda: Decoder(line(relative_bias=True)),
    "windows by head": lambda: Decoder(line(((3,), 6), relative_bias=True)),
    "window, extra tokens": lambda: Decoder(line(), {"extra": torch.ones(3, 2, EMBED, dtype=torch.float64)}),
}


def sequences(decoder: Decoder) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Tokens of three sequences, and the outputs of a call of each alone."""
    draw = torch.Generator().manual_seed(1)
    decoder.module.double().eval()
    for parameter in decoder.module.parameters():
        nn.init.normal_(parameter, std=0.3, generator=draw)
    rows = [torch.randn(1, length + sum(STEPS), EMBED, dtype=torch.float64, generator=draw) for length in PROMPTS]
    one = copy.copy(decoder)
    one.options = {name: x[:1] for name, x in decoder.options.items()}
    return rows, [one(x)[0] for x in rows]


@torch.no_grad()
@pytest.mark.parametrize("padding", ["right", "left"])
@pytest.mark.parametrize("name", MODULES)
def test_a_prompt_and_the_tokens_after_it_are_those_of_the_whole_call(name, padding):
    decoder = MODULES[name]()
    rows, whole = sequences(decoder)
    prompt, counts = max(PROMPTS), torch.tensor(PROMPTS)
    padded = torch.full((3, prompt, EMBED), 7.0, dtype=torch.float64)  # padding that holds something
    for b, length in enumerate(PROMPTS):
        padded[b, slice(length) if padding == "right" else slice(prompt - length, None)] = rows[b][0, :length]
    options = {} if padding == "right" else {"key_start": prompt - counts}
    cache = decoder.module.make_cache(3, ROOM)
    assert cache.k.shape == (3, ROOM, 2, 4)
    assert cache.k.dtype == torch.float64
    assert cache.lengths.dtype == torch.int32
    for _ in range(2):
        out = decoder(padded, cache=cache, **options)
        if padding == "right":
            cache.lengths.copy_(counts)
        found = [out[b, :n] if padding == "right" else out[b, prompt - n :] for b, n in enumerate(PROMPTS)]
        done = 0
        for count in STEPS:
            at = [length + done for length in PROMPTS]
            step = torch.cat([x[:, n : n + count] for x, n in zip(rows, at, strict=True)])
            out = decoder(step, cache=cache, **options)
            found = [torch.cat([before, after]) for before, after in zip(found, out, strict=True)]
            done += count
        torch.testing.assert_close(found, whole, atol=1e-12, rtol=0)
        cache.reset()
        assert cache.is_empty


@torch.no_grad()
@pytest.mark.parametrize("where", ["attention", "out_proj"])
@pytest.mark.parametrize("name", ["keys of zeros", "window", "window, extra tokens"])
def test_a_call_that_fails_counts_no_tokens(name, where, monkeypatch):
    decoder = MODULES[name]()
    rows, whole = sequences(decoder)
    cache = decoder.module.make_cache(1, ROOM)
    decoder.options = {option: x[:1] for option, x in decoder.options.items()}

    def failing(*args, **options):
        raise RuntimeError("out of memory")

    found = []
    for step in rows[0].split([5, 1, 3, 1, 7], dim=1):
        with monkeypatch.context() as patched:
            if where == "out_proj":
                patched.setattr(decoder.module.out_proj, "forward", failing)
            elif isinstance(decoder.module, NeighbourhoodAttention):
                patched.setattr(grid_module, "computed", failing)
            else:
                patched.setattr(decoder.module.attention, "forward", failing)
            with pytest.raises(RuntimeError, match="out of memory"):
                decoder(step, cache=cache)
        found.append(decoder(step, cache=cache)[0])
    torch.testing.assert_close(torch.cat(found), whole[0], atol=1e-12, rtol=0)


@pytest.mark.parametrize("make", [multihead, line])
def test_a_batch_padded_on_the_left_has_the_gradients_of_each_sequence_alone(make):
    decoder = Decoder(make(prepare=Turned()))
    rows, whole = sequences(decoder)
    longest = max(x.shape[1] for x in rows)
    begins = torch.tensor([longest - x.shape[1] for x in rows])
    padded = torch.cat([nn.functional.pad(x, (0, 0, longest - x.shape[1], 0), value=3.0) for x in rows])
    out = decoder(padded, key_start=begins)
    found = [x[begin:] for x, begin in zip(out, begins.tolist(), strict=True)]
    torch.testing.assert_close(found, whole, atol=1e-12, rtol=0)
    parameters = list(decoder.module.parameters())
    grads, exact = (torch.autograd.grad(sum(x.square().sum() for x in each), parameters) for each in (found, whole))
    torch.testing.assert_close(grads, exact, atol=1e-10, rtol=0)


@torch.no_grad()
def test_windows_that_queries_share_are_those_of_a_grid_of_the_whole_room():
    decoder = Decoder(line(6, stride=4))
    decoder.module.double()
    x = torch.randn(2, ROOM, EMBED, dtype=torch.float64)
    cache = decoder.module.make_cache(2, ROOM)
    found = [decoder(part, cache=cache) for part in x.split([9, *[1] * 12, 5], 1)]
    torch.testing.assert_close(torch.cat(found, 1), decoder(x), atol=1e-12, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("make", [multihead, line])
def test_a_call_without_tokens_leaves_a_cache_as_it_is(make):
    decoder = Decoder(make())
    decoder.module.double()
    x = torch.randn(2, ROOM, EMBED, dtype=torch.float64)
    cache = decoder.module.make_cache(2, ROOM)
    assert decoder(x[:, :0], cache=cache).shape == (2, 0, EMBED)
    assert cache.is_empty
    found = [decoder(part, cache=cache) for part in x.split([9, 0, ROOM - 9], 1)]
    torch.testing.assert_close(torch.cat(found, 1), decoder(x), atol=1e-12, rtol=0)


@torch.no_grad()
def test_tokens_can_be_taken_back_and_tokens_first_axis_or_batch_may_lack():
    decoder = Decoder(multihead(batch_first=False))
    decoder.module.double()
    x = torch.randn(ROOM, EMBED, dtype=torch.float64)
    whole = decoder(x)
    cache = decoder.module.make_cache(1, ROOM)
    decoder(x[:7], cache=cache)
    decoder(x[9:12], cache=cache)
    cache.lengths -= 3
    torch.testing.assert_close(decoder(x[7:9], cache=cache), whole[7:9])
    torch.testing.assert_close(decoder(x[9:, None], cache=cache)[:, 0], whole[9:])


@torch.no_grad()
@pytest.mark.parametrize("make", [multihead, line])
def test_a_compiled_step_is_one_graph_for_all_lengths_and_half_precision_serves(make):
    decoder = Decoder(make(prepare=Turned()).eval())
    x = torch.randn(2, 12, EMBED)
    whole, programs = decoder(x), []

    def counted(graph, inputs):
        programs.append(graph)
        return graph

    step = torch.compile(lambda x, cache: decoder(x, cache=cache), fullgraph=True, backend=counted)
    cache = decoder.module.make_cache(2, ROOM)
    found = [decoder(x[:, :5], cache=cache), *(step(x[:, n : n + 1], cache) for n in range(5, 12))]
    torch.testing.assert_close(torch.cat(found, 1), whole)
    assert len(programs) == 1
    with torch.autocast("cpu", torch.bfloat16):
        cache = decoder.module.make_cache(2, ROOM)
        assert cache.k.dtype == torch.bfloat16
        found = [decoder(part, cache=cache) for part in x.split([5, 1, 6], 1)]
    torch.testing.assert_close(torch.cat(found, 1).float(), whole, atol=3e-2, rtol=0)


def decoded(x=None, cache=None, module=None, **options):
    module = module or multihead()
    x = torch.ones(2, 5, EMBED) if x is None else x
    with torch.no_grad():
        return module(x, cache=module.make_cache(2, 6) if cache is None else cache, **options)


def twice(**options):
    module = multihead()
    cache = module.make_cache(2, 6)
    decoded(cache=cache, module=module, is_causal=True)
    return decoded(cache=cache, module=module, is_causal=True, **options)


def of_another_batch(make, batch):
    module = make(prepare=Turned())
    return decoded(torch.ones(batch, 5, EMBED), module=module, **IS_CAUSAL[type(module)])


def without_room(make):
    def looked_up(q, k, positions):
        table = torch.ones(6)
        return q * table[positions][..., None, None], k

    module = make(prepare=looked_up)
    cache = module.make_cache(2, 6)
    for _ in range(2):
        decoded(cache=cache, module=module, **IS_CAUSAL[type(module)])


def out_of_place():
    cache = multihead().make_cache(2, 6)
    cache.lengths += 1
    return decoded(cache=cache, is_causal=True)


def with_lengths(lengths, module=None):
    module = module or multihead()
    cache = module.make_cache(2, 6)
    cache.lengths = lengths
    return decoded(cache=cache, module=module, **IS_CAUSAL[type(module)])


def made_in_inference_mode(module):
    options = {"module": module, **IS_CAUSAL[type(module)]}
    with torch.inference_mode():
        cache = module.make_cache(2, 6)
        decoded(cache=cache, **options)
        decoded(TOKENS[:, :1], cache=cache, **options)
    return decoded(TOKENS[:, :0], cache=cache, **options)


def adapted():
    module = multihead()
    module.in_proj = nn.Sequential(module.in_proj)
    return module


IS_CAUSAL = {MultiheadDilatedAttention: {"is_causal": True}, NeighbourhoodAttention: {}}
CACHE = KeyValueCache(*torch.zeros(2, 2, 6, 2, 4), torch.zeros(2, dtype=torch.int32))
FOR_TWO = "cache is for 2 sequences of at most 6 tokens, .* "
MASK, TOKENS = torch.zeros(2, 5, dtype=torch.bool), torch.ones(2, 5, EMBED)
WRONG = {
    TypeError: [
        (lambda: decoded(cache={}, is_causal=True), "cache must be what make_cache returns, or None; got dict"),
        (
            lambda: decoded(cache=multihead().make_cache(2, 6, dtype=torch.float64), is_causal=True),
            "cache must have .*64",
        ),
        (lambda: multihead().make_cache(2.5, 6), "batch must be an integer"),
        (lambda: with_lengths([0, 0]), "cache.lengths must be a tensor, got list"),
        (lambda: with_lengths(torch.zeros(2)), "cache.lengths must be int32 or int64, got torch.float32"),
    ],
    ValueError: [
        (lambda: multihead().make_cache(2, 0), "max_length must be an integer of at least 1, got 0"),
        (lambda: adapted().make_cache(2, 6), "device must be given where in_proj has no weight"),
        (lambda: adapted().make_cache(2, 6, device="cpu"), "dtype must be given where in_proj has no weight"),
        (lambda: multihead(kv_ordering=Ordering.linear(6)).make_cache(2, 6), "kv_ordering must be None for a cache"),
        (lambda: line((3, 3)).make_cache(2, 6), r"window must be of one axis for a cache, got \(3, 3\)"),
        (lambda: line(3, is_causal=False).make_cache(2, 6), "is_causal must be True for a cache, got False"),
        (lambda: decoded(), "is_causal must be True with a cache, got False"),
        (
            lambda: decoded(is_causal=True, key_padding_mask=MASK),
            "key_padding_mask must be None with a cache, got Tensor",
        ),
        (lambda: decoded(is_causal=True, cu_seqlens=MASK), "cu_seqlens must be None with a cache, got Tensor"),
        (
            lambda: decoded(module=line(), key_padding_mask=MASK),
            "key_padding_mask must be None with a cache, got Tensor",
        ),
        (lambda: decoded(module=line(), query_box=[(0, 1)]), "query_box must be None with a cache, got list"),
        (lambda: decoded(module=line(), extra=TOKENS, return_extra=True), "return_extra must be None with a cache"),
        (lambda: decoded(TOKENS[:, None], module=line(3)), "cache must be None on grids of more than one axis"),
        (
            lambda: line(3)(TOKENS[:, None], key_start=torch.zeros(2)),
            "key_start must be None on grids of more than one",
        ),
        (
            lambda: decoded(TOKENS[:1], is_causal=True),
            r"cache is for 2 sequences of at most 6 tokens, .* \(1, 5, 2, 4\)",
        ),
        (lambda: decoded(torch.ones(2, 7, EMBED), is_causal=True), "of at most 6 tokens, with 2 heads of 4; got keys"),
        (lambda: decoded(module=multihead(kv_heads=4), cache=CACHE, is_causal=True), "2 heads of 4; got .* 5, 4, 4"),
        (lambda: decoded(cache=multihead().make_cache(2, 6, device="meta"), is_causal=True), r"of the tokens \(cpu\)"),
        (lambda: of_another_batch(multihead, 1), FOR_TWO + r"\(1, 5, 2, 4\)"),
        (lambda: of_another_batch(multihead, 3), FOR_TWO + r"\(3, 5, 2, 4\)"),
        (lambda: of_another_batch(line, 1), FOR_TWO + r"\(1, 5, 2, 4\)"),
        (lambda: of_another_batch(line, 3), FOR_TWO + r"\(3, 5, 2, 4\)"),
        (lambda: without_room(multihead), r"cache.lengths must be from 0 to 1, max_length 6 .*; got \[5, 5\]"),
        (lambda: without_room(line), r"cache.lengths must be from 0 to 1, max_length 6 .*; got \[5, 5\]"),
        (twice, r"cache.lengths must be from 0 to 1, max_length 6 .*; got \[5, 5\]"),
        (out_of_place, r"cache.lengths must be 0 where cache.is_empty is True; got \[1, 1\]"),
        (
            lambda: with_lengths(torch.zeros(1, dtype=torch.int32)),
            r"cache.lengths must be \(batch,\) = \(2,\), got .*\(1,\)",
        ),
        (
            lambda: with_lengths(torch.zeros(2, 1).int(), module=multihead(prepare=Turned())),
            r"\(2,\), got shape \(2, 1\)",
        ),
        (lambda: with_lengths(torch.zeros(2, 1).int(), module=line(prepare=Turned())), r"\(2,\), got shape \(2, 1\)"),
        (
            lambda: made_in_inference_mode(multihead()),
            r"cache must be used under torch.inference_mode\(\), where it was",
        ),
        (lambda: made_in_inference_mode(line()), r"cache must be used under torch.inference_mode\(\), where it was"),
        (lambda: multihead()(TOKENS, cache=CACHE, is_causal=True), "cache must be None where gradients are recorded"),
    ],
}
test_a_cache_that_does_not_fit_is_refused_by_name = refusals(WRONG)
