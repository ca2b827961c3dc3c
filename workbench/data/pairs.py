"""The prompt that two answers share, where a preference row holds it inside both."""

from typing import Any

from workbench.data.messages import Place

Messages = list[dict[str, Any]]
_TURN = "\n\nAssistant:"  # the turn marker of the hh-rlhf family of data sets


def split_turns(
    prompt: Messages | str | None, chosen: Messages, rejected: Messages, place: Place
) -> tuple[Messages | str, Messages, Messages]:
    """Prompt, chosen and rejected without the prompt's messages.

    Without a prompt it is the longest common beginning that leaves at least one message in each answer. A prompt that
    both answers repeat is taken off them; a text prompt that stands in them as the user's message too.
    """
    if isinstance(prompt, str) and any(m["role"] == "user" for m in chosen):
        if not any(m["role"] == "user" and _same_text(m["content"], prompt) for m in chosen):
            raise place.error("the prompt is not among the user's messages in chosen; drop or rename one of them.")
        prompt = None
    if prompt is None:
        count = _common(chosen, rejected)
        return chosen[:count], chosen[count:], rejected[count:]
    count = len(prompt)
    repeated = isinstance(prompt, list) and chosen[:count] == prompt == rejected[:count]
    if repeated and count and min(len(chosen), len(rejected)) > count:
        return prompt, chosen[count:], rejected[count:]
    return prompt, chosen, rejected


def after_prompt(prompt: Messages | str, answer: Messages | str, place: Place, *, implicit: bool) -> Messages | str:
    """A third answer without the prompt that the other two share, if it repeats it.

    Args:
        prompt: as found for the other two.
        answer: the third one.
        place: of it.
        implicit: the prompt stood inside the other two, so that a text has to begin with it.
    """
    if isinstance(answer, list):
        count = len(prompt) if isinstance(prompt, list) else 0
        if count and len(answer) > count and answer[:count] == prompt:
            return answer[count:]
        starts_over = answer[0]["role"] != "assistant" and any(m["role"] == "user" for m in answer)
    else:
        if not implicit:
            return answer
        if len(answer) > len(prompt) and answer.startswith(prompt):
            return answer[len(prompt) :]
        starts_over = True
    if starts_over:
        raise place.error("it does not begin with the prompt that chosen and rejected share; give the prompt its own column.")
    return answer


def _common(chosen: Messages, rejected: Messages) -> int:
    limit = min(len(chosen), len(rejected)) - 1
    return next((i for i in range(limit) if chosen[i] != rejected[i]), limit)


def _same_text(content: Any, text: str) -> bool:
    return isinstance(content, str) and content.strip() == text.strip()


def split_text(chosen: str, rejected: str) -> tuple[str, str, str]:
    """Prompt, chosen and rejected for two texts that begin with the prompt.

    The cut is the last place inside the common beginning that leaves both answers a character and does not fall
    inside a word; blanks before the cut go to the answers (``"The sky is"`` + ``" blue."``). Where the common beginning
    holds a ``\\n\\nAssistant:`` turn, the cut follows the last one.
    """
    limit = min(len(chosen), len(rejected)) - 1
    cut = next((i for i in range(limit) if chosen[i] != rejected[i]), max(limit, 0))
    turn = chosen.rfind(_TURN, 0, cut)
    if turn >= 0:
        cut = turn + len(_TURN)
    while cut and _in_word(chosen[cut - 1]) and (_in_word(chosen[cut]) or _in_word(rejected[cut])):
        cut -= 1
    while cut and chosen[cut - 1] in " \t":
        cut -= 1
    return chosen[:cut], chosen[cut:], rejected[cut:]


def _in_word(character: str) -> bool:
    """Letters and digits of scripts that put blanks between words (Chinese, Japanese and Korean do not count)."""
    return character.isalnum() and character < "\u2e80"
