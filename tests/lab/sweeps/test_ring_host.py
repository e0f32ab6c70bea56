"""scripts/ring_host.py times calls of the ring on all ranks, and shows the slowest rank's."""

import torch.distributed as dist
from click.testing import CliRunner
from own_scripts import load_script

script = load_script("ring_host")


def printed(*words: str) -> list[list[str]]:
    done = CliRunner().invoke(script.main, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in done.output.splitlines()[2:]]


def test_a_row_has_the_slowest_ranks_times(monkeypatch):
    def times_of_two_ranks(target, ranks, order, **_):
        assert (target, ranks, order["rows"]) == ("ring_host:times_of", 2, [(64, "auto"), (64, "ring")])
        return [[[(1.0, 2.0), (3.0, 4.0)]] * 2, [[(1.5, 1.0), (2.0, 5.0)]] * 2]

    monkeypatch.setattr(script, "run_ranks", times_of_two_ranks)
    rows = printed("--ranks", "2", "--tokens", "64", "--transport", "auto", "--transport", "ring")
    assert rows == [[f"64, {name}", "1.50", "3.00", "2.00", "5.00"] for name in ("auto", "ring")]


def test_a_rank_times_a_forward_and_both_ways():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        (times,) = script.times_of({"rows": [(64, "auto")], "heads": 1, "head_dim": 8})
    finally:
        dist.destroy_process_group()
    assert [0.0 < host <= device for host, device in times] == [True, True]
