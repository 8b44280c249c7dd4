"""Put a trained head into the package: its weights, its run record without local paths, and a model card made from both.

    python -m recipes.bundle_head RUN [RUN ...] [--bundled src/foretell/bundled] [--target NAME]
    python -m recipes.bundle_head RUN --target NAME --blocks Q4_0 [--tokens 8192 --responses FILE] [--lend-output]

RUN is a folder that ``foretell train`` wrote. Every number of a card comes from its files. A head of another target than
the bundled one (``--target smollm2-135m``) lies in a folder of that target's name. With ``--blocks`` it becomes a GGUF file
(without a vocabulary, so for this project alone) whose matrices are rounded to these blocks; an output head that was not
trained may then be cut to the ``--tokens`` that stand most often in the answers, and with ``--lend-output`` it is left
out: its rows are read from the target when the head is loaded.
"""

from __future__ import annotations

import argparse
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from foretell.heads import formats
from foretell.heads.draft_vocabulary import draft_vocabulary
from foretell.methods.eagle.eagle3 import Eagle3Head
from foretell.train.responses import Responses

WHAT = {
    "eagle1": "EAGLE-1 head (2401.15077): one layer that predicts the target's next feature; also read by `eagle2`.",
    "eagle3": "EAGLE-3 head (2503.01840): one layer over three fused layers of the target, with a vocabulary of its own.",
    "medusa": "Medusa heads (2401.10774): each guesses one more token from the target's last hidden state.",
    "kangaroo": "Kangaroo adapter (2404.18911): norm, attention and norm behind the target's own lower layers.",
    "dflash": "DFlash-type block drafter (2602.06036) with DSpark's Markov and confidence heads: a block in one pass.",
    "acceptance": "Acceptance head of SpecDec++ (2405.19715): will the target keep the guess that the drafter just read?\n"
    "With `reads_law` it departs from the paper: beside the drafter's hidden state it reads log q(x), log max q, the\n"
    "entropy of q, and the temperature. What it foresees: docs/drafters.md.",
    "judge": "Judge (2501.19309, labels mined as in 2504.20039): does a wrong guess matter? **Lossy** by design.",
}
OPTIMIZERS = {"adamw": "AdamW", "muon": "Muon and AdamW"}
CARD = """---
license: apache-2.0
library_name: foretell
---
# foretell bundled {method}

{what}

For `{target}`, {parameters} parameters, {megabytes:.1f} MB. For other targets train your own (`foretell train`,
docs/train.md). Licence: Apache-2.0{source}.

## Data
{data}

## Training
{training}

## Held-out result
{result}
"""
HIDDEN = ("argv",)  # says where files lay on one machine
OWN = "bundled/target"
OWN_TEXT = "the target"


def learned(record: dict[str, Any], target: str) -> str:
    """What it learned from."""
    source, seen, kept = record["responses"], record["learned"], record["held_out"]
    fingerprint = f"Data fingerprint `{record['data'][:16]}`, target weights `{source['target_hash']}`."
    if "num_answers" in source:  # of recipes.own_responses
        begin = source["prompts_from"]
        prompts = "" if begin is None else f", prompts from token {begin} on among them"
        wrote = source.get("written_by", OWN_TEXT)
        whose = (
            f"{target} itself at temperatures 0 and 1 (`recipes.own_answers`)"
            if wrote == OWN_TEXT
            else (f"{wrote}, which {target} read: the head learns its law at each token")
        )
        return (
            f"{seen['num_texts'] + kept['num_texts']:,} texts, {source['num_answers']:,} of them with answers of {whose}"
            f";\n{seen['num_tokens']:,} tokens to learn from{prompts}"
            f"; {kept['num_texts']} texts ({kept['num_tokens']:,} tokens) held out.\n{fingerprint}"
        )
    temperatures = " and ".join(f"{t:g}" for t in source["temperatures"])
    whose = "the bundled target" if target == OWN else target
    return (
        f"{seen['num_texts']:,} answers of {whose} itself ({seen['num_tokens']:,} tokens) to prompts of "
        f"`{source['source']}`,\nat temperatures {temperatures} in turn, up to {source['max_new_tokens']} tokens each; "
        f"{kept['num_texts']} further texts ({kept['num_tokens']:,} tokens) held out.\n{fingerprint}"
    )


def trained(record: dict[str, Any], losses: str) -> str:
    """How it was trained."""
    config = record["config"]
    options = ", ".join(f"{key} {value}" for key, value in record["options"].items() if value is not None)
    epochs = f"{config['epochs']:g} epochs" if config["epochs"] else "as many as the clock allowed"
    epochs = "as many as asked for" if config["steps"] else epochs
    earlier = record.get("init")
    before = ""
    if isinstance(earlier, dict):
        name = record.get("target", "")
        first = f"First on other data: {learned(earlier, name)}\n\n" if earlier["data"] != record["data"] else ""
        before = f"{first}{trained(earlier, '').rstrip()}\n\nThen, from there:\n"
    positions = config["batch_tokens"] * config["accumulate"] * record["num_processes"]
    optimizer = OPTIMIZERS[config.get("optimizer", "adamw")]
    return before + (
        f"{record['steps']:,} steps ({epochs}) of {positions:,} positions in {record['seconds'] / 60:.0f} minutes on "
        f"{cores(record)}, {optimizer}, lr {config['lr']:g}\n(cosine to "
        f"{config['final_lr']:g} of it), gradient norm clipped at "
        f"{config['clip']:g}, divergence {config['divergence'] or record['divergence']}, seed {config['seed']}.\n"
        f"Settings: {options}.\ntorch {record['versions']['torch']}, transformers {record['versions']['transformers']}.\n\n"
        + losses
    )


def cores(record: dict[str, Any]) -> str:
    """How many it had, or the accelerator."""
    if record["machine"].get("accelerator"):
        return f"one {record['machine']['accelerator']}"
    count = record["num_processes"] * record["machine"]["torch_threads"]
    return "one core" if count == 1 else f"{count} cores"


def read_record(run: Path) -> dict[str, Any]:
    """A run's record without local paths; where it began from another run, that one's stands in the place of the path."""
    record = json.loads((run / "record.json").read_text(encoding="utf-8"))
    kept = {key: value for key, value in record.items() if key not in HIDDEN}
    for place in (kept, kept.get("responses", {})):
        if Path(str(place.get("target", ""))).is_absolute():
            place["target"] = Path(place["target"]).name
    begun = kept.get("init")  # a bundled head's record holds that of the run before, not its path
    if begun and isinstance(begun, str) and (Path(begun) / "record.json").exists():
        earlier = read_record(Path(begun))
        again = earlier["data"] == kept["data"] and earlier["time"] == kept["time"]
        # Put a second time, it finds itself where it began.
        kept["init"] = earlier.get("init") if again else earlier
    return kept


def loss_table(log: Path, rows: int = 8) -> str:
    """Mean training loss of so many equal parts of the run."""
    losses = [json.loads(line)["loss"] for line in log.read_text(encoding="utf-8").splitlines()]
    size = -(-len(losses) // rows)
    parts = [losses[at : at + size] for at in range(0, len(losses), size)]
    ends = [min(len(losses), (index + 1) * size) for index in range(len(parts))]
    means = [f"{sum(part) / len(part):.3f}" for part in parts]
    lines = ("up to step", *map(str, ends)), ("---", *["---:"] * len(ends)), ("mean loss", *means)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def held_out(record: dict[str, Any]) -> str:
    """Acceptance by slot, or what a head without slots is measured by."""
    result = record["result"]
    if not result["acceptance"]:
        figures = {key: value for key, value in result.items() if isinstance(value, float) and "length" not in key}
        return "\n".join(f"- {key}: {value:.3f}" for key, value in figures.items())
    names = (
        ("conditional", "kept at temperature 1, given the slots before"),
        ("conditional_greedy", "same most probable token, given the same before"),
        ("acceptance", "kept at temperature 1, every place alike"),
        ("ece", "calibration error"),
    )
    slots = range(1, len(result["acceptance"]) + 1)
    lines = ["| slot | " + " | ".join(map(str, slots)) + " |", "|---" + "|---:" * len(slots) + "|"]
    lines += [f"| {words} | " + " | ".join(f"{x:.3f}" for x in result[key]) + " |" for key, words in names]
    length = (
        f"\n\nExpected length of a chain of {len(slots)} guesses, bonus included: {result['expected_length']:.2f} sampled, "
        f"{result['expected_length_greedy']:.2f} greedy\n({result['num_tokens']:,} held-out tokens, teacher forcing)."
    )
    if len(slots) == 1:
        length = f"\n\n{result['num_tokens']:,} held-out tokens, teacher forcing; the law is the same at every slot."
    return "\n".join(lines) + length


def judge_card(config: dict[str, Any]) -> tuple[str, str, str]:
    """Data, training and result of a judge, which keeps them in its config."""
    about = config["training"]
    data = (
        f"{about['labels']:,} tokens of {about['prompts']} worked problems, mined by `recipes.mine_judge`: one token was "
        f"swapped for the draft's,\nthe rest written again, and the token called important where the final answer changed "
        f"({about['important']:,} of them);\n{about['held_out_labels']} further labels held out."
    )
    training = (
        f"Logistic regression on the output of layer {config['layer']}, ridge strength {about['strength']:g} "
        "of seven by held-out AUC."
    )
    result = f"- AUC {about['auc']:.3f} held out, {about['auc_training']:.3f} on the training labels\n"
    result += "- threshold by recall: see `thresholds` in config.json; docs/drafters.md shows what each does to answers"
    return data, training, result


def card(folder: Path, losses: str | None, target: str = OWN) -> str:
    """The card of a head that lies in folder."""
    file = folder / "head.gguf"
    head = formats.load(file if file.exists() else folder)
    weights = sum(file.stat().st_size for end in ("safetensors", "gguf") for file in folder.glob(f"*.{end}"))
    if head.method == "judge":
        data, training, result = judge_card(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    else:
        record = json.loads((folder / "record.json").read_text(encoding="utf-8"))
        data, training, result = learned(record, target), trained(record, losses or ""), held_out(record)
        if bits := record.get("significant_bits"):
            result += f"\n\nMeasured before its matrices were rounded to {bits} significant bits."
        if blocks := record.get("blocks"):
            size = record["options"]["draft_vocab_size"] or head.config.vocab_size
            result += f"\n\nMeasured before its matrices were rounded to {blocks}, with a draft vocabulary of {size:,}."
        if record.get("output_of_target"):
            result += (
                "\n\nIts output head was not trained: its rows are the target's, and are read from there when the head is "
                "loaded,\nrounded to the same blocks."
            )
    return CARD.format(
        method=head.method, what=WHAT[head.method], parameters=f"{head.num_parameters:,}", megabytes=weights / 1e6,
        data=data, training=training.rstrip(), result=result, target=target,
        source=", as that of its text (`../README.md`)" if target == OWN else ", as the target's",
    )  # fmt: skip


def cut(head: Eagle3Head, responses: Responses, size: int) -> Eagle3Head:
    """The head with those ``size`` tokens of its draft vocabulary that stand most often in the answers."""
    ids = head.target_ids
    index = torch.arange(responses.tokens.shape[1])
    said = (index >= responses.start[:, None]) & (index < responses.length[:, None])
    counts = torch.bincount(responses.tokens[said].long(), minlength=len(head.t2d))
    counts = torch.where(head.t2d, counts + 1, 0)  # of other tokens the head has no row
    d2t, t2d = draft_vocabulary(counts, size)
    small = Eagle3Head(replace(head.config, draft_vocab_size=size)).to(head.dtype)
    kept = t2d[ids]
    weights = {**head.state_dict(), "d2t": d2t, "t2d": t2d, "lm_head.weight": head.lm_head.weight.data[kept]}
    small.load_state_dict(weights)
    return small


def put(
    run: Path, bundled: Path, target: str = OWN, blocks: str = "", tokens: int = 0,
    responses: Path | None = None, *, lend_output: bool = False,
) -> Path:  # fmt: skip
    """Copy one run's head and write its card; the folder."""
    method = formats.load(run).method
    folder = bundled / method if target == OWN else bundled / target / method
    folder.mkdir(exist_ok=True, parents=True)
    # Before anything is removed: a run that went on from the head that it replaces has its record from there.
    record = read_record(run) if (run / "record.json").exists() else None
    for old in folder.iterdir():
        old.unlink()
    if blocks:
        head = formats.load(run)
        if tokens and responses is not None:
            assert isinstance(head, Eagle3Head)
            head = cut(head, Responses.load(responses), tokens)
        about = formats.describe_target(run)
        if lend_output and (record is None or record["options"].get("train_lm_head") is not False):
            raise SystemExit(f"{run}: its output head was trained: no target has it")
        formats.save_gguf(
            head, folder / "head.gguf", {}, target=about, kind_of_matrices=blocks, lend_output=lend_output
        )
    for file in sorted(run.iterdir()) if not blocks else ():
        if file.name == "config.json" or file.suffix == ".safetensors":
            shutil.copy(file, folder / file.name)
    if target != OWN and not blocks:  # else the name is the one it was trained under
        _rename_target(folder / "config.json", target)
    if record is not None:
        record |= {"blocks": blocks} if blocks else {}
        record |= {"output_of_target": True} if lend_output else {}
        record |= {"bundled_draft_vocab_size": tokens} if tokens else {}
        (folder / "record.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    losses = loss_table(run / "log.jsonl") if (run / "log.jsonl").exists() else None
    (folder / "README.md").write_text(card(folder, losses, target), encoding="utf-8")
    return folder


def _rename_target(file: Path, target: str) -> None:
    """The target's directory on the machine of the training becomes its name."""
    config = json.loads(file.read_text(encoding="utf-8"))
    config["foretell"]["target"]["name"] = target
    file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    parser.add_argument("--bundled", type=Path, default=Path("src/foretell/bundled"))
    parser.add_argument("--target", default=OWN, help="whose head it is: a name of 'foretell list'")
    parser.add_argument("--blocks", default="", choices=("Q4_0", "Q8_0"), help="of a GGUF file")
    parser.add_argument("--tokens", type=int, default=0, help="of its draft vocabulary; it needs --responses")
    parser.add_argument("--lend-output", action="store_true", help="leave out an output head that is the target's")
    parser.add_argument("--responses", type=Path, help="the answers that the head learned from")
    args = parser.parse_args()
    for run in args.runs:
        print(
            put(
                run, args.bundled, args.target, args.blocks, args.tokens, args.responses,
                lend_output=args.lend_output,
            )
        )  # fmt: skip


if __name__ == "__main__":
    main()
