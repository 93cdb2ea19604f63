"""Read training requests and write answers in the protobuf format of Tinker's API.

N tokens of a datum, K targets of a position. Arrays are little-endian; what does not fit is a `RequestError`.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError

from coati_rl.tinker.core import Datum, Floats, LossRequest, LossResult, RequestError, SampleResult
from coati_rl.tinker.messages import MESSAGES

_DTYPES: dict[int, Any] = {1: np.dtype("<f4"), 2: np.dtype("<i8"), 3: np.dtype("<i4")}
_FLOAT32 = 1
_MAX_ELEMENTS = 2**26  # of one array: a sparse one of a few bytes may stand for any number
_MAX_DATA = 2**16  # of one request
_STOPPED, _CUT = 0, 1
_NO_LOGPROB = -99999.0  # of a place in the top k that holds no token


def read_forward_backward(body: bytes) -> tuple[LossRequest, int]:
    """Return what a body asks for, and its seq_id. Raises: RequestError."""
    request = _parsed(body)
    if not 1 <= len(request.data) <= _MAX_DATA:
        raise RequestError(f"data: {len(request.data)} datums; send 1 to {_MAX_DATA}")
    settings: dict[str, float | str] = {name: float(value) for name, value in request.loss_fn_config.items()}
    for name, value in request.loss_fn_config_v2.items():
        settings[name] = value.text if value.HasField("text") else value.number
    for name, each in settings.items():
        if isinstance(each, float) and not math.isfinite(each):
            raise RequestError(f"loss_fn_config[{name!r}] is {each}; give a finite number")
    data = [_read_datum(index, datum) for index, datum in enumerate(request.data)]
    found = LossRequest(
        model=request.model_id,
        data=data,
        loss=request.loss_fn,
        settings=settings,
        is_forward_only=request.forward_only,
    )
    return found, request.seq_id


def read_place(body: bytes) -> tuple[str, int]:
    """Return a body's model and seq_id. Raises: RequestError."""
    request = _parsed(body)
    return request.model_id, request.seq_id


def _parsed(body: bytes) -> Any:
    try:
        return MESSAGES["ForwardBackwardRequest"].FromString(body)
    except (DecodeError, ValueError) as error:
        raise RequestError(f"the body is no ForwardBackwardRequest: {error}; update the tinker package") from error


def _read_datum(index: int, datum: Any) -> Datum:
    where = f"data[{index}]"
    if any(not chunk.HasField("encoded_text") for chunk in datum.model_input):
        raise RequestError(f"{where}: model_input holds an image or audio; this server takes text tokens alone")
    chunks = [_numbers(chunk.encoded_text.tokens, _DTYPES[3], where) for chunk in datum.model_input]
    tokens = np.concatenate(chunks).astype(np.int64) if chunks else np.empty(0, np.int64)
    inputs = {}
    for name, tensor in datum.loss_fn_inputs.items():
        array = _read_array(tensor, f"{where}.loss_fn_inputs[{name!r}]")
        inputs[name] = array.astype(np.int64 if name == "target_tokens" else np.float32)
    return Datum(tokens=tokens, inputs=inputs)


def _numbers(data: bytes, dtype: Any, where: str) -> npt.NDArray[Any]:
    if len(data) % dtype.itemsize:
        raise RequestError(f"{where}: {len(data)} bytes are no whole number of {dtype.name}")
    return np.frombuffer(data, dtype)


def _read_array(tensor: Any, where: str) -> npt.NDArray[Any]:
    if tensor.dtype not in _DTYPES:
        raise RequestError(f"{where}: dtype {tensor.dtype} is unknown; use float32 (1), int64 (2) or int32 (3)")
    dtype, shape = _DTYPES[tensor.dtype], tuple(tensor.shape)
    if any(size < 0 for size in shape) or math.prod(shape) > _MAX_ELEMENTS:
        raise RequestError(f"{where}: shape {shape}; sizes are at least 0, with at most {_MAX_ELEMENTS} elements")
    if tensor.HasField("sparse_csr"):
        return _read_sparse(tensor.sparse_csr, dtype, shape, where)
    array = _numbers(tensor.dense, dtype, where)
    if shape and math.prod(shape) != array.size:
        raise RequestError(f"{where}: {array.size} elements for the shape {shape}")
    return array.reshape(shape) if shape else array


def _read_sparse(sparse: Any, dtype: Any, shape: tuple[int, ...], where: str) -> npt.NDArray[Any]:
    if len(shape) != 2:
        raise RequestError(f"{where}: a sparse array has two dimensions, not the shape {shape}")
    rows = _numbers(sparse.crow_indices, _DTYPES[2], where)
    columns = _numbers(sparse.col_indices, _DTYPES[2], where)
    values = _numbers(sparse.values, dtype, where)
    counts = np.diff(rows)
    fits = len(rows) == shape[0] + 1 and rows[0] == 0 and rows[-1] == len(columns) == len(values)
    if not fits or (counts < 0).any() or (columns < 0).any() or (columns >= shape[1]).any():
        raise RequestError(f"{where}: the indices of the sparse array do not fit the shape {shape}")
    out = np.zeros(shape, dtype)
    out[np.repeat(np.arange(shape[0]), counts), columns] = values
    return out


def write_forward_backward(result: LossResult) -> bytes:
    """Write an answer: one record for each run of data whose arrays have the same trailing shape."""
    out = MESSAGES["ForwardBackwardOutput"](loss_fn_output_type="ArrayRecord")
    arrays = [np.ascontiguousarray(each, "<f4") for each in result.logprobs]
    begin = 0
    for end in range(1, len(arrays) + 1):
        if end == len(arrays) or arrays[end].shape[1:] != arrays[begin].shape[1:]:
            _add_record(out, arrays[begin:end])
            begin = end
    out.metrics.update(result.metrics)
    written: bytes = out.SerializeToString(deterministic=True)
    return written


def _add_record(out: Any, arrays: Sequence[Floats]) -> None:
    record = out.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(arrays))
    field = record.fields["logprobs"]
    field.data, field.dtype = b"".join(each.tobytes() for each in arrays), _FLOAT32
    field.offsets = np.cumsum([0, *(each.nbytes for each in arrays)]).astype("<i8").tobytes()
    field.trailing_shape.extend(arrays[0].shape[1:])


def write_sample(result: SampleResult) -> bytes:
    """Write the answer of a sampling request."""
    out = MESSAGES["SampleResponse"]()
    for each in result.sequences:
        out.sequences.add(
            stop_reason=_STOPPED if each.has_stopped else _CUT,
            tokens=np.asarray(each.token_ids, "<i4").tobytes(),
            logprobs=np.asarray(each.logprobs, "<f4").tobytes(),
        )
    if result.prompt_logprobs is not None:
        out.prompt_logprobs = np.asarray(result.prompt_logprobs, "<f4").tobytes()
    if result.top_k_prompt is not None:
        ids, logprobs = result.top_k_prompt
        top = out.topk_prompt_logprobs
        known = ~np.isnan(logprobs)
        top.token_ids = np.where(known, ids, 0).astype("<i4").tobytes()
        top.logprobs = np.where(known, logprobs, _NO_LOGPROB).astype("<f4").tobytes()
        top.length, top.k = ids.shape
    written: bytes = out.SerializeToString(deterministic=True)
    return written
