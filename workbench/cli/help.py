"""The help pages, written from the configuration files' own comments. Imports neither Hydra nor a YAML reader: it
must be quick.
"""

import pathlib
import re

from workbench.cli import COMMANDS

PRIMARY = {"train": "train", "inspect": "inspect", "evaluate": "evaluate", "generate": "generate"}
MAIN_GROUPS = ("method", "data", "model", "peft", "optim", "scheduler", "trainer")
_KEY = re.compile(r"^(?P<indent> *)(?P<key>[\w.]+):(?P<value>[^#]*)(?:#\s*(?P<comment>.*))?$")

EXAMPLES = {
    "train": (
        ("workbench train", "a nano model learns sums, here and now"),
        ("workbench train model.name=<hub id or folder> model=hf data=file data.train=rows.jsonl", "your model, your rows"),
        ("workbench train experiment=smollm2_lora", "a recipe; workbench train -m seed=0,1,2 sweeps"),
        ("workbench train resume=last", "go on with the newest run"),
    ),
    "inspect": (("workbench inspect data=file data.train=rows.jsonl", "what these rows would teach"),),
    "evaluate": (("workbench evaluate run=<run folder>", "the run's saved model on the run's evaluation data"),),
    "generate": (
        ('workbench generate run=<run folder> prompt="12+34="', "one answer"),
        ("workbench generate model.name=<hub id or folder>", "prompts from the terminal, one a line"),
    ),
    "env": (("workbench env", "what is installed and found"),),
}


def overview() -> str:
    """The page of ``workbench --help``."""
    width = max(map(len, COMMANDS))
    commands = "\n".join(f"  {name:<{width}}  {text}" for name, text in COMMANDS.items())
    return (
        "usage: workbench <command> [flags] [key=value ...]\n\n"
        f"{commands}\n\n"
        "workbench train            trains a nano model on sums: no hub, no GPU, no data set needed\n"
        "workbench <command> --help lists flags, groups, experiments and keys\n"
        "workbench train --cfg job  prints the configuration that would run"
    )


def command(name: str, words: list[str] = ()) -> str:
    """The page of ``workbench <command> --help``; group choices among ``words`` show that option's keys."""
    lines = [f"usage: workbench {name} [flags] [key=value ...]", f"\n{COMMANDS[name]}\n"]
    lines += [f"  {text}\n      {about}" for text, about in EXAMPLES[name]]
    if name not in PRIMARY:
        return "\n".join(lines)
    from workbench.cli.config_files import config_dir  # kept apart from Hydra

    folder = config_dir()
    lines += ["\nflags", *_flags()]
    lines += ["\ngroups (choose with group=option)", *_groups(folder, PRIMARY[name])]
    if name != "generate":
        lines += ["\nexperiments (experiment=name)", *_options(folder / "experiment")]
    lines += ["\nkeys (change with key=value; dots go into groups)", *_keys(folder / f"{PRIMARY[name]}.yaml")]
    chosen = _chosen(folder, PRIMARY[name], words)
    for group in MAIN_GROUPS if name != "generate" else ("model",):
        file = folder / group / f"{chosen.get(group)}.yaml"
        if file.is_file():
            lines += [f"\n{group}={chosen[group]}", *_keys(file, prefix=f"{group}.")]
    return "\n".join(lines)


def _flags() -> list[str]:
    from workbench.cli.flags import FLAGS

    names: dict[str, list[str]] = {}
    about = {}
    for flag, (key, _, text) in FLAGS.items():
        names.setdefault(key, []).append(flag)
        about[key] = text or about.get(key, "")
    return [f"  {', '.join(flags):<44} {about[key]}" for key, flags in names.items()]


def _groups(folder: pathlib.Path, primary: str) -> list[str]:
    chosen = _chosen(folder, primary, ())
    lines = []
    for group in chosen:
        options = sorted(str(f.relative_to(folder / group).with_suffix("")) for f in (folder / group).rglob("*.yaml"))
        options = [o for o in options if o.rpartition("/")[0] not in options]  # a folder named like an option is part of it
        if group != "experiment" and options:
            marked = [f"[{o}]" if o == chosen[group] else o for o in options]
            lines.append(f"  {group:<12} {' '.join(marked)}")
    return lines


def _options(folder: pathlib.Path) -> list[str]:
    files = sorted(folder.rglob("*.yaml"))
    width = max((len(f.stem) for f in files), default=0)
    return [f"  {f.relative_to(folder).with_suffix('')!s:<{width}}  {first_comment(f)}" for f in files]


def first_comment(file: pathlib.Path) -> str:
    """The first comment line of a file that is not a Hydra directive."""
    for line in file.read_text().splitlines():
        if line.startswith("#") and "@package" not in line:
            return line.lstrip("# ")
    return ""


def _chosen(folder: pathlib.Path, primary: str, words: list[str]) -> dict[str, str]:
    """group -> option: the defaults list of the primary file, and of the file it builds on, then what was typed."""
    chosen: dict[str, str] = {}
    text = (folder / f"{primary}.yaml").read_text()
    for base in re.findall(r"^\s+- (\w+)\s*(?:#.*)?$", text, flags=re.M):
        if base != "_self_":
            chosen |= _chosen(folder, base, ())
    for group, option in re.findall(r"^\s+- (?:override )?/?(\w+): (\w+)", text, flags=re.M):
        chosen[group] = option
    for word in words:
        group, equals, option = word.partition("=")
        if equals and (folder / group / f"{option}.yaml").is_file():
            chosen[group] = option
    return chosen


def _keys(file: pathlib.Path, prefix: str = "") -> list[str]:
    """Every key of a file, and of the files it builds on, as it is typed on the command line, with its comment."""
    return [f"  {name + '=' + value:<42} {comment}".rstrip() for name, (value, comment) in _entries(file, prefix).items()]


def _entries(file: pathlib.Path, prefix: str) -> dict[str, tuple[str, str]]:
    entries: dict[str, tuple[str, str]] = {}
    parents: list[str] = []
    text = file.read_text()
    own_prefix = "" if "@package _global_" in text else prefix
    in_defaults = False
    for line in text.splitlines():
        in_defaults = line.startswith("defaults:") or (in_defaults and line.startswith((" ", "-", "#")))
        if in_defaults:
            base = re.match(r" +- (\w+)(?:@\w+)?\s*(?:#.*)?$", line)
            if base and base[1] != "_self_" and prefix:
                entries |= _entries(file.with_name(f"{base[1]}.yaml"), prefix)
            continue
        found = _KEY.match(line)
        if not found or found["key"].startswith("_"):
            continue
        parents[len(found["indent"]) // 2 :] = [found["key"]]
        value = found["value"].strip()
        if value or found["comment"]:
            entries[own_prefix + ".".join(parents)] = (value, found["comment"] or "")
    return entries
