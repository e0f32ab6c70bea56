"""Claims of the documents on several GPUs: memory, bytes sent, overlap, lengths."""

from hilbert_lib.lab.ledger import kernels, ring
from hilbert_lib.lab.ledger.claim import Band, Claim, When

CLAIMS = (
    Claim(
        "R1",
        claim="ring attention keeps O(N/p) memory",
        source="000, 003",
        question=(
            "memory of the fullest rank times the ranks, a token: measured peaks, forward and backward, on 2 and 4 "
            "GPUs over that of one, by every transport and order; planned for 16M tokens on 4 to 32 ranks over that "
            "of 2"
        ),
        quantity="memory, together / of the fewest ranks together",
        record="07_ring_attention",
        sweeps=("weak", "strong", "transports", "lengths"),
        measure=lambda records: ring.memory_by_ranks(records, tokens=2**24, ranks=[2, 4, 8, 16, 32]),
        claimed=(Band(most=1.5),),
        leaves_out={
            "side == 'dense ring'": "dense attention: one rank alone ran none to compare with",
            "side == 'each by itself'": "ranks that share no sequence, the control of weak scaling",
            "how == 'measured' and heads != 16": "one rank alone ran 16 heads",
        },
        when=When(
            says="but where all k and v are gathered, go round more than 8 ranks, or are read in an order of storage",
            where=(
                "what not in ['all k and v, gathered', 'dilated rows, in an order'] "
                "and (what != 'all k and v, round a ring' or ranks <= 8)"
            ),
        ),
        verdict=(
            "holds but where all k and v are gathered, go round more than 8 ranks, or are read in an order of storage "
            "(23 of 36 cases)"
        ),
        note=(
            "where all k and v go round, each rank holds a table of the places of all rows beside two buffers; an "
            "order of storage takes 1.63 times the memory of one rank alone, whatever the order"
        ),
    ),
    Claim(
        "R2",
        claim="isend/irecv is leaner than all_gather",
        source="001, 004",
        question=(
            "bytes sent and memory of the fullest rank, by all_gather over a ring of the dilated rows; the same rows "
            "as planned on 2 to 16 ranks and as measured on 4 GPUs, and all k and v as measured; leaner by a per cent"
        ),
        quantity="all_gather / ring",
        record="07_ring_attention",
        sweeps=("strong", "transports"),
        measure=lambda records: ring.gathered_over_ring(records, tokens=2**20, ranks=[2, 4, 8, 16]),
        claimed=(Band(least=1.01),),
        leaves_out={"gathered == 'nothing'": "ways that gather nothing: the claim is of all_gather"},
        when=When(
            says="over gathering all k and v, not over gathering the same rows", where="gathered == 'all k and v'"
        ),
        verdict="holds over gathering all k and v, not over gathering the same rows (7 of 20 cases)",
    ),
    Claim(
        "R3",
        claim="Hilbert order reduces communication by 10 to 15 %",
        source="002",
        question="rows that the fullest of 8 ranks lacks, with an order over the sequence and over each shard",
        quantity="share of rows saved",
        measure=lambda: ring.saved_by_order(tokens=65536, ranks=8, kinds=["hilbert"]),
        claimed=(Band(least=0.1),),
        verdict="does not hold",
    ),
    Claim(
        "R4",
        claim="communication overlaps computation; scaling near linear in GPUs",
        source="003",
        question=(
            "on 2 and 4 GPUs, a segment over all of the sequence: the share of the exchange's kernels that ran under "
            'others, forward and backward, by "auto", by each transport and in two orders (at least half); and tokens '
            "per second of a GPU, forward and backward, over those of one GPU alone (at least 0.85), with as many "
            "tokens on every GPU (weak) or in all (strong)"
        ),
        quantity="share hidden; efficiency",
        record="07_ring_attention",
        sweeps=("weak", "strong", "transports", "lengths"),
        measure=ring.overlap_and_scaling,
        claimed=(
            Band(least=0.5, where="what == 'hidden'"),
            Band(least=0.85, where="what == 'scaling'"),
        ),
        leaves_out={
            "side == 'gathered'": "all k and v are gathered before anything is computed, so that nothing can be hidden",
            "side == 'dense ring'": "dense attention, which has more to hide under",
        },
        verdict="does not hold (48 of 51 cases)",
        note=(
            "the cases that fail are of causal calls; the halos of windows on grids are another exchange, which "
            "notebook 07 shows"
        ),
    ),
    Claim(
        "R5",
        claim="sequences of 1M tokens and more, and beyond 1B",
        source="002",
        question="the longest sequences that ran on 4 GPUs and were held against float64 rows of every branch",
        quantity="tokens reached / tokens claimed",
        record="07_ring_attention",
        sweeps=("weak", "strong", "transports", "lengths"),
        measure=lambda records: ring.longest(records, both=2**20, forward=10**9),
        claimed=(Band(least=1),),
        verdict="holds",
        note="the longest forward is of one head of 32; with more and wider heads a GPU holds fewer tokens",
    ),
    Claim(
        "R6",
        claim="262K tokens with appropriate hardware",
        source="004",
        question="the longest sequence whose forward and backward were timed and held against float64 rows, one GPU",
        quantity="tokens reached / tokens claimed",
        record="06_kernel_benchmarks",
        sweeps=("backends",),
        measure=lambda records: kernels.longest(records, asked=2**18),
        claimed=(Band(least=1),),
        verdict="holds",
    ),
    Claim(
        "R7",
        claim="load can be balanced over GPUs of unequal speed",
        source="001",
        question="shards by work and speed, causal; time of the slowest rank over that of the fastest, as planned",
        quantity="the last / the first rank, in time",
        measure=lambda: ring.balance(tokens=2**20, speeds=[[2, 1], [2, 1, 1, 1], [4, 3, 2, 1]]),
        claimed=(Band(most=1.02),),
        basis="as planned",
        verdict="holds as planned",
        note="there were no GPUs of unequal speed to run it on",
    ),
    Claim(
        "R8",
        claim="the output equals that of standard ring attention",
        source="002",
        question="output and gradients of a ring in every order, pattern and transport against one process",
        tests=("tests/ring/test_ring_attention.py::test_error_is_at_most_twice_that_of_one_process",),
        verdict="holds",
    ),
)
