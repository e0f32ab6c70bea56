"""Triton's interpreter at twice its speed, for tests."""

import inspect
from dataclasses import replace
from functools import cache


def hasten() -> None:
    """Leave out of the interpreter what takes half of its time and finds nothing at the sizes of tests.

    Additions are not computed again in 64 bits. A call from a kernel's function to another one does not replace
    Triton's language by the interpreter's where that has been done. And numpy's name of a type is looked up once.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)

    numpy_type, known = interpreter._get_np_dtype, {}

    def known_type(triton_type):
        if triton_type.name not in known:
            known[triton_type.name] = numpy_type(triton_type)
        return known[triton_type.name]

    @cache
    def languages(function) -> list:
        return [each for each in function.__globals__.values() if inspect.ismodule(each) and each in (tl, tl.core)]

    def call(self, *args, **kwargs):
        if any(tl.core.is_builtin(language.load) for language in languages(self.fn)):
            interpreter._patch_lang(self.fn)
        return self.rewrite()(*args, **kwargs)

    interpreter._get_np_dtype = known_type
    interpreter.InterpretedFunction.__call__ = call
