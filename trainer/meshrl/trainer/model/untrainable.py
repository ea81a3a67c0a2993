"""Models that packed training refuses, told from config.json alone: nothing here loads torch or reads weights.

The trainer itself tries each model (`model/packing_check.py`), so this list is not what makes a run right: it lets a
recipe be refused before anything starts. `tests/unit/testing/test_doubles.py` holds the two against each other.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

WANTED = "want a model that docs/reference/models.md says is trained"
ATTENTION_LAYERS = frozenset({"full_attention", "sliding_attention", "attention"})
"""`layer_types` of a model whose attention the packed one computes."""
_OTHERS = (
    "axk2 deepseek_v32 deepseek_v4 dots3_note dots3_note_text falcon_mamba glm_moe_dsa hy_v4 inkling_text"
    " inkling2_text jamba mamba mamba2 minimax recurrent_gemma rwkv xlstm zamba zamba2 zaya"
)
OTHER_LAYERS = frozenset(_OTHERS.split())
"""Types of models that have layers of other kinds, also where config.json does not list the kinds."""
_STATEFUL = (
    "bailing_hybrid bamba falcon_h1 granitemoehybrid kimi_linear lfm2 lfm2_moe lfm3 nemotron_h olmo_hybrid qwen3_5"
    " qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_next"
)
STATEFUL = frozenset(_STATEFUL.split())
"""Types of trained models with layers that keep a state from one token to the next, which begins with each row."""
NO_SHARES = "layers that keep a state from one token to the next are not shared by sequence or tensor ranks; want 1"
_SPREAD = frozenset(("qwen3_next", "qwen3_5_moe", "qwen3_5_moe_text"))
"""Members of STATEFUL whose experts learned on several ranks what they learn on one."""
_STATE = "rows of a pack would see each other"
REASONS: Mapping[str, str] = {
    f"its attention does not go through transformers' attention interface: {_STATE}": (
        "blt bloom cpmant dbrx doge git gpt_neo gpt_neox_japanese gptj mpt mvp openai-gpt prophetnet qwen4_exp"
        " qwen4_exp_text reformer trocr xglm"
    ),
    "it counts positions over the whole pack": (
        "bart bigbird_pegasus blenderbot blenderbot-small marian mbart pegasus plbart"
    ),
    "it draws random numbers while it trains: log-probs would not be the sampler's": "phimoe",
    "its output embedding has a bias, which is not supported": (
        "bert bert-generation big_bird camembert codegen ctrl data2vec-text electra ernie megatron-bert"
        " modernbert-decoder phi rembert roberta roberta-prelayernorm roc_bert roformer xlm xlm-roberta"
        " xlm-roberta-xl xlnet xmod"
    ),
    "it does not compute on tokens alone": (
        "gemma4 gemma4_assistant gemma4_unified gemma4_unified_assistant musicgen musicgen_melody"
    ),
    "its decoder layers are not under a known name": "hrm_text llama4 llama4_text mllama",
}
"""Why, and the types of models whose code it is true of."""
REFUSED = {kind: reason for reason, kinds in REASONS.items() for kind in kinds.split()}


PICTURES = (
    "idefics3",
    "qwen2_5_vl",
    "qwen2_vl",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_vl",
    "qwen3_vl_moe",
    "smolvlm",
)
"""Types of vision-language models that are trained; others are untested."""

FAMILIES: Mapping[str, str] = {
    "bloom": "bloom",
    "deepseek-v3.2": "deepseek_v32",
    "deepseek-v4": "deepseek_v4",
    "falcon-mamba": "falcon_mamba",
    "gemma-4": "gemma4",
    "glm-5": "glm_moe_dsa",
    "jamba": "jamba",
    "llama-4": "llama4",
    "minimax-(text|m1)": "minimax",
    "mpt-": "mpt",
    "phi-(1|2)": "phi",
    "phi-3.5-moe": "phimoe",
    "recurrentgemma": "recurrent_gemma",
    "zamba": "zamba",
    "zamba2": "zamba2",
}
"""How names on the hub begin, as a pattern in lower case, and the type of such models."""
PICTURE_FAMILIES: Mapping[str, str] = {
    "gemma-3-(4|12|27)b": "gemma3",
    "gemma-3n": "gemma3n",
    "glm-4.[156]v": "glm4v",
    "internvl": "internvl",
    "kimi-vl": "kimi_vl",
    "llama-3.2-(11|90)b": "mllama",
    "llava": "llava",
    "minicpm-(o|v)": "minicpmo",
    "phi-(3.5-vision|4-multimodal)": "phi4_multimodal",
    "qwen2.5-omni": "qwen2_5_omni",
    "qwen3-omni": "qwen3_omni_moe",
}
"""Vision-language models."""


def refusal_of_name(name: str) -> str:
    """Why a model of this name on the hub, `ORG/NAME`, cannot be trained, as far as its family is known; or empty."""
    last = name.rpartition("/")[2].lower()
    for pattern, kind in FAMILIES.items():
        if re.match(pattern, last):
            return refusal({"model_type": kind})
    for pattern, kind in PICTURE_FAMILIES.items():
        if re.match(pattern, last):
            return refusal({"model_type": kind, "vision_config": {"model_type": kind}})
    return ""


def refusal(config: Mapping[str, Any]) -> str:
    """Why a model with this config.json cannot be trained; empty for one that may be tried."""
    text = config.get("text_config") or config
    kinds = {str(part.get("model_type")) for part in (config, text)}
    for kind in sorted(kinds & REFUSED.keys()):
        return f"{kind}: {REFUSED[kind]}"
    others = _other_layers(text)
    if others and not kinds & STATEFUL:
        return f"layer_types {', '.join(others)}: {_STATE}"
    if not text.get("layer_types"):
        for kind in sorted(kinds & OTHER_LAYERS):
            return f"{kind} has layers of other kinds than attention: {_STATE}"
    named = config.get("model_type")
    if config.get("vision_config") and named is not None and named not in PICTURES:
        return f"{named} reads pictures, in another way than {', '.join(PICTURES)}"
    if "falcon" in kinds and text.get("alibi"):
        return "falcon with alibi, whose distances a pack does not have"
    return ""


def spread_fault(config: Mapping[str, Any]) -> str:
    """Why ranks cannot share the experts of a model with this config.json; empty where they may."""
    kind = (config.get("text_config") or config).get("model_type")
    if kind in STATEFUL and kind not in _SPREAD:
        return f"the experts of {kind} are not shared among ranks; want 1"
    return ""


def keeps_state(config: Mapping[str, Any]) -> bool:
    """Whether layers of a model with this config.json keep a state from one token to the next."""
    text = config.get("text_config") or config
    listed = bool(text.get("layer_types"))
    return text.get("model_type") in STATEFUL and (not listed or bool(_other_layers(text)))


def _other_layers(text: Mapping[str, Any]) -> list[str]:
    return sorted({*map(str, text.get("layer_types") or ())} - ATTENTION_LAYERS)
