"""Requests and answers in Tinker's protobuf format: what a client writes is read, what does not fit is refused."""

import numpy as np
import pytest

from coati_rl.tinker.core import LossResult, RequestError, SampledSequence, SampleResult
from coati_rl.tinker.messages import MESSAGES
from coati_rl.tinker.wire import read_forward_backward, write_forward_backward, write_sample
from tests.tinker_client import loss_body


def request() -> object:
    return MESSAGES["ForwardBackwardRequest"].FromString(loss_body("m", 3, [[5, 6, 7]], weights=[1.0, 0.5]))


def test_a_request_is_read_with_its_arrays_settings_and_place():
    message = request()
    message.loss_fn_config["beta"] = 0.25
    message.loss_fn_config_v2["kind"].text = "x"
    loss, seq = read_forward_backward(message.SerializeToString())
    assert (loss.model, seq, loss.loss, loss.is_forward_only) == ("m", 3, "cross_entropy", False)
    assert loss.settings == {"beta": 0.25, "kind": "x"}
    assert loss.data[0].tokens.tolist() == [5, 6]
    assert loss.data[0].inputs["target_tokens"].tolist() == [6, 7]
    assert loss.data[0].inputs["weights"].tolist() == [1.0, 0.5]


def test_a_sparse_array_is_what_its_cells_say():
    message = request()
    sparse = message.data[0].loss_fn_inputs["target_tokens"]
    sparse.ClearField("dense")
    del sparse.shape[:]
    sparse.shape.extend([2, 3])
    sparse.sparse_csr.crow_indices = np.array([0, 2, 3], "<i8").tobytes()
    sparse.sparse_csr.col_indices = np.array([0, 2, 1], "<i8").tobytes()
    sparse.sparse_csr.values = np.array([9, 8, 7], "<i8").tobytes()
    loss, _ = read_forward_backward(message.SerializeToString())
    assert loss.data[0].inputs["target_tokens"].tolist() == [[9, 0, 8], [0, 7, 0]]


def _break_shape(message):
    message.data[0].loss_fn_inputs["weights"].shape[0] = 7


def _break_dtype(message):
    message.data[0].loss_fn_inputs["weights"].dtype = 9


def _break_bytes(message):
    message.data[0].model_input[0].encoded_text.tokens = b"abc"


def _huge(message):
    del message.data[0].loss_fn_inputs["weights"].shape[:]
    message.data[0].loss_fn_inputs["weights"].shape.extend([2**40, 2**40])


def _negative(message):
    message.data[0].loss_fn_inputs["weights"].shape[0] = -2


def _image(message):
    message.data[0].model_input[0].ClearField("encoded_text")
    message.data[0].model_input[0].image.format = "png"


def _rows(message):
    sparse = message.data[0].loss_fn_inputs["weights"]
    sparse.shape.extend([3])
    sparse.sparse_csr.crow_indices = np.array([0, 5, 1], "<i8").tobytes()
    sparse.sparse_csr.col_indices = np.array([4], "<i8").tobytes()
    sparse.sparse_csr.values = np.array([1], "<f4").tobytes()


def _not_finite(message):
    message.loss_fn_config["beta"] = float("nan")


def _empty(message):
    del message.data[:]


BREAKS = [_break_shape, _break_dtype, _break_bytes, _huge, _negative, _image, _rows, _not_finite, _empty]


@pytest.mark.parametrize("breaks", BREAKS)
def test_what_does_not_fit_is_refused_by_name(breaks):
    message = request()
    breaks(message)
    with pytest.raises(RequestError, match=r"data|loss_fn_config"):
        read_forward_backward(message.SerializeToString())


def test_a_body_that_is_no_message_is_refused():
    with pytest.raises(RequestError, match="update the tinker package"):
        read_forward_backward(b"\xff\xff{}")


def test_answers_of_data_with_different_numbers_of_targets_are_records_in_a_row():
    logprobs = [np.float32([1, 2]), np.float32([3]), np.float32([[4, 5]])]
    written = write_forward_backward(LossResult(logprobs=logprobs, metrics={"loss:sum": 1.5}))
    found = MESSAGES["ForwardBackwardOutput"].FromString(written)
    fields = [each.fields["logprobs"] for each in found.loss_fn_outputs]
    assert [each.num_datums for each in found.loss_fn_outputs] == [2, 1]
    assert [np.frombuffer(each.data, "<f4").tolist() for each in fields] == [[1, 2, 3], [4, 5]]
    assert [np.frombuffer(each.offsets, "<i8").tolist() for each in fields] == [[0, 8, 12], [0, 8]]
    assert [list(each.trailing_shape) for each in fields] == [[], [2]]
    assert dict(found.metrics) == {"loss:sum": 1.5}


def test_a_sample_says_why_it_ended_and_marks_places_without_a_log_probability():
    ended = SampledSequence(token_ids=[3, 4], logprobs=[-1.0, -2.0], has_stopped=True)
    top = np.array([[9, 9], [1, 2]], np.int32), np.float32([[np.nan, np.nan], [-0.5, -1.5]])
    prompt = np.float32([np.nan, -0.25])
    written = write_sample(SampleResult(sequences=[ended], prompt_logprobs=prompt, top_k_prompt=top))
    found = MESSAGES["SampleResponse"].FromString(written)
    assert found.sequences[0].stop_reason == 0
    assert np.frombuffer(found.sequences[0].tokens, "<i4").tolist() == [3, 4]
    assert np.isnan(np.frombuffer(found.prompt_logprobs, "<f4")[0])
    assert np.frombuffer(found.topk_prompt_logprobs.token_ids, "<i4").tolist() == [0, 0, 1, 2]
    assert np.frombuffer(found.topk_prompt_logprobs.logprobs, "<f4").tolist() == [-99999.0, -99999.0, -0.5, -1.5]
