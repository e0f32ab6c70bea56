"""The laboratory: measures, draws and reports. Nothing that a user calls imports it.

What is measured:

workload      one call of any pattern: inputs, useful work, exact rows
calls         one call with options likewise, and all its gradients
exact_rows    a few rows of attention and of its gradients in float64
baselines     other people's ways to dilated attention
seeds         what the documents under examination published
seed_kernel   their kernel pair
exponentials   exponentials and nothing else: a roof of kernels
samples       input for notebooks: text, pictures, made slides
clouds        made clouds of points: tissue, and a room
models        small models of bytes, pictures and slides

How it is measured:

timers        the clocks of the host and of a CUDA device
timing        samples of one call, and of two in turn
sustained     calls back to back
training      small models trained, and what they lose on what they have not seen
resolutions   ways to full attention with fewer keys, and what they are off
first_pass    cases computed by several processes, so that kernels are compiled when they are measured
pairs         calls checked, compared, timed and recorded
selection     a backend chosen by measurement
guarded       points in processes of their own, within limits of memory and time
cache         what caches and memory see, modelled
sweeps        what each notebook measures
inside        kernels as a lesson, which numpy runs too

What becomes of it:

environment   the machine, the software and the code
records       files of what was measured
record_schema  what a record must hold: no speed without a check that passed
tables        records as tables
figures       every plot
ledger        what the documents claim, and what was found
parameters    parameters of a notebook, checked
suite         runs of notebooks, and their reports

Notebooks take the names that rooms list, in this table and in those of other folders, and nothing behind.
"""

from hilbert_lib.lazy import lazily

PUBLIC = {
    "hilbert_lib.attention.backends.registry": ("BACKENDS",),
    "hilbert_lib.checks": ("integer", "integers", "one_of", "positive"),
    "hilbert_lib.lab.baselines": ("BASELINES",),
    "hilbert_lib.lab.calls": ("Call",),
    "hilbert_lib.lab.clouds": ("CLOUDS", "made_room", "made_tissue"),
    "hilbert_lib.lab.environment": ("describe_environment", "say_hardware"),
    "hilbert_lib.lab.models": ("rollout",),
    "hilbert_lib.lab.pairs": ("Side", "relative_difference", "run_back_to_back", "run_sides"),
    "hilbert_lib.lab.parameters": ("each", "pattern_of"),
    "hilbert_lib.lab.records": (
        "RESULTS",
        "append_records",
        "committed_records",
        "newest_run",
        "read_records",
        "records_to_draw",
    ),
    "hilbert_lib.lab.resolutions": ("error_table", "run_approximations"),
    "hilbert_lib.lab.samples": ("picture_parts", "sample_image", "text_qkv"),
    "hilbert_lib.lab.seeds": ("seed_hilbert_d2xy", "seed_key_sets"),
    "hilbert_lib.lab.selection": ("SELECTION", "choice_pairs", "choice_table"),
    "hilbert_lib.lab.tables": ("both_ways", "fused_name", "ratio_table", "side_table", "sides_of"),
    "hilbert_lib.lab.timers": ("timer_of",),
    "hilbert_lib.lab.timing": ("Case", "compare_paired", "measure"),
    "hilbert_lib.lab.training": ("curve_table", "fit", "learning_table", "run_trainings"),
    "hilbert_lib.lab.workload": ("Workload", "fused_backend", "grid"),
    "hilbert_lib.machine": ("kernel_mode", "prepare_kernels"),
}
__getattr__, __dir__ = lazily(__name__, PUBLIC)
