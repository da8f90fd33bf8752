"""Inputs of small models, made from their configs: text, pictures, films, sounds."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import torch
import transformers

BATCH, TOKENS, VOCABULARY = 2, 12, 99


def inputs_of(model) -> Iterator[dict]:
    """The arguments of a forward without masks; models that do not run with the first ones may run
    with later ones."""
    config, parameters = model.config, inspect.signature(model.forward).parameters
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(4, 88, (BATCH, TOKENS), generator=generator)
    ids[:, -1] = VOCABULARY - 1  # CLIP's text is its end
    shapes = _shapes_of(model.main_input_name, config, parameters)
    for found in shapes or [{"input_ids": ids}]:
        found = {n: _drawn(x, generator) for n, x in found.items()}
        for name in ("pixel_values", "pixel_values_videos"):
            if name in parameters and name not in found:
                needed = parameters[name].default is inspect.Parameter.empty
                # Where images have tokens of their own, a text alone is an input too.
                has_tokens = _first(config, "image_token_id", "image_token_index", deep=False)
                if needed or (hasattr(config, "vision_config") and has_tokens is None):
                    shape = _pixels(getattr(config, "vision_config", None) or config, name)
                    found[name] = torch.randn(shape, generator=generator)
        if "decoder_input_ids" in parameters:
            found["decoder_input_ids"] = torch.randint(4, 88, (BATCH, 7), generator=generator)
        yield _further(config, parameters, ids) | found


def _drawn(x, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(x, generator=generator) if isinstance(x, tuple) else x


def _shapes_of(main: str, config, parameters) -> list[dict]:
    """The inputs that are not text, each as a shape or a tensor; none: the input is text."""
    if {"grid_thw", "image_grid_thw"} & {*parameters} and "input_ids" not in parameters:
        name = "hidden_states" if "hidden_states" in parameters else "pixel_values"
        return _patches_of_grids(name, config)
    if main.startswith("pixel_values") and main in parameters and "input_ids" not in parameters:
        if "spatial_shapes" in parameters:
            return [{main: (BATCH, 16, 3 * _first(config, "patch_size") ** 2)}]
        batch, *picture = _pixels(config, main)[-4:]
        frames = _first(config, "num_frames") or 4
        return [{main: _pixels(config, main)}, {main: (batch, frames, *picture[-3:])}]
    if main == "input_features" and main in parameters:
        mels = [n for n in (_first(config, *MELS), _first(config, *WIDTHS), 80) if n]
        lengths = 2 * (_first(config, "max_source_positions") or 20), 100
        every = [(n, length) for n in mels for length in lengths]
        shapes = [(length, n) for n, length in every] + every
        return [{main: (BATCH, *shape)} for shape in shapes]
    if main == "input_values" and main in parameters:
        spectrum = BATCH, _first(config, "max_length") or 100, _first(config, *MELS) or 80
        return [{main: x} for x in ((BATCH, 4000), (BATCH, 1, 4000), spectrum)]
    return []


def _patches_of_grids(name: str, config) -> list[dict]:
    """Two pictures of 4 x 4 patches."""
    channels = _first(config, "in_channels", "in_chans", "num_channels") or 3
    times, size = _first(config, "temporal_patch_size") or 1, _first(config, "patch_size")
    grid, width = torch.tensor([[1, 4, 4]] * 2), channels * size**2
    widths = width * times, width, 2 * width, _first(config, "hidden_size")
    shapes = [(32, n) for n in widths] + [(32, channels, size, size)]
    return [{name: x, n: grid} for n in ("grid_thw", "image_grid_thw") for x in shapes]


def _further(config, parameters, ids: torch.Tensor) -> dict:
    """Arguments that a forward must have beside its first one."""
    width = _first(config, "hidden_size") or 64
    every = {
        "bbox": torch.tensor([1, 2, 3, 4]).expand(BATCH, TOKENS, 4),
        "input_features_mask": torch.ones(
            BATCH, 2 * (_first(config, "max_source_positions") or 20)
        ),
        "merge_sizes": torch.ones(2, dtype=torch.long),
        "pixel_attention_mask": (torch.arange(16) < torch.tensor([[12], [16]])).long(),
        "qformer_input_ids": ids,
        "query_embeds": torch.randn(BATCH, 5, width, generator=torch.Generator().manual_seed(3)),
        "spatial_shapes": torch.tensor([[4, 3], [4, 4]]),
    }
    needed = [n for n, x in parameters.items() if x.default is inspect.Parameter.empty]
    return {n: x for n, x in every.items() if n in needed or (n == "bbox" and n in parameters)}


MELS = "num_mel_bins", "feature_size", "input_feat_per_channel", "n_mels"
WIDTHS = "input_dim", "input_feat_size", "feature_projection_input_dim", "input_size"


def _first(config, *names: str, deep: bool = True):
    """The first of these fields that a config has, or one of its parts; of a list its first."""
    parts = [x for x in vars(config).values() if isinstance(x, transformers.PretrainedConfig)]
    for part in [config, *parts] if deep else [config]:
        for name in names:
            value = getattr(part, name, None)
            if value is not None:
                return value[0] if isinstance(value, list | tuple) else value
    return None


def _pixels(config, main: str) -> tuple[int, ...]:
    size = _first(config, "image_size") or 32
    shape = (BATCH, _first(config, "num_channels") or 3, size, size)
    if main == "pixel_values_videos":
        shape = (BATCH, _first(config, "frames_per_clip") or 4, *shape[1:])
    return shape


def mask_of(side: str | None) -> torch.Tensor | None:
    """(BATCH, TOKENS): four tokens of padding in the first row."""
    if side is None:
        return None
    mask = torch.ones(BATCH, TOKENS, dtype=torch.long)
    mask[0, :4] = side != "left"
    mask[0, -4:] = side != "right"
    return mask
