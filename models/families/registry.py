"""All architectures that have a description."""
from ggjit.models.families import (
    deepseek,
    encoders,
    experts,
    gemma,
    hybrid,
    kimi,
    layer_norm,
    llama,
    qwen,
    recurrent,
    rms_norm,
    t5,
    windowed_experts,
)

DECODERS = {**llama.FAMILY, **qwen.FAMILY, **gemma.FAMILY, **rms_norm.FAMILY, **layer_norm.FAMILY, **deepseek.FAMILY,
            **experts.FAMILY, **recurrent.FAMILY, **hybrid.FAMILY, **windowed_experts.FAMILY,
            **kimi.FAMILY, **t5.FAMILY}

ENCODERS = encoders.FAMILY
