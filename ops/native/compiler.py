"""How Numba compiles kernels: helpers stay bitcode, a kernel is optimised once, only needed passes run.

Left to itself Numba links every function with all that it calls, optimises the whole and makes machine code of it.  A
kernel is thirty to eighty small helpers that call each other, and helpers are called by kernels alone:

    kernel -> multiply_strip -> stretch -> fetch            Numba: 4 times optimised, 4 times machine code,
                                                                   `fetch` is inside all of them
                                                            here:  linked, optimised and translated once, as `kernel`

Numba also makes a version of a function for every literal integer it is called with (`ne(view, 1)`, `ne(view, 2)`...);
inlining brings the constant in anyway, so helpers have one version a type.  Its default pipeline has passes for
NumPy expressions, closures, comprehensions, `with` blocks, exceptions made at run time and parfors; kernels have none
of these, and where one is written the compilation fails.  Together: 40 % less processor time.

Cached machine code is loaded without Numba's libraries, so all it refers to must be known to the process by name
(`unknown`).  LLVM ends the process for a function that is not, or puts in address 0 and says nothing.
"""
import functools
from types import BuiltinFunctionType

import llvmlite.binding as llvm
from numba import types
from numba.core import cgutils, ir
from numba.core.codegen import JITCodeLibrary, JITCPUCodegen
from numba.core.compiler import CompilerBase
from numba.core.compiler_machinery import PassManager, register_pass
from numba.core.dispatcher import Dispatcher
from numba.core.ir_utils import build_definitions
from numba.core.lowering import Lower
from numba.core.rewrites import rewrite_registry
from numba.core.runtime import _nrt_python
from numba.core.ssa import reconstruct_ssa
from numba.core.typed_passes import (
    IRLegalization,
    NativeLowering,
    NoPythonBackend,
    NopythonTypeInference,
    PreLowerStripPhis,
)
from numba.core.untyped_passes import (
    DeadBranchPrune,
    FixupArgs,
    GenericRewrites,
    IRProcessing,
    ReconstructSSA,
    TranslateByteCode,
)

from ggjit.ops.core.errors import NotSupported
from ggjit.ops.core.interrupts import let_in
from ggjit.ops.native import isa

# Numba optimises its own functions, and those of users that kernels call, for all the processor has.  With SVE their
# vectors would have a length that no level knows, and LLVM ends the process that brings them into a kernel.
if isa.ARM64:
    llvm.set_option("ggjit", "-scalable-vectorization=off")
llvm.initialize_native_asmparser()          # instructions that kernels name


def _link(module, library):
    """Link into `module` the bitcode of all that `library` calls, each function once."""
    seen, todo, theirs = {library}, list(library._linking_libraries), []
    while todo:
        callee = todo.pop()
        if callee in seen:
            continue
        seen.add(callee)
        if isinstance(callee, HelperLibrary):
            module.link_in(callee.bitcode, preserve=True)
            todo += callee._linking_libraries
        else:
            theirs.append(callee)
    # linked last: LLVM takes only the functions that are referred to by then
    for callee in theirs:
        code = callee._get_module_for_linking()
        if isa.ARM64 and "vscale" in str(code):
            raise NotSupported(f"{callee.name} was compiled for SVE before ggjit was imported, and kernels have NEON "
                               f"alone; import ggjit first")
        module.link_in(code, preserve=True)


class _Codegen(JITCPUCodegen):
    """Machine code for the level of isa.py.  Other jitted code of the process has Numba's own code generator."""

    def _get_host_cpu_name(self):
        return isa.SCHEDULED_AS if isa.ISA in isa.MODELS else super()._get_host_cpu_name()

    def _get_host_cpu_features(self):
        return isa.features_text(isa.FEATURES) if isa.ISA in isa.MODELS else super()._get_host_cpu_features()


@functools.cache
def codegen():
    """The code generator of all kernels."""
    return _Codegen("ggjit")


@functools.cache
def _own_context(targetctx):
    """Numba's target context with that code generator, and with internal functions compiled by it."""
    return targetctx.subtarget(_internal_codegen=codegen())


def runtime_functions():
    """{name: address} of the functions of Numba's runtime that machine code refers to."""
    return {name if name.startswith("_") else f"NRT_{name}": address for name, address in _nrt_python.c_helpers.items()}


def unknown(names):
    """The names that have no address in this process."""
    return [name for name in names if llvm.address_of_symbol(name) is None]


class HelperLibrary(JITCodeLibrary):
    """A function that only other jitted code calls: bitcode, to be linked into them, never machine code of its own."""

    codegen = property(lambda self: self)               # Numba only calls set_env on it

    def set_env(self, name, env):
        """Do nothing: code that another process loads holds no Python objects."""
        if any(f.name == "numba_gil_ensure" for f in self._final_module.functions):
            raise NotSupported(f"{self.name} uses Python objects (print, strings, an object's attributes); jitted "
                               f"helpers have numbers and addresses alone")

    def finalize(self):
        for function in self._final_module.functions:
            if not function.is_declaration and function.linkage == llvm.Linkage.external:
                function.linkage = "linkonce_odr"       # may be defined many times; dropped where it was inlined
        self._finalized = True

    @property
    def bitcode(self):
        self._ensure_finalized()
        return self._final_module

    def _get_module_for_linking(self):
        """The module for callers that Numba compiles its own way."""
        whole = self.bitcode.clone()
        _link(whole, self)
        return whole

    def _optimize_functions(self, module):
        module.data_layout = self._codegen._data_layout

    def get_pointer_to_function(self, name):
        self._ensure_finalized()
        return 0                                        # Numba takes 0 for: no such symbol


class KernelLibrary(JITCodeLibrary):
    """An entry point with everything it reaches: the one module that is optimised and becomes machine code."""

    def _optimize_functions(self, module):
        module.data_layout = self._codegen._data_layout

    def finalize(self):
        _link(self._final_module, self)
        self._linking_libraries = []
        module = self._final_module
        self.externals = [x.name for x in (*module.functions, *module.global_variables)
                          if x.is_declaration and not x.name.startswith("llvm.")]
        if unknown(self.externals):
            raise NotSupported(f"{self.name} refers to {', '.join(unknown(self.externals))}, which is not in this "
                               f"process; helpers that call each other in turn cannot be compiled, nor calls of C "
                               f"functions that are not loaded")
        super().finalize()


class _Passes(PassManager):
    _ENFORCING = False          # Numba checks the whole function after each pass: turned off

    def _runPass(self, *args):
        let_in()                # a Ctrl-C inside a pass would leave Numba's tables half changed
        super()._runPass(*args)


class _TypingContext:
    """Numba's typing context, which remembers how operators and intrinsics were resolved: a quarter of the time.

    For every `a + b` of two integers Numba tries the rules of NumPy's ufuncs, arrays and sets again, and formats an
    error for each that does not fit.
    """

    def __init__(self, context):
        self._context = context
        self._resolved = {}                     # (function, argument types) -> signature
        self._operators = {}                    # operator.add... -> its type

    def __getattr__(self, name):
        return getattr(self._context, name)

    def resolve_function_type(self, func, args, kws):
        if not isinstance(func, types.Function) or kws:
            return self._context.resolve_function_type(func, args, kws)
        key = func, tuple(args)
        found = self._resolved.get(key)
        if found is None:
            found = self._context.resolve_function_type(func, args, kws)
            if found is not None:
                self._resolved[key] = found
        return found

    def resolve_value_type(self, value):
        if not isinstance(value, BuiltinFunctionType):
            return self._context.resolve_value_type(value)
        found = self._operators.get(value)
        if found is None:
            found = self._operators[value] = self._context.resolve_value_type(value)
        return found


_typing_context = functools.cache(_TypingContext)


class _Lower(Lower):
    """Machine code of `a + b` by the signature that typing has found; Numba looks for it again."""

    def lower_binop(self, result_type, expr, op):
        if expr.static_lhs is not ir.UNDEFINED or expr.static_rhs is not ir.UNDEFINED:
            return super().lower_binop(result_type, expr, op)  # powers with a literal exponent are lowered by Numba
        builder, context, typing = self.builder, self.context, _typing_context(self.context.typing_context)
        signature = self.fndesc.calltypes[expr]
        operands = [context.cast(builder, self.loadvar(v.name), self.typeof(v.name), wanted)
                    for v, wanted in zip((expr.lhs, expr.rhs), signature.args, strict=True)]
        op = typing.resolve_value_type(op)
        found = typing.resolve_function_type(op, signature.args, {})
        result = context.get_function(op, found)(builder, operands)
        return context.cast(builder, result, signature.return_type, result_type)

    def alloca_lltype(self, name, lltype, datamodel=None):
        """Numba also asks LLVM for the size, for debuggers."""
        if self.context.enable_debuginfo:
            return super().alloca_lltype(name, lltype, datamodel)
        return cgutils.alloca_once(self.builder, lltype, name=name, zfill=False)


@register_pass(mutates_CFG=True, analysis_only=False)
class _Lowering(NativeLowering):
    lowering_class = _Lower


# Numba computes the lifetimes of all variables after each of the next three; only those after the last are used, in
# IRLegalization.
@register_pass(mutates_CFG=True, analysis_only=False)
class _Rewrites(GenericRewrites):
    def run_pass(self, state):
        blocks = state.func_ir.blocks
        for rewrite in (kind(state) for kind in rewrite_registry.rewrites["before-inference"]):
            todo = list(blocks.items())
            while todo:
                key, block = todo.pop()
                if rewrite.match(state.func_ir, block, state.typemap, state.calltypes):
                    blocks[key] = rewrite.apply()
                    todo.append((key, blocks[key]))
        return True


@register_pass(mutates_CFG=True, analysis_only=False)
class _SSA(ReconstructSSA):
    def run_pass(self, state):
        state.func_ir = reconstruct_ssa(state.func_ir)
        state.func_ir._definitions = build_definitions(state.func_ir.blocks)
        return True


@register_pass(mutates_CFG=True, analysis_only=False)
class _StripPhis(PreLowerStripPhis):
    def run_pass(self, state):
        state.func_ir = self._strip_phi_nodes(state.func_ir)
        state.func_ir._definitions = build_definitions(state.func_ir.blocks)
        return True


PASSES = (TranslateByteCode, FixupArgs, IRProcessing, DeadBranchPrune, _Rewrites, _SSA, NopythonTypeInference,
          _StripPhis, IRLegalization, _Lowering, NoPythonBackend)


class _Compiler(CompilerBase):
    library = None              # class of the compiled library, set by subclasses

    def __init__(self, typingctx, targetctx, *args):
        super().__init__(typingctx, _own_context(targetctx), *args)

    def compile_extra(self, func):
        self.state.typingctx = _typing_context(self.state.typingctx)
        self.state.library = self.library(self.state.targetctx.codegen(), func.__qualname__)
        self.state.library.enable_object_caching()
        return super().compile_extra(func)

    def define_pipelines(self):
        passes = _Passes("ggjit")
        for step in PASSES:
            passes.add_pass(step, step.name())
        passes.finalize()
        return [passes]


class HelperCompiler(_Compiler):
    """The compiler of functions that only jitted code calls."""
    library = HelperLibrary


class KernelCompiler(_Compiler):
    """The compiler of entry points."""
    library = KernelLibrary


def by_type(dispatcher):
    """The dispatcher, compiling once for all literal integers."""
    if not isinstance(dispatcher, Dispatcher):          # NUMBA_DISABLE_JIT: the function itself
        return dispatcher
    call_template = dispatcher.get_call_template

    def get_call_template(args, kws):
        return call_template(tuple(types.unliteral(a) for a in args),
                             {name: types.unliteral(a) for name, a in kws.items()})
    dispatcher.get_call_template = get_call_template
    return dispatcher
