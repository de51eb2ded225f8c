"""mul_mat: types against columns.  Weights come from memory, activations are small.

onnxruntime (MatMulNBits) and OpenVINO have 4 and 8 bits with a scale for 32 elements: next to them are Q4_0 and Q8_0.
"""
import ggjit as gg
from benchmarks.work import Graph

TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL",
         "IQ4_XS", "MXFP4")
COLUMNS, QUICK_COLUMNS = (1, 2, 4, 8, 16, 32, 128, 512), (1, 2, 4, 8, 16, 32, 128)
K, M = 2048, 2048
LONG = {4096: 4096, 11008: 4096}                # row length: rows, for one column
TARGETS = {"wheel": 1.0, "native": 1.0, "llamafile": None}
NBITS = {"onnxruntime": 1.0, "openvino": 1.0}
MOST_NBITS_COLUMNS = 32
STREAMED = ("Q4_0", "Q8_0", "Q4_K", "Q6_K", "F16")      # decoding reads these as fast as memory gives them
# Between ggml's result and ours.  It rounds activations to the same codes, then the scales of blocks of 32 to float16
# (5e-8), for Q4_1 and Q5_1 a block's sum as well (9e-7); other types differ by the order of additions (1e-13).
MAX_NMSE = dict.fromkeys(("Q8_0", "Q4_0", "Q5_0", "IQ4_NL", "MXFP4"), 2e-7) | dict.fromkeys(("Q4_1", "Q5_1"), 2e-6)
SAME_NMSE = 1e-8
NBITS_NMSE = 1e-3               # they round activations in ways of their own
BLAS = {"numpy": 1.0, "torch": 1.0}


def product(type, k, m, n, targets, quick=True):
    def build(new):
        return gg.mul_mat(new.weights(getattr(gg, type), (k, m)), new(gg.F32, (k, n)))
    size = f"n{n}" if (k, m) == (K, M) else f"{k}x{m}-n{n}"
    nbits = NBITS if type in ("Q4_0", "Q8_0") and (k, m) == (K, M) and n <= MOST_NBITS_COLUMNS else {}
    return Graph(key=f"mul_mat-{type.lower()}-{size}", text=f"mul_mat {type} [{k} x {m}], n = {n}",
                 targets=targets | nbits, build=build, cold=True, quick=quick, max_nmse=MAX_NMSE.get(type, SAME_NMSE),
                 peer_nmse=dict.fromkeys(nbits, NBITS_NMSE), share=0.9 if n == 1 and type in STREAMED else None)


WORKS = (*(product(t, K, M, n, TARGETS | (BLAS if t == "F32" else {}), n in QUICK_COLUMNS or t == "F32")
           for t in TYPES for n in COLUMNS),
         *(product(t, k, m, 1, TARGETS, quick=False) for t in TYPES for k, m in LONG.items()),
         *(product("F32", k, m, n, TARGETS | BLAS, quick=n == 64) for k, m in ((384, 1536), (1024, 1024))
           for n in (16, 64, 256)))
