import io
import struct
import threading
import zlib

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from luce_core.errors import RequestError
from luce_core.media import decode as module
from luce_core.media.decode import decode


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_pixels_of_files_without_loss(kind, picture, written):
    image = picture()
    got = decode(written(image, kind, **({"lossless": True} if kind == "WEBP" else {})))
    assert got.dtype == np.uint8
    assert np.array_equal(got, np.asarray(image))


def test_a_jpeg_is_as_pillow_reads_it(picture, written):
    data = written(picture(), "JPEG", quality=80)
    assert np.array_equal(decode(data), np.asarray(Image.open(io.BytesIO(data))))


def test_grey_palette_and_two_colours(picture, written):
    grey = picture(mode="L")
    assert np.array_equal(decode(written(grey)), np.repeat(np.asarray(grey)[..., None], 3, 2))
    palette = picture().convert("P", palette=Image.Palette.ADAPTIVE, colors=8)
    assert np.array_equal(decode(written(palette)), np.asarray(palette.convert("RGB")))
    assert decode(written(grey.convert("1"))).shape == (12, 17, 3)


def test_of_an_animation_the_first_frame(picture, written):
    frames = [picture(seed=seed).quantize(16) for seed in range(3)]
    data = written(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert np.array_equal(decode(data), np.asarray(frames[0].convert("RGB")))


def test_transparency_is_white(picture, written):
    numbers = np.zeros((2, 2, 4), np.uint8)
    numbers[0, 0] = (10, 20, 30, 255)
    numbers[0, 1] = (10, 20, 30, 0)
    numbers[1, 0] = (0, 0, 0, 128)
    got = decode(written(Image.fromarray(numbers)))
    assert got[0].tolist() == [[10, 20, 30], [255, 255, 255]]
    assert abs(int(got[1, 0, 0]) - 127) <= 1
    # a palette with one entry that is not seen
    palette = Image.fromarray(np.array([[0, 1]], np.uint8), mode=None).convert("P")
    palette.putpalette([1, 2, 3, 4, 5, 6])
    assert decode(written(palette, "GIF", transparency=1)).tolist() == [[[1, 2, 3], [255, 255, 255]]]


@pytest.mark.parametrize("way", range(1, 9))
def test_turned_as_exif_says(way, picture, written):
    """Every orientation against the array operations its definition names."""
    stored = picture(3, 5)
    exif = Image.Exif()
    exif[0x0112] = way
    x = np.asarray(stored)
    seen = {
        1: x,
        2: x[:, ::-1],
        3: x[::-1, ::-1],
        4: x[::-1],
        5: x.swapaxes(0, 1),
        6: np.rot90(x, -1),
        7: np.rot90(x, 2).swapaxes(0, 1),
        8: np.rot90(x),
    }[way]
    assert np.array_equal(decode(written(stored, exif=exif)), seen)


@pytest.mark.parametrize(
    "data", [b"", b"x", b"\x89PNG\r\n\x1a\n", b"GIF89a", b"\xff\xd8\xff", b"RIFF\x04\0\0\0WEBP"]
)
def test_what_is_no_image(data):
    with pytest.raises(RequestError, match=r"bytes are no image|cannot be decoded"):
        decode(data)


@pytest.mark.parametrize("kind", ["BMP", "TIFF", "ICO", "PPM", "TGA"])
def test_other_kinds_are_not_tried(kind, picture, written):
    with pytest.raises(RequestError, match="PNG, JPEG, WEBP, GIF"):
        decode(written(picture(), kind))


def png(width, height, data=b""):
    def chunk(name, content):
        return (
            struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("width", "height"), [(2**15, 2**11), (2**30, 2**30), (2**25 + 1, 1), (60_000, 60_000)]
)
def test_bombs_are_refused_by_their_header(width, height, monkeypatch):
    monkeypatch.setattr(Image.Image, "load", lambda self: pytest.fail("decoded"))
    with pytest.raises(RequestError, match=r"pixels|too large"):
        decode(png(width, height, zlib.compress(b"\0" * 1000)))


def test_a_bomb_of_text_in_a_png():
    bomb = zlib.compress(b"a" * 70_000_000)
    text = b"zTXt", b"k\0\0" + bomb
    chunk = (
        struct.pack(">I", len(text[1])) + text[0] + text[1] + struct.pack(">I", zlib.crc32(text[0] + text[1]))
    )
    whole = png(1, 1, zlib.compress(b"\0\1\2\3"))
    data = whole[:33] + chunk + whole[33:]
    with pytest.raises(RequestError, match=r"cannot be decoded|no image"):
        decode(data)


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damage_is_an_error_of_the_request_or_another_picture(data, picture, written):
    """Bytes changed, cut and doubled, in files of every kind."""
    kind = data.draw(st.sampled_from(["PNG", "JPEG", "WEBP", "GIF"]))
    image = picture(mode=data.draw(st.sampled_from(["RGB", "L"])))
    raw = bytearray(written(image.quantize(8) if kind == "GIF" else image, kind))
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, len(raw) - 1))
        raw[at] = data.draw(st.integers(0, 255))
    raw = raw[: data.draw(st.integers(1, len(raw)))] if data.draw(st.booleans()) else raw
    try:
        got = decode(bytes(raw))
    except RequestError:
        return
    assert got.ndim == 3
    assert got.shape[2] == 3


def test_one_image_is_decoded_at_a_time(monkeypatch, picture, written):
    """So the memory it takes is that of one."""
    inside, most, gate = 0, 0, threading.Barrier(4)
    honest = module._pixels

    def counted(image):
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        try:
            return honest(image)
        finally:
            inside -= 1

    monkeypatch.setattr(module, "_pixels", counted)
    data = written(picture(200, 200))

    def run():
        gate.wait()
        for _ in range(5):
            decode(data)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1
