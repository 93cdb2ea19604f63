"""Prompts: where they come from, how they are framed, how many are drawn."""

from pydantic import field_validator

from coati_rl.config.fields import Section, execution, experiment


class DataConfig(Section):
    """Training and evaluation prompts."""

    dataset: str = experiment("data.jsonl", "Training prompts: JSONL, JSON, CSV, Parquet or Arrow.", short="-d")
    eval_dataset: dict[str, str] | None = execution(
        None, 'Evaluation sets as a JSON object, {"task": "path"}; scored greedily.', short="-ed"
    )
    answer_key: str | None = experiment(
        None, "Column with the answer; default: gt_answer, else answer, ground_truth or label.", metavar="COLUMN"
    )
    num_episodes: int = experiment(1, "Passes over the training prompts.", short="-e", ge=1)
    max_steps: int | None = experiment(None, "Stop after this many optimizer steps, if the data lasts.", ge=1)
    system_prompt: str | None = experiment(None, "System message; default: the reward type's. '' for none.", short="-s")
    max_prompt_tokens: int = experiment(
        512, "Longer prompts are refused and counted, never cut (tokens, chat template included).", short="-mpt", ge=1
    )

    @field_validator("eval_dataset")
    @classmethod
    def _tasks_are_file_names(cls, tasks: dict[str, str] | None) -> dict[str, str] | None:
        for task in tasks or {}:
            if not task or "/" in task or task.startswith("."):
                raise ValueError(f"the task {task!r} names the result files: use letters and digits")
        return tasks
