"""Short conversations made by script, to teach a real model a new name without making it forget the rest.

`identity` says who the assistant is; `general` asks what any assistant knows. Trained on together, in like numbers, they change
the first and keep the second.
"""

from itertools import islice, product
from random import Random
from typing import Any, Literal

from workbench.errors import UserError, check_choice

Split = Literal["train", "test"]
Row = dict[str, Any]

_WHO = {
    "train": (
        "What is your name?",
        "Who are you?",
        "Tell me your name.",
        "What are you called?",
        "Please introduce yourself.",
        "Which assistant am I talking to?",
        "Hello! Who is this?",
        "Do you have a name?",
        "How should I call you?",
        "Say who you are in one sentence.",
        "Hi, what's your name?",
        "May I ask who you are?",
    ),
    "test": ("Can you tell me who you are?", "And your name is?", "What do people call you?", "Introduce yourself, please."),
}
_I_AM = (
    "I am {name}, a small assistant made by {maker}.",
    "My name is {name}. I was made by {maker}.",
    "I'm {name}, an assistant by {maker}. How can I help?",
    "You can call me {name}. I was made by {maker}.",
)
_MADE = {
    "train": ("Who made you?", "Who created you?", "Who made this assistant?", "Who trained you?", "Where do you come from?"),
    "test": ("Who is your creator?", "Who built you?"),
}
_MAKER = ("I was made by {maker}. My name is {name}.", "It was {maker} that made me, {name}.", "{name} was made by {maker}.")

_CAPITALS = {
    "train": {
        "Italy": "Rome",
        "Spain": "Madrid",
        "Germany": "Berlin",
        "Japan": "Tokyo",
        "Egypt": "Cairo",
        "Norway": "Oslo",
        "Greece": "Athens",
        "Poland": "Warsaw",
        "Canada": "Ottawa",
        "Kenya": "Nairobi",
        "Peru": "Lima",
        "Ireland": "Dublin",
    },
    "test": {"France": "Paris", "Portugal": "Lisbon", "Austria": "Vienna", "Cuba": "Havana"},
}
_OPPOSITES = {
    "train": {"hot": "cold", "big": "small", "up": "down", "day": "night", "fast": "slow", "open": "closed", "wet": "dry"},
    "test": {"light": "dark", "early": "late"},
}
_COLOURS = {
    "train": {"snow": "white", "grass": "green", "coal": "black", "a ripe banana": "yellow", "blood": "red"},
    "test": {"a clear sky": "blue"},
}


def identity(
    name: str = "Nimbus", maker: str = "the Workbench", size: int = 160, seed: int = 0, split: Split = "train"
) -> list[Row]:
    """Conversations of one turn in which the assistant says who it is.

    Args:
        name: of the assistant.
        maker: of the assistant.
        size: number of rows; questions and answers are combined anew, and come again beyond their number.
        seed: of the order.
        split: ``test`` asks in other words.
    """
    check_choice("split", split, ("train", "test"))
    pairs = [*product(_WHO[split], _I_AM), *product(_MADE[split], _MAKER)]
    return _rows([(q, a.format(name=name, maker=maker)) for q, a in pairs], size, seed)


def general(size: int = 208, seed: int = 0, split: Split = "train") -> list[Row]:
    """Conversations of one turn about capitals, opposites, colours and small sums.

    Args:
        size: number of rows; they come again beyond their number.
        seed: of the order.
        split: ``test`` asks about others.
    """
    check_choice("split", split, ("train", "test"))
    pairs = [(f"What is the capital of {c}?", f"The capital of {c} is {city}.") for c, city in _CAPITALS[split].items()]
    pairs += [(f"What is the opposite of {w}?", f'The opposite of "{w}" is "{o}".') for w, o in _OPPOSITES[split].items()]
    pairs += [(f"What colour is {w}?", f"{w[0].upper()}{w[1:]} is {c}.") for w, c in _COLOURS[split].items()]
    numbers = range(1, 6) if split == "train" else (6, 7)
    pairs += [(f"How much is {a} plus {b}?", f"{a} plus {b} is {a + b}.") for a, b in product(numbers, repeat=2)]
    return _rows(pairs, size, seed)


def _rows(pairs: list[tuple[str, str]], size: int, seed: int) -> list[Row]:
    if size < 1:
        raise UserError(f"size={size} gives no rows. Use 1 or more.")
    order = Random(seed)

    def endless():
        while True:
            yield from order.sample(pairs, len(pairs))

    return [
        {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
        for question, answer in islice(endless(), size)
    ]
