"""Import modules of systems that are not installed."""

import importlib
import importlib.util
import sys

import pytest

from coati_rl.stand_ins import finder, openrlhf, rl4llm


@pytest.fixture(autouse=True)
def nothing_imported():
    def forget():
        for name in [name for name in sys.modules if name.partition(".")[0] in ("openrlhf", "rl4llm")]:
            del sys.modules[name]

    forget()
    finder.install()
    yield
    forget()


def test_what_their_documents_import_is_there_and_nothing_else():
    from openrlhf.utils.agent import AgentInstanceBase  # type: ignore[import-not-found]

    assert AgentInstanceBase is openrlhf.AgentInstanceBase
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'openrlhf.models'"):
        importlib.import_module("openrlhf.models")
    with pytest.raises(ImportError, match="cannot import name 'Nothing'") as caught:
        from openrlhf.utils.agent import Nothing  # noqa: F401
    assert "without it a file can import openrlhf.utils.agent (AgentInstanceBase, " in finder.remedy(caught.value)


def test_a_directory_of_a_systems_name_is_not_the_system(tmp_path, monkeypatch):
    (tmp_path / "rl4llm" / "docs").mkdir(parents=True)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert importlib.import_module("rl4llm.core.base_env").BaseMDPEnv.__module__ == "coati_rl.stand_ins.rl4llm"


@pytest.mark.parametrize("files", [["__init__.py", "own.py"], ["core/own.py"]], ids=["package", "namespace"])
def test_a_system_that_is_installed_is_imported_itself(tmp_path, monkeypatch, files):
    (tmp_path / "rl4llm" / "core").mkdir(parents=True)
    for file in files:
        (tmp_path / "rl4llm" / file).write_text("x = 1")
    if "core/own.py" not in files:
        (tmp_path / "rl4llm" / "core").rmdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    own = files[-1].removesuffix(".py").replace("/", ".")
    assert importlib.import_module(f"rl4llm.{own}").x == 1
    with pytest.raises(ModuleNotFoundError) as caught:  # of a version without it; ours does not mix with theirs
        importlib.import_module("rl4llm.core.base_env")
    assert finder.remedy(caught.value) == ""


def test_a_conversation_that_ends_with_the_policys_turn_is_continued(monkeypatch):
    """RL4LLM joins turns of the policy that follow one another."""

    class Tokenizer:
        eos_token_id, pad_token_id = 7, None

        def apply_chat_template(self, messages, **options):
            return [(each["role"], each["content"]) for each in messages], options

    env = rl4llm.BaseMDPEnv(tokenizer=Tokenizer(), reward_functions=[], tool_schemas=["tool"])
    said = [("user", "q"), ("assistant", "a"), ("assistant", "b")]
    messages = [rl4llm.ChatMessage(role=role, content=text) for role, text in said]
    states = [rl4llm.SampleState(messages=messages[:size], init_msg_size=1) for size in (1, 3)]
    first, second = env._convert_to_batch_prompts(rl4llm.EnvState(sample_states=states))
    usual = {"tools": ["tool"], "tokenize": False}
    assert first == (said[:1], {**usual, "add_generation_prompt": True, "continue_final_message": False})
    joined = [("user", "q"), ("assistant", "ab")]
    assert second == (joined, {**usual, "add_generation_prompt": False, "continue_final_message": True})
    assert (env.pad_token_id, env.random_state.randint(9), env.random_state is env.random_state) == (7, 6, True)


def test_other_imports_are_left_alone():
    assert finder.remedy(ModuleNotFoundError("No module named 'gem'", name="gem")) == ""
    assert finder.remedy(ValueError("x")) == ""
    assert importlib.util.find_spec("openrlhf_agent") is None
    finder.install()
    assert sum(type(each).__name__ == "_StandIns" for each in sys.meta_path) == 1
