"""Scans of recurrent mixers over a few tokens, from a given state, of which every position can be taken up afterwards.

After token i a state is S[i] = decay[i] * S[i - 1] + left[i] (x) right[i], in every family here. Nothing in a token's own
*terms* (decay, left, right) depends on the tokens behind it. So a pass keeps the terms of its tokens instead of the state
after the last: whatever is accepted of them, ``after`` adds up that many, for all rows of a batch at once, in the one
product that the state after the last would have taken.

Sources: gated delta rule, 2412.06464 (chunks by the WY form, 2406.06484); Kimi's, 2510.26692 (a decay for each channel of
the keys); Mamba-2, 2405.21060; Mamba, 2312.00752. All in float32. transformers' own functions are the slow twins.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from foretell.model.hf.recurrent.branches import Branches

CHUNK = 64
"""Tokens read at once; with a decay for each channel a quarter of it, since that takes [n, n, channels] numbers."""


class Scan(ABC):
    """One mixer's scan, called by the mixer in the place of transformers' function."""

    function: ClassVar[str]
    """The name of that function."""
    terms: dict[str, int]
    """Sizes of what is kept of a token, float32."""

    def __init__(self) -> None:
        self.state: Tensor = torch.empty(0)  # before the call [b, ...]; after it, where ``count`` is given, behind it
        self.count: Tensor | None = None  # [b] the tokens of each row that are real; None: the state stays as it is
        self.kept: dict[str, Tensor] = {}  # terms of the call's tokens, each [b, n, size]
        self.branches: Branches | None = None  # where the call's tokens are nodes of a tree; they are read at once
        self.earlier: Mapping[str, Tensor] = {}  # terms held at that tree's places, each [b, M, size]

    @classmethod
    @abstractmethod
    def made(cls, shape: tuple[int, ...], conv_width: int) -> "Scan | None":
        """Of a mixer with states of a shape, behind a convolution of conv_width channels; None for shapes of others."""

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """What transformers' function of that name returns, arguments as it has them; the second is any tensor."""

    @abstractmethod
    def after(self, state: Tensor, terms: Mapping[str, Tensor], count: Tensor | None) -> Tensor:
        """[b, ...] the state after count [b] tokens (None: all) of terms [b, m, size], from state. A copy."""


class OuterScan(Scan):
    """States are [h, d, e], of left [h, d] and right [g, e], each right shared by h/g heads."""

    def __init__(self, shape: tuple[int, ...], groups: int, channels: int) -> None:
        """channels: decays of each head, 1 or d."""
        super().__init__()
        self.heads, self.rows, self.columns = shape
        self.groups, self.channels = groups, channels
        self.terms = {"left": self.heads * self.rows, "right": groups * self.columns, "decay": self.heads * channels}
        self.chunk = CHUNK if channels == 1 else CHUNK // 4

    def after(self, state: Tensor, terms: Mapping[str, Tensor], count: Tensor | None) -> Tensor:
        """See ``Scan``."""
        batch, width = terms["left"].shape[:2]
        decay = terms["decay"].view(batch, width, self.heads, self.channels)
        left = terms["left"].view(batch, width, self.heads, self.rows)
        right = terms["right"].view(batch, width, self.groups, self.columns)
        if count is not None:
            out = (torch.arange(width, device=state.device) >= count.to(state.device)[:, None])[..., None, None]
            decay, left = decay.masked_fill(out, 0.0), left.masked_fill(out, 0.0)
            right = right.masked_fill(out, 0.0)  # what lies behind a row's last token may be anything
        summed = decay.cumsum(1)  # logarithms
        whole = summed[:, -1]
        left = left * (whole[:, None] - summed).exp()
        left = left.view(batch, width, self.groups, -1).permute(0, 2, 3, 1)
        added = (left @ right.transpose(1, 2)).view(state.shape)
        return torch.addcmul(added, state, whole.exp()[..., None])

    def _whole(self, branches: Branches, name: str, new: Tensor) -> Tensor:
        """[b, M, ...] one kind of terms at all places of a tree, new [b, n, ...] ones of this pass among them."""
        held = self.earlier[name]
        return branches.whole(held.view(*held.shape[:2], *new.shape[2:]), new)

    def _move(self, at: int, width: int, of: int, left: Tensor, right: Tensor, decay: Tensor) -> None:
        """Go on behind tokens [at, at + width) of a call over ``of``, whose terms are given, [b, width, ...] each."""
        if self.count is None and at + width == of:
            return
        terms = _terms(left, right, decay)
        count = None if self.count is None else (self.count - at).clamp(0, width)
        self.state = self.after(self.state, terms, count)


class DeltaScan(OuterScan):
    """Gated delta nets: S = exp(g) S + k (x) beta (v - exp(g) k S)."""

    function = "torch_chunk_gated_delta_rule"

    @classmethod
    def made(cls, shape: tuple[int, ...], conv_width: int) -> "Scan | None":
        """See ``Scan``."""
        return cls(shape, shape[0], 1) if len(shape) == 3 else None

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        *args: Any,
        use_qk_l2norm_in_kernel: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        """query and key [b, n, k, d], value [b, n, h, e], g [b, n, h] or, with channels, [b, n, h, d], beta [b, n, h]."""
        num_new, dtype = query.shape[1], query.dtype
        asked, key = query.float(), key.float()
        if use_qk_l2norm_in_kernel:
            asked, key = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (asked, key))
        # Keys and queries are read together: [b, h, 2, n, d].
        pair = torch.stack([key, asked * self.rows**-0.5], 2).permute(0, 3, 2, 1, 4)
        if pair.shape[1] != self.heads:
            pair = pair.repeat_interleave(self.heads // pair.shape[1], dim=1)
        value, g, beta = (x.float().transpose(1, 2) for x in (value, g.view(*g.shape[:3], self.channels), beta))
        if self.branches is not None:
            whole, right = self._read_branches(self.branches, pair, value, g, beta)
            self.kept = _terms(pair[:, :, 0].transpose(1, 2), right.transpose(1, 2), g.transpose(1, 2))
            return whole.transpose(1, 2).to(dtype), self.state
        outputs, news = [], []
        for at in range(0, num_new, self.chunk):
            part = slice(at, at + self.chunk)
            keys = pair[:, :, 0, part]
            output, new = self._read(pair[:, :, :, part], value[:, :, part], g[:, :, part], beta[:, :, part])
            terms = (x.transpose(1, 2) for x in (keys, new, g[:, :, part]))
            self._move(at, keys.shape[2], num_new, *terms)
            outputs.append(output)
            news.append(new)
        right, whole = (torch.cat(x, 2) if len(x) > 1 else x[0] for x in (news, outputs))
        self.kept = _terms(pair[:, :, 0].transpose(1, 2), right.transpose(1, 2), g.transpose(1, 2))
        return whole.transpose(1, 2).to(dtype), self.state

    def _read(self, pair: Tensor, value: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
        """Output and new values [b, h, n, e] of one chunk."""
        count = pair.shape[3]
        summed = g.cumsum(2)  # [b, h, n, channels]
        faded = summed.exp()[:, :, None]
        apart = (summed[:, :, :, None] - summed[:, :, None]).masked_fill(_later(count, g.device)[..., None], -torch.inf)
        if self.channels == 1:
            scores = (pair.flatten(2, 3) @ pair[:, :, 0].transpose(2, 3)).view(*pair.shape[:4], count)
            scores = scores * apart.exp()[:, :, None, ..., 0]
        else:
            keyed = apart.exp() * pair[:, :, 0, None]  # [b, h, n, n, d]
            scores = (keyed @ pair.permute(0, 1, 3, 4, 2)).permute(0, 1, 4, 2, 3)
        told = ((pair * faded).flatten(2, 3) @ self.state).view(*pair.shape[:4], -1)
        new = beta[..., None] * (value - told[:, :, 0])
        if count > 1:
            system = beta[..., None] * scores[:, :, 0]
            new = torch.linalg.solve_triangular(system, new, upper=False, unitriangular=True)
        return told[:, :, 1] + scores[:, :, 1] @ new, new

    def _read_branches(
        self, branches: Branches, pair: Tensor, value: Tensor, g: Tensor, beta: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The same of nodes of a tree: the WY form with a mask of ancestors for the causal one. What nodes read before add
        is known, so the system is of this pass's nodes alone."""
        keys = self._whole(branches, "left", pair[:, :, 0].transpose(1, 2)).transpose(1, 2)  # [b, h, M, d]
        path, apart = branches.fading(self._whole(branches, "decay", g.transpose(1, 2)).transpose(1, 2))
        told = ((pair * path.exp()[:, :, None]).flatten(2, 3) @ self.state).view(*pair.shape[:4], -1)
        if self.channels == 1:
            scores = (pair.flatten(2, 3) @ keys.transpose(2, 3)).view(*pair.shape[:4], -1)
            scores = scores * apart.exp()[:, :, None, ..., 0]
        else:
            scores = torch.einsum("bhpnd,bhnmd->bhpnm", pair, apart.exp() * keys[:, :, None])
        unread = torch.zeros_like(value)
        known = self._whole(branches, "right", unread.transpose(1, 2)).transpose(1, 2)  # [b, h, M, e]
        new = beta[..., None] * (value - told[:, :, 0] - scores[:, :, 0] @ known)
        system = beta[..., None] * branches.of_this_pass(scores[:, :, 0])
        new = torch.linalg.solve_triangular(system, new, upper=False, unitriangular=True)
        right = self._whole(branches, "right", new.transpose(1, 2)).transpose(1, 2)
        return told[:, :, 1] + scores[:, :, 1] @ right, new


class KimiScan(DeltaScan):
    """Kimi's delta attention: a decay for each channel of a key."""

    function = "chunk_kimi_delta_attention"

    @classmethod
    def made(cls, shape: tuple[int, ...], conv_width: int) -> "Scan | None":
        """See ``Scan``."""
        return cls(shape, shape[0], shape[1]) if len(shape) == 3 else None


class Mamba2Scan(OuterScan):
    """S = exp(dt A) S + dt x (x) B, output C S + D x."""

    function = "mamba2_chunk_scan"

    @classmethod
    def made(cls, shape: tuple[int, ...], conv_width: int) -> "Scan | None":
        """See ``Scan``. The convolution reads x, B and C."""
        if len(shape) != 3:
            return None
        groups, rest = divmod(conv_width - shape[0] * shape[1], 2 * shape[2])
        return cls(shape, groups, 1) if groups > 0 and not rest and not shape[0] % groups else None

    def __call__(
        self,
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        *args: Any,
        D: Tensor | None = None,
        dt_bias: Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        """hidden_states [b, n, h, d], dt [b, n, h], A [h], B and C [b, n, g, e]."""
        num_new = dt.shape[1]
        dt = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
        dt = (F.softplus(dt) if dt_softplus else dt).clamp(*dt_limit).float()
        given, B, C = hidden_states.float(), B.float(), C.float()
        stepped, decay = given * dt[..., None], A.float() * dt
        outputs = [] if self.branches is None else [self._read_branches(self.branches, stepped, decay, B, C)]
        for at in range(0, num_new if self.branches is None else 0, self.chunk):
            part = slice(at, at + self.chunk)
            outputs.append(self._read(stepped[:, part], decay[:, part], B[:, part], C[:, part]))
            width = outputs[-1].shape[1]
            self._move(at, width, num_new, stepped[:, part], B[:, part], decay[:, part, :, None])
        output = torch.cat(outputs, 1) if len(outputs) > 1 else outputs[0]
        self.kept = _terms(stepped, B, decay[..., None])
        return output if D is None else torch.addcmul(output, given, D.float()[:, None]), self.state

    def _read(self, stepped: Tensor, decay: Tensor, B: Tensor, C: Tensor) -> Tensor:
        """[b, n, h, d] of one chunk."""
        batch, count = decay.shape[:2]
        summed = decay.cumsum(1)  # [b, n, h]
        asked = C.transpose(1, 2)  # [b, g, n, e]
        told = self._told(asked, summed)
        scores = (asked @ B.permute(0, 2, 3, 1))[:, :, None]  # [b, g, 1, n, n]
        lines = summed.transpose(1, 2).view(batch, self.groups, -1, count)
        apart = (lines[..., None] - lines[..., None, :]).masked_fill(_later(count, decay.device), -torch.inf).exp()
        mixed = (scores * apart).view(batch, self.heads, count, count) @ stepped.transpose(1, 2)
        return told + mixed.transpose(1, 2)

    def _told(self, asked: Tensor, summed: Tensor) -> Tensor:
        """[b, n, h, d] the state's part, of asked [b, g, n, e] and logarithms of decays [b, n, h]."""
        told = asked @ self.state.view(len(asked), self.groups, -1, self.columns).transpose(2, 3)  # [b, g, n, h/g * d]
        return told.transpose(1, 2).reshape(*summed.shape, self.rows) * summed.exp()[..., None]

    def _read_branches(self, branches: Branches, stepped: Tensor, decay: Tensor, B: Tensor, C: Tensor) -> Tensor:
        """The same of nodes of a tree: the sum of each node's ancestors."""
        batch, count = decay.shape[:2]
        path, apart = branches.fading(self._whole(branches, "decay", decay[..., None]).transpose(1, 2))
        asked = C.transpose(1, 2)  # [b, g, n, e]
        scores = asked @ self._whole(branches, "right", B).permute(0, 2, 3, 1)  # [b, g, n, M]
        faded = apart[..., 0].exp().view(batch, self.groups, -1, *scores.shape[2:])  # [b, g, h/g, n, M]
        left = self._whole(branches, "left", stepped).transpose(1, 2)  # [b, h, M, d]
        mixed = (scores[:, :, None] * faded).view(batch, self.heads, count, -1) @ left
        return self._told(asked, path[..., 0].transpose(1, 2)) + mixed.transpose(1, 2)


class MambaScan(Scan):
    """Mamba's first form: states [d, e], S = exp(dt A) S + dt x (x) B with decays A [d, e], output C S + D x, gated."""

    function = "mamba_selective_scan"

    @classmethod
    def made(cls, shape: tuple[int, ...], conv_width: int) -> "Scan | None":
        """See ``Scan``."""
        return cls(shape) if len(shape) == 2 else None

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.terms = {"step": shape[0], "left": shape[0], "right": shape[1]}
        self.rates = torch.empty(0)  # A, as the last call was given it

    def __call__(
        self,
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None = None,
        z: Tensor | None = None,
        delta_bias: Tensor | None = None,
        delta_softplus: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        """hidden_states, dt and z [b, d, n], A [d, e], B and C [b, e, n]."""
        dt = dt if delta_bias is None else dt + delta_bias.to(dt.dtype)[..., None]
        step = (F.softplus(dt) if delta_softplus else dt).float().transpose(1, 2)  # [b, n, d]
        given = hidden_states.float().transpose(1, 2)
        left, right, asked = step * given, B.float().transpose(1, 2), C.float().transpose(1, 2)
        self.rates = A.float()
        state = self.state
        self.kept = {"step": step, "left": left, "right": right}
        if self.branches is not None:
            output = self._read_branches(self.branches, asked)
        else:
            outputs = []
            ends = None if self.count is None else self.count.to(state.device)
            for at in range(step.shape[1]):
                before = state
                state = self._next(state, step[:, at], left[:, at], right[:, at])
                outputs.append((state @ asked[:, at, :, None])[..., 0])
                if ends is not None:
                    state = torch.where((at < ends)[:, None, None], state, before)
            if ends is not None:
                self.state = state
            output = torch.stack(outputs, 2)
        if D is not None:
            output = output + hidden_states.float() * D[:, None]
        if z is not None:
            output = output * F.silu(z.float())
        return output.to(hidden_states.dtype), state

    def _next(self, state: Tensor, step: Tensor, left: Tensor, right: Tensor) -> Tensor:
        return state * (step[..., None] * self.rates).exp() + left[..., None] * right[:, None]

    def _read_branches(self, branches: Branches, asked: Tensor) -> Tensor:
        """[b, d, n] of nodes of a tree, asked [b, n, e]: decays of each number of a state are too many to hold a pair of
        nodes, so states are made place by place, each of its parent's."""
        step, left, right = (branches.whole(self.earlier[name], new) for name, new in self.kept.items())
        parent, rows = branches.parent.to(step.device) + 1, torch.arange(len(step), device=step.device)
        states = self.state.new_empty(len(step), step.shape[1] + 1, *self.state.shape[1:])
        states[:, 0] = self.state
        for place in range(step.shape[1]):
            before = states[rows, parent[:, place]]
            states[:, place + 1] = self._next(before, step[:, place], left[:, place], right[:, place])
        mine = states[rows[:, None], branches.at.to(step.device) + 1]  # [b, n, d, e]
        return (mine @ asked[..., None])[..., 0].transpose(1, 2)

    def after(self, state: Tensor, terms: Mapping[str, Tensor], count: Tensor | None) -> Tensor:
        """See ``Scan``."""
        width = terms["step"].shape[1]
        for at in range(0, width, CHUNK // 4):  # [b, m, d, e] numbers at once
            step, left, right = (terms[name][:, at : at + CHUNK // 4] for name in ("step", "left", "right"))
            if count is not None:
                places = torch.arange(at, at + step.shape[1], device=state.device)
                out = (places >= count.to(state.device)[:, None])[..., None]
                step, left, right = (x.masked_fill(out, 0.0) for x in (step, left, right))
            summed = step.cumsum(1)
            whole = summed[:, -1]
            faded = ((whole[:, None] - summed)[..., None] * self.rates).exp()
            added = (faded * left[..., None] * right[:, :, None]).sum(1)
            state = torch.addcmul(added, state, (whole[..., None] * self.rates).exp())
        return state


SCANS: tuple[type[Scan], ...] = (DeltaScan, KimiScan, Mamba2Scan, MambaScan)


def _terms(left: Tensor, right: Tensor, decay: Tensor) -> dict[str, Tensor]:
    return {"left": left.flatten(2), "right": right.flatten(2), "decay": decay.flatten(2)}


def narrow_conv(
    lines: Sequence[Tensor], weight: Tensor, bias: Tensor | None, activation: str | None, dtype: torch.dtype
) -> Tensor:
    """[b, n, C] of dtype: a causal convolution of each channel, weight [C, K], over n tokens whose K inputs are lines, each
    [b, n, C], the token's own last. A few tokens: K products of lines, where a convolution routine reads across
    them."""
    from transformers.activations import ACT2FN

    wide = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
    weights = weight.to(wide).t().contiguous()  # [K, C]
    whole = lines[0].to(wide) * weights[0]
    for line, factor in zip(lines[1:], weights[1:], strict=True):
        whole = torch.addcmul(whole, line.to(wide), factor)
    if bias is not None:
        whole = whole + bias.to(wide)
    whole = whole.to(weight.dtype)
    if activation is not None:
        whole = ACT2FN[activation](whole)
    return whole.to(dtype)


def _later(count: int, device: torch.device) -> Tensor:
    """[n, n] True where the second index is behind the first."""
    return torch.ones(count, count, dtype=torch.bool, device=device).triu(1)
