"""The trainer for all methods. A step: texts, the frozen target's outputs, the head's outputs, loss, one update.

Everything random is a function of (seed, step, process), so an interrupted run continues exactly as if it had not been
interrupted. Several processes (``accelerate launch``) each take batches of their own and average gradients; the head is
not wrapped, so objectives may call any of its methods.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from accelerate import PartialState
from torch import Tensor

from foretell.core.errors import ConfigError, TrainError
from foretell.core.jsontext import parse_json
from foretell.core.noise import derive_seed
from foretell.core.provenance import provenance
from foretell.heads.stored_outputs import LinearHead, OutputKeeper
from foretell.heads.teacher import LabeledBatch, Objective, Teacher, TeacherBatch
from foretell.methods.medusa.head import head_weight
from foretell.train import checkpoint
from foretell.train.checkpoint import patient
from foretell.train.config import TrainConfig, rate
from foretell.train.data import Batches
from foretell.train.losses import parse_divergence
from foretell.train.metrics import Evaluation, divergence_of, evaluate, loss_per_slot, slot_losses
from foretell.train.optimizers import optimizers_of
from foretell.train.responses import Responses

LOG, RECORD = "log.jsonl", "record.json"
FIRST_CHECKPOINT = 1 / 8
"""Share of training after which there is one, however many steps lie between two."""


@dataclass(frozen=True)
class Report:
    """Progress after a step or an evaluation."""

    step: int
    num_steps: int  # 0 where the clock decides
    share: float  # of training done
    loss: float  # as it is minimised: a sum over slots, so it jumps where slots are added
    tokens_per_second: float  # positions of the batch, padding left out
    evaluation: Evaluation | None = None  # the newest
    slot_losses: tuple[float | None, ...] = ()  # mean of each slot
    loss_per_slot: float | None = None  # mean over slots by their weights; None where the objective has none


class Trainer:
    """One run."""

    def __init__(
        self,
        objective: Objective,
        teacher: Teacher,
        responses: Responses,
        out: Path | str,
        config: TrainConfig,
        *,
        identity: Mapping[str, Any] | None = None,
        save: Callable[[Path], None] | None = None,
        finish: Callable[[Objective, Teacher, Responses], None] | None = None,
        progress: Callable[[Report], None] | None = None,
        notice: Callable[[str], None] | None = None,
    ) -> None:
        """identity: what must be equal in a resumed run besides config and data (method, its options, target); it goes
        into the record. finish is called with the held-out texts after the last step (calibration); save writes the
        final weights into a folder. notice is called with a line at Ctrl-C: what will be saved, and how to go on.
        Raises ConfigError."""
        self._notice = notice
        self.objective, self.teacher, self.config, self.out = objective, teacher, config, Path(out)
        self.device = teacher.model.spec.device
        self.state = PartialState(cpu=self.device.type == "cpu")
        self.responses = responses.cut(config.max_length)
        self.learned, self.held_out = self.responses.split(config.held_out)
        self.batches = Batches(self.learned.length.tolist(), config.batch_tokens, seed=config.seed)
        self.per_step = config.accumulate * self.state.num_processes
        self.steps_per_epoch = len(self.batches.epoch(0)) / self.per_step
        self.divergence = parse_divergence(config.divergence or objective.divergence)
        self.identity = {
            **(identity or {}),
            "config": asdict(config),
            "data": responses.fingerprint,
            "num_processes": self.state.num_processes,
        }
        self.progress, self._save, self._finish = progress, save, finish
        objective.head.to(self.device)
        self.parameters = [p for p in objective.head.parameters() if p.requires_grad]
        reduced = getattr(getattr(objective.head, "config", None), "draft_vocab_size", None)
        self.optimizers = optimizers_of(
            objective.head, config, [teacher.model.spec.vocab_size, *([reduced] if reduced else [])]
        )
        self.step, self.seconds = 0, 0.0
        self._keeper: OutputKeeper | None = None
        self.evaluation: Evaluation | None = None
        self.log: list[dict[str, Any]] = []

    # -- a run -----------------------------------------------------------------------------------------------------

    def run(self, *, resume: bool = False) -> Evaluation:
        """Train to the end of the budget. Raises KeyboardInterrupt after a checkpoint on Ctrl-C, and
        TrainError where it cannot continue; the message names the last good checkpoint, which is kept."""
        self._open(resume)
        num_steps = self.config.budget.num_steps(self.steps_per_epoch)
        self._write_record(finished=False)
        self.objective.head.train()
        with patient(self._tell_stop) as interrupted, self._writing():
            while (share := self.config.budget.share(self.step, self.seconds, self.steps_per_epoch)) < 1.0:
                begun = perf_counter()
                row = self._step(share, interrupted.is_set())
                self.seconds += row.pop("seconds")
                self.step += 1
                stop = row.pop("stop")
                row["seconds"] = round(self.seconds, 3)
                self.log.append(row)
                now = self.config.budget.share(self.step, self.seconds, self.steps_per_epoch)
                ended, is_first = now >= 1.0, now >= FIRST_CHECKPOINT and not checkpoint.found(self.out)
                if not ended and self.config.eval_every and self.step % self.config.eval_every == 0:
                    row["held_out"] = self._evaluate().as_dict()
                if stop or ended or is_first or self.step % self.config.checkpoint_every == 0:
                    self._checkpoint()
                if self.progress is not None:
                    speed = row["num_tokens"] / max(1e-9, perf_counter() - begun)
                    self.progress(
                        Report(
                            self.step, num_steps, share, row["loss"], speed, self.evaluation, tuple(row["slot_losses"]),
                            row["loss_per_slot"],
                        )
                    )  # fmt: skip
                if stop:
                    raise KeyboardInterrupt
            if self._finish is not None:
                self._finish(self.objective, self.teacher, self.held_out)
            self._check_weights()
            final = self._evaluate()
            if self.state.is_main_process:
                self._append_log()
                if self._save is not None:
                    self._save(self.out)
        self._write_record(finished=True)
        self.state.wait_for_everyone()
        return final

    def _tell_stop(self) -> None:
        if self._notice is None or not self.state.is_main_process:
            return
        if self.config.budget.share(self.step, self.seconds, self.steps_per_epoch) < 1.0:
            now = f"stopping after step {self.step + 1}, which is saved in {self.out}: --resume goes on from there"
        else:
            now = f"all steps are done and saved in {self.out}; the end is being measured and written"
        self._notice(f"{now}. Ctrl-C again stops at once; then {self._last()}")

    def _step(self, share: float, stop: bool) -> dict[str, Any]:
        """One step: its log entry, its ``seconds``, and whether any process received a request to ``stop``."""
        begun, config = perf_counter(), self.config
        # By steps the middle of the step counts, so that neither the first nor the last has a rate of 0.
        shift = 0.0 if config.minutes is not None else 0.5 / config.budget.num_steps(self.steps_per_epoch)
        lr = config.lr * rate(share + shift, warmup=config.warmup, final=config.final_lr)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.zero_grad(set_to_none=True)
        self.objective.share = share
        loss_sum, num_tokens = 0.0, 0
        parts = torch.zeros(0, 2, dtype=torch.float64)
        figures: dict[str, float] = {}
        for part in range(config.accumulate):
            number = self.step * self.per_step + part * self.state.num_processes + self.state.process_index
            index = self.batches[number]
            batch = self.learned.batch(index).to(self.device)
            generator = torch.Generator().manual_seed(derive_seed(config.seed, number, 1) & (2**63 - 1))
            labeled = self._label(batch, index)
            with self._autocast(), self._seeded(number):
                outcome = self.objective.outcome(labeled, self.teacher, generator, training=True)
            losses = divergence_of(labeled, outcome, self.divergence, config.temperature)
            loss = losses.total / config.accumulate
            parts = losses.parts / config.accumulate + (parts if len(parts) else 0.0)
            if loss.requires_grad:
                loss.backward()  # type: ignore[no-untyped-call]
            loss_sum += float(loss.detach())
            num_tokens += int(batch.length.sum())
            for name, value in outcome.figures.items():
                figures[name] = figures.get(name, 0.0) + float(value) / config.accumulate
        loss_mean, stopped, seconds, *flat = self._mean(
            loss_sum, float(stop), perf_counter() - begun, *parts.flatten().tolist()
        )
        parts = torch.tensor(flat, dtype=torch.float64).view(-1, 2)
        self._reduce_gradients()
        norm = float(torch.nn.utils.clip_grad_norm_(self.parameters, config.clip))
        if not math.isfinite(loss_mean) or not math.isfinite(norm):
            raise TrainError(
                f"step {self.step + 1}: loss {loss_mean:g}, gradient norm {norm:g}: not finite, so the step was not "
                f"applied; {self._last()}: try a smaller lr or clip, or precision float32"
            )
        for optimizer in self.optimizers:
            optimizer.step()
        return {
            "step": self.step + 1,
            "loss": loss_mean,
            "loss_per_slot": loss_per_slot(parts),
            "slot_losses": slot_losses(parts),
            "lr": lr,
            "gradient_norm": norm,
            "num_tokens": num_tokens * self.state.num_processes,
            **figures,
            "seconds": seconds,
            "stop": stopped > 0,
        }

    def _label(self, batch: TeacherBatch, index: Sequence[int]) -> LabeledBatch:
        """The target's outputs on texts ``index``: kept from an earlier pass where ``keep_gib`` allows."""
        if not self.config.keep_gib:
            return self.teacher.label(batch, self.objective.taps)
        if self._keeper is None:
            head = LinearHead(self.teacher.model, head_weight(self.teacher.model))
            self._keeper = OutputKeeper(self.teacher, head, self.objective.taps, int(self.config.keep_gib * 2**30))
        return self._keeper.label(batch, index)

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.precision == "bfloat16")

    @contextmanager
    def _seeded(self, number: int) -> Iterator[None]:
        """While inside, what draws from torch's own generators (dropout in a draft model's layers) draws as it does for
        this batch in every run."""
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(derive_seed(self.config.seed, number, 2) & (2**63 - 1))
            yield

    def _check_weights(self) -> None:
        """Raise TrainError where a step left numbers that are not finite: they must not be written."""
        broken = [
            name
            for name, each in self.objective.head.state_dict().items()
            if each.is_floating_point() and not bool(each.isfinite().all())
        ]
        if broken:
            raise TrainError(
                f"step {self.step}: {len(broken)} tensors of the head hold numbers that are not finite ({broken[0]}), so "
                f"nothing was written; {self._last()}: try a smaller lr"
            )

    def _evaluate(self) -> Evaluation:
        """On the held-out texts. Every process computes the same figures, without communication."""
        with self._autocast():
            self.evaluation = evaluate(
                self.objective, self.teacher, self.held_out, self.divergence,
                batch_tokens=self.config.batch_tokens, max_tokens=self.config.eval_tokens,
                temperature=self.config.temperature,
            )  # fmt: skip
        return self.evaluation

    # -- several processes -------------------------------------------------------------------------------------------

    def _mean(self, *values: float) -> list[float]:
        if self.state.num_processes == 1:
            return list(values)
        both = torch.tensor(values, dtype=torch.float64, device=self.device)
        torch.distributed.all_reduce(both)
        return [float(value) for value in both / self.state.num_processes]

    def _reduce_gradients(self) -> None:
        if self.state.num_processes == 1:
            return
        for p in self.parameters:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        flat: Tensor = torch.cat([p.grad.flatten() for p in self.parameters if p.grad is not None])
        torch.distributed.all_reduce(flat)
        flat /= self.state.num_processes
        at = 0
        for p in self.parameters:
            assert p.grad is not None
            p.grad.copy_(flat[at : at + p.numel()].view_as(p))
            at += p.numel()

    # -- files -------------------------------------------------------------------------------------------------------

    def _open(self, resume: bool) -> None:
        """Find the last checkpoint where there is one; refuse a folder in use."""
        there = checkpoint.found(self.out) if self.out.is_dir() else []
        if self.out.exists() and not self.out.is_dir():
            raise ConfigError(f"{self.out} is a file; expected a folder to write the head into")
        if not resume and self.out.is_dir() and any(self.out.iterdir()):
            hint = "give --resume to go on with it, or another folder" if there else "give another folder"
            raise ConfigError(f"{self.out} is not empty: {hint}")
        if resume and not there and self.out.is_dir() and any(self.out.iterdir()) and not (self.out / RECORD).exists():
            raise ConfigError(f"{self.out} holds no run that could be resumed: give the folder of one, or an empty one")
        self.state.wait_for_everyone()
        if there:
            state, about = checkpoint.load(there[-1], self.device)
            checkpoint.check_same(about["identity"], self.identity)
            self.objective.head.load_state_dict(state["head"])
            for optimizer, its in zip(self.optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(its)
            self.step, self.seconds = about["step"], about["seconds"]
            if self.state.is_main_process and (self.out / LOG).exists():
                lines = (self.out / LOG).read_text(encoding="utf-8").splitlines()
                kept = [line for line in lines if parse_json(line).get("step", 0) <= self.step]
                checkpoint.write_bytes(self.out / LOG, "".join(line + "\n" for line in kept).encode())

    def _checkpoint(self) -> None:
        """Weights, optimizer and place; then the log up to there. Raises TrainError for weights that are not finite."""
        self._check_weights()
        if not self.state.is_main_process:
            return
        checkpoint.save(
            self.out,
            self.step,
            {
                "head": self.objective.head.state_dict(),
                "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            },
            {"step": self.step, "seconds": self.seconds, "identity": self.identity},
        )
        self._append_log()

    def _append_log(self) -> None:
        text = "".join(json.dumps(row) + "\n" for row in self.log)
        with (self.out / LOG).open("a", encoding="utf-8") as stream:
            stream.write(text)
        self.log.clear()

    def _write_record(self, *, finished: bool) -> None:
        if not self.state.is_main_process:
            return
        with self._writing():
            self.out.mkdir(parents=True, exist_ok=True)
            sizes = {"num_texts": len(self.learned), "num_tokens": self.learned.num_tokens}
            held_out = {"num_texts": len(self.held_out), "num_tokens": self.held_out.num_tokens}
            record = {
                **self.identity,
                "divergence": self.config.divergence or self.objective.divergence,
                "responses": dict(self.responses.metadata),
                "learned": sizes,
                "held_out": held_out,
                "num_parameters": sum(p.numel() for p in self.parameters),
                "finished": finished,
                "steps": self.step,
                "seconds": round(self.seconds, 1),
                "result": self.evaluation.as_dict() if finished and self.evaluation is not None else None,
                **provenance(),
            }
            checkpoint.write_json(self.out / RECORD, record)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Turn errors of writing to the disk into one TrainError."""
        try:
            yield
        except OSError as error:
            raise TrainError(
                f"step {self.step}: {self.out} cannot be written to: {error.strerror or error}; {self._last()}: make "
                "room and go on with --resume"
            ) from error

    def _last(self) -> str:
        there = checkpoint.found(self.out) if self.out.is_dir() else []
        return f"the last good checkpoint is {there[-1]}" if there else "there is no checkpoint yet"


def train(
    objective: Objective,
    teacher: Teacher,
    responses: Responses,
    out: Path | str,
    config: TrainConfig | None = None,
    *,
    resume: bool = False,
    **more: Any,
) -> Evaluation:
    """Train a head and return its evaluation on held-out text. See ``Trainer`` for arguments and errors."""
    return Trainer(objective, teacher, responses, out, config or TrainConfig(), **more).run(resume=resume)
