"""Random Hugging Face models that see, and the two files converters would make of each."""

from __future__ import annotations

import io

import numpy as np
import torch
import transformers
from attrs import frozen
from PIL import Image
from torch import nn
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from luce_core.testing.gguf_factory import write_gguf

from .hugging_face import Random, random_model

VISION = {
    "depth": 3,
    "hidden_size": 48,
    "num_heads": 3,
    "intermediate_size": 72,
    "patch_size": 8,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 49,
    "out_hidden_size": 48,
}
NAMES = {
    "patch_embed.proj.bias": "v.patch_embd.bias",
    "pos_embed.weight": "v.position_embd.weight",
    "merger.norm": "v.post_ln",
    "merger.linear_fc1": "mm.0",
    "merger.linear_fc2": "mm.2",
}
BLOCK_NAMES = {
    "norm1": "ln1",
    "norm2": "ln2",
    "attn.qkv": "attn_qkv",
    "attn.proj": "attn_out",
    "mlp.linear_fc1": "ffn_up",
    "mlp.linear_fc2": "ffn_down",
}
MEAN, STD = (0.5, 0.45, 0.4), (0.5, 0.4, 0.6)
"""Not all the same, so that colours cannot be swapped."""


@frozen(eq=False)
class Seeing:
    """A text model, and one of the same weights that takes images too."""

    text: Random
    whole: nn.Module

    @property
    def tower(self) -> nn.Module:
        return self.whole.model.visual


def seeing_model(arch="qwen35", vision=None, **changes):
    """Every weight random. image_token_id etc. stand at the end of the vocabulary."""
    text = random_model(arch, changes)
    given = {**VISION, "out_hidden_size": text.config.hidden_size, **(vision or {})}
    prefix = "Qwen3_5" if arch == "qwen35" else "Qwen3_5Moe"
    config = getattr(transformers, f"{prefix}Config")(
        text_config=text.config.to_dict(),
        vision_config=given,
        image_token_id=text.config.vocab_size - 1,
        video_token_id=text.config.vocab_size - 2,
        vision_start_token_id=text.config.vocab_size - 3,
        vision_end_token_id=text.config.vocab_size - 4,
        tie_word_embeddings=text.config.tie_word_embeddings,
    )
    config._attn_implementation = "eager"
    whole = getattr(transformers, f"{prefix}ForConditionalGeneration")(config).float().eval()
    whole.model.language_model.load_state_dict(text.model.model.state_dict())
    whole.lm_head.load_state_dict(text.model.lm_head.state_dict())
    generator = torch.Generator().manual_seed(31)
    with torch.no_grad():
        for name, parameter in whole.model.visual.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("bias"):
                parameter.copy_(0.2 * noise)
            elif "norm" in name:
                parameter.copy_(1 + 0.3 * noise)
            elif "pos_embed" in name:
                parameter.copy_(noise)
            else:
                parameter.copy_(1.3 * noise / parameter[0].numel() ** 0.5)
    return Seeing(text, whole)


def projector_tensors(model):
    """By the names of llama.cpp's converter."""
    found = {}
    for name, value in model.tower.state_dict().items():
        stem, _, kind = name.rpartition(".")
        if name == "patch_embed.proj.weight":
            found["v.patch_embd.weight"] = value[:, :, 0]
            found["v.patch_embd.weight.1"] = value[:, :, 1]
        elif name.startswith("blocks."):
            _, layer, rest = stem.split(".", 2)
            found[f"v.blk.{layer}.{BLOCK_NAMES[rest]}.{kind}"] = value
        elif name in NAMES:
            found[NAMES[name]] = value
        else:
            found[f"{NAMES[stem]}.{kind}"] = value
    return {name: np.ascontiguousarray(value.numpy(), np.float32) for name, value in found.items()}


def projector_metadata(model):
    config = model.whole.config.vision_config
    side = round(config.num_position_embeddings**0.5)
    return {
        "general.architecture": "clip",
        "general.type": "mmproj",
        "clip.has_vision_encoder": True,
        "clip.projector_type": "qwen3vl_merger",
        "clip.use_gelu": True,
        "clip.vision.image_size": side * config.patch_size,
        "clip.vision.patch_size": config.patch_size,
        "clip.vision.embedding_length": config.hidden_size,
        "clip.vision.feed_forward_length": config.intermediate_size,
        "clip.vision.projection_dim": config.out_hidden_size,
        "clip.vision.block_count": config.depth,
        "clip.vision.attention.head_count": config.num_heads,
        "clip.vision.attention.layer_norm_epsilon": 1e-6,
        "clip.vision.spatial_merge_size": config.spatial_merge_size,
        "clip.vision.is_deepstack_layers": [False] * config.depth,
        "clip.vision.image_mean": list(MEAN),
        "clip.vision.image_std": list(STD),
    }


def projector(path, model, *, drop=(), metadata=None, **more):
    """The mmproj file, with `more` tensors and without those in `drop`."""
    tensors = {**projector_tensors(model), **more}
    kept = {name: numbers for name, numbers in tensors.items() if name not in drop}
    return write_gguf(path, {**projector_metadata(model), **(metadata or {})}, kept)


def processor_of(model, max_pixels, min_pixels=65536):
    """Hugging Face's, with Pillow."""
    config = model.whole.config.vision_config
    return Qwen2VLImageProcessorPil(
        size={"shortest_edge": min_pixels, "longest_edge": max_pixels},
        patch_size=config.patch_size,
        merge_size=config.spatial_merge_size,
        temporal_patch_size=config.temporal_patch_size,
        image_mean=list(MEAN),
        image_std=list(STD),
    )


def picture(height, width, seed=0, mode="RGB"):
    """Noise over slopes: every resampling shows."""
    draw = np.random.default_rng(seed)
    channels = len(mode)
    slopes = np.linspace(0, 200, height)[:, None, None] + np.linspace(0, 55, width)[None, :, None]
    numbers = slopes + draw.integers(0, 60, (height, width, channels))
    return Image.fromarray(np.clip(numbers, 0, 255).astype(np.uint8), mode if mode == "RGBA" else None)


def encoded(image, kind="PNG", **options):
    """The file of a picture."""
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


# --- with a vocabulary, for whole engines

IMAGE_TOKENS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")
TEMPLATE = (
    "{% macro shown(parts) %}{% if parts is string %}{{ parts }}{% else %}{% for part in parts %}"
    "{% if part.type == 'image' %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}{% else %}"
    "{{ part.text }}"
    "{% endif %}{% endfor %}{% endif %}{% endmacro %}"
    "{% for message in messages %}{% set content = shown(message.content)|trim %}"
    "{{ '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""With a macro and a filter between the markers and the prompt, as the published ones have them."""


def vocabulary():
    """The toy's, with the tokens around images, and a template that writes them."""
    from luce_core.testing.toy_vocab import toy_vocabulary

    found = dict(toy_vocabulary("bpe"))
    found["tokenizer.ggml.tokens"] = [*found["tokenizer.ggml.tokens"], *IMAGE_TOKENS]
    found["tokenizer.ggml.token_type"] = [*found["tokenizer.ggml.token_type"], *[3] * len(IMAGE_TOKENS)]
    found["tokenizer.chat_template"] = TEMPLATE
    return found


@frozen(eq=False)
class Files:
    model: Seeing
    text: object
    projector: object
    start: int
    """Ids of the tokens around images."""
    pad: int
    end: int

    @property
    def options(self):
        return {
            "cache_type_k": "f32",
            "cache_type_v": "f32",
            "chunk": 32,
            "threads": 1,
            "mmproj": str(self.projector),
            "image_max_pixels": 2**16,
        }


def files_of(folder, arch="qwen35", **changes):
    """A model with a vocabulary, and both files."""
    from .hugging_face import metadata_of, tensors_of

    words = vocabulary()
    tokens = words["tokenizer.ggml.tokens"]
    start, pad, end, video = (tokens.index(text) for text in IMAGE_TOKENS)
    model = seeing_model(arch, vocab_size=len(tokens), max_position_embeddings=1024, **changes)
    model.whole.config.image_token_id = model.whole.model.config.image_token_id = pad
    model.whole.config.video_token_id = model.whole.model.config.video_token_id = video
    text = write_gguf(folder / "text.gguf", {**metadata_of(model.text), **words}, tensors_of(model.text))
    return Files(model, text, projector(folder / "mmproj.gguf", model), start, pad, end)


@torch.no_grad()
def whole_logits(model, ids, images, max_pixels=2**16):
    """f32[T, V] of a text whose placeholders are already as many as its images have rows."""
    ids = torch.tensor([ids])
    if not images:
        return model.whole(input_ids=ids).logits[0]
    made = processor_of(model, max_pixels)(
        images=[np.asarray(image) for image in images], return_tensors="pt", input_data_format="channels_last"
    )
    kinds = (ids == model.whole.config.image_token_id).int()
    return model.whole(
        input_ids=ids,
        pixel_values=made["pixel_values"].float(),
        image_grid_thw=made["image_grid_thw"],
        mm_token_type_ids=kinds,
    ).logits[0]
