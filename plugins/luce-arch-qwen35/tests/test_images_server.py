"""Images through a real server, with the official client; the engine on a thread and in a process of its
own.
"""

from __future__ import annotations

import base64
import threading
from contextlib import contextmanager
from functools import partial

import httpx
import numpy as np
import openai
import pytest

from luce_core.media import ImageReader
from luce_core.plan_media import media_processor
from luce_core.supervision.messages import Boot
from luce_core.supervision.supervised import SupervisedChannel
from luce_core.testing.pipeline import TOY_HOOKS, make_pipeline, registry_of
from luce_core.testing.server import on_a_thread, serving

from .vision import encoded, files_of, picture, processor_of, whole_logits

HOOKS = "luce_arch_qwen35.hooks"
LENGTH = 8
A, B = picture(256, 256, 1), picture(190, 380, 2)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return files_of(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def pipeline(files):
    return make_pipeline(files.text, TOY_HOOKS, HOOKS, options=files.options)


def in_a_process(pipeline, max_queue):
    ready = threading.Event()
    boot = Boot(pipeline.plan, partial(registry_of, TOY_HOOKS, HOOKS), beat_s=0.05, log_level="error")
    channel = SupervisedChannel(boot, max_queue=max_queue, on_ready=ready.set)
    assert ready.wait(60)
    return channel


@contextmanager
def served_by(pipeline, channel=on_a_thread, max_images=4, **more):
    processor = media_processor(pipeline.plan, registry_of(TOY_HOOKS, HOOKS))
    placeholder = pipeline.target.tokenizer.token_id(processor.placeholder)
    reader = ImageReader(processor, placeholder, max_images=max_images)
    with serving(pipeline, images=reader, channel=channel, **more) as served:
        yield served


@pytest.fixture(scope="module")
def served(pipeline):
    with served_by(pipeline) as served:
        yield served


def data_url(image, kind="PNG"):
    return f"data:image/{kind.lower()};base64,{base64.b64encode(encoded(image, kind)).decode()}"


def shown(*parts):
    """Texts and images as the content of a message."""
    return [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image_url", "image_url": {"url": data_url(part)}}
        for part in parts
    ]


def client_of(served):
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)


def ask(client, messages, **more):
    given = {"model": "toy", "max_tokens": LENGTH, "temperature": 0, **more}
    return client.chat.completions.create(messages=messages, **given)


MESSAGES = [
    {"role": "system", "content": "look"},
    {"role": "user", "content": shown("what is ", A, " and ", B, "?")},
]


def greedy(files, served, images):
    """The prompt's ids, and those Hugging Face's model writes behind it."""
    made = processor_of(files.model, 2**16)(
        images=[np.asarray(image) for image in images], return_tensors="np"
    )
    rows = [int(grid.prod()) // 4 for grid in made["image_grid_thw"]]
    text = "<|im_start|>system\nlook<|im_end|>\n<|im_start|>user\nwhat is "
    tokenizer = served.service.face.tokenizer
    ids = tokenizer.encode(text, special=True)
    for part, count in zip((" and ", "?<|im_end|>\n<|im_start|>assistant\n"), rows, strict=True):
        ids += [files.start, *[files.pad] * count, files.end]
        ids += tokenizer.encode(part, special=True)
    prompt = len(ids)
    for _ in range(LENGTH):
        ids.append(int(whole_logits(files.model, ids, images)[-1].argmax()))
        if ids[-1] in tokenizer.eog:
            break
    return ids[:prompt], ids[prompt:]


@pytest.mark.parametrize("channel", [on_a_thread, in_a_process])
def test_the_official_client_gets_hugging_faces_answer(channel, files, pipeline):
    with served_by(pipeline, channel) as served, client_of(served) as client:
        whole = ask(client, MESSAGES, extra_body={"ignore_eos": False}, logprobs=True)
        prompt, want = greedy(files, served, [A, B])
        tokenizer = served.service.face.tokenizer
        assert whole.usage.prompt_tokens == len(prompt)
        written = [entry.token for entry in whole.choices[0].logprobs.content]
        kept = [token for token in want if token not in tokenizer.eog]
        assert written == [tokenizer.token_bytes(token).decode(errors="replace") for token in kept]
        chunks = list(ask(client, MESSAGES, stream=True, stream_options={"include_usage": True}))
        streamed = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert streamed == whole.choices[0].message.content
        # the second time the images came from the cache
        assert chunks[-1].usage.prompt_tokens_details.cached_tokens == len(prompt) - 1


def test_another_image_is_another_prompt(served):
    with client_of(served) as client:
        first = ask(client, [{"role": "user", "content": shown(A, "?")}])
        other = ask(client, [{"role": "user", "content": shown(picture(256, 256, 77), "?")}])
        again = ask(client, [{"role": "user", "content": shown(A, "?")}])
    assert first.usage.prompt_tokens == other.usage.prompt_tokens
    assert other.usage.prompt_tokens_details.cached_tokens == 0
    assert again.usage.prompt_tokens_details.cached_tokens == again.usage.prompt_tokens - 1
    assert again.choices[0].message.content == first.choices[0].message.content


def test_every_way_to_send_an_image_is_the_same_prompt(served):
    """OpenAI's two forms, Anthropic's, other files of the same pixels."""
    raw = base64.b64encode(encoded(A)).decode()
    forms = [
        {"type": "image_url", "image_url": data_url(A)},
        {"type": "image_url", "image_url": {"url": data_url(A), "detail": "high"}},
        {"type": "input_image", "image_url": data_url(A)},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": raw}},
        {"type": "image_url", "image_url": {"url": f"data:;BASE64,{raw}"}},
        {"type": "image_url", "image_url": {"url": f"data:image/x;base64,{raw[:500]}\n{raw[500:]}"}},
    ]
    for kind, options in (("WEBP", {"lossless": True}),):
        other = base64.b64encode(encoded(A, kind, **options)).decode()
        forms.append({"type": "image_url", "image_url": {"url": f"data:image/webp;base64,{other}"}})
    with client_of(served) as client:
        answers = [ask(client, [{"role": "user", "content": [form, "?"]}]) for form in forms]
    assert len({answer.choices[0].message.content for answer in answers}) == 1
    assert all(a.usage.prompt_tokens_details.cached_tokens == a.usage.prompt_tokens - 1 for a in answers[1:])


def test_it_says_that_it_reads_images(served):
    card = httpx.get(f"{served.url}/v1/models").json()["data"][0]
    assert card["input_modalities"] == ["text", "image"]
    assert httpx.get(f"{served.url}/props").json()["modalities"] == {"vision": True, "audio": False}
    schemas = httpx.get(f"{served.url}/openapi.json").json()["components"]["schemas"]
    assert "ImagePart" in schemas


def refused(served, content, status=400):
    answer = httpx.post(
        f"{served.url}/v1/chat/completions",
        json={"messages": [{"role": "user", "content": content}], "max_tokens": 1},
        timeout=60,
    )
    assert answer.status_code == status, answer.text
    return answer.json()["error"]


@pytest.mark.parametrize(("url", "said"), [
    ("data:image/png;base64,AAAA", "no image of a known kind"),
    ("data:image/png;base64,!!!!", "base64"),
    ("data:image/png,abc", "base64"),
    ("data:image/png;base64", "comma"),
    ("file:///etc/passwd", "data URL"),
    ("/etc/passwd", "data URL"),
    ("https://example.com/a.png", "--allow-image-urls"),
])  # fmt: skip
def test_what_is_no_image_is_a_400_that_names_the_part(url, said, served):
    error = refused(served, ["look", {"type": "image_url", "image_url": {"url": url}}])
    assert error["param"] == "messages[0].content[1]"
    assert error["code"] == "invalid_image"
    assert said in error["message"]


def test_half_an_image_and_a_line(served):
    cut = base64.b64encode(encoded(A)[:2000]).decode()
    line = data_url(picture(1, 900))
    for url, said in ((f"data:image/png;base64,{cut}", "cannot be decoded"), (line, "900 x 1 pixels")):
        assert said in refused(served, [{"type": "image_url", "image_url": url}])["message"]


def test_too_many_images(served):
    error = refused(served, shown(*[picture(8, 8)] * 5))
    assert (error["param"], error["code"]) == ("messages[0].content[4]", "too_many_images")


def test_too_large_for_the_context(pipeline):
    with served_by(pipeline, max_images=8) as served:
        error = refused(served, shown(*[picture(256, 256, seed) for seed in range(8)]))
    assert error["code"] == "context_length_exceeded"


def test_an_image_where_none_can_be(served):
    """In a system message, and where the template shows none."""
    body = {"messages": [{"role": "system", "content": shown(A)}, {"role": "user", "content": "x"}]}
    answer = httpx.post(f"{served.url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "messages[0].content[0].type"


def test_text_cannot_spell_an_image(served):
    """A user who types the placeholder gets text, and images stay where they are."""
    with client_of(served) as client:
        typed = ask(client, [{"role": "user", "content": shown("<|image_pad|><|vision_start|>", A)}])
        plain = ask(client, [{"role": "user", "content": shown("", A)}])
    assert typed.usage.prompt_tokens > plain.usage.prompt_tokens + 10


def test_without_a_projector_an_image_is_refused_never_ignored(files):
    options = {name: value for name, value in files.options.items() if name != "mmproj"}
    with serving(make_pipeline(files.text, TOY_HOOKS, HOOKS, options=options)) as served:
        error = refused(served, shown("what is ", A))
        assert error["code"] == "image_unsupported"
        assert "--mmproj" in error["message"]
        card = httpx.get(f"{served.url}/v1/models").json()["data"][0]
        assert card["input_modalities"] == ["text"]
        assert "ImagePart" not in httpx.get(f"{served.url}/openapi.json").text


def test_transparency_is_white_and_pictures_are_turned(served):
    """Against files of the pixels that should be seen."""
    clear = picture(64, 96, 5, "RGBA")
    numbers = np.asarray(clear).astype(np.float32)
    alpha = numbers[..., 3:] / 255
    from PIL import Image

    over = np.asarray(Image.alpha_composite(Image.new("RGBA", clear.size, (255,) * 4), clear).convert("RGB"))
    assert np.abs(over - (numbers[..., :3] * alpha + 255 * (1 - alpha))).max() <= 1
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned clockwise by a quarter
    turned = encoded(A.transpose(Image.Transpose.ROTATE_90), "PNG", exif=exif)
    pairs = ((encoded(clear), encoded(Image.fromarray(over))), (turned, encoded(A)))
    with client_of(served) as client:
        for one, other in pairs:
            answers = []
            for raw in (one, other):
                url = f"data:image/png;base64,{base64.b64encode(raw).decode()}"
                answers.append(
                    ask(client, [{"role": "user", "content": [{"type": "image_url", "image_url": url}]}])
                )
            usage = answers[1].usage
            assert usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens - 1


def test_several_answers_about_one_image(served):
    """It is encoded once, and every answer draws with its own seed."""
    picture_of = picture(200, 200, 41)
    before = served.engine.encoding.encoded
    with client_of(served) as client:
        given = {
            "messages": [{"role": "user", "content": shown(picture_of, "?")}],
            "temperature": 1.0,
            "seed": 5,
        }
        both = ask(client, **given, n=3)
        alone = [ask(client, **{**given, "seed": 5 + choice}) for choice in range(3)]
    assert served.engine.encoding.encoded == before + 1
    assert [choice.message.content for choice in both.choices] == [
        one.choices[0].message.content for one in alone
    ]
