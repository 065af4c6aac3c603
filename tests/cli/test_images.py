"""Images through the commands: the plan of an encoder, a server that fetches from an allowed host."""

import base64
import io
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import httpx
import numpy as np
import pytest
from PIL import Image

from luce_core.testing.dense.model import write_dense_model
from luce_core.testing.pictures import write_picture_model

from .test_serve import URL, Served

TEMPLATE = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'image' %}<think>{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
)


@pytest.fixture
def seeing(toy):
    """A text model with an architecture of its own, and an encoder's plugin."""
    toy.add("dense", "luce_core.testing.dense.hooks", provides=("arch.dense",))
    toy.add(
        "pictures", "luce_core.testing.pictures.hooks", provides=("arch.clip.pictures", "encoder.pictures")
    )
    return toy


@pytest.fixture
def files(tmp_path):
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE)
    return write_dense_model(tmp_path / "text.gguf"), write_picture_model(tmp_path / "p.gguf"), template


@pytest.fixture
def picture():
    out = io.BytesIO()
    numbers = np.random.default_rng(0).integers(0, 256, (8, 12, 3), dtype=np.uint8)
    Image.fromarray(numbers).save(out, "PNG")
    return out.getvalue()


def test_the_plan_names_the_encoder_and_its_bytes(luce, seeing, files):
    text, projector, _ = files
    shown = luce("plan", text, "--mmproj", projector)
    assert shown.status == 0, shown.err
    for words in ("mmproj, encoder model of encoder pictures", "weights of mmproj", "images through mmproj"):
        assert words in shown.out
    assert "served by plugin 'pictures'" in luce("inspect", projector).out


def test_a_file_that_does_not_fit_is_one_sentence(luce, seeing, files, tmp_path):
    wrong = write_picture_model(tmp_path / "wrong.gguf", width=64)
    shown = luce("plan", files[0], "--mmproj", wrong)
    assert shown.status == 1
    assert "wrong.gguf" in shown.err
    assert len(shown.err.strip().splitlines()) == 1
    absent = luce("plan", files[0], "--mmproj", tmp_path / "absent.gguf")
    assert (absent.status, "absent.gguf" in absent.err) == (1, True)


def test_a_host_that_is_none_is_told_before_anything_is_loaded(luce, seeing, files):
    shown = luce("serve", files[0], "--allow-image-urls", "http://example.com/x", "--port", "0")
    assert shown.status == 2
    assert "--allow-image-urls: 'http://example.com/x' is no host" in shown.err


def test_a_server_answers_about_images(seeing, files, picture, environment, tmp_path):
    class Site(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(picture)

        def log_message(self, *args):
            """Quiet."""

    site = HTTPServer(("127.0.0.1", 0), Site)
    threading.Thread(target=site.serve_forever, kwargs={"poll_interval": 0.01}).start()
    host = f"127.0.0.1:{site.server_port}"
    text, projector, template = files
    argv = [str(text), "--mmproj", str(projector), "--chat-template-file", str(template)]
    server = Served([*argv, "--allow-image-urls", host], environment(), tmp_path)
    try:
        url = URL.search(server.line(URL.pattern))[1]

        def ask(image):
            part = {"type": "image_url", "image_url": {"url": image}}
            body = {
                "messages": [{"role": "user", "content": [part, "so"]}],
                "max_tokens": 4,
                "temperature": 0,
            }
            return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)

        sent = ask(f"data:image/png;base64,{base64.b64encode(picture).decode()}").json()
        fetched = ask(f"http://{host}/a.png").json()
        assert sent["usage"]["prompt_tokens"] == 6 + 2
        assert fetched["choices"][0]["message"] == sent["choices"][0]["message"]
        assert fetched["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        refused = ask("http://127.0.0.1:9/a.png")
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_image")
        card = httpx.get(f"{url}/v1/models").json()["data"][0]
        assert card["input_modalities"] == ["text", "image"]
        assert server.stop() == 0
    finally:
        server.close()
        site.shutdown()
        site.server_close()
