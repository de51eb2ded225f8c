"""What the machine can do at most, as ggjit.profiling.machine_limits measures it.

    python -m benchmarks.limits
"""
from ggjit.profiling.machine_limits import Reader, peak_f32, read_bandwidth

__all__ = ["Reader", "peak_f32", "read_bandwidth"]

if __name__ == "__main__":
    for t in (1, 2):
        print(f"reading memory, {t} thread(s): {read_bandwidth(t) / 1e9:.1f} GB/s")
    print(f"float32 multiply-adds, one core: {peak_f32() / 1e9:.0f} GFLOP/s")
