"""All architectures that have a description."""
from ggjit.models.families import gemma, layer_norm, llama, qwen, rms_norm

DECODERS = {**llama.FAMILY, **qwen.FAMILY, **gemma.FAMILY, **rms_norm.FAMILY, **layer_norm.FAMILY}
