"""The options of load_model, in one place."""
import dataclasses
import time
from typing import Any

from ggjit.core.process_memory import taken_now
from ggjit.models.blocks.hparams import ROPE_OPTIONS
from ggjit.models.core.checks import known_options
from ggjit.models.core.other_options import LOADING

DECODER_OPTIONS = "n_ctx", "n_batch", "kv_type", "flash", "n_seqs", "n_cells"
ARGUMENTS = ("backend", "n_threads", "reserve", "n_gpu_layers", "cpu_moe", "strict", "validate", "lora", "devices",
             "vision")
KEYWORDS = (*DECODER_OPTIONS, *ROPE_OPTIONS, "pooling", "repack", "arena")          # names of load_model's **options


@dataclasses.dataclass(frozen=True)
class LoadOptions:
    """Arguments of load_model under their names, which its docstring explains.

    A network checks what it uses before it reads weights; DECODER_OPTIONS and rope are for decoders alone.
    """
    backend: Any = "CPU"
    n_threads: int | None = None
    reserve: bool = True
    n_gpu_layers: int | None = None
    cpu_moe: bool = False
    override_tensor: Any = ()           # {pattern of names: device}
    gpus: tuple = ()                    # backends of GPU layers, instead of one
    strict: bool = True
    lora: Any = ()
    devices: Any = None
    repack: bool | None = None
    vision: Any = None                  # path of the mmproj file of a decoder
    pooling: str | None = None          # how tokens become one vector; None: as the file says
    arena: Any = None                   # bytes, or a text such as "24M", that computed results may take
    n_ctx: int | None = None
    n_batch: int = 512
    kv_type: Any = "F16"
    flash: bool = True
    n_seqs: int | None = None           # None: as many as the architecture computes at once
    n_cells: int | None = None          # cache rows of all texts together; None: n_ctx
    rope: dict = dataclasses.field(default_factory=dict)        # those of ROPE_OPTIONS that were given
    started: float = dataclasses.field(default_factory=time.perf_counter)      # when loading began
    process: tuple = dataclasses.field(default_factory=taken_now)              # what the process held then

    @classmethod
    def of(cls, keywords, **more):
        """LoadOptions of load_model's **options and its other arguments.  Errors: ParamError for unknown names."""
        known_options("load_model", keywords, (*ARGUMENTS, *KEYWORDS), LOADING)
        rope = {name: value for name, value in keywords.items() if name in ROPE_OPTIONS}
        return cls(**{name: value for name, value in keywords.items() if name not in rope}, rope=rope, **more)
