"""Claims of the documents on the tables of an order: their cost, what they need, where they are equal."""

from hilbert_lib.lab.ledger import kernels
from hilbert_lib.lab.ledger.claim import Band, Claim, When
from hilbert_lib.lab.ledger.claims import only

CLAIMS = (
    Claim(
        "M1",
        claim="with cached mappings the cost of the curve disappears; 30 to 50 % faster",
        source="000, 002",
        question="the share of a call's time that is saved where its tables and its order are found and not built",
        quantity="share of time saved",
        record="05_backend_selection",
        sweeps=("pattern cache",),
        measure=kernels.saved_by_cache,
        claimed=(Band(least=0.3),),
        leaves_out={"rival == 'look-up'": "the time of a look-up alone, which B6 judges"},
        when=When(
            says="for the tables of a pattern, and for a curve of at most 8192 tokens",
            where="what == 'schedule tables' or length <= 8192",
        ),
        verdict="holds for the tables of a pattern, and for a curve of at most 8192 tokens (4 of 6 cases)",
        only=only.TABLES,
    ),
    Claim(
        "M2",
        claim="ordering k and v only, not q, is enough",
        source="000",
        question="output and gradients with k and v stored in an order, q and the output in sequence order",
        tests=("tests/attention/test_modules.py::test_output_and_gradients_do_not_depend_on_how_k_and_v_are_stored",),
        verdict="holds",
    ),
    Claim(
        "M3",
        claim="variable lengths need padding to a power of two",
        source="002",
        question="the generalised curve on grids of any sides, every cell once, steps of one but for parity",
        tests=(
            "tests/curves/test_curves.py::test_every_cell_is_met_once_and_index_is_the_inverse",
            "tests/curves/test_curves.py::test_hilbert_steps_hold_for_every_small_shape",
            "tests/test_ordering.py::test_cells_past_the_length_are_skipped",
        ),
        verdict="does not hold",
    ),
    Claim(
        "M4",
        claim="gradients need the inverse mapping cached and an autograd function of one's own",
        source="002",
        question="gradients through torch's own index_select, and through attention that reads k and v in an order",
        tests=(
            "tests/test_ordering.py::test_apply_and_undo_have_exact_gradients",
            "tests/attention/test_modules.py::test_output_and_gradients_do_not_depend_on_how_k_and_v_are_stored",
        ),
        verdict="does not hold",
    ),
    Claim(
        "M5",
        claim="online softmax is stable over chunks",
        source="002",
        question="partial results with large log-sum-exps merged, and scores up to 1e4, against float64",
        tests=(
            "tests/attention/test_merge.py::test_large_lse_neither_overflow_nor_vanish",
            "tests/attention/test_merge.py::test_weights_in_float32_lose_no_digits_to_a_large_lse_or_to_many_parts",
            "tests/attention/triton/test_triton.py::test_large_scores_and_rows_with_one_key_are_exact",
        ),
        verdict="holds",
    ),
    Claim(
        "M6",
        claim="mappings are equal on all ranks",
        source="002",
        question="the tables of every ordering, made in several processes",
        tests=("tests/test_ordering.py::test_every_process_makes_the_same_tables",),
        verdict="holds",
    ),
)
