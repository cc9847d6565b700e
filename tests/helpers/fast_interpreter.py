"""Triton's interpreter without what it does over and over, which is half of its work in our tests."""

from types import FunctionType

from triton.runtime import interpreter


def patch_language_once() -> None:
    """Let the interpreter replace the functions of `triton.language` once for each module with kernels, and for good.

    By itself it does so at every launch and at every call of a function in a kernel.
    """
    patch = interpreter._patch_lang
    patched: set[str] = set()

    def patch_first(function: FunctionType) -> interpreter._LangPatchScope:
        if function.__module__ not in patched:
            patched.add(function.__module__)
            patch(function)
        return interpreter._LangPatchScope()  # which restores nothing

    interpreter._patch_lang = patch_first
