"""The backends that exist, by name."""

from hilbert_lib.attention.backends import dense, flex, fused, packages, reference

_ROOMS = (fused.BACKENDS, dense.HALF, packages.BACKENDS, flex.BACKENDS, dense.BACKENDS, reference.BACKENDS)
BACKENDS = {backend.name: backend for room in _ROOMS for backend in room}
WITHOUT_BUILD = {
    "flash_attn_1": "no build of FlashAttention 1 exists for a current torch; on Turing and Volta sdpa serves instead"
}
