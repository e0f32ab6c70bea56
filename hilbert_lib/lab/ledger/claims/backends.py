"""Claims of the documents on backends, dtypes, buffers and CUDA graphs."""

from hilbert_lib.lab.ledger import kernels, models
from hilbert_lib.lab.ledger.claim import Band, Claim, When
from hilbert_lib.lab.ledger.claims import only
from hilbert_lib.lab.ledger.claims.speed import DECODING, NARROW_ROWS, ORDERS, OTHER_ORDERS
from hilbert_lib.lab.ledger.documents import backend_pairs

CLAIMS = (
    Claim(
        "B1",
        claim="automatic backend selection improves throughput by 20 to 40 %",
        source="001",
        question=(
            "time of each fixed backend over that of the automatic choice, the mean of all works, least and most, "
            "where sequences are so long that no call waits for its launches; at least 20 %"
        ),
        quantity="time of a fixed backend / of the choice",
        record="05_backend_selection",
        sweeps=("selection",),
        measure=lambda records: kernels.over_fixed(records, least=262144),
        claimed=(Band(least=1.2),),
        leaves_out={"not is_long": "a fixed backend waits for its launches there, and the choice for none"},
        when=When(
            says="over a fixed sdpa or flash, not over the best fixed ones, cudnn and flash_attn_4",
            where="base in ['sdpa', 'flash']",
        ),
        verdict=(
            "holds over a fixed sdpa or flash, not over the best fixed ones, cudnn and flash_attn_4 (2 of 4 cases)"
        ),
        only=only.CHOICES,
    ),
    Claim(
        "B2",
        claim="FlashAttention gives 5 to 10x over the manual backend",
        source="001",
        question="plain matrix products and softmax beside torch's FlashAttention, in the same points; at least 5x",
        quantity="time manual / time flash",
        record="04_safe_benchmarking",
        sweeps=("points",),
        measure=lambda records: kernels.over_rival(records, "flash"),
        claimed=(Band(least=5),),
        leaves_out={"base != 'eager'": "the claim is of the manual backend"},
        verdict="holds",
    ),
    Claim(
        "B3",
        claim="the right dtype can be chosen from the architecture",
        source="001",
        question="the recommended dtype of every architecture from Pascal to Blackwell",
        tests=("tests/test_machine.py::test_every_architecture_has_its_name_and_dtypes",),
        verdict="holds",
    ),
    Claim(
        "B4",
        claim="xFormers: 1.08x over the base",
        source="004",
        question=(
            "the reference work, torch's memory-efficient kernel (backend sdpa) and its FlashAttention beside xFormers"
        ),
        quantity="time of torch's kernel / time xformers",
        record="claims_B4",
        sweeps=("claims",),
        measure=kernels.over_xformers,
        pairs=lambda **shape: backend_pairs(("sdpa", "flash"), "xformers", (8192, 65536), **shape),
        claimed=(Band(least=1.05),),
        leaves_out={"base == 'cudnn'": "cuDNN's kernel runs on no GPU of the documents' age"},
        when=When(says="over torch's memory-efficient kernel, not over its FlashAttention", where="base == 'sdpa'"),
        verdict="holds over torch's memory-efficient kernel, not over its FlashAttention (8 of 14 cases)",
        note=(
            "the documents do not say what their base is; the cases in points are of reports/h200, "
            "bench_attention_xformers; those in pairs were timed before a sample's spin grew with its launches, so "
            "that the ratio at 8,192 tokens may hold some"
        ),
    ),
    Claim(
        "B5",
        claim="a memory pool: 0.98x on average, pays from 100K tokens on, uses more memory at 8K",
        source="004",
        question=(
            "calls of one length, buffers kept or in a pool, against torch's caching allocator; 5 % is granted below "
            "100K; and memory reserved at 8192 tokens"
        ),
        quantity="time caching / with a pool; memory with a pool / caching",
        record="05_backend_selection",
        sweeps=("pools",),
        measure=kernels.pools,
        claimed=(
            Band(least=0.93, most=1.03, where="what == 'time' and tokens < 100000"),
            Band(least=1.01, where="what == 'time' and tokens >= 100000"),
            Band(least=1.01, where="what == 'memory'"),
        ),
        leaves_out={
            "strategy == 'graph'": "a CUDA graph holds its buffers too, and gains by its launches (see B7)",
            "tokens == 0": "calls of several lengths in turn have no one length (see B10)",
            "what == 'memory' and tokens != 8192": "the claim on memory is of 8,192 tokens (see B12)",
        },
        verdict="does not hold (5 of 16 cases)",
        note=(
            "a pool takes more memory at 8192 tokens, and is no faster anywhere; CUDA graphs gain, by their launches "
            "(B7)"
        ),
        only=only.POOLS,
    ),
    Claim(
        "B6",
        claim="the pattern cache saves recomputation",
        source="004",
        question="time to build the tables of a pattern and an order over that to find them",
        quantity="building / a look-up, in time",
        record="05_backend_selection",
        sweeps=("pattern cache",),
        measure=lambda records: kernels.ratios(records, sweep="pattern cache", columns=["rival", "what", "length"]),
        claimed=(Band(least=1.01),),
        leaves_out={"rival == 'call'": "the time of a whole call, beside which M1 sets it"},
        verdict="holds",
        only=only.TABLES,
    ),
    Claim(
        "B7",
        claim="CUDA graphs help small sequences",
        source="004",
        question="modules called and replayed, from an idle device to the finished result",
        quantity="time called / time replayed",
        record="05_backend_selection",
        sweeps=("graphs",),
        measure=lambda records: kernels.ratios(records, sweep="graphs", columns=["module", "direction", "length"]),
        claimed=(Band(least=1.01),),
        verdict="holds",
        only=only.GRAPHS,
    ),
    Claim(
        "B8",
        claim="choose by length: above 8K tokens the Hilbert order",
        source="000, 001",
        question=(
            "one function on two layouts above 8K tokens, rows of head_dim 64 and more in bf16; faster by a per cent"
        ),
        quantity="time linear / time Hilbert",
        record="06b_orders_and_counters",
        sweeps=ORDERS,
        measure=kernels.layout_ratios,
        claimed=(Band(least=1.01),),
        leaves_out=OTHER_ORDERS | DECODING | NARROW_ROWS | {"length <= 8192": "the claim is of more than 8,192 tokens"},
        verdict="does not hold",
        note='an adaptive choice existed, kv_ordering="auto"; it took none in any call, and is gone',
        only=only.LAYOUTS,
    ),
    Claim(
        "B9",
        claim="FlashAttention works seamlessly with reordered data",
        source="002",
        question="a dense kernel given reordered k and v and not told; relative difference of its output in float64",
        quantity="relative difference",
        measure=models.plain_kernel_on_reordered_keys,
        claimed=(Band(most=1e-12),),
        when=When(says="without a causal mask", where="not is_causal"),
        verdict="holds without a causal mask (1 of 2 cases)",
        note="with a causal mask it masks slots for positions, and computes another function",
    ),
    Claim(
        "B10",
        claim="a memory pool reduces fragmentation",
        source="004",
        question=(
            "memory reserved and not allocated after calls of several lengths in turn, torch's caching allocator less "
            "another way to hold buffers; by 1 MiB at least"
        ),
        quantity="GiB of fragmentation spared",
        record="05_backend_selection",
        sweeps=("pools",),
        measure=kernels.pool_fragmentation,
        claimed=(Band(least=0.001),),
        leaves_out={"tokens > 0": "calls of one length leave little to fragment"},
        verdict="does not hold",
        only=only.POOLS,
    ),
    Claim(
        "B11",
        claim="fp32 is needed on Pascal for numerical stability",
        source="001",
        question=(
            "float16 with sums in float32, and large scores, against a float64 oracle; rounding is that of every GPU"
        ),
        tests=(
            "tests/attention/triton/test_triton.py::test_tiles_that_are_no_squares_and_half_precision_equal_the_oracle",
            "tests/attention/triton/test_triton.py::test_large_scores_and_rows_with_one_key_are_exact",
        ),
        verdict="cannot be tested here: no Pascal GPU",
        note=(
            "the tests show that float16 needs no float32 inputs where sums are float32; fp32 may still be faster on "
            "Pascal (B3)"
        ),
    ),
    Claim(
        "B12",
        claim="memory is equal in all configurations at 16K and 32K tokens",
        source="004",
        question=(
            "memory reserved by calls of 8,192, 131,072 and 1,048,576 tokens, buffers held in three ways, over that "
            "under torch's allocator; within a per cent"
        ),
        quantity="memory / under torch's allocator",
        record="05_backend_selection",
        sweeps=("pools",),
        measure=kernels.pools,
        claimed=(Band(least=0.99, most=1.01),),
        leaves_out={
            "what == 'time'": "the claim is of memory",
            "tokens == 0": "calls of several lengths in turn (see B10)",
        },
        verdict="does not hold (4 of 18 cases)",
        note=(
            "kept buffers take up to twice as much at every length; pools and graphs 3 to 45 % more up to 131,072 "
            "tokens, nothing at 2^20"
        ),
        only=only.POOLS,
    ),
    Claim(
        "B13",
        claim="the cache grows with the number of dilation patterns",
        source="004",
        question="tables kept after more patterns and orders than the bound of their caches",
        tests=("tests/test_ordering.py::test_the_cache_drops_the_least_recently_used_beyond_its_bound",),
        verdict="does not hold",
        note="up to its bound it does; then the least recently used is dropped",
    ),
)
