"""LEDGER.md names a test or a reason for every row of ggml's behaviour, and the tests it names exist."""
import re

from helpers.paths import TESTS

PARTS = {1: 13, 2: 12, 3: 27, 4: 8, 5: 20, 6: 12, 7: 11, 8: 9, 9: 24, 10: 18, 11: 5, 12: 11, 13: 17, 14: 16, 15: 9}

CURRENT = {
    "B3": """tallocr | reserve_n | reserve_n_size | resets buffers | plan validity | chunks | in-place | OUTPUT flag |
        NONE-op views | get_buffer_size | usage COMPUTE | alloc_ctx_tensors""",
    "B4": """sched_new | GGML_SCHED_DEBUG | passes 1-5 | 30 inputs | pipeline inputs | graph_optimize | dependency |
        alloc_splits | sync rules | MoE rule | event record | reserve_size | set/get_tensor_backend | reset | uid |
        set_copy_callback | without addresses""",
    "B5": """device types | lookups | init_by_ | load_all | registration order | get_proc_address | set/get 2d |
        tensor_memset | CPU supports_op | supports_buft | use_ref | CPU fusion | node skipping | CUDA offload_op |
        meta backend | RPC | graph_copy""",
    "B6": """layout | readers | refused | getters | writers | validate_row_data""",
    "B7": """build_backward_expand | ops with gradients | not differentiated | graph_reset | opt context | dataset""",
    "B8": """context | graph | fusion helpers | threadpool | abort callback | fatal abort hook | statuses | NUMA |
        logging | dumps | flags""",
    "E1": """whole process | not enough space | free blocks | plan reused | max size | leak | use after free |
        split input limit | per-op malloc | undocumented | abort callback""",
    "E2": """view initialised | within one backend | work buffer | plans copy | move backend switches |
        unchanged inputs | set_usage | case-insensitive""",
    "E3": """eval callback stops | stale copies | edits the user's graph | reserve_n | context buffer | last backend |
        count inputs | hash sized | ROPE | always synchronizes | NONE nodes | multi-buffer | no device | unloaded |
        meta device | barrier | dot dump"""}
ALLOC_ROWS = [f"A{part}.{k:02d}" for part in (9, 10, 11) for k in range(1, PARTS[part] + 1)]
# rows of B3 about allocators, by the test that pins them down
ALLOC_B3 = {
    "tallocr bump pointer": "test_b3_bump_allocator",
    "reserve_n: ids per node and leaf, several buffer types": "test_chunks_and_several_buffer_types",
    "chunks: max size, oversized tensors, 16th unlimited": "test_chunks_and_several_buffer_types",
    "dynamic best fit over chunks": "test_chunks_and_several_buffer_types",
    "leafs first, INPUT-flagged next": "test_random_graphs",
    "OUTPUT never freed, never reused": "test_a10_16_outputs_survive_only_as_last_node_in_2023",
    "in-place and free_extra_space": "test_random_graphs",
    "NONE-op views in nodes do not count as views": "test_none_op_views_in_nodes_do_not_count",
    "plan without allocation (reserve_n_size)": "test_model_graphs",
}


def test_the_ledger_is_complete_and_true():
    rows = dict(re.findall(r"^\| (A\d+\.\d\d) \| (.+) \|$", (TESTS / "LEDGER.md").read_text(encoding="utf-8"), re.M))
    assert set(rows) == {f"A{p}.{k:02d}" for p, n in PARTS.items() for k in range(1, n + 1)}
    assert all(len(text) > 8 or text.startswith("as A") for text in rows.values())


def test_the_ledger_names_every_row_of_current_ggml():
    text = (TESTS / "LEDGER.md").read_text(encoding="utf-8")
    missing = [f"{part} {row}" for part, rows in CURRENT.items() for row in rows.split("|")
               if not re.search(rf"^\| {part} [^|]*{re.escape(row.strip())}[^|]* \| .{{9,}} \|$", text, re.M)]
    assert not missing


def test_every_named_test_exists():
    named = set(re.findall(r"`(test_\w+\.py)::(test_\w+)`", (TESTS / "LEDGER.md").read_text(encoding="utf-8")))
    assert len(named) > 60
    files = {p.name: p.read_text(encoding="utf-8") for p in TESTS.rglob("test_*.py")}
    missing = [(f, t) for f, t in named if f"def {t}(" not in files.get(f, "")]
    assert not missing


def test_every_row_of_the_allocators_stands_in_the_name_of_a_test():
    files = [*TESTS.rglob("test_*alloc*.py")]
    assert len(files) > 1
    names = re.findall(r"^def (test_\w+)", "\n".join(p.read_text(encoding="utf-8") for p in files), re.M)
    said = {f"A{a}.{b}" for n in names for a, b in re.findall(r"[aA](\d+)_(\d\d)(?=_|$)", n)}
    assert [r for r in ALLOC_ROWS if r not in said] == []
    assert [t for t in ALLOC_B3.values() if t not in names] == []
