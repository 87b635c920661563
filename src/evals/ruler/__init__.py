"""RULER (Hsieh et al., 2024, arXiv:2404.06654): its 13 tasks, made for one tokenizer and one token length, or read from files.

Construction: NVIDIA/RULER c3f5e3b, ``scripts/data/synthetic``. Known deviations:

* Every sample has a random stream of its own (seed, task, index), so it depends on neither the list of tasks nor the
  number of samples. Official: one stream per task, which all its samples share.
* Every sample is filled up to the length, by one unit of haystack at a time. Official: one size per task; a sample that is too
  long loses a large step.
* Tokens are counted in both protocols and the larger count has to fit, so both protocols get the same text.
* Needle keys are drawn as adjective and noun, not from the list of all pairs; the order of a sample's needles is drawn too.
* ``vt``: the worked example has 500 tokens at most as officially, but no more than half of a short prompt.
* ``cwe``: a list longer than the word lists goes on with pairs of an adjective and a noun. Official: with another word list.
* ``qa``: when a sample needs more documents than there are, all are used again, in another order.
* The built-in templates and the ``pydoc`` haystack are stand-ins: scores compare with published ones only after
  ``templates`` and ``haystack`` name the official data.
"""

from evals.ruler.haystack import essay_text
from evals.ruler.suite import GENERATOR_VERSION, Ruler
from evals.ruler.tasks import GROUPS, TASKS

__all__ = ["GENERATOR_VERSION", "GROUPS", "TASKS", "Ruler", "essay_text"]
