"""Joint attention: queries beside a grid see every cell and every extra key, in one softmax and in one call."""

from dataclasses import replace
from functools import partial
from random import Random

import oracle
import pytest
import torch
from cases import (
    JOINT_NAMES,
    ORDERS,
    RULES,
    TOLERANCE,
    UNIONS,
    box_in,
    check_joint,
    drawn_joint,
    needs_hopper,
    neighbourhoods,
    refusals,
    shape_of,
)
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from hilbert_lib import (
    DilatedPattern,
    Neighbourhood,
    NeighbourhoodAttention,
    attend,
    dilated_attention,
    explain_backend,
    neighbourhood_attention,
)
from hilbert_lib.attention import api, known_calls, operators
from hilbert_lib.attention.backends import all_pairs, flex, reference
from hilbert_lib.attention.backends.registry import backends_for
from hilbert_lib.attention.request import Request, Tensors
from hilbert_lib.attention.triton import limits
from hilbert_lib.internals import WITHOUT_INTERNALS
from hilbert_lib.machine import kernel_mode
from hilbert_lib.patterns.all_pairs import AllPairs

NEAR = Neighbourhood((4, 6), 3)
drawn = partial(drawn_joint, 24)


def check_random(seed, dtype, backend, has_more=False, **options):
    """A random call: a grid or a union, windows by head, groups, an order or a box, masks, numbers of extra tokens.

    has_more: besides, a bias, and along a line sequences that begin at unequal rows.
    """
    random = Random(seed)
    rules = random.choice((*RULES, *UNIONS))
    shape, windows = shape_of(rules), random.choice(("one", "windows"))
    cells = torch.Size(shape).numel()
    query_box = box_in(shape) if random.random() < 0.3 else None
    if has_more:
        options |= more_options(Random(seed), rules, cells)
        query_box = None if "starts" in options else query_box
    check_joint(
        neighbourhoods(rules, windows),
        shape,
        None if query_box or "starts" in options else ORDERS[random.choice(("none", "random", "hilbert"))](shape),
        dtype,
        backend,
        heads=(2, random.choice((2, 4)), 2 if windows == "windows" else random.choice((1, 2))),
        query_box=query_box,
        with_dlse=random.random() < 0.5,
        extra=random.choice((0, 1, 3, 9)),
        extra_queries=random.choice((0, 1, 4, cells, cells + 3)),
        hidden=random.choice((0.0, 0.4, 1.0)),
        extra_hidden=random.choice((0.0, 0.4, 1.0)),
        seed=seed,
        **options,
    )


def more_options(random, rules, cells):
    """A bias, which unions do not take; starts of two sequences along a line, some past its end or behind q's row."""
    found = {"has_bias": rules not in UNIONS and random.random() < 0.7}
    if len(shape_of(rules)) == 1 and random.random() < 0.7:
        found["queries"] = random.choice((cells, random.randint(1, cells)))
        found["starts"], first = {}, (0, 0)
        if found["queries"] < cells or random.random() < 0.5:
            first = random.randint(0, cells), random.randint(0, cells - 1)
            found["starts"]["query_start"] = torch.tensor(first, dtype=torch.int32)
        # The second sequence has the first row of q.
        begins = random.randint(-1, cells + 1), random.randint(-1, first[1])
        found["starts"]["key_start"] = torch.tensor(begins)
    return found


LINES = ("line", "line, causal", "a line three times")


@pytest.mark.parametrize("backend", ["reference", "eager", "auto"])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_random_calls_with_a_bias_and_unequal_starts_are_the_oracles(dtype, backend, monkeypatch):
    for seed in range(8):
        check_random(seed, dtype, backend, has_more=True)
    for name, rules in (("RULES", LINES[:2]), ("UNIONS", LINES[2:])):
        monkeypatch.setattr(f"{__name__}.{name}", {line: globals()[name][line] for line in rules})
    for seed in range(8, 16):
        check_random(seed, dtype, backend, has_more=True)


@pytest.mark.skipif(kernel_mode() != "interpreted", reason="on a GPU no machine has run these calls yet")
def test_plain_kernels_take_a_bias_and_unequal_starts(monkeypatch):
    monkeypatch.setattr(f"{__name__}.UNIONS", {})
    monkeypatch.setattr(f"{__name__}.RULES", {line: RULES[line] for line in LINES[:2]})
    for seed in range(4):
        check_random(seed, torch.float32, "triton", has_more=True, head_dim=16)


@pytest.mark.parametrize("backend", ["reference", "eager", "auto"])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_random_calls_are_the_oracles(dtype, backend):
    for seed in range(12):
        check_random(seed, dtype, backend)


def test_rows_before_a_sequence_begins_are_no_cells():
    tensors, line = drawn(queries=2), Neighbourhood((24,), 5, is_causal=True)
    options = {"pattern": line, "key_start": torch.tensor([3, 0]), "query_start": torch.tensor([20, 11])}
    for backend in ("reference", "eager", "auto"):
        found = attend(**tensors, **options, backend=backend, return_lse=True)
        torch.testing.assert_close(found, oracle.joint_attention(**tensors, **options), atol=1e-12, rtol=0)


@pytest.mark.skipif(kernel_mode() == "absent", reason="needs triton")
@pytest.mark.parametrize("case", [(0, 0), (0, 5), (3, 0), (3, 5)], ids=str)
def test_plain_kernels_are_the_oracles(case):
    # The kernel counts keys by position: more queries than keys, as many, and fewer; without padding and with some. Up
    # to as many they stand on a line of the keys.
    extra, hidden = case
    device = "cuda" if kernel_mode() == "compiled" else "cpu"
    for extra_queries in (2, 6, 9):
        options = {"extra": extra, "extra_queries": extra_queries, "hidden": hidden / 10, "extra_hidden": hidden / 10}
        options["with_dlse"] = extra_queries == 6
        check_joint(
            Neighbourhood((2, 3), 2), (2, 3), None, torch.float32, "triton", device=device, head_dim=16, **options
        )


@pytest.mark.skipif(kernel_mode() == "absent", reason="needs triton")
@pytest.mark.parametrize(("shape", "runs"), [((2, 7), 2), ((3, 7), 3), ((23,), 3)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_backward_by_runs_of_keys_is_the_oracles(monkeypatch, shape, runs, dtype):
    # Of 23 keys no run of seven holds the last two.
    monkeypatch.setattr(all_pairs, "LEAST_KEYS", 7)
    monkeypatch.setattr(all_pairs, "MOST_ON_A_LINE", 1)
    cells = torch.Size(shape).numel()
    assert all_pairs.runs_of(torch.empty(2, 5, 4, 16), torch.empty(2, cells, 2, 16)) == runs
    device = "cuda" if kernel_mode() == "compiled" else "cpu"
    for hidden, extra in ((0.0, 0), (0.4, 3), (1.0, 3)):
        options = {"hidden": hidden, "extra_hidden": hidden, "extra": extra, "head_dim": 16, "with_dlse": hidden > 0}
        check_joint(Neighbourhood(shape, 2), shape, None, dtype, "triton", device=device, **options)


def test_a_backward_has_as_many_runs_of_keys_as_fill_a_gpu():
    def runs(queries: int, keys: int, heads: int = 8) -> int:
        return all_pairs.runs_of(torch.empty(1, queries, heads, 64), torch.empty(1, keys, heads, 64))

    assert runs(64, 65_536) == 16  # of 4,096 keys
    assert runs(512, 65_536) == 4  # 64 tiles
    assert runs(1_024, 65_536) == 1  # 128 tiles
    assert runs(256, 8_193) == 2  # and a rest of one key
    assert runs(5_000, 20_001, heads=1) == 3  # 79 tiles
    assert runs(5_000, 20_000, heads=1) == 2  # without a rest
    assert runs(5_000, 9_999, heads=1) == 1  # no run has fewer keys than queries
    assert runs(1, 8_191) == 1


@pytest.mark.skipif(kernel_mode() == "absent", reason="needs triton")
@pytest.mark.parametrize(("whole_tiles", "parts"), [(limits.WHOLE_TILES, 1), (1, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_extra_keys_by_plain_kernels_are_of_one_part_or_sums_of_several(
    monkeypatch, whole_tiles, parts, dtype
):
    monkeypatch.setattr(limits, "WHOLE_TILES", whole_tiles)
    assert limits.parts_of_extra_keys(70, (2, 3, 2, 16)) == parts
    device = "cuda" if kernel_mode() == "compiled" else "cpu"
    options = {"extra": 3, "extra_queries": 1, "hidden": 0.0, "extra_hidden": 0.3, "head_dim": 16, "device": device}
    check_joint(Neighbourhood((2, 35), 3), (2, 35), None, dtype, "triton", **options)


@pytest.mark.skipif(kernel_mode() == "absent", reason="needs triton")
def test_plain_kernels_take_few_keys_on_a_line_and_more_in_segments(monkeypatch):
    from hilbert_lib.attention.triton import grid_launch, launch  # triton is imported only where a kernel is used

    taken = []
    for module, name in ((grid_launch, "on a line"), (launch, "in segments")):
        original = module.forward
        noting = lambda *given, run=original, name=name: taken.append(name) or run(*given)  # noqa: E731
        monkeypatch.setattr(module, "forward", noting)
    monkeypatch.setattr(all_pairs, "MOST_ON_A_LINE", 8)
    device = "cuda" if kernel_mode() == "compiled" else "cpu"
    forward, _ = backends_for(AllPairs)["triton"].functions(torch.device(device))
    request = Request(AllPairs(), scale=0.25)
    for queries, keys, extra in ((1, 8, 0), (8, 8, 3), (9, 8, 0), (1, 9, 0)):
        sizes = {"queries": queries, "extra_queries": 1, "extra": extra, "head_dim": 16, "dtype": torch.float32}
        tensors = drawn_joint(keys, (2, 4, 2), **sizes)
        inputs = Tensors(*(tensors[name].to(device) for name in "qkv"))
        if extra:
            inputs = inputs._replace(extra_k=tensors["extra_k"].to(device), extra_v=tensors["extra_v"].to(device))
        forward(inputs, request)
    assert taken == ["on a line"] * 2 + ["in segments"] * 2


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [40, 64, 128])
@pytest.mark.parametrize("backend", ["eager", "triton", "auto"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("first", range(0, 16, 2))
def test_on_a_gpu_random_calls_are_the_oracles(first, dtype, backend, head_dim):
    for seed in (first, first + 1):
        check_random(seed, dtype, backend, head_dim=head_dim, device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("with_dlse", [False, True])
@pytest.mark.parametrize("sizes", [(128, 128), (130, 70), (5, 200)], ids=str)
@pytest.mark.parametrize("backend", ["triton", "flex", "auto", pytest.param("hopper", marks=needs_hopper)])
def test_on_a_gpu_text_beside_an_image_is_the_oracles(backend, sizes, with_dlse):
    extra_queries, extra = sizes
    if backend == "hopper" and extra_queries == 5:
        extra_queries = 72  # of a few queries it refuses to decode
    options = {"hidden": 0.0, "extra_hidden": 0.4, "with_dlse": with_dlse, "head_dim": 64, "device": "cuda"}
    near = Neighbourhood((16, 24), (5, 7))
    check_joint(near, near.shape, None, torch.bfloat16, backend, extra=extra, extra_queries=extra_queries, **options)


def test_it_is_one_graph_and_is_checkpointed():
    leaves = [x.requires_grad_() for x in drawn().values()]
    hidden = torch.rand(2, 24, generator=torch.Generator().manual_seed(2)) < 0.3

    def call(*tensors):
        named = dict(zip(JOINT_NAMES, tensors, strict=True))
        return neighbourhood_attention(**named, neighbourhood=NEAR, key_padding_mask=hidden, return_lse=True)

    def loss(results):
        return results[0].square().sum() + results[2].square().sum()

    right = call(*leaves)
    grads = torch.autograd.grad(loss(right), leaves)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for results in (compiled(*leaves), checkpoint(call, *leaves, use_reentrant=False)):
        torch.testing.assert_close(results, right)
        torch.testing.assert_close(torch.autograd.grad(loss(results), leaves), grads)


@pytest.mark.skipif(WITHOUT_INTERNALS, reason="without private names somebody may watch every call")
def test_a_later_call_of_its_form_is_looked_up_and_another_number_of_extra_queries_is_another_form(monkeypatch):
    known_calls.forget()
    validations, original = [], api.validated
    monkeypatch.setattr(api, "validated", lambda *given, **rest: validations.append(1) or original(*given, **rest))
    for seed, extra_queries, count in ((0, 5, 1), (1, 5, 1), (2, 6, 2)):
        tensors = drawn(extra_queries=extra_queries, seed=seed)
        found = neighbourhood_attention(**tensors, neighbourhood=NEAR, return_lse=True)
        torch.testing.assert_close(found, oracle.joint_attention(**tensors, pattern=NEAR), atol=1e-12, rtol=0)
        assert len(validations) == count


def test_any_number_of_extra_tokens_is_one_graph():
    graphs = []
    call = torch.compile(
        partial(neighbourhood_attention, neighbourhood=NEAR),
        fullgraph=True, dynamic=True, backend=lambda graph, _: graphs.append(graph) or graph.forward,
    )  # fmt: skip
    for extra in (3, 5, 9):
        tensors = drawn(extra=extra, extra_queries=extra + 2)
        torch.testing.assert_close(call(**tensors), neighbourhood_attention(**tensors, neighbourhood=NEAR))
    assert len(graphs) == 1


def test_the_operator_takes_them():
    tensors = drawn(extra_queries=2, dtype=torch.float32)
    inputs = [x if x is None else x.requires_grad_() for x in joint_inputs(tensors)]
    request = Request(AllPairs(), scale=0.3, extra_padding_mask=torch.rand(2, 3) < 0.5)
    arguments = (*inputs, *operators._arguments(request), "sdpa")
    torch.library.opcheck(torch.ops.hilbert_lib.attention.default, arguments)


def test_useful_flop_of_extra_queries_are_counted():
    tensors = {name: x.requires_grad_() for name, x in drawn().items()}
    for backend in ("eager", "auto"):
        with FlopCounterMode(display=False) as counted:
            _, extra_out = neighbourhood_attention(**tensors, neighbourhood=NEAR, backend=backend)
            forward = counted.get_total_flops()
            extra_out.sum().backward()
        of_cells = 4 * 8 * 2 * 4 * (int(oracle.mask_of(NEAR).sum()) + 24 * 3)
        of_extra = 4 * 8 * 2 * 4 * 5 * (24 + 3)
        assert forward == of_cells + of_extra
        assert counted.get_total_flops() == forward + of_extra * 5 // 2


def test_autocast_casts_extra_queries():
    tensors = drawn(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        _, _, out, lse = neighbourhood_attention(**tensors, neighbourhood=NEAR, return_lse=True)
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)


def joint_inputs(tensors):
    return Tensors(*(tensors[name] for name in ("extra_q", "k", "v", "extra_k", "extra_v")))


def test_no_keys_are_joined_to_extra_ones(monkeypatch):
    monkeypatch.setattr(torch, "cat", lambda *_args, **_options: pytest.fail("tensors are joined"))
    tensors = {name: x.requires_grad_() for name, x in drawn().items()}
    out, _ = operators.attention(joint_inputs(tensors), Request(AllPairs()), "sdpa")
    out.sum().backward()


def test_it_says_which_backend_serves_extra_queries():
    tensors = drawn()
    hidden = torch.zeros(2, 24, dtype=torch.bool)
    q, k, v = (tensors.pop(name) for name in "qkv")
    explained = partial(explain_backend, q, k, v, NEAR, **tensors)
    assert explained().reasons["eager"].endswith("extra queries by 'sdpa'")
    assert explained(key_padding_mask=hidden).reasons["eager"].endswith("extra queries by 'eager'")
    assert explained(backend="reference").reasons["reference"].endswith("extra queries by 'reference'")
    over_cells = "extra queries over the cells by 'sdpa', over the extra keys by matrix products"
    assert explained(extra_padding_mask=hidden[:, :3]).reasons["eager"].endswith(over_cells)
    refused = explain_backend(q, k, v, NEAR, backend="hopper").reasons["hopper"]
    assert explained(backend="hopper").reasons["hopper"] == refused  # of the cells


TENSORS = drawn()
asked = partial(neighbourhood_attention, *(TENSORS[name] for name in "qkv"), NEAR)
EXTRA_Q = TENSORS["extra_q"]
LINE = DilatedPattern((24,), (1,))
refused_arguments = {
    ValueError: [
        (lambda: asked(extra_q=EXTRA_Q[0]), r"extra_q must be .*with q's 2, 4 and 8, got shape \(5, 4, 8\)"),
        (lambda: asked(extra_q=EXTRA_Q[:1]), r"extra_q must be \(batch, extra, heads, head_dim\) .*\(1, 5, 4, 8\)"),
        (lambda: asked(extra_q=EXTRA_Q[:, :, :2]), "extra_q must be .*with q's 2, 4 and 8"),
        (lambda: asked(extra_q=EXTRA_Q[..., :4]), "extra_q must be .*with q's 2, 4 and 8"),
        (lambda: asked(extra_q=EXTRA_Q.to("meta")), r"extra_q must be on the device of q \(cpu\), got meta"),
        (lambda: attend(*[EXTRA_Q] * 3, LINE, extra_q=EXTRA_Q), "extra_q must be left out for a DilatedPattern, got a"),
    ],
    TypeError: [
        (lambda: asked(extra_q=EXTRA_Q.float()), "extra_q must have the dtype of q .*float64.*, got torch.float32"),
        (lambda: asked(extra_q=[EXTRA_Q]), "extra_q must be a tensor, got list"),
        (
            lambda: asked(extra_q=torch.nested.nested_tensor([EXTRA_Q[0]], layout=torch.jagged)),
            "extra_q must be a dense .*a nested one",
        ),
        (lambda: dilated_attention(*[EXTRA_Q] * 3, LINE, extra_q=EXTRA_Q), "no argument 'extra_q'"),
    ],
}
test_wrong_extra_queries_are_named = refusals(refused_arguments)


def test_a_backend_that_does_not_serve_extra_queries_is_refused_by_name(monkeypatch):
    backends = backends_for(AllPairs)
    monkeypatch.setitem(backends, "eager", replace(backends["eager"], limits=lambda q, request: "no such queries"))
    with pytest.raises(ValueError, match="backend='eager' cannot serve extra_q: no such queries; see explain_backend"):
        asked(extra_q=EXTRA_Q, backend="eager")


def test_a_second_derivative_and_a_transform_are_refused_by_name():
    extra_q = EXTRA_Q.clone().requires_grad_()
    (grad,) = torch.autograd.grad(asked(extra_q=extra_q)[1].square().sum(), extra_q, create_graph=True)
    with pytest.raises(RuntimeError, match="neighbourhood_attention with extra_q can be differentiated once"):
        grad.sum().backward()
    with pytest.raises(RuntimeError, match=r"neighbourhood_attention with extra_q has no rule for torch\.func\.vmap"):
        torch.func.vmap(lambda x: asked(extra_q=x)[1])(extra_q.detach()[None])


def test_the_keys_of_a_backend_that_serves_no_mask_and_an_extra_mask():
    # "sdpa" takes no mask: it serves the cells, and matrix products serve the extra keys.
    tensors = drawn(dtype=torch.float32)
    mask = torch.tensor([[True, False, False], [True, True, True]])
    call = partial(attend, pattern=NEAR, extra_padding_mask=mask, return_lse=True)
    request = Request(AllPairs(), scale=8**-0.5, extra_padding_mask=mask)
    out, lse = operators.attention(joint_inputs(tensors), request, "sdpa")
    _, _, right, right_lse = call(**tensors, backend="reference")
    torch.testing.assert_close((out, lse), (right, right_lse))


@pytest.mark.skipif(kernel_mode() != "interpreted", reason="of kernels on a CPU")
@pytest.mark.parametrize("extra_queries", [2, 3, 9])  # fewer than extra keys, as many, more
def test_plain_kernels_serve_a_mask_of_extra_keys_beside_a_dense_kernel(monkeypatch, extra_queries):
    monkeypatch.setattr(all_pairs, "kernel_serves", lambda x: True)
    for name in ("forward_by_rows", "backward_by_rows"):
        monkeypatch.setattr(reference, name, lambda *_: pytest.fail("matrix products"))
    tensors = {name: x.requires_grad_() for name, x in drawn(dtype=torch.float32, extra_queries=extra_queries).items()}
    mask = torch.tensor([[True, False, False], [True, True, True]])
    right = oracle.joint_attention(**tensors, pattern=NEAR, extra_padding_mask=mask)[2:]
    douts = [torch.randn_like(x) for x in right]
    inputs = joint_inputs(tensors)
    wanted = torch.autograd.grad(right, inputs[:5], douts)

    request = Request(AllPairs(), scale=8**-0.5, extra_padding_mask=mask)
    forward, backward = backends_for(AllPairs)["sdpa"].functions(torch.device("cpu"))
    with torch.no_grad():
        out, lse = forward(inputs, request)
        found = backward(douts[0].float(), inputs, out, lse, request, douts[1].float())
    for x, y in zip((out, lse, *found[:5]), (*right, *wanted), strict=True):
        torch.testing.assert_close(x.double(), y.double(), atol=1e-5, rtol=0)
    q, k, v = (tensors.pop(name) for name in "qkv")
    explained = explain_backend(q, k, v, NEAR, **tensors, extra_padding_mask=mask).reasons["eager"]
    assert explained.endswith("extra queries over the cells by 'sdpa', over the extra keys by 'triton'")


def vit_attention(tokens, weight, near, extra):
    """A vision transformer's attention by a dense mask: class tokens first, then cells, which see their window."""
    q, k, v = (x.transpose(1, 2) for x in (tokens @ weight).unflatten(-1, (3, 2, -1)).unbind(2))
    sees = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool)
    sees[extra:, extra:] = oracle.mask_of(near)
    return scaled_dot_product_attention(q, k, v, attn_mask=sees).transpose(1, 2)


@pytest.mark.parametrize("window", [3, (7, 11)], ids=["windows", "dense"])
@pytest.mark.parametrize("extra", [1, 5])
def test_class_tokens_beside_an_image_are_a_vision_transformers(extra, window):
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(2, extra + 24, 16, generator=generator, dtype=torch.float64)
    weight = torch.randn(16, 48, generator=generator, dtype=torch.float64)
    near = Neighbourhood((4, 6), window, edge="clip")
    q, k, v = (tokens @ weight).unflatten(-1, (3, 2, -1)).unbind(2)
    of_class = dict(zip(JOINT_NAMES[3:], (x[:, :extra] for x in (q, k, v)), strict=True))
    image, extra_out = neighbourhood_attention(*(x[:, extra:] for x in (q, k, v)), near, **of_class)
    found = torch.cat([extra_out, image], 1)
    torch.testing.assert_close(found, vit_attention(tokens, weight, near, extra), atol=1e-12, rtol=0)


def test_extra_tokens_of_a_module_attend_by_its_projections():
    torch.manual_seed(0)
    module = NeighbourhoodAttention(16, 4, window=3, kv_heads=2, edge="clip").double()
    x, extra = torch.randn(2, 4, 6, 16, dtype=torch.float64), torch.randn(2, 3, 16, dtype=torch.float64)
    hidden, extra_hidden = torch.rand(2, 4, 6) < 0.3, torch.tensor([[False, True, False], [False, False, False]])
    masks = {"key_padding_mask": hidden.flatten(1), "extra_padding_mask": extra_hidden}
    (q, k, v), of_extra = (
        module.in_proj(tokens).unflatten(-1, (-1, 4)).split((4, 2, 2), -2) for tokens in (x.flatten(1, 2), extra)
    )
    near = Neighbourhood((4, 6), 3, edge="clip")
    right = oracle.joint_attention(q, k, v, pattern=near, **dict(zip(JOINT_NAMES[3:], of_extra, strict=True)), **masks)
    options = {"key_padding_mask": hidden, "extra": extra, "extra_padding_mask": extra_hidden}
    out, extra_out = module(x, **options, return_extra=True)
    torch.testing.assert_close(out, module.out_proj(right[0].flatten(2)).view_as(x), atol=1e-12, rtol=0)
    torch.testing.assert_close(extra_out, module.out_proj(right[2].flatten(2)), atol=1e-12, rtol=0)
    torch.testing.assert_close(module(x, **options), out)
    with pytest.raises(ValueError, match="return_extra must be False where extra is None, got True"):
        module(x, return_extra=True)
    with pytest.raises(ValueError, match="extra_padding_mask must be None where extra is None"):
        module(x, extra_padding_mask=extra_hidden)


def test_flex_attention_differentiates_a_part_by_the_merged_results(monkeypatch):
    # The compiled FlexAttention runs on a GPU alone; here the reference stands in for its forward.
    def attend_to_all(given, request):
        times = torch.ones(2, 4, given[0].shape[1], given[1].shape[1], dtype=torch.float64)
        k, v = (x.repeat_interleave(2, 2) for x in given[1:3])
        return oracle.softmax_over(given[0], k, v, times, request.scale)

    monkeypatch.setattr(flex, "attend", attend_to_all)
    inputs, request, gradients = joint_inputs(drawn()), Request(AllPairs(), scale=0.4), []
    for name in ("flex", "reference"):
        forward, backward = backends_for(AllPairs)[name].functions(torch.device("cpu"))
        out, lse = forward(inputs, request)
        gradients.append(backward(out.sin(), inputs, out, lse, request))
    for x, right in zip(*gradients, strict=True):
        torch.testing.assert_close(x, right, atol=1e-12, rtol=0)


def test_auto_passes_over_a_backend_without_a_gradient_of_lse(monkeypatch):
    # On a GPU "flash" and "cudnn" have none for the largest head_dims.
    backends, served = backends_for(AllPairs), []
    narrow = replace(backends["sdpa"], limits=lambda q, request: "too wide" if q.shape[-1] > 8 else "")
    monkeypatch.setitem(backends, "sdpa", narrow)
    original = operators.attention
    monkeypatch.setattr(operators, "attention", lambda *given: served.append(given[2]) or original(*given))
    tensors = {name: x.requires_grad_() for name, x in drawn().items()}
    for return_lse in (False, True):
        attend(**tensors, pattern=NEAR, return_lse=return_lse, scale=0.123)
    assert served == ["eager", "sdpa", "eager", "eager"]  # of the cells, then of extra queries


@pytest.mark.parametrize("extra", [0, 3])
def test_a_bias_is_of_the_cells_alone(extra):
    tensors = drawn(extra=extra)
    tensors["bias"] = torch.randn(4, 5, 5, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    leaves = {name: x.requires_grad_() for name, x in tensors.items()}
    exact = oracle.joint_attention(**leaves, pattern=NEAR)
    for backend in ("reference", "eager", "auto"):
        found = neighbourhood_attention(**leaves, neighbourhood=NEAR, backend=backend, return_lse=True)
        torch.testing.assert_close(found, exact, atol=1e-12, rtol=0)
        grads, right = (
            torch.autograd.grad([x.sin().sum() for x in results], list(leaves.values()), retain_graph=True)
            for results in (found, exact)
        )
        torch.testing.assert_close(grads, right, atol=1e-11, rtol=0)
