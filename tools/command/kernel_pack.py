"""Chooses the kernels of a pack: those of the cache, or those that a model needs."""
from ggjit.models.networks.load import load_model
from ggjit.ops.core.errors import ParamError
from ggjit.ops.core.traits import is_kept
from ggjit.ops.native import cache_files, kernel_pack
from ggjit.ops.native.jit import CACHE, sources_key


def export(path, model=None):
    """Write the kernels of the cache, or those that a model needs, into a pack: their number.

    Errors: ParamError for an empty cache, OSError.
    """
    folder, found = cache_files.cache_dir() / "kernels", {}
    for file in sorted(folder.glob("*.o")) if model is None else _kernels_of(model, folder):
        try:
            payload = cache_files.read(file)
        except cache_files.Unusable:        # the next process that needs it compiles it again
            continue
        if payload is not None and kernel_pack.NAME.fullmatch(file.name):
            found[file.name] = payload
    if not found:
        raise ParamError(f"no kernels in {folder}; `ggjit warm-up MODEL` compiles those of a model")
    kernel_pack.write(path, found)
    return len(found)


def _kernels_of(model, folder):
    """Files of the kernels that the model's common graphs use, compiled now if they are not there."""
    with load_model(model) as network:
        network.warm_up()
    return [folder / f"{name}-{sources_key(tuple(sorted(modules)))}.o" for name, modules in sorted(CACHE.addresses)
            if is_kept(modules)]
