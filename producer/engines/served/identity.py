"""Ask a server what it is, and refuse it unless it can be the engine of a run.

In: the run's model, precision and lengths. Out: what the engine has to know of the server. Everything is asked of the
server itself: its settings, the names of its parameters, its vocabulary, the token ids of some texts.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from coati_rl.errors import ConfigError
from coati_rl.http_call import CallRefusedError, HttpCallError
from coati_rl.text import shorten
from coati_rl.transport.manifest import TensorEntry
from producer.engines.checkpoint import read_entries
from producer.engines.served.calls import ServerAnswers, ServerCalls, ServerFacts
from producer.engines.served.server import Server
from producer.engines.served.sglang_calls import SglangCalls
from producer.engines.served.sglang_identity import sglang_answers
from producer.engines.served.vllm_calls import VllmCalls
from producer.engines.served.vllm_identity import vllm_answers

_ASK_S = 60.0
_NORM, _HEAD = "norm.weight", "lm_head.weight"  # no layout joins them to others
_TEXTS = ("Solve 12 + 345 = ? Answer: \\boxed{357}.\n\n", "def f(x):\n    return [x] * 2  # ok\n", "naïve, 你好 🙂")
_NUM_SAMPLED_IDS = 64  # of the vocabulary, whose text is tokenised


def check_server(
    server: Server, model: Path, *, dtype: str, max_model_len: int, timeout_s: float, tokenizer: Any = None
) -> ServerFacts:
    """Return what a server is.

    Args:
        server: to be asked.
        model: directory of the run's model.
        dtype: "float32" or "bfloat16", of the run's engines.
        max_model_len: prompt and response together, in tokens.
        timeout_s: within which it has to be there.
        tokenizer: of the model; None: it is loaded.
    Raises: ConfigError with the address, what is wrong and the remedy.
    """
    try:
        is_sglang = _is_sglang(server, timeout_s)
    except HttpCallError as error:
        raise ConfigError(
            f"-b {server.url}: no server answers there: {error}; start it, or correct the address"
        ) from error
    entries = read_entries(model)
    ask = sglang_answers if is_sglang else vllm_answers
    answers = ask(server, entries, dtype=dtype, max_model_len=max_model_len)
    problems = [*answers.problems]
    if answers.parameters:
        problems += [
            f"it serves another model than {model}: {reason}" for reason in _differences(answers, model, entries)
        ]
    problems += _tokenizer_problems(server, model, tokenizer)
    if problems:
        raise ConfigError("\n".join(f"-b {server.url}: {problem}" for problem in problems))
    return answers.facts


def calls_of(server: Server, facts: ServerFacts) -> ServerCalls:
    """Return the calls of a server's kind."""
    return SglangCalls(server, has_seeds=facts.has_seeds) if facts.is_sglang else VllmCalls(server)


def _is_sglang(server: Server, timeout_s: float) -> bool:
    """Return whether a server is one of SGLang, which alone has /model_info. Raises: HttpCallError if none answers."""
    try:
        return "weight_version" in server.get("/model_info", timeout_s=timeout_s)
    except CallRefusedError:
        server.get("/health", timeout_s=timeout_s)
        return False


def _differences(answers: ServerAnswers, model: Path, entries: Mapping[str, TensorEntry]) -> Iterator[str]:
    from transformers import AutoConfig

    own = {name for name in entries if name.endswith(_NORM)}
    if differ := own ^ {name for name in answers.parameters if name.endswith(_NORM)}:
        yield f"{len(differ)} layers differ, such as {min(differ)}"
    if _HEAD in entries and _HEAD not in answers.parameters:
        yield "it has no output head of its own"
    vocabulary, found = AutoConfig.from_pretrained(model).get_text_config().vocab_size, answers.vocabulary
    if vocabulary not in found:
        yield f"its vocabulary has {', '.join(map(str, found)) or 'an unknown number of'} tokens, not {vocabulary}"
    yield from answers.differing_shapes


def _tokenizer_problems(server: Server, model: Path, tokenizer: Any) -> Iterator[str]:
    if tokenizer is None:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(model)
    step = max(1, len(tokenizer) // _NUM_SAMPLED_IDS)
    special = "".join(map(str, tokenizer.all_special_tokens))
    for text in (*_TEXTS, special, str(tokenizer.decode(list(range(0, len(tokenizer), step))))):
        try:
            reply = server.post("/tokenize", {"prompt": text, "add_special_tokens": False}, timeout_s=_ASK_S)
        except HttpCallError as error:
            yield f"it does not tokenise ({shorten(error, 100)}); start it with the model's tokenizer"
            return
        if reply.get("tokens") != tokenizer(text, add_special_tokens=False)["input_ids"]:
            yield f"its tokenizer is not that of {model}: {shorten(repr(text), 40)} has other token ids"
            return
