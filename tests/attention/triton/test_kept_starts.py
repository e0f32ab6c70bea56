"""Kept starts have the bits of Triton's own, and run on the current stream. Run by `make test-gpu`."""

from functools import partial

import pytest
import torch
from cases import determinism

from hilbert_lib import DilatedPattern, Neighbourhood, dilated_attention, neighbourhood_attention

pytestmark = pytest.mark.gpu
PATTERN = DilatedPattern((256, 500, 1024), (1, 2, 4))
ALONG = partial(dilated_attention, pattern=PATTERN, backend="triton")
CALLS = {
    "sequence": ALONG,
    "causal": partial(ALONG, is_causal=True),
    "coarse rates": partial(ALONG, pattern=DilatedPattern((64, 256, 1024), (1, 16, 64))),
    "dropout": partial(ALONG, dropout_p=0.5),
    "hopper": partial(ALONG, backend="hopper"),
    "hopper, causal": partial(ALONG, backend="hopper", is_causal=True),
    "hopper, coarse rates": partial(ALONG, pattern=DilatedPattern((64, 256, 1024), (1, 16, 64)), backend="hopper"),
    "grid, boxes": partial(neighbourhood_attention, neighbourhood=Neighbourhood((32, 32), 7), backend="hopper"),
    "grid": partial(neighbourhood_attention, neighbourhood=Neighbourhood((32, 32), 7), backend="triton"),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("deterministic", [True, False])
def test_a_kept_start_has_the_bits_of_tritons_own(monkeypatch, deterministic, name, dtype):
    from hilbert_lib.attention.triton import start as starting

    is_on_hopper = name.startswith("hopper") or name == "grid, boxes"
    if is_on_hopper and (dtype == torch.float32 or torch.cuda.get_device_capability() != (9, 0)):
        pytest.skip("warp-specialised kernels are of half precision, on Hopper")
    starting.forget()
    drawn = torch.randn(2, 4, 1, 1024, 4, 64, device="cuda").to(dtype)
    # On the side stream other memory is free than on the first.
    streams = [torch.cuda.current_stream(), torch.cuda.current_stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    found = []
    with determinism(deterministic):
        for number, stream in enumerate([*streams, *streams[1:]]):
            if number >= 2:
                monkeypatch.setattr(starting, "_start", lambda _: pytest.fail("Triton was asked to start kernels"))
            *tensors, dout = drawn[number % 2].clone()
            torch.cuda.synchronize()
            torch.manual_seed(5)
            with torch.cuda.stream(stream):
                leaves = [x.requires_grad_() for x in tensors]
                out, lse = CALLS[name](*leaves, return_lse=True)
                found.append([out, lse, *torch.autograd.grad(out, leaves, dout)])
        torch.cuda.synchronize()
    for number in range(2, len(found)):
        for result, kept, own in zip(("out", "lse", "dq", "dk", "dv"), found[number], found[number % 2], strict=True):
            if result == "dq" and not deterministic:  # on Hopper it is summed in an order that varies
                torch.testing.assert_close(kept, own, rtol=2e-2, atol=2e-3)
            else:
                assert torch.equal(kept, own), result
    assert not torch.equal(found[0][0], found[1][0])


def test_a_graph_that_captures_a_kept_call_keeps_its_tables():
    from hilbert_lib.attention.triton import schedule
    from hilbert_lib.attention.triton.start import forget

    forget()
    schedule.tables.cache_clear()
    tensors = torch.randn(3, 1, 1024, 4, 64, device="cuda", dtype=torch.bfloat16).unbind()
    for _ in range(3):
        expected = ALONG(*tensors)
    before = schedule.tables.cache_info().hits
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ALONG(*tensors)
    assert schedule.tables.cache_info().hits > before, "the capture did not ask for its tables"
    graph.replay()
    assert torch.equal(out, expected)
