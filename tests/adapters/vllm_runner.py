"""As much of vLLM as ``adapters/vllm_coupled.py`` touches: configurations, a worker, and a model runner V2 whose models are
tables and whose noise is a function that a test can enumerate.

A token is where a uniform number falls in the cumulative probabilities: a keyed draw, as the Gumbel race is, whose law is
exact once the numbers run over a grid.
"""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any, Literal, get_args

import pytest
import torch
from torch import Tensor

GPU = "vllm.v1.worker.gpu"
SALT = 1 << 30
Noise = Callable[[Tensor, Tensor], Tensor]
"""Of seeds and positions [N], those of drafts salted: numbers of [0, 1) [N], float64."""


class SpeculativeConfig:
    """vLLM's checks by type; with its default of greedy drafts."""

    def __init__(self, **options: Any) -> None:
        self.rejection_sample_method: Literal["standard", "synthetic", "block"] = "standard"
        self.draft_sample_method = "greedy"
        self.__dict__ |= options
        if self.rejection_sample_method not in get_args(Literal["standard", "synthetic", "block"]):
            raise ValueError("Input should be 'standard', 'synthetic' or 'block'")


class VllmConfig:
    def __init__(self, speculative_config: SpeculativeConfig | None = None, use_v2_model_runner: bool = True) -> None:
        self.speculative_config, self.use_v2_model_runner = speculative_config, use_v2_model_runner


class WorkerBase:
    def __init__(self, vllm_config: VllmConfig, rank: int = 0) -> None:
        self.vllm_config, self.rank, self.model_runner = vllm_config, rank, None


class Gumbel:
    """The module ``sample.gumbel``: a draw a row, keyed by the row's seed and position."""

    def __init__(self) -> None:
        self.noise: Noise = lambda seeds, positions: torch.full_like(seeds, 0.5, dtype=torch.float64)

    def gumbel_sample(
        self, logits: Tensor, slots: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor,
        apply_temperature: bool, is_drafting: bool, logits_cache: Tensor | None = None,
        logits_cache_col: int = 0, use_fp64: bool = False,
    ) -> Tensor:  # fmt: skip
        heat, seeds = temperature[slots, None], seeds[slots]
        if logits_cache is not None:
            seeds = seeds ^ (logits_cache_col << 32)
        divided = logits.double() / torch.where((heat != 0) & apply_temperature, heat, 1.0)
        numbers = self.noise(seeds, positions + SALT * is_drafting)
        drawn = (divided.softmax(1).cumsum(1) <= numbers[:, None] + 1e-12).sum(1)
        return torch.where(heat[:, 0] == 0, logits.argmax(1), drawn)


class RejectionSampler:
    def __init__(self, sampler: Any, spec_config: SpeculativeConfig) -> None:
        self.sampler, self.num_speculative_steps = sampler, spec_config.__dict__["num_speculative_tokens"]

    def _verify(self, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
        raise AssertionError("vLLM's own verifier")

    def __call__(self, logits: Tensor, batch: Any, draft_logits: Any) -> tuple[Tensor, Tensor]:
        _, tokens, counts = self._verify(
            logits, draft_logits, batch.tokens, batch.positions, batch.starts, batch.slots, batch.slots.numpy(),
            batch.row_slots, batch.depths, None, batch.guesses,
        )  # fmt: skip
        return tokens, counts


class Drafter:
    """A drafter of the base class; ``draft_watermarker`` is the slot of another noise."""

    def __init__(self, config: Any, gumbel: Gumbel) -> None:
        self.draft_logits = torch.zeros(1) if config.draft_sample_method == "probabilistic" else None
        self.draft_watermarker: Any = None
        self.gumbel = gumbel

    def sample_draft(self, logits: Tensor, states: Any, slots: Tensor, positions: Tensor, step: int) -> Tensor:
        if self.draft_logits is None:
            return logits.argmax(-1)
        mark = self.draft_watermarker
        sampler = self.gumbel.gumbel_sample if mark is None else partial(mark.sample, num_steps=1)
        return sampler(
            logits, slots, states.temperature.gpu, states.seeds.gpu, positions, apply_temperature=True,
            is_drafting=True, logits_cache=self.draft_logits, logits_cache_col=step, use_fp64=False,
        )  # fmt: skip


class Runner:
    """Requests of a batch, decoded together. p, q [V, V]: the models' probabilities after each token."""

    def __init__(self, config: SpeculativeConfig | None, gumbel: Gumbel, p: Tensor, q: Tensor) -> None:
        self.p, self.q, self.gumbel = p.log(), q.log(), gumbel
        self.sampler = SimpleNamespace(use_fp64_gumbel=False, apply_sampling_params=self._processed)
        self.rejection_sampler: Any = None
        self.speculator: Any = None
        self.num_guesses = self.num_accepted = 0
        if config is not None:
            self.rejection_sampler = RejectionSampler(self.sampler, config)
            self.speculator = Drafter(config, gumbel)

    def _processed(self, logits: Tensor, slots: Tensor, *args: Any) -> Tensor:
        heat = self.sampler.sampling_states.temperature.gpu[slots]
        return logits / torch.where(heat == 0, 1.0, heat)[:, None]

    def decode(
        self, prompts: Sequence[Sequence[int]], length: int, *, seeds: Sequence[int], temperature: Sequence[float],
        depths: Sequence[int] = (), forbidden: Sequence[int] = (),
    ) -> list[tuple[int, ...]]:  # fmt: skip
        """The texts, of ``length`` tokens each. depths: how many guesses each request has; forbidden: tokens that no guess
        may be."""
        states = SimpleNamespace(
            temperature=SimpleNamespace(gpu=torch.tensor(temperature)), seeds=SimpleNamespace(gpu=torch.tensor(seeds))
        )
        self.sampler.sampling_states = states
        texts = [list(prompt) for prompt in prompts]
        guesses: list[list[int]] = [[] for _ in prompts]
        while min(len(text) - len(prompt) for text, prompt in zip(texts, prompts, strict=True)) < length:
            rows = [[text[-1], *more] for text, more in zip(texts, guesses, strict=True)]
            batch = SimpleNamespace(
                tokens=torch.tensor([token for row in rows for token in row]),
                positions=torch.tensor(
                    [len(text) - 1 + depth for text, row in zip(texts, rows, strict=True) for depth in range(len(row))]
                ),
                starts=torch.tensor([0, *(len(row) for row in rows)]).cumsum(0),
                slots=torch.arange(len(rows)),
                row_slots=torch.tensor([slot for slot, row in enumerate(rows) for _ in row]),
                depths=torch.tensor([depth for row in rows for depth in range(len(row))]),
            )  # fmt: skip
            at_depth = batch.depths > 0
            banned = torch.isin(batch.tokens, torch.tensor(forbidden, dtype=torch.int64)) & at_depth
            batch.guesses = batch.tokens.masked_fill(banned, -1)
            logits = self.p[batch.tokens]
            if not any(guesses):
                winners = self.gumbel.gumbel_sample(
                    self._processed(logits, batch.row_slots), batch.row_slots, states.temperature.gpu,
                    states.seeds.gpu, batch.positions, apply_temperature=False, is_drafting=False,
                )  # fmt: skip
                tokens, counts = winners[:, None], torch.ones(len(rows), dtype=torch.int32)
            else:
                tokens, counts = self.rejection_sampler(logits, batch, self.speculator.draft_logits)
            self.num_guesses += sum(map(len, guesses))
            self.num_accepted += int(counts.sum()) - len(rows)
            for text, line, count in zip(texts, tokens.tolist(), counts.tolist(), strict=True):
                text += line[:count]
            guesses = self._propose(texts, depths, states)
        return [tuple(text[len(prompt) :][:length]) for text, prompt in zip(texts, prompts, strict=True)]

    def _propose(self, texts: list[list[int]], depths: Sequence[int], states: Any) -> list[list[int]]:
        guesses: list[list[int]] = [[] for _ in texts]
        slots = torch.arange(len(texts))
        for step in range(max(depths, default=0)):
            ends = [[*text, *more] for text, more in zip(texts, guesses, strict=True)]
            last = torch.tensor([end[-1] for end in ends])
            positions = torch.tensor([len(end) - 1 for end in ends])
            for more, token in zip(
                guesses,
                self.speculator.sample_draft(self.q[last], states, slots, positions, step).tolist(),
                strict=True,
            ):
                more.append(token)
        return [more[:depth] for more, depth in zip(guesses, depths, strict=True)] if depths else guesses


class Installed:
    """The modules, as ``sys.modules`` has them; ``runner`` loads one through a worker."""

    def __init__(self, patch: pytest.MonkeyPatch, version: str = "0.33.0") -> None:
        self.gumbel = Gumbel()
        self.warnings: list[str] = []
        logger = SimpleNamespace(warning=lambda text, *args: self.warnings.append(text % args))
        kinds = [type(kind.__name__, (kind,), {}) for kind in (SpeculativeConfig, VllmConfig, WorkerBase)]
        self.SpeculativeConfig, self.VllmConfig, self.WorkerBase = kinds
        modules: dict[str, dict[str, Any]] = {
            "vllm": {"__version__": version},
            "vllm.config": {"SpeculativeConfig": kinds[0], "VllmConfig": kinds[1]},
            "vllm.logger": {"init_logger": lambda name: logger},
            "vllm.v1.worker.worker_base": {"WorkerBase": kinds[2]},
            f"{GPU}.sample.gumbel": {"gumbel_sample": self.gumbel.gumbel_sample},
            f"{GPU}.spec_decode.rejection_sampler": {"RejectionSampler": RejectionSampler},
        }
        for name, names in modules.items():
            parts = name.split(".")
            for end in range(1, len(parts) + 1):
                found = sys.modules.get(".".join(parts[:end]))
                if not isinstance(found, ModuleType) or end == len(parts):
                    patch.setitem(sys.modules, ".".join(parts[:end]), ModuleType(".".join(parts[:end])))
            sys.modules[name].__dict__.update(names)

    def worker(self, config: Any, p: Tensor, q: Tensor) -> Any:
        """A worker whose model is not loaded yet."""
        gumbel = self.gumbel

        class Worker(self.WorkerBase):  # type: ignore[name-defined, misc]
            def load_model(self) -> None:
                self.model_runner = Runner(self.vllm_config.speculative_config, gumbel, p, q)

        return Worker(self.VllmConfig(config))

    def runner(self, p: Tensor, q: Tensor, **options: Any) -> Runner:
        """A loaded runner; without options one that does not speculate."""
        config = self.SpeculativeConfig(**options) if options else None
        worker = self.worker(config, p, q)
        worker.load_model()
        runner: Runner = worker.model_runner
        return runner
