"""``workbench generate``: answers of a model to prompts from the command line, a pipe or the terminal."""

import sys
from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig, OmegaConf

from workbench.cli import resume
from workbench.cli.evaluate import model_folder
from workbench.cli.flags import Arguments, quote
from workbench.errors import UserError

CONFIG_FILE = "config.yaml"  # of a run
_TEXTS = ("prompt", "system")


def rewrite(argv: list[str]) -> list[str]:
    """Quotes free texts, which may hold any character; ``prompt=[a,b]`` stays a list and quoted ones stay as they are."""
    return [_quoted(word) for word in argv]


def _quoted(word: str) -> str:
    key, equals, value = word.partition("=")
    if not equals or key.lstrip("+") not in _TEXTS or value in ("null", ""):
        return word
    closed = len(value) > 1 and (value[0], value[-1]) in (('"', '"'), ("'", "'"), ("[", "]"))
    return word if closed else f"{key}={quote(value)}"


def expand(arguments: Arguments) -> Arguments:
    """``run=``: the saved model of that run."""
    wanted = resume.value_of(arguments.overrides, "run")
    if wanted is not None:
        folder = model_folder(resume.run_folder(wanted, arguments.overrides))
        arguments.overrides = resume.merge([f"model.name={quote(str(folder))}"], arguments.overrides)
    return arguments


def main(cfg: DictConfig) -> int:
    """Answers every prompt."""
    answer = load(cfg)
    if cfg.prompt is not None:
        prompts = list(cfg.prompt) if OmegaConf.is_list(cfg.prompt) else [cfg.prompt]
        many = len(prompts) > 1 or cfg.num_samples > 1
        for prompt in prompts:
            for text in answer(prompt):
                print(f"{prompt}\n  {text}" if many else text)
        return 0
    for prompt in _typed():
        print("\n".join(answer(prompt)), flush=True)
    return 0


def load(cfg: DictConfig) -> Any:
    """Loads the model and returns a function from a prompt to its answers."""
    import torch

    from workbench.cli.check import to_plain
    from workbench.data.chat import ChatRenderer
    from workbench.methods.generate import generate_texts
    from workbench.models.load import load_model
    from workbench.models.policy import Policy
    from workbench.models.tokenizer import load_tokenizer
    from workbench.run import instantiate

    spec = instantiate(to_plain(cfg)["model"])
    tokenizer = load_tokenizer(spec)
    chat = tokenizer.chat_template is not None if cfg.chat is None else cfg.chat
    if chat and tokenizer.chat_template is None:
        raise UserError(f"chat=true, but the tokenizer of {cfg.model.name} has no chat template; set model.chat_template.")
    if cfg.system and not chat:
        raise UserError("system= needs a chat template; put the text into the prompt instead.")
    device = ("cuda" if torch.cuda.is_available() else "cpu") if cfg.device == "auto" else cfg.device
    policy = Policy(load_model(spec).to(device))
    torch.manual_seed(cfg.seed)
    options = {**sampling(cfg), "renderer": ChatRenderer(tokenizer, **_rendering(cfg))}

    def answer(prompt: str) -> list[str]:
        messages = [{"role": "system", "content": cfg.system}] if cfg.system else []
        asked = [*messages, {"role": "user", "content": prompt}] if chat else prompt
        return generate_texts(policy, tokenizer, [asked] * cfg.num_samples, max_new_tokens=cfg.max_new_tokens, **options)

    return answer


def _rendering(cfg: DictConfig) -> dict[str, Any]:
    """How the run that is asked rendered its conversations."""
    file = resume.run_folder(cfg.run) / CONFIG_FILE if cfg.run else None
    data = OmegaConf.select(OmegaConf.load(file), "data") if file and file.is_file() else None
    plain = OmegaConf.to_container(data) if data else {}
    return {key: plain[key] for key in ("chat_template_kwargs", "fold_system") if plain.get(key)}


def sampling(cfg: DictConfig) -> dict[str, Any]:
    """Generation options in transformers' words."""
    if cfg.temperature == 0:
        return {"do_sample": False}
    return {"do_sample": True, "temperature": cfg.temperature, "top_p": cfg.top_p, "top_k": cfg.top_k}


def _typed() -> Iterator[str]:
    """Lines from the terminal (until an empty one or its end) or from a pipe."""
    if not sys.stdin.isatty():
        yield from (line.rstrip("\n") for line in sys.stdin if line.strip())
        return
    print("a prompt a line; an empty line ends", file=sys.stderr)
    while True:
        try:
            line = input("> ")
        except EOFError:
            return
        if not line.strip():
            return
        yield line
