"""Attention and the positions that go into it.

    flash_attn              flash_attn_ext and the choice of its kernel; flash_attn_back is refused, as in ggml
    flash_attn_decode       kernel of few query rows (flash_attn_tiles: its register tiles)
    flash_attn_prefill      kernel of many query rows (flash_attn_matrix: its register tile)
    flash_attn_paged        the same of several texts, whose keys are found by page tables
    flash_attn_rows, flash_attn_softmax     which rows an item has; the online softmax: parts of both
    rope, rope_angles       rotary positions
    rel_pos                 relative positions;  lightning_indexer: scores that choose keys

Read `flash_attn`, `flash_attn_rows`, `flash_attn_softmax`, `flash_attn_decode`, `flash_attn_prefill`; then `rope`.
"""
