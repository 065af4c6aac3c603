"""The core's own options: what `luce-core` takes without any plugin. Fields in the order of the help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from luce_core.option_fields import OptionInfo as Info

CacheType = Literal["f32", "f16", "bf16", "q8_0", "fp8", "q4_0", "tq3_0"]


class CoreOptions(BaseModel):
    """Validated on the merged values; `Options.origin` knows where each came from."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    # --- model
    model: Annotated[str | None, Info(group="Model", aliases=("-m",))] = Field(
        None, description="GGUF file, or a name `luce-core pull` knows."
    )
    alias: Annotated[str | None, Info(group="Model")] = Field(
        None, description="Name of the model in the APIs; by default the file's own name."
    )
    strict_model: Annotated[bool, Info(group="Model")] = Field(
        False, description="Refuse requests that name another model, instead of answering with this one."
    )
    chat_template_file: Annotated[Path | None, Info(group="Model")] = Field(
        None, description="Jinja chat template to use in place of the file's own."
    )
    mmproj: Annotated[Path | None, Info(group="Model", plan="mmproj")] = Field(
        None, description="GGUF file of the model's image encoder: requests may then have images."
    )
    image_max_pixels: Annotated[int, Info("pixels", group="Model", plan="images.max_pixels")] = Field(
        2**21, ge=4096, le=2**26, description="Larger images are made smaller before they are encoded."
    )
    profile: Annotated[str | None, Info(group="Model")] = Field(
        None, description="Named set of launch defaults; whatever is said explicitly wins over it."
    )
    config: Annotated[Path | None, Info(group="Model")] = Field(
        None, description="Config file to read in place of the user's own and ./luce.toml."
    )

    cache: Annotated[Path | None, Info(group="Model")] = Field(
        None, description="Folder for pulled models; by default luce-core/models in the user's cache."
    )

    # --- device and memory
    device: Annotated[str, Info(group="Device and memory", plan="device")] = Field(
        "auto", description="Device to run on, as `luce-core devices` lists them; auto takes the best."
    )
    threads: Annotated[int, Info(group="Device and memory", aliases=("-t",), plan="threads")] = Field(
        0, ge=0, le=4096, description="CPU threads; 0 = the physical cores."
    )
    ctx_size: Annotated[
        int, Info("tokens", group="Device and memory", aliases=("-c", "--max-ctx"), plan="context")
    ] = Field(
        0, ge=0, le=2**27, description="Context of one sequence; 0 = as trained, less if memory is short."
    )
    cache_type_k: Annotated[CacheType, Info(group="Device and memory", plan="cache.k_type")] = Field(
        "f16", description="Type of the keys in the cache."
    )
    cache_type_v: Annotated[CacheType, Info(group="Device and memory", plan="cache.v_type")] = Field(
        "f16", description="Type of the values in the cache."
    )
    cache_bytes: Annotated[int, Info("bytes", group="Device and memory", plan="cache.bytes")] = Field(
        0,
        ge=0,
        description="What the cache of all sequences may take on the device; 0 = whatever `max-sequences` "
        "full contexts need, less if memory is short. Finished sequences stay in it as reusable prefixes.",
    )
    cache_block: Annotated[int, Info("tokens", group="Device and memory", plan="cache.block_tokens")] = Field(
        32, ge=1, le=4096, description="Tokens one cache block covers; raised to fit the model's strides."
    )
    checkpoint_bytes: Annotated[
        int, Info("bytes", group="Device and memory", plan="cache.checkpoint_bytes")
    ] = Field(
        2**30, ge=0, description="Host memory for snapshots of recurrent state, where the model has any."
    )
    swap_bytes: Annotated[int, Info("bytes", group="Device and memory", plan="cache.swap_bytes")] = Field(
        0,
        ge=0,
        description="Host memory for the state of requests that had to give way; 0 = none, it is computed "
        "again.",
    )
    memory_limit: Annotated[int, Info("bytes", group="Device and memory", plan="memory.limit_bytes")] = Field(
        0, ge=0, description="Memory to use on the device; 0 = 85 % of what it has."
    )

    # --- engine
    max_sequences: Annotated[
        int, Info(group="Engine", aliases=("--parallel",), plan="engine.max_sequences")
    ] = Field(4, ge=1, le=4096, description="Requests that run at the same time; more wait in a queue.")
    chunk: Annotated[int, Info("tokens", group="Engine", plan="engine.row_budget")] = Field(
        512, ge=1, le=65536, description="Rows of one step: the size of a chunk of prompt processing."
    )
    draft_nodes: Annotated[int, Info(group="Engine", plan="engine.draft_nodes")] = Field(
        16, ge=0, le=1024, description="Candidate tokens a sequence may verify in a step; 0 = none."
    )
    scheduler: Annotated[str, Info(group="Engine", plan="parts.scheduler")] = Field(
        "fair", description="Who runs next."
    )
    executor: Annotated[str, Info(group="Engine", plan="parts.executor")] = Field(
        "eager", description="How steps reach the device."
    )
    warmup: Annotated[bool, Info(group="Engine", plan="engine.warmup")] = Field(
        True,
        description="Try every ordinary kind of step before the first request, where first steps are slow "
        "(kernels are compiled, graphs captured).",
    )
    drafter: Annotated[tuple[str, ...], Info(group="Engine", plan="parts.drafter")] = Field(
        (), description="Sources of candidate tokens, in order; 'none' for plain decoding."
    )
    reducer: Annotated[tuple[str, ...], Info(group="Engine", plan="parts.reducer")] = Field(
        (), description="Prompt reducers, in order; 'none' for none."
    )
    residency: Annotated[str | None, Info(group="Engine", plan="parts.residency")] = Field(
        None, description="Which chunks of a long context stay in memory; 'none' for all."
    )
    encoder: Annotated[tuple[str, ...], Info(group="Engine", plan="parts.encoder")] = Field(
        (), description="Encoders of images and other media; 'none' for none."
    )
    chat: Annotated[tuple[str, ...], Info(group="Engine", plan="parts.chat")] = Field(
        ("auto",),
        description="How thoughts and tool calls are written: chat formats, the first that suits the file is "
        "taken; by default the architecture's own. 'plain' leaves everything text.",
    )
    experts: Annotated[str | None, Info(group="Engine", plan="parts.experts")] = Field(
        None, description="Where experts lie; 'none' for all in memory."
    )
    op_layer: Annotated[tuple[str, ...], Info(group="Engine", plan="execution.op_layers")] = Field(
        (), description="Layers of ops over the reference, last wins; 'none' for the reference alone."
    )
    ops_off: Annotated[tuple[str, ...], Info(group="Engine", plan="execution.ops_off")] = Field(
        (),
        description="Op to take away from every op layer, or LAYER.OP from one, with those that need it: "
        "what lies below computes it, at last the reference. For kernels that are wrong on a device.",
    )
    deterministic: Annotated[bool, Info(group="Engine", plan="deterministic")] = Field(
        False, description="Only ops whose result for a row depends on nothing but the row."
    )

    engine_process: Annotated[bool, Info(group="Engine")] = Field(
        True, description="Serve with the engine in a process of its own, started again when it dies."
    )
    step_timeout: Annotated[float, Info("s", group="Engine")] = Field(
        300.0, ge=0, description="An engine process that gets nowhere for so long is restarted; 0 = never."
    )

    # --- answers
    max_tokens: Annotated[int, Info("tokens", group="Answers")] = Field(
        0, ge=0, description="Length of an answer when the request names none; 0 = up to the context."
    )
    temperature: Annotated[float, Info(group="Answers")] = Field(
        1.0, ge=0, le=100, description="Sampling temperature when the request names none; 0 = greedy."
    )
    top_p: Annotated[float, Info(group="Answers")] = Field(
        1.0, gt=0, le=1, description="Nucleus when the request names none; 1 = off."
    )
    top_k: Annotated[int, Info(group="Answers")] = Field(
        0, ge=0, description="Best tokens to sample from when the request names none; 0 = all."
    )
    min_p: Annotated[float, Info(group="Answers")] = Field(
        0.0, ge=0, le=1, description="Least probability relative to the best when the request names none."
    )
    repetition_penalty: Annotated[float, Info(group="Answers")] = Field(
        1.0, gt=0, le=10, description="Penalty on repeated tokens when the request names none; 1 = off."
    )
    thinking: Annotated[Literal["auto", "on", "off"], Info(group="Answers")] = Field(
        "auto", description="Whether models that can think do; auto leaves it to the template."
    )

    # --- server
    host: Annotated[str, Info(group="Server")] = Field("127.0.0.1", description="Address to listen on.")
    port: Annotated[int, Info(group="Server")] = Field(
        8080, ge=0, le=65535, description="Port to listen on; 0 = any free one."
    )
    api_key: Annotated[tuple[str, ...], Info(group="Server", secret=True)] = Field(
        (), description="Key a client must send; repeat for several. Needed beyond this machine."
    )
    api_key_file: Annotated[Path | None, Info(group="Server")] = Field(
        None,
        description="File with one key per line; blank lines and lines that begin with # are skipped. Read "
        "again when it changes.",
    )
    tls_cert: Annotated[Path | None, Info(group="Server")] = Field(
        None, description="PEM file of a certificate and its chain: serve https. Read again when it changes."
    )
    tls_key: Annotated[Path | None, Info(group="Server")] = Field(
        None, description="PEM file of the certificate's private key; by default the certificate's own file."
    )
    tls_key_password_file: Annotated[Path | None, Info(group="Server")] = Field(
        None, description="File whose first line opens an encrypted private key."
    )
    tls_client_ca: Annotated[Path | None, Info(group="Server")] = Field(
        None,
        description="PEM file of authorities: only clients with a certificate of theirs may connect (mutual "
        "TLS).",
    )
    insecure: Annotated[bool, Info(group="Server")] = Field(
        False, description="Allow an address beyond this machine without a key or client certificates."
    )
    allowed_host: Annotated[tuple[str, ...], Info(group="Server")] = Field(
        (),
        description="Name under which clients may call a server without key and TLS, beside localhost and "
        "addresses; '*' for any.",
    )
    cors_origin: Annotated[tuple[str, ...], Info(group="Server")] = Field(
        (), description="Web origins whose pages may call the server; '*' for any."
    )
    max_images: Annotated[int, Info("images", group="Server")] = Field(
        32, ge=0, le=4096, description="Images one request may have."
    )
    allow_image_urls: Annotated[tuple[str, ...], Info(group="Server")] = Field(
        (),
        description="Host images may be fetched from over http and https, such as example.com, "
        "*.example.com or 10.0.0.5:8080; repeat for several, '*' for any public one. By default none: images "
        "come in the request, as data URLs.",
    )
    queue_limit: Annotated[int, Info("requests", group="Server")] = Field(
        32, ge=0, le=100_000, description="Requests that may wait; one more is refused with 429."
    )
    request_timeout: Annotated[float, Info("s", group="Server")] = Field(
        0.0,
        ge=0,
        description="Longest a request may take, queue included; its own `timeout` may be shorter; 0 = no "
        "limit.",
    )
    keepalive: Annotated[float, Info("s", group="Server")] = Field(
        5.0, ge=0, description="A comment in every stream that was silent for so long; 0 = none."
    )
    body_limit: Annotated[int, Info("bytes", group="Server")] = Field(
        32 * 2**20, ge=1024, description="Largest request body."
    )
    max_connections: Annotated[int, Info(group="Server")] = Field(
        0, ge=0, description="Connections at a time; one more is told 503. 0 = what open files allow."
    )
    read_timeout: Annotated[float, Info("s", group="Server")] = Field(
        30.0,
        ge=0,
        description="For a request's headers, and for its body, which gets a second more for each 16 KiB; "
        "0 = no limit.",
    )
    idle_timeout: Annotated[float, Info("s", group="Server")] = Field(
        75.0, ge=0, description="A connection without a request is closed after so long; 0 = never."
    )
    write_timeout: Annotated[float, Info("s", group="Server")] = Field(
        30.0, ge=0, description="A client that takes nothing of its answer for so long is cut off; 0 = never."
    )
    drain: Annotated[float, Info("s", group="Server")] = Field(
        5.0, ge=0, description="How long running answers may go on after the server was told to stop."
    )
    log_level: Annotated[Literal["debug", "info", "warning", "error"], Info(group="Server")] = Field(
        "info", description="Least severity that is logged."
    )

    # --- plugins
    plugin: Annotated[tuple[str, ...], Info(group="Plugins")] = Field(
        (), description="Plugin that must load; an error with the reason if it does not."
    )
    plugin_allow: Annotated[tuple[str, ...], Info(group="Plugins")] = Field(
        (), description="Load these plugins only."
    )
    plugin_block: Annotated[tuple[str, ...], Info(group="Plugins")] = Field(
        (), description="Load all plugins but these."
    )
