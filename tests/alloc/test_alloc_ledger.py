"""Every row of the allocator part of the behaviour list has a test that names it, or a reason why it needs none."""
import re

from helpers.paths import TESTS

ROWS = [f"A{part}.{k:02d}" for part, n in ((9, 24), (10, 18), (11, 5)) for k in range(1, n + 1)]

# rows of B3 by the test that pins them down; "engine" rows are about buffers and live in the engine's own tests
B3 = {
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
NOT_HERE = {
    "hash size (n_nodes + n_leafs) * 1.25": "tensors have ids; the pass uses dense columns and a table sized for them",
    "hash_get creates a record (A10.18)": "no hash: queries change nothing",
    "buffers, usage COMPUTE, get_buffer_size 0 for repeats, automatic re-reserve, alloc_ctx_tensors": "engine",
    "plan validity test compares sizes only": "replaced by the topology key of the engine's plans",
}


def test_every_row_is_named_by_a_test():
    files = [*TESTS.rglob("test_*alloc*.py")]
    assert len(files) > 1
    names = re.findall(r"^def (test_\w+)", "\n".join(p.read_text(encoding="utf-8") for p in files), re.M)
    said = {f"A{a}.{b}" for n in names for a, b in re.findall(r"[aA](\d+)_(\d\d)(?=_|$)", n)}
    assert [r for r in ROWS if r not in said] == []
    assert [t for t in B3.values() if t not in names] == []
    assert all(NOT_HERE.values())
