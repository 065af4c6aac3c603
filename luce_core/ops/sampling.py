"""Engine-side ops: parameter table by slot, logit processing, Gumbel-max sampling. References in torch.

Order of transforms, as documented to users: mask of a constraint, logit bias, repetition penalty,
frequency and presence penalties, DRY, minimum length, top-n-sigma, temperature, top-k, typical-p, top-p,
min-p, XTC, noise, argmax.
Every filter works on the distribution left by the one before.
Temperature 0 is noise 0: the argmax of the processed logits, lowest id on ties.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from luce_core.contracts import ForwardBatch, SamplingParams
from luce_core.ops import marks
from luce_core.ops.newest import NewestTokens
from luce_core.ops.noise import CounterNoise

HEAD = 256
"""Candidates looked at before a full sort: the best 256 nearly always hold the mass top-p asks for."""

WORD_BITS = 64
"""Of `sees`."""

MASK_BITS = 32
"""Of a word of `ForwardBatch.mask`."""

DRY_MOST = 60
"""Largest exponent of a DRY penalty: beyond it a logit is as good as forbidden, and floats end."""

HOST_FLAGS = frozenset({"dry"})
"""For which the host has to know the text, and waits for the device to have it."""

PROCESSED = frozenset({"bias", "penalty", "dry", "min_tokens", "sigma", "noise"})
"""What `process_logits` does."""

MARKED = frozenset({"penalty", "min_tokens"})
"""What reads the marks of a slot."""

FILTERS = frozenset({"top_k", "top_p", "typical", "xtc"})
"""For which candidates are put in order."""

_NOISE = CounterNoise()


class ParamTable:
    """(dev) Sampling parameters of every slot. Written when a slot is taken, read by the sampling ops."""

    def __init__(self, num_slots: int, vocab: int, device: str = "cpu") -> None:
        self.vocab = vocab
        self.device = device
        self.num_slots = num_slots

        def column(dtype: torch.dtype) -> Tensor:
            return torch.zeros(num_slots, dtype=dtype, device=device)

        self.temperature = column(torch.float32)
        self.top_k = column(torch.int64)
        self.top_p = column(torch.float32)
        self.min_p = column(torch.float32)
        self.typical_p = column(torch.float32)
        self.repetition = column(torch.float32)
        self.frequency = column(torch.float32)
        self.presence = column(torch.float32)
        self.seed = column(torch.int64)
        self.min_index = column(torch.int64)
        """Index of the first token that may end the text."""
        self.top_n_sigma = column(torch.float32)
        self.xtc_probability = column(torch.float32)
        self.xtc_threshold = column(torch.float32)
        self.newest = NewestTokens(num_slots, device)
        self.flags: list[frozenset[str]] = [frozenset()] * num_slots
        self.dry: list[Dry | None] = [None] * num_slots
        """(host) Where a slot asked for it."""
        self.marks = marks.Marks(num_slots, vocab, device)
        """Of slots with penalties or a minimum length."""
        self.bias: Tensor | None = None
        """f32[slots, V], from the first slot on that asked for one; it does not move."""

    def take(self, slot: int, params: SamplingParams, prompt: Iterable[int], ending: Iterable[int]) -> None:
        """Fill the row of `slot` for a new sequence; `ending` are the ids that may not come before
        `min_tokens`.
        """
        prompt = list(prompt)
        self.temperature[slot] = params.temperature
        self.top_k[slot] = params.top_k
        self.top_p[slot] = params.top_p
        self.min_p[slot] = params.min_p
        self.typical_p[slot] = params.typical_p
        self.repetition[slot] = params.repetition
        self.frequency[slot] = params.frequency
        self.presence[slot] = params.presence
        self.top_n_sigma[slot] = params.top_n_sigma
        self.xtc_probability[slot] = params.xtc_probability
        self.xtc_threshold[slot] = params.xtc_threshold
        self.seed[slot] = params.seed - (1 << 64) if params.seed >= 1 << 63 else params.seed
        self.min_index[slot] = len(prompt) + params.min_tokens
        ending = sorted(ending)
        self.newest.take(slot, ending)
        self._take_bias(slot, params)
        self.flags[slot] = _flags(params)
        self.dry[slot] = Dry(params, prompt) if params.dry_multiplier > 0 else None
        if self.flags[slot] & MARKED:
            self.marks.take(slot, prompt, ending)

    def _take_bias(self, slot: int, params: SamplingParams) -> None:
        if self.bias is None and params.logit_bias:
            self.bias = torch.zeros(self.num_slots, self.vocab, device=self.device)
        if self.bias is not None:
            self.bias[slot] = 0.0
        if self.bias is not None and params.logit_bias:
            ids = torch.tensor(list(params.logit_bias), dtype=torch.int64, device=self.device)
            values = torch.tensor(list(params.logit_bias.values()), dtype=torch.float32, device=self.device)
            self.bias[slot, ids] = values

    def count(self, slot: int, tokens: Iterable[int], noted: bool = False) -> None:
        """These tokens were emitted. noted: `note_picks` has marked them."""
        tokens = list(tokens)
        if (dry := self.dry[slot]) is not None:
            dry.text += tokens
        if "penalty" in self.flags[slot] and not noted:
            self.marks.count(slot, tokens)

    def step(self, slots: Iterable[int]) -> StepParams:
        """What one step over these slots needs."""
        return StepParams(self, frozenset().union(*(self.flags[slot] for slot in slots)))


@frozen
class StepParams:
    """The table and what the slots of this step use of it: ops skip what nobody asked for."""

    table: ParamTable
    flags: frozenset[str]

    @property
    def waits(self) -> bool:
        """Whether the host must know something of the device's, or of the text, to sample."""
        looks = bool(self.flags & FILTERS) and "typical" not in self.flags and "wide" in self.flags
        return looks or bool(self.flags & HOST_FLAGS)

    @property
    def counted(self) -> Tensor | None:
        """The marks where picks have to be counted in, if anywhere."""
        return self.table.marks.table if "penalty" in self.flags else None


def _flags(params: SamplingParams) -> frozenset[str]:
    """Beside what was asked for: wide, the best HEAD candidates may not hold all that can be picked."""
    wanted = {
        "wide": params.temperature > 0.0 and not 0 < params.top_k <= HEAD,
        "bias": bool(params.logit_bias),
        "penalty": params.repetition != 1.0 or params.frequency != 0.0 or params.presence != 0.0,
        "dry": params.dry_multiplier > 0.0,
        "min_tokens": params.min_tokens > 0,
        "sigma": params.temperature > 0.0 and params.top_n_sigma > 0.0,
        "xtc": params.temperature > 0.0 and params.xtc_probability > 0.0,
        "noise": params.temperature > 0.0,
        "top_k": params.temperature > 0.0 and params.top_k > 0,
        "top_p": params.temperature > 0.0 and params.top_p < 1.0,
        "min_p": params.temperature > 0.0 and params.min_p > 0.0,
        "typical": params.temperature > 0.0 and params.typical_p < 1.0,
        "logprobs": params.logprobs > 0,
    }
    return frozenset(name for name, on in wanted.items() if on)


def _rows(b: ForwardBatch) -> tuple[Tensor, Tensor]:
    """(slot, index of the emitted token) of every wanted row, i64[R]."""
    wanted = b.wanted.long()
    return b.slot.long()[b.seq.long()[wanted]], b.index.long()[wanted] + 1


def process_logits(ops: Any, logits: Tensor, b: ForwardBatch, params: StepParams) -> Tensor:
    """f32[R, V] -> f32[R, V]: mask, bias, penalties, minimum length, temperature. The input is left as it
    was.
    """
    flags, table = params.flags, params.table
    if b.mask is None and not flags & PROCESSED:
        return logits
    slot, index = _rows(b)
    out = logits.clone()
    if b.mask is not None:
        out.masked_fill_(~_allowed(b.mask, out.shape[1]), -torch.inf)
    if "bias" in flags and table.bias is not None:
        out += table.bias[slot]
    marked = _marked(slot, params)
    if "penalty" in flags:
        out = _penalize(out, marked, b, slot, table)
    if "dry" in flags:
        _dry(out, b, slot.tolist(), table)
    if "min_tokens" in flags:
        early = (index < table.min_index[slot])[:, None]
        out.masked_fill_(early & marks.ending(marked), -torch.inf)
    if "sigma" in flags:
        out = _top_n_sigma(out, table.top_n_sigma[slot])
    if "noise" in flags:
        temperature = table.temperature[slot]
        out /= torch.where(temperature > 0, temperature, 1.0)[:, None]
    return out


def _allowed(mask: Tensor, vocab: int) -> Tensor:
    """i32[R, words] -> bool[R, V]."""
    token = torch.arange(vocab, device=mask.device)
    return (mask[:, token // MASK_BITS] >> (token % MASK_BITS)) & 1 > 0


def _marked(slot: Tensor, params: StepParams) -> Tensor:
    """i32[R, V], of every row; empty where nobody asked."""
    table = params.table.marks.table
    if table is None or not params.flags & MARKED:
        return torch.empty(0, dtype=torch.int32, device=slot.device)
    return table[slot]


def _top_n_sigma(logits: Tensor, n: Tensor) -> Tensor:
    """Keep logits within n standard deviations of the best (Tang et al. 2024); -inf counts in neither."""
    finite = logits > -torch.inf
    count = finite.sum(-1, keepdim=True)
    mean = torch.where(finite, logits, 0.0).sum(-1, keepdim=True) / count
    spread = torch.where(finite, (logits - mean) ** 2, 0.0).sum(-1, keepdim=True) / count
    floor = logits.amax(-1, keepdim=True) - n[:, None] * spread.sqrt()
    return torch.where((logits < floor) & (n[:, None] > 0), -torch.inf, logits)


def _candidates(b: ForwardBatch) -> list[list[int]]:
    """Per wanted row, the candidate tokens on its path, itself included; decided rows are text already."""
    sure, start = b.sure.tolist(), b.query_start.tolist()
    seq, sees, token = b.seq.tolist(), b.sees.tolist(), b.token.tolist()
    return [
        [
            token[start[seq[t]] + j]
            for j in range(sure[seq[t]], start[seq[t] + 1] - start[seq[t]])
            if sees[t][j // 64] >> (j % 64) & 1
        ]
        for t in b.wanted.tolist()
    ]


class Dry:
    """(host) One slot's text and how it is kept from repeating sequences (the DRY sampler)."""

    def __init__(self, params: SamplingParams, prompt: Iterable[int]) -> None:
        self.params = params
        self.text = list(prompt)

    def penalties(self, path: list[int]) -> dict[int, float]:
        """Token -> what is taken off its logit after text + path.

        A token that would continue an earlier occurrence of the newest n tokens is penalized by
        multiplier * base^(n - allowed), where n is the longest such match that crosses no breaker.
        """
        params = self.params
        text = [*self.text, *path][-params.dry_range :]
        newest_first = [
            -1 - place if token in params.dry_breakers else token
            for place, token in enumerate(reversed(text))
        ]  # a breaker equals nothing, so no match reaches across it
        lengths: dict[int, int] = {}
        for back, length in enumerate(_match_lengths(newest_first)):
            if back and length >= params.dry_allowed_length:
                token = newest_first[back - 1]
                lengths[token] = max(length, lengths.get(token, 0))
        return {
            token: params.dry_multiplier
            * params.dry_base ** min(length - params.dry_allowed_length, DRY_MOST)
            for token, length in lengths.items()
            if token >= 0
        }


def _match_lengths(items: list[int]) -> list[int]:
    """z[k]: how many items from place k on equal those from the start. Linear time (the Z algorithm)."""
    z = [0] * len(items)
    left = right = 0
    for k in range(1, len(items)):
        length = min(right - k, z[k - left]) if k < right else 0
        while k + length < len(items) and items[length] == items[k + length]:
            length += 1
        z[k] = length
        if k + length > right:
            left, right = k, k + length
    return z


def _dry(logits: Tensor, b: ForwardBatch, slots: list[int], table: ParamTable) -> None:
    """In place."""
    for row, (slot, path) in enumerate(zip(slots, _candidates(b), strict=True)):
        if (dry := table.dry[slot]) is not None and (found := dry.penalties(path)):
            ids = torch.tensor(list(found), dtype=torch.int64, device=logits.device)
            logits[row, ids] -= torch.tensor(list(found.values()), dtype=torch.float32, device=logits.device)


def _penalize(logits: Tensor, marked: Tensor, b: ForwardBatch, slot: Tensor, table: ParamTable) -> Tensor:
    """Repetition over prompt and answer; frequency and presence over the answer, candidates on the path
    included. marked: i32[R, V].
    """
    counts = marks.emitted(marked)
    if b.token.shape[0] > b.slot.shape[0]:  # with one row each there are no candidates
        counts.scatter_add_(1, *_on_path(b))
    repeated = marks.prompted(marked) | (counts > 0)
    factor = table.repetition[slot][:, None]
    logits = torch.where(repeated, torch.where(logits > 0, logits / factor, logits * factor), logits)
    return logits - table.frequency[slot][:, None] * counts - table.presence[slot][:, None] * (counts > 0)


def _on_path(b: ForwardBatch) -> tuple[Tensor, Tensor]:
    """As `_candidates`, on the device: (tokens i64[R, M] of up to M rows of the sequence of each wanted row,
    i32[R, M] 1 where one is a candidate on its path).
    """
    wanted, start = b.wanted.long(), b.query_start.long()
    seq, words = b.seq.long()[wanted], b.sees[wanted]
    j = torch.arange(min(WORD_BITS * words.shape[1], b.token.shape[0]), device=wanted.device)
    place = start[seq][:, None] + j
    seen = (words[:, j // WORD_BITS] >> (j % WORD_BITS)) & 1
    seen = seen * (j >= b.sure[seq][:, None]) * (place < start[seq + 1][:, None])
    return b.token.long()[place.clamp(max=b.token.shape[0] - 1)], seen.to(torch.int32)


def sample(ops: Any, logits: Tensor, b: ForwardBatch, params: StepParams) -> Tensor:
    """Processed logits f32[R, V] -> picked token ids i64[R]."""
    if "noise" not in params.flags:
        return _argmax(logits)
    slot, index = _rows(b)
    values, ids = _filter(logits, slot, index, params)
    table = params.table
    token = ids if ids is not None else torch.arange(logits.shape[-1], device=logits.device)[None]
    noise = _NOISE.gumbel(table.seed[slot][:, None], index[:, None], token)
    noisy = torch.where(table.temperature[slot][:, None] > 0, values + noise, values)
    best = _argmax(noisy)
    return best if ids is None else ids.gather(-1, best[:, None])[:, 0]


def _argmax(rows: Tensor) -> Tensor:
    """i64[R], the lowest id on ties. numpy's takes 6 µs where torch's takes 106 on a CPU (49,152 columns)."""
    if rows.device.type == "cpu":
        return torch.from_numpy(rows.numpy().argmax(-1))
    return rows.argmax(dim=-1)


def _filter(logits: Tensor, slot: Tensor, index: Tensor, params: StepParams) -> tuple[Tensor, Tensor | None]:
    """(values [R, K], ids [R, K], best first), or (values [R, V], None) when nothing needs an order."""
    flags, table = params.flags, params.table
    if "min_p" in flags and not flags & FILTERS:
        floor = logits.amax(dim=-1, keepdim=True) + torch.log(table.min_p[slot])[:, None]
        return logits.masked_fill(logits < floor, -torch.inf), None
    if not flags & FILTERS:
        return logits, None
    vocab = logits.shape[-1]
    if "typical" not in flags and vocab > HEAD:
        values, ids = logits.topk(HEAD, dim=-1)
        keep, covered = _keep(values, logits.logsumexp(dim=-1, keepdim=True), slot, index, params)
        if "wide" not in flags or bool(covered.all()):
            return values.masked_fill(~keep, -torch.inf), ids
    # A stable order by value then id: equal logits at a cut fall the same way whatever the batch.
    values, ids = logits.sort(dim=-1, descending=True, stable=True)
    keep, _ = _keep(values, values.logsumexp(dim=-1, keepdim=True), slot, index, params)
    return values.masked_fill(~keep, -torch.inf), ids


def _keep(
    values: Tensor, total: Tensor, slot: Tensor, index: Tensor, params: StepParams
) -> tuple[Tensor, Tensor]:
    """Which of the sorted `values` [R, K] survive, and bool[R, 1] whether all certainly lie within these K.

    total: logsumexp of the whole rows [R, 1].
    """
    table, flags = params.table, params.flags
    sampled = table.temperature[slot][:, None] > 0
    rank = torch.arange(values.shape[-1], device=values.device)[None]
    k = table.top_k[slot][:, None]
    k = torch.where((k <= 0) | ~sampled, torch.iinfo(torch.int64).max, k)
    keep = rank < k
    limited = k <= values.shape[-1]
    if "top_k" in flags:
        total = torch.where(limited, values.masked_fill(~keep, -torch.inf).logsumexp(-1, keepdim=True), total)
    if "typical" in flags:
        typical_p = torch.where(sampled, table.typical_p[slot][:, None], 1.0)
        keep = keep & _typical(values, keep, typical_p)
        total = values.masked_fill(~keep, -torch.inf).logsumexp(-1, keepdim=True)
    probs = (values.masked_fill(~keep, -torch.inf) - total).exp()
    before = probs.cumsum(-1) - probs
    top_p = torch.where(sampled, table.top_p[slot][:, None], torch.inf)
    if "top_p" in flags:
        keep = keep & ((before < top_p) | (rank == 0) | (top_p >= 1.0))
    if "min_p" in flags:
        keep = keep & (values >= values[:, :1] + torch.log(table.min_p[slot])[:, None])
    if "xtc" in flags:
        keep = keep & ~_xtc(values.masked_fill(~keep, -torch.inf), slot, index, table)
    mass = before[:, -1:] + probs[:, -1:]
    covered = limited | (mass >= top_p) | ~sampled
    return keep, covered


def _xtc(values: Tensor, slot: Tensor, index: Tensor, table: ParamTable) -> Tensor:
    """bool[R, K]: the top choices XTC removes, all but the least likely. values: sorted, -inf where filtered.

    Whether it acts is drawn from the request's own noise, under a token id no vocabulary has.
    """
    probs = values.softmax(-1)
    top = probs >= table.xtc_threshold[slot][:, None]
    count = top.sum(-1, keepdim=True)
    nobody = torch.tensor([[0xFFFFFFFF]], device=values.device)
    chance = _NOISE.uniform(table.seed[slot][:, None], index[:, None], nobody)
    acts = (chance < table.xtc_probability[slot][:, None]) & (count >= 2)
    acts &= table.temperature[slot][:, None] > 0
    return acts & top & (top.cumsum(-1) < count)  # typical-p may have cut what comes before them


def _typical(values: Tensor, alive: Tensor, typical_p: Tensor) -> Tensor:
    """Locally typical sampling (Meister et al. 2023): tokens whose surprise is nearest the entropy, up to
    a mass.
    """
    logp = values.masked_fill(~alive, -torch.inf).log_softmax(-1)
    p = logp.exp()
    entropy = -torch.where(p > 0, p * logp, 0.0).sum(-1, keepdim=True)
    distance = torch.where(p > 0, (-logp - entropy).abs(), torch.inf)
    order = distance.argsort(dim=-1, stable=True)
    ordered = p.gather(-1, order)
    inside = (ordered.cumsum(-1) - ordered < typical_p) | (typical_p >= 1.0)
    return torch.zeros_like(alive).scatter_(-1, order, inside)


def logprobs(ops: Any, logits: Tensor, picked: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of the model itself, before any transform: of `picked` f32[R], and the best `top`
    (values, ids).
    """
    normal = logits.log_softmax(-1)
    values, ids = normal.topk(min(top, logits.shape[-1]), dim=-1)
    return normal.gather(-1, picked[:, None])[:, 0], values, ids
