"""Commands, options, keys and values that earlier versions had, each with what to use instead."""

from __future__ import annotations

from collections.abc import Sequence

COMMANDS = {  # Advice by command, to complete "`dlbench NAME` has been removed: ...".
    "data index": "pack the images into shards, which have an index (dlbench data pack)",
    "box": "`python -m tests.slurm_box` in a clone of the repository starts a one-box Slurm cluster (docs/slurm.md)",
    "data samples": "write BERT's samples with create_pretraining_data.py of NVIDIA's DeepLearningExamples",
    "data vocab": "train a vocabulary with Hugging Face's tokenizers (docs/workloads.md)",
    "history prune": "move the run folders that you no longer need out of the history's folder",
    "history rebuild": "every command updates the index of a history by itself",
    "prepare": "`pip download` fetches the packages, `dlbench setup horovod` builds Horovod's wheel (docs/systems.md)",
    "image": "pack the environment into a container's image instead (docs/systems.md)",
}

_RESUME_AGAIN = "give `dlbench submit --resume SERIES --max-jobs N` again as the queue empties, e.g. by watch or cron"
_WITH_INDEX = ("acknowledge", "export", "import", "list", "slow-nodes", "trends")

OPTIONS: dict[tuple[str, str], str] = {
    ("data make", "--size-on-disk"): "give --samples; text data has 1.5 MB",
    ("data pack", "--container"): "images are packed into tar shards",
    ("data verify", "--kind"): "the kind is recognised",
    ("trace", "--cores"): 'dlbench.open(FOLDER).telemetry(RUN) has every core (docs/reports.md, "In Python")',
    ("export metrics", "--format"): "`dlbench report --format csv --table runs` has a line for each run",
    ("check", "--json"): "-o FILE.json writes it",
    ("comm predict", "--topology"): "`dlbench project spec` prices the links of a system file (network)",
    ("comm submit", "--every"): _RESUME_AGAIN,
    ("comm submit", "--follow"): _RESUME_AGAIN,
    ("compare", "--json"): "-o FILE.json writes it",
    ("diagnose", "--network"): "`dlbench project runs RUNS --network FILE --set sync.KEY=VALUE` forecasts an exchange",
    ("diagnose", "--slurm"): "the report of runs of Slurm jobs includes Slurm's accounting (cost)",
    **{(f"history {name}", "--index"): "the index of a history is in its folder" for name in _WITH_INDEX},
    ("logs", "--follow"): "`tail -F` of the files that `dlbench logs` names follows them",
    ("run", "--watch-cost"): "every run measures the cost of its monitoring (dlbench show, diagnose)",
    ("submit", "--every"): _RESUME_AGAIN,
    ("submit", "--follow"): _RESUME_AGAIN,
}
"""Advice by command and option, e.g. ("run", "--watch-cost"), to complete "--watch-cost has been removed: ..."."""

PROJECTIONS = {  # Options that named the source of `dlbench project`, and the command that each has become.
    "--against": "score RUNS",
    "--from-spec": "spec WORKLOAD --system SYSTEM --to RANKS",
    "--points": "points FILE.csv --to RANKS",
    "--from": "ingredients FILE --to RANKS",
}

KEYS = {  # Advice by section or key of a file (`sync.inside`) or by key and value (`sync.inside=shared-memory`).
    "prepare": "`pip download` fetches the packages, `dlbench setup horovod` builds Horovod's wheel (docs/systems.md)",
    "image": "pack the environment into a container's image instead (container, docs/systems.md)",
    "backends=horovod": "`dlbench run --engine horovod` times its exchange",
    "sync.inside": "ranks of a group exchange by the engine's library (gloo, mpi or nccl)",
}


def removed_command(words: Sequence[str]) -> str | None:
    """Returns the sentence for the longest of the first words that name a removed command; None: there is none."""
    for count in range(len(words), 0, -1):
        name = " ".join(words[:count])
        if name in COMMANDS:
            return f"`dlbench {name}` has been removed: {COMMANDS[name]}"
    return None


def removed_option(command: str, option: str) -> str | None:
    """Returns the sentence for an option of a command (`comm run`); None: there never was such an option."""
    if (command, option) not in OPTIONS:
        return None
    return f"{option} has been removed: {OPTIONS[command, option]}"


def removed_key(path: Sequence[str], value: object = None) -> str | None:
    """Returns the sentence for a key at a path, or for its value; None: neither has been removed."""
    dotted = ".".join(path)
    for name in (f"{dotted}={value}", dotted, *path[:1]):
        if name in KEYS:
            return f"has been removed: {KEYS[name]}"
    return None


def respelt_projection(words: Sequence[str]) -> str:
    """Returns the sentence for words of `dlbench project` from before its sources were commands."""
    options = {word.partition("=")[0] for word in words}
    for option, spelling in PROJECTIONS.items():
        if option in options:
            return f"`dlbench project {option}` is now spelt `dlbench project {spelling}`"
    return "`dlbench project RUNS` is now spelt `dlbench project runs RUNS`"
