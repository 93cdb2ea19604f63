"""Test arguments of vLLM: what is checked before it is imported, and what an engine is made with."""

from pathlib import Path

import pytest

import rl_example
from coati_rl.errors import ConfigError
from coati_rl.types import Device
from producer.engines import vllm_arguments
from producer.engines.options import EngineOptions
from producer.engines.vllm_arguments import _OWNED, _read_engine_args, check_engine_args, check_quantization
from producer.engines.vllm_engine import VllmEngine


def refusal(*texts: str) -> str:
    with pytest.raises(ConfigError) as caught:
        check_engine_args(texts)
    return str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "kv_cache_dtype=fp8",
        "max-num-batched-tokens=8192",
        "enable_chunked_prefill=false",
        "async_scheduling=null",
        "watermark=1",
        'compilation_config={"mode": 0}',
    ],
)
def test_what_vllm_has_passes(text: str) -> None:
    check_engine_args([text])  # raises for what it has not
    assert "no_such_argument" in refusal(text, "no_such_argument=1"), "the argument itself is not what is refused"


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("max_num_batched_token=8192", "vLLM has no such argument; did you mean max_num_batched_tokens?"),
        ("a_b_c_d=1", "vLLM has no such argument; its EngineArgs has the names"),
        ("seed=3", "cannot be set like this: use --seed"),
        ("block-size=32", "cannot be set like this: use --block-size"),
        ("distributed_executor_backend=ray", "engines are sized and placed by -i and -ptp"),
        ("data_parallel_size=2", "engines are sized and placed by -i and -ptp"),
        ('logits-processors=["m:P"]', "training needs the log-probabilities of the distribution that was sampled from"),
        ('watermark_config={"key": 1}', "training needs the log-probabilities of the distribution that was sampled"),
        ("max_num_batched_tokens=many", "vLLM takes an integer or null"),
        ("enable_chunked_prefill=False", "vLLM takes true or false or null"),
        ("disable_cascade_attn=1", "vLLM takes true or false or null"),
    ],
)
def test_an_argument_that_cannot_be_set_is_refused_with_a_remedy(text: str, remedy: str) -> None:
    assert remedy in refusal("kv_cache_dtype=fp8", text)


def test_each_name_that_is_refused_is_one_of_vllms() -> None:
    types = _read_engine_args()
    assert types is not None
    assert set(_OWNED) <= set(types)


def test_without_vllm_on_this_machine_our_own_names_are_refused_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_arguments, "_read_engine_args", lambda: None)
    check_engine_args(["no_such_name=1"])
    assert "use -m" in refusal("model=x")


def test_a_method_of_quantization_is_one_of_vllms() -> None:
    check_quantization(None, gets_updates=True)
    check_quantization("fp8", gets_updates=True)
    with pytest.raises(ConfigError, match=r"--quantization fp9: vLLM has no such method; did you mean fp8\?"):
        check_quantization("fp9", gets_updates=True)
    check_quantization("awq", gets_updates=False)
    with pytest.raises(ConfigError, match=r"--quantization awq: is for checkpoints whose weights are quantized"):
        check_quantization("awq", gets_updates=True)


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--engine-arg max_num_batched_token=1", "did you mean max_num_batched_tokens?"),
        ("--quantization fp9", "did you mean fp8?"),
    ],
)
def test_a_run_is_refused_before_anything_starts(
    flag: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "data.jsonl").touch()
    flags = ["--run-dir", f"{tmp_path}/run", "-d", f"{tmp_path}/data.jsonl", *flag.split()]
    assert rl_example.main(flags, tmp_path) == 2
    assert message in capsys.readouterr().err


def test_an_engine_is_made_with_its_arguments_and_the_defaults_of_its_device() -> None:
    """It does not load in a process without its environment."""
    wanted = {"block_size": 64, "quantization": "fp8", "enforce_eager": False, "engine_args": {"watermark": 0.5}}
    engines = [
        VllmEngine(EngineOptions(model="m", max_model_len=8, device=device, **own))
        for device in ("cpu", "cuda")
        for own in ({}, wanted)
    ]
    names = ("block_size", "quantization", "enforce_eager", "watermark")
    found = [tuple(engine._core._engine_args.get(name) for name in names) for engine in engines]
    for engine in engines:
        engine.close()
    given = (64, "fp8", False, 0.5)
    assert found == [(32, None, True, None), given, (None, None, False, None), given]


@pytest.mark.parametrize(
    ("device", "samples", "budget"),
    [("cpu", 64, 4096), ("cpu", 4096, 4097), ("cuda", 2047, None), ("cuda", 2048, 2049)],
)
def test_a_step_has_room_for_a_token_of_each_sample_and_for_a_probe(
    device: Device, samples: int, budget: int | None
) -> None:
    engine = VllmEngine(EngineOptions(model="m", max_model_len=8, device=device, max_num_seqs=samples))
    arguments = engine._core._engine_args
    engine.close()
    names = ("max_num_seqs", "max_num_active_seqs", "max_num_batched_tokens")
    assert tuple(arguments.get(name) for name in names) == (samples + 1, samples, budget)


@pytest.mark.parametrize(("device", "width", "is_off"), [("cuda", 1, False), ("cuda", 2, True), ("cpu", 2, False)])
def test_ranks_on_gpus_compile_no_fused_all_reduce_unless_it_is_asked_for(
    device: Device, width: int, is_off: bool
) -> None:
    own = {"pass_config": {"fuse_allreduce_rms": True}}
    for engine_args, expected in (
        ({}, {"pass_config": {"fuse_allreduce_rms": False}} if is_off else None),
        ({"compilation_config": own}, own),
    ):
        options = EngineOptions(
            model="m", max_model_len=8, device=device, tensor_parallel_size=width, engine_args=engine_args
        )
        engine = VllmEngine(options)
        engine.close()
        assert engine._core._engine_args.get("compilation_config") == expected
