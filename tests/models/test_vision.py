"""Pictures in: libmtmd's vectors and logits, transformers' LLaVA, pictures as tokens, what is no picture."""
import base64
import io

import numpy as np
import pytest
from helpers import vision_files as files
from helpers.llamacpp import computed
from helpers.requirements import shared

import ggjit as gg
from ggjit.models import load_model
from ggjit.models.files.picture import MAX_PIXELS, read_picture
from ggjit.models.files.resample import resized
from ggjit.models.networks.base.load_options import LoadOptions
from ggjit.models.networks.parts.picture_tokens import PictureTokens
from ggjit.models.networks.peak import model_peak
from ggjit.models.networks.pictures import senses
from ggjit.models.networks.pictures.vision_input import kept_proportions
from ggjit.models.text.picture_prompt import ids_with_pictures, pictures_and_sounds, without_pictures
from ggjit.tools.command.main import main

# transformers' CLIPVisionModel(...).hidden_states[-2] of clip_tensors, then the two matrices with a GELU between
LLAVA = [[1.4664, -2.2047, 0.548, 0.1014, -1.9372], [0.6696, -1.8839, 0.1384, -0.3984, -1.6211],
         [0.4404, -1.4522, -1.0346, -0.2973, 0.1065]]


def vision_of(path):
    return senses.vision_of(path, LoadOptions(n_threads=1, reserve=False))


@pytest.fixture
def small(tmp_path):
    """(path of a llama with a vocabulary, function that loads it with a vision part)."""
    path = files.write_text(shared("tools"), tmp_path / "text.gguf")

    def load(name="gemma3", **options):
        mmproj = files.write(name, tmp_path / f"{name}.gguf")
        text = path
        if name in files.DECODER:
            text = files.write_text(shared("tools"), tmp_path / f"{name}-text.gguf", name)
        return load_model(text, n_threads=1, n_ctx=512, kv_type="F32", vision=mmproj, **options)
    return path, load


def libmtmd(name, folder):
    """Its vectors and logits.  With Mistral 3 some of its processes answer NaN, others do not: the next is asked."""
    for _ in range(8):
        want = computed("vision_files", name, folder, "vectors.npz")
        if all(np.isfinite(want[k]).all() for k in want):
            break
    return want


@pytest.mark.peer
@pytest.mark.parametrize("name", files.NAMES)
def test_against_libmtmd(name, tmp_path, need):
    """Vectors of every field, and the logits behind a prompt with two pictures.  There, GELU is read from a table, and
    what goes into MobileNet's convolutions by channel is rounded to F16."""
    need("xllamacpp", "llama.cpp is the oracle")
    most = 6e-3 if name == "gemma3nv" else 2e-3
    want = libmtmd(name, tmp_path)
    with load_model(tmp_path / "text.gguf", n_threads=1, n_ctx=1024, kv_type="F32", flash=False,
                    vision=tmp_path / "vision.gguf") as m:
        for n, (h, w) in enumerate(files.WHOLE.get(name, files.PICTURES)):
            got = m.vision.encode(files.picture(n, h, w))
            theirs = [want[k] for k in want if k.startswith(f"{n}.")]
            assert [g.shape for g in got] == [t.shape for t in theirs]
            assert m.vision.tokens_of(w, h) == len(m.encode_image(files.picture(n, h, w)))
            for ours, other in zip(got, theirs, strict=True):
                if name == "llama4":            # llama.cpp has them column by column, the model row by row
                    other = other.reshape(3, 3, -1).swapaxes(0, 1).reshape(other.shape)
                elif name in ("llava", "llava16"):          # it drops the first patch in place of the class embedding
                    ours, other = ours[1:], other[:-1]
                assert abs(ours - other).max() <= most * abs(other).max()
        if name in ("llama4", "llava", "llava16"):      # it leaves out what is between the tiles
            return
        ids = ids_with_pictures(m, files.PROMPT, [want["told.0"], want["told.1"]])
        got = m.decode(ids)
        assert abs(got - want["logits"]).max() <= most * abs(want["logits"]).max()


def test_llava_is_that_of_transformers(tmp_path):
    """The class embedding comes first, at position 0; its vector is left out."""
    path = files.write("mlp", tmp_path / "v.gguf", tensors=files.clip_tensors())
    with vision_of(path) as v:
        got, = v.encode(files.picture(0, 24, 24))
        np.testing.assert_allclose(got[::12, :5], LLAVA, atol=2e-4)


# ---------------------------------------------------------------- pictures as tokens
@pytest.mark.parametrize("name", ["pixtral", "qwen25", "qwen3"])
def test_a_text_with_pictures_is_read_in_any_batches(name, small):
    _, load = small
    picture, other = files.picture(1, 40, 61), files.picture(2, 40, 61)
    with load(name) as m:
        ids = ids_with_pictures(m, "Is <__media__> like <__media__>?", [picture, other])
        whole = m.logits(ids)
        m.reset()
        parts = np.concatenate([m.decode(ids[i:i + 29], all_logits=True) for i in range(0, len(ids), 29)])
        np.testing.assert_allclose(parts, whole, atol=1e-4)
        swapped = ids_with_pictures(m, "Is <__media__> like <__media__>?", [other, picture])
        assert abs(m.logits(swapped)[-1] - whole[-1]).max() > 1e-3
        assert ids_with_pictures(m, "Is <__media__> like <__media__>?", [picture, other]) == ids


def test_vectors_of_gemma_see_those_behind_them(small):
    """Batches end before a picture that does not fit them whole; the last vector changes what follows the first."""
    _, load = small
    picture = files.picture(1, 40, 61)
    with load("gemma3", n_batch=8) as m:
        ids = ids_with_pictures(m, "a long text before <__media__> and behind", [picture])
        small_batches = m.logits(ids)
        pictures = [i for i, id in enumerate(ids) if id >= m.n_vocab]
        assert len(pictures) == 4 and all(len(b) <= 8 for b in m._batches(np.array(ids), m.n_batch))
        cut = [b for b in m._batches(np.array(ids), m.n_batch) if (b >= m.n_vocab).any()]
        assert len(cut) == 1 and (cut[0] >= m.n_vocab).sum() == 4
    with load("gemma3") as m:
        ids = ids_with_pictures(m, "a long text before <__media__> and behind", [picture])
        want = m.logits(ids)
        np.testing.assert_allclose(small_batches, want, atol=1e-4)
        _, vectors, columns = m.pictures._kept.popitem()[1]
        vectors[-1] += 1
        m.pictures._kept[m.pictures._firsts[0][1]] = m.n_vocab, vectors, columns
        changed = abs(m.logits(ids) - want).max(1)
        assert changed[pictures[0]] > 1e-4 and changed[pictures[0] - 1] == 0
    with pytest.raises(gg.ParamError, match="n_batch = 2: a picture of .* is read at once, and has 4 vectors"):
        load("gemma3", n_batch=2)


def test_generate_and_chat_take_pictures(small):
    _, load = small
    picture = files.picture(0, 24, 24)
    with load("idefics3") as m:
        g = m.generate("What is it?", n_predict=4, images=[picture])
        assert g.text == m.generate("<__media__>What is it?", n_predict=4, images=[picture]).text
        assert g.stats["prompt_tokens"] == len(g.prompt_ids) > 20 and g._repr_html_()
        past = m.n_past
        again = m.generate("What is it?", n_predict=4, images=[picture])
        assert again.text == g.text and m.n_past == past
        messages = [{"role": "user", "content": [{"type": "image", "image": picture}, {"type": "text", "text": "Hm?"}]}]
        p = m.chat_prompt(messages, template="chatml")
        assert "<__media__>Hm?" in p.text and sum(i >= m.n_vocab for i in p.ids) == m.vision.tokens_of(24, 24)
        assert m.chat(messages, 3, template="chatml", temp=0).text is not None
        many = m.generate([g.prompt_ids, [1, 2, 3]], n_predict=4)
        dict(many)
        assert many.texts[0] == g.text


def test_openai_s_form_of_a_message():
    png = base64.b64encode(b"x").decode()
    messages, found = without_pictures([{"role": "user", "content": [
        {"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{png}"}}]}])
    assert messages == [{"role": "user", "content": "a<__media__>"}] and found == [b"x"]
    for part, message in (({"type": "image_url", "image_url": {"url": "http://a/b.png"}}, "are not fetched"),
                          ({"type": "image", "picture": "x"}, "has no picture"),
                          ({"type": "image_url", "image_url": "data:image/png;base64,!"}, "is damaged")):
        with pytest.raises(gg.ParamError, match=message):
            without_pictures([{"role": "user", "content": [part]}])
    with pytest.raises(gg.ParamError, match="stands for a picture"):
        without_pictures([{"role": "user", "content": "say <__media__>"}])


def test_one_picture_needs_no_list():
    x = files.picture(0, 8, 9)
    for images, want in ((None, []), ("a.png", ["a.png"]), (b"x", [b"x"]), ((), []), (["a", "b"], ["a", "b"])):
        assert pictures_and_sounds(images, None) == want
    assert pictures_and_sounds(x, ())[0] is x and len(pictures_and_sounds(np.stack([x, x]), ())) == 2
    samples = np.zeros(9, np.float32)
    given = samples, (samples, 8000), (samples, np.int64(8000)), ("a.wav", "b.wav")
    (one,), (other,), (third,), two = (pictures_and_sounds((), a) for a in given)
    assert one.source is samples and other.source[1] == third.source[1] == 8000 and len(two) == 2
    with pytest.raises(gg.TypeMismatch, match="images is a list of pictures, got int"):
        pictures_and_sounds(5, ())
    with pytest.raises(gg.ParamError, match="'video', which is not text, picture or sound"):
        without_pictures([{"role": "user", "content": [{"type": "image", "image": "x"}, {"type": "video"}]}])


def test_pictures_that_were_forgotten_are_told(monkeypatch):
    from ggjit.models.networks.parts import picture_tokens
    monkeypatch.setattr(picture_tokens, "MAX_NBYTES", 100)
    p = PictureTokens(10)
    first, second = (p.ids_of(np.full((5, 4), x, np.float32)) for x in (1, 2))
    assert first.tolist() == [*range(10, 15)] and second.tolist() == [*range(15, 20)] and p.end == 20
    out = np.zeros((5, 4), np.float32), np.zeros((5, 1), np.float32)
    p.fill(second, *out)
    assert (out[0] == 2).all() and not out[1].any()
    with pytest.raises(gg.ParamError, match="was forgotten"):
        p.fill(first, *out)


def test_positions_have_rows_and_columns():
    """Two pictures among text, each position one more than the largest before it; the same in any parts."""
    p = PictureTokens(10)
    wide, high = (np.full((*shape, 4), shape[0], np.float32) for shape in ((2, 3), (4, 1)))
    ids = np.concatenate([[1, 2], p.ids_of(wide), [5], p.ids_of(high), p.ids_of(high), [6, 7]]).astype(np.int32)
    got, saved = p.positions(ids, 0, 0)
    assert got.tolist() == [[0, 1, 2, 2, 2, 2, 2, 2, 5, 6, 6, 6, 6, 10, 10, 10, 10, 14, 15],
                            [0, 1, 2, 2, 2, 3, 3, 3, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15],
                            [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 6, 6, 6, 10, 10, 10, 10, 14, 15]]
    assert saved == len(ids) - 16
    for cut in range(1, len(ids)):
        first, saved = p.positions(ids[:cut], 0, 0)
        rest, saved = p.positions(ids[cut:], cut, saved)
        assert np.concatenate([first, rest], 1).tolist() == got.tolist() and saved == len(ids) - 16


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "pixtral"])
def test_a_picture_is_dropped_whole_or_not_at_all(name, small):
    """Where positions have rows and columns, what stays is read again at its new positions."""
    _, load = small
    with load(name) as m:
        ids = ids_with_pictures(m, "is <__media__> like <__media__> or not?",
                                [files.picture(1, 24, 24), files.picture(2, 24, 40)])
        (first, end), (second, last) = m.pictures.runs(np.array(ids, np.int32))
        m.logits(ids)
        for n_keep, n_discard in ((first, 2), (0, first + 1), (end, second + 1 - end)):
            with pytest.raises(gg.NotSupported, match=rf"would cut the picture that is tokens ({first}|{second}) to"):
                m.shift_context(n_keep, n_discard)
            assert m.n_past == len(ids)
        m.shift_context(first, end - first)
        assert m.n_past == len(ids) - (end - first)
        got = m.decode([3, 4])
        stay = ids[:first] + ids[end:] + [3, 4]
        if name != "pixtral":
            np.testing.assert_allclose(got, m.logits(stay)[-1], atol=1e-4)


def test_attention_over_a_picture(small):
    """Rows sum up to 1, in the picture's order; windows of Qwen 2.5 look at nothing outside."""
    _, load = small
    with load("qwen25") as m:
        looks = m.vision.attention(files.picture(0, 120, 136))
        assert looks.grid == (30, 34) and list(looks.weights) == [0, 1, 2]
        for layer, w in looks.weights.items():
            np.testing.assert_allclose(w.sum(2), 1, atol=1e-4)
            seen = looks.seen(layer, patch=(1, 33)) > 0
            assert seen.all() if layer == 1 else seen[:28, 28:].all() and seen.sum() == 28 * 6
        with pytest.raises(gg.ParamError, match="the patch's row"):
            looks.seen(0, patch=(30, 0))
        before = m.encode_image(files.picture(0, 120, 136))
        assert m.vision.flash and (m.encode_image(files.picture(0, 120, 136)) == before).all()
    with load("minicpm46") as m:                # behind layer 1, four patches are one
        looks = m.vision.attention(files.picture(0, 32, 32))
        pytest.importorskip("matplotlib").use("Agg")
        frames = [(f.get_xy(), f.get_width()) for f in looks.plot(patch=(7, 5)).patches]
        assert frames == [((35 * k + 20, 28), 4) for k in (1, 2)] + [((3 * 35 + 16, 24), 8), ((20, 28), 4)]
        assert [looks.seen(i).shape for i in range(3)] == [(8, 8), (8, 8), (4, 4)]
        np.testing.assert_allclose(looks.seen(2, patch=(3, 3)).sum(), 1, atol=1e-4)
    with load("llava") as m:
        looks = m.vision.attention(files.picture(0, 24, 24))
        assert looks.weights[0].shape == (4, 36, 36) and (looks.weights[0].sum(2) < 1).all()


def test_what_the_model_gets_is_shown(small):
    pytest.importorskip("matplotlib").use("Agg")
    _, load = small
    with load("idefics3") as m:
        seen = m.vision.fields(files.picture(1, 40, 61))
        assert len(seen.plot().images) == len(seen.fields) == 1 + seen.grid[0] * seen.grid[1]
        corners = [image.get_extent() for image in seen.plot().images]
        assert len({(x, y) for x, _, _, y in corners}) == len(corners) and seen._repr_png_()
        assert m.vision.attention(files.picture(1, 40, 61), 1)._repr_png_()


@pytest.mark.parametrize("name", files.NAMES)
def test_pictures_of_any_size(name, tmp_path):
    """A point and a line give some vectors, no more than any other picture."""
    with vision_of(files.write(name, tmp_path / "v.gguf")) as v:
        for h, w in ((1, 1), (1, 300), (2000, 3)):
            got = v.encode_packed(np.full((h, w, 3), 99, np.uint8))
            assert 0 < sum(map(len, got)) == v.tokens_of(w, h) <= 4096 and all(np.isfinite(x).all() for x in got)


def test_memory_of_a_picture_is_announced(small, tmp_path):
    text, load = small
    with load("idefics3") as m:
        before = m.memory().terms
        m.encode_image(files.picture(1, 40, 61))
        taken = {row.name: row.nbytes for row in m.memory().rows if row.name.startswith("picture")}
    report = model_peak(text, 512, vision=tmp_path / "idefics3.gguf", image=(61, 40))
    said = {row.name: row.nbytes for row in report.memory.rows if row.name.startswith("picture")}
    assert said.keys() == taken.keys() == {"picture weights", "picture repacked weights", "picture compute",
                                           "picture inputs"} and "picture compute" not in before
    for name in said:
        assert abs(said[name] - taken[name]) <= 4096, (name, said, taken)
    assert report.kinds["picture compute"] == said["picture compute"]
    with pytest.raises(gg.ParamError, match="--mmproj FILE --image WxH"):
        model_peak(text, 512, image=(61, 40))
    with pytest.raises(gg.ParamError, match="20000 x 20000 pixels"):
        model_peak(text, 512, vision=tmp_path / "idefics3.gguf", image=(20000, 20000))
    assert main(["peak", str(text), "--mmproj", str(tmp_path / "idefics3.gguf"), "--image", "61x40", "--json"]) == 0
    with pytest.raises(SystemExit):
        main(["peak", str(text), "--mmproj", str(tmp_path / "idefics3.gguf"), "--image", "61"])


def test_memory_of_windows_grows_with_the_patches(tmp_path):
    text = files.write_text(shared("tools"), tmp_path / "text.gguf", "qwen25")
    vision = files.write("qwen25", tmp_path / "v.gguf")
    small_one, large = (model_peak(text, 512, vision=vision, image=(side, side)).kinds for side in (128, 512))
    for kind in ("picture inputs", "picture compute"):
        assert large[kind] <= 16.5 * small_one[kind]
    assert large["kernel work"] > model_peak(text, 512).kinds["kernel work"], "kernels of the vision part need more"


def test_what_does_not_belong_together(small, tmp_path):
    text, load = small
    for name, decoder, match in (("qwen2", "mlp", "has rows and columns of vectors"),
                                 ("mlp", "qwen2", "has no rows and columns of vectors"),
                                 ("qwen2", "qwen3", "for 0 layers behind the first, .* reads them in 2"),
                                 ("qwen3", "qwen2", "for 2 layers behind the first, .* reads them in 0")):
        path = files.write_text(shared("tools"), tmp_path / "other.gguf", decoder)
        with pytest.raises(gg.ModelError, match=match):
            load_model(path, n_threads=1, vision=files.write(name, tmp_path / "w.gguf"))
    with pytest.raises(gg.ModelError, match=r"makes vectors of 32 numbers, .* reads 64"):
        load_model(text, n_threads=1, vision=files.write("mlp", tmp_path / "w.gguf", n_out=32))
    with pytest.raises(gg.ModelError, match="not a vision part .*'llama'"):
        load_model(text, n_threads=1, vision=text)
    with pytest.raises(gg.ModelError, match="sees or hears beside a model, load_model.model, vision="):
        load_model(files.write("mlp", tmp_path / "w.gguf"), n_threads=1)
    with pytest.raises(gg.ModelError, match=r"v.blk.1.attn_q.weight' is missing"):
        load_model(text, n_threads=1, vision=files.write("mlp", tmp_path / "w.gguf", without=["v.blk.1.attn_q.weight"]))
    with pytest.raises(gg.ModelError, match="not make a vision network"):
        load_model(text, n_threads=1, vision=files.write("mlp", tmp_path / "w.gguf", patch_size=5))
    with load_model(text, n_threads=1) as m:
        for call in (lambda: m.encode_image(files.picture(0, 8, 8)), lambda: m.generate("a", images=["x.png"])):
            with pytest.raises(gg.NotSupported, match="load_model.path, vision="):
                call()
    with load("mlp") as m, pytest.raises(gg.ParamError, match="1 marks <__media__> in the text, 2 pictures"):
        m.generate("a <__media__>", images=[files.picture(0, 8, 8)] * 2)


# ---------------------------------------------------------------- pictures
@pytest.mark.parametrize("kind", ["bilinear", "bicubic", "lanczos"])
def test_resized_is_pillow_s(kind):
    pillow = pytest.importorskip("PIL.Image")
    rng = np.random.default_rng()
    for _ in range(6):
        h, w, n = rng.integers(1, 90, 3).tolist()
        x = rng.integers(0, 256, (h, w, 3)).astype(np.uint8)
        for size in ((n, h), (w, n)):               # one side; both: along the rows first
            want = np.asarray(pillow.fromarray(x).resize(size, getattr(pillow, kind.upper())))
            np.testing.assert_array_equal(resized(x, *size, kind), want)
    assert (resized(x, w, h, kind) == x).all()


def test_proportions_are_kept():
    for width, height in ((1, 1), (5000, 3), (640, 480), (33, 4000)):
        w, h = kept_proportions(width, height, 16, 8 * 256, 1024 * 256)
        assert w % 16 == h % 16 == 0 and w > 0 < h and w * h <= 1024 * 256


def test_files_and_arrays_are_the_same_picture(tmp_path):
    pillow = pytest.importorskip("PIL.Image")
    x = files.picture(0, 13, 17)
    pillow.fromarray(x).save(tmp_path / "x.png")
    raw = (tmp_path / "x.png").read_bytes()
    for source in (tmp_path / "x.png", raw, x, x.astype(np.float32) / 255, pillow.fromarray(x)):
        np.testing.assert_array_equal(read_picture(source), x)
    grey = read_picture(x[..., 0])
    assert grey.shape == x.shape and (grey == x[..., :1]).all()
    clear = np.dstack([x, np.zeros(x.shape[:2], np.uint8)])
    assert (read_picture(clear) == 255).all()
    for mode in ("CMYK", "P", "1"):
        buffer = io.BytesIO()
        pillow.fromarray(x).convert(mode).save(buffer, "TIFF")
        assert read_picture(buffer.getvalue()).shape == x.shape


@pytest.mark.parametrize(("kind", "format"), [(np.uint16, "PNG"), (np.uint16, "TIFF"), (np.int32, "TIFF"),
                                              (np.float32, "TIFF")])
def test_grey_values_of_many_bits(kind, format):
    pillow = pytest.importorskip("PIL.Image")
    x, buffer = files.picture(0, 13, 17)[..., 0], io.BytesIO()
    deep = {np.uint16: x.astype(np.uint16) * 257, np.int32: x.astype(np.int32),
            np.float32: x.astype(np.float32) / 255}[kind]
    pillow.fromarray(deep).save(buffer, format)
    for source in (buffer.getvalue(), pillow.fromarray(deep)):
        assert (read_picture(source) == x[..., None]).all()
    if kind is np.int32:
        for wrong in (-deep, deep * 100000):
            with pytest.raises(gg.ParamError, match="grey values from"):
                read_picture(pillow.fromarray(wrong))


def test_a_photograph_is_turned_as_its_camera_says():
    pillow = pytest.importorskip("PIL.Image")
    x, buffer, exif = files.picture(0, 13, 17), io.BytesIO(), pillow.Exif()
    exif[0x0112] = 6                            # what is left in the file is up
    pillow.fromarray(x).save(buffer, "PNG", exif=exif)
    assert (read_picture(buffer.getvalue()) == np.rot90(x, -1)).all()
    pillow.fromarray(x).save(damaged := io.BytesIO(), "PNG", exif=b"Exif\0\0II*\0\xff\xff")
    assert (read_picture(damaged.getvalue()) == x).all()


@pytest.mark.parametrize(("source", "error", "message"), [
    ("no-such-picture.png", gg.BadFile, "no such file"),
    (b"not a picture", gg.BadFile, "not a picture that can be read"),
    (np.zeros((3, 4, 5), np.uint8), gg.ShapeError, r"\(3, 4, 5\)"),
    (np.zeros((0, 4, 3), np.uint8), gg.ShapeError, "4 x 0"),
    (np.zeros((4, 4, 3), np.int64), gg.TypeMismatch, "int64"),
    (np.full((4, 4, 3), 3.0), gg.ParamError, "from 0 to 1"), (np.full((4, 4), np.nan), gg.ParamError, "from 0 to 1"),
    (np.broadcast_to(np.uint8(0), (20000, 20000, 3)), gg.ParamError, f"20000 x 20000 pixels, more than {MAX_PIXELS}")])
def test_what_is_no_picture(source, error, message):
    pytest.importorskip("PIL.Image")
    with pytest.raises(error, match=message):
        read_picture(source)


def test_damaged_files_and_bombs(tmp_path):
    pillow = pytest.importorskip("PIL.Image")
    buffer = io.BytesIO()
    pillow.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3)).astype(np.uint8)).save(buffer, "PNG")
    with pytest.raises(gg.BadFile, match="not a picture that can be read"):
        read_picture(buffer.getvalue()[:len(buffer.getvalue()) // 2])
    bomb = io.BytesIO()
    pillow.new("1", (20000, 20000)).save(bomb, "PNG")
    with pytest.raises(gg.ParamError, match="make it smaller first"):
        read_picture(bomb.getvalue())
    frames = [pillow.fromarray(files.picture(i, 8, 9)) for i in range(3)]
    moving = io.BytesIO()
    frames[0].save(moving, "GIF", save_all=True, append_images=frames[1:])
    assert read_picture(moving.getvalue()).shape == (8, 9, 3)
