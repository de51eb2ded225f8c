"""A small random Whisper: its tensors, file and model, a sound, and what the reference makes of it."""
import numpy as np
import pytest
from helpers.whisper_reference import SIZES, Reference, random_tensors, write_bin

from ggjit.models import load_speech


@pytest.fixture(scope="module")
def tensors():
    return random_tensors()


@pytest.fixture(scope="module")
def small(tensors, tmp_path_factory):
    return write_bin(tmp_path_factory.mktemp("whisper") / "small.bin", tensors)


@pytest.fixture(scope="module")
def model(small):
    with load_speech(small, n_threads=1) as m:
        yield m


@pytest.fixture(scope="module")
def mel():
    return np.random.default_rng(5).uniform(-1, 1, (80, 2 * SIZES["n_audio_ctx"])).astype(np.float32)


@pytest.fixture(scope="module")
def encoded(tensors, mel):
    return Reference(tensors, 2).encode(mel)
