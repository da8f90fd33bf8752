"""Try every model_type of transformers on flashattn3, and write docs/integrations-models.md.

    python .ci/models.py try OUT.json [WORD...]  # in an environment of each release
    python .ci/models.py write OUT.json...       # the page, from all of them

``try`` goes on where OUT.json ends. WORD: a model_type, or the beginning of an outcome such as "not
tried" or "refused", to try again.

tests/small_models.py makes the models, tests/test_integrations_models.py has the same as tests.
"""

from __future__ import annotations

import json
import re
import resource
import sys
import warnings
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "integrations-models.md"
HEAD = """# Models of transformers

Every `model_type` of transformers, made small from its config with random weights, runs with
`attn_implementation="fa3"` and with eager attention (float32, CPU, the reference backend): a
forward without a mask, with left and with right padding, and `generate` where the model has it.
*right*: all of these are equal to 1e-4 of the largest value, and all tokens of `generate` are the
same. *refused*: an `UnsupportedError` names the model, if its layers do not ask for their attention
(*own attention*), look it up in a table that has transformers' own alone (*own table*) or compute
with the mask (*own masks*), or else the argument. *in part*: some of these are right and some
refused. *as sdpa*: equal to transformers' sdpa, its default, while its own eager
attention, which shows every key without a mask, is not. Empty: this release does not have the
model. `python .ci/models.py` writes this page.

"""
SORTS = "right", "refused", "in part", "as sdpa", "wrong or another error", "not tried"
NOT_TRIED = """
## Not tried

The test could not make a small model of these, or their eager attention did not run on its inputs,
or a library that they need was not there (timm, torchaudio, scipy). The table makes no statement
about them; the errors above hold for them too.

"""


def try_all(out: Path, words: list[str]) -> None:
    sys.path.insert(0, str(ROOT / "tests"))
    import torch
    import transformers
    from small_models import model_classes, outcome

    from flashattn3.integrations import transformers as fa3

    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_AS, (12 << 30, 12 << 30))  # a few models make long films
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    fa3.register()
    found = {"release": ".".join(transformers.__version__.split(".")[:2]), "kinds": {}}
    if out.exists():
        found = json.loads(out.read_text())
    kinds = found["kinds"]
    for kind, cls in model_classes().items():
        known = kinds.get(kind, ["", ""])[1]
        if known and kind not in words and not known.startswith(tuple(words)):
            continue
        kinds[kind] = [cls, outcome(kind)]
        print(kind, *kinds[kind], flush=True)
        out.write_text(json.dumps(found))


def _sort_of(text: str) -> str:
    if "WRONG" in text or "ERROR" in text:
        return "wrong or another error"
    for sort in ("right", "refused", "not tried"):
        if text == sort or text.startswith(f"{sort}:"):
            return sort
    return "as sdpa" if "as sdpa" in text else "in part"


REASONS = (
    (r"it takes its attention from \w+, a table of its own", "own table"),
    (r"it computes attention itself.*", "own attention"),
    (r"its (layers|pooling head) computes? with the mask \w+", "own masks"),
    (r" must be (None|for the lengths of the call)", ""),
    (r"it must be causal or bidirectional", "mask function"),
    (r"as sdpa, from which eager attention differs", "as sdpa"),
)


def _short(text: str) -> str:
    """An outcome in a few words. One that has no other cases is one for all."""
    if ";" not in text and ": refused, " in text:
        text = "refused: " + text.split(": refused, ")[1]
    for pattern, words in REASONS:
        text = re.sub(pattern, words, text)
    return text


def write(runs: list[dict]) -> None:
    runs.sort(key=lambda run: tuple(map(int, run["release"].split("."))))
    releases = [run["release"] for run in runs]
    kinds = sorted({kind for run in runs for kind in run["kinds"]})
    rows, untried = [], []
    for kind in kinds:
        found = [run["kinds"].get(kind, ["", ""]) for run in runs]
        found = [(cls, _short(text)) for cls, text in found]
        words = [text for _, text in found]
        if all(not text or text.startswith("not tried") for text in words):
            untried.append(f"`{kind}`")
            continue
        cls = next(cls for cls, _ in reversed(found) if cls)
        cells = ["not tried" if text.startswith("not tried") else text for text in words]
        rows.append(f"| {cls} | " + " | ".join(cells) + " |")
    summary = ["| transformers | " + " | ".join(SORTS) + " |", "|---" * (len(SORTS) + 1) + "|"]
    for run in runs:
        sorts = [_sort_of(_short(text)) for _, text in run["kinds"].values()]
        numbers = " | ".join(str(sorts.count(sort)) for sort in SORTS)
        summary.append(f"| {run['release']} | {numbers} |")
    table = ["| class | " + " | ".join(releases) + " |", "|---" * (len(runs) + 1) + "|"]
    text = HEAD + "\n".join([*summary, "", *table, *rows]) + "\n"
    lines, line = [], ""
    for name in untried:
        if len(line) + len(name) > 96:
            lines.append(line.rstrip())
            line = ""
        line += f"{name}, " if name != untried[-1] else f"{name}."
    PAGE.write_text(text + NOT_TRIED + "\n".join([*lines, line]) + "\n")


if __name__ == "__main__":
    if sys.argv[1] == "try":
        try_all(Path(sys.argv[2]), sys.argv[3:])
    else:
        write([json.loads(Path(name).read_text()) for name in sys.argv[2:]])
