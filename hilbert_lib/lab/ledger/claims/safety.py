"""Claims of the documents on memory limits and on runs that stay within them."""

from hilbert_lib.lab.ledger import models
from hilbert_lib.lab.ledger.claim import Band, Claim, When

CLAIMS = (
    Claim(
        "S1",
        claim="memory limits and progressive lengths prevent system lock-ups",
        source="001",
        question=(
            "processes that run out of memory, hang, crash or are killed on purpose, and lengths that would not fit"
        ),
        tests=(
            "tests/lab/guarded/test_safe_runner.py::test_a_fault_is_recorded_with_its_cause",
            "tests/lab/guarded/test_safe_runner.py::test_a_fault_costs_its_neighbours_the_comparison_and_the_next_point_nothing",
            "tests/lab/guarded/test_safe_runner.py::test_what_would_not_fit_is_not_tried_and_what_cannot_serve_is_told",
            "tests/launch/test_progressive.py::test_the_run_stops_before_memory_would_run_out_and_says_why",
        ),
        verdict="holds",
    ),
    Claim(
        "S2",
        claim="per-segment processing lowers peak memory; 8.2K tokens fit in 8 GB",
        source="001",
        question=(
            "predicted memory of a float32 forward at 8192 tokens in segments of 1024, and of one segment over that "
            "of many"
        ),
        quantity="GiB; memory of one segment / of many",
        measure=lambda: models.memory_of_segments(length=8192, segment_length=1024, backends=["eager", "sdpa"]),
        claimed=(
            Band(most=7.45, where="what == 'GiB'"),
            Band(least=1.01, where="what != 'GiB'"),
        ),
        when=When(
            says="but for sdpa, where one segment takes no more than many",
            where="not (what == 'one segment over many' and backend == 'sdpa')",
        ),
        basis="as predicted",
        verdict="holds as predicted but for sdpa, where one segment takes no more than many (3 of 4 cases)",
        note="a kernel that never holds the scores has nothing to gain",
    ),
)
