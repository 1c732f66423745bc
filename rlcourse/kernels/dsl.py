"""The names of CuTe DSL that kernels use, or stand-ins where it is not installed, which let a module be read, so that
references import without it: as a decorator a stand-in gives the function back, anything else of it is itself."""

from collections.abc import Iterator
from contextlib import contextmanager

try:
    import cutlass
    import cutlass.cute as cute
    from cutlass import Float32, Int32, Int64, Uint32, Uint64, const_expr, range_constexpr

    INSTALLED = True
except ImportError:

    class _StandIn:
        def __getattr__(self, name):
            return self

        def __call__(self, function=None, *arguments, **options):
            return function if callable(function) else self

    cutlass = cute = Float32 = Int32 = Int64 = Uint32 = Uint64 = const_expr = range_constexpr = _StandIn()
    INSTALLED = False

__all__ = ["Float32", "Int32", "Int64", "Uint32", "Uint64", "const_expr", "cute", "cutlass", "range_constexpr"]


@contextmanager
def line_information() -> Iterator[None]:
    """Within it, compiled PTX says from which line of Python an instruction comes."""
    settings = cutlass.cutlass_dsl.CuTeDSL._get_dsl().envar
    before, settings.lineinfo = settings.lineinfo, True
    try:
        yield
    finally:
        settings.lineinfo = before
