"""Names of torch and Triton that are private, or that their releases spell differently: each stands here, once.

Each function says in which release its name was read, and what is done in a release that lacks it. torch and Triton
are imported inside the functions, so that the library imports without Triton.
"""


def async_load():
    """Gluon's copy from global to shared memory: (descriptor, coordinates, barrier, tile).

    `async_load` from Triton 3.8 on. Triton 3.6 and 3.7 call it `async_copy_global_to_shared`, a name that raises in
    3.9.
    """
    from triton.experimental.gluon.language.nvidia.hopper import tma

    return tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared


def async_store():
    """Gluon's copy from shared to global memory: (descriptor, coordinates, tile).

    `async_store` from Triton 3.8 on. Triton 3.6 and 3.7 call it `async_copy_shared_to_global`, a name that raises in
    3.9.
    """
    from triton.experimental.gluon.language.nvidia.hopper import tma

    return tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global


def async_add():
    """Gluon's addition of a tile in shared memory to global memory: (descriptor, coordinates, tile).

    `async_atomic_add` from Triton 3.8 on. Triton 3.6 and 3.7 have no name for it: there the builder's
    `create_async_tma_reduce` is called, as read in 3.7.1.
    """
    from triton.experimental.gluon.language.nvidia.hopper import tma

    if hasattr(tma, "async_atomic_add"):
        return tma.async_atomic_add

    from triton._C.libtriton import ir
    from triton.experimental.gluon.language._core import builtin

    @builtin
    def add_shared_to_global(descriptor, coordinates, source, _semantic=None):
        coordinates = _semantic._convert_to_ir_values(coordinates, require_i64=False)
        _semantic.builder.create_async_tma_reduce(
            ir.DESCRIPTOR_REDUCE_KIND.ADD, descriptor.handle, coordinates, source.handle
        )

    return add_shared_to_global


def reinterpret():
    """Gluon's view of a tile in shared memory with another dtype, shape and layout: (tile, dtype, shape, layout).

    `tile.reinterpret` from Triton 3.9 on. Triton 3.6 to 3.8 call it `tile._reinterpret`.
    """
    from triton.experimental.gluon.language._core import builtin

    @builtin
    def view(tile, dtype, shape, layout, _semantic=None):
        method = tile.reinterpret if hasattr(tile, "reinterpret") else tile._reinterpret
        return method(dtype, shape, layout, _semantic=_semantic)

    return view
