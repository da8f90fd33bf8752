"""The description of a call stands once: public signatures, operators and problem agree with it."""

from __future__ import annotations

import dataclasses
import inspect
import re

import pytest
import torch
from helpers import ROOT

import flashattn3
from flashattn3.backends.hopper import config_types
from flashattn3.call import dtypes, fields, operands, permuted_v
from flashattn3.call.cached import DECODE, DecodeOptions
from flashattn3.call.problem import Problem
from flashattn3.call.public import public
from flashattn3.run.quantized import Scheme

FUNCTIONS = [
    function
    for name in flashattn3.__all__
    if name.startswith("flash_attn_") or name == "explain"
    for function in (getattr(flashattn3, name),)
    if "kvcache" not in function.__module__  # DECODE describes the cached call
]
TENSORS = {
    *("q", "k", "v", "qkv", "kv", "num_heads_q", "cu_seqlens", "max_seqlen", "device"),
    *("dout", "out", "lse", "dlse", "dq", "dk", "dv"),
    *operands.Tensors._fields,
    "mask",
    *(f"{side}_descale" for side in operands.SIDES),
}
by_name = pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)


@by_name
def test_public_signatures_have_the_fields_and_their_defaults(function):
    parameters = inspect.signature(function).parameters
    options = parameters.keys() - TENSORS - set(Scheme._fields)
    assert options <= fields.CALL.fields.keys()
    assert options >= {"softmax_scale", "causal", "window_size", "softcap", "backend"}
    if function is not flashattn3.flash_attn_backward:
        assert options >= {"use_fast_accum", "return_max_logit"}
    required = {"max_seqlen_q", "max_seqlen_k"}
    for name in options - required:
        assert parameters[name].default == fields.CALL.fields[name].default, name


@by_name
def test_the_compiled_function_has_its_signature(function):
    """inspect reads that of the described function; this is what Python binds."""
    compiled = inspect.signature(function, follow_wrapped=False).parameters
    described = inspect.signature(function).parameters
    assert [*compiled] == [*described, "foreign"]
    for name, parameter in described.items():
        assert parameter.kind is compiled[name].kind
        assert parameter.default is compiled[name].default


def test_the_whole_interface_has_every_field():
    whole = inspect.signature(flashattn3.flash_attn_varlen_func).parameters.keys()
    packed = inspect.signature(flashattn3.flash_attn_varlen_kvpacked_func).parameters.keys()
    assert fields.CALL.fields.keys() <= whole | packed
    explained = inspect.signature(flashattn3.explain).parameters.keys()
    assert whole - explained == set()


def test_a_cached_call_has_fields_of_the_same_table():
    parameters = inspect.signature(flashattn3.flash_attn_with_kvcache).parameters
    assert DECODE.fields.keys() <= parameters.keys()
    for name, field in DECODE.fields.items():
        assert parameters[name].default == field.default, name
    own = {name for name, field in DECODE.fields.items() if fields.CALL.fields.get(name) != field}
    differ = {"softmax_scale", "causal", "qv"}
    assert own == {*differ, "return_softmax_lse"}
    arguments = torch.ops.flashattn3.decode.default._schema.arguments
    names = tuple(argument.name for argument in arguments)
    assert names[-len(DecodeOptions._fields) :] == DecodeOptions._fields


def test_the_operators_take_the_fields():
    """In the order of Tensors and Options, with defaults that their types allow."""
    forward, backward = torch.ops.flashattn3.forward, torch.ops.flashattn3.backward
    tensors, options = operands.Tensors._fields, fields.Options._fields
    plain = [*tensors[: operands.NUM_TENSORS], *options]
    scores = [*tensors, *options]
    of_8_bits = [
        f"{side}_{name}" for side in operands.SIDES for name in operands.Scaled._fields[1:]
    ]
    given = ["dout", "dlse", "out", "lse"]
    for operator, expected in {
        forward.default: plain,
        forward.scaled: plain + of_8_bits,
        forward.scores: scores,
        forward.scaled_scores: scores + of_8_bits,
        backward.default: given + plain,
        backward.scores: [*given, *scores, "with_dbias"],
    }.items():
        assert [argument.name for argument in operator._schema.arguments] == expected


def test_calls_name_dtypes_and_columns_as_the_kernel_configs_do():
    """call imports no backend."""
    assert (*dtypes.NAMES.values(),) == config_types.DTYPES
    assert config_types.HEAD_DIMS[config_types.E4M3] == permuted_v.COLUMNS


def test_a_problem_has_the_fields_for_the_backends():
    names = {field.name for field in dataclasses.fields(Problem)}
    assert {*fields.CALL.to_backend} <= names
    dropped = {*fields.Options._fields} - names
    assert dropped == {"max_seqlen_q", "max_seqlen_k", "causal", *fields.ScoreScale._fields}


def test_hints_are_named_as_the_interface_documents_them():
    hints = {field.name for field in fields.HINTS}
    assert hints == {"num_splits", "pack_gqa", "sm_margin", "use_fast_accum"}


def test_flat_tensors_come_back():
    q, descale = torch.zeros(2, 3, 4, 5), torch.ones(2, 4, 1)
    edges = torch.zeros(3, dtype=torch.int32)
    of_q = operands.Scaled(q, descale, 64, hadamard=True, mean=descale)
    of_v = operands.Scaled(q, None, None, False, "permuted", 5)
    assert len(operands.flat(operands.Tensors(q, q, q))) == operands.NUM_TENSORS
    for tensors in (
        operands.Tensors(q, q, q),
        operands.Tensors(of_q, q, of_v, edges, edges, None, edges),
    ):
        found = operands.of_flat(operands.flat(tensors))
        for side, given in zip(found, tensors, strict=True):
            assert type(side) is type(given)
            if type(given) is operands.Scaled:
                assert all(x is y for x, y in zip(side, given, strict=True))
            else:
                assert side is given


def test_a_form_must_take_every_argument():
    def form(options, q, k):
        return None

    with pytest.raises(TypeError, match=r"flash: no field and no argument of form: \{'qq'\}"):

        @public(form)
        def flash(q, k, qq, softmax_scale=None, window_size=(-1, -1)):
            pass

    with pytest.raises(TypeError, match=r"flash: no field and no argument of form: \{'k'\}"):

        @public(form)
        def flash(q, softmax_scale=None, window_size=(-1, -1)):
            pass


def test_values_that_are_equal_but_of_another_type_are_other_calls():
    q = torch.zeros(1, 2, 1, 8)
    assert flashattn3.flash_attn_func(q, q, q, causal=1, window_size=(1, 0)).shape == q.shape
    for window in ((True, 0), (1.0, 0)):
        with pytest.raises(TypeError, match=r"window_size\[0\] must be an int"):
            flashattn3.flash_attn_func(q, q, q, causal=1, window_size=window)
    with pytest.raises(TypeError, match="num_splits must be an int, got True"):
        flashattn3.flash_attn_func(q, q, q, num_splits=True)


def test_a_tensor_that_changes_is_read_again():
    q = torch.randn(1, 4, 1, 8)
    scale = torch.tensor(1.0)
    first = flashattn3.flash_attn_func(q, q, q, softmax_scale=scale)
    scale.fill_(2.0)
    second = flashattn3.flash_attn_func(q, q, q, softmax_scale=scale)
    assert torch.equal(first, flashattn3.flash_attn_func(q, q, q, softmax_scale=1.0))
    assert torch.equal(second, flashattn3.flash_attn_func(q, q, q, softmax_scale=2.0))


# The signatures of another package, to which a new option of ours adds nothing.
FOREIGN = {"flash_attn_2.py", "flash_attn_3.py", "paged.py", "transformers_paged.py", "vllm.py"}
PRODUCT = [
    path
    for path in sorted((ROOT / "flashattn3").rglob("*.py"))
    if not FOREIGN & {*path.relative_to(ROOT).parts}
]
CSRC = [path for path in sorted((ROOT / "csrc").rglob("*.*")) if path.suffix != ".md"]
# Files of the package and of csrc that name an option, prose included: at most 9 together.
MOST_FILES = {"softcap": (5, 4), "sm_margin": (7, 2), "seqused_k": (7, 2)}


@pytest.mark.parametrize("option", MOST_FILES)
def test_few_files_name_an_option(option):
    """A new option is a field of call/fields.py, an argument in api.py, and its use in a backend;
    integrations name what their library names."""
    for paths, most in zip((PRODUCT, CSRC), MOST_FILES[option], strict=True):
        naming = [path for path in paths if re.search(rf"\b{option}\b", path.read_text())]
        names = [str(path.relative_to(ROOT)) for path in naming]
        assert len(names) <= most, names
        assert paths is CSRC or "flashattn3/api.py" in names


def test_the_tensors_of_a_call_have_no_properties():
    """torch 2.9 traces no property of a NamedTuple: no call with one would compile."""
    assert not [
        name for name, value in vars(operands.Tensors).items() if isinstance(value, property)
    ]
