"""Compile the kernels of attention, DeltaNet, commits and experts for a list of targets, without a GPU.

    python compile_sequences.py cuda:75 cuda:90 cuda:120 hip:gfx942 [--wide] [--few]

Prints one line per kernel and target: name, target, "ok". --wide: heads of 128; --few: what CI has time for.
Of `attend` and `held_tree` for Hopper it also checks that what registers wrote for a product is fenced, then
waited for.
"""

from __future__ import annotations

import itertools
import re
import sys

import compile_kernels
from compile_kernels import ability_of, compiled, room_of
from luce_backend_triton import (
    attention,
    attention_cuts,
    attention_kernels,
    choice_kernels,
    delta,
    delta_chunks,
    delta_kernels,
    list_kernels,
    moe_kernels,
    nucleus_kernels,
    one_row_kernels,
    pick_kernels,
    route_kernels,
    row_kernels,
    state_kernels,
)
from luce_backend_triton.formats import FORMATS, SCALE_KINDS
from luce_backend_triton.invariant import attention_kernels as invariant_attention
from luce_backend_triton.invariant import delta_kernels as invariant_delta
from luce_backend_triton.invariant import kernels as invariant_kernels

from luce_core.contracts import CODECS, CodedField

I32 = (
    "index", "query_start", "length", "lengths", "span", "block", "first", "count", "seq", "parent", "axis",
    "position", "slots", "path", "used", "page", "order", "starts", "ids", "lut",
)  # fmt: skip
I64 = ("sees", "states", "logs_k", "logs_u", "logs_g", "logs", "pages")
F32 = (
    "scale", "cap", "q_eps", "k_eps", "v_eps", "magnitude", "lower", "unit_eps", "norm_eps", "q_scale", "eps",
)  # fmt: skip
PLAIN = (
    "ldq", "hdq", "ldg", "hdg", "ldk", "ldv", "axis_stride", "row_stride", "table_stride", "num_rows",
    "num_seqs", "words", "splits",
    "ldqkv", "ldz", "ldbeta", "lddecay", "most", "ldx", "ldr", "width", "path_stride", "n",
    "blocks", "per", "tiles", "weight_stride", "wide", "m", "ldy", "held",
)  # fmt: skip


def codings(k_codec, v_codec, dim):
    """Constants of codecs by name, "" = numbers."""
    fields = [CodedField(CODECS[name], dim) if name else None for name in (k_codec, v_codec)]
    return {**attention.coding(fields[0], "K"), **attention.coding(fields[1], "V")}


NUMBERS = codings("", "", 0)
CODEC_PAIRS = (("q8_0", "q8_0"), ("q4_0", "fp8"), ("fp8", "q4_0"), ("tq3_0", "tq3_0"), ("q8_0", ""))


def type_of(name):
    for names, kind in ((I64, "*i64"), (I32, "*i32"), (F32, "fp32"), (PLAIN, "i32")):
        if name in names:
            return kind
    return "*fp32"


def variants(target, dim, pairs):
    """(kernel, constants, types that differ, options)."""
    cuda = target.startswith("cuda")
    ability = ability_of(target)
    new = ability.matrix
    rows, chunk = ("tf32", "f16") if new else ("ieee", "ieee")
    overlap = {"OVERLAP": ability.overlap}
    arch = int(target.partition(":")[2]) if cuda else 0
    stages = attention_cuts.DEEP if new and room_of(target) >= attention_cuts.DEEP_BYTES else 3
    pages = {"pages_k": "*bf16", "pages_v": "*fp16", "turned_q": "*bf16", "window": "i32"}
    heads = {"H": 6, "HK": 2, "D": dim, "DV": dim, "DP": dim, "BLOCK": 32, "HELD": True, **NUMBERS}
    rope = {"ROPE": True, "START": 0, "HALF": dim // 4, "HALVES": True, "AXES": True}
    norms = {"Q_NORM": True, "K_NORM": True, "V_NORM": False, "HB": 1, "WRITE": True}
    yield row_kernels.make_rows, {**heads, **rope, **norms, **overlap}, pages, {"num_warps": 1}
    asked = {"q": "*bf16", **pages}
    all_of = {
        "WINDOW": True,
        "CAP": True,
        "SINKS": True,
        "SPAN": False,
        "GATE": 1,
        "PER_HEAD": False,
        "DVP": dim,
        "PTX": arch,
    }
    small = {"M": 16, "N": 16, "RT": 5, "SB": attention_cuts.COMPANY, "SPLIT": True}
    yield attention_kernels.attend, {**heads, **all_of, **small, **overlap}, asked, {"num_warps": 8}
    if new:
        large = {**heads, **all_of, "HELD": False, "M": 64, "N": 32, "RT": 21, "SB": 1, "SPLIT": False}
        yield attention_kernels.attend, {**large, **overlap}, asked, {"num_warps": 8, "num_stages": 2}
    one = {**heads, **all_of, **rope, **norms, "M": 16, "N": 32 if new else 16, "SPLIT": False, **overlap}
    one["AHEAD"] = True
    del one["HELD"], one["SPAN"], one["HB"]
    yield one_row_kernels.attend_one, one, {**pages, "q": "*fp32"}, {"num_warps": 8}
    bare = {**one, "WRITE": False, "ROPE": False, "Q_NORM": False, "K_NORM": False, "GATE": 0}
    yield one_row_kernels.attend_one, bare, {**pages, "q": "*fp32"}, {"num_warps": 8}
    ends = {"H": 6, "STEP": 16, "SINKS": True, "GATE": 2, "PER_HEAD": True}
    summed = {**ends, "DV": dim, "DVB": 32, "VT": 0, **overlap}
    yield attention_kernels.join, {**summed, "READY": False}, {}, {}
    yield attention_kernels.join, {**summed, "READY": True}, {"ready": "*fp16"}, {}
    alike = {**heads, **all_of, "M": 32, "N": 32, "PART": 512, "SB": attention_cuts.COMPANY, **overlap}
    apart = {"num_stages": 2, "enable_fp_fusion": False}
    yield invariant_attention.attend_parts, {**alike, "RT": 1}, asked, apart
    chunk_of = {**alike, "RT": 10, "HELD": False, "SPAN": True}
    yield invariant_attention.attend_parts, chunk_of, asked, apart
    whole = {"H": 6, "DV": dim, "DVP": dim, "HP": 1, "SINKS": True, "GATE": 2, "PER_HEAD": True}
    yield invariant_attention.join_parts, {**whole, "VT": 0, **overlap}, {}, {"num_warps": 1}
    for k_codec, v_codec in pairs:
        wide = max(dim, 64)
        codes = {**heads, "D": wide, "DV": wide, "DP": wide, **codings(k_codec, v_codec, wide)}
        kept = {"turned_q": "*fp16", "q": "*fp16", "window": "i32"}
        for letter, codec in (("k", k_codec), ("v", v_codec)):
            kept[f"pages_{letter}"] = "*u8" if codec else "*bf16"
            kept[f"scales_{letter}"] = "*fp16" if codec else "*bf16"
        yield row_kernels.make_rows, {**codes, **rope, **norms, **overlap}, {**kept, "q": "*fp32"}, {}
        held = {**codes, **all_of, "DVP": wide, **small}
        yield attention_kernels.attend, {**held, **overlap}, kept, {"num_stages": stages}
        single = {**one, **codes, "DVP": wide, "V_NORM": True, "AXES": False, "SPLIT": True, "AHEAD": False}
        del single["HELD"]
        yield one_row_kernels.attend_one, single, {**kept, "q": "*fp32"}, {"num_stages": stages}
        if new:
            many = {**codes, **all_of, "DVP": wide, "HELD": False, "M": 64, "N": 32, "RT": 21, "SB": 1}
            options = {"num_warps": 8, "num_stages": 2}
            yield attention_kernels.attend, {**many, "SPLIT": False, **overlap}, kept, options
        if v_codec:
            part = {"DV": wide, "DVB": max(64, codes["VT"]), "VT": codes["VT"]}
            yield attention_kernels.join, {**ends, **part, "READY": False, **overlap}, {}, {}
            turned = {**whole, "DV": wide, "DVP": wide, "VT": codes["VT"]}
            yield invariant_attention.join_parts, {**turned, **overlap}, {}, {"num_warps": 1}
        row = {**alike, **codes, "DVP": wide, "RT": 1}
        yield invariant_attention.attend_parts, row, kept, apart
    dims = {"KH": 2, "VH": 4, "DK": dim, "DV": dim}
    taps = {**dims, "DKP": dim, "DVP": dim, "KERNEL": 4}
    pointer = {"window": "*fp32"}
    yield delta_kernels.held_one, {**taps, "ALONE": False, **overlap}, pointer, {}
    rows_of = {**dims, "DP": dim, "RT": 8, "KERNEL": 4, "ABOVE": 1}
    yield delta_kernels.held_rows, {**rows_of, **overlap}, pointer, {}
    tree = {**dims, "DKP": dim, "DVB": 32, "ABOVE": 1, "PRECISE": rows, **overlap}
    for r in (16, 32, 64) if new else (delta.SMALL_HELD,):
        yield delta_kernels.held_tree, {**tree, "R": r}, pointer, {}
    turn = {**taps, "R": 4, "ABOVE": 0, "KDA": True}
    yield delta_kernels.held_in_turn, {**turn, **overlap}, pointer, {"num_warps": 8}
    for kda in (False, True):
        yield invariant_delta.in_turn, {**taps, "KDA": kda, **overlap}, pointer, {"num_warps": 8}
    normed = {"VH": 4, "DV": dim, "DVP": dim, "RT": 4, "ABOVE": 1}
    yield delta_kernels.norm_heads, {**normed, **overlap}, {}, {}
    fold = {**dims, "DKP": dim, "DVB": 32, "KDA": False, **overlap}
    yield state_kernels.fold, fold, {}, {}
    yield state_kernels.shift_rows, {"ROWS": 3, "COLS": 256, **overlap}, {}, {}
    yield state_kernels.move_entries, {"COLS": 256, "BLOCK": 32, **overlap}, {}, {}
    half = dict.fromkeys(("q", "k", "v", "w", "u", "states"), "*fp16" if cuda else "*fp32")
    cut = {**dims, "DKP": dim, "CHUNK": delta.CHUNK if new else delta.SMALL_CHUNK, "SB": 1}
    yield delta_chunks.convolve, {**dims, "DP": dim, "RT": 8, "KERNEL": 4}, {**half, **pointer}, {}
    yield delta_chunks.move_window, {"ROWS": 3, "COLS": 256}, pointer, {}
    if new or room_of(target) >= delta.SMALL_CHUNK_BYTES:
        yield delta_chunks.solve, {**cut, "DVP": dim, "PRECISE": chunk}, half, {}
        yield delta_chunks.carry, {**cut, "DVB": 32, "STAGES": 2}, half, {}
        yield delta_chunks.emit, {**cut, "DVP": dim}, half, {}
    fmt = FORMATS["Q6_K"]
    packed = {
        "RECORD": fmt.record_bytes, "CODES": fmt.code_bytes, "BITS": fmt.bits, "TABLE": bool(fmt.table),
        "ZERO": fmt.zero, "SCALES": SCALE_KINDS.index(fmt.scales),
    }  # fmt: skip
    yield moe_kernels.sort_pairs, {"STEP": 1024}, {"pairs": "i32"}, {}
    pick = {"K": 8, "X": 64, "SOFTMAX": True, "BIAS": True, "RENORM": True, "OVERLAP": False}
    plain = {"count": "i32", "scale": "fp32"}
    yield route_kernels.pick, pick, plain, {}
    routed = {"NORM": True, "TILE": 4, "WHOLE": 256, "ROWS": 2, "READY": False, "OVERLAP": False}
    yield route_kernels.logits, routed, {**plain, "rows": "i32"}, {}
    ready = {**routed, "WHOLE": 2048, "READY": True, **overlap}
    yield route_kernels.logits, ready, {**plain, "rows": "i32", "ready8": "*i8"}, {"num_warps": 8}
    numbers = {
        **dict.fromkeys(("wanted", "slot", "where", "token", "newest", "ends"), "*i32"),
        **dict.fromkeys(("rows", "vocab", "part", "parts", "num_seqs"), "i32"),
        "seeds": "*i64", "seq": "*i32",
    }  # fmt: skip
    numbers |= dict.fromkeys(("limits", "found", "listed", "marks", "sure", "mask"), "*i32")
    numbers |= dict.fromkeys(("above", "sees", "top_k", "min_index", "cuts", "sums"), "*i64")
    numbers |= {"words": "i32", "most": "i32", "mask_words": "i32"}
    first = dict.fromkeys(("MASK", "BIAS", "PENALTY", "MIN_TOKENS", "NOISE"), True)
    first |= {"STEP": 1024, **overlap}
    yield pick_kernels.process, first, numbers, {"enable_fp_fusion": False}
    yield pick_kernels.top_of_part, {"CUT": True, "STAGES": 3, "STEP": 1024, **overlap}, numbers, {}
    if ability_of(target).atomics:
        yield from filters(numbers, overlap)
    for stages, xtc in ((1, False), (3, True)):
        kept = {"NOISE": True, "MIN_P": True, "CUT": True, "STAGES": stages, "XTC": xtc, **overlap}
        yield pick_kernels.best_of_part, {**kept, "STEP": 1024, "P": 256}, numbers, {}
    yield pick_kernels.best_of_parts, {"P": 256, **overlap}, {**numbers, "out": "*i64"}, {"num_warps": 1}
    filled = {**numbers, "out": "*i32", "count": "*i32"}
    yield pick_kernels.fill_tokens, {"S": 16}, filled, {"num_warps": 1}
    noted = {**numbers, "picks": "*i64", "count": "*i32", "out": "*i64"}
    yield pick_kernels.note, {"ENDS": 32, "MARKS": True, **overlap}, noted, {"num_warps": 1}
    has = {"HAS_SCALE": True, "HAS_BIAS": True, "HAS_RESIDUAL": True, "M": 32, "ROWS": 32, "DEPTH": 64}
    types = {"x": "*bf16", "w": "*bf16", "scale": "*fp32", "k": "i32"}
    yield invariant_kernels.linear_floats, has, types, {"num_stages": 3}
    of = {"X": 8, "EXPERTS": 8}
    weights = {"x": "*fp16", "records": "*u8", "halves": "*fp16", "w": "*fp16"}
    yield moe_kernels.grouped, {**of, "M": 16, "ROWS": 16, **packed}, weights, {}
    if new:
        yield moe_kernels.grouped_dense, {**of, "M": 64, "ROWS": 64, "DEPTH": 64}, weights, {"num_stages": 3}
    one = {"K": 2, "COLS": 64, "WHOLE": 64, "SHARED": True, "GATED": True, "NORM": True, "RESIDUAL": True}
    yield moe_kernels.combine, one, {"each": "i32", "lds": "i32"}, {}


def filters(numbers, overlap):
    """Where top-k, typical-p and top-p cut, and what XTC takes out."""
    sizes = {"STEP": 512, "P": 256, **overlap}
    searched = {"N": 8, "C": 1024, "MOST": 4096, "ENOUGH": 2048, "P": 256, **overlap}
    for stage in range(3):
        for done in range(nucleus_kernels.PASSES.value):
            passed = {"STAGE": stage, "DONE": done, "ENOUGH": 2048, **sizes}
            yield nucleus_kernels.add_masses, passed, numbers, {"num_warps": 8}
        yield nucleus_kernels.list_range, {"STAGE": stage, "ENOUGH": 2048, **sizes}, numbers, {}
        for by_number, after in ((True, False), (False, True), (False, False))[2 * (stage > 0) :]:
            which = {"STAGE": stage, "BY_NUMBER": by_number, "AFTER": after, **searched}
            yield list_kernels.find_cut, which, numbers, {"num_warps": 8}
    yield choice_kernels.add_moments, sizes, numbers, {}
    for likely in (False, True):
        for stages in (1, 3):
            choices = {"LIKELY_ONES": likely, "CUT": True, "STAGES": stages, "MIN_P": True, **sizes}
            yield choice_kernels.add_choices, choices, numbers, {}


WIDE = {"heads": 24, "kv_heads": 4, "dim": 256}
"""Attention of Qwen3.5-27B: the most registers a tile wants."""
WIDE_BATCHES = ((2048, False), (256, False), (24, True))
"""Rows of one sequence, of a prompt or held, behind 40,000 places."""


def wide_attention(target, pairs):
    """As `variants`: `attend` for WIDE, cut as such a card cuts it."""
    ability, dim = ability_of(target), WIDE["dim"]
    card = attention_cuts.Room(132, room_of(target), ability.matrix)
    arch = int(target.partition(":")[2]) if target.startswith("cuda") else 0
    heads = {"H": WIDE["heads"], "HK": WIDE["kv_heads"], "D": dim, "DV": dim, "DP": dim, "DVP": dim}
    alike = {
        "BLOCK": 32, "WINDOW": False, "CAP": False, "SINKS": False, "SPAN": False, "GATE": 1,
        "PER_HEAD": False, "PTX": arch, "SB": 1, "OVERLAP": ability.overlap,
    }  # fmt: skip
    for k_codec, v_codec in (("", ""), *pairs):
        codes = codings(k_codec, v_codec, dim)
        kept = {"turned_q": "*fp16", "q": "*fp16", "window": "i32"}
        for letter, codec in (("k", k_codec), ("v", v_codec)):
            kept |= {f"pages_{letter}": "*u8" if codec else "*fp16", f"scales_{letter}": "*fp16"}
        for rows, held in WIDE_BATCHES:
            cut = attention_cuts.cut(rows, 1, 40_000, WIDE["heads"], WIDE["kv_heads"], dim, 2, card)
            joined = attention_cuts.joins(cut, codes["VT"])
            shape = {"M": cut.m, "N": cut.places, "RT": cut.rows, "SPLIT": joined}
            options = {"num_warps": cut.warps, "num_stages": cut.stages}
            yield attention_kernels.attend, {**heads, **alike, **codes, **shape, "HELD": held}, kept, options


FEW_PAIRS = (("tq3_0", "q8_0"),)
FEW = (
    "make_rows", "attend", "attend_one", "held_one", "solve", "carry", "best_of_part", "attend_parts",
    "in_turn", "linear_floats",
)  # fmt: skip
"""With those of compile_kernels.py, which are small."""
EVENTS = re.compile(
    r"(?P<what>wgmma\.mma_async|fence\.proxy\.async|bar\.sync|st\.shared|stmatrix|\bret\b)"
    r"|(?P<label>\$\w+):"
    r"|(?P<maybe>@!?%\w+\s+)?bra(?:\.uni)?\s+(?P<to>\$\w+)"
)


def check_fences(ptx):
    """Between a store to shared memory and the product of Hopper's tensor cores behind it, whichever way a
    thread takes: a fence, and behind that a barrier. Triton 3.6 has left the barrier out (see `product` in
    attention_kernels.py).
    """
    steps = list(EVENTS.finditer(ptx))
    labels = {one["label"]: at for at, one in enumerate(steps) if one["label"]}
    seen, ahead = set(), [(0, True, True)]  # a step; whether what was stored is fenced, and waited for
    while ahead:
        state = at, fenced, waited = ahead.pop()
        if state in seen or at == len(steps):
            continue
        seen.add(state)
        one = steps[at]
        if one["to"]:
            ahead.append((labels[one["to"]], fenced, waited))
            if not one["maybe"]:
                continue
        elif one["what"] == "ret":
            continue
        elif one["what"] in ("st.shared", "stmatrix"):
            fenced = waited = False
        elif one["what"] == "fence.proxy.async":
            fenced = True
        elif one["what"] == "bar.sync":
            waited = waited or fenced
        elif one["what"]:
            assert waited, "an operand of wgmma is read before it is published"
        ahead.append((at + 1, fenced, waited))


def changes_layout(constexprs):
    """Whether a mask goes through shared memory in front of a product, which check_fences takes for an
    operand: of held rows of wide heads, whose values come by asynchronous copies.
    """
    return constexprs.get("DVP") == WIDE["dim"] and constexprs["HELD"] and not constexprs["VC"]


def main(targets, dim, names=(), pairs=CODEC_PAIRS):
    for target in targets:
        every = itertools.chain(variants(target, dim, pairs), wide_attention(target, pairs))
        for kernel, constexprs, types, options in every:
            if names and kernel.fn.__name__ not in names:
                continue
            signature = {
                name: "constexpr" if name in constexprs else types.get(name, type_of(name))
                for name in kernel.arg_names
            }
            places = {(kernel.arg_names.index(name),): value for name, value in constexprs.items()}
            aligned = {
                (place,): [["tt.divisibility", 16]]
                for place, name in enumerate(kernel.arg_names)
                if signature[name].startswith("*")
            }
            made = compiled(kernel, signature, places, target, options, aligned)
            multiplies = kernel in (attention_kernels.attend, delta_kernels.held_tree)
            if multiplies and target == "cuda:90" and not changes_layout(constexprs):
                check_fences(made.asm["ptx"])
            print(kernel.fn.__name__, target, "ok", flush=True)


if __name__ == "__main__":
    given = sys.argv[1:]
    few, targets = "--few" in given, [one for one in given if ":" in one]
    if few:
        compile_kernels.main(targets)
    main(targets, 128 if "--wide" in given else 32, *((FEW, FEW_PAIRS) if few else ()))
