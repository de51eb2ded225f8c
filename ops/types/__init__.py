"""One file per tensor type or tight family."""
from ggjit.ops.types.traits import BY_NAME, TYPE_INFO, Type

F32, F16, BF16, F64 = (BY_NAME[n] for n in ("f32", "f16", "bf16", "f64"))
I8, I16, I32, I64 = (BY_NAME[n] for n in ("i8", "i16", "i32", "i64"))
Q8_0, Q4_0 = BY_NAME["q8_0"], BY_NAME["q4_0"]
