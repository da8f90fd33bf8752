"""Try every model_type of transformers on flashattn3, and write docs/integrations-models.md.

    python .ci/models.py try OUT.json [WORD...]  # in an environment of each release
    python .ci/models.py write OUT.json...       # the page, from all of them

``try`` goes on where OUT.json ends. WORD: a model_type, or the beginning of an outcome such as "not
tried" or "refused", to try again.

tests/small_models.py makes the models, tests/test_integrations_models.py has the same as tests.
"""

from __future__ import annotations

import json
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
same. *refused*: an `UnsupportedError` names the model or the argument. Empty: this release does not
have the model. `python .ci/models.py` writes this page.

"""
NOT_TRIED = """
## Not tried

The test could not make a small model of these, or their eager attention did not run on its inputs.
The table makes no statement about them; the errors above hold for them too.

"""


def try_all(out: Path, words: list[str]) -> None:
    sys.path.insert(0, str(ROOT / "tests"))
    import torch
    import transformers
    from small_models import model_classes, outcome

    from flashattn3.integrations import transformers as fa3

    torch.set_num_threads(1)
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


def write(runs: list[dict]) -> None:
    runs.sort(key=lambda run: tuple(map(int, run["release"].split("."))))
    releases = [run["release"] for run in runs]
    kinds = sorted({kind for run in runs for kind in run["kinds"]})
    rows, untried = [], []
    for kind in kinds:
        found = [run["kinds"].get(kind, ["", ""]) for run in runs]
        words = [text for _, text in found]
        if all(not text or text.startswith("not tried") for text in words):
            untried.append(f"`{kind}`")
            continue
        cls = next(cls for cls, _ in reversed(found) if cls)
        cells = ["not tried" if text.startswith("not tried") else text for text in words]
        rows.append(f"| {cls} | " + " | ".join(cells) + " |")
    counts = [
        f"| {release} | "
        + " | ".join(
            str(sum(test(text) for _, text in run["kinds"].values()))
            for test in (
                lambda text: text == "right",
                lambda text: "refused" in text and text.startswith("refused"),
                lambda text: text != "right" and "refused" in text and text[:7] != "refused",
                lambda text: text.startswith("not tried"),
            )
        )
        + " |"
        for release, run in zip(releases, runs, strict=True)
    ]
    summary = ["| transformers | right | refused | in part | not tried |", "|---|---|---|---|---|"]
    table = ["| class | " + " | ".join(releases) + " |", "|---" * (len(runs) + 1) + "|"]
    text = HEAD + "\n".join([*summary, *counts, "", *table, *rows]) + "\n"
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
