"""What vision networks get of a picture: fields to the bit as transformers' processors make them, and their numbers."""
import json
from types import SimpleNamespace

import numpy as np
import pytest
from helpers.paths import TESTS
from helpers.seen_by_transformers import MEAN, PINPOINTS, digest, picture

from ggjit.models.networks.pictures import tiles, vision_input
from ggjit.models.networks.pictures.vision_input import patches

GOLDENS = json.loads((TESTS / "models" / "seen_goldens.json").read_text())
GRIDS = sorted(((a, b) for a in range(1, 13) for b in range(1, 13) if a * b <= 12), key=np.prod)
FAMILIES = {                        # what sees; sizes as seen_by_transformers.py has them
    "gemma3": (vision_input.stretched, {"image_size": 32}, {}),
    "llava": (vision_input.padded, {"image_size": 24}, {}),
    "llava16": (tiles.anyres, {"image_size": 24}, {"sizes": [(w, h) for h, w in PINPOINTS]}),
    "idefics3": (tiles.enlarged, {"image_size": 16, "longest_edge": 64}, {}),
    "pixtral": (vision_input.bounded, {"image_size": 96}, {}),
    "internvl": (tiles.closest_grid, {"image_size": 24}, {"grids": GRIDS}),
    "qwen2": (vision_input.near, {}, {"pixels": lambda about: (4 * 64, 400 * 64)}),
    "gemma4": (vision_input.budgeted, {"n_merge": 3}, {"most_vectors": 280}),
    "minicpm46": (tiles.slices, {"image_size": 32, "n_merge": 4}, {})}


def seen(family, x):
    see, sizes, own = FAMILIES[family]
    about = {"patch_size": 4, "n_merge": 2, "mean": np.array(MEAN, np.float32), "family": SimpleNamespace(**own)}
    return see(x, SimpleNamespace(**about | sizes))


@pytest.mark.parametrize("family", FAMILIES)
def test_fields_are_those_of_transformers(family):
    assert len(GOLDENS[family]) >= 7
    for seed, h, w, want in GOLDENS[family]:
        assert [digest(field) for field in seen(family, picture(seed, h, w)).fields] == want, (h, w)


def test_a_canvas_is_the_smallest_that_holds_the_picture():
    """Llama 4's: (300, 200) in tiles of 224 is (448, 224), black at the right and below; a small picture is not
    enlarged beyond a tile; a large one has 16 tiles at most."""
    about = SimpleNamespace(image_size=224)
    x = tiles.canvas(np.full((200, 300, 3), 9, np.uint8), about)
    assert x.grid == (2, 1) and len(x.fields) == 3
    assert (x.fields[0][:200] == 9).all() and (x.fields[1][:200, :76] == 9).all()
    assert not x.fields[0][200:].any() and not x.fields[1][:, 76:].any() and (x.fields[2] == 9).all()
    assert tiles.canvas(np.full((100, 100, 3), 9, np.uint8), about).grid == (0, 0)
    for width, height, want in ((10000, 10000, (4, 4)), (100, 9000, (1, 16)), (448, 448, (2, 2)), (600, 100, (3, 1))):
        assert tiles.best_canvas(width, height, 224) == want


def test_what_a_vector_lacks_is_black():
    """Kimi-VL's: sizes stay, up to so many patches; sides are filled up to whole vectors."""
    family = SimpleNamespace(most_patches=40, longest_row=511)
    about = SimpleNamespace(patch_size=4, n_merge=2, family=family)
    x, = vision_input.edged(np.full((17, 9, 3), 200, np.uint8), about).fields
    assert x.shape == (24, 16, 3) and (x[:17, :9] == 200).all() and not x[17:].any() and not x[:, 9:].any()
    x, = vision_input.edged(np.full((80, 40, 3), 200, np.uint8), about).fields
    assert x.shape == (40, 24, 3) and (x[:35, :17] == 200).all()            # sqrt(40 / 200) of it
    x, = vision_input.edged(np.full((1, 9000, 3), 200, np.uint8), about).fields
    assert x.shape == (8, 2040, 3)


@pytest.mark.parametrize("side", [4, 14])
def test_patches_are_the_numbers_of_their_pixels(side):
    rng = np.random.default_rng()
    field = rng.integers(0, 256, (3 * side, 5 * side, 3), dtype=np.uint8)
    order = rng.permutation(15)
    mean, std = (rng.uniform(0.2, 0.6, 3).astype(np.float32) for _ in range(2))
    x = ((field.astype(np.float32) / np.float32(255) - mean) / std).transpose(2, 0, 1)
    want = x.reshape(3, 3, side, 5, side).transpose(1, 3, 0, 2, 4).reshape(15, -1)[order]
    np.testing.assert_array_equal(patches(field, side, order, mean, std), want)
