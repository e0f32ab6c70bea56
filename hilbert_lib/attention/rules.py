"""What "auto" goes by, as data: orders of backends, each with the record that it comes from."""

from typing import NamedTuple

CHOICE_RECORD = "notebook 05 on an H200, reports/h200"
NOT_MEASURED = "not measured: the order of general knowledge"
ANY = (0, None)


class Rule(NamedTuple):
    """An order of backends for a class of calls. Of the rules that fit a call the first one holds.

    Attributes:
        order: names of backends, the fastest first. A name that is missing is taken only when asked for.
        record: where the order comes from.
        head_dims, lengths, heads: the least and the most, or None for no most; heads are those of the whole batch.
        is_causal: of the call, or None for both.
        gradient: whether its backward will run, or None for both.
        pattern: segment_lengths, dilation_rates, offsets and mixing, or None for all.
    """

    order: tuple[str, ...]
    record: str
    head_dims: tuple[int, int] = (1, 256)
    lengths: tuple[int, int | None] = ANY
    heads: tuple[int, int | None] = ANY
    is_causal: bool | None = None
    gradient: bool | None = None
    pattern: tuple | None = None

    @property
    def asks_for_length(self) -> bool:
        """Whether it holds for some lengths alone."""
        # Number by number: torch.compile in torch 2.11 compares no two tuples for being different.
        return self.lengths[0] > 0 or self.lengths[1] is not None

    def fits(self, head_dim, length, heads, is_causal, gradient, pattern) -> bool:
        """Whether a call is of the class. Compared number by number, so that torch.compile compiles no length anew."""
        for (least, most), value in ((self.head_dims, head_dim), (self.lengths, length), (self.heads, heads)):
            if value < least or (most is not None and value > most):
                return False
        if self.is_causal not in (None, is_causal) or self.gradient not in (None, gradient):
            return False
        return self.pattern in (None, pattern)


# On Hopper one pass over all branches is the fastest of what was timed in 47 of the 48 calls of 05's record. In the
# other one, of 262,144 tokens with a backward, FlashAttention-4's calls of each branch are ahead by 0.2 %; two records
# differ by more there. FlashAttention-3 and -2 are not in the record: each stands before what is older than it, and
# xFormers, which takes as long as torch's flash, behind both.
_HOPPER = ("triton", "cudnn", "flash_attn_4", "flash_attn_3", "flash", "flash_attn_2", "xformers", "sdpa", "eager")
_AMPERE = ("triton", "cudnn", "flash_attn_2", "flash", "xformers", "sdpa", "eager")
_BLACKWELL = ("cudnn", "flash_attn_4", "triton", "flash", "flash_attn_2", "xformers", "sdpa", "eager")
_OLDER = ("sdpa", "xformers", "eager")
HALF_RULES = {
    "Hopper": (Rule(_HOPPER, CHOICE_RECORD),),
    **dict.fromkeys(("Ampere", "Ada"), (Rule(_AMPERE, NOT_MEASURED),)),
    **dict.fromkeys(("Blackwell", "newer"), (Rule(_BLACKWELL, NOT_MEASURED),)),
    **dict.fromkeys(("older", "Pascal", "Volta", "Turing"), (Rule(_OLDER, NOT_MEASURED),)),
}
# In float32 the fused kernels use no matrix instructions, and sdpa is ahead of them. Of what sdpa refuses (dropout,
# padding, a few queries) eager takes 0.2 to 44 times their time once they are compiled, and at 65,536 tokens 13 GiB
# where they take 0.1. float64 has eager alone on a GPU.
FULL_RULES = (Rule(("sdpa", "triton", "eager"), "float32 on an H200, reports/HISTORY.md; float64 has eager alone"),)
CPU_RULES = (Rule(("sdpa", "eager"), "notebook 05, which measures it where it runs"),)
