"""Every direction of the documents has an answer, and what it names is there."""

import re

import pytest

import hilbert_lib
from hilbert_lib.lab.ledger.answer import ROOT
from hilbert_lib.lab.ledger.claims import LEDGER
from hilbert_lib.lab.ledger.directions import ANSWERED, DIRECTIONS, Direction, directions_table
from hilbert_lib.lab.ledger.numbers import numbers

# Words of the documents' lists of future work, next steps and priorities: document, and a word of the direction here.
WANTED = [
    ("000", "several GPUs"),
    ("000", "FlashAttention-3"),
    ("000", "adaptive"),
    ("000", "each GPU"),
    ("001", "kernels that make the curve"),
    ("001", "length of the sequence"),
    ("001", "unequal GPUs"),
    ("001", "block-sparse"),
    ("002", "designed together"),
    ("002", "adaptive"),
    ("002", "resolutions"),
    ("002", "FlashAttention-3"),
    ("002", "kernels that make the curve"),
    ("002", "other curves"),
    ("002", "follow the content"),
    ("002", "million tokens"),
    ("002", "gradients"),
    ("002", "profiles of caches"),
    ("003", "kernels that make the curve"),
    ("003", "head groups"),
    ("003", "several GPUs"),
    ("003", "Pascal"),
    ("004", "memory pools"),
    ("004", "each GPU"),
    ("004", "chunks of a curve"),
]


@pytest.mark.parametrize(("document", "words"), WANTED)
def test_every_direction_of_the_documents_is_answered(document, words):
    assert [each for each in DIRECTIONS if document in each.documents.split(", ") and words in each.direction]


@pytest.mark.parametrize("direction", DIRECTIONS, ids=lambda each: each.direction)
def test_what_an_answer_names_is_there(direction):
    assert all((ROOT / f"notebooks/{name}.ipynb").exists() for name in direction.notebooks)
    assert set(direction.claims) <= set(LEDGER)
    assert all(hasattr(hilbert_lib, name) for name in direction.calls)
    assert any(direction.direction in words or words in direction.direction for _, words in WANTED)


@pytest.mark.evidence
def test_the_table_has_a_row_for_each_direction_with_the_numbers_of_the_records():
    table = directions_table(numbers())
    assert numbers()["directions"] == table
    rows = table.strip().splitlines()
    assert len(rows) == 2 + len(DIRECTIONS)
    assert all(row.count("|") == 5 for row in rows)
    assert not re.search(r"[{}]", table)
    assert f"{numbers()['along_hilbert']} % of 17 x 17" in table


def test_a_direction_without_an_answer_is_refused():
    with pytest.raises(ValueError, match="notebooks, claims or calls must answer 'more', got none"):
        Direction("000", "more", ANSWERED, "perhaps")
    with pytest.raises(ValueError, match="outcome must be one of built, measured, answered, not built; got 'hoped'"):
        Direction("000", "more", "hoped", "perhaps", calls=("attend",))
    with pytest.raises(KeyError, match="grid_best"):
        directions_table({})
