"""Tries every causal language model of transformers in packs, and holds `trainer.model.untrainable` against it.

python -m tests.doubles.trainable [TYPE ...] [--write docs/reference/models.md]

Ends with 1 where a type that `meshrl config check` lets pass is refused by the trainer, or the other way round.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Mapping
from typing import Any

import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from meshrl.trainer.model.packing_check import first_line
from meshrl.trainer.model.policy import empty_hf, packing_fault, what_to_try
from meshrl.trainer.model.untrainable import refusal
from tests.doubles.architectures import parser_of, replace_section

ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
MORE: Mapping[str, Mapping[str, Any]] = {
    "cohere_compass_text": {
        "rope_parameters": dict.fromkeys(("full_attention", "sliding_attention"), ROPE)
    },
    "deepseek_v2": {"num_experts_per_tok": 6, "n_group": 1, "topk_group": 1},
    "dots1": {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128, "moe_topk": 2, "num_experts": 8},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
    "granitemoehybrid": {"layer_types": ["attention"] * 32},
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"] * 30},
    "ministral": {"head_dim": 128},
    "nemotron": {"head_dim": 128, "num_key_value_heads": 8},
    "reformer": {"is_decoder": True},
}
"""Settings of checkpoints beside the defaults of transformers, which are no model by themselves."""

UNTRIED = "not tried"


def tried(kind: str) -> tuple[str, str]:
    """Why the trainer refuses models of a type, and why the check of a recipe does; empty where they do not."""
    try:
        config = CONFIG_MAPPING[kind](**MORE.get(kind, {}))
    except Exception as error:  # its defaults are no model, and MORE has none
        return f"{UNTRIED}: {first_line(error)}", refusal({"model_type": kind})
    said = refusal(config.to_dict())
    try:
        return packing_fault(*what_to_try(empty_hf(config))), said
    except Exception as error:  # whatever it is: the trainer makes a line of it
        return first_line(error), said


SECTION = """## Every causal model

All {count} types of transformers {transformers}, checked as the trainer checks a model that it
loads: log-probs of three packed rows beside transformers' own. Written by

```
python -m tests.doubles.trainable --write docs/reference/models.md
```

Other `layer_types` in `config.json` than the defaults may give another result.

**Trained** ({trained_count}): {trained}.

| refused because | types |
|---|---|
{refused}
"""


def section(found: Mapping[str, str]) -> str:
    """The result of each type."""
    trained = [kind for kind, why in found.items() if not why]
    refused: dict[str, list[str]] = {}
    for kind, why in found.items():
        if why:
            reason = why.removeprefix(kind).lstrip(": ").replace("|", " ")
            refused.setdefault(reason, []).append(kind)
    lines = [f"| {reason} | {', '.join(kinds)} |" for reason, kinds in refused.items()]
    return SECTION.format(
        count=len(found),
        transformers=transformers.__version__,
        trained_count=len(trained),
        trained=", ".join(trained),
        refused="\n".join(lines),
    )


def main() -> int:
    """The exit code."""
    options = parser_of(__doc__, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES).parse_args()
    warnings.simplefilter("ignore")
    be_quiet: Any = transformers.logging.set_verbosity_error
    be_quiet()
    found, apart = {}, 0
    for kind in options.names or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        trainer, check = tried(kind)
        found[kind] = check or trainer
        agree = bool(trainer) == bool(check) or trainer.startswith(UNTRIED)
        apart += not agree
        mark = "" if agree else f"  <-- but config check says: {check or 'good'}"
        print(f"{kind}: {trainer or 'trained'}{mark}", flush=True)
    if options.write:
        replace_section(options.write, SECTION.splitlines()[0], section(found))
    print(f"{apart} of {len(found)} apart")
    return int(apart > 0)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
