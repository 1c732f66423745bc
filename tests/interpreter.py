"""Makes Triton's interpreter faster, with the same results: what it looks up again per call is looked up once.

For every launch, and every call of one kernel by another, the interpreter searches `triton.language` for functions to
replace. It also rebuilds the same types per operation. That was most of the time of tests with whole models. Where
Triton's internals have other names, everything stays as it is, only slower.
"""

from contextlib import suppress
from types import SimpleNamespace


def speed_up() -> None:
    with suppress(ImportError, AttributeError):
        from triton.language import core
        from triton.runtime import interpreter

        patch_once(interpreter)
        keep_types(core, interpreter)


def patch_once(interpreter) -> None:
    """The interpreter's functions are found at the first launch and put in place again at the others."""
    search, make_scope, function = interpreter._patch_lang, interpreter._LangPatchScope, interpreter.InterpretedFunction
    everything = SimpleNamespace(__globals__={"tl": interpreter.tl, "core": interpreter.tl.core})
    changes = []  # object, name, value

    def patch(kernel):
        if not changes:
            scope = search(everything)
            changes.extend((o, name, o.__dict__[name]) for o, name, _ in scope._changes)
            return scope
        scope = make_scope()
        for change in changes:
            scope.set_attr(*change)
        return scope

    def call(self, *arguments, **keywords):  # within a launch, which has put everything in place
        try:
            return self.rewrite()(*arguments, **keywords)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    interpreter._patch_lang, function.__call__ = patch, call


def keep_types(core, interpreter) -> None:
    numpy_types, types = {}, {}
    find, make_block, make_tensor = interpreter._get_np_dtype, core.block_type.__init__, core.tensor.__init__
    unwrap_any = core._unwrap_if_constexpr

    def unwrap(value):
        return value if type(value) in (int, bool, core.dtype, core.tensor) else unwrap_any(value)

    def numpy_type(dtype):
        if dtype.name not in numpy_types:
            numpy_types[dtype.name] = find(dtype)
        return numpy_types[dtype.name]

    def block(self, element_ty, shape):
        key = element_ty.name, *core._unwrap_shape(shape)
        if key in types:
            self.__dict__.update(types[key])
        else:
            make_block(self, element_ty, shape)
            types[key] = dict(self.__dict__)

    def tensor(self, handle, type):
        kept = type.__dict__.get("kept")
        if kept is None:
            make_tensor(self, handle, type)
            type.kept = {"shape": self.shape, "numel": self.numel, "dtype": self.dtype}
        else:
            self.handle, self.type = handle, type
            self.__dict__.update(kept)

    interpreter._get_np_dtype, core.block_type.__init__, core.tensor.__init__ = numpy_type, block, tensor
    core._unwrap_if_constexpr = unwrap
