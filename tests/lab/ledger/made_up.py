"""Records of made-up times, as the benchmarks write them, and what the ledger says of them."""

import json

from hilbert_lib.lab.ledger.answer import answer


def comparison(a, b, ratio, *, peak=(0, 0), spread=0.01, ms=1.0, **parameters):
    """A record as `paired.run_sides` writes it, of made-up times."""
    sides = {"parameters": parameters, "error": 0.0, "useful_flop": 1.0, "useful_bytes": 1.0}
    return {
        "kind": "comparison",
        "ratio": ratio,
        "interval": (ratio - spread, ratio + spread),
        "a": {"name": a, "samples_ms": [ms * ratio], "median_ms": ms * ratio, **sides},
        "b": {"name": b, "samples_ms": [ms], "median_ms": ms, **sides},
        "peak_bytes": peak,
        "output_difference": 0.0,
        "environment": {"utc": "2026-01-01", "hardware": "made up"},
    }


def answered_by(claim, records, folder):
    """What a claim's answer would be if these were its records."""
    environment = {"environment": {"utc": "2026", "hardware": "made up"}}
    lines = [json.dumps({**environment, **record}) + "\n" for record in records]
    (folder / "results.jsonl").write_text("".join(lines))
    return answer(claim, folder)
