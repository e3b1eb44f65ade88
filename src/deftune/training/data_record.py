"""What a run prints and records of its data, and how it is found to be the same when the run is resumed."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import numpy as np
import torch.distributed as dist

from deftune.artifacts.files import write_atomic
from deftune.artifacts.names import shown_model
from deftune.artifacts.runs import Run
from deftune.data.examples import Examples
from deftune.data.packing import Packs
from deftune.objectives import objective as parse_objective
from deftune.training.machine import base_name, data_ranks, has_ranks, tensor_ranks, weights_of
from deftune.training.preparation import Prepared, model_options, text_config


def facts(prepared: Prepared) -> list[str]:
    """What follows from the config and the data, as a reader would want to check it."""
    config, ranks = prepared.config, data_ranks(prepared.config)
    train = config.train
    micro = train.micro_batch_size
    unit = "packed sequences" if config.data.packing else "rows"
    model = shown_model(config.model.name)
    lines = [
        f"objective {config.objective} ({parse_objective(config.objective).kind}); model {model}"
        + (f" with LoRA r={config.model.lora.r} over {base_name(config)} weights" if config.model.lora else ""),
        *[f"train: {line}" for line in prepared.train.facts()],
        *([f"eval: {line}" for line in prepared.eval.facts()] if prepared.eval else []),
        f"{train.batch_size} {unit}/step = {ranks} rank{'s' * (ranks > 1)} x {micro} x "
        f"{train.batch_size // (micro * ranks)}; {len(prepared.sequences):,} {unit}; {prepared.steps:,} steps",
    ]
    if train.tensor_parallel > 1:
        lines.append(
            f"tensor parallel: {train.tensor_parallel} ranks share each layer and the vocabulary"
            if tensor_ranks(config) > 1
            else "train.tensor_parallel: one rank holds all weights; start several with torchrun to divide them"
        )
    lines += (
        ["the layers' matrices are bfloat16, with float32 masters in the optimizer"]
        if weights_of(config) != "float32"
        else []
    )
    lines += [prepared.checkpointing.why] if prepared.checkpointing.why else []
    if train.fsdp:
        size = min(train.shard_size or ranks, ranks)
        lines.append(
            "train.fsdp: one rank holds all weights; start several with torchrun to shard them"
            if ranks == 1
            else f"FSDP2: {ranks // size} cop{'ies' if ranks > size else 'y'} of the weights, each over {size} ranks"
        )
    context = getattr(text_config(prepared.source, **model_options(config)), "max_position_embeddings", None)
    longest = max(prepared.train.examples.sizes, default=0)
    if context and longest > context:
        lines.append(
            f"WARNING: the longest row has {longest:,} tokens, and the model was made for {context:,} "
            f"(max_position_embeddings); set data.max_length to {context} at most"
        )
    if train.max_steps is not None and train.max_steps > prepared.steps:
        lines.append(
            f"train.max_steps {train.max_steps:,} is more than train.epochs {train.epochs:g} allows: the run has "
            f"{prepared.steps:,} steps; raise train.epochs for more"
        )
    if train.eval_steps is not None and train.eval_steps > prepared.steps:
        lines.append(
            f"WARNING: train.eval_steps {train.eval_steps:,} is more than the run's {prepared.steps:,} steps: it is "
            f"evaluated only at the end"
        )
    elif train.stop_after is not None and prepared.steps // (train.eval_steps or 1) <= train.stop_after:
        lines.append(
            f"WARNING: train.stop_after {train.stop_after} cannot stop a run of {prepared.steps:,} steps that is "
            f"evaluated every {train.eval_steps:,}; lower train.eval_steps"
        )
    if len(prepared.sequences) < train.batch_size:
        lines.append(
            f"a step takes all {len(prepared.sequences)} {unit}: fewer than train.batch_size {train.batch_size}"
        )
    if prepared.now is not None:
        lines.append(f"the chat template writes the date: {prepared.now:%d %B %Y}, also when the run is resumed")
    if prepared.bad.skip and prepared.bad.rows:
        lines.append(f"{prepared.bad.summary()}; bad_rows.jsonl in the run's folder lists each with its reason")
    return lines


ARRAYS = "arrays-"  # begins the fingerprints that `fingerprint` makes


def fingerprint(prepared: Prepared) -> str:
    """Of the token ids, the masks and the packs: a resumed run must see the same."""
    digest = hashlib.sha256()
    for sequences in (prepared.sequences, prepared.eval.examples if prepared.eval else Examples()):
        examples: Any = sequences.examples if isinstance(sequences, Packs) else sequences
        members = sequences.members if isinstance(sequences, Packs) else []
        columns = [examples.columns["rows"]["size"], examples.columns["input_ids"], examples.columns["supervised"]]
        places = np.frombuffer(b"".join(members), "q").astype("<i8", copy=False)
        columns += [np.array([len(pack) for pack in members], "<i8"), places]
        for column in columns:
            digest.update(b"%d\n" % len(column))
            digest.update(np.ascontiguousarray(column).data)
    return ARRAYS + digest.hexdigest()


def fingerprint_of_lists(prepared: Prepared) -> str:
    """As versions until 0.2.0 made it, of token ids and labels as JSON: seconds for every 100,000 rows."""
    digest = hashlib.sha256()
    for sequence in itertools.chain(prepared.sequences, prepared.eval.examples if prepared.eval else ()):
        digest.update(json.dumps([sequence.input_ids, sequence.labels]).encode())
    return digest.hexdigest()


def read_fingerprint(run: Run) -> str | None:
    """The fingerprint of the data that a run began with; None for a run that has not started."""
    path = run.folder / "data.json"
    try:
        return str(json.loads(path.read_text(encoding="utf-8"))["fingerprint"]) if path.is_file() else None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ValueError(f"{path}: is damaged; restore it, or start another run with --set run=...") from None


def read_time(runs: Sequence[Run]) -> datetime:
    """The time that the chat template wrote into the data of the first of ``runs`` that has one; else now."""
    times = [datetime.fromisoformat(time) for run in runs if (time := run.template_time())]
    return times[0] if times else datetime.now()


def record_data(prepared: Prepared, run: Run) -> None:
    """Write what the data was; a resumed run whose data changed is refused."""
    now: dict[str, Any] = {"fingerprint": fingerprint(prepared), "facts": facts(prepared)}
    if prepared.now is not None:
        now["now"] = prepared.now.isoformat()
    before = read_fingerprint(run)
    # a run that an earlier version began has the other kind
    own = fingerprint_of_lists(prepared) if before and not before.startswith(ARRAYS) else now["fingerprint"]
    if before is not None and before != own:
        raise ValueError(
            f"{run.folder}: the data is not what the run began with (tokens or masks differ); restore it, or start "
            f"another run with --set run=..."
        )
    write_atomic(run.folder / "data.json", json.dumps(now, indent=1))
    if prepared.bad.skip and prepared.bad.rows:
        prepared.bad.write(run.folder / "bad_rows.jsonl")


def refuse_other_rows(prepared: Prepared, alike: Sequence[Run]) -> None:
    """Refuse data that is not that of runs which this one will be compared with."""
    recorded = {run.folder: one for run in alike if (one := read_fingerprint(run)) and one.startswith(ARRAYS)}
    now = fingerprint(prepared) if recorded else None
    if other := next((folder for folder, before in recorded.items() if before != now), None):
        raise ValueError(
            f"{other}: was trained on other rows (tokens or masks differ), so the runs cannot be compared; restore the "
            f"data, or begin another comparison with --set folder=..."
        )


def compare_ranks(prepared: Prepared) -> None:
    """Refuse ranks with different data, on all of them: machines may have files of their own."""
    if not has_ranks():
        return
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, fingerprint(prepared))
    if others := [rank for rank, one in enumerate(found) if one != found[0]]:
        raise ValueError(
            f"rank {others[0]} has other rows than rank 0 (tokens or masks differ); give every machine the same files, "
            f"and leave them as they are while the run starts"
        )
