"""Check the tables of docs/coming_from: rows are counted, and what they name as ours exists."""

import re
import shlex
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from coati_rl.config.cli import build_parser, parse, parse_job
from coati_rl.config.commands import ALL
from coati_rl.config.rules import check
from coati_rl.errors import ConfigError

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "coming_from"
INDEX = (FOLDER / "README.md").read_text(encoding="utf-8")
PAGES = sorted(path.stem for path in FOLDER.glob("*.md") if path.name != "README.md")
FLAGS = {name for job in ALL.values() for action in build_parser(job=job)._actions for name in action.option_strings}
TOP_LEVEL = {"coati", "coati_rl", "producer", "consumer", "rewards", "scripts", "docs", "tests"}
# Arguments in the examples that the projects' documents print: OpenRLHF's README and its page on non-RL methods, RL2's
# README and examples.
PRINTED = {
    "openrlhf": """
        actor_learning_rate actor_num_gpus_per_node actor_num_nodes adam_offload advantage_estimator agent_func_path
        apply_chat_template async_queue_size async_train attn_implementation aux_loss_coef best_of_n beta bf16
        chosen_key ckpt_path colocate_actor_ref colocate_all_models colocate_critic_reward critic_learning_rate
        critic_num_gpus_per_node critic_num_nodes critic_pretrain dataset dataset_probs deepcompile
        deepspeed_enable_sleep ds_tensor_parallel_size dynamic_filtering dynamic_filtering_reward_range
        enable_prefix_caching enable_vllm_is_correction enforce_eager eval_dataset eval_steps eval_task generate_max_len
        gradient_checkpointing greedy_sampling init_kl_coef input_key input_template ipo iter kd_coef label_key
        label_smoothing learning_rate load_checkpoint load_in_4bit logging_steps lora_rank max_epochs max_len
        max_new_tokens max_num_seqs max_samples micro_batch_size micro_rollout_batch_size micro_train_batch_size
        multiturn n_samples_per_prompt nll_loss_coef normalize_reward output_key output_path overlap_comm
        packing_samples param_dtype placeholder_token post_processor pretrain pretrain_mode prompt_data
        prompt_data_probs prompt_key prompt_max_len ref_num_gpus_per_node ref_num_nodes ref_offload ref_pretrain
        rejected_key remote_rm_url repetition_penalty reward_num_gpus_per_node reward_num_nodes reward_pretrain
        reward_template reward_tokens ring_attn_size rollout_batch_size save_hf_ckpt save_path save_steps
        teacher_model teacher_offload temperature tokenizer_chat_template top_p tp_size train_batch_size
        use_dynamic_batch use_icepop use_tensorboard use_wandb value_head_prefix value_prefix_head
        vllm_enable_sleep vllm_gpu_memory_utilization vllm_is_truncated_threshold vllm_num_engines vllm_sync_backend
        vllm_tensor_parallel_size wandb_group zero_stage
        """,
    "rl2": """
        adv.estimator adv.norm_var batch_size beta data.train.path ddp_size env_path experiment_name gamma interact
        kl.reward_estimator lambda_orpo lr master_addr master_port max_length max_length_per_device max_new_tokens
        max_turns model_name n_epochs nnodes node_rank nproc_per_node project prompts_per_rollout responses_per_prompt
        save_freq sp_size test_freq total_steps tp_size update_per_rollout warmup_ratio
        """,
}
Row = tuple[str, str, str]  # theirs, ours, note


def rows(page: str) -> list[Row]:
    """A cell holds no bar."""
    lines = (FOLDER / f"{page}.md").read_text(encoding="utf-8").splitlines()
    table = [line for line in lines if line.startswith("| ") and not line.startswith("| theirs")]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table]
    return [(theirs, ours, note) for theirs, ours, note in cells]


def kind(row: Row) -> str:
    for name in ("not yet", "no, because "):
        if row[1].startswith(name):
            return name.partition(",")[0]
    return "ours"


def snippets(page: str) -> Iterator[str]:
    """What is in backticks of our two columns."""
    for _, ours, note in rows(page):
        yield from re.findall(r"`([^`]+)`", f"{ours} {note}")


def counts(page: str) -> list[int]:
    kinds = [kind(row) for row in rows(page)]
    return [len(kinds), *(kinds.count(name) for name in ("ours", "not yet", "no"))]


def test_the_index_counts_the_rows_of_every_page() -> None:
    told = {
        page: [int(number) for number in numbers.split(" | ")]
        for page, numbers in re.findall(r"^\| \[[^]]+\]\((\w+)\.md\) \| ([\d |]+\d) \|$", INDEX, flags=re.MULTILINE)
    }
    assert told == {page: counts(page) for page in PAGES}
    total = [sum(column) for column in zip(*told.values(), strict=True)]
    assert f"| all | {' | '.join(map(str, total))} |" in INDEX
    assert "Of {} rows, {} are ours, {} not yet and {} no.".format(*total) in INDEX


@pytest.mark.parametrize("page", PAGES)
def test_a_row_names_what_is_ours_or_says_that_there_is_nothing(page: str) -> None:
    assert [row for row in rows(page) if kind(row) == "ours" and "`" not in row[1]] == []
    assert [row[0] for row in rows(page) if row[1].startswith("no") and kind(row) == "ours"] == []


def is_accepted(flags: list[str]) -> bool:
    """True if one of the commands takes these flags."""
    for job in ALL.values():
        with suppress(ConfigError):
            parse_job(flags, job)
            return True
    return False


@pytest.mark.sampled(3)
@pytest.mark.parametrize("page", PAGES)
def test_the_flags_of_ours_exist_and_take_the_values_beside_them(page: str) -> None:
    commands = [shlex.split(snippet) for snippet in snippets(page) if snippet.startswith("-")]
    named = {word for command in commands for word in command if re.match(r"--?[A-Za-z]", word)}
    assert named - FLAGS == set()
    assert [command for command in commands if len(command) > 1 and not is_accepted(command)] == []


@pytest.mark.parametrize("page", PAGES)
def test_the_files_of_ours_exist(page: str) -> None:
    paths = [snippet for snippet in snippets(page) if snippet.partition("/")[0] in TOP_LEVEL and "/" in snippet]
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_every_flag_of_colossal_rl_is_a_flag_here() -> None:
    theirs = {flag for row in rows("colossal_rl") for flag in re.findall(r"`(--?[A-Za-z][\w-]*)`", row[0])}
    assert len(theirs) > 30
    assert theirs - FLAGS == set()


def test_the_commands_are_accepted() -> None:
    blocks = re.findall(r"```bash\n(.*?)```", (FOLDER / "colossal_rl.md").read_text(encoding="utf-8"), re.DOTALL)
    commands = [line for block in blocks for line in block.replace("\\\n", "").splitlines()]
    assert len(commands) == 2
    for command in commands:
        program, script, *arguments = shlex.split(command)
        assert (program, script) == ("python", "rl_example.py")
        check(parse(arguments)[0])


@pytest.mark.parametrize("page", PRINTED)
def test_every_argument_of_a_printed_example_has_a_row(page: str) -> None:
    quoted = " ".join(span for row in rows(page) for span in re.findall(r"`([^`]+)`", row[0]))
    named = {word.rstrip("()=:,") for part in re.split(r"[\s=(]", quoted) for word in [part.removeprefix("--")]}
    named |= {word.rpartition(".")[2] for word in named}
    assert [name for name in PRINTED[page].split() if name not in named] == []
