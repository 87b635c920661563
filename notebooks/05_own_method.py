# ruff: noqa: E402
# %% [markdown]
# # A method of your own
# A frozen dataclass that says how bytes become slots, and how units are ranked. `docs/own_method.md` has the way from here to a
# method that runs, is tested and stands in the tables; `python scripts/new_method.py NAME` writes its files.

# %%
import os
from pathlib import Path

os.chdir(next(p for p in (Path.cwd(), *Path.cwd().parents) if (p / "conf/config.yaml").is_file()))  # the repository
MODEL = os.environ.get("QEVICT_NOTEBOOK_MODEL", "smollm2-135m")

# %%
from dataclasses import dataclass, replace

from baselines.snapkv import SnapKV
from qevict import TierCache
from qevict.accounting import full_bytes, measure
from qevict.hf.loading import load_model, load_tokenizer


@dataclass(frozen=True)
class Spread(SnapKV):
    """SnapKV that prefers tokens on a grid: scores of the others are damped.

    Args:
        every: distance of the grid, in tokens.
        damp: factor of the scores between.
    """

    every: int = 4
    damp: float = 0.5

    def refresh(self, c):
        c = super().refresh(c)
        return replace(c, score=c.score * (1 - (1 - self.damp) * (c.unit % self.every != 0)))


# %% [markdown]
# It is held to the budget, and counted, like every other method.

# %%
model, _ = load_model(MODEL, device="cpu")
tokenizer = load_tokenizer(MODEL)
inputs = tokenizer("one two three four five six seven eight nine ten " * 40, return_tensors="pt")
for method in (SnapKV(), Spread(), Spread(damp=0.0)):
    cache = TierCache(model, method, budget=0.2)
    out = model.generate(**inputs, past_key_values=cache, max_new_tokens=8, do_sample=False)
    said = tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    print(f"{method}: {measure(cache)['total'] / full_bytes(cache):.1%} {said!r}")
