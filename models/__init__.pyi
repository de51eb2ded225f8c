"""Types of the public names of ggjit.models."""
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, NamedTuple, TypedDict, Unpack, overload

import numpy as np
import numpy.typing as npt

from ggjit import Backend, Context, Device, Graph, Scheduler, Tensor, Type
from ggjit.train import History

_Path = str | os.PathLike[str]

class _Sampling(TypedDict, total=False):            # temp is an argument of its own
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
    adaptive_target: float
    adaptive_decay: float
    logit_bias: Mapping[int, float]
    samplers: str | Sequence[str]
    seed: int | None

class _Options(_Sampling, total=False):
    grammar: str | None
    json_schema: Mapping[str, Any] | bool | str | None
    grammar_triggers: str | int | re.Pattern[str] | Sequence[str | int | re.Pattern[str]] | None
    cache_prompt: bool
    context_shift: bool
    n_keep: int
    speculative: Any
    steps: int | None                               # from here on: of models that write all tokens at once
    eps: float | None
    block_length: int | None
    algorithm: Literal["confidence", "margin", "entropy", "random", "origin"]
    alg_temp: float
    cfg_scale: float

class _ChatOptions(_Options, total=False):
    temp: float
    stop: str | int | Sequence[str | int]
    ignore_eos: bool

class _Generation(Iterator[str]):
    stats: dict[str, Any]
    def __next__(self) -> str: ...

class _ChatPrompt(NamedTuple):
    text: str
    ids: list[int]

class _Generations(Iterator[tuple[int, str]]):
    runs: list[_Generation]
    stats: dict[str, Any]
    @property
    def texts(self) -> list[str]: ...
    def __next__(self) -> tuple[int, str]: ...
    def __len__(self) -> int: ...
    def __getitem__(self, i: int) -> _Generation: ...

class _Spec(NamedTuple):
    name: str
    op: str
    shape: tuple[int | str, ...]
    where: str

class _Capturing(Mapping[str, npt.NDArray[Any]]):
    def __getitem__(self, name: str) -> npt.NDArray[Any]: ...
    def __iter__(self) -> Iterator[str]: ...
    def __len__(self) -> int: ...
    @property
    def tokens(self) -> npt.NDArray[np.int32]: ...
    def __enter__(self) -> _Capturing: ...
    def __exit__(self, *exc: object) -> None: ...

class _AttentionMaps:
    weights: dict[int, npt.NDArray[np.float32]]
    tokens: list[str]
    def plot(self, layer: int | None = None, head: int | None = None, axes: Any = None) -> Any: ...

class _HiddenStates:
    values: npt.NDArray[np.float32]
    tokens: list[str]
    norms: npt.NDArray[np.float32]
    similarity: npt.NDArray[np.float32]
    def plot(self, axes: Any = None) -> Any: ...

class _LogitLens:
    ids: npt.NDArray[np.int32]
    probabilities: npt.NDArray[np.float32]
    words: list[list[list[str]]]
    tokens: list[str]
    def plot(self, axes: Any = None) -> Any: ...

class _Network:
    backend: Backend
    scheduler: Scheduler | None
    n_vocab: int
    n_ctx: int
    load_seconds: float
    def __enter__(self) -> _Network: ...
    def __exit__(self, *exc: object) -> None: ...
    def tokenize(self, text: str, special: bool = False, add_special: bool = True) -> list[int]: ...
    def logits(self, ids: Sequence[int]) -> npt.NDArray[np.float32]: ...
    def hidden(self, ids: Sequence[int]) -> npt.NDArray[np.float32]: ...
    def embed(self, texts: Sequence[str]) -> npt.NDArray[np.float32]: ...
    def quantize(self, type: Type | str, keep: str | Sequence[str] = ()) -> _Network: ...
    def rerank(self, query: str, texts: Sequence[str]) -> npt.NDArray[np.float32]: ...
    def encode_image(self, image: Any) -> npt.NDArray[np.float32]: ...
    @overload
    def generate(self, prompt: str | Sequence[int], n_predict: int = 64, temp: float = 0.0,
                 stop: str | int | Sequence[str | int] = (), ignore_eos: bool = False,
                 **options: Unpack[_Options]) -> _Generation: ...
    @overload
    def generate(self, prompt: list[str] | list[list[int]], n_predict: int = 64, temp: float = 0.0,
                 stop: str | int | Sequence[str | int] = (), ignore_eos: bool = False,
                 **options: Unpack[_Options]) -> _Generations: ...
    def infill(self, before: str, after: str, n_predict: int = 64, others: Sequence[tuple[str, str]] = (),
               suffix_first: bool = False, **options: Unpack[_ChatOptions]) -> _Generation: ...
    def set_lora(self, lora: Sequence[_Path | tuple[_Path, float]] = ()) -> None: ...
    def set_control_vectors(self, vectors: Sequence[_Path | _ControlVector | tuple[_Path | _ControlVector, float]] = (),
                            first: int = 1, last: int | None = None) -> None: ...
    def chat(self, messages: Sequence[Mapping[str, Any]], n_predict: int = -1,
             tools: Sequence[Mapping[str, Any]] | None = None, template: str | None = None,
             variables: Mapping[str, Any] | None = None, **options: Unpack[_ChatOptions]) -> _Generation: ...
    def chat_prompt(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None,
                    add_generation_prompt: bool = True, template: str | None = None,
                    **variables: Any) -> _ChatPrompt: ...
    def shift_context(self, n_keep: int, n_discard: int) -> None: ...
    def save_state(self, path: _Path | None = None) -> bytes: ...
    def load_state(self, state: bytes | _Path) -> None: ...
    def names(self, pattern: str = "*") -> tuple[_Spec, ...]: ...
    def capture(self, patterns: str | Sequence[str], prompt: str | Sequence[int],
                out: _Path | None = None) -> dict[str, npt.NDArray[Any]]: ...
    def capturing(self, patterns: str | Sequence[str], out: _Path | None = None) -> _Capturing: ...
    def patch(self, changes: Mapping[str, Callable[[npt.NDArray[Any]], Any] | npt.ArrayLike]) \
        -> AbstractContextManager[None]: ...
    def attention(self, prompt: str | Sequence[int]) -> _AttentionMaps: ...
    def hidden_states(self, prompt: str | Sequence[int]) -> _HiddenStates: ...
    def logit_lens(self, prompt: str | Sequence[int], top: int = 3) -> _LogitLens: ...
    def graph(self, *shape: int) -> Graph: ...
    def warm_up(self) -> None: ...
    def explain(self) -> str: ...
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
    def stretches(self, read: Callable[[int, int], npt.ArrayLike], n_samples: int,
                  **params: float) -> list[tuple[float, float]]: ...
    def names(self, pattern: str = "*") -> tuple[_Spec, ...]: ...
    def capture(self, patterns: str | Sequence[str], samples: npt.ArrayLike) -> dict[str, npt.NDArray[np.float32]]: ...
    def free(self) -> None: ...

class _Finetuning:
    peak: int
    n_steps: float
    n_params: int

def load_model(path: _Path | None = None, backend: str | Backend = "CPU", n_threads: int | None = None,
               reserve: bool = True, n_gpu_layers: int | None = None, cpu_moe: bool = False, strict: bool = True,
               validate: bool = False, lora: Sequence[_Path | tuple[_Path, float]] = (),
               devices: Sequence[Device | str] | None = None,
               override_tensor: Mapping[str, str] | Sequence[tuple[str, str]] = (), vision: _Path | None = None, *,
               n_ctx: int | None = None, n_batch: int = 512, kv_type: str = "F16", flash: bool = True,
               n_seqs: int | None = None, n_cells: int | None = None,
               rope_scaling: Literal["none", "linear", "yarn"] | None = None, rope_freq_base: float | None = None,
               rope_freq_scale: float | None = None, rope_scale: float | None = None,
               yarn_ext_factor: float | None = None, yarn_attn_factor: float | None = None,
               yarn_beta_fast: float | None = None, yarn_beta_slow: float | None = None,
               yarn_orig_ctx: int | None = None, pooling: Literal["none", "mean", "cls", "last", "rank"] | None = None,
               repack: bool | None = None, arena: int | str | None = None) -> _Network: ...
def finetune(model: _Path | None = None, data: _Path | Sequence[int] | npt.NDArray[Any] | None = None,
             out: _Path | None = None, rank: int = 8, alpha: float | None = None, targets: Sequence[str] | None = None,
             n_ctx: int | None = None, memory: int | None = None, epochs: int | None = None, steps: int | None = None,
             lr: float | Callable[[int], float] | None = None, batch: int = 1, seed: int = 0,
             n_threads: int | None = None, checkpoint: _Path | None = None,
             callback: Callable[[History], Any] | None = None, progress: bool = True,
             on_plan: Callable[[_Finetuning], Any] | None = None, force: bool = False,
             sample: str | None = None) -> History: ...
def embed_texts(model: _Path, texts: Sequence[str], cluster: Any = None, keep: _Path | None = None, n_part: int = 32,
                progress: Callable[[int], object] | None = None) -> npt.NDArray[np.float32]: ...
def generate_texts(model: _Path, texts: Sequence[str], cluster: Any = None, keep: _Path | None = None,
                   n_part: int = 32, progress: Callable[[int], object] | None = None,
                   load: Mapping[str, Any] | None = None, **options: Any) -> list[str]: ...
def token_seconds(weights_nbytes: float, nbytes_per_second: float, trip_seconds: float, crossing_nbytes: float = 0,
                  link_nbytes_per_second: float | None = None) -> float: ...
def load_gguf(path: _Path, ctx: Context | None = None) -> tuple[dict[str, Tensor], Mapping[str, Any]]: ...
def load_safetensors(path: _Path, ctx: Context | None = None) -> dict[str, Tensor]: ...
def save_gguf(path: _Path, tensors: Mapping[str, Tensor | npt.NDArray[Any]],
              metadata: Mapping[str, Any] | None = None) -> None: ...
def save_safetensors(path: _Path, tensors: Mapping[str, Tensor | npt.NDArray[Any]],
                     metadata: Mapping[str, str] | None = None) -> None: ...
def tensor_split(model: Any, n_devices: int) -> Callable[[Tensor], Any]: ...
def load_vad(path: _Path, backend: str | Backend = "CPU", n_threads: int = 1,
             conv_type: Literal["F32", "F16"] = "F32") -> _SileroVad: ...

class _Word(NamedTuple):
    start: float
    end: float
    word: str
    probability: float
    @property
    def text(self) -> str: ...

class _Segment:
    id: int
    start: float
    end: float
    text: str
    tokens: list[int]
    words: list[_Word]
    temperature: float
    mean_logp: float
    compression_ratio: float
    no_speech: float
    def as_dict(self) -> dict[str, Any]: ...

class _Language(NamedTuple):
    language: str
    probability: float
    probabilities: dict[str, float]

class _Transcript:
    name: str
    seconds: float
    notes: list[str]
    language: str
    languages: _Language
    def __iter__(self) -> Iterator[_Segment]: ...
    @property
    def segments(self) -> list[_Segment]: ...
    @property
    def text(self) -> str: ...
    @property
    def words(self) -> list[_Word]: ...
    def as_dict(self) -> dict[str, Any]: ...
    def to_srt(self, words: bool = False) -> str: ...
    def to_vtt(self, words: bool = False) -> str: ...

class _LiveTranscript:
    words: list[_Word]
    pending: list[_Word]
    delays: list[float]
    busy: float
    language: str | None
    @property
    def text(self) -> str: ...
    @property
    def seconds(self) -> float: ...
    @property
    def delay(self) -> float: ...
    def feed(self, samples: npt.ArrayLike) -> list[_Word]: ...
    def finish(self) -> list[_Word]: ...

_Sound = _Path | npt.ArrayLike

class _Speech:
    network: Any
    vocab: Any
    def __enter__(self) -> _Speech: ...
    def __exit__(self, *exc: object) -> None: ...
    def transcribe(self, sound: _Sound, language: str | None = None, task: Literal["transcribe", "translate"] = ...,
                   beam: int = 1, timestamps: bool = True, word_timestamps: bool = False,
                   prompt: str | Sequence[int] | None = None, vad: bool | _SileroVad = True, *,
                   sample_rate: int = 16000, temperature: float | Sequence[float] = ..., best_of: int = 5,
                   patience: float = 1.0, compression_ratio_threshold: float = 2.4, logprob_threshold: float = -1.0,
                   no_speech_threshold: float = 0.6, condition_on_previous_text: bool = True,
                   suppress_non_speech: bool = False, audio_ctx: int | Literal["auto"] | None = None, batch: int = 1,
                   seed: int = 0,
                   progress: Callable[[float], object] | None = None) -> _Transcript: ...
    def stream(self, step: float = 1.0, longest: float = 20.0, sample_rate: int = 16000,
               **options: Any) -> _LiveTranscript: ...
    def names(self, pattern: str = "*") -> tuple[_Spec, ...]: ...
    def capture(self, patterns: str | Sequence[str], sound: _Sound,
                tokens: Sequence[int] | None = None) -> dict[str, npt.NDArray[np.float32]]: ...
    def patch(self, changes: Mapping[str, Callable[[npt.NDArray[Any]], Any] | npt.ArrayLike]) \
        -> AbstractContextManager[None]: ...
    def spectrogram(self, sound: _Sound, words: Sequence[_Word] = (), sample_rate: int = 16000) -> Any: ...
    def listening(self, sound: _Sound, language: str | None = None, task: Literal["transcribe", "translate"] = ...,
                  sample_rate: int = 16000) -> Any: ...
    def detect_language(self, sound: _Sound, sample_rate: int = 16000) -> _Language: ...
    def log_mel(self, sound: _Sound, sample_rate: int = 16000) -> npt.NDArray[np.float32]: ...
    def encode(self, sound: _Sound, audio_ctx: int | None = None) -> npt.NDArray[np.float32]: ...
    def logits(self, tokens: Sequence[int]) -> npt.NDArray[np.float32]: ...
    def free(self) -> None: ...

def load_speech(path: _Path | None = None, n_threads: int | None = None, backend: str | Backend = "CPU",
                kv_type: Literal["F16", "F32"] | None = None, gelu: Literal["exact", "ggml"] = "exact",
                repack: bool | None = None) -> _Speech: ...

class OwnWeights:
    damaged: list[str]
    def __init__(self, directory: _Path) -> None: ...
    def get(self, key: bytes, nbytes: int) -> npt.NDArray[np.uint8] | None: ...

class _ImportanceSums:
    values: npt.NDArray[np.float32]
    counts: npt.NDArray[np.float32]
    plain: npt.NDArray[np.float32] | None
    @property
    def importances(self) -> npt.NDArray[np.float32]: ...

class _Imatrix:
    sums: dict[str, _ImportanceSums]
    datasets: tuple[str, ...]
    n_chunks: int
    chunk_size: int
    path: str
    def save(self, path: _Path, force: bool = False) -> None: ...

class _ControlVector:
    directions: dict[int, npt.NDArray[np.float32]]
    arch: str
    path: str
    def save(self, path: _Path) -> None: ...
    def __mul__(self, factor: float) -> _ControlVector: ...
    def __rmul__(self, factor: float) -> _ControlVector: ...

def load_control_vector(path: _Path) -> _ControlVector: ...
def make_control_vector(m: _Network, positive: Sequence[str], negative: Sequence[str],
                        method: Literal["pca", "mean"] = "pca") -> _ControlVector: ...
def load_imatrix(path: _Path) -> _Imatrix: ...
def quantize_gguf(path: _Path, out: _Path, type: str | Type, imatrix: _Path | _Imatrix | None = None,
                  tensor_types: Mapping[str, str | Type] | None = None, output_type: str | Type | None = None,
                  embedding_type: str | Type | None = None, leave_output: bool = False, pure: bool = False,
                  requantize: bool = False, keep_split: bool = False, max_nbytes: int | None = None,
                  force: bool = False, progress: bool = True) -> dict[str, Any]: ...
def convert_folder(folder: _Path, out: _Path, type: str = "AUTO", pre: str | None = None, vocabulary: bool = True,
                   force: bool = False, progress: bool = True, mmproj: _Path | None = None) -> dict[str, Any]: ...
def edit_gguf(path: _Path, out: _Path, set_keys: Mapping[str, Any] | None = None, remove_keys: Sequence[str] = (),
              rename: Mapping[str, str] | None = None, set_types: Mapping[str, str | Type] | None = None,
              max_nbytes: int | None = None, force: bool = False, progress: bool = True,
              lora: Sequence[_Path | tuple[_Path, float]] = ()) -> dict[str, Any]: ...
def measure_imatrix(m: _Network, data: str | Sequence[int], n_ctx: int | None = None, n_chunks: int | None = None,
                    output: bool = False, dataset: str = "", progress: bool = True) -> _Imatrix: ...
def perplexity(m: _Network, data: str | Sequence[int] | None, n_ctx: int | None = None, n_chunks: int | None = None,
               base: _Network | _Path | None = None, save_logits: _Path | None = None,
               progress: bool = True, force: bool = False) -> dict[str, Any]: ...
