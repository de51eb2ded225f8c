"""Types of the public names of ggjit.models."""
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypedDict, Unpack

import numpy as np
import numpy.typing as npt

from ggjit import Backend, Context, Graph, Scheduler, Tensor

_Path = str | os.PathLike[str]

class _LlamaOptions(TypedDict, total=False):
    n_ctx: int | None
    n_batch: int
    kv_type: Literal["F16", "F32", "BF16", "Q8_0", "Q4_0"]
    flash: bool
    repack: bool | None

class _Sampling(TypedDict, total=False):
    temp: float
    top_k: int
    top_p: float
    min_p: float
    typical_p: float
    top_n_sigma: float
    xtc_probability: float
    xtc_threshold: float
    dynatemp_range: float
    dynatemp_exponent: float
    repeat_penalty: float
    frequency_penalty: float
    presence_penalty: float
    penalty_last_n: int
    dry_multiplier: float
    dry_base: float
    dry_allowed_length: int
    dry_penalty_last_n: int
    dry_sequence_breakers: Sequence[str]
    mirostat: Literal[0, 1, 2]
    mirostat_tau: float
    mirostat_eta: float
    logit_bias: Mapping[int, float]
    samplers: str | Sequence[str]
    seed: int | None

class _Generation(Iterator[str]):
    stats: dict[str, Any]
    def __next__(self) -> str: ...

class _ChatPrompt(NamedTuple):
    text: str
    ids: list[int]

class _Network:
    backend: Backend
    scheduler: Scheduler | None
    n_vocab: int
    n_ctx: int
    load_seconds: float
    def __enter__(self) -> _Network: ...
    def __exit__(self, *exc: object) -> None: ...
    def tokenize(self, text: str) -> list[int]: ...
    def logits(self, ids: Sequence[int]) -> npt.NDArray[np.float32]: ...
    def hidden(self, ids: Sequence[int]) -> npt.NDArray[np.float32]: ...
    def embed(self, texts: Sequence[str]) -> npt.NDArray[np.float32]: ...
    def generate(self, prompt: str | Sequence[int], n_predict: int = 64, stop: str | int | Sequence[str | int] = (),
                 ignore_eos: bool = False, **sampling: Unpack[_Sampling]) -> _Generation: ...
    def chat(self, messages: Sequence[Mapping[str, Any]], n_predict: int = -1,
             tools: Sequence[Mapping[str, Any]] | None = None, template: str | None = None,
             variables: Mapping[str, Any] | None = None, **options: Any) -> _Generation: ...
    def chat_prompt(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None,
                    add_generation_prompt: bool = True, template: str | None = None,
                    **variables: Any) -> _ChatPrompt: ...
    def graph(self, *shape: int) -> Graph: ...
    def warm_up(self) -> None: ...
    def free(self) -> None: ...

class _SileroVad:
    n_window: int
    backend: Backend
    @property
    def plan(self) -> Any: ...
    def __enter__(self) -> _SileroVad: ...
    def __exit__(self, *exc: object) -> None: ...
    def __call__(self, window: npt.ArrayLike) -> float: ...
    def reset(self) -> None: ...
    def probabilities(self, samples: npt.ArrayLike, reset: bool = True) -> npt.NDArray[np.float32]: ...
    def segments(self, samples: npt.ArrayLike, **params: float) -> list[tuple[float, float]]: ...
    def free(self) -> None: ...

def load_model(path: _Path, backend: str | Backend = "CPU", n_threads: int | None = None, reserve: bool = True,
               n_gpu_layers: int | None = None, cpu_moe: bool = False, strict: bool = True, validate: bool = False,
               **options: Unpack[_LlamaOptions]) -> _Network: ...
def load_gguf(path: _Path, ctx: Context | None = None) -> tuple[dict[str, Tensor], Mapping[str, Any]]: ...
def load_safetensors(path: _Path, ctx: Context | None = None) -> dict[str, Tensor]: ...
def save_gguf(path: _Path, tensors: Mapping[str, Tensor | npt.NDArray[Any]],
              metadata: Mapping[str, Any] | None = None) -> None: ...
def save_safetensors(path: _Path, tensors: Mapping[str, Tensor | npt.NDArray[Any]],
                     metadata: Mapping[str, str] | None = None) -> None: ...
def load_vad(path: _Path, backend: str | Backend = "CPU", n_threads: int = 1,
             conv_type: Literal["F32", "F16"] = "F32") -> _SileroVad: ...
