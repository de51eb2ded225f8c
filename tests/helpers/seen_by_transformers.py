"""What the image processors of transformers make of random pictures, as digests for tests/models/test_seen.py.

    python -m helpers.seen_by_transformers > models/seen_goldens.json         in tests/; needs transformers and torch

Processors are Pillow's.  Rows: [seed, height, width, [[height, width, digest of the bytes], ...]].
"""
import hashlib
import json
import sys

import numpy as np

SIZES = [(40, 61), (17, 90), (7, 5), (300, 23), (150, 150), (64, 32), (200, 333), (24, 24), (90, 400)]
PINPOINTS = [[24, 48], [48, 24], [48, 48], [72, 24], [24, 72]]              # height, width
MEAN = [0.48145466, 0.4578275, 0.40821073]


def picture(seed, height, width):
    """uint8 (height, width, 3), smooth with an edge."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:height, :width]
    waves = [np.sin(x / rng.uniform(3, 20) + y / rng.uniform(3, 20)) * 100 + 128 for _ in range(3)]
    out = np.rint(np.stack(waves, 2)).astype(np.uint8)
    out[height // 3:height // 2, width // 4:width // 2] = rng.integers(0, 256, 3)
    return out


def digest(field):
    return [*field.shape[:2], hashlib.blake2b(np.ascontiguousarray(field).tobytes(), digest_size=8).hexdigest()]


# ---------------------------------------------------------------- with transformers alone
def _bytes(x):
    """uint8 (h, w, 3) of (3, h, w)."""
    x = np.asarray(x)
    assert np.array_equal(x, np.rint(x)) and x.min() >= 0 and x.max() <= 255
    return x.astype(np.uint8).transpose(1, 2, 0)


def _patched(x, p, rows, columns):
    """uint8 (h, w, 3) of patches (n, p p 3)."""
    x = np.asarray(x)[:rows * columns].reshape(rows, columns, p, p, 3).swapaxes(1, 2)
    return _bytes(x.reshape(rows * p, columns * p, 3).transpose(2, 0, 1))


def processors():
    """{family: function of a picture that gives its fields}"""
    import transformers as t
    raw = {"do_rescale": False, "do_normalize": False}

    def processor(name, **options):
        return getattr(t, name)(**raw, **options)

    def images(name, **options):
        p = processor(name, **options)
        return lambda x: [_bytes(y) for y in np.asarray(p(images=[x]).pixel_values).reshape(-1, *p_shape(p, x))]

    def p_shape(p, x):
        return np.asarray(p(images=[x]).pixel_values).shape[-3:]

    def qwen(x):
        p = processor("Qwen2VLImageProcessorPil", patch_size=4, merge_size=2, temporal_patch_size=2, min_pixels=4 * 64,
                      max_pixels=400 * 64, size={"shortest_edge": 4 * 64, "longest_edge": 400 * 64})
        out = p(images=[x])
        _, rows, columns = np.asarray(out.image_grid_thw)[0].tolist()
        y = np.asarray(out.pixel_values).reshape(rows // 2, columns // 2, 2, 2, 3, 2, 4, 4)[..., 0, :, :]
        return [_bytes(y.transpose(4, 0, 2, 5, 1, 3, 6).reshape(3, rows * 4, columns * 4))]

    def gemma4(x):
        p = processor("Gemma4ImageProcessorPil", patch_size=4, max_soft_tokens=280, pooling_kernel_size=3)
        out = p(images=[x])
        at = np.asarray(out.image_position_ids)[0]
        columns, rows = (at.max(0) + 1).tolist()
        return [_patched(np.asarray(out.pixel_values)[0], 4, rows, columns)]

    def minicpm46(x):
        p = processor("MiniCPMV4_6ImageProcessorPil", patch_size=4, scale_resolution=32)
        out = p(images=[x])
        y, fields, at = np.asarray(out.pixel_values)[0], [], 0
        for rows, columns in np.asarray(out.target_sizes).tolist():
            part = y[:, :, at:at + 4 * rows * columns].reshape(3, 4, rows, columns, 4)
            fields.append(_bytes(part.transpose(0, 2, 1, 3, 4).reshape(3, 4 * rows, 4 * columns)))
            at += 4 * rows * columns
        return fields
    return {
        "gemma3": images("Gemma3ImageProcessorPil", size={"height": 32, "width": 32}),
        "llava": images("LlavaImageProcessorPil", do_pad=True, size={"shortest_edge": 24}, image_mean=MEAN,
                        crop_size={"height": 24, "width": 24}),
        "llava16": images("LlavaNextImageProcessorPil", size={"shortest_edge": 24}, do_pad=False,
                          crop_size={"height": 24, "width": 24}, image_grid_pinpoints=PINPOINTS),
        "idefics3": images("Idefics3ImageProcessorPil", size={"longest_edge": 64}, max_image_size={"longest_edge": 16}),
        "pixtral": images("PixtralImageProcessorPil", size={"longest_edge": 96}, patch_size={"height": 8, "width": 8}),
        "internvl": images("GotOcr2ImageProcessorPil", size={"height": 24, "width": 24}, crop_to_patches=True,
                           min_patches=1, max_patches=12),
        "qwen2": qwen, "gemma4": gemma4, "minicpm46": minicpm46}


def main():
    out = {}
    for family, see in processors().items():
        rows = []
        for seed, (h, w) in enumerate(SIZES):
            try:
                rows.append([seed, h, w, [digest(field) for field in see(picture(seed, h, w))]])
            except ValueError as e:             # proportions that it refuses
                print(f"{family} {h} x {w}: {e}", file=sys.stderr)
        out[family] = rows
    print("{" + ",\n".join(f"\n{json.dumps(k)}: [\n" + ",\n".join(json.dumps(r) for r in rows) + "]"
                           for k, rows in out.items()) + "}")


if __name__ == "__main__":
    main()
