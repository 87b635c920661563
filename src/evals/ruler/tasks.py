"""The 13 tasks by their official names, and groups of them."""

from __future__ import annotations

from evals.ruler.draw import Task
from evals.ruler.niah import Niah
from evals.ruler.qa import DocumentQa
from evals.ruler.words import CommonWords, FrequentWords, VariableTracking

TASKS: dict[str, Task] = {
    "niah_single_1": Niah("noise"),
    "niah_single_2": Niah("essay"),
    "niah_single_3": Niah("essay", value="uuids"),
    "niah_multikey_1": Niah("essay", keys=4),
    "niah_multikey_2": Niah("needle"),
    "niah_multikey_3": Niah("needle", key="uuids", value="uuids"),
    "niah_multivalue": Niah("essay", values=4),
    "niah_multiquery": Niah("essay", keys=4, queries=4),
    "vt": VariableTracking(),
    "cwe": CommonWords(),
    "fwe": FrequentWords(),
    "qa_1": DocumentQa("squad.json"),
    "qa_2": DocumentQa("hotpotqa.json"),
}
GROUPS = {
    "niah": tuple(name for name, task in TASKS.items() if task.family == "niah"),
    "offline": tuple(name for name, task in TASKS.items() if task.family != "qa"),
    "all": tuple(TASKS),
}


def expand(asked: object) -> tuple[str, ...]:
    """Names of tasks and groups as names of tasks, in the order given.

    Raises:
        ValueError: there is none, one is unknown, or one comes twice.
    """
    choice = f"name one or more of {', '.join(TASKS)} or a group ({', '.join(GROUPS)}), each once"
    try:
        given = [asked] if isinstance(asked, str) else list(asked)
        names = [name for entry in given for name in GROUPS.get(entry, (entry,))]
        good = names and set(names) <= set(TASKS) and len(set(names)) == len(names)
    except TypeError as error:
        raise ValueError(f"task.tasks={asked!r}: {choice}") from error
    if not good:
        raise ValueError(f"task.tasks={given}: {choice}")
    return tuple(names)
