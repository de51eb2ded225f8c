"""docs/ggml-names.md: every C function a ggml library exports, and what does it in ggjit.

The list of functions is read from an installed library (`nm -D` on the xllamacpp wheel); a function whose name without
the prefix is in ggjit maps to that; the others are placed by the first of RULES that matches.  A function that no rule
knows is an error, so the page cannot silently fall behind.
"""
import functools
import glob
import importlib
import importlib.metadata
import importlib.util
import re
import subprocess

import ggjit

# pattern | what does it, "-" for nothing | note.  \1 is the first group; names are resolved when the page is made.
RULES_TEXT = r"""
ggml_compute_forward_\w+ | - | kernel, not for users
ggml_(vec|gemm|gemv)_\w+ | - | kernel, not for users
ggml_quantize_mat_\w+ | - | kernel, not for users
ggml_(tiled_wdata_size|op_alloc_size_may_expand|barrier|can_fuse_subgraph_ext) | - | internal
ggml_(graph_next_uid|unravel_index|set_op_params\w*) | - | internal
ggml_(hash|critical_section|threadpool_chunk|aligned)\w* | - | internal
ggml_(log_internal|log_callback|print_backtrace)\w* | - | internal
ggml_(abort|fopen|numa_init|is_numa|cycles|cycles_per_ms|time_init|time_ms|time_us|guid_matches) | - | C runtime
ggml_(version|commit) | gg.__version__ |
ggml_status_to_string | gg.errors | a typed error instead of a status

ggml_init | gg.Context | takes no memory: buffers hold the data
ggml_(free|reset) | gg.Context.free |
ggml_(get_mem_buffer|get_mem_size|used_mem|get_no_alloc|set_no_alloc) | - | a Context holds no data
ggml_(new_buffer|print_objects?|tensor_overhead) | - | a Context holds no data
ggml_get_max_tensor_size | - | max(t.nbytes for t in ctx.tensors)
ggml_get_(first|next)_tensor | - | ctx.tensors is a list of those alive
ggml_get_tensor | - | next(t for t in ctx.tensors if t.name == name)
ggml_new_tensor(_[1-4]d)? | gg.Context.new_tensor | the shape is one tuple
ggml_dup_tensor | gg.Context.new_tensor | ctx.new_tensor(t.type, t.ne)
ggml_set_(f32|i32)(_1d|_nd)? | gg.Tensor.set, gg.Tensor.write | arrays
ggml_get_(f32|i32)_(1d|nd) | gg.Tensor.numpy | arrays
ggml_get_data(_f32)? | gg.Tensor.numpy, gg.Tensor.bytes |
ggml_(get_name|format_name) | gg.Tensor.name |
ggml_set_loss | gg.set_loss |
ggml_(nelements|nrows|n_dims) | gg.Tensor.ne |
ggml_nbytes | gg.Tensor.nbytes |
ggml_nbytes_pad | - | -(-t.nbytes // 16) * 16: room in a ggml context, which has no arena here
ggml_(is_empty|is_scalar|is_vector|is_matrix|is_3d|are_same_shape) | gg.Tensor.ne | compare tuples
ggml_(is_permuted|is_transposed|are_same_stride) | gg.Tensor.nb | compare tuples
ggml_(is_contiguous_channels|is_contiguous_to_[123]|is_contiguously_allocated) | gg.Tensor.nb | compare tuples
ggml_is_contiguous(_[012])? | ggjit.ops.core.shape.is_contiguous |
ggml_is_contiguous_rows | ggjit.ops.core.shape.rows_contiguous |
ggml_is_view | gg.Tensor.view_src |
ggml_can_repeat | ggjit.ops.core.shape.can_repeat |
ggml_(get_unary_op|get_glu_op|flash_attn_ext_get_prec) | gg.Tensor.op_params |
ggml_(op_name|op_symbol|op_desc|unary_op_name|glu_op_name) | gg.Tensor.op | an enum with ggml's names and numbers
ggml_op_can_inplace | ggjit.ops.core.spec.in_place_table |

ggml_(type_name|is_quantized) | ggjit.ops.core.types.Type | gg.Q4_0.name, .quantized
ggml_(type_sizef?|blck_size|element_size|row_size) | ggjit.ops.core.types.Type | .nbytes, .block, .row_nbytes(n)
ggml_get_type_traits(_cpu)? | ggjit.ops.core.traits.traits_of |
ggml_ftype_to_ggml_type | - | a GGUF file names the type of each tensor
ggml_quantize_chunk | gg.quantize |
ggml_quantize_(init|free) | - | nothing to set up
ggml_quantize_requires_imatrix | gg.quantize | it says so
ggml_validate_row_data | gg.validate_row_data | load_model(path, validate=True) for a file
ggml_(bf16_to_fp32|fp16_to_fp32|fp32_to_bf16|fp32_to_fp16)(_row|_row_ref)? | gg.quantize, gg.dequantize |

ggml_new_graph(_custom)? | gg.Graph | gg.Graph(*outputs)
ggml_build_forward_expand | gg.Graph |
ggml_build_forward_(order|select) | gg.Graph | order="memory" chooses an order
ggml_build_backward_expand | gg.build_backward_expand, gg.grad | returns another graph
ggml_graph_(node|nodes|n_nodes|size|get_tensor) | - | graph.nodes, graph.leafs are lists
ggml_graph_(clear|cpy|dup|view|add_node|overhead|overhead_custom) | - | a Graph does not change
ggml_graph_dump_dot | gg.Graph.dot, gg.Graph.draw |
ggml_graph_print | gg.Graph.draw |
ggml_graph_(compute|compute_with_ctx|plan) | gg.Backend.graph_compute, gg.Backend.graph_plan_create, gg.compute |
ggml_threadpool_\w+ | gg.threadpool | one pool for the process
ggml_set_abort_callback | - | errors are exceptions, nothing aborts
ggml_log_(get|set) | - | errors are exceptions; GGJIT_DEBUG for the rest

ggml_prec_set_acc | gg.mul_mat_set_prec, gg.flash_attn_ext_set_prec | the same slots; returns a new node
ggml_prec_set_src | - | a wish for backends that can choose; the CPU computes the same
ggml_flash_attn_ext_set_n_kv_max | - | a hint for GPU kernels; the CPU computes the same
ggml_clamp_inplace | gg.clamp | always in place here, as in ggml until 0.13
ggml_rope_custom(_inplace)? | gg.rope_ext\1 | deprecated there; c is None
ggml_rope_yarn_corr_dims | ggjit.ops.attention.rope_angles | part of the kernel's set-up

ggml_backend_tensor_(\w+) | gg.tensor_\1 |
ggml_backend_event_(\w+) | gg.event_\1 |
ggml_backend_graph_copy | gg.graph_copy |
ggml_backend_graph_copy_free | gg.GraphCopy |
ggml_backend_(compare_graph_backend|view_init) | gg.\1 |
ggml_backend_alloc_ctx_tensors(_from_buft)? | gg.alloc_ctx_tensors |
ggml_backend_alloc_ctx_tensors_from_buft_size | gg.alloc_ctx_tensors_from_buft_size |
ggml_backend_sched_new | gg.Scheduler |
ggml_backend_sched_get_(n_splits|n_copies) | gg.Scheduler.\1 |
ggml_backend_sched_get_(backend|n_backends) | gg.Scheduler.backends |
ggml_backend_sched_get_buffer_size | gg.Scheduler.buffer_size |
ggml_backend_sched_get_buffer_type | gg.Scheduler.buffer_type |
ggml_backend_sched_(\w+) | gg.Scheduler.\1 |
ggml_backend_buft_get_(alignment|max_size|alloc_size) | gg.BufferType.\1 |
ggml_backend_buft_get_device | gg.BufferType |
ggml_backend_buft_(alloc_buffer|is_host) | gg.BufferType.\1 |
ggml_backend_buft_(alloc_buffer_n|get_alloc_size_n) | gg.alloc_ctx_tensors | splits by max_size
ggml_backend_buft_name | gg.BufferType |
ggml_backend_buffer_(init_tensor|clear|reset|free|set_usage) | gg.Buffer.\1 |
ggml_backend_buffer_copy_tensor | gg.Buffer.copy_tensor |
ggml_backend_buffer_(get_base|get_size|get_usage|get_type|name|init) | gg.Buffer | .base .size .usage .buft
ggml_backend_buffer_(get_alignment|get_max_size|get_alloc_size|is_host) | gg.BufferType | buf.buft
ggml_backend_(multi_buffer_\w+|buffer_is_multi_buffer) | gg.MultiBuffer |
ggml_backend_meta_device | gg.meta_device |
ggml_backend_meta_split_axis_name | gg.meta_split_axis_name |
ggml_backend_(meta_\w+|\w+_is_meta|is_meta) | gg.MetaDevice | .devices; its backends' .backends; .type is "meta"
ggml_backend_dev_(buffer_type|host_buffer_type|buffer_from_host_ptr|memory) | gg.Device.\1 |
ggml_backend_dev_(offload_op|supports_buft|supports_op) | gg.Device.\1 |
ggml_backend_dev_init | gg.Device.init_backend |
ggml_backend_dev_get_props | gg.Device.props |
ggml_backend_dev_(name|description|type|backend_reg) | gg.Device |
ggml_backend_dev_(by_name) | gg.registry.device |
ggml_backend_dev_by_type | gg.registry.by_type |
ggml_backend_dev_(count|get) | gg.registry.devices |
ggml_backend_(register|device_register) | gg.registry.register |
ggml_backend_unload | gg.registry.unregister |
ggml_backend_load(_all|_all_from_path)? | gg.registry.load | entry points of group ggjit.backends
ggml_backend_reg_by_name | gg.registry.registry |
ggml_backend_reg_get_proc_address | gg.registry.proc_address |
ggml_backend_reg_\w+ | gg.registry.registries |
ggml_backend_init_(best|by_name|by_type) | gg.init_backend |
ggml_backend_cpu_init | gg.init_backend | gg.init_backend("CPU")
ggml_backend_cpu_set_n_threads | gg.init_backend | backend.n_threads
ggml_backend_cpu_set_abort_callback | gg.init_backend | backend.abort_callback
ggml_backend_cpu_set_threadpool | gg.threadpool | one pool for the process
ggml_backend_cpu_set_use_ref | - | GGJIT_DEBUG=check compares every node with its reference
ggml_backend_cpu_buffer_from_ptr | gg.from_numpy |
ggml_backend_cpu_(buffer_type|reg) | gg.Device | of gg.registry.device("CPU")
ggml_backend_is_cpu | gg.Device | backend.device.type == "cpu"
ggml_backend_graph_plan_(create|compute|free) | gg.Backend.graph_plan_\1 |
ggml_backend_graph_compute(_async)? | gg.Backend.graph_compute |
ggml_backend_get_default_buffer_type | gg.Backend.default_buffer_type |
ggml_backend_get_(alignment|max_size) | gg.Backend.\1 |
ggml_backend_(alloc_buffer|free|guid|offload_op|supports_buft|supports_op|synchronize) | gg.Backend.\1 |
ggml_backend_(get_device|name) | gg.Backend |
ggml_gallocr_new(_n)? | gg.GraphAllocator |
ggml_gallocr_get_buffer_size | gg.GraphAllocator.buffer_size |
ggml_gallocr_reserve_n_size | gg.GraphAllocator.plan, gg.measure | allocates nothing
ggml_gallocr_reserve(_n)? | gg.GraphAllocator.reserve |
ggml_gallocr_(alloc_graph|free) | gg.GraphAllocator.\1 |
ggml_tallocr_\w+ | gg.BumpAllocator, gg.TensorAllocator | the second is ggml's of 2023: it frees too

ggml_cpu_has_amx_int8 | ggjit.ops.native.isa | AMX; GGJIT_CPU=avx512bf16 turns it off
ggml_cpu_has_\w+ | ggjit.ops.native.isa | GGJIT_CPU forces avx512, avx2, neon or generic
ggml_cpu_(get_\w+|init|extra_\w+) | - | internal
ggml_cpu_fp\w+|ggml_cpu_bf\w+ | gg.quantize, gg.dequantize |
ggml_opt_dataset_(init|ndata|shuffle|get_batch|get_batch_host|data|labels|free) | gg.train.Dataset | arrays
ggml_opt_(fit|epoch\w*|init|alloc|prepare_alloc|eval|reset|free|static_graphs) | gg.train.fit, gg.train.evaluate |
ggml_opt_result_(loss|accuracy|pred|ndata)|ggml_opt_ncorrect | gg.train.Evaluation | what gg.train.evaluate returns
ggml_opt_result_\w+ | gg.train.Evaluation | a + b: of the rows of both
ggml_opt_loss | gg.train.History |
ggml_opt_(pred|outputs|inputs|labels) | gg.train.predict |
ggml_opt_(\w*optimizer\w*|default_params) | gg.train.AdamW, gg.train.SGD | a schedule is lr=function of the step
ggml_opt_grad_acc | gg.graph_get_grad_acc |

gguf_init_from_file(_ptr)? | ggjit.models.files.gguf.GGUFFile |
gguf_init_from_(buffer|callback) | ggjit.models.files.gguf.GGUFFile.from_bytes |
gguf_(get_val|get_arr)\w* | ggjit.models.files.gguf.GGUFFile.get | .metadata is a mapping
gguf_(get_n_kv|get_key|find_key|get_kv_type) | ggjit.models.files.gguf.GGUFFile.get | .metadata is a mapping
gguf_(get_n_tensors|find_tensor|get_tensor)\w* | ggjit.models.files.gguf.TensorInfo | .tensors is a mapping
gguf_get_(version|alignment|data_offset) | ggjit.models.files.gguf.GGUFFile | .version, .alignment, .data_offs
gguf_free | - | Python frees
gguf_type_name | ggjit.models.files.gguf.type_name |
gguf_(write_to_file\w*|add_tensor|set_tensor_(data|type)) | ggjit.models.save_gguf | all tensors in one call
gguf_(set_\w+|init_empty|remove_key) | ggjit.models.save_gguf | metadata is a dict: set, merge and delete its keys
gguf_get_meta\w* | ggjit.models.save_gguf | the whole file; .metadata of a GGUFFile is what was read
"""
HEAD = """\
# ggml's names

Generated by `python docs/generate.py ggml-names.md` from the functions that ggml {version} exports (the xllamacpp wheel
{wheel}); a test checks that it is up to date. Of {n} functions, {same} have their own name in ggjit (`ggml_add` is
`gg.add`), {other} are done by something with another name, and {none} have no equivalent, for the reason given.

| C function | ggjit | note |
|---|---|---|
"""


# builders that change an existing node in C
NEW_NODE = ("mul_mat_set_prec", "mul_mat_set_hint", "flash_attn_ext_set_prec", "flash_attn_ext_add_sinks",
            "soft_max_add_sinks", "rope_set_offset")


@functools.cache
def rules():
    """[(compiled pattern, target or "", note)]"""
    found = []
    for line in filter(None, RULES_TEXT.splitlines()):
        pattern, target, note = (part.strip() for part in line.rsplit(" | ", 2)) if line.count(" | ") >= 2 else \
            (*(part.strip() for part in line.rstrip(" |").split(" | ", 1)), "")
        found.append((re.compile(pattern), "" if target == "-" else target, note))
    return found


def library():
    """Path of the library, or None where the wheel is not installed."""
    spec = importlib.util.find_spec("xllamacpp")
    found = glob.glob(f"{spec.submodule_search_locations[0]}/xllamacpp*.so") if spec else []
    return found[0] if found else None


def exported():
    """Names of the C functions (ggml_*, gguf_*) the library exports, sorted."""
    lines = subprocess.run(["nm", "-D", "--defined-only", library()], capture_output=True, text=True, check=True).stdout
    return sorted({name for _, kind, name in (line.split() for line in lines.splitlines() if line.count(" ") == 2)
                   if kind == "T" and re.match(r"gg(ml|uf)_", name)})


def resolve(name):
    """The object of a dotted name: gg.Tensor.set, ggjit.models.files.gguf.GGUFFile.  AttributeError if there is
    none."""
    parts = name.replace("gg.", "ggjit.", 1).split(".") if name.startswith("gg.") else name.split(".")
    found = ggjit
    for i, part in enumerate(parts[1:], 2):
        if not hasattr(found, part):
            importlib.import_module(".".join(parts[:i]))
        found = getattr(found, part)
    return found


def place(function):
    """(ggjit names, note) for a C function.  LookupError if no rule knows it."""
    own = function.removeprefix("ggml_")
    if function.startswith("ggml_") and hasattr(ggjit, own):
        return (f"gg.{own}",), "returns a new node; C's writes into its argument" if own in NEW_NODE else ""
    for pattern, target, note in rules():
        match = pattern.fullmatch(function)
        if match:
            target = target.replace(r"\1", (match.group(1) or "") if match.groups() else "")
            names = tuple(filter(None, target.split(", ")))
            for n in names:
                resolve(n)
            return names, note
    raise LookupError(f"no rule of docs/ggml_names.py places {function}")


def page():
    functions = exported()
    placed = {f: place(f) for f in functions}
    same = sum(names == (f"gg.{f.removeprefix('ggml_')}",) for f, (names, _) in placed.items())
    none = sum(not names for names, _ in placed.values())
    rows = [f"| `{f}` | {', '.join(f'`{n}`' for n in names) or '-'} | {note} |" for f, (names, note) in placed.items()]
    head = HEAD.format(version=ggml_version(), wheel=importlib.metadata.version("xllamacpp"), n=len(functions),
                       same=same, other=len(functions) - same - none, none=none)
    return head + "\n".join(rows) + "\n"


def ggml_version():
    import ctypes
    lib = ctypes.CDLL(library(), mode=ctypes.RTLD_LOCAL)
    lib.ggml_version.restype = ctypes.c_char_p
    return lib.ggml_version().decode()
