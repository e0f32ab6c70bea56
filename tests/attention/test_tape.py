"""What a call's starts and steps did is repeated, and a call that did more is not."""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch

from hilbert_lib.attention import tape
from hilbert_lib.attention.tape import note, stepped, taped
from hilbert_lib.graph_cache import cached_for_graphs

ready = [True]  # whether starts may be repeated


def sum_of(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """The sum, noted as a start that was recorded."""
    run = lambda given: [sum(given)]  # noqa: E731
    recording = SimpleNamespace(started=run, is_ready=lambda x: ready[0], setting="", descriptors=[], launches=[])
    results = run(tensors)
    note(recording, tensors, [], results)
    return results


@cached_for_graphs()
def table(value: float, device: torch.device) -> torch.Tensor:
    return torch.full((3,), value, device=device)


def test_several_starts_are_repeated_with_other_tensors():
    x, y = torch.ones(3), torch.ones(3)
    with taped([x, y]) as tape:
        (first,) = sum_of(x, y)
        (second,) = sum_of(first, first, y, table(5.0, x.device))
    repeated = tape.recording([second, None, first])
    second, nothing, first = repeated.run([torch.full((3,), 2.0), torch.full((3,), 3.0)])
    assert nothing is None
    assert first.tolist() == [5.0] * 3
    assert second.tolist() == [5.0 + 5.0 + 3.0 + 5.0] * 3


def product_of(*tensors: torch.Tensor) -> torch.Tensor:
    """The product of two tensors, noted as a step."""
    return stepped(lambda x, y: (x * y,), *tensors)[0]


def test_steps_are_repeated_among_starts_and_alone():
    x, y = torch.ones(3), torch.ones(3)
    given = [torch.full((3,), 2.0), torch.full((3,), 3.0)]
    with taped([x, y]) as tape:
        total = product_of(*sum_of(x, y), y)
        results = [*sum_of(total, x), total]
    assert tape.has_starts
    assert [each.tolist() for each in tape.recording(results).run(given)] == [[17.0] * 3, [15.0] * 3]
    with taped([x, y]) as tape:
        total = product_of(x, y)
    assert tape.recording([total]).run(given)[0].tolist() == [6.0] * 3


def test_nothing_is_started_where_a_later_start_may_not_be_repeated():
    x, called = torch.ones(3), []
    with taped([x]) as tape:
        (first,) = stepped(lambda x: called.append(x) or (2 * x,), x)
        (total,) = sum_of(first)
    repeated = tape.recording([total])
    ready[0] = False
    try:
        assert repeated.run([x]) is None
    finally:
        ready[0] = True
    assert len(called) == 1
    assert repeated.run([x])[0].tolist() == [2.0] * 3


def test_a_step_is_not_taken_with_a_tensor_that_begins_off_a_16_byte_address():
    x = torch.ones(4)
    with taped([x]) as tape:
        total = product_of(x, x)
    repeated = tape.recording([total])
    assert repeated.run([torch.ones(5)[1:]]) is None
    assert repeated.run([x])[0].tolist() == [1.0] * 4


def test_autocast_does_not_reach_a_step():
    x = torch.ones(4, 4)
    with taped([x]) as tape:
        (product,) = stepped(lambda x: (x @ x,), x)
    repeated = tape.recording([product])
    with torch.autocast("cpu", torch.bfloat16):
        assert repeated.run([x])[0].dtype == torch.float32


def changed_in_place(x: torch.Tensor) -> torch.Tensor:
    (first,) = sum_of(x, x)
    first.mul_(2)
    return sum_of(first)[0]


def changed_at_the_end(x: torch.Tensor) -> torch.Tensor:
    (total,) = sum_of(sum_of(x, x)[0])
    return total.mul_(2)


def unrecorded(x: torch.Tensor) -> torch.Tensor:
    note(None, [x], [], [x])
    return sum_of(sum_of(x, x)[0])[0]


def in_inference_mode(x: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return sum_of(sum_of(x, x)[0])[0]


@pytest.mark.parametrize(
    "call",
    [
        changed_in_place,
        changed_at_the_end,
        unrecorded,
        in_inference_mode,
        lambda x: sum_of(sum_of(x, x)[0] + 1)[0],
        lambda x: sum_of(sum_of(x, x)[0])[0] + 1,
        lambda x: sum_of(sum_of(x, torch.ones(3))[0])[0],
        lambda x: x + 1,
    ],
)
def test_a_call_that_does_more_than_its_starts_is_not_repeated(call):
    x = torch.ones(3)
    with taped([x]) as tape:
        result = call(x)
    assert tape.recording([result]) is None


def test_a_call_that_is_given_one_tensor_twice_is_not_repeated():
    x = torch.ones(3)
    for given in ([x], [x, x]):
        with taped(given) as tape:
            (total,) = sum_of(sum_of(x, x)[0])
        assert (tape.recording([total]) is None) == (len(given) == 2)


def made_of(*tensors: torch.Tensor, scratch: int = 0) -> torch.Tensor:
    """A tensor of 4 elements, noted as what a start made of others beside scratch."""
    made = [torch.empty(scratch), torch.empty(4)]
    recording = SimpleNamespace(setting="", descriptors=[])
    note(recording, tensors, made, made[1:])
    return made[1]


def in_a_row(x: torch.Tensor) -> torch.Tensor:
    return made_of(made_of(made_of(x)))


def merged_at_the_end(x: torch.Tensor) -> torch.Tensor:
    return made_of(made_of(x), made_of(x), made_of(x))


def beside_scratch(x: torch.Tensor) -> torch.Tensor:
    return made_of(made_of(x, scratch=8), made_of(x, scratch=2))


@pytest.mark.parametrize(("call", "bytes_more"), [(in_a_row, 16), (merged_at_the_end, 0), (beside_scratch, 32 + 8)])
def test_bytes_are_counted_that_starts_hold_more_where_they_become_one(call, bytes_more):
    x = torch.ones(4)
    with taped([x]) as noted:
        result = call(x)
    repeated = tape._repeated(noted._entries, [noted._number_of(result)])
    assert tape._bytes_more(noted._entries, repeated) == bytes_more


def test_no_tensor_is_held_and_a_table_that_is_gone_is_not_read():
    x = torch.ones(3)
    with taped([x]) as tape:
        (first,) = sum_of(x, table(2.0, x.device))
        (total,) = sum_of(first)
        of_first = weakref.ref(first)
        del first
        assert of_first() is None, "a tape that held what starts return would take memory"
    repeated = tape.recording([total])
    assert repeated.run([x])[0].tolist() == [3.0] * 3
    held = [weakref.ref(each) for each in (x, total, table(2.0, x.device))]
    table.cache_clear()
    del x, total
    gc.collect()
    assert [each() for each in held] == [None] * 3
    assert repeated.run([torch.ones(3)]) is None
