"""Real networks on the engine: GGUF files, tokenizers, bert, llama, sampling, Silero VAD.

    from ggjit.models import load_model, load_vad
    m = load_model("model.gguf")
    for piece in m.generate("Once upon a time"): print(piece, end="")
    load_vad("silero.bin").segments(samples)            # stretches of speech

Read networks/load.py first.  files/: model files, read, mapped and written; text/: text <-> token ids, sampling;
convert/: Hugging Face folders as GGUF files; blocks/: the pieces of networks; families/: the architectures, each a
description of pieces; networks/: what runs them; core/: checks of arguments and progress bars, used by all of them.
"""
if not __name__.startswith("ggjit"):
    raise ImportError("import ggjit, not a folder of the checkout: the repository root is on sys.path")

import ggjit.names  # what using ggjit registers: a line while kernels are compiled, pictures of graphs
from ggjit.models.convert.convert import convert_folder
from ggjit.models.files.control_vector import load_control_vector
from ggjit.models.files.imatrix import load_imatrix
from ggjit.models.files.load_tensors import load_gguf, load_safetensors
from ggjit.models.files.own_weights import OwnWeights
from ggjit.models.files.rewrite import edit_gguf, quantize_gguf
from ggjit.models.files.save import save_gguf, save_safetensors
from ggjit.models.files.smollm2 import smollm2_path
from ggjit.models.networks.bulk import embed_texts, generate_texts
from ggjit.models.networks.diff import diff
from ggjit.models.networks.evaluate import measure_imatrix, perplexity
from ggjit.models.networks.finetune import finetune
from ggjit.models.networks.fit import fit
from ggjit.models.networks.load import load_model
from ggjit.models.networks.pareto import pareto
from ggjit.models.networks.parts.steering import make_control_vector
from ggjit.models.networks.placement.device_map import token_seconds
from ggjit.models.networks.placement.tensor_split import tensor_split
from ggjit.models.networks.sounds.silero import load_vad
from ggjit.models.speech.speech import load_speech
