# ruff: noqa: B018, E402
# %% [markdown]
# # Quickstart
# A cache under a budget of bytes, in a plain `generate`, and what it holds.

# %%
import os
from pathlib import Path

os.chdir(next(p for p in (Path.cwd(), *Path.cwd().parents) if (p / "conf/config.yaml").is_file()))  # the repository
MODEL = os.environ.get("QEVICT_NOTEBOOK_MODEL", "smollm2-135m")  # the embedded model

# %%
from baselines.snapkv import SnapKV
from qevict import QEvict, TierCache
from qevict.accounting import full_bytes, measure
from qevict.hf.loading import load_model, load_tokenizer

model, source = load_model(MODEL, device="cpu")
tokenizer = load_tokenizer(MODEL)
source

# %% [markdown]
# A number hidden in the middle of a text, and a question at its end.

# %%
filler = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
text = filler * 12 + "The magic number is 48213. Remember it. " + filler * 12 + "What is the magic number? The magic number is"
inputs = tokenizer(text, return_tensors="pt")
inputs["input_ids"].shape

# %% [markdown]
# The same prompt with everything kept, and with two methods at 20 % of the bytes. `measure` counts every byte that the cache holds.

# %%
from baselines.fullkv import FullKV

for method, budget in ((FullKV(), 1.0), (QEvict(), 0.2), (SnapKV(), 0.2)):
    cache = TierCache(model, method, budget=budget, dtype="float16")
    out = model.generate(**inputs, past_key_values=cache, max_new_tokens=8, do_sample=False)
    said = tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    held = measure(cache)
    print(f"{type(method).__name__:8} {held['total'] / full_bytes(cache):6.1%} of the bytes: {said!r}")

# %% [markdown]
# What the last one is made of, in bytes. From here: `python run.py --help`, and the other notebooks.

# %%
{part: size for part, size in held.items() if size}
