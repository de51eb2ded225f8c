"""The families of vision networks, by the projector that the file names."""
from typing import Any

from ggjit.models.networks.pictures.free_projectors import Gemma4Vision, KimiVL, Pixtral, Qwen2, Qwen3, Qwen25
from ggjit.models.networks.pictures.sliced_projectors import MiniCPM46, Resampler
from ggjit.models.networks.pictures.square_projectors import Gemma3, Idefics3, InternVL, Llama4, Llava, LlavaNext
from ggjit.ops.core.errors import NotSupported

PROJECTORS: dict[str, Any] = {
    "mlp": Llava, "gemma3": Gemma3, "gemma4v": Gemma4Vision, "idefics3": Idefics3, "pixtral": Pixtral,
    "qwen2vl_merger": Qwen2, "qwen2.5vl_merger": Qwen25, "qwen3vl_merger": Qwen3, "kimivl": KimiVL,
    "internvl": InternVL, "llama4": Llama4, "resampler": Resampler, "minicpmv4_6": MiniCPM46}

MOBILENET = "gemma3nv"          # has a network of its own


def family_of(projector, file):
    """The family; LLaVA 1.6 has LLaVA's projector, and sizes of tiles.  Errors: NotSupported."""
    if projector not in PROJECTORS:
        raise NotSupported(f"{file.path}: projector {projector!r} is not supported; supported: "
                           f"{', '.join((*PROJECTORS, MOBILENET))}")
    kind = PROJECTORS[projector]
    return (LlavaNext if kind is Llava and file.arch_get("image_grid_pinpoints", None) is not None else kind)()
