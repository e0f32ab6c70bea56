"""A later call of a known form is computed as the first was, and whatever a call hangs on makes another form."""

import gc
import weakref
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from hilbert_lib import DilatedPattern, Neighbourhood, Ordering, PointNeighbourhood, Union, attend, dilated_attention
from hilbert_lib.attention import api, autograd, failures, known_calls, measured_rules
from hilbert_lib.internals import WITHOUT_INTERNALS

pytestmark = pytest.mark.skipif(WITHOUT_INTERNALS, reason="without private names somebody may watch every call")

LENGTH = 36
PATTERN, NEAR = DilatedPattern((9, 36), (1, 2)), Neighbourhood((6, 6), 3)
HILBERT = Ordering.from_curve("hilbert", LENGTH)


def drawn(seed: int, queries: int = LENGTH, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(1, n, 2, 8, generator=generator, dtype=dtype).requires_grad_() for n in (queries, LENGTH, LENGTH)
    ]


def mask(seed: int, length: int = LENGTH) -> torch.Tensor:
    return torch.rand(1, length, generator=torch.Generator().manual_seed(seed)) > 0.7


# The options of a call, made anew for each seed: the values of a mask are no part of a form.
CALLS = {
    "sequence": (PATTERN, lambda seed: {}),
    "causal": (PATTERN, lambda seed: {"is_causal": True, "scale": 0.3}),
    "keys of zeros": (DilatedPattern((9, 36), (2, 5), padding="zeros"), lambda seed: {}),
    "mask": (PATTERN, lambda seed: {"key_padding_mask": mask(seed)}),
    "dropout": (PATTERN, lambda seed: {"dropout_p": 0.4}),
    "order that is undone": (PATTERN, lambda seed: {"kv_ordering": HILBERT, "backend": "sdpa"}),
    "order that is read": (PATTERN, lambda seed: {"kv_ordering": HILBERT, "backend": "reference"}),
    "a decoder's step": (PATTERN, lambda seed: {"query_start": 20, "is_causal": True}),
    "a sequence that begins later": (PATTERN, lambda seed: {"key_start": torch.tensor([2 + seed])}),
    "a step of unequal caches": (PATTERN, lambda seed: {"query_start": torch.tensor([9 * seed]), "is_causal": True}),
    "documents": (PATTERN, lambda seed: {"cu_seqlens": torch.tensor([0, 11 + seed, LENGTH], dtype=torch.int32)}),
    "grid": (NEAR, lambda seed: {}),
    "grid along a curve": (NEAR, lambda seed: {"ordering": HILBERT, "key_padding_mask": mask(seed)}),
    "extra keys": (NEAR, lambda seed: dict(zip(("extra_k", "extra_v"), drawn(seed + 9)[1:], strict=True))),
    "union": (Union((NEAR, Neighbourhood((6, 6), 3, dilation=2))), lambda seed: {}),
    "one segment": (DilatedPattern((LENGTH,), (1,)), lambda seed: {}),
    "one causal segment": (DilatedPattern((LENGTH,), (1,)), lambda seed: {"is_causal": True}),
}


def computed(name: str, seed: int) -> list[torch.Tensor]:
    """Output, lse and all gradients."""
    pattern, options_of = CALLS[name]
    options = options_of(seed)
    tensors = drawn(seed, queries=5 if "step" in name else LENGTH)
    torch.manual_seed(seed)
    out, lse = attend(*tensors, pattern, return_lse=True, **options)
    leaves = [*tensors, *(x for x in options.values() if isinstance(x, torch.Tensor) and x.requires_grad)]
    return [out, lse, *torch.autograd.grad(out.square().sum(), leaves)]


@pytest.mark.parametrize("name", CALLS)
def test_a_known_call_computes_what_a_first_one_does(monkeypatch, name):
    expected = computed(name, seed=2)
    known_calls.forget()
    computed(name, seed=1)
    monkeypatch.setattr(api, "validated", lambda *_args, **_options: pytest.fail("the call was not known"))
    for x, y in zip(computed(name, seed=2), expected, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("with_keys", [False, True])
def test_a_known_call_with_extra_queries_computes_what_a_first_one_does(monkeypatch, with_keys, return_lse):
    def joint(seed: int) -> list[torch.Tensor]:
        tensors, (extra_q, extra_k, extra_v) = drawn(seed), drawn(seed + 20, queries=4)
        options = {"extra_k": extra_k[:, :3], "extra_v": extra_v[:, :3]} if with_keys else {}
        results = attend(*tensors, NEAR, extra_q=extra_q, return_lse=return_lse, **options)
        assert len(results) == (4 if return_lse else 2)
        leaves = [*tensors, extra_q, *([extra_k, extra_v] if with_keys else [])]
        return [*results, *torch.autograd.grad(results[0].sum() + results[-1].square().sum(), leaves)]

    expected = joint(2)
    known_calls.forget()
    joint(1)
    monkeypatch.setattr(api, "validated", lambda *_args, **_options: pytest.fail("the call was not known"))
    for _ in range(2):
        for x, y in zip(joint(2), expected, strict=True):
            assert torch.equal(x, y)


def plain(pattern=PATTERN, change=nullcontext, tensors=None, attend=dilated_attention, **options):
    with change():
        return attend(*(drawn(0) if tensors is None else tensors), pattern, **options)


def measured(order):
    """Keep a measured order of backends for `plain()`: "auto" takes the first."""
    shape = measured_rules.ShapeClass("cpu", "float32", LENGTH, 2, 8, False, True, PATTERN)
    measured_rules.remember(shape, order, dict.fromkeys(order, 1.0))


CHANGES = {
    "shape": lambda: plain(tensors=[x[:, :, :1] for x in drawn(0)]),
    "dtype": lambda: plain(tensors=drawn(0, dtype=torch.float64)),
    "gradient": lambda: plain(tensors=[x.detach() for x in drawn(0)]),
    "grad mode": lambda: plain(change=torch.no_grad),
    "inference": lambda: plain(change=torch.inference_mode),
    "autocast": lambda: plain(change=lambda: torch.autocast("cpu", torch.bfloat16)),
    "pattern": lambda: plain(DilatedPattern((9, 36), (1, 3))),
    "backend": lambda: plain(backend="eager"),
    "scale": lambda: plain(scale=0.25),
    "causal": lambda: plain(is_causal=True),
    "mask": lambda: plain(key_padding_mask=mask(0)),
    "door": lambda: plain(attend=attend),
    "compile": lambda: plain(attend=torch.compile(dilated_attention, backend="eager")),
}


@pytest.fixture
def validations(monkeypatch):
    """The calls that are validated."""
    calls, original = [], api.validated
    monkeypatch.setattr(api, "validated", lambda *args, **options: calls.append(options) or original(*args, **options))
    return calls


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_a_call_hangs_on_makes_another_form(validations, change, compiled_code_is_forgotten):
    plain()
    plain()
    assert len(validations) == 1
    CHANGES[change]()
    assert len(validations) == 2


def test_determinism_makes_another_form(validations):
    plain()
    torch.use_deterministic_algorithms(True)
    try:
        plain()
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(validations) == 2


def test_transforms_are_refused_in_calls_that_were_known():
    q, k, v = drawn(0)
    for _ in range(3):
        plain(tensors=(q, k, v))
    for transform in (torch.func.grad, partial(torch.func.vmap, in_dims=0)):
        with pytest.raises(RuntimeError, match=r"dilated_attention has no rule for torch\.func"):
            transform(lambda x: plain(tensors=(x, k, v)).sum())(q[None] if transform is not torch.func.grad else q)


def test_a_known_call_is_differentiated_once():
    for n in range(3):
        q, k, v = drawn(n)
        (dq,) = torch.autograd.grad(plain(tensors=(q, k, v)).square().sum(), q, create_graph=True)
        with pytest.raises(RuntimeError, match="can be differentiated once"):
            dq.sum().backward()


def test_a_checkpoint_recomputes_a_first_call_by_a_known_one_and_one_that_was_watched():
    for watched in (nullcontext, partial(FlopCounterMode, display=False)):
        known_calls.forget()
        for options in ({}, {"key_padding_mask": mask(0)}, {"dropout_p": 0.3}):
            q, k, v = drawn(0)
            call = partial(plain, tensors=(q, k, v), **options)
            torch.manual_seed(1)
            expected = torch.autograd.grad(call().square().sum(), (q, k, v))
            known_calls.forget()
            torch.manual_seed(1)
            with watched():
                out = checkpoint(call, use_reentrant=False)
            plain(tensors=drawn(1), **options)  # known from now on
            for found, right in zip(torch.autograd.grad(out.square().sum(), (q, k, v)), expected, strict=True):
                assert torch.equal(found, right)


def test_a_mask_that_changes_before_the_backward_of_a_known_call_is_told():
    for n in range(3):
        hidden = mask(n)
        out = plain(tensors=drawn(n), key_padding_mask=hidden)
        hidden.logical_not_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_autocast_that_casts_nothing_is_a_form_and_its_known_calls_are_those_of_others(validations):
    tensors = drawn(0, dtype=torch.bfloat16)
    expected = plain(tensors=tensors)
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(3):
            assert torch.equal(plain(tensors=tensors), expected)
        for _ in range(3):
            assert plain(tensors=drawn(0)).dtype == torch.bfloat16
    assert len(validations) == 1 + 1 + 3, "what autocast casts is validated each time"


def test_lists_of_other_sizes_are_another_form(monkeypatch):
    """A recording counts blocks and words of the lists, of which points say less."""
    monkeypatch.setattr(PointNeighbourhood, "form", property(lambda _: "points"))
    line = torch.stack([torch.arange(256), torch.zeros(256, dtype=torch.int64)], 1)
    block = torch.cartesian_prod(torch.arange(16), torch.arange(16))
    forms = {
        known_calls.form_of(*drawn(0), PointNeighbourhood(cells, window), attend, {"backend": "triton"})
        for cells, window in ((line, 3), (block, 3), (block, 9), (block, 9))
    }
    shapes = {
        tuple(x.shape for x in PointNeighbourhood(cells, window).list_tensors)
        for cells, window in ((line, 3), (block, 3), (block, 9))
    }
    assert len(forms) == len(shapes) > 1


def test_a_measurement_is_heeded_by_calls_that_were_known(monkeypatch, tmp_path):
    monkeypatch.setenv("HILBERT_CACHE", str(tmp_path))
    served = []
    original = api.served_by
    monkeypatch.setattr(api, "served_by", lambda name, *rest: served.append(name) or original(name, *rest))
    plain()
    measured(("reference", "eager"))
    plain()
    plain()
    assert served == ["sdpa", "reference"]


def test_a_kernel_that_did_not_compile_is_passed_over_by_calls_that_were_known(validations):
    plain()
    failures.remember(failures.KernelError("no"), PATTERN.function, "sdpa", drawn(0)[0])
    plain()
    failures.forget()
    assert len(validations) == 2


@pytest.mark.parametrize(
    ("options", "error"), [({"is_causal": 0}, TypeError), ({"return_lse": 0}, TypeError), ({"scale": True}, TypeError)]
)
def test_what_is_equal_to_a_known_argument_and_no_such_thing_is_refused(options, error):
    plain(is_causal=False, return_lse=False, scale=1.0)
    with pytest.raises(error):
        plain(**{"is_causal": False, "return_lse": False, "scale": 1.0} | options)


def test_a_pattern_of_the_other_kind_is_refused_by_a_door_that_does_not_take_it():
    attend(*drawn(0), NEAR)
    with pytest.raises(TypeError, match="call neighbourhood_attention, or attend"):
        dilated_attention(*drawn(0), NEAR)


def test_a_mask_of_no_extra_keys_reaches_no_request(monkeypatch):
    q, k, v = drawn(0)
    options = {"extra_k": k[:, :0], "extra_v": v[:, :0], "extra_padding_mask": mask(0)[:, :0]}
    requests, original = [], autograd._forward_of_one
    monkeypatch.setattr(autograd, "_forward_of_one", lambda *given: requests.append(given[2]) or original(*given))
    for _ in range(2):
        attend(q, k, v, NEAR, **options)
    assert [request.extra_padding_mask for request in requests] == [None, None], "the second call was known"


def test_extra_queries_without_extra_keys_are_computed_by_known_calls_too():
    (q, k, v), extra_q = drawn(0), drawn(1, queries=4)[0]
    first = attend(q, k, v, NEAR, extra_q=extra_q, return_lse=True)
    for _ in range(2):
        known = attend(q, k, v, NEAR, extra_q=extra_q, return_lse=True)
        assert len(known) == len(first) == 4
        assert all(map(torch.equal, known, first))


def test_tensors_without_elements_that_autocast_casts_are_computed_more_than_once():
    for _ in range(3):
        tensors = [x.detach()[:0].requires_grad_() for x in drawn(0)]
        with torch.autocast("cpu", torch.bfloat16):
            out = dilated_attention(*tensors, PATTERN)
        out.sum().backward()
        assert out.shape == (0, LENGTH, 2, 8)
        assert out.dtype == torch.bfloat16
        assert all(x.grad.shape == x.shape for x in tensors)


def test_no_tensor_of_a_known_call_is_held():
    alive = []
    order = Ordering.from_permutation(torch.randperm(LENGTH))
    joint = dict(zip(("extra_q", "extra_k", "extra_v"), drawn(1, queries=4), strict=True))
    for options in (joint, {"key_padding_mask": mask(0)}, {"ordering": order}):
        pattern = PATTERN if "key_padding_mask" in options else NEAR
        tensors = drawn(0)
        for _ in range(3):
            out = attend(*tensors, pattern, **options)
        out = out if isinstance(out, tuple) else (out,)
        alive += [weakref.ref(x) for x in (*tensors, *out, *options.values()) if isinstance(x, torch.Tensor)]
    alive.append(weakref.ref(order.table.perm))
    del tensors, out, options, order, joint
    gc.collect()
    assert not [each for each in alive[:-1] if each() is not None]


def test_many_different_calls_grow_nothing(monkeypatch):
    monkeypatch.setattr(known_calls, "MOST", 8)
    x = [each.detach() for each in drawn(0)]
    for n in range(1, 30):
        dilated_attention(*x, PATTERN, scale=n / 8)
        assert 1 <= len(known_calls._calls) <= 8
    for n in range(1, 30):  # with so many extra queries
        attend(*x, NEAR, extra_q=x[0][:, :n], extra_k=x[1], extra_v=x[2])
        assert 1 <= sum(map(len, known_calls._calls.values())) <= 8
    for n in range(1, 30):  # of one shape
        wide = torch.zeros(1, LENGTH, 2 * n, 8)[:, :, ::n]
        dilated_attention(wide, *x[1:], PATTERN)
        assert 1 <= sum(map(len, known_calls._calls.values())) <= 8


def test_as_many_forms_of_one_key_are_known_as_a_search_among_them_allows():
    x = [each.detach() for each in drawn(0)]
    for n in range(1, 2 * known_calls.MOST_ALIKE):
        dilated_attention(torch.zeros(1, LENGTH, 2 * n, 8)[:, :, ::n], *x[1:], PATTERN)
        (alike,) = known_calls._calls.values()
        assert 1 <= len(alike) <= known_calls.MOST_ALIKE


@pytest.mark.parametrize(
    ("pattern", "is_repeated"),
    [
        (DilatedPattern((LENGTH,), (1,)), True),
        (NEAR, True),
        (Neighbourhood((LENGTH,), 9), True),
        (PATTERN, False),  # several calls of a dense kernel, and their merge
    ],
    ids=["one segment", "a plane", "a line", "two branches"],
)
def test_a_short_call_on_a_cpu_repeats_the_dense_kernel_alone(pattern, is_repeated, monkeypatch):
    ran = []
    forward = known_calls.run_forward
    monkeypatch.setattr(known_calls, "run_forward", lambda *given: ran.append(given) or forward(*given))
    for seed in range(4):
        tensors = [x.detach() for x in drawn(seed)]
        ran.clear()
        found = attend(*tensors, pattern=pattern, return_lse=True)
        torch.testing.assert_close(found, attend(*tensors, pattern=pattern, return_lse=True, backend="reference"))
    own = [request for _, request, served in ran if served.name != "reference"]
    assert bool(own) != is_repeated
