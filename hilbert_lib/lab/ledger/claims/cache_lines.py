"""Claims of the documents on cache lines, hit rates and memory bandwidth."""

from hilbert_lib.lab.ledger import kernels, models, ring
from hilbert_lib.lab.ledger.claim import Band, Claim, When

CLAIMS = (
    Claim(
        "C1",
        claim="Hilbert order touches 25 to 40 % fewer cache lines",
        source="000",
        question="different lines that one head touches in k, exactly counted, against linear storage; at least 25 %",
        quantity="share of lines saved",
        measure=lambda: models.units_saved(unit="line"),
        claimed=(Band(least=0.25),),
        when=When(
            says="for rows of 64 B at most, stored heads first, at dilation 2 and more",
            where="layout == 'bhsd' and row_bytes <= 64 and dilation >= 2",
        ),
        verdict=(
            "holds for rows of 64 B at most, stored heads first, at dilation 2 and more (16 of 18 such cases, 16 of "
            "70 in all)"
        ),
        note="where it holds, residue-major storage saves more",
    ),
    Claim(
        "C2",
        claim="40 to 60 % fewer cache lines for dilated patterns",
        source="002",
        question="as C1, dilation 2 and above; at least 40 %",
        quantity="share of lines saved",
        measure=lambda: models.units_saved(unit="line", least_dilation=2),
        claimed=(Band(least=0.4),),
        when=When(
            says="for rows of 32 B at most, stored heads first, at dilation 4 and more",
            where="layout == 'bhsd' and row_bytes <= 32 and dilation >= 4",
        ),
        verdict=(
            "holds for rows of 32 B at most, stored heads first, at dilation 4 and more (9 of 10 such cases, 9 of 60 "
            "in all)"
        ),
    ),
    Claim(
        "C3",
        claim="cache hit rate 25 to 40 points higher for dilated patterns",
        source="002",
        question=(
            "an exact LRU cache of 8 to 512 KiB under a kernel's reads at dilation 4, one segment; and the L2 of an "
            "H200, counted with empty caches in a forward and in decoding at dilation 1 to 64; at least 25"
        ),
        quantity="points of hit rate gained",
        record="06b_orders_and_counters",
        sweeps=("counters",),
        measure=lambda records: kernels.gained_and_counted(records, dilation=4),
        claimed=(Band(least=25),),
        leaves_out={
            "order != 'hilbert'": "the claim is of Hilbert order",
            "how == 'counted in gather'": "a gather of rows is no attention",
        },
        verdict="does not hold (4 of 113 cases)",
        note=(
            "the cases that hold are modelled: a cache whose size lies between what the two orders touch, as a hit "
            "rate leaps where all that is touched fits; no counted case holds"
        ),
    ),
    Claim(
        "C4",
        claim="20 to 30 % less memory bandwidth needed",
        source="002",
        question=(
            "different fetches of 64 bytes that one head needs of k, as modelled, and bytes read from memory in one "
            "forward and in decoding with one query, as counted; against linear storage; at least 20 %"
        ),
        quantity="share of fetches or bytes saved",
        record="06b_orders_and_counters",
        sweeps=("counters",),
        measure=lambda records: kernels.saved_and_counted(records, column="dram_read_bytes", unit="fetch"),
        claimed=(Band(least=0.2),),
        leaves_out={
            "order != 'hilbert'": "the claim is of Hilbert order",
            "how == 'counted in gather'": "a gather of rows is no attention",
        },
        verdict="does not hold (16 of 118 cases)",
        note="residue-major storage saves more; in time it shows as K6 says",
    ),
    Claim(
        "C5",
        claim="better coalescing on GPUs",
        source="002",
        question=(
            "sectors requested, tile by tile, by a kernel that walks the keys in the order of positions, as modelled, "
            "and sectors from L2 to L1 in one forward and in decoding with one query, as counted"
        ),
        quantity="share of requests saved",
        record="06b_orders_and_counters",
        sweeps=("counters",),
        measure=lambda records: kernels.saved_and_counted(
            records, column="l1_sectors", unit="sector", counts="requested", key_order="position"
        ),
        claimed=(Band(least=0.02),),
        leaves_out={
            "order != 'hilbert'": "the claim is of Hilbert order",
            "how == 'counted in gather'": "a gather of rows is no attention",
        },
        verdict="does not hold (6 of 118 cases)",
        note=(
            "the cases that hold are modelled, with rows of 16 B (head_dim 8 in bf16) stored heads first at dilation "
            "2 and more; without dilation such rows request more; as counted no case holds"
        ),
    ),
    Claim(
        "C6",
        claim="an order in each segment keeps locality that an order over the whole sequence loses",
        source="001",
        question="lines touched with a Hilbert curve that restarts in every segment, against one over the sequence",
        quantity="share of lines saved",
        measure=models.saved_by_restarting,
        claimed=(Band(least=0.01),),
        verdict="does not hold (6 of 70 cases)",
    ),
    Claim(
        "C7",
        claim="ordering after the split keeps locality that ordering before it breaks",
        source="003",
        question="rows that the fullest of 8 ranks lacks, the order laid over the sequence or over each shard",
        quantity="rows lacked before / after",
        measure=lambda: ring.kept_by_order_of_shards(tokens=65536, ranks=8, kinds=["tile", "morton", "hilbert"]),
        claimed=(Band(least=1.01),),
        when=When(says="for Morton and Hilbert order, not for tiles", where="kind != 'tile'"),
        verdict="holds for Morton and Hilbert order, not for tiles (2 of 3 cases)",
    ),
    Claim(
        "C8",
        claim="a more consistent, predictable stride",
        source="002",
        question="the share of the commonest distance from one row of the branch to the next",
        quantity="share, Hilbert / linear",
        measure=models.stride_regularity,
        claimed=(Band(least=1.01),),
        verdict="does not hold",
        note="linear storage has one distance throughout",
    ),
    Claim(
        "C9",
        claim="head groups of different branches share cache lines",
        source="002",
        question=(
            "lines that two heads touch through two branches, of those of the first, where the heads of a token fill "
            "no whole line; Hilbert less linear storage"
        ),
        quantity="difference of shares",
        measure=models.lines_shared_by_branches,
        claimed=(Band(least=0.01),),
        verdict="does not hold",
        note=(
            "heads share such lines in any order, and in sequence order most; where a token's heads fill whole lines "
            "no order changes what is shared"
        ),
    ),
)
