"""Tensor allocators: rows A9.* of the behaviour list, and the bump allocator of B3.

Golden traces are worked out by hand from the 2023 sources; alignment 32 unless said otherwise.
"""
import numpy as np
import pytest
from helpers.alloc_2023 import Blocks
from helpers.requirements import benchmark

from ggjit.alloc.ggml.bump import Bump, aligned_offset
from ggjit.alloc.ggml.legacy.tensor_alloc import MEASURE_BASE, BestFit
from ggjit.ops.core.errors import IndexRangeError, OutOfMemory, ParamError, ShapeError
from ggjit.ops.core.record import OP

graphs = benchmark("alloc_graphs")


# ---------------------------------------------------------------- A9
def test_a9_01_aligned_offset():
    assert [aligned_offset(0, n, 32) for n in (0, 1, 32, 33)] == [0, 32, 32, 64]
    assert aligned_offset(0x1010, 0, 32) == 16 and aligned_offset(0x1010, 5, 32) == 16
    for bad in (0, 3, -32):
        with pytest.raises(ParamError, match="power of two"):
            aligned_offset(0, 0, bad)


def test_a9_02_a9_08_reset_gives_one_block_from_the_aligned_base():
    t = BestFit(1000, 64, base=16)
    assert t.blocks == [(48, 952)] and t.max_size == 0
    t.alloc(1, 100)
    assert t.max_size == 48 + 128
    t.reset()
    assert t.blocks == [(48, 952)] and t.max_size == 176            # not reset
    assert not t.is_own(1)


def test_a9_05_offsets_are_aligned_as_addresses():
    data = np.zeros(4096 + 32, np.uint8)
    t = BestFit(data.nbytes, 32, base=data.ctypes.data)
    assert (data.ctypes.data + t.alloc(0, 10)) % 32 == 0


def test_a9_04_a9_20_a9_22_measuring_makes_the_same_decisions():
    rng = np.random.default_rng(3)
    m, real, live = BestFit(None, 32), BestFit(1 << 20, 32), []
    assert m.is_measure and m.base == MEASURE_BASE
    for i in range(300):
        if live and rng.random() < 0.45:
            i = live.pop(int(rng.integers(len(live))))
            m.free_id(i)
            real.free_id(i)
        else:
            n = int(rng.integers(0, 500))
            assert m.alloc(i, n) == real.alloc(i, n)
            live.append(i)
        assert m.blocks[:-1] == real.blocks[:-1]
    assert m.max_size == real.max_size


def test_a9_09_views_and_placed_tensors_are_refused():
    g = graphs.Net()
    a = g.new(OP.NONE, (8,))
    v, w = g.view(a, (4,)), g.weight(4)
    t = BestFit(1000)
    for i in (v, w):
        with pytest.raises(ParamError, match="view or has memory"):
            t.alloc(i, 16, g.table)
    assert t.alloc(a, 32, g.table) == 0
    with pytest.raises(ParamError, match="already"):
        t.alloc(a, 32, g.table)
    with pytest.raises(ShapeError, match="tensor 99: -1 bytes"):
        t.alloc(99, -1)


def test_a9_10_sizes_are_padded_and_empty_tensors_share_an_address():
    t = BestFit(1000)
    assert [t.alloc(i, n) for i, n in enumerate((1, 0, 0, 33))] == [0, 32, 32, 32]
    assert t.max_size == 96


def test_a9_11_a9_12_a9_14_a9_15_best_fit_ties_to_the_later_block_and_the_tail_last():
    t = BestFit(4096)
    for i, n in enumerate((64, 32, 96, 32, 64, 32, 96, 32)):
        t.alloc(i, n)
    for i in (0, 2, 4, 6):
        t.free_id(i)
    assert t.blocks == [(0, 64), (96, 96), (224, 64), (320, 96), (448, 3648)]
    assert t.alloc(10, 64) == 224                                   # exact fits: the later of two, not the tail
    assert t.alloc(11, 70) == 320 and t.alloc(12, 70) == 96         # 96 bytes each, later one first; emptied
    assert t.blocks == [(0, 64), (448, 3648)]
    assert t.alloc(13, 32) == 0 and t.blocks[0] == (32, 32)         # low end of the block
    assert t.alloc(14, 40) == 448                                   # nothing else holds it
    assert t.max_size == 512


def test_a9_13_out_of_memory_names_need_and_best_block():
    t = BestFit(256)
    t.alloc(0, 100)
    with pytest.raises(OutOfMemory, match="tensor 7 needs 160 bytes, the largest free block has 128"):
        t.alloc(7, 150)
    assert t.blocks == [(128, 128)] and not t.is_own(7)


def test_a9_16_a9_18_a9_24_only_own_tensors_are_freed_and_only_once():
    t = BestFit(1000)
    t.alloc(0, 10)
    t.free_id(5)                                                    # another buffer's: ignored
    assert t.is_own(0) and not t.is_own(5)
    t.free_id(0)
    with pytest.raises(IndexRangeError, match="already"):
        t.free_id(0)


def test_a9_17_a9_18_merging_both_ways_and_inserting_in_order():
    t = BestFit(1000)
    for i in range(7):
        t.alloc(i, 32)
    t.free_id(1)
    t.free_id(5)
    t.free_id(3)                                                    # inserted between
    assert t.blocks == [(32, 32), (96, 32), (160, 32), (224, 776)]
    t.free_id(2)                                                    # end of one, start of the next
    assert t.blocks == [(32, 96), (160, 32), (224, 776)]
    t.free_id(0)                                                    # start of a block
    t.free_id(6)                                                    # joins 5 and the tail
    assert t.blocks == [(0, 128), (160, 840)]
    t.free_id(4)
    assert t.blocks == [(0, 1000)]


def test_a9_02_no_limit_on_free_blocks():
    t = BestFit(None)
    for i in range(2000):
        t.alloc(i, 32)
    for i in range(0, 2000, 2):
        t.free_id(i)
    assert len(t.blocks) == 1001                                    # ggml aborts at 256


def test_a9_23_live_tensors_at_every_new_maximum():
    seen = []
    t = BestFit(1000, on_max=lambda top, live: seen.append((top, [i for i, _, _ in live])))
    t.alloc(1, 64)
    t.alloc(2, 32)
    t.free_id(1)
    t.alloc(3, 40)                                                  # into the hole: no new maximum
    t.alloc(4, 40)
    assert seen == [(64, [1]), (96, [1, 2]), (160, [3, 2, 4])]


def test_b3_bump_allocator():
    b = Bump(200, 32, base=16)
    assert [b.alloc(10), b.alloc(0), b.alloc(33)] == [16, 48, 48]
    with pytest.raises(OutOfMemory, match="needs 96 bytes, 88 of 200 are left"):
        b.alloc(70)
    assert b.offs == 112



@pytest.mark.parametrize("seed", range(6))
def test_a9_10_to_a9_18_blocks_with_empty_ones_are_those_of_the_rules(seed):
    """Empty tensors leave empty blocks; where one lies among others at its address decides what is joined."""
    rng, live = np.random.default_rng(seed), []
    t, want = BestFit(1 << 16), Blocks(1 << 16)
    for i in range(400):
        if live and rng.random() < 0.5:
            k, offs, need = live.pop(int(rng.integers(len(live))))
            t.free_id(k)
            want.free(offs, need)
        else:
            need = 32 * int(rng.choice([0, 0, 1, 1, 2, 5]))
            offs = want.alloc(need)
            assert t.alloc(i, need) == offs
            live.append((i, offs, need))
        assert t.blocks == [tuple(b) for b in want.blocks]
