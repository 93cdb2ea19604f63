"""Look for the files of a command's rows before anything large is imported: a wrong path is told at once."""

from coati_rl.config.named_paths import read_sources
from coati_rl.config.sections import JobConfig
from coati_rl.reading.files import expect_source


def expect_files(config: JobConfig) -> None:
    """Look for the files of --dataset and --eval-dataset.

    Raises: ConfigError for the first one that is not there, or of another format; where rows are streamed, what reads
    them says it.
    """
    train: str | dict[str, str] = {} if config.setting("streaming", False) else config.setting("dataset", {})
    held_out: dict[str, str] | None = config.setting("eval_dataset", None)
    texts = [("--dataset", text) for text in ([train] if isinstance(train, str) else train.values())]
    texts += [("--eval-dataset", text) for text in (held_out or {}).values()]
    for flag, text in texts:
        for source in read_sources(text):
            if not source.is_generator:
                expect_source(source.path, flag=flag)
