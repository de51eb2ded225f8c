"""The vision and audio networks of one mmproj file, beside a decoder."""
import numpy as np

from ggjit.models.networks.base.load_options import LoadOptions
from ggjit.models.networks.parts.picture_tokens import PictureTokens
from ggjit.models.networks.pictures.conformer import Conformer
from ggjit.models.networks.pictures.hearing import CONFORMER, EARS, Hearing, HearingFile
from ggjit.models.networks.pictures.mobilenet import MobileNet
from ggjit.models.networks.pictures.projectors import MOBILENET
from ggjit.models.networks.pictures.tower import senses_of
from ggjit.models.networks.pictures.vision import Vision, VisionFile
from ggjit.ops.core.errors import ModelError, NotSupported, ParamError

OTHERS = {MOBILENET: MobileNet, CONFORMER: Conformer}       # which are no towers of like blocks


def vision_of(path, options):
    """The network that sees of an mmproj file.  Errors: BadFile, ModelError, NotSupported."""
    file = VisionFile(path)
    return OTHERS.get(file.projector, Vision)(file, options)


def hearing_of(path, options):
    """The network that hears of an mmproj file.  Errors: BadFile, ModelError, NotSupported."""
    file = HearingFile(path)
    return OTHERS.get(file.projector, Hearing)(file, options)


def load(decoder, path):
    """Load `.vision` and `.hearing` beside a decoder, on its backend; of a file with both, what sees alone where what
    hears is of a family that is not supported.

    Errors: ModelError where they do not belong together, ParamError for batches that hold no picture.
    """
    senses = senses_of(path)
    if senses != ["audio"]:
        decoder.vision = _loaded(vision_of, path, decoder)
    if "audio" in senses and (decoder.vision is None or HearingFile(path).projector in (*EARS, *OTHERS)):
        decoder.hearing = _loaded(hearing_of, path, decoder)
    decoder.pictures = PictureTokens(decoder.n_vocab)
    most = decoder.vision.family.most(decoder.vision) if decoder.vision is not None and decoder.vision.sees_all else 0
    if most > decoder.n_batch:
        raise ParamError(f"n_batch = {decoder.n_batch}: a picture of {path} is read at once, and has {most} vectors")


def _loaded(network_of, path, decoder):
    o = decoder.options
    network = network_of(path, LoadOptions(o.backend, o.n_threads, repack=o.repack, strict=o.strict, reserve=False))
    try:
        check_pair(path, network, decoder)
    except BaseException:
        network.free()
        raise
    network._code = decoder._code               # what it compiles counts there
    return network


def check_pair(path, tower, decoder):
    """ModelError, where the decoder reads other vectors, or tells their positions in another way."""
    about, n, family = decoder.description, tower.n_out, tower.family
    n_deep = family.n_deep
    if n_deep != about.n_deep:
        raise ModelError(f"{path} makes vectors for {n_deep} layers behind the first, {decoder.file.path} reads them "
                         f"in {about.n_deep}: they are not of one model")
    if n != decoder.n_embd * (1 + n_deep):
        raise ModelError(f"{path} makes vectors of {n // (1 + n_deep)} numbers, {decoder.file.path} reads "
                         f"{decoder.n_embd}: they are not of one model")
    if family.has_grid != about.has_grid:
        one, other = ("has", "tells no") if family.has_grid else ("has no", "tells")
        raise ModelError(f"{path} {one} rows and columns of vectors, {decoder.file.path} {other} such positions apart "
                         f"(rope.dimension_sections): they are not of one model")


# ---------------------------------------------------------------- methods of Decoder
def encode_image(self, image):
    """float32 (n, n_embd): what the decoder reads of a picture, all its tiles; load_model(path, vision=mmproj).

    image: a path, the bytes of a file, or an array uint8 (height, width, 3).  Of Qwen 3 VL: (n, n_embd (1 + k)),
    since its first k layers add vectors, too.

        m.encode_image("cat.jpg").shape

    Errors: NotSupported without a vision part; BadFile, ParamError, ShapeError, TypeMismatch for what is no
    picture.
    """
    if self.vision is None:
        raise NotSupported(f"{self.file.path} sees nothing alone; load_model(path, vision=\"mmproj.gguf\")")
    return np.concatenate(self.vision.encode_packed(image))


def encode_audio(self, sound):
    """float32 (n, n_embd): what the decoder reads of a sound, in windows of 30 s; load_model(path, vision=mmproj).

    sound: a path, the bytes of a file, samples at 16 kHz, or (samples, rate).

        m.encode_audio("talk.wav").shape

    Errors: NotSupported without a part that hears; BadFile, ParamError, ShapeError, TypeMismatch for what is no
    sound.
    """
    if self.hearing is None:
        raise NotSupported(f"{self.file.path} hears nothing alone; load_model(path, vision=\"mmproj.gguf\") "
                           f"with a part that hears (Gemma 4, Ultravox, Qwen2-Audio, Voxtral)")
    return self.hearing.encode(sound)
