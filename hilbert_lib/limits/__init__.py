"""Memory and time: limits, predictions, and a watch while something runs.

config        the limits, from arguments, the environment, a file
memory        free memory, whether a need fits, the peak of a call
estimate      the memory of an attention call, predicted
watch         memory and temperature during a run, which is ended at a limit
"""

from hilbert_lib.lazy import lazily

__getattr__, __dir__ = lazily(
    __name__,
    {
        "hilbert_lib.limits.config": ("SafetyConfig",),
        "hilbert_lib.limits.estimate": ("estimate_memory",),
        "hilbert_lib.limits.memory": ("GB", "MemorySafetyChecker", "gpu_memory", "host_memory"),
        "hilbert_lib.limits.watch": ("Watcher",),
    },
)
