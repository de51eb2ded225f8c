"""A llama that helpers/numpy_llama.py computes too: its file, and the model of a whole test file."""
import pytest
from helpers import tiny_model

from ggjit.models import load_model


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny_model.write(tmp_path_factory.mktemp("model") / "tiny.gguf",
                            shapes={"output.weight": (tiny_model.VOCAB, tiny_model.DIM)})


@pytest.fixture(scope="module")
def model(path):
    with load_model(path, n_threads=1, kv_type="F32") as m:
        yield m
