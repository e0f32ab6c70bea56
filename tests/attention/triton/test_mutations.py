"""The kernels' sources, edited as `mutations` lists it, fail: the emulated cases see every planted fault."""

import pytest
from drawn_grids import BOXED, MANY_PROGRAMS, SPECIAL, special, uneven, whole, wide
from drawn_grids import CASES as GRIDS
from drawn_grids import drawn as drawn_grid
from mutations import MUTATIONS, Mutation

emulator = pytest.importorskip("emulator", reason="triton has no build for this platform", exc_type=ImportError)

import test_emulated  # noqa: E402
import test_emulated_grid  # noqa: E402

PADDED = {f"mask {seed}": (seed, mask) for seed, mask in test_emulated.PADDED}
PACKED = {f"documents {case[0]}": case for case in test_emulated.PACKED}
HEADS = {f"heads {number}": wide for number, wide in enumerate(test_emulated.WIDE)}
DROPPED = {f"dropout {seed}": dropped for seed, *dropped in test_emulated.DROPPED}
ON_SEQUENCES = (*range(test_emulated.CASES), *PADDED, *DROPPED, *HEADS, *PACKED, *test_emulated.FIXED)
ON_GRIDS = (*range(len(GRIDS)), *BOXED)


def of_sequence(case: int | str) -> tuple[test_emulated.Case, bool]:
    """A random call along a sequence, and whether torch asks for determinism."""
    if case in PADDED:
        seed, mask = PADDED[case]
        return test_emulated.drawn(seed)._replace(mask=mask), False
    if case in DROPPED:
        return test_emulated.dropping(int(case.removeprefix("dropout ")), *DROPPED[case])
    if case in PACKED:
        return test_emulated.packed(*PACKED[case])
    if case in test_emulated.FIXED:
        return test_emulated.FIXED[case], False
    if case in HEADS:
        return test_emulated.of_head_dim(*HEADS[case])
    return test_emulated.drawn(case), False


def is_seen(mutation: Mutation, case: int | str) -> bool:
    """Whether a random call, a special grid or a part of a grid shows that a source was edited."""
    sources = emulator.edited(mutation)
    if not mutation.is_on_grid or case in ON_SEQUENCES[test_emulated.CASES :]:  # some modules are of both
        return bool(test_emulated.fault_of(sources, *of_sequence(case), is_forward_given=mutation.is_of_backward))
    if case in BOXED:
        try:
            test_emulated_grid.run_part(sources, case)
        except (AssertionError, emulator.Fault):
            return True
        return False
    if case == "tables":
        return bool(test_emulated_grid.fault_of_tables(sources.grids, lambda starts: sources._start(lambda: starts)))
    if str(case).startswith("bias "):
        cases = [drawn_grid(int(case.removeprefix("bias ")))._replace(has_bias=True)]
    elif str(case).startswith("wide "):
        cases = [wide(int(case.removeprefix("wide ")))]
    elif str(case).startswith("uneven "):
        cases = [uneven(int(case.removeprefix("uneven ")))]
    elif case == "many programs":
        sources.grids.multiprocessors = lambda device: 12
        cases = [MANY_PROGRAMS[192]]
    elif str(case).startswith("whole "):
        cases = [whole(case.removeprefix("whole "))]
    else:
        cases = special(case) if case in SPECIAL else [drawn_grid(case)]
    return any(test_emulated_grid.fault_of(sources, each, mutation.is_of_backward) for each in cases)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda each: each.why)
def test_an_edited_source_fails(mutation):
    # The case that showed it first: others may once the sources or the order of threads have changed.
    cases = ON_GRIDS if mutation.is_on_grid else ON_SEQUENCES
    assert any(is_seen(mutation, case) for case in (mutation.seed, *cases))


@pytest.mark.parametrize("case", [1, "mask 0", "dropout 1", "heads 4", "documents 0"])
def test_a_source_as_it_is_does_not_fail_from_a_forward_that_is_given(case):
    assert test_emulated.fault_of(emulator.Sources(), *of_sequence(case), is_forward_given=True) is None


@pytest.mark.parametrize("number", [0, 9])
def test_nor_does_that_of_a_grid(number):
    assert test_emulated_grid.fault_of(emulator.Sources(), drawn_grid(number), is_forward_given=True) is None
