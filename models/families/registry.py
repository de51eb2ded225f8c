"""All architectures that have a description, found in the files of this folder: their DECODERS, ENCODERS,
DIFFUSERS and DRAFTERS."""
from ggjit.ops.core.discovery import modules_below


def _found(attribute):
    """{architecture: function from HParams to Description} of all dicts of that name."""
    return {arch: describe for module in modules_below("ggjit.models.families")
            for arch, describe in getattr(module, attribute, {}).items()}


DECODERS, ENCODERS, DIFFUSERS, DRAFTERS = map(_found, ("DECODERS", "ENCODERS", "DIFFUSERS", "DRAFTERS"))
