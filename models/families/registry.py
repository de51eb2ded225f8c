"""All architectures that have a description."""
from ggjit.models.families import gemma, llama, qwen

DECODERS = {**llama.FAMILY, **qwen.FAMILY, **gemma.FAMILY}
