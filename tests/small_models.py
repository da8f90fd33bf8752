"""Every model class of the installed transformers, made small from its config.

A config is shrunk by the names of its fields; ``CHANGES`` has what no name tells. Weights are
drawn anew, large enough that a wrong mask shows. No network, no files.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import re
import warnings

import small_inputs
import torch
import transformers
from small_inputs import VOCABULARY, mask_of
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from flashattn3 import UnsupportedError

OLD = transformers.__version__.startswith("4.")  # its configs take dicts of their parts
TOLERANCE, LARGEST = 1e-4, 30_000_000  # relative error; number of weights

# What a field becomes, by the first pattern that its name matches.
SIZES = (
    (r"^qk_head_dim$", None),  # a sum of two others
    (r"(^|_)(head_dim|d_kv|key_value_dim|attention_head_dim|v_head_dim|qk_\w*head_dim)$", 16),
    (r"(^|_)(q_lora_rank|kv_lora_rank|o_lora_rank|index_head_dim)$", 32),
    (r"(key_value_heads|kv_heads|num_query_groups)$", 2),
    (r"(attention_heads|num_heads|n_heads?|n_head|heads|attn_heads)$", 4),
    (r"(feat_extract_layers|conv\w*_layers|adapter_layers|deconv\w*)$", None),
    (r"(hidden_layers|num_layers|n_layers?|_layers|num_blocks|^depth|_depth)$", 2),
    (r"rotary_dim$|^(mamba_)?chunk_size$", 8),
    (r"(vocab_size|vocabulary_size)", VOCABULARY),
    (r"^d_latents$", 64),
    (r"(intermediate_size|ffn_dim|ffn_hidden_size|d_ff|ffn_size|d_inner|n_inner|inner_dim)", 64),
    (r"(num_experts|n_routed_experts|local_experts|n_experts|moe_num_experts)$", 4),
    (r"(experts_per_tok|moe_topk|moe_k|num_experts_per_token|top_k_experts)$", 2),
    (r"(^n_group|topk_group|shared_experts)$", 1),
    (r"(max_position_embeddings|n_positions|max_sequence_length|max_seq_len|n_ctx)$", 128),
    (
        r"(hidden_size|d_model|n_embd|embed_dim|hidden_dim|embedding_size|emb_dim|projection_dim)",
        64,
    ),
    (r"(^image_size|^img_size|input_size)$", 32),
    (r"patch_size$", 8),
    (r"(max_source_positions)$", 20),
    (r"(num_queries|num_query_tokens)$", 5),
)
CHANGES: dict[str, dict] = {
    "bamba": {"attn_layer_indices": [1]},
    "chameleon": {"vocabulary_map": {"<image>": 95}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "esm": {"vocab_size": VOCABULARY, "pad_token_id": 0, "mask_token_id": 1},
    "esmc": {"num_key_value_heads": 4},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "hunyuan_vl_text": {"head_dim": 16},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "lfm2_vl": {"vision_config": {"vision_use_head": False}},
    "mimi": {"upsample_groups": 64},
    "minimax": {"layer_types": ["linear_attention", "full_attention"]},
    "ministral": {"head_dim": 16},
    "mistral4": {"head_dim": 32},
    "moonshine": {"encoder_num_key_value_heads": 4, "decoder_num_key_value_heads": 4},
    "nemotron": {"num_key_value_heads": 2},
    "nemotron_h": {"n_groups": 2},
    "nemotron3_diarization_audio": {"num_key_value_heads": 4},
    "nemotron3_5_transcribe_asr_audio": {"num_key_value_heads": 4},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "step3p7_text": {"sliding_window": 8},
    "zamba2": {"attention_hidden_size": 128, "attention_head_dim": 32},
}
# Sections of the rotary dimensions, half a head, that configs do not name, by the beginning of the
# model_type.
SECTIONS = {"glm4v_moe": [1, 1, 2], "hunyuan_vl": [2, 2, 2, 2]}
SECTIONS |= {
    n: [2, 3, 3] for n in ("glm", "qwen2_vl", "qwen2_5_vl", "qwen2_5_omni", "paddleocr_vl")
}
AUTOS = (
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "MODEL_MAPPING_NAMES",
)


def model_classes() -> dict[str, str]:
    """The model class of each model_type: the first of the auto classes that takes its config and
    not that of a part; else the first."""
    found: dict[str, list[str]] = {}
    for name in AUTOS:
        for kind, classes in getattr(modeling_auto, name).items():
            first = classes if isinstance(classes, str) else classes[0]
            found.setdefault(kind, []).append(first)
    return {kind: _of_the_config(kind, names) for kind, names in sorted(found.items())}


def _of_the_config(kind: str, names: list[str]) -> str:
    if len(names) == 1 or kind not in CONFIG_MAPPING:
        return names[0]
    wanted = CONFIG_MAPPING[kind].__name__
    configs = ((n, getattr(getattr(transformers, n, None), "config_class", None)) for n in names)
    return next((n for n, c in configs if getattr(c, "__name__", "") == wanted), names[0])


def small_config(kind: str):
    return _shrunk(CONFIG_MAPPING[kind], CHANGES.get(kind, {}))


def _shrunk(cls, changes: dict):
    default = cls()
    values = {}
    for name in _fields(cls, default):
        value = _value(default, name)
        if name in changes or isinstance(value, transformers.PretrainedConfig):
            continue
        small = _small(name, value)
        if name.endswith("key_value_heads") and _value(default, "kv_lora_rank"):
            small = 4
        if isinstance(value, dict) and "mrope_section" in value:
            small = value | {"mrope_section": [2, 3, 3]}
        if small is not value:
            values[name] = small
    for name, sub in _subconfigs(default).items():
        if name not in changes or isinstance(changes[name], dict):
            own = changes.get(name, {}) | CHANGES.get(sub.model_type, {})
            small = _shrunk(type(sub), own)
            values[name] = small.to_dict() if OLD else small
    values |= {n: v for n, v in changes.items() if n not in _subconfigs(default)}
    layers = _layers(values, default)
    for name in _fields(cls, default):
        value = _value(default, name)
        if isinstance(value, list | tuple) and name == "num_heads" and name not in changes:
            grows = value[0] < value[-1]  # with the width, of Swin and its like
            values[name] = [4 * 2**i if grows else 4 for i in range(len(value))]
        if isinstance(value, list | tuple) and name not in changes and len(value) > 4:
            shorter = _shortened(name, value, layers)
            if shorter is not None:
                values[name] = shorter
    kinds = max([len(v) for n, v in values.items() if n == "layer_types"] + [0])
    if kinds > layers:
        for name in ("num_hidden_layers", "num_layers", "n_layers"):
            if name in values:
                values[name] = kinds
    values.pop("model_type", None)
    config = cls(**values)
    rotary = _value(config, "rope_parameters") or _value(config, "rope_scaling")
    sections = [x for n, x in SECTIONS.items() if cls.model_type.startswith(n)]
    if sections and isinstance(rotary, dict):
        rotary["mrope_section"] = sections[0]
    return config


def _value(config, name: str):
    try:
        return getattr(config, name, None)
    except Exception:  # an attribute that differs between layers
        return None


def _fields(cls, default) -> list[str]:
    names = [n for c in cls.__mro__ for n in inspect.signature(c.__init__).parameters]
    names = [n for n in names if n not in ("self", "kwargs", "args", "config")]
    return sorted(set(names) | {n for n in vars(default) if not n.startswith("_")})


def _subconfigs(config) -> dict:
    return {n: v for n, v in vars(config).items() if isinstance(v, transformers.PretrainedConfig)}


def _small(name: str, value):
    if isinstance(value, bool):
        return value
    if name.endswith("token_id") or name.endswith("token_index") or name.endswith("_token_ids"):
        if name.startswith(("pad", "text_pad")) and value is not None:
            return 0
        if name.startswith("eos"):
            return None if value is None else VOCABULARY - 1
        return value if not isinstance(value, int) or value < 90 else 90 + value % 8
    if isinstance(value, float) and re.search(
        r"(dropout|_pdrop|drop_rate|drop_path|layerdrop)", name
    ):
        return 0.0
    if not isinstance(value, int):
        return value
    for pattern, size in SIZES:
        if re.search(pattern, name):
            if size is None:
                return value
            return min(size, value) if value > 0 else value
    return value


def _layers(values: dict, default) -> int:
    names = "num_hidden_layers", "num_layers", "n_layers", "n_layer"
    return next((values.get(n) for n in names if values.get(n)), 2)


def _shortened(name: str, value, layers: int):
    """A list with an element for each layer, with each kind of them."""
    if name in ("layer_types", "layers_block_type", "attention_types", "mlp_layer_types"):
        kinds = list(dict.fromkeys(value))
        return (kinds * layers)[: max(layers, len(kinds))]
    return None


def build(cls_name: str, config, attention: str):
    cls = getattr(transformers, cls_name)
    config._attn_implementation = attention
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return cls._from_config(config, attn_implementation=attention).eval()


def draw_weights(model) -> None:
    generator = torch.Generator().manual_seed(0)
    for name, weight in sorted(model.named_parameters()):
        if not weight.is_floating_point():
            continue
        noise = torch.randn(weight.shape, generator=generator)
        with torch.no_grad():
            if weight.ndim > 1:
                fan_in = weight[0].numel() if "embed" not in name else 4
                weight.copy_(noise / fan_in**0.5)
            else:
                weight.add_(noise * 0.05)


def _rounded(model):
    """A copy whose weights differ as by rounding."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for weight in other.parameters():
            if weight.is_floating_point():
                weight.mul_(1 + 1e-7 * torch.randn(weight.shape, generator=generator))
    return other


def compare(model, eager, inputs: dict, mask: torch.Tensor | None) -> float:
    """The largest relative error of the outputs, at tokens."""
    if mask is not None:
        inputs = inputs | {"attention_mask": mask}
        if mask[0, -1] == 0:
            inputs["input_ids"] = inputs["input_ids"].clone()
            inputs["input_ids"][0, 7] = VOCABULARY - 1
    error = 0.0
    with torch.no_grad():
        pairs = zip(outputs_of(model(**inputs)), outputs_of(eager(**inputs)), strict=True)
        for found, wanted in pairs:
            if mask is not None and found.shape[:2] == mask.shape:
                found, wanted = found[mask.bool()], wanted[mask.bool()]
            if wanted.numel():
                error = max(error, ((found - wanted).abs().max() / wanted.abs().max()).item())
    return error


def outcome(kind: str, name: str = "fa3") -> str:
    """What happens to a kind of model: "right", "right, ...refused", "refused: ...", "not tried:
    ..." where transformers' own attention does not run, or "WRONG ..." or "ERROR ..." """
    try:
        config, cls = small_config(kind), model_classes()[kind]
        with torch.device("meta"), contextlib.suppress(RuntimeError, NotImplementedError):
            count = sum(x.numel() for x in build(cls, copy.deepcopy(config), "eager").parameters())
            build(cls, copy.deepcopy(config), name)
            if count > LARGEST:
                return "not tried: too large"
        eager = build(cls, copy.deepcopy(config), "eager")
        draw_weights(eager)
        inputs = _inputs_that_run(eager)
        if compare(eager, eager, inputs, None) != 0:
            return "not tried: eager attention does not repeat its numbers"
        if compare(_rounded(eager), eager, inputs, None) > TOLERANCE:
            return "not tried: its numbers amplify rounding"
    except UnsupportedError as error:
        return f"refused: {_reason(error)}"
    except Exception as error:
        return f"not tried: {_words(error)}"
    models = {}
    try:
        for attention in (name, "sdpa"):
            models[attention] = build(cls, copy.deepcopy(config), attention)
            models[attention].load_state_dict(eager.state_dict(), strict=False)
    except UnsupportedError as error:
        return f"refused: {_reason(error)}"
    except Exception as error:
        if not models:
            return f"ERROR {_words(error)}"
    return _outcome_of(models[name], [eager, *list(models.values())[1:]], inputs)


def _inputs_that_run(eager) -> dict:
    """The first of the inputs with which a model runs; the error of the first if it never does."""
    first = None
    for inputs in small_inputs.inputs_of(eager):
        try:
            compare(eager, eager, inputs, None)
            return inputs
        except Exception as error:
            first = first or error
    raise first


def _outcome_of(model, others: list, inputs: dict) -> str:
    """others: the model with transformers' eager attention, and with sdpa if it has that."""
    eager = others[0]
    takes_masks = "input_ids" in inputs and "attention_mask" in _parameters(eager)
    found = {}
    for side in (None, "left", "right") if takes_masks else (None,):
        mask = mask_of(side)

        def is_right(m, other, mask=mask):
            return compare(m, other, inputs, mask) <= TOLERANCE

        def generates_the_same(m, other, mask=mask):
            return torch.equal(*(_generated(x, inputs, mask) for x in (m, other)))

        found[side or "forward"] = _tried(is_right, model, others)
        if side != "right" and "input_ids" in inputs and eager.can_generate():
            found[f"generate {side or ''}".strip()] = _tried(generates_the_same, model, others)
    by_words: dict[str, list[str]] = {}
    for case, words in found.items():
        if words:
            by_words.setdefault(words, []).append(case)
    if list(by_words) == ["right"]:
        return "right"
    return "; ".join(f"{', '.join(cases)}: {words}" for words, cases in by_words.items())


AS_SDPA = "as sdpa, from which eager attention differs"


def _tried(is_right, model, others: list) -> str:
    """is_right: of a model and another. "": eager attention fails too."""
    try:
        is_right(others[0], others[0])
    except Exception:
        return ""
    try:
        if is_right(model, others[0]):
            return "right"
        both = len(others) > 1 and is_right(model, others[1])
        return AS_SDPA if both and not is_right(others[1], others[0]) else "WRONG"
    except UnsupportedError as error:
        return f"refused, {_reason(error)}"
    except Exception as error:
        return f"ERROR {_words(error)}"


def _generated(model, inputs: dict, mask):
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    inputs = {n: x for n, x in inputs.items() if n != "decoder_input_ids"}
    return model.generate(**inputs, attention_mask=mask, **options)


def _reason(error: Exception) -> str:
    text = str(error)
    for pattern in (r"because (.*?); use", r"(?:attention|mask): (.*?)[:;,]"):
        match = re.search(pattern, text)
        if match:
            return match[1]
    return text


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip()[:90]}".replace("\n", " ")


def _parameters(model):
    return inspect.signature(model.forward).parameters


def outputs_of(result) -> list[torch.Tensor]:
    """The tensors with values of an output, without caches."""
    if isinstance(result, torch.Tensor):
        return [result] if result.is_floating_point() else []
    if hasattr(result, "items"):
        result = [v for n, v in result.items() if n not in ("past_key_values", "cache")]
    if isinstance(result, list | tuple):
        return [tensor for x in result for tensor in outputs_of(x)]
    return []
